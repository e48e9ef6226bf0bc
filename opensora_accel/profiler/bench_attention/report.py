"""The rows as tables, to read in a terminal or to put into a document."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from opensora_accel.profiler.bench_attention.results import NOT_OFFERED, PROGRAM, Row


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str]
    command: str
    """That gives any one of its rows again."""

    def text(self) -> Iterator[str]:
        lines = [self.header, *self.rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(self.header))]
        yield f"\n{self.title}"
        for line in lines:
            yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        yield from (f"  {note}" for note in self.notes)

    def markdown(self) -> Iterator[str]:
        yield f"### {self.title}\n"
        yield f"| {' | '.join(self.header)} |"
        yield f"|{'---|' * len(self.header)}"
        yield from (f"| {' | '.join(line)} |" for line in self.rows)
        yield f"\nAny row again: `{self.command}`\n"
        yield from (f"- {note}" for note in self.notes)
        if self.notes:
            yield ""


def tables(result: dict[str, Any]) -> list[Table]:
    """Those that have rows, what is deterministic first."""
    made = [_errors(result["errors"]), _bytes(result["bytes"]), _times(result["times"])]
    return [table for table in made if table.rows]


def _errors(rows: Sequence[Row]) -> Table:
    cases = list(dict.fromkeys(row["problem"]["name"] for row in rows))
    asked = [row for row in rows if row["status"] != NOT_OFFERED]
    keys = dict.fromkeys((row["side"], row["ranks"], row["problem"]["dtype"]) for row in asked)
    lines = []
    for side, ranks, dtype in keys:
        found = {row["problem"]["name"]: row for row in rows if (row["side"], row["ranks"]) == (side, ranks)}
        lines.append(
            [side, str(ranks), dtype, *(_error_cell(found[case]) if case in found else "" for case in cases)]
        )
    title = "Gradients: largest error of out, dq, dk and dv over the largest value, against full attention in fp64"
    command = f'{PROGRAM} --part errors --only "NAME" --ranks P'
    return Table(title, ["side", "ranks", "dtype", *cases], lines, [*_wrong(rows), *_reasons(rows)], command)


def _error_cell(row: Row) -> str:
    if row["status"] != "done":
        return "–" if row["status"] == NOT_OFFERED else row["status"]
    worst = "NaN" if row["worst"] is None else f"{row['worst']:.0e}"
    return worst if row["right"] else f"WRONG {worst}"


def _wrong(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["status"] == "done" and not row["right"]:
            errors = ", ".join(f"{k} {'NaN' if e is None else f'{e:.1e}'}" for k, e in row["errors"].items())
            yield f"{row['side']}, {row['ranks']} ranks, {row['problem']['name']}: {errors}"


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Each reason once, with the cases and rank counts that it was given for."""
    given: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    first: dict[tuple[str, str, str], str] = {}
    for row in rows:
        if row["status"] not in ("done", NOT_OFFERED):
            # Those that differ in sizes alone are one.
            key = (row["side"], row["status"], re.sub(r"\d+", "#", row["reason"]))
            cases = given.setdefault(key, {})
            cases.setdefault(row["problem"]["name"], []).append(str(row["ranks"]))
            first.setdefault(key, row["reason"])
    for key, cases in given.items():
        where = "; ".join(f"{case} on {', '.join(dict.fromkeys(ranks))}" for case, ranks in cases.items())
        yield f"{key[0]} {key[1]} ({where}): {first[key]}"


def _bytes(rows: Sequence[Row]) -> Table:
    header = [
        "side",
        "ranks",
        "dtype",
        "collectives",
        "sends",
        "barriers",
        "sent KiB",
        "sent / q",
        "kept / q",
    ]
    lines = [_byte_line(row) for row in rows if row["status"] != NOT_OFFERED]
    title = (
        "One layer, forward and backward: calls and bytes of the busiest rank, and bytes kept for backward"
    )
    notes = [
        f"{row['side']}: not counted are {', '.join(dict.fromkeys(row['uncounted']))}"
        for row in rows
        if row.get("uncounted")
    ]
    command = f'{PROGRAM} --part bytes --only "NAME" --ranks P'
    return Table(title, header, lines, [*notes, *_reasons(rows)], command)


def _byte_line(row: Row) -> list[str]:
    line = [row["side"], str(row["ranks"]), row["problem"]["dtype"]]
    if row["status"] != "done":
        return [*line, row["status"], *[""] * 5]
    calls = [str(row["collectives"]), str(row["sends"]), str(row["barriers"])]
    if row["size_exchanges"]:
        calls[0] += f" + {row['size_exchanges']} of sizes"
    return [
        *line,
        *calls,
        f"{row['sent_bytes'] / 1024:.0f}",
        f"{row['sent_in_q']:.2f}",
        f"{row['kept_in_q']:.2f}",
    ]


def _times(rows: Sequence[Row]) -> Table:
    header = ["side", "ranks", "problem", "beside", "ours ms", "side ms", "side / ours"]
    lines = [_time_line(row) for row in rows if row["status"] != NOT_OFFERED]
    title = (
        "Forward and backward, in turns: medians and quartiles, of the slowest rank; above 1, ours is faster"
    )
    command = f'{PROGRAM} --part times --only "NAME" --time-ranks P'
    return Table(title, header, lines, list(_reasons(rows)), command)


def _time_line(row: Row) -> list[str]:
    problem = row["problem"]
    sizes = f"{problem['name']} B{problem['batch']} S{problem['queries']} H{problem['heads']}"
    line = [row["side"], str(row["ranks"]), f"{sizes} D{problem['head_dim']} {problem['dtype']}"]
    if row["status"] != "done":
        return [*line, row["status"], *[""] * 3]
    return [
        *line,
        row["beside"],
        _spread(row["ours_ms"], 1),
        _spread(row["side_ms"], 1),
        _spread(row["ratio"], 3),
    ]


def _spread(values: dict[str, Any], digits: int) -> str:
    return f"{values['median']:.{digits}f} [{values['q1']:.{digits}f}, {values['q3']:.{digits}f}]"


def claim_line(claim: dict[str, Any]) -> str:
    value = "-" if claim["value"] is None else f"{claim['value']:.4g}"
    held = "held" if claim["held"] else "FAILED"
    return f"  {held:<7} {value:>10}  {claim['comparison']} {claim['threshold']:g}: {claim['claim']}"


def markdown(result: dict[str, Any]) -> str:
    """The whole result as a section of a document."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    hardware = result["hardware"]
    where = (
        f"{hardware.get('gpu') or hardware['cpu']}, {hardware['cores']} cores; {versions}; {result['date']}"
    )
    lines = [f"Measured by `{result['command']}` on {where}.\n"]
    for table in tables(result):
        lines += table.markdown()
    lines += ["### Claims\n", "| held | value | claim |", "|---|---|---|"]
    for claim in result["claims"]:
        value = "–" if claim["value"] is None else f"{claim['value']:.4g}"
        asked = f"{claim['claim']}: {claim['comparison']} {claim['threshold']:g}"
        lines.append(f"| {'yes' if claim['held'] else 'NO'} | {value} | {asked} |")
    return "\n".join(lines) + "\n"
