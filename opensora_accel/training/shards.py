"""Files inside of other files: tar as WebDataset has it, parquet and Arrow as the datasets of Hugging Face have them.

A clip in a shard has a path like any other, with the shard as its folder, and all that reads videos takes it:

    clips/a.mp4                       a file
    clips/part-000017.tar/b.mp4       a member of a tar archive; its bytes lie in it in one piece
    clips/train-00003.parquet/41.mp4  row 41; the bytes in its column "video" (or "image")
    clips/data-00000-of-00002.arrow/7.png  the same, as `save_to_disk` of datasets writes it

What is known of a shard is read once in each process, and again when the shard changes.

Sources: WebDataset (github.com/webdataset/webdataset): members that share all before the first dot of their name are
one sample. Hugging Face datasets: a column of videos or images is {"bytes", "path"}.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import tarfile
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

# Endings that PyAV and Pillow are asked to read; others in a sample are its caption, or something else.
IMAGES = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP"}
VIDEOS = {".mp4", ".mov", ".mkv", ".webm", ".avi", ".gif", ".m4v", ".mpg", ".mpeg", ".ts"}
CAPTION_KEYS = ("caption", "text", "prompt")
_TABLES = (".parquet", ".arrow")
_SHARDS = (".tar", *_TABLES)


class Place(NamedTuple):
    """A shard and the name in it."""

    shard: Path
    name: str


def place_of(path: str | os.PathLike[str]) -> Place | None:
    """Where in which shard a path leads; None for a path of a file."""
    for parent in Path(path).parents:
        if parent.suffix in _SHARDS and parent.is_file():
            return Place(parent, Path(path).relative_to(parent).as_posix())
    return None


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """The bytes of a file, or of one in a shard.

    Raises:
        OSError, ValueError: there is no such file, or its shard cannot be read.
    """
    place = place_of(path)
    if place is None:
        return open(path, "rb")
    if place.shard.suffix in _TABLES:
        return io.BytesIO(_row(place.shard, place.name))
    offset, size_bytes = _member(place)
    return io.BufferedReader(_Part(open(place.shard, "rb"), offset, size_bytes))


def size_of(path: str | os.PathLike[str]) -> int:
    """Bytes of a file, or of one in a shard; raises as `open_file`."""
    place = place_of(path)
    if place is None:
        return os.path.getsize(path)
    return len(_row(*place)) if place.shard.suffix in _TABLES else _member(place)[1]


def status_of(path: str | os.PathLike[str]) -> os.stat_result:
    """The system's status of a file; of one in a shard, that of the shard.

    Raises:
        OSError: there is no such file.
    """
    place = place_of(path)
    return os.stat(path if place is None else place.shard)


def find_samples(folder: Path) -> list[tuple[str, str]]:
    """Every video and image in the shards of a folder, and its caption, in the order of names.

    Raises:
        ValueError: a shard cannot be read, a sample has no caption, or pyarrow, which reads tables, is not installed.
    """
    found: list[tuple[str, str]] = []
    for shard in sorted(path for path in folder.iterdir() if path.suffix in _SHARDS and path.is_file()):
        samples = _tar_samples(shard) if shard.suffix == ".tar" else _table_samples(shard)
        found += [(f"{shard.name}/{name}", caption) for name, caption in samples]
    return found


class _Part(io.RawIOBase):
    """Bytes `offset` to `offset + size_bytes` of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, size_bytes: int):
        self._file, self._offset, self._size_bytes, self._at = file, offset, size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        data = self._file.read(max(0, min(len(buffer), self._size_bytes - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


# Tar


def _member(place: Place) -> tuple[int, int]:
    """Where a member begins in its archive, and its length, in bytes."""
    status = os.stat(place.shard)
    members = _members(os.fspath(place.shard), status.st_size, status.st_mtime_ns)
    if place.name not in members:
        raise FileNotFoundError(f"{place.shard} has no member {place.name}")
    return members[place.name]


@lru_cache(maxsize=4096)
def _members(path: str, size_bytes: int, changed_ns: int) -> dict[str, tuple[int, int]]:
    """Where each file of an archive begins, and its length."""
    try:
        # Not compressed: what is read of it is a part.
        with tarfile.open(path, "r:") as archive:
            return {
                str(PurePosixPath(each.name)): (each.offset_data, each.size)
                for each in archive
                if each.isfile() and not each.issparse()
            }
    except tarfile.TarError as error:
        raise ValueError(
            f"{path} is no readable tar archive ({error}); write it without compression"
        ) from error


def _tar_samples(shard: Path) -> Iterator[tuple[str, str]]:
    status = os.stat(shard)
    members = _members(os.fspath(shard), status.st_size, status.st_mtime_ns)
    by_key: dict[str, dict[str, str]] = {}
    for name in members:
        parent, _, last = name.rpartition("/")
        key, _, ending = last.partition(".")
        by_key.setdefault(f"{parent}/{key}", {})[f".{ending.lower()}"] = name
    for key, endings in by_key.items():
        seen = [name for ending, name in endings.items() if ending in VIDEOS or ending in IMAGES]
        if not seen:
            continue
        if ".txt" in endings:
            with open_file(shard / endings[".txt"]) as file:
                caption = file.read().decode("utf-8", "replace").strip()
        elif ".json" in endings:
            with open_file(shard / endings[".json"]) as file:
                caption = caption_in(json.load(file), f"{shard}: {endings['.json']}")
        else:
            raise ValueError(
                f"{shard}: {seen[0]} has no caption beside it; a sample of WebDataset has {key.lstrip('/')}.txt, or "
                f"{key.lstrip('/')}.json with a text under {CAPTION_KEYS[0]!r}"
            )
        yield seen[0], caption


def caption_in(record: Any, place: str) -> str:
    values = [record.get(key) for key in CAPTION_KEYS] if isinstance(record, dict) else []
    texts = [value for value in values if isinstance(value, str)]
    if not texts:
        raise ValueError(f"{place}: needs a text under one of {', '.join(CAPTION_KEYS)}")
    return texts[0]


# Tables


class _Parquet:
    """A file of parquet, of which one group of rows is read at a time."""

    def __init__(self, path: str):
        import pyarrow.parquet

        self._file = pyarrow.parquet.ParquetFile(path)
        self.schema = self._file.schema_arrow
        counts = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        # The number of rows up to the end of each group.
        self._ends = list(accumulate(counts)) or [0]
        self.num_rows = self._ends[-1]

    def cell(self, row: int, column: str) -> Any:
        group = bisect_right(self._ends, row)
        values = self._file.read_row_group(group, columns=[column]).column(0)
        return values[row - (self._ends[group - 1] if group else 0)].as_py()

    def column(self, name: str) -> list[Any]:
        values: list[Any] = self._file.read(columns=[name]).column(0).to_pylist()
        return values

    def paths(self, column: str) -> list[Any]:
        """Of files, by the names that they had; their bytes are not read."""
        return [value and value["path"] for value in self.column(f"{column}.path")]


class _Arrow:
    """A stream of Arrow's batches, whose memory is the file's own pages."""

    def __init__(self, path: str):
        import pyarrow.ipc

        self._table = pyarrow.ipc.open_stream(pyarrow.memory_map(path)).read_all()
        self.schema, self.num_rows = self._table.schema, self._table.num_rows

    def cell(self, row: int, column: str) -> Any:
        return self._table.column(column)[row].as_py()

    def column(self, name: str) -> list[Any]:
        values: list[Any] = self._table.column(name).to_pylist()
        return values

    def paths(self, column: str) -> list[Any]:
        """Of files, by the names that they had; their bytes are not read."""
        import pyarrow.compute

        values: list[Any] = pyarrow.compute.struct_field(self._table.column(column), "path").to_pylist()
        return values


def _row(shard: Path, name: str) -> bytes:
    status = os.stat(shard)
    return _row_bytes(os.fspath(shard), int(name.partition(".")[0]), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=8)
def _row_bytes(path: str, row: int, size_bytes: int, changed_ns: int) -> bytes:
    table, column = _table(path, size_bytes, changed_ns)
    if row >= table.num_rows:
        raise FileNotFoundError(f"{path} has no row {row}")
    value = table.cell(row, column)
    data = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(data, bytes):
        raise ValueError(
            f"{path}: row {row} has no bytes under {column!r}; save the dataset with its files embedded "
            "(push_to_hub and to_parquet of datasets do)"
        )
    return data


@lru_cache(maxsize=64)
def _table(path: str, size_bytes: int, changed_ns: int) -> tuple[_Parquet | _Arrow, str]:
    """The open file, and the column that has files."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{path} is read by pyarrow, which is not installed; pip install pyarrow")
    import pyarrow

    is_arrow = Path(path).suffix == ".arrow"
    try:
        table = _Arrow(path) if is_arrow else _Parquet(path)
    except pyarrow.ArrowException as error:
        kind = "stream of Arrow" if is_arrow else "file of parquet"
        raise ValueError(f"{path} is no readable {kind} ({error})") from error
    columns = [name for name in ("video", "image", "mp4") if name in table.schema.names]
    if not columns:
        raise ValueError(
            f"{path} has the columns {', '.join(table.schema.names)}, and none of video, image and mp4; rename one"
        )
    return table, columns[0]


def _table_samples(shard: Path) -> Iterator[tuple[str, str]]:
    status = os.stat(shard)
    table, column = _table(os.fspath(shard), status.st_size, status.st_mtime_ns)
    names = table.schema.names
    caption = next((name for name in CAPTION_KEYS if name in names), None)
    if caption is None:
        raise ValueError(
            f"{shard} has the columns {', '.join(names)}, and no caption under one of {', '.join(CAPTION_KEYS)}; "
            "rename one"
        )
    texts = table.column(caption)
    nested = table.schema.field(column).type
    has_path = any(nested.field(i).name == "path" for i in range(nested.num_fields))
    paths = table.paths(column) if has_path else [None] * len(texts)
    for row, (text, path) in enumerate(zip(texts, paths, strict=True)):
        # Images are read by another library than videos.
        ending = Path(path or "").suffix.lower() or (".png" if column == "image" else ".mp4")
        if not isinstance(text, str):
            raise ValueError(f"{shard}: row {row} has no text under {caption!r}")
        yield f"{row}{ending}", text
