"""docs/published.md, of which the tables are made from the suite: `python -m tests.published --page` writes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.published.bug import Bug, Finding
from tests.published.suite import BUGS, NOT_FOUND_YET

PAGE = Path(__file__).parents[2] / "docs" / "published.md"
_ROOMS = {
    "scales": "Divisors and sums",
    "collectives": "Collectives and their gradients",
    "kernels": "Kernels, masks and parameters",
    "precision": "Precision",
    "draws": "Samples and draws",
    "state": "Optimizer and state",
}
# What depends on the machine or on rounding, and the names of more than one parameter.
_FIGURES = re.compile(r", up to \S+ of the largest| \((?:[\w.]+, )+[^)]*\)|\. To do: .*")


def first_line(findings: Sequence[Finding]) -> str:
    """What the tool says first, without figures that depend on rounding; of a bug that nobody finds nothing."""
    return _FIGURES.sub("", findings[0][0]) if findings else ""


def row(bug: Bug, says: str) -> str:
    not_read = "" if bug.was_found else " (the thread was not found; as others tell it)"
    answer = says or f"*not found yet*: {NOT_FOUND_YET[bug.name]}"
    command = f"`python -m tests.published {bug.name.replace(' #', '#')}`"
    source = f"[{bug.name}]({bug.url}), {bug.year}{not_read}"
    return f"| {source} | {bug.mechanism} Hidden, because {bug.hides}. | {answer} | {command} |"


def tables(says: Mapping[str, str]) -> str:
    """A table for each file of bugs. `says`: the first line of what was found, by the bug's name."""
    lines = []
    for room, title in _ROOMS.items():
        lines += [f"### {title}", "", "| bug | what it does | what our tool says first | the command |"]
        lines += ["|---|---|---|---|"]
        here = [bug for bug in BUGS if bug.step.__module__.endswith(f".{room}")]
        lines += [*(row(bug, says[bug.name]) for bug in here), ""]
    return "\n".join(lines)


def written() -> tuple[str, dict[str, str]]:
    """The page as it is, and the last column but one of its tables by the bug's name."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([^\]]+)\].* \| (.*?) \| `python -m tests\.published [^`]+` \|$", text, re.M)
    return text, {name: "" if says.startswith("*not found yet*") else says for name, says in rows}


def write(says: Mapping[str, str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, _, _ = text.partition("### ")
    PAGE.write_text(f"{head}{tables(says)}", encoding="utf-8")
