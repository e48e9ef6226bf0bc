"""What one forward and backward sends, and what it keeps in between."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from opensora_accel.profiler.memory import LiveBytes
from opensora_accel.verify.communication.record import Call, Recorder


@dataclass
class Traffic:
    """Of one rank. Sizes that ranks tell each other (int64) are counted apart from data."""

    collectives: int = 0
    sends: int = 0
    barriers: int = 0
    size_exchanges: int = 0
    sent_bytes: int = 0
    uncounted: list[str] = field(default_factory=list)
    """Operations whose bytes this counter does not know."""


class SentBytes(Recorder):
    """Counts every c10d call on this rank: what is in it that another rank gets."""

    @property
    def traffic(self) -> Traffic:
        found = Traffic()
        for call in self.calls:
            _count(found, call)
        return found


def _count(traffic: Traffic, call: Call) -> None:
    if call.kind == "recv":
        return
    if call.kind == "barrier":
        traffic.barriers += 1
    elif call.kind == "unknown":
        traffic.collectives += 1
        traffic.uncounted.append(call.operator)
    elif call.dtype == "int64":
        traffic.size_exchanges += 1
    else:
        traffic.sent_bytes += call.sent_bytes
        if call.kind == "send":
            traffic.sends += 1
        else:
            traffic.collectives += 1


class KeptBytes(LiveBytes):
    """Live storages, also those inside of tensor subclasses."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _has_subclass(types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def _has_subclass(types: Sequence[type]) -> bool:
    """A DTensor's own operations take it apart; the mode then sees what is done to the parts."""
    return any(cls is not Tensor for cls in types)


def bytes_kept(forward: Callable[..., Tensor], inputs: Sequence[Tensor]) -> int:
    """Bytes alive for backward once q, k, v and the output are forgotten by everybody but the graph."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with KeptBytes() as live:
        # As a projection makes them: nobody but the graph holds them once the forward has returned.
        output = forward(*(leaf.clone() for leaf in leaves))
        node = output.grad_fn
        assert node is not None, "the output needs no gradient"
        del output
        gc.collect()
        size_bytes = live.now_bytes
        del node
    return size_bytes
