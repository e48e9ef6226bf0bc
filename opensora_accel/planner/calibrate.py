"""Measures this machine into a hardware file: `opensora-accel doctor --calibrate FILE`, in about three minutes.

What is measured, each over sizes from small to large and stored as a share of the fastest:

    products of matrices      (m, n, k), with a bias (addmm) and without (mm)
    attention                 (heads, queries, keys, head_dim), forward and backward
    operators by traffic      the bytes of add, mul, gelu, layer norm, ...: what a video transformer spends time in
    the same in bf16          on a CPU, whose library has other kernels for it; of a GPU the fastest product alone
    the host, and the step    what an operator costs beside its work in each phase of a step, and how much slower
                              kernels are there than by themselves: two steps of a small transformer, also under FSDP2
    copies                    to host memory and back, page-locked on a GPU
    links                     each collective on the ranks of a node, small and large messages; and the link from node
                              to node, where a launcher has started ranks on several
    ranks beside each other   on a CPU: how much slower a step is where others compute, how late ranks come to what they
                              do together, and how much of a message compute hides

A GPU computes for 15 s before all that. On a CPU, seconds are those of the process and not of the clock on the wall, so
that another program beside it does not count. A torchrun of several ranks measures kernels on rank 0 while the others
wait, and links on all of them.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from opensora_accel.files import check_folder_of
from opensora_accel.links import Link
from opensora_accel.observe import architecture_of
from opensora_accel.parallel_states import start_distributed
from opensora_accel.planner import rank_speeds, step_speeds
from opensora_accel.planner.hardware import Efficiency, Hardware
from opensora_accel.planner.kernel_speeds import Meter, attention, products, traffic

Show = Callable[[str, float], None]
# What remains uncertain of a measured figure, so that nine of ten steps lie in their interval: fitted to forty steps of
# four families on a machine of 2 cores, and judged by others (tools/bench/forecast.py).
_UNCERTAINTY = 0.07
# Where ranks take turns on a core, each collective waits for ranks that wait for a core: fitted to the same.
_OVERSUBSCRIBED = 0.11
# What a GPU computes before anything is measured.
_LOAD_S = 15.0


def write(path: Path) -> None:
    """`opensora-accel doctor --calibrate FILE`, on one process or on every rank of a launcher; rank 0 writes.

    Raises:
        FileNotFoundError: there is no folder to write to; before anything is measured.
    """
    check_folder_of(path)
    start = time.perf_counter()

    def show(what: str, share: float) -> None:
        print(f"{share:4.0%}  {time.perf_counter() - start:5.1f} s  {what}", file=sys.stderr, flush=True)

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    is_first = os.environ.get("RANK", "0") == "0"
    # Kernels first, on rank 0 alone: the others wait for it where the group starts. A step is traced without a group.
    hardware = measure_device(device, show) if is_first else None
    if "RANK" in os.environ:
        start_distributed()
        if is_first:
            show("links", 0.9)
        hardware = measure_links(device, hardware)
        dist.destroy_process_group()
    if is_first:
        assert hardware is not None
        hardware.save(path)
        peaks = ", ".join(f"{peak / 1e9:,.0f} G/s {name}" for name, peak in hardware.peak_flops.items())
        print(f"wrote {path}: {peaks}; plan with --hardware {path}")


def measure_device(device: torch.device, show: Show = lambda what, share: None) -> Hardware:
    """Kernels, copies and the host of this process; links are those of the data sheet or assumed.

    Args:
        show: called with what is being measured, and the share of all that is done.

    Raises:
        ValueError: a process group exists already: a step cannot be traced in it.
    """
    meter = Meter(device)
    if meter.is_gpu:
        show("under load, until its clock is that of a long run", 0.0)
        meter.load(_LOAD_S)
    show("products of matrices", 0.0)
    products_found = products(meter)
    show("attention", 0.2)
    attention_found = attention(meter)
    show("operators by traffic", 0.35)
    traffic_found = traffic(meter)
    in_bf16: dict[str, dict[tuple[float, ...], float]] = {}
    if not meter.is_gpu:
        # A GPU's kernels in bf16 follow from its peak; a CPU's from what its library has for each of them.
        show("the same in bf16", 0.5)
        other = Meter(device, "bfloat16")
        in_bf16 = products(other)["rates"] | attention(other) | traffic(other)
    show("copies, and the host's time", 0.85)
    hardware = _hardware(meter, products_found, attention_found, traffic_found, in_bf16)
    launch_s, phases = step_speeds.phases(device, hardware)
    return dataclasses.replace(hardware, launch_s=launch_s, phases=phases)


def measure_links(device: torch.device, hardware: Hardware | None) -> Hardware | None:
    """The same hardware, with collectives and crowding as they are measured; every rank calls, and rank 0 gives it.

    Communication: collectives of 8 MiB and less over all ranks.
    """
    places, collectives = rank_speeds.Places.now(), rank_speeds.collectives(device)
    between = rank_speeds.between_nodes(device)
    sharded_launch_s, hook_s = step_speeds.sharded_host_s(device)
    on_cores: dict[str, Any] = {}
    uncertain, oversubscribed = _UNCERTAINTY, _OVERSUBSCRIBED
    if device.type == "cpu" and places.per_node > 1:
        step = step_speeds.small_step(device, *step_speeds.LARGE)
        on_cores["crowding"], on_cores["lateness"], spreads = rank_speeds.beside_others(step)
        # A machine that does other things too is as uncertain as rounds differ on it.
        on_own_cores = (spread for busy, spread in spreads.items() if busy <= _num_cores())
        uncertain = min(0.5, max(uncertain, *on_own_cores))
        oversubscribed = min(0.5, max(oversubscribed, *spreads.values()))
        on_cores["beside_collective"] = rank_speeds.beside_collective()
    if hardware is None:
        return None
    links: dict[str, Any] = {}
    if places.per_node > 1:
        small, *_, large = collectives[f"send {places.per_node}/{places.per_node}"]
        links = {"within": Link.through(small, large), "collectives": collectives}
    if between is not None:
        links["between"] = between
    names = ("sharded_launch_s", "hook_s", *links, *on_cores)
    ranks = (
        f"{places.nodes} nodes of {places.per_node} ranks" if places.nodes > 1 else f"{places.per_node} ranks"
    )
    return dataclasses.replace(
        hardware,
        sharded_launch_s=sharded_launch_s,
        hook_s=hook_s,
        **links,
        **on_cores,
        uncertainties=hardware.uncertainties
        | {
            "collective": uncertain,
            "crowding": uncertain,
            "oversubscription": oversubscribed,
        },
        ranks_per_node=places.per_node,
        memory_bytes=hardware.memory_bytes
        if device.type == "cuda"
        else hardware.host_memory_bytes // places.per_node,
        sources=hardware.sources | dict.fromkeys(names, f"{_when()}, {ranks}"),
    )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _when() -> str:
    return f"measured by doctor --calibrate on {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"


# ---- the host, copies, links


def _copies(meter: Meter) -> Link:
    """The link of a device to host memory."""

    def taken(size: int) -> tuple[int, float]:
        source = torch.zeros(size, dtype=torch.uint8, device=meter.device)
        target = torch.zeros(size, dtype=torch.uint8, pin_memory=meter.is_gpu)
        return size, meter.seconds(lambda: lambda: target.copy_(source, non_blocking=True))

    return Link.through(taken(1024), taken(2**25))


# ---- the file


def _hardware(
    meter: Meter,
    products_found: dict[str, Any],
    attention_found: dict[str, Any],
    traffic_found: dict[str, Any],
    in_bf16: dict[str, dict[tuple[float, ...], float]],
) -> Hardware:
    """What was measured, in the place of what is assumed. `in_bf16`: of a CPU, all classes once more."""
    peaks: dict[str, float] = products_found["peak_flops"]
    peak = peaks[meter.dtypes[0]]
    if in_bf16:
        computed = [rates for name, rates in in_bf16.items() if not name.startswith("memory")]
        peaks["bfloat16"] = max(max(rates.values()) for rates in computed)
    moved = [*traffic_found.values(), *(in_bf16[name] for name in in_bf16 if name.startswith("memory"))]
    fastest = max(max(rates.values()) for rates in moved)
    efficiencies = (
        {name: _shares(("m", "n", "k"), rates, peak) for name, rates in products_found["rates"].items()}
        | {
            name: _shares(("heads", "queries", "keys", "head_dim"), rates, peak)
            for name, rates in attention_found.items()
        }
        | {name: _shares(("bytes",), rates, fastest) for name, rates in traffic_found.items()}
    )
    for name, rates in in_bf16.items():
        by = efficiencies[name].by
        of_peak = fastest if by == ("bytes",) else peaks["bfloat16"]
        efficiencies[f"{name} bfloat16"] = _shares(by, rates, of_peak)
    base = Hardware.named("h100" if meter.is_gpu else "cpu")
    free_bytes = psutil.virtual_memory().available
    measured = dict.fromkeys(
        (
            "peak_flops",
            "memory_bytes_per_s",
            "memory_bytes",
            "host_memory_bytes",
            "host_link",
            "launch_s",
            "phases",
            *efficiencies,
        ),
        _when(),
    )
    return dataclasses.replace(
        base,
        name=f"calibrated {meter.device.type}",
        architecture=architecture_of(meter.device),
        peak_flops=peaks,
        memory_bytes=torch.cuda.get_device_properties(meter.device).total_memory
        if meter.is_gpu
        else free_bytes,
        memory_bytes_per_s=fastest,
        host_link=_copies(meter),
        ranks_per_node=1,
        host_memory_bytes=free_bytes,
        launch_s=0.0,
        slowness=dict.fromkeys(base.slowness, 1.0),
        cores=None if meter.is_gpu else _num_cores(),
        efficiencies=efficiencies,
        uncertainties={
            kind: share if kind == "reserved" else _UNCERTAINTY for kind, share in base.uncertainties.items()
        },
        sources=base.sources | measured,
    )


def _shares(by: Sequence[str], rates: dict[tuple[float, ...], float], peak: float) -> Efficiency:
    points = tuple((tuple(map(float, sizes)), min(1.0, rate / peak)) for sizes, rate in rates.items())
    return Efficiency(tuple(by), points)
