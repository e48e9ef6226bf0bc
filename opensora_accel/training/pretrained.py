"""Models that are used as they are, from local folders: loaded whole, or refused in one line.

Nothing is fetched, and no code of a folder is run.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn

from opensora_accel.deferred import deferred_init, materialize
from opensora_accel.documents import read_text
from opensora_accel.weights import fill, find_stored, missing_in

ModelT = TypeVar("ModelT", bound=nn.Module)

PRETRAINED_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def read_description(option: str, folder: str | Path, what: str) -> dict[str, Any]:
    """The config.json of a folder. `what` says which folder `option` needs.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{option} {folder} has no config.json; give the local folder of {what}")
    try:
        description = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{option} {folder}: its config.json is damaged ({error})") from error
    if not isinstance(description, dict):
        raise ValueError(
            f"{option} {folder}: its config.json is a JSON {type(description).__name__}, not an object; give the local "
            f"folder of {what}"
        )
    return description


def with_defaults(cls: type, description: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, with the defaults of its class for what it leaves out."""
    parameters = inspect.signature(cls).parameters
    named = {name: each.default for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}
    return named | dict(description)


def load_pretrained(
    cls: type[ModelT],
    make: Callable[[], ModelT],
    option: str,
    folder: str | Path,
    stem: str,
    dtype: torch.dtype,
    device: torch.device | None,
    prefixes: Mapping[str, str] = MappingProxyType({}),
) -> ModelT:
    """The model of a folder in `dtype`, frozen, as `from_pretrained(folder, dtype=dtype)` of its library gives it.

    It is built without memory and filled tensor by tensor, each of which goes to `device` before the next one is read:
    at most one is held beside the model, in the type that the file has. What the model's class keeps in fp32 stays in
    fp32.

    Args:
        make: builds the `cls`.
        stem: how the library names the files of weights.
        device: None leaves it without memory: its sizes are known, and that all of its weights are there. On "meta"
            its sizes are known, and its weights need not be there.
        prefixes: the first of these that a name in the files begins with → what the model's own name has there.

    Raises:
        ValueError: there are no safetensors, they cannot be read, or weights are missing or of another shape.
    """
    # Constructors make parameters in the default dtype, as `from_pretrained` has it while it builds.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with deferred_init():
            model = make()
    except Exception as error:  # whatever a constructor raises for values that do not work
        raise unloadable(cls, option, folder, error) from error
    finally:
        torch.set_default_dtype(before)
    _keep_in_fp32(model)
    if device is not None and device.type == "meta":
        return model
    try:
        found = find_stored(Path(folder), stem)
        stored = {_own_name(name, prefixes): each for name, each in found.items()}
    except FileNotFoundError as error:
        raise ValueError(
            f"{option} {folder} has no {stem}.safetensors, and weights are read from safetensors alone; save them once "
            f"as such: {cls.__name__}.from_pretrained({str(folder)!r}).save_pretrained(another folder)"
        ) from error
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise unloadable(cls, option, folder, error) from error
    # Before anything is filled: a library leaves weights that are missing random, and a frozen model never
    # learns them.
    missing = missing_in(stored, model)
    if missing:
        raise ValueError(
            f"{option} {folder} does not hold all weights of a {cls.__name__}: {len(missing)} are missing, "
            f"{', '.join(missing[:3])} among them; copy the folder again, whole"
        )
    if device is None:
        return model
    try:
        fill(model, stored)
        materialize(model, device)
    except (SafetensorError, OSError) as error:
        raise unloadable(cls, option, folder, error) from error
    return model.eval().requires_grad_(False)


def _own_name(name: str, prefixes: Mapping[str, str]) -> str:
    found = (own + name.removeprefix(prefix) for prefix, own in prefixes.items() if name.startswith(prefix))
    return next(found, name)


def _keep_in_fp32(model: nn.Module) -> None:
    """Parameters that the libraries keep in fp32 whatever type is asked for, by a part of their name."""
    # transformers has two lists, and the one without "strict" is for fp16 alone.
    is_transformers = hasattr(model, "_keep_in_fp32_modules_strict")
    listed = getattr(
        model, "_keep_in_fp32_modules_strict" if is_transformers else "_keep_in_fp32_modules", None
    )
    # Some classes name one module, some several, and most none.
    kept = {listed} if isinstance(listed, str) else set(listed or ())
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if kept & {*path.split("."), name}:
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, dtype=torch.float32)))


def unloadable(cls: type, option: str, folder: str | Path, error: Exception) -> ValueError:
    """What to raise for a library's error, which may have any type and many lines."""
    return ValueError(
        f"{option} {folder} cannot be loaded as {cls.__name__} ({in_one_line(error)}); copy the folder again, "
        "whole, or give another"
    )


def in_one_line(error: Exception) -> str:
    """Type and first line of an error that a library raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
