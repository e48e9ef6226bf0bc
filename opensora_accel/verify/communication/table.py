"""A record as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from opensora_accel.verify.communication.groups import group_of
from opensora_accel.verify.communication.record import Call
from opensora_accel.verify.communication.recorded import RankRecord, Record

Key = tuple[str, str, str, str]


def as_table(record: Record) -> str:
    """Rows in the order of their first call: phase, collective, group, calls and bytes sent, source line."""
    rows = [("phase", "collective", "over", "calls", "sent bytes", "source")]
    counts = {rank.rank: _counts(rank, record) for rank in record.ranks}
    for key in dict.fromkeys(key for calls, _ in counts.values() for key in calls):
        calls = max(each[key] for each, _ in counts.values())
        size_bytes = max(each[key] for _, each in counts.values())
        rows.append((*key[:3], f"{calls:,}", f"{size_bytes:,}", key[3]))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join(
            [
                cell.rjust(w) if at in (3, 4) else cell.ljust(w)
                for at, (cell, w) in enumerate(zip(row[:5], widths, strict=True))
            ]
            + [row[5]]
        )
        for row in rows
    ]
    return "\n".join([_title(record), *lines, *(f"note: {note}" for note in record.notes)])


def _title(record: Record) -> str:
    shown = ", ".join(str(rank.rank) for rank in record.ranks)
    whose = "of the busiest of ranks" if len(record.ranks) > 1 else "of rank"
    return f"{record.shape}, {record.shape.world_size:,} ranks; calls and bytes {whose} {shown}"


def _counts(rank: RankRecord, record: Record) -> tuple[Counter[Key], Counter[Key]]:
    calls: Counter[Key] = Counter()
    sent: Counter[Key] = Counter()
    for call in rank.calls:
        key = (call.phase, call.kind, str(group_of(call.group, record.shape)), call.source)
        calls[key] += 1
        sent[key] += call.sent_bytes
    return calls, sent


def as_dict(record: Record) -> dict[str, Any]:
    return {
        "mesh": dict(record.shape.degrees),
        "world_size": record.shape.world_size,
        "plan": None if record.shape.plan is None else record.shape.plan.to_dict(),
        "ranks": [
            {
                "rank": rank.rank,
                "num_backwards": rank.num_backwards,
                "sent_bytes": sum(call.sent_bytes for call in rank.calls),
                "calls": [_call_as_dict(call, record) for call in rank.calls],
                "parameters": [dataclasses.asdict(parameter) for parameter in rank.parameters],
            }
            for rank in record.ranks
        ],
        "notes": list(record.notes),
    }


def _call_as_dict(call: Call, record: Record) -> dict[str, Any]:
    values = dataclasses.asdict(call)
    where = values.pop("where")
    return {**values, **where, "over": str(group_of(call.group, record.shape))}
