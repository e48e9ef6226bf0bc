"""Mistakes that small meshes do not have: beyond 8 ranks, and where a number of ranks is odd; on up to 64 of them."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from opensora_accel.verify.beside_one_device import verify
from opensora_accel.verify.pool import RankPool
from tests.tiers import PROVE
from tests.verify.loops import Small, average, averaged, batch, finish

pytestmark = PROVE
A_NODE = 8


def samples_by_place_in_a_node(model, run):
    """Samples are chosen by the local rank: the second node has those of the first."""
    forward = averaged(model, run)
    if not run.is_reference:
        torch.manual_seed(run.data_rank % A_NODE + 1)
    return finish(forward(batch()))


def samples_by_local_rank(model, run):
    """As the launcher says it, which has two nodes of two ranks each."""
    forward = averaged(model, run)
    if not run.is_reference:
        torch.manual_seed(int(os.environ["LOCAL_RANK"]) + 1)
    return finish(forward(batch()))


def averaged_within_a_node(model, run):
    """Gradients are averaged within a node, and then between the first two nodes: a third is left out."""
    loss = finish(model(batch()))
    if not run.is_reference:
        nodes = [list(range(first, first + A_NODE)) for first in range(0, run.world_size, A_NODE)]
        groups = [dist.new_group(ranks) for ranks in nodes]
        node = run.rank // A_NODE
        average(model.parameters(), groups[node])
        between = [dist.new_group([first, first + A_NODE]) for first in range(A_NODE)]
        if node < 2 and run.world_size > A_NODE:
            average(model.parameters(), between[run.rank % A_NODE])
    return loss


def halved_in_pairs(model, run):
    """A sum by recursive halving, which leaves over whoever has no partner: right on 2, 4 and 8 ranks."""
    loss = finish(model(batch()))
    if not run.is_reference:
        for parameter in model.parameters():
            gradient, distance = parameter.grad, 1
            while distance < run.world_size:
                partner = run.rank ^ distance
                if partner < run.world_size:
                    theirs = torch.empty_like(gradient)
                    receive = dist.irecv(theirs, partner)
                    dist.send(gradient.clone(), partner)
                    receive.wait()
                    gradient += theirs
                distance *= 2
            gradient /= run.world_size
    return loss


CASES = {
    "samples by the local rank": (samples_by_local_rank, 2, 4),
    "samples by the place in a node": (samples_by_place_in_a_node, 8, 16),
    "averaged within a node": (averaged_within_a_node, 16, 24),
    "halved in pairs": (halved_in_pairs, 8, 12),
}


@pytest.fixture(scope="module")
def many():
    with RankPool(64) as pool:
        yield pool


@pytest.mark.parametrize("name", CASES)
def test_it_is_found_where_it_shows(many, name):
    step, right, wrong = CASES[name]
    assert verify(step, Small, {"data": right}, pool=many).ok
    report = verify(step, Small, {"data": wrong}, pool=many)
    assert not report.ok, report
    print(f"{name}, {wrong} ranks, {report.seconds:.0f} s: {report.findings[0].what}")


def by_hand(model, run):
    loss = finish(model(batch()))
    if not run.is_reference:
        average(model.parameters())
    return loss


def test_sixty_four_ranks_prove_a_right_step(many):
    started = time.perf_counter()
    report = verify(by_hand, Small, {"data": 64}, pool=many)
    print(f"64 ranks: {time.perf_counter() - started:.0f} s")
    assert report.ok and len(report.results[0].observations) == 64
