"""Sequence parallelism: what a policy says of tokens, put on a model. One function for each kind of entry.

A table for a small DiT on P = 3 ranks, with 7 tokens:

    split_inputs    the first block's input     rank 0 goes on with tokens 0 1 2, rank 1 with 3 4, rank 2 with 5 6
    self_attention  every block's attention     its kernel call becomes ulysses_attention over the shares
    gather_outputs  the output layer            every rank has all 7 tokens again, as the caller expects

The first split shows how the tokens lie (`tokens.Tokens`); everything else that is split, counted or gathered in the
same forward follows it.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.arguments import Arguments, change_at, value_at
from opensora_accel.plan import Plan
from shardformer.engine.attentions import redirect_attentions
from shardformer.engine.forwards import follow_forward
from shardformer.engine.packed import (
    attend_to_whole_keys,
    tell_samples_apart,
)
from shardformer.engine.positions import keep_positions
from shardformer.engine.whole_sequences import exchange_heads
from shardformer.paths import names_several
from shardformer.policy import GatherOutput, Policy, SplitInput, SplitOutput
from shardformer.spread import Spread, Tokens, mark_own


def spread_tokens(model: nn.Module, plan: Plan, policy: Policy, tokens: Tokens, undo: ExitStack) -> None:
    """Puts on all that the policy says of tokens.

    Hooks of a module run in the order in which they are put on. The policy's functions stand between splits and
    gathers: they see a module's arguments split, as a number of a rank's tokens has to be counted, and its output not
    yet gathered.

    Raises:
        ValueError: the table does not fit the model, or diffusers' own parallelism is on: tokens would be split
        twice.
    """
    for name, module in model.named_modules():
        for attribute in ("_parallel_config", "_cp_shard_fn"):
            if getattr(module, attribute, None) is not None:
                raise ValueError(
                    f"{name or type(model).__name__} is parallel already (its {attribute} is set, as by "
                    "enable_parallelism); make the model anew and leave that out"
                )
    spread = Spread(model, tokens, undo)
    tokens.ring_size = 1 if policy.whole_sequences else plan.ring
    tell_samples_apart(spread, policy)
    # Refusals go on first, so that they raise before anything is split.
    for argument, reason in policy.refuses:
        refuse_input(spread, argument, reason)
    if policy.arguments:
        refuse_unknown_inputs(spread, policy)
    for split in policy.split_inputs:
        split_input(spread, split)
    for splits in policy.split_outputs:
        split_output(spread, splits)
    for function in policy.functions:
        function(spread)
    for gather in policy.gather_outputs:
        gather_output(spread, gather)
    keep_positions(model, policy, tokens, undo)
    redirect_attentions(model, plan, policy, tokens, undo)
    exchange_heads(spread, policy)
    attend_to_whole_keys(spread, policy)
    follow_forward(spread)


def split_input(spread: Spread, entry: SplitInput) -> None:
    """An argument becomes this rank's share of it."""

    def change(arguments: Arguments, name: str) -> None:
        what = f"{name}'s {entry.argument}"
        change_at(arguments, entry.argument, lambda value: _split_all(value, entry, spread.tokens, what))

    spread.change_arguments(entry.module, entry.argument, change)


def split_output(spread: Spread, entry: SplitOutput) -> None:
    """What a module returns becomes this rank's share of it."""

    def change(output: Any, name: str) -> Any:
        what = f"{name}'s output"
        if not entry.indices:
            return _split_all(output, entry, spread.tokens, what)
        indices = [_index(index, output, what) for index in entry.indices]
        return tuple(
            _split_all(item, entry, spread.tokens, f"{what} {index}") if index in indices else item
            for index, item in enumerate(output)
        )

    spread.change_output(entry.module, change)


def gather_output(spread: Spread, entry: GatherOutput) -> None:
    """What a module returns is joined over the ranks."""
    tokens = spread.tokens

    def gather(output: Tensor, what: str) -> Tensor:
        """[..., S/P at dim, ...] → [..., S at dim, ...], with text before or behind it if the entry says so."""
        splits, text = tokens.state.splits, []
        if entry.text is not None and splits is not None:
            num_own = splits[tokens.group.rank()]
            num_text = output.size(entry.dim) - num_own
            if num_text < 0:
                raise ValueError(
                    f"{what} has {output.size(entry.dim)} tokens, fewer than this rank's {num_own}"
                )
            sizes = [num_text, num_own] if entry.text == "first" else [num_own, num_text]
            text = list(output.split(sizes, entry.dim))
            output = text.pop(1 if entry.text == "first" else 0)
        elif entry.text is not None:
            tokens.check_known(what)
        # The text, which is the same on every rank, has the same gradient on every rank, and the average over them
        # leaves it as it is.
        output = tokens.gather(output, entry.dim, splits, what)
        tokens.state.have_ended = entry.ends
        if text:
            output = torch.cat([*text, output] if entry.text == "first" else [output, *text], entry.dim)
        return mark_own(output, False)

    def change(output: Any, name: str) -> Any:
        what = f"{name}'s output"
        if entry.index is None:
            return gather(output, what)
        index = _index(entry.index, output, what)
        return tuple(gather(item, what) if i == index else item for i, item in enumerate(output))

    spread.change_output(entry.module, change)


def refuse_input(spread: Spread, argument: str, reason: str) -> None:
    """An argument of the model that cannot be split must stay None or False."""

    def change(arguments: Arguments, name: str) -> None:
        value = value_at(arguments, argument)
        if value is not None and value is not False:
            raise ValueError(f"{name}'s {argument} cannot be split over ranks: {reason}")

    spread.change_arguments("", argument, change)


def refuse_unknown_inputs(spread: Spread, policy: Policy) -> None:
    """Refuses, where they are used, arguments that the policy was not made for."""
    parameters = inspect.signature(spread.model.forward).parameters
    known = {*policy.arguments.split()}
    known |= {name for name, p in parameters.items() if p.kind == p.VAR_POSITIONAL}

    def check(arguments: Arguments, model: str) -> None:
        for name, value in arguments.items():
            if name not in known and value is not None and value is not False:
                raise ValueError(
                    f"{model}'s {name} cannot be split over ranks: the policy for {policy.models[0]} "
                    "was made for a model without that argument; pass None, or write a policy that says what becomes "
                    "of it (docs/policies.md)"
                )

    spread.change_arguments("", "", check)


def _split_all(value: Any, entry: SplitInput | SplitOutput, tokens: Tokens, what: str) -> Any:
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        return type(value)([_split_all(item, entry, tokens, what) for item in value])
    if isinstance(value, dict):
        return {name: _split_all(item, entry, tokens, what) for name, item in value.items()}
    if not isinstance(value, Tensor):
        raise ValueError(f"the policy splits {what}, which is no tensor but a {type(value).__name__}")
    if entry.ndim is not None and value.dim() == entry.ndim - 1:
        return value  # it has no dim of tokens this time
    if entry.ndim not in (None, value.dim()) or not -value.dim() <= entry.dim < value.dim():
        raise ValueError(
            f"the policy splits dim {entry.dim} of {what}"
            + (f" where it has {entry.ndim} dims" if entry.ndim is not None else "")
            + f", but it is {tuple(value.shape)}"
        )
    return _split_one(value, entry, tokens, what)


def _split_one(tensor: Tensor, entry: SplitInput | SplitOutput, tokens: Tokens, what: str) -> Tensor:
    """This rank's share of [..., S at dim, ...], where S counts tokens, or text and video."""
    total, known = tensor.size(entry.dim), tokens.state.splits
    is_shared = names_several(entry.module)  # by many blocks; what one module gets is not kept for another
    if entry.text is not None or total == 1:
        # Its share follows from tokens that were split before it.
        tokens.check_known(what)
    if entry.text is None:
        if total == 1 and known is not None and sum(known) != 1:
            return tensor  # it is broadcast over the tokens
        return tokens.split(tensor, entry.dim, tokens.share(total, what), is_shared)
    if known is None:
        raise ValueError(
            f"{what} holds text and video tokens, and how many of either is not known yet: let the policy split "
            "something of the video alone before it"
        )
    # Both lie along one dim: what is more than the video is text.
    num_text = total - sum(known)
    if num_text < 0:
        raise ValueError(f"{what} has {total} tokens, fewer than the {sum(known)} of the video alone")

    def make() -> Tensor:
        """The text is whole on every rank, and its gradient is what passed through this one."""
        sizes = [num_text, sum(known)] if entry.text == "first" else [sum(known), num_text]
        parts = list(tensor.split(sizes, entry.dim))
        at = 1 if entry.text == "first" else 0
        parts[at] = tokens.own_rows(parts[at], entry.dim)
        return torch.cat(parts, entry.dim)

    return tokens.once(tensor, (entry.dim, known, entry.text), make) if is_shared else mark_own(make())


def _index(index: int, value: Any, what: str) -> int:
    """Counted from the first item, also where the policy counts from the last."""
    if not isinstance(value, (tuple, list)) or not -len(value) <= index < len(value):
        kind = f"{len(value)} items" if isinstance(value, (tuple, list)) else type(value).__name__
        raise ValueError(f"the policy names item {index} of {what}, which is {kind}")
    return index % len(value)
