"""Times swapped norms beside what they replace, and counts the bytes that each keeps for backward.

Claim: a norm that `swap_norms` swaps is no slower than before, forward alone and forward with backward, for hidden
sizes from 128 (a head) to 5120. Its output is the original's bit for bit, or to the last bit of an fp32 sum, and no
gradient is further from fp64. On a CPU torch has a kernel for one of these norms only; the rows of the others say so.

Claim, on a GPU: forward at 85 % of the bandwidth of a copy or more, for hidden 3072 and 5120. That part was never
run: no GPU could be had. `--device cuda` measures the copy in the same run and prints the share.

Each turn repeats a call until it takes 5 ms, and counts by its mean. "ratio" is original over swapped of the same
turn; above 1, the swap is faster. A swap is slower where even the upper quartile is below 1.

    python tools/bench/norms.py --only T5LayerNorm
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import harness
import torch
from harness import Report, make_claim, make_table
from torch import Tensor, nn

from shardformer import swap_norms

LEAST_MS, LEAST_SHARE = 5.0, 0.85
PASSES = ("forward", "forward and backward")
# Hidden size, tokens, and heads: 0, or the input is [B, H, S, C], transposed from [B, S, H, C].
SIZES = {
    "cpu": [(512, 256, 0), (1024, 1024, 0), (3072, 2048, 0), (5120, 2048, 0), (128, 1024, 24)],
    "cuda": [(3072, 32768, 0), (5120, 32768, 0)],
    "quick": [(96, 8, 0), (64, 5, 3)],
}
# On a CPU fast mode has nothing that strict mode has not.
DTYPES_AND_MODES: dict[str, list[tuple[torch.dtype, str]]] = {
    "cpu": [(torch.float32, "strict"), (torch.bfloat16, "strict")],
    "cuda": [(torch.bfloat16, "strict"), (torch.bfloat16, "fast")],
}


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


def measure(original: nn.Module, x: Tensor, mode: str, rounds: int) -> dict[str, Any]:
    """What runs in the place of `original` for x [..., C], and the times of both."""
    torch.manual_seed(0)
    original = original.to(x.device, x.dtype)
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.5)
    # A norm without parameters runs in the dtype and on the device of its model.
    rest = nn.Linear(1, 1, dtype=x.dtype, device=x.device)
    holder = nn.ModuleDict({"norm": copy.deepcopy(original), "rest": rest})
    swap = swap_norms(holder, mode).rows[0]  # type: ignore[arg-type]
    row: dict[str, Any] = {"kernel": swap.to, "reason": swap.reason, "difference": swap.difference}
    row |= {"kept_before": swap.saved_before, "kept_after": swap.saved_after}
    if swap.to is None:
        return row
    for name in PASSES:
        steps = {
            "original": make_step(original, x, name != "forward"),
            "swapped": make_step(holder["norm"], x, name != "forward"),
        }
        calls = max(1, int(LEAST_MS / harness.time_ms(steps["original"], x.device, 2)))
        turns = {side: partial(harness.time_ms, step, x.device, calls) for side, step in steps.items()}
        times = harness.take_turns(turns, rounds)
        row[name] = {f"{side}_ms": harness.spread(values)["median"] for side, values in times.items()}
        row[name]["ratio"] = harness.ratios(times["original"], times["swapped"])
    return row


def make_step(norm: nn.Module, x: Tensor, backward: bool) -> Callable[[], Any]:
    """Forward, with or without backward, of a norm over x [..., C]."""
    leaf = x.detach().requires_grad_(backward)

    def forward() -> Tensor:
        with torch.set_grad_enabled(backward):
            out: Tensor = norm(leaf)
        return out

    if not backward:
        return forward
    gradient, wanted = torch.randn_like(forward()), [leaf, *norm.parameters()]
    return lambda: torch.autograd.grad(forward(), wanted, gradient)


def copy_bytes_per_s(device: torch.device) -> float:
    source = torch.randn(32768, 5120, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    times = [harness.time_ms(lambda: target.copy_(source), device, 10) for _ in range(15)]
    return 2 * source.nbytes / (harness.spread(times)["median"] / 1e3)


def claims(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The worst case decides; the names of those that fail stand with the claim."""
    asked = {f"{name}: original over swapped, least upper quartile": f"{name}.ratio.q3" for name in PASSES}
    found = []
    for what, path, threshold in (
        *((what, path, 1.0) for what, path in asked.items()),
        ("forward: share of a copy's bandwidth", "share_of_copy_bandwidth", LEAST_SHARE),
    ):
        values = {row["case"]: harness.look_up(row, path) for row in rows}
        values = {case: value for case, value in values.items() if value is not None}
        claim = make_claim(what, min(values.values(), default=None), "at least", threshold)
        found.append(claim | {"fails": [case for case, value in values.items() if value < threshold]})
    return found


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
    parser = harness.make_parser("norms", __doc__, rounds=15)
    options = harness.parse_options(parser, arguments, {"quick": {"rounds": 2}})
    torch.set_num_threads(1)
    device = torch.device(options.device)
    copied = copy_bytes_per_s(device) if device.type == "cuda" else None
    note = "" if copied else "the claims for a GPU were not run: no GPU could be had"
    report, rows = Report(options, note=note, copy_bytes_per_s=copied), list[dict[str, Any]]()
    sizes = SIZES["quick" if options.quick else options.device]
    for (norm, make), (hidden, tokens, heads), (dtype, mode) in itertools.product(
        norms().items(), sizes, DTYPES_AND_MODES[options.device]
    ):
        shape = f"{tokens} tokens" + (f" × {heads} heads" if heads else "") + f" × {hidden}"
        name = f"{norm}, {shape}, {str(dtype).removeprefix('torch.')}, {mode}"
        if options.only not in name:
            continue
        harness.say(f"norms: {name}")
        x = torch.randn((1, tokens, max(1, heads), hidden), dtype=dtype, device=device)
        x = x.transpose(1, 2) if heads else x.squeeze(2)  # [B, H, S, C], or [B, S, C]
        row = {"case": name} | measure(make(hidden), x, mode, options.rounds)
        if copied and row["kernel"]:
            # One read and one write of the input, as a copy makes them.
            per_s = 2 * x.nbytes / (row["forward"]["swapped_ms"] / 1e3)
            row["share_of_copy_bandwidth"] = per_s / copied
        rows.append(row)
    report.result |= {"cases": rows, "claims": claims(rows)}
    report.show(make_table("Swapped norms beside what they replace", COLUMNS, rows))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
