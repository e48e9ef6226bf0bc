"""A pipeline's folder becomes a configuration, which a run takes as it is."""

import dataclasses
import json
import shutil

import pytest
import torch

from opensora_accel import Plan
from opensora_accel.training import new_command, planned
from opensora_accel.training.config import load_config
from opensora_accel.training.sections import ConditionsConfig
from opensora_accel.training.tiny_run import write_clips
from opensora_accel.verify.pool import RankError
from tests.tiers import PROVE, some
from tests.training.pipelines import CAPTIONS, EVERY, FROM_FRAMES, FROM_VIDEOS, setting


def saved(name, folder):
    """The family's tiny pipeline, as diffusers saves it."""
    pipeline = setting(name).pipeline.to(torch.float32)
    pipeline.save_pretrained(folder)
    return folder


def written(folder, *options):
    """The configuration that is written for a pipeline's folder, and its text."""
    output = folder.with_suffix(".toml")
    output.unlink(missing_ok=True)
    assert new_command.main([str(folder), "--output", str(output), *options]) == 0
    return load_config(output), output.read_text()


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """By the name of the family; saved when first asked for."""
    folder, made = tmp_path_factory.mktemp("pipelines"), {}

    def get(name):
        if name not in made:
            made[name] = saved(name, folder / str(len(made)))
        return made[name]

    return get


SHIFTS = {
    "WanTransformer3DModel": 3.0,
    "WanVACETransformer3DModel": 3.0,
    "SkyReelsV2Transformer3DModel": 8.0,
    "LTXVideoTransformer3DModel": "ltx",
    "LTX2VideoTransformer3DModel": "ltx",
    "LTX2VideoTransformer3DModel, 2.3": "ltx",
    "MochiTransformer3DModel": 1.0,
    "CogVideoXTransformer3DModel, 2B": 1.73205,
    "CogVideoXTransformer3DModel, 5B": "auto",
    "CogVideoXTransformer3DModel, 1.5": "auto",
    "HunyuanVideoTransformer3DModel": 7.0,
    "HunyuanVideo15Transformer3DModel": 5.0,
    "SanaVideoTransformer3DModel": 8.0,
    "Kandinsky5Transformer3DModel": 5.0,
    "CosmosTransformer3DModel": 5.0,
    "EasyAnimateTransformer3DModel": 5.0,
    "AllegroTransformer3DModel": "auto",
    "LatteTransformer3DModel": "auto",
}


def steps(config):
    from opensora_accel.training.loop import Trainer

    return Trainer(config).train()


def tiny(config, name, folder):
    """Two steps of what was written, on clips of the size of a family's test."""
    clips = write_clips(
        folder / "clips", num_frames=max(13, EVERY[name].size[0]), with_sound=bool(config.codec.sound_path)
    )
    lines = [json.dumps({"file": f"{n}.mp4", "caption": CAPTIONS[n % 2]}) for n in range(5)]
    (clips / "metadata.jsonl").write_text("\n".join(lines))
    num_frames, height, width = EVERY[name].size
    data = dataclasses.replace(
        config.data, folder=str(clips), num_frames=num_frames, height=height, width=width
    )
    return dataclasses.replace(config, data=data, output=str(folder / "run"), steps=2, num_samples=0)


OF_HUNYUAN = [f"HunyuanVideo, {kind}" for kind in ("token_replace", "latent_concat")]


@pytest.mark.parametrize("name", some(SHIFTS, "HunyuanVideoTransformer3DModel"))
def test_a_run_takes_what_was_written(ranks, pipelines, tmp_path, name):
    config, text = written(pipelines(name))
    assert config.flow.shift == SHIFTS[name] and config.lora.rank == 16
    assert config.flow.is_forced == name.startswith("SkyReels")
    assert '\nplan = "auto"' in text and text.startswith("#:schema ./")
    (losses,) = ranks(1, steps, tiny(config, name, tmp_path))
    assert len(losses) == 2


@PROVE
@pytest.mark.parametrize(
    "name",
    some(
        ["CogVideoX", "HunyuanVideo 1.5", "Cosmos-Predict 2", "EasyAnimate", *OF_HUNYUAN],
        "CogVideoX",
        "Cosmos-Predict 2",
        OF_HUNYUAN[0],
    ),
)
def test_weights_that_begin_with_a_frame(ranks, tmp_path, name):
    frame = (FROM_FRAMES | FROM_VIDEOS)[name]
    made = setting(frame.family, frame.vae, frame)
    made.pipeline.to(torch.float32).save_pretrained(tmp_path / "pipeline")
    config, _ = written(tmp_path / "pipeline")
    assert (config.conditions.t2v, config.conditions.i2v_head) == (0.0, 1.0)
    assert bool(config.image.path) == bool(frame.picture_width)
    assert config.text.cache == (not name.startswith("HunyuanVideo,"))
    assert len(ranks(1, steps, tiny(config, frame.family, tmp_path))[0]) == 2


def test_weights_from_text_learn_no_frames(ranks, pipelines, tmp_path):
    config, _ = written(pipelines("WanTransformer3DModel"))
    config = tiny(config, "WanTransformer3DModel", tmp_path)
    config = dataclasses.replace(config, conditions=ConditionsConfig(i2v_head=1.0))
    with pytest.raises(RankError, match=r"no channels for frames that are given, and .*expand_timesteps"):
        ranks(1, steps, config)


def test_two_experts_and_first_frames(pipelines, tmp_path):
    folder = shutil.copytree(pipelines("WanTransformer3DModel"), tmp_path / "wan")
    config = json.loads((folder / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(json.dumps({**config, "in_channels": 36}))
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "boundary_ratio": 0.9}))
    config, text = written(folder, "--full")
    assert 'plan = "auto"' not in text and config.plan.precision == "bf16", "the planner would refuse two"
    with pytest.raises(ValueError, match=r"flow\.boundary trains two"):
        new_command.main(
            [str(folder), "--output", str(tmp_path / "x.toml"), "--gpus", "2", "--hardware", "h100x8"]
        )
    assert (config.flow.boundary, config.model.path_2) == (0.9, str(folder / "transformer_2"))
    assert (config.conditions.t2v, config.conditions.i2v_head, config.lora.rank) == (0.0, 1.0, 0)


@PROVE
def test_the_planners_plan_is_in_it(pipelines, tmp_path):
    folder = shutil.copytree(pipelines("WanTransformer3DModel"), tmp_path / "wan")
    # Positions for the clips that are published.
    config = json.loads((folder / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(json.dumps({**config, "rope_max_seq_len": 64}))
    config, text = written(folder, "--gpus", "2", "--hardware", "h100x8")
    assert config.plan.world_size == 2 and config.plan.precision == "bf16"
    assert config.data.batch_size == config.plan.data and "[plan]" in text and "auto" not in text


def test_editors_check_a_file_by_the_schema(pipelines):
    schema = new_command.schema_of_config()
    assert schema["additionalProperties"] is False
    assert schema["properties"]["steps"] == {
        "default": 1000, "description": "Optimizer steps.", "minimum": 1, "title": "Steps", "type": "integer"
    }  # fmt: skip
    every = [schema, *schema["$defs"].values()]
    bare = [name for table in every for name, each in table["properties"].items()
            if "description" not in each and "$ref" not in each]  # fmt: skip
    assert bare == [], "an option has no sentence of its own"


def test_what_cannot_be_written_is_told(pipelines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(pipelines("WanTransformer3DModel"), tmp_path / "wan")
    (tmp_path / "there.toml").touch()
    for arguments, message in (
        (["wan2.2-t2v"], r"Wan-AI/Wan2\.2-T2V-A14B-Diffusers .* `hf download .* --local-dir wan2\.2-t2v`"),
        (["nowhere"], r"nowhere is no folder; give the local folder of a pipeline"),
        ([str(tmp_path)], r"has no model_index\.json or modular_model_index\.json; give"),
        ([str(folder), "--output", "there.toml"], r"there\.toml exists; name another"),
        ([str(folder), "--output", "x.json"], r"--output is a \.toml file"),
        ([str(folder), "--rank", "0"], r"at least 1; --full trains all weights; got 0"),
        ([str(folder), "--gpus", "2"], r"--gpus and --hardware belong together"),
        ([str(folder), "--gpus", "0", "--hardware", "h100x8"], r"at least 1; got 0"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            new_command.main(arguments)
    shutil.rmtree(folder / "vae")
    shutil.copytree(pipelines("MochiTransformer3DModel") / "vae", folder / "vae")
    with pytest.raises(
        ValueError, match=r"has in_channels 16, and what lies beside it gives 12: they are parts of"
    ):
        new_command.main([str(folder)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.toml", "wan"], "nothing is written"


def test_a_plan_that_is_chosen_on_gpus_computes_in_bf16(pipelines, monkeypatch):
    config, _ = written(pipelines("WanTransformer3DModel"))
    config, chosen = dataclasses.replace(config, plan=Plan()), []
    monkeypatch.setattr(planned, "choose_foreseen", lambda job, _world_size: chosen.append(job.precision))
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        planned.choose_plan(config)
    assert chosen == ["fp32", "bf16"]
