"""Optimizers, averages of weights, and what is written to disk and read again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from opensora_accel import Plan
from opensora_accel.observe.meshes import Run
from tests.published.bug import Bug
from tests.published.models import batches
from tests.verify.loops import averaged, batch, finish, plain_ddp


def parameters_of_before(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """Sharding gives the model new parameters, and the optimizer that was prepared with it goes on stepping the old
    ones: the model stays as it is."""
    optimizer = torch.optim.AdamW(model.parameters())
    if not run.is_reference:
        fully_shard(model, mesh=run.mesh["data"])
        if not is_wrong:
            (group,) = optimizer.param_groups
            group["params"] = list(model.parameters())
    loss = finish(model(batch()).clone())
    optimizer.step()
    return loss


def clips_nothing_that_is_left(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """A function takes the norm of the parameters that it is given, and then clips them; of a generator nothing is
    left by then, and gradients stay as they are."""
    loss = plain_ddp(model, run)
    given = iter(model.parameters()) if is_wrong and not run.is_reference else list(model.parameters())
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in given])
    torch.nn.utils.clip_grads_with_norm_(given, 1e-3, norm)
    return loss


def added_to_what_was_stepped(model: Any, run: Run, is_wrong: bool) -> dict[str, Any]:
    """Gradients accumulate in a buffer beside `.grad`; when they have been handed to the optimizer it is `.grad` that
    is cleared, and the next step adds to the buffer of this one."""
    forward, losses = averaged(model, run), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffers: dict[nn.Parameter, Tensor] = {}
    for step in range(2):
        for part in range(2):
            loss = forward(batch()).square().mean() / 2
            loss.backward()
            losses[f"loss {step}.{part}"] = loss.detach()
            for parameter in model.parameters():
                buffers[parameter] = parameter.grad + buffers.get(parameter, 0)
                parameter.grad = None
        for parameter, buffer in buffers.items():
            parameter.grad = buffer
        optimizer.step()
        optimizer.zero_grad()
        if run.is_reference or not is_wrong:
            buffers.clear()
    return losses


def decay_that_is_its_own_limit(model: Any, run: Run, is_wrong: bool) -> dict[str, Any]:
    """The decay of an average warms up to a limit, and what comes out for a step is stored in the place of the limit:
    the average follows the weights closely for ever."""
    forward, limit = averaged(model, run), 0.999
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for number, x in enumerate(batches(12), 1):
        optimizer.zero_grad()
        losses[f"loss {number}"] = finish(forward(x))
        optimizer.step()
        share = 1 - min(limit, (1 + number) / (10 + number))  # of the new weights
        limit = share if is_wrong else limit
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter.detach(), share)
    return {**losses, "average": torch.stack([each.norm() for each in average.values()]).norm()}


def average_that_begins_anew(model: Any, run: Run, is_wrong: bool) -> dict[str, Any]:
    """An average begins with the weights of a certain step. That it has begun is not saved, so that a run which goes
    on throws away the average that it has read, and takes the weights of that moment."""
    forward, average, has_begun = averaged(model, run), {}, False
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for number, x in enumerate(batches(6)):
        if number == 4 and not run.is_reference:  # stopped, and gone on
            has_begun = not is_wrong
        optimizer.zero_grad()
        losses[f"loss {number}"] = finish(forward(x))
        optimizer.step()
        for name, parameter in model.named_parameters() if number >= 1 else ():
            new = parameter.detach().clone()
            average[name] = average[name].lerp(new, 0.1) if has_begun else new
        has_begun = has_begun or number >= 1
    return {**losses, "average": torch.stack([each.norm() for each in average.values()]).norm()}


def trains_and_goes_on(model: Any, run: Run, watched: Any, through_a_file: Any) -> None:
    """Two steps of SGD with momentum, and two more when `through_a_file(buffers)` has saved and read its state."""
    forward, optimizer = averaged(model, run), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, x in enumerate(batches(4)):
        if number == 2:
            state = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
            saved = watched.saves(state)
            through_a_file([*state.values()])
            watched.loaded(state, saved)
        optimizer.zero_grad()
        loss = forward(x).square().mean()
        watched.loss(loss)
        loss.backward()
        optimizer.step()


def read_at_padded_places(model: Any, run: Run, is_wrong: bool, watched: Any) -> None:
    """Buckets of the optimizer's state are saved without the padding at their ends, and parameters are looked for at
    the places that they had with it; what lies past the end is filled with zeros."""

    def through_a_file(buffers: list[Tensor]) -> None:
        buckets, places, stripped, start = [buffers[:3], buffers[3:]], [], 0, 0
        for bucket in buckets:
            for buffer in bucket:
                places.append(start - (0 if is_wrong else stripped))
                start += buffer.numel()
            padding = -start % 64
            stripped, start = stripped + padding, start + padding
        file = torch.cat([buffer.flatten() for buffer in buffers])
        for buffer, place in zip(buffers, places, strict=True):
            found = file[place : place + buffer.numel()]
            buffer.copy_(nn.functional.pad(found, (0, buffer.numel() - found.numel())).view_as(buffer))

    trains_and_goes_on(model, run, watched, through_a_file)


def moments_left_behind(model: Any, run: Run, is_wrong: bool, watched: Any) -> None:
    """The state into which an optimizer is loaded is made without its moments, as no step has made them yet; what the
    file has of them is dropped without a word."""

    def through_a_file(buffers: list[Tensor]) -> None:
        file = [buffer.clone() for buffer in buffers]
        for buffer, saved in zip(buffers, file, strict=True):
            buffer.copy_(torch.zeros_like(saved) if is_wrong else saved)

    trains_and_goes_on(model, run, watched, through_a_file)


BUGS = [
    Bug(
        "huggingface/accelerate", 3835, 2025, parameters_of_before, "the loss changes with the samples", "optimizer",
        ("data",), was_read=False,
    ),
    Bug(
        "pytorch/torchtitan", 1258, 2025, clips_nothing_that_is_left, "the norm that is returned is right",
        "clipping", ("data",),
    ),
    Bug(
        "deepspeedai/DeepSpeed", 8601, 2026, added_to_what_was_stepped, "`.grad` is empty before every step",
        "state", ("data",), tool="several steps",
    ),
    Bug(
        "huggingface/diffusers", 1868, 2022, decay_that_is_its_own_limit, "the weights that are trained are right",
        "average", tool="single device",
    ),
    Bug(
        "koda-dernet/Side-Step", 38, 2026, average_that_begins_anew, "weights and file are right", "result",
        ("data",), tool="several steps",
    ),
    Bug(
        "NVIDIA/Megatron-LM", 5077, 2026, read_at_padded_places, "with one bucket nothing is padded in between",
        "loaded state", meshes=(Plan(dp_replicate=2),), tool="loader",
    ),
    Bug(
        "areal-project/AReaL", 1468, 2026, moments_left_behind,
        "the weights are right, and moments come back in time", "loaded state",
        meshes=(Plan(dp_replicate=2),), tool="loader",
    ),
]  # fmt: skip
