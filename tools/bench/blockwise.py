"""Runs attention over blocks of keys on one device: several ranks, one after the other, on the kernels of that device.

A ring's rank attends to one block of keys after the other, merges, and in backward gives the kernel the log-sum-exp of
the whole row, of some of its rows at a time under a causal mask. Ulysses attends with some heads to all keys. Both are
computed here for P ranks in one process, below the collectives, so that one GPU shows whether its kernels take what
they are given. Nothing is sent.

Claim: the output and the gradients of q, k and v of P simulated ranks are no further from fp64 than 2 times the error
of one call over the whole sequence in the same dtype; for each kernel that the device has, and each order of tokens.

Claim, on a GPU: the kernel that `explain_kernel` names is at most 1.05 times as slow as the fastest one that can take
the call, forward and backward.

    python tools/bench/blockwise.py --tokens 4096 --only zigzag
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import harness
import torch
from harness import Report, make_claim, make_table
from torch import Tensor

from opensora_accel.attention import explain_kernel, local_attention
from opensora_accel.attention.balance import LAYOUTS, Tile, TokenLayout, causal_tiles, rearrange
from opensora_accel.attention.blocks import accumulator_dtype, attend, attend_backward, merge_
from opensora_accel.attention.kernels import Kernel, Problem, Scores
from opensora_accel.attention.kernels.cpu import CpuFlashKernel
from opensora_accel.attention.kernels.cuda import CudnnKernel, EfficientKernel, FlashKernel
from opensora_accel.attention.kernels.flash_attn import FlashAttn2Kernel, FlashAttn3Kernel
from opensora_accel.communications import share_sizes

MOST_ERROR, MOST_TIME = 2.0, 1.05
# All but the plain one, which holds S × S scores.
KERNELS: tuple[Kernel, ...] = (
    *(FlashAttn3Kernel(), FlashAttn2Kernel(), CudnnKernel(), FlashKernel(), EfficientKernel()),
    CpuFlashKernel(),
)
TENSORS = ("output", "gradient of q", "gradient of k", "gradient of v")
Results = tuple[Tensor, Tensor, Tensor, Tensor]


def ring_on_one_device(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    num_ranks: int,
    layout: TokenLayout | None = None,
    mask: Tensor | None = None,
    kernel: Kernel | None = None,
) -> Results:
    """What the ranks of a ring compute, each with its own tokens and one block of keys after the other.

    Args:
        q, grad: [B, S, H, D] and k, v: [B, S, H_kv, D], in the order of the layout.
        layout: of a causal ring; None sees all keys.
        mask: [B, S], true where a key may be seen.
        kernel: attends; by default the one that is chosen for the call, which also knows rows that see nothing.

    Returns:
        The output and the gradients of q, k and v, in fp32 or fp64 and in the shapes of `q`, `q`, `k` and `v`.
    """
    forward, backward = (attend, attend_backward) if kernel is None else (kernel.forward, kernel.backward)
    splits, dtype, scale = share_sizes(q.size(1), num_ranks), accumulator_dtype(q.dtype), q.size(-1) ** -0.5
    shares = [list(each.split(splits, 1)) for each in (q, k, v, grad)]
    masks = [None] * num_ranks if mask is None else list(mask.split(splits, 1))
    results = [torch.zeros(each.shape, dtype=dtype, device=q.device) for each in (q, q, k, v)]
    outs, grads_q, grads_k, grads_v = (each.split(splits, 1) for each in results)
    # A rank holds its share in memory of its own.
    qs, ks, vs, grads = ([each.contiguous() for each in share] for share in shares)

    def tiles(rank: int, owner: int) -> tuple[Tile, ...]:
        if layout is not None:
            return causal_tiles(layout, splits, splits, rank, owner)
        return (Tile(slice(0, splits[rank]), slice(0, splits[owner]), causal=False),)

    for rank in range(num_ranks):
        owners = [(rank - step) % num_ranks for step in range(num_ranks)]
        work = [
            (owner, tile, Scores(scale, None if mask_ is None else mask_[:, tile.keys], tile.causal))
            for owner in owners
            for mask_ in (masks[owner],)
            for tile in tiles(rank, owner)
        ]
        lse = qs[rank].new_full(qs[rank].shape[:3], float("-inf"), dtype=dtype)  # [B, S/P, H]
        for owner, (rows, keys, *_), scores in work:
            part, part_lse = forward(qs[rank][:, rows], ks[owner][:, keys], vs[owner][:, keys], scores)
            merge_(outs[rank][:, rows], lse[:, rows], part, part_lse.transpose(1, 2))
        out, lse = outs[rank].to(q.dtype), lse.transpose(1, 2).contiguous()
        if mask is not None:
            lse = lse.masked_fill(lse == float("-inf"), 0)
        for owner, (rows, keys, *_), scores in work:
            parts = backward(
                *(grads[rank][:, rows], qs[rank][:, rows], ks[owner][:, keys], vs[owner][:, keys]),
                *(out[:, rows], lse[:, :, rows], scores),
            )
            grads_q[rank][:, rows] += parts[0]
            grads_k[owner][:, keys] += parts[1]
            grads_v[owner][:, keys] += parts[2]
    return results[0], results[1], results[2], results[3]


def ulysses_on_one_device(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, num_ranks: int, causal: bool, mask: Tensor | None
) -> Results:
    """What the ranks of Ulysses compute, each with all tokens of some heads.

    Args:
        q, grad: [B, S, H, D]; k, v: [B, S, H, D]; mask: [B, S].

    Returns:
        The output and the gradients of q, k and v, [B, S, H, D].
    """
    heads = share_sizes(q.size(2), num_ranks)
    parts = [
        one_call(*(each.contiguous() for each in share), causal=causal, mask=mask)
        for share in zip(*(each.split(heads, 2) for each in (q, k, v, grad)), strict=True)
    ]
    found = [torch.cat(each, 2) for each in zip(*parts, strict=True)]
    return found[0], found[1], found[2], found[3]


def one_call(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, causal: bool, mask: Tensor | None) -> Results:
    """The output and the gradients of q, k and v of one call over the whole sequence.

    q, grad: [B, S, H, D]; k, v: [B, S, H_kv, D]; mask: [B, S].
    """
    leaves = [each.detach().requires_grad_() for each in (q, k, v)]
    out = local_attention(*leaves, mask=mask, causal=causal)
    grads = torch.autograd.grad(out, leaves, grad)
    return out.detach(), grads[0], grads[1], grads[2]


def in_fp64(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, causal: bool, mask: Tensor | None) -> Results:
    """`one_call` in fp64, one head at a time: it holds S × S scores. Shapes as there, with as many key heads."""
    heads = zip(*(each.double().split(1, 2) for each in (q, k, v, grad)), strict=True)
    parts = [one_call(*head, causal=causal, mask=mask) for head in heads]
    found = [torch.cat(each, 2) for each in zip(*parts, strict=True)]
    return found[0], found[1], found[2], found[3]


# ---- errors


def measure_errors(options: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """For each dtype, mask and order of tokens: the errors of P ranks over those of one call."""
    for dtype, masked in itertools.product(options.dtypes, (False, True)):
        q, k, v, grad = inputs(options, dtype, device)
        generator = torch.Generator().manual_seed(1)
        mask = (torch.rand(1, options.tokens, generator=generator) > 0.3).to(device) if masked else None
        for causal in (False, True):
            if masked and causal:
                continue  # one call over it needs an S × S mask
            wanted = in_fp64(q, k, v, grad, causal=causal, mask=mask)
            alone = one_call(q, k, v, grad, causal=causal, mask=mask)
            for num_ranks in options.simulate:
                ranks: dict[str, Any] = {"num_ranks": num_ranks, "mask": mask}
                where = f"{str(dtype).removeprefix('torch.')}, {num_ranks} ranks"
                where += ", causal" if causal else ", masked" if masked else ""
                rings: list[TokenLayout | None] = list(LAYOUTS) if causal else [None]
                for layout in rings:
                    order = partial(rearrange, num_ranks=num_ranks, layout=layout) if layout else torch.clone
                    given = [order(each) for each in (q, k, v, grad)]
                    problem = Problem.of(given[0], given[1], given[2], mask)
                    for kernel in (each for each in KERNELS if not each.refuses(problem)):
                        name = f"ring, {kernel.name}, {where}" + (f", {layout}" if layout else "")
                        if options.only in name:
                            run = partial(ring_on_one_device, *given, **ranks, layout=layout, kernel=kernel)
                            against = [[order(each) for each in each_of] for each_of in (wanted, alone)]
                            yield {"case": name} | compare(run, *against)
                name = f"Ulysses, {explain_kernel(q, k, v, mask=mask).kernel.name}, {where}"
                if options.only in name:
                    run = partial(ulysses_on_one_device, q, k, v, grad, **ranks, causal=causal)
                    yield {"case": name} | compare(run, wanted, alone)


def inputs(options: Any, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k, v and the output's gradient, [1, S, H, D]."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, 1, options.tokens, options.heads, options.head_dim)
    return list(torch.randn(shape, generator=generator).to(device, dtype))


def compare(run: Any, wanted: Sequence[Tensor], alone: Sequence[Tensor]) -> dict[str, Any]:
    """The error of each tensor [B, S, H, D] over that of one call, and the greatest of the four."""
    try:
        found = run()
    except RuntimeError as error:  # of one kernel: the others are asked all the same
        return {"ratio": None, "raised": f"{type(error).__name__}: {error}".splitlines()[0]}

    def over_size(tensors: Sequence[Tensor]) -> list[float]:
        pairs = zip(tensors, wanted, strict=True)
        return [float((each.double() - right).norm() / right.norm()) for each, right in pairs]

    errors, errors_alone = over_size(found), over_size(alone)
    over = [mine / max(its, 1e-30) for mine, its in zip(errors, errors_alone, strict=True)]
    # `max` passes over a NaN that does not come first.
    worst = next((each for each in over if each != each), max(over))
    return {"ratio": worst, "errors": dict(zip(TENSORS, errors, strict=True)), "error": max(errors)}


# ---- times


def measure_times(options: Any, device: torch.device) -> list[dict[str, Any]]:
    """Forward and backward of each kernel that can take the call, in turn."""
    rows = []
    for dtype in options.dtypes:
        q, k, v, grad = inputs(options, dtype, device)
        problem, scores = Problem.of(q, k, v, None), Scores(q.size(-1) ** -0.5)
        able = [each for each in KERNELS if not each.refuses(problem)]

        def step(kernel: Kernel, q: Tensor = q, k: Tensor = k, v: Tensor = v, grad: Tensor = grad) -> None:
            out, lse = kernel.forward(q, k, v, scores)  # noqa: B023 - called before the next dtype
            kernel.backward(grad, q, k, v, out, lse, scores)  # noqa: B023

        # Several calls, so that the host asks for one while the device computes another.
        calls = 10 if device.type == "cuda" else 1
        turns = {each.name: partial(harness.time_ms, partial(step, each), device, calls) for each in able}
        times = harness.take_turns(turns, options.rounds)
        chosen, fastest = explain_kernel(q, k, v).kernel.name, min(times, key=lambda name: min(times[name]))
        for name, values in times.items():
            row = {"case": f"{str(dtype).removeprefix('torch.')}, {name}", "time_ms": harness.spread(values)}
            ratio = harness.ratios(times[chosen], times[fastest])["median"] if name == chosen else None
            rows.append(row | {"chosen": name == chosen, "ratio": ratio})
    return rows


def make_claims(
    errors: Sequence[Mapping[str, Any]], times: Sequence[Mapping[str, Any]], on_cuda: bool
) -> list[dict[str, Any]]:
    """Of each case; one that raised is no number, and does not hold."""
    found = []
    for row in errors:
        ratio = float("nan") if row["ratio"] is None else row["ratio"]
        found.append(make_claim(f"error over one call's: {row['case']}", ratio, "at most", MOST_ERROR))
    for row in (each for each in times if each["chosen"]):
        what = f"time of the chosen kernel over the fastest: {row['case']}"
        found.append(make_claim(what, row["ratio"] if on_cuda else None, "at most", MOST_TIME))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """0; claims that do not hold are printed and stored."""
    parser = harness.make_parser("blockwise", __doc__, rounds=7)
    parser.add_argument("--tokens", type=int, help="length of the sequence (240; 4096 on CUDA)")
    parser.add_argument("--heads", type=int, help="default: 4; 12 on CUDA")
    parser.add_argument("--head-dim", type=int, help="default: 16; 128 on CUDA")
    parser.add_argument("--simulate", type=int, nargs="+", default=[2, 3, 4, 8], help="numbers of ranks")
    usual: Mapping[str, Mapping[str, Any]] = {
        "cpu": {"tokens": 240, "heads": 4, "head_dim": 16},
        "cuda": {"tokens": 4096, "heads": 12, "head_dim": 128},
        "quick": {"tokens": 60, "heads": 3, "head_dim": 8, "rounds": 2, "simulate": [2, 3]},
    }
    options = harness.parse_options(parser, arguments, usual)
    device = torch.device(options.device)
    options.dtypes = [torch.bfloat16, torch.float32]
    report, errors, on_cuda = Report(options, simulated=True), list[dict[str, Any]](), device.type == "cuda"
    report.result["errors"] = errors
    columns = {"case": "case", "over one call": "ratio", "error": "error", "": "raised"}
    try:
        for row in measure_errors(options, device):
            errors.append(row)
            report.result["claims"] = make_claims(errors, [], on_cuda)
    finally:
        # A kernel that fails may take the device with it; what was found before is kept.
        report.show(make_table("Ranks simulated on one device: errors over one call's", columns, errors))
    times = measure_times(options, device) if not options.only else []
    report.result |= {"times": times, "claims": make_claims(errors, times, on_cuda)}
    report.result["note"] = None if on_cuda else "the times say nothing about a GPU"
    columns = {"case": "case", "ms": "time_ms", "chosen": "chosen", "over the fastest": "ratio"}
    report.show(make_table("Forward and backward of one block, by kernel", columns, times))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
