"""Whether the ranks' calls fit each other, before any rank waits for another one for ever.

With P = 3, ranks 0 and 1 call an all-reduce and then a barrier over their group, and rank 2 the barrier alone: the
first call differs, so rank 2 is named with the line that it stands on. Ranks may also agree in every group and hang:
rank 0 waits in group A for rank 1, which waits in group B for rank 0. So all queues are run in order at the end.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from opensora_accel.verify.communication.record import Call
from opensora_accel.verify.communication.record_step import Record
from opensora_accel.verify.meshes import axes_between, group_of

_MOST_SOURCES = 4
_SAME_BYTES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "gather", "scatter")
_REMEDY = (
    "let no rank's calls depend on its rank or its data; where shares differ, pass every rank's size to all"
)


@dataclass(frozen=True)
class Violation:
    """One promise that was not kept."""

    rule: str
    actual: str
    remedy: str
    sources: tuple[str, ...] = ()
    """The lines that the calls in question came from."""

    def __str__(self) -> str:
        lines = [
            f"{self.rule}; but {self.actual}; {self.remedy}",
            *(f"    at {line}" for line in self.sources),
        ]
        return "\n".join(lines)


def sources_of(calls: Iterable[Call]) -> tuple[str, ...]:
    """Each line once, the first few."""
    found = list(dict.fromkeys(call.source for call in calls))
    more = len(found) - _MOST_SOURCES
    return tuple([*found[:_MOST_SOURCES], *([f"and {more} more lines"] if more > 0 else [])])


def disagreements(record: Record) -> list[Violation]:
    """Between the ranks that were recorded: the first difference of each group and of each pair, and what hangs.

    - The members of a group call the same collectives in one order, with one dtype, root and size; of an all-to-all,
      what one sends is what the other expects.
    - Every message is received, in order, with its dtype and size.
    - No ranks wait for each other in a circle, each in another group's collective. Collectives are taken to wait, also
      those that were called with async_op: NCCL runs them in order. Messages are not.
    """
    found = [*unlike_collectives(record), *unmatched_messages(record)]
    return found or list(circular_waits(record))  # a difference hangs by itself


def unlike_collectives(record: Record) -> Iterator[Violation]:
    """The first call of each group in which two of its ranks differ."""
    queues: dict[int, dict[tuple[int, ...], list[Call]]] = {}
    for rank in record.ranks:
        queues[rank.rank] = defaultdict(list)
        for call in rank.calls:
            if not call.is_point_to_point:
                queues[rank.rank][call.group].append(call)
    for group in dict.fromkeys(group for calls in queues.values() for group in calls):
        members = [rank for rank in group if rank in queues]
        for first, other in itertools.combinations(members, 2):
            difference = _first_difference((first, queues[first][group]), (other, queues[other][group]))
            if difference is not None:
                name = group_of(group, record.shape).name
                rule = f"all ranks of a group call the same collectives in the same order ({name})"
                yield Violation(rule, difference[0], _REMEDY, difference[1])
                break


def _first_difference(
    one: tuple[int, list[Call]], other: tuple[int, list[Call]]
) -> tuple[str, tuple[str, ...]] | None:
    """What two ranks' calls differ in, and where; both are given as a rank and its calls."""
    (rank, calls), (other_rank, other_calls) = one, other
    for number, (mine, theirs) in enumerate(zip(calls, other_calls, strict=False), start=1):
        if not _fit(mine, theirs, rank, other_rank):
            actual = (
                f"call {number} is {_shown(mine, other_rank)} on rank {rank}, {_shown(theirs, rank)} on rank "
                f"{other_rank}"
            )
            return actual, _lines((rank, mine), (other_rank, theirs))
    if len(calls) == len(other_calls):
        return None
    if len(calls) < len(other_calls):
        (rank, calls), (other_rank, other_calls) = other, one
    extra = calls[len(other_calls)]
    actual = (
        f"rank {rank} calls {len(calls)}, rank {other_rank} {len(other_calls)}: {_shown(extra, other_rank)} on rank "
        f"{rank} waits"
    )
    return actual, _lines((rank, extra))


def _fit(one: Call, two: Call, first: int, other: int) -> bool:
    """Whether two ranks' calls are the two sides of one collective."""
    if one.kind != two.kind:
        return False
    if one.kind == "barrier":
        return True
    if (one.dtype, one.peer) != (two.dtype, two.peer):
        return False
    if one.kind in _SAME_BYTES:
        return one.input_bytes == two.input_bytes
    if one.sent_to is None or one.received_from is None or two.sent_to is None or two.received_from is None:
        return True
    # An all-to-all: what each sends to the other is what the other expects of it.
    at, to = one.group.index(first), one.group.index(other)
    return one.sent_to[to] == two.received_from[at] and two.sent_to[at] == one.received_from[to]


def _shown(call: Call, towards: int) -> str:
    root = "" if call.peer is None else f" from or to rank {call.peer}"
    size = f"{call.input_bytes:,} bytes"
    if call.sent_to is not None and call.received_from is not None:
        at = call.group.index(towards)
        size = f"{call.sent_to[at]:,} bytes to and {call.received_from[at]:,} from rank {towards}"
    return f"{call.kind}{root} ({size}, {call.dtype})"


def _lines(*calls: tuple[int, Call]) -> tuple[str, ...]:
    return tuple(f"rank {rank}: {call.source}" for rank, call in calls[:_MOST_SOURCES])


def unmatched_messages(record: Record) -> Iterator[Violation]:
    """The first message between two ranks that is not received as it was sent."""
    sends: dict[tuple[int, int], list[Call]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Call]] = defaultdict(list)
    for rank in record.ranks:
        for call in rank.calls:
            if call.kind == "send" and call.peer is not None:
                sends[rank.rank, call.peer].append(call)
            if call.kind == "recv" and call.peer is not None:
                receives[call.peer, rank.rank].append(call)
    recorded = {rank.rank for rank in record.ranks}
    for source, target in dict.fromkeys([*sends, *receives]):
        if not recorded.issuperset((source, target)):
            continue
        sent, received = sends[source, target], receives[source, target]
        rule = f"every message has its receive, in order ({' and '.join(axes_between(source, target, record.shape))})"
        pairs = enumerate(zip(sent, received, strict=False), start=1)
        unlike = (
            (n, one, two)
            for n, (one, two) in pairs
            if (one.input_bytes, one.dtype) != (two.input_bytes, two.dtype)
        )
        number, one, two = next(unlike, (0, None, None))
        if one is not None and two is not None:
            actual = (
                f"message {number} from rank {source} to rank {target} is {one.input_bytes:,} bytes ({one.dtype}), and "
                f"{two.input_bytes:,} bytes ({two.dtype}) are expected"
            )
            yield Violation(rule, actual, _REMEDY, _lines((source, one), (target, two)))
        elif len(sent) != len(received):
            actual = (
                f"rank {source} sends {len(sent)} messages to rank {target}, which receives {len(received)}"
            )
            is_lost = len(sent) > len(received)
            waiting = (source, sent[len(received)]) if is_lost else (target, received[len(sent)])
            yield Violation(rule, actual, _REMEDY, _lines(waiting))


def circular_waits(record: Record) -> Iterator[Violation]:
    """Runs all ranks' collectives in order, each once its recorded members have come to it."""
    queues = {rank.rank: [call for call in rank.calls if not call.is_point_to_point] for rank in record.ranks}
    # Recorded ranks only: of the others nothing is known, and they are taken to come in time.
    position = dict.fromkeys(queues, 0)
    while True:
        waiting = {
            rank: calls[position[rank]] for rank, calls in queues.items() if position[rank] < len(calls)
        }
        ready = []
        for rank, call in waiting.items():
            members = [member for member in call.group if member in queues]
            if all(member in waiting and waiting[member].group == call.group for member in members):
                ready.append(rank)
        for rank in ready:
            position[rank] += 1
        if not ready:
            break
    if waiting:
        shown = [
            f"rank {rank} in {call.kind} over {group_of(call.group, record.shape)}"
            for rank, call in waiting.items()
        ]
        yield Violation(
            "groups that share ranks are called in one order, so that no ranks wait in a circle",
            "; ".join(shown),
            _REMEDY,
            _lines(*waiting.items()),
        )
