"""Which samples a step loads: the indices that torch's DataLoader asks its dataset for.

Two data ranks that shuffle ten samples, an epoch each:

    rank 0    3 7 1 9 4        rank 1    0 2 8 5 6        right: each once
    rank 0    3 7 1 9 4        rank 1    3 7 1 9 4        one order for both: half of the samples are never seen
    rank 0    3 7 1 9 4        rank 0    3 7 1 9 4        its second epoch is its first: nobody called set_epoch

What a loop loads for itself, or from an iterable dataset, has no indices here. Loaders with worker processes load in
the process that asks them: in the same order, but for what the dataset draws.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _SingleProcessDataLoaderIter

from opensora_accel.observe import MeshShape, find_call_site
from opensora_accel.verify.causes import Cause, list_names
from opensora_accel.wrapping import replaced

if TYPE_CHECKING:
    from opensora_accel.verify.results import Results

# So many samples of a shuffled epoch are not in the same order by chance.
_NO_CHANCE = 4


@dataclass
class Pass:
    """One way through a loader."""

    dataset: int  # of those that the step loads from, in the order of their first use
    length: int
    batches: list[tuple[int, ...]] = field(default_factory=list)
    is_over: bool = False
    is_for_training: bool = True  # while gradients are taken
    is_random: bool = False  # the sampler may repeat samples
    is_whole: bool = False  # the sampler is one that deals all samples, but for what is
    num_dropped: int = 0  # left out at most, by each data rank

    @property
    def samples(self) -> list[int]:
        return [sample for batch in self.batches for sample in batch]

    @property
    def unpadded(self) -> set[int]:
        """Without the last batch of an epoch, which may be filled up with samples that others have."""
        return {sample for batch in self.batches[: -1 if self.is_over else None] for sample in batch}


@contextmanager
def without_workers(notes: list[str]) -> Iterator[None]:
    """Within it a DataLoader with worker processes loads by itself, which `notes` say once of each line."""
    iterate: Any = DataLoader.__iter__

    def in_process(loader: Any) -> Any:
        if loader.num_workers == 0:
            return iterate(loader)
        note = (
            f"the DataLoader at {find_call_site().caller} ran without its worker processes: its samples are those of "
            "the same indices, and what its dataset draws comes from the generators of the step"
        )
        note += ", without worker_init_fn" if loader.worker_init_fn is not None else ""
        if note not in notes:
            notes.append(note)
        kept = {name: getattr(loader, name) for name in ("num_workers", "timeout")}
        try:
            loader.num_workers = loader.timeout = 0
            return _SingleProcessDataLoaderIter(loader)
        finally:
            for name, value in kept.items():
                setattr(loader, name, value)

    with replaced(DataLoader, "__iter__", in_process):
        yield


@contextmanager
def watch_loads(passes: list[Pass], is_training: Callable[[], bool]) -> Iterator[None]:
    """Adds to `passes` what loaders within it ask for."""
    next_index: Any = _BaseDataLoaderIter._next_index
    known: dict[Any, Pass] = {}
    datasets: list[Any] = []

    def watched(iterator: Any) -> Any:
        if iterator._dataset_kind != _DatasetKind.Map:
            return next_index(iterator)
        if iterator not in known:
            dataset = iterator._dataset
            places = [place for place, each in enumerate(datasets) if each is dataset]
            if not places:
                datasets.append(dataset)
            place = places[0] if places else len(datasets) - 1
            known[iterator] = Pass(place, len(dataset), is_for_training=is_training(), **_about(iterator))
            passes.append(known[iterator])
        try:
            index = next_index(iterator)
        except StopIteration:
            known[iterator].is_over = True
            raise
        listed = list(index) if isinstance(index, (list, tuple)) else [index]
        # A dataset may be asked by other keys than numbers.
        if all(isinstance(each, int) for each in listed):
            known[iterator].batches.append(tuple(listed))
        return index

    with replaced(_BaseDataLoaderIter, "_next_index", watched):
        yield


def _about(iterator: Any) -> dict[str, Any]:
    """What the samplers of a loader say."""
    chain = [iterator._index_sampler]
    while (inner := getattr(chain[-1], "batch_sampler", getattr(chain[-1], "sampler", None))) is not None:
        chain.append(inner)
    last = chain[-1]
    size = max(int(getattr(each, "batch_size", 1) or 1) for each in chain)
    drops = any(getattr(each, "drop_last", False) for each in chain)
    return {
        "is_random": bool(getattr(last, "replacement", False)),
        "is_whole": isinstance(last, (SequentialSampler, RandomSampler, DistributedSampler))
        and getattr(last, "num_samples", len(iterator._dataset)) == len(last),
        "num_dropped": size if drops else 0,
    }


# What can be wrong with it.


def _first(samples: Sequence[int]) -> str:
    return list_names(list(map(str, samples)))


@dataclass(frozen=True)
class UnlikeLoads(Cause):
    kind = "data"
    WHAT = (
        "ranks that share a sample load different ones {where}: in epoch {epoch} rank {ranks[0]} loads {samples[0]}, "
        "rank {ranks[1]} {samples[1]}"
    )
    REMEDY = (
        "give the sampler the data rank and the number of data ranks, not the global rank and the world size"
    )
    epoch: int = 1
    ranks: tuple[int, ...] = (0, 1)
    samples: tuple[str, ...] = ("", "")


@dataclass(frozen=True)
class SharedLoads(Cause):
    kind = "data"
    WHAT = "data ranks load the same samples {where}: in epoch {epoch} ranks {ranks[0]} and {ranks[1]} load {shared}"
    REMEDY = (
        "deal an epoch out: DistributedSampler(dataset, run.data_size, run.data_rank), seeded alike on all ranks; a "
        "loader that shuffles by itself deals every rank all samples"
    )
    epoch: int = 1
    ranks: tuple[int, ...] = (0, 1)
    shared: str = ""


@dataclass(frozen=True)
class MissedLoads(Cause):
    kind = "data"
    WHAT = "no rank loads {number} of {length} samples in epoch {epoch} {where}: {missed}"
    REMEDY = (
        "num_replicas of the sampler is the number of data ranks, and each has a place of its own among them"
    )
    epoch: int = 1
    number: int = 0
    length: int = 0
    missed: str = ""


@dataclass(frozen=True)
class SameEpoch(Cause):
    kind = "data"
    WHAT = "epoch {epoch} has the order of the one before again {where}: rank {rank} loads {samples} in both"
    REMEDY = "call sampler.set_epoch(epoch) before each epoch, or keep one generator for all of them"
    epoch: int = 1
    rank: int = 0
    samples: str = ""


@dataclass(frozen=True)
class Loaded:
    """The epochs of one dataset that one mesh went through, by rank."""

    shape: MeshShape
    by_rank: Sequence[Sequence[Pass]]
    turns: Sequence[Sequence[Pass]]  # those of the single device, by data rank; none, where it has one batch
    is_right: bool  # the mesh has the single device's gradients

    @property
    def num_epochs(self) -> int:
        return max(map(len, self.by_rank), default=0)

    def epoch(self, number: int) -> dict[int, Pass]:
        """By rank; only those that load something."""
        return {
            rank: e[number] for rank, e in enumerate(self.by_rank) if len(e) > number and e[number].batches
        }

    def wrong(self) -> Iterator[tuple[type[Cause], dict[str, Any]]]:
        """Kinds of causes, with their fields."""
        for number in range(self.num_epochs):
            yield from self._unlike(number)
            yield from self._shared(number)
            yield from self._missed(number)
            yield from self._same_as_before(number)

    def _unlike(self, number: int) -> Iterator[tuple[type[Cause], dict[str, Any]]]:
        epoch = self.epoch(number)
        for data_rank in range(self.shape.data_size):
            ranks = [rank for rank in self.shape.ranks_of(data_rank) if rank in epoch]
            other = next((r for r in ranks if epoch[r].samples != epoch[ranks[0]].samples), None)
            if other is None:
                continue
            # Ranks may load a part each of what they then exchange, if gradients are right all the same.
            together = sorted(sample for rank in ranks for sample in epoch[rank].samples)
            turn = self.turns[data_rank] if data_rank < len(self.turns) else []
            if not self.is_right or len(turn) <= number or together != sorted(turn[number].samples):
                both = ranks[0], other
                shown = tuple(_first(epoch[rank].samples) for rank in both)
                yield UnlikeLoads, {"epoch": number + 1, "ranks": both, "samples": shown}

    def _of_data_ranks(self, number: int) -> dict[int, Pass]:
        """The first rank of each data rank that loads something; none, where all share one batch out."""
        epoch = self.epoch(number) if self.turns else {}
        firsts = ([r for r in self.shape.ranks_of(d) if r in epoch][:1] for d in range(self.shape.data_size))
        return {rank: epoch[rank] for some in firsts for rank in some if not epoch[rank].is_random}

    def _shared(self, number: int) -> Iterator[tuple[type[Cause], dict[str, Any]]]:
        for (one, mine), (other, theirs) in itertools.combinations(self._of_data_ranks(number).items(), 2):
            shared = mine.unpadded & theirs.unpadded
            if shared:
                listed = [sample for sample in mine.samples if sample in shared]
                yield SharedLoads, {"epoch": number + 1, "ranks": (one, other), "shared": _first(listed)}

    def _missed(self, number: int) -> Iterator[tuple[type[Cause], dict[str, Any]]]:
        epoch = list(self._of_data_ranks(number).values())
        if len(epoch) < self.shape.data_size or not all(each.is_over and each.is_whole for each in epoch):
            return
        length = epoch[0].length
        missed = sorted(set(range(length)) - {sample for each in epoch for sample in each.samples})
        if len(missed) > sum(each.num_dropped for each in epoch):
            fields = {"number": len(missed), "length": length, "missed": _first(missed)}
            yield MissedLoads, {"epoch": number + 1, **fields}

    def _same_as_before(self, number: int) -> Iterator[tuple[type[Cause], dict[str, Any]]]:
        before, now = (self.epoch(each) if each >= 0 else {} for each in (number - 1, number))
        for rank in before.keys() & now.keys():
            one, other = before[rank].samples, now[rank].samples
            length = min(len(one), len(other))
            is_shuffled = one[:length] != sorted(one[:length])
            if length >= _NO_CHANCE and is_shuffled and one[:length] == other[:length]:
                yield SameEpoch, {"epoch": number + 1, "rank": rank, "samples": _first(one[:length])}


def check_loads(results: Results) -> list[Cause]:
    """What is wrong with the samples of every mesh, each kind once, as its first mesh shows it."""
    shapes: defaultdict[type[Cause], list[MeshShape]] = defaultdict(list)
    fields: dict[type[Cause], dict[str, Any]] = {}
    for mesh in results.ran:
        in_turns = len(mesh.expected.turns) == mesh.shape.data_size
        for dataset in sorted({each.dataset for seen in mesh.observations for each in seen.loads}):
            ranks = [_epochs(seen.loads, dataset) for seen in mesh.observations]
            turns = [_epochs(seen.loads, dataset) for seen in mesh.expected.turns] if in_turns else []
            for kind, found in Loaded(mesh.shape, ranks, turns, results.is_right(mesh)).wrong():
                shapes[kind].append(mesh.shape)
                fields.setdefault(kind, found)
    order: list[type[Cause]] = [UnlikeLoads, SharedLoads, MissedLoads, SameEpoch]
    # What no rank loads is mostly what others load instead.
    has_other = UnlikeLoads in shapes or SharedLoads in shapes
    wrong = [kind for kind in order if kind in shapes and not (kind is MissedLoads and has_other)]
    return [kind(where=results.where(shapes[kind]), **fields[kind]) for kind in wrong]


def _epochs(loads: Sequence[Pass], dataset: int) -> list[Pass]:
    return [each for each in loads if each.dataset == dataset and each.is_for_training]


def is_training(model: torch.nn.Module | None, was_training: bool) -> bool:
    """Whether what is loaded now is trained on, as far as can be known."""
    return torch.is_grad_enabled() and (model is None or model.training or not was_training)
