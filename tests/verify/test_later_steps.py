"""Steps after the first: right loops are right after each of them, and what goes wrong is named with its step."""

from __future__ import annotations

import pytest

from opensora_accel.verify import verify
from tests.tiers import PROVE
from tests.verify import corners, later_loops
from tests.verify.later_loops import STEPS, Dropping, DroppingWithin, WithIdleBias
from tests.verify.loops import Small

DATA = [{"data": 2}, {"data": 3}]
SEQUENCE = [{"data": 2, "sequence": 2}, {"data": 1, "sequence": 3}]

RIGHT = {
    "AdamW": (later_loops.adamw, Small, DATA),
    "momentum and a schedule": (later_loops.momentum_and_schedule, Small, DATA),
    "FSDP2": (later_loops.fully_sharded, Small, DATA),
    "FSDP1": (later_loops.fsdp1, Small, DATA),
    "a sequence over ranks": (later_loops.sequence, Small, SEQUENCE),
    "accumulated, unlike numbers of microbatches": (later_loops.accumulated, Small, DATA),
    "data ranks with unlike numbers of microbatches": (later_loops.unlike_counts, Small, DATA),
    "accelerate, accumulated and clipped": (later_loops.accelerated, Small, DATA),
    "an average": (later_loops.keeps_an_average, Small, DATA),
    "clipped, with its norm": (later_loops.clips_and_tells_the_norm, Small, DATA),
    "signs of rounding errors": (later_loops.steps_by_signs, WithIdleBias, DATA),
    "two optimizers": (later_loops.two_optimizers, Small, DATA),
    "a closure": (later_loops.one_closure, Small, DATA),
    "thawed in the second step": (later_loops.thaws_a_layer, Small, DATA),
}
IN_A_PLAIN_RUN = ("FSDP2", "accumulated, unlike numbers of microbatches", "signs of rounding errors")


def cases(table, plain=None):
    marks = {name: () if plain is None or name in plain else PROVE for name in table}
    return [pytest.param(*case, id=name, marks=marks[name]) for name, case in table.items()]


@pytest.mark.parametrize(("step", "model_fn", "meshes"), cases(RIGHT, IN_A_PLAIN_RUN))
def test_a_right_loop_is_right_after_each_step(ranks, step, model_fn, meshes):
    report = verify(step, model_fn, meshes, pool=ranks)
    assert report.ok, report
    for result in report.results:
        assert report.followed.steps[result.shape] == STEPS, report
        assert f"parameters after each of {STEPS} steps right to" in str(report)
        # What it returns of every step is compared.
        assert any(name.endswith(f" {STEPS}") for name in result.scalars())


WRONG = {
    "averaged in the first step only": (
        later_loops.averages_the_first_step_only, DATA, "missing sum",
        "right in step 1 and wrong in step 2: missing average over data for all 8 parameters",
    ),
    "the divisor of the last microbatch": (
        later_loops.divides_the_rest_by_a_whole, DATA, "scale",
        "right in steps 1 to 2 and wrong in step 3: scale 0.5 on all 8 parameters",
    ),
    "a step of one microbatch": (
        later_loops.never_syncs_a_single_microbatch, DATA, "missing sum", "wrong in step 2: missing",
    ),
    "a schedule for each rank": (
        later_loops.schedules_once_for_each_rank, DATA, "update",
        "lr is 0.025 (one device: 0.05) on data=2, lr is 0.0125 (one device: 0.05) on data=3",
    ),
    "groups by a wrapper's names": (
        later_loops.sorts_by_the_names_of_a_wrapper, DATA, "update", "weight_decay is 0.5 (one device: 0)",
    ),
    "an optimizer that is built anew": (
        later_loops.builds_the_optimizer_anew, DATA, "state",
        "before it steps the optimizer holds another momentum_buffer on data=2",
    ),
    "gradients that are not cleared": (
        later_loops.clears_nothing, DATA, "state", "gradients of step 2 still have those of step 1 in them",
    ),
    "frozen where one device thaws": (
        later_loops.thaws_on_one_device_only, DATA, "trained",
        "step 2 freezes 2 of 8 parameters (embed.weight, embed.bias) over data",
    ),
    "parameters left out": (
        later_loops.leaves_the_norm_out, DATA, "optimizer",
        "no optimizer holds 2 of 8 parameters (norm.weight, norm.bias) over data",
    ),
    "replicas that drift apart": (
        later_loops.drifts_apart, DATA, "update", "after step 2 though their gradients are right over data: all",
    ),
    "fewer steps": (later_loops.steps_less_often, DATA, "steps", "3 times on data=2 and 2 times on data=3, and 6"),
    "another optimizer": (
        later_loops.is_trained_by_another_optimizer, DATA, "update", "decoupled_weight_decay is 0 (one device: 1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "meshes", "kind", "words"),
    cases(
        WRONG,
        ("averaged in the first step only", "a schedule for each rank", "gradients that are not cleared"),
    ),
)
def test_the_step_that_goes_wrong_is_named(ranks, step, meshes, kind, words):
    report = verify(step, Small, meshes, pool=ranks)
    assert not report.ok
    assert report.causes[0].kind == kind, report
    assert words in report.causes[0].what, report
    assert "✗ data=3" in str(report)
    # Gradients of the first step are right.
    assert all(each.is_right for result in report.results for each in result.parameters().values())


def test_turns_whose_optimizer_searches_along_a_line_are_not_compared(ranks):
    report = verify(corners.steps_by_a_closure, Small, [{"data": 2}], pool=ranks)
    assert report.ok
    assert any("an optimizer's closure runs several times in a step" in note for note in report.notes)


GOOD_LOADS = {
    "dealt": (later_loops.loads, SEQUENCE),
    "filled up": (later_loops.loads_what_does_not_divide, DATA),
    "dropped": (later_loops.loads_and_drops, DATA),
    "by workers": (later_loops.loads_by_workers, SEQUENCE),
    "with replacement": (later_loops.loads_with_replacement, DATA),
}
BAD_LOADS = {
    "an epoch twice": (
        later_loops.never_sets_the_epoch, DATA, "epoch 2 has the order of the one before again over data: rank 0",
    ),
    "by the global rank": (
        later_loops.loads_by_the_global_rank, SEQUENCE, "ranks that share a sample load different ones over sequence",
    ),
    "by workers, an epoch twice": (
        later_loops.loads_by_workers_in_one_order, DATA, "epoch 2 has the order of the one before again over data",
    ),
    "no sampler": (later_loops.shuffles_by_itself, DATA, "data ranks load the same samples over data: in epoch 1"),
    "too many replicas": (later_loops.deals_to_too_many, DATA, "no rank loads 6 of 12 samples in epoch 1 over data"),
}  # fmt: skip


@pytest.mark.parametrize(("step", "meshes"), cases(GOOD_LOADS, ("filled up",)))
def test_samples_that_are_dealt_once_are_let_alone(ranks, step, meshes):
    report = verify(step, Small, meshes, pool=ranks)
    assert report.ok, report
    assert all(seen.loads for result in report.results for seen in result.observations)


@pytest.mark.parametrize(
    ("step", "notes"),
    [
        (later_loops.loads, []),
        (later_loops.loads_by_workers, ["what its dataset draws comes from the generators of the step"]),
        (later_loops.loads_by_workers_in_one_order, ["generators of the step, without worker_init_fn"]),
    ],
)
def test_loaders_that_ran_without_their_workers_are_noted(ranks, step, notes):
    found = [note for note in verify(step, Small, [{"data": 2}], pool=ranks).notes if "DataLoader" in note]
    assert len(found) == len(notes)
    for note, end in zip(found, notes, strict=True):
        assert note.startswith("the DataLoader at tests/verify/later_loops.py:") and note.endswith(end)


@pytest.mark.parametrize(
    ("step", "meshes", "words"), cases(BAD_LOADS, ("an epoch twice", "by the global rank"))
)
def test_samples_that_are_not_dealt_once_are_named(ranks, step, meshes, words):
    report = verify(step, Small, meshes, pool=ranks)
    assert report.causes[0].kind == "data", report
    assert words in report.causes[0].what


@pytest.mark.parametrize(
    ("step", "model_fn", "words"),
    [
        (later_loops.drops_by_rank, Dropping, "draw other random numbers within the model over sequence, at"),
        (later_loops.drops_alike, DroppingWithin, "for a rank's own part of a sample over sequence, at"),
    ],
)
def test_draws_within_the_model_are_named(ranks, step, model_fn, words):
    meshes = [*SEQUENCE, {"data": 3, "sequence": 1}]
    report = verify(step, model_fn, meshes, pool=ranks)
    first = report.causes[0]
    assert first.kind == "draws" and words in first.what, report
    assert "later_loops.py" in first.what and "in forward" in first.what


def test_draws_that_are_alike_are_let_alone(ranks):
    assert verify(later_loops.drops_alike, Dropping, SEQUENCE, pool=ranks).ok
