"""Corrects a hardware file by a measured run, so that the next plan on it foresees what was measured.

A part of the step has kernels of several classes: attention's module has products around its kernel. So the factors of
the classes are found together, as those by which all parts come nearest to what was measured. Of blocks that were
foreseen with 3 s of products and 1 s of traffic and took 5.5 s, and an optimizer with 1 s of traffic that took 1 s,
products take (5.5 − 1) / 3 = 1.5 times as long, and traffic 1.0 times. What the parts do not tell apart gets the factor
of the whole.

A correction is counted from the figures that the forecast had without any: one that was there before is replaced, and a
run that is taken twice corrects once.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from opensora_accel.files import replacing
from opensora_accel.observe import Forecast, MeasuredParts
from opensora_accel.planner.hardware import Hardware

_CLASSES = ("gemm", "attention", "memory")
# How much, of the parts' squares, a factor away from that of the whole counts.
_TOGETHER = 1e-4
# No run says that a kernel takes less than a twentieth of what was foreseen: then something else was measured.
_LEAST = 0.05


def correct(path: Path, forecast: Forecast, measured: MeasuredParts) -> list[str]:
    """Writes the corrected hardware file; a line for each correction.

    Args:
        path: an existing file of this hardware keeps its other figures; a new one gets those of the forecast.

    Raises:
        ValueError: the file is of other hardware, or nothing in the run says anything of it.
        OSError: it cannot be read or written.
    """
    if path.suffix != ".json":
        raise ValueError(f"--correct names a hardware file (.json); got {path}")
    hardware = Hardware.named(str(path) if path.exists() else forecast.hardware_file or forecast.hardware)
    if hardware.name != forecast.hardware:
        raise ValueError(
            f"{path} is of {hardware.name}, and the forecast is for {forecast.hardware}; name another file, or one "
            "that is not there yet"
        )
    factors = factors_of(measured.parts)
    slowness = dict(hardware.slowness)
    collectives, sources = dict(hardware.collective_slowness), dict(hardware.sources)
    day = datetime.datetime.fromtimestamp(measured.started_at, datetime.timezone.utc).date()
    run = f"{day}: run {measured.name}, {measured.num_steps} steps"
    lines = []
    for name, factor in factors.items():
        slowness[name] = forecast.slowness.get(name, 1.0) * factor
        sources[f"slowness.{name}"] = f"{run}: {slowness[name]:.3f} times what the figures say"
        lines.append(
            f"{name} takes {slowness[name]:.3f} times what the figures say ({factor:.3f} of the forecast)"
        )
    for group, (foreseen_s, measured_s) in measured.calls.items():
        if foreseen_s > 0 and measured_s > 0:
            factor = max(_LEAST, measured_s / foreseen_s)
            collectives[group] = forecast.collective_slowness.get(group, 1.0) * factor
            sources[f"collective_slowness.{group}"] = (
                f"{run}: {collectives[group]:.3f} times what the links say"
            )
            lines.append(
                f"{group} takes {collectives[group]:.3f} times what the links say ({factor:.3f} of the forecast)"
            )
    if not lines:
        raise ValueError(
            f"{measured.name} has no part that its forecast has too: nothing in {path} is corrected"
        )
    corrected = dataclasses.replace(
        hardware, slowness=slowness, collective_slowness=collectives, sources=sources
    )
    with replacing(path) as temporary:
        temporary.write_text(corrected.to_json(), encoding="utf-8")
    return lines


def factors_of(parts: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """How many times longer kernels of each class took, of the classes that the parts have.

    Args:
        parts: of each the seconds that were foreseen by class, with those of the host, and those that were measured.
    """
    by_class = [[kernels.get(name, 0.0) for name in _CLASSES] for kernels, _seconds in parts]
    rows = np.array(by_class).reshape(-1, len(_CLASSES))
    taken = np.array([max(0.0, seconds - kernels.get("host", 0.0)) for kernels, seconds in parts])
    sums = rows.sum(0)
    if not sums.any():
        return {}
    whole = taken.sum() / sums.sum()
    together = np.sqrt(_TOGETHER) * np.diag(sums)
    found, *_ = np.linalg.lstsq(
        np.concatenate([rows, together]), np.concatenate([taken, together @ np.full(3, whole)]), rcond=None
    )
    return {
        name: max(_LEAST, float(factor))
        for name, factor, seconds in zip(_CLASSES, found, sums, strict=True)
        if seconds > 0
    }
