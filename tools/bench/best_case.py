"""How near our attention over ranks comes to the shortest code that could do it, when nothing needs checking.

The best case is what one would write for sizes that divide, no mask, no causality and one dtype: about 20 lines each.

    Ulysses   stack q, k, v; permute; contiguous; one `all_to_all_single`; torch's flash kernel; the way back likewise
    ring      `isend` and `irecv` of [k, v] to the next rank while the kernel works on what is here; parts are merged
              by their log-sum-exps; in backward [dk, dv] follow the keys one step behind

Claim: ours, given `splits=` and `kv_splits=`, takes at most 1.05 times the best case, forward and backward, at
S·H·D = 2048·8·64, 256·8·32 and 64·4·16 on two gloo ranks. Before the clock starts, the output and the gradients of
both sides are compared with full attention on one device.

    python tools/bench/best_case.py                      both kinds, three sizes, about a minute
    python tools/bench/best_case.py --only ring --rounds 41 --output best.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

SIZES = ((2048, 8, 64), (256, 8, 32), (64, 4, 16))
LEAST_MS = 20.0
"""Of one turn: a call that is shorter is repeated."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class BestUlysses(torch.autograd.Function):
    """Tokens are exchanged for heads: this rank attends over all tokens with H/P heads.

    B batch, S sequence, H heads, D head dim, P ranks.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        """q, k, v: [B, S/P, H, D] → [B, S/P, H, D]."""
        ctx.group = group
        q, k, v = _tokens_to_heads(torch.stack((q, k, v)), group)
        out, lse = _flash(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return _heads_to_tokens(out[None], group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = _tokens_to_heads(grads[0][None], ctx.group)
        gradients = _flash_backward(grad, *ctx.saved_tensors, 0.0, False)
        return (*_heads_to_tokens(torch.stack(gradients), ctx.group), None)


def _tokens_to_heads(tensors: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, B, S/P, H, D] → [N, B, H/P, S, D]."""
    num, batch, tokens, heads, head_dim = tensors.shape
    ranks = group.size()
    send = tensors.view(num, batch, tokens, ranks, heads // ranks, head_dim).permute(3, 0, 1, 4, 2, 5)
    received = torch.empty(send.shape, dtype=send.dtype)  # [P, N, B, H/P, S/P, D]
    dist.all_to_all_single(received, send.contiguous(), group=group)
    return received.permute(1, 2, 3, 0, 4, 5).reshape(num, batch, heads // ranks, ranks * tokens, head_dim)


def _heads_to_tokens(tensors: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, B, H/P, S, D] → [N, B, S/P, H, D]."""
    num, batch, heads, tokens, head_dim = tensors.shape
    ranks = group.size()
    send = tensors.view(num, batch, heads, ranks, tokens // ranks, head_dim).permute(3, 0, 1, 4, 2, 5)
    received = torch.empty(send.shape, dtype=send.dtype)  # [P, N, B, S/P, H/P, D]
    dist.all_to_all_single(received, send.contiguous(), group=group)
    return received.permute(1, 2, 3, 0, 4, 5).reshape(num, batch, tokens // ranks, ranks * heads, head_dim)


class BestRing(torch.autograd.Function):
    """Keys and values travel past every rank; every rank keeps its queries."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        """q, k, v: [B, S/P, H, D] → [B, S/P, H, D]."""
        ctx.group = group
        kv = torch.stack((k, v))
        q = q.transpose(1, 2)
        for step in range(group.size()):
            arriving, transfers = _pass_on(kv, group) if step < group.size() - 1 else (kv, [])
            part, part_lse = _flash(q, *kv.transpose(2, 3))  # [B, H, S/P, D], [B, H, S/P]
            if step == 0:
                out, lse = part, part_lse
            else:
                out = out - torch.sigmoid(part_lse - lse)[..., None] * (out - part)
                lse = lse - torch.nn.functional.logsigmoid(lse - part_lse)
            _wait(transfers)
            kv = arriving
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        group, grad = ctx.group, grads[0].transpose(1, 2)
        kv = torch.stack((k, v))
        # A block's gradient starts one rank after its owner, follows the block, and ends at the owner after P−1 hops.
        travelling, leaving = None, []
        for step in range(group.size()):
            arriving, transfers = _pass_on(kv, group) if step < group.size() - 1 else (kv, [])
            parts = _flash_backward(grad, q, *kv.transpose(2, 3), out, lse, 0.0, False)
            dkv = torch.stack(parts[1:])  # [2, B, H, S/P, D]
            if step == 0:
                dq, own = parts[0], dkv
            else:
                _wait(leaving)
                dq = dq + parts[0]
                travelling, leaving = _pass_on(dkv if travelling is None else travelling + dkv, group)
            _wait(transfers)
            kv = arriving
        _wait(leaving)
        dk, dv = (own if travelling is None else own + travelling).transpose(2, 3)
        return dq.transpose(1, 2), dk, dv, None


def _pass_on(tensor: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[Any]]:
    """What the last rank sends, once both transfers are waited for. `tensor` goes to the next rank."""
    arriving = torch.empty(tensor.shape, dtype=tensor.dtype)
    sent = dist.isend(tensor, group=group, group_dst=(group.rank() + 1) % group.size())
    received = dist.irecv(arriving, group=group, group_src=(group.rank() - 1) % group.size())
    return arriving, [sent, received]


def _wait(transfers: list[Any]) -> None:
    for transfer in transfers:
        transfer.wait()


# ---- the comparison

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def sides(kind: str, tokens: int, group: dist.ProcessGroup) -> dict[str, Attention]:
    """The best case and ours, by name."""
    from opensora_accel.attention import ring_attention, ulysses_attention

    best = BestUlysses if kind == "ulysses" else BestRing
    ours = ulysses_attention if kind == "ulysses" else ring_attention
    splits = [tokens // group.size()] * group.size()
    return {
        "best": lambda q, k, v: best.apply(q, k, v, group),
        "ours": lambda q, k, v: ours(q, k, v, group, splits=splits, kv_splits=splits),
    }


def compare(kind: str, size: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Times of one kind at one size, and the gradient error of both sides."""
    group = dist.group.WORLD
    assert group is not None
    tokens, heads, head_dim = size
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, tokens, heads, head_dim, generator=generator) for _ in "qkvg"]
    expected = _full_attention(*whole)
    q, k, v, grad = (tensor.chunk(group.size(), 1)[group.rank()].contiguous() for tensor in whole)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    attentions = sides(kind, tokens, group)

    def forward_backward(name: str) -> list[Tensor]:
        out = attentions[name](*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    errors = {}
    for name in attentions:
        parts = [tensor.chunk(group.size(), 1)[group.rank()] for tensor in expected]
        pairs = zip(forward_backward(name), parts, strict=True)
        error = max(float((found - part).abs().max() / part.abs().max()) for found, part in pairs)
        errors[name] = _largest(error)
        assert errors[name] < 2e-5, f"{name} {kind} {size}: an error of {errors[name]:.1e}"

    def turn(name: str, calls: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            forward_backward(name)
        return (time.perf_counter() - start) * 1e3 / calls

    turn("ours", 3)
    calls = max(1, round(LEAST_MS / _largest(turn("ours", 3))))
    times: dict[str, list[float]] = {name: [] for name in attentions}
    for number in range(-2, rounds):
        for name in sorted(attentions, reverse=number % 2 == 0):
            elapsed_ms = _largest(turn(name, calls))
            if number >= 0:
                times[name].append(elapsed_ms)
    ratios = [best / ours for best, ours in zip(times["best"], times["ours"], strict=True)]
    return {
        "kind": kind,
        "size": size,
        "calls": calls,
        "errors": errors,
        "best_ms": quartiles(times["best"]),
        "ours_ms": quartiles(times["ours"]),
        "best_over_ours": quartiles(ratios),
    }


def _full_attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", leaves[0], leaves[1]) / q.size(-1) ** 0.5
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), leaves[2])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _largest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def quartiles(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": low, "q3": high}


def run_rank(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", arguments.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    results = []
    for kind in ("ulysses", "ring"):
        for size in SIZES:
            if arguments.only in kind:
                found = compare(kind, size, arguments.rounds)
                results.append(found)
                if rank == 0:
                    shown = [found["best_ms"], found["ours_ms"], found["best_over_ours"]]
                    cells = [f"{s['median']:8.3f} [{s['q1']:.3f}, {s['q3']:.3f}]" for s in shown]
                    print(
                        f"{kind:<8} {'·'.join(map(str, size)):<10}", *(f"{c:<28}" for c in cells), flush=True
                    )
    if rank == 0 and arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default: 2)")
    parser.add_argument("--rounds", type=int, default=21, help="timed turns of each side (default: 21)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kinds whose name holds TEXT")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all figures here, as JSON")
    arguments = parser.parse_args()
    if arguments.ranks not in (2, 4):
        parser.error(f"--ranks must be 2 or 4, which divide all tokens and heads; got {arguments.ranks}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{'kind':<8} {'S·H·D':<10} {'best ms':<28} {'ours ms':<28} best / ours", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (arguments, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
