"""Which files of a folder are trained on, and the caption of each, in the forms in which people have them.

    metadata.jsonl, .csv or .json      a line, row or object for each file
    a.mp4, a.txt (or a.json)           captions beside the files, in the folder and in those below it
    part-000017.tar, data.parquet …    shards (`shards.py`), which hold both

The first is the whole list where there is one; else what lies beside and in shards is taken together. A list names
files and captions as its writer's trainer did: {"file_path": "a.mp4", "text": "a rabbit"} of VideoX-Fun is the row
`a.mp4,a rabbit` of DiffSynth-Studio under `video,prompt`.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora_accel.training.sections import DataConfig
from opensora_accel.training.shards import CAPTION_KEYS, IMAGES, VIDEOS, caption_in, find_samples

EXAMPLE = '{"file": "clip.mp4", "caption": "a rabbit stretches in a meadow"}'

# Here, in Hugging Face's folders, DiffSynth-Studio's and Open-Sora's tables, VideoX-Fun's and musubi-tuner's lists.
_FILE_KEYS = ("file", "file_name", "video", "path", "file_path", "video_path", "image", "image_path")
_LISTS = ("metadata.jsonl", "metadata.csv", "metadata.json")
# Characters; training a tokenizer takes a minute for one word of 300,000 (2 cores, 2026-11).
_LONGEST_CAPTION = 10_000
_MOST_NAMED = 5


@dataclass(frozen=True)
class Entry:
    """A file, by its path in the folder, and its caption."""

    file: str
    caption: str
    # How often it comes in an epoch.
    times: int = 1


def entries_of(config: DataConfig) -> list[Entry]:
    """The files of `data.folder`, or of all of `data.folders`, by their paths in `config.root`.

    Raises:
        FileNotFoundError, ValueError: as `read_entries`.
    """
    if not config.folders:
        return read_entries(config.folder)
    return [
        Entry(os.path.relpath(os.path.join(folder, entry.file), config.root), entry.caption, times)
        for folder, times in config.folders.items()
        for entry in read_entries(folder)
    ]


def read_entries(folder: str | os.PathLike[str]) -> list[Entry]:
    """The files of a folder, in the order of its list, or of their names.

    Raises:
        FileNotFoundError: there is no folder, or none of what is told above in it.
        ValueError: an entry of the list has no file or no caption, or its file lies outside the folder; a file has no
            caption beside it; a shard cannot be read. The message names the place.
    """
    if not os.fspath(folder) or not Path(folder).is_dir():
        raise FileNotFoundError(
            _remedy("no folder of videos is given" if not folder else f"there is no {folder}")
        )
    lists = [path for path in (Path(folder, name) for name in _LISTS) if path.is_file()]
    if len(lists) > 1:
        names = " and ".join(path.name for path in lists)
        raise ValueError(f"{folder} has {names}, and one list says what is trained on; leave one of them")
    if lists:
        records = {".jsonl": _lines, ".csv": _rows, ".json": _objects}[lists[0].suffix](lists[0])
        entries = [_entry(record, place, Path(folder)) for place, record in records]
        if not entries:
            raise ValueError(f"{lists[0]} names no video; write one line per video, for example {EXAMPLE}")
        return entries
    entries = [
        Entry(file, _checked(caption, file))
        for file, caption in [*_beside(Path(folder)), *find_samples(Path(folder))]
    ]
    if not entries:
        raise FileNotFoundError(_remedy(f"there is no list, video or shard in {folder}", Path(folder)))
    return entries


def _remedy(missing: str, folder: Path | None = None) -> str:
    below = sorted({path.parent for name in _LISTS for path in folder.glob(f"*/{name}")}) if folder else []
    there = f"; {', '.join(map(str, below[:_MOST_NAMED]))} has one" if below else ""
    return (
        f"{missing}{there}; point --data.folder at a folder with videos and a metadata.jsonl that has one line per "
        f"video, for example {EXAMPLE}, or a metadata.csv or .json of the like; with a caption beside each file "
        "(a.mp4, a.txt); or with shards (.tar of WebDataset, .parquet and .arrow of datasets)"
    )


# Lists


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            place = f"{path}:{number}"
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
                raise ValueError(f"{place}: is not a line of JSON ({error}); write {EXAMPLE}") from error
            yield place, record


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        records = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error}); write [{EXAMPLE}]") from error
    if not isinstance(records, list):
        raise ValueError(f"{path}: is a JSON {type(records).__name__}, not a list; write [{EXAMPLE}]")
    for number, record in enumerate(records, start=1):
        yield f"{path}, entry {number}", record


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            for row in rows:
                # Under None lies what a row has beyond its columns.
                if None in row:
                    raise ValueError(
                        f"{path}:{rows.line_num}: has more values than there are columns "
                        f"({', '.join(rows.fieldnames or ())}); put a caption with a comma into quotes"
                    )
                yield f"{path}:{rows.line_num}", row
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not a table of comma-separated values in UTF-8 ({error})") from error


def _entry(record: Any, place: str, folder: Path) -> Entry:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: is a JSON {type(record).__name__}, not an object; write {EXAMPLE}")
    named = _text(record, _FILE_KEYS, place)
    caption = _text(record, CAPTION_KEYS, place, may_be_empty=True)
    file = os.path.normpath(named)
    # By name only: a link inside the folder may well lead to larger storage.
    if os.path.isabs(file):
        file = os.path.relpath(file, folder.absolute())
    if file.split(os.sep)[0] == os.pardir or file == os.curdir:
        raise ValueError(
            f"{place}: file {named!r} must lie inside the folder; move or link the video into it"
        )
    return Entry(file, _checked(caption, place))


def _text(record: dict[str, Any], keys: tuple[str, ...], place: str, may_be_empty: bool = False) -> str:
    """The text under the first of these keys that has one."""
    for key in keys:
        value = record.get(key)
        # A table of videos and images has an empty cell in one of two columns.
        if isinstance(value, str) and (value or may_be_empty):
            return value
    raise ValueError(
        f"{place}: needs a text under {keys[0]!r} (or {', '.join(keys[1:])}), has {record!r}; write {EXAMPLE}"
    )


def _checked(caption: str, place: str) -> str:
    if len(caption) > _LONGEST_CAPTION:
        raise ValueError(
            f"{place}: the caption has {len(caption):,} characters, and {_LONGEST_CAPTION:,} are the most; "
            "shorten it; what follows the first --text.length tokens is not read anyway"
        )
    return caption


# Captions beside the files


def _beside(folder: Path) -> list[tuple[str, str]]:
    """Videos and images in the folder and below it, and the captions beside them, in the order of names."""
    found, without = [], []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in name.parts)
        if path.suffix.lower() not in VIDEOS | set(IMAGES) or is_hidden or not path.is_file():
            continue
        caption = _caption_beside(path)
        if caption is None:
            without.append(name.as_posix())
        else:
            found.append((name.as_posix(), caption))
    if without:
        shown = ", ".join(without[:_MOST_NAMED]) + (", …" if len(without) > _MOST_NAMED else "")
        stem = Path(without[0]).with_suffix("")
        raise ValueError(
            f"{len(without)} of {len(without) + len(found)} videos and images in {folder} have no caption beside them "
            f"({shown}); write {stem}.txt, an empty one for a clip without a caption, or list all in a metadata.jsonl, "
            f"for example {EXAMPLE}"
        )
    return found


def _caption_beside(path: Path) -> str | None:
    text, document = path.with_suffix(".txt"), path.with_suffix(".json")
    try:
        if text.is_file():
            return text.read_text(encoding="utf-8-sig").strip()
        if document.is_file():
            return caption_in(json.loads(document.read_text(encoding="utf-8-sig")), os.fspath(document))
    except UnicodeDecodeError as error:
        raise ValueError(f"{text if text.is_file() else document}: is not UTF-8 ({error})") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f'{document}: is not JSON ({error}); write {{"caption": …}}') from error
    return None
