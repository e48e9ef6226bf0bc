"""A timeline's kinds add up to live bytes, to the byte, in every way to checkpoint, offload and shard."""

import itertools

import pytest

from opensora_accel import Plan
from opensora_accel.observe.kinds import KINDS
from tests.profiler.timelines import compare
from tests.tiers import PROVE

MODELS = ("Wan", "HunyuanVideo")
ACTIVATIONS = (("none", 0.0), ("full", 0.0), ("full", 1.0), ("selective", 0.0), ("selective", 1.0))
WORLDS = [
    (1, {"sharding": "none"}),
    (1, {"sharding": "zero2"}),
    (1, {"sharding": "zero3"}),
    (2, {"sharding": "none", "ulysses": 2}),
    (2, {"sharding": "zero2", "ulysses": 2}),
    (2, {"sharding": "zero3", "dp_shard": 2}),
    (2, {"sharding": "zero3", "ring": 2, "prefetch": 0}),
]
IN_MAKE_TEST = [("Wan", ("full", 1.0), 1)]


def cases():
    for name, activations, world in itertools.product(MODELS, ACTIVATIONS, range(len(WORLDS))):
        marks = () if (name, activations, world) in IN_MAKE_TEST else PROVE
        yield pytest.param(name, activations, world, marks=marks)


@pytest.mark.parametrize(("name", "activations", "world"), [*cases()])
def test_the_peak_is_that_of_live_bytes(ranks, name, activations, world):
    checkpoint, offload = activations
    num_ranks, degrees = WORLDS[world]
    plan = Plan(checkpoint=checkpoint, offload=offload, **degrees)
    for found in ranks(num_ranks, compare, plan, name):
        peak = found["peak"]
        assert peak.sample.device_bytes == max(s.device_bytes for s in found["samples"])
        assert peak.sample.device_bytes == pytest.approx(found["live"], rel=0.01)
        if num_ranks == 1:
            # gloo's threads let go of what has arrived between any two counts, each of which is right.
            assert found["equal"] and peak.sample.device_bytes == found["live"]
        for sample in found["samples"]:
            assert list(sample.bytes_by_kind) == list(KINDS) and min(sample.bytes_by_kind.values()) >= 0
        by_block = sum(sum(row.values()) for row in peak.by_block.values())
        assert by_block == peak.sample.device_bytes + peak.sample.bytes_by_kind["block inputs on the host"]
        highest = {kind: max(s.bytes_by_kind[kind] for s in found["samples"]) for kind in KINDS}
        # AdamW's state of a tensor is two of its size, and a step count.
        parameters = found["samples"][-1].bytes_by_kind["parameters"]
        assert 2 * parameters <= highest["optimizer state"] + 64 * num_ranks * 200
        assert (highest["block inputs"] > 0) == (highest["recomputation"] > 0) == (checkpoint != "none")
        assert (highest["block inputs on the host"] > 0) == (offload > 0)
        assert (highest["communication"] > 0) == (num_ranks > 1 or plan.sharding != "none")
        assert highest["gradients"] > 0
        # After a step this rank's shards are left; within it blocks were gathered.
        assert (highest["parameters"] > parameters) == (plan.sharding != "none")
        if plan.sharding != "none" and peak.place.block:
            assert any("gathered parameters" in row for row in peak.by_block.values())
