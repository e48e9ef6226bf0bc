"""Applies a policy table to a model, and undoes it. Knows nothing of any one model.

Order: policy, checkpointing, sharding of parameters. Parameters keep their names and identity.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from opensora_accel.attention import ulysses_attention, usp_attention
from opensora_accel.attention.overlap import OverlapWatch
from opensora_accel.checkpoint import Scope, checkpoint_blocks, chunk_tokens
from opensora_accel.communications import (
    gather_forward_split_backward,
    share_sizes,
    split_forward_gather_backward,
)
from opensora_accel.fsdp import shard_parameters
from opensora_accel.parallel_states import get_parallel_group, get_sequence_parallel_group
from opensora_accel.plan import Plan
from opensora_accel.wrapping import refuse_copy
from shardformer.modeling import NORMS, redirect_attention
from shardformer.policy import find_policy
from shardformer.policy.base import GatherOutput, NormSwap, Policy, SplitInput, SplitOutput

ModelT = TypeVar("ModelT", bound=nn.Module)
Undo = Callable[[], None]

_ATTRIBUTE = "_shardformer"


@dataclass
class _Applied:
    """What `shard` left on a model."""

    undo: ExitStack
    has_sharded_parameters: bool


def shard(model: ModelT, plan: Plan, *, policy: Policy | None = None) -> ModelT:
    """The same model, run as the plan says over the registered groups.

    Every rank still calls it with the whole input and gets the whole output, and the training step around it does
    not change: average gradients over the mixed group (DDP's and FSDP's default).

    Args:
        model: of a class that has a policy, or any with `policy`.
        plan: sequence degrees split the tokens, `checkpoint`, `offload` and `mlp_chunks` act on the blocks,
            `sharding` on the parameters. `precision` is for the training loop: the model's dtype stays.
        policy: a table for a model that `shardformer.policy` does not know.

    Raises:
        ValueError: no policy, groups that do not match the plan, or a model that is sharded already.
    """
    if hasattr(model, _ATTRIBUTE):
        raise ValueError(
            f"this {type(model).__name__} is sharded already; call shardformer.unshard(model) first"
        )
    policy = policy or find_policy(model)
    group = _sequence_group(plan)
    tokens = _Tokens(group)
    # Left by an exception, the stack takes back what was done: a policy that fails leaves the model as it was.
    with ExitStack() as undo:
        for swap in policy.norm_swaps:
            undo.callback(_swap_norms(model, swap))
        if group is not None:
            _split_sequence(model, plan, policy, tokens, undo)
        if plan.mlp_chunks > 1:
            _chunk_mlps(model, plan.mlp_chunks, policy, undo)
        if plan.checkpoint != "none":
            _checkpoint(model, plan, policy, tokens, undo)
        if plan.sharding != "none":
            shard_parameters(model, plan, blocks_of(model, policy))
        model.__deepcopy__ = refuse_copy  # type: ignore[assignment]
        undo.callback(delattr, model, "__deepcopy__")
        setattr(model, _ATTRIBUTE, _Applied(undo.pop_all(), plan.sharding != "none"))
    return model


def unshard(model: ModelT) -> ModelT:
    """The model as it was before `shard`, bit for bit; ValueError where its parameters are sharded."""
    applied: _Applied | None = getattr(model, _ATTRIBUTE, None)
    if applied is None:
        raise ValueError(f"this {type(model).__name__} is not sharded")
    if applied.has_sharded_parameters:
        raise ValueError(
            "the parameters were sharded by FSDP2, which cannot be undone; load a checkpoint instead"
        )
    applied.undo.close()
    delattr(model, _ATTRIBUTE)
    return model


def blocks_of(model: nn.Module, policy: Policy | None = None) -> list[nn.Module]:
    """The repeated blocks that the policy names, in the order in which they run."""
    policy = policy or find_policy(model)
    return [block for entry in policy.blocks for block in _get(model, entry.module).children()]


def _sequence_group(plan: Plan) -> dist.ProcessGroup | None:
    if plan.tp > 1:
        raise ValueError(f"tp={plan.tp}: tensor parallelism is not available yet; put its ranks on ulysses")
    if plan.sequence == 1:
        return None
    group = get_sequence_parallel_group()
    if group is None or group.size() != plan.sequence:
        registered = "none is registered" if group is None else f"the registered one has {group.size()}"
        raise ValueError(
            f"the plan needs a sequence group of {plan.sequence} ranks, but {registered}; "
            "call opensora_accel.init_parallel(plan), or set_sequence_parallel_group(group)"
        )
    if plan.ring > 1:
        _check_axes(plan)
    return group


def _check_axes(plan: Plan) -> None:
    """Both axes must be registered as the plan has them: a sequence group alone does not tell who is on which."""
    for axis in ("ring", "ulysses"):
        size = get_parallel_group(axis).size()
        if size != getattr(plan, axis):
            raise ValueError(
                f"the plan has {axis}={getattr(plan, axis)}, but the registered {axis} group has {size} ranks; "
                "call opensora_accel.init_parallel(plan)"
            )


class _Tokens:
    """How the tokens of the forward that is running are spread. None outside of a forward.

    A recomputation runs outside of it. Ours brings the shares along (`capture`); under any other checkpoint they
    are unknown, the same on every rank, and attention exchanges them.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.splits: tuple[int, ...] | None = None
        self._in_forward = False

    def share(self, total: int, what: str) -> tuple[int, ...]:
        assert self.group is not None
        splits = share_sizes(total, self.group.size())
        if self.splits is not None and self.splits != splits:
            raise ValueError(
                f"{what} has {total} tokens, but the tokens split before it were {sum(self.splits)}; "
                "the policy splits tensors of different lengths"
            )
        if self._in_forward:  # not where another checkpoint recomputes a module that splits
            self.splits = splits
        return splits

    def capture(self) -> Scope:
        splits = self.splits

        @contextmanager
        def scope() -> Iterator[None]:
            before, self.splits = self.splits, splits
            try:
                yield
            finally:
                self.splits = before

        return scope

    def begin(self, *_: Any) -> None:
        self.splits, self._in_forward = None, True

    def end(self, *_: Any) -> None:
        self.splits, self._in_forward = None, False


def _split_sequence(model: nn.Module, plan: Plan, policy: Policy, tokens: _Tokens, undo: ExitStack) -> None:
    for split_input in policy.split_inputs:
        undo.callback(_split_input(_get(model, split_input.module), split_input, tokens))
    for split_output in policy.split_outputs:
        undo.callback(_split_output(_get(model, split_output.module), split_output, tokens))
    for gather in policy.gather_outputs:
        undo.callback(_gather_output(_get(model, gather.module), gather, tokens))

    attention = _attention(plan, tokens)
    for pattern in policy.self_attention:
        for name, module in _match(model, pattern):
            undo.callback(redirect_attention(module, name, attention))
    # Also after an exception, so that the next forward does not meet this one's shares.
    undo.callback(model.register_forward_pre_hook(tokens.begin).remove)
    undo.callback(model.register_forward_hook(tokens.end, always_call=True).remove)


def _attention(plan: Plan, tokens: _Tokens) -> Callable[..., Tensor]:
    """Self-attention over the plan's axes: Ulysses, where that is all of them, needs the sequence group only."""
    if plan.ring == 1:

        def ulysses(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            return ulysses_attention(
                q, k, v, tokens.group, splits=tokens.splits, kv_splits=tokens.splits, **options
            )

        return ulysses
    watch = OverlapWatch(get_parallel_group("ring"), plan.ulysses)

    def usp(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        watch.check(q, k)
        return usp_attention(q, k, v, splits=tokens.splits, kv_splits=tokens.splits, **options)

    return usp


def _split(tensor: Tensor, dim: int, tokens: _Tokens, what: str) -> Tensor:
    splits = tokens.share(tensor.size(dim), what)
    return split_forward_gather_backward(tensor, tokens.group, dim, "down", splits=splits)


def _split_input(module: nn.Module, entry: SplitInput, tokens: _Tokens) -> Undo:
    signature = inspect.signature(module.forward)
    if entry.argument not in signature.parameters:
        raise ValueError(
            f"the policy splits {entry.module}'s argument {entry.argument!r}, but its forward takes "
            f"{', '.join(signature.parameters)}"
        )

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        bound = signature.bind(*args, **kwargs)
        tensor = bound.arguments[entry.argument]
        what = f"{entry.module}'s {entry.argument}"
        bound.arguments[entry.argument] = _split(tensor, entry.dim, tokens, what)
        return bound.args, bound.kwargs

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def _split_output(module: nn.Module, entry: SplitOutput, tokens: _Tokens) -> Undo:
    def share(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or (entry.ndim is not None and tensor.dim() != entry.ndim):
            return tensor
        return _split(tensor, entry.dim, tokens, f"{entry.module}'s output")

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return share(output)
        return tuple(share(item) if i in entry.indices else item for i, item in enumerate(output))

    return module.register_forward_hook(hook).remove


def _gather_output(module: nn.Module, entry: GatherOutput, tokens: _Tokens) -> Undo:
    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return gather_forward_split_backward(output, tokens.group, entry.dim, "up", splits=tokens.splits)

    return module.register_forward_hook(hook).remove


def _checkpoint(model: nn.Module, plan: Plan, policy: Policy, tokens: _Tokens, undo: ExitStack) -> None:
    if not policy.blocks:
        raise ValueError(f'checkpoint="{plan.checkpoint}" needs a policy that names the model\'s blocks')
    assert plan.checkpoint != "none"
    names = {
        id(block): entry.boundary for entry in policy.blocks for block in _get(model, entry.module).children()
    }
    undo.callback(
        checkpoint_blocks(
            blocks_of(model, policy),
            plan.checkpoint,
            plan.offload,
            boundary=lambda block: names[id(block)],
            capture_scope=tokens.capture,
        )
    )


def _chunk_mlps(model: nn.Module, num_chunks: int, policy: Policy, undo: ExitStack) -> None:
    if not policy.mlps:
        raise ValueError(
            f"mlp_chunks={num_chunks} needs a policy that names the model's MLPs; use mlp_chunks=1"
        )
    for pattern in policy.mlps:
        for _name, module in _match(model, pattern):
            undo.callback(chunk_tokens(module, num_chunks))


def _swap_norms(model: nn.Module, swap: NormSwap) -> Undo:
    target = NORMS[swap.target]
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(_get(model, swap.module).modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in swap.sources and type(child) is not target:
                replaced.append((parent, name, child))
                setattr(parent, name, target.from_native_module(child))

    def undo() -> None:
        for parent, name, child in replaced:
            setattr(parent, name, child)

    return undo


def _get(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(
            f"the policy names the module {path!r}, which {type(model).__name__} does not have: {error}"
        ) from error


def _match(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    found = [(name, module) for name, module in model.named_modules() if expression.fullmatch(name)]
    if not found:
        raise ValueError(f"the policy's pattern {pattern!r} fits no module of {type(model).__name__}")
    return found
