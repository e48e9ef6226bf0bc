"""Times swapped norms beside what they replace, and counts the bytes that each keeps for backward.

Claim: a norm that `swap_norms` swaps is no slower than before, forward alone and forward with backward, for hidden
sizes from 128 (a head) to 5120. Its output is the original's bit for bit, or to the last bit of an fp32 sum, and no
gradient is further from fp64. On a CPU torch has a kernel for one of these norms only; the rows of the others say so.

Claim, on a GPU: forward at 85 % of the bandwidth of a copy or more, for hidden 3072 and 5120; and kernels, forward and
with backward, at 90 % where they norm or gate, at 85 % where they also modulate or turn. `--device cuda` measures the
copy in the same run.

Each turn repeats a call until it takes 5 ms, and counts by its mean; on a GPU it replays a graph of some calls'
kernels, so that the host's time is no part of it. "ratio" is original over swapped of the same turn; above 1, the swap
is faster. A swap is slower where even the upper quartile is below 1.

    python tools/bench/norms.py --only '^T5LayerNorm|rotary'       # a pattern of Python's
"""

from __future__ import annotations

import copy
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import harness
import torch
from harness import Report, make_claim, make_table
from torch import Tensor, nn

from shardformer import swap_norms
from shardformer.modeling.kernels import explain_kernel, gated_residual, modulated_norm, norm_rotary, plain
from shardformer.modeling.norm_orders import ORDERS
from shardformer.modeling.norms import KERNELS, Unfit

LEAST_MS, LEAST_SHARE = 5.0, 0.85
# What is asked of kernels, by what they do.
KINDS = {"norm or gate": 0.9, "modulate or turn": 0.85}
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
        clocks = {
            side: harness.clock(make_step(norm, x, name != "forward"), x.device)
            for side, norm in (("original", original), ("swapped", holder["norm"]))
        }
        times = take_turns(clocks, "original", rounds)
        row[name] = {f"{side}_ms": harness.spread(values)["median"] for side, values in times.items()}
        row[name]["ratio"] = harness.ratios(times["original"], times["swapped"])
    return row


def take_turns(
    clocks: Mapping[str, Callable[[int], float]], slowest: str, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each side in each round, on the mean of as many calls as the slowest makes in 5 ms."""
    calls = max(1, int(LEAST_MS / clocks[slowest](2)))
    return harness.take_turns({side: partial(clock, calls) for side, clock in clocks.items()}, rounds)


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


@dataclass
class Fused:
    """One kernel, the plain operations that it stands for, and peers that compute the same."""

    operands: tuple[Tensor, ...]
    ours: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    # How many tensors of the size of x are read and written, in forward and in backward.
    passes: tuple[int, int]
    kind: str = "norm or gate"
    # What else is read in each of them, and grows with the tokens.
    tables: tuple[Tensor, ...] = ()
    peers: dict[str, Callable[..., Tensor]] = field(default_factory=dict)


def fused(hidden: int, tokens: int, head_dim: int, device: torch.device) -> dict[str, Fused]:
    """Every kernel over x [1, tokens, hidden] in bf16, as Wan and T5 have it."""
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    x, y, weight = draw(1, tokens, hidden), draw(1, tokens, hidden), draw(hidden)
    scale, shift = draw(hidden).float(), draw(hidden).float()
    cos, sin = (draw(1, tokens, 1, head_dim).float() for _ in range(2))
    t5, product, layer = ORDERS[0], ORDERS[2], ORDERS[5]
    peers = {
        name: lambda x, weight, run=KERNELS[name].run: run(x, weight, None, t5, 1e-6)
        for name in ("quack", "liger", "apex")
    }
    return {
        "RMS norm": Fused(
            (x, weight),
            lambda x, weight: modulated_norm(x, None, None, weight, order=t5, eps=1e-6),
            lambda x, weight: t5(x, weight, None, 1e-6),
            (2, 3),
            peers=peers,
        ),
        "norm, scale and shift": Fused(
            (x, scale, shift),
            lambda x, scale, shift: modulated_norm(x, scale, shift, order=layer, eps=1e-6, rounds="end"),
            lambda x, scale, shift: plain.modulated_norm(x, scale, shift, None, None, layer, 1e-6, "end"),
            (2, 3),
            "modulate or turn",
        ),
        "gate and residual": Fused(
            (x, y, scale),
            lambda x, y, gate: gated_residual(x, y, gate, rounds="end"),
            lambda x, y, gate: plain.gated_residual(x, y, gate, "end"),
            (3, 3),
        ),
        "norm and rotary": Fused(
            (x, weight),
            lambda x, w: norm_rotary(x, cos, sin, w, order=product, eps=1e-6, head_dim=head_dim),
            lambda x, w: plain.norm_rotary(x, cos, sin, w, None, product, 1e-6, "neighbours", "end"),
            (2, 3),
            "modulate or turn",
            (cos, sin),
        ),
    }


def measure_fused(case: Fused, rounds: int, copied: float | None) -> dict[str, Any]:
    """The times of all sides, and the share of a copy's bandwidth that the kernel has."""
    x = case.operands[0]
    row: dict[str, Any] = {
        "kernel": explain_kernel(*case.operands), "kind": case.kind, "refused": {}
    }  # fmt: skip
    sides = {"ours": case.ours, "plain": case.plain}
    peers = ({"compiled": torch.compile(case.plain)} if x.is_cuda else {}) | case.peers
    for name, peer in peers.items():
        try:
            make_fused_step(peer, case.operands, backward=True)()
            sides[name] = peer
        except (Unfit, RuntimeError) as error:
            row["refused"][name] = str(error).splitlines()[0]
    for name in PASSES:
        backward = name != "forward"
        clocks = {
            side: harness.clock(make_fused_step(run, case.operands, backward), x.device)
            for side, run in sides.items()
        }
        times = take_turns(clocks, "plain", rounds)
        row[name] = {f"{side}_ms": harness.spread(values)["median"] for side, values in times.items()}
        row[name]["ratio"] = harness.ratios(times["plain"], times["ours"])
        if copied:
            passes = case.passes[: 2 if backward else 1]
            moved = x.nbytes * sum(passes) + len(passes) * sum(table.nbytes for table in case.tables)
            row[name]["share_of_copy_bandwidth"] = moved / (row[name]["ours_ms"] / 1e3) / copied
    return row


def make_fused_step(
    function: Callable[..., Tensor], operands: Sequence[Tensor], backward: bool
) -> Callable[[], Any]:
    """Forward, with or without backward, of a function of the operands."""
    leaves = [tensor.detach().requires_grad_(backward) for tensor in operands]
    if not backward:
        return lambda: function(*leaves)
    gradient = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, gradient)


def claims(
    rows: Sequence[Mapping[str, Any]], of_kernels: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The worst case decides; the names of those that fail stand with the claim."""
    asked = {f"{name}: original over swapped, least upper quartile": f"{name}.ratio.q3" for name in PASSES}
    found = []
    share = "share_of_copy_bandwidth"
    kernels = itertools.product(KINDS.items(), PASSES)
    for what, path, threshold, measured in (
        *((what, path, 1.0, rows) for what, path in asked.items()),
        ("forward: share of a copy's bandwidth", share, LEAST_SHARE, rows),
        *(
            (f"kernels that {kind}, {name}: share of a copy's bandwidth", f"{name}.{share}", least,
             [row for row in of_kernels if row["kind"] == kind])
            for (kind, least), name in kernels
        ),
    ):  # fmt: skip
        values = {row["case"]: harness.look_up(row, path) for row in measured}
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


COLUMNS_OF_KERNELS = {
    "case": "case",
    "runs": "kernel",
    "forward ms": "forward.ours_ms",
    "plain": "forward.plain_ms",
    "torch.compile": "forward.compiled_ms",
    "quack": "forward.quack_ms",
    "liger": "forward.liger_ms",
    "apex": "forward.apex_ms",
    "of a copy": "forward.share_of_copy_bandwidth",
    "and backward ms": "forward and backward.ours_ms",
    "plain ": "forward and backward.plain_ms",
    "of a copy ": "forward and backward.share_of_copy_bandwidth",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0; claims that do not hold are printed and stored."""
    parser = harness.make_parser("norms", __doc__, rounds=15)
    options = harness.parse_options(parser, arguments, {"quick": {"rounds": 2}})
    torch.set_num_threads(1)
    device = torch.device(options.device)
    copied = harness.copy_bytes_per_s(device) if device.type == "cuda" else None
    note = "" if copied else "the claims for a GPU were not run: no GPU could be had"
    report, rows = Report(options, note=note, copy_bytes_per_s=copied), list[dict[str, Any]]()
    kernels = list[dict[str, Any]]()

    def keep() -> None:
        """After each case, because whoever started this may end it before the last."""
        report.result |= {"cases": rows, "kernels": kernels, "claims": claims(rows, kernels)}
        report.save()

    sizes = SIZES["quick" if options.quick else options.device]
    for (norm, make), (hidden, tokens, heads), (dtype, mode) in itertools.product(
        norms().items(), sizes, DTYPES_AND_MODES[options.device]
    ):
        shape = f"{tokens} tokens" + (f" × {heads} heads" if heads else "") + f" × {hidden}"
        name = f"{norm}, {shape}, {str(dtype).removeprefix('torch.')}, {mode}"
        if not re.search(options.only, name):
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
        keep()
    # On a CPU the plain operations run on both sides: a quick run takes them, to see that they run.
    if copied or options.quick:
        for hidden, tokens, _ in sizes:
            for name, case in fused(hidden, tokens, 32 if options.quick else 128, device).items():
                name = f"{name}, {tokens} tokens × {hidden}"
                if re.search(options.only, name):
                    harness.say(f"norms: {name}")
                    kernels.append({"case": name} | measure_fused(case, options.rounds, copied))
                    keep()
    keep()
    report.show(make_table("Swapped norms beside what they replace", COLUMNS, rows))
    if kernels:
        report.show(make_table("Kernels beside the plain operations", COLUMNS_OF_KERNELS, kernels))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
