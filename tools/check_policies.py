"""Claims that every policy gives one device's gradients, and measures it; beside diffusers' own context parallelism.

Claims, of each model family at awkward sizes (odd tokens, 3 heads, text masks) in fp64: output, input gradients and
every parameter's gradient equal those of the same model on one device to 1e-9, on the meshes ulysses 2, ring 2,
ring 3, and ring 2 × ulysses 2. diffusers' `enable_parallelism` stands beside where a model has a plan for it, on sizes
that its plans take (all of them divide), each of its gradients summed or averaged over the ranks, whichever is closer.

Gloo ranks on this machine's CPU. The table goes to docs/policies.md, the figures to tools/results/policies_cpu.json.
Takes four minutes on two cores that are free; `--only Wan` tries some.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import warnings
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the models are the tests'

import torch  # noqa: E402

from opensora_accel import Plan  # noqa: E402
from opensora_accel.verify.pool import RankError, RankPool  # noqa: E402
from tests.shardformer.conformance import errors  # noqa: E402
from tests.shardformer.diffusers_own import theirs  # noqa: E402
from tests.tolerances import RELATIVE  # noqa: E402
from tests.video_models import CASES  # noqa: E402
from tests.video_models.even import EVEN  # noqa: E402

MESHES = {
    "ulysses 2": Plan(ulysses=2),
    "ring 2": Plan(ring=2),
    "ring 3": Plan(ring=3),
    "ring 2 × ulysses 2": Plan(ring=2, ulysses=2),
}
BOUND = RELATIVE[torch.float64]
Row = dict[str, dict[str, Any]]


def quietly(function: Any, name: str, plan: Plan) -> dict[str, float]:
    """On a rank: without what models, and the ring of toy size, warn of."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(name, plan)


def measure(ranks: RankPool, function: Any, name: str) -> Row:
    """By mesh: the largest error, whose it is, and how many are past the bound; or why there is none."""
    row: Row = {}
    for mesh, plan in MESHES.items():
        try:
            found = ranks(plan.world_size, quietly, function, name, plan)
        except RankError as error:
            row[mesh] = {"failed": error.errors[min(error.errors)].strip().splitlines()[-1]}
            continue
        worst = {key: max(each[key] for each in found) for key in found[0]}
        key = max(worst, key=lambda each: worst[each])
        wrong = sum(value > BOUND for value in worst.values())
        row[mesh] = {"error": worst[key], "of": key, "wrong": wrong, "compared": len(worst)}
    return row


def show(cell: dict[str, Any]) -> str:
    if "failed" in cell:
        return "fails"
    return f"{cell['error']:.0e}" + (
        f" ({cell['wrong']} of {cell['compared']} wrong)" if cell["wrong"] else ""
    )


def table(first: str, rows: dict[str, Row]) -> str:
    lines = [f"| {first} | compared | {' | '.join(MESHES)} |", "|---|---|" + "---|" * len(MESHES)]
    for name, row in rows.items():
        compared = max((cell.get("compared", 0) for cell in row.values()), default=0)
        lines.append(f"| {name} | {compared or '–'} | {' | '.join(show(row[mesh]) for mesh in MESHES)} |")
    failed = {
        name: sorted({cell["failed"] for cell in row.values() if "failed" in cell})
        for name, row in rows.items()
    }
    lines += [
        "",
        *(
            f"{name} fails with: {'; '.join('`' + why.replace('`', chr(39)) + '`' for why in whys)}."
            for name, whys in failed.items()
            if whys
        ),
    ]
    return "\n".join(lines).strip()


def replace(page: Path, name: str, text: str) -> None:
    """What stands between the page's two comments of that name."""
    source = page.read_text(encoding="utf-8")
    start, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
    head, _, rest = source.partition(start)
    _, _, tail = rest.partition(end)
    if not tail:
        raise SystemExit(f"{page} has no {start.strip()} … {end.strip()}")
    page.write_text(head + start + text + end + tail, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="models whose name holds one of these words")
    parser.add_argument("--dry", action="store_true", help="write no file")
    options = parser.parse_args()

    def chosen(names: Any) -> list[str]:
        words = [word.lower() for word in options.only]
        return [name for name in names if not words or any(word in name.lower() for word in words)]

    ours: dict[str, Row] = {}
    peers: dict[str, Row] = {}
    with RankPool(preload=["diffusers.models.transformers.transformer_wan"]) as ranks:
        todo = [(ours, errors, name) for name in chosen(CASES)] + [
            (peers, theirs, name) for name in chosen(EVEN)
        ]
        for number, (rows, function, name) in enumerate(todo, 1):
            rows[name] = measure(ranks, function, name)
            cells = "  ".join(f"{mesh}: {show(cell)}" for mesh, cell in rows[name].items())
            whose = "" if rows is ours else "diffusers' own: "
            print(f"[{number}/{len(todo)}] {whose}{name}  {cells}", flush=True)

    held = all("error" in cell and not cell["wrong"] for row in ours.values() for cell in row.values())
    print(f"\n{'all' if held else 'NOT all'} of {len(ours)} models below {BOUND:.0e} on every mesh")
    if not options.dry and not options.only:
        versions = {name: __import__(name).__version__ for name in ("torch", "diffusers", "transformers")}
        result = {
            "claim": f"every gradient of every policy within {BOUND:.0e} of one device's, fp64",
            "held": held,
            "command": "python tools/check_policies.py",
            "date": date.today().isoformat(),
            "hardware": f"CPU, gloo, {platform.machine()}, one thread a rank",
            "versions": {"python": platform.python_version(), **versions},
            "ours": ours,
            "diffusers": peers,
        }
        path = ROOT / "tools/results/policies_cpu.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        page = ROOT / "docs/policies.md"
        replace(page, "gradients", table("model", ours))
        replace(page, "diffusers", table("diffusers' own plan", peers))
        print(f"written: {path.relative_to(ROOT)}, {page.relative_to(ROOT)}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
