"""What fp64 does not show: sums and casts in a narrower type than the one that they are meant for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications import gather_forward_reduce_scatter_backward
from opensora_accel.observe.meshes import Run
from tests.published.bug import Bug
from tests.published.models import SEQUENCE, attend_over_ranks, batches, own_tokens
from tests.verify.loops import averaged, finish
from tests.verify.steps import OneLayer


def merged_in_bf16(model: OneLayer, run: Run, is_wrong: bool) -> Tensor:
    """A ring casts what it has attended so far to bf16 after each hop and back before the next: it rounds once for
    each rank."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = run.mesh.get_group("sequence")
        k, v = (gather_forward_reduce_scatter_backward(each, group, 1) for each in (k, v))
        out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf)
        for keys, values in zip(k.chunk(group.size(), 1), v.chunk(group.size(), 1), strict=True):
            scores = torch.einsum("bshd,bthd->bsht", q, keys) / q.size(-1) ** 0.5
            total = torch.logaddexp(lse, scores.logsumexp(-1))
            weights = (scores - total[..., None]).exp()
            out = out * (lse - total).exp()[..., None] + torch.einsum("bsht,bthd->bshd", weights, values)
            out, lse = out.bfloat16().to(q.dtype) if is_wrong else out, total
        return out

    return attend_over_ranks(model, run, attend)


def weights_of_the_step_before(model: Any, run: Run, is_wrong: bool) -> dict[str, Any]:
    """One autocast stands around several steps of the optimizer, and keeps the weights that it has cast until it
    ends: from the second step on the model computes with old ones."""
    forward, losses = averaged(model, run), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autocast, nothing = torch.autocast("cpu", torch.bfloat16), nullcontext()
    with autocast if is_wrong else nothing:
        for number, x in enumerate(batches(3)):
            optimizer.zero_grad()
            with nothing if is_wrong else autocast:
                loss = forward(x).square().mean()
            losses[f"loss {number}"] = loss
            loss.backward()
            optimizer.step()
    return losses


def summed_in_bf16(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """Gradients are summed over the ranks of a sequence in the bf16 in which they come: the norm of the sum drifts
    away from the one that a single rank has."""
    loss = finish(model(own_tokens(torch.randn(2, 12, 4), run)))
    for parameter in () if run.is_reference else model.parameters():
        sent = parameter.grad.bfloat16() if is_wrong else parameter.grad.clone()
        dist.all_reduce(sent)
        parameter.grad.copy_(sent / run.world_size)
    return loss


IN_FP64 = "in fp64 casts are lifted"

BUGS = [
    Bug(
        "Dao-AILab/flash-attention", 2723, 2026, merged_in_bf16, IN_FP64, "rounding", ("sequence",), model_fn=OneLayer,
        meshes=SEQUENCE, tool="bf16",
    ),
    Bug(
        "X-GenGroup/Flow-Factory", 186, 2026, weights_of_the_step_before,
        "autocast keeps no weight that is fp64 or bf16", "values", tool="bf16",
    ),
    Bug(
        "deepspeedai/DeepSpeed", 4530, 2023, summed_in_bf16, IN_FP64, "rounding", ("data", "sequence"),
        meshes=SEQUENCE, tool="bf16",
    ),
]  # fmt: skip
