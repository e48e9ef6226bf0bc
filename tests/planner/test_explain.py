"""What is said of a plan: its memory, what its step waits for, its neighbours, and where its axes stand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opensora_accel.observe.meshes import MeshShape
from opensora_accel.plan import Plan
from opensora_accel.planner.candidates import describe
from opensora_accel.planner.explain import bound_of, change_between, explain, neighbours, placement_of
from opensora_accel.planner.search import search
from tests.planner.stand_in import request, small

pytestmark = pytest.mark.usefixtures("stand_in_traces")


def test_an_explanation_tells_memory_waits_and_neighbours():
    outcome = search(request(hardware=small(6.0)))
    told = explain(outcome.best, outcome)
    assert told.bytes_by_kind[0][1] == max(size for _kind, size in told.bytes_by_kind)
    assert "bound by compute" in told.bound and told.neighbours
    text = told.text()
    assert "memory at the peak" in text and "one choice away" in text
    for near in neighbours(outcome.best, outcome):
        assert near.change and near.why


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([1, 2, 3, 4]), min_size=4, max_size=4), st.sampled_from([1, 2, 4, 6, 8]),
)  # fmt: skip
def test_which_axes_leave_a_node_is_told(degrees, per_node):
    copies, shards, ring, ulysses = degrees
    plan = Plan(dp_replicate=copies, dp_shard=shards, ring=ring, ulysses=ulysses, sharding="zero3")
    told = placement_of(plan, per_node)
    if plan.world_size <= per_node:
        assert told == ""
        return
    shape = MeshShape.of(plan)
    within, between = told.removesuffix(" between nodes").split(" within a node, ")
    for axis in shape.used(shape.axes):
        nodes = [{rank // per_node for rank in group} for group in shape.groups((axis,))]
        leaves = any(len(each) > 1 for each in nodes)
        assert f"{axis}={shape.degree(axis)}" in (between if leaves else within).split(", ")


def test_the_placement_of_the_winner_is_told():
    outcome = search(request(16, fixed={"ulysses": 8, "checkpoint": "full"}))
    told = explain(outcome.best, outcome)
    assert told.placement.startswith("ulysses=8 within a node, ") and told.placement in told.text()
    assert told.to_dict()["placement"] == told.placement
    outcome = search(request(8))
    assert (
        explain(outcome.best, outcome).placement == ""
        and "placement" not in explain(outcome.best, outcome).text()
    )


def test_a_plan_that_does_not_fit_is_told_what_would():
    outcome = search(request(hardware=small(1.2)))
    heavy = next(each for each in outcome.candidates if not each.fits and each.plan.checkpoint == "none")
    told = explain(heavy, outcome)
    assert "fit" in told.helps or "nearest" in told.helps


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"checkpoint": "selective"}, "checkpoint=selective"),
        ({"offload": 1.0}, "offload=1.0"),
        ({"ulysses": 4, "dp_shard": 2}, "ulysses=4, dp_shard=2"),
        ({"ulysses": 4, "dp_shard": 2, "checkpoint": "selective"}, ""),
        ({}, ""),
        ({"mlp_chunks": 4}, "mlp_chunks=4"),
        ({"sharding": "zero2"}, "sharding=zero2"),
        ({"dp_shard": 2, "dp_replicate": 2}, "dp_replicate=2, dp_shard=2"),
    ],
)
def test_a_change_is_one_choice(fields, change):
    plan = Plan(dp_shard=4, ulysses=2, sharding="zero3", checkpoint="full")
    assert set(change_between(plan, plan.replace(**fields)).split(", ")) == set(change.split(", "))


def test_what_bounds_a_step_is_what_takes_most_of_it():
    assert bound_of({"gemm": 2.0, "all-to-all over ulysses": 1.0}).startswith("bound by compute (67%)")
    assert "bound by communication" in bound_of({"gemm": 1.0, "parameters sent": 3.0})
    assert "bound by starting operators" in bound_of({"gemm": 1.0, "host": 3.0})


def test_a_plan_is_described_by_what_is_not_usual():
    assert (
        describe(Plan(dp_shard=2, sharding="zero3", cpu_offload=True))
        == "dp_shard=2 sharding=zero3 cpu_offload"
    )
    assert describe(Plan()) == "one rank, nothing saved"
