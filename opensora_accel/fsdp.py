"""Parameters sharded by torch FSDP2 over the ranks that a Plan names.

Each rank keeps its part of every weight, of its gradient and of the optimizer's state. Before a block computes, its
weights are gathered; after its backward the gradients are averaged, and each rank keeps the part that belongs to its
weights. Ranks of a sequence group share the shards too, because gradients are averaged over *mixed* anyway. With
F shards on W ranks there are W/F copies. On W = 4 ranks, a weight of rows 0…7:

    sharding_factor    rank 0    rank 1    rank 2    rank 3
    4                  0 1       2 3       4 5       6 7        FULL_SHARD, SHARD_GRAD_OP
    2                  0…3       4…7       0…3       4…7        HYBRID_SHARD, HYBRID_SHARD_ZERO2
    1                  0…7       0…7       0…7       0…7        NO_SHARD

Precision. With precision="bf16" each rank keeps fp32 shards, gathers and computes in bf16, and adds gradients up in
fp32. Nothing runs under torch.autocast, whose lists of operators differ between CPU and CUDA and whose cache keeps
every gathered bf16 weight alive until the forward ends. Modules that the model keeps in fp32 (diffusers'
`_keep_in_fp32_modules`) are gathered and computed in fp32. The model is then called as one that was loaded in bf16,
but hidden states may come in fp32. A timestep is never rounded: bf16 has no number between 996 and 1000.

A rank's own shard has another norm than the whole gradient. Clip by the whole one: `shardformer.clip_grad_norm_`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map_only

from opensora_accel.experimental import call_experiments
from opensora_accel.parallel_states import get_mesh, make_mesh
from opensora_accel.plan import Plan
from opensora_accel.wrapping import refuse_old_parameters

ModelT = TypeVar("ModelT", bound=nn.Module)

# Gradients are added up in fp32, and the optimizer steps on fp32 shards.
_BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
# Arguments that bf16 would round to others: the diffusion time, and positions or what was made of them.
_TIMES = ("t", "time", "sigma", "sigmas")
_EXACT = ("timestep", "rotary", "rope", "freqs", "coords", "position", "_ids")
_AS_THEY_ARE = MixedPrecisionPolicy(cast_forward_inputs=False)


def shard_parameters(model: ModelT, plan: Plan, blocks: Sequence[nn.Module]) -> ModelT:
    """The same model with its parameters as DTensors, gathered block by block while they are used.

    Gradients are averaged over *mixed*, which is what the gradient convention of `communications` asks for: the divisor
    stays at FSDP's own default, whatever the sharding factor.

    Args:
        plan: sharding "zero2" keeps parameters gathered between forward and backward, "zero3" does not;
            `sharding_factor`, `precision`, `prefetch` and `cpu_offload` say the rest.
        blocks: the repeated blocks in the order in which they run, each gathered on its own.

    An optimizer that holds the parameters that the model had before raises ValueError when it steps.

    Raises:
        ValueError: plan.sharding is "none", or bf16 is asked of a model whose own parameters are not fp32, or shards
            on the host of groups that cannot send from there.
    """
    if not plan.is_sharded:
        raise ValueError('shard_parameters needs sharding="zero2" or "zero3"; this plan has "none"')
    # More than one copy is HSDP.
    num_copies = plan.mixed // plan.num_shards
    kept: set[int] = set()
    if plan.precision == "bf16":
        _check_master_weights(model)
        kept = kept_in_fp32(model)
        model.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
    whole_mixed = num_copies == 1 and not kept
    mesh = get_mesh("mixed") if whole_mixed else make_mesh(num_copies, plan.num_shards)
    offload: OffloadPolicy = OffloadPolicy()
    if plan.cpu_offload:
        _check_backend(mesh)
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    options: Any = {
        "mesh": mesh,
        "reshard_after_forward": plan.sharding == "zero3",
        "mp_policy": _BF16 if plan.precision == "bf16" else _AS_THEY_ARE,
        "offload_policy": offload,
    }
    fp32: FSDPMeshInfo | None = None
    if kept:
        # FSDP2 gathers the parameters of one process group together, in one dtype. A second mesh of the same ranks
        # makes those that stay in fp32 a group of their own. It equals the first, dims' names included: operators on
        # lists of DTensors, as the norm of all gradients is one, refuse those of unequal meshes.
        fp32 = _mesh_info(make_mesh(num_copies, plan.num_shards))

    def placement(parameter: nn.Parameter) -> Any:
        shard = _shard_dim(parameter, plan.num_shards)
        if fp32 is None or id(parameter) not in kept:
            return shard
        # Here, so that all else of this package imports under torch 2.11, which has no such thing.
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

        return ShardPlacementResult(shard, fp32)

    options["shard_placement_fn"] = placement
    model.register_forward_hook(_without_views)
    # Inner modules first: what a block holds is not gathered again with the model's own parameters. FSDP2 works in
    # place: a module's class becomes a subclass of its own.
    modules: list[nn.Module] = [*blocks, model]
    before = list(model.parameters())
    for module in modules:
        unit = fully_shard(module, **options)
        groups = unit._get_fsdp_state()._fsdp_param_groups if kept else ()
        for group in groups:
            # The group on the second mesh: gathered and reduced in the dtype that its parameters have.
            if group.mesh_info is fp32:
                group.mp_policy = _AS_THEY_ARE
        call_experiments("shard_unit", plan, unit, fp32)
    _prefetch(model, blocks, plan.prefetch)
    refuse_old_parameters(before, model)
    return model


def reshard(model: nn.Module) -> None:
    """Drops gathered parameters, after a forward without backward, which leaves them gathered under zero2.

    Whoever reads or writes `model.parameters()` after it would otherwise meet copies that the next step forgets.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_last_microbatch(model: nn.Module, is_last: bool) -> None:
    """Says before a backward whether it is the last of a step that accumulates gradients.

    Every backward reduce-scatters, so that no rank ever holds whole gradients beyond one block. Only the all-reduce
    between copies (HSDP) waits for the last one. FSDP2's `set_requires_gradient_sync(False)` would instead keep the
    gradients of the whole model on every rank, in fp32.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_last)


def param_groups(unit: Any) -> Iterator[Any]:
    """FSDP2's groups of parameters of one module, each gathered together."""
    yield from (group for group in unit._get_fsdp_state()._fsdp_param_groups if group is not None)


def leaves_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a backward gives gradients to, by parameters' names: gathered ones in the place of shards.

    Call it between steps. What was never gathered yet is left out.
    """
    reshard(model)
    leaves: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    names = {id(parameter): name for name, parameter in leaves.items()}
    for module in model.modules():
        for group in param_groups(module) if isinstance(module, FSDPModule) else ():
            for each in group.fsdp_params:
                name = names.get(id(each.sharded_param))
                if name is None:
                    continue
                gathered = getattr(each, "_unsharded_param", None)
                leaves.pop(name)
                if gathered is not None:
                    leaves[name] = gathered
    return leaves


def forget_rounding(model: nn.Module) -> None:
    """Drops what collectives that round have kept for the next step, after gradients that no optimizer step used."""
    for module in model.modules():
        for group in param_groups(module) if isinstance(module, FSDPModule) else ():
            for user in (group._reduce_scatter_comm, group._all_reduce_hook):
                if hasattr(user, "forget"):
                    user.forget()


def _shard_dim(parameter: nn.Parameter, num_shards: int) -> Shard:
    """Rows, unless there are so few that most ranks would hold, and gather, padding alone.

    A table [1, 6, 5120] cut into rows for 1,024 ranks travels as 1,024 rows. Cut along its last dim each rank holds
    [1, 6, 5]. FSDP2 takes another dim than the first only where it divides.
    """
    if parameter.dim() and parameter.size(0) < num_shards:
        for dim in range(1, parameter.dim()):
            if parameter.size(dim) % num_shards == 0:
                return Shard(dim)
    return Shard(0)


def _mesh_info(mesh: DeviceMesh) -> FSDPMeshInfo:
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh, replicate_mesh_dim=0, shard_mesh_dim=1)


def _check_backend(mesh: DeviceMesh) -> None:
    """Norms of gradients that lie on the host are added up there."""
    for group in mesh.get_all_groups():
        if torch.device("cpu") not in group._device_types:
            raise ValueError(
                "cpu_offload keeps gradients on the host, from where the backend of this job cannot send; start "
                'torch.distributed with init_process_group("cpu:gloo,cuda:nccl"), or leave it to init_parallel'
            )


def _check_master_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ValueError(
                f'precision="bf16" keeps fp32 master weights, but {name} is {parameter.dtype}; call model.float() '
                'before shardformer.shard, or set precision="fp32" to compute in the dtype that the model has'
            )


def kept_in_fp32(model: nn.Module) -> set[int]:
    """Ids of the parameters that the model's class wants in fp32, by diffusers' rule: a part of the name is listed."""
    listed = getattr(model, "_keep_in_fp32_modules", None) or ()
    listed = {listed} if isinstance(listed, str) else set(listed)
    return {id(parameter) for name, parameter in model.named_parameters() if listed & set(name.split("."))}


def _cast_inputs(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Hidden states and text in bf16; times, positions and vectors (a length, a scale) stay as they are."""
    names = list(inspect.signature(model.forward).parameters)

    def cast(name: str, value: Any) -> Any:
        if name in _TIMES or any(part in name for part in _EXACT):
            return value
        return tree_map_only(Tensor, _cast_tensor, value)

    # More arguments than names come only where forward takes *args.
    cast_args = tuple(
        cast(name, value) for name, value in zip_longest(names[: len(args)], args, fillvalue="")
    )
    return cast_args, {name: cast(name, value) for name, value in kwargs.items()}


def _cast_tensor(tensor: Tensor) -> Tensor:
    """A tensor in bf16, where it is fp32 and has more than one dim: vectors [N] stay as they are."""
    return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 and tensor.dim() > 1 else tensor


def _without_views(_model: nn.Module, _args: Any, output: Any) -> Any:
    """The output in memory of its own.

    A hook on the output gathers the parameters again for backward. On a view, as an unpatchified latent is, `out += 1`
    would drop that hook without a word.
    """
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor._is_view() else tensor, output)


def _prefetch(model: nn.Module, blocks: Sequence[nn.Module], num_blocks: int) -> None:
    """Gathers the next blocks while one computes: those after it in forward, those before it in backward."""
    if not isinstance(model, FSDPModule):
        return  # blocks prefetch each other on the streams of their root
    # By default FSDP2 overlaps by itself, on a stream of its own, and for that keeps what has arrived of one block
    # until the next one is here: with a block fetched ahead that would be three blocks' bytes in forward.
    model._set_unshard_async_op(True)
    units: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + num_blocks])
        before = units[max(0, index - num_blocks) : index]
        # With an empty list FSDP2 would choose by itself; a block that is here already is not gathered again.
        unit.set_modules_to_backward_prefetch(before[::-1] or [unit])
