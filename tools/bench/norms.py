"""Times swapped norms beside what they replace, and counts the bytes that each keeps for backward.

Claim: a norm that `swap_norms` swaps is no slower than before, forward alone and forward with backward, for hidden
sizes from 128 (a head) to 5120. Its output is the original's bit for bit, or to the last bit of an fp32 sum, and no
gradient is further from fp64. On a CPU torch has a kernel for one of these norms only; the rows of the others say so.

Claim, on a GPU: forward at 85 % of the bandwidth of a copy or more, for hidden 3072 and 5120. That part was never
run: no GPU could be had. `--device cuda` measures the copy in the same run and prints the share.

Each turn repeats a call until it takes 5 ms, and counts by its mean. "ratio" is original over swapped of the same
turn; above 1, the swap is faster. A swap is slower where even the upper quartile is below 1.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness
import torch
from harness import Report, Table, make_claim
from torch import Tensor, nn

from shardformer import swap_norms

PROGRAM = "python tools/bench/norms.py"
LEAST_MS, LEAST_SHARE = 5.0, 0.85
PASSES = ("forward", "forward and backward")
EXAMPLES = f"""\
examples, from the repository root:
  {PROGRAM}                          every norm and size, about ten minutes
  {PROGRAM} --only "T5LayerNorm"     only the cases whose name holds this text
  {PROGRAM} --device cuda            bf16, hidden 3072 and 5120, with the bandwidth of a copy"""


@dataclass(frozen=True)
class Case:
    """One norm on one input; `heads` is 0, or the input is [B, H, S, C], transposed from [B, S, H, C]."""

    norm: str
    hidden: int
    tokens: int
    dtype: torch.dtype
    mode: str
    heads: int = 0

    @property
    def name(self) -> str:
        rows = f"{self.tokens} tokens" + (f" × {self.heads} heads" if self.heads else "")
        return f"{self.norm}, {rows} × {self.hidden}, {str(self.dtype).removeprefix('torch.')}, {self.mode}"


def norms() -> dict[str, Callable[[int], nn.Module]]:
    """By name: the original, for a hidden size. Imported here, because it takes seconds."""
    from diffusers.models import normalization as diffusers
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    return {
        "T5LayerNorm": T5LayerNorm,
        "LlamaRMSNorm": LlamaRMSNorm,
        "torch.nn.RMSNorm": lambda hidden: nn.RMSNorm(hidden, eps=1e-6),
        "MochiRMSNorm": lambda hidden: diffusers.MochiRMSNorm(hidden, eps=1e-6),
        "FP32LayerNorm": lambda hidden: diffusers.FP32LayerNorm(hidden, eps=1e-6, elementwise_affine=False),
        "FP32LayerNorm, affine": lambda hidden: diffusers.FP32LayerNorm(hidden, eps=1e-6),
    }


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """What is measured, as far as --only asks for it."""
    sizes = [(512, 256, 0), (1024, 1024, 0), (3072, 2048, 0), (5120, 2048, 0), (128, 1024, 24)]
    # On a CPU fast mode has nothing that strict mode has not.
    dtypes, modes = [torch.float32, torch.bfloat16], ["strict"]
    if options.device == "cuda":
        sizes = [(3072, 32768, 0), (5120, 32768, 0)]
        dtypes, modes = [torch.bfloat16], ["strict", "fast"]
    if options.quick:
        sizes = [(96, 8, 0), (64, 5, 3)]
    for norm, (hidden, tokens, heads), dtype, mode in itertools.product(norms(), sizes, dtypes, modes):
        case = Case(norm, hidden, tokens, dtype, mode, heads)
        if options.only in case.name:
            yield case


def measure(case: Case, original: nn.Module, device: torch.device, rounds: int) -> dict[str, Any]:
    """One row: what runs in the place of `original`, and the times of both."""
    torch.manual_seed(0)
    original = original.to(device, case.dtype)
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.5)
    # A norm without parameters runs in the dtype and on the device of its model.
    rest = nn.Linear(1, 1, dtype=case.dtype, device=device)
    holder = nn.ModuleDict({"norm": copy.deepcopy(original), "rest": rest})
    swap = swap_norms(holder, case.mode).rows[0]  # type: ignore[arg-type]
    row: dict[str, Any] = {"case": case.name, "kernel": swap.to, "reason": swap.reason}
    row |= {"difference": swap.difference, "kept_before": swap.saved_before, "kept_after": swap.saved_after}
    if swap.to is None:
        return row
    shape = (1, case.tokens, case.heads, case.hidden) if case.heads else (1, case.tokens, case.hidden)
    x = torch.randn(shape, dtype=case.dtype, device=device)
    if case.heads:
        x = x.transpose(1, 2)  # [B, H, S, C]
    norms_by_side = {"original": original, "swapped": holder["norm"]}
    for name in PASSES:
        steps = {side: make_step(norm, x, name) for side, norm in norms_by_side.items()}
        calls = max(1, int(LEAST_MS / harness.time_ms(steps["original"], device, 2)))
        turns = {side: partial(harness.time_ms, step, device, calls) for side, step in steps.items()}
        times = harness.take_turns(turns, rounds)
        row[name] = {f"{side}_ms": harness.spread(values)["median"] for side, values in times.items()}
        row[name]["ratio"] = harness.ratios(times["original"], times["swapped"])
    return row


def make_step(module: nn.Module, x: Tensor, name: str) -> Callable[[], Any]:
    """One pass, by its name, of a norm over x [..., C]."""
    backward = name != "forward"
    leaf = x.detach().requires_grad_(backward)

    def forward() -> Tensor:
        with torch.set_grad_enabled(backward):
            out: Tensor = module(leaf)
        return out

    if not backward:
        return forward
    gradient, wanted = torch.randn_like(forward()), [leaf, *module.parameters()]
    return lambda: torch.autograd.grad(forward(), wanted, gradient)


def copy_bytes_per_s(device: torch.device) -> float:
    source = torch.randn(32768, 5120, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    times = [harness.time_ms(lambda: target.copy_(source), device, 10) for _ in range(15)]
    return 2 * source.nbytes / (harness.spread(times)["median"] / 1e3)


def claims(rows: Sequence[Mapping[str, Any]], on_cuda: bool) -> list[dict[str, Any]]:
    """The worst case decides; the names of those that fail stand with the claim."""
    swapped = [row for row in rows if row["kernel"]]

    def worst(what: str, values: Mapping[str, float], threshold: float) -> dict[str, Any]:
        claim = make_claim(what, min(values.values(), default=None), "at least", threshold)
        return claim | {"fails": [case for case, value in values.items() if value < threshold]}

    found = []
    for name in PASSES:
        quartiles = {row["case"]: row[name]["ratio"]["q3"] for row in swapped}
        found.append(worst(f"{name}: original over swapped, least upper quartile", quartiles, 1.0))
    shares = {row["case"]: row["share_of_copy_bandwidth"] for row in swapped} if on_cuda else {}
    return [*found, worst("forward: share of a copy's bandwidth", shares, LEAST_SHARE)]


COLUMNS = {
    "case": "case",
    "kernel": "kernel",
    "forward ms": "forward.swapped_ms",
    "ratio": "forward.ratio",
    "and backward ms": "forward and backward.swapped_ms",
    "ratio ": "forward and backward.ratio",
    "bytes kept a token": "kept_before",
    "now": "kept_after",
    "of a copy": "share_of_copy_bandwidth",
    "not swapped, because": "reason",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0; claims that do not hold are printed and stored."""
    parser = harness.make_parser(PROGRAM, __doc__, EXAMPLES, rounds=15)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    options = harness.parse_options(parser, arguments, quick={"rounds": 2})
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    copied, note = None, "the claims for a GPU were not run: no GPU could be had"
    if device.type == "cuda":
        copied, note = copy_bytes_per_s(device), ""
    facts = {"note": note, "rounds": options.rounds, "threads": options.threads, "copy_bytes_per_s": copied}
    report, rows, made = Report(options, **facts), list[dict[str, Any]](), norms()
    for case in cases(options):
        harness.say(f"norms: {case.name}")
        row = measure(case, made[case.norm](case.hidden), device, options.rounds)
        if copied is not None and row["kernel"]:
            # One read and one write of the input, as a copy makes them.
            moved_bytes = 2 * case.tokens * max(1, case.heads) * case.hidden * case.dtype.itemsize
            row["share_of_copy_bandwidth"] = moved_bytes / (row["forward"]["swapped_ms"] / 1e3) / copied
        rows.append(row)
    report.result |= {"cases": rows, "claims": claims(rows, copied is not None)}
    report.show(Table.of("Swapped norms beside what they replace", COLUMNS, rows))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
