"""Says which sides import in this environment: `python -m opensora_accel.profiler.bench_attention.probe FILE SIDE…`."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import warnings
from pathlib import Path

from opensora_accel.profiler.bench_attention.peers import find_side


def probe(name: str) -> dict[str, str | None]:
    """The version of the side's package, and why it does not import, if it does not."""
    side = find_side(name)
    found: dict[str, str | None] = {"version": None, "reason": None}
    try:
        found["version"] = importlib.metadata.version(side.package)
        side.check_import()
    except BaseException as error:  # noqa: BLE001 - a package may even exit
        text = " ".join(f"{type(error).__name__}: {error}".split())
        found["reason"] = f"does not import: {text}"
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    Path(sys.argv[1]).write_text(json.dumps({name: probe(name) for name in sys.argv[2:]}), encoding="utf-8")
