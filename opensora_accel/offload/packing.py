"""A strided tensor as plain bytes and back: the same values, the same strides, however it lies in memory.

Three tensors of shape [2, 3], and the elements that travel:

    strides (3, 1)   side by side                   6 elements: a view of the tensor's own memory
    strides (0, 1)   a row, broadcast to two        3 elements: a view of the row
    strides (6, 2)   every second column of [2, 6]  6 elements, copied together: what lies between them stays

The strides come back too. Kernels choose the order of their sums by them, so a recomputation that met other strides
would round otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


@dataclass(frozen=True)
class TensorMeta:
    """How a tensor lies in memory, and which of its elements travel."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    # Then its distinct elements travel; otherwise all that lies between its first and its last.
    has_gaps: bool
    num_elements: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """tensor: of any shape, in plain strided memory. Broadcast dims count once, overlapping windows too."""
        distinct = _without_repeats(tensor)
        span = 1 + sum((n - 1) * s for n, s in zip(distinct.shape, distinct.stride(), strict=True))
        span = span if tensor.numel() else 0
        has_gaps = span > distinct.numel()
        num_elements = distinct.numel() if has_gaps else span
        return cls(tensor.shape, tensor.stride(), tensor.dtype, has_gaps, num_elements)

    @property
    def size_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def to_bytes(tensor: Tensor, meta: TensorMeta) -> Tensor:
    """uint8 [size_bytes] of a tensor: a view of its own memory, except of one with gaps."""
    tensor = tensor.detach()
    if meta.has_gaps:
        return _without_repeats(tensor).contiguous().view(-1).view(torch.uint8)
    return tensor.as_strided((meta.num_elements,), (1,)).view(torch.uint8)


def from_bytes(memory: Tensor, meta: TensorMeta) -> Tensor:
    """The tensor, within `memory` (uint8 [size_bytes]); one with gaps is spread over memory of its own."""
    elements = memory.view(meta.dtype)
    if meta.has_gaps:
        lengths = zip(meta.shape, meta.stride, strict=True)
        distinct = [1 if stride == 0 and length > 1 else length for length, stride in lengths]
        spread = torch.empty_strided(distinct, meta.stride, dtype=meta.dtype, device=memory.device)
        elements = spread.copy_(elements.view(distinct))
    # `.data` has a version counter of its own: a block that writes into one input must not invalidate its neighbour.
    return elements.as_strided(meta.shape, meta.stride).data


def _without_repeats(tensor: Tensor) -> Tensor:
    """A view that has size 1 along every dim that is repeated with stride 0."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is of no subclass with a behaviour of its own."""
    return type(tensor) in (Tensor, torch.nn.Parameter) or is_fake(tensor)


def can_move(tensor: Tensor) -> bool:
    """Whether a tensor is plain strided memory: not sparse, not quantized, not lazily conjugated or negated."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return is_plain(tensor) and tensor.layout is torch.strided and not is_lazy and not tensor.is_quantized


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two Python objects of one tensor: autograd may hand its hooks a new object."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())
