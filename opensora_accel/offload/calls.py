"""What the engine keeps about one checkpointed call: the tickets of what it moved, and the call before it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opensora_accel.offload.layout import Layout
from opensora_accel.offload.measure import CallTimes


@dataclass(eq=False)
class Ticket:
    """What was moved: where its bytes lie in the arena and how it looked."""

    host: Tensor
    """uint8 [size_bytes]"""
    layout: Layout
    device: torch.device
    version: int
    copied: Any = None
    """The copy out, until the compute queue has waited for it."""

    @property
    def size_bytes(self) -> int:
        return self.host.numel()


@dataclass(eq=False)
class Saved:
    """What autograd holds in place of a tensor. Tickets may be shared by calls, these are not."""

    ticket: Ticket
    call: Call
    index: int


@dataclass(frozen=True)
class Kept:
    """A tensor that stays on the device. Hooks switch off autograd's own check that it is unchanged."""

    tensor: Tensor
    version: int

    def tensor_unchanged(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that a checkpointed block needs for its recomputation "
                f"was changed in place: it is at version {self.tensor._version}, {self.version} was expected"
            )
        return self.tensor


@dataclass(frozen=True)
class Leaving:
    """A copy out that has not been waited for: its memory must not be used again before."""

    ticket: Ticket
    source: Tensor
    data: Tensor
    """The bytes that are copied: the source's own, or a compact copy of one with gaps."""


@dataclass
class Fetched:
    """Copies in of one call: memory by `Saved.index`, until autograd takes it."""

    device: torch.device
    pieces: dict[int, Tensor]
    arrived: Any
    waited: bool = False


@dataclass(eq=False)
class Call:
    """One checkpointed call. Autograd owns its tickets; this holds none of them."""

    previous: weakref.ref[Call] | None = None
    """The one that backward reaches next."""
    saved: list[weakref.ref[Saved]] = field(default_factory=list)
    leaving: list[Leaving] = field(default_factory=list)
    fetched: Fetched | None = None
    times: CallTimes | None = None
    is_open: bool = False
    """Its forward is running."""
    device: torch.device | None = None
    """Of all that it moved."""

    def check_unchanged(self) -> None:
        """Raises RuntimeError where the block wrote into what its recomputation starts from."""
        for leaving in self.leaving:
            if leaving.source._version != leaving.ticket.version:
                raise RuntimeError(
                    f"a checkpointed block changed a tensor of shape {list(leaving.source.shape)} in place that its "
                    "recomputation starts from; let it work on a copy (hidden = hidden + x, not hidden += x)"
                )

    def alive(self) -> list[Saved]:
        found = (reference() for reference in self.saved)
        return [saved for saved in found if saved is not None]
