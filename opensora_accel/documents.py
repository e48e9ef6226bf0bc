"""Documents that somebody else may have written, or a crash may have cut: read safely, and checked as a whole.

    run = read_json(folder / "config.json", RunConfig, inside=folder)

A folder that a user is given may hold a named pipe, whose opening waits for ever; a link to a file of their own, which
a page would then show; gigabytes where a line is expected; and a step called "a". So a document is a plain file, of a
bounded size, in its folder, and what it says has the types and ranges of a form before any of it is used:

    @dataclass(frozen=True)
    class Span:
        region: str
        start_s: Seconds          # -1e10 to 1e10, no NaN and no infinity

A form is a dataclass, a NamedTuple or a table as dict[str, float]. pydantic reads it, and is imported when something
is read, so that a program that only writes such documents does without.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

# The bound of a document that is held whole. The longest, the metrics of a million steps, has 200 MB.
MOST_BYTES = 1 << 30
# The most ranks of a job: ten times the largest machine that there is.
MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Between:
    """The bounds of an annotated number: it is finite, and from `least` to `most`."""

    least: float
    most: float

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        schema = {**handler(source), "ge": self.least, "le": self.most}
        return {**schema, "allow_inf_nan": False} if schema["type"] == "float" else schema


@dataclass(frozen=True)
class Short:
    """The bound of an annotated text, in characters. A picture takes seconds to lay out one of thousands."""

    most: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "max_length": self.most}


# The name of a module, a group of ranks, a metric, or what else a picture shows.
Name = Annotated[str, Short(400)]
# 300 years: what no clock shows is a damaged number.
Seconds = Annotated[float, Between(-1e10, 1e10)]
Duration = Annotated[float, Between(0.0, 1e10)]
Finite = Annotated[float, Between(-1e30, 1e30)]
# A speed, or operations: of the largest machines 1e24.
Amount = Annotated[float, Between(0.0, 1e30)]
Count = Annotated[int, Between(0, 1 << 62)]
# A rank, or a number of ranks.
Ranks = Annotated[int, Between(0, MOST_RANKS)]


def open_plain(path: Path, inside: Path | None = None) -> BinaryIO:
    """The open file.

    Args:
        inside: a folder in which it has to lie, without a link on the way. A file that the user named may be a link.

    Raises:
        ValueError: it is no plain file (a folder, a pipe, a device), or not inside the folder.
        OSError: it cannot be opened.
    """
    if inside is not None and path.parent.resolve() != inside.resolve() / path.parent.relative_to(inside):
        raise ValueError(f"{path} leads out of {inside} by a link; only what lies in the folder is read")
    # Not O_NONBLOCK, a pipe nobody writes to would hold us; a plain file does not know the difference.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if inside is not None else 0)
    if inside is not None and path.is_symlink():
        raise ValueError(f"{path} is a link; only what lies in {inside} itself is read")
    opened = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise ValueError(f"{path} is no plain file")
    return os.fdopen(opened, "rb")


def is_plain(path: Path, inside: Path) -> bool:
    """Whether `open_plain` would open it."""
    try:
        open_plain(path, inside).close()
    except (OSError, ValueError):
        return False
    return True


def read_text(path: Path, inside: Path | None = None, most_bytes: int = MOST_BYTES) -> str:
    """The text of a plain file.

    Raises:
        ValueError: as `open_plain`; it has more than `most_bytes`, or is no text in UTF-8.
        OSError: it cannot be read.
    """
    with open_plain(path, inside) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{path} has more than {most_bytes:,} bytes, and none of its kind has so many")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read as text in UTF-8: {error}") from error


def read_json(path: Path, form: Any, inside: Path | None = None, most_bytes: int = MOST_BYTES) -> Any:
    """What a JSON file says, in a form.

    Raises:
        ValueError: as `read_text`; or it is no JSON, or not of this form: the message has the place and the rule.
        OSError: it cannot be read.
        ModuleNotFoundError: pydantic is not installed.
    """
    return parse(read_text(path, inside, most_bytes), form, str(path))


def parse(text: str | bytes, form: Any, source: str) -> Any:
    """The same of a text; `source` names it in messages."""
    return _told(lambda: checker(form).validate_json(text, strict=True), source)


def checked(values: Any, form: Any, source: str) -> Any:
    """The same of what was parsed before, or is no JSON: TOML."""
    return _told(lambda: checker(form).validate_python(values), source)


def _told(check: Callable[[], Any], source: str) -> Any:
    from pydantic import ValidationError

    try:
        return check()
    except ValidationError as error:
        raise ValueError(f"{source}: {first_refused(error)}") from error


@lru_cache
def checker(form: Any) -> TypeAdapter[Any]:
    """What checks values and JSON against a form."""
    from pydantic import TypeAdapter

    return TypeAdapter(form)


def first_refused(error: ValidationError) -> str:
    """The first place that a form refuses, the rule, and what is there."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "value_error":
        # By the form's own __post_init__, in our words.
        return f"{place + ': ' if place else ''}{first['ctx']['error']}"
    if first["type"] == "missing":
        return f"{place} is missing"
    if first["type"] in ("json_invalid", "unexpected_keyword_argument"):
        return f"{place + ': ' if place else ''}{first['msg']}"
    return f"{place or 'it'} {first['msg'].replace('Input should', 'must')}; got {_shortened(repr(first['input']))}"


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
