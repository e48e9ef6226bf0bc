"""Draws a result: memory over the step for each scheme, and what ran when on the three queues."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from opensora_accel.profiler.bench_offload.schemes import OFFLOADED, REFERENCE

# Colours that the colour-blind tell apart (Okabe and Ito, https://jfly.uni-koeln.de/color/).
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#8A8A8A"
INK, FAINT = "#222222", "#666666"
PANELS = (
    ("none", "no checkpointing", GREY),
    (REFERENCE, "checkpointing", ORANGE),
    (OFFLOADED, "checkpointing\n+ our offload", BLUE),
    ("selective+offload", "attention kept too\n+ our offload", PURPLE),
    ("save_on_cpu", "checkpointing\n+ save_on_cpu", GREEN),
)
HEADROOM = 1.45
"""Of the axis, above the greatest peak of the schemes that checkpoint; without checkpointing leaves the picture."""
LEAST_WIDTH = 0.0025
"""Of the picture's width: what a copy is drawn with at least, so that it is seen."""

ROOM = 0.019
"""Of the picture's width: what a block's number needs."""


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError(
            "--picture needs matplotlib, which is not installed; pip install matplotlib (or the extra: "
            "pip install 'opensora-accel[plot]'), or leave --picture out and keep the figures with --output"
        ) from None


def draw(result: dict[str, Any], path: Path) -> None:
    """A PNG of the last case, 1400 pixels wide."""
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    case = result["cases"][-1]
    panels = [panel for panel in PANELS if "timeline" in case["schemes"].get(panel[0], {})]
    queues = case["schemes"].get(OFFLOADED, {}).get("queues")
    with matplotlib.rc_context({"font.size": 9.5, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(10, 7.4), dpi=140, facecolor="white")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(
            2, max(1, len(panels)), height_ratios=[1.35, 1], left=0.085, right=0.985, top=0.79, bottom=0.1,
            hspace=0.5, wspace=0.12,
        )  # fmt: skip
        _headline(figure, result, case)
        _draw_memory(figure, grid, case, panels)
        if queues is not None:
            _draw_queues(figure.add_subplot(grid[1, :]), queues, result["hardware"]["device"], case)
        figure.savefig(path)


def _headline(figure: Any, result: dict[str, Any], case: dict[str, Any]) -> None:
    figure.text(0.02, 0.955, _finding(case), fontsize=15, weight="bold")
    hardware = result["hardware"]
    where = hardware.get("gpu") or f"{hardware['cpu']} (accounting only: a CPU's copies cannot hide)"
    figure.text(0.02, 0.922, f"One training step of a stack of DiT blocks on {where}", color=FAINT)
    figure.text(0.02, 0.895, case["name"], color=FAINT)


def _finding(case: dict[str, Any]) -> str:
    schemes = case["schemes"]
    ours, alone = schemes.get(OFFLOADED, {}), schemes.get(REFERENCE, {})
    if "resident_bytes" not in ours or "resident_bytes" not in alone:
        return "Memory of one training step"
    share = 1 - ours["resident_bytes"] / alone["resident_bytes"]
    if share <= 0:
        return "So few blocks fill the engine's two slots: offload frees nothing here"
    found = f"Offload frees {share:.0%} of what checkpointing keeps"
    if case["device"] == "cuda" and ours["step_time_ratio"] is not None:
        return f"{found}, at {ours['step_time_ratio'] - 1:+.1%} step time"
    return f"{found} ({ours['peak_bytes'] / alone['peak_bytes'] - 1:+.0%} peak)"


# ---- memory


def _draw_memory(
    figure: Any, grid: Any, case: dict[str, Any], panels: Sequence[tuple[str, str, str]]
) -> None:
    schemes = case["schemes"]
    scale, unit = _unit(max((schemes[name]["peak_bytes"] for name, *_ in panels), default=0))
    checkpointed = [schemes[name]["peak_bytes"] for name, *_ in panels if name != "none"]
    top = HEADROOM * max(checkpointed or [schemes[name]["peak_bytes"] for name, *_ in panels] or [1]) / scale
    first = None
    for column, (name, title, colour) in enumerate(panels):
        axes = figure.add_subplot(grid[0, column], sharey=first)
        first = first or axes
        _draw_panel(axes, schemes[name], colour, scale, unit, top)
        axes.set_title(title, fontsize=10.5, color=colour if name != "none" else INK, weight="bold", pad=8)
        if column == 0:
            axes.set_ylabel(f"live activations ({unit})")
        else:
            axes.tick_params(labelleft=False, left=False)
        if name != REFERENCE and REFERENCE in schemes:
            level = schemes[REFERENCE]["resident_bytes"] / scale
            axes.axhline(level, color=ORANGE, linewidth=1, linestyle=(0, (4, 3)))
    if first is not None:
        note = "the step's operations, in order; dashed: what checkpointing alone keeps after the forward"
        middle = 0.53
        figure.text(middle, 0.427, note, ha="center", color=FAINT)


def _draw_panel(axes: Any, scheme: dict[str, Any], colour: str, scale: int, unit: str, top: float) -> None:
    forward, backward = (scheme["timeline"][f"{half}_bytes"] for half in ("forward", "backward"))
    places = [i / len(forward) for i in range(len(forward))]
    places += [1 + i / len(backward) for i in range(len(backward))]
    values = [value / scale for value in (*forward, *backward)]
    axes.fill_between(places, values, color=colour, alpha=0.28, linewidth=0)
    axes.plot(places, values, color=colour, linewidth=1.1)
    axes.axvline(1, ymax=0.83, color=INK, linewidth=0.8)
    resident, peak = scheme["resident_bytes"] / scale, scheme["peak_bytes"] / scale
    axes.set_ylim(0, top)
    axes.set_xlim(0, 2)
    axes.set_xticks([0.5, 1.5], ["forward", "backward"])
    axes.tick_params(axis="x", length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    shown = f"peak {_number(peak)} {unit}" + (" ↑" if peak > top else "")
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(1.0, top * 0.985, shown, ha="center", va="top", weight="bold", bbox=box)
    axes.text(1.0, top * 0.9, f"after forward {_number(resident)}", ha="center", va="top", bbox=box)
    if resident < top:
        axes.plot(
            [1], [resident], marker="o", markersize=5.5, color=colour, markeredgecolor="white", zorder=5
        )


def _unit(size_bytes: int) -> tuple[int, str]:
    return (2**30, "GiB") if size_bytes >= 2**30 else (2**20, "MiB")


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


# ---- queues


def _draw_queues(axes: Any, queues: dict[str, Any], device: str, case: dict[str, Any]) -> None:
    end = max(
        (interval[1] for key in ("compute_ms", "out_ms", "in_ms") for interval in queues[key]), default=1
    )
    least = LEAST_WIDTH * end
    _draw_compute(axes, queues, end)
    for row, key, colour in ((1, "out_ms", GREEN), (0, "in_ms", PURPLE)):
        bars = [(start, max(stop - start, least)) for start, stop in queues[key]]
        axes.broken_barh(bars, (row - 0.32, 0.64), facecolors=colour, linewidth=0)
    if queues["labels"]:
        _number_copies(axes, queues, end)
    axes.set_yticks([2, 1, 0], ["compute", "copies out\n(to host)", "copies in\n(to device)"])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, 2.6)
    axes.set_xlim(-0.005 * end, end * 1.005)
    axes.set_xlabel("time in the step (ms)")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(_queue_title(device, case), loc="left", fontsize=10.5, weight="bold", color=BLUE, pad=6)


def _queue_title(device: str, case: dict[str, Any]) -> str:
    ours, hidden = "checkpointing + our offload", case["schemes"][OFFLOADED]["copy_time_hidden_share"]
    if device == "cpu":
        return f"{ours}: order of copies on a CPU (they do not overlap here); numbers are blocks"
    if hidden is None:
        return f"{ours}: the three queues of the GPU"
    return f"{ours}: {hidden:.1%} of the time that copies take lies beside compute"


def _draw_compute(axes: Any, queues: dict[str, Any], end: float) -> None:
    if not queues["labels"]:
        bars = [(start, stop - start) for start, stop in queues["compute_ms"]]
        axes.broken_barh(bars, (1.68, 0.64), facecolors=BLUE, linewidth=0)
        return
    spans: dict[str, list[float]] = {}
    for (start, stop), label in zip(queues["compute_ms"], queues["labels"], strict=True):
        kind, _, _ = label.partition(" ")
        colour = "#7FB8DA" if kind == "forward" else BLUE
        axes.broken_barh(
            [(start, stop - start)], (1.68, 0.64), facecolors=colour, edgecolors="white", linewidth=0.6
        )
        span = spans.setdefault(label, [start, stop])
        span[1] = stop
    for label, (start, stop) in spans.items():
        kind, _, number = label.partition(" ")
        if stop - start > ROOM * end:
            colour = INK if kind == "forward" else "white"
            axes.text((start + stop) / 2, 2, number, ha="center", va="center", color=colour, fontsize=9)
    for kind in ("forward", "backward"):
        inside = [span for label, span in spans.items() if label.startswith(kind)]
        if inside:
            middle = (min(s for s, _ in inside) + max(e for _, e in inside)) / 2
            shown = kind if kind == "forward" else "backward: each block is recomputed, then differentiated"
            axes.text(middle, 2.36, shown, ha="center", va="bottom", color=INK)


def _number_copies(axes: Any, queues: dict[str, Any], end: float) -> None:
    """One copy for each block that moves: out in their order, in the other way round."""
    for row, key, step in ((1, "out_ms", 1), (0, "in_ms", -1)):
        numbers = range(len(queues[key]))[::step]
        starts = [start for start, _ in queues[key]]
        if any(later - start < 1.4 * ROOM * end for start, later in pairwise(starts)):
            continue
        for (_, stop), number in zip(queues[key], numbers, strict=True):
            axes.text(stop + 0.004 * end, row, str(number), va="center", ha="left", fontsize=9, color=INK)
