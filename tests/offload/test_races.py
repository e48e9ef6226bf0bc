"""No access without an order. And the checks are worth something: they fail when any wait or event is taken away."""

import gc
import sys

import pytest
import torch

from opensora_accel.offload import OffloadEngine, Queue
from opensora_accel.offload import engine as engine_module
from opensora_accel.offload.device import CudaQueues
from tests.offload.devices import LateQueues
from tests.offload.scenarios import SCENARIOS, engine
from tests.stand_in_streams import Schedule
from tests.tiers import PROVE, each_once

MODES = ("full", "selective")


def expected(scenario, mode):
    with engine(OffloadEngine()) as plain:
        return SCENARIOS[scenario](plain, mode)


def run_late(scenario, mode, queues=None):
    queues = queues or LateQueues()
    with engine(OffloadEngine(lambda _device: queues)) as late:
        return SCENARIOS[scenario](late, mode), queues


def races(scenario, mode, make_queues=CudaQueues):
    with Schedule() as schedule:
        with engine(OffloadEngine(make_queues)) as checked:
            SCENARIOS[scenario](checked, mode)
            checked.close()
        del checked
        gc.collect()
    return schedule.races


def same(found, wanted):
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("scenario", "mode"), each_once(SCENARIOS, MODES))
def test_copies_that_are_late_change_no_bit(scenario, mode):
    found, queues = run_late(scenario, mode)
    assert same(found, expected(scenario, mode))
    assert queues.freed_under_copy == 0


@pytest.mark.parametrize(("scenario", "mode"), each_once(SCENARIOS, MODES))
def test_every_access_is_ordered(scenario, mode):
    assert races(scenario, mode) == []


def without(kind, removed=None):
    """Queues that leave out the order that the engine states at one place; `places` has all that they were asked for.

    A place is a line of the engine. Where that is in a helper that only orders, so is the line that called it.
    """

    class Without(kind):
        def __init__(self, device=None):
            super().__init__(device)
            self.places = {}

        def is_removed(self, name, waits_for_copy):
            frame, found = sys._getframe(2), []
            while frame is not None and frame.f_code.co_filename == engine_module.__file__:
                found.append(f"{frame.f_code.co_name}, line {frame.f_lineno}: {name}")
                if not frame.f_code.co_name.startswith(("_wait_for_copies", "_synchronize")):
                    break
                frame = frame.f_back
            for place in found:
                self.places[place] = self.places.get(place, False) or waits_for_copy
            return removed in found

        def record(self, queue):
            return None if self.is_removed("record", queue is not Queue.COMPUTE) else super().record(queue)

        def wait(self, queue, event):
            waits_for_copy = queue is Queue.COMPUTE or (isinstance(event, tuple) and event[0] is Queue.OUT)
            if not self.is_removed("wait", waits_for_copy) and event is not None:
                super().wait(queue, event)

        def synchronize(self):
            if not self.is_removed("synchronize", False):
                super().synchronize()

    return Without


@pytest.fixture(scope="module")
def places():
    """Where the engine states an order, and whether it makes somebody wait for a copy."""
    watched = without(LateQueues)()
    for scenario in SCENARIOS:
        for mode in MODES:
            run_late(scenario, mode, watched)
    assert len(watched.places) >= 12, watched.places
    return watched.places


@PROVE
def test_without_any_one_order_there_is_a_race(places):
    unseen = [
        place
        for place in places
        if not any(races(s, m, without(CudaQueues, place)) for m in MODES for s in SCENARIOS)
    ]
    assert unseen == []


@pytest.mark.prove
def test_without_a_wait_for_a_copy_there_is_nan(places):
    """The other orders keep a copy from being early, which a late one cannot show."""

    def is_wrong(scenario, mode, place):
        found, queues = run_late(scenario, mode, without(LateQueues, place)())
        return queues.freed_under_copy or not same(found, expected(scenario, mode))

    waits = [place for place, waits_for_copy in places.items() if waits_for_copy]
    unseen = [p for p in waits if not any(is_wrong(s, m, p) for m in MODES for s in reversed(SCENARIOS))]
    assert unseen == []
