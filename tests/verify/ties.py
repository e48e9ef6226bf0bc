"""Loops over a model whose head is its embedding's weight, which ranks may part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from opensora_accel.observe.meshes import Run

STEPS = 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.mlp = nn.Linear(8, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x)
        return self.head(hidden + torch.tanh(self.mlp(hidden)))


class Equal(Tied):
    """Two tensors of the same values, on one device too."""

    def tie_weights(self) -> None:
        self.head.weight = nn.Parameter(self.table.weight.detach().clone())


def trained(model, run: Run, between=lambda: None, lr: float = 0.1) -> dict[str, Tensor]:
    """Two steps; `between` runs after each backward's average."""
    forward = model if run.is_reference or not plain(model) else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = {}
    for step in range(STEPS):
        loss = forward(torch.randint(7, (2, 11))).square().mean()
        loss.backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        losses[f"loss {step}"] = loss.detach()
    return losses


def plain(model: nn.Module) -> bool:
    return all(type(each) is nn.Parameter for each in model.parameters())


def materialise(model: nn.Module) -> None:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta")
    model.to_empty(device="cpu")
    model.load_state_dict(values)


def plainly(model, run):
    return trained(model, run)


def materialised(model, run):
    if not run.is_reference:
        materialise(model)
    return trained(model, run)


def tied_again(model, run):
    if not run.is_reference:
        materialise(model)
        model.tie_weights()
    return trained(model, run)


def assigned(model, run):
    if not run.is_reference:
        model.load_state_dict(
            {name: value.clone() for name, value in model.state_dict().items()}, assign=True
        )
    return trained(model, run)


def exchanged(model, run):
    if not run.is_reference:
        weight = model.head.weight.detach().clone()
        with torch.random.fork_rng():
            model.head = nn.Linear(8, 7, bias=False)
        model.head.load_state_dict({"weight": weight})
    return trained(model, run)


def tied_again_and_exchanged(model, run):
    if not run.is_reference:
        materialise(model)
        model.tie_weights()
    return exchanged(model, run)


def sharded_apart(model, run):
    if not run.is_reference:
        materialise(model)  # what is one parameter FSDP2 refuses to shard in two groups
        for module in (model.table, model.head, model):
            fully_shard(module, mesh=run.mesh["data"])
    return trained(model, run)


def sharded_together(model, run):
    if not run.is_reference:
        fully_shard(model, mesh=run.mesh["data"])
    return trained(model, run)


def starts_apart(model, run):
    if not run.is_reference:
        model.head.weight = nn.Parameter(torch.ones(7, 8))
    return trained(model, run)


def after_the_first_step(model, run):
    def part() -> None:
        if not run.is_reference and model.head.weight is model.table.weight:
            model.head.weight = nn.Parameter(model.table.weight.detach().clone())

    losses = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = model(torch.randint(7, (2, 11))).square().mean()
        loss.backward()
        for parameter in model.parameters() if not run.is_reference else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= run.world_size
        optimizer.step()
        model.zero_grad()
        part()
        losses[f"loss {step}"] = loss.detach()
    return losses


def summed(model, run, scale: float = 1.0, of_second: float = 1.0):
    """Two tensors on ranks, each of which gets the sum of both gradients; the optimizer may hold one of them alone."""
    if not run.is_reference:
        materialise(model)

    def add_up() -> None:
        if not run.is_reference:
            both = scale * (model.table.weight.grad + model.head.weight.grad)
            model.table.weight.grad = both
            model.head.weight.grad = both.clone()

    if of_second == 0 and not run.is_reference:
        forward = DistributedDataParallel(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p is not model.head.weight], lr=0.1)
        losses = {}
        for step in range(STEPS):
            loss = forward(torch.randint(7, (2, 11))).square().mean()
            loss.backward()
            add_up()
            optimizer.step()
            model.zero_grad()
            losses[f"loss {step}"] = loss.detach()
        return losses
    return trained(model, run, add_up)


def summed_and_doubled(model, run):
    return summed(model, run, scale=2.0)


def second_never_steps(model, run):
    return summed(model, run, of_second=0)
