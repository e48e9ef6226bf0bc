"""The verifier on loops as users have them: what is wrong is found and named, what is right passes."""

import dataclasses
import json
from xml.etree import ElementTree

import pytest

from opensora_accel import Plan
from opensora_accel.verify import verify
from opensora_accel.verify.in_bf16 import InBf16
from opensora_accel.verify.report import to_junit
from tests.tiers import PROVE
from tests.verify import corners, loops, mutants_hidden, mutants_of_loops

MESHES = [{"data": d, "sequence": s} for d, s in ((2, 2), (1, 4), (4, 1), (1, 3))]
DATA = [{"data": 2}, {"data": 4}]


@pytest.mark.parametrize(
    ("step", "meshes"),
    [
        (loops.plain_ddp, DATA),
        (loops.plain_fsdp2, DATA),
        (loops.with_optimizer, DATA),
        (loops.accelerated, DATA),
        (loops.compiled, DATA),
        (loops.in_bf16, DATA),
        (loops.sequence_parallel, MESHES),
        (loops.own_gradients, MESHES),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_right_loop_passes(ranks, step, meshes):
    report = verify(step, loops.small, meshes, pool=ranks)
    assert report.ok, report
    assert not report.unproven()
    for result in report.results:
        assert len(result.parameters()) == 8
        assert max(each.error() for each in result.parameters().values()) < 1e-13
        assert result.inputs()["x"].is_right


@pytest.mark.parametrize(
    ("step", "meshes", "options", "kind", "axis", "words"),
    [
        (
            loops.averaged_over_data_only, MESHES, {}, "missing sum", "sequence",
            ["missing average over sequence for 6 of 8 parameters", "average gradients over the mixed group"],
        ),
        (
            loops.norm_left_out, [{"sequence": 2}, {"sequence": 3}], {}, "missing sum", "sequence",
            ["missing sum over sequence for 2 of 8 parameters (norm.weight, norm.bias)\n", "all-reduce them there"],
        ),
        pytest.param(
            loops.left_alone, DATA, {"timeout_s": 4}, "failure", "data", ["never ends"], marks=PROVE
        ),
        pytest.param(
            mutants_of_loops.skips_one_of_two_collectives, DATA, {"timeout_s": 10}, "failure", "data",
            ["ranks meet in collectives that are not the same", "in the same order"], marks=PROVE,
        ),
        (
            mutants_of_loops.means_over_its_own_tokens, DATA, {"reference": "whole"}, "shares", "data",
            ["divide by the number over all ranks"],
        ),
        (
            mutants_of_loops.clips_by_hand, DATA, {}, "scale", "data",
            ["a factor that goes with no number of ranks", "by hand"],
        ),
        pytest.param(
            loops.fails_on_one_rank, DATA, {"timeout_s": 20}, "failure", "data",
            ["the step fails over data: RuntimeError: the disk is full (rank 1)\n"], marks=PROVE,
        ),
        (
            corners.seeds_all_alike, DATA, {}, "inputs", "data",
            ["all data ranks were given the same samples over data"],
        ),
        (
            corners.trains_what_one_device_freezes, DATA, {}, "missing gradient", "data",
            ["2 of 8 parameters (embed.weight, embed.bias) get a gradient that the single"],
        ),
        # The optimizer of another model is not waited for.
        (
            corners.another_optimizer_first, DATA, {}, "missing sum", "data",
            ["missing average over data for all 8 parameters\n"],
        ),
        (
            corners.steps_by_a_closure_without_an_average, DATA, {}, "missing sum", "data",
            ["missing average over data for all 8 parameters\n"],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_what_is_wrong_is_named_in_plain_words(ranks, step, meshes, options, kind, axis, words):
    report = verify(step, loops.small, meshes, pool=ranks, **options)
    finding, *rest = report.findings
    assert (finding.kind, finding.axes) == (kind, (axis,))
    assert all(each in str(finding) for each in words), finding
    assert "gloo" not in finding.what and "preamble" not in finding.what
    assert bool(report.results[0].errors) == (kind == "failure")
    assert not rest or step not in (loops.norm_left_out, corners.seeds_all_alike)


def test_uneven_split_scaled_by_shares_is_named(ranks):
    report = verify(loops.shares_for_scale, loops.small, MESHES, pool=ranks)
    (finding,) = report.findings
    assert finding.kind == "shares" and finding.axes == ("sequence",)
    assert "its share of an uneven split, 4:4:3" in finding.what
    assert "exactly the number of ranks" in finding.remedy
    assert set(finding.names) == {f"{m}.{p}" for m in ("norm", "mlp", "out") for p in ("weight", "bias")}


def test_noise_that_differs_between_ranks_of_one_sample_is_named(ranks):
    finding, *rest = verify(
        loops.noise_by_rank, loops.small, [{"sequence": 2}, {"sequence": 3}], pool=ranks
    ).findings
    assert finding.kind == "inputs" and finding.axes == ("sequence",)
    assert "drew different noise" in finding.what and "x differ" in finding.what
    assert [other.kind for other in rest] == ["values"] and "as they must" in rest[0].what


def test_the_same_shard_on_every_rank_is_named(ranks):
    finding, *_ = verify(loops.same_shard, loops.small_on_meta, DATA, pool=ranks).findings
    assert finding.what.startswith("every rank holds the same shard of")
    assert "mlp.weight" in finding.names and "from a seed of its own" in finding.remedy


@pytest.mark.parametrize(
    ("step", "model_fn", "meshes", "options", "message"),
    [
        (corners.never_backward, loops.small, DATA, {}, "leaves no gradient on a single device"),
        (corners.clears_gradients, loops.small, DATA, {}, "leaves no gradient on a single device"),
        (corners.hands_over_nothing, loops.small, DATA, {}, "leaves no gradient on a single device"),
        (corners.is_not_finite, loops.small, DATA, {}, "on a single device already, gradients are not finite"),
        (corners.steps_within_backward, loops.small, DATA, {}, "an optimizer steps within backward"),
        (corners.returns_a_pair, loops.small, DATA, {}, "returned loss as tuple; return the loss, or a dict"),
        (loops.plain_ddp, loops.small, {"blob": 2}, {}, "do the ranks along blob see different samples"),
        (loops.fails_everywhere, loops.small, DATA, {}, "fails on a single device.*\n(.*\n)*.*there is no such file"),
        (loops.forgets_to_watch, None, DATA, {}, "never called run.watch"),
        (loops.returns_a_tensor, loops.small, DATA, {}, "returned loss of shape .3,.; return numbers"),
        (lambda model, run: None, loops.small, DATA, {}, "top level of a module or script, no lambda"),
        (loops.plain_ddp, loops.small, [], {}, "there is no mesh of several ranks to verify on"),
        (loops.plain_ddp, loops.small, {"data": 0}, {}, "mesh axis data must be a whole number of ranks"),
        (loops.plain_ddp, loops.small, {"data": 9}, {}, "this pool has up to 6 ranks; 9 were asked for"),
        (loops.plain_ddp, loops.small, DATA, {"data_axes": ["dp"]}, "data_axes names dp, but the meshes have data"),
        (loops.plain_ddp, loops.small, Plan(), {"data_axes": ["data"]}, "a Plan has data axes of its own"),
        (loops.plain_ddp, loops.small, DATA, {"reference": "half"}, 'reference must be "turns" or "whole"'),
        (loops.plain_ddp, loops.small, Plan(tp=2), {}, "tensor parallelism cannot be verified yet"),
    ],
)  # fmt: skip
def test_bad_calls_say_what_to_do(ranks, step, model_fn, meshes, options, message):
    with pytest.raises(ValueError, match=message):
        verify(step, model_fn, meshes, pool=ranks, **options)


def test_the_report_as_text_json_and_junit(ranks):
    report = verify(loops.averaged_over_data_only, loops.small, MESHES, pool=ranks)
    text = str(report)
    assert "✗ sequence=3" in text and "✓ data=4" in text and text.endswith("are NOT those of a single device")
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert not values["ok"] and values["findings"][0]["axes"] == ["sequence"]
    assert (
        values["meshes"][0]["parameters"]["embed.weight"]
        < 1e-12
        < values["meshes"][0]["parameters"]["mlp.weight"]
    )
    suite = ElementTree.fromstring(to_junit(report, ["a group of no name"]))
    assert (suite.get("tests"), suite.get("failures")) == ("5", "4")
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert "gradients on data=4" not in failed and "communication" in failed


@pytest.mark.parametrize(
    ("step", "model_fn", "options"),
    [
        (corners.unusual_model, corners.Unusual, {}),
        (corners.batches_of_unlike_size, loops.small, {}),
        (corners.ddp_for_each_layer, loops.small, {}),
        (corners.hand_written_optimizer, loops.small, {}),
        (corners.one_batch_split_by_the_step, loops.small, {"reference": "whole"}),
        (corners.keeps_an_average, loops.small, {}),
        (corners.forward_by_the_transforms, loops.small, {}),
        (corners.penalises_its_gradient, loops.small, {}),
        (corners.steps_by_a_closure, loops.small, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_unusual_but_right_step_passes(ranks, step, model_fn, options):
    report = verify(step, model_fn, [{"data": 2}, {"data": 3}], pool=ranks, **options)
    assert report.ok and not report.unproven(), report
    assert len(report.results[0].parameters()) == 8


def test_axes_that_no_mesh_tells_apart_are_told(ranks):
    report = verify(loops.sequence_parallel, loops.small, {"data": 2, "sequence": 2}, pool=ranks)
    assert report.ok and any("data and sequence go together on these meshes" in note for note in report.notes)


def test_casts_to_half_precision_are_listed(ranks):
    """They are lifted for the proof, on one device and where ranks alone have them."""
    step = corners.narrows_what_it_sends
    report = verify(step, loops.small, DATA[:1], pool=ranks)
    assert report.ok, report
    (note,) = [note for note in report.notes if "casts" in note]
    assert note.startswith(
        "2 casts to half precision were lifted in fp64, and what they round in training is not proven "
        "(--dtype bf16 judges it): "
    )
    for in_bf16, says in (
        (InBf16(), "training was judged in bf16: "),
        (InBf16(reason="none"), "is not proven ("),
    ):
        (other,) = [n for n in dataclasses.replace(report, in_bf16=in_bf16).notes if "casts" in n]
        assert says in other
    line = step.__code__.co_firstlineno
    assert f"bfloat16 at tests/verify/corners.py:{line + 1} in narrows_what_it_sends" in note, note
    assert f"float16 at tests/verify/corners.py:{line + 4} in narrows_what_it_sends" in note, note
    (note,) = [n for n in verify(loops.in_bf16, loops.small, DATA[:1], pool=ranks).notes if "casts" in n]
    assert "autocast to bfloat16 at tests/verify/loops.py:" in note
    report = verify(loops.plain_ddp, loops.small, DATA[:1], pool=ranks)
    assert not any("casts" in note for note in report.notes)


def test_progress_is_told(ranks):
    told = []
    verify(loops.plain_ddp, loops.small, DATA, pool=ranks, on_progress=lambda *what: told.append(what))
    assert told[0][2] == 2 and told[-1] == ("done", 2, 2)


def test_a_colossalai_loop(ranks):
    """Beside torch 2.13 it installs with `pip install --no-deps colossalai==0.5.0` and what that asks for."""
    pytest.importorskip("colossalai")
    report = verify(loops.colossalai_ddp, loops.small, MESHES, pool=ranks)
    assert report.ok and not report.unproven(), report


@PROVE
class TestDiffusers:
    """What was found in diffusers 0.42.1 by running it; where these fail, it may have been mended."""

    def test_ulysses_under_fsdp2_gives_one_over_sp(self, ranks):
        meshes = [{"data": d, "ring": 1, "ulysses": u} for d, u in ((2, 2), (1, 4), (1, 2), (4, 1))]
        report = verify(loops.diffusers_ulysses_under_fsdp2, loops.wan_of_4_heads, meshes, pool=ranks)
        (finding,) = report.findings
        assert finding.what == "scale ulysses⁻¹ on all 69 parameters"
        assert "set the divisor to the data degree" in finding.remedy

    def test_ring_of_three_pairs_the_wrong_keys(self, ranks):
        report = verify(
            loops.diffusers_ring, loops.wan_of_6_heads, [{"sequence": 2}, {"sequence": 3}], pool=ranks
        )
        finding, *_ = report.findings
        assert finding.kind == "values" and "wherever sequence has 3 ranks or more" in finding.what
        assert "blocks.1.attn1.to_k.weight" in finding.remedy and "keys and values" in finding.remedy
        assert "blocks.1.attn1.to_q.weight" not in finding.names


def test_a_verdict_says_what_it_takes_for_granted(ranks):
    """A loop whose `main()` seeds by rank would draw other noise than a step that was seeded for it."""
    assumed = "if the loop seeds the default generator of torch by the data rank"
    report = verify(loops.sequence_parallel, loops.small, MESHES, pool=ranks)
    assert report.ok and assumed in str(report)
    of_its_own, for_nothing = corners.draws_from_a_generator_of_its_own, corners.draws_for_nothing
    for step, meshes in ((loops.plain_ddp, DATA), (of_its_own, MESHES), (for_nothing, MESHES)):
        report = verify(step, loops.small, meshes, pool=ranks)
        assert report.ok and str(report).endswith("the gradients are those of a single device")


@pytest.mark.parametrize("model_fn", [corners.Insisting, corners.OnGpuOnly])
def test_a_model_that_insists_on_a_type_or_a_device_is_told_what_to_do(ranks, model_fn):
    with pytest.raises(ValueError, match="runs in fp64 on a CPU, and this asks for another type or device"):
        verify(loops.plain_ddp, model_fn, DATA, pool=ranks)


def test_same_samples_are_no_wrong_gradients(ranks):
    report = verify(corners.gives_all_the_same_samples, loops.small, DATA, pool=ranks)
    assert not report.ok and "NOT" not in report.verdict()
    assert report.verdict().startswith(
        "every gradient that was compared is that of a single device, but the samples"
    )


def test_a_wrong_forward_is_not_sent_to_backward(ranks):
    step = mutants_hidden.told_its_place_and_pools_its_own
    finding, *_ = verify(step, mutants_hidden.Placed, mutants_of_loops.SEQUENCE, pool=ranks).findings
    assert "first in the model itself, outside of its modules, before pool (its" in finding.remedy
    assert "in backward" not in finding.remedy
