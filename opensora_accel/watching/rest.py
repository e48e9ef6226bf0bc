"""Shards and optimizer states that one rank alone holds, which no other rank's can be compared with.

Nobody writes them between a step's first forward and its optimizer. So a number of their bits is taken before and
after, in a step that is looked at:

    rank 1, rows 2 and 3 of blocks.0.weight    before the forward 17    before the optimizer 40    a bit was flipped
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from opensora_accel.communications import gather_objects
from opensora_accel.fsdp import reshard
from opensora_accel.observe import Holders, digest, digest_of_all, local_part, states_of


class AtRest:
    """Looks at what no other rank holds. All ranks call its methods alike."""

    def __init__(self, model: nn.Module, holders: Mapping[str, Holders]):
        self._model = model
        self._alone = {name for name, each in holders.items() if not each.same}
        self._before: dict[str, Tensor] | None = None

    def before_forward(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Before each forward of a step that is looked at, of which the first counts."""
        if self._before is None and self._alone:
            reshard(self._model)  # validation may have left gathered parameters
            self._before = self._digests(optimizers)

    def forget(self) -> None:
        """The step is over."""
        self._before = None

    def changed(self, optimizers: Iterable[torch.optim.Optimizer]) -> str:
        """What has changed since, on which rank; "" where nothing has. The same on all ranks.

        Communication: an object all-gather, where some rank alone holds anything.
        """
        if not self._alone:
            return ""
        mine: list[str] = []
        if self._before is not None:
            now = self._digests(optimizers)
            both = [name for name in self._before if name in now]
            mine = [name for name in both if not torch.equal(self._before[name], now[name])]
        self._before = None
        everyone = gather_objects(mine)
        found = [(rank, name) for rank, names in enumerate(everyone) for name in names]
        if not found:
            return ""
        rank, name = found[0]
        others = f"; {len(found) - 1} more" if len(found) > 1 else ""
        return f"{name} on rank {rank} has changed between the step's forward and its optimizer{others}"

    @torch.no_grad()
    def _digests(self, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
        found = {
            f"the weight of {name}": digest(local_part(parameter))
            for name, parameter in self._model.named_parameters()
            if name in self._alone
        }
        for name, states in states_of(self._model, optimizers).items():
            if name in self._alone:
                found[f"the optimizer's state of {name}"] = digest_of_all(states.values())
        return found
