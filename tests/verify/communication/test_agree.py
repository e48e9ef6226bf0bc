"""Whether the calls of several ranks fit each other: what would hang is told, with the lines of both."""

import pytest
import torch
import torch.distributed as dist

from opensora_accel import Plan, init_parallel
from opensora_accel.parallel_states import get_parallel_group
from opensora_accel.verify.communication.promise import broken_promises
from opensora_accel.verify.communication.record_step import record_step
from tests.verify.communication.recorded_steps import (
    Attending,
)


def violations(step, plan, model_fn=Attending, ranks=None, **options):
    ranks = range(min(plan.world_size, 4)) if ranks is None else ranks
    return broken_promises(record_step(step, model_fn, plan, ranks=ranks, fake_tensors=False, **options))


def by_rank(*programs):
    """A step in which every rank runs its own."""

    def step(model, run):
        init_parallel(run.plan, "cpu")
        programs[run.rank](get_parallel_group("ring"), get_parallel_group("ulysses"))

    return step


def reduce(group, num=4, dtype=torch.float32):
    dist.all_reduce(torch.ones(num, dtype=dtype), group=group)


def broadcast(group, root):
    dist.broadcast(torch.ones(4), root, group)


def gather(group):
    dist.all_gather([torch.empty(4) for _ in range(group.size())], torch.ones(4), group=group)


def exchange(group, sends, receives):
    dist.all_to_all_single(torch.empty(sum(receives)), torch.ones(sum(sends)), receives, sends, group=group)


def send(to, num=4, dtype=torch.float32):
    dist.send(torch.ones(num, dtype=dtype), to)


def receive(of, num=4):
    dist.recv(torch.empty(num), of)


DISAGREEING = [
    ("another order", [lambda r, u: (reduce(u), gather(u)), lambda r, u: (gather(u), reduce(u))],
     ["same order (ulysses)", "call 1 is all-reduce (16 bytes, float32) on rank 0, all-gather (16 bytes, float32) on"]),
    ("one call more", [lambda r, u: (reduce(u), reduce(u)), lambda r, u: reduce(u)],
     ["same order (ulysses)", "rank 0 calls 2, rank 1 1: all-reduce (16 bytes, float32) on rank 0 waits"]),
    ("another dtype", [lambda r, u: reduce(u), lambda r, u: reduce(u, 2, torch.float64)],
     ["(ulysses)", "(16 bytes, float64) on rank 1"]),
    ("another size", [lambda r, u: reduce(u), lambda r, u: reduce(u, 5)],
     ["(ulysses)", "(20 bytes, float32) on rank 1"]),
    ("another root", [lambda r, u: broadcast(u, 0), lambda r, u: broadcast(u, 1)],
     ["(ulysses)", "broadcast from or to rank 1 (16 bytes, float32) on rank 1"]),
    ("another share", [lambda r, u: exchange(u, [2, 3], [2, 2]), lambda r, u: exchange(u, [2, 2], [4, 2])],
     ["(ulysses)", "all-to-all (12 bytes to and 8 from rank 1, float32) on rank 0",
      "(8 bytes to and 16 from rank 0, float32) on rank 1"]),
    ("no receive", [lambda r, u: (send(1), send(1)), lambda r, u: receive(0)],
     ["every message has its receive, in order (ulysses)", "rank 0 sends 2 messages to rank 1, which receives 1"]),
    ("no send", [lambda r, u: None, lambda r, u: receive(0)],
     ["in order (ulysses)", "rank 0 sends 0 messages to rank 1, which receives 1"]),
    ("another message", [lambda r, u: (send(1), send(1, 6)), lambda r, u: (receive(0, 6), receive(0))],
     ["in order (ulysses)", "message 1 from rank 0 to rank 1 is 16 bytes (float32), and 24 bytes (float32) are"]),
]  # fmt: skip


@pytest.mark.parametrize(("programs", "words"), [d[1:] for d in DISAGREEING], ids=[d[0] for d in DISAGREEING])
def test_ranks_that_disagree_are_told_so(programs, words):
    found = [v for v in violations(by_rank(*programs), Plan(ulysses=2)) if "rank 0" in v.actual]
    assert any(all(word in str(violation) for word in words) for violation in found), list(map(str, found))
    lines = [line for violation in found for line in violation.sources]
    assert lines and all(line.startswith(("rank 0: tests/verify", "rank 1: tests/verify")) for line in lines)


def test_a_difference_names_the_lines_of_both_ranks():
    programs = [lambda r, u: reduce(u), lambda r, u: gather(u)]
    (violation,) = (v for v in violations(by_rank(*programs), Plan(ulysses=2)) if "same order" in v.rule)
    assert [line.split(" in ")[-1] for line in violation.sources] == ["reduce", "gather"]


def test_ranks_that_wait_in_a_circle():
    """Each group's calls agree; its members come to them in another order."""
    programs = [
        lambda r, u: (reduce(r), reduce(u)),  # 0: ring 0, 2; ulysses 0, 1
        lambda r, u: (reduce(u), reduce(r)),  # 1: ring 1, 3
        lambda r, u: (reduce(u), reduce(r)),  # 2: ulysses 2, 3
        lambda r, u: (reduce(r), reduce(u)),
    ]
    plan = Plan(ring=2, ulysses=2)
    found = [v for v in violations(by_rank(*programs), plan) if "in a circle" in v.rule]
    assert (
        len(found) == 1
        and "rank 0 in all-reduce over ring; rank 1 in all-reduce over ulysses" in found[0].actual
    )
    agreeing = by_rank(*[lambda r, u: (reduce(r), reduce(u))] * 4)
    assert not any("circle" in v.rule for v in violations(agreeing, plan))


def test_messages_of_ranks_that_were_not_recorded_are_left_open():
    programs = [lambda r, u: send(1), lambda r, u: None]
    assert not any(
        "message has" in v.rule for v in violations(by_rank(*programs), Plan(ulysses=2), ranks=[0])
    )
