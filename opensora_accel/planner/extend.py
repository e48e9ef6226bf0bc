"""A step of many blocks from a recorded step of few: what a block in the middle does is repeated.

Recorded with blocks 0 to 4 of one kind, of which 2 and 3 did exactly the same in forward and in backward. The step of
7 blocks does what 2 did two times more, and goes on:

    forward    0  1  2  [2  2]  3  4        backward   4  3  [2  2]  2  1  0        optimizer  0  1  2  [2  2]  3  4

An operation carries along the storages that are made and freed while it runs. So live bytes follow: forward adds what
a block keeps once more for each copy, and backward takes it away again. What is there before the step, parameters and
the optimizer's state, is known by block. Nothing is fitted, and what is not the same in two blocks is not repeated.

An operation waits for the last, or the last but one, ... operation of another stream. Told that way it holds for a
copy as well. DDP's buckets alone do not keep to blocks: they are filled anew from the gradients in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from opensora_accel.planner.allocator import Event, StepMemory
from opensora_accel.planner.recording import Change, StepRecorder
from opensora_accel.planner.trace import MemoryState, Operation, Stream

# What a rank keeps on the host where its shards live there.
_ON_HOST = ("parameters", "optimizer state")
# torch's DistributedDataParallel: bytes at which its first bucket is full, and each one after it.
_BUCKET_BYTES = (2**20, 25 * 2**20)
# A change of live bytes by this share of the peak is seen in a picture.
_SEEN = 1 / 256


class NotRepeated(Exception):
    """No two neighbouring blocks of a stretch do the same."""


@dataclass(frozen=True)
class Stretch:
    """Neighbouring blocks that are alike: how many of them were recorded, from which on, and how many there are."""

    first: int
    recorded: int
    true: int


@dataclass
class ExtendedStep:
    """A whole step."""

    operations: list[Operation] = field(default_factory=list)
    memory: list[MemoryState] = field(default_factory=list)
    host_bytes: int = 0
    largest_bytes: int = 0
    storages: StepMemory = field(default_factory=StepMemory)
    parameter_bytes: int = 0
    trained_bytes: int = 0


def extend(
    recorder: StepRecorder, names: Sequence[str], stretches: Sequence[Stretch], has_shards_on_host: bool
) -> ExtendedStep:
    """The step with as many blocks as there are.

    Args:
        names: of the recorded blocks, in the order in which they run.

    Raises:
        NotRepeated: more blocks must be recorded.
    """
    return _Extension(recorder, names, stretches, has_shards_on_host).result()


@dataclass(frozen=True)
class _Period:
    """Operations [start, end) from where a block begins to where the next one does, in forward or in backward."""

    start: int
    end: int
    is_forward: bool
    block: int


@dataclass(frozen=True)
class _Entry:
    """An operation of the whole step: the recorded one that it is, and the index of its block."""

    number: int
    block: int | None
    # Whether it belongs to a copy of the block that was recorded.
    is_copy: bool = False


class _Extension:
    def __init__(
        self,
        recorder: StepRecorder,
        names: Sequence[str],
        stretches: Sequence[Stretch],
        has_shards_on_host: bool,
    ):
        self.recorder, self.names, self.has_shards_on_host = recorder, names, has_shards_on_host
        self.is_bucket = set(recorder.buckets)
        self.index_of = {name: index for index, name in enumerate(names)}
        self.copies: dict[int, int] = {}
        for stretch in stretches:
            if stretch.true > stretch.recorded:
                self.copies[self._middle(stretch)] = stretch.true - stretch.recorded

    # ---- what was recorded

    @cached_property
    def periods(self) -> list[_Period]:
        periods: list[_Period] = []
        start, current = 0, (True, -1)
        marks = self.recorder.marks
        for number, mark in enumerate(marks):
            if mark.phase == "optimizer":
                here = (False, -1)
            elif mark.block:
                here = (mark.phase == "forward", self.index_of[mark.block])
            else:
                continue
            if here != current:
                if current[1] >= 0:
                    periods.append(_Period(start, number, *current))
                start, current = number, here
        if current[1] >= 0:
            periods.append(_Period(start, len(marks), *current))
        return periods

    @cached_property
    def period_at(self) -> dict[int, _Period]:
        """By number, for operations of a period that the block's neighbour follows: the last one has no such end."""
        by_operation: dict[int, _Period] = {}
        for period, following in zip(self.periods, self.periods[1:], strict=False):
            step = 1 if period.is_forward else -1
            if following.is_forward == period.is_forward and following.block == period.block + step:
                by_operation |= dict.fromkeys(range(period.start, period.end), period)
        return by_operation

    @cached_property
    def changes(self) -> Mapping[int, list[Change]]:
        """By the operation that is kept: what happens at a bucket's all-reduce is listed with the one before."""
        by_operation = defaultdict[int, list[Change]](list)
        for change in self.recorder.changes:
            by_operation[self._kept(change.operation)].append(change)
        return by_operation

    @cached_property
    def host_changes(self) -> Mapping[int, int]:
        by_operation = Counter[int]()
        for number, size_bytes in self.recorder.host_changes:
            by_operation[self._kept(number)] += size_bytes
        return by_operation

    @cached_property
    def gradients(self) -> Mapping[int, list[int]]:
        by_operation = defaultdict[int, list[int]](list)
        for gradient in self.recorder.gradients:
            by_operation[self._kept(gradient.operation)].append(gradient.size_bytes)
        return by_operation

    def _kept(self, number: int) -> int:
        while number in self.is_bucket:
            number -= 1
        return number

    @cached_property
    def waits(self) -> list[tuple[tuple[Stream, int], ...]]:
        """For each operation the streams that it waits for, and how many operations back on each (0 is the last)."""
        place: dict[int, int] = {}
        count = Counter[str]()
        waits = []
        for number, operation in enumerate(self.recorder.operations):
            relative = []
            for other in operation.after:
                if other not in self.is_bucket:
                    stream = self.recorder.operations[other].stream
                    relative.append((stream, count[stream] - 1 - place[other]))
            waits.append(tuple(sorted(relative)))
            if number not in self.is_bucket:
                place[number] = count[operation.stream]
                count[operation.stream] += 1
        return waits

    def _signature(self, number: int) -> Any:
        kinds = self.recorder.storages
        operation = replace(self.recorder.operations[number], after=(), block=None)
        changes = [(kinds[change.storage].kind, change.size_bytes) for change in self.changes.get(number, ())]
        rest = self.gradients.get(number, []), self.host_changes.get(number, 0), self.waits[number]
        return operation, changes, rest

    def _middle(self, stretch: Stretch) -> int:
        """A block that does the same as the next one, from as near to the stretch's middle as there is."""
        signatures = {
            (index, block): [
                self._signature(number)
                for number in range(period.start, period.end)
                if number not in self.is_bucket
            ]
            for block in range(stretch.first, stretch.first + stretch.recorded)
            for index, period in enumerate(each for each in self.periods if each.block == block)
            if period.start in self.period_at
        }
        num_passes = len([each for each in self.periods if each.block == stretch.first])
        centre = stretch.first + (stretch.recorded - 2) / 2
        candidates = range(stretch.first, stretch.first + stretch.recorded - 1)
        for block in sorted(candidates, key=lambda block: abs(block - centre)):
            one, other = (
                [signatures.get((index, each)) for index in range(num_passes)] for each in (block, block + 1)
            )
            if one == other and None not in one:
                return block
        raise NotRepeated(f"none of {stretch.recorded} blocks from number {stretch.first} on repeats itself")

    # ---- the whole step

    def _new_index(self, block: int) -> int:
        return block + sum(copies for middle, copies in self.copies.items() if middle < block)

    def _entries(self) -> Iterator[_Entry]:
        marks, number = self.recorder.marks, 0
        while number < len(marks):
            if number in self.is_bucket:
                number += 1
                continue
            period = self.period_at.get(number)
            if period is not None:
                yield from self._repeated(range(period.start, period.end), period.block, period.is_forward)
                number = period.end
                continue
            owner = marks[number].owner
            if owner and not marks[number].block:
                end = number
                while end < len(marks) and marks[end].owner == owner and end not in self.is_bucket:
                    end += 1
                before = marks[number - 1].owner
                rises = not before or self.index_of[before] <= self.index_of[owner]
                yield from self._repeated(range(number, end), self.index_of[owner], rises)
                number = end
                continue
            block = self.recorder.operations[number].block
            yield _Entry(number, None if block is None else self._new_index(block))
            number += 1

    def _repeated(self, numbers: range, block: int, rises: bool) -> Iterator[_Entry]:
        copies, index = self.copies.get(block, 0), self._new_index(block)
        for copy in range(copies + 1) if rises else range(copies, -1, -1):
            for number in numbers:
                if number not in self.is_bucket:
                    has_block = self.recorder.operations[number].block is not None
                    yield _Entry(number, index + copy if has_block else None, copy > 0)

    def _times(self, change: Change, entry: _Entry) -> int:
        """How often a change of live bytes happens at an operation."""
        if entry.number in self.period_at:
            return 1
        block = self.index_of.get(self.recorder.storages[change.storage].block, -1)
        if self.index_of.get(self.recorder.marks[entry.number].owner, -2) == block:
            return 1  # each copy has its own
        return 0 if entry.is_copy else 1 + self.copies.get(block, 0)

    def result(self) -> ExtendedStep:
        recorded, step = self.recorder.operations, ExtendedStep()
        streams = defaultdict[str, list[int]](list)
        buckets, memory = _Buckets(self), _Memory(self)
        for change in self.changes.get(-1, ()):
            memory.change(-1, change, 1)
        for entry in self._entries():
            operation = recorded[entry.number]
            num_bytes = operation.num_bytes
            for name, size_bytes in (self.recorder.marks[entry.number].parts or {}).items():
                num_bytes += size_bytes * self.copies.get(self.index_of.get(name, -1), 0)
            after = [
                streams[stream][-1 - back]
                for stream, back in self.waits[entry.number]
                if back < len(streams[stream])
            ]
            number = len(step.operations)
            if entry.number in buckets.is_unpacking:
                after += buckets.unpack()
            step.operations.append(
                replace(operation, block=entry.block, num_bytes=num_bytes, after=tuple(sorted(set(after))))
            )
            streams[operation.stream].append(number)
            for change in self.changes.get(entry.number, ()):
                memory.change(number, change, self._times(change, entry), operation.stream, operation.phase)
            memory.host(self.host_changes.get(entry.number, 0))
            for size_bytes in self.gradients.get(entry.number, ()):
                bucket = buckets.add(size_bytes)
                if bucket is not None:
                    after = streams["compute"][-1:]
                    step.operations.append(replace(bucket, block=entry.block, after=tuple(after)))
                    streams["reduce"].append(len(step.operations) - 1)
                    buckets.numbers.append(len(step.operations) - 1)
        memory.finish(step)
        step.largest_bytes = max(step.largest_bytes, buckets.largest_bytes)
        return step


class _Buckets:
    """DDP's buckets, filled from gradients in the order in which they are complete."""

    def __init__(self, extension: _Extension):
        recorder = extension.recorder
        self.is_unpacking = set(recorder.unpackings)
        # Operations of their all-reduces, and of each gradient the bucket that it is in.
        self.numbers: list[int] = []
        self._bucket_of: list[int] = []
        self._size_bytes = self._num_buckets = self._num_unpacked = self._num_added = 0
        self._template = recorder.operations[recorder.buckets[0]] if recorder.buckets else None
        self.num_gradients = 0
        for number, sizes in extension.gradients.items():
            period = extension.period_at.get(number)
            self.num_gradients += len(sizes) * (1 + extension.copies.get(period.block if period else -1, 0))
        self._told: set[int] = set()
        self.largest_bytes = 0

    def add(self, size_bytes: int) -> Operation | None:
        """A gradient is complete; the all-reduce of its bucket, where that is full now."""
        if self._template is None:
            return None
        self._size_bytes += size_bytes
        self._bucket_of.append(self._num_buckets)
        self._num_added += 1
        limit_bytes = _BUCKET_BYTES[min(self._num_buckets, 1)]
        if self._size_bytes < limit_bytes and self._num_added < self.num_gradients:
            return None
        size_bytes, self._size_bytes = self._size_bytes, 0
        self.largest_bytes = max(self.largest_bytes, size_bytes)
        self._num_buckets += 1
        num_ranks = len(self._template.group)
        # In an all-reduce a rank sends what others have not, twice.
        return replace(self._template, num_bytes=2 * size_bytes * (num_ranks - 1) // num_ranks)

    def unpack(self) -> list[int]:
        """The next gradient is copied out of its bucket: the all-reduce that it waits for, if it is the first."""
        bucket = self._bucket_of[self._num_unpacked]
        self._num_unpacked += 1
        if bucket in self._told:
            return []
        self._told.add(bucket)
        return [self.numbers[bucket]]


class _Memory:
    """Live bytes by kind over the whole step."""

    def __init__(self, extension: _Extension):
        self._extension, recorder = extension, extension.recorder
        self._kind_of = [
            "parameters" if storage.kind.endswith("parameters") else storage.kind
            for storage in recorder.storages
        ]
        self._now = Counter[str]()
        # Of "other", by who made it.
        self._other = Counter[str]()
        self._largest = 0
        self._storages = StepMemory()
        # Block inputs on the host, and shards there.
        self._inputs = self._shards = self._host_peak = 0
        self.parameter_bytes = self.trained_bytes = 0
        for serial, size_bytes in recorder.at_start.items():
            block = extension.index_of.get(recorder.storages[serial].block, -1)
            size_all = size_bytes * (1 + extension.copies.get(block, 0))
            # DDP's buckets, of which a longer step has larger ones, are counted by `_Buckets`.
            if not (recorder.buckets and self._kind_of[serial] == "communication"):
                self._largest = max(self._largest, size_bytes)
            if self._kind_of[serial] == "parameters":
                self.parameter_bytes += size_all
                self.trained_bytes += 0 if recorder.storages[serial].is_frozen else size_all
            self._add(serial, size_all)
            if self._is_on_device(serial):
                is_state = self._kind_of[serial] == "optimizer state"
                made = self._storages.made_by_optimizer if is_state else self._storages.held
                made += [Event(serial, size_bytes)] * (1 + extension.copies.get(block, 0))
        if recorder.buckets:
            # DDP keeps its buckets between steps, of as many bytes as there are gradients.
            for number, sizes in extension.gradients.items():
                period = extension.period_at.get(number)
                copies = extension.copies.get(period.block if period else -1, 0)
                self._now["communication"] += copies * sum(sizes)
        self._start = sum(self._now.values()) + self._shards
        self._states: list[tuple[int, Counter[str], Counter[str], int]] = []
        self._rises = True
        self._record(-1)

    def _is_on_device(self, serial: int) -> bool:
        storage = self._extension.recorder.storages[serial]
        is_shard = storage.kind in _ON_HOST or (storage.kind == "gradients" and storage.is_reduced)
        return not (self._extension.has_shards_on_host and is_shard)

    def _add(self, serial: int, size_bytes: int) -> None:
        if not self._is_on_device(serial):
            self._shards += size_bytes
            self._host_peak = max(self._host_peak, self._inputs + self._shards)
            return
        self._now[self._kind_of[serial]] += size_bytes
        if self._kind_of[serial] == "other":
            self._other[self._extension.recorder.storages[serial].made_by] += size_bytes

    def change(
        self, number: int, change: Change, times: int, stream: str = "compute", phase: str = ""
    ) -> None:
        """Bytes are made or freed while an operation runs."""
        if not times:
            return
        rises = change.size_bytes > 0
        self._largest = max(self._largest, change.size_bytes)
        if rises != self._rises:
            self._record(number)
        self._rises = rises
        self._add(change.storage, change.size_bytes * times)
        if self._is_on_device(change.storage):
            self._storages.steps += [Event(change.storage, change.size_bytes, stream, phase)] * times

    def host(self, size_bytes: int) -> None:
        """Block inputs come to the host, or leave it."""
        self._inputs += size_bytes
        self._host_peak = max(self._host_peak, self._inputs + self._shards)

    def _record(self, number: int) -> None:
        self._states.append((number, self._now.copy(), self._other.copy(), self._inputs))

    def finish(self, step: ExtendedStep) -> None:
        self._record(len(step.operations) - 1)
        # Whatever a copy makes it frees again, as its block does.
        gained = sum(self._now.values()) + self._shards - self._start
        recorded = sum(change.size_bytes for change in self._extension.recorder.changes)
        if gained != recorded:
            raise NotRepeated(f"a step leaves {gained} bytes behind, and with fewer blocks {recorded}")
        totals = [sum(now.values()) for _number, now, _other, _host in self._states]
        highest = max(totals)
        last: int | None = None
        for (number, now, other, host), total in zip(self._states, totals, strict=True):
            is_peak = total == highest and all(state.device_bytes < highest for state in step.memory)
            if last is None or is_peak or abs(total - last) > _SEEN * highest:
                operation = step.operations[max(number, 0)]
                kinds = dict(now) | {"block inputs on the host": host}
                state = MemoryState(max(number, 0), operation.phase, operation.block, kinds, dict(other))
                step.memory.append(state)
                last = total
        step.host_bytes, step.largest_bytes = self._host_peak, self._largest
        step.storages = self._storages
        step.parameter_bytes, step.trained_bytes = self.parameter_bytes, self.trained_bytes
