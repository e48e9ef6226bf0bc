"""Steps of unusual make: right ones that must pass, and ones that prove nothing and must say so."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.verify.loops import Small, plain_ddp


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
