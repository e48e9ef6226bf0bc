"""offload="auto": measured once, then as few blocks as the memory needs and no more than the link hides."""

import dataclasses
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from opensora_accel import checkpoint as ck
from opensora_accel.offload import OffloadEngine, Queue, choose
from opensora_accel.offload.choose import BlockCost
from tests.offload.devices import SimulatedQueues
from tests.offload.scenarios import engine

GIB = 2**30


def costs(num=10, size=GIB, forward=1.0, backward=3.0):
    return [BlockCost(size, forward, backward)] * num


def decide(bandwidth=2 * GIB, keep_last=1, **options):
    return choose(
        costs(),
        keep_last=keep_last,
        out_bytes_per_s=bandwidth,
        in_bytes_per_s=bandwidth,
        **options,
    )


def test_without_a_memory_target_all_that_hides_moves():
    decision = decide()
    assert (decision.moved, decision.limited_by, decision.stall_s) == (9, "all blocks", 0.0)
    assert decision.moved_bytes == 9 * GIB and decision.pass_s == 40.0
    assert decision.reason == (
        "9 of 10 blocks wait in host memory: all that may leave, and waiting costs 0.0 ms a pass"
    )
    assert decide(keep_last=3).moved == 7


def test_a_link_that_is_too_slow_limits_the_number():
    # 1.25 s for a copy out behind 1 s of forward: 0.25 s each, of 2 % of 40 s = 0.8 s.
    decision = decide(bandwidth=0.8 * GIB)
    assert (decision.moved, decision.limited_by) == (3, "deadline")
    assert decision.stall_s == pytest.approx(0.75)
    assert "moving one more would wait 1000.0 ms" in decision.reason


def test_a_slow_copy_in_counts_as_well():
    decision = choose(costs(), keep_last=1, out_bytes_per_s=2 * GIB, in_bytes_per_s=GIB / 3.5)
    assert decision.moved == 1 and decision.stall_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("target", "moved", "limited_by"),
    [
        (50, 0, "nothing to gain"),
        (49, 0, "nothing to gain"),
        (48, 1, "memory"),
        (44.5, 5, "memory"),
        (40, 9, "memory"),
    ],
)
def test_memory_takes_the_fewest_that_fit(target, moved, limited_by):
    decision = decide(peak_bytes=40 * GIB, target_bytes=int(target * GIB))
    assert (decision.moved, decision.limited_by) == (moved, limited_by)
    assert decision.peak_bytes == (49 - moved) * GIB <= decision.target_bytes


def test_memory_goes_before_the_deadline_and_says_what_it_costs():
    decision = decide(bandwidth=0.8 * GIB, peak_bytes=40 * GIB, target_bytes=44 * GIB)
    assert (decision.moved, decision.limited_by) == (5, "memory")
    assert "2 more than hide, which waits 1250.0 ms a pass" in decision.reason


def test_a_target_out_of_reach_moves_all_and_says_so():
    decision = decide(peak_bytes=40 * GIB, target_bytes=30 * GIB)
    assert decision.moved == 9
    assert "and still 10.00 GiB above the 30.00 GiB aimed at" in decision.reason


def test_a_device_that_does_not_overlap_gains_nothing():
    decision = decide(overlaps=False)
    assert (decision.moved, decision.limited_by) == (0, "nothing to gain")
    assert "do not run beside compute" in decision.reason


class Timed(nn.Module):
    """A block that takes a second of the simulated device, and two in backward besides its recomputation."""

    def __init__(self, queues):
        super().__init__()
        self.linear, self.queues = nn.Linear(16, 16), queues

    def forward(self, hidden):
        self.queues.compute(1.0)
        out = self.linear(hidden).sin()
        if out.requires_grad:
            out.register_hook(lambda _gradient: self.queues.compute(2.0))
        return out


ENTRY = 4 * 16 * 4


def optimizer_step():
    torch.optim.SGD([torch.zeros(1)]).step()


def train(bandwidth, passes, memory=None, offload="auto", num=10, sizes=None, target=None, queues=None):
    """The manager after some passes, and the simulated seconds of each."""
    queues = queues or SimulatedQueues(bandwidth, memory)
    manager = OffloadEngine(lambda _device: queues)
    manager.memory_target_bytes = target
    torch.manual_seed(0)
    blocks = nn.ModuleList([Timed(queues) for _ in range(num)])
    seconds = []
    with engine(manager):
        manager.setup_arena(1 << 16)
        ck.checkpoint_blocks(blocks, "full", offload)
        for number in range(passes):
            before = queues.now[Queue.COMPUTE]
            forward(blocks, sizes[number] if sizes else 4).backward()
            optimizer_step()
            seconds.append(max(queues.now.values()) - before)
    return manager, seconds, queues


def test_the_second_pass_is_measured_and_decides(caplog):
    with caplog.at_level(logging.INFO):
        manager, seconds, _ = train(ENTRY / 0.5, passes=4)
    (decision,) = manager.decisions
    assert decision.moved == 9 and decision.limited_by == "all blocks"
    assert decision.out_bytes_per_s == pytest.approx(ENTRY / 0.5)
    assert decision.in_bytes_per_s == pytest.approx(ENTRY / 0.5)
    assert decision.pass_s == pytest.approx(10 * (1 + 3)), "forward, and recomputation with backward"
    assert [record.message for record in caplog.records] == [f"offload: {decision.reason}"]
    assert json.loads(json.dumps(decision.to_dict())) == dataclasses.asdict(decision)
    assert seconds[-1] == pytest.approx(40.0), "nothing waits"


def test_what_was_chosen_is_what_moves():
    memory = SimpleNamespace(peak_bytes=18 * ENTRY, total_bytes=26 * ENTRY)
    manager, _, _ = train(ENTRY / 0.5, passes=3, memory=memory)
    assert manager.decisions[0].target_bytes == int(0.9 * 26 * ENTRY)
    assert manager.decisions[0].moved == 4, "18 and the 5 that come back are less than 23.4"
    assert manager.counters.moved == 9 + 9 + 4


def test_a_target_may_be_set():
    memory = SimpleNamespace(peak_bytes=18 * ENTRY, total_bytes=1000 * ENTRY)
    manager, _, _ = train(ENTRY / 0.5, passes=3, memory=memory, target=20 * ENTRY)
    assert manager.decisions[0].moved == 7


def test_the_peak_is_that_of_the_pass_and_not_of_what_comes_after_it():
    """A loop that resets the statistics after each step must not hide the step's peak."""

    class Resetting(SimulatedQueues):
        def peak_bytes(self):
            in_backward = self.now[Queue.IN] > 0 and self.now[Queue.COMPUTE] % 40 > 0
            return 100 * ENTRY if in_backward else ENTRY

        def total_bytes(self):
            return 100 * ENTRY

    manager, _, _ = train(ENTRY / 0.5, passes=3, queues=Resetting(ENTRY / 0.5))
    assert manager.decisions[0].moved == 9 and "above the" in manager.decisions[0].reason


def test_a_slow_link_is_not_waited_for():
    """A copy of 1.5 s behind a forward of 1 s."""
    manager, seconds, _ = train(ENTRY / 1.5, passes=3)
    assert manager.decisions[0].moved == 1
    assert seconds[0] == pytest.approx(40 + 9 * 0.5)
    assert seconds[2] <= 1.02 * 40


def test_a_link_that_just_carries_it_costs_nothing():
    _, forced, queues = train(ENTRY / 0.999, passes=2, offload=1.0)
    _, plain, _ = train(ENTRY / 0.999, passes=2, offload=0.0)
    assert queues.waited_s == 0 and forced == pytest.approx(plain)


def test_every_size_is_decided_for_itself():
    manager, _, _ = train(ENTRY / 0.8, passes=8, sizes=[4, 4, 4, 8, 8, 8, 4, 8])
    assert [d.moved for d in manager.decisions] == [9, 1]
    assert manager.counters.moved == 9 + 9 + 9 + 9 + 9 + 1 + 9 + 1


@pytest.fixture
def four_blocks():
    """On a link that hides everything; with the manager that decides."""
    queues = SimulatedQueues(ENTRY / 0.5)
    manager = OffloadEngine(lambda _device: queues)
    blocks = nn.ModuleList([Timed(queues) for _ in range(4)])
    with engine(manager):
        manager.setup_arena(1 << 16)
        ck.checkpoint_blocks(blocks, "full", "auto")
        yield blocks, manager, queues


def forward(blocks, tokens=4):
    hidden = torch.ones(tokens, 16) * 1
    for block in blocks:
        hidden = block(hidden)
    return hidden.sum()


def test_a_pass_that_never_ends_is_measured_again(four_blocks):
    blocks, manager, _ = four_blocks
    for number in range(14):
        loss = forward(blocks)
        if number != 1:  # the one that is measured: its graph is dropped
            loss.backward()
        optimizer_step()
        assert bool(manager.decisions) == (number >= 11)


def test_a_pass_that_never_ends_does_not_hold_up_another_size(four_blocks):
    blocks, manager, _ = four_blocks
    for number in range(14):
        loss = forward(blocks, tokens=4 if number < 2 else 8)
        if number != 1:
            loss.backward()
        optimizer_step()
    assert len(manager.decisions) == 1


def test_two_microbatches_in_flight_are_measured_apart(four_blocks):
    blocks, manager, _ = four_blocks
    waiting = []
    for _ in range(8):
        waiting.append(forward(blocks))
        if len(waiting) == 2:
            waiting.pop(0).backward()
            optimizer_step()
    assert [d.moved for d in manager.decisions] == [3]
    assert manager.decisions[0].pass_s == pytest.approx(4 * 4)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_nothing_is_measured_before_the_optimizer_has_its_state(four_blocks, accumulation):
    """Two block inputs fit besides the state that the first step makes; before it all would."""
    blocks, manager, queues = four_blocks
    queues._memory = memory = SimpleNamespace(peak_bytes=10 * ENTRY, total_bytes=24 * ENTRY)
    for step in range(3):
        for _ in range(accumulation):
            forward(blocks).backward()
        optimizer_step()
        memory.peak_bytes = 20 * ENTRY
        assert bool(manager.decisions) == (step == 2 or (step == 1 and accumulation > 1))
    assert manager.decisions[0].moved == 2


def test_without_an_optimizer_of_torch_it_is_measured_all_the_same(four_blocks):
    blocks, manager, _ = four_blocks
    for number in range(12):
        forward(blocks).backward()
        assert bool(manager.decisions) == (number >= 9)


def test_where_memory_grows_later_it_is_decided_once_more(four_blocks):
    blocks, manager, queues = four_blocks
    queues._memory = memory = SimpleNamespace(peak_bytes=10 * ENTRY, total_bytes=24 * ENTRY)
    for number in range(12):
        forward(blocks).backward()
        optimizer_step()
        if number == 5:
            memory.peak_bytes = 30 * ENTRY
    assert [d.moved for d in manager.decisions] == [0, 3]
    assert queues.num_resets == 2


@pytest.mark.parametrize("skipped", [0, 2])
def test_blocks_that_are_skipped(four_blocks, skipped):
    blocks, manager, _ = four_blocks
    for _ in range(4):
        forward([block for index, block in enumerate(blocks) if index != skipped]).backward()
        optimizer_step()
    (decision,) = manager.decisions
    assert decision.num_blocks == 4 and decision.pass_s == pytest.approx(3 * 4)


def test_inside_of_another_checkpoint_nothing_is_counted(four_blocks):
    blocks, manager, _ = four_blocks
    for _ in range(3):
        torch_checkpoint(forward, blocks, use_reentrant=False).backward()
        optimizer_step()
    assert manager.decisions == [] and manager.counters.moved == 0
    for _ in range(3):
        forward(blocks).backward()
        optimizer_step()
    assert len(manager.decisions) == 1


def test_sizes_that_are_close_share_a_decision():
    manager, _, _ = train(ENTRY / 0.5, passes=20, sizes=[1000 + 3 * number for number in range(20)])
    assert len(manager.decisions) == 1


def test_after_a_decision_to_move_nothing_nothing_is_held(four_blocks):
    blocks, manager, queues = four_blocks
    manager.setup_arena()
    queues._memory = SimpleNamespace(peak_bytes=10 * ENTRY, total_bytes=100 * ENTRY)
    for number in range(4):
        forward(blocks).backward()
        optimizer_step()
        assert (manager.slot_bytes > 0) == (manager.arena.size_bytes > 0) == (number < 2)
    assert manager.decisions[0].moved == 0


class TimedAttention(Timed):
    """A second for attention and its projections, which the selective mode computes once less."""

    def forward(self, hidden):
        q = self.linear(hidden).view(1, 1, -1, 16)
        attended = nn.functional.scaled_dot_product_attention(q, q, q).view(-1, 16)
        return super().forward(attended)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_times_are_of_whole_blocks_in_every_mode(mode):
    """What a block loads while it recomputes does not end it."""
    queues = SimulatedQueues(ENTRY / 0.1)
    manager = OffloadEngine(lambda _device: queues)
    blocks = nn.ModuleList([TimedAttention(queues) for _ in range(6)])
    with engine(manager):
        manager.setup_arena(1 << 16)
        ck.checkpoint_blocks(blocks, mode, "auto")
        for _ in range(3):
            forward(blocks).backward()
            optimizer_step()
    assert manager.decisions[0].moved == 5
    assert manager.decisions[0].pass_s == pytest.approx(6 * 4)
