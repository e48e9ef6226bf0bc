"""Any order of forwards, backwards, aborts and repeats gives the plain gradients, with every copy late and in order."""

import gc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opensora_accel import checkpoint as ck
from opensora_accel.offload import OffloadEngine
from opensora_accel.offload.device import CudaQueues
from tests.offload.devices import LateQueues
from tests.offload.scenarios import ENTRY_BYTES, Aborted, engine, forward, model
from tests.stand_in_streams import Schedule
from tests.tiers import some

ACTIONS = (
    "forward",
    "forward",
    "oldest",
    "newest",
    "retain",
    "drop",
    "explode",
    "no_grad",
    "explode in forward",
)


def play(blocks, actions):
    """Runs the actions, as far as there is a graph to act on; the gradients that add up."""
    graphs = []
    for number, (action, place) in enumerate(actions):
        if action == "forward":
            graphs.append(forward(blocks, seed=number))
        elif action == "no_grad":
            with torch.no_grad():
                forward(blocks, seed=number)
        elif action == "explode in forward":
            site = blocks[place % len(blocks)].up.register_forward_hook
            explode(site, lambda number=number: forward(blocks, seed=number))
        elif graphs:
            graph = graphs.pop(-1 if action == "newest" else 0)
            if action == "explode":
                before = [None if p.grad is None else p.grad.clone() for p in blocks.parameters()]
                explode(blocks[place % len(blocks)].up.weight.register_hook, graph.backward)
                for parameter, gradient in zip(blocks.parameters(), before, strict=True):
                    parameter.grad = gradient  # how far it got is not what is compared
            elif action == "retain":
                graph.backward(retain_graph=True)
                graphs.append(graph)
            elif action != "drop":
                graph.backward()
            del graph
    for graph in graphs:
        graph.backward()
    return [torch.zeros(1) if p.grad is None else p.grad for p in blocks.parameters()]


def explode(site, call):
    """`site` is a module's or a tensor's `register_..._hook`."""

    def hook(*_):
        raise Aborted

    handle = site(hook)
    with pytest.raises(Aborted):
        call()
    handle.remove()


def offloaded(make_queues, mode, room, actions):
    manager = OffloadEngine(make_queues)
    blocks = model(3)
    with engine(manager):
        manager.setup_arena(room)
        ck.checkpoint_blocks(blocks, mode, 1.0, keep_last=0)
        found = play(blocks, actions)
        # After a backward that failed, autograd keeps what it did not reach until the next one (torch 2.13).
        torch.ones(1, requires_grad=True).sum().backward()
        gc.collect()
        assert manager.counters.in_use_bytes == 0, "bytes were lost"
        manager.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", some(["full", "selective"], "selective"))
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3)), min_size=2, max_size=9),
    entries=st.integers(1, 9),
)
def test_any_order_gives_the_plain_gradients(mode, actions, entries):
    plain = model(3)
    expected = play(plain, actions)
    late = LateQueues()
    found = offloaded(lambda _device: late, mode, entries * ENTRY_BYTES, actions)
    assert all(map(torch.equal, found, expected)) and late.freed_under_copy == 0
    with Schedule() as schedule:
        found = offloaded(CudaQueues, mode, entries * ENTRY_BYTES, actions)
    assert all(map(torch.equal, found, expected)) and schedule.races == []


def test_the_gradients_are_of_something():
    assert all(bool((g != 0).any()) for g in play(model(3), [("forward", 0)]))
