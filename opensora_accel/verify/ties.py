"""Weights that are one tensor under two names on one device (an embedding and the head), and two on ranks.

Memory that is given to every parameter by itself, a load that assigns, or a module that is exchanged parts them. Both
halves start with the same values, so that loss and outputs are right, and each gets a part of one gradient:

    one device    table and head: 5     (3 from the embedding, 2 from the head)
    ranks         table: 3              head: 2        and after a step they are two matrices

Who keeps two tensors on purpose (the first and the last stage of a pipeline) adds up both gradients: 5 and 5 are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from opensora_accel.observe import MeshShape, find_call_site
from opensora_accel.verify.causes import Cause, list_names
from opensora_accel.verify.observation import Observation, Probe
from opensora_accel.verify.parameters import named_modules
from opensora_accel.verify.results import Results
from opensora_accel.wrapping import replaced


def all_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every name of every parameter, also those that are one."""
    return {
        f"{prefix}.{name}".lstrip("."): parameter
        for prefix, module in named_modules(model)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter that has several, with its first."""
    firsts: dict[int, str] = {}
    names = {name: firsts.setdefault(id(parameter), name) for name, parameter in all_names(model).items()}
    return {name: first for name, first in names.items() if name != first}


@dataclass(frozen=True)
class Untied(Cause):
    """`names`: of each pair the further name and the first one."""

    kind = "untied"
    first: str = ""
    other: str = ""
    # Which part of the gradient's norm each of them has, and whether they add up to it; on the first wrong mesh.
    shares: tuple[float, float] | None = None
    is_sum: bool = False
    starts_apart: bool = False
    step: int = 0  # after which values are apart and gradients were right; 0 where gradients are wrong
    lines: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        two = f"{self.other} and {self.first} are one tensor on one device and two {self.where}"
        rest = len(self.names) - 2
        two += f" ({rest} more names are parted so)" if rest > 0 else ""
        if self.starts_apart:
            return f"{two}, which start with other values"
        if self.step:
            return f"{two}, and after step {self.step} they have other values"
        if self.shares is None:
            return two
        mine, other = self.shares
        both = "; both add up to it" if self.is_sum else ""
        return (
            f"{two}: of its gradient's norm {self.first} gets {mine:.0%} and {self.other} {other:.0%}{both}"
        )

    @property
    def remedy(self) -> str:
        at = f" (they come apart at {list_names(self.lines)})" if self.lines else ""
        return (
            f"tie them again after what gives them memory, loads or exchanges them{at}, before the model is wrapped "
            f"and the optimizer made: model.tie_weights(), or model.{self.other} = model.{self.first}. What has to be "
            "two, as on two stages of a pipeline, gets the sum of both gradients"
        )


class TieProbe(Probe):
    """Notes the model's ties, and on ranks the lines at which they end."""

    def __init__(self, observation: Observation):
        self._observation = observation
        self._model: nn.Module | None = None
        self._depth = 0

    def watch(self, model: nn.Module) -> Callable[[], None]:
        self._model = model
        self._observation.tied.update(tied_names(model))
        return lambda: None

    @contextmanager
    def around(self) -> Iterator[None]:
        with ExitStack() as undo:
            # A model without ties costs nothing.
            for owner, name in _CHANGING if self._observation.tied else ():
                undo.enter_context(replaced(owner, name, self._looking(getattr(owner, name))))
            yield

    def _looking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            is_set = function.__name__ == "__setattr__"
            if is_set and not isinstance(args[-1], (nn.Parameter, nn.Module)):
                return function(*args, **kwargs)
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._look()

        return change

    def _look(self) -> None:
        assert self._model is not None
        now = all_names(self._model)
        for name, first in self._observation.tied.items():
            if name in now and first in now and now[name] is not now[first]:
                self._observation.untied_at.setdefault(name, find_call_site().caller)
            elif name in self._observation.untied_at:
                del self._observation.untied_at[name]  # tied again


# What parts them; each looks when the outermost of them ends.
_CHANGING: tuple[tuple[type, str], ...] = (
    (nn.Module, "__setattr__"),
    (nn.Module, "register_parameter"),
    (nn.Module, "_apply"),
    (nn.Module, "load_state_dict"),
)


def find_untied(results: Results, step: int = 0) -> list[Untied]:
    """Ties that ranks have not, where gradients of both names are not what one device has.

    Args:
        step: where parameters after it stand in the place of gradients.
    """
    bad: dict[str, list[MeshShape]] = {}
    fields: dict[str, Any] = {}
    lines: dict[str, None] = {}
    for mesh in results.ran:
        for other, pair in mesh.untied.items():
            if pair.is_kept:
                continue
            first = mesh.expected.first.tied[other]
            for name in (other, first):
                bad.setdefault(name, []).append(mesh.shape)
            seen = mesh.observations
            lines |= {each.untied_at[other]: None for each in seen if other in each.untied_at}
            right = mesh.expected.first.weights.get(first)
            starts = {each.weights.get(other, right) for each in seen}
            fields = fields or {
                "first": first,
                "other": other,
                "shares": None if step else pair.shares,
                "is_sum": pair.is_sum,
                "starts_apart": not step and starts != {right},
            }
    if not bad:
        return []
    return [
        results.cause(
            Untied, bad, num_names=len(results.weight_names), step=step, lines=tuple(lines), **fields
        )
    ]
