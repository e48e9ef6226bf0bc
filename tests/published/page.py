"""docs/published.md, of which the tables are made from the suite: `python -m tests.published --page` writes it."""

from __future__ import annotations

import collections
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.published.bug import Bug, Finding
from tests.published.suite import BUGS, NAMED_OTHERWISE, NOT_FOUND_YET

PAGE = Path(__file__).parents[2] / "docs" / "published.md"
_ROOMS = {
    "scales": "Divisors and sums",
    "collectives": "Collectives and their gradients",
    "kernels": "Kernels, masks and parameters",
    "precision": "Precision",
    "draws": "Samples and draws",
    "state": "Optimizer and state",
}
_TOOLS = {
    "verify": "`verify`",
    "single device": "`verify` on one device",
    "bf16": "`verify` in bf16",
    "several steps": "`verify` over several steps",
    "watch": "`watch`",
}
# What depends on the machine, on rounding or on a line of the suite, and the names of more than one parameter.
_FIGURES = re.compile(
    r", up to \S+ of the largest| \((?:[\w.]+, )+[^)]*\)|\. To do: .*|(?<=\.py):\d+"
    r"| is off by [0-9][^;]*(?=;|$)"
)


def first_line(findings: Sequence[Finding]) -> str:
    """What the tool says first, without figures that depend on rounding; of a bug that nobody finds nothing."""
    return _FIGURES.sub("", findings[0][0]) if findings else ""


def row(bug: Bug, says: str) -> str:
    not_read = "" if bug.was_read else " (not read there, as others tell it)"
    source = f"[{bug.name}]({bug.url}), {bug.year}{not_read}"
    answer = says or f"*not found yet*: {NOT_FOUND_YET[bug.name]}"
    command = f"`python -m tests.published {bug.name.replace(' #', '#')}`"
    return f"| {' | '.join([source, bug.mechanism, bug.hides, answer, command])} |"


def summary() -> str:
    found = [bug for bug in BUGS if bug.name not in NOT_FOUND_YET]
    by = collections.Counter(bug.tool for bug in found)
    tools = [f"{by[tool]} by {word}" for tool, word in _TOOLS.items() if by[tool]]
    left = f"{len(NOT_FOUND_YET)} {'is' if len(NOT_FOUND_YET) == 1 else 'are'} not found yet"
    return (
        f"{len(BUGS)} pairs. {len(found)} bugs are found, {', '.join(tools)}; {len(found) - len(NAMED_OTHERWISE)} of "
        f"these are named right by the first finding. {left}. No right twin is called "
        "wrong."
    )


def tables(says: Mapping[str, str]) -> str:
    """A table for each file of bugs. `says`: the first line of what was found, by the bug's name."""
    lines = ["## The pairs", "", *textwrap.wrap(summary(), 118), ""]
    for room, title in _ROOMS.items():
        lines += [f"### {title}", ""]
        lines += ["| bug | what it does | why nobody saw it | what our tool says first | the command |"]
        lines += ["|---|---|---|---|---|"]
        here = [bug for bug in BUGS if bug.step.__module__.endswith(f".{room}")]
        lines += [*(row(bug, says[bug.name]) for bug in here), ""]
    return "\n".join(lines)


def written() -> tuple[str, dict[str, str]]:
    """The page as it is, and the last column but one of its tables by the bug's name."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([^\]]+)\].* \| (.*?) \| `python -m tests\.published [^`]+` \|$", text, re.M)
    return text, {name: "" if says.startswith("*not found yet*") else says for name, says in rows}


def write(says: Mapping[str, str]) -> None:
    head, _, _ = PAGE.read_text(encoding="utf-8").partition("## The pairs")
    PAGE.write_text(f"{head}{tables(says)}", encoding="utf-8")
