"""Hands whatever holds tensors to another rank: lists, tuples and dicts of them, and of plain values.

    rank 0 has (a, {"text": b})        rank 1 has (c, {"text": d})        passed on by 1 place of 2 ranks:
    rank 0 gets (c, {"text": d})       rank 1 gets (a, {"text": b})

Tensors travel as bytes from device to device, and keep their order in memory; the rest is pickled.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from opensora_accel.communications import gather_objects


@dataclass(frozen=True)
class _Sent:
    """Stands for a tensor, which travels by itself."""

    index: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool
    requires_grad: bool

    def received(self, flat: Tensor) -> Tensor:
        """The tensor of its bytes."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=flat.device)
        tensor.copy_(flat.view(self.dtype).view(self.shape))
        return (tensor.cpu() if self.is_on_host else tensor).requires_grad_(self.requires_grad)


class Parcel:
    """What can be passed on.

    Args:
        value: nested; its tensors have to stay as they are.
        plain: goes with it, and has no tensors.
        device: from where the ranks' backend sends.

    Raises:
        Exception: whatever pickle raises for what it cannot pickle.
    """

    def __init__(self, value: Any, plain: Any, device: torch.device):
        self.content, self._device, self._tensors = (value, plain), device, list[Tensor]()
        self._text = pickle.dumps((tree_map_only(Tensor, self._take, value), plain))

    def _take(self, tensor: Tensor) -> _Sent:
        self._tensors.append(tensor.detach())
        # Numbers that lie in no memory of their own, as expanded ones, are laid out one after the other.
        stride = torch.empty_like(tensor, device="meta").stride()
        on_host, index = tensor.device.type == "cpu", len(self._tensors) - 1
        return _Sent(index, tensor.shape, stride, tensor.dtype, on_host, tensor.requires_grad)

    def pass_on(self, group: dist.ProcessGroup | None, shift: int) -> tuple[Any, Any]:
        """What the rank `shift` places after this one has, while this one's goes as far the other way.

        Communication: an object all-gather over the group, and the tensors to one rank and from one.
        """
        if group is None or group.size() == 1:
            return self.content
        ranks, place, size = dist.get_process_group_ranks(group), group.rank(), group.size()
        to, source = ranks[(place - shift) % size], ranks[(place + shift) % size]
        # Each rank gets all texts, of which it reads one: they are small.
        text = gather_objects(self._text, group)[(place + shift) % size]
        skeleton, plain = pickle.loads(text)
        theirs = [leaf for leaf in tree_leaves(skeleton) if isinstance(leaf, _Sent)]
        sent = [each.to(self._device).contiguous().view(-1).view(torch.uint8) for each in self._tensors]
        flat = [
            torch.empty(each.shape.numel() * each.dtype.itemsize, dtype=torch.uint8, device=self._device)
            for each in theirs
        ]
        operations = [dist.P2POp(dist.isend, each, to, group) for each in sent if each.numel()]
        operations += [dist.P2POp(dist.irecv, each, source, group) for each in flat if each.numel()]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        tensors = {each.index: each.received(flat[number]) for number, each in enumerate(theirs)}
        return tree_map_only(_Sent, lambda each: tensors[each.index], skeleton), plain
