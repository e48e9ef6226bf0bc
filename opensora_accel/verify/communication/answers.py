"""What the other ranks would have answered, for a backend that sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Finished(dist.Work):
    """A work whose future holds what was communicated, as DDP's reducer asks for it; the fake backend's holds None."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(tensors)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


Exchanges = dict[tuple[int, ...], list[dict[int, Tensor]]]
"""For each group: what every rank has given to its first, second, … all-gather of whole numbers."""


class Answers(TorchDispatchMode):
    """What the fake backend leaves out: results of all-reduces, and sizes that other ranks tell.

    It fills an all-gather with this rank's own data. Where that is whole numbers, and `known` says what every rank of
    the group gives, they are filled in.
    """

    def __init__(self, known: Exchanges | None = None) -> None:
        super().__init__()
        self.given: dict[tuple[int, ...], list[Tensor]] = {}
        self._known = known or {}
        self._works: list[_Finished] = []  # C++ keeps its half only

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.allreduce_.default:
            self._works.append(_Finished(list(args[0])))
            return result[0], self._works[-1].boxed()
        if func is torch.ops.c10d._allgather_base_.default:
            self._exchange(list(args[0].view(-1).chunk(len(_ranks(args[2])))), args[1], _ranks(args[2]))
        elif func is torch.ops.c10d.allgather_.default:
            self._exchange(args[0][0], args[1][0], _ranks(args[2]))
        return result

    def _exchange(self, outputs: Sequence[Tensor], given: Tensor, ranks: tuple[int, ...]) -> None:
        if given.dtype != torch.int64 or isinstance(given, FakeTensor):
            return
        mine = self.given.setdefault(ranks, [])
        mine.append(given.clone())
        rounds = self._known.get(ranks, [])
        answers = rounds[len(mine) - 1] if len(mine) <= len(rounds) else {}
        for rank, output in zip(ranks, outputs, strict=True):
            if rank in answers and answers[rank].numel() == output.numel():
                output.copy_(answers[rank].view(output.shape))


def _ranks(boxed_group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed_group)))


def gathered(given: Mapping[int, Mapping[tuple[int, ...], Sequence[Tensor]]]) -> Exchanges:
    """What all recorded ranks have given, by group and in order."""
    found: Exchanges = {}
    for rank, groups in given.items():
        for ranks, tensors in groups.items():
            rounds = found.setdefault(ranks, [])
            rounds.extend({} for _ in range(len(tensors) - len(rounds)))
            for number, tensor in enumerate(tensors):
                rounds[number][rank] = tensor
    return found


def are_answered(found: Exchanges, known: Exchanges) -> bool:
    """Whether a recording with `known` was answered as its ranks would answer each other."""
    for ranks, rounds in found.items():
        before = known.get(ranks, [])
        for number, tensors in enumerate(rounds):
            told = before[number] if number < len(before) else {}
            first, *others = tensors.values()
            if all(torch.equal(first, other) for other in others):
                continue  # its own data is the right answer
            if any(rank not in told or not torch.equal(told[rank], each) for rank, each in tensors.items()):
                return False
    return True
