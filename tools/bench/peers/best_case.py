"""The shortest code that could do it, when nothing needs checking: about 20 lines each.

It is what one would write for sizes that divide, no mask, no causality, one dtype and a CPU. Ours, which takes
everything, is to be nearly as fast.

    Ulysses   stack q, k, v; permute; contiguous; one `all_to_all_single`; torch's flash kernel; the way back likewise
    ring      `isend` and `irecv` of [k, v] to the next rank while the kernel works on what is here; parts are merged
              by their log-sum-exps; in backward [dk, dv] follow the keys, one step behind

B batch, S sequence, H heads, D head dim, P ranks, N tensors that travel together.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import World
from torch import Tensor

from peers import ours
from peers.side import Attention, Problem, Side, cpu_flash, cpu_flash_backward


class BestUlysses(torch.autograd.Function):
    """Tokens are exchanged for heads: this rank attends over all tokens with H/P heads."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        """q, k, v: [B, S/P, H, D] → [B, S/P, H, D]."""
        ctx.group = group
        q, k, v = _exchange(torch.stack((q, k, v)), group)
        out, lse = cpu_flash(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return _exchange(out[None], group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = _exchange(grads[0][None], ctx.group)
        gradients = cpu_flash_backward(grad, *ctx.saved_tensors)
        return (*_exchange(torch.stack(gradients), ctx.group), None)


def _exchange(tensors: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Tokens for heads, [N, B, S/P, H, D] → [N, B, H/P, S, D], and likewise heads for tokens: dims 2 and 3 swap."""
    send = tensors.unflatten(3, (group.size(), -1)).permute(3, 0, 1, 4, 2, 5)
    received = torch.empty(send.shape, dtype=send.dtype)  # [P, N, B, H/P, S/P, D]
    dist.all_to_all_single(received, send.contiguous(), group=group)
    return received.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)


class BestRing(torch.autograd.Function):
    """Keys and values travel past every rank; every rank keeps its queries."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        """q, k, v: [B, S/P, H, D] → [B, S/P, H, D]."""
        ctx.group, kv, q = group, torch.stack((k, v)), q.transpose(1, 2)
        for step in range(group.size()):
            arriving, transfers = _pass_on(kv, group) if step < group.size() - 1 else (kv, [])
            part, part_lse = cpu_flash(q, *kv.transpose(2, 3))  # [B, H, S/P, D], [B, H, S/P]
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
        group, grad, kv = ctx.group, grads[0].transpose(1, 2), torch.stack((k, v))
        # A block's gradient starts one rank after its owner, follows the block, and ends at the owner after P−1 hops.
        travelling, leaving = None, list[Any]()
        for step in range(group.size()):
            arriving, transfers = _pass_on(kv, group) if step < group.size() - 1 else (kv, [])
            parts = cpu_flash_backward(grad, q, *kv.transpose(2, 3), out, lse)
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
    """`tensor` goes to the next rank; what the last rank sends is here once both transfers are waited for."""
    arriving = torch.empty(tensor.shape, dtype=tensor.dtype)
    sent = dist.isend(tensor, group=group, group_dst=(group.rank() + 1) % group.size())
    received = dist.irecv(arriving, group=group, group_src=(group.rank() - 1) % group.size())
    return arriving, [sent, received]


def _wait(transfers: list[Any]) -> None:
    for transfer in transfers:
        transfer.wait()


def _make(world: World, problem: Problem, mask: Tensor | None, function: Any) -> Attention:
    on_cuda = world.device.type == "cuda"
    if on_cuda or problem.queries % world.num_ranks or problem.heads % world.num_ranks:
        raise ValueError(
            "the best case is written for a CPU and for sizes that divide by the number of ranks"
        )
    return Attention(lambda q, k, v: function.apply(q, k, v, world.group))


def _side(name: str, function: Any, beside: str) -> Side:
    make = partial(_make, function=function)
    return Side(name, make, kind="best case", offers=frozenset(), beside=beside)


SIDES = (
    _side("best case ulysses", BestUlysses, ours.ULYSSES),
    _side("best case ring", BestRing, ours.RING),
)
