"""One rank fails in the middle of the ring: nobody waits for ever, and nothing wrong looks right."""

import datetime
import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from opensora_accel.attention import blocks, ring_attention
from opensora_accel.communications import share_sizes
from tests.attention.reference import full_attention, random_inputs
from tests.tiers import PROVE


class OutOfMemory(RuntimeError):
    pass


def failing(function, at_call):
    """`function`, which raises at its call number `at_call`."""
    calls = []

    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) == at_call:
            raise OutOfMemory("no memory for this block")
        return function(*args, **kwargs)

    return call


def shares(rank, num_ranks):
    *full, mask = random_inputs(13, 13, 2, 2, True)
    mine = [t.tensor_split(num_ranks, 1)[rank].clone().requires_grad_() for t in full]
    return full, mask, mine, mask.tensor_split(num_ranks, 1)[rank]


def failing_forward(failing_rank, at_call):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    full, mask, mine, own_mask = shares(rank, num_ranks)
    original = blocks.attend
    if rank == failing_rank:
        blocks.attend = failing(blocks.attend, at_call)
    try:
        out = ring_attention(*mine, dist.group.WORLD, mask=own_mask)
        verdict = (out - full_attention(*full, mask).tensor_split(num_ranks, 1)[rank]).abs().max().item()
    except OutOfMemory:
        verdict = "failed"
    finally:
        blocks.attend = original
    dist.barrier()  # nothing is pending: the group can be used again
    again = ring_attention(*mine, dist.group.WORLD, mask=own_mask)
    assert (again - full_attention(*full, mask).tensor_split(num_ranks, 1)[rank]).abs().max() < 1e-12
    return verdict


@pytest.mark.parametrize("at_call", [1, 2, 4])
def test_a_rank_that_fails_in_forward_leaves_the_others_exact(ranks, at_call):
    found = ranks(4, failing_forward, 1, at_call)
    assert found.pop(1) == "failed"
    assert max(found) < 1e-12


def failing_backward(failing_rank, at_call):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    full, mask, mine, own_mask = shares(rank, num_ranks)
    full = [t.requires_grad_() for t in full]
    full_attention(*full, mask).sum().backward()
    out = ring_attention(*mine, dist.group.WORLD, mask=own_mask)
    original = blocks.attend_backward
    if rank == failing_rank:
        blocks.attend_backward = failing(blocks.attend_backward, at_call)
    try:
        out.sum().backward()
        verdict = []
        for tensor, whole in zip(mine, full, strict=True):
            expected = whole.grad.tensor_split(num_ranks, 1)[rank]
            exact = bool((tensor.grad - expected).abs().max() < 1e-12)
            verdict.append("exact" if exact else "nan" if bool(tensor.grad.isnan().all()) else "wrong")
    except OutOfMemory:
        verdict = "failed"
    finally:
        blocks.attend_backward = original
    dist.barrier()
    return verdict


@pytest.mark.parametrize("at_call", [1, 2, 3, 4])
def test_a_rank_that_fails_in_backward_leaves_no_wrong_gradient(ranks, at_call):
    """Rank 1 sees the keys of ranks 1, 0, 3, 2 in turn; what it has passed on before it failed is whole."""
    found = ranks(4, failing_backward, 1, at_call)
    assert found[1] == "failed"
    passed = [0, 3, 2][: max(0, at_call - 2)]
    for rank in (0, 2, 3):
        keys = "exact" if rank in passed else "nan"
        assert found[rank] == ["exact", keys, keys], rank


def absent():
    """Rank 1 never comes: the others get an error after the group's timeout, which names it."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
    q, k, v, _ = random_inputs(6, 6, 2, 2, False)
    if dist.get_rank() == 1:
        time.sleep(4)
        return None
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        ring_attention(q, k, v, group, splits=(6, 6), kv_splits=(6, 6))
    return time.monotonic() - start


@pytest.mark.slow
@PROVE
def test_a_rank_that_never_comes_is_a_timeout(ranks):
    waited = ranks(2, absent)[0]
    assert 1.5 < waited < 20


def interrupted():
    """Ctrl-C on rank 1 while it waits for rank 0, which is late."""
    rank = dist.get_rank()
    _, _, mine, own_mask = shares(rank, dist.get_world_size())
    sizes = share_sizes(13, dist.get_world_size())
    options = {"mask": own_mask, "splits": sizes, "kv_splits": sizes}
    ring_attention(*mine, dist.group.WORLD, **options)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if rank == 0:
            time.sleep(1.5)
        if rank != 1:
            out = ring_attention(*mine, dist.group.WORLD, **options)
            return bool(out.isfinite().all())
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            ring_attention(*mine, dist.group.WORLD, **options)
            time.sleep(1)  # where the backend's wait cannot be interrupted
    finally:
        signal.signal(signal.SIGINT, before)
    return True


@pytest.mark.slow
def test_an_interrupt_is_passed_on_too(ranks):
    assert ranks(3, interrupted) == [True] * 3


def one_message_fails(direction, at_call):
    """Posting raises, as where the backend is out of its own memory: nothing can be passed on, and it is said."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
    q, k, v, _ = random_inputs(6, 6, 2, 2, False)
    original = dist.batch_isend_irecv
    if rank == 1:
        dist.batch_isend_irecv = failing(dist.batch_isend_irecv, at_call)
    start = time.monotonic()
    try:
        with pytest.raises(RuntimeError) as caught:
            q.requires_grad_()
            out = ring_attention(q, k, v, group, splits=(6, 6), kv_splits=(6, 6))
            if direction == "backward":
                out.sum().backward()
    finally:
        dist.batch_isend_irecv = original
    return time.monotonic() - start < 20 and ("no memory" in str(caught.value)) == (rank == 1)


@PROVE
@pytest.mark.parametrize("direction", ["backward", "forward"])
def test_the_first_failure_is_the_one_that_is_raised(ranks, direction):
    at_call = {"forward": 1, "backward": 3}[direction]
    assert ranks(2, one_message_fails, direction, at_call) == [True] * 2


def fails_while_its_neighbour_is_away():
    """The failed rank tries to pass on; that fails too, after the group's timeout."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
    if dist.get_rank() == 0:
        time.sleep(4)
        return True
    q, k, v, _ = random_inputs(6, 6, 2, 2, False)
    original, blocks.attend = blocks.attend, failing(blocks.attend, 1)
    try:
        with pytest.raises(OutOfMemory):
            ring_attention(q, k, v, group, splits=(6, 6), kv_splits=(6, 6))
    finally:
        blocks.attend = original
    return True


@PROVE
def test_what_fails_while_passing_on_does_not_hide_the_failure(ranks):
    assert all(ranks(2, fails_while_its_neighbour_is_away))
