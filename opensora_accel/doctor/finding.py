"""What a check found, and how it is shown."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing worth knowing. A `problem` stops or badly slows training; a `note` is for information."""

    topic: str
    status: Literal["ok", "note", "problem"]
    message: str
    remedy: str = ""


def print_report(findings: Sequence[Finding]) -> int:
    """Prints a table (plain lines without rich). Returns the exit code: 1 if there is a problem, else 0."""
    problems = sum(finding.status == "problem" for finding in findings)
    notes = sum(finding.status == "note" for finding in findings)
    try:
        _print_rich(findings)
    except ImportError:
        for finding in findings:
            remedy = f"\n{'':10}→ {finding.remedy}" if finding.remedy else ""
            print(f"{finding.status:<8}  {finding.topic}: {finding.message}{remedy}")
    verdict = (
        f"{problems} problem(s), each with what to do"
        if problems
        else "nothing stands in the way of training"
    )
    print(f"{verdict}; {notes} note(s)")
    return 1 if problems else 0


def _print_rich(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    style = {"ok": "green", "note": "yellow", "problem": "bold red"}
    table = Table(title="opensora-accel doctor", show_lines=False)
    for column in ("topic", "status", "what was found, and what to do"):
        table.add_column(column)
    for finding in findings:
        text = Text(finding.message)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="cyan")
        table.add_row(Text(finding.topic), Text(finding.status, style=style[finding.status]), text)
    Console().print(table)


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as a JSON list, for scripts."""
    return json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1, ensure_ascii=False)


def read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what follows: "2.13.0+cpu" is (2, 13, 0)."""
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def integer(text: str | None, default: int) -> int:
    return int(text) if text and text.isdigit() else default


def size_text(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**29 else f"{size_bytes / 2**20:.1f} MiB"
