"""Tensors on disk under the hash of all that they were computed from, shared by runs, ranks and machines.

A key is a JSON object that says what a tensor was computed from. Its SHA-256 sum is the name of the file, so another
video, other weights or another version of torch is another file, and nothing there is ever out of date. A key whose
sum begins with 3f:

    FOLDER/3f/3f07…e1.safetensors               the tensor; in the header the key, what a person knows it by, a checksum
    FOLDER/3f/.3f07…e1.safetensors.….partial    the same while a process writes it, under a name of its own
    FOLDER/runs.jsonl                           one line for each run: what it found, and what it stored

Nobody waits for anybody. A file gets its name when it is whole and on the disk; two processes that write the same one
write the same bytes, and the later one stays. Still a disk may lose or change what it was given, so each file is
compared with its checksum when it is read. What does not fit is reported once, computed again and replaced.

A process holds a lock on what it writes, which the system frees however the process ends. So a file without its name
that is unlocked and old was left by a process that was killed, and goes.
"""

from __future__ import annotations

import ast
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from opensora_accel.files import replacing, retried, sha256_of
from opensora_accel.training.shards import open_file, status_of

logger = logging.getLogger(__name__)

RUNS = "runs.jsonl"
_FORMAT = "opensora-accel cache 1"
_TENSOR = "value"
_SUFFIX = ".safetensors"
_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_PARTIAL = re.compile(r"\.[0-9a-f]{64}\.safetensors\..*\.partial")
# Younger ones may have been made, but not yet locked, by a living process. Where there are no locks, a day it is.
_LEFT_AFTER_S, _LEFT_WITHOUT_LOCKS_AFTER_S = 600.0, 86_400.0
# The time of last use is that of the file's last change. It need not be exact, and costs a message on network storage.
_USED_AGAIN_AFTER_S = 3600.0
# A file whose status has not changed for so long was not written to in the tick of the clock in which it was looked at,
# its pages that a process maps are on the disk (30 s), and so is its status on every client of NFS (60 s).
_SETTLED_AFTER_S = 75.0


@dataclass
class Counts:
    """What a process got from a folder, and gave to it."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    read_bytes: int = 0
    stored_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True)
class Entry:
    """One file of a folder; `used` is when it was last read or written, in seconds since 1970."""

    path: Path
    size_bytes: int
    used: float


class DiskCache:
    """A folder of tensors. Nothing that is wrong with it ends a run: what cannot be read is a miss."""

    def __init__(self, folder: str | Path):
        self.folder, self.counts = Path(folder), Counts()
        self._stores = True
        self._told, self._damaged, self._tidied = set[str](), set[Path](), set[Path]()

    def get(self, key: Mapping[str, Any]) -> Tensor | None:
        """What was stored under the key, on the host; None where it is not there, or damaged."""
        path = self._path(key)
        try:
            content = retried(partial(_read_file, path), f"reading {path}")
            value = _parse(content, key)
        except FileNotFoundError:
            value = None
        except (OSError, ValueError, SafetensorError) as error:
            value = None
            self._damaged.add(path)
            self._warn_once(
                "damaged",
                f"{path} is not what was stored there ({error}); it is computed again, and so are others of "
                "which this is true",
            )
        if value is None:
            self.counts.misses += 1
            return None
        self.counts.hits += 1
        self.counts.read_bytes += len(content)
        with suppress(OSError):  # of another user, or on a file system that cannot be written to
            if time.time() - path.stat().st_mtime > _USED_AGAIN_AFTER_S:
                os.utime(path)
        return value

    def put(self, key: Mapping[str, Any], value: Tensor, about: str) -> bool:
        """Stores a tensor of any shape; whether it is there now. `about` is for a person, and no part of the key."""
        path = self._path(key)
        if path.exists() and path not in self._damaged:
            return True  # another process was faster
        if not self._stores:
            return False
        value = value.detach().cpu().contiguous()
        record = {"about": about, "key": key, "sha256": _checksum(value, key, about)}
        # One entry: safetensors writes several in an order of chance, and the same value is to be the same file.
        content = save({_TENSOR: value}, {_FORMAT: _canonical(record)})
        try:
            retried(partial(_write_file, path, content), f"writing {path}")
            if path.parent not in self._tidied:
                self._tidied.add(path.parent)
                _remove_left(path.parent)
        except IsADirectoryError:
            return False  # somebody else's folder in the place of one file, which `get` has reported
        except OSError as error:
            self._stores = False
            remedy = "let it be writable"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                remedy = f"`opensora-accel cache {self.folder} --keep 100GB` keeps what was used last"
            self._warn_once(
                "not stored",
                f"nothing more is stored in cache_folder {self.folder} by this process ({error.strerror or error}); "
                f"the run goes on, and what it lacks there is computed again by the next one; {remedy}, or name "
                "another --cache_folder",
            )
            return False
        self._damaged.discard(path)
        self.counts.stored += 1
        self.counts.stored_bytes += len(content)
        return True

    def note_run(self, record: Mapping[str, Any]) -> None:
        """Adds a line to the list of runs, where that can be."""
        line = json.dumps({"time": time.strftime("%Y-%m-%d %H:%M:%S"), **record}) + "\n"
        # In one write at the end of the file, so that the lines of two runs do not mix.
        with suppress(OSError), (self.folder / RUNS).open("ab", buffering=0) as file:
            file.write(line.encode())

    def _path(self, key: Mapping[str, Any]) -> Path:
        name = hashlib.sha256(_canonical(key).encode()).hexdigest()
        return self.folder / name[:2] / f"{name}{_SUFFIX}"

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("%s", message)


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _checksum(value: Tensor, key: Mapping[str, Any], about: Any) -> str:
    kind = {"key": key, "about": about, "dtype": str(value.dtype), "shape": list(value.shape)}
    summed = hashlib.sha256(_canonical(kind).encode())
    summed.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return summed.hexdigest()


def _parse(content: bytes, key: Mapping[str, Any]) -> Tensor:
    """The tensor of a file that was stored under `key`.

    Raises:
        ValueError, SafetensorError: it was not, or the file is not whole.
    """
    record = _record(content[:8], content[8:])
    value: Tensor | None = load(content).get(_TENSOR)
    if value is None or _canonical(record["key"]) != _canonical(key):
        raise ValueError("it is a file of something else")
    if record.get("sha256") != _checksum(value, key, record.get("about")):
        raise ValueError("its checksum is another")
    return value


def _record(size: bytes, header: bytes) -> dict[str, Any]:
    """What stands in the header of an entry that begins with `size` and `header`, which may be followed by more.

    Raises:
        ValueError: it is no entry.
    """
    length = int.from_bytes(size, "little")
    if len(size) < 8 or length > len(header):
        raise ValueError("its header is cut short")
    try:
        record: dict[str, Any] = json.loads(json.loads(header[:length])["__metadata__"][_FORMAT])
        if not isinstance(record["key"], dict):
            raise TypeError("its key is no object")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError("it was not written by this cache, or its header is damaged") from error
    return record


def _read_file(path: Path) -> bytes:
    with open(path, "rb", opener=_open_regular) as file:
        return file.read()


def _open_regular(path: str, flags: int) -> int:
    """Opens a file, and no pipe, which would be waited for without end.

    Raises:
        ValueError: it is none.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no regular file")
    return descriptor


def _write_file(path: Path, content: bytes) -> None:
    # The file is closed, and with that unlocked, after it has got its name.
    with ExitStack() as closing, replacing(path) as temporary:
        file = closing.enter_context(temporary.open("xb"))
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _remove_left(folder: Path) -> int:
    """Removes what killed processes left in a sub-folder; how many files that were."""
    left = [path for path in folder.iterdir() if _PARTIAL.fullmatch(path.name)]
    return sum(_remove_if_left(path) for path in left)


def _remove_if_left(path: Path) -> bool:
    """Removes a temporary file that no living process writes; whether it did."""
    try:
        age_s = time.time() - path.stat().st_mtime
        if age_s < _LEFT_AFTER_S:
            return False
        with path.open("r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return False
            except OSError:  # there are no locks
                if age_s < _LEFT_WITHOUT_LOCKS_AFTER_S:
                    return False
            path.unlink()
            return True
    except OSError:
        return False  # removed by another process, or not ours to remove


# The folder as a whole


def entries(folder: Path) -> Iterator[Entry]:
    """Every file of the folder that has the name of an entry, whole or not, in no order.

    Raises:
        OSError: the folder cannot be listed.
    """
    for place in _sub_folders(folder):
        for item in os.scandir(place):
            with suppress(FileNotFoundError):  # removed by another process just now
                if _NAME.fullmatch(item.name) and item.is_file(follow_symlinks=False):
                    status = item.stat(follow_symlinks=False)
                    yield Entry(Path(item.path), status.st_size, status.st_mtime)


def describe(path: Path) -> dict[str, Any]:
    """The key of an entry.

    Raises:
        ValueError, OSError: its header cannot be read.
    """
    with open(path, "rb", opener=_open_regular) as file:
        size = file.read(8)
        # A header of this cache has a few kilobytes; a damaged length may be anything.
        key: dict[str, Any] = _record(size, file.read(min(int.from_bytes(size, "little"), 2**24)))["key"]
    return key


def trim(folder: Path, keep_bytes: int) -> list[Entry]:
    """Removes the entries that were not used for longest, until the others have at most `keep_bytes`; what it removed.

    A run that uses the folder meanwhile computes again what it misses.
    """
    oldest_first = sorted(entries(folder), key=lambda entry: (entry.used, entry.path))
    total, removed = sum(entry.size_bytes for entry in oldest_first), []
    for entry in oldest_first:
        if total <= keep_bytes:
            break
        entry.path.unlink(missing_ok=True)
        total -= entry.size_bytes
        removed.append(entry)
    return removed


def remove_left(folder: Path) -> int:
    """Removes what killed processes left anywhere in the folder; how many files that were."""
    return sum(map(_remove_left, _sub_folders(folder)))


def _sub_folders(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if re.fullmatch("[0-9a-f]{2}", path.name) and path.is_dir()
    )


# What goes into keys


def file_digest(path: str | Path) -> str | None:
    """The SHA-256 sum of a file's content; None where it is no file that can be read.

    The sum is remembered within the process for as long as the file's status stays, and its status has stayed for over
    a minute. The status has the time of its own last change (ctime), which every write moves on and no program can set
    back. Two writes within a tick of the clock have the same time, which is why a file that was changed a moment ago is
    read again each time: its second write would go unnoticed. The sum of a file that lies still is read once.
    """
    try:
        status = status_of(path)
        if not stat.S_ISREG(status.st_mode):
            return None
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if time.time() - status.st_ctime > _SETTLED_AFTER_S:
            return _digest_of_settled(os.path.abspath(path), *identity)
        return sha256_of(Path(path), partial(open_file, path))
    except (OSError, ValueError):  # it is gone, or its shard is damaged
        return None


@lru_cache(maxsize=2**17)
def _digest_of_settled(path: str, *identity: int) -> str:
    return sha256_of(Path(path), partial(open_file, path))


def code_version(modules: Sequence[ModuleType]) -> str:
    """The SHA-256 sum of what these modules do: of their source without comments, docstrings and line breaks.

    Not a number that somebody raises: who tries another filter in a copy of the source would be given what the one
    before computed.
    """
    summed = hashlib.sha256()
    for module in modules:
        assert module.__file__ is not None
        source = Path(module.__file__).read_bytes()
        if module.__file__.endswith(".py"):
            source = _without_words(ast.parse(source)).encode()
        summed.update(json.dumps([module.__name__, hashlib.sha256(source).hexdigest()]).encode())
    return summed.hexdigest()


def _without_words(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # Texts that stand alone; an empty body is no Python.
            kept = [
                each
                for each in body
                if not (
                    isinstance(each, ast.Expr)
                    and isinstance(each.value, ast.Constant)
                    and isinstance(each.value.value, str)
                )
            ]
            body[:] = kept or [ast.Pass()]
    return ast.unparse(tree)
