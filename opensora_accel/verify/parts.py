"""Gradients put together that lie on several ranks: a stage's, an expert's, a slice of a Megatron layer.

A rank holds all of a parameter, rows of it along one dim, or none. Rows are found by the weights' own values, so that
a packed projection, of which each rank holds slices of q, k and v, is put together right.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opensora_accel.verify.shapes import PART_AXIS_NAMES, MeshShape


@dataclass(frozen=True)
class Part:
    """What one rank holds of a parameter's gradient."""

    gradient: Tensor | None
    """None where it holds nothing."""
    dim: int = 0
    rows: Tensor | None = None
    """Along `dim`, where it holds not all of them."""


def part_of(gradient: Tensor, weight: Tensor | None, whole: Tensor) -> Part | None:
    """The rank's part, of a parameter that is `whole`; `weight`: what the rank has of it. None where it is no part."""
    if gradient.shape == whole.shape:
        return Part(gradient)
    if weight is None or weight.shape != gradient.shape or weight.dim() != whole.dim():
        return None
    other = [dim for dim in range(whole.dim()) if weight.size(dim) != whole.size(dim)]
    if len(other) != 1:
        return None
    mine, all_ = (each.movedim(other[0], 0).reshape(each.size(other[0]), -1) for each in (weight, whole))
    is_same = (mine[:, None] == all_).all(-1)
    if not bool((is_same.sum(1) == 1).all()):
        return None
    return Part(gradient, other[0], is_same.int().argmax(1))


def put_together(shape: MeshShape, parts: Sequence[Part], whole: Tensor) -> tuple[Tensor, ...] | None:
    """Every rank's gradient, whole: with the parts of the ranks that differ along as few axes as need be.

    None where parts overlap, or leave something out. What a rank has not at all, other data ranks do not stand for.
    """
    axes = [axis for axis, degree in shape.degrees if degree > 1]
    if any(part.gradient is None for part in parts):
        axes = [axis for axis in axes if axis not in shape.data_axes or axis in PART_AXIS_NAMES]
    for count in range(len(axes) + 1):
        for some in itertools.combinations(axes, count):
            found: dict[int, Tensor] = {}
            for ranks in shape.groups(some):
                together = _of_group([parts[rank] for rank in ranks], whole)
                if together is None:
                    break
                found |= dict(zip(ranks, together, strict=True))
            else:
                return tuple(found[rank] for rank in range(shape.world_size))
    return None


def _of_group(parts: Sequence[Part], whole: Tensor) -> list[Tensor] | None:
    complete = [part.gradient for part in parts if part.gradient is not None and part.rows is None]
    if complete:
        return (
            [complete[0] if part.gradient is None else part.gradient for part in parts]
            if all(part.rows is None for part in parts)
            else None
        )
    slices = [part for part in parts if part.rows is not None]
    if not slices or len({part.dim for part in slices}) > 1:
        return None
    dim = slices[0].dim
    rows = torch.cat([part.rows for part in slices if part.rows is not None])
    if rows.sort().values.tolist() != list(range(whole.size(dim))):
        return None
    found = torch.empty_like(whole)
    for part in slices:
        assert part.rows is not None and part.gradient is not None
        found.index_copy_(dim, part.rows, part.gradient)
    return [found] * len(parts)
