"""Several plans that take turns on the blocks of one model: each forward has its own, and backward follows it."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER
from opensora_accel.precision import lift_casts
from tests.models import wan, wan_inputs
from tests.tiers import PROVE
from tests.tolerances import RELATIVE, relative_error

TURNS = {
    "long": Plan(checkpoint="full", offload=1.0, mlp_chunks=3),
    "middle": Plan(checkpoint="selective", mlp_chunks=2),
    "short": Plan(),
}


def counted(model):
    """How often each kind of layer ran."""
    counts = Counter()
    for name, module in [("attention", model.blocks[0].attn1.to_q), ("MLP", model.blocks[0].ffn.net[0])]:
        module.register_forward_hook(lambda *_, name=name: counts.update([name]))
    return counts


def losses_in_turn(model, names):
    """Forwards of all before the first backward: a recomputation runs when another plan is the turn's."""
    losses = []
    for number, name in enumerate(names):
        with shardformer.run_blocks(model, name):
            out = model(**wan_inputs(frames=2 + number), return_dict=False)[0]
        losses.append(out.square().mean())
    for loss in losses:
        loss.backward()
    return [p.grad for p in model.parameters()]


def in_turn(names, base, alternatives):
    model = wan()
    lift_casts(model)
    shardformer.shard(model, base, alternatives=alternatives)
    return losses_in_turn(model, names)


def test_gradients_are_those_of_one_plan_for_all():
    names = ["long", None, "short", "middle", "long"]
    expected = in_turn(["short"] * 5, Plan(), {"short": Plan()})
    GLOBAL_ACTIVATION_MANAGER.reset_counters()
    found = in_turn(names, Plan(mlp_chunks=4), TURNS)
    assert GLOBAL_ACTIVATION_MANAGER.counters.moved > 0, "the first block's inputs wait in host memory"
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < RELATIVE[torch.float64]


@pytest.mark.parametrize(
    "name,attention,mlp",
    # Forward and recomputation; of an MLP in pieces each piece is recomputed within the block's recomputation too.
    [("long", 2, 9), ("middle", 2, 6), ("short", 1, 1), (None, 1, 8)],
)
def test_a_forward_and_its_backward_run_as_their_plan_says(name, attention, mlp):
    model = wan()
    shardformer.shard(model, Plan(mlp_chunks=4), alternatives=TURNS)
    counts = counted(model)
    with shardformer.run_blocks(model, name):
        loss = model(**wan_inputs(), return_dict=False)[0].square().mean()
    with shardformer.run_blocks(model, "short"):
        loss.backward()
    assert counts == {"attention": attention, "MLP": mlp}


def on_a_ring(plan):
    init_parallel(plan)
    alternatives = {name: dataclasses.replace(each, ring=2) for name, each in TURNS.items()}
    return in_turn(["long", None, "middle"], plan, alternatives)


@PROVE
def test_tokens_are_shared_alike_in_every_turn(ranks):
    expected = in_turn(["short"] * 3, Plan(), {"short": Plan()})
    everyone = ranks(2, on_a_ring, Plan(ring=2))
    for number, theirs in enumerate(expected):
        ours = sum(grads[number] for grads in everyone) / 2
        assert relative_error(ours, theirs) < RELATIVE[torch.float64]


@PROVE
def test_blocks_are_compiled_inside_of_all_checkpoints():
    model, counter = wan(layers=1), CompileCounterWithBackend("aot_eager")
    turns = {"full": Plan(checkpoint="full"), "moved": Plan(checkpoint="full", offload=1.0)}
    expected = in_turn_of(model, Plan(), {}, [None, None])
    model.zero_grad()
    shardformer.shard(model, Plan(), alternatives=turns)
    model.blocks[0].compile(backend=counter)
    found = losses_in_turn(model, ["full", "moved"])
    assert counter.frame_count >= 1
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < RELATIVE[torch.float64]
    shardformer.unshard(model)
    assert "forward" not in vars(model.blocks[0]) and "compile" not in vars(model.blocks[0])


def in_turn_of(model, base, alternatives, names):
    shardformer.shard(model, base, alternatives=alternatives)
    found = [grad.clone() for grad in losses_in_turn(model, names)]
    shardformer.unshard(model)
    return found


def test_an_alternative_that_cannot_take_turns_is_refused():
    with pytest.raises(
        ValueError, match=r"alternatives 'a' has sharding='zero3' and the plan 'none', but only"
    ):
        shardformer.shard(wan(), Plan(), alternatives={"a": Plan(sharding="zero3")})
    model = wan()
    with pytest.raises(ValueError, match=r"no alternative plan None \(there are: none\)"):
        shardformer.run_blocks(model, None).__enter__()
    shardformer.shard(model, Plan(), alternatives={"long": Plan(checkpoint="full")})
    with pytest.raises(ValueError, match=r"no alternative plan 'short' \(there are: 'long'\); name it in"):
        shardformer.run_blocks(model, "short").__enter__()
    policy = shardformer.Policy(models=("Linear",))
    with pytest.raises(ValueError, match='checkpoint="full" needs a policy that names the model\'s blocks'):
        shardformer.shard(
            torch.nn.Linear(2, 2), Plan(), policy=policy, alternatives={"a": Plan(checkpoint="full")}
        )
