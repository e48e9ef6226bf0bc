"""What stands still although steps go on: weights, samples, draws. Each is told once, and ends nothing.

    looks at weights         digest of proj_out.weight   17   17   17   17     its gradient 5, 8, 2, 9: no rate moves it
    four steps from a look   samples                     a    a    a    a      the loader gives the same batch
                             numbers drawn at train.py:41  ε  ε    ε    ε      seeded anew in each step

A run of one batch or of a fixed noise does so by intention; a warning is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from opensora_accel.communications import gather_objects
from opensora_accel.observe import digest, local_part
from opensora_accel.watchdog import named
from opensora_accel.watching.inputs import Draw, Draws

logger = logging.getLogger(__name__)

# Looks between which a weight has not moved; steps in which draws and samples are the same.
_LOOKS, _STEPS = 3, 4
# Two ranks may draw the same few numbers by chance.
_FEWEST_NUMBERS = 64


class StillWeights:
    """Weights that have gradients, and do not move from look to look though an optimizer steps."""

    def __init__(self, model: nn.Module):
        self._model, self._is_told = model, False
        self._seen: dict[str, int] = {}
        self._since: dict[str, int] = {}

    @torch.no_grad()
    def look(self, step: int, optimizers: Iterable[torch.optim.Optimizer], has_stepped: bool) -> None:
        """Before an optimizer's step.

        Args:
            has_stepped: whether one has stepped since the last look.

        Communication: an object all-gather, at every look until something was told.
        """
        if self._is_told:
            return
        rates = _rates(optimizers)
        graded = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None and id(parameter) in rates and local_part(parameter).numel()
        }
        gradients = [local_part(p.grad).any() for p in graded.values() if p.grad is not None]
        numbers = [digest(local_part(parameter)) for parameter in graded.values()]
        # In one wait for the device.
        both = (
            torch.stack([*numbers, *(each.to(torch.int64) for each in gradients)]).tolist() if graded else []
        )
        still = []
        for (name, parameter), now, has_gradient in zip(
            graded.items(), both[: len(graded)], both[len(graded) :], strict=True
        ):
            is_still = self._seen.get(name) == now and has_gradient and has_stepped
            self._since[name] = self._since.get(name, 0) + 1 if is_still else 0
            self._seen[name] = now
            if self._since[name] >= _LOOKS:
                still.append((name, rates[id(parameter)]))
        everyone = gather_objects(still)
        # A shard of few numbers may stand still where the others move.
        on_all = [each for each in everyone[0] if all(each in other for other in everyone)]
        if on_all:
            self._is_told = True
            name, rate = on_all[0]
            _warn(
                f"watch: until step {step}, {len(on_all)} weights have had gradients in {_LOOKS + 1} looks and have "
                f"not moved by a bit: {name}, whose learning rate is {rate:.3g} now; look at its schedule, and whether "
                "its type rounds away so small a step"
            )


def _rates(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, float]:
    return {
        id(parameter): float(group.get("lr", 1.0)) * float(group.get("d", 1.0))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


class SameBatches:
    """Samples and draws that are the same in several steps, one after the other."""

    def __init__(self) -> None:
        self._draws: Draws | None = None
        self._steps: list[tuple[tuple[str, ...], frozenset[Draw]]] = []
        self._told: set[str] = set()

    def begin(self) -> None:
        """In a step that is looked at, from its first forward on."""
        if self._draws is None and len(self._told) < 2:
            self._draws, self._steps = Draws().__enter__(), []

    def close(self) -> None:
        """Nothing is followed any more."""
        if self._draws is not None:
            self._draws.__exit__()
            self._draws = None

    def step(self, number: int, samples: Sequence[str]) -> None:
        """The step of this number has ended.

        Communication: an object all-gather, in one of the steps after a look.
        """
        if self._draws is None:
            return
        drawn = [
            each for each in self._draws.seen if each.is_continuous and each.num_numbers >= _FEWEST_NUMBERS
        ]
        self._draws.seen = []
        self._steps.append((tuple(samples), frozenset(drawn)))
        # What the first step has drawn before its first forward was not seen.
        if len(self._steps) <= _STEPS:
            return
        self.close()
        steps = self._steps[1:]
        samples_before = steps[0][0]
        is_stuck = bool(samples_before) and all(each == samples_before for each, _ in steps)
        same = frozenset.intersection(*(drawn for _, drawn in steps))
        everyone = gather_objects((is_stuck, min((each.line for each in same), default="")))
        stuck = [rank for rank, (is_one, _) in enumerate(everyone) if is_one]
        repeated = {rank: line for rank, (_, line) in enumerate(everyone) if line}
        first = number - _STEPS + 1
        if stuck and "samples" not in self._told:
            self._told.add("samples")
            shown = ", ".join(samples_before[:3]) or "the same"
            _warn(f"watch: {named(stuck, 'rank')} trained on the same samples ({shown}) in all steps from {first} to "
                  f"{number}; look at the loader, if there are more")  # fmt: skip
        if repeated and "draws" not in self._told:
            self._told.add("draws")
            line = next(iter(repeated.values()))
            _warn(f"watch: {named([*repeated], 'rank')} drew the same numbers at {line} in all steps from {first} to "
                  f"{number}; seed a generator once, and not in each step")  # fmt: skip


def _warn(what: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("%s", what)
