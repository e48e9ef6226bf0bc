"""Muon: a step of a matrix is an orthogonal one, and AdamW steps all else.

An averaged gradient M [m, k] = U S Vᵀ becomes U Vᵀ, whose singular values are all 1: what a matrix rarely sees counts
as much as what it always sees. Five Newton-Schulz iterations in bf16 come near it, and take the whole matrix. So ranks
that hold shards of matrices exchange them, each gets one whole, and sends the shards of its U Vᵀ back. With 2 ranks
and matrices A, B of one shape:

    rank 0: A₀ B₀ ──►│                  │──► A₀ A₁ ──► U Vᵀ of A ──►│                  │──► steps of A₀ B₀
    rank 1: A₁ B₁ ──►│ one all-to-all   │──► B₀ B₁ ──► U Vᵀ of B ──►│ one all-to-all   │──► steps of A₁ B₁

That is 2 bytes a number each way, and every matrix is iterated once in its group of ranks. Steps are as long as AdamW's
are in the root of the mean square, so that learning rates and decay are AdamW's.

Source: Jordan et al., Muon (https://kellerjordan.github.io/posts/muon/); Liu et al., Muon is Scalable for LLM Training
(arXiv:2502.16982), for the length of steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _zeropower_via_newtonschulz,
)

from opensora_accel.communications import all_to_all_packed
from opensora_accel.training.optim import ShardwiseAdamW, shard_of

_MOMENTUM = 0.95
# Of AdamW's steps, by Liu et al.
_STEP_SIZE = 0.2


def hidden_matrices(blocks: Iterable[nn.Module]) -> list[Tensor]:
    """The trained matrices of the blocks' linear layers: not embeddings, projections of patches and answers, tables."""
    layers = (layer for block in blocks for layer in block.modules() if isinstance(layer, nn.Linear))
    return list(dict.fromkeys(layer.weight for layer in layers if layer.weight.requires_grad))


class Muon(ShardwiseAdamW):
    """Steps the parameters of groups with `"is_matrix": True` by Muon, and those of the others by AdamW.

    The average of a matrix's gradients has the name of AdamW's, `exp_avg`, and is saved as that.

    Communication: of matrices that are sharded, two all-to-alls for each N of one shape, over their N ranks.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        # Of a group that is stepped here the lists stay empty, and AdamW has nothing to do.
        if not group["is_matrix"]:
            return super()._init_group(group, *lists)
        self._step_matrices(group)
        return False

    def _step_matrices(self, group: dict[str, Any]) -> None:
        rate, decay = float(group["lr"]), group["weight_decay"]
        for matrices in _exchanged_together(group["params"]):
            averaged = torch.stack([self._averaged(matrix) for matrix in matrices])
            length = rate * _STEP_SIZE * math.sqrt(max(matrices[0].shape))
            for matrix, direction in zip(matrices, _orthogonal(averaged, matrices[0]), strict=True):
                shard_of(matrix).mul_(1 - rate * decay).add_(direction, alpha=-length)

    def _averaged(self, matrix: Tensor) -> Tensor:
        """This rank's shard of what is made orthogonal, in bf16: the average, a step ahead (Nesterov)."""
        assert matrix.grad is not None
        state, gradient = self.state[matrix], shard_of(matrix.grad)
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(matrix, requires_grad=False)
        average = shard_of(state["exp_avg"]).lerp_(gradient, 1 - _MOMENTUM)
        return gradient.lerp(average, _MOMENTUM).bfloat16()


def _exchanged_together(matrices: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices that have gradients, by their shapes, as many at once as ranks have shards of them."""
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for matrix in matrices:
        if matrix.grad is not None:
            alike[tuple(matrix.shape), matrix.dtype, _sharded_dim(matrix)].append(matrix)
    for each in alike.values():
        count = max(1, len(_sizes_of_shards(each[0])))
        yield from (each[begin : begin + count] for begin in range(0, len(each), count))


def _sharded_dim(matrix: Tensor) -> tuple[int, int] | None:
    """The dim of a matrix that is sharded, and that of its mesh; None where this rank holds all of it."""
    if isinstance(matrix, DTensor):
        for mesh_dim, placement in enumerate(matrix.placements):
            if isinstance(placement, Shard) and matrix.device_mesh.size(mesh_dim) > 1:
                return placement.dim, mesh_dim
    return None


def _sizes_of_shards(matrix: Tensor) -> Sequence[int]:
    """Of each rank, along the dim that is sharded: cut as by `torch.chunk`, so that the last ones may be empty."""
    if (sharded := _sharded_dim(matrix)) is None:
        return ()
    dim, mesh_dim = sharded
    num_ranks = matrix.device_mesh.size(mesh_dim)  # type: ignore[attr-defined]
    size = -(-matrix.size(dim) // num_ranks)
    return [max(0, min(size, matrix.size(dim) - rank * size)) for rank in range(num_ranks)]


def _orthogonal(averaged: Tensor, like: Tensor) -> Tensor:
    """Shards [n, m/N, k] of n matrices → the shards of their U Vᵀ, in bf16."""
    if (sharded := _sharded_dim(like)) is None:
        return _newton_schulz(averaged)
    assert isinstance(like, DTensor)
    (dim, mesh_dim), sizes = sharded, _sizes_of_shards(like)
    group = like.device_mesh.get_group(mesh_dim)
    counts = [len(each) for each in torch.arange(len(averaged)).tensor_split(len(sizes))]
    (whole,) = all_to_all_packed([averaged], group, 0, 1 + dim, splits=[sizes])
    whole = _newton_schulz(whole)
    (shards,) = all_to_all_packed([whole], group, 1 + dim, 0, splits=[counts], scatter_splits=[sizes])
    return shards


def _newton_schulz(matrices: Tensor) -> Tensor:
    coefficients = DEFAULT_A, DEFAULT_B, DEFAULT_C
    made = [_zeropower_via_newtonschulz(each, coefficients, DEFAULT_NS_STEPS, EPS) for each in matrices]
    return torch.stack(made) if made else matrices
