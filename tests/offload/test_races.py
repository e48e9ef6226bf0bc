"""No access without an order. And the checks are worth something: they fail when any wait or event is taken away."""

import ast
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from opensora_accel.offload import ActivationManager, manager
from tests.offload.devices import Compute, LateQueues, RaceQueues
from tests.offload.scenarios import SCENARIOS, engine
from tests.tiers import PROVE

SOURCE = Path(importlib.util.find_spec(manager.__name__).origin)
MODES = ("full", "selective")


def expected(scenario, mode):
    with engine(ActivationManager()) as plain:
        return SCENARIOS[scenario](plain, mode)


def run_late(scenario, mode, cls=ActivationManager):
    queues = LateQueues()
    with engine(cls(lambda _device: queues)) as late:
        return SCENARIOS[scenario](late, mode), queues


def races(scenario, mode, cls=ActivationManager):
    queues = RaceQueues()
    with engine(cls(lambda _device: queues)) as checked, Compute(queues):
        SCENARIOS[scenario](checked, mode)
        checked.close()
    return queues.races


def same(found, wanted):
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_copies_that_are_late_change_no_bit(scenario, mode):
    found, queues = run_late(scenario, mode)
    assert same(found, expected(scenario, mode))
    assert queues.freed_under_copy == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_access_is_ordered(scenario, mode):
    assert [str(race) for race in races(scenario, mode)] == []


def is_order(node):
    """A call that states an order: `x.wait(...)`, `x.record(...)`, `x.synchronize()`, `self._wait_for_...()`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    name = node.func.attr
    return name in ("wait", "record", "synchronize", "_synchronize") or name.startswith("_wait_for_copies")


def order_sites():
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    sites = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            found = [node for node in ast.walk(function) if is_order(node)]
            for number, node in enumerate(sorted(found, key=lambda n: (n.lineno, n.col_offset))):
                sites[f"{function.name}-{number}-{node.func.attr}"] = (
                    node.lineno,
                    node.col_offset,
                    node.func.attr,
                )
    return sites


SITES = order_sites()


def without(site):
    """The engine with one order taken away: nothing in place of the call."""

    class Remove(ast.NodeTransformer):
        removed = 0

        def visit_Call(self, node):
            self.generic_visit(node)
            if is_order(node) and (node.lineno, node.col_offset, node.func.attr) == SITES[site]:
                self.removed += 1
                return ast.copy_location(ast.Constant(None), node)
            return node

    remove = Remove()
    tree = remove.visit(ast.parse(SOURCE.read_text(encoding="utf-8")))
    assert remove.removed == 1
    module = types.ModuleType("mutated_manager")
    sys.modules[module.__name__] = module  # dataclasses look it up
    exec(compile(ast.fix_missing_locations(tree), str(SOURCE), "exec"), vars(module))
    return module.ActivationManager


def test_all_orders_of_the_engine_are_known():
    assert len(SITES) >= 12, SITES


@PROVE
@pytest.mark.parametrize("site", SITES)
def test_without_any_one_order_there_is_a_race(site):
    assert any(races(scenario, mode, without(site)) for mode in MODES for scenario in SCENARIOS), site


SEEN_LATE = (
    "offload-0",
    "_copy_out-2",
    "_wait_for_copies_out-0",
    "_take-0",
    "_wait_for_copies_in-0",
    "_fetch-2",
    "_fetch-3",
)
"""Those that make somebody wait for a copy. The others keep a copy from being early, which a late one cannot show."""


@pytest.mark.parametrize("site", [site for site in SITES if site.startswith(SEEN_LATE)])
def test_without_a_wait_for_a_copy_there_is_nan(site):
    mutated = without(site)

    def is_wrong(scenario, mode):
        found, queues = run_late(scenario, mode, mutated)
        return queues.freed_under_copy or not same(found, expected(scenario, mode))

    assert any(is_wrong(scenario, mode) for mode in MODES for scenario in reversed(SCENARIOS)), site
