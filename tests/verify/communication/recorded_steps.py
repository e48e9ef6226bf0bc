"""Training steps for the verifier: a real Wan, and a small attention model that can be broken in every way."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardformer
from opensora_accel import init_parallel
from opensora_accel.attention import usp_attention
from opensora_accel.communications import gather_forward_split_backward, split_forward_gather_backward
from opensora_accel.parallel_states import get_parallel_group
from tests.models import wan, wan_inputs

TOKENS, HEADS, HEAD_DIM = 24, 4, 4
CHANNELS = HEADS * HEAD_DIM


def tiny_wan():
    return wan(torch.float32)


def wan_step(model, run):
    """As a training loop does it: the plan on the model, DDP where parameters are whole."""
    init_parallel(run.plan, "cpu")
    model = shardformer.shard(model, run.plan)
    if run.plan.sharding == "none":
        model = DistributedDataParallel(model, process_group=get_parallel_group("mixed"))
    prediction = model(**wan_inputs(torch.float32), return_dict=False)[0]
    prediction.square().mean().backward()


class Attending(nn.Module):
    """[B, S, C] → [B, S, C] with attention over the whole sequence."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.out = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x, attention):
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        return self.out(attention(q, k, v).flatten(2))


def average(model, group):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()


def attending_step(model, run, attention=None, averaging=None, after_forward=None):
    """Exact as it is. `attention`, `averaging(model, run)` and `after_forward` replace its parts."""
    init_parallel(run.plan, "cpu")
    sequence = get_parallel_group("sequence")
    x = split_forward_gather_backward(torch.randn(2, TOKENS, CHANNELS), sequence, 1, "down")
    x = model(x, attention or whole_attention)
    if after_forward is not None:
        after_forward(run)
    shares = [x.size(1)] * sequence.size()
    gather_forward_split_backward(x, sequence, 1, "up", splits=shares).square().mean().backward()
    if averaging is None:
        average(model, get_parallel_group("mixed"))
    else:
        averaging(model, run)


def whole_attention(q, k, v):
    shares = [q.size(1)] * get_parallel_group("sequence").size()
    return usp_attention(q, k, v, splits=shares, kv_splits=shares)


class Two(nn.Module):
    """35 elements of its own, 36 of a child."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 5)

    def forward(self, x):
        return self.last(self.first(x))


def linear():
    return nn.Linear(6, 5)
