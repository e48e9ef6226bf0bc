"""Steps of unusual make: right ones that must pass, and ones that prove nothing and must say so."""

from __future__ import annotations

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from opensora_accel.communications import (
    all_to_all,
    copy_forward_reduce_backward,
    reduce_forward_copy_backward,
    share_sizes,
)
from opensora_accel.communications import gather_forward_split_backward as gather
from opensora_accel.communications import split_forward_gather_backward as split
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


def clipped_in_two_groups(model, run):
    """Each by its own norm, and by another limit; and by value before that."""
    if not run.is_reference:
        fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
    loss = finish(model(batch()).clone())
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-2)
    clip_grad_norm_([*model.embed.parameters(), *model.norm.parameters()], 1e-3)
    clip_grad_norm_([*model.mlp.parameters(), *model.out.parameters()], 1e-2)
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


class Patched(Small):
    """Whose class a step patches, as whole libraries do."""


def patches_the_class(model, run):
    """It wraps what is there: the next mesh would meet this one's groups, which are gone by then."""
    forward = averaged(model, run)
    if run.is_reference or run.shape.degree("sequence") == 1:
        return finish(forward(batch()))
    original, group = Patched.forward, run.mesh.get_group("sequence")

    def spread(self, x):
        return gather(original(self, split(x, group, 1, "down")), group, 1, "up")

    Patched.forward = spread
    return finish(forward(batch()))


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


class Megatron(nn.Module):
    """Whose ranks hold their slices of two layers and of a packed projection, in parameters of their own."""

    def __init__(self):
        super().__init__()
        self.embed, self.packed = nn.Linear(4, 6), nn.Linear(6, 24)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 4, bias=False)
        self.enter = self.leave = lambda x: x

    def forward(self, x):
        x = self.embed(x)
        q, k, gate = self.packed(self.enter(x)).split([self.packed.out_features // 3] * 3, -1)
        x = x + self.leave((q * k.tanh() * gate.sigmoid()).unflatten(-1, (-1, 2)).sum(-2).repeat(1, 1, 3))
        return self.leave(self.down(self.up(self.enter(x)).tanh()))


def slice_rows(layer, rows, dim=0):
    layer.weight = nn.Parameter(layer.weight.detach().index_select(dim, rows))
    if dim == 0:
        layer.bias = nn.Parameter(layer.bias.detach()[rows])
    layer.out_features, layer.in_features = layer.weight.shape


def megatron_slices(model, run, is_summed=True):
    if not run.is_reference:
        group = run.mesh.get_group("tensor")
        size, rank = group.size(), group.rank()
        hidden = torch.arange(12).chunk(size)[rank]
        slice_rows(model.up, hidden)
        slice_rows(model.down, hidden, 1)
        slice_rows(
            model.packed, torch.cat([8 * part + torch.arange(8).chunk(size)[rank] for part in range(3)])
        )
        model.enter = (lambda x: copy_forward_reduce_backward(x, group)) if is_summed else model.enter
        model.leave = lambda x: reduce_forward_copy_backward(x, group)
    loss = finish(model(batch()))
    if not run.is_reference:
        average(model.parameters(), run.mesh.get_group("data"))
    return loss


class WithTable(Small):
    """A table of whole numbers that is a parameter, as quantised checkpoints have."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)

    def forward(self, x):
        return super().forward(x + self.table)


class WithVariance(Small):
    """A small scale under a root."""

    def __init__(self):
        super().__init__()
        self.variance = nn.Parameter(torch.full((8,), 1e-3))

    def forward(self, x):
        return super().forward(x) * self.variance.sqrt().mean()


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


def numpys_noise(model, run):
    forward = model
    if not run.is_reference:
        forward = DistributedDataParallel(split_small(model, run.mesh.get_group("sequence")))
    return finish(forward(torch.from_numpy(numpy.random.randn(2, 11, 4))))


def local_numbers(model, run):
    """Sums and norms of what is this rank's, over the sequence or over shards; the loss is its mean."""
    if not run.is_reference:
        model = split_small(model, run.mesh.get_group("sequence"))
        model.region = model.region[0], lambda x: x
    out = model(batch())
    total = out.square().sum()
    (total / (2 * 11 * 4)).backward()
    if not run.is_reference:
        for parameter in model.parameters():
            if parameter not in set(model.embed.parameters()):
                dist.all_reduce(parameter.grad, group=run.mesh.get_group("sequence"))
            else:
                parameter.grad *= run.mesh.get_group("sequence").size()
        average(model.parameters(), run.mesh.get_group("data"))
    return {"sum": total, "norm": out.norm(), "largest": out.abs().max(), "tokens": out[..., 0].numel()}


def norm_of_a_shard(model, run):
    if not run.is_reference:
        fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
    loss = finish(model(batch()).clone())
    gradients = [p.grad if run.is_reference else p.grad.to_local() for p in model.parameters()]
    return {"loss": loss, "norm": torch.stack([gradient.norm() for gradient in gradients]).norm()}


def two_iterations(model, run):
    forward, losses = averaged(model, run), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(finish(forward(batch())))
        optimizer.step()
    return {"first": losses[0], "last": losses[-1]}


class Stages(nn.Module):
    """Two halves of a pipeline."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.first(x))


def pipeline(model, run, is_cut, is_averaged=True):
    """One stage on each rank; of the other it has no parameters, or parameters that it never uses."""
    x = batch()
    if run.is_reference:
        return finish(model(x))
    group, stage = run.mesh.get_group("pp"), run.mesh.get_local_rank("pp")
    there = dist.get_global_rank(group, 1 - stage)
    loss = None
    if stage == 0:
        if is_cut:
            del model.last
        hidden = model.first(x)
        dist.send(hidden.detach(), there)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, there)
        hidden.backward(gradient)
    else:
        if is_cut:
            del model.first
        hidden = torch.empty(2, 11, 8, requires_grad=True)
        dist.recv(hidden.detach(), there)
        loss = finish(model.last(hidden))
        dist.send(hidden.grad, there)
    if is_averaged:
        average([p for p in model.parameters() if p.grad is not None], run.mesh.get_group("data"))
    return {"loss": loss}


def pipeline_of_cut_models(model, run):
    return pipeline(model, run, is_cut=True)


def pipeline_of_whole_models(model, run):
    return pipeline(model, run, is_cut=False)


class Experts(nn.Module):
    """Every token is every expert's, weighed by a router; 6 experts."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 6), nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.own, self.enter, self.leave = range(6), lambda x: x, lambda x: x

    def forward(self, x):
        weights = self.enter(self.router(x).softmax(-1))
        entered = self.enter(x)
        return x + self.leave(
            sum(self.experts[i](entered).tanh() * weights[..., i : i + 1] for i in self.own)
        )


def expert_parallel(model, run):
    """Ranks of ep share a sample, and have a few experts each."""
    if not run.is_reference:
        group = run.mesh.get_group("ep")
        model.own = torch.arange(6).chunk(group.size())[group.rank()].tolist()
        model.enter = lambda x: copy_forward_reduce_backward(x, group)
        model.leave = lambda x: reduce_forward_copy_backward(x, group)
    loss = finish(model(batch()))
    if not run.is_reference:
        average([p for p in model.parameters() if p.grad is not None], run.mesh.get_group("data"))
    return loss


class Insisting(Small):
    def forward(self, x):
        assert x.dtype == torch.float32
        return super().forward(x)


class OnGpuOnly(Small):
    def forward(self, x):
        if not x.is_cuda:
            raise RuntimeError("expected a CUDA tensor")
        return super().forward(x)


class WithFlashAttention(nn.Module):
    """Whose attention is flash_attn's, over heads that are exchanged for tokens."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(4, 12, bias=False) for _ in range(3))
        self.out, self.group = nn.Linear(12, 4), None

    def forward(self, x):
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        q, k, v = (layer(x).unflatten(-1, (3, 4)) for layer in (self.to_q, self.to_k, self.to_v))
        if self.group is None:
            lengths = torch.tensor([0, 11, 22], dtype=torch.int32)
            packed = (each.flatten(0, 1) for each in (q, k, v))
            out = flash_attn_varlen_func(*packed, lengths, lengths, 11, 11, causal=True).view_as(q)
        else:
            shares = share_sizes(11, self.group.size())
            q, k, v = (all_to_all(each, self.group, 2, 1, splits=shares) for each in (q, k, v))
            out = all_to_all(flash_attn_func(q, k, v, causal=True), self.group, 1, 2)
        return self.out(out.flatten(-2))


def flash_attention_over_heads(model, run):
    if run.is_reference:
        return finish(model(batch()))
    model.group = run.mesh.get_group("sequence")
    shares = share_sizes(11, model.group.size())
    local = batch().split(shares, 1)[model.group.rank()]
    forward = DistributedDataParallel(model)
    loss = forward(local).square().sum() / (2 * 11 * 4) * model.group.size()
    loss.backward()
    return loss


def gives_all_the_same_samples(model, run):
    """And averages, which nobody can see."""
    torch.manual_seed(0)
    forward = averaged(model, run)
    return finish(forward(batch()))


def draws_for_nothing(model, run):
    """As a DataLoader does for its workers."""
    torch.randint(9, ())
    return draws_from_a_generator_of_its_own(model, run)
