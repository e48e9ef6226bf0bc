"""Ring exchange: every rank passes its tensor on."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.checks import check_agreement, check_dim, check_group
from opensora_accel.communications.sizes import splits_of_local
from opensora_accel.communications.transfer import Handle
from opensora_accel.communications.waiting import waiting


class _RingExchange:
    """Sends to the rank `shift` further on, receives from the one `shift` before."""

    def __init__(self, group: dist.ProcessGroup, shift: int, dim: int, splits: tuple[int, ...]):
        self.group, self.shift, self.dim, self.splits = group, shift, dim, splits

    def inverse(self) -> _RingExchange:
        moved = tuple(self.splits[(rank - self.shift) % len(self.splits)] for rank in range(len(self.splits)))
        return _RingExchange(self.group, -self.shift, self.dim, moved)

    def start(self, tensors: Sequence[Tensor]) -> None:
        (tensor,) = tensors
        rank, num_ranks = self.group.rank(), self.group.size()
        source, target = (rank - self.shift) % num_ranks, (rank + self.shift) % num_ranks
        shape = list(tensor.shape)
        shape[self.dim] = self.splits[source]
        self._sent, self._received = tensor.contiguous(), tensor.new_empty(shape)
        to, of = (dist.get_global_rank(self.group, each) for each in (target, source))
        with waiting("ring_exchange", self.group):
            self._work = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self._sent, to, self.group),
                    dist.P2POp(dist.irecv, self._received, of, self.group),
                ]
            )

    def finish(self) -> tuple[Tensor, ...]:
        with waiting("ring_exchange", self.group):
            for work in self._work:
                work.wait()
        received = self._received
        del self._sent, self._received, self._work
        return (received,)


def ring_exchange(
    input_: Tensor,
    process_group: dist.ProcessGroup | None,
    *,
    shift: int = 1,
    dim: int | None = None,
    splits: Sequence[int] | None = None,
) -> Tensor:
    """The tensor of the rank `shift` places before this one, while this one's goes `shift` places on.

    Args:
        input_: one shape on every rank, but for `dim`.
        shift: 1 is the next rank; negative shifts go the other way.
        dim: the dimension whose size differs between ranks; None when none does.
        splits: every rank's size of `dim`, where the caller knows them; otherwise they are exchanged.

    Communication: one send and one receive of the tensor's bytes. Gradient: the exchange by −shift, unscaled.
    """
    return ring_exchange_async(input_, process_group, shift=shift, dim=dim, splits=splits).wait()


def ring_exchange_async(
    input_: Tensor,
    process_group: dist.ProcessGroup | None,
    *,
    shift: int = 1,
    dim: int | None = None,
    splits: Sequence[int] | None = None,
) -> Handle:
    """`ring_exchange` in flight; `.wait()` gives the received tensor."""
    group = check_group(process_group)
    if dim is None and splits is not None:
        raise ValueError(f"splits={tuple(splits)} need the dim that they belong to; pass dim=")
    if input_.dim() == 0:
        raise ValueError("ring_exchange needs a tensor of at least one dim; use input_.reshape(1)")
    at = 0 if dim is None else check_dim("dim", dim, input_)
    check_agreement("ring_exchange", input_, group, None if dim is None else at, f"shift={shift}")
    sizes = (input_.size(0),) * group.size() if dim is None else splits_of_local(input_, splits, group, at)
    if shift % group.size() == 0:
        return Handle(None, [input_])
    return Handle(_RingExchange(group, shift, at, sizes), [input_])
