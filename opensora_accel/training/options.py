"""Tables of options: frozen dataclasses that pydantic checks when they are made; what is wrong is one line of ours."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
from dataclasses import field
from typing import Any, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
Class = TypeVar("Class", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def options(cls: Class) -> Class:
    """Makes a frozen dataclass whose fields pydantic checks when it is made; an error is one line of ours."""
    checked = dataclass(frozen=True, config=_STRICT)(cls)
    make = checked.__init__

    def make_or_explain(self: Any, *args: Any, **values: Any) -> None:
        try:
            make(self, *args, **values)
        except ValidationError as error:
            raise ValueError(first_refused(error, cls)) from error

    setattr(checked, "__init__", make_or_explain)  # noqa: B010 — mypy refuses the assignment
    return checked  # type: ignore[return-value]


def first_refused(error: ValidationError, cls: Any) -> str:
    """The first option of `cls` that pydantic refuses, the rule and the value."""
    names = set(option_names(cls))
    named = []
    for each in error.errors():
        # Its path through nested tables, as far as it names options.
        name = ""
        for part in map(str, each["loc"]):
            full = f"{name}.{part}".lstrip(".")
            # The others are names that pydantic gives the alternatives of a type.
            if full in names or part.isdigit() or each["type"] == "unexpected_keyword_argument":
                name = full
        named.append((name, each))
    # The first is enough to go on with, and a line has no room for all.
    name, first = named[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "unexpected_keyword_argument":
        table, _, key = name.rpartition(".")
        every = option_names(cls)
        here = [full for full in every if full.rpartition(".")[0] == table]
        # A key in the wrong table is found in the right one; one of this table goes before the others of its name.
        nearest_of = {full.rpartition(".")[2]: full for full in [*every, *here]}
        nearest = difflib.get_close_matches(key, nearest_of, n=1, cutoff=0.5)
        hint = f"did you mean {nearest_of[nearest[0]]!r}? " if nearest else ""
        choice = ", ".join(full.rpartition(".")[2] for full in here)
        return f"there is no option {name!r}; {hint}The options here are {choice}"
    rule = " or ".join(_rule(each["msg"]) for other, each in named if other == name)
    return f"{name or 'the file'} {rule}; got {first['input']!r}"


def _rule(message: str) -> str:
    return (
        message[0].lower() + message[1:]
        if "should" not in message
        else message.replace("Input should", "must")
    )


def option_names(cls: Any, prefix: str = "") -> list[str]:
    """The full name of every option, and of every table of options."""
    names = []
    for name, hint in get_type_hints(cls).items():
        names.append(prefix + name)
        if dataclasses.is_dataclass(hint):
            names += option_names(hint, f"{prefix}{name}.")
    return names


def check_argument(hint: Any, value: Any, name: str) -> Any:
    """The value of a model's argument as the type that its class asks for.

    Raises:
        ValueError: the value has another type.
    """
    # Types of a model's constructor are what its authors wrote, which is not always what they meant.
    if get_origin(hint) is tuple and len(get_args(hint)) == 1:
        # diffusers writes tuple[int] for a tuple of any length.
        hint = types.GenericAlias(tuple, (get_args(hint)[0], ...))
    try:
        return TypeAdapter(hint, config=_STRICT).validate_json(json.dumps(value))
    except ValidationError as error:
        rule = " or ".join(_rule(each["msg"]) for each in error.errors())
        raise ValueError(f"{name} {rule}; got {value!r}") from error
