"""Bits that flip on one rank are found, and the rank is named; runs in which none flips are let alone."""

import collections
import logging
import statistics
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.watching import watch
from opensora_accel.watching.rhythm import Rhythm
from opensora_accel.watching.verdicts import Numbers, judge, noise_of
from tests.profiler.timelines import one_second_step
from tests.tiers import PROVE
from tests.watching.faults import BITS, EVERY, PLANS, Fault, all_trained, ranks_named

# ---- who is named


def run(value, noise=0.0):
    """Of one tensor, whose digest is that of its value."""
    number = value + noise
    return {"the output of blocks.0": Numbers(hash(number), (number, 0.0))}


RIGHT, WRONG = run(1.0), run(1.5)


@pytest.mark.parametrize(
    ("runs", "suspects", "is_of_step"),
    [
        ([(0, RIGHT), (0, RIGHT), (0, RIGHT), (1, RIGHT), (1, RIGHT)], None, None),
        # Once in the step; once when another ran it again; always.
        ([(0, WRONG), (0, RIGHT), (0, RIGHT), (1, RIGHT), (1, RIGHT)], {0}, True),
        ([(0, RIGHT), (0, RIGHT), (0, RIGHT), (1, WRONG), (1, RIGHT)], {1}, False),
        ([(0, WRONG), (0, WRONG), (0, WRONG), (1, RIGHT), (1, RIGHT)], {0, 1}, False),
        ([(0, WRONG), (0, WRONG), (0, WRONG), (2, RIGHT), (2, RIGHT), (1, RIGHT)], {0}, False),
        ([(0, RIGHT), (0, RIGHT), (0, RIGHT), (2, WRONG), (2, WRONG), (1, RIGHT)], {2}, False),
        # Now and then.
        ([(0, RIGHT), (0, WRONG), (0, run(7.0)), (1, RIGHT), (1, RIGHT)], {0}, False),
        ([(0, WRONG), (0, RIGHT), (0, RIGHT)], {0}, True),
    ],
)
def test_the_rank_whose_runs_are_not_those_of_most_is_named(runs, suspects, is_of_step):
    verdict = judge(runs, noise_of(runs))
    assert (verdict is None) == (suspects is None)
    if verdict is not None:
        assert (verdict.suspects, verdict.is_of_step) == (suspects, is_of_step)
        assert verdict.what == "the output of blocks.0" and verdict.share > 0


def test_noise_is_what_no_rank_can_repeat():
    noisy = [(rank, run(1.0, 1e-6 * (3 * rank + each))) for rank in (0, 1) for each in range(3)]
    assert noise_of(noisy) == pytest.approx({"the output of blocks.0": 1e-6})
    assert judge(noisy, noise_of(noisy)) is None
    verdict = judge([(0, WRONG), *noisy[1:]], noise_of(noisy))
    assert verdict is not None and verdict.suspects == {0}
    # Who alone does not repeat itself is no noise.
    alone = [*noisy[:3], (1, RIGHT), (1, RIGHT)]
    assert noise_of(alone) == {} and judge(alone, {}).suspects == {0}


# ---- bits that flip


def faults_of(name):
    """Each kind, once for each kind of bit, on ranks and at places in turn."""
    plan = PLANS[name]
    modules = ("blocks.0.attn1.to_q", "blocks.1.ffn.net.2", "proj_out", "blocks.1.attn2.to_v")
    faults = []
    for kind in ("weight", "gradient", "optimizer state", "activation", "gradient of an activation"):
        for number, bit in enumerate(BITS):
            # Of one data rank it has to be seen first that it repeats itself.
            looked_at = EVERY if plan.data > 1 else 2 * EVERY
            step = looked_at if "activation" in kind else 2 + number % 3
            module = modules[(number + len(faults) // 4) % 4]
            faults.append(Fault(kind, bit, module, (number + 1) % plan.world_size, step))
    return faults


def found_of(ranks, name, faults):
    """How many of each kind were found within N + 1 steps with the rank among those that are named, and of how many."""
    plan, counts, missed = PLANS[name], collections.Counter(), []
    everyone = ranks(plan.world_size, all_trained, plan, faults)
    for fault, *outcomes in zip(faults, *everyone, strict=True):
        assert len(set(outcomes)) == 1, "ranks say different things"
        step, message = outcomes[0]
        has_found = bool(message) and step - fault.step <= EVERY + 1 and fault.rank in ranks_named(message)
        counts[fault.kind, has_found] += 1
        if not has_found:
            missed.append((fault, step, message))
    return counts, missed


ALONE = ("weight", "gradient", "optimizer state")
"""Of a shard without a copy nobody can say that one of these is wrong."""


@PROVE
@pytest.mark.parametrize("name", PLANS)
def test_bits_that_flip_are_found_with_their_rank(ranks, name, fault):
    faults = faults_of(name)
    counts, missed = found_of(ranks, name, faults)
    expected = [each for each in faults if name != "3 FSDP2" or each.kind not in ALONE]
    assert [each for each in missed if each[0] in expected] == []
    for (kind, has_found), number in counts.items():
        fault(f"{'found' if has_found else 'not found'}: a bit of a {kind}, {name}", number)


@PROVE
@pytest.mark.parametrize("kind", ["weight", "optimizer state"])
def test_a_shard_that_changes_in_a_step_is_found_where_no_rank_has_another(ranks, kind):
    plan = PLANS["3 FSDP2"]
    faults = [Fault(f"{kind} in the step", "mantissa", "blocks.0.attn1.to_q", 1, step) for step in (4, 5)]
    for looked_at, other in ranks(3, all_trained, plan, faults):
        what = {"weight": "weight", "optimizer state": "optimizer's state"}[kind]
        assert (
            f"shard at rest: the {what} of blocks.0.attn1.to_q.weight on rank 1 has changed" in looked_at[1]
        )
        assert looked_at[0] == 4 and other == (8, ""), "step 5 is not looked at"


# ---- what is let alone


def healthy(plan, num_steps, seed=0):
    """How many replays came out alike in a run, and what was said."""
    from tests.watching import faults

    said, seen = [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("opensora_accel.watching").addHandler(handler)
    try:
        outcome = faults.trained(
            plan, num_steps=num_steps, seed=seed, run_ended=lambda run: seen.append(run._replays.last_alike)
        )
    finally:
        logging.getLogger("opensora_accel.watching").removeHandler(handler)
    return outcome, seen, said


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "2 × 2 ulysses" else PROVE) for n in PLANS]
)
def test_healthy_runs_are_let_alone(ranks, name):
    for outcome, seen, said in ranks(PLANS[name].world_size, healthy, PLANS[name], 9):
        assert outcome == (9, "") and seen == [9] and said == []


@PROVE
@pytest.mark.parametrize("name", ["2 DDP", "3 DDP", "2 ulysses", "2 × 2 FSDP2"])
def test_a_hundred_healthy_steps_have_no_alarm(ranks, name):
    for outcome, seen, said in ranks(PLANS[name].world_size, healthy, PLANS[name], 100, 1):
        assert outcome == (100, "") and seen == [99] and said == []


@PROVE
@pytest.mark.parametrize("how", ["dropout", "noise", "autocast", ""])
def test_two_thousand_healthy_steps_have_no_alarm(ranks, how):
    for last, said in ranks(2, odd_steps, how, None, 500):
        assert last == 500 and said == []


class Odd(nn.Module):
    """A layer that does not repeat itself: by noise of its own, or by what it keeps from one call to the next."""

    def __init__(self, how):
        super().__init__()
        self.inner, self.how, self.seen = nn.Linear(8, 8), how, -1
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.is_wrong = False

    def forward(self, x):
        out = self.inner(x)
        if self.how == "noise":
            out = out * (1 + 1e-6 * torch.randn(out.shape, generator=self.generator))
        elif self.how == "kept":
            # The first forward after a step of the optimizer makes what the others take.
            self.seen, is_new = self.inner.weight._version, self.seen != self.inner.weight._version
            out = out * (1.01 if is_new else 1.0)
        elif self.how == "dropout":
            out = nn.functional.dropout(out, 0.3)
        elif self.how == "autocast":
            assert out.dtype == torch.bfloat16
        return out + 0.1 if self.is_wrong else out


def odd_steps(how, wrong_at=None, num_steps=10):
    parallel_states.reset()
    init_parallel(Plan(dp_replicate=2))
    torch.manual_seed(0)
    layer = Odd(how)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), layer, nn.Linear(8, 3))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    torch.manual_seed(dist.get_rank())
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("opensora_accel.watching").addHandler(handler)
    try:
        with watch(model, every=2, replay_every=2, check_steps=0) as run:
            for number in range(1, num_steps + 1):
                for part in range(2):
                    layer.is_wrong = number == wrong_at and part == 0 and dist.get_rank() == 1
                    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                        out = wrapped(torch.randn(4, 8))
                    layer.is_wrong = False
                    out.float().square().mean().backward()
                try:
                    run.check()
                except ValueError as error:
                    return str(error), said
                optimizer.step()
                optimizer.zero_grad()
            return run._replays.last_alike, said
    finally:
        logging.getLogger("opensora_accel.watching").removeHandler(handler)


@pytest.mark.parametrize("how", ["noise", "dropout", "autocast"])
def test_what_a_run_draws_and_rounds_is_no_fault(ranks, how):
    for last, said in ranks(2, odd_steps, how):
        assert last == 10 and said == []


def test_a_fault_above_the_noise_is_found(ranks):
    for message, _ in ranks(2, odd_steps, "noise", 6):
        assert "in step 6 " in message and "device: rank 1 computes wrong, once" in message, message
        assert "all computed alike" in message and "in step 4" in message


def test_a_model_that_never_repeats_itself_is_no_fault_of_a_rank(ranks):
    (last, said), (_, others) = ranks(2, odd_steps, "kept")
    assert last == 0 and others == [] and len(said) == 2
    assert (
        "the replay of step 2 says nothing, and it is tried once more: no rank's microbatch gives the same"
        in said[0]
    )
    assert "the replay of step 4 says nothing, and no more are tried" in said[1]


# ---- what it costs


@pytest.mark.parametrize(
    ("step_s", "replay_s", "every", "expected"),
    [(5.0, 5.5, 100, 200), (20.0, 5.5, 100, 100), (1.0, 0.9, 1, 113), (1.0, 3.0, 100, 400)],
)
def test_replays_take_less_than_a_hundredth_of_the_time(monkeypatch, step_s, replay_s, every, expected):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    rhythm, due = Rhythm(1, every, None), []
    for step in range(1, 1 + every + 2 * expected):
        if step > 1:
            now[0] += step_s
        if rhythm.is_due(step):
            due.append(step)
            with rhythm.measured(step):
                now[0] += replay_s
    assert due == [1 + every, 1 + every + expected]
    assert replay_s / (step_s * expected) < 0.01


def test_replays_come_as_often_as_is_asked_for():
    def due(rhythm):
        steps = []
        for step in range(1, 11):
            if rhythm.is_due(step):
                steps.append(step)
                with rhythm.measured(step):
                    pass
        return steps

    assert due(Rhythm(1, 100, 3)) == [3, 6, 9] and due(Rhythm(1, 100, 1)) == [*range(1, 11)]
    assert due(Rhythm(1, 2, 0)) == [] and due(Rhythm(5, 100, 3)) == [7, 10]
    with pytest.raises(ValueError, match="replay_every must be 0 or a number of steps; got -1"):
        watch(nn.Linear(1, 1), replay_every=-1)


def costs(num_turns):
    """Seconds of processor time of steps, of those that are recorded and replayed, and of those that are not."""
    init_parallel(Plan(dp_replicate=2))
    model, inputs = one_second_step()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        begin = time.process_time()
        wrapped(**inputs, return_dict=False)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begin

    step()
    turns = []
    for _ in range(num_turns):
        with watch(model, every=1000, replay_every=2, check_steps=0):
            step()  # which looks over the ranks
            turns.append((step(), step()))
    return turns


@pytest.mark.alone
def test_what_a_replay_costs(ranks):
    turns = ranks(2, costs, 4)[0]
    replayed, plain = (statistics.median(each) for each in zip(*turns, strict=True))
    print(
        f"a step of {plain:.2f} s takes {replayed - plain:.2f} s more with a replay: {replayed / plain - 1:.0%}"
    )
    # By default so many steps lie between two that it is less than a hundredth of them.
    assert (replayed - plain) / plain < 1.6
