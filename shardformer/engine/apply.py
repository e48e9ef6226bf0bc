"""`shard` and `unshard`. Knows nothing of any one model.

Order: policy, checkpointing, sharding of parameters. Parameters keep their names and identity.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from opensora_accel.checkpoint import checkpoint_blocks, chunk_tokens, preserve_state
from opensora_accel.deferred import is_deferred, materialize, resume_recording
from opensora_accel.experimental import call_experiments
from opensora_accel.parallel_states import (
    get_mesh,
    get_parallel_group,
    get_sequence_parallel_group,
    get_tensor_parallel_group,
    has_mesh,
    has_parallel_group,
)
from opensora_accel.plan import Plan
from opensora_accel.precision import lift_casts
from opensora_accel.wrapping import refuse_copy, refuse_pickle
from shardformer.paths import children, find
from shardformer.policy import Policy, find_policy, has_policy
from shardformer.spread import Alone, Tokens

if TYPE_CHECKING:
    from shardformer.modeling import SwapReport

ModelT = TypeVar("ModelT", bound=nn.Module)
_ATTRIBUTE = "_shardformer"
# What may differ between forwards of one sharded model.
_OF_BLOCKS = ("checkpoint", "offload", "mlp_chunks")

_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}

logger = logging.getLogger(__name__)


class _BlockPlans:
    """Which of several plans a model's blocks run as: `current`, also while backward recomputes them."""

    def __init__(self, plan: Plan, alternatives: Mapping[str, Plan]):
        self.plans: dict[str | None, Plan] = {None: plan}
        self.plans.update(alternatives)
        self.current = plan
        for name, other in alternatives.items():
            for each in fields(Plan):
                ours, theirs = getattr(plan, each.name), getattr(other, each.name)
                if ours != theirs and each.name not in _OF_BLOCKS:
                    raise ValueError(
                        f"alternatives {name!r} has {each.name}={theirs!r} and the plan {ours!r}, but only "
                        f"{', '.join(_OF_BLOCKS)} may differ between forwards of one model; set {each.name} to the "
                        "plan's"
                    )

    @contextmanager
    def to(self, plan: Plan) -> Iterator[None]:
        def by_this_plan(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                with self.to(plan):  # again, where backward calls it
                    return function(*args, **kwargs)

            return run

        before, self.current = self.current, plan
        try:
            with preserve_state(by_this_plan):
                yield
        finally:
            self.current = before

    def when(self, **settings: Any) -> Callable[[], bool] | None:
        """Whether the blocks run with these settings now; None where they always do."""

        def has_them(plan: Plan) -> bool:
            return all(getattr(plan, name) == value for name, value in settings.items())

        if all(map(has_them, self.plans.values())):
            return None
        return lambda: has_them(self.current)


@dataclass
class _Applied:
    """What `shard` left on a model."""

    policy: Policy
    undo: ExitStack
    has_sharded_parameters: bool
    norms: SwapReport | None
    block_plans: _BlockPlans
    tokens: Tokens | None


def shard(
    model: ModelT,
    plan: Plan,
    *,
    policy: Policy | None = None,
    norms: Literal["strict", "fast"] | None = None,
    packed: bool = False,
    alternatives: Mapping[str, Plan] | None = None,
) -> ModelT:
    """The same model, run as the plan says over the registered groups; one that waits for its values gets them.

    Every rank still calls it with the whole input and gets the whole output, and the training step around it does
    not change: average gradients over the mixed group (DDP's and FSDP's default).

    Args:
        model: of a class that has a policy, or any with `policy`.
        plan: sequence degrees split the tokens, `checkpoint`, `offload` and `mlp_chunks` act on the blocks,
            `sharding` on the parameters, which `precision` "bf16" gathers and computes with in bf16. Whole parameters
            keep their dtype: then `precision` is for the training loop.
        policy: a table for a model that `shardformer.policy` does not know.
        norms: swaps norms for lighter kernels: "strict" to the last bit of what they compute, "fast" with other
            rounding too. `shardformer.norms_of(model)` says what was done and why.
        packed: makes the model take rows of several samples, and masks of your own (`shardformer.packing`).
        alternatives: plans under names of yours, which differ from `plan` in `checkpoint`, `offload` and `mlp_chunks`
            alone: within `run_blocks(model, name)` the blocks run so, for clips of another size, say.

    Raises:
        ValueError: no policy, groups that do not match the plan, or a model that is sharded already.
    """
    _check_kinds(model, plan)
    block_plans = _BlockPlans(plan, alternatives or {})
    if hasattr(model, _ATTRIBUTE):
        raise ValueError(
            f"this {type(model).__name__} is sharded already; call shardformer.unshard(model) first"
        )
    call_experiments("check_groups", plan)
    policy = policy or find_policy(model)
    group = _sequence_group(plan)
    # Left by an exception, the stack takes back what was done: a policy that fails leaves the model as it was.
    with ExitStack() as undo:
        # From the inside out: layers are replaced before hooks are put on them, a checkpoint recomputes a block with
        # its hooks, and FSDP2 shards what all of this has left.
        with resume_recording(model):  # of a deferred model what becomes of its parameters is noted
            for replace in policy.replacements:
                undo.callback(replace(model))
        report = None
        if norms is not None:
            from shardformer.modeling import swap_norms

            report = swap_norms(model, norms, within=policy.norms)
        if report is not None:
            undo.callback(report.undo)
        if plan.tp > 1:
            with resume_recording(model):
                _shard_tensors(model, plan, policy, undo)
        tokens = None
        if group is not None or packed:
            # With all of attention, which a plan without sequence parallelism has no use for.
            from shardformer.engine.splits import spread_tokens

            tokens = Tokens(Alone() if group is None else group, are_packed=packed)
            spread_tokens(model, plan, policy, tokens, undo)
        _chunk_mlps(model, policy, block_plans, undo)
        _checkpoint(model, policy, block_plans, undo)
        if plan.is_sharded:
            from opensora_accel.fsdp import shard_parameters  # loads torch's FSDP, as long as half of torch

            shard_parameters(model, plan, blocks_of(model, policy))
        if is_deferred(model):
            device = get_mesh().device_type if has_mesh() else "cpu"
            materialize(model, "cpu" if plan.cpu_offload else device, buffer_device=device)
        for name, refuse in (("__deepcopy__", refuse_copy), ("__reduce_ex__", refuse_pickle)):
            setattr(model, name, refuse)
            undo.callback(delattr, model, name)
        # From here on the undo belongs to the model, and leaving this block takes nothing back.
        applied = _Applied(policy, undo.pop_all(), plan.is_sharded, report, block_plans, tokens)
        setattr(model, _ATTRIBUTE, applied)
    return model


def parallelize(
    model: nn.Module,
    plan: Plan,
    device: torch.device,
    alternatives: Mapping[str, Plan] | None = None,
    packed: bool = False,
) -> tuple[nn.Module, Callable[..., Any]]:
    """The sharded model, and what to call for a prediction whose gradients are averaged over *mixed*.

    `alternatives` and `packed` are `shard`'s.

    In bf16 whole weights are the one shard of each copy: FSDP2 makes a block's bf16 weights when it runs, as it does of
    several shards, and averages fp32 gradients. So no operator's dtype depends on torch.autocast and its lists. Frozen
    weights are kept in bf16: nothing but their rounded values is ever read.
    """
    alternatives = dict(alternatives or {})
    if plan.precision == "bf16" and not plan.is_sharded:
        plan, *others = (
            each.replace(sharding="zero3", sharding_factor=1) for each in (plan, *alternatives.values())
        )
        alternatives = dict(zip(alternatives, others, strict=True))
    model.train()
    with resume_recording(model):  # of a model that waits for its weights
        if any(p.is_floating_point() and p.dtype != weight_dtype(plan) for p in model.parameters()):
            model.to(weight_dtype(plan))
        if frozen_dtype(plan) != weight_dtype(plan):
            _narrow_frozen(model, frozen_dtype(plan))
    if not is_deferred(model):
        model.to(device)
    if plan.precision == "fp64":
        lift_casts(model)
    shard(model, plan, alternatives=alternatives, packed=packed)
    if not plan.averages_by_ddp:
        return model, model  # FSDP2 averages by itself, and one rank has nothing to average
    group = get_parallel_group("mixed")
    devices = [device] if device.type == "cuda" else None
    return model, nn.parallel.DistributedDataParallel(model, device_ids=devices, process_group=group)


def _narrow_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives frozen weights in fp32 the type that they are computed in, but for those that their class keeps so."""
    from opensora_accel.fsdp import kept_in_fp32  # not before bf16 needs torch's FSDP

    kept, narrowed = kept_in_fp32(model), dict[int, nn.Parameter]()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_narrowed = not parameter.requires_grad and parameter.dtype == torch.float32
            if is_narrowed and id(parameter) not in kept:
                # Tied parameters stay one.
                narrow = nn.Parameter(parameter.to(dtype), requires_grad=False)
                setattr(module, name, narrowed.setdefault(id(parameter), narrow))


def weight_dtype(plan: Plan) -> torch.dtype:
    """The type of the weights in training; bf16 computes in bf16 on fp32 weights."""
    return _DTYPES[plan.precision]


def frozen_dtype(plan: Plan) -> torch.dtype:
    """The type of weights that are not trained: what is computed in."""
    return torch.bfloat16 if plan.precision == "bf16" else weight_dtype(plan)


def _check_kinds(model: object, plan: object) -> None:
    if not isinstance(plan, Plan):
        written = "Plan.from_dict({...})" if isinstance(plan, dict) else "Plan(ulysses=2)"
        raise ValueError(f"shard takes a Plan, as {written}; got a {type(plan).__name__}")
    if isinstance(model, nn.Module):
        return
    components = getattr(model, "components", None)  # of a pipeline of diffusers
    parts = components if isinstance(components, dict) else {}
    known = [name for name, part in parts.items() if isinstance(part, nn.Module) and has_policy(part)]
    remedy = "; ".join(f"shardformer.shard(pipe.{name}, plan)" for name in known) or "shard its transformer"
    raise ValueError(f"shard takes a model, a torch.nn.Module; got a {type(model).__name__}: {remedy}")


def unshard(model: ModelT) -> ModelT:
    """The model as it was before `shard`, bit for bit.

    Call it after the backward of everything that ran before: a checkpoint recomputes with the model as it is then.

    Raises:
        ValueError: the model is not sharded, or its parameters are, which cannot be undone.
    """
    applied: _Applied | None = getattr(model, _ATTRIBUTE, None)
    if applied is None:
        raise ValueError(f"this {type(model).__name__} is not sharded")
    if applied.has_sharded_parameters:
        raise ValueError(
            "the parameters were sharded by FSDP2, which cannot be undone; load a checkpoint instead"
        )
    # The stack runs backwards: what was put on last is taken off first.
    applied.undo.close()
    delattr(model, _ATTRIBUTE)
    return model


@contextmanager
def run_blocks(model: nn.Module, name: str | None) -> Iterator[None]:
    """Within it the model's blocks run as the plan of this name in `shard(…, alternatives=…)`; None is the plan itself.

    It goes around the forward. Backward may come later: what is recomputed runs as it did in its forward.

    Raises:
        ValueError: the model is not sharded, or without such an alternative.
    """
    applied: _Applied | None = getattr(model, _ATTRIBUTE, None)
    plans = {} if applied is None else applied.block_plans.plans
    if applied is None or name not in plans:
        known = ", ".join(repr(each) for each in plans if each is not None) or "none"
        raise ValueError(
            f"this {type(model).__name__} has no alternative plan {name!r} (there are: {known}); name it in "
            "shardformer.shard(model, plan, alternatives={...})"
        )
    with applied.block_plans.to(plans[name]):
        yield


@contextmanager
def run_packed(model: nn.Module, balanced: bool, streams: Mapping[str, Any]) -> Iterator[None]:
    """`shardformer.packing.run_packed`."""
    applied: _Applied | None = getattr(model, _ATTRIBUTE, None)
    if applied is None or applied.tokens is None or not applied.tokens.are_packed:
        raise ValueError(
            f"this {type(model).__name__} was not sharded for rows of several samples; call "
            "shardformer.shard(model, plan, packed=True)"
        )
    from shardformer.engine.packed import run_packed as run

    with run(model, applied.policy, applied.tokens, balanced, streams):
        yield


def norms_of(model: nn.Module) -> SwapReport:
    """What `shard(…, norms=…)` made of the model's norms, and why: `print` it.

    Raises:
        ValueError: the model was sharded without `norms=`, or not at all.
    """
    applied: _Applied | None = getattr(model, _ATTRIBUTE, None)
    if applied is None or applied.norms is None:
        raise ValueError(
            f"the norms of this {type(model).__name__} were not looked at; call "
            'shardformer.shard(model, plan, norms="strict")'
        )
    return applied.norms


def blocks_of(model: nn.Module, policy: Policy | None = None) -> list[nn.Module]:
    """The repeated blocks that the policy names, in the order in which they run."""
    applied: _Applied | None = getattr(model, _ATTRIBUTE, None)
    if policy is None:
        # A sharded model may have been given a table that is not found by its name.
        policy = find_policy(model) if applied is None else applied.policy
    return [block for block, _boundary in _blocks(model, policy)]


def _blocks(model: nn.Module, policy: Policy) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """The blocks in the order in which they run, each with the names of the arguments that flow to the next."""
    blocks = []
    for entry in policy.blocks:
        # A model may hold its blocks in two lists that run in turn: first of each, second of each, …
        lists = [children(model, path) for path in (entry.module, *entry.alternating)]
        in_turn = chain.from_iterable(zip_longest(*lists))
        blocks += [(block, entry.boundary) for block in in_turn if block is not None]
    return blocks


def _sequence_group(plan: Plan) -> dist.ProcessGroup | None:
    if plan.sequence == 1:
        return None
    group = _registered("sequence", get_sequence_parallel_group(), plan.sequence)
    if has_parallel_group("ring"):
        # `init_parallel` made the groups, each axis by itself; setters register the sequence group alone.
        for axis in ("ring", "ulysses"):
            size = get_parallel_group(axis).size()
            if size != getattr(plan, axis):
                raise ValueError(
                    f"the plan has {axis}={getattr(plan, axis)}, but the registered {axis} group has {size} ranks; "
                    "call opensora_accel.init_parallel(plan)"
                )
    elif plan.ring > 1 and plan.ulysses > 1:
        raise ValueError(
            f"the plan has ring={plan.ring} and ulysses={plan.ulysses}, but only their sequence group is registered, "
            "which does not say who is on which axis; call opensora_accel.init_parallel(plan) (under ColossalAI "
            "shardformer.colossalai.register_groups(plugin), which has one axis), or put all ranks on one of them"
        )
    return group


def _shard_tensors(model: nn.Module, plan: Plan, policy: Policy, undo: ExitStack) -> None:
    if not policy.tensors:
        raise ValueError(
            f"tp={plan.tp} needs a policy that says where the layers of {type(model).__name__} are cut, and its policy "
            "does not; use tp=1 and put its ranks on ulysses"
        )
    from shardformer.tensor_parallel import shard_tensors

    group = _registered("tensor", get_tensor_parallel_group(), plan.tp)
    undo.callback(shard_tensors(model, policy.tensors, group))


def _registered(name: str, group: dist.ProcessGroup | None, size: int) -> dist.ProcessGroup:
    """The group, if it is of the size that the plan needs."""
    if group is None or group.size() != size:
        registered = "none is registered" if group is None else f"the registered one has {group.size()}"
        raise ValueError(
            f"the plan needs a {name} group of {size} ranks, but {registered}; "
            f"call opensora_accel.init_parallel(plan), or set_{name}_parallel_group(group)"
        )
    return group


def _checkpoint(model: nn.Module, policy: Policy, block_plans: _BlockPlans, undo: ExitStack) -> None:
    # Lists of blocks may name their hidden state differently.
    boundaries = {id(block): boundary for block, boundary in _blocks(model, policy)}
    # One wrapper for each way in which some plan runs the blocks; in a forward at most one of them acts.
    for checkpoint, offload in dict.fromkeys(
        (plan.checkpoint, plan.offload) for plan in block_plans.plans.values()
    ):
        if checkpoint == "none":
            continue
        if not policy.blocks:
            raise ValueError(f'checkpoint="{checkpoint}" needs a policy that names the model\'s blocks')
        undo.callback(
            checkpoint_blocks(
                blocks_of(model, policy),
                checkpoint,
                offload,
                boundary=lambda block: boundaries[id(block)],
                when=block_plans.when(checkpoint=checkpoint, offload=offload),
            )
        )


def _chunk_mlps(model: nn.Module, policy: Policy, block_plans: _BlockPlans, undo: ExitStack) -> None:
    numbers = sorted({plan.mlp_chunks for plan in block_plans.plans.values()} - {1})
    if not numbers:
        return
    if not policy.mlps:
        raise ValueError(
            f"mlp_chunks={numbers[0]} needs a policy that names the model's MLPs; use mlp_chunks=1"
        )
    mlps = [module for pattern in policy.mlps for _name, module in find(model, pattern)]
    for num_chunks in numbers:
        for module in mlps:
            undo.callback(chunk_tokens(module, num_chunks, when=block_plans.when(mlp_chunks=num_chunks)))
    # Blocks whose MLP shares a layer with attention (single-stream ones) have nothing to run in pieces.
    blocks = blocks_of(model, policy)
    whole = [block for block in blocks if not any(module in mlps for module in block.modules())]
    if whole and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "mlp_chunks=%s leaves %d of %d blocks as they are (%s): their MLP is no module of its own",
            ", ".join(map(str, numbers)),
            len(whole),
            len(blocks),
            ", ".join(sorted({type(block).__name__ for block in whole})),
        )
