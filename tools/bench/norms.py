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
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import harness
import torch
from harness import Report, Table, make_claim
from torch import Tensor, nn

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


# ---- what is known here of how norms are swapped


def swap(original: nn.Module, case: Case, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """The module that runs in the place of `original`, and what the report says of it."""
    from shardformer import swap_norms

    # A norm without parameters runs in the dtype and on the device of its model.
    rest = nn.Linear(1, 1, dtype=case.dtype, device=device)
    holder = nn.ModuleDict({"norm": copy.deepcopy(original), "rest": rest})
    row = swap_norms(holder, case.mode).rows[0]  # type: ignore[arg-type]
    facts = {"kernel": row.to, "reason": row.reason, "difference": row.difference}
    return holder["norm"], facts | {"kept_before": row.saved_before, "kept_after": row.saved_after}


# ---- measuring


def cases(options: argparse.Namespace) -> Iterator[Case]:
    on_cuda = options.device == "cuda"
    sizes = [(512, 256, 0), (1024, 1024, 0), (3072, 2048, 0), (5120, 2048, 0), (128, 1024, 24)]
    if options.quick:
        sizes = [(96, 8, 0), (64, 5, 3)]
    elif on_cuda:
        sizes = [(3072, 32768, 0), (5120, 32768, 0)]
    for norm in norms():
        for hidden, tokens, heads in sizes:
            for dtype in [torch.bfloat16] if on_cuda else [torch.float32, torch.bfloat16]:
                # On a CPU fast mode has nothing that strict mode has not.
                for mode in ("strict", "fast") if on_cuda else ("strict",):
                    case = Case(norm, hidden, tokens, dtype, mode, heads)
                    if options.only in case.name:
                        yield case


def measure(
    case: Case, make: Callable[[int], nn.Module], options: argparse.Namespace, copied: float | None
) -> dict[str, Any]:
    """One row. `copied`: bytes a second of a copy."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    original = make(case.hidden).to(device, case.dtype)
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.5)
    swapped, facts = swap(original, case, device)
    row: dict[str, Any] = {"case": case.name, **facts}
    if row["kernel"] is None:
        return row

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device)

    x = draw(1, case.tokens, case.heads, case.hidden).transpose(1, 2) if case.heads else None
    x = draw(1, case.tokens, case.hidden) if x is None else x
    for name in PASSES:
        backward = name != "forward"
        steps = {
            key: _step(norm, x, backward) for key, norm in (("original", original), ("swapped", swapped))
        }
        calls = max(1, int(LEAST_MS / harness.time_ms(steps["original"], device, 2)))
        turns = {key: lambda step=step: harness.time_ms(step, device, calls) for key, step in steps.items()}  # noqa: B023
        times = harness.take_turns(turns, options.rounds, lambda what, detail: None)
        row[name] = {f"{key}_ms": harness.spread(values)["median"] for key, values in times.items()}
        row[name]["ratio"] = harness.ratios(times["original"], times["swapped"])
    if copied is not None:
        row["share_of_copy_bandwidth"] = 2 * x.nbytes / (row["forward"]["swapped_ms"] / 1e3) / copied
    return row


def _step(module: nn.Module, x: Tensor, backward: bool) -> Callable[[], Any]:
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
    """The worst upper quartile of each pass decides; the names of those that are slower stand with the claim."""
    swapped, found = [row for row in rows if row["kernel"]], []
    for name in PASSES:
        worst = {row["case"]: row[name]["ratio"]["q3"] for row in swapped}
        value = min(worst.values(), default=None)
        claim = make_claim(f"{name}: original over swapped, least upper quartile", value, "at least", 1.0)
        found.append(claim | {"fails": [case for case, q3 in worst.items() if q3 < 1]})
    shares = {row["case"]: row["share_of_copy_bandwidth"] for row in swapped} if on_cuda else {}
    claim = make_claim(
        "forward: share of a copy's bandwidth", min(shares.values(), default=None), "at least", LEAST_SHARE
    )
    return [*found, claim | {"fails": [case for case, share in shares.items() if share < LEAST_SHARE]}]


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
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = harness.make_parser(PROGRAM, __doc__, EXAMPLES, rounds=15)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    options = parser.parse_args(given)
    if options.quick:
        options.rounds = 2
    on_cuda = harness.choose_device(options)
    harness.check_options(parser, options, {})
    torch.set_num_threads(options.threads)
    copied = copy_bytes_per_s(torch.device("cuda")) if on_cuda else None
    note = "" if on_cuda else "the claims for a GPU were not run: no GPU could be had"
    facts = {"note": note, "rounds": options.rounds, "threads": options.threads, "copy_bytes_per_s": copied}
    report, rows, made = Report(options, PROGRAM, given, **facts), [], norms()
    with harness.progress("norms") as tell:
        for case in cases(options):
            tell(case.name)
            rows.append(measure(case, made[case.norm], options, copied))
    report.result |= {"cases": rows, "claims": claims(rows, on_cuda)}
    report.show(Table.of("Swapped norms beside what they replace", COLUMNS, rows))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
