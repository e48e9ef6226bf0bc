"""Factorised attention: blocks along one dimension of a grid, then along the other, and the switch between.

Open-Sora's STDiT attends in turn over the places of a frame and over the frames of a place. A block needs the dimension
whole that it attends along, and may have the other one spread. With P = 3 ranks, 6 frames and 9 places:

    spatial block    needs all 9 places   each rank has 2 frames   [B, 2, 9, C]
    switch           one all-to-all       (attention.switch_sharded_dim)
    temporal block   needs all 6 frames   each rank has 3 places   [B, 6, 3, C]

A policy names, for each block, the layout of its tokens, `B (T S) C`, and the dimension that is spread within it. The
switch is made where two blocks disagree, and nowhere else.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from opensora_accel.arguments import Arguments, change_at, value_at
from opensora_accel.attention import switch_sharded_dim
from opensora_accel.communications import (
    gather_forward_split_backward,
    share_sizes,
    split_forward_gather_backward,
)
from shardformer.policy import GatherGrid, Grid, Policy
from shardformer.spread import Spread
from shardformer.tokens import Tokens, mark_own


@dataclass(frozen=True)
class GridLayout:
    """Which dimensions of a grid each dim of a tensor holds, outer first, as einops writes it: `B (T S) C`."""

    pattern: str
    groups: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, pattern: str) -> GridLayout:
        """The layout of a pattern such as "B (T S) C".

        Raises:
            ValueError: the pattern is no layout.
        """
        found = re.findall(r"\(([^()]*)\)|(\w+)", pattern)
        groups = tuple(tuple(inner.split()) if inner else (single,) for inner, single in found)
        names = [name for group in groups for name in group]
        if not names or len(set(names)) != len(names) or re.sub(r"\([^()]*\)|\w+|\s", "", pattern):
            raise ValueError(f'{pattern!r} is no layout; write one like "B (T S) C", every name once')
        return cls(pattern, groups)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group)

    def sizes(self, tensor: Tensor, known: dict[str, int], what: str) -> dict[str, int]:
        """The size of every dimension of a tensor in this layout; at most one a group may be unknown.

        Raises:
            ValueError: the tensor does not fit the layout and the sizes that are known.
        """
        if tensor.dim() != len(self.groups):
            raise ValueError(f'{what} is {tuple(tensor.shape)}, which is not "{self.pattern}"')
        sizes: dict[str, int] = {}
        for size, group in zip(tensor.shape, self.groups, strict=True):
            unknown = [name for name in group if name not in known]
            rest = math.prod(known[name] for name in group if name in known)
            if len(unknown) > 1 or (size != rest if not unknown else rest == 0 or size % rest):
                raise ValueError(
                    f'{what} is {tuple(tensor.shape)}, which is not "{self.pattern}" with '
                    + ", ".join(f"{name} = {known[name]}" for name in self.names if name in known)
                )
            # At most one name of a group is unknown, and its size is what the others leave.
            sizes |= {name: known.get(name, size // rest if unknown else size) for name in group}
        return sizes

    def unfold(self, tensor: Tensor, sizes: dict[str, int]) -> Tensor:
        """A dim for every name: [B, T·S, C] → [B, T, S, C] in the layout "B (T S) C"."""
        return tensor.reshape([sizes[name] for name in self.names])

    def fold(self, tensor: Tensor) -> Tensor:
        """The inverse of `unfold`: [B, T, S, C] → [B, T·S, C]."""
        sizes = dict(zip(self.names, tensor.shape, strict=True))
        return tensor.reshape([math.prod(sizes[name] for name in group) for group in self.groups])


def spread_grids(spread: Spread, policy: Policy) -> None:
    """Puts on what the policy says of grids: their sizes, the blocks that attend along a dimension, the way out."""

    def read_sizes(arguments: Arguments, _name: str) -> None:
        for dimension, argument, dim in policy.grid_sizes:
            spread.tokens.state.sizes[dimension] = value_at(arguments, argument).size(dim)

    if policy.grid_sizes:
        spread.change_arguments("", " ".join(argument for _, argument, _ in policy.grid_sizes), read_sizes)
    for entry in policy.grids:
        # One for all blocks of the entry; what changes from forward to forward is in `tokens`.
        _Grid(entry, spread.tokens).attach(spread)
    for gather in policy.gather_grids:
        _gather(spread, gather)


class _Grid:
    def __init__(self, entry: Grid, tokens: Tokens):
        self.entry, self.tokens = entry, tokens
        self.layout = GridLayout.parse(entry.tokens[1])
        self.others = [(argument, GridLayout.parse(layout)) for argument, layout in entry.layouts]

    def attach(self, spread: Spread) -> None:
        entry = self.entry
        others = (*(other for other, _ in self.others), *(count for _, count in entry.counts))
        spread.change_arguments(entry.module, " ".join((entry.tokens[0], *others)), self._enter)
        if entry.leave is not None or entry.lends_row:
            spread.change_output(entry.module, self._leave)

    def _leave(self, output: Tensor, name: str) -> Tensor:
        """output: in the layout of the entry's tokens."""
        entry, tokens = self.entry, self.tokens
        if entry.lends_row and _own_size(tokens, entry.spread) == 0:
            # The row that was lent is given back.
            output = output.narrow(self.layout.names.index(entry.spread), 0, 0)
        if entry.leave is None:
            return output
        what = f"{name}'s output"
        return _spread_along(output, self.layout, entry.leave, tokens, what, entry.may_be_empty)

    def _enter(self, arguments: Arguments, name: str) -> None:
        self.tokens.check_known(name)
        state, spread = self.tokens.state, self.entry.spread
        # Counts come first: they tell the sizes by which the layouts are read.
        for dimension, argument in self.entry.counts:
            state.sizes[dimension] = value_at(arguments, argument)
        argument, _ = self.entry.tokens
        what, may_be_empty = f"{name}'s {argument}", self.entry.may_be_empty
        change_at(
            arguments,
            argument,
            lambda held: _spread_along(held, self.layout, spread, self.tokens, what, may_be_empty),
        )
        if self.entry.lends_row and _own_size(self.tokens, spread) == 0:
            # A rank without rows runs the module on one row of zeros, so that it takes part in every collective.
            empty, dim = value_at(arguments, argument), self.layout.names.index(spread)
            row = empty.new_zeros([1 if at == dim else size for at, size in enumerate(empty.shape)])
            # Joined to what has no rows, so that backward reaches the all-to-all that other ranks wait in.
            change_at(arguments, argument, lambda _: torch.cat([empty, row], dim))
        # In the table's order, and not a set's: backward gathers their gradients in it, alike on all ranks.
        for other in dict.fromkeys(other for other, _ in self.others):
            change_at(arguments, other, partial(self._own, argument=other, what=f"{name}'s {other}"))
        for dimension, count in self.entry.counts:
            if dimension == spread:
                change_at(arguments, count, lambda _: _own_size(self.tokens, spread))

    def _own(self, tensor: Tensor, argument: str, what: str) -> Tensor:
        """This rank's part of a tensor that is whole."""
        spread, tokens = self.entry.spread, self.tokens
        # One argument may have several layouts, as a mask with and without queries; the number of dims tells.
        layouts = [layout for name, layout in self.others if name == argument]
        layout = next((each for each in layouts if len(each.groups) == tensor.dim()), layouts[0])
        sizes = layout.sizes(tensor, tokens.state.sizes, what)
        if spread not in sizes:
            return tensor

        def make() -> Tensor:
            unfolded, dim = layout.unfold(tensor, sizes), layout.names.index(spread)
            splits = _shares(tokens, spread)
            return layout.fold(
                split_forward_gather_backward(unfolded, tokens.group, dim, "down", splits=splits)
            )

        return tokens.once(tensor, (layout.pattern, spread), make)


def _shares(tokens: Tokens, dimension: str) -> tuple[int, ...]:
    return share_sizes(tokens.state.sizes[dimension], tokens.group.size())


def _own_size(tokens: Tokens, dimension: str) -> int:
    return _shares(tokens, dimension)[tokens.group.rank()]


def _local_sizes(tensor: Tensor, layout: GridLayout, tokens: Tokens, what: str) -> dict[str, int]:
    """Sizes of a tensor whose dimension `state.spread` is spread; whole sizes are noted as they are met."""
    state, known = tokens.state, dict(tokens.state.sizes)
    if state.spread is not None:
        known[state.spread] = _own_size(tokens, state.spread)
    sizes = layout.sizes(tensor, {name: known[name] for name in layout.names if name in known}, what)
    state.sizes = sizes | state.sizes  # which has the whole size of what is spread
    return sizes


def _spread_along(
    tensor: Tensor, layout: GridLayout, dimension: str, tokens: Tokens, what: str, may_be_empty: bool
) -> Tensor:
    """The same tokens with `dimension` spread over the ranks, whatever was spread before."""
    state, group = tokens.state, tokens.group
    if state.spread == dimension:
        return tensor
    unfolded = layout.unfold(tensor, _local_sizes(tensor, layout, tokens, what))
    if not may_be_empty:
        tokens.check_all_have_some(state.sizes[dimension], dimension, what)
    to_dim = layout.names.index(dimension)
    if state.spread is None:
        splits = _shares(tokens, dimension)
        unfolded = split_forward_gather_backward(unfolded, group, to_dim, "down", splits=splits)
    else:
        # Each rank has a share already, along the other dimension: one all-to-all turns it.
        from_dim, splits = layout.names.index(state.spread), _shares(tokens, state.spread)
        unfolded = switch_sharded_dim(unfolded, group, from_dim=from_dim, to_dim=to_dim, splits=splits)
    state.spread = dimension
    return layout.fold(unfolded)


def _gather(spread: Spread, entry: GatherGrid) -> None:
    layout, tokens = GridLayout.parse(entry.layout), spread.tokens

    def change(output: Tensor, name: str) -> Tensor:
        """output: in the entry's layout → the same with the spread dimension whole."""
        what, dimension = f"{name}'s output", tokens.state.spread
        if dimension is None:
            raise ValueError(f"the policy gathers {what}, but no dimension of it is spread")
        unfolded = layout.unfold(output, _local_sizes(output, layout, tokens, what))
        whole = gather_forward_split_backward(
            unfolded, tokens.group, layout.names.index(dimension), "up", splits=_shares(tokens, dimension)
        )
        # What follows in this forward has whole grids again.
        tokens.state.spread = None
        return mark_own(layout.fold(whole), False)

    spread.change_output(entry.module, change)
