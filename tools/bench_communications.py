"""Times this toolkit's collectives beside Open-Sora's scheme, and counts the bytes that each puts on the wire.

Claim: an all-to-all of one tensor of 64 MB per rank on two gloo ranks of one machine is at least 1.5 times faster
than cutting it into a list, `dist.all_to_all`, and concatenating (Open-Sora's scheme). The ratio that counts makes
our result contiguous first, because it may be a strided view where the peer's never is.

Outside the claim, because there is no such peer: where pieces differ in size gloo's list `all_to_all` raises, so
Open-Sora's scheme does not run on it, and "plain" sends the pieces one by one (isend and irecv). The three
tensors of `all_to_all_packed` are measured too, against three list all-to-alls.

Also: split, gather and ring exchange, for sizes that divide and that do not, against the plain way to write them.

How it measures. Every rank has one thread. The sides take turns, run by run, in an order that changes; a barrier
stands before each run, and a run takes as long as its slowest rank. Before the clock starts, each side's result
and gradient must equal the other's bit for bit, and one run is counted: the bytes in every c10d call, on the
busiest rank, against what theory says must be sent (sizes that a call exchanges by itself are shown apart).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from opensora_accel.communications import (
    all_to_all,
    all_to_all_packed,
    gather_forward_split_backward,
    ring_exchange,
    share_sizes,
    split_forward_gather_backward,
)
from opensora_accel.verify.communication.record import Recorder

CLAIMED_RATIO = 1.5
HEAD_DIM = 128
EXAMPLES = """\
examples, from the repository root:
  python tools/bench_communications.py                        two gloo ranks, 64 MB, about two minutes
  python tools/bench_communications.py --only "all_to_all"    only the cases whose name holds this text
  python tools/bench_communications.py --ranks 4 --megabytes 16
  python tools/bench_communications.py --device cuda          NCCL, one rank per GPU, two or more GPUs

how to read the table: times are medians in milliseconds over the runs, with the quartiles in brackets. "ratio" is
plain / ours with our result made contiguous; above 1, ours is faster. "sent" is what the busiest rank
put on the wire in one run, and "theory" the least that the operation must send from it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation on one layout, in two ways; both take the same inputs and give the same outputs."""

    name: str
    inputs: list[Tensor]
    ours: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    plain: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    theory_bytes: int
    backward: bool = False
    claimed: bool = False
    """Whether `plain` is Open-Sora's scheme for one tensor, so that the claim speaks of it."""


# ---- Open-Sora's scheme, and the plain way to write the others


class PlainAllToAll(torch.autograd.Function):
    """`opensora.acceleration.communications.all_to_all`, given the right sizes where they do not divide."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, scatter_dim: int, gather_dim: int, gather_sizes, scatter_sizes):
        ctx.arguments = gather_dim, scatter_dim, scatter_sizes, gather_sizes
        pieces = [t.contiguous() for t in torch.tensor_split(input_, len(gather_sizes), scatter_dim)]
        received = []
        for size in gather_sizes:
            shape = list(pieces[dist.get_rank()].shape)
            shape[gather_dim] = size
            received.append(input_.new_empty(shape))
        if len({piece.shape for piece in (*pieces, *received)}) == 1:
            dist.all_to_all(received, pieces)
        else:  # gloo's list all_to_all takes equal pieces only, and raises otherwise (torch 2.13)
            exchange_pieces(received, pieces)
        return torch.cat(received, gather_dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        return PlainAllToAll.apply(grad, *ctx.arguments), None, None, None, None


def exchange_pieces(received: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    rank = dist.get_rank()
    received[rank].copy_(pieces[rank])
    others = [other for other in range(dist.get_world_size()) if other != rank]
    operations = [dist.P2POp(dist.isend, pieces[other], other) for other in others]
    operations += [dist.P2POp(dist.irecv, received[other], other) for other in others]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def plain_gather(input_: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """A list `all_gather` and a concatenation; padded where the sizes differ, which gloo does not take."""
    input_ = input_.contiguous()
    if len(set(sizes)) > 1:
        shape = list(input_.shape)
        shape[dim] = max(sizes) - input_.size(dim)
        input_ = torch.cat([input_, input_.new_zeros(shape)], dim)
    received = [torch.empty_like(input_) for _ in sizes]
    dist.all_gather(received, input_)
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(received, sizes, strict=True)], dim)


def plain_split(input_: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    return input_.split(list(sizes), dim)[dist.get_rank()].contiguous()


class PlainAlongDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, dim: int, sizes: Sequence[int], forward, backward) -> Tensor:
        ctx.arguments = dim, sizes, backward
        return forward(input_, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        dim, sizes, backward = ctx.arguments
        return backward(grad, dim, sizes), None, None, None, None


def plain_ring(input_: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    shape = list(input_.shape)
    shape[dim] = sizes[rank - 1]
    received = input_.new_empty(shape)
    # Even ranks send first: posted in one order, two NCCL ranks would wait for each other.
    operations = [
        lambda: dist.isend(input_.contiguous(), (rank + 1) % num_ranks),
        lambda: dist.irecv(received, (rank - 1) % num_ranks),
    ]
    for work in [start() for start in (operations if rank % 2 == 0 else operations[::-1])]:
        work.wait()
    return received


# ---- the cases


@dataclasses.dataclass(frozen=True)
class Workload:
    """What every rank makes its inputs from. `size_bytes` is what one rank puts in, within a row of the layout."""

    size_bytes: int
    device: torch.device

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(dist.get_rank())
        return torch.randn(shape, dtype=dtype, device=self.device, generator=generator)

    def num_tokens(self, batch: int, width: int, dtype: torch.dtype, *, uneven: bool) -> int:
        """Tokens of one rank, or of all ranks less a few where they must not divide."""
        num_ranks = dist.get_world_size()
        total = num_ranks * max(num_ranks, self.size_bytes // (batch * width * dtype.itemsize))
        return total - 1 if uneven else total


def bytes_to_others(input_: Tensor, scatter_dim: int, scatter_sizes: Sequence[int]) -> int:
    """Of an all-to-all: everything but the piece that stays."""
    stays = scatter_sizes[dist.get_rank()]
    return input_.nbytes // input_.size(scatter_dim) * (input_.size(scatter_dim) - stays)


def all_to_all_case(
    load: Workload, batch: int, heads: int, dtype: torch.dtype, *, scatter_dim=2, backward=False, uneven=False
) -> Case:
    """[B, S/P, H, D] → [B, S, H/P, D] for scatter_dim 2, and the way back for scatter_dim 1."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    gather_dim = 3 - scatter_dim
    tokens = load.num_tokens(batch, heads * HEAD_DIM, dtype, uneven=uneven)
    sizes = {1: share_sizes(tokens, num_ranks), 2: share_sizes(heads, num_ranks)}
    full = {1: tokens, 2: heads}
    full[gather_dim] = sizes[gather_dim][rank]
    input_ = load.tensor(batch, full[1], full[2], HEAD_DIM, dtype=dtype)
    theory = bytes_to_others(input_, scatter_dim, sizes[scatter_dim])
    if backward:  # the gradient travels the other way: this rank keeps the same piece and sends the rest
        held = input_.nbytes // (full[1] * full[2]) * sizes[scatter_dim][rank]
        theory += held * (sum(sizes[gather_dim]) - sizes[gather_dim][rank])
    way = f"scatter {scatter_dim} gather {gather_dim}"
    name = f"all_to_all {way}, B{batch} H{heads} {_short(dtype)}"
    uneven = uneven or heads % num_ranks != 0
    name += (", uneven" if uneven else "") + (", forward+backward" if backward else "")
    return Case(
        name,
        [input_],
        lambda x: [all_to_all(x[0], None, scatter_dim, gather_dim)],
        lambda x: [PlainAllToAll.apply(x[0], scatter_dim, gather_dim, sizes[gather_dim], sizes[scatter_dim])],
        theory,
        backward,
        claimed=not uneven,
    )


def packed_case(load: Workload, heads: int, dtype: torch.dtype) -> Case:
    """q, k and v, which Ulysses sends together; a third of the bytes each."""
    num_ranks = dist.get_world_size()
    third = dataclasses.replace(load, size_bytes=load.size_bytes // 3)
    tokens = third.num_tokens(1, heads * HEAD_DIM, dtype, uneven=False) // num_ranks
    inputs = [load.tensor(1, tokens, heads, HEAD_DIM, dtype=dtype) for _ in "qkv"]
    sizes = (tokens,) * num_ranks, share_sizes(heads, num_ranks)
    return Case(
        f"all_to_all_packed q, k, v, B1 H{heads} {_short(dtype)}",
        inputs,
        lambda qkv: all_to_all_packed(qkv, None, 2, 1),
        lambda qkv: [PlainAllToAll.apply(x, 2, 1, *sizes) for x in qkv],
        sum(bytes_to_others(x, 2, sizes[1]) for x in inputs),
    )


def along_dim_case(load: Workload, operation: str, dtype: torch.dtype, *, uneven: bool) -> Case:
    """[B, S, C] split, or [B, S/P, C] gathered, with the gradient. The whole tensor is of the workload's size."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    width = 24 * HEAD_DIM
    whole = dataclasses.replace(load, size_bytes=load.size_bytes // num_ranks)
    tokens = whole.num_tokens(1, width, dtype, uneven=uneven)
    sizes = share_sizes(tokens, num_ranks)
    splitting = operation == "split"
    functions = (plain_split, plain_gather) if splitting else (plain_gather, plain_split)
    ours = split_forward_gather_backward if splitting else gather_forward_split_backward
    return Case(
        f"{operation} forward+backward, {_short(dtype)}{', uneven' if uneven else ''}",
        [load.tensor(1, tokens if splitting else sizes[rank], width, dtype=dtype)],
        lambda x: [ours(x[0], None, 1, None)],
        lambda x: [PlainAlongDim.apply(x[0], 1, sizes, *functions)],
        (num_ranks - 1) * sizes[rank] * width * dtype.itemsize,
        backward=True,
    )


def ring_case(load: Workload, dtype: torch.dtype, *, uneven: bool) -> Case:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    tokens = load.num_tokens(1, 24 * HEAD_DIM, dtype, uneven=uneven)
    sizes = share_sizes(tokens, num_ranks)
    input_ = load.tensor(1, sizes[rank], 24, HEAD_DIM, dtype=dtype)
    return Case(
        f"ring_exchange, {_short(dtype)}{', uneven' if uneven else ''}",
        [input_],
        lambda x: [ring_exchange(x[0], None, dim=1 if uneven else None)],
        lambda x: [plain_ring(x[0], 1, sizes)],
        input_.nbytes,
    )


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def cases(load: Workload) -> list[Callable[[], Case]]:
    """Each makes its inputs when it is called, so that only one case's memory is held."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        lambda: all_to_all_case(load, 1, 32, fp32),
        lambda: all_to_all_case(load, 1, 32, bf16),
        lambda: all_to_all_case(load, 1, 32, bf16, scatter_dim=1),
        lambda: all_to_all_case(load, 2, 32, bf16),
        lambda: all_to_all_case(load, 2, 32, bf16, scatter_dim=1),
        lambda: all_to_all_case(load, 1, 24, bf16, uneven=True),
        lambda: all_to_all_case(load, 1, 24, bf16, scatter_dim=1, uneven=True),
        lambda: all_to_all_case(load, 1, 25, bf16),
        lambda: all_to_all_case(load, 1, 32, bf16, backward=True),
        lambda: packed_case(load, 24, bf16),
        lambda: along_dim_case(load, "split", bf16, uneven=False),
        lambda: along_dim_case(load, "split", bf16, uneven=True),
        lambda: along_dim_case(load, "gather", bf16, uneven=False),
        lambda: along_dim_case(load, "gather", bf16, uneven=True),
        lambda: ring_case(load, bf16, uneven=False),
        lambda: ring_case(load, bf16, uneven=True),
    ]


# ---- measuring


@dataclasses.dataclass(frozen=True)
class SentBytes:
    """Bytes this rank sends, by what is in each c10d call; exchanged sizes (int64) are counted apart."""

    data_bytes: int
    sizes_bytes: int


@dataclasses.dataclass(frozen=True)
class Side:
    """One way to run a case, up to a result that is ready to be used."""

    run: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    contiguous: bool = False

    def __call__(self, case: Case, gradient: Sequence[Tensor] | None) -> list[Tensor]:
        outputs = list(self.run(case.inputs))
        if self.contiguous:
            outputs = [output.contiguous() for output in outputs]
        if gradient is None:
            return outputs
        gradients = torch.autograd.grad(outputs, case.inputs, list(gradient))
        if self.contiguous:
            gradients = [gradient.contiguous() for gradient in gradients]
        return outputs + list(gradients)


def measure(case: Case, num_runs: int, device: torch.device) -> dict[str, Any]:
    sides = {
        "ours": Side(case.ours, contiguous=True),
        "ours_as_returned": Side(case.ours),
        "plain": Side(case.plain),
    }
    gradient = None
    if case.backward:
        for input_ in case.inputs:
            input_.requires_grad_()
        gradient = [torch.randn_like(output) for output in case.plain(case.inputs)]
    results = {name: side(case, gradient) for name, side in sides.items()}
    for name in ("ours", "ours_as_returned"):
        assert all(torch.equal(a, b) for a, b in zip(results[name], results["plain"], strict=True)), (
            f"{case.name}: {name} and plain differ on rank {dist.get_rank()}"
        )
    contiguous = all(tensor.is_contiguous() for tensor in results["ours_as_returned"])
    del results
    sent = {name: _count(case, sides[name], gradient) for name in ("ours", "plain")}
    theory_bytes = _largest(case.theory_bytes, device)
    times = _interleaved(case, sides, gradient, num_runs, device)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "case": case.name,
        "claimed": case.claimed,
        "input_bytes": sum(input_.nbytes for input_ in case.inputs),
        "ratio": medians["plain"] / medians["ours"],
        "ratio_as_returned": medians["plain"] / medians["ours_as_returned"],
        "returned_contiguous": contiguous,
        "results_equal": True,
        "theory_bytes": theory_bytes,
        **{f"{name}_sent_bytes": _largest(count.data_bytes, device) for name, count in sent.items()},
        **{f"{name}_sizes_bytes": _largest(count.sizes_bytes, device) for name, count in sent.items()},
        "bytes_match": all(_largest(c.data_bytes, device) == theory_bytes for c in sent.values()),
        "times": {name: _summary(values) for name, values in times.items()},
    }


def _count(case: Case, side: Side, gradient: Sequence[Tensor] | None) -> SentBytes:
    with Recorder() as recorder:
        side(case, gradient)
    unknown = [call.operator for call in recorder.calls if call.kind == "unknown"]
    assert not unknown, f"{', '.join(unknown)} is not counted; say in verify.collectives what it sends"
    sizes_bytes = sum(call.sent_bytes for call in recorder.calls if call.dtype == "int64")
    return SentBytes(sum(call.sent_bytes for call in recorder.calls) - sizes_bytes, sizes_bytes)


def _largest(value: int, device: torch.device) -> int:
    tensor = torch.tensor([value], device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


def _interleaved(
    case: Case, sides: dict[str, Side], gradient: Sequence[Tensor] | None, num_runs: int, device: torch.device
) -> dict[str, list[float]]:
    """For each side, the milliseconds of every run on its slowest rank. Two more runs warm up."""
    names = list(sides)
    times: dict[str, list[float]] = {name: [] for name in names}
    for run in range(-2, num_runs):
        for at in range(len(names)):
            name = names[(run + at) % len(names)]
            _synchronize(device)
            dist.barrier()
            start = time.perf_counter()
            outputs = sides[name](case, gradient)
            _synchronize(device)
            elapsed_ms = (time.perf_counter() - start) * 1e3
            del outputs
            if run >= 0:
                times[name].append(elapsed_ms)
    table = torch.tensor([times[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return dict(zip(names, table.tolist(), strict=True))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {
        "median_ms": median,
        "q1_ms": low,
        "q3_ms": high,
        "min_ms": min(values),
        "max_ms": max(values),
        "runs": len(values),
    }


# ---- ranks and report


def run_rank(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    # torch 2.13 wants other names for collectives that torch 2.11 knows only under these.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    device = torch.device(arguments.device, rank) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # A file store: a TCP store's server listens on every interface of the machine.
    store = dist.FileStore(f"{folder}/store", arguments.ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=arguments.ranks)
    load = Workload(int(arguments.megabytes * 2**20), device)
    results = []
    for make in cases(load):
        case = make()
        if arguments.only in case.name:
            results.append(measure(case, arguments.runs, device))
            if rank == 0:
                print(_row(results[-1]), flush=True)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def _row(result: dict[str, Any]) -> str:
    times = result["times"]
    cells = [f"{result['case']:<58}"]
    for name in ("ours", "plain"):
        t = times[name]
        cells.append(f"{t['median_ms']:8.2f} [{t['q1_ms']:.1f}, {t['q3_ms']:.1f}]".ljust(24))
    cells.append(f"{times['ours_as_returned']['median_ms']:8.2f}")
    cells.append(f"{result['ratio']:6.2f}")
    cells.append(f"{result['ours_sent_bytes'] / 2**20:8.2f} {result['plain_sent_bytes'] / 2**20:8.2f}")
    cells.append(f"{result['theory_bytes'] / 2**20:8.2f} {'ok' if result['bytes_match'] else 'MISMATCH'}")
    return "  ".join(cells)


def _header() -> str:
    return (
        f"{'case':<58}  {'ours, contiguous ms':<24}  {'plain ms':<24}  {'as ret.':>8}  {'ratio':>6}  "
        f"{'sent MB':>8} {'plain':>8}  {'theory':>8}"
    )


def describe_machine(device: str) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        cpu = models[0] if models else cpu
    gpus = range(torch.cuda.device_count()) if device == "cuda" else ()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_average_at_start": _load_average(),
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _load_average() -> float | None:
    """Of the last minute; above the number of ranks, other programs disturbed the measurement."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: gloo; cuda: NCCL")
    parser.add_argument("--megabytes", type=float, default=64, help="bytes of a rank's input (default 64)")
    parser.add_argument("--runs", type=int, default=21, help="timed runs of each side (default 21)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name holds TEXT")
    parser.add_argument("--quick", action="store_true", help="1 MB and 3 runs: checks results and bytes only")
    parser.add_argument("--out", type=Path, help="write the result as JSON; nothing is written without it")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.megabytes, arguments.runs = 1, 3
    if arguments.ranks < 2 or arguments.runs < 2:
        parser.error(f"--ranks ({arguments.ranks}) and --runs ({arguments.runs}) must be at least 2")
    gpus = torch.cuda.device_count() if arguments.device == "cuda" else arguments.ranks
    if gpus < arguments.ranks:
        parser.error(
            f"--ranks {arguments.ranks} need as many GPUs for NCCL, and there are {gpus}; use --device cpu"
        )
    return arguments


def main() -> int:
    arguments = parse_arguments()
    # Inherited by the ranks. Only this machine is spoken to, and each rank keeps to one core.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    machine = describe_machine(arguments.device)
    print(
        f"{arguments.ranks} ranks, {arguments.device}, {arguments.megabytes:g} MB, {arguments.runs} runs a side"
    )
    print(_header(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (arguments, folder), nprocs=arguments.ranks)
        results = json.loads(Path(folder, "results.json").read_text())
    slow = [result["case"] for result in results if result["claimed"] and result["ratio"] < CLAIMED_RATIO]
    report = {
        "claim": f"all_to_all of one tensor in equal pieces is at least {CLAIMED_RATIO} times as fast as Open-Sora's "
        "list all_to_all and cat, with our result made contiguous",
        "claim_holds": not slow,
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine | {"load_average_at_end": _load_average()},
        "ranks": arguments.ranks,
        "backend": "nccl" if arguments.device == "cuda" else "gloo",
        "megabytes": arguments.megabytes,
        "results": results,
    }
    if not arguments.quick:
        print(f"the claim of {CLAIMED_RATIO} " + (f"fails for {'; '.join(slow)}" if slow else "holds"))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {arguments.out}")
    return 0 if all(result["bytes_match"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
