"""The optimizer's steps within one call of a user's step, and how one device takes them for several data ranks.

Ranks average their gradients before each optimizer step. One device takes the data ranks' batches in turns, so after
its first optimizer step no turn has the ranks' weights: each has stepped by its own gradient. So the turns are run
again, and gradients are exchanged for their mean as soon as backward has made them. With two turns and three steps:

    round 0    turn 0 has g₁, turn 1 has h₁                                   says m₁ = (g₁ + h₁) / 2
    round 1    both step by m₁, and have g₂ and h₂ at the same weights         says m₂
    round 2    both step by m₁ and m₂, and have g₃ and h₃                      says m₃
    round 3    both step by all three: parameters, norms and losses are those of data ranks that average

The exchange comes behind backward, so what the loop does with gradients afterwards (a clip, a norm that it logs, a
buffer that it accumulates in) is done with the mean. One more round moves the means by rounding errors, and shows what
an optimizer makes of these: Lion and Adam turn a gradient of 1e-17 into a step of full length.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensora_accel.verify.fit import largest
from opensora_accel.verify.parameters import named_parameters, whole
from opensora_accel.wrapping import replaced

MOST_STEPS = 16
# Of gradients and parameters that are kept, on each rank.
_MOST_BYTES = 64 * 2**20
# Rounding errors of a sum over ranks: of a gradient itself, and of the largest one, which cancels in others.
_OF_ITSELF, _OF_LARGEST = 1e-14, 1e-15
# Of a group of parameters: what schedulers leave there for themselves, and what changes no number.
_NO_SETTINGS = {"params", "initial_lr", "foreach", "fused", "capturable", "differentiable"}

Gradients = dict[str, Tensor]
"""As they are in `.grad`, by the names of the parameters that have one."""


@dataclass(frozen=True)
class MeanGradients:
    """The mean over turns of what one iteration's backwards leave in `.grad`."""

    by_backward: tuple[Gradients, ...]
    counts: tuple[int, ...]  # of backwards, by turn

    @classmethod
    def of(cls, turns: Sequence[Sequence[Gradients]]) -> MeanGradients:
        """`turns`: every turn's gradients after each of its backwards."""
        counts = tuple(map(len, turns))
        # Turns of unlike counts have their last backward in common, after which gradients are complete.
        alike = zip(*turns, strict=True) if len(set(counts)) == 1 else [[turn[-1] for turn in turns]]
        return cls(tuple(map(_mean, alike)), counts)

    def after(self, turn: int, number: int) -> Gradients | None:
        """What stands in the place of a turn's own gradients after a backward, if anything."""
        if len(set(self.counts)) == 1:
            return self.by_backward[number] if number < len(self.by_backward) else None
        return self.by_backward[-1] if number == self.counts[turn] - 1 else None


def _mean(turns: Sequence[Gradients]) -> Gradients:
    """A turn without a gradient (an expert that none of its tokens reached) counts as zero."""
    names = dict.fromkeys(name for turn in turns for name in turn)
    return {n: torch.stack([turn[n] for turn in turns if n in turn]).sum(0) / len(turns) for n in names}


class CannotReplay(Exception):
    """Gradients cannot be exchanged."""


@dataclass(frozen=True)
class Replay:
    """How optimizer steps after the first are followed.

    Attributes:
        most: how many iterations are kept at most.
        means: on one device, what stands in the place of its own gradients, by iteration.
        is_noisy: whether these are moved by rounding errors.
        weights: by turn, what parameters become after each step of the optimizer, the last of them also later.
        starts_there: whether they have the first of these from the begin.
    """

    most: int = MOST_STEPS
    means: tuple[MeanGradients, ...] = ()
    is_noisy: bool = False
    weights: tuple[tuple[Mapping[str, Tensor], ...], ...] = ()
    starts_there: bool = False

    @torch.no_grad()
    def put_weights(self, model: nn.Module, turn: int, num_steps: int) -> None:
        """Gives parameters the values that are meant for them after so many steps."""
        if not self.weights or (not num_steps and not self.starts_there):
            return
        values = self.weights[turn]
        now = values[min(max(num_steps - 1, 0), len(values) - 1)]
        for name, parameter in named_parameters(model):
            parameter.copy_(now[name])

    def exchange(self, model: nn.Module, turn: int, iteration: int, backward: int) -> Gradients | None:
        """Exchanges what backward has left in `.grad`; where nothing is to be exchanged, returns it."""
        parameters = dict(named_parameters(model))
        if any(p.grad is not None and _is_special(p.grad) for p in parameters.values()):
            raise CannotReplay("gradients on one device are sharded, or sparse")
        if iteration >= len(self.means):
            return {n: p.grad.detach().clone() for n, p in parameters.items() if p.grad is not None}
        means = self.means[iteration].after(turn, backward)
        size = largest((means or {}).values())
        for name, mean in (means or {}).items():
            parameter = parameters[name]
            if self.is_noisy:
                mean = _moved(mean, size, f"{name} {iteration} {backward}")
            if parameter.grad is None:
                parameter.grad = mean.clone()
            else:
                parameter.grad.copy_(mean)  # others may hold it
        return None


def _is_special(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) or gradient.layout != torch.strided


def _moved(gradient: Tensor, size: float, name: str) -> Tensor:
    """By rounding errors, where it is not exactly zero."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
    return gradient + (gradient != 0) * noise * (_OF_ITSELF * gradient.abs() + _OF_LARGEST * size)


def most_steps_of(parameters: Mapping[int, tuple[str, nn.Parameter]]) -> int:
    """How many iterations of a model may be kept."""
    size = sum(2 * 8 * parameter.numel() for _, parameter in parameters.values())
    return max(1, min(MOST_STEPS, _MOST_BYTES // max(size, 1)))


@contextmanager
def after_each_backward(call: Callable[[], None]) -> Iterator[None]:
    """Within it `call` is called after every backward that is no part of another."""
    backward = torch.autograd.backward

    def watched(*args: Any, **kwargs: Any) -> None:
        is_inner = torch._C._current_graph_task_id() != -1
        backward(*args, **kwargs)
        if not is_inner:
            call()

    with replaced(torch.autograd, "backward", watched):
        yield


@dataclass
class Held:
    """What optimizers hold when they are about to step, by the names of the parameters."""

    settings: dict[str, dict[str, tuple[float, ...]]] = field(default_factory=dict)
    # Norms of what they remember of a parameter, in its own shape.
    states: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Communication: an all-gather of every state that is a DTensor."""
        names = {id(parameter): name for name, parameter in named_parameters(model)}
        for group in optimizer.param_groups:
            numbers = {key: _numbers(each) for key, each in group.items() if key not in _NO_SETTINGS}
            settings = {key: each for key, each in numbers.items() if each}
            for parameter in group["params"]:
                if id(parameter) in names:
                    name = names[id(parameter)]
                    self.settings[name] = settings
                    self.states[name] = _norms(parameter, optimizer.state.get(parameter, {}))


def _numbers(value: Any) -> tuple[float, ...]:
    """The numbers of a setting: of a learning rate one, of betas two; none of what is no number."""
    values = value if isinstance(value, (list, tuple)) else [value]
    values = [each.item() if isinstance(each, Tensor) and each.numel() == 1 else each for each in values]
    return tuple(map(float, values)) if all(isinstance(each, (int, float)) for each in values) else ()


def _norms(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for key, value in state.items():
        is_like = isinstance(value, Tensor) and value.shape == parameter.shape
        if is_like and isinstance(value, DTensor) == isinstance(parameter, DTensor):
            found[key] = whole(value).norm().item()
    return found
