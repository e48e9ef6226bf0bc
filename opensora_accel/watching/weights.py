"""Which weights a loop trains: every one that has a gradient has an optimizer with a rate, and moves; so does the EMA.

A weight that has to move, and does not, is told from one whose step is rounded away: AdamW moves a weight w by about
its rate, and 1 + 1e-4 is 1 in bf16. So a weight in fp32 counts only if, for some element of it, rate · |gradient| is
above what its type rounds away; of narrower types there is a warning. Optimizers that find their rate (Prodigy,
D-Adaptation) keep beside `lr` a factor d, which begins at 1e-6: their rate is d · lr.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import nn

from opensora_accel.observe import digest, local_part

logger = logging.getLogger(__name__)


class TrainedWeights:
    """What optimizers do to the weights of a model, over the steps that are checked."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.with_gradient: set[str] = set()
        self.with_optimizer: set[int] = set()
        self._foreign: set[str] = set()
        # By name: whether some rate was above 0, and whether its step is larger than what is rounded away.
        self._has_rate: dict[str, bool] = {}
        self._has_to_move: set[str] = set()

    def start(self) -> None:
        """Before the first step."""
        self._before = digests(self._model)

    def held_by(self, optimizer: torch.optim.Optimizer) -> set[int]:
        own = {id(parameter) for parameter in self._model.parameters()}
        return {id(p) for group in optimizer.param_groups for p in group["params"]} & own

    @torch.no_grad()
    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step of an optimizer, when gradients are there."""
        held = self.held_by(optimizer)
        graded = {id(p): name for name, p in self._model.named_parameters() if p.grad is not None}
        self.with_optimizer |= held
        if graded and not held:
            self._foreign.add(type(optimizer).__name__)
        if not held:
            return
        self.with_gradient |= set(graded.values())
        for group in optimizer.param_groups:
            rate = float(group.get("lr", 1.0)) * float(group.get("d", 1.0))
            for parameter in group["params"]:
                name = graded.get(id(parameter))
                if name is None:
                    continue
                self._has_rate[name] = self._has_rate.get(name, False) or rate > 0
                weight, gradient = local_part(parameter), local_part(parameter.grad)
                # Adam's step is the rate times at least |g|, where that is below 1; SGD's is the rate times |g|.
                step = rate * gradient.abs().clamp(max=1.0)
                if (step > 4 * torch.finfo(weight.dtype).eps * weight.abs()).any():
                    self._has_to_move.add(name)

    def mistakes(self, num_steps: int) -> Iterator[tuple[str, str]]:
        """(Mistake, what) on this rank, when the steps are over."""
        names = {name: id(parameter) for name, parameter in self._model.named_parameters()}
        left = [n for n in names if n in self.with_gradient and names[n] not in self.with_optimizer]
        if left:
            yield "optimizer", f"{left[0]} has a gradient and no optimizer; {len(left)} weights in all"
        elif self._foreign and not self.with_optimizer:
            yield "optimizer", f"{', '.join(sorted(self._foreign))} holds none of the model's parameters"
        still = [n for n, has_rate in self._has_rate.items() if not has_rate]
        # Where no weight has a rate, it is about to rise.
        if still and len(still) < len(self._has_rate):
            what = f"{still[0]} has a learning rate of 0, and others have not; {len(still)} weights in all"
            yield "unmoved weight", what
            return
        # Some optimizers take their first step to look around.
        if num_steps < 2:
            return
        dtypes = {name: parameter.dtype for name, parameter in self._model.named_parameters()}
        pairs = zip(names, self._before, digests(self._model), strict=True)
        unmoved = [name for name, before, now in pairs if name in self._has_rate and before == now]
        stuck = [n for n in unmoved if n in self._has_to_move and torch.finfo(dtypes[n]).bits >= 32]
        if stuck:
            what = f"{stuck[0]} has a gradient, and the same bits after {num_steps} steps; {len(stuck)} weights in all"
            yield "unmoved weight", what
        narrow = [n for n in unmoved if self._has_rate[n] and torch.finfo(dtypes[n]).bits < 32]
        if narrow:
            logger.warning(
                "watch: %d weights (%s, …) have not moved in %d steps; in their type, %s, a step may be rounded "
                "away: keep the weights that the optimizer steps in fp32",
                *(len(narrow), narrow[0], num_steps, str(dtypes[narrow[0]]).removeprefix("torch.")),
            )

    def has_moved(self) -> bool:
        return digests(self._model) != self._before


def digests(module: nn.Module) -> list[int]:
    """A number of the bits of each parameter, of this rank's part of it."""
    return torch.stack([digest(local_part(p)) for p in module.parameters()]).tolist()
