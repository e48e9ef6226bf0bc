"""Right loops that clip gradients or shard parameters, by torch's means and by accelerate's."""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_

from tests.verify.loops import average, averaged, batch, finish, sharded


def accelerates_documented_loop(model, run):
    """With its clipping, on one device too; the limit changes every gradient."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    loss = model(batch()).square().mean()
    accelerator.backward(loss)
    if accelerator.sync_gradients:
        accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def clipped_on_ranks_only(model, run):
    if run.is_reference:
        return finish(model(batch()))
    return accelerates_documented_loop(model, run)


def sharded_and_clipped(model, run):
    loss = finish(sharded(model, run)(batch()).clone())
    clip_grad_norm_(model.parameters(), 1e-3)
    return loss


def averaged_then_clipped_by_value(model, run):
    loss = finish(model(batch()))
    if not run.is_reference:
        average(model.parameters())
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    return loss


def clipped_in_two_groups(model, run):
    """Each by its own norm, and by another limit; and by value before that."""
    loss = finish(sharded(model, run)(batch()).clone())
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-2)
    clip_grad_norm_([*model.embed.parameters(), *model.norm.parameters()], 1e-3)
    clip_grad_norm_([*model.mlp.parameters(), *model.out.parameters()], 1e-2)
    return loss


def optimizer_after_sharding(model, run):
    sharded(model, run)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = finish(model(batch()).clone())
    optimizer.step()
    return loss


def loss_scaled(model, run):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    forward = averaged(model, run)
    loss = forward(batch()).square().mean()
    if run.is_reference:
        loss.backward()
    else:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
    return loss


def norm_of_a_shard(model, run):
    loss = finish(sharded(model, run)(batch()).clone())
    gradients = [p.grad if run.is_reference else p.grad.to_local() for p in model.parameters()]
    return {"loss": loss, "norm": torch.stack([gradient.norm() for gradient in gradients]).norm()}


def fsdp1(model, run, use_orig_params, clipped=False, nested=False, scale=1):
    from torch.distributed.fsdp import FullyShardedDataParallel

    if run.is_reference:
        return finish(model(batch()))
    options = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    if nested:
        model.mlp = FullyShardedDataParallel(model.mlp, **options)
    sharded = FullyShardedDataParallel(model, **options)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    loss = finish(sharded(batch()))
    for parameter in sharded.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad * scale
    if clipped:
        sharded.clip_grad_norm_(1e-3)
    optimizer.step()
    return loss


def fsdp1_flat(model, run):
    return fsdp1(model, run, use_orig_params=False)


def fsdp1_flat_clipped(model, run):
    return fsdp1(model, run, use_orig_params=False, clipped=True, nested=True)


def fsdp1_original(model, run):
    return fsdp1(model, run, use_orig_params=True, nested=True)


def fsdp1_original_clipped(model, run):
    return fsdp1(model, run, use_orig_params=True, clipped=True)
