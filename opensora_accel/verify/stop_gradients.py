"""What a step takes out of the graph on purpose, kept as it was while parameters move.

Of loss = x · x.detach() at x = 3 the gradient is 3, as its author means it, and the loss changes by 6: `x.detach()`
moves with x. So it is recorded once, and what was recorded stands in its place when x is moved:

    recorded = StopGradients()
    with recorded:                    # x = 3:    x.detach() is 3
        step()
    with recorded.again():            # x = 3.1:  x.detach() is still 3, and the loss changes by 3 · 0.1
        step()

On purpose is: `detach`, `.data`, numbers (`item`, `tolist`, `float`), and all that is computed while gradients are off,
except in the forward of a `torch.autograd.Function`, which has a backward to answer for. What runs again within
backward (a checkpoint) is let alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from opensora_accel.observe import find_call_site
from opensora_accel.verify.observation import Probe
from opensora_accel.wrapping import replaced

_DETACH = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
_NUMBERS = (Tensor.item, Tensor.tolist, Tensor.__float__)


@contextmanager
def around_functions(wrap: Callable[[Any, Any, Any, Any], Any]) -> Iterator[None]:
    """Within it `wrap(function, call, args, kwargs)` stands for every call of a `torch.autograd.Function`."""
    original = torch.autograd.Function.__dict__["apply"].__func__

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return wrap(cls, partial(original, cls), args, kwargs)

    with replaced(torch.autograd.Function, "apply", classmethod(apply)):
        yield


class StopGradients(Probe):
    """Records when entered first; `again()` plays that back, each time from its beginning.

    Attributes:
        lines: where something was taken out of the graph.
        is_off: a run took out other things than the one that was recorded.
    """

    def __init__(self, recorded: StopGradients | None = None):
        self.lines: dict[str, None] = {}
        self.is_off = False
        self._recorded = recorded
        self._results: list[tuple[Any, Any]] = []
        self._depth = 0  # of functions that have a backward of their own

    def again(self) -> StopGradients:
        """For one more run, with what was recorded."""
        return StopGradients(self)

    @contextmanager
    def around(self) -> Iterator[None]:
        with around_functions(self._enter), _Mode(self):
            yield

    def _enter(self, _function: Any, call: Any, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            self._depth -= 1

    def pass_on(self, function: Any, args: Any, kwargs: Any) -> Any:
        """What a call gives: in later runs what it gave in the first."""
        result = function(*args, **kwargs)
        if self._depth or torch._C._current_graph_task_id() != -1:
            return result
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        is_detached = function in _DETACH and given[0].requires_grad
        is_number = function in _NUMBERS and (given[0].requires_grad or not torch.is_grad_enabled())
        if is_detached or is_number:
            self.lines.setdefault(find_call_site().caller)
            return self._next(function, result)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.is_floating_point()]
        if torch.is_grad_enabled() or not made or function in _DETACH:
            return result
        if any(each.requires_grad for each in given):
            self.lines.setdefault(find_call_site().caller)
        # What lies where an argument lies is a view of it, which keeps up by itself, or the argument, which was
        # written to; all else is new, and nobody else's.
        memory = {each.untyped_storage().data_ptr() for each in given if not each.is_meta}
        written = [each for each in made if any(each is other for other in given) and not each.requires_grad]
        new = [each for each in made if each.untyped_storage().data_ptr() not in memory]
        for each in (*new, *written):
            each.copy_(self._next(function, each))
        return result

    def _next(self, function: Any, result: Any) -> Any:
        if self._recorded is None:
            self._results.append(
                (function, tree_map_only(Tensor, lambda each: each.detach().clone(), result))
            )
            return result
        place = len(self._results)
        self._results.append((function, None))
        known = self._recorded._results
        if place >= len(known) or known[place][0] != function or _shapes(known[place][1]) != _shapes(result):
            self._recorded.is_off = True
            return result
        return tree_map_only(Tensor, Tensor.clone, known[place][1])


class _Mode(TorchFunctionMode):
    def __init__(self, stops: StopGradients):
        super().__init__()
        self._stops = stops

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._stops.pass_on(function, args, kwargs or {})


def _shapes(result: Any) -> list[Any]:
    return [each.shape if isinstance(each, Tensor) else type(each) for each in tree_leaves(result)]
