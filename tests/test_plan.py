"""The Plan: what it refuses, in which words, and that it comes back from JSON as it went."""

import json

import pytest

from opensora_accel import Plan


def test_degrees_multiply_to_named_groups():
    plan = Plan(dp_replicate=2, dp_shard=3, ring=5, ulysses=7, tp=11, sharding="zero3")
    assert (plan.data, plan.sequence, plan.mixed, plan.world_size) == (6, 35, 210, 2310)


def test_json_round_trip(tmp_path):
    plan = Plan(ulysses=2, checkpoint="full", offload="auto", precision="bf16")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert json.loads(plan.to_json())["ulysses"] == 2


def test_a_plan_cannot_be_changed():
    with pytest.raises(AttributeError):
        Plan().ring = 2  # type: ignore[misc]
    assert Plan().replace(ring=2) == Plan(ring=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ring": 0}, "ring must be a whole number of ranks, at least 1; got 0"),
        ({"ulysses": 2.0}, "ulysses must be a whole number"),
        ({"tp": True}, "tp must be a whole number"),
        ({"checkpoint": "some"}, "checkpoint must be one of none, full, selective; got 'some'"),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, fp64"),
        ({"sharding": "zero1"}, "sharding must be one of none, zero2, zero3"),
        ({"checkpoint": "full", "offload": 1.5}, "from 0.0 to 1.0"),
        ({"checkpoint": "full", "offload": "all"}, "from 0.0 to 1.0"),
        ({"offload": 0.5}, 'set checkpoint="full"'),
        ({"offload": "auto"}, 'set checkpoint="full"'),
        ({"dp_shard": 4}, 'set sharding="zero3"'),
        ({"dp_shard": 10**11, "sharding": "zero3"}, "dp_shard is at most 1,048,576; got 100,000,000,000"),
        ({"ring": 2000, "ulysses": 2000}, "a plan has at most 1,048,576 ranks; this one has 4,000,000"),
        ({"cpu_offload": "no"}, "cpu_offload must be true or false; got 'no'"),
    ],
)
def test_bad_fields_name_the_remedy(fields, message):
    with pytest.raises(ValueError) as caught:
        Plan(**fields)
    assert message in str(caught.value)


def test_an_unknown_field_names_the_nearest():
    with pytest.raises(ValueError, match="no field 'ulyses'; did you mean 'ulysses'"):
        Plan.from_dict({"ulyses": 2})


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_text_that_is_no_plan(text):
    with pytest.raises(ValueError, match="JSON object"):
        Plan.from_json(text)


def test_world_size_error_lists_the_degrees_that_fit():
    with pytest.raises(ValueError) as caught:
        Plan(ulysses=2, ring=2).check_world_size(8)
    message = str(caught.value)
    assert "needs 4 ranks" in message and "8 are running" in message
    assert (
        "dp_replicate=2" in message and "ring=4" in message and "ulysses=4" in message and "tp=2" in message
    )
    assert "dp_shard" not in message.split("; ")[1]
    assert "torchrun --nproc-per-node 4" in message


def test_world_size_error_where_no_single_axis_fits():
    with pytest.raises(ValueError, match="each one of 1, 5"):
        Plan(ulysses=2, ring=2).check_world_size(5)
