"""Measures this machine into a hardware file: `opensora-accel doctor --calibrate FILE`, in about two minutes.

What is measured, each over sizes from small to large and stored as a share of the fastest:

    products of matrices      (m, n, k), with a bias (addmm) and without (mm), and in bf16 beside fp32
    attention                 (heads, queries, keys, head_dim), forward and backward
    operators by traffic      the bytes of add, mul, gelu, layer norm, ...: what a video transformer spends time in
    the host                  what an operator costs beside its work: a step of a small transformer, by its operators
    copies                    to host memory and back, page-locked on a GPU
    links                     each collective on all ranks of a launcher, small and large messages

On a CPU, seconds are those of the process and not of the clock on the wall, so that another program beside it does not
count. A torchrun of several ranks measures kernels on rank 0 while the others wait, and links on all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from opensora_accel.communications import transport
from opensora_accel.links import Link
from opensora_accel.parallel_states import start_distributed
from opensora_accel.plan import Plan
from opensora_accel.planner.cost import kernel_s
from opensora_accel.planner.hardware import Efficiency, Hardware
from opensora_accel.planner.kernel_speeds import Meter, attention, products, traffic
from opensora_accel.planner.trace import trace_step
from opensora_accel.planner.workload import Workload, of_model

Show = Callable[[str, float], None]
# What remains uncertain of a measured figure, beside other programs: assumed.
_UNCERTAINTY = 0.1
_MESSAGE_BYTES = (64, 2**16, 2**20, 2**23)


def write(path: Path) -> None:
    """`opensora-accel doctor --calibrate FILE`, on one process or on every rank of a launcher; rank 0 writes.

    Raises:
        FileNotFoundError: there is no folder to write to; before anything is measured.
    """
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(
            f"there is no folder {path.resolve().parent} to write {path.name} to; make it first"
        )
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
    show("products of matrices", 0.0)
    products_found = products(meter)
    show("attention", 0.3)
    attention_found = attention(meter)
    show("operators by traffic", 0.6)
    traffic_found = traffic(meter)
    show("copies, and the host's time", 0.8)
    hardware = _hardware(meter, products_found, attention_found, traffic_found)
    return dataclasses.replace(hardware, launch_s=_launch_s(meter, hardware))


def measure_links(device: torch.device, hardware: Hardware | None) -> Hardware | None:
    """The same hardware, with collectives and crowding as they are measured; every rank calls, and rank 0 gives it.

    Communication: collectives of 8 MiB and less over all ranks.
    """
    collectives = _collectives(device)
    crowding = _crowding() if device.type == "cpu" else {}
    if hardware is None:
        return None
    world = dist.get_world_size()
    (small, small_s), *_, (large, large_s) = collectives[f"send {world}/{world}"]
    link = Link((large - small) / max(large_s - small_s, large_s / 10), small_s)
    measured = dict.fromkeys(("within", "collectives", "crowding"), f"{_when()}, {world} ranks")
    return dataclasses.replace(
        hardware, within=link, collectives=collectives, crowding=crowding,
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), memory_bytes=hardware.memory_bytes
        if device.type == "cuda" else hardware.host_memory_bytes // world, sources=hardware.sources | measured,
    )  # fmt: skip


def _when() -> str:
    return f"measured by doctor --calibrate on {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"


# ---- the host, copies, links


def _launch_s(meter: Meter, hardware: Hardware) -> float:
    """What an operator takes of the host in a step beside its work: modules, views, autograd, the optimizer.

    On a GPU it shows in a step whose kernels take no time. On a CPU, caches are cold for it after each large kernel, so
    it is what a step of a small model takes more than its kernels by themselves.
    """
    sizes = (16, 2, 4) if meter.is_gpu else (40, 3, 20)
    step, workload = _small_step(meter.device, *sizes)
    for _ in range(2):
        step()
    times = []
    for _ in range(15):
        before = time.thread_time()
        step()
        times.append(time.thread_time() - before)
        if meter.is_gpu:
            torch.cuda.synchronize()
    trace = trace_step(workload, Plan())
    kernels_s = sum(kernel_s(each, hardware) for each in trace.operations)
    taken_s = statistics.median(times)
    return max(taken_s - (0.0 if meter.is_gpu else kernels_s), taken_s / 20) / len(trace.operations)


def _small_step(
    device: torch.device, head_dim: int, heads: int, side: int
) -> tuple[Callable[[], None], Workload]:
    """A step of a small video transformer on side × side tokens, and the same as a workload.

    Raises:
        ModuleNotFoundError: diffusers is not installed.
    """
    from diffusers import WanTransformer3DModel

    channels = heads * head_dim

    def build() -> nn.Module:
        made: Any = WanTransformer3DModel
        model: nn.Module = made(
            num_attention_heads=heads, attention_head_dim=head_dim, in_channels=4, out_channels=4, text_dim=16,
            freq_dim=32, ffn_dim=4 * channels, num_layers=4, rope_max_seq_len=64,
        )  # fmt: skip
        return model

    def inputs(_model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(1, 4, 1, 2 * side, 2 * side, dtype=dtype),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": torch.randn(1, 8, 16, dtype=dtype),
            "return_dict": False,
        }

    fused = device.type == "cuda"
    workload = of_model(
        "small", build, inputs, num_tokens=side * side, num_heads=heads, fused_optimizer=fused
    )
    model = build().to(device)
    given = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs(model, torch.float32).items()
    }
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)

    def step() -> None:
        functional.mse_loss(model(**given)[0], given["hidden_states"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, workload


def _copies(meter: Meter) -> Link:
    """Of a device to host memory."""

    def copy_s(size: int) -> float:
        source = torch.zeros(size, dtype=torch.uint8, device=meter.device)
        target = torch.zeros(size, dtype=torch.uint8, pin_memory=meter.is_gpu)
        return meter.seconds(lambda: lambda: target.copy_(source, non_blocking=True))

    small_s, large_s = copy_s(1024), copy_s(2**25)
    return Link(2**25 / max(large_s - small_s, large_s / 10), small_s)


def _collectives(device: torch.device) -> dict[str, tuple[tuple[float, float], ...]]:
    """Each kind, in groups of each size, for each number of ranks that are busy at once."""
    world, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for busy in [number for number in range(2, world + 1) if number <= 8 or number == world]:
        for size in [number for number in range(2, busy + 1) if busy % number == 0]:
            groups = [range(start, start + size) for start in range(0, busy, size)]
            made = [dist.new_group(list(ranks)) for ranks in groups]
            mine = next((group for group, ranks in zip(made, groups, strict=True) if rank in ranks), None)
            for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"):
                points = [_message(kind, message, size, mine, device) for message in _MESSAGE_BYTES]
                # A larger message is not faster: where it seems so, something else ran beside it.
                seconds = list(itertools.accumulate((taken for _sent, taken in points), max))
                found[f"{kind} {size}/{busy}"] = tuple(
                    (sent, taken) for (sent, _), taken in zip(points, seconds, strict=True)
                )
    return found


def _message(
    kind: str, size_bytes: int, num_ranks: int, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[float, float]:
    """What a rank sends, and the seconds of the slowest rank; a rank without a group waits for the others."""
    count = max(1, size_bytes // 4 // num_ranks) * num_ranks
    x, y = torch.zeros(count, device=device), torch.zeros(count, device=device)
    part = x[: count // num_ranks].clone()

    def call() -> None:
        if group is None:
            return
        if kind == "all-reduce":
            transport.all_reduce_(x, group)
        elif kind == "all-gather":
            transport.all_gather(y, part, group)
        elif kind == "reduce-scatter":
            transport.reduce_scatter(part, y, group)
        elif kind == "all-to-all":
            transport.all_to_all_single(y, x, group)
        else:
            to, source = (group.rank() + 1) % num_ranks, (group.rank() - 1) % num_ranks
            pair = [
                dist.P2POp(dist.isend, x, group=group, group_peer=to),
                dist.P2POp(dist.irecv, y, group=group, group_peer=source),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

    # As the verifier counts what a rank sends.
    share = {"all-reduce": 2 * (num_ranks - 1) / num_ranks, "send": 1.0}.get(
        kind, (num_ranks - 1) / num_ranks
    )
    return share * 4 * count, _slowest_s(call, device)


def _slowest_s(call: Callable[[], None], device: torch.device, rounds: int = 9) -> float:
    """From when the first rank starts to when the last one is done, in the round in which that is the least.

    Another program beside it does not count then. A rank that waits for a core before it starts does count, where the
    ranks share a machine, and so a clock; on several machines it is the slowest rank's own time.
    """
    starts, ends = [], []
    for number in range(rounds + 2):
        dist.barrier()
        before = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            starts.append(before)
            ends.append(time.perf_counter())
    first = torch.tensor(starts, dtype=torch.float64, device=device)
    last = torch.tensor(ends, dtype=torch.float64, device=device)
    if os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())) != str(dist.get_world_size()):
        first, last = torch.zeros_like(first), last - first
    dist.all_reduce(first, dist.ReduceOp.MIN)
    dist.all_reduce(last, dist.ReduceOp.MAX)
    return float((last - first).min())


def _crowding() -> dict[str, float]:
    """How many times longer a product and an addition take by the clock on the wall where so many ranks compute."""
    world, rank = dist.get_world_size(), dist.get_rank()
    a, b = torch.randn(512, 512), torch.randn(2**20)

    def work() -> None:
        for _ in range(12):
            a @ a
            b + b

    taken = {}
    for busy in [number for number in range(1, world + 1) if number <= 8 or number == world]:
        taken[busy] = _slowest_s(work if rank < busy else lambda: None, torch.device("cpu"), rounds=7)
    return {str(busy): max(1.0, seconds / taken[1]) for busy, seconds in taken.items()}


# ---- the file


def _hardware(
    meter: Meter,
    products_found: dict[str, Any],
    attention_found: dict[str, Any],
    traffic_found: dict[str, Any],
) -> Hardware:
    """What was measured, in the place of what is assumed."""
    peaks: dict[str, float] = products_found["peak_flops"]
    peak = peaks[meter.dtypes[0]]
    fastest = max(max(rates.values()) for rates in traffic_found.values())
    efficiencies = (
        {name: _shares(("m", "n", "k"), rates, peak) for name, rates in products_found["rates"].items()}
        | {
            name: _shares(("heads", "queries", "keys", "head_dim"), rates, peak)
            for name, rates in attention_found.items()
        }
        | {name: _shares(("bytes",), rates, fastest) for name, rates in traffic_found.items()}
    )
    base = Hardware.named("h100" if meter.is_gpu else "cpu")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free_bytes = psutil.virtual_memory().available
    measured = dict.fromkeys(
        (
            "peak_flops",
            "memory_bytes_per_s",
            "memory_bytes",
            "host_memory_bytes",
            "host_link",
            "launch_s",
            *efficiencies,
        ),
        _when(),
    )
    return dataclasses.replace(
        base,
        name=f"calibrated {meter.device.type}",
        peak_flops=peaks,
        memory_bytes=torch.cuda.get_device_properties(meter.device).total_memory
        if meter.is_gpu
        else free_bytes,
        memory_bytes_per_s=fastest,
        host_link=_copies(meter),
        ranks_per_node=1,
        host_memory_bytes=free_bytes,
        launch_s=0.0,
        cores=None if meter.is_gpu else cores,
        efficiencies=efficiencies,
        uncertainties=dict.fromkeys(base.uncertainties, _UNCERTAINTY),
        sources=base.sources | measured,
    )


def _shares(by: Sequence[str], rates: dict[tuple[float, ...], float], peak: float) -> Efficiency:
    points = tuple((tuple(map(float, sizes)), min(1.0, rate / peak)) for sizes, rate in rates.items())
    return Efficiency(tuple(by), points)
