"""Which videos of a folder can be trained on: metadata.jsonl, their headers, and the reason for each left out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora_accel.training.config import DataConfig
from opensora_accel.training.video import UnreadableVideo, VideoInfo, probe

METADATA_EXAMPLE = '{"file": "clip.mp4", "caption": "a rabbit stretches in a meadow"}'

_LONGEST_CAPTION = 10_000
"""Characters; training a tokenizer takes a minute for one word of 300,000 (2 cores, 2026-11)."""
_PROGRESS_FROM_FILES = 200
_PROBE_THREADS = 8  # opening files waits on storage more than on the processor


@dataclass(frozen=True)
class Entry:
    """One line of metadata.jsonl."""

    file: str
    caption: str


@dataclass(frozen=True)
class Video:
    """An entry whose file has been looked at; `info` is None if the file could not be used."""

    file: str
    caption: str
    info: VideoInfo | None


def read_metadata(folder: str | os.PathLike[str]) -> list[Entry]:
    """The entries of `folder`/metadata.jsonl, in the order of its lines; blank lines are skipped.

    Raises: FileNotFoundError if there is no such file; ValueError, naming file and line, for a line that is
    not an object with the texts `file` and `caption`, or whose file lies outside the folder.
    """
    path = Path(folder) / "metadata.jsonl"
    if not os.fspath(folder) or not path.is_file():
        missing = f"there is no {path}" if os.fspath(folder) else "no folder of videos is given"
        raise FileNotFoundError(
            f"{missing}; point --data.folder at a folder with videos and a metadata.jsonl that has one line "
            f"per video, for example {METADATA_EXAMPLE}"
        )
    lines = enumerate(path.read_bytes().splitlines(), start=1)
    entries = [_parse_line(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not entries:
        raise ValueError(f"{path} names no video; write one line per video, for example {METADATA_EXAMPLE}")
    return entries


def _parse_line(line: bytes, place: str) -> Entry:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise ValueError(f"{place}: is not a line of JSON ({error}); write {METADATA_EXAMPLE}") from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{place}: is a JSON {type(record).__name__}, not an object; write {METADATA_EXAMPLE}"
        )
    for name in ("file", "caption"):
        if not isinstance(record.get(name), str):
            raise ValueError(
                f"{place}: needs a text under {name!r}, has {record!r}; write {METADATA_EXAMPLE}"
            )
    if len(record["caption"]) > _LONGEST_CAPTION:
        raise ValueError(
            f"{place}: the caption has {len(record['caption']):,} characters, and {_LONGEST_CAPTION:,} are the most; "
            "shorten it; what follows the first --text.length tokens is not read anyway"
        )
    file = os.path.normpath(record["file"])
    # By name only: a link inside the folder may well lead to larger storage.
    if os.path.isabs(file) or file.split(os.sep)[0] == os.pardir or file == os.curdir:
        raise ValueError(
            f"{place}: file {record['file']!r} must lie inside the folder; move or link the video into it"
        )
    return Entry(file, record["caption"])


def index_videos(
    entries: Sequence[Entry], folder: str | os.PathLike[str], config: DataConfig
) -> tuple[list[Video], dict[str, str]]:
    """The usable videos, in order, and the reason for each file that is set aside.

    A file is set aside if its header cannot be read or it is shorter than one clip.

    Raises: ValueError with the first five reasons if no video is left.
    """

    def look(entry: Entry) -> Video | str:
        try:
            info = probe(Path(folder) / entry.file)
        except UnreadableVideo as error:
            return str(error)
        if info.num_frames < config.frames_needed:
            return (
                f"{entry.file}: too short: has {info.num_frames} frames, a clip of {config.num_frames} "
                f"frames in steps of {config.frame_stride} needs {config.frames_needed}"
            )
        return Video(entry.file, entry.caption, info)

    usable: list[Video] = []
    quarantined: dict[str, str] = {}
    with ThreadPoolExecutor(_PROBE_THREADS) as pool:
        for entry, outcome in zip(entries, _progress(pool.map(look, entries), len(entries)), strict=True):
            if isinstance(outcome, Video):
                usable.append(outcome)
            else:
                quarantined[entry.file] = outcome
    if not usable:
        raise ValueError(nothing_usable(folder, quarantined))
    return usable, quarantined


def _progress(outcomes: Iterable[Any], total: int) -> Iterable[Any]:
    """The same outcomes, with a bar for a person who would otherwise wait in front of nothing."""
    if total <= _PROGRESS_FROM_FILES or not sys.stderr.isatty():
        return outcomes
    from rich.console import Console
    from rich.progress import track

    return track(outcomes, "reading video headers", total=total, console=Console(stderr=True))


def nothing_usable(folder: str | os.PathLike[str], quarantined: Mapping[str, str]) -> str:
    reasons = "\n  ".join(list(quarantined.values())[:5])
    return (
        f"none of the {len(quarantined)} videos in {os.fspath(folder)} can be used; the first reasons:\n"
        f"  {reasons}\n"
        "Repair or replace the files, or lower --data.num_frames or --data.frame_stride if they are too short"
    )
