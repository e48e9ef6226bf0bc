"""Files that are there whole or not at all, and attempts at what fails for a moment, on network file systems above all.

A collective is never tried again. After one has failed, some ranks may have its result and others not.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

PAUSES_S = (0.5, 2.0)
# What a file system says while a server of it restarts, or its connection is made again.
_PASSING = {
    errno.EIO,
    errno.ESTALE,
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
}


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside `path` that takes its name on success and vanishes on failure.

    A file that is written so is there whole or as it was before: a full disk costs none that was there.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because a rename replaces a file at once only within one file system.
    # Random, because processes of several machines, which may have one number, may write the same file.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def check_folder_of(path: Path | None) -> None:
    """Checks, before long work whose result a file is to hold, that there is a folder to write it to.

    Raises:
        FileNotFoundError: there is none.
    """
    if path is not None and not os.path.isdir(folder := os.path.dirname(os.path.abspath(path))):
        raise FileNotFoundError(f"there is no folder {folder} to write {path.name} to; make it first")


def sha256_of(path: Path, opened: Callable[[], BinaryIO] | None = None) -> str:
    """The SHA-256 sum of a file's content, in hexadecimal.

    Args:
        opened: opens it, where it is part of another file.
    """

    def read() -> str:
        summed = hashlib.sha256()
        with path.open("rb", buffering=0) if opened is None else opened() as file:
            while data := file.read(2**20):
                summed.update(data)
        return summed.hexdigest()

    return retried(read, f"reading {path}")


def retried(work: Callable[[], T], what: str) -> T:
    """What `work()` gives, in up to three attempts where it fails for a moment; each failure is logged.

    Raises:
        Exception: what the last attempt raised, or the first one where trying again cannot help (a full disk, a file
            that is not there or damaged).
    """
    for pause_s in PAUSES_S:
        try:
            return work()
        except Exception as error:
            if not _passes(error):
                raise
            logger.warning("%s failed (%s); trying again in %g s", what, error, pause_s)
        time.sleep(pause_s)
    return work()


def _passes(error: BaseException) -> bool:
    """Whether the system's error number, somewhere behind this error, is one that passes."""
    number = getattr(error, "errno", None)
    if number is None:
        # safetensors, which is written in Rust, has it in its text alone.
        match = re.search(r"\(os error (\d+)\)", str(error))
        number = int(match[1]) if match else None
    return number in _PASSING or (error.__cause__ is not None and _passes(error.__cause__))
