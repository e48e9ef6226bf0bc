"""Sequence parallelism: everything that a policy says of tokens, put on a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from torch import nn

from opensora_accel.plan import Plan
from shardformer.engine.attentions import redirect_attentions
from shardformer.engine.boundaries import (
    Undo,
    count_frames,
    count_input,
    gather_output,
    refuse_input,
    refuse_unknown_inputs,
    split_input,
    split_output,
)
from shardformer.engine.forward import follow_forward
from shardformer.engine.grids import spread_grids
from shardformer.engine.positions import keep_positions
from shardformer.engine.tokens import Tokens
from shardformer.modeling.halo import add_halo
from shardformer.paths import find
from shardformer.policy.base import Halo, Policy


def spread_tokens(model: nn.Module, plan: Plan, policy: Policy, tokens: Tokens, undo: ExitStack) -> None:
    """Puts it on; `undo` takes it off again, also where a later part failed."""
    _refuse_others(model)
    for step in _steps(model, plan, policy, tokens):
        for each in step:
            undo.callback(each)


def _refuse_others(model: nn.Module) -> None:
    """ValueError where diffusers' own context or tensor parallelism is on: the tokens would be split twice."""
    for name, module in model.named_modules():
        for attribute in ("_parallel_config", "_cp_shard_fn"):
            if getattr(module, attribute, None) is not None:
                raise ValueError(
                    f"{name or type(model).__name__} is parallel already (its {attribute} is set, as by "
                    "enable_parallelism); make the model anew and leave that out"
                )


def _steps(model: nn.Module, plan: Plan, policy: Policy, tokens: Tokens) -> Iterator[Iterator[Undo]]:
    """Hooks of a module run in the order in which they are put on: frames before splits, splits before counts."""
    yield from (refuse_input(model, argument, reason) for argument, reason in policy.refuses)
    if policy.arguments:
        yield refuse_unknown_inputs(model, policy)
    if policy.frames is not None:
        yield count_frames(model, policy.frames, tokens)
    yield from (split_input(model, entry, tokens) for entry in policy.split_inputs)
    yield from (split_output(model, entry, tokens) for entry in policy.split_outputs)
    yield from (count_input(model, entry, tokens) for entry in policy.count_inputs)
    yield spread_grids(model, policy, tokens)
    yield from (gather_output(model, entry, tokens) for entry in policy.gather_outputs)
    yield from (_halo(model, entry, tokens) for entry in policy.halos)
    yield keep_positions(model, policy, tokens)
    yield redirect_attentions(model, plan, policy, tokens)
    # Last, and it puts its first hook before all others: the model's own inputs may be split.
    yield iter([follow_forward(model, tokens, _named(model, policy))])


def _named(model: nn.Module, policy: Policy) -> dict[str, nn.Module]:
    """The modules at the edges of what is spread, by name."""
    paths = {
        *(entry.module for entry in policy.split_inputs),
        *(entry.module for entry in policy.split_outputs),
        *(entry.module for entry in policy.gather_outputs),
        *(entry.module for entry in policy.gather_grids),
        *(entry.module for entry in policy.halos),
    }
    return {name: module for path in sorted(paths) for name, module in find(model, path) if name}


def _halo(model: nn.Module, entry: Halo, tokens: Tokens) -> Iterator[Undo]:
    def get_splits() -> tuple[int, ...] | None:
        """In frames."""
        splits = tokens.state.splits
        return None if splits is None else tuple(size // tokens.state.unit for size in splits)

    for name, module in find(model, entry.module):
        yield add_halo(module, name, tokens.group, entry.dim, entry.reach, get_splits)
