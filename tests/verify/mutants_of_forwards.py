"""Mistakes in the forward of a sequence-parallel model: one part of it sees its rank's tokens where it needs all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from opensora_accel.communications import (
    gather_forward_reduce_scatter_backward,
    gather_forward_split_backward,
    share_sizes,
    split_forward_gather_backward,
)
from opensora_accel.observe.meshes import Run
from tests.verify.defects import Mutant
from tests.verify.meshes import Meshes

WIDTH, TOKENS, TEXT = 6, 11, 3
MESHES: Meshes = ({"data": 2, "sequence": 2}, {"data": 1, "sequence": 3}, {"data": 3, "sequence": 1})


class Tokens:
    """Which tokens are here. On one device, and for a part of the model that forgets the other ranks: all."""

    first = 0

    def whole(self, tokens: Tensor) -> Tensor:
        return tokens

    def own(self, tokens: Tensor) -> Tensor:
        return tokens


class Spread(Tokens):
    def __init__(self, group: Any) -> None:
        sizes = share_sizes(TOKENS, group.size())
        self.group, self.first, self.size = group, sum(sizes[: group.rank()]), sizes[group.rank()]

    def whole(self, tokens: Tensor) -> Tensor:
        return gather_forward_reduce_scatter_backward(tokens, self.group, 1)

    def own(self, tokens: Tensor) -> Tensor:
        return tokens[:, self.first : self.first + self.size]


class Part(nn.Module):
    """A part of a block: [B, S, C] → [B, S, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.project = Tokens(), nn.Linear(WIDTH, WIDTH)


class Places(Part):
    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.size(1), dtype=x.dtype) + self.tokens.first
        waves = torch.stack([(at * (i + 1) / 9).sin() for i in range(WIDTH)], -1)
        return x + self.project(waves)


class Attention(Part):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_causal = False

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_q(x), self.tokens.whole(self.project(x)), self.tokens.whole(self.to_v(x))
        scores = q @ k.transpose(1, 2)
        if self.is_causal:
            rows = torch.arange(q.size(1))[:, None] + self.tokens.first
            scores = scores.masked_fill(torch.arange(k.size(1)) > rows, -torch.inf)
        return x + scores.softmax(-1) @ v


class Pool(Part):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.tokens.whole(x).mean(1, keepdim=True))


class Maximum(Part):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.project(self.tokens.whole(x).amax(1, keepdim=True)).sigmoid()


class Normalise(Part):
    def forward(self, x: Tensor) -> Tensor:
        whole = self.tokens.whole(x)
        return self.project((x - whole.mean(1, keepdim=True)) / (whole.var(1, keepdim=True) + 0.1).sqrt())


class Before(Part):
    """Every token sees the one before."""

    def forward(self, x: Tensor) -> Tensor:
        whole = self.tokens.whole(x)
        before = torch.cat([torch.zeros_like(whole[:, :1]), whole[:, :-1]], 1)
        return x + self.project(self.tokens.own(before))


class Scan(Part):
    """A state that runs along the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.tokens.own(self.tokens.whole(x).cumsum(1)))


class ByLength(Part):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(x) / self.tokens.whole(x).size(1)


class Best(Part):
    """Keeps the tokens of the largest norms."""

    def forward(self, x: Tensor) -> Tensor:
        norms = self.tokens.whole(x).norm(dim=-1)
        kept = norms >= norms.median(1, keepdim=True).values
        return x + self.project(x) * self.tokens.own(kept[..., None])


class Nearest(Part):
    """To the first token of all."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(x * self.tokens.whole(x)[:, :1])


class Reversed(Part):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.tokens.own(self.tokens.whole(x).flip(1)))


class Video(nn.Module):
    """Two parts that need all tokens, between layers that do not."""

    def __init__(self, part: type[Part]) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.part = Attention(), part()
        self.mlp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.split: Callable[[Tensor], Tensor] = lambda x: x
        self.gather: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.norm(self.split(self.embed(x))))
        x = self.part(x)
        return self.gather(self.out(x + self.mlp(x).tanh()))


@dataclass(frozen=True)
class Forward:
    """Sequence parallelism by hand, of which the model's `part` knows nothing where it is forgetful."""

    part: type[Part]
    is_forgetful: bool = True

    def model(self) -> nn.Module:
        return Video(self.part)

    def __call__(self, model: Video, run: Run) -> Tensor:
        forward: nn.Module = model
        if not run.is_reference:
            group = run.mesh.get_group("sequence")
            model.split = partial(
                split_forward_gather_backward, process_group=group, dim=1, grad_scale="down"
            )
            model.gather = partial(gather_forward_split_backward, process_group=group, dim=1, grad_scale="up")
            model.attention.tokens = Spread(group)
            if not self.is_forgetful:
                model.part.tokens = Spread(group)
            forward = DistributedDataParallel(model)
        loss = forward(torch.randn(2, TOKENS, 4)).square().mean()
        loss.backward()
        return loss


FORWARD_MUTANTS = [
    Mutant(
        f"forward: {part.__name__.lower()} of its own tokens",
        (),
        Forward(part),
        MESHES,
        "values",
        ("sequence",),
    )
    for part in Part.__subclasses__()
]
