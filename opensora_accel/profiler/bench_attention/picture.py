"""Draws a result: whose gradients are right, what a layer sends, and who computes what under a causal mask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opensora_accel.attention.balance import LAYOUTS, TokenLayout, causal_tiles, positions
from opensora_accel.communications import share_sizes
from opensora_accel.profiler.bench_attention.plan import of_ours
from opensora_accel.profiler.bench_attention.results import NOT_OFFERED, SKIPPED, Row
from opensora_accel.profiler.bench_offload.picture import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    require_matplotlib,
)

RANK_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
NUM_TOKENS = 16
"""Of the drawings of layouts, on as many ranks as there are colours."""
_SHORT = {"float32": "fp32", "bfloat16": "bf16"}
RIGHT, WRONG, FAILS, NOTHING = "#9FD3C1", "#D55E00", "#C9C9C9", "#FFFFFF"


def draw(result: dict[str, Any], path: Path) -> None:
    """A PNG 1540 pixels wide; a part that was not measured is left out."""
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9.5, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(11, 9.2), dpi=140, facecolor="white")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(
            2, 2, height_ratios=[1.45, 1], width_ratios=[1, 1], left=0.19, right=0.975, top=0.87, bottom=0.06,
            hspace=0.42, wspace=0.62,
        )  # fmt: skip
        hardware = result["hardware"]
        figure.text(
            0.02, 0.955, "Attention over ranks: whose gradients are right", fontsize=15, weight="bold"
        )
        where = f"{hardware.get('gpu') or hardware['cpu']}, {result['backend']}; {result['date']}"
        figure.text(0.02, 0.928, f"against full attention on one device in fp64. {where}", color=FAINT)
        _draw_errors(figure.add_subplot(grid[0, 0]), result["errors"])
        _draw_bytes(figure.add_subplot(grid[0, 1]), result["bytes"])
        lower = grid[1, :].subgridspec(1, 3, wspace=0.12)
        for column, layout in enumerate(LAYOUTS):
            _draw_layout(figure.add_subplot(lower[0, column]), layout, column == 0)
        figure.savefig(path)


def _most_ranks(rows: Sequence[Row]) -> list[Row]:
    """Those of the largest group that every side of the table ran on."""
    done = [row for row in rows if row["status"] not in (NOT_OFFERED, SKIPPED)]
    most = max((row["ranks"] for row in done), default=0)
    return [row for row in rows if row["ranks"] == most]


def _draw_errors(axes: Any, all_rows: Sequence[Row]) -> None:
    rows = _most_ranks(all_rows)
    sides = [
        s
        for s in dict.fromkeys(row["side"] for row in rows)
        if any(_was_put(r) for r in rows if r["side"] == s)
    ]
    cases = list(dict.fromkeys(row["problem"]["name"] for row in rows))
    for row in rows:
        if row["side"] not in sides:
            continue
        x, y = cases.index(row["problem"]["name"]), sides.index(row["side"])
        colour, text = _verdict(row)
        axes.add_patch(_rectangle((x, y), 0.94, 0.9, colour))
        ink = "white" if colour == WRONG else FAINT if colour == FAILS else INK
        axes.text(x + 0.47, y + 0.45, text, ha="center", va="center", fontsize=7.2, color=ink)
    axes.set_xlim(0, max(1, len(cases)))
    axes.set_ylim(max(1, len(sides)), 0)
    axes.set_xticks([at + 0.47 for at in range(len(cases))], [case.replace(" ", "\n", 1) for case in cases])
    dtypes = {row["side"]: row["problem"]["dtype"] for row in rows}
    shown = [side if dtypes[side] == "float64" else f"{side} ({_SHORT[dtypes[side]]})" for side in sides]
    _name_sides(axes, shown, [at + 0.45 for at in range(len(sides))])
    axes.tick_params(axis="x", labelsize=7.5, length=0, top=False)
    axes.set_title(
        _ranks_title("largest error of out, dq, dk, dv", rows), loc="left", fontsize=10.5, weight="bold"
    )
    for spine in axes.spines.values():
        spine.set_visible(False)


def _was_put(row: Row) -> bool:
    return row["status"] not in (NOT_OFFERED, SKIPPED)


def _verdict(row: Row) -> tuple[str, str]:
    if not _was_put(row):
        return NOTHING, "–"
    if row["status"] != "done":
        return FAILS, row["status"]
    text = "NaN" if row["worst"] is None else f"{row['worst']:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return (RIGHT if row["right"] else WRONG), text


def _draw_bytes(axes: Any, all_rows: Sequence[Row]) -> None:
    rows = [
        row
        for row in _most_ranks(all_rows)
        if row["status"] == "done" and row["problem"]["dtype"] == "float32"
    ]
    sides = [row["side"] for row in rows]
    for at, row in enumerate(rows):
        colour = BLUE if of_ours(row["side"]) else GREY
        axes.barh(at, row["sent_in_q"], height=0.66, color=colour)
        calls = row["collectives"] + row["sends"]
        axes.text(
            row["sent_in_q"],
            at,
            f" {row['sent_in_q']:.3g} in {calls} calls",
            va="center",
            fontsize=8,
            color=INK,
        )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.45 * max((row["sent_in_q"] for row in rows), default=1))
    _name_sides(axes, sides, list(range(len(sides))))
    axes.set_title(
        _ranks_title("sent, in units of the local q, fp32", rows), loc="left", fontsize=10.5, weight="bold"
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _ranks_title(what: str, rows: Sequence[Row]) -> str:
    return f"{what}; {rows[0]['ranks']} ranks" if rows else f"{what}: not measured"


def _name_sides(axes: Any, sides: Sequence[str], at: Sequence[float]) -> None:
    axes.set_yticks(at, sides)
    axes.tick_params(axis="y", length=0, labelsize=8.5)
    for label in axes.get_yticklabels():
        if of_ours(label.get_text()):
            label.set(weight="bold", color=BLUE)


def _rectangle(corner: tuple[float, float], width: float, height: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor=colour, edgecolor="none")


def _draw_layout(axes: Any, layout: TokenLayout, is_first: bool) -> None:
    """Queries down, keys across; a score that is computed has the colour of its rank."""
    num_ranks = len(RANK_COLOURS)
    splits = share_sizes(NUM_TOKENS, num_ranks)
    for rank, colour in enumerate(RANK_COLOURS):
        for row in positions(NUM_TOKENS, num_ranks, rank, layout).tolist():
            axes.add_patch(_rectangle((0, row), row + 1, 0.94, colour))
    pairs = [
        sum(
            tile.num_pairs
            for owner in range(num_ranks)
            for tile in causal_tiles(layout, splits, splits, r, owner)
        )
        for r in range(num_ranks)
    ]
    axes.set_xlim(-0.4, NUM_TOKENS)
    axes.set_ylim(NUM_TOKENS, -0.2)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    if is_first:
        axes.set_ylabel("causal mask, 4 ranks:\nqueries of one colour are one rank's")
    shown = ", ".join(str(number) for number in pairs)
    axes.set_title(f"{layout}\nscores a rank: {shown}", fontsize=9.5, weight="bold", loc="left")
