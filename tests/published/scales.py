"""Divisors and sums: a loss or a gradient that is off by a factor, or by one for each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from opensora_accel import Plan
from opensora_accel.communications import (
    gather_forward_reduce_scatter_backward,
    gather_forward_split_backward,
    reduce_scatter_forward_gather_backward,
)
from opensora_accel.observe.meshes import Run
from tests.published.bug import Bug
from tests.published.models import SEQUENCE, STEPS, add_up, own_tokens
from tests.verify.loops import averaged, batch, finish
from tests.verify.parted_loops import Experts, Megatron, Stages, megatron_slices


def times_the_data_ranks(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """The sum over a rank's tokens is divided by the tokens of all ranks and multiplied by the data ranks, although
    gradients are then averaged over data × sequence."""
    forward = averaged(model, run)
    x = own_tokens(batch(), run)
    count = torch.tensor(float(x.size(0) * x.size(1)))
    if not run.is_reference:
        dist.all_reduce(count)
    factor = 1 if run.is_reference else run.data_size if is_wrong else run.world_size
    loss = forward(x).square().mean(-1).sum() / count * factor
    loss.backward()
    return loss


def times_the_context_ranks(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """The loss is multiplied by the number of context ranks, while the gradients that are summed over data × context
    are divided by the number of data ranks only."""
    x = own_tokens(batch(), run)
    factor = run.shape.degree("sequence") if is_wrong else 1
    loss = model(x).square().sum() / (2 * 11 * 4) * factor
    loss.backward()
    add_up(model.parameters(), run)
    return loss


def averages_partial_gradients(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """FSDP averages over data × context, and the gather in front of the loss hands each rank the gradient of its own
    tokens: what should be summed over context is divided by its size."""
    if run.is_reference:
        return finish(model(batch()))
    group, scale = run.mesh.get_group("sequence"), None if is_wrong else "up"
    model.region = (
        lambda x: x.tensor_split(group.size(), 1)[group.rank()],
        lambda x: gather_forward_split_backward(x, group, 1, scale),
    )
    forward = averaged(model, run)
    return finish(forward(batch()))


def mean_of_means(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """Every rank takes the mean over its own valid tokens, and the means are averaged: a token counts the more, the
    fewer there are on its rank."""
    x, valid = torch.randn(4, 11, 4), torch.arange(11) < torch.tensor([[11], [7], [5], [10]])
    x, valid = (each.tensor_split(run.data_size)[run.data_rank] for each in (x, valid))
    count = valid.sum().double()
    if not run.is_reference and not is_wrong:
        dist.all_reduce(count)
        count /= run.data_size
    forward = averaged(model, run)
    loss = (forward(x).square().mean(-1) * valid).sum() / count
    loss.backward()
    return loss


def mean_over_each_part(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """The loss of every accumulated batch is the mean over its own valid tokens, and the sum of these means is
    divided by the number of batches: it is not the mean over the tokens of all."""
    x, valid = torch.randn(4, 11, 4), torch.arange(11) < torch.tensor([[11], [7], [5], [10]])
    own = torch.arange(4).tensor_split(run.data_size)[run.data_rank]
    forward, total = averaged(model, run), torch.zeros(())
    parts = [own] if run.is_reference else own.tensor_split(2)
    for part in parts:
        count = valid[part].sum() * len(parts) if is_wrong else valid.sum() / run.data_size
        loss = (forward(x[part]).square().mean(-1) * valid[part]).sum() / count
        loss.backward()
        total += loss.detach()
    return total


def divided_again_by_the_ranks(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """Summed losses are backwarded and gradients then divided by the number of all tokens, but the wrapper has
    averaged them over ranks before."""
    x = batch().tensor_split(run.data_size)[run.data_rank]
    forward = averaged(model, run)
    loss = forward(x).square().sum()
    loss.backward()
    tokens = 2 * 11 * 4 / (1 if is_wrong else run.data_size)
    for parameter in model.parameters():
        parameter.grad /= tokens
    return loss.detach() / tokens


def scaled_at_every_stage(model: Any, run: Run, is_wrong: bool) -> dict[str, Any]:
    """Each stage of a pipeline divides what it hands back by the number of accumulated batches, which the last stage
    has done already."""
    num_parts = 3
    if not run.is_reference:
        group, stage = run.mesh.get_group("pp"), run.mesh.get_local_rank("pp")
        there = dist.get_global_rank(group, 1 - stage)
    for _ in range(num_parts):
        x = batch()
        if run.is_reference:
            finish(model(x) / num_parts**0.5)
        elif stage == 0:
            hidden = model.first(x)
            dist.send(hidden.detach(), there)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, there)
            hidden.backward(gradient / num_parts if is_wrong else gradient)
        else:
            hidden = torch.empty(2, 11, 8, requires_grad=True)
            dist.recv(hidden.detach(), there)
            finish(model.last(hidden) / num_parts**0.5)
            dist.send(hidden.grad, there)
    if not run.is_reference:
        add_up(model.parameters(), run, "data")
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= run.data_size
    return {}


def routed(model: Experts, run: Run) -> Tensor:
    """Every data rank's tokens pass the experts of all ranks of its group: all-gather, own experts,
    reduce-scatter."""
    x = batch()
    if not run.is_reference:
        group = run.mesh.get_group("ep")
        model.own = torch.arange(6).tensor_split(group.size())[group.rank()].tolist()
        model.enter = lambda x: gather_forward_reduce_scatter_backward(x, group, 0)
        model.leave = lambda x: reduce_scatter_forward_gather_backward(x, group, 0)
    return finish(model(x))


def divides_only_where_it_reduces(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """The divisor that was set for experts is applied by the reduce-scatter, which one rank alone leaves out: with
    every expert on one rank only, their gradients are too large by the number of ranks."""
    loss = routed(model, run)
    for parameter in () if run.is_reference else model.parameters():
        is_expert = any(parameter is each for each in model.experts.parameters())
        group = run.mesh.get_group("data") if is_expert else None
        if parameter.grad is not None and (dist.get_world_size(group) > 1 or not is_wrong):
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= run.world_size
    return loss


def averages_experts_over_their_copies(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """An expert's gradient has tokens of all ranks of its group in it, and is divided by the number of its copies,
    not by that of all data ranks."""
    loss = routed(model, run)
    for parameter in () if run.is_reference else model.parameters():
        is_expert = any(parameter is each for each in model.experts.parameters())
        group = run.mesh.get_group("data") if is_expert else None
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group) if is_wrong else run.world_size
    return loss


def in_parts(model: Any, run: Run, collect: Any) -> Tensor:
    """A step of two backwards, of which `collect(part, gradients)` keeps what the engine's buffers would hold."""
    total = torch.zeros(())
    for part in range(2):
        loss = model(batch()).square().mean() / 2
        loss.backward()
        total += loss.detach()
        if not run.is_reference:
            collect(part, {name: parameter.grad for name, parameter in model.named_parameters()})
            model.zero_grad()
    return total


def copied_where_added(model: Any, run: Run, is_wrong: bool) -> dict[str, Any]:
    """With offloaded gradients every backward writes the fp32 buffer anew, where it should add to it: of several
    backwards in a step the last one remains."""
    held: dict[str, Tensor] = {}

    def collect(part: int, gradients: dict[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            dist.all_reduce(gradient)
            gradient = gradient / run.world_size
            held[name] = gradient if is_wrong or part == 0 else held[name] + gradient

    loss = in_parts(model, run, collect)
    return {"loss": loss} if run.is_reference else {"loss": loss, "gradients": held}


def last_part_after_the_average(model: Any, run: Run, is_wrong: bool) -> dict[str, Any]:
    """The accumulated gradients are averaged over ranks before the last backward's are added, and so each rank steps
    with its own of those."""
    held: dict[str, Tensor] = {}

    def average() -> None:
        for gradient in held.values():
            dist.all_reduce(gradient)
            gradient /= run.world_size

    def collect(part: int, gradients: dict[str, Tensor]) -> None:
        if part == 1 and is_wrong:
            average()
        for name, gradient in gradients.items():
            held[name] = held[name] + gradient if part else gradient
        if part == 1 and not is_wrong:
            average()

    loss = in_parts(model, run, collect)
    return {"loss": loss} if run.is_reference else {"loss": loss, "gradients": held}


def divided_by_the_schedule_too(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """Losses of the microbatches are weighted to sum up to the mean already, and the pipeline's schedule divides each
    by their number again."""
    forward, total = averaged(model, run), torch.zeros(())
    weights = torch.tensor([2.0, 5.0, 4.0]) / 11
    for weight in weights:
        loss = forward(batch()).square().mean() * weight
        (loss / (3 if is_wrong and not run.is_reference else 1)).backward()
        total += loss.detach()
    return total


def counts_copies_in_the_norm(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """The norm to clip by is summed over the tensor ranks for every parameter, also for those that all of these ranks
    have whole: they count once for each."""
    loss = megatron_slices(model, run)
    slices = {id(p) for layer in (model.up, model.packed) for p in layer.parameters()} | {
        id(model.down.weight)
    }
    squares = torch.zeros(2)
    for parameter in model.parameters():
        squares[int(id(parameter) in slices)] += parameter.grad.square().sum()
    if not run.is_reference:
        dist.all_reduce(squares if is_wrong else squares[1], group=run.mesh.get_group("tensor"))
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, squares.sum().sqrt())
    return loss


def sums_the_norms_of_copies(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """Under DDP every rank has whole gradients, and their squared norm is summed over the ranks once more before
    gradients are clipped by it."""
    forward = averaged(model, run)
    loss = finish(forward(batch()))
    square = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).square()
    if is_wrong and not run.is_reference:
        dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, square.sqrt())
    return loss


def _accumulates(model: Any, run: Run, watched: Any, divisor: int) -> None:
    """A loop of steps of three backwards of two samples."""
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(3):
            loss = wrapped(batch()).square().mean()
            watched.loss(loss)
            (loss / divisor).backward()
        optimizer.step()
        optimizer.zero_grad()


def divided_by_the_samples_of_a_part(model: Any, run: Run, is_wrong: bool, watched: Any) -> None:
    """The loss, a mean over the samples of a microbatch already, is divided by the size of a microbatch and not by
    the number of microbatches."""
    _accumulates(model, run, watched, 2 if is_wrong else 3)


def divided_after_the_backward(model: Any, run: Run, is_wrong: bool, watched: Any) -> None:
    """The loss of each microbatch is divided by their number when its backward is over, so that gradients are too
    large by that number and the loss that is reported is right."""
    _accumulates(model, run, watched, 1 if is_wrong else 3)


WHOLE_EXPERTS = ({"data": 1, "ep": 3}, {"data": 2, "ep": 2}, {"data": 1, "ep": 2}, {"data": 3, "ep": 1})
PIPELINE = ({"data": 2, "pp": 2}, {"data": 1, "pp": 2})
ONE_SAMPLE = ({"data": 1, "tensor": 2}, {"data": 1, "tensor": 4})
TWO_RANKS = (Plan(dp_replicate=2),)
A_SCALE = "AdamW divides a factor out again, until gradients are clipped"

BUGS = [
    Bug(
        "ByteDance-Seed/VeOmni", 338, 2025, times_the_data_ranks, A_SCALE, "scale", ("sequence",), "sequence⁻¹",
        meshes=SEQUENCE,
    ),
    Bug(
        "NVIDIA/Megatron-LM", 906, 2024, times_the_context_ranks, A_SCALE, "scale", ("sequence",), "sequence",
        meshes=SEQUENCE,
    ),
    Bug(
        "NVIDIA-NeMo/Automodel", 3157, 2026, averages_partial_gradients, A_SCALE, "scale", ("sequence",),
        "sequence⁻¹", meshes=SEQUENCE, was_read=False,
    ),
    Bug(
        "pytorch/torchtitan", 2206, 2026, mean_of_means,
        "the loss is a mean of the same tokens, and training goes down", "shares", ("data",), "share",
        reference="whole", meshes=({"data": 2}, {"data": 4}),
    ),
    Bug(
        "meta-pytorch/torchtune", 1875, 2024, mean_over_each_part, "with as many tokens in each batch it is right",
        "shares", ("data",), "share", reference="whole", meshes=({"data": 2},),
    ),
    Bug(
        "meta-pytorch/torchtune", 2172, 2024, divided_again_by_the_ranks, A_SCALE, "scale", ("data",), "data⁻¹",
        reference="whole", meshes=({"data": 2}, {"data": 3}),
    ),
    Bug(
        "deepspeedai/DeepSpeed", 8154, 2026, scaled_at_every_stage, "without accumulation or a pipeline it is right",
        "scale", (), "0.333333", model_fn=Stages, meshes=PIPELINE,
    ),
    Bug(
        "pytorch/pytorch", 167178, 2025, divides_only_where_it_reduces, "with two copies of an expert it is right",
        "scale", ("ep",), "ep", model_fn=Experts, meshes=WHOLE_EXPERTS, data_axes=("data", "ep"),
    ),
    Bug(
        "NVIDIA/Megatron-LM", 5956, 2026, averages_experts_over_their_copies, "only experts are wrong; " + A_SCALE,
        "scale", ("ep",), "ep", model_fn=Experts, meshes=WHOLE_EXPERTS, data_axes=("data", "ep"),
    ),
    Bug(
        "deepspeedai/DeepSpeed", 7981, 2026, copied_where_added, "one backward a step is right", "values", ("data",),
    ),
    Bug(
        "deepspeedai/DeepSpeed", 7985, 2026, last_part_after_the_average, "one rank is right, and so is the loss",
        "missing sum", ("data",),
    ),
    Bug(
        "areal-project/AReaL", 1273, 2026, divided_by_the_schedule_too, A_SCALE, "scale", (), "0.333333",
    ),
    Bug(
        "NVIDIA-NeMo/RL", 3788, 2026, counts_copies_in_the_norm,
        "it shows in the norm alone, and where that is clipped", "clipping", ("tensor",), model_fn=Megatron,
        meshes=ONE_SAMPLE,
    ),
    Bug(
        "modelscope/twinkle", 290, 2026, sums_the_norms_of_copies,
        "it shows in the norm alone, and where that is clipped", "clipping", ("data",),
    ),
    Bug(
        "ByteDance-Seed/VeOmni", 963, 2026, divided_by_the_samples_of_a_part, "one device does it too", "loss scale",
        tool="watch", meshes=TWO_RANKS,
    ),
    Bug(
        "verl-project/verl", 436, 2025, divided_after_the_backward, "one device does it too", "loss scale",
        tool="watch", meshes=TWO_RANKS,
    ),
]  # fmt: skip
