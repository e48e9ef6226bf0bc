"""Two experts in one run are what two runs make of them, one after the other, and go on, are exported and sampled."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from opensora_accel import Plan
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.saved_state import read_record
from tests.tiers import PROVE, some
from tests.training.runs import TINY_WAN, tiny_config

BOUNDARY = 0.6
SIDES = {"transformer": (BOUNDARY, 1.0), "transformer_2": (0.0, BOUNDARY)}
NAMES = ("high-noise", "low-noise")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A pipeline's folder with two Wans of other weights, for latents of 48 channels and embeddings of 32."""
    from diffusers import WanTransformer3DModel

    folder = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate(SIDES):
        torch.manual_seed(seed)
        model = WanTransformer3DModel(**TINY_WAN, in_channels=48, out_channels=48, text_dim=32)
        model.save_pretrained(folder / name)
    (folder / "model_index.json").write_text(
        json.dumps({"_class_name": "WanPipeline", "boundary_ratio": BOUNDARY})
    )
    return folder


def of_both(clips, output, pair, plan=None, **changes):
    paths = {"path": str(pair / "transformer"), "path_2": str(pair / "transformer_2")}
    return tiny_config(
        clips, output, plan, model=paths, **{"steps": 10, "flow.boundary": BOUNDARY, **changes}
    )


def of_one(clips, output, pair, name, plan=None, **changes):
    model = {"path": str(pair / name)}
    return tiny_config(
        clips, output, plan, model=model, **{"steps": 10, "flow.time_range": list(SIDES[name]), **changes}
    )


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def trained(config, saved=None):
    """Rows of the run, and of each model weights, averages and moments."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config, saved, read_record(saved) if saved else None)
    trainer.train()
    tensors = []
    for expert in trainer.experts:
        found, optimizer = {}, expert.state.optimizer
        for name, parameter in expert.state.model.named_parameters():
            found[name] = whole(parameter)
            found |= {f"{name} {key}": whole(value) for key, value in optimizer.state[parameter].items()}
        found |= {f"average of {name}": whole(weight) for name, weight in expert.state.ema.weights.items()}
        tensors.append(found)
    lines = (trainer.output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], tensors


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


PLANS = [
    Plan(ulysses=3),
    Plan(),
    Plan(dp_replicate=2),
    Plan(dp_shard=2, ring=2, sharding="zero3", checkpoint="full", offload=1.0),
    Plan(dp_shard=2, sharding="zero3", precision="bf16", cpu_offload=True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim", some([{}, {"accumulation": 1}, {"algorithm": "prodigy", "lr": 1.0}]), ids=str
)
@pytest.mark.parametrize("plan", some(PLANS, Plan()), ids=str)
def test_both_are_bit_for_bit_what_two_runs_make_of_them(ranks, clips, pair, tmp_path, plan, optim):
    changes = {f"optim.{key}": each for key, each in {"accumulation": 2, "skip_factor": 3.0, **optim}.items()}
    rows, both = ranks(plan.world_size, trained, of_both(clips, tmp_path / "both", pair, plan, **changes))[0]
    for side, (name, found) in zip(NAMES, zip(SIDES, both, strict=True), strict=True):
        alone = of_one(clips, tmp_path / name, pair, name, plan, **changes)
        expected_rows, (expected,) = ranks(plan.world_size, trained, alone)[0]
        assert_equal(found, expected)
        for row, expected_row in zip(rows, expected_rows, strict=True):
            for key in ("loss", "grad_norm"):
                assert row[f"{key}/{side}"] == expected_row[key]
            # Of Prodigy each expert has its own rate.
            rate = row.get(f"lr/{side}", row["lr"])
            assert (row["tokens"], rate) == (expected_row["tokens"], expected_row["lr"])
    assert all(row["loss"] == sum(row[f"loss/{side}"] for side in NAMES) / 2 for row in rows)


@PROVE
def test_both_are_watched_and_stay_what_they_are(ranks, clips, pair, tmp_path):
    plan, changes = Plan(dp_replicate=2), {"steps": 4}
    _, expected = ranks(2, trained, of_both(clips, tmp_path / "a", pair, plan, **changes))[0]
    rows, found = ranks(2, trained, of_both(clips, tmp_path / "b", pair, plan, watch=2, **changes))[0]
    for each, wanted in zip(found, expected, strict=True):
        assert_equal(each, wanted)
    assert all(any(key.startswith("grad_norm/block") and side in key for key in rows[0]) for side in NAMES), (
        rows[0]
    )


def not_finite(config, side):
    """The low-noise expert's loss is NaN in the second step: whether each model moved in it."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    trainer.step()
    objective = trainer.experts[side].objective
    loss = objective.loss
    objective.loss = lambda batch: loss(batch) * float("nan")
    before = [[whole(p) for p in expert.state.model.parameters()] for expert in trainer.experts]
    metrics = trainer.step()
    moved = [
        not all(map(torch.equal, old, expert.state.model.parameters()))
        for old, expert in zip(before, trainer.experts, strict=True)
    ]
    return moved, [expert.skipped_in_a_row for expert in trainer.experts], metrics["loss"]


@pytest.mark.parametrize("side", [0, 1])
def test_a_step_that_is_not_finite_is_skipped_by_its_expert_alone(ranks, clips, tmp_path, side):
    config = tiny_config(clips, tmp_path, **{"flow.boundary": BOUNDARY, "lora.rank": 0})
    ((moved, skipped, loss),) = ranks(1, not_finite, config, side)
    assert moved == [side != 0, side != 1] and skipped == [1 - side, side] and loss != loss


def test_models_without_folders_are_two_too(ranks, clips, tmp_path):
    changes = {"steps": 3, "flow.boundary": BOUNDARY}
    _, (high, low) = ranks(1, trained, tiny_config(clips, tmp_path, **changes))[0]
    assert high.keys() == low.keys() and not any(
        torch.equal(high[name], low[name]) for name in high if "average" not in name and "step" not in name
    )


@PROVE
@pytest.mark.slow
@pytest.mark.parametrize("after", some([Plan(ulysses=2), Plan(dp_shard=2, sharding="zero3")]), ids=str)
def test_a_resumed_run_is_the_run(ranks, clips, pair, tmp_path, after):
    before = Plan(ulysses=2)
    config = of_both(clips, tmp_path / "run", pair, before, steps=6, save_every=3, keep_checkpoints=9)
    rows, expected = ranks(2, trained, config)[0]
    states = tmp_path / "run" / "checkpoints"
    # What diffusers' pipeline takes as its transformer and transformer_2.
    for name, tensors in zip(SIDES, expected, strict=True):
        weights = {}
        for path in (states / "step_000006" / name).glob("*.safetensors"):
            weights |= load_file(path)
        assert all(torch.equal(weight, tensors[key]) for key, weight in weights.items())
    going_on = of_both(clips, tmp_path / "on", pair, after, steps=6)
    rows_after, found = ranks(2, trained, going_on, states / "step_000003")[0]
    if before == after:
        same = ("loss", "grad_norm", *(f"loss/{side}" for side in NAMES))
        assert [[row[key] for key in same] for row in rows_after] == [
            [row[key] for key in same] for row in rows[3:]
        ]
        for each, wanted in zip(found, expected, strict=True):
            assert_equal(each, wanted)
    else:
        for each, wanted in zip(found, expected, strict=True):
            assert all(torch.allclose(each[name], wanted[name], atol=1e-4) for name in wanted)


@PROVE
def test_adapters_of_both_are_what_a_pipeline_loads(ranks, clips, pair, tmp_path):
    from diffusers import WanPipeline, WanTransformer3DModel

    changes = {"lora.rank": 2, "optim.lr": 1e-2, "steps": 3, "optim.ema_decay": 0.5}
    ranks(2, trained, of_both(clips, tmp_path / "both", pair, Plan(ulysses=2), **changes))
    transformers = [WanTransformer3DModel.from_pretrained(pair / name) for name in SIDES]
    pipeline = WanPipeline(None, None, None, None, *transformers)
    pipeline.load_lora_weights(tmp_path / "both" / "lora")
    pipeline.load_lora_weights(tmp_path / "both" / "lora_2", load_into_transformer_2=True)
    for name, transformer in zip(SIDES, transformers, strict=True):
        ranks(2, trained, of_one(clips, tmp_path / name, pair, name, Plan(ulysses=2), **changes))
        alone = WanTransformer3DModel.from_pretrained(pair / name)
        alone.load_lora_adapter(str(tmp_path / name / "lora"), use_safetensors=True)
        adapted, expected = transformer.state_dict(), alone.state_dict()
        moved = [value.abs().max() for key, value in expected.items() if "lora_B" in key]
        assert moved and min(moved) > 0
        # The pipeline names its adapters by itself.
        for (key, found), wanted in zip(adapted.items(), expected.values(), strict=True):
            assert torch.equal(found, wanted), key


def test_a_run_samples_with_both(ranks, clips, pair, tmp_path):
    changes = {"num_samples": 1, "sample_every": 2, "steps": 3, "flow.sample_steps": 3}
    output = tmp_path / "both"
    ranks(2, trained, of_both(clips, output, pair, Plan(ulysses=2), **changes))
    assert sorted(path.name for path in (output / "samples").iterdir()) == ["step_000002", "step_000003"]
    assert (output / "samples/step_000003/clip_1.mp4").is_file()
    page = (output / "run.html").read_text()
    assert "Loss, high-noise" in page and "Loss, low-noise" in page


# ---- wrong input

WRONG = {
    "a range too": ({"flow.time_range": [0.0, 0.6]}, "leave one of them out"),
    "no second": ({"model.path_2": ""}, "model.path_2 is not: set it"),
    "no boundary": ({"flow.boundary": 0.0}, "flow.boundary is not: set it"),
    "no first": ({"model.path": ""}, "model.path has the first; set both"),
    "a boundary of 1": ({"flow.boundary": 1.0}, "flow.boundary"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_pair_is_refused(clips, pair, tmp_path, wrong):
    changes, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        of_both(clips, tmp_path, pair, **changes)


def refused(config, saved=None):
    from opensora_accel.training.loop import Trainer

    with pytest.raises(ValueError) as caught:
        Trainer(config, saved, read_record(saved) if saved else None)
    return str(caught.value)


def test_an_expert_is_not_trained_in_the_others_range(ranks, clips, pair, tmp_path):
    high, low = (str(pair / name) for name in SIDES)
    swapped = of_both(clips, tmp_path, pair, **{"model.path": low, "model.path_2": high})
    (told,) = ranks(1, refused, swapped)
    assert f"{low} is the expert of the times 0 to {BOUNDARY}" in told and "model_index.json" in told
    (told,) = ranks(1, refused, of_both(clips, tmp_path, pair, **{"flow.boundary": 0.9}))
    assert f"{low} is the expert of the times 0 to {BOUNDARY}, and 0 to 0.9" in told
    alone = of_one(clips, tmp_path, pair, "transformer", **{"flow.time_range": [0.0, BOUNDARY]})
    (told,) = ranks(1, refused, alone)
    assert f"{high} is the expert of the times {BOUNDARY} to 1" in told
    # A part of its own times is its own affair.
    ranks(
        1,
        trained,
        of_one(clips, tmp_path, pair, "transformer", **{"flow.time_range": [0.7, 0.8], "steps": 1}),
    )


def warned(config):
    from opensora_accel.training.loop import Trainer
    from opensora_accel.training.recipes import checks

    told, warning = [], checks.logger.warning
    checks.logger.warning = lambda text, *values: told.append(text % values)
    try:
        Trainer(config)
    finally:
        checks.logger.warning = warning
    return told


def test_an_expert_that_gets_all_times_is_told(ranks, clips, pair, tmp_path):
    config = of_one(clips, tmp_path, pair, "transformer_2", **{"flow.time_range": [0.0, 1.0]})
    told, nothing = ranks(2, warned, dataclasses.replace(config, plan=Plan(ulysses=2)))
    assert len(told) == 1 and "flow.time_range" in told[0] and nothing == []


def test_a_state_of_one_model_is_not_gone_on_with_by_two(ranks, clips, tmp_path):
    one = tiny_config(clips, tmp_path / "one", steps=1)
    ranks(1, trained, one)
    two = dataclasses.replace(one, flow=dataclasses.replace(one.flow, boundary=BOUNDARY))
    (told,) = ranks(1, refused, two, tmp_path / "one/checkpoints/step_000001")
    assert "a run of 1 model(s), and this one trains 2" in told


@PROVE
@pytest.mark.parametrize("file", ["optimizer_2.safetensors", "transformer_2/config.json"])
def test_a_manifest_without_a_file_of_the_second_is_damaged(ranks, clips, tmp_path, file):
    ranks(1, trained, tiny_config(clips, tmp_path, **{"steps": 1, "flow.boundary": BOUNDARY}))
    folder = tmp_path / "checkpoints/step_000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest[file]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shutil.move(folder / file, tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"does not list {file}"):
        read_record(folder)


def profiled(config):
    from opensora_accel.training.config import ProfileOptions
    from opensora_accel.training.loop import Trainer

    with pytest.raises(ValueError) as caught:
        Trainer(config).train(ProfileOptions(1))
    return str(caught.value)


def test_what_follows_one_model_asks_for_one(ranks, clips, tmp_path):
    from opensora_accel.training.planned import job_of

    config = tiny_config(clips, tmp_path, **{"flow.boundary": BOUNDARY})
    (told,) = ranks(1, profiled, config)
    assert "set flow.time_range in place of flow.boundary" in told
    with pytest.raises(ValueError, match="the planner counts one model"):
        job_of(config)


def test_the_parts_of_a_run_say_what_they_train():
    config = config_from_dict({"flow": {"boundary": 0.875}}, "the test")
    high, low = config.experts
    assert high.flow.time_range == (0.875, 1.0) and low.flow.time_range == (0.0, 0.875)
    assert high.flow.boundary == low.flow.boundary == 0.0 and config.num_samples
