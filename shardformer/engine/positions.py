"""Positions that are made, or enter, where the tokens are split already: inside attention.

A model's code may call `rope_apply(x, grid_sizes, freqs)` in every attention, and take the first rows of `freqs` for
the tokens of x. On rank 1 of 2, which holds the last tokens, these are the wrong rows. There are two ways to be right:

    tables   the function gets this rank's rows of a table that has a row for every token of the clip
    tokens   the function gets as many tokens as the clip has, this rank's in their places and zeros elsewhere, and
             of what it returns this rank's rows are kept; it computes P times as much, but needs no table
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.functions import check_function, replace_function
from shardformer.modeling import running_redirection
from shardformer.policy import Policy, Positions
from shardformer.spread import Tokens, running_tokens, uncompiled


def keep_positions(model: nn.Module, policy: Policy, tokens: Tokens, undo: ExitStack) -> None:
    """Every function that gives tokens their positions sees the whole clip's, as `Positions` says."""
    missed: set[str] = set()

    def check(*_: Any) -> None:
        if missed:
            raise ValueError(
                f"the policy says that {', '.join(sorted(missed))} gives tokens their positions, but "
                f"{type(model).__name__} did not call it: positions may be counted from a rank's own tokens; name the "
                "function that it calls"
            )

    for entry in policy.positions:
        missed.add(entry.function)

        def wrap(original: Callable[..., Any], entry: Positions = entry) -> Callable[..., Any]:
            signature = check_function(entry.function, original, (*entry.tables, *entry.tokens))

            @functools.wraps(original)
            def function(*args: Any, **kwargs: Any) -> Any:
                # Other models may call the same function, and so may this one where nothing is split yet.
                if running_tokens() is not tokens or tokens.state.splits is None:
                    running = running_redirection()
                    # Inside this model's attention, but outside of its forward: a checkpoint recomputes it.
                    if running is not None and running.attention in tokens.attentions:
                        tokens.check_known(f"{entry.function}, which gives tokens their positions,")
                    return original(*args, **kwargs)
                missed.discard(entry.function)
                bound = signature.bind(*args, **kwargs)
                for name in entry.tables:
                    bound.arguments[name] = _rows(bound.arguments[name], entry, tokens)
                own = bound.arguments[entry.tokens[0]] if entry.in_place else None
                for name in entry.tokens:
                    bound.arguments[name] = _in_place(bound.arguments[name], entry, tokens)
                out = _of_each_clip(original, bound, entry)
                if own is not None:
                    # The caller looks at its own tensor, and not at what the function returns.
                    return own.copy_(_rows(bound.arguments[entry.tokens[0]], entry, tokens))
                return _rows(out, entry, tokens) if entry.tokens else out

            return function

        undo.callback(replace_function(model, entry.function, wrap))
    undo.callback(model.register_forward_hook(uncompiled(check)).remove)


def _of_each_clip(original: Callable[..., Any], bound: inspect.BoundArguments, entry: Positions) -> Any:
    """What the function gives of the whole sequence; of each clip by itself, where there are several of one shape."""
    if entry.grid is None or not entry.tokens:
        return original(*bound.args, **bound.kwargs)
    num_tokens = math.prod(int(size) for size in bound.arguments[entry.grid][0])
    (name,) = entry.tokens
    parts = []
    for clip in bound.arguments[name].split(num_tokens, entry.dim):
        bound.arguments[name] = clip
        parts.append(original(*bound.args, **bound.kwargs))
    return torch.cat(parts, entry.dim)


def _rows(value: Any, entry: Positions, tokens: Tokens) -> Any:
    """This rank's rows of tensors that have a row for every token of the clip."""
    if isinstance(value, (tuple, list)):
        return type(value)(_rows(item, entry, tokens) for item in value)
    if not isinstance(value, Tensor):
        return value
    with torch._C.DisableTorchFunction():  # it is known where this comes from
        if tokens.order(value.device) is not None and value.size(entry.dim) == tokens.total():
            return tokens.own_rows(value, entry.dim)
        own = tokens.own_range_of(value.size(entry.dim))
        return value.narrow(entry.dim, own.start, own.stop - own.start)


def _in_place(value: Tensor, entry: Positions, tokens: Tokens) -> Tensor:
    """As many rows as the clip has, [..., S at dim, ...]: this rank's rows where they belong, and zeros elsewhere."""
    assert tokens.state.splits is not None
    total, num_own = tokens.total(), tokens.state.splits[tokens.group.rank()]
    if value.size(entry.dim) != num_own:
        raise ValueError(
            f"the policy says that {entry.function} gets this rank's {num_own} tokens along dim {entry.dim}, but it "
            f"got {tuple(value.shape)}"
        )
    order = tokens.order(value.device)
    if order is not None:
        # As many rows before and behind as the other ranks have, and then all where they belong.
        first = sum(tokens.state.splits[: tokens.group.rank()])
        return _between_zeros(value, entry.dim, first, total).index_select(entry.dim, order[1])
    return _between_zeros(value, entry.dim, tokens.own_range(tokens.state.splits).start, total)


def _between_zeros(value: Tensor, dim: int, start: int, total: int) -> Tensor:
    """[..., n at dim, ...] → [..., total at dim, ...], with the rows from `start` on."""
    shape = list(value.shape)
    shape[dim] = start
    before = value.new_zeros(shape)
    shape[dim] = total - start - value.size(dim)
    return torch.cat([before, value, value.new_zeros(shape)], dim)
