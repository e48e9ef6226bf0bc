"""Models from local folders: loaded whole or refused in one line. Nothing is fetched, and none of their code is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_description(option: str, folder: str | Path, what: str) -> dict[str, Any]:
    """Its config.json. `what` tells which folder `option` needs.

    Raises FileNotFoundError where there is none, ValueError where it is no JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{option} {folder} has no config.json; give the local folder of {what}")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{option} {folder}: its config.json is damaged ({error})") from error
    if not isinstance(description, dict):
        raise ValueError(
            f"{option} {folder}: its config.json is a JSON {type(description).__name__}, not an object; give the local "
            f"folder of {what}"
        )
    return description


def load_pretrained(cls: Any, option: str, folder: str | Path, **options: Any) -> Any:
    """`cls.from_pretrained` of a folder.

    Raises ValueError, naming the option, for whatever the library raises, and for weights that are missing or of
    another shape: the library would draw them at random and go on.
    """
    try:
        model, info = cls.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, output_loading_info=True, **options
        )
    except Exception as error:
        raise unloadable(cls, option, folder, error) from error
    lacking = sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"]))
    if lacking:
        raise ValueError(
            f"{option} {folder} does not hold all weights of a {cls.__name__}: {len(lacking)} are missing or of "
            f"another shape, {', '.join(lacking[:3])} among them; copy the folder again, whole"
        )
    return model


def unloadable(cls: Any, option: str, folder: str | Path, error: Exception) -> ValueError:
    """What to raise for a library's error, which may have any type and many lines."""
    return ValueError(
        f"{option} {folder} cannot be loaded as {cls.__name__} ({in_one_line(error)}); copy the folder again, "
        "whole, or give another"
    )


def in_one_line(error: Exception) -> str:
    """Type and first line of an error that a library raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
