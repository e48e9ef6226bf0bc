"""Corrects a hardware file by a measured run, so that the next plan on it foresees what was measured.

A part of the step has kernels of several classes: attention's module has products around its kernel. So the factors of
the classes are found together, as those by which all parts come nearest to what was measured. Of blocks that were
foreseen with 3 s of products and 1 s of traffic and took 5.5 s, and an optimizer with 1 s of traffic that took 1 s,
products take (5.5 − 1) / 3 = 1.5 times as long, and traffic 1.0 times. What the parts do not tell apart gets the factor
of the whole. Where the host computes, what it takes to start a kernel is such a class.

A correction is counted from the figures that the forecast had without any: one that was there before is replaced, and a
run that is taken twice corrects once.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opensora_accel.files import replacing
from opensora_accel.observe import Forecast, MeasuredParts
from opensora_accel.planner.hardware import Hardware

_CLASSES = ("gemm", "attention", "memory", "host")
# How much a factor away from that of the whole counts, of what the whole would be off by it. A class with a small share
# of the step cannot be told from noise in the others, and keeps the factor of the whole.
_TOGETHER = 1e-3
# No class is that many times further from its forecast than the whole is: then something else was measured.
_MOST = 5.0


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
    lines, figures = list[str](), dict[str, Any]()
    for name, factor in factors.items():
        if name == "host":
            figures = {each: taken * factor for each, taken in forecast.host_s.items()}
            taken = ", ".join(f"{each} {seconds * 1e6:.3g} µs" for each, seconds in figures.items())
            sources |= dict.fromkeys(figures, f"{run}: {taken}")
            lines.append(f"host takes {factor:.3f} times the forecast: {taken}")
            continue
        slowness[name] = forecast.slowness.get(name, 1.0) * factor
        sources[f"slowness.{name}"] = f"{run}: {slowness[name]:.3f} times what the figures say"
        lines.append(
            f"{name} takes {slowness[name]:.3f} times what the figures say ({factor:.3f} of the forecast)"
        )
    for group, (foreseen_s, measured_s) in measured.calls.items():
        if foreseen_s > 0 and measured_s > 0:
            factor = measured_s / foreseen_s
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
        hardware, slowness=slowness, collective_slowness=collectives, sources=sources, **figures
    )
    with replacing(path) as temporary:
        temporary.write_text(corrected.to_json(), encoding="utf-8")
    return lines


def factors_of(parts: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """How many times longer kernels of each class took, of the classes that the parts have.

    Args:
        parts: of each the seconds that were foreseen by class, and those that were measured.
    """
    by_class = [[kernels.get(name, 0.0) for name in _CLASSES] for kernels, _seconds in parts]
    rows = np.array(by_class).reshape(-1, len(_CLASSES))
    taken = np.array([seconds for _kernels, seconds in parts])
    sums = rows.sum(0)
    if not sums.any():
        return {}
    whole = float(taken.sum() / sums.sum())
    together = np.sqrt(_TOGETHER) * sums.sum()
    # What comes out too far off is set to the bound, and the others are found again.
    factors, free = dict[int, float](), list(range(len(_CLASSES)))
    while free:
        left = taken - sum((factor * rows[:, i] for i, factor in factors.items()), np.zeros(len(taken)))
        found, *_ = np.linalg.lstsq(
            np.concatenate([rows[:, free], together * np.eye(len(free))]),
            np.concatenate([left, np.full(len(free), together * whole)]),
            rcond=None,
        )
        bounded = np.clip(found, whole / _MOST, whole * _MOST)
        worst = int(np.argmax(np.abs(np.log(bounded / np.maximum(found, 1e-9)))))
        if bounded[worst] == found[worst]:
            factors |= {i: float(factor) for i, factor in zip(free, found, strict=True)}
            break
        factors[free.pop(worst)] = float(bounded[worst])
    return {name: factors[i] for i, name in enumerate(_CLASSES) if sums[i] > 0}
