"""Several samples in one row: clips of any length and size in one forward, without padding.

A batch pads its clips to the longest one. A row has one clip behind the other, and attention keeps them apart, at the
cost of each clip's own area. Two clips with captions of 77 and 12 tokens, for diffusers' Wan:

    shapes = [(5, 30, 52), (21, 60, 104)]                                # of latents (T, H, W)
    row = packing.to_row([short, long], patch=(1, 2, 2))                 # of [C, T, H, W] each
    time = packing.per_token([0.3, 0.9], shapes, patch=(1, 2, 2))
    told = packing.run_packed(model, hidden_states=shapes, encoder_hidden_states=[77, 12])
    with told: out = model(row, timestep=time, encoder_hidden_states=captions).sample
    short_out, long_out = packing.to_clips(out, shapes, patch=(1, 2, 2))

The model was sharded by `shardformer.shard(model, plan, packed=True)`, and captions are [1, 77 + 12, D]. Every rank
passes the whole row, as ever, and gets the whole output. What each sample gives, and every gradient, are those of calls
of their own (`pytest tests/shardformer/test_packing.py`). A stream's mask may be passed in the place of lengths:
`run_packed(model, hidden_states=AttentionSlices.block_causal(21, 1560))` makes a clip causal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from opensora_accel.attention import slices

__all__ = ["per_token", "run_packed", "to_clips", "to_row"]

# (T, H, W)
Shape = Sequence[int]

if TYPE_CHECKING:
    # Its number of tokens or its shape; and who sees whom in it, where that is not all of it.
    Sample = int | Shape | tuple[int | Shape, slices.AttentionSlices]


@contextmanager
def run_packed(
    model: nn.Module,
    *,
    balanced: bool = True,
    **streams: Sequence[Sample] | slices.AttentionSlices,
) -> Iterator[None]:
    """Within it the model's input is a row of several samples. It goes around the forward; backward may come later.

    Args:
        model: what `shardformer.shard(model, plan, packed=True)` returned.
        balanced: deals the tokens out in a ring, so that all ranks have as much to compute. Otherwise each has a run of
            the row, as without `run_packed`.
        streams: by the model's own arguments, of each sample the number of tokens; where the model has a grid, its
            shape (T, H, W) of latents. Either may stand in a pair with the sample's `AttentionSlices`, who sees whom in
            it. Or `AttentionSlices` of all of a stream's tokens, of one clip.

    Raises:
        ValueError: the model was not sharded so, its table has no such stream, a stream that the row has was left out,
            streams have other numbers of samples, a mask is of another number of tokens than its sample, or of a
            stream that does not attend to itself. In the forward: the row has another length, or the model passes a
            mask of its own.
    """
    from shardformer.engine import run_packed as run

    with run(model, balanced, streams):
        yield


def to_row(latents: Sequence[Tensor], patch: Shape) -> Tensor:
    """Clips of any shape as one of N patches behind each other, for a model whose input is a grid.

    Args:
        latents: each [C, T, H, W], in whole patches.
        patch: the model's patch size (t, h, w).

    Returns:
        [1, C, N · t, h, w]: a clip whose every frame, or every t of them, is one patch, in the order of its tokens.
    """
    parts = [_unfold(each, patch).flatten(1, 4) for each in latents]
    return torch.cat(parts, 1).unsqueeze(0)


def to_clips(row: Tensor, shapes: Sequence[Shape], patch: Shape) -> list[Tensor]:
    """What the model returned of a row, [1, C, N · t, h, w], as its clips [C, T, H, W] again."""
    t, h, w = patch
    counts = [prod(shape) // prod(patch) for shape in shapes]
    clips = []
    for part, (frames, height, width) in zip(
        row.squeeze(0).split([n * t for n in counts], 1), shapes, strict=True
    ):
        grid = part.unflatten(1, (frames // t, height // h, width // w, t))  # [C, T/t, H/h, W/w, t, h, w]
        clips.append(grid.permute(0, 1, 4, 2, 5, 3, 6).reshape(-1, frames, height, width))
    return clips


def per_token(values: Sequence[Tensor | float], shapes: Sequence[Shape], patch: Shape) -> Tensor:
    """A value for each sample, its time say, as one for each of its tokens.

    Args:
        values: of each sample one, one for each of its T/t frames of tokens, or one for each token, in any shape.
        shapes: of each sample (T, H, W).

    Returns:
        [1, N].

    Raises:
        ValueError: a sample's tokens are no multiple of its values.
    """
    parts = []
    for value, shape in zip(values, shapes, strict=True):
        flat, num_tokens = torch.as_tensor(value).reshape(-1), prod(shape) // prod(patch)
        if not len(flat) or num_tokens % len(flat):
            raise ValueError(f"a clip {tuple(shape)} of {num_tokens} tokens cannot have {len(flat)} values")
        parts.append(flat.repeat_interleave(num_tokens // len(flat)))
    return torch.cat(parts).unsqueeze(0)


def _unfold(clip: Tensor, patch: Shape) -> Tensor:
    """[C, T, H, W] → [C, T/t, H/h, W/w, t, h, w].

    Raises:
        ValueError: it is not of whole patches.
    """
    if clip.dim() != 4 or any(size % side for size, side in zip(clip.shape[1:], patch, strict=True)):
        raise ValueError(
            f"a clip [C, T, H, W] is of whole patches of {tuple(patch)}; got {tuple(clip.shape)}"
        )
    t, h, w = patch
    # [C, T/t, t, H/h, h, W/w, w]
    grid = clip.unflatten(3, (-1, w)).unflatten(2, (-1, h)).unflatten(1, (-1, t))
    return grid.permute(0, 1, 3, 5, 2, 4, 6)
