"""Sums that are missing, over other ranks than meant, or put together in another order."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

from opensora_accel.attention import local_attention
from opensora_accel.communications import (
    all_to_all,
    copy_forward_reduce_backward,
    gather_forward_reduce_scatter_backward,
    gather_forward_split_backward,
    reduce_forward_copy_backward,
    reduce_scatter_forward_gather_backward,
)
from opensora_accel.observe.meshes import Run
from tests.published.bug import Bug
from tests.published.models import SEQUENCE, Adapted, add_up, attend_over_ranks, three_key_heads
from tests.verify.by_hand import RingByHand
from tests.verify.loops import average, averaged, averaged_over_data_only, batch, finish, sequence_parallel
from tests.verify.meshes import RING, TENSOR
from tests.verify.parted_loops import Experts, Megatron, megatron_slices
from tests.verify.steps import CHANNELS, OneLayer


def averaged_by_data_ranks_only(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """DDP is given the group of the data ranks; the ranks that share a sequence each keep the gradient of their own
    tokens."""
    return (averaged_over_data_only if is_wrong else sequence_parallel)(model, run)


def adapter_of_own_tokens(model: Adapted, run: Run, is_wrong: bool) -> dict[str, Any]:
    """Of the adapter of a row-parallel layer the second factor is whole on every tensor rank and sees that rank's
    tokens only; its gradient is never summed over these ranks."""
    x = batch()
    if run.is_reference:
        return {"loss": finish(model(x))}
    group = run.mesh.get_group("tensor")
    mine = torch.arange(4).tensor_split(group.size())[group.rank()]

    def rows(layer: nn.Linear) -> Tensor:  # this rank's columns, all ranks' sum, this rank's tokens
        return reduce_scatter_forward_gather_backward(F.linear(x[..., mine], layer.weight[:, mine]), group, 1)

    out = rows(model.base) + model.base.bias + model.up(rows(model.down))
    loss = finish(gather_forward_split_backward(out, group, 1))
    add_up([model.down.weight] if is_wrong else model.adapters(), run, "tensor")
    average(model.adapters(), run.mesh.get_group("data"))
    return {
        "loss": loss,
        "gradients": {"down.weight": model.down.weight.grad, "up.weight": model.up.weight.grad},
    }


def adapter_behind_fsdp(model: Adapted, run: Run, is_wrong: bool) -> Tensor:
    """Adapters that come when the layers are sharded already are in no group of FSDP: nobody averages their
    gradients."""
    if run.is_reference:
        return finish(model(batch()))
    fully_shard(model.base, mesh=run.mesh["data"])
    loss = finish(model(batch()))
    if not is_wrong:
        average(model.adapters())
    return loss


class _ColumnParallel(torch.autograd.Function):
    """y = xWᵀ for this rank's rows of W and all ranks' tokens x [S/P, I]; its backward gathers x again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any, is_wrong: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.is_wrong = group, is_wrong
        whole = x.new_empty(group.size() * x.size(0), x.size(1))
        dist.all_gather_into_tensor(whole, x.contiguous(), group)
        return whole @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        size = ctx.group.size()
        stacked = x.new_empty(size * x.size(1), x.size(0))  # [P·I, S/P]
        dist.all_gather_into_tensor(stacked, x.T.contiguous(), ctx.group)
        transposed = stacked.view(x.size(1), -1) if ctx.is_wrong else torch.cat(stacked.chunk(size), 1)
        of_x = grad @ weight
        dist.all_reduce(of_x, group=ctx.group)
        return of_x.chunk(size)[ctx.group.rank()], (transposed @ grad).T, None, None


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.columns = nn.Linear(4, 6), nn.Linear(6, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.columns(self.embed(x))


def stacked_where_concatenated(model: Columns, run: Run, is_wrong: bool) -> Tensor:
    """The backward of a sequence-parallel layer gathers its transposed input along the last dim, but the collective
    stacks what ranks send along the first one, and the buffer is read as if it had not."""
    x = torch.randn(12, 4)
    if run.is_reference:
        return finish(model(x))
    group = run.mesh.get_group("tensor")
    hidden = model.embed(x.chunk(group.size())[group.rank()])
    rows = torch.arange(12).tensor_split(group.size())[group.rank()]
    out = _ColumnParallel.apply(hidden, model.columns.weight[rows], group, is_wrong)
    loss = out.square().sum() / (12 * 12)
    loss.backward()
    add_up(model.parameters(), run)
    return loss


class _Gathered(torch.autograd.Function):
    """Every rank's tensor, as torch.distributed.nn gives it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, is_wrong: bool) -> tuple[Tensor, ...]:
        ctx.group, ctx.is_wrong = group, is_wrong
        gathered = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(gathered, x.contiguous(), group)
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        buffer = torch.zeros_like(grads[ctx.group.rank()])  # which has the layout of what it is like
        filled = buffer.contiguous()
        dist.reduce_scatter(filled, [grad.contiguous() for grad in grads], group=ctx.group)
        return buffer if ctx.is_wrong else filled, None, None


def gathered_into_a_copy(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """The backward of an all-gather hands a buffer to a reduce-scatter, which fills a contiguous copy of it where the
    gradients are not contiguous; the buffer itself is returned, as empty as it was."""
    x = torch.randn(2, 12, 4)
    if run.shape.degree("sequence") > 1:
        group = run.mesh.get_group("sequence")

        def leave(hidden: Tensor) -> Tensor:  # gathered as [S, B, C], as many models have it
            whole = _Gathered.apply(hidden.transpose(0, 1).contiguous(), group, is_wrong)
            return torch.cat([each.transpose(0, 1) for each in whole], 1)

        model.region = (lambda hidden: hidden.chunk(group.size(), 1)[group.rank()], leave)
    forward = averaged(model, run)
    return finish(forward(x))


def rms(k: Tensor) -> Tensor:
    """The reciprocal of the root of the mean square, for each token and head."""
    return (k.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class _NormedKeys(torch.autograd.Function):
    """k · rms(k) · w [B, S/P, H, D] → all-to-all → [B, S, H/P, D], with a backward by hand."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, weight: Tensor, group: Any, is_wrong: bool) -> Tensor:
        ctx.save_for_backward(k, weight)
        ctx.group, ctx.is_wrong = group, is_wrong
        return all_to_all(k * rms(k) * weight, group, 2, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        k, weight = ctx.saved_tensors
        collected = all_to_all(grad, ctx.group, 1, 2)
        # As it has come from the kernel: it has as many numbers as this rank's tokens of all heads, not the same.
        given = grad.reshape(k.shape) if ctx.is_wrong else collected
        normed = k * rms(k)
        of_weight = (given * normed).sum((0, 1, 2))
        scaled = given * weight
        of_k = rms(k) * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return collected if ctx.is_wrong else of_k, of_weight, None, None


class WithNormedKeys(OneLayer):
    def __init__(self) -> None:
        super().__init__(heads=6)
        self.scale = nn.Parameter(torch.randn(CHANNELS // 6))
        self.attend = lambda q, k, v: local_attention(q, k * rms(k) * self.scale, v)


def norm_before_its_gradient_is_there(model: WithNormedKeys, run: Run, is_wrong: bool) -> Tensor:
    """In Ulysses that overlaps its all-to-alls, the backward of the keys' norm runs on the gradient that has not been
    collected yet, and what is collected afterwards takes the place of its result."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = run.mesh.get_group("sequence")
        k = _NormedKeys.apply(k, model.scale, group, is_wrong)
        out = local_attention(all_to_all(q, group, 2, 1), k, all_to_all(v, group, 2, 1))
        return all_to_all(out, group, 1, 2)

    return attend_over_ranks(model, run, attend)


def keys_of_the_first_hop(model: OneLayer, run: Run, is_wrong: bool) -> Tensor:
    """Keys and values go round the ring again in backward, but each hop computes with those that forward has saved,
    and it saved them in its first hop only: the rank's own."""
    return RingByHand("the keys of the first hop" if is_wrong else "", tokens=12)(model, run)


def gathered_along_the_heads(model: OneLayer, run: Run, is_wrong: bool) -> Tensor:
    """Keys and values are gathered along the dim that held the sequence before they were transposed: each rank
    attends to its own tokens only, by heads of all ranks, which fit where queries have more heads than keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group, dim = run.mesh.get_group("sequence"), 2 if is_wrong else 1
        return local_attention(
            q, *(gather_forward_reduce_scatter_backward(each, group, dim) for each in (k, v))
        )

    return attend_over_ranks(model, run, attend)


def gradient_that_is_called_whole(model: Megatron, run: Run, is_wrong: bool) -> Tensor:
    """What enters a column-parallel layer leaves DTensor by `to_local()`, without a word on its gradient: the part of
    it that each rank has counts as the whole, and nothing is summed."""

    def enter(x: Tensor) -> Tensor:
        placements = None if is_wrong else [Partial()]
        replicated = DTensor.from_local(x, run.mesh["tensor"], [Replicate()])
        return replicated.to_local(grad_placements=placements)

    if not run.is_reference:
        model.enter = enter
    return megatron_slices(model, run, is_summed=False)


def experts_of_each_rank(model: Experts, run: Run) -> None:
    """Every rank of `ep` has a few experts, and the sum of what all of them say."""
    group = run.mesh.get_group("ep")
    model.own = torch.arange(6).chunk(group.size())[group.rank()].tolist()
    model.leave = lambda x: reduce_forward_copy_backward(x, group)


def router_of_own_experts(model: Experts, run: Run, is_wrong: bool) -> Tensor:
    """The router is whole on every rank, and the experts that it weighs are not: what comes back to it is a part of
    its gradient, which nobody sums, so that its copies drift apart from the first step on."""
    x = batch()
    if not run.is_reference:
        experts_of_each_rank(model, run)
        group = run.mesh.get_group("ep")
        # The router's weights are what `enter` meets first, the tokens come second.
        model.enter = lambda each: each if is_wrong else copy_forward_reduce_backward(each, group)
    loss = finish(model(x))
    if not run.is_reference:
        average([p for p in model.parameters() if p.grad is not None], run.mesh.get_group("data"))
    return loss


class _Detached(torch.autograd.Function):
    """A plain all-gather along the batch: torch knows of no gradient of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        gathered = x.new_empty(group.size() * x.size(0), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group)
        ctx.mark_non_differentiable(gathered)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def router_behind_a_plain_gather(model: Experts, run: Run, is_wrong: bool) -> Tensor:
    """Tokens are gathered by a collective that has a gradient, and the probabilities of the router by one that has
    none: the loss no longer reaches the router."""
    x = batch()
    if not run.is_reference:
        group = run.mesh.get_group("ep")
        experts_of_each_rank(model, run)
        model.leave = lambda x: reduce_scatter_forward_gather_backward(x, group, 0)

        def enter(each: Tensor) -> Tensor:
            is_of_router = each.size(-1) == 6
            if is_wrong and is_of_router:
                return _Detached.apply(each, group)
            return gather_forward_reduce_scatter_backward(each, group, 0)

        model.enter = enter
    loss = finish(model(x))
    for parameter in () if run.is_reference else model.parameters():
        is_expert = any(parameter is each for each in model.experts.parameters())
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=run.mesh.get_group("data") if is_expert else None)
            parameter.grad /= run.world_size
    return loss


def adapters_by_the_ranks_own_seed(model: Adapted, run: Run, is_wrong: bool) -> Tensor:
    """Adapters that several expert ranks share are drawn by a generator that each of these ranks seeds differently;
    summed gradients keep the copies as far apart as they began."""
    if not run.is_reference and is_wrong:
        own = torch.Generator().manual_seed(run.rank)
        for parameter in model.adapters():
            nn.init.normal_(parameter, generator=own)
    loss = finish(model(batch()))
    if not run.is_reference:
        average(model.adapters())
    return loss


EXPERTS = ({"data": 2, "ep": 2}, {"data": 1, "ep": 3})
SLICES = ({"data": 2, "tensor": 2}, {"data": 1, "tensor": 4})
A_GRADIENT = "forward and loss are right to the last digit"

BUGS = [
    Bug(
        "ByteDance-Seed/VeOmni", 1115, 2026, averaged_by_data_ranks_only,
        "with one data rank, nothing is averaged at all", "missing sum", ("sequence",), meshes=SEQUENCE,
    ),
    Bug(
        "modelscope/mcore-bridge", 173, 2026, adapter_of_own_tokens, "only rank 0's copy is saved", "missing sum",
        ("tensor",), model_fn=Adapted, meshes=TENSOR,
    ),
    Bug(
        "hao-ai-lab/FastVideo", 1666, 2026, adapter_behind_fsdp, "the base model is frozen and right", "missing sum",
        ("data",), model_fn=Adapted,
    ),
    Bug(
        "NVIDIA/TransformerEngine", 530, 2023, stacked_where_concatenated, A_GRADIENT, "values", ("tensor",),
        model_fn=Columns, meshes=TENSOR,
    ),
    Bug(
        "pytorch/pytorch", 120386, 2024, gathered_into_a_copy, "with contiguous gradients it is right", "values",
        ("sequence",), meshes=SEQUENCE,
    ),
    Bug(
        "ByteDance-Seed/VeOmni", 419, 2026, norm_before_its_gradient_is_there, A_GRADIENT, "values", ("sequence",),
        model_fn=WithNormedKeys, meshes=SEQUENCE,
    ),
    Bug(
        "huggingface/diffusers", 14265, 2026, keys_of_the_first_hop, A_GRADIENT, "values", ("ring",),
        model_fn=OneLayer, meshes=RING,
    ),
    Bug(
        "pytorch/torchtitan", 3206, 2026, gathered_along_the_heads, "with as many heads for keys it fails", "values",
        ("sequence",), model_fn=three_key_heads, meshes=({"data": 2, "sequence": 2}, {"data": 1, "sequence": 4}),
    ),
    Bug(
        "pytorch/torchtitan", 4054, 2026, gradient_that_is_called_whole, A_GRADIENT, "values", ("tensor",),
        model_fn=Megatron, meshes=SLICES, was_read=False,
    ),
    Bug(
        "pytorch/torchtitan", 2387, 2026, router_of_own_experts, A_GRADIENT, "missing sum", ("ep",),
        model_fn=Experts, meshes=EXPERTS,
    ),
    Bug(
        "NVIDIA-NeMo/Automodel", 2995, 2026, router_behind_a_plain_gather, A_GRADIENT, "missing gradient", ("ep",),
        model_fn=Experts, meshes=EXPERTS, data_axes=("data", "ep"),
    ),
    Bug(
        "NVIDIA-NeMo/Megatron-Bridge", 5396, 2026, adapters_by_the_ranks_own_seed,
        "every copy trains, from its own start", "weights", ("ep",), model_fn=Adapted, meshes=EXPERTS,
        data_axes=("data", "ep"),
    ),
]  # fmt: skip
