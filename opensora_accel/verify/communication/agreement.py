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

from opensora_accel.observe import CollectiveCall, axes_between, group_of
from opensora_accel.verify.communication.record_step import Record

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
    # The lines that the calls in question came from.
    sources: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.rule}; but {self.actual}; {self.remedy}"
        return "\n".join([text, *(f"    at {line}" for line in self.sources)])


def sources_of(calls: Iterable[CollectiveCall]) -> tuple[str, ...]:
    """Each line once, the first few."""
    sources = list(dict.fromkeys(call.source for call in calls))
    more = len(sources) - _MOST_SOURCES
    return tuple([*sources[:_MOST_SOURCES], *([f"and {more} more lines"] if more > 0 else [])])


def disagreements(record: Record) -> list[Violation]:
    """Between the ranks that were recorded: the first difference of each group and of each pair, and what hangs.

    - The members of a group call the same collectives in one order, with one dtype, root and size; of an all-to-all,
      what one sends is what the other expects.
    - Every message is received, in order, with its dtype and size.
    - No ranks wait for each other in a circle, each in another group's collective. Collectives are taken to wait, also
      those that were called with async_op: NCCL runs them in order. Messages are not.
    """
    violations = [*unlike_collectives(record), *unmatched_messages(record)]
    return violations or list(circular_waits(record))  # a difference hangs by itself


def unlike_collectives(record: Record) -> Iterator[Violation]:
    """The first call of each group in which two of its ranks differ."""
    queues: dict[int, dict[tuple[int, ...], list[CollectiveCall]]] = {}
    for rank in record.ranks:
        queues[rank.rank] = defaultdict(list)
        for call in rank.calls:
            # Messages have two ends and no order among a group's collectives: they are compared apart.
            if not call.is_point_to_point:
                queues[rank.rank][call.group].append(call)
    for group in dict.fromkeys(group for calls in queues.values() for group in calls):
        rule = f"all ranks of a group call the same collectives in the same order ({group_of(group, record.shape)})"
        # Every pair is compared, because in an all-to-all any two ranks may disagree about what they exchange.
        for first, other in itertools.combinations([rank for rank in group if rank in queues], 2):
            pairs = enumerate(zip(queues[first][group], queues[other][group], strict=False), start=1)
            unlike = [(n, one, two) for n, (one, two) in pairs if not _fit(one, two, first, other)]
            if unlike:
                number, one, two = unlike[0]
                actual = f"call {number} is {_shown(one, other)} on rank {first}, {_shown(two, first)} on rank {other}"
                yield Violation(rule, actual, _REMEDY, _lines((first, one), (other, two)))
                break
            # Those that both have fit: the one with more waits in the first that is left over.
            longer, shorter = sorted((first, other), key=lambda member: -len(queues[member][group]))
            calls, num_fewer = queues[longer][group], len(queues[shorter][group])
            if len(calls) > num_fewer:
                actual = (
                    f"rank {longer} calls {len(calls)}, rank {shorter} {num_fewer}: "
                    f"{_shown(calls[num_fewer], shorter)} on rank {longer} waits"
                )
                yield Violation(rule, actual, _REMEDY, _lines((longer, calls[num_fewer])))
                break


def _fit(one: CollectiveCall, two: CollectiveCall, first: int, other: int) -> bool:
    """Whether two ranks' calls are the two sides of one collective."""
    if one.kind != two.kind:
        return False
    # It carries nothing that could differ.
    if one.kind == "barrier":
        return True
    if (one.dtype, one.peer) != (two.dtype, two.peer):
        return False
    if one.kind in _SAME_BYTES:
        return one.input_bytes == two.input_bytes
    # Where no sizes are known, the kinds are all that can be compared.
    if one.sent_to is None or one.received_from is None or two.sent_to is None or two.received_from is None:
        return True
    # An all-to-all: what each sends to the other is what the other expects of it.
    at, to = one.group.index(first), one.group.index(other)
    return one.sent_to[to] == two.received_from[at] and two.sent_to[at] == one.received_from[to]


def _shown(call: CollectiveCall, towards: int) -> str:
    root = "" if call.peer is None else f" from or to rank {call.peer}"
    size = f"{call.input_bytes:,} bytes"
    if call.sent_to is not None and call.received_from is not None:
        at = call.group.index(towards)
        size = f"{call.sent_to[at]:,} bytes to and {call.received_from[at]:,} from rank {towards}"
    return f"{call.kind}{root} ({size}, {call.dtype})"


def _lines(*calls: tuple[int, CollectiveCall]) -> tuple[str, ...]:
    return tuple(f"rank {rank}: {call.source}" for rank, call in calls[:_MOST_SOURCES])


def unmatched_messages(record: Record) -> Iterator[Violation]:
    """The first message between two ranks that is not received as it was sent."""
    sends: dict[tuple[int, int], list[CollectiveCall]] = defaultdict(list)
    receives: dict[tuple[int, int], list[CollectiveCall]] = defaultdict(list)
    recorded = {rank.rank for rank in record.ranks}
    for rank in record.ranks:
        for call in rank.calls:
            if call.kind == "send" and call.peer in recorded:
                sends[rank.rank, call.peer].append(call)
            if call.kind == "recv" and call.peer in recorded:
                receives[call.peer, rank.rank].append(call)
    for source, target in dict.fromkeys([*sends, *receives]):
        sent, received = sends[source, target], receives[source, target]
        rule = f"every message has its receive, in order ({' and '.join(axes_between(source, target, record.shape))})"
        pairs = enumerate(zip(sent, received, strict=False), start=1)
        unlike = [(n, a, b) for n, (a, b) in pairs if (a.input_bytes, a.dtype) != (b.input_bytes, b.dtype)]
        if unlike:
            number, one, two = unlike[0]
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
        # A collective runs when all of its recorded members have come to it. Then each of them goes on.
        ready = []
        for rank, call in waiting.items():
            members = [member for member in call.group if member in queues]
            if all(member in waiting and waiting[member].group == call.group for member in members):
                ready.append(rank)
        for rank in ready:
            position[rank] += 1
        if not ready:
            break
    # None of the ranks that are left can go on, so each waits for another one of them.
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
