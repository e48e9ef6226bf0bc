"""Draws the house from its imports: docs/architecture.png, one box a room, arrows down to what it imports.

A room is a folder, or a file of its own, of `opensora_accel` and `shardformer`. A room stands one row above the
highest of those that it imports. An arrow is left out where a longer way leads to the same room (the transitive
reduction).

    python tools/draw_architecture.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("opensora_accel", "shardformer")
COLORS = {"opensora_accel": "#dbe9f6", "shardformer": "#fde6cf"}
# A package's own __init__ is a door and no room: it hands out the names of this one.
DOORS = {"opensora_accel": "opensora_accel.parallel_states", "shardformer": "shardformer.engine"}
# Open-Sora's name for a policy of ColossalAI's: a front that stands above both rooms.
FRONTS = {"shardformer.policy.t5_encoder"}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module's dotted name and its file."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def room(module: str) -> str:
    """The room of a module."""
    module = DOORS.get(module, module)
    return module if module in FRONTS else ".".join(module.split(".")[:2])


def rooms() -> tuple[dict[str, list[int]], dict[str, set[str]]]:
    """For every room the number of its files and of their lines, and the rooms that it imports."""
    known = dict(modules())
    size: dict[str, list[int]] = {}
    imports: dict[str, set[str]] = {}
    for module, path in known.items():
        source = path.read_text(encoding="utf-8")
        if module in DOORS:
            continue
        here = room(module)
        counted = size.setdefault(here, [0, 0])
        counted[0] += 1
        counted[1] += len(source.splitlines())
        for node in ast.walk(ast.parse(source)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                # `from opensora_accel import plan` imports the module plan.
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in known else node.module for name in inner]
            found = {room(name) for name in names if name in known}
            imports.setdefault(here, set()).update(found - {here})
    return size, imports


def reduced(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that a longer way makes superfluous."""

    def reached(start: str, seen: set[str]) -> set[str]:
        for other in imports.get(start, set()) - seen:
            seen.add(other)
            reached(other, seen)
        return seen

    return {
        start: {end for end in ends if not any(end in reached(way, set()) for way in ends - {end})}
        for start, ends in imports.items()
    }


def rows(imports: dict[str, set[str]]) -> dict[str, int]:
    """Each room's row, counted from the bottom."""
    found: dict[str, int] = {}

    def row(name: str, above: tuple[str, ...] = ()) -> int:
        if name in above:
            raise ValueError(f"the rooms import each other: {' → '.join([*above, name])}")
        if name not in found:
            below = [row(other, (*above, name)) for other in imports.get(name, ())]
            found[name] = 1 + max(below, default=-1)
        return found[name]

    for name in imports:
        row(name)
    return found


def draw(path: Path) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size, imports = rooms()
    place = rows(imports)
    by_row: dict[int, list[str]] = {}
    for name, row in place.items():
        by_row.setdefault(row, []).append(name)
    widest = max(map(len, by_row.values()))
    figure, axes = plt.subplots(figsize=(2.3 * widest, 1.25 * len(by_row)))
    centres: dict[str, tuple[float, float]] = {}
    for row, members in by_row.items():
        for number, name in enumerate(sorted(members)):
            centres[name] = (widest * (number + 0.5) / len(members), float(row))
    boxes = {}
    for name, (x, y) in centres.items():
        num_files, num_lines = size[name]
        package, _, short = name.partition(".")
        files = f"{num_files} files, " if num_files > 1 else ""
        box = {"boxstyle": "round,pad=0.35", "facecolor": COLORS[package], "edgecolor": "#555555"}
        told = f"{short}\n{files}{num_lines:,} lines"
        boxes[name] = axes.text(x, y, told, ha="center", va="center", fontsize=9, bbox=box, zorder=3)
    figure.canvas.draw()  # gives the boxes their sizes, at which arrows end
    for start, ends in reduced(imports).items():
        for end in ends:
            bend = 0.0 if place[start] - place[end] <= 1 else 0.08
            style = {
                "arrowstyle": "-|>",
                "color": "#888888",
                "connectionstyle": f"arc3,rad={bend}",
                "patchA": boxes[start].get_bbox_patch(),
                "patchB": boxes[end].get_bbox_patch(),
            }
            axes.annotate("", xy=centres[end], xytext=centres[start], arrowprops=style, zorder=1)
    axes.set(xlim=(0, widest), ylim=(-0.6, len(by_row) - 0.4))
    axes.axis("off")
    axes.set_title(
        "blue: opensora_accel, orange: shardformer; an arrow leads to what a room imports", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(ROOT / "docs" / "architecture.png")
    print("docs/architecture.png")
