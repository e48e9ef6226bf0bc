"""Factorised attention: blocks along one dimension of a grid, then along the other, and the switch between.

Open-Sora's STDiT attends in turn over the places of a frame and over the frames of a place. A block needs the dimension
whole that it attends along, and may have the other one spread. With P = 3 ranks, 6 frames and 9 places:

    spatial block    needs all 9 places   each rank has 2 frames   [B, 2, 9, C]
    switch           one all-to-all       (attention.switch_sharded_dim)
    temporal block   needs all 6 frames   each rank has 3 places   [B, 6, 3, C]

A policy's function names, for each block, the layout of its tokens, `B (T S) C` as einops writes it, and the dimension
that is spread within it. The switch is made where two blocks disagree, and nowhere else.
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
from opensora_accel.communications import share_sizes, split_forward_gather_backward
from shardformer.spread import Spread, Tokens, mark_own


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


def read_sizes(spread: Spread, *sizes: tuple[str, str, int]) -> None:
    """Notes sizes of the grid that no block has.

    Args:
        sizes: each a dimension, a tensor among the arguments of the model's forward, and its dim of that size.

    Raises:
        ValueError: the model's forward lacks an argument.
    """

    def change(arguments: Arguments, _name: str) -> None:
        for dimension, argument, dim in sizes:
            spread.tokens.state.sizes[dimension] = value_at(arguments, argument).size(dim)

    spread.change_arguments("", " ".join(argument for _, argument, _ in sizes), change)


def spread_grid(
    spread: Spread,
    module: str,
    dimension: str,
    tokens: tuple[str, str],
    *,
    layouts: tuple[tuple[str, str], ...] = (),
    counts: tuple[tuple[str, str], ...] = (),
    may_be_empty: bool = True,
    lends_row: bool = False,
    leave: str | None = None,
) -> None:
    """Blocks run with `dimension` spread, and attend along another one, which they have whole.

    Whichever dimension is spread when a block is called, one all-to-all makes it `dimension`.

    Args:
        module: the path of the blocks.
        tokens: the argument that holds the tokens, and its layout; what the block returns has the same one.
        layouts: further arguments that may have `dimension`, each with its layout, and are split along it. One argument
            may have several layouts, of other numbers of dims.
        counts: integer arguments that are the size of a dimension, as (dimension, argument): they become this rank's.
        may_be_empty: whether the block's own code runs on a rank that has nothing of `dimension`. Otherwise fewer
            than ranks are refused.
        lends_row: the block treats every row of `dimension` alone, but cannot run on none. A rank without rows runs it
            on one row of zeros, which is dropped; so it takes its part in every collective and every gradient.
        leave: the dimension that is spread in what the block returns, where the model between the blocks needs that.

    Raises:
        ValueError: a pattern is no layout, there is no such module, or its forward lacks an argument.
    """
    grid = _Grid(
        spread.tokens,
        dimension,
        argument=tokens[0],
        layout=GridLayout.parse(tokens[1]),
        others=[(argument, GridLayout.parse(layout)) for argument, layout in layouts],
        counts=counts,
        may_be_empty=may_be_empty,
        lends_row=lends_row,
        leave=leave,
    )
    names = [tokens[0], *(argument for argument, _ in layouts), *(count for _, count in counts)]
    spread.change_arguments(module, " ".join(names), grid.enter)
    if leave is not None or lends_row:
        spread.change_output(module, grid.after)


def gather_grid(spread: Spread, module: str, layout: str) -> None:
    """What a module returns, in a layout, is joined along whichever dimension of the grid is spread.

    Raises:
        ValueError: the pattern is no layout, or there is no such module.
    """
    parsed, tokens = GridLayout.parse(layout), spread.tokens

    def change(output: Tensor, name: str) -> Tensor:
        what, dimension = f"{name}'s output", tokens.state.spread
        if dimension is None:
            raise ValueError(f"the policy gathers {what}, but no dimension of it is spread")
        unfolded = parsed.unfold(output, _local_sizes(output, parsed, tokens, what))
        dim = parsed.names.index(dimension)
        whole = tokens.gather(unfolded, dim, _shares(tokens, dimension), what)
        # What follows in this forward has whole grids again.
        tokens.state.spread = None
        return mark_own(parsed.fold(whole), False)

    spread.change_output(module, change)


@dataclass(frozen=True)
class _Grid:
    """What the hooks of `spread_grid` do; one for all its blocks, as what a forward changes is in `tokens`."""

    tokens: Tokens
    dimension: str
    argument: str
    layout: GridLayout
    others: list[tuple[str, GridLayout]]
    counts: tuple[tuple[str, str], ...]
    may_be_empty: bool
    lends_row: bool
    leave: str | None

    def enter(self, arguments: Arguments, name: str) -> None:
        """Changes a block's arguments."""
        self.tokens.check_known(name)
        what = f"{name}'s {self.argument}"
        # Counts come first: they give the sizes by which the layouts are read.
        for dimension, argument in self.counts:
            self.tokens.state.sizes[dimension] = value_at(arguments, argument)
        change_at(arguments, self.argument, lambda held: self._along(held, self.dimension, what))
        if self._lends_now():
            # A rank without rows runs the module on one row of zeros, so that it takes part in every collective.
            empty, dim = value_at(arguments, self.argument), self.layout.names.index(self.dimension)
            row = empty.new_zeros([1 if at == dim else size for at, size in enumerate(empty.shape)])
            # Joined to what has no rows, so that backward reaches the all-to-all that other ranks wait in.
            change_at(arguments, self.argument, lambda _: torch.cat([empty, row], dim))
        # In the table's order, and not a set's: backward gathers their gradients in it, alike on all ranks.
        for other in dict.fromkeys(other for other, _ in self.others):
            change_at(arguments, other, partial(self._own, argument=other, what=f"{name}'s {other}"))
        for dimension, count in self.counts:
            if dimension == self.dimension:
                change_at(arguments, count, lambda _: _own_size(self.tokens, self.dimension))

    def after(self, output: Tensor, name: str) -> Tensor:
        """output: in the layout of the block's tokens → without a row that was lent, with `leave` spread."""
        if self._lends_now():
            output = output.narrow(self.layout.names.index(self.dimension), 0, 0)
        return output if self.leave is None else self._along(output, self.leave, f"{name}'s output")

    def _lends_now(self) -> bool:
        return self.lends_row and _own_size(self.tokens, self.dimension) == 0

    def _along(self, tensor: Tensor, dimension: str, what: str) -> Tensor:
        """The same tokens with `dimension` spread over the ranks, whatever was spread before."""
        tokens, layout = self.tokens, self.layout
        state, group = tokens.state, tokens.group
        if state.spread == dimension:
            return tensor
        unfolded = layout.unfold(tensor, _local_sizes(tensor, layout, tokens, what))
        if not self.may_be_empty:
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

    def _own(self, tensor: Tensor, argument: str, what: str) -> Tensor:
        """This rank's part of a tensor that is whole."""
        dimension, tokens = self.dimension, self.tokens
        # One argument may have several layouts, as a mask with and without queries; the number of dims decides.
        layouts = [layout for name, layout in self.others if name == argument]
        layout = next((each for each in layouts if len(each.groups) == tensor.dim()), layouts[0])
        sizes = layout.sizes(tensor, tokens.state.sizes, what)
        if dimension not in sizes:
            return tensor

        def make() -> Tensor:
            unfolded, dim = layout.unfold(tensor, sizes), layout.names.index(dimension)
            splits = _shares(tokens, dimension)
            return layout.fold(
                split_forward_gather_backward(unfolded, tokens.group, dim, "down", splits=splits)
            )

        return tokens.once(tensor, (layout.pattern, dimension), make)


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
