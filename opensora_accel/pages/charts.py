"""The pictures of the report: inline SVG by matplotlib, which needs no JavaScript and no network.

Text and lines take the page's colours, so that a picture follows a dark or a light page. Every area has a pattern
beside its colour, and the page has a table beside every picture.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import AutoLocator, EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

# Drawn with these, and replaced by the page's variables.
_INK, _LINE, _SURFACE = "#010203", "#040506", "#070809"
_VARIABLES = {_INK: "var(--ink)", _LINE: "var(--line)", _SURFACE: "var(--surface)", "#000000": "var(--ink)"}
_COLOURS = {
    "data": "#b28d3a",
    "encode": "#8d6e63",
    "block": "#8193ab",
    "attention": "#3d7ab8",
    "mlp": "#52a39b",
    "communication": "#9b5f93",
    "copy out": "#c9803c",
    "copy in": "#dba95f",
    "optimizer": "#6d9150",
    "save": "#70757c",
    "exposed": "#c24f44",
    "other": "#aeb4bb",
    "parameters": "#3d7ab8",
    "gradients": "#6d9150",
    "optimizer state": "#b28d3a",
    "block inputs": "#c24f44",
    "block inputs on the host": "#dba95f",
    "recomputation": "#52a39b",
    "compute": "#3d7ab8",
    "hidden": "#52a39b",
    "waited for late ranks": "#b28d3a",
    "matrix products": "#52a39b",
    "norms": "#8d6e63",
    "elementwise": "#8193ab",
    "copies": "#c9803c",
    "made before": "#d5d0c4",
}
# Lines only: a pattern of dots takes a hundred times the bytes.
_HATCHES = {
    "recompute": "|||",
    "backward": "////",
    "exposed": "xxxx",
    "gradients": "////",
    "optimizer state": "---",
    "block inputs": "xxxx",
    "recomputation": "|||",
    "communication": "++",
    "copy out": "////",
    "copy in": "\\\\\\\\",
    "waited for late ranks": "|||",
}
# For what else would look alike.
_FREE_HATCHES = ("\\\\\\\\", "|||", "---", "++", "////", "xxxx", "")
# Inches at which 10 points are as large on a telephone as those of a wide picture on a desk.
_NARROW = 4.3
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
}
GIB = 1 << 30
# More than these are drawn in stretches, and a table has a choice of them.
MAX_STEPS = 400
_MOST_MARKED = 60


class Chart:
    """A figure that becomes an <svg> element.

    chart = Chart(height=3)
    chart.axes.plot(...)
    chart.svg("What it shows")
    """

    def __init__(self, height: float, width: float = 8.6, is_plain: bool = False):
        """A plain one has axes and nothing around them: it is laid out by one look, where legends take several, and
        drawn once.
        """
        self.is_plain = is_plain
        with matplotlib.rc_context(_STYLE):
            self.figure = Figure((width, height), layout=None if is_plain else "constrained")
            self.axes: Axes = self.figure.subplots()

        # By the name in the legend: colour and hatch.
        self.styles: dict[str, tuple[str, str]] = {}

    def style(self, name: str, kind: str, phase: str = "") -> tuple[str, str]:
        """Colour and hatch of a series: those of its kind and phase, unless another series of this chart has them."""
        if name not in self.styles:
            colour, hatch = style_of(kind, phase)
            taken = set(self.styles.values())
            # By colour first, so that what belongs together looks alike.
            others = (
                (each, lines) for each in (colour, *_COLOURS.values()) for lines in (hatch, *_FREE_HATCHES)
            )
            self.styles[name] = next((pair for pair in others if pair not in taken), (colour, hatch))
        return self.styles[name]

    def legend(self, columns: int = 4) -> None:
        """Names with their colour and hatch, and lines that have a label, above the picture."""
        lines, _ = self.axes.get_legend_handles_labels()
        patches = [
            Patch(facecolor=colour, hatch=hatch, edgecolor=_SURFACE, label=name)
            for name, (colour, hatch) in self.styles.items()
        ]
        self.figure.legend(
            handles=[*patches, *lines], loc="outside upper left", ncols=columns, fontsize=9, frameon=False
        )

    def use_log_scales(self) -> None:
        """For numbers of several sizes: ticks at 1, 2 and 5, or of numbers that hardly differ at any round ones."""
        self.axes.set(xscale="log", yscale="log")
        for axis, (low, high) in (
            (self.axes.xaxis, self.axes.get_xlim()),
            (self.axes.yaxis, self.axes.get_ylim()),
        ):
            subs = (1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,)
            axis.set_major_locator(
                LogLocator(subs=subs) if high > 12 * low else MaxNLocator(4, min_n_ticks=2)
            )
            axis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())

    def svg(self, label: str, prefix: str) -> Markup:
        """The picture, and unless it is plain the same for a telephone: narrow, with letters of the same size.

        Args:
            prefix: keeps this picture's identifiers apart from those of others on the page.
        """
        if self.is_plain:
            return Markup(self._svg(label, f"{prefix}-curve"))
        wide = self._svg(label, prefix)
        width, height = self.figure.get_size_inches()
        rows = -(-len(self.styles) // 2) - -(-len(self.styles) // 4)
        self.figure.set_size_inches(min(width, _NARROW), height + 0.19 * rows)
        for legend in list(self.figure.legends):
            legend.remove()
            self.legend(columns=2)
        if isinstance(self.axes.xaxis.get_major_locator(), AutoLocator):
            self.axes.xaxis.set_major_locator(MaxNLocator(5))
        # matplotlib has escaped what names say.
        return Markup(wide + self._svg(label, f"{prefix}-narrow"))

    def _svg(self, label: str, prefix: str) -> str:
        file = io.StringIO()
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": prefix}):
            nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
            if self.is_plain:
                self.figure.tight_layout(pad=0.4)
                self.figure.set_layout_engine(None)  # or it would be drawn once more, to be laid out
            self.figure.savefig(file, format="svg", metadata=nothing)
        text = file.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
        text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.S)
        text = re.sub(r'\bid="', f'id="{prefix}-', text)
        text = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", text)
        text = re.sub(r"font-family: [^;]*; ", "", text)
        for colour, variable in _VARIABLES.items():
            text = text.replace(colour, variable)
        text = re.sub(r'(<svg [^>]*?)width="[^"]*"', r"\1", text, count=1)
        text = re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", text, count=1)
        classes = " ".join(prefix.split("-")[1:])
        return text.replace("<svg ", f'<svg class="{classes}" role="img" aria-label="{escape(label)}" ', 1)


def style_of(name: str, phase: str = "") -> tuple[str, str]:
    """Colour and hatch of a region in a phase, or of a kind of memory."""
    return _COLOURS.get(name, _COLOURS["other"]), _HATCHES.get(phase, "") or _HATCHES.get(name, "")


def part_name(part: Mapping[str, Any]) -> str:
    return " ".join(filter(None, (part["region"], part["axis"], part["phase"])))


def step_breakdown(ranks: Sequence[Mapping[str, Any]], prefix: str) -> Markup:
    """Mean exclusive time of every part, a bar for each rank."""
    chart = Chart(height=1.6 + 0.26 * len(ranks))
    for i, rank in enumerate(ranks):
        left = 0.0
        for part in rank["parts"]:
            colour, hatch = chart.style(part_name(part), part["region"], part["phase"])
            chart.axes.barh(
                i, part["mean_s"], 0.78, left, color=colour, hatch=hatch, edgecolor=_SURFACE, linewidth=0.5
            )
            left += part["mean_s"]
    chart.axes.set_yticks(range(len(ranks)), [f"rank {rank['rank']}" for rank in ranks])
    chart.axes.invert_yaxis()
    chart.axes.set_xlabel("seconds of the mean step")
    chart.axes.grid(axis="y", visible=False)
    chart.legend()
    return chart.svg("Parts of the mean step on every rank; the table below has the numbers", prefix)


def memory_timeline(timeline: Mapping[str, Any], prefix: str) -> Markup:
    """Live bytes by kind over one step, stacked; those on the host as a line."""
    chart = Chart(height=3.6)
    times = [time for time, _ in timeline["memory"]]
    kinds = list(dict.fromkeys(kind for _, sample in timeline["memory"] for kind in sample))
    values = {kind: [sample.get(kind, 0) / GIB for _, sample in timeline["memory"]] for kind in kinds}
    device = [kind for kind in kinds if not kind.endswith("host")]
    areas = chart.axes.stackplot(times, *[values[kind] for kind in device])
    for area, kind in zip(areas, device, strict=True):
        colour, hatch = chart.style(kind, kind.removeprefix("other: "))
        area.set(facecolor=colour, hatch=hatch, edgecolor=_SURFACE, linewidth=0.5)
    for kind in kinds:
        if kind not in device and any(values[kind]):
            chart.axes.plot(times, values[kind], "--", color=_INK, linewidth=1.4, label=kind)
    chart.axes.set(xlabel="seconds since the step's start", ylabel="GiB", ylim=(0, None))
    chart.legend()
    return chart.svg("Live bytes by kind over one step; the table below has the numbers", prefix)


def axes_bars(axes: Sequence[Mapping[str, Any]], prefix: str) -> Markup:
    """How long each axis communicates in a step: hidden, exposed, and waiting for late ranks."""
    chart = Chart(height=1.4 + 0.45 * len(axes))
    names = ("hidden", "exposed", "waited for late ranks")
    for i, axis in enumerate(axes):
        waited = axis["exposed_s"] - axis["exposed_transfer_s"]
        left = 0.0
        for name, seconds in zip(
            names, (axis["seconds"] - axis["exposed_s"], axis["exposed_transfer_s"], waited), strict=True
        ):
            colour, hatch = chart.style(name, name)
            chart.axes.barh(i, max(0.0, seconds), 0.6, left, color=colour, hatch=hatch, edgecolor=_SURFACE)
            left += max(0.0, seconds)
    chart.axes.set_yticks(range(len(axes)), [axis["axis"] or "no axis" for axis in axes])
    chart.axes.invert_yaxis()
    chart.axes.set_xlabel("seconds per step and rank")
    chart.axes.grid(axis="y", visible=False)
    chart.legend()
    return chart.svg("Communication time by axis; the table below has the numbers", prefix)


def sent_matrix(sent: Sequence[Sequence[float]], num_ranks: int, prefix: str) -> Markup:
    """Who sent how much to whom in a step: of few ranks in numbers, of any in colours, by the logarithm.

    Gradients, which everybody gets a little of, would look like nothing beside a ring's messages.
    """
    chart = Chart(height=4.2, width=5.4)
    unit, scale = _unit_of(max((size for _source, _target, size in sent), default=0.0))
    matrix = [[float("nan")] * num_ranks for _ in range(num_ranks)]
    for source, target, size in sent:
        matrix[int(source)][int(target)] = size / scale or float("nan")
    sizes = [size / scale for _source, _target, size in sent if size] or [1.0]
    # Of sizes that are alike a logarithm has no two numbers to show.
    colours = LogNorm(min(sizes), max(sizes)) if max(sizes) > 12 * min(sizes) else Normalize(0, max(sizes))
    image = chart.axes.imshow(matrix, cmap="viridis", norm=colours, interpolation="nearest")
    bar = chart.figure.colorbar(image, label=f"{unit} per step", shrink=0.85)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:g}"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    if num_ranks <= 8:
        for source, target, size in sent:
            chart.axes.text(
                target, source, _in_a_cell(size / scale), ha="center", va="center", fontsize=8, color="white",
                bbox={"facecolor": "#101418", "edgecolor": "none", "pad": 1},
            )  # fmt: skip
    # A tick for each, or at 0, 8, 16, ...: where nodes of eight begin.
    every = 1 if num_ranks <= 8 else 2 ** max(1, math.ceil(math.log2(num_ranks / 8)))
    chart.axes.set_xticks(range(0, num_ranks, every))
    chart.axes.set_yticks(range(0, num_ranks, every))
    chart.axes.set(xlabel="to rank", ylabel="from rank")
    chart.axes.grid(visible=False)
    return chart.svg("Bytes from rank to rank; the table below has the numbers", prefix)


def _unit_of(num_bytes: float) -> tuple[str, float]:
    """In which the number is under 1,024."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << power:
            return unit, float(1 << power)
    return "B", 1.0


def _in_a_cell(value: float) -> str:
    """Of four letters at most, as wide as a cell on a telephone."""
    if 0 < value < 0.01:
        return "~0"
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.3g}"


def offload_timeline(timeline: Mapping[str, Any], prefix: str) -> Markup:
    """When one rank computed and copied in one step."""
    chart = Chart(height=2.1)
    lanes = timeline["lanes"]
    for i, lane in enumerate(lanes):
        colour, _ = style_of(lane["name"])
        bars = [(start, end - start) for start, end in lane["intervals"]]
        chart.axes.broken_barh(bars, (i - 0.35, 0.7), facecolor=colour)
    chart.axes.set_yticks(range(len(lanes)), [lane["name"] for lane in lanes])
    chart.axes.invert_yaxis()
    chart.axes.set(xlabel="seconds since the step's start", xlim=(0, timeline["seconds"]))
    chart.axes.grid(axis="y", visible=False)
    return chart.svg("Compute and copies of one step; the table below has the numbers", prefix)


def over_steps(steps: Sequence[Mapping[str, Any]], field: str, label: str, prefix: str) -> Markup:
    """One number over the steps; the warm-up is a hollow point.

    Of more than `MAX_STEPS` steps each stretch is its median, in a band from its lowest to its highest.
    """
    # Two of them stand side by side on a desk.
    chart = Chart(height=2.35, width=_NARROW, is_plain=True)
    known = [(step["step"], step[field], step["warm_up"]) for step in steps if step[field] is not None]
    counted = [(number, value) for number, value, warm_up in known if not warm_up]
    if len(steps) > MAX_STEPS:
        length = -(-len(steps) // MAX_STEPS)
        stretches = [counted[i : i + length] for i in range(0, len(counted), length)]
        middle = [stretch[len(stretch) // 2][0] for stretch in stretches]
        values = [[value for _number, value in stretch] for stretch in stretches]
        low, high = [min(each) for each in values], [max(each) for each in values]
        chart.axes.fill_between(middle, low, high, color=_COLOURS["attention"], alpha=0.35, linewidth=0)
        chart.axes.plot(middle, [statistics.median(each) for each in values], color=_COLOURS["attention"])
    elif counted:
        # More points than these would be one thick line.
        style = "o-" if len(counted) <= _MOST_MARKED else "-"
        chart.axes.plot(*zip(*counted, strict=True), style, color=_COLOURS["attention"], markersize=4)
    for number, value, warm_up in known:
        if warm_up:
            chart.axes.plot(number, value, "o", markerfacecolor="none", color=_COLOURS["attention"])
            chart.axes.annotate("warm-up", (number, value), (7, -3), textcoords="offset points", fontsize=8)
    chart.axes.set(xlabel="step", ylabel=label)
    chart.axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if any(abs(value) >= 1e4 for _number, value, _warm_up in known):
        chart.axes.yaxis.set_major_formatter(
            EngFormatter(sep="")
        )  # 250k, not 250000 or 2.5 and "1e5" elsewhere
    if field != "loss":
        # In a line that hardly rises, autoscaling would cut the upper half.
        chart.axes.set_ylim(0, 1.08 * max((value for _number, value, _warm_up in known), default=1.0) or None)
    return chart.svg(f"{label} over the steps; the table below has the numbers", prefix)
