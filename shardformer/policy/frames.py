"""Shares of whole frames, for policies of models with layers that need the grid of a frame.

These are convolutions over space, and attention frame by frame. With P = 3 ranks, 5 frames of 6 tokens:

    spread_by_frames    shares become whole frames: 12, 12 and 6 of the 30 tokens, in place of 10 each
    split_frames        a tensor with a row for every frame: the rows of frames 0 1, of 2 3 and of 4
    count_own_frames    the number 5 becomes 2, 2 and 1
    gather_frames       the rows of 2, 2 and 1 frames become those of 5 again
"""

from __future__ import annotations

import math

from torch import Tensor

from opensora_accel.arguments import Arguments, change_at, value_at
from shardformer.paths import names_several
from shardformer.spread import Spread


def spread_by_frames(
    spread: Spread, argument: str, dim: int, *, patch: int = 1, may_be_empty: bool = True
) -> None:
    """Shares become whole frames, as many as a tensor of the whole clip has.

    The model itself gets the tensor, whose hook runs before those of its modules. So a table that splits the model's
    own arguments, `SplitInput("", …)`, is too early for it.

    Args:
        argument: of the model's forward, [..., T at dim, ...].
        patch: so many of its frames make one frame of tokens.
        may_be_empty: whether the model's own code runs on a rank without frames. Otherwise fewer frames than ranks are
            refused.

    Raises:
        ValueError: the model's forward has no such argument.
    """

    def change(arguments: Arguments, name: str) -> None:
        state = spread.tokens.state
        if state.splits is not None:
            raise ValueError(f"the policy splits an argument of {name} before it knows the frames")
        state.num_frames = value_at(arguments, argument).size(dim) // patch
        state.may_be_empty = may_be_empty

    spread.change_arguments("", argument, change)


def split_frames(spread: Spread, module: str, argument: str, dim: int = 1) -> None:
    """An argument with a row for every frame along `dim` becomes the rows of this rank's frames; None stays None.

    Tokens that are kept as a grid, [B, T, H, W, C], may be what is split first: they show themselves how many a
    frame has.

    Raises:
        ValueError: there is no such module, or its forward lacks the argument.
    """
    tokens, is_shared = spread.tokens, names_several(module)

    def split(tensor: Tensor, what: str) -> Tensor:
        """[..., T at dim, ...] → [..., T/P at dim, ...]."""
        tokens.check_known(what)
        total, places = tensor.size(dim), tensor.shape[dim % tensor.dim() + 1 : -1]
        if tokens.state.splits is None and places:
            tokens.state.unit = math.prod(places)
            tokens.share(total * tokens.state.unit, what)
        num_tokens = tokens.total()
        if total * tokens.state.unit != num_tokens:
            raise ValueError(
                f"the policy splits {what} by frames, but {total} are not those of "
                + (f"{num_tokens} tokens" if num_tokens else "tokens that are not split yet")
            )
        splits = tokens.state.frames
        assert splits is not None
        return tokens.split(tensor, dim, splits, is_shared)

    def change(arguments: Arguments, name: str) -> None:
        change_at(arguments, argument, lambda tensor: split(tensor, f"{name}'s {argument}"))

    spread.change_arguments(module, argument, change)


def count_own_frames(spread: Spread, module: str, argument: str) -> None:
    """The clip's number of frames becomes this rank's.

    Raises:
        ValueError: there is no such module, or its forward lacks the argument.
    """
    tokens = spread.tokens

    def change(arguments: Arguments, name: str) -> None:
        tokens.check_known(f"{name}'s {argument}")
        frames = tokens.state.frames
        if frames is not None:
            change_at(arguments, argument, lambda _: frames[tokens.group.rank()])

    spread.change_arguments(module, argument, change)


def gather_frames(spread: Spread, module: str, dim: int = 1) -> None:
    """What a module returns is joined over the ranks: [..., T/P at dim, ...] → [..., T at dim, ...].

    Raises:
        ValueError: there is no such module.
    """
    tokens = spread.tokens

    def change(output: Tensor, name: str) -> Tensor:
        return tokens.gather(output, dim, tokens.state.frames, f"{name}'s output")

    spread.change_output(module, change)
