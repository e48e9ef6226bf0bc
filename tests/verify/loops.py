"""Training steps as users have them, right and wrong, each with its meshes. Top level, so that they can be sent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from opensora_accel.communications import (
    gather_forward_split_backward,
    share_sizes,
    split_forward_gather_backward,
)
from tests.models import wan, wan_inputs


class Small(nn.Module):
    """[B, S, 4] → [B, S, 4]. `region` enters and leaves the sequence-parallel part."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)
        self.mlp, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.region = None

    def forward(self, x):
        enter, leave = self.region or (lambda x: x, lambda x: x)
        x = enter(self.embed(x))
        return leave(self.out(x + torch.tanh(self.mlp(self.norm(x)))))


def small():
    return Small()


def split_small(model, group, scale_up="up", scale_down="down"):
    model.region = (
        lambda x: split_forward_gather_backward(x, group, 1, scale_down),
        lambda x: gather_forward_split_backward(x, group, 1, scale_up),
    )
    return model


def batch():
    """This data rank's: 11 tokens, which divide by nothing here."""
    return torch.randn(2, 11, 4)


def finish(outputs):
    loss = outputs.square().mean()
    loss.backward()
    return loss


def averaged(model, run, **options):
    """Under DDP."""
    return model if run.is_reference else DistributedDataParallel(model, **options)


def sharded(model, run):
    """Under FSDP2."""
    if not run.is_reference:
        fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
    return model


def spread(model, run, scale_up="up", scale_down="down", **options):
    """A sequence over ranks, averaged over all of them."""
    if not run.is_reference:
        split_small(model, run.mesh.get_group("sequence"), scale_up, scale_down)
    return averaged(model, run, **options)


def average(parameters, group=None):
    """By hand."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


def plain_ddp(model, run):
    forward = averaged(model, run)  # held until backward: DDP that is forgotten before averages nothing
    return finish(forward(batch()))


def plain_fsdp2(model, run):
    return finish(sharded(model, run)(batch()))


def with_optimizer(model, run):
    """The whole of a loop's body, as it stands in the loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    loss = plain_ddp(model, run)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def accelerated(model, run):
    """A loop of accelerate's; each mesh is a world of its own to it."""
    if run.is_reference:
        return finish(model(batch()))
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == run.world_size
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    loss = model(batch()).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def compiled(model, run):
    forward = averaged(model, run)
    return finish((forward if run.is_reference else torch.compile(forward, backend="aot_eager"))(batch()))


def in_bf16(model, run):
    """Autocast leaves fp64 as it is: the proof is of the same sums."""
    forward = averaged(model, run)
    with torch.autocast("cpu", torch.bfloat16):
        loss = forward(batch()).square().mean()
    loss.backward()
    return loss


def sequence_parallel(model, run):
    forward = spread(model, run)
    return finish(forward(batch()))


def own_gradients(model, run):
    """Gradients that lie elsewhere than in `.grad`, and are handed over."""
    loss = sequence_parallel(model, run)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return {"loss": loss, "gradients": gradients}


def shares_for_scale(model, run):
    """An uneven split scaled by each rank's share, instead of by the number of ranks."""
    share = 1.0
    if not run.is_reference:
        group = run.mesh.get_group("sequence")
        share = share_sizes(11, group.size())[group.rank()] / 11
    forward = spread(model, run, 1 / share, share)
    return finish(forward(batch()))


def averaged_over_data_only(model, run):
    if run.is_reference:
        return finish(model(batch()))
    split_small(model, run.mesh.get_group("sequence"))
    forward = averaged(model, run, process_group=run.mesh.get_group("data"))
    return finish(forward(batch()))


def norm_left_out(model, run):
    """Every gradient is summed by hand, but for the norm's."""
    if run.is_reference:
        return finish(model(batch()))
    group = run.mesh.get_group("sequence")
    loss = finish(split_small(model, group, 1.0, 1.0)(batch()))
    for name, parameter in model.named_parameters():
        if not name.startswith(("norm", "embed")):
            dist.all_reduce(parameter.grad, group=group)
    return loss


def noise_by_rank(model, run):
    torch.manual_seed(run.rank)
    return sequence_parallel(model, run)


def same_shard(model, run):
    """Deferred initialisation, in which every rank draws the numbers of its own shard from one seed."""
    sharded(model, run)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return finish(model(batch()))


def small_on_meta():
    with torch.device("meta"):
        return Small()


def left_alone(model, run):
    """One rank skips a collective that the others wait in."""
    loss = plain_ddp(model, run)
    if run.rank != 1:
        dist.all_reduce(torch.zeros(1))
    return loss


def fails_on_one_rank(model, run):
    if run.rank == 1:
        raise RuntimeError("the disk is full")
    return plain_ddp(model, run)


def fails_everywhere(model, run):
    raise RuntimeError("there is no such file")


def forgets_to_watch(run):
    return 1.0


def returns_a_tensor(model, run):
    plain_ddp(model, run)
    return torch.zeros(3)


def wan_of_4_heads():
    return wan(heads=4)


def wan_of_6_heads():
    return wan(heads=6)


def wan_loss(model, frames):
    """6 × 4 × frames tokens: as diffusers wants them, shares are equal."""
    inputs = wan_inputs(batch=1, frames=frames, height=8, width=12)
    inputs["hidden_states"] = torch.randn(inputs["hidden_states"].shape)
    (velocity,) = model(**inputs, return_dict=False)
    return (velocity - torch.randn(velocity.shape)).square().mean()


def diffusers_ulysses_under_fsdp2(model, run):
    if not run.is_reference:
        from diffusers import ContextParallelConfig

        degree = run.shape.degree("ulysses")
        if degree > 1:
            mesh = run.mesh["ring", "ulysses"]
            model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=degree, mesh=mesh))
        everyone = init_device_mesh("cpu", (run.world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)
    loss = wan_loss(model, 4)
    loss.backward()
    return loss


def diffusers_ring(model, run):
    """With its gradients added up by hand, which is what diffusers' own scale asks for."""
    if not run.is_reference:
        from diffusers import ContextParallelConfig

        model.set_attention_backend("_native_flash")
        model.enable_parallelism(config=ContextParallelConfig(ring_degree=run.world_size))
    loss = wan_loss(model, 6)
    loss.backward()
    if not run.is_reference:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        model.set_attention_backend("native")  # it is set for every model of the process, of later tests too
    return loss


def colossalai_ddp(model, run):
    """A ColossalAI loop: its booster wraps model and optimizer, and runs backward."""
    if run.is_reference:
        return finish(model(batch()))
    from colossalai.booster import Booster
    from colossalai.booster.plugin import TorchDDPPlugin

    booster = Booster(plugin=TorchDDPPlugin())
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped, optimizer, *_ = booster.boost(split_small(model, run.mesh.get_group("sequence")), optimizer)
    loss = wrapped(batch()).square().mean()
    booster.backward(loss, optimizer)
    optimizer.step()
    return loss
