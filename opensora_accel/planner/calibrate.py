"""Measures this machine into a hardware file: `opensora-accel doctor --calibrate FILE`, in about two minutes.

What is measured, each over sizes from small to large and stored as a share of the fastest:

    products of matrices      (m, n, k), with a bias (addmm) and without (mm), and in bf16 beside fp32
    attention                 (heads, queries, keys, head_dim), forward and backward
    operators by traffic      the bytes of add, mul, gelu, layer norm, ... : those that a video transformer spends time in
    the host                  what an operator costs beside its work: a step of a tiny transformer, by its operators
    copies                    to host memory and back, page-locked on a GPU
    links                     each collective on all ranks of a launcher, small and large messages

On a CPU, seconds are those of the process and not of the clock on the wall, so that another program beside it does not
count. A torchrun of several ranks measures kernels on rank 0 while the others wait, and links on all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
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
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_accel.communications import transport
from opensora_accel.links import Link
from opensora_accel.parallel_states import start_distributed
from opensora_accel.planner.hardware import Efficiency, Hardware

# A product or an attention of more operations than this is not measured: it takes too long on a CPU.
_MOST_FLOPS_ON_CPU, _MOST_FLOPS_ON_GPU = 4e9, 1e13
# Outputs that a measurement keeps until its end, as a step keeps activations: memory is then new to each call.
_KEPT = 4
# What remains uncertain of a measured figure, beside other programs: assumed.
_UNCERTAINTY = 0.1
_MESSAGE_BYTES = (64, 2**16, 2**20, 2**23)

Unary = Callable[[Tensor], Any]


def write(path: Path) -> None:
    """`opensora-accel doctor --calibrate FILE`, on one process or on every rank of a launcher; rank 0 writes.

    Raises:
        FileNotFoundError: there is no folder to write to; before anything is measured.
    """
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(
            f"there is no folder {path.resolve().parent} to write {path.name} to; make it first"
        )
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else None
    )
    if "RANK" in os.environ:
        start_distributed()
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    start = time.perf_counter()

    def show(what: str, share: float) -> None:
        if is_first:
            print(f"{share:4.0%}  {time.perf_counter() - start:5.1f} s  {what}", file=sys.stderr, flush=True)

    hardware = calibrate(device or torch.device("cpu"), show)
    if is_first:
        hardware.save(path)
        peaks = ", ".join(f"{peak / 1e9:,.0f} G/s {name}" for name, peak in hardware.peak_flops.items())
        print(f"wrote {path}: {peaks}; plan with --hardware {path}")
    if dist.is_initialized():
        dist.destroy_process_group()


def calibrate(
    device: torch.device, show: Callable[[str, float], None] = lambda what, share: None
) -> Hardware:
    """What this machine does, measured; on several ranks every one calls and gets the same.

    Args:
        show: called with what is being measured, and the share of all that is done.

    Communication: collectives of 8 MiB and less over all ranks, where torch.distributed was started.
    """
    meter = _Meter(device)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    found: dict[str, Any] = {}
    if is_first:
        show("products of matrices", 0.0)
        found |= _products(meter)
        show("attention", 0.35)
        found["attention"] = _attention(meter)
        show("operators by traffic", 0.55)
        found |= _traffic(meter)
        show("the host's time", 0.85)
        found["launch_s"] = _launch_s(meter)
        found["host_link"] = _copies(meter)
    if not dist.is_initialized():
        return _hardware(meter, found, {}, 1)
    show("links", 0.9)
    links = _collectives(device)
    found["crowding"] = {} if meter.is_gpu else _crowding()
    everyone: list[Any] = [found if is_first else None]
    dist.broadcast_object_list(everyone, src=0)
    return _hardware(meter, everyone[0], links, dist.get_world_size())


class _Meter:
    """Seconds of a function on a device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.most_flops = _MOST_FLOPS_ON_GPU if self.is_gpu else _MOST_FLOPS_ON_CPU
        self.dtypes = ("bfloat16", "float32") if self.is_gpu else ("float32", "bfloat16")
        self.dtype = getattr(torch, self.dtypes[0])

    def seconds(self, function: Callable[[], Any], least_s: float = 0.01, rounds: int = 3) -> float:
        """The least of some rounds, each of as many calls as `least_s` needs; a call's result is kept for a while."""
        function()
        once = max(1e-7, self._round_s(function, 1))
        calls = max(1, min(1000, math.ceil(least_s / once)))
        return min(self._round_s(function, calls) / calls for _ in range(rounds))

    def _round_s(self, function: Callable[[], Any], calls: int) -> float:
        kept: list[Any] = [None] * _KEPT
        if self.is_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for number in range(calls):
                kept[number % _KEPT] = function()
            end.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(end)) / 1e3
        before = time.thread_time()
        for number in range(calls):
            kept[number % _KEPT] = function()
        return time.thread_time() - before

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)


# ---- kernels


def _products(meter: _Meter) -> dict[str, Any]:
    """Peaks by dtype, and (m, n, k) → operations a second of products with and without a bias."""
    sides = (32, 128, 512, 2048) if not meter.is_gpu else (128, 1024, 4096, 16384)
    shapes = [
        (m, n, k) for m, n, k in itertools.product(sides, repeat=3) if 2 * m * n * k <= meter.most_flops
    ]
    rates: dict[str, dict[tuple[int, ...], float]] = {"gemm": {}, "gemm aten.addmm": {}}
    for m, n, k in shapes:
        a, b, bias = meter.tensor(m, k), meter.tensor(n, k), meter.tensor(n)
        flops = 2.0 * m * n * k
        # As a linear layer has it, with its weight [n, k].
        rates["gemm"][m, n, k] = flops / meter.seconds(lambda a=a, b=b: a @ b.T)  # type: ignore[misc]
        with_bias = meter.seconds(lambda a=a, b=b, bias=bias: functional.linear(a, b, bias))  # type: ignore[misc]
        rates["gemm aten.addmm"][m, n, k] = flops / with_bias
    fastest = {meter.dtypes[0]: max(max(each.values()) for each in rates.values())}
    for name in meter.dtypes[1:]:
        side = sides[2]
        a, b = (meter.tensor(side, side, dtype=getattr(torch, name)) for _ in range(2))
        fastest[name] = 2.0 * side**3 / meter.seconds(lambda a=a, b=b: a @ b.T)  # type: ignore[misc]
    return {"peak_flops": fastest, "rates": rates}


def _attention(meter: _Meter) -> dict[str, dict[tuple[int, ...], float]]:
    """(heads, queries, keys, head_dim) → operations a second, forward and backward."""
    lengths = (64, 256, 1024, 2048) if not meter.is_gpu else (512, 2048, 8192, 32768)
    rates: dict[str, dict[tuple[int, ...], float]] = {"attention": {}, "attention backward": {}}
    for heads, queries, keys, head_dim in itertools.product((1, 8), lengths, lengths, (16, 64, 128)):
        flops = 4.0 * heads * queries * keys * head_dim
        if flops > meter.most_flops / 4 or (head_dim == 16 and meter.is_gpu):
            continue
        q = meter.tensor(1, heads, queries, head_dim).requires_grad_()
        k, v = (meter.tensor(1, heads, keys, head_dim).requires_grad_() for _ in range(2))
        out = functional.scaled_dot_product_attention(q, k, v)
        grad = torch.randn_like(out)
        with torch.no_grad():
            forward_s = meter.seconds(lambda q=q, k=k, v=v: functional.scaled_dot_product_attention(q, k, v))  # type: ignore[misc]
        backward_s = meter.seconds(
            lambda out=out, q=q, k=k, v=v, grad=grad: torch.autograd.grad(
                out, (q, k, v), grad, retain_graph=True
            )  # type: ignore[misc]
        )
        rates["attention"][heads, queries, keys, head_dim] = flops / forward_s
        rates["attention backward"][heads, queries, keys, head_dim] = 2.5 * flops / backward_s
    return rates


def _operators() -> dict[str, tuple[Unary, float]]:
    """Operators by their names in a trace, and how many times the bytes of their first input they move."""
    aten = torch.ops.aten

    def norm(x: Tensor) -> Any:
        return aten.native_layer_norm(x, [x.shape[-1]], None, None, 1e-6)

    def norm_backward(x: Tensor) -> Any:
        mean = x[..., :1]
        return aten.native_layer_norm_backward(
            x, x, [x.shape[-1]], mean, mean, None, None, [True, False, False]
        )

    return {
        "aten.add": (lambda x: x + x, 3),
        "aten.mul": (lambda x: x * x, 3),
        "aten.add_": (lambda x: x.add_(x), 3),
        "aten.mul_": (lambda x: x.mul_(0.999), 2),
        "aten.copy_": (lambda x: torch.empty_like(x).copy_(x), 2),
        "aten.clone": (lambda x: x.clone(), 2),
        "aten._to_copy": (lambda x: x.to(torch.float64 if x.dtype == torch.float32 else torch.float32), 3),
        "aten.cat": (lambda x: torch.cat([x, x], -1), 4),
        "aten.fill_": (lambda x: torch.empty_like(x).fill_(0.0), 1),
        "aten.gelu": (lambda x: functional.gelu(x, approximate="tanh"), 2),
        "aten.gelu_backward": (lambda x: aten.gelu_backward(x, x, approximate="tanh"), 3),
        "aten.silu": (functional.silu, 2),
        "aten.silu_backward": (lambda x: aten.silu_backward(x, x), 3),
        "aten.pow": (lambda x: x**2, 2),
        "aten.rsqrt": (lambda x: x.rsqrt(), 2),
        "aten.sqrt": (lambda x: x.sqrt(), 2),
        "aten.mean": (lambda x: x.mean(-1, keepdim=True), 1),
        "aten.sum": (lambda x: x.sum(0), 1),
        "aten.native_layer_norm": (norm, 2),
        "aten.native_layer_norm_backward": (norm_backward, 3),
        "aten.lerp_": (lambda x: x.lerp_(x, 0.1), 3),
        "aten.addcmul_": (lambda x: x.addcmul_(x, x, value=1e-6), 4),
        "aten.addcdiv_": (lambda x: x.addcdiv_(x, x, value=1e-6), 4),
        "aten.div": (lambda x: x / x, 3),
    }


def _traffic(meter: _Meter) -> dict[str, Any]:
    """By operator, bytes → bytes a second."""
    sizes = (2**14, 2**17, 2**20, 2**23, 2**26) if not meter.is_gpu else (2**16, 2**20, 2**24, 2**28)
    rates: dict[str, dict[tuple[float, ...], float]] = {}
    with torch.no_grad():
        for name, (function, moves) in _operators().items():
            of_name = rates.setdefault(f"memory {name}", {})
            one = torch.ones(1, 2, device=meter.device)
            nothing_s = meter.seconds(lambda f=function, x=one: f(x), 0.002)  # type: ignore[misc]
            for size in sizes:
                x = torch.rand(size // 4 // 128, 128, device=meter.device) + 0.5
                taken_s = meter.seconds(lambda f=function, x=x: f(x), 0.004)  # type: ignore[misc]
                of_name[(moves * size,)] = moves * size / max(taken_s - nothing_s, taken_s / 20)
    rates["memory"] = {}
    # Any other operator is taken for an addition.
    rates["memory"] = dict(rates["memory aten.add"])
    return {"traffic": rates}


# ---- the host, copies, links


class _Counter(TorchDispatchMode):
    """Counts operators that make or change a tensor; a view does neither."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def _launch_s(meter: _Meter) -> float:
    """What an operator takes of the host in a step: modules, autograd, the optimizer, on tensors of hardly any size."""
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(*(layer for _ in range(4))).to(meter.device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=meter.is_gpu)
    x = torch.randn(1, 4, 16, device=meter.device)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with _Counter() as counter:
        step()
    times = []
    for _ in range(7):
        before = time.thread_time()
        step()
        times.append(time.thread_time() - before)
    if meter.is_gpu:
        torch.cuda.synchronize()
    return statistics.median(times) / counter.count


def _copies(meter: _Meter) -> Link:
    """Of a device to host memory."""

    def copy_s(size: int) -> float:
        source = torch.zeros(size, dtype=torch.uint8, device=meter.device)
        target = torch.zeros(size, dtype=torch.uint8, pin_memory=meter.is_gpu)
        return meter.seconds(lambda: target.copy_(source, non_blocking=True))

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
    """The slowest rank's time, in the round in which that is the least: another program beside it does not count."""
    times = []
    for number in range(rounds + 2):
        dist.barrier()
        before = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            times.append(time.perf_counter() - before)
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.min())


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


def _hardware(meter: _Meter, found: dict[str, Any], links: dict[str, Any], num_ranks: int) -> Hardware:
    """What was measured, in the place of what is assumed."""
    peaks: dict[str, float] = found["peak_flops"]
    peak = peaks[meter.dtypes[0]]
    efficiencies = {
        name: _shares(("m", "n", "k"), rates, peak) for name, rates in found["rates"].items()
    } | {
        name: _shares(("heads", "queries", "keys", "head_dim"), rates, peak)
        for name, rates in found["attention"].items()
    }  # fmt: skip
    fastest = max(max(rates.values()) for rates in found["traffic"].values())
    efficiencies |= {name: _shares(("bytes",), rates, fastest) for name, rates in found["traffic"].items()}
    base = Hardware.named("h100" if meter.is_gpu else "cpu")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    when = time.strftime("%Y-%m-%d")
    measured = f"measured by doctor --calibrate on {when}, torch {torch.__version__}, {num_ranks} rank(s)"
    sources = dict.fromkeys(
        ("peak_flops", "memory_bytes_per_s", "host_link", "launch_s", *efficiencies), measured
    )
    link = None
    if links:
        (small, small_s), *_, (large, large_s) = links[f"send {num_ranks}/{num_ranks}"]
        link = Link((large - small) / max(large_s - small_s, large_s / 10), small_s)
        sources["within"] = sources["collectives"] = sources["crowding"] = measured
    memory = torch.cuda.get_device_properties(meter.device).total_memory if meter.is_gpu else _free_bytes()
    return dataclasses.replace(
        base,
        name=f"calibrated {meter.device.type}",
        peak_flops=peaks,
        memory_bytes=memory if meter.is_gpu else memory // num_ranks,
        memory_bytes_per_s=fastest,
        within=link or base.within,
        host_link=found["host_link"],
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        host_memory_bytes=_free_bytes(),
        launch_s=found["launch_s"],
        cores=None if meter.is_gpu else cores,
        efficiencies=efficiencies,
        uncertainties=dict.fromkeys(base.uncertainties, _UNCERTAINTY),
        sources=base.sources | sources,
        collectives=links,
        crowding=found.get("crowding", {}),
    )


def _shares(by: Sequence[str], rates: dict[tuple[float, ...], float], peak: float) -> Efficiency:
    points = tuple((tuple(map(float, sizes)), min(1.0, rate / peak)) for sizes, rate in rates.items())
    return Efficiency(tuple(by), points)


def _free_bytes() -> int:
    return psutil.virtual_memory().available
