"""Two tiers: `make test` runs every behaviour once, `make prove` every case of it."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

PROVE = pytest.mark.prove
# `make gpu` runs these, by the stages of tools/gpu_stages.py.
NEEDS_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
# On this CPU in `make prove`, which tests the test, and on a GPU where there is one.
CPU_AND_GPU = [pytest.param("cpu", marks=PROVE), pytest.param("cuda", marks=NEEDS_GPU)]
# On several, a rank each.
NEEDS_GPUS = [pytest.mark.cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not 2 GPUs")]
CPUS_AND_GPUS = [pytest.param("cpu", marks=PROVE), pytest.param("cuda", marks=NEEDS_GPUS)]


def some(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """All values of one parameter; those that are not among the chosen, or not the first, are left to `make prove`."""
    values = list(values)
    chosen = chosen or tuple(values[:1])
    return [_param((value,), value in chosen) for value in values]


def each_once(rows: Iterable[Any], columns: Iterable[Any], chosen: Iterable[Any] | None = None) -> list[Any]:
    """Every (row, column), of which `make test` has each of the chosen rows once, and the columns in turn."""
    rows, columns = list(rows), list(columns)
    chosen = rows if chosen is None else list(chosen)
    return [
        _param((row, column), row in chosen and i % len(columns) == j)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def _param(values: tuple[Any, ...], by_default: bool) -> Any:
    return pytest.param(*values, marks=() if by_default else PROVE)
