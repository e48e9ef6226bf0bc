"""Steps of unusual make: right ones that must pass, and ones that prove nothing and must say so."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from tests.verify.loops import Small, plain_ddp, split_small


def averaged(model, run):
    return model if run.is_reference else DistributedDataParallel(model)


def finish(outputs):
    loss = outputs.square().mean()
    loss.backward()
    return loss


def never_backward(model, run):
    return model(torch.randn(2, 11, 4)).mean()


def clears_gradients(model, run):
    loss = plain_ddp(model, run)
    model.zero_grad()
    return loss


def hands_over_nothing(model, run):
    return {"loss": plain_ddp(model, run), "gradients": {}}


def is_not_finite(model, run):
    return finish(model(torch.randn(2, 11, 4) / 0))


def steps_within_backward(model, run):
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    return finish(model(torch.randn(2, 11, 4)))


def returns_a_pair(model, run):
    return plain_ddp(model, run), 1.0


def seeds_all_alike(model, run):
    """And averages nothing, which nobody could see."""
    torch.manual_seed(0)
    return finish(model(torch.randn(2, 11, 4)))


def trains_what_one_device_freezes(model, run):
    model.embed.requires_grad_(not run.is_reference)
    return plain_ddp(model, run)


def another_optimizer_first(model, run):
    """Of another model; and the gradients of this one are never averaged."""
    other = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    other(torch.randn(1, 1)).sum().backward()
    optimizer.step()
    return finish(model(torch.randn(2, 11, 4)))


class Unusual(Small):
    """Changes its input in place, fills a dict that it is given, embeds whole numbers in fp32."""

    def forward(self, x, time, seen):
        x.mul_(2)
        angles = time[:, None, None].float() * torch.arange(4, dtype=torch.float32)
        shift = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float32)
        seen["aux"] = x.square().mean()
        return super().forward(x + angles.cos() + shift)


def unusual():
    return Unusual()


def unusual_model(model, run):
    seen, forward = {}, averaged(model, run)
    outputs = forward(torch.randn(2, 11, 4), torch.tensor([1, 2]), seen)
    assert "aux" in seen
    return {"loss": finish(outputs), "lr": None}


def batches_of_unlike_size(model, run):
    forward = averaged(model, run)  # held until backward: DDP that is forgotten before averages nothing
    extra = {"second": 1.0} if run.data_rank else {}
    return {"loss": finish(forward(torch.randn(1 + run.data_rank, 11, 4))), **extra}


def ddp_for_each_layer(model, run):
    if not run.is_reference:
        for name, layer in list(model.named_children()):
            setattr(model, name, DistributedDataParallel(layer))
    return finish(model(torch.randn(2, 11, 4)))


def hand_written_optimizer(model, run):
    loss = plain_ddp(model, run)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    return loss


def one_batch_split_by_the_step(model, run):
    """Count over all ranks: every rank's mean would be of another size."""
    batch = torch.randn(5, 11, 4).tensor_split(run.data_size)[run.data_rank]
    forward = averaged(model, run)
    loss = forward(batch).square().sum() / (5 * 11 * 4) * run.data_size
    loss.backward()
    return loss


# Right loops of other people's making.


def batch():
    return torch.randn(2, 11, 4)


def average(parameters, group=None):
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


class Spectral(nn.Module):
    """Complex weights, as of a Fourier operator."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        waves = torch.fft.rfft(x, dim=1)
        return self.out(torch.fft.irfft(waves * self.weight, n=x.size(1), dim=1))


def complex_weights(model, run):
    loss = finish(model(batch()))
    if not run.is_reference:
        for parameter in model.parameters():
            gradient = torch.view_as_real(parameter.grad) if parameter.is_complex() else parameter.grad
            dist.all_reduce(gradient)
            gradient /= run.world_size
    return loss


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
    if not run.is_reference:
        fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
    loss = finish(model(batch()).clone())
    clip_grad_norm_(model.parameters(), 1e-3)
    return loss


def averaged_then_clipped_by_value(model, run):
    loss = finish(model(batch()))
    if not run.is_reference:
        average(model.parameters())
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    return loss


def optimizer_after_sharding(model, run):
    if not run.is_reference:
        fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters())
    loss = finish(model(batch()).clone())
    optimizer.step()
    return loss


def draws_from_a_generator_of_its_own(model, run):
    generator = torch.Generator().manual_seed(run.data_rank)
    forward = model
    if not run.is_reference:
        forward = DistributedDataParallel(split_small(model, run.mesh.get_group("sequence")))
    return finish(forward(torch.randn(2, 11, 4, generator=generator)))
