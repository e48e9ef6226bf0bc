"""Right loops whose ranks hold parts of the model: slices of layers, stages of a pipeline, experts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from opensora_accel.communications import copy_forward_reduce_backward, reduce_forward_copy_backward
from tests.verify.loops import average, batch, finish


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
