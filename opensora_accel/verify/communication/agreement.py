"""Whether the ranks' calls fit each other, before any rank waits for another one for ever."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from opensora_accel.verify.communication.groups import axes_between, group_of
from opensora_accel.verify.communication.record import Call
from opensora_accel.verify.communication.record_step import Record

_MOST_SOURCES = 4


@dataclass(frozen=True)
class Violation:
    """One promise that was not kept."""

    rule: str
    actual: str
    remedy: str
    sources: tuple[str, ...] = ()
    """Lines that the calls in question came from."""

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


_SAME_BYTES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "gather", "scatter")
_REMEDY = (
    "let no rank's calls depend on its rank or its data; where shares differ, pass every rank's size to all"
)


def disagreements(record: Record) -> list[Violation]:
    """Between the ranks that were recorded: the first difference of each group and of each pair, and what hangs.

    - The members of a group call the same collectives in one order, with one dtype, root and size; of an all-to-all,
      what one sends is what the other expects.
    - Every message is received, in order, with its dtype and size.
    - No ranks wait for each other in a circle, each in another group's collective. Collectives are taken to wait, also
      those that were called with async_op: NCCL runs them in order. Messages are not.
    """
    found = [*_collectives(record), *_messages(record)]
    return found or list(_circles(record))  # a difference hangs by itself


def _collectives(record: Record) -> Iterator[Violation]:
    queues = {
        rank.rank: _by_group([c for c in rank.calls if not c.is_point_to_point]) for rank in record.ranks
    }
    groups = dict.fromkeys(group for calls in queues.values() for group in calls)
    for group in groups:
        members = [rank for rank in group if rank in queues]
        name = group_of(group, record.shape).name
        for first, other in itertools.combinations(members, 2):
            problem = _first_difference(
                queues[first].get(group, []), queues[other].get(group, []), first, other
            )
            if problem is not None:
                rule = f"all ranks of a group call the same collectives in the same order ({name})"
                yield Violation(rule, problem[0], _REMEDY, problem[1])
                break


def _by_group(calls: Sequence[Call]) -> dict[tuple[int, ...], list[Call]]:
    found: dict[tuple[int, ...], list[Call]] = {}
    for call in calls:
        found.setdefault(call.group, []).append(call)
    return found


def _first_difference(
    mine: Sequence[Call], theirs: Sequence[Call], first: int, other: int
) -> tuple[str, tuple[str, ...]] | None:
    for number, (one, two) in enumerate(zip(mine, theirs, strict=False), start=1):
        if not _fit(one, two, first, other):
            actual = (
                f"call {number} is {_shown(one, other)} on rank {first}, {_shown(two, first)} on rank {other}"
            )
            return actual, _lines((first, one), (other, two))
    if len(mine) != len(theirs):
        longer, rank, fewer = (mine, first, other) if len(mine) > len(theirs) else (theirs, other, first)
        shorter = min(len(mine), len(theirs))
        extra = longer[shorter]
        actual = f"rank {rank} calls {len(longer)}, rank {fewer} {shorter}: {_shown(extra, fewer)} on rank {rank} waits"
        return actual, _lines((rank, extra))
    return None


def _fit(one: Call, two: Call, first: int, other: int) -> bool:
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
    at, to = one.group.index(first), one.group.index(other)
    return one.sent_to[to] == two.received_from[at] and two.sent_to[at] == one.received_from[to]


def _shown(call: Call, towards: int) -> str:
    root = "" if call.peer is None else f" from or to rank {call.peer}"
    size = f"{call.input_bytes:,} bytes"
    if call.sent_to is not None and call.received_from is not None:
        at = call.group.index(towards)
        size = f"{call.sent_to[at]:,} bytes to and {call.received_from[at]:,} from rank {towards}"
    return f"{call.kind}{root} ({size}, {call.dtype})"


def _messages(record: Record) -> Iterator[Violation]:
    sends: dict[tuple[int, int], list[Call]] = {}
    receives: dict[tuple[int, int], list[Call]] = {}
    for rank in record.ranks:
        for call in rank.calls:
            if call.kind == "send" and call.peer is not None:
                sends.setdefault((rank.rank, call.peer), []).append(call)
            if call.kind == "recv" and call.peer is not None:
                receives.setdefault((call.peer, rank.rank), []).append(call)
    recorded = {rank.rank for rank in record.ranks}
    for pair in dict.fromkeys([*sends, *receives]):
        if not recorded.issuperset(pair):
            continue
        problem = _unmatched(pair, sends.get(pair, []), receives.get(pair, []))
        if problem is not None:
            along = " and ".join(axes_between(*pair, record.shape))
            yield Violation(
                f"every message has its receive, in order ({along})", problem[0], _REMEDY, problem[1]
            )


def _unmatched(
    pair: tuple[int, int], sends: Sequence[Call], receives: Sequence[Call]
) -> tuple[str, tuple[str, ...]] | None:
    of, to = pair
    for number, (sent, received) in enumerate(zip(sends, receives, strict=False), start=1):
        if (sent.input_bytes, sent.dtype) != (received.input_bytes, received.dtype):
            return (
                f"message {number} from rank {of} to rank {to} is {sent.input_bytes:,} bytes ({sent.dtype}), and "
                f"{received.input_bytes:,} bytes ({received.dtype}) are expected"
            ), _lines((of, sent), (to, received))
    if len(sends) == len(receives):
        return None
    actual = f"rank {of} sends {len(sends)} messages to rank {to}, which receives {len(receives)}"
    waiting = (of, sends[len(receives)]) if len(sends) > len(receives) else (to, receives[len(sends)])
    return actual, _lines(waiting)


def _circles(record: Record) -> Iterator[Violation]:
    """Runs all ranks' collectives in order, each once its recorded members have come to it."""
    queues = {rank.rank: [c for c in rank.calls if not c.is_point_to_point] for rank in record.ranks}
    position = dict.fromkeys(queues, 0)
    waiting: dict[int, Call] = {}
    is_moving = True
    while is_moving:
        waiting = {
            rank: calls[position[rank]] for rank, calls in queues.items() if position[rank] < len(calls)
        }
        ready = [rank for rank in waiting if _all_there(waiting, queues, rank)]
        for rank in ready:
            position[rank] += 1
        is_moving = bool(ready)
    if waiting:
        shown = "; ".join(
            f"rank {rank} in {call.kind} over {group_of(call.group, record.shape)}"
            for rank, call in waiting.items()
        )
        yield Violation(
            "groups that share ranks are called in one order, so that no ranks wait in a circle",
            shown,
            _REMEDY,
            _lines(*waiting.items()),
        )


def _all_there(waiting: dict[int, Call], queues: dict[int, list[Call]], rank: int) -> bool:
    group = waiting[rank].group
    return all(member in waiting and waiting[member].group == group for member in group if member in queues)


def _lines(*calls: tuple[int, Call]) -> tuple[str, ...]:
    return tuple(f"rank {rank}: {call.source}" for rank, call in calls[:4])
