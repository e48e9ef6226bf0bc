"""Values within a call's arguments: what holds them is copied where they change, and a wrong path is named."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from opensora_accel.arguments import change_at, value_at


@dataclass(frozen=True)
class Clip:
    """Checked where it is made: a copy with another `x` alone would not pass."""

    x: int
    copy_of_x: int

    def __post_init__(self) -> None:
        assert self.x == self.copy_of_x


class Grid(NamedTuple):
    frames: int
    places: int


class Plain:
    def __init__(self, x: int):
        self.x = x


def arguments() -> dict[str, Any]:
    return {
        "plain": 1,
        "clip": Clip(1, 1),
        "object": Plain(1),
        "options": {"x": 1, "other": 5},
        "args": (0, 1),
        "sizes": [0, 1],
        "grid": Grid(0, 1),
        "deep": {"clips": [Clip(7, 7), Clip(1, 1)]},
    }


@pytest.mark.parametrize(
    "path",
    ["plain", "clip.x", "object.x", "options.x", "args.1", "args.-1", "sizes.1", "grid.1", "deep.clips.1.x"],
)
def test_a_value_is_read_and_changed_wherever_it_is_held(path):
    given = arguments()
    before = dict(given)
    assert value_at(given, path) == 1
    change_at(given, path, lambda value: value + 1)
    assert value_at(given, path) == 2
    assert type(given[path.split(".")[0]]) is type(before[path.split(".")[0]])
    # What the caller holds is as it was, and so is all else.
    assert value_at(before, path) == 1
    assert [name for name in given if given[name] is not before[name]] == [path.split(".")[0]]


def test_what_is_not_there_stays_away():
    given = {"clip": None, "options": {"x": None}}
    for path in ("clip.x", "options.x", "missing", "missing.x"):
        assert value_at(given, path) is None
        change_at(given, path, lambda value: 5)
    assert given == {"clip": None, "options": {"x": None}}


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("clip.y", "the argument 'clip.y', but this Clip has x, copy_of_x"),
        ("options.y", "this dict has x, other"),
        ("args.2", "this tuple has 2 items"),
        ("args.x", "this tuple has 2 items"),
        ("plain.x", "this int has no fields"),
    ],
)
def test_a_wrong_path_is_named(path, told):
    with pytest.raises(ValueError, match=told):
        change_at(arguments(), path, lambda value: value)
