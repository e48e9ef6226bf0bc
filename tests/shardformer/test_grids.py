"""Grids of tokens in a model that uses every liberty a table has: what is spread changes, ends, and begins again."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardformer
from opensora_accel import Plan, init_parallel
from shardformer.policy.grids import gather_grid, read_sizes, spread_grid
from tests.tolerances import RELATIVE, relative_errors

SIZE = 5  # of both dimensions, so that shapes alone do not tell them apart


class Mix(nn.Module):
    """Tokens mix along one dimension of the grid, after they were weighted by their places."""

    def __init__(self, along):
        super().__init__()
        self.along, self.weight = along, nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(
        self, x, places
    ):  # [B, T · S, C]; [T, S] where tokens mix along T, else [S, T] if it is turned
        grid = x.unflatten(1, places.shape) * places[..., None].cos()
        mixed = torch.einsum("btsc,tu->busc" if self.along == "T" else "btsc,su->btuc", grid, self.weight)
        return x + mixed.flatten(1, 2)


class Turned(Mix):
    """As `Mix`, of places that are [S, T]."""

    def forward(self, x, places):
        return super().forward(x, places.t())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList([Mix("S"), Mix("T"), Mix("S"), Turned("S")])
        self.last = nn.ModuleList([Mix("T"), Mix("S")])
        self.between, self.end = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, places):
        for block in self.first:
            x = block(x, places)
        x = self.between(x)
        x = x + x.flatten(1).mean(1)[:, None, None]  # needs all tokens
        for block in self.last:
            x = block(x, places)
        return self.end(x)


def spread_everything(spread):
    read_sizes(spread, ("T", "places", 0), ("S", "places", 1))
    for module, dimension, places in (
        ("first.0", "T", "T S"),
        ("first.1", "S", "T S"),
        ("first.2", "T", "T S"),
        ("first.3", "T", "S T"),
        ("last.0", "S", "T S"),
        ("last.1", "T", "T S"),
    ):
        spread_grid(spread, module, dimension, ("x", "B (T S) C"), layouts=(("places", places),))
    for module in ("between", "end"):
        gather_grid(spread, module, "B (T S) C")


POLICY = shardformer.Policy(("Model",), functions=(spread_everything,))


def compared(num_ranks):
    plan = Plan(ulysses=num_ranks)
    init_parallel(plan)
    torch.manual_seed(0)
    model = Model().double()
    x, places = torch.randn(2, SIZE**2, 4).double(), torch.randn(SIZE, SIZE).double()
    found = []
    for sharded in (False, True):
        model.zero_grad()
        leaves = [x.clone().requires_grad_(), places.clone().requires_grad_()]
        if sharded:
            shardformer.shard(model, plan, policy=POLICY)
        out = model(*leaves)
        out.square().mean().backward()
        grads = [leaf.grad for leaf in (*leaves, *model.parameters())]
        if sharded:
            for grad in grads:
                dist.all_reduce(grad)
                grad /= num_ranks
        found.append([out.detach(), *(grad.clone() for grad in grads)])
    expected, actual = (dict(enumerate(each)) for each in found)
    return max(relative_errors(actual, expected).values())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradients_are_those_of_one_device(ranks, num_ranks):
    assert max(ranks(num_ranks, compared, num_ranks)) < RELATIVE[torch.float64]


SCRIPT = """
import torch
from contextlib import ExitStack
from types import SimpleNamespace
from shardformer.policy import grids
from shardformer.spread import Spread
from shardformer.spread import Tokens

class Block(torch.nn.Module):
    def forward(self, x, **others):
        return x

names, seen = [f"argument_{i}" for i in range(8)], []
block, tokens = Block(), Tokens(SimpleNamespace(size=lambda: 1, rank=lambda: 0))
grids._Grid._own = lambda self, tensor, argument, what: seen.append(argument)
layouts = tuple((name, "B T") for name in names)
grids.spread_grid(Spread(block, tokens, ExitStack()), "", "T", ("x", "B (T S) C"), layouts=layouts)
tokens.begin()
tokens.state.sizes, tokens.state.spread = {"T": 2, "S": 1}, "T"
block(**{name: torch.zeros(1, 2) for name in ("x", *reversed(names))})
assert seen == names, seen
"""


@pytest.mark.slow
def test_arguments_are_split_in_the_tables_order():
    """A set's order would be each rank's own: processes of torchrun have hash seeds of their own."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
