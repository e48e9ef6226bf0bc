"""What the house looks like, in numbers and as a picture, read from its sources.

    python tools/house.py               # what `import shardformer` loads, names past a room's face, lines by room …
    python tools/house.py --picture     # draws docs/architecture.png anew

A room is a folder, or a file of its own, of `opensora_accel` and `shardformer`. Its face is what its `__init__` names
in `__all__`; of a file, every name without an underscore. In the picture a room stands one row above the highest of
those that it imports, and an arrow is left out where a longer way leads to the same room (the transitive reduction).

A Plan is followed through `shard` as a reader does it who looks at every function once, when it is first called: a stop
is a file, for as long as no other one comes between; a turn is a stop in a room that was left before.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("opensora_accel", "shardformer")
COLORS = {"opensora_accel": "#dbe9f6", "shardformer": "#fde6cf"}
# A package's own __init__ is a door and no room: it hands out the names of this one.
DOORS = {"opensora_accel": "opensora_accel.parallel_states", "shardformer": "shardformer.engine"}
# Open-Sora's name for a policy of ColossalAI's: a front that stands above both rooms.
FRONTS = {"shardformer.policy.t5_encoder"}


@functools.cache
def modules() -> dict[str, Path]:
    """Every module's file, by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    """The room of a module."""
    module = DOORS.get(module, module)
    return module if module in FRONTS else ".".join(module.split(".")[:2])


@functools.cache
def faces() -> dict[str, set[str] | None]:
    """The names of every room's face; None where a file has no list of its own."""
    found: dict[str, set[str] | None] = {}
    for module, path in modules().items():
        if module != room(module) and module not in DOORS:
            continue
        listed = None
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                listed = set(ast.literal_eval(node.value))
        found[module] = listed if listed is not None or path.name != "__init__.py" else set()
    return found


def imports_of(source: str) -> Iterator[tuple[str, str]]:
    """Our modules that a source imports, in functions and under TYPE_CHECKING too, each with a name out of it.

    The name is empty where a module itself is imported that is not on the face of its package.
    """
    known, face = modules(), faces()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_on_face = alias.name in (face.get(node.module) or ())
                yield (inner, "") if inner in known and not is_on_face else (node.module, alias.name)


def rooms() -> tuple[dict[str, list[int]], dict[str, set[str]]]:
    """For every room the number of its files and of their lines, and the rooms that it imports."""
    size: dict[str, list[int]] = {}
    imports: dict[str, set[str]] = {}
    for module, path in modules().items():
        if module in DOORS:
            continue
        here, source = room(module), path.read_text(encoding="utf-8")
        counted = size.setdefault(here, [0, 0])
        counted[0] += 1
        counted[1] += len(source.splitlines())
        imports.setdefault(here, set()).update({room(other) for other, _ in imports_of(source)} - {here})
    return size, imports


def past_the_face(module: str, source: str) -> set[tuple[str, str]]:
    """What the source of a module imports from other rooms beside their faces: a module of theirs, and a name of it."""
    found = set()
    for other, name in imports_of(source):
        if room(other) == room(module):
            continue
        listed = faces().get(other)
        is_hidden = name not in listed if listed is not None else name.startswith("_")
        is_on_face = other in faces() and not (name and is_hidden)  # a room itself may be imported
        if not is_on_face:
            found.add((other, name))
    return found


def loaded_by(module: str) -> dict[str, int]:
    """Our modules that an import of this one loads, and their lines."""
    program = f"import {module}, sys; print(*sorted(sys.modules))"
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    paths = modules()
    return {
        name: len(paths[name].read_text(encoding="utf-8").splitlines())
        for name in printed.stdout.split()
        if name in paths
    }


def files_of_fields() -> dict[str, set[str]]:
    """For every field of the Plan the modules that read it of a plan, or make one with it."""
    from opensora_accel.plan import Plan

    found: dict[str, set[str]] = {field.name: set() for field in dataclasses.fields(Plan)}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = list[str | None]()
            if isinstance(node, ast.Attribute):
                of_plan = module == "opensora_accel.plan" or ast.unparse(node.value).lower().endswith("plan")
                names = [node.attr] if of_plan else []
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Plan", "plan.replace")):
                names = [keyword.arg for keyword in node.keywords]
            for name in names:
                if name in found:
                    found[str(name)].add(module)
    return found


def stops() -> list[str]:
    """The modules whose functions `shard` of a small Wan calls for the first time, in order."""
    import torch.distributed as dist
    from diffusers import WanTransformer3DModel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import shardformer
    from opensora_accel import Plan, init_parallel

    for module in ("opensora_accel.fsdp", "shardformer.engine.splits"):  # which `shard` imports late
        importlib.import_module(module)
    plan = Plan(ring=2, ulysses=2, checkpoint="full", offload=1.0, sharding="zero3")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.world_size)
    init_parallel(plan, device_type="cpu")
    sizes = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 2,
        "ffn_dim": 32,
        "text_dim": 16,
    }
    model = WanTransformer3DModel(**sizes, in_channels=4, out_channels=4, freq_dim=32)
    files = {str(path): module for module, path in modules().items()}
    found: list[str] = []
    seen: set[CodeType] = set()

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in seen or code.co_filename not in files:
            return
        seen.add(code)
        module = files[code.co_filename]
        if not found or found[-1] != module:
            found.append(module)

    sys.setprofile(watch)
    try:
        shardformer.shard(model, plan)
    finally:
        sys.setprofile(None)
        dist.destroy_process_group()
    return found


def turns(places: Sequence[str]) -> int:
    """How often a way comes back to a place that it has left."""
    merged = [place for number, place in enumerate(places) if not number or place != places[number - 1]]
    return len(merged) - len(set(merged))


def tell() -> None:
    """Prints the numbers."""
    loaded, size, way = loaded_by("shardformer"), rooms()[0], stops()
    past = set[tuple[str, str]]()
    for module, path in modules().items():
        past |= past_the_face(module, path.read_text(encoding="utf-8"))
    visited = [room(module) for module in way]
    fields = sorted(files_of_fields().items(), key=lambda item: -len(item[1]))
    print(f"import shardformer loads {len(loaded)} modules, {sum(loaded.values()):,} lines")
    print(f"names past a room's face: {len(past)}")
    print(f"a Plan in shard: {len(way)} stops in {len(set(visited))} rooms, {turns(visited)} turns")
    print(
        "files that name a field of the Plan: " + ", ".join(f"{name} {len(files)}" for name, files in fields)
    )
    print(f"lines: {sum(lines for _, lines in size.values()):,}")
    for name, (num_files, lines) in sorted(size.items(), key=lambda item: -item[1][1]):
        print(f"  {lines:6,} {num_files:4} {name}")


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--picture", action="store_true", help="draw docs/architecture.png instead")
    if parser.parse_args(arguments).picture:
        draw(ROOT / "docs" / "architecture.png")
        print("docs/architecture.png")
    else:
        tell()


if __name__ == "__main__":
    main()
