"""What the engine keeps: tickets of what it moved, what autograd holds in a tensor's place, one record for a call.

Autograd owns the tickets. A call refers weakly to what it saved, so that bytes are free when the graph is.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opensora_accel.offload.choose import Measurement, Moment
from opensora_accel.offload.packing import TensorMeta


@dataclass
class OffloadCounters:
    """What happened to the marked tensors since the last `reset_counters()`."""

    moved: int = 0
    moved_bytes: int = 0
    shared: int = 0  # marked again while already in the arena: one copy serves all
    kept: int = 0  # stayed on the device: the arena was full, or the tensor is of a kind that cannot move
    kept_bytes: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    prefetched: int = 0  # calls whose copies in started while another block computed
    overflows: int = 0  # calls fetched into memory of their own, because both slots were in use
    in_use_bytes: int = 0
    peak_bytes: int = 0


@dataclass(eq=False)
class Ticket:
    """The only handle to what was moved. Its bytes in the arena are free when nothing refers to it any more."""

    host: Tensor  # uint8 [size_bytes]
    meta: TensorMeta
    device: torch.device
    version: int
    copied: Any = None  # the event of the copy out, until the compute queue has waited for it


@dataclass(eq=False)
class Saved:
    """What autograd holds in place of a tensor that moved. Calls may share a ticket; each has a `Saved` of its own."""

    ticket: Ticket
    call: Call
    index: int  # its place in `call.saved`


@dataclass(frozen=True)
class Kept:
    """A tensor that stays on the device. Hooks switch off autograd's own check that it is unchanged."""

    tensor: Tensor
    version: int

    def tensor_unchanged(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place since.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that a checkpointed block needs for its recomputation "
                f"was changed in place: it is at version {self.tensor._version}, {self.version} was expected"
            )
        return self.tensor


@dataclass(eq=False)
class Call:
    """One checkpointed call."""

    previous: weakref.ref[Call] | None = None  # the call before, which backward reaches next
    is_open: bool = False  # whether its forward is running
    measurement: Measurement | None = None
    block: int = 0  # which one, where it is measured
    device: torch.device | None = None  # of all that it moves
    saved: list[weakref.ref[Saved]] = field(default_factory=list)
    # Copies out that compute has not waited for, with their tensor and its bytes, which must live until then.
    leaving: list[tuple[Ticket, Tensor, Tensor]] = field(default_factory=list)
    # uint8 [size_bytes] on the device by `Saved.index`, until autograd takes it.
    fetched: dict[int, Tensor] = field(default_factory=dict)
    arrived: Any = None  # the event of the copies in, until the compute queue has waited for it

    def note(self, moment: Moment) -> None:
        """Marks a moment of the pass that is measured, where this call is a part of it."""
        if self.measurement is not None:
            self.measurement.note(moment, self.block)

    def alive(self) -> list[Saved]:
        """What autograd still holds of this call."""
        referents = (reference() for reference in self.saved)
        return [saved for saved in referents if saved is not None]
