"""The pictures of the benchmarks, drawn from what they store. matplotlib is needed here and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from harness import show_error
from peers import is_ours
from peers.side import NOT_OFFERED, SKIPPED

from opensora_accel.attention.balance import TokenLayout, positions

# Colours that the colour-blind tell apart (Okabe and Ito, https://jfly.uni-koeln.de/color/).
BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#8A8A8A"


@contextlib.contextmanager
def drawing(path: Path, title: str, below: str, width: float, height: float) -> Iterator[Any]:
    """Within it, a matplotlib figure of so many inches under a headline, which is then saved."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = {"font.size": 9.5, "axes.titleweight": "bold", "axes.titlesize": 10.5}
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), dpi=140, facecolor="white")
        FigureCanvasAgg(figure)
        figure.text(0.02, 0.955, title, fontsize=15, weight="bold")
        figure.text(0.02, 0.945, below, va="top")
        yield figure
        figure.savefig(path)


# ---- attention

Row = Mapping[str, Any]


def draw_attention(result: dict[str, Any], path: Path) -> None:
    """Whose gradients are right, what a layer sends, and who computes what under a causal mask."""
    where = (
        f"{result['hardware'].get('gpu') or result['hardware']['cpu']}, {result['backend']}; {result['date']}"
    )
    below = f"against full attention on one device in fp64. {where}"
    with drawing(path, "Attention over ranks: whose gradients are right", below, 11, 9) as figure:
        edges = {"left": 0.19, "right": 0.975, "top": 0.87, "bottom": 0.04}
        grid = figure.add_gridspec(2, 2, height_ratios=[1.5, 1], hspace=0.4, wspace=0.62, **edges)
        _draw_errors(figure.add_subplot(grid[0, 0]), result["errors"])
        _draw_bytes(figure.add_subplot(grid[0, 1]), result["bytes"])
        layouts: tuple[TokenLayout, ...] = get_args(TokenLayout)
        lower = grid[1, :].subgridspec(1, len(layouts), wspace=0.12)
        for column, layout in enumerate(layouts):
            _draw_layout(figure.add_subplot(lower[0, column]), layout)


def _of_most_ranks(rows: Sequence[Row]) -> list[Row]:
    most = max((row["ranks"] for row in rows if row["status"] not in (NOT_OFFERED, SKIPPED)), default=0)
    return [row for row in rows if row["ranks"] == most and row["status"] != SKIPPED]


def _name_sides(axes: Any, sides: Sequence[str], title: str, rows: Sequence[Row]) -> None:
    where = f"{rows[0]['ranks']} ranks" if rows else "not measured"
    axes.set_title(f"{title}; {where}", loc="left")
    axes.set_yticks(range(len(sides)), sides)
    axes.set_ylim(len(sides) - 0.45, -0.55)
    for side, label in zip(sides, axes.get_yticklabels(), strict=True):
        label.set_weight("bold" if is_ours(side) else "normal")


def _draw_errors(axes: Any, all_rows: Sequence[Row]) -> None:
    rows = _of_most_ranks(all_rows)
    sides = list(dict.fromkeys(row["side"] for row in rows if row["status"] != NOT_OFFERED))
    cases = list(dict.fromkeys(row["problem"]["name"] for row in rows))
    for row in (row for row in rows if row["side"] in sides):
        x, y = cases.index(row["problem"]["name"]), sides.index(row["side"])
        text, colour = row["status"], "#C9C9C9"
        if text == NOT_OFFERED:
            text, colour = "–", "#FFFFFF"
        elif text == "done":
            text, colour = show_error(row["worst"]), "#9FD3C1" if row["right"] else RED
        axes.barh(y, 0.94, left=x, height=0.9, color=colour)
        axes.text(x + 0.47, y, text, ha="center", va="center", fontsize=7.2)
    _name_sides(axes, sides, "largest error of out, dq, dk, dv", rows)
    axes.set_xticks([at + 0.47 for at in range(len(cases))], [case.replace(" ", "\n", 1) for case in cases])
    axes.tick_params(axis="x", labelsize=7.5)


def _draw_bytes(axes: Any, all_rows: Sequence[Row]) -> None:
    done = [row for row in _of_most_ranks(all_rows) if row["status"] == "done"]
    rows = [row for row in done if row["problem"]["dtype"] == "float32"]
    for at, row in enumerate(rows):
        axes.barh(at, row["sent_in_q"], height=0.66, color=BLUE if is_ours(row["side"]) else GREY)
        text = f" {row['sent_in_q']:.3g} in {row['collectives'] + row['sends']} calls"
        axes.text(row["sent_in_q"], at, text, va="center", fontsize=8)
    axes.set_xlim(0, 1.45 * max((row["sent_in_q"] for row in rows), default=1))
    _name_sides(axes, [row["side"] for row in rows], "sent, in units of the local q, fp32", rows)


def _draw_layout(axes: Any, layout: TokenLayout) -> None:
    """Queries down, keys across, 16 tokens on 4 ranks; a score that is computed has the colour of its rank."""
    scores = []
    for rank, colour in enumerate((BLUE, ORANGE, GREEN, PURPLE)):
        queries = positions(16, 4, rank, layout).tolist()
        keys_seen = [query + 1 for query in queries]
        axes.barh(queries, keys_seen, height=0.94, color=colour)
        scores.append(str(sum(keys_seen)))
    axes.set(ylim=(16, -1), aspect="equal", xticks=[], yticks=[])
    axes.set_title(f"{layout}, causal\nscores a rank: {', '.join(scores)}", loc="left")


# ---- offload

# The schemes that a claim or the headline of the picture compares.
REFERENCE, OFFLOADED = "full", "full+offload"
PANELS = {
    "none": ("no checkpointing", GREY),
    REFERENCE: ("checkpointing", ORANGE),
    OFFLOADED: ("checkpointing\n+ our offload", BLUE),
    "selective+offload": ("attention kept too\n+ our offload", PURPLE),
    "save_on_cpu": ("checkpointing\n+ save_on_cpu", GREEN),
}


def draw_offload(result: dict[str, Any], path: Path) -> None:
    """Memory over the step for each scheme of the last case, and what ran when on the three queues."""
    case, hardware = result["cases"][-1], result["hardware"]
    schemes = {name: case["schemes"][name] for name in PANELS if "timeline" in case["schemes"].get(name, {})}
    if not schemes:
        return  # nothing was measured that could be drawn
    ours, alone = (schemes.get(name, {}).get("resident_bytes", 0) for name in (OFFLOADED, REFERENCE))
    title = (
        f"Offload frees {1 - ours / alone:.0%} of what checkpointing keeps" if ours and alone else "Memory"
    )
    where = hardware.get("gpu") or f"{hardware['cpu']} (accounting only: copies cannot hide)"
    below = f"One training step of a stack of DiT blocks on {where}\n{case['name']}"
    # Without checkpointing leaves the picture.
    highest = max(
        scheme["peak_bytes"] for name, scheme in schemes.items() if name != "none" or len(schemes) < 2
    )
    scale, unit = (2**30, "GiB") if highest >= 2**30 else (2**20, "MiB")
    with drawing(path, title, below, 10, 7.4) as figure:
        edges = {"left": 0.085, "right": 0.985, "top": 0.79, "bottom": 0.1}
        grid = figure.add_gridspec(2, len(schemes), height_ratios=[1.35, 1], hspace=0.5, **edges)
        for column, (name, scheme) in enumerate(schemes.items()):
            axes = figure.add_subplot(grid[0, column])
            label, colour = PANELS[name]
            for at, half in enumerate(("forward_bytes", "backward_bytes")):
                sizes = [size / scale for size in scheme["timeline"][half]]
                places = [at + index / len(sizes) for index in range(len(sizes))]
                axes.fill_between(places, sizes, color=colour, alpha=0.4)
            axes.axvline(1, ymax=0.8, color="black", linewidth=0.8)
            axes.axhline(alone / scale, color=ORANGE, linewidth=1, linestyle="--")
            top = 1.45 * highest / scale
            axes.set(xlim=(0, 2), ylim=(0, top))
            axes.set_xticks([0.5, 1.5], ["forward", "backward"])
            axes.set_title(label, color=colour)
            peak, resident = (f"{scheme[f'{key}_bytes'] / scale:.2f}" for key in ("peak", "resident"))
            axes.text(1, top, f"peak {peak} {unit}\nafter forward {resident}", ha="center", va="top")
        note = "the step's operations, in order; dashed: what checkpointing alone keeps after the forward"
        figure.text(0.53, 0.43, note, ha="center")
        if "queues" in schemes.get(OFFLOADED, {}):
            share = schemes[OFFLOADED]["copy_time_hidden_share"]
            how = "they do not overlap on a CPU" if share is None else f"{share:.1%} hidden"
            _draw_queues(figure.add_subplot(grid[1, :]), schemes[OFFLOADED]["queues"], how)


def _draw_queues(axes: Any, queues: Mapping[str, Any], how: str) -> None:
    rows = (("compute", BLUE), ("out", GREEN), ("in", PURPLE))
    end = max((stop for key, _ in rows for _, stop in queues[f"{key}_ms"]), default=1.0)
    for row, (key, colour) in enumerate(rows):
        # A copy is drawn wide enough to be seen.
        bars = [(start, max(stop - start, 0.0025 * end)) for start, stop in queues[f"{key}_ms"]]
        axes.broken_barh(bars, (2 - row - 0.32, 0.64), facecolors=colour, edgecolors="white", linewidth=0.4)
    # Where each block begins. On CUDA no kernel knows its block.
    begins = dict(zip(reversed(queues["labels"]), reversed(queues["compute_ms"]), strict=False))
    for label, (start, _) in begins.items():
        axes.text(start, 2.4, label.replace("forward ", "").replace("backward ", "−"), fontsize=8)
    axes.set_yticks([2, 1, 0], ["compute", "copies out\n(to host)", "copies in\n(to device)"])
    axes.set_xlabel("time in the step (ms)")
    axes.set_title(f"our offload: blocks in forward, and (−) in backward; copies: {how}", loc="left")


# ---- longest sequences


def draw_longest(result: dict[str, Any], path: Path) -> None:
    """The longest sequence under each mode, and the peaks of all lengths that were tried."""
    modes = {name: found for name, found in result["modes"].items() if found["tokens"]}
    if not modes:
        return  # nothing fitted
    colours = {"none": GREY, "selective": PURPLE, "full": ORANGE, "full+offload": BLUE}
    hardware, limit = result["hardware"], result["limit_bytes"]
    scale, unit = (2**30, "GiB") if limit >= 2**30 else (2**20, "MiB")
    below = f"Wan blocks on {hardware.get('gpu') or hardware['cpu']}, {limit / scale:.3g} {unit}; {result['date']}"
    with drawing(path, "The longest sequence that fits", below, 10, 4.6) as figure:
        bars, lines = figure.subplots(1, 2)
        figure.subplots_adjust(left=0.13, right=0.975, top=0.78, bottom=0.13, wspace=0.3)
        for row, (name, found) in enumerate(modes.items()):
            bars.barh(row, found["tokens"], color=colours[name])
            at_least = "≥ " if "time ended" in found["ended"] else ""
            bars.text(found["tokens"], row, f" {at_least}{found['tokens']:,}", va="center")
            points = sorted(
                (one["tokens"], one["peak_bytes"] / scale) for one in found["tried"] if "peak_bytes" in one
            )
            lines.plot(*zip(*points, strict=True), color=colours[name], marker="o", label=name)
        bars.set_yticks(range(len(modes)), list(modes))
        bars.set(xlabel="tokens", xlim=(0, 1.35 * max(found["tokens"] for found in modes.values())))
        bars.invert_yaxis()
        bars.locator_params(axis="x", nbins=5)
        bars.set_title("longest", loc="left")
        lines.axhline(limit / scale, color="black", linewidth=0.8, linestyle="--")
        lines.set(xlabel="tokens", ylabel=unit)
        lines.set_title("peak of a step", loc="left")
        lines.legend(frameon=False)


# ---- scaling

STRATEGIES = {
    "ulysses": BLUE,
    "ring": ORANGE,
    "ring × ulysses": GREEN,
    "data parallel": GREY,
    "data parallel, sharded": PURPLE,
}


def draw_scaling(result: dict[str, Any], path: Path) -> None:
    """Efficiency over ranks, dashed where it is simulated; and what ranks wait for."""
    modes = [mode for mode in ("strong", "weak") if mode in result]
    hardware = result["hardware"]
    where = hardware.get("gpu") or f"{hardware['cpu']}, {result['workers']} cores"
    below = f"a small Wan on {where}; {result['date']}\ndashed: SIMULATED from the fit and the link"
    with drawing(path, "How a training step scales over ranks", below, 11, 1.3 + 3.7 * len(modes)) as figure:
        top = 1 - 1.15 / (1.3 + 3.7 * len(modes))
        edges = {"left": 0.075, "right": 0.98, "top": top, "bottom": 0.16 / len(modes)}
        grid = figure.add_gridspec(len(modes), 2, hspace=0.42, wspace=0.42, **edges)
        for line, mode in enumerate(modes):
            _draw_efficiency(figure.add_subplot(grid[line, 0]), mode, result[mode], result["workers"])
            _draw_waits(figure.add_subplot(grid[line, 1]), mode, result[mode]["rows"])


def _draw_efficiency(axes: Any, mode: str, found: Mapping[str, Any], workers: int) -> None:
    one, most = found["rows"][0], max(row["ranks"] for row in found["rows"] + found["simulated"])
    for name, colour in STRATEGIES.items():
        rows = [one] + [row for row in found["rows"] if row["strategy"] == name]
        if len(rows) == 1:
            continue
        ranks = [row["ranks"] for row in rows]
        middle = [row["efficiency"]["median"] for row in rows]
        around = [
            [abs(row["efficiency"][quartile] - row["efficiency"]["median"]) for row in rows]
            for quartile in ("q1", "q3")
        ]
        axes.errorbar(ranks, middle, yerr=around, color=colour, marker="o", capsize=3, label=name)
        beyond = [row for row in found["simulated"] if row["strategy"] == name]
        if beyond:
            # From the last measured point on that has a core for each rank.
            start = [row for row in rows if row["workers"] == row["ranks"]][-1]
            axes.plot(
                [start["ranks"], *(row["ranks"] for row in beyond)],
                [start["efficiency"]["median"], *(row["efficiency"] for row in beyond)],
                color=colour,
                linestyle="--",
                marker="o",
                markerfacecolor="white",
            )
    sizes = sorted({row["ranks"] for row in found["rows"] + found["simulated"]})
    if any(row["workers"] < row["ranks"] for row in found["rows"]):
        measured = [size for size in sizes if size <= max(row["ranks"] for row in found["rows"])]
        permitted = [min(1.0, workers / size) for size in measured]
        axes.plot(measured, permitted, color="black", linewidth=0.8, label=f"what {workers} cores permit")
    if found["simulated"]:
        axes.plot(
            [], [], color="black", linestyle="--", marker="o", markerfacecolor="white", label="SIMULATED"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, sizes)
    # Room for the legend above the lines.
    axes.set(xlabel="ranks", ylabel="efficiency", ylim=(0, 1.4), xlim=(0.9, most * 1.1))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_title(f"{mode} scaling", loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)


def _draw_waits(axes: Any, mode: str, rows: Sequence[Row]) -> None:
    shown = [row for row in rows if row["ranks"] > 1]
    for at, row in enumerate(shown):
        seen = row["seen"]
        network, waited = (100 * seen[key] / seen["profiled_step_s"] for key in ("network_s", "waited_s"))
        axes.barh(at, network, color=BLUE, label="the network" if at == 0 else None)
        axes.barh(at, waited, left=network, color=ORANGE, label="ranks that come later" if at == 0 else None)
        axes.text(
            network + waited,
            at,
            f" {row['sent_bytes'] / 2**20:.3g} MiB in {row['calls']:.0f} calls",
            va="center",
        )
    names = [f"{row['strategy']}, {row['ranks']}" for row in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set_xlim(0, 1.5 * max([1.0, *(100 * row["seen"]["exposed_share"] for row in shown)]))
    axes.set_ylim(len(shown) - 0.4, -1.6)
    axes.set_xlabel("% of the step")
    axes.set_title(f"{mode}: what a rank waits for", loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)


# ---- techniques


def draw_techniques(result: dict[str, Any], path: Path) -> None:
    """Memory saved over time paid, a dot a technique; and accounted beside measured memory."""
    rows = [row for row in result["techniques"] if row["strategy"] != row["against"]]
    hardware = result["hardware"]
    where = hardware.get("gpu") or f"{hardware['cpu']}, {result['workers']} cores"
    below = f"one training step of a small Wan, each technique against none, on {where}; {result['date']}"
    with drawing(path, "Memory saved, and the time it costs", below, 11, 5.2) as figure:
        figure.subplots_adjust(left=0.07, right=0.98, top=0.82, bottom=0.11, wspace=0.55)
        dots, bars = figure.subplots(1, 2)
        for number, row in enumerate(rows, start=1):
            paid, saved = row["paid"], 100 * row["saved"]
            around = [[abs(paid[quartile] - paid["median"])] for quartile in ("q1", "q3")]
            colour = BLUE if row["ranks"] == 1 else ORANGE
            dots.errorbar(paid["median"], saved, xerr=around, color=colour, marker="o", capsize=3)
            dots.annotate(
                str(number),
                (paid["median"], saved),
                (5, 5 if number % 2 else -13),
                textcoords="offset points",
            )
        dots.axvline(1, color="black", linewidth=0.8, linestyle="--")
        dots.axhline(0, color="black", linewidth=0.8)
        dots.set(xlabel="time paid: device time a clip, over none", ylabel="% of a rank's peak saved")
        dots.set_title("one rank (blue), several (orange)", loc="left")
        for at, row in enumerate(rows):
            bars.barh(at - 0.2, row["seen"]["peak_bytes"] / 2**20, height=0.38, color=BLUE)
            bars.barh(at + 0.2, row["accounted_bytes"] / 2**20, height=0.38, color=GREY)
            bars.text(
                row["seen"]["peak_bytes"] / 2**20,
                at - 0.2,
                f" {row['deviation']:+.0%}",
                va="center",
                fontsize=8,
            )
        bars.set_yticks(range(len(rows)), [f"{n} {row['strategy']}" for n, row in enumerate(rows, start=1)])
        bars.set_ylim(len(rows) - 0.4, -0.6)
        bars.set_xlabel("MiB of a rank")
        bars.set_title("peak measured (blue), accounted (grey)", loc="left")
