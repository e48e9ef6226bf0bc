"""`opensora-accel cache`: what lies in a --cache_folder, and less of it."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from opensora_accel.documents import read_text
from opensora_accel.training.disk_cache import RUNS, describe, entries, remove_left, trim

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SHOWN_RUNS = 5


def main(arguments: Sequence[str]) -> int:
    """Tells what a --cache_folder of `opensora-accel train` holds, and removes what was not used for longest.

    usage: opensora-accel cache FOLDER [--keep SIZE]

    options:
      --keep SIZE   removes entries, those first that were read or written longest ago, until the others have at most
                    SIZE: 200GB, 1.5TiB, 0. Runs may go on meanwhile; they compute again what they miss.

    Nothing else in the folder is touched, but what killed processes have left half written.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(inspect.cleandoc(main.__doc__ or ""))
        return 0
    parser = argparse.ArgumentParser("opensora-accel cache", add_help=False, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep")
    own = parser.parse_args(arguments)
    if not own.folder.is_dir():
        raise FileNotFoundError(f"there is no folder {own.folder}; give what --cache_folder names")
    keep_bytes = None if own.keep is None else _bytes(own.keep)
    left = remove_left(own.folder)
    if left:
        print(f"removed {left} files that killed processes have left")
    if keep_bytes is not None:
        removed = trim(own.folder, keep_bytes)
        print(f"removed {len(removed)} entries, {_size(sum(entry.size_bytes for entry in removed))}")
    _print(own.folder)
    return 0


def _print(folder: Path) -> None:
    numbers, sizes = Counter[str](), Counter[str]()
    for entry in entries(folder):
        try:
            kind = _kind(describe(entry.path))
        except FileNotFoundError:
            continue  # removed by another process just now
        except (OSError, ValueError):
            kind = "damaged; they are computed again when they are needed"
        numbers[kind] += 1
        sizes[kind] += entry.size_bytes
    print(f"{folder}: {numbers.total()} entries, {_size(sizes.total())}")
    for kind, number in numbers.most_common():
        print(f"  {number} {kind}, {_size(sizes[kind])}")
    lines = []
    with suppress(OSError, ValueError):  # of somebody else, or damaged: entries count without it
        lines = read_text(folder / RUNS, inside=folder).splitlines()[-_SHOWN_RUNS:]
    for line in lines:
        with suppress(ValueError, LookupError, TypeError):  # of a disk that was full
            run = json.loads(line)
            print(
                f"run {run['time']}  {run['hits']} found, {run['misses']} computed, {run['stored']} stored  "
                f"{run['output']}"
            )


def _kind(key: dict[str, Any]) -> str:
    """What an entry is, and of which encoder: the first digits tell two of one class apart."""
    encoder = key.get("encoder") or {}
    sums = "".join(map(str, (encoder.get("files") or {}).values()))[:8]
    return f"{key.get('what', 'tensors')} of {encoder.get('class', 'an encoder')} {sums} ({key.get('dtype', '')})"


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"--keep is a size, as 200GB, 1.5TiB or 0; got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 10**7 else f"{size_bytes / 1e6:.3f} MB"
