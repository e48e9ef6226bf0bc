"""What a Plan turns on that is an experiment: the one way from the library to `opensora_accel.experiments`.

    Plan(two_level="on")    init_parallel(plan)       calls by_node.init_parallel(plan, ranks)
                            shard_parameters(…)       calls fsdp_collectives.shard_unit(plan, unit, kept)

Experiments import the library, and no module of it imports them: they are loaded by name, where a field asks for one.
Without their folder every other Plan runs as before.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from types import ModuleType
from typing import Any, TypeVar

from opensora_accel.plan import Plan

_PACKAGE = "opensora_accel.experiments"
# Modules by the field that turns them on.
_MODULES = {
    "overlap_ulysses": ("overlap",),
    "reduce_dtype": ("fsdp_collectives",),
    "gather_dtype": ("fsdp_collectives",),
    "two_level": ("by_node", "fsdp_collectives"),
}
FunctionT = TypeVar("FunctionT")


def has_experiments() -> bool:
    """Whether this installation has them."""
    try:
        return importlib.util.find_spec(_PACKAGE) is not None
    except ModuleNotFoundError:
        return False


def experiment(name: str) -> Any:
    """The module of that name.

    Raises:
        ValueError: this installation has no experiments.
    """
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name not in (_PACKAGE, f"{_PACKAGE}.{name}"):
            raise
        raise ValueError(
            f"{name} is an experiment, and {_PACKAGE} is not installed; install the whole package, or leave out the "
            "option that asks for it"
        ) from None


def experiments_of(plan: Plan) -> list[ModuleType]:
    """The experiments that the Plan turns on."""
    changed = {each.name for each in dataclasses.fields(plan) if getattr(plan, each.name) != each.default}
    names = (name for field, names in _MODULES.items() if field in changed for name in names)
    return [experiment(name) for name in dict.fromkeys(names)]


def call_experiments(step: str, plan: Plan, *args: Any) -> None:
    """Calls `step(plan, *args)` of each experiment that the Plan turns on and that has such a function."""
    for module in experiments_of(plan):
        function = getattr(module, step, None)
        if function is not None:
            function(plan, *args)


def from_experiments(plan: Plan, function: FunctionT) -> FunctionT:
    """What an experiment has under the function's name, in place of the library's own function."""
    name: str = function.__name__  # type: ignore[attr-defined]
    return next((getattr(each, name) for each in experiments_of(plan) if hasattr(each, name)), function)
