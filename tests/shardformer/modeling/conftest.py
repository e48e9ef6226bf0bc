"""Small inputs that are computed as large ones are: in tiles of a few rows."""

import dataclasses

import pytest

from shardformer.modeling.norms import layer_tiles, tiles
from shardformer.modeling.norms.kernels import KERNELS


@pytest.fixture
def kernels():
    """The table of kernels, to be changed; its order is part of it."""
    before = dict(KERNELS)
    yield KERNELS
    KERNELS.clear()
    KERNELS.update(before)


@pytest.fixture
def small_tiles(monkeypatch, kernels):
    """Every input is worth tiling, and a tile is 2 KiB."""
    monkeypatch.setattr(tiles, "TILE_BYTES", 2048)
    for module, name in (
        (tiles, "LEAST_ELEMENTS"),
        (tiles, "_LEAST_ELEMENTS_WITHOUT_BACKWARD"),
        (layer_tiles, "_LEAST_ELEMENTS"),
        (layer_tiles, "_LEAST_HALF_ELEMENTS"),
    ):
        monkeypatch.setattr(module, name, 0)
    kernels["tiles"] = dataclasses.replace(kernels["tiles"], least_elements=0)
