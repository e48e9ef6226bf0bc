"""Times swapped norms beside what they replace, and counts the bytes that each keeps for backward.

Claim, on a CPU: a norm that `swap_norms` puts in is no slower than the norm it replaces, forward alone and forward
with backward, for hidden sizes from 128 (a head) to 5120. Its output is the original's bit for bit, or to the last bit
of an fp32 sum, and no gradient is further from fp64. A norm that nothing here is faster than is kept, and its row says
why.

Claim, on a GPU: forward at 85 % of the bandwidth of a copy or more, for hidden 3072 and 5120. That part was never run:
no GPU could be had. `--device cuda` measures the copy in the same run and prints the share.

How it measures. The two sides take turns, in an order that changes; each turn repeats a call until it takes 5 ms, and
counts by its mean. "ratio" is original over swapped of the same turn; above 1, the swap is faster. A swap is slower
where even the upper quartile is below 1. Sizes too small for a kernel run the original's own forward; they are marked
"=", and no claim is about them: what they show is the microsecond that asking costs, and the noise.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.profiler.bench_offload.report import date, hardware, versions
from shardformer.modeling.norms import SwappedNorm, swap_norms
from shardformer.modeling.norms.layer_tiles import worth_tiling_layer_norm

LEAST_MS = 5.0
EXAMPLES = """\
examples, from the repository root:
  python tools/bench_norms.py                          every norm and size, about ten minutes
  python tools/bench_norms.py --only "T5LayerNorm"     only the cases whose name holds this text
  python tools/bench_norms.py --device cuda            bf16, hidden 3072 and 5120, with the bandwidth of a copy"""


@dataclass(frozen=True)
class Case:
    """One norm on one input; `heads` is 0, or the input is [B, H, S, C], transposed from [B, S, H, C]."""

    norm: str
    hidden: int
    tokens: int
    dtype: torch.dtype
    device: torch.device
    mode: str
    heads: int = 0

    @property
    def name(self) -> str:
        rows = f"{self.tokens} tokens" + (f" × {self.heads} heads" if self.heads else "")
        return f"{self.norm}, {rows} × {self.hidden}, {str(self.dtype).removeprefix('torch.')}, {self.mode}"

    def input(self) -> Tensor:
        shape = (1, self.tokens, self.heads, self.hidden) if self.heads else (1, self.tokens, self.hidden)
        x = torch.randn(shape, dtype=self.dtype, device=self.device)
        return x.transpose(1, 2) if self.heads else x


def norms() -> dict[str, Callable[[int], nn.Module]]:
    """By name: the original, for a hidden size. Imported here, because it takes seconds."""
    from diffusers.models.normalization import (
        AdaLayerNormContinuous,
        CogVideoXLayerNormZero,
        FP32LayerNorm,
        MochiRMSNorm,
    )
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    return {
        "T5LayerNorm": T5LayerNorm,
        "LlamaRMSNorm": LlamaRMSNorm,
        "torch.nn.RMSNorm": lambda hidden: nn.RMSNorm(hidden, eps=1e-6),
        "MochiRMSNorm": lambda hidden: MochiRMSNorm(hidden, eps=1e-6),
        "FP32LayerNorm": lambda hidden: FP32LayerNorm(hidden, eps=1e-6, elementwise_affine=False),
        "FP32LayerNorm, affine": lambda hidden: FP32LayerNorm(hidden, eps=1e-6),
        "AdaLayerNormContinuous": lambda hidden: AdaLayerNormContinuous(hidden, 64, elementwise_affine=False),
        "CogVideoXLayerNormZero": lambda hidden: CogVideoXLayerNormZero(64, hidden),
    }


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    device = torch.device(arguments.device)
    if arguments.quick:
        sizes: list[tuple[int, int, int]] = [(96, 8, 0), (64, 5, 3)]
    elif device.type == "cuda":
        sizes = [(3072, 32768, 0), (5120, 32768, 0)]
    else:
        sizes = [(512, 256, 0), (1024, 1024, 0), (3072, 2048, 0), (5120, 2048, 0), (128, 1024, 24)]
    for norm in norms():
        for hidden, tokens, heads in sizes:
            if heads and norm.startswith(("Ada", "Cog")):
                continue
            for dtype in [torch.bfloat16] if device.type == "cuda" else [torch.float32, torch.bfloat16]:
                # On a CPU fast mode has nothing that strict mode has not.
                for mode in ("strict", "fast") if device.type == "cuda" else ("strict",):
                    case = Case(norm, hidden, tokens, dtype, device, mode, heads)
                    if arguments.only in case.name:
                        yield case


def measure(
    case: Case, make: Callable[[int], nn.Module], rounds: int, copy_bytes_per_s: float | None
) -> dict[str, Any]:
    torch.manual_seed(0)
    original = make(case.hidden).to(case.device, case.dtype)
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.5)
    # A norm without parameters runs in the dtype and on the device of its model.
    rest = nn.Linear(1, 1, dtype=case.dtype, device=case.device)
    holder = nn.ModuleDict({"norm": copy.deepcopy(original), "rest": rest})
    report = swap_norms(holder, case.mode)  # type: ignore[arg-type]
    row = report.rows[0]
    told: dict[str, Any] = {"case": case.name, "kernel": row.to, "reason": row.reason}
    if row.to is None:
        return told
    told |= {"difference": row.difference, "kept_before": row.saved_before, "kept_after": row.saved_after}
    arguments = [case.input()]
    if case.norm.startswith("Cog"):
        arguments.append(torch.randn(1, 32, case.hidden, dtype=case.dtype, device=case.device))
    if case.norm.startswith(("Ada", "Cog")):
        arguments.append(torch.randn(1, 64, dtype=case.dtype, device=case.device))
    for backward in (False, True):
        sides = [_step(module, arguments, backward) for module in (original, holder["norm"])]
        times = _take_turns(sides, rounds, case.device)
        ratios = [before / after for before, after in zip(*times, strict=True)]
        told["forward and backward" if backward else "forward"] = {
            "on_kernel": _runs_on_kernel(holder["norm"], arguments[0], backward),
            "original_ms": statistics.median(times[0]),
            "swapped_ms": statistics.median(times[1]),
            "ratio": _quartiles(ratios),
        }
    if copy_bytes_per_s is not None:
        moved = 2 * arguments[0].nbytes / (told["forward"]["swapped_ms"] / 1e3)
        told["share_of_copy_bandwidth"] = moved / copy_bytes_per_s
    return told


def _runs_on_kernel(module: nn.Module, x: Tensor, backward: bool) -> bool:
    """Whether this size is worth a kernel; on others the original's own forward runs."""
    if not isinstance(module, SwappedNorm):
        return worth_tiling_layer_norm(x)
    with torch.set_grad_enabled(backward):
        return module.on_kernel(x.detach().requires_grad_(backward)) is not None


def _step(module: nn.Module, arguments: list[Tensor], backward: bool) -> Callable[[], None]:
    if not backward:

        def forward() -> None:
            with torch.no_grad():
                module(*arguments)

        return forward
    leaves = [tensor.detach().requires_grad_() for tensor in arguments]
    wanted = [*leaves, *module.parameters()]
    first = module(*leaves)
    gradient = torch.randn_like(first[0] if isinstance(first, tuple) else first)

    def both() -> None:
        out = module(*leaves)
        out = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad(out, wanted, gradient, allow_unused=True)

    return both


def _take_turns(sides: list[Callable[[], None]], rounds: int, device: torch.device) -> list[list[float]]:
    """Milliseconds of each side in every round."""
    repeats = max(1, int(LEAST_MS / _mean_ms(sides[0], 2, device)))
    for side in sides:
        _mean_ms(side, repeats, device)
    times: list[list[float]] = [[], []]
    for turn in range(rounds):
        for index in (0, 1) if turn % 2 else (1, 0):
            times[index].append(_mean_ms(sides[index], repeats, device))
    return times


def _mean_ms(function: Callable[[], None], repeats: int, device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    _synchronize(device)
    return (time.perf_counter() - started) * 1e3 / repeats


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high}


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.randn(32768, 5120, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    times = [_mean_ms(lambda: target.copy_(source) and None, 10, device) for _ in range(15)]  # type: ignore[func-returns-value]
    return 2 * source.nbytes / (statistics.median(times) / 1e3)


def _claims(results: list[dict[str, Any]], on_gpu: bool) -> list[dict[str, Any]]:
    swapped = [result for result in results if result["kernel"]]
    claims = []
    for what in ("forward", "forward and backward"):
        slow = [r["case"] for r in swapped if r[what]["on_kernel"] and r[what]["ratio"]["q3"] < 1]
        claims.append({"claim": f"{what}: no slower than what is replaced", "held": not slow, "fails": slow})
    if on_gpu:
        below = [r["case"] for r in swapped if r["share_of_copy_bandwidth"] < 0.85]
        claims.append(
            {"claim": "forward: 85 % of the bandwidth of a copy", "held": not below, "fails": below}
        )
    return claims


def _line(result: dict[str, Any]) -> str:
    if not result["kernel"]:
        return f"{result['case']:<62} kept: {result['reason']}"
    figures = []
    for what in ("forward", "forward and backward"):
        ratio = result[what]["ratio"]
        mark = " " if result[what]["on_kernel"] else "="
        spread = f"[{ratio['q1']:.2f}, {ratio['q3']:.2f}]"
        figures.append(f"{result[what]['swapped_ms']:8.2f} ms {mark}{ratio['median']:5.2f} {spread:<14}")
    kept = f"{result['kept_before']:>6} → {result['kept_after']} B"
    share = (
        f"  {result['share_of_copy_bandwidth']:.0%} of copy" if "share_of_copy_bandwidth" in result else ""
    )
    return f"{result['case']:<62} {'   '.join(figures)}  {kept}{share}"


def _command() -> str:
    """As it can be typed from the repository's root; of other paths only the name."""
    shown = [argument if argument.startswith("tools/") else Path(argument).name for argument in sys.argv[1:]]
    return shlex.join(["python", "tools/bench_norms.py", *shown])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15, help="timed turns of each side (default 15)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name holds TEXT")
    parser.add_argument("--quick", action="store_true", help="small inputs, 2 turns: checks that it runs")
    parser.add_argument("--out", type=Path, help="write the result as JSON; nothing is written without it")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 2
    if arguments.rounds < 2:
        parser.error(f"--rounds ({arguments.rounds}) must be at least 2")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and there is none; use --device cpu")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    bandwidth = _copy_bandwidth(device) if device.type == "cuda" else None
    print(f"{'':<62} forward: swapped, ratio          forward and backward: swapped, ratio   kept a token")
    made, results = norms(), []
    for case in cases(arguments):
        results.append(measure(case, made[case.norm], arguments.rounds, bandwidth))
        print(_line(results[-1]), flush=True)
    claims = _claims(results, device.type == "cuda")
    for claim in claims:
        print(f"{'held' if claim['held'] else 'FAILED'}: {claim['claim']}", *claim["fails"], sep="\n  ")
    report = {
        "note": "the claims for a GPU were not run: no GPU could be had" if device.type == "cpu" else "",
        "hardware": hardware(device),
        "versions": versions(),
        "command": _command(),
        "date": date(),
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "copy_bytes_per_s": bandwidth,
        "cases": results,
        "claims": claims,
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
