"""Blocks as video models have them, and training steps whose gradients are compared bit for bit."""

import torch
import torch.nn.functional as F
from torch import nn

from opensora_accel.attention import local_attention

DEVICE = "cpu"
"""Where the tests run; the fixture `device` sets it."""


class Block(nn.Module):
    """A block as video models have them: attention, MLP, a shared timestep, dropout."""

    def __init__(self, dim=16):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, hidden, timestep=None, *, gain=1.0, positions=None):
        x = hidden * timestep if timestep is not None else hidden
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2)
        hidden = hidden + self.out(local_attention(q, k, v).flatten(2)) * gain
        return hidden + self.down(F.dropout(F.gelu(self.up(hidden)), 0.2))


def blocks(num=4, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.ModuleList([Block() for _ in range(num)]).to(DEVICE, dtype)


def data(dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, 16, generator=generator).to(DEVICE, dtype).requires_grad_()
    t = torch.randn(2, 1, 16, generator=generator).to(DEVICE, dtype).requires_grad_()
    return x, t


def gradients(model, inputs):
    return [p.grad.clone() for p in model.parameters()] + [x.grad.clone() for x in inputs]


def run(model, inputs, call=lambda block, x, t: block(x, t)):
    torch.manual_seed(7)  # dropout
    x, t = inputs
    hidden = x * 1
    for block in model:
        hidden = call(block, hidden, t)
    return hidden


def baseline(dtype=torch.float32, num=4):
    model, inputs = blocks(num, dtype), data(dtype)
    run(model, inputs).float().square().sum().backward()
    return gradients(model, inputs)


def assert_identical(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
