"""What the benchmark claims of our scheme, and whether one run's figures bear it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opensora_accel.profiler.bench_offload.measure import Measured
from opensora_accel.profiler.bench_offload.report import step_time_ratio
from opensora_accel.profiler.bench_offload.schemes import OFFLOADED, OFFLOADING_PEERS, REFERENCE
from opensora_accel.profiler.bench_offload.workload import Case

MOST_STEP_TIME = 1.02
LEAST_MOVED = 0.99
LEAST_HIDDEN = 0.95
MOST_BYTES_OFF = 0.01

Results = Mapping[str, Measured]


def claims(case: Case, results: Results) -> list[dict[str, Any]]:
    """Each with its value, its threshold, and whether it held; None for what this device cannot show."""
    on_device = case.device.type == "cuda"
    found = [
        _claim(
            f"step time of {OFFLOADED} over that of {REFERENCE}",
            step_time_ratio(results, OFFLOADED) if on_device else None,
            MOST_STEP_TIME,
            "at most",
        ),
        _claim(
            f"share of copy time that {OFFLOADED} hides behind compute",
            _of(results, OFFLOADED, lambda result: result.hidden_share) if on_device else None,
            LEAST_HIDDEN,
            "at least",
        ),
    ]
    for name in (name for name in (OFFLOADED, "selective+offload") if name in results):
        found.append(_moved(name, results, on_device))
        found.append(_resident(name, name.partition("+")[0], results))
    for peer in (peer for peer in OFFLOADING_PEERS if peer in results):
        time_value = _over_ours(results, peer, lambda result: result.median_ms) if on_device else None
        found.append(_claim(f"step time of {peer} over that of {OFFLOADED}", time_value, 1.0, "above"))
        peak_value = _over_ours(results, peer, _peak)
        found.append(_claim(f"peak of {peer} over that of {OFFLOADED}", peak_value, 1.0, "above"))
    return [{"case": case.name, **claim} for claim in found]


def _claim(what: str, value: float | None, threshold: float, comparison: str) -> dict[str, Any]:
    held: bool | None = None
    if value is not None:
        tests: dict[str, Callable[[float], bool]] = {
            "at most": lambda number: number <= threshold,
            "at least": lambda number: number >= threshold,
            "above": lambda number: number > threshold,
            "1, to within": lambda number: abs(number - 1) <= threshold,
        }
        held = tests[comparison](value)
    return {"claim": what, "comparison": comparison, "threshold": threshold, "value": value, "held": held}


def _moved(name: str, results: Results, on_device: bool) -> dict[str, Any]:
    def share(result: Measured) -> float | None:
        if result.memory is None or not result.theory_bytes:
            return None
        return min(result.memory.out_bytes, result.memory.in_bytes) / result.theory_bytes

    what = f"bytes that {name} moves each way, over theory"
    limits = (LEAST_MOVED, "at least") if on_device else (MOST_BYTES_OFF, "1, to within")
    return _claim(what, _of(results, name, share), *limits)


def _resident(name: str, alone: str, results: Results) -> dict[str, Any]:
    """What lies on the device beside the blocks' boundaries (the loss's own, say) is the same without offload."""
    value = None
    with_offload, without = results.get(name), results.get(alone)
    if with_offload is not None and without is not None and with_offload.memory and without.memory:
        assert with_offload.kept_bytes is not None and without.kept_bytes is not None
        others = without.memory.resident_bytes - without.kept_bytes
        expected = with_offload.memory.slot_bytes + with_offload.kept_bytes
        value = (with_offload.memory.resident_bytes - others) / expected if expected else None
    what = (
        f"bytes that {name} keeps for the blocks after the forward, over two slots and the blocks that stay"
    )
    return _claim(what, value, MOST_BYTES_OFF, "1, to within")


def _of(results: Results, name: str, figure: Callable[[Measured], float | None]) -> float | None:
    result = results.get(name)
    return None if result is None else figure(result)


def _peak(result: Measured) -> float | None:
    return None if result.memory is None else result.memory.peak_bytes


def _over_ours(results: Results, peer: str, figure: Callable[[Measured], float | None]) -> float | None:
    theirs, ours = _of(results, peer, figure), _of(results, OFFLOADED, figure)
    return theirs / ours if theirs is not None and ours else None
