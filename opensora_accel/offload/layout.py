"""A strided tensor as plain bytes and back, with its strides, however it lies in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


@dataclass(frozen=True)
class Layout:
    """How a tensor lay, and how its bytes are taken.

    Recomputation must meet the strides that the forward met: kernels choose their order of sums by them.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    has_gaps: bool
    """Then only its distinct elements are taken; otherwise all that lies between its first and its last."""
    num_elements: int

    @property
    def size_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def layout_of(tensor: Tensor) -> Layout:
    """Broadcast dims (stride 0) count once, overlapping windows too."""
    distinct = _once(tensor)
    span = 1 + sum((n - 1) * s for n, s in zip(distinct.shape, distinct.stride(), strict=True))
    span = span if tensor.numel() else 0
    has_gaps = span > distinct.numel()
    return Layout(
        tensor.shape, tensor.stride(), tensor.dtype, has_gaps, distinct.numel() if has_gaps else span
    )


def to_bytes(tensor: Tensor, layout: Layout) -> Tensor:
    """uint8 [size_bytes]: a view of the tensor's own memory, except of one with gaps."""
    tensor = tensor.detach()
    if layout.has_gaps:
        return _once(tensor).contiguous().view(-1).view(torch.uint8)
    return tensor.as_strided((layout.num_elements,), (1,)).view(torch.uint8)


def from_bytes(memory: Tensor, layout: Layout) -> Tensor:
    """The tensor, in `memory` (uint8 [size_bytes]) itself; one with gaps is spread over memory of its own."""
    elements = memory.view(layout.dtype)
    if layout.has_gaps:
        expanded = [s == 0 and n > 1 for n, s in zip(layout.shape, layout.stride, strict=True)]
        shape = [1 if once else n for n, once in zip(layout.shape, expanded, strict=True)]
        spread = torch.empty_strided(shape, layout.stride, dtype=layout.dtype, device=memory.device)
        tensor = spread.copy_(elements.view(shape)).as_strided(layout.shape, layout.stride)
    else:
        tensor = elements.as_strided(layout.shape, layout.stride)
    # A version counter of its own: a block that writes into one input must not invalidate its neighbour in memory.
    return tensor.data


def is_plain(tensor: Tensor) -> bool:
    """Of no subclass with a behaviour of its own."""
    return type(tensor) in (Tensor, torch.nn.Parameter) or is_fake(tensor)


def can_move(tensor: Tensor) -> bool:
    """Plain strided memory: no subclass, not sparse, no lazily conjugated or negated values."""
    return (
        is_plain(tensor)
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
    )


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two Python objects of one tensor: autograd may hand hooks a new object."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    storage = tensor.untyped_storage()._cdata
    lies = (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return (*lies, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _once(tensor: Tensor) -> Tensor:
    """Without the elements that a broadcast dim repeats."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
