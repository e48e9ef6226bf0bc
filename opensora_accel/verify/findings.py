"""What is wrong, as a finding that says what, over which axis, by what factor, and what is probably missing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from opensora_accel.plan import DATA_AXES, SEQUENCE_AXES
from opensora_accel.verify.fit import Factor
from opensora_accel.verify.shapes import MeshShape

Kind = Literal[
    "failure",
    "weights",
    "inputs",
    "missing gradient",
    "scale",
    "missing sum",
    "shares",
    "values",
    "clipping",
    "optimizer",
    "outside",
    "result",
]

_SHOWN_NAMES = 4


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    kind: Kind
    what: str
    """One line."""
    remedy: str
    axes: tuple[str, ...] = ()
    """Over which it goes wrong."""
    factor: str = ""
    """By which gradients are multiplied, where that is what is wrong: `sequence⁻¹`."""
    names: tuple[str, ...] = ()
    """All parameters concerned."""
    meshes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.what}\n  {self.remedy}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "what": self.what,
            "remedy": self.remedy,
            "axes": list(self.axes),
            "factor": self.factor,
            "parameters": list(self.names),
            "meshes": list(self.meshes),
        }


def count_names(names: Sequence[str], total: int) -> str:
    """`all 69 parameters`, or `2 of 69 parameters (a, b)`."""
    if len(names) == total:
        return f"all {total} parameters" if total != 1 else f"the only parameter ({names[0]})"
    return f"{len(names)} of {total} parameters ({list_names(names)})"


def list_names(names: Sequence[str]) -> str:
    more = f", … {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def join(words: Sequence[str], last: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def compose_axes(axes: Sequence[str], used: Sequence[str]) -> tuple[str, ...]:
    """The Plan's own words for several axes: ring and ulysses are sequence, where the meshes use both."""
    left = list(axes)
    words: list[str] = []
    for word, members in (("data", DATA_AXES), ("sequence", SEQUENCE_AXES)):
        present = [axis for axis in used if axis in members]
        if len(present) > 1 and all(axis in left for axis in present):
            words.append(word)
            left = [axis for axis in left if axis not in members]
    return (*left, *words)


def compose_factor(factor: Factor, used: Sequence[str]) -> Factor:
    by_exponent: dict[int, list[str]] = {}
    for axis, exponent in factor.exponents:
        by_exponent.setdefault(exponent, []).append(axis)
    composed = tuple((w, e) for e, axes in by_exponent.items() for w in compose_axes(axes, used))
    return replace(factor, exponents=composed)


@dataclass(frozen=True)
class Blame:
    """The axes that an error goes with, by the meshes on which it shows."""

    axes: tuple[str, ...] = ()
    words: str = ""


def blame(bad: Sequence[MeshShape], good: Sequence[MeshShape], axes: Sequence[str]) -> Blame:
    """The simplest rule that tells the meshes with the error from those without."""
    everything = [*bad, *good]

    def fits(rule: Any) -> bool:
        return all(rule(s) == (s in bad) for s in everything)

    for axis in axes:
        for least in (2, 3, 4):
            if fits(lambda s, axis=axis, least=least: s.degree(axis) >= least):
                return Blame(
                    (axis,), f"wherever {axis} has {least} ranks or more" if least > 2 else f"over {axis}"
                )
    for count in range(2, len(axes)):
        for chosen in itertools.combinations(axes, count):
            if fits(lambda s, chosen=chosen: any(s.degree(axis) > 1 for axis in chosen)):
                return Blame(chosen, f"over {join(chosen, 'or')}")
    for count in range(2, len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            if fits(lambda s, chosen=chosen: all(s.degree(axis) > 1 for axis in chosen)):
                return Blame(chosen, f"where {join(chosen)} are used together")
    if fits(lambda s: s.world_size > 1):
        return Blame(tuple(axes), "on every mesh")
    return Blame((), f"on {join([str(s) for s in bad])} only")
