"""Models and parts of steps that several bugs share, beside those of `tests.verify.loops` and `steps`.

Letters: B batch, S tokens, C channels, H heads, D head dim, P ranks of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_accel.communications import gather_forward_split_backward, split_forward_gather_backward
from opensora_accel.observe.meshes import Run
from tests.verify.loops import Small, averaged, batch, finish
from tests.verify.meshes import Meshes
from tests.verify.steps import CHANNELS, OneLayer

SEQUENCE: Meshes = ({"data": 2, "sequence": 2}, {"data": 1, "sequence": 3}, {"data": 3, "sequence": 1})
STEPS = 3
"""Of a loop: `watch` looks at the first two, and at what they leave in the third."""


def attend_over_ranks(
    model: OneLayer,
    run: Run,
    attend: Callable[..., Tensor],
    tokens: int = 12,
    order: Tensor | None = None,
) -> Tensor:
    """A step of one layer whose tokens are spread, averaged over all ranks.

    Args:
        attend: how q, k, v [B, S/P, H, D] of the ranks meet; where no other rank has tokens, the model's own is left.
        order: of the tokens [S] when they are dealt to the ranks one after another.
    """
    order = torch.arange(tokens) if order is None else order
    if run.shape.degree("sequence") > 1:
        group = run.mesh.get_group("sequence")
        model.split = lambda x: split_forward_gather_backward(x[:, order], group, 1, "down")
        model.gather = lambda x: gather_forward_split_backward(x, group, 1, "up")[:, order.argsort()]
        model.attend = attend
    forward = averaged(model, run)
    return finish(forward(torch.randn(2, tokens, CHANNELS)))


def own_tokens(x: Tensor, run: Run, dim: int = 1) -> Tensor:
    """This rank's share of a sequence; all of it on one device."""
    if run.is_reference:
        return x
    group = run.mesh.get_group("sequence")
    return x.tensor_split(group.size(), dim)[group.rank()]


def add_up(parameters: Iterable[nn.Parameter], run: Run, over: str | None = None) -> None:
    """Sums gradients over an axis, or over all ranks, and takes the mean over data ranks of these."""
    for parameter in parameters:
        if run.is_reference or parameter.grad is None:
            continue
        dist.all_reduce(parameter.grad, group=None if over is None else run.mesh.get_group(over))
        parameter.grad /= run.data_size if over is None else 1


def six_heads() -> OneLayer:
    return OneLayer(heads=6)


def three_key_heads() -> OneLayer:
    return OneLayer(heads=12, kv_heads=3)


class Adapted(nn.Module):
    """A frozen layer and its low-rank adapter. [B, S, 4] → [B, S, 4]"""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))

    def adapters(self) -> list[nn.Parameter]:
        return [self.down.weight, self.up.weight]


class Timed(Small):
    """A model that is told how noisy its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 4)

    def forward(self, latents: Tensor, timestep: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(latents + self.time(timestep[:, None])[:, None])


def batches(number: int) -> list[Tensor]:
    """So many batches of this data rank."""
    return [batch() for _ in range(number)]


def train(model: nn.Module, run: Run, given: Iterable[Tensor], rate: float = 0.1) -> dict[str, Any]:
    """Steps of SGD under DDP; the loss of each."""
    forward, losses = averaged(model, run), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for number, x in enumerate(given):
        optimizer.zero_grad()
        losses[f"loss {number}"] = finish(forward(x))
        optimizer.step()
    return losses


def shuffled(length: int, seed: int) -> Iterator[int]:
    """The order of one epoch."""
    return iter(torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist())
