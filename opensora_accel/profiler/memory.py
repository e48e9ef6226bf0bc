"""What fills the memory over a step: live bytes by kind, and at the peak by block.

A checkpointed block of a model on a CPU, whose input is x and whose MLP has a hidden layer h:

    forward      x is made                            other
                 autograd keeps x for later           block inputs
                 h is made, and freed                 other
    backward     the recomputation makes h again      recomputation
                 the weight's gradient is there       gradients

A sample is taken just before live bytes begin to fall, or to rise again. Whose the storages are is looked up when the
next operator runs: by then a gradient is a parameter's, and a buffer has been sent.

On a CPU, and on fake tensors, every operator passes through Python, which is dear: that is for a study of single steps.
On a GPU the allocator counts, and samples are taken where the step comes to another place (`places`).
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from opensora_accel.arguments import tensors_in
from opensora_accel.observe import (
    DETAILED_KINDS,
    ELSEWHERE,
    GATHERED,
    KINDS,
    NAMESPACES,
    OFFLOAD,
    OUTSIDE,
    DeviceBytes,
    Owner,
    Owners,
    Place,
    Places,
    arena_bytes,
    arena_memory,
    class_of,
    find_blocks,
)
from opensora_accel.profiler.records import MemorySample

# A change of live bytes by this share of the peak is seen in a picture.
_SEEN = 1 / 256
# Operators whose arguments and results are buffers that are sent and received.
_COMMUNICATION = (*NAMESPACES, "fsdp")

# Words of a heading stand below each other, so that a row of all kinds has 100 columns.
_HEADS = {
    "parameters": "param- eters",
    "gathered parameters": "gathered param- eters",
    "optimizer state": "opti- mizer state",
    "block inputs on the host": "block inputs on host",
    "recomputation": "recom- putation",
    "communication": "commu- nication",
}
_NOBODY = Owner("other", ELSEWHERE)
_ON_HOST = Owner("block inputs on the host", OFFLOAD)

Holdings = Mapping[Owner, int]


@dataclass(frozen=True)
class MemoryPeak:
    """The most live bytes of the device at once."""

    sample: MemorySample
    # By block, then by kind (`owners.DETAILED_KINDS`). What waits on the host is a kind of its own there too.
    by_block: Mapping[str, Mapping[str, int]]
    place: Place
    # Optimizer steps that were done before it.
    step: int
    # What is other, by what the operators that have made it are for; "" where that is not known.
    other_by_class: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Moment:
    """When a sample was taken: time, place, and optimizer steps that were done."""

    time_s: float
    place: Place
    step: int


class MemoryCounter(Protocol):
    """Counts the memory of one device, by owner, while it is entered."""

    @property
    def now_bytes(self) -> int:
        """What the device has in use."""

    def holdings(self) -> Holdings:
        """Bytes by owner, whose sum without those on the host is `now_bytes`."""

    def sample(self, holdings: Holdings, time_s: float) -> MemorySample:
        """The same by kind, of this time."""

    @property
    def largest(self) -> Mapping[str, int]:
        """The largest single storage that was made in each block, where that is known."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> None: ...


class MemoryTimeline:
    """Within it, follows what fills the memory of this rank's device. Print it for the peak as a table.

    Args:
        model, optimizer: whose tensors are named; the optimizer's state counts as other without it.
        blocks: the repeated blocks, by default the items of the model's outermost lists of modules.
        clock: gives the time of a sample, in seconds.
        moved: called with two places, where the step comes from the one to the other, and what is held there.

    Raises:
        ValueError: one of `blocks` is no part of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        blocks: Sequence[nn.Module] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        moved: Callable[[Place, Place, Holdings], None] | None = None,
    ):
        named = find_blocks(model, blocks)
        self.owners = Owners(model, named, optimizer)
        self.places = Places(model, named, optimizer, moved=self._moved, saved=self.owners.add_inputs)
        self._call_moved, self._clock, self._entered = moved, clock, ExitStack()
        self._samples: list[MemorySample] = []
        self._peak: MemoryPeak | None = None
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        self.counter: MemoryCounter
        if device.type == "cuda":
            self.counter = AllocatorCounter(self.owners, device)
        else:
            self.counter = StorageCounter(self.owners, self.places, self._keep, clock)

    @property
    def samples(self) -> list[MemorySample]:
        """In the order of time: wherever live bytes began to fall, or to rise, by what is seen in a picture."""
        samples = [*self._samples]
        if self._peak is not None and self._peak.sample not in samples:
            samples.append(self._peak.sample)
        return sorted(samples, key=lambda sample: sample.time_s)

    @property
    def peak(self) -> MemoryPeak:
        """The most at once since it was entered.

        Raises:
            ValueError: it has not been entered.
        """
        if self._peak is None:
            raise ValueError("nothing was counted yet; run a step within the timeline: with timeline: ...")
        return self._peak

    def __enter__(self) -> MemoryTimeline:
        with ExitStack() as entered:
            entered.enter_context(self.places)
            entered.enter_context(self.counter)
            self._record()
            entered.callback(self._record)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)

    def _moved(self, before: Place, now: Place) -> None:
        if isinstance(self.counter, AllocatorCounter):
            highest = self.counter.risen_to()
            if highest is not None:
                self._keep(self.counter.holdings(highest), Moment(self._clock(), before, self.places.step))
            self._record()
        if self._call_moved is not None:
            self._call_moved(before, now, self.counter.holdings())

    def _record(self) -> None:
        moment = Moment(self._clock(), self.places.now, self.places.step)
        self._keep(self.counter.holdings(), moment)

    def _keep(self, holdings: Holdings, moment: Moment) -> None:
        sample = self.counter.sample(holdings, moment.time_s)
        highest = 0 if self._peak is None else self._peak.sample.device_bytes
        if sample.device_bytes > highest or self._peak is None:
            by_block = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
            others = collections.Counter[str]()
            for owner, size_bytes in holdings.items():
                if size_bytes:
                    by_block[owner.block][owner.kind] += size_bytes
                    others[owner.made_by] += size_bytes if owner.kind == "other" else 0
            named = {block: dict(kinds) for block, kinds in by_block.items()}
            self._peak = MemoryPeak(sample, named, moment.place, moment.step, dict(+others))
        last = self._samples[-1] if self._samples else None
        if last is None or _differ(last, sample, _SEEN * max(highest, 1)):
            self._samples.append(sample)

    def __str__(self) -> str:
        peak = self.peak
        where = f"{peak.place}, in step {peak.step + 1}" if peak.place != OUTSIDE else str(peak.place)
        unit, num_bytes = unit_of(peak.sample.device_bytes)
        lines = [f"peak of {peak.sample.device_bytes / num_bytes:,.1f} {unit}: {where}"]
        if peak.sample.reserved_bytes is not None:
            lines.append(
                f"the allocator has {peak.sample.reserved_bytes / num_bytes:,.1f} {unit} of the device, of which "
                f"{(peak.sample.fragmented_bytes or 0) / num_bytes:,.1f} {unit} lie free between pieces in use"
            )
        return "\n".join([*lines, *table_of(peak), *_of_other(peak)])


def _of_other(peak: MemoryPeak) -> list[str]:
    """A line that says what the other bytes are, if that is known."""
    unit, num_bytes = unit_of(peak.sample.device_bytes)
    found = [
        f"{size / num_bytes:,.1f} {unit} by {name}"
        for name, size in sorted(peak.other_by_class.items(), key=lambda item: -item[1])
        if name and size >= 0.05 * num_bytes
    ]
    return [f"other was made {', '.join(found)}"] if found else []


def _differ(one: MemorySample, other: MemorySample, seen_bytes: float) -> bool:
    return any(abs(one.bytes_by_kind[kind] - other.bytes_by_kind[kind]) > seen_bytes for kind in KINDS)


def unit_of(size_bytes: float) -> tuple[str, int]:
    """The unit in which a size, and what makes it up, are easy to read, and its bytes."""
    for name, num_bytes in (("GiB", 2**30), ("MiB", 2**20)):
        if size_bytes >= 10 * num_bytes:
            return name, num_bytes
    return "KiB", 2**10


def table_of(peak: MemoryPeak, most_rows: int = 20) -> list[str]:
    """Lines of a table: a row for each block, largest first, a column for each kind that any of them holds."""
    kinds = [kind for kind in DETAILED_KINDS if any(kind in row for row in peak.by_block.values())]
    rows = sorted(peak.by_block.items(), key=lambda item: -sum(item[1].values()))
    total = collections.Counter[str]()
    for _name, row in rows:
        total.update(row)
    if len(rows) > most_rows:
        rest = collections.Counter[str]()
        for _name, row in rows[most_rows - 1 :]:
            rest.update(row)
        rows = [*rows[: most_rows - 1], (f"{len(rows) - most_rows + 1} others", rest)]
    unit, num_bytes = unit_of(peak.sample.device_bytes)
    heads = [_HEADS.get(kind, kind).split() for kind in kinds]
    height = max(map(len, heads), default=1)
    lines = [
        f"{unit if line == height - 1 else '':19}"
        + "".join(f"{([''] * height + head)[-height:][line]:>9}" for head in heads)
        for line in range(height)
    ]
    for name, row in [*rows, ("all", total)]:
        cut = name if len(name) <= 19 else "…" + name[-18:]
        lines.append(f"{cut:19}" + "".join(f"{row.get(kind, 0) / num_bytes:>9,.1f}" for kind in kinds))
    return lines


def by_kind(holdings: Holdings) -> dict[str, int]:
    """Bytes of each of `records.KINDS`."""
    sizes = dict.fromkeys(KINDS, 0)
    for owner, size_bytes in holdings.items():
        sizes["parameters" if owner.kind == GATHERED else owner.kind] += size_bytes
    return sizes


class StorageCounter(DeviceBytes):
    """Live bytes by counting storages. What is in host memory for offload is no part of them, and listed beside.

    Args:
        turned: called with what was held, and when, for each time that live bytes began to fall or to rise.
    """

    def __init__(
        self,
        owners: Owners,
        places: Places,
        turned: Callable[[Holdings, Moment], None],
        clock: Callable[[], float],
    ):
        super().__init__()
        self._owners, self._places, self._turned, self._clock = owners, places, turned, clock
        # By address: what is known of a storage from when it was made, and who had it when that was last looked up.
        self._made: dict[int, Owner] = {}
        self._known: dict[int, Owner] = {}
        self.largest: dict[str, int] = {}
        self._makes, self._sends, self._class = True, False, ""
        self._direction = self._told_bytes = 0
        # Moments whose owners are not looked up yet, and storages that are gone since.
        self._waiting: list[_Waiting] = []
        self._gone: set[int] = set()

    def __enter__(self) -> StorageCounter:
        for memory in arena_memory():
            self.ignore(memory)
        self.count([tensor for tensor, _owner in self._owners.tensors()])
        self.count(self._owners.model.buffers())
        super().__enter__()
        return self

    def holdings(self) -> Holdings:
        """Bytes by owner."""
        self._look_up()
        return self._held(list(self._sizes.items()), self._made, self._known)

    def sample(self, holdings: Holdings, time_s: float) -> MemorySample:
        return MemorySample(time_s, by_kind(holdings))

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Looks up whose the storages of the last turn were."""
        if self._waiting:
            self._look_up()
        self._sends = func.namespace in _COMMUNICATION
        self._makes = not (self._sends or func.is_view or func._schema.is_mutable)
        self._class = class_of(func._schema.name.rpartition("::")[2])

    def after(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Counts what the operator has made, and notes what it sends."""
        super().after(func, args, kwargs, outputs)
        for tensor in tensors_in((args, kwargs, outputs)) if self._sends else ():
            address = tensor.untyped_storage()._cdata
            made = self._made.get(address)
            if made is not None and made.kind == "other":
                self._made[address] = Owner("communication", made.block)

    def is_made(self, address: int, kind: str, size_bytes: int) -> None:
        """It belongs to the block where the step is, as long as nobody holds it."""
        block = self._places.now.block or ELSEWHERE
        self._made[address] = Owner(kind, block, made_by=self._class if kind == "other" else "")
        # A bucket of DDP comes to light when a gradient is copied into it, and is nothing that a block computes.
        if self._makes:
            self.largest[block] = max(self.largest.get(block, 0), size_bytes)

    def _place(self) -> Place:
        return self._places.now

    def _forget(self, address: int) -> None:
        super()._forget(address)
        self._made.pop(address, None)
        self._known.pop(address, None)
        if self._waiting:
            self._gone.add(address)

    def _set(self, address: int, size_bytes: int) -> None:
        change = size_bytes - self._sizes.get(address, 0)
        if change * self._direction < 0:
            is_peak = self._direction > 0 and self.now_bytes >= self.peak_bytes
            if is_peak or abs(self.now_bytes - self._told_bytes) > _SEEN * self.peak_bytes:
                # A storage that goes calls this in the midst of `parameter.grad = None`, whose gradient must not be
                # looked at then. So all is copied here, and owners are asked for later.
                moment = Moment(self._clock(), self._places.now, self._places.step)
                copied = [*self._sizes.items()], self._made.copy(), self._known.copy()
                self._waiting.append(_Waiting(moment, *copied, arena_bytes()))
                self._told_bytes = self.now_bytes
        super()._set(address, size_bytes)
        if change:
            self._direction = change

    def _look_up(self) -> None:
        waiting, gone = self._waiting, self._gone
        self._waiting, self._gone = [], set()
        owners = {address: owned.owner for address, owned in self._owners.by_address().items()}
        for each in waiting:
            # Another storage may lie by now where one is gone.
            since = {address: owner for address, owner in owners.items() if address not in gone}
            held = self._held(each.sizes, each.made, each.known | since)
            self._turned({**held, _ON_HOST: each.arena_bytes}, each.moment)
        self._known = {address: owner for address, owner in owners.items() if address in self._sizes}

    def _held(
        self, sizes: Sequence[tuple[int, int]], made: Mapping[int, Owner], known: Mapping[int, Owner]
    ) -> dict[Owner, int]:
        by_owner = collections.Counter[Owner]()
        for address, size_bytes in sizes:
            by_owner[known.get(address) or made.get(address) or _NOBODY] += size_bytes
        by_owner[_ON_HOST] = arena_bytes()
        return dict(by_owner)


@dataclass(frozen=True)
class _Waiting:
    """A moment at which live bytes turned: by address, the size of every storage and what was known of it."""

    moment: Moment
    sizes: list[tuple[int, int]]
    made: dict[int, Owner]
    known: dict[int, Owner]
    arena_bytes: int


class AllocatorCounter:
    """What CUDA's allocator has in use. What has an owner is named, and all of the rest is other.

    Asking the allocator takes some ten microseconds and walking the tensors of a large model milliseconds, at each
    place that a step comes to. Between two places only the highest point is known, where it is higher than any before.
    It has not run on a GPU yet.
    """

    def __init__(self, owners: Owners, device: torch.device):
        self._owners, self._device = owners, device
        self.largest: dict[str, int] = {}
        self._highest = 0

    def __enter__(self) -> AllocatorCounter:
        self._highest = self._stats("allocated_bytes.all.peak")
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def _stats(self, name: str) -> int:
        # Without CUDA's context there are none.
        return int(torch.cuda.memory_stats(self._device).get(name, 0))

    @property
    def now_bytes(self) -> int:
        return self._stats("allocated_bytes.all.current")

    def risen_to(self) -> int | None:
        """The most that was in use at once, if that is more than when this was asked before."""
        highest = self._stats("allocated_bytes.all.peak")
        # Who resets the allocator's peak, as a trainer does between steps, makes it fall.
        is_higher, self._highest = highest > self._highest, highest
        return highest if is_higher else None

    def holdings(self, in_use_bytes: int | None = None) -> Holdings:
        """Bytes by owner, of what is in use now or of as many bytes as were in use before."""
        by_owner = collections.Counter[Owner]()
        for owned in self._owners.by_address().values():
            if owned.device == self._device:
                by_owner[owned.owner] += owned.size_bytes
        in_use_bytes = self.now_bytes if in_use_bytes is None else in_use_bytes
        # The allocator rounds up to 512 bytes, so it has no less in use than there is in tensors.
        by_owner[_NOBODY] = max(0, in_use_bytes - sum(by_owner.values()))
        by_owner[_ON_HOST] = arena_bytes()
        return by_owner

    def sample(self, holdings: Holdings, time_s: float) -> MemorySample:
        return MemorySample(
            time_s,
            by_kind(holdings),
            reserved_bytes=self._stats("reserved_bytes.all.current"),
            fragmented_bytes=self._stats("inactive_split_bytes.all.current"),
        )
