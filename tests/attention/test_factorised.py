"""Factorised attention with its tokens spread along time or space: gradients of one device, half of the traffic."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from opensora_accel.attention import local_attention, switch_sharded_dim, ulysses_attention
from opensora_accel.communications import share_sizes
from tests.attention.counting import counted
from tests.tolerances import relative_errors

HEADS = 3


class Layer(nn.Module):
    """STDiT's pair: every frame attends along space, every place along time. [B, T, S, C]."""

    def __init__(self, channels=12):
        super().__init__()
        self.spatial, self.temporal = nn.Linear(channels, 3 * channels), nn.Linear(channels, 3 * channels)

    def forward(self, x, to_time=lambda x: x, to_space=lambda x: x):
        x = x + attend(self.spatial(x))
        x = to_time(x)
        x = x + attend(self.temporal(x).transpose(1, 2)).transpose(1, 2)
        return to_space(x)


def attend(qkv):
    """Self-attention along dim 2 of [B, N, S, 3C]."""
    q, k, v = qkv.flatten(0, 1).unflatten(-1, (3, HEADS, -1)).unbind(2)
    return local_attention(q, k, v).flatten(2).unflatten(0, qkv.shape[:2])


def model():
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(2)).double()


def compared(frames, places):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(2, frames, places, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    reference, x_full = model(), x.clone().requires_grad_()
    expected = x_full
    for layer in reference:
        expected = layer(expected)
    expected.square().sum().backward()

    spread, mine = model(), x.tensor_split(num_ranks, 1)[rank].clone().requires_grad_()
    by_time, by_space = share_sizes(frames, num_ranks), share_sizes(places, num_ranks)
    out = mine
    for number, layer in enumerate(spread):
        sizes = {"to_time": by_time, "to_space": by_space} if number else {"to_time": None, "to_space": None}
        out = layer(
            out,
            lambda t, s=sizes: switch_sharded_dim(
                t, dist.group.WORLD, from_dim=1, to_dim=2, splits=s["to_time"]
            ),
            lambda t, s=sizes: switch_sharded_dim(
                t, dist.group.WORLD, from_dim=2, to_dim=1, splits=s["to_space"]
            ),
        )
    out.square().sum().backward()
    errors = [(out - expected.tensor_split(num_ranks, 1)[rank]).abs().max()]
    errors.append((mine.grad - x_full.grad.tensor_split(num_ranks, 1)[rank]).abs().max())
    grads = []
    for parameter, whole in zip(spread.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        grads.append((parameter.grad, whole.grad))
    found, expected = (dict(enumerate(each)) for each in zip(*grads, strict=True))
    return max(
        *(error.item() for error in errors if error.numel()), *relative_errors(found, expected).values()
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("frames", "places"), [(8, 12), (5, 7), (4, 9)])
def test_switching_the_sharded_dim_matches_one_device(ranks, num_ranks, frames, places):
    assert max(ranks(num_ranks, compared, frames, places)) < 1e-10


def traffic():
    """Bytes of a switch there and back, and of Ulysses along the dim that is spread, in units of the tokens."""
    num_ranks = dist.get_world_size()
    x = torch.randn(1, 4, 8, 16)
    with counted() as switch:
        y = switch_sharded_dim(x, dist.group.WORLD, from_dim=1, to_dim=2, splits=(4,) * num_ranks)
        switch_sharded_dim(y, dist.group.WORLD, from_dim=2, to_dim=1, splits=(8 // num_ranks,) * num_ranks)
    q, sizes = x.unflatten(-1, (4, 4)).movedim(1, 2)[0], (4,) * num_ranks
    with counted() as ulysses:
        ulysses_attention(q, q, q, dist.group.WORLD, splits=sizes, kv_splits=sizes)
    return switch.num_collectives, switch.size_bytes / x.nbytes, ulysses.size_bytes / x.nbytes


def test_a_switch_moves_one_tensor_where_ulysses_moves_four(ranks):
    assert ranks(2, traffic) == [(2, 2 * 1 / 2, 4 * 1 / 2)] * 2
