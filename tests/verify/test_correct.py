"""No false alarm: correct plans on correct models are found right, and every gradient that can be told is told.

`make test` tries a few of each kind of case, `make prove PART=verify` all of them.
"""

from __future__ import annotations

from typing import Any

import pytest

from opensora_accel.training.tiny_run import write_clips
from opensora_accel.verify.beside_one_device import verify
from tests.tiers import PROVE
from tests.verify import corners, loops, parted_loops, sharded_loops
from tests.verify.by_hand import RingByHand
from tests.verify.defects import Defective
from tests.verify.loops import Small
from tests.verify.meshes import BOTH, HYBRID, RING, SHARDED, TENSOR, ULYSSES, plan
from tests.verify.model_steps import DiTStep, TinyDiT, TrainerStep, WanStep, plain_step
from tests.verify.mutants_of_communications import TRACED
from tests.verify.steps import AttentionStep, FactorisedStep, JointStep, MegatronStep, ShiftStep

TO_ULYSSES_3, TO_RING_3 = ULYSSES[:2], RING[:2]
U2D2, R2D2, R2U2 = plan(dp_replicate=2, ulysses=2), plan(dp_replicate=2, ring=2), plan(ring=2, ulysses=2)
ZERO3 = plan(dp_shard=2, ulysses=2, sharding="zero3")

LAYERS = {
    "ulysses 2, 3, 4": (AttentionStep("ulysses"), (*TO_ULYSSES_3, plan(ulysses=4))),
    "ulysses, 2 key heads of 6": (AttentionStep("ulysses", heads=6, kv_heads=2), TO_ULYSSES_3),
    "ulysses, masked": (AttentionStep("ulysses", masked=True), TO_ULYSSES_3),
    "ulysses, causal": (AttentionStep("ulysses", causal=True), TO_ULYSSES_3),
    "ring 2, 3, 4": (AttentionStep("ring"), (*TO_RING_3, plan(ring=4))),
    "ring, 2 key heads of 6": (AttentionStep("ring", heads=6, kv_heads=2), TO_RING_3),
    "ring, masked": (AttentionStep("ring", masked=True), TO_RING_3),
    "ring, causal": (AttentionStep("ring", causal=True), TO_RING_3),
    "ring, causal zigzag": (AttentionStep("ring", causal=True, layout="zigzag"), TO_RING_3),
    "ring, causal striped": (AttentionStep("ring", causal=True, layout="striped"), TO_RING_3),
    "ring by hand, causal": (RingByHand(causal=True), (*TO_RING_3, plan(ring=4))),
    "ring × ulysses": (AttentionStep(), BOTH[:3]),
    "ring × ulysses, masked": (AttentionStep(masked=True), (R2U2,)),
    "ring × ulysses, causal zigzag": (AttentionStep(causal=True, layout="zigzag"), (R2U2,)),
    "ring × ulysses, causal striped, 12 tokens": (
        AttentionStep(causal=True, layout="striped", tokens=12),
        (R2U2,),
    ),
    "fewer tokens than ranks": (AttentionStep("ulysses", tokens=3), (plan(ulysses=4), plan(dp_replicate=2))),
    "fewer tokens than ranks of a ring": (AttentionStep("ring", tokens=3), (plan(ring=4),)),
    "gather-free loss": (AttentionStep(gather_free=True), BOTH[:3]),
    "gather-free loss, causal zigzag": (
        AttentionStep("ring", gather_free=True, causal=True, layout="zigzag"),
        TO_RING_3,
    ),
    "gather-free loss, masked": (AttentionStep("ulysses", gather_free=True, masked=True), TO_ULYSSES_3),
    "joint attention": (JointStep(), BOTH[:3]),
    "joint attention, one text token": (JointStep(text_tokens=1), (R2U2, plan(ulysses=3))),
    "joint attention, 6 heads": (JointStep(heads=6, text_tokens=6, tokens=12), (R2U2, plan(ring=3))),
    "factorised": (FactorisedStep(), TO_ULYSSES_3),
    "factorised, 3 frames on 4 ranks": (FactorisedStep(frames=3), (plan(ulysses=4),)),
    "tokens that see the one before": (ShiftStep(), TO_ULYSSES_3),
    "Megatron": (MegatronStep(), TENSOR),
    "Megatron, sequence parallel": (MegatronStep(sequence_parallel=True), TENSOR),
}

MODELS = {
    "ulysses": (DiTStep(), TO_ULYSSES_3),
    "ulysses as torch.compile sees it": (Defective(DiTStep(), (TRACED,)), TO_ULYSSES_3),
    "ring": (DiTStep(), TO_RING_3),
    "ring × ulysses": (DiTStep(), BOTH[:3]),
    "accumulated": (DiTStep(accumulation=3), (U2D2, R2U2)),
    "checkpoint full": (DiTStep(), (U2D2.replace(checkpoint="full"), R2U2.replace(checkpoint="full"))),
    "checkpoint selective": (DiTStep(), (U2D2.replace(checkpoint="selective"), R2D2.replace(checkpoint="selective"))),
    "offload": (DiTStep(), (U2D2.replace(checkpoint="full", offload=1.0),)),
    "offload selective": (DiTStep(), (R2U2.replace(checkpoint="selective", offload=0.5),)),
    "MLPs in chunks": (DiTStep(), (U2D2.replace(mlp_chunks=3), R2D2.replace(mlp_chunks=2))),
    "MLPs in chunks, checkpointed": (DiTStep(), (U2D2.replace(mlp_chunks=2, checkpoint="full", offload=1.0),)),
    "zero3": (DiTStep(), SHARDED[:2]),
    "zero2": (DiTStep(), (ZERO3.replace(sharding="zero2"), plan(ulysses=3, sharding="zero2"))),
    "zero3, checkpointed, offload": (DiTStep(), (ZERO3.replace(checkpoint="full", offload=1.0),)),
    "zero3 on a ring": (DiTStep(), (plan(dp_shard=2, ring=2, sharding="zero3"),)),
    "HSDP": (DiTStep(), HYBRID[:2]),
    "HSDP, data only": (DiTStep(), (plan(dp_replicate=2, dp_shard=2, sharding="zero3"),)),
    "HSDP, zero2, accumulated": (DiTStep(accumulation=2), (plan(dp_replicate=2, ulysses=2, sharding="zero2"),)),
    "plain DDP": (plain_step, (plan(dp_replicate=2), plan(dp_replicate=3))),
    "plain FSDP2": (plain_step, (plan(dp_shard=2, sharding="zero3"), plan(dp_shard=3, sharding="zero3"))),
    "Wan": (WanStep(), (U2D2, plan(ring=3))),
    "Wan, ring × ulysses, selective": (WanStep(), (R2U2.replace(checkpoint="selective"),)),
    "Wan, time of every token": (WanStep(("per_token_time",)), (U2D2, R2D2)),
    "Wan from an image": (WanStep(("image",)), (U2D2, plan(ring=3))),
    "Wan from an image, zero3, full": (WanStep(("image",)), (ZERO3.replace(checkpoint="full"),)),
}  # fmt: skip

DATA = ({"data": 2}, {"data": 3})
SEQUENCE = ({"data": 2, "sequence": 2}, {"data": 1, "sequence": 3}, {"data": 3, "sequence": 1})

LOOPS: dict[str, tuple[Any, Any, Any]] = {
    "complex weights": (corners.complex_weights, corners.Spectral, DATA),
    "accelerate's documented loop": (sharded_loops.accelerates_documented_loop, Small, DATA),
    "clipped on ranks only": (sharded_loops.clipped_on_ranks_only, Small, DATA),
    "FSDP2, clipped": (sharded_loops.sharded_and_clipped, Small, DATA),
    "FSDP2, clipped in two groups": (sharded_loops.clipped_in_two_groups, Small, DATA),
    "averaged, then clipped by value": (sharded_loops.averaged_then_clipped_by_value, Small, DATA),
    "FSDP2, then the optimizer": (sharded_loops.optimizer_after_sharding, Small, DATA),
    "a patched class": (corners.patches_the_class, corners.Patched, SEQUENCE),
    "FSDP1, flat": (sharded_loops.fsdp1_flat, Small, DATA),
    "FSDP1, flat, clipped": (sharded_loops.fsdp1_flat_clipped, Small, DATA),
    "FSDP1, original parameters": (sharded_loops.fsdp1_original, Small, DATA),
    "FSDP1, original parameters, clipped": (sharded_loops.fsdp1_original_clipped, Small, DATA),
    "Megatron's slices": (
        parted_loops.megatron_slices,
        parted_loops.Megatron,
        ({"data": 2, "tensor": 2}, {"data": 1, "tensor": 4}),
    ),
    "whole numbers among parameters": (loops.plain_ddp, corners.WithTable, DATA),
    "a small scale under a root": (loops.plain_ddp, corners.WithVariance, DATA),
    "GradScaler": (sharded_loops.loss_scaled, Small, DATA),
    "numpy's noise": (corners.numpys_noise, Small, SEQUENCE),
    "local sums and norms": (corners.local_numbers, Small, SEQUENCE),
    "the norm of a shard": (sharded_loops.norm_of_a_shard, Small, DATA),
    "two iterations": (corners.two_iterations, Small, DATA),
    "a pipeline of cut models": (
        parted_loops.pipeline_of_cut_models,
        parted_loops.Stages,
        ({"data": 2, "pp": 2}, {"data": 1, "pp": 2}),
    ),
    "a pipeline of whole models": (
        parted_loops.pipeline_of_whole_models,
        parted_loops.Stages,
        ({"data": 2, "pp": 2}, {"data": 1, "pp": 2}),
    ),
    "experts": (
        parted_loops.expert_parallel,
        parted_loops.Experts,
        ({"data": 2, "ep": 2}, {"data": 1, "ep": 3}),
    ),
    "flash_attn on a CPU": (corners.flash_attention_over_heads, corners.WithFlashAttention, SEQUENCE[1:]),
}
"""Loops of users, unusual and right."""

TRAINERS = {
    "accumulated": ({"optim.accumulation": 2}, (U2D2, plan(ulysses=3))),
    "LTX-Video": (
        {
            "model.class_name": "LTXVideoTransformer3DModel",
            "model.config": {"num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 12},
        },
        (U2D2, plan(ring=3)),
    ),
    "zero3 on a ring, offload": (
        {},
        (plan(dp_shard=2, ring=2, sharding="zero3", checkpoint="full", offload=1.0),),
    ),
}


_IN_A_PLAIN_RUN = (
    "ring × ulysses, causal zigzag",
    "ring by hand, causal",
    "zero3, checkpointed, offload",
    "Wan",
    "FSDP2, clipped in two groups",
    "local sums and norms",
    "a pipeline of cut models",
    "accumulated",
)


def params(cases: dict[str, Any]) -> list[Any]:
    """A few of each kind of case for a plain run, the others for `make prove`."""
    return [
        pytest.param(*case, id=name, marks=() if name in _IN_A_PLAIN_RUN else PROVE)
        for name, case in cases.items()
    ]


def test_there_are_enough_cases():
    """Counted as plan × model."""
    cases = [*LAYERS.values(), *MODELS.values(), *TRAINERS.values(), *LOOPS.values()]
    assert sum(len(meshes) for *_, meshes in cases) >= len(cases) >= 79


@pytest.mark.parametrize(("step", "meshes"), [*params(LAYERS), *params(MODELS)])
def test_a_correct_step_raises_no_alarm(ranks, step: Any, meshes: Any):
    model_fn = TinyDiT if step is plain_step else getattr(step, "step", step).model
    report = verify(step, model_fn, meshes, pool=ranks)
    assert report.ok, report
    assert_is_proof(report)


@pytest.mark.parametrize(("step", "model_fn", "meshes"), params(LOOPS))
def test_a_users_right_loop_raises_no_alarm(ranks, step: Any, model_fn: Any, meshes: Any):
    report = verify(step, model_fn, meshes, pool=ranks)
    assert report.ok, str(report)
    assert not report.unproven()
    for result in report.results:
        assert result.parameters().keys() == result.expected.gradients.keys()


@PROVE
@pytest.mark.parametrize(("changes", "meshes"), params(TRAINERS))
def test_the_trainers_own_step_raises_no_alarm(ranks, tmp_path, changes: dict[str, Any], meshes: Any):
    step = TrainerStep(write_clips(tmp_path / "clips"), changes=tuple(changes.items()))
    report = verify(step, None, meshes, reference="whole", pool=ranks)
    assert report.ok, report
    assert_is_proof(report)


def assert_is_proof(report):
    """Nothing was left out of the comparison."""
    assert not report.unproven()
    for result in report.results:
        assert not result.errors and len(result.observations) == result.shape.world_size
        assert result.parameters().keys() == result.expected.gradients.keys()
        assert set(result.scalars()) >= {"loss"}
