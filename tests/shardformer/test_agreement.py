"""Ranks of a sequence group that do not have the same sample, noise, timestep or weights are told so at once."""

import os
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.observe import CollectiveRecorder
from shardformer.engine.agreement import NUM_COMPARED_FORWARDS, named_values, summarise
from tests.models import wan, wan_inputs


def sharded():
    plan = Plan(ulysses=2)
    init_parallel(plan)
    return shardformer.shard(wan(torch.float32), plan), wan_inputs(torch.float32)


def told(call):
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def with_different(what):
    model, inputs = sharded()
    if dist.get_rank() == 1:
        if what == "weights":
            torch.nn.init.ones_(model.blocks[1].ffn.net[2].bias)
        elif what == "timestep":
            inputs["timestep"] = inputs["timestep"] + 1
        elif what == "noise":
            inputs["hidden_states"] = inputs["hidden_states"] + 0.5 * torch.randn_like(
                inputs["hidden_states"]
            )
        elif what == "length":
            inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :5]
        elif what == "absent":
            del inputs["encoder_hidden_states"]
            inputs["encoder_hidden_states"] = None
    return told(lambda: model(**inputs))


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("noise", "inputs: hidden_states"),
        ("timestep", "inputs: timestep"),
        ("length", "inputs: encoder_hidden_states"),
        ("absent", "inputs: encoder_hidden_states"),
        ("weights", "weights: blocks.1.ffn.net.2.bias"),
    ],
)
@pytest.mark.faults
def test_every_rank_hears_what_differs(ranks, what, name, fault):
    for message in ranks(2, with_different, what):
        assert (
            "rank 0 and rank 1 of a sequence group called WanTransformer3DModel with different " + name
            in message
        )
        assert ("get_data_parallel_group().rank()" in message) != (what == "weights")
    fault("inputs that differ between the ranks of a sequence")


def after_the_first_steps(debug):
    model, inputs = sharded()
    with torch.no_grad():
        for _ in range(NUM_COMPARED_FORWARDS):
            model(**inputs)
        if dist.get_rank() == 1:
            inputs["timestep"] = inputs["timestep"] + 1
        if not debug:
            model(**inputs)  # not looked at any more
            return ""
        return told(lambda: model(**inputs))


def test_every_step_is_compared_in_debug_mode_and_the_first_ones_always(ranks):
    assert ranks(2, after_the_first_steps, False) == ["", ""]
    for message in ranks(2, after_the_first_steps, True, env={"OPENSORA_ACCEL_DEBUG": "1"}):
        assert "different inputs: timestep" in message


def recorded():
    model, inputs = sharded()
    seen = []
    for _ in range(NUM_COMPARED_FORWARDS + 1):
        with CollectiveRecorder() as recorder, torch.no_grad():
            model(**inputs)
        seen.append([call.kind for call in recorder.calls])
    return seen


def test_the_comparison_is_no_part_of_what_a_step_communicates(ranks):
    for seen in ranks(2, recorded):
        assert len(seen[0]) > 2 and all(each == seen[0] for each in seen)


def test_rounding_is_no_difference_and_other_noise_is():
    generator = torch.Generator().manual_seed(0)
    for shape in ((65,), (2, 16, 5, 6, 10), (300, 1000)):
        x, other = (torch.randn(shape, generator=generator) for _ in range(2))
        assert summarise(x).agrees(summarise(x.bfloat16()))
        assert not summarise(x).agrees(summarise(other))
        assert not summarise(x).agrees(summarise(x.flip(0)))
    assert not summarise(torch.tensor([500.0])).agrees(summarise(torch.tensor([501.0])))
    assert summarise(torch.full((100,), torch.nan)).agrees(summarise(torch.full((100,), torch.nan)))


def step_without_numpy(plan):
    def numpy(_tensor):
        raise RuntimeError("Numpy is not available")  # what torch says where it is not installed

    with (
        mock.patch.object(torch.Tensor, "numpy", numpy),
        mock.patch.dict(os.environ, OPENSORA_ACCEL_DEBUG="1"),
    ):
        init_parallel(plan)
        model = shardformer.shard(wan(torch.float32), plan)
        for _ in range(2):
            (model(**wan_inputs(torch.float32))[0].square().mean()).backward()
        return told(
            lambda: model(**(wan_inputs(torch.float32) | {"timestep": torch.tensor([dist.get_rank()])}))
        )


@pytest.mark.parametrize(
    "plan", [Plan(ulysses=2, checkpoint="full", offload=1.0), Plan(ring=2)], ids=["ulysses", "ring"]
)
def test_a_step_needs_torch_alone(ranks, plan):
    """Nothing else is installed with the core: what ranks tell each other must not pass through numpy."""
    for message in ranks(2, step_without_numpy, plan):
        assert "with different inputs: timestep" in message


@dataclass(frozen=True)
class Clip:
    latent: torch.Tensor
    sigma: float
    mask: torch.Tensor | None = None


def test_what_an_object_among_the_inputs_holds_is_compared_too():
    values = dict(named_values("", {"video": Clip(torch.ones(2), 0.5), "audio": None}))
    assert list(values) == ["video.latent", "video.sigma"]
