"""diffusers' `enable_parallelism`, with its arguments and its errors, run by `shardformer.shard`.

    from opensora_accel.integrations import diffusers as parallel

    parallel.install()
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))

What a config of diffusers becomes, on 4 ranks:

    ContextParallelConfig(ulysses_degree=2)                  Plan(dp_replicate=2, ulysses=2)
    ContextParallelConfig(ring_degree=2, ulysses_degree=2)   Plan(ring=2, ulysses=2)
    ContextParallelConfig(ring_degree=2, mesh=mesh)          Plan(dp_replicate=2, ring=2), whose groups are the mesh's
    TensorParallelConfig(tp_degree=2)                        Plan(dp_replicate=2, tp=2), if the policy cuts layers

An option that asks for what `shard` does anyway is taken (`ulysses_anything`: any length is); one that asks for
something else is an error. docs/integrations/diffusers.md has the list. diffusers is imported on use only.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

import shardformer
from opensora_accel.communications import gather_objects
from opensora_accel.parallel_states import (
    get_mesh,
    get_parallel_group,
    get_sequence_parallel_group,
    get_tensor_parallel_group,
    has_mesh,
    init_parallel,
)
from opensora_accel.plan import Plan
from shardformer.policy import find_policy, has_policy
from shardformer.spread import uncompiled

if TYPE_CHECKING:
    from diffusers.models._modeling_parallel import (
        ContextParallelConfig,
        ParallelConfig,
        TensorParallelConfig,
    )

logger = logging.getLogger(__name__)

__all__ = ["disable_parallelism", "enable_parallelism", "install", "uninstall"]

# Where diffusers notes on a model what it was made parallel with: its own method then refuses the model.
_NOTE = "_parallel_config"
# What `disable_parallelism` undoes.
_UNDO = "_opensora_accel_undo"
# Where `install` keeps diffusers' own method, beside the one that takes its place.
_METHOD, _ORIGINAL = "enable_parallelism", "_enable_parallelism_of_diffusers"


def enable_parallelism(
    model: nn.Module,
    *,
    config: ParallelConfig | ContextParallelConfig | TensorParallelConfig,
    cp_plan: dict[str, Any] | None = None,
) -> None:
    """Makes a model parallel as diffusers' method of this name does, with gradients that are one device's.

    Every rank of the job calls it. Groups that are registered already (`init_parallel`) are used; else the ranks
    beyond ring × ulysses become data parallel, or those of the config's mesh do that are along none of its dims "ring"
    and "ulysses". Each rank then calls the model with the whole input and gets the whole output. Gradients are to be
    *averaged over all ranks*, as DDP and FSDP do.

    Args:
        model: of a class that has a policy.
        config: of diffusers.
        cp_plan: must be left out; what is split where is the policy's.

    Communication: makes the process groups; with a mesh, gathers every rank's place on it.

    Raises:
        RuntimeError: the model is parallel already, or torch.distributed was not started.
        ValueError: the model has no policy, or the config asks for what `shard` does not do; the message has the
            remedy.
    """
    from diffusers.models._modeling_parallel import (
        ContextParallelConfig,
        ParallelConfig,
        TensorParallelConfig,
    )

    if getattr(model, _NOTE, None) is not None:
        raise RuntimeError(
            f"Parallelism is already applied to this {type(model).__name__}; call "
            "opensora_accel.integrations.diffusers.disable_parallelism(model) first. One loaded with "
            "from_pretrained(..., parallel_config=...) has been through enable_parallelism"
        )
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed must be available and initialized before enable_parallelism; start the script with "
            "torchrun, and call torch.distributed.init_process_group()"
        )
    if isinstance(config, ContextParallelConfig):
        config = ParallelConfig(context_parallel_config=config)
    elif isinstance(config, TensorParallelConfig):
        config = ParallelConfig(tensor_parallel_config=config)
    elif not isinstance(config, ParallelConfig):
        raise ValueError(
            "enable_parallelism takes a ContextParallelConfig, TensorParallelConfig or ParallelConfig of diffusers; "
            f"got a {type(config).__name__}. A Plan goes to shardformer.shard(model, plan)"
        )
    if cp_plan is not None:
        raise ValueError(
            "cp_plan says where diffusers splits tensors, and here the model's policy does: leave it out, or write a "
            "policy and call shardformer.shard(model, plan, policy=...) (docs/policies.md)"
        )
    if config.context_parallel_config is not None:
        asked = _context_parallel(config.context_parallel_config)
    elif config.tensor_parallel_config is not None:
        asked = _tensor_parallel(config.tensor_parallel_config, model)
    else:
        raise ValueError("this ParallelConfig names no parallelism; give it a context_parallel_config")
    _register(asked)
    with _without_cache(model), ExitStack() as undo:
        undo.callback(shardformer.unshard, shardformer.shard(model, asked.plan))
        if asked.plan.sequence > 1:
            _warn_of_ranks_left_out(model, get_parallel_group("sequence"), undo)
        setattr(model, _NOTE, config)
        undo.callback(delattr, model, _NOTE)
        setattr(model, _UNDO, undo.pop_all())


def disable_parallelism(model: nn.Module) -> None:
    """Takes back what `enable_parallelism` did: the model is as it was, bit for bit. The process groups stay.

    Raises:
        ValueError: the model is not parallel, or was made so by diffusers' own method, which cannot be undone.
    """
    undo: ExitStack | None = vars(model).get(_UNDO)
    if undo is None:
        raise ValueError(
            f"enable_parallelism was not called with this {type(model).__name__}; what shardformer.shard did, "
            "shardformer.unshard(model) takes back"
        )
    with _without_cache(model):
        undo.close()
    delattr(model, _UNDO)


def install() -> ExitStack:
    """Puts `enable_parallelism` in the place of diffusers' method, for models whose class has a policy.

    Others keep diffusers' own. `from_pretrained(..., parallel_config=...)` calls the method, too.

    Returns:
        To be used or ignored: `with install(): ...` calls `uninstall` at its end, unless it was installed before.
    """
    from diffusers.models.modeling_utils import ModelMixin

    undo = ExitStack()
    if _ORIGINAL in vars(ModelMixin):
        return undo
    original = ModelMixin.enable_parallelism

    @functools.wraps(original)
    def method(self: Any, *, config: Any, cp_plan: dict[str, Any] | None = None) -> None:
        chosen = functools.partial(enable_parallelism if has_policy(self) else original, self)
        chosen(config=config, cp_plan=cp_plan)

    setattr(ModelMixin, _ORIGINAL, original)
    setattr(ModelMixin, _METHOD, method)
    undo.callback(uninstall)
    return undo


def uninstall() -> None:
    """Gives diffusers its own method back. Models that are parallel stay so, until `disable_parallelism`.

    Raises:
        ValueError: it is not installed.
    """
    from diffusers.models.modeling_utils import ModelMixin

    if _ORIGINAL not in vars(ModelMixin):
        raise ValueError("diffusers has its own enable_parallelism: call install() before uninstall()")
    setattr(ModelMixin, _METHOD, vars(ModelMixin)[_ORIGINAL])
    delattr(ModelMixin, _ORIGINAL)


class _Asked(NamedTuple):
    """What a config asks for."""

    plan: Plan
    # [dp_replicate, dp_shard, ring, ulysses, tp]: who stands where.
    ranks: Tensor
    # The config's own, whose groups are used.
    mesh: DeviceMesh | None


def _context_parallel(config: ContextParallelConfig) -> _Asked:
    # What diffusers' `ulysses_anything` and `ring_anything` allow is the rule here, whether they are set or not.
    ring, ulysses = config.mesh_shape
    if ring > 1 and not config.convert_to_fp32:
        raise ValueError(
            "convert_to_fp32=False lets a ring merge partial results in the dtype of the model; here they are always "
            "merged in fp32: leave convert_to_fp32 at True"
        )
    if config.rotate_method != "allgather":
        raise ValueError(
            f"rotate_method={config.rotate_method!r} is not known here: keys and values go round the ring from "
            "neighbour to neighbour, with the same result; leave it at its default"
        )
    plan, mesh = Plan(ring=ring, ulysses=ulysses), config.mesh
    if mesh is None:
        return _over_world(plan)
    names = mesh.mesh_dim_names or ()
    if "ring" not in names or "ulysses" not in names or names.index("ring") > names.index("ulysses"):
        raise ValueError(
            f"the config's mesh has the dims {names}, but needs 'ring' and 'ulysses', in this order; give the one that "
            'is not used the size 1: init_device_mesh("cuda", (2, 4), mesh_dim_names=("ring", "ulysses"))'
        )
    for name in {"tp", "tensor"} & set(names):
        if mesh.size(names.index(name)) > 1:
            raise ValueError(
                f"the config's mesh has {mesh.size(names.index(name))} ranks along {name!r}, which hold different "
                "parameters; tensor and context parallelism of one model do not go together here, as in diffusers: "
                "give that dim the size 1"
            )
    degrees = mesh.size(names.index("ring")), mesh.size(names.index("ulysses"))
    if degrees != (ring, ulysses):
        raise ValueError(
            f"the config has ring_degree={ring} and ulysses_degree={ulysses}, but its mesh has "
            f"ring={degrees[0]} and ulysses={degrees[1]}; write the mesh's sizes"
        )
    own = None if mesh.get_coordinate() is None else mesh["ring", "ulysses"].mesh
    return _over_mesh(plan, mesh, own)


def _tensor_parallel(config: TensorParallelConfig, model: nn.Module) -> _Asked:
    if not find_policy(model).tensors:
        raise ValueError(
            f"the policy of {type(model).__name__} says nothing of tensor parallelism; use "
            "ContextParallelConfig(ulysses_degree=...) on these ranks, or uninstall() and diffusers' own"
        )
    mesh = config.mesh
    if mesh is None:
        return _over_world(Plan(tp=config.tp_degree))
    if mesh.ndim != 1:
        raise ValueError(
            f"the mesh of a TensorParallelConfig has one dim; this one has {mesh.ndim}: pass mesh['tp']"
        )
    return _over_mesh(Plan(tp=mesh.size()), mesh, None if mesh.get_coordinate() is None else mesh.mesh)


def _over_world(plan: Plan) -> _Asked:
    """Ranks beyond the degrees are data parallel, with neighbours in one group.

    diffusers makes a mesh of the first ranks alone, and the others fail.
    """
    size, world_size = plan.world_size, dist.get_world_size()
    if world_size % size:
        raise ValueError(
            f"the {world_size} ranks that are running cannot be parted into groups of {size} "
            f"(ring {plan.ring} × ulysses {plan.ulysses} × tp {plan.tp}); start a multiple of that, or choose degrees "
            "whose product divides the number of ranks"
        )
    plan = plan.replace(dp_replicate=world_size // size)
    return _Asked(plan, torch.arange(world_size).view(plan.degrees), None)


def _over_mesh(plan: Plan, mesh: DeviceMesh, own: Tensor | None) -> _Asked:
    """Ranks that share a sample or a layer are those of the mesh; whoever has the same place in other groups is data
    parallel. With 4 ranks on the mesh ring=2 × fsdp=2, ranks 0 2 and 1 3 share a sample, 0 1 and 2 3 are data ranks.

    own: this rank's [ring, ulysses] or [tp] of the mesh, None outside of it.
    """
    places = gather_objects(None if own is None else own.flatten().tolist())
    lines = sorted({tuple(line) for line in places if line is not None})
    known = [rank for line in lines for rank in line]
    if sorted(known) != list(range(len(places))):
        missing = sorted(set(range(len(places))) - set(known))
        what = f"leaves out ranks {', '.join(map(str, missing))}" if missing else "names ranks twice"
        raise ValueError(
            f"the config's mesh {what} of the {len(places)} that are running; make one mesh of all ranks, with a dim "
            'for those that see other samples: mesh_dim_names=("dp", "ring", "ulysses")'
        )
    plan = plan.replace(dp_replicate=len(lines))
    return _Asked(plan, torch.tensor(lines).view(plan.degrees), mesh)


def _register(asked: _Asked) -> None:
    """Makes the process groups, or checks that those which are there are the config's."""
    plan, ranks, mesh = asked
    if not has_mesh():
        if get_sequence_parallel_group() is None and get_tensor_parallel_group() is None:
            device_type, groups = (None, ()) if mesh is None else (mesh.device_type, mesh.get_all_groups())
            init_parallel(plan, device_type, ranks=ranks, groups=groups)
        elif mesh is not None:
            raise ValueError(
                "the config has a mesh, but groups were set already (set_sequence_parallel_group and the like); leave "
                "the mesh out, and these groups are used"
            )
        # `shard` checks the sizes of groups that were set.
        return
    had = get_mesh().mesh  # [dp_replicate, dp_shard, ring, ulysses, tp]
    if had.shape[2:] != ranks.shape[2:] or not torch.equal(had.flatten(), ranks.flatten()):
        raise ValueError(
            "the config asks for groups of ring {} × ulysses {} × tp {}".format(*ranks.shape[2:])
            + f" over ranks {ranks.flatten().tolist()}, but this process has groups of "
            + "ring {} × ulysses {} × tp {}".format(*had.shape[2:])
            + f" over {had.flatten().tolist()}, and all parallel models share them; use the same degrees and mesh, or "
            "call opensora_accel.parallel_states.reset() when no model uses these"
        )


@contextmanager
def _without_cache(model: Any) -> Iterator[None]:
    """Takes a cache of diffusers (`enable_cache`) off, and puts it on again around what has become of the model.

    A cache that skips a whole attention module has to be outside of the attention that is put into the module.
    """
    config = model._cache_config if getattr(model, "is_cache_enabled", False) else None
    if config is not None:
        model.disable_cache()
    try:
        yield
    finally:
        if config is not None:
            model.enable_cache(config)


def _warn_of_ranks_left_out(model: nn.Module, group: dist.ProcessGroup, undo: ExitStack) -> None:
    """Warns in the first training forward where FSDP2's mesh is without the ranks that share a sample.

    FSDP2 averages over its mesh alone. It may be put on before or after `enable_parallelism`.
    """
    sequence = set(dist.get_process_group_ranks(group))

    @uncompiled
    def look(_model: nn.Module, _args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        hook.remove()
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            state: Any = unit._get_fsdp_state()
            for sharded in state._fsdp_param_groups:
                averaged = set(sharded.mesh_info.mesh.mesh.flatten().tolist())
                if not sequence <= averaged:
                    logger.warning(
                        "FSDP2 averages gradients over its mesh, here ranks %s, but ranks %s share a sample, and a "
                        "gradient is the mean over all of them too; give fully_shard a mesh of all ranks, as "
                        'mesh["fsdp", "ring", "ulysses"]._flatten("all"), or average over the others by hand',
                        sorted(averaged),
                        sorted(sequence),
                    )
                    return

    hook = model.register_forward_pre_hook(look)
    undo.callback(hook.remove)
