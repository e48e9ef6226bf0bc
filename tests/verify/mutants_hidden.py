"""Mistakes of users' own loops that something else hides: another mistake, or what is no mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.communications import share_sizes
from opensora_accel.observe.meshes import Run
from tests.verify.defects import Mutant
from tests.verify.loops import Small, batch, finish, spread
from tests.verify.meshes import Meshes
from tests.verify.mutants_of_loops import SEQUENCE, mutant


@dataclass
class Conditions:
    """As models of diffusers hand them on: nested, and no dict."""

    text: dict[str, list[Tensor]]


class Placed(Small):
    """Every token is told its place; a rank is told where its tokens begin."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.pool, self.text = nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(4, 4)
        self.is_pooled, self.mean = False, lambda x: x.mean(1, keepdim=True)

    def forward(self, x: Tensor, offset: Tensor, conditions: Conditions | None = None) -> Tensor:  # type: ignore[override]
        enter, leave = self.region or (lambda x: x, lambda x: x)
        if conditions is not None:
            x = x + self.text(conditions.text["clip"][0])
        x = enter(self.embed(x))
        at = torch.arange(x.size(1), dtype=x.dtype) + offset
        x = x + self.places(at[:, None] / 7)
        if self.is_pooled:
            x = x + self.pool(self.mean(x))
        return leave(self.out(x + torch.tanh(self.mlp(self.norm(x)))))


def offset_of(run: Run, num_tokens: int = 11) -> Tensor:
    """Where this rank's tokens begin."""
    if run.is_reference or run.shape.degree("sequence") == 1:
        return torch.tensor(0)
    group = run.mesh.get_group("sequence")
    return torch.tensor(sum(share_sizes(num_tokens, group.size())[: group.rank()]))


def placed(model: Any, run: Run, scale_up: str | None = "up") -> Tensor:
    forward = spread(model, run, scale_up, find_unused_parameters=True)
    return finish(forward(batch(), offset_of(run)))


def told_its_place_and_scaled(model: Any, run: Run) -> Tensor:
    return placed(model, run, None)


class _Rolled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.roll(1, 1)


def told_its_place_and_mixed_in_backward(model: Any, run: Run) -> Tensor:
    if not run.is_reference and run.shape.degree("sequence") > 1:
        model.mlp.register_forward_hook(lambda _module, _args, output: _Rolled.apply(output))
    return placed(model, run)


def told_its_place_and_pools_its_own(model: Any, run: Run) -> Tensor:
    model.is_pooled = True
    return placed(model, run)


def microbatches(model: Any, run: Run, seed_by_rank: Callable[[int], bool], nested: bool = False) -> Tensor:
    forward, total = spread(model, run, find_unused_parameters=True), torch.zeros(())
    for micro in range(2):
        seed = run.rank if seed_by_rank(micro) and not run.is_reference else run.data_rank
        noise = torch.randn(2, 11, 4, generator=torch.Generator().manual_seed(100 * micro + seed))
        conditions = Conditions({"clip": [noise]}) if nested else None
        x = torch.randn(2, 11, 4, generator=torch.Generator().manual_seed(7 + run.data_rank))
        arguments = (x, offset_of(run), conditions) if nested else (x + noise, offset_of(run))
        loss = forward(*arguments).square().mean() / 2
        loss.backward()
        total += loss.detach()
    return total


def second_microbatchs_noise_by_rank(model: Any, run: Run) -> Tensor:
    return microbatches(model, run, lambda micro: micro == 1)


def nested_noise_by_rank(model: Any, run: Run) -> Tensor:
    return microbatches(model, run, lambda micro: True, nested=True)


def refuses_heads_and_scales(model: Any, run: Run) -> Tensor:
    if run.shape.degree("sequence") == 3:
        raise ValueError("4 heads do not divide by 3 ranks")
    forward = spread(model, run, None)
    return finish(forward(batch()))


def drops_heads_and_scales(model: Any, run: Run) -> Tensor:
    """Channels of 8: with 3 ranks, the last 2 are left out."""
    degree = run.shape.degree("sequence")
    if degree > 1:
        kept = torch.arange(8) < 8 // degree * degree
        model.mlp.register_forward_hook(lambda _module, _args, output: output * kept)
    forward = spread(model, run, None)
    return finish(forward(batch()))


HEADS: Meshes = (
    {"data": 2, "sequence": 2},
    {"data": 1, "sequence": 4},
    {"data": 1, "sequence": 3},
    {"data": 3, "sequence": 1},
)


def _mutant(name: str, step: Any, kind: str, factor: str = "", **options: Any) -> Mutant:
    return mutant(
        name, step, kind, ("sequence",), factor, **({"model_fn": Placed, "meshes": SEQUENCE} | options)
    )


HIDDEN_MUTANTS = [
    _mutant("an exact factor, and a place for each rank", told_its_place_and_scaled, "scale", "sequence⁻¹"),
    _mutant("mixed in backward, and a place for each rank", told_its_place_and_mixed_in_backward, "values"),
    _mutant("pooled over its own tokens, and a place for each rank", told_its_place_and_pools_its_own, "values"),
    _mutant("noise by rank in the second microbatch", second_microbatchs_noise_by_rank, "inputs"),
    _mutant("noise by rank in a nested argument", nested_noise_by_rank, "inputs"),
    _mutant(
        "1/sp, and heads that are refused", refuses_heads_and_scales, "scale", "sequence⁻¹", model_fn=Small,
        meshes=HEADS,
    ),
    _mutant(
        "1/sp, and heads that are dropped", drops_heads_and_scales, "scale", "sequence⁻¹", model_fn=Small,
        meshes=HEADS,
    ),
]  # fmt: skip
