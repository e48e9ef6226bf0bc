"""Random numbers that are drawn within the model: a functional dropout, the sampling of a VAE, a caption drop.

They are seen by torch's dispatcher, in runs whose modules are traced. Ranks that share a sample have to draw what one
device draws for it. A rank that draws for its own tokens only has other numbers in any case, so such a draw has to be
turned off for the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensora_accel.observe import MeshShape, find_call_site
from opensora_accel.verify.causes import Cause, Where, list_names
from opensora_accel.verify.observation import Draw, Observation, Probe
from opensora_accel.verify.parameters import digest, is_transformed

if TYPE_CHECKING:
    from torch._ops import OpOverload


@dataclass(frozen=True)
class DrawsInModel(Cause):
    kind = "draws"
    lines: tuple[str, ...] = ()
    is_of_parts: bool = False  # ranks draw for what they hold of a sample

    @property
    def what(self) -> str:
        at = list_names(self.lines)
        if self.is_of_parts:
            return f"the model draws random numbers for a rank's own part of a sample {self.where}, at {at}"
        return f"ranks that share a sample draw other random numbers within the model {self.where}, at {at}"

    @property
    def remedy(self) -> str:
        if self.is_of_parts:
            return (
                "no rank can have one device's numbers there, so nothing is proven: turn the draw off for the proof "
                "(p = 0), and see that ranks with other tokens draw other numbers in training"
            )
        return (
            "what is drawn for a sample must depend on the data rank only: seed its generator by run.data_rank, and "
            "let no rank draw more often than its peers"
        )


class DrawProbe(Probe):
    """Notes every draw while the model runs."""

    def __init__(self) -> None:
        self.draws: list[Draw] = []
        self._depth = 0

    @contextmanager
    def around(self) -> Iterator[None]:
        with _Mode(self):
            yield

    def watch(self, model: nn.Module) -> Callable[[], None]:
        def enter(module: nn.Module, _args: Any) -> None:
            self._depth += module is model  # hooks are copied with a model

        def leave(module: nn.Module, _args: Any, _output: Any) -> None:
            self._depth -= module is model

        before = model.register_forward_pre_hook(enter)
        after = model.register_forward_hook(leave, always_call=True)

        def remove() -> None:
            before.remove()
            after.remove()

        return remove

    def note(self, func: OpOverload, result: Any) -> None:
        is_draw = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name()
        if not is_draw or not self._depth or torch._C._current_graph_task_id() != -1 or is_transformed():
            return
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and not isinstance(each, DTensor):
                self.draws.append(Draw(find_call_site().caller, func.name(), digest(each)))


class _Mode(TorchDispatchMode):
    def __init__(self, probe: DrawProbe):
        super().__init__()
        self._probe = probe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._probe.note(func, result)
        return result


def find_draws(
    shape: MeshShape, turns: Sequence[Observation], ranks: Sequence[Observation], where: Where
) -> list[Cause]:
    """Where ranks draw otherwise than the single device's turn, whose model ran with the same inputs."""
    apart, parts = dict[str, None](), dict[str, None]()
    for data_rank in range(shape.data_size if len(turns) == shape.data_size else 0):
        for rank in shape.ranks_of(data_rank):
            for own, right in zip(ranks[rank].draws, turns[data_rank].draws, strict=False):
                if (own.line, own.operator) != (right.line, right.operator):
                    break  # another branch: what follows cannot be told apart
                if own.shape != right.shape:
                    parts.setdefault(own.line)
                elif own.digest != right.digest:
                    apart.setdefault(own.line)
    kinds = ((apart, False), (parts, True))
    return [DrawsInModel(where, lines=tuple(lines), is_of_parts=p) for lines, p in kinds if lines]
