"""The planner's forecasts beside figures that others have published, and the intervals that these deserve.

Each figure stands with its source and settings in published_training.py and published_sampling.py. What is fitted is
one factor for seconds, one for memory, and how far figures lie from them (published_rows.py): here each figure is
judged by what the other sources say. The last lines have the fit to all, which opensora_accel/planner/devices.py takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import published_sampling
import published_training
from published_rows import Fit, Row, fitted, left_out, summary


def _trained(steps: Callable[[], Iterator[published_training.Step]]) -> Iterator[Row]:
    for step in steps():
        yield step.row()


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    **{steps.__name__: partial(_trained, steps) for steps in published_training.SOURCES},
    **{rows.__name__: rows for rows in published_sampling.SOURCES},
}


def main() -> int:
    """Prints tables in markdown; 0."""
    parser = argparse.ArgumentParser(
        "python tools/bench/published.py", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--only", choices=tuple(TABLES), help="one of the publications; nothing is fitted to it then"
    )
    chosen = parser.parse_args().only
    rows = [row for name, rows_of in TABLES.items() if chosen in (None, name) for row in rows_of()]
    by_kind = {kind: [row for row in rows if row.kind == kind] for kind in ("seconds", "memory")}
    unfitted = Fit(1.0, 0.0)
    judged: dict[str, list[tuple[Row, Fit]]] = {}
    for kind, of_kind in by_kind.items():
        is_enough = len({row.source for row in of_kind}) > 1
        judged[kind] = left_out(of_kind) if is_enough else [(row, unfitted) for row in of_kind]
    print("| what | published | unfitted | by the other sources | error |\n|---|---|---|---|---|")
    for row, fit in judged["seconds"] + judged["memory"]:
        low, high = row.interval(fit)
        print(
            f"| {row.source}: {row.what} | {row.published:,.4g} {row.unit} | {row.error(unfitted):+.0%} | "
            f"{low:,.4g} to {high:,.4g} {row.unit} | {row.error(fit):+.0%} |"
        )
    print()
    for kind, of_kind in judged.items():
        if of_kind:
            print(summary(kind, of_kind))
    for kind, of_kind in by_kind.items():
        if of_kind and chosen is None:
            fit = fitted(of_kind)
            print(f"{kind}, fitted to all: {fit.factor:.3f} times as much, within {fit.width:.0%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
