"""Sides that do what a benchmark must survive, or what it must count; ranks run this as a script beside attention's."""

import os
import time

import torch
import torch.distributed as dist
from attention import run_task  # noqa: F401 - the ranks call it, and find the sides of this file
from peers import SIDES
from peers.side import Attention, Side, sdpa


def right(world, problem, mask):
    """All keys on every rank: k and v go to P−1 others, and P−1 parts of their gradients to the owners."""
    return Attention(lambda q, k, v: sdpa(q, _Gather.apply(k, world), _Gather.apply(v, world)))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, world):
        ctx.world = world
        parts = [torch.empty_like(tensor) for _ in range(world.num_ranks)]
        dist.all_gather(parts, tensor.contiguous(), group=world.group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        parts = [part.contiguous() for part in grad.chunk(ctx.world.num_ranks, 1)]
        received = [torch.empty_like(part) for part in parts]
        dist.all_to_all(received, parts, group=ctx.world.group)
        return sum(received), None


def wrong(world, problem, mask):
    attention = right(world, problem, mask)
    return Attention(lambda q, k, v: attention.forward(q, k, v * (1 + 1e-4 * world.rank)))


def not_a_number(world, problem, mask):
    attention = right(world, problem, mask)
    return Attention(lambda q, k, v: attention.forward(q, k, v) * torch.nan)


def raises(world, problem, mask):
    """On one rank; the other waits for it."""

    def forward(q, k, v):
        if world.rank == 1:
            raise ValueError("rank 1 has had enough")
        dist.barrier()

    return Attention(forward)


def hangs(world, problem, mask):
    def forward(q, k, v):
        while world.rank == 1:
            time.sleep(60)
        dist.barrier()

    return Attention(forward)


def aborts(world, problem, mask):
    return Attention(lambda q, k, v: os.abort() if world.rank == 1 else dist.barrier())


@torch.library.custom_op("bench_test::pass_on", mutates_args=())
def pass_on(tensor: torch.Tensor) -> torch.Tensor:
    """To the next rank and from the last, where a dispatch mode does not look by itself."""
    received, rank, num_ranks = torch.empty_like(tensor), dist.get_rank(), dist.get_world_size()
    operations = [
        dist.P2POp(dist.isend, tensor.contiguous(), (rank + 1) % num_ranks),
        dist.P2POp(dist.irecv, received, (rank - 1) % num_ranks),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


pass_on.register_autograd(lambda ctx, grad: grad.clone())


def hidden(world, problem, mask):
    """Sends k once, in a custom operator, and keeps nothing for backward."""
    return Attention(lambda q, k, v: q + pass_on(k) + v)


for make in (right, wrong, not_a_number, raises, hangs, aborts, hidden):
    SIDES[make.__name__] = Side(make.__name__, make)
