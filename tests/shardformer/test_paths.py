"""Modules by the paths that a policy holds."""

import pytest
from torch import nn

from shardformer.paths import find


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Identity()) for _ in range(5)])
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("", [""]),
        ("head", ["head"]),
        ("blocks.*", [f"blocks.{index}" for index in range(5)]),
        ("blocks.-1", ["blocks.4"]),
        ("blocks.-2", ["blocks.3"]),
        ("blocks.0::2", ["blocks.0", "blocks.2", "blocks.4"]),
        ("blocks.1::2.0", ["blocks.1.0", "blocks.3.0"]),
        ("blocks.3:", ["blocks.3", "blocks.4"]),
        ("blocks.*.-1", [f"blocks.{index}.1" for index in range(5)]),
    ],
)
def test_a_path_names_modules_as_python_counts_them(path, names):
    assert [name for name, _module in find(Model(), path)] == names


@pytest.mark.parametrize("path", ["blocks.7::2", "head.-1", "heads.-1", "blocks.-1.weight"])
def test_a_path_that_fits_nothing_is_named(path):
    with pytest.raises(ValueError, match=f"names '{path}', which fits no module of Model: "):
        find(Model(), path)
