"""Measures this machine into a hardware file: `opensora-accel doctor --calibrate FILE`, in about two minutes.

What is measured, each over sizes from small to large and stored as a share of the fastest:

    products of matrices      (m, n, k), with a bias (addmm) and without (mm)
    attention                 (heads, queries, keys, head_dim), forward and backward
    operators by traffic      the bytes of add, mul, gelu, layer norm, ...: what a video transformer spends time in
    the same in bf16          on a CPU, whose library has other kernels for it; of a GPU the fastest product alone
    the host, and the step    what an operator costs beside its work, and how much slower kernels are in a step than by
                              themselves: two steps of a small transformer
    copies                    to host memory and back, page-locked on a GPU
    links                     each collective on all ranks of a launcher, small and large messages
    ranks beside each other   on a CPU: how much slower a step is where others compute, and where collectives run

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from opensora_accel.communications import transport
from opensora_accel.files import check_folder_of
from opensora_accel.links import Kind, Link, measure_rounds, pass_on, sent_bytes
from opensora_accel.observe import architecture_of
from opensora_accel.parallel_states import start_distributed
from opensora_accel.plan import Plan
from opensora_accel.planner.cost import kernel_s
from opensora_accel.planner.hardware import Efficiency, Hardware
from opensora_accel.planner.kernel_speeds import Meter, attention, products, traffic
from opensora_accel.planner.run import trace_step
from opensora_accel.planner.workload import Workload, workload_of_model

Show = Callable[[str, float], None]
# What remains uncertain of a measured figure, beside other programs: assumed.
_UNCERTAINTY = 0.1
# Where ranks take turns on a core, each collective waits for ranks that wait for a core: assumed.
_OVERSUBSCRIBED = 0.25
_ROUNDS = 9
_MESSAGE_BYTES = (64, 2**16, 2**20, 2**23)
# Head dim, heads, and side in tokens of the steps that are measured.
_TINY, _SMALL, _LARGE = (16, 2, 4), (40, 3, 20), (48, 5, 26)


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
    slowness, launch_s = _slowness_and_launch_s(meter, hardware)
    return dataclasses.replace(
        hardware, launch_s=launch_s, slowness=dict.fromkeys(hardware.slowness, slowness)
    )


def measure_links(device: torch.device, hardware: Hardware | None) -> Hardware | None:
    """The same hardware, with collectives and crowding as they are measured; every rank calls, and rank 0 gives it.

    Communication: collectives of 8 MiB and less over all ranks.
    """
    collectives = _collectives(device)
    sharded_launch_s = _sharded_launch_s(device)
    on_cores: dict[str, Any] = {}
    uncertain = _UNCERTAINTY
    if device.type == "cpu":
        step, _workload = _small_step(device, *_LARGE)
        on_cores["crowding"], uncertain = _crowding(step)
        on_cores["beside_collective"] = _beside_collective(step)
    if hardware is None:
        return None
    world = dist.get_world_size()
    small, *_, large = collectives[f"send {world}/{world}"]
    names = ("within", "collectives", "sharded_launch_s", *on_cores)
    return dataclasses.replace(
        hardware,
        within=Link.through(small, large),
        collectives=collectives,
        sharded_launch_s=sharded_launch_s,
        **on_cores,
        uncertainties=hardware.uncertainties
        | {
            "collective": uncertain,
            "crowding": uncertain,
            "oversubscription": max(_OVERSUBSCRIBED, uncertain),
        },
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        memory_bytes=hardware.memory_bytes if device.type == "cuda" else hardware.host_memory_bytes // world,
        sources=hardware.sources | dict.fromkeys(names, f"{_when()}, {world} ranks"),
    )


def _when() -> str:
    return f"measured by doctor --calibrate on {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"


# ---- the host, copies, links


def _slowness_and_launch_s(meter: Meter, hardware: Hardware) -> tuple[float, float]:
    """How many times longer kernels take in a step than by themselves, and the host's seconds for an operator.

    In a step, memory is new and caches are cold for a kernel, and the host passes through modules, views, autograd and
    the optimizer. Two steps of the same operators, a small one and a large one, tell the two apart. Where the kernels
    of an operator take k seconds by themselves and a step has n operators:

        small: 20 ms taken, k = 10 ms        slowness = (95 − 20) / (80 − 10) = 1.07
        large: 95 ms taken, k = 80 ms        n launches = 20 − 1.07 · 10 = 9.3 ms

    On a GPU the host runs ahead, and a step whose kernels take no time shows what it takes.
    """

    def taken(sizes: tuple[int, int, int]) -> tuple[float, float, int]:
        step, workload = _small_step(meter.device, *sizes)
        times = []
        for number in range(12):
            before = time.thread_time()
            step()
            if number >= 2:
                times.append(time.thread_time() - before)
            if meter.is_gpu:
                torch.cuda.synchronize()
        operations = trace_step(workload, Plan()).operations
        return statistics.median(times), sum(kernel_s(each, hardware) for each in operations), len(operations)

    if meter.is_gpu:
        launches_s, _, num_operations = taken(_TINY)
        return 1.0, launches_s / num_operations
    (small_s, small_kernels_s, num_operations), (large_s, large_kernels_s, _) = taken(_SMALL), taken(_LARGE)
    # Beyond these bounds something else ran beside it.
    slowness = min(1.5, max(0.8, (large_s - small_s) / (large_kernels_s - small_kernels_s)))
    return slowness, max(small_s - slowness * small_kernels_s, small_s / 20) / num_operations


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
    workload = workload_of_model(
        "small", build, inputs, num_tokens=side * side, num_heads=heads, fused_optimizer=fused,
        architecture=architecture_of(device),
    )  # fmt: skip
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
    """The link of a device to host memory."""

    def taken(size: int) -> tuple[int, float]:
        source = torch.zeros(size, dtype=torch.uint8, device=meter.device)
        target = torch.zeros(size, dtype=torch.uint8, pin_memory=meter.is_gpu)
        return size, meter.seconds(lambda: lambda: target.copy_(source, non_blocking=True))

    return Link.through(taken(1024), taken(2**25))


def _collectives(device: torch.device) -> dict[str, tuple[tuple[float, float], ...]]:
    """Each kind, in groups of each size, for each number of ranks that are busy at once."""
    world, rank = dist.get_world_size(), dist.get_rank()
    points_of = {}
    for busy in [number for number in range(2, world + 1) if number <= 8 or number == world]:
        for size in [number for number in range(2, busy + 1) if busy % number == 0]:
            groups = [range(start, start + size) for start in range(0, busy, size)]
            made = [dist.new_group(list(ranks)) for ranks in groups]
            mine = next((group for group, ranks in zip(made, groups, strict=True) if rank in ranks), None)
            for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"):
                points = [_message(kind, message, size, mine, device) for message in _MESSAGE_BYTES]
                # A larger message is not faster: where it seems so, something else ran beside it.
                seconds = list(itertools.accumulate((taken for _sent, taken in points), max))
                points_of[f"{kind} {size}/{busy}"] = tuple(
                    (sent, taken) for (sent, _), taken in zip(points, seconds, strict=True)
                )
    return points_of


def _message(
    kind: Kind, size_bytes: int, num_ranks: int, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[float, float]:
    """What a rank sends, and the median seconds of the slowest rank; one without a group waits for the others."""
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
            pass_on(x, y, group)

    return sent_bytes(kind, 4 * count, num_ranks), statistics.median(measure_rounds(call, device, _ROUNDS))


def _crowding(step: Callable[[], None]) -> tuple[dict[str, float], float]:
    """How many times longer a step takes by the clock on the wall where so many ranks compute, and how uncertain it is.

    A step has many operations, and each of them may be held up: medians count, and not the luckiest round.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    medians_s, spreads = {}, []
    for busy in [number for number in range(1, world + 1) if number <= 8 or number == world]:
        rounds_s = measure_rounds(step if rank < busy else lambda: None, torch.device("cpu"), _ROUNDS)
        low_s, medians_s[busy], high_s = statistics.quantiles(rounds_s, n=4)
        spreads.append((high_s - low_s) / medians_s[busy])
    crowding = {str(busy): max(1.0, seconds / medians_s[1]) for busy, seconds in medians_s.items()}
    return crowding, min(0.5, max(_UNCERTAINTY, *spreads))


def _sharded_launch_s(device: torch.device) -> float:
    """What the host takes longer for an operator where a tensor is sharded over ranks, as FSDP2's parameters are."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = torch.zeros(64, device=device)
    sharded = DTensor.from_local(torch.zeros(64, device=device), mesh, [Shard(0)])

    def calls_s(x: Tensor) -> float:
        def round_s() -> float:
            before = time.thread_time()
            for _ in range(200):
                x.mul_(1.0)
            return (time.thread_time() - before) / 200

        return statistics.median(round_s() for _ in range(5))

    return max(0.0, calls_s(sharded) - calls_s(whole))


def _beside_collective(step: Callable[[], None]) -> float:
    """How many times longer compute takes while collectives run, which need cores too.

    A step of 90 ms and collectives of 40 ms end together after 120 ms: 10 ms of the collectives were hidden. Had
    compute not been slower beside them, they had been hidden whole. In their 40 ms the work of 10 ms was done: 4 times.
    """
    device = torch.device("cpu")
    buffers = [torch.zeros(2**20) for _ in range(8)]

    def collectives() -> list[Any]:
        return [dist.all_reduce(each, async_op=True) for each in buffers]

    def wait(works: list[Any]) -> None:
        for work in works:
            work.wait()

    def both() -> None:
        works = collectives()
        step()
        wait(works)

    step_s, collectives_s, both_s = (
        statistics.median(measure_rounds(each, device, _ROUNDS))
        for each in (step, lambda: wait(collectives()), both)
    )
    hidden_s = step_s + collectives_s - both_s
    # Where collectives take longer than the step, only the step's time can hide them.
    return max(1.0, min(step_s, collectives_s) / max(hidden_s, collectives_s / 20))


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
            "slowness",
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
        cores=None if meter.is_gpu else cores,
        efficiencies=efficiencies,
        uncertainties={
            kind: share if kind == "reserved" else _UNCERTAINTY for kind, share in base.uncertainties.items()
        },
        sources=base.sources | measured,
    )


def _shares(by: Sequence[str], rates: dict[tuple[float, ...], float], peak: float) -> Efficiency:
    points = tuple((tuple(map(float, sizes)), min(1.0, rate / peak)) for sizes, rate in rates.items())
    return Efficiency(tuple(by), points)
