"""Checkpoints: whole or not there, pruned only where this run wrote them, verified before they are read."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from opensora_accel import Plan
from opensora_accel.training.saved_state import MODEL_WEIGHTS, list_saved_states, read_record
from tests.tiers import PROVE, some
from tests.training.runs import tiny_config


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def checkpoints(output):
    """Of a run with step_000002 and step_000004."""
    return output / "checkpoints"


def go_on(run, *options):
    status, text = run("train", *options)
    assert status == 0, text
    return text


def test_folders_of_the_user_between_checkpoints_are_kept(run, config_file, checkpoints):
    """A name alone says nothing: neither that it is a checkpoint, nor that this run wrote it."""
    (checkpoints / "step_000001").mkdir()
    (checkpoints / "step_000001" / "notes.txt").write_text("mine")
    (checkpoints / "step_000001" / "manifest.json").write_text('{"notes.txt": "of something else"}')
    (checkpoints / "step_000006").mkdir()  # where the run will save
    (checkpoints / "step_000006" / "notes.txt").write_text("mine")
    (checkpoints / "step_000002" / "notes.txt").write_text("mine")
    options = ["--keep-checkpoints", "1", "--steps", "6", "--save-every", "6"]
    go_on(run, "--config", config_file, "--resume", checkpoints / "step_000004", *options)
    assert names(checkpoints) == ["step_000001", "step_000002", "step_000006", "step_000006.kept_1"]
    assert names(checkpoints / "step_000002") == ["notes.txt"], "the checkpoint's own files go, others stay"
    assert names(checkpoints / "step_000001") == ["manifest.json", "notes.txt"]
    assert names(checkpoints / "step_000006.kept_1") == ["notes.txt"]
    read_record(checkpoints / "step_000006")


def test_checkpoints_of_another_run_are_kept(run, config_file, checkpoints, tmp_path):
    other = ["--config", config_file, "--output", tmp_path / "other", "--steps", "1"]
    go_on(run, *other)
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step_000001", checkpoints / "step_000001")
    go_on(run, "--config", config_file, "--resume", "--steps", "8", "--keep-checkpoints", "1")
    assert names(checkpoints) == ["step_000001", "step_000008"], "and the own ones of before the resume go"


def test_a_checkpoint_that_is_a_link_to_an_archive_is_kept(run, config_file, checkpoints, tmp_path):
    archive = tmp_path / "archive"
    (checkpoints / "step_000002").rename(archive)
    (checkpoints / "step_000002").symlink_to(archive)
    before = names(archive)
    go_on(run, "--config", config_file, "--resume", "--steps", "8", "--keep-checkpoints", "1")
    assert names(checkpoints) == ["step_000002", "step_000008"] and names(archive) == before
    read_record(checkpoints / "step_000002")


def test_what_a_killed_save_left_goes_and_a_link_is_not_followed(run, config_file, checkpoints, tmp_path):
    (checkpoints / "step_000003.partial").mkdir()
    (checkpoints / "step_000003.partial" / "state.json").write_text("{")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (checkpoints / "step_000005.partial").symlink_to(tmp_path / "mine")
    go_on(run, "--config", config_file, "--resume", "--steps", "5")
    assert names(checkpoints) == ["step_000004", "step_000005"] and names(tmp_path / "mine") == ["notes.txt"]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    run, config_file, checkpoints, monkeypatch
):
    remove = os.unlink

    def busy(path, *args, **options):
        if "step_000002" in str(path):
            raise OSError(16, "Device or resource busy", str(path))
        return remove(path, *args, **options)

    monkeypatch.setattr(os, "unlink", busy)
    go_on(run, "--config", config_file, "--resume", "--steps", "6", "--keep-checkpoints", "1")
    assert names(checkpoints) == ["step_000002", "step_000006"]


# Every checkpoint is a model of diffusers

LOADS_IT = """
import sys
import torch
from diffusers import AutoModel, WanTransformer3DModel

inputs, *folders = sys.argv[1:]
for folder in folders:
    model, info = WanTransformer3DModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert isinstance(AutoModel.from_pretrained(folder), WanTransformer3DModel)
    with torch.no_grad():
        torch.save(model.eval()(**torch.load(inputs), return_dict=False)[0], folder + ".output")
assert not [name for name in sys.modules if name.startswith(("opensora_accel", "shardformer"))]
"""


def trained(config, inputs):
    """Of the trained model and of its average: the output for `inputs`, from the weights in memory."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    trainer.train()
    model, outputs = trainer.state.model.eval(), {}
    with torch.no_grad():
        outputs["transformer"] = model(**inputs, return_dict=False)[0]
        with trainer.state.ema.applied():
            outputs["transformer_ema"] = model(**inputs, return_dict=False)[0]
    return outputs


@pytest.mark.prove
@pytest.mark.parametrize(
    "plan",
    [Plan(), Plan(dp_shard=2, sharding="zero3", checkpoint="full")],
    ids=["one rank", "sharded"],
)
def test_a_checkpoint_is_a_model_of_diffusers(ranks, clips, tmp_path, plan):
    config = tiny_config(clips, tmp_path / "run", plan, steps=3)
    torch.manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, 48, 5, 6, 10),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 8, 32),
    }
    torch.save(inputs, tmp_path / "inputs")
    expected = ranks(plan.world_size, trained, config, inputs)[0]
    assert not torch.equal(expected["transformer"], expected["transformer_ema"])
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000003"
    for name in expected:
        description = json.loads((checkpoint / name / "config.json").read_text())
        assert description["_class_name"] == "WanTransformer3DModel" and str(tmp_path) not in str(description)
    folders = [str(checkpoint / name) for name in expected]
    command = [sys.executable, "-c", LOADS_IT, str(tmp_path / "inputs"), *folders]
    subprocess.run(command, check=True, cwd=tmp_path)
    for name, output in expected.items():
        assert torch.equal(torch.load(checkpoint / f"{name}.output"), output), name


def test_training_starts_from_the_model_of_a_checkpoint(run, config_file, checkpoints, tmp_path):
    """--model.path takes it, live and averaged."""
    output = tmp_path / "second"
    for name in ("transformer", "transformer_ema"):
        model = tmp_path / name
        shutil.copytree(checkpoints / "step_000004" / name, model)
        options = ["--model.path", model, "--output", output / name, "--optim.lr", "0", "--steps", "1"]
        text = go_on(run, "--config", config_file, "--model.config", "{}", *options)
        assert "WanTransformer3DModel, 0.05 M parameters" in text
        found = load_file(output / name / "checkpoints" / "step_000001" / MODEL_WEIGHTS)
        expected = load_file(model / "diffusion_pytorch_model.safetensors")
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_a_model_folder_that_lacks_weights_is_refused(run, config_file, checkpoints, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(checkpoints / "step_000004" / "transformer", model)
    weights = load_file(model / "diffusion_pytorch_model.safetensors")
    weights.pop("blocks.0.attn1.to_k.weight")
    save_file(weights, model / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    options = [
        "--config",
        config_file,
        "--output",
        tmp_path / "new",
        "--model.config",
        "{}",
        "--model.path",
        model,
    ]
    status, text = run("train", *options)
    assert status == 2 and "missing ['blocks.0.attn1.to_k.weight'], unknown []" in text
    (model / "diffusion_pytorch_model.safetensors").write_bytes(b"\x00" * 99)
    status, text = run("train", *options)
    assert status == 2 and f"model.path {model} cannot be loaded as WanTransformer3DModel" in text


@pytest.mark.parametrize("config", ["", "{", "[]", "{}", '{"_class_name": 3}', '{"_class_name": "T5"}'])
def test_a_model_folder_with_another_description_is_refused(run, config_file, tmp_path, config):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config)
    status, text = run(
        "train", "--config", config_file, "--model.config", "{}", "--model.path", tmp_path / "model"
    )
    assert status == 2 and "model" in text and len(text.splitlines()) == 1, text


def change_manifest(folder, change):
    path = folder / "manifest.json"
    sums = json.loads(path.read_text())
    change(sums)
    path.write_text(json.dumps(sums))


MANIFESTS = {
    "of nothing": (
        lambda f: (f / "manifest.json").write_text("{}"),
        "does not list state.json, optimizer.safetensors",
    ),
    "empty": (lambda f: (f / "manifest.json").write_text(""), "manifest.json is damaged"),
    "not JSON": (lambda f: (f / "manifest.json").write_bytes(b"\x00\xff" * 99), "manifest.json is damaged"),
    "a list": (lambda f: (f / "manifest.json").write_text("[]"), "it is no table of SHA-256 sums"),
    "no sums": (
        lambda f: change_manifest(f, lambda s: s.update({"state.json": 3})),
        "no table of SHA-256 sums",
    ),
    "without the weights": (
        lambda f: change_manifest(f, lambda s: s.pop(MODEL_WEIGHTS)),
        f"not list {MODEL_WEIGHTS}",
    ),
    "without the tokenizer": (
        lambda f: change_manifest(f, lambda s: s.pop("tokenizer.json")),
        "not list tokenizer",
    ),
    "outside": (
        lambda f: change_manifest(f, lambda s: s.update({"../x": "0" * 64})),
        "is outside of the saved state",
    ),
    "a missing file": (lambda f: (f / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    "a changed state": (
        lambda f: (f / "state.json").write_text("{}"),
        "state.json was changed since it was written",
    ),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_checkpoint_is_read_only_where_its_manifest_vouches_for_every_file(
    run, config_file, checkpoints, name
):
    damage, message = MANIFESTS[name]
    damage(checkpoints / "step_000004")
    status, text = run("train", "--config", config_file, "--resume", "--steps", "5")
    assert status == 2 and message in text and len(text.splitlines()) == 1, text
    assert [path.name for path in list_saved_states(checkpoints)] == ["step_000002", "step_000004"]


@pytest.mark.parametrize("content", ["{}", "[]", '{"step": 4, "config": {}, "data": {}}'])
def test_a_state_of_something_else_is_refused(run, config_file, checkpoints, content):
    state = checkpoints / "step_000004" / "state.json"
    state.write_text(content)
    sums = {"state.json": hashlib.sha256(content.encode()).hexdigest()}
    change_manifest(state.parent, lambda manifest: manifest.update(sums))
    status, text = run("train", "--config", config_file, "--resume")
    assert status == 2 and "is no record of a saved state: " in text and len(text.splitlines()) == 1, text


def reseal(folder, text):
    """Writes another state.json, with a manifest that vouches for it."""
    (folder / "state.json").write_text(text)
    sums = {"state.json": hashlib.sha256(text.encode()).hexdigest()}
    change_manifest(folder, lambda manifest: manifest.update(sums))


EDITS = {
    "step": ["a", -5, 2.5, None, [], True, 1e300, 10**30],
    "ema_updates": [-1, "1", 0.5, None],
    "config": [[], 7, "a", None, {"steps": "a"}, {"steps": -5}, {"data": []}, {"plan": {"ulysses": 0}}, {"shoe": 1}],
    "data": [[], 1, None, {}],
    "data.position": [-1, "a", 2.5, 10**30, None, []],
    "data.order": [3, None, []],
    "data.excluded": ["a", {}, [1], None],
    "data.quarantined": [[], {"a": 1}, 3],
    "norms": ["a", [-1.0], [float("nan")], [None], {}],
    "optimizer": [{}, [1], [{"k": "a"}], [{}, {}, {}], [{"shoe": 1.0}]],
    "run": [1, []],
    "model_class": [1, {}],
}  # fmt: skip


@PROVE
# The first half has a value of every place.
@pytest.mark.parametrize("half", some(range(2)))
def test_a_state_that_was_edited_and_sealed_again_is_refused_and_costs_nothing(
    run, config_file, output, checkpoints, half
):
    state = checkpoints / "step_000004" / "state.json"
    whole = state.read_text()

    def files():
        return {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}

    for place, values in EDITS.items():
        for value in values[half::2]:
            record = json.loads(whole)
            *outer, last = place.split(".")
            inside = record[outer[0]] if outer else record
            inside[last] = value
            reseal(state.parent, json.dumps(record))
            before = files()
            status, text = run("train", "--config", config_file, "--resume", "--steps", "6")
            told = f"{place} = {value!r}: {text}"
            assert status == 2 and "Traceback" not in text, told
            assert text.splitlines()[-1].startswith("error: ") and files() == before, told


def test_a_run_that_ends_before_its_first_step_leaves_the_one_before_as_it_was(
    run, config_file, output, checkpoints
):
    """Of the steps after the one it goes on from: their rows, and the configuration."""
    rows = (output / "metrics.jsonl").read_text()
    (output / "metrics.jsonl").write_text(rows + '"no row"\n')
    config = (output / "config.json").read_text()
    go_on_from = ["--config", config_file, "--resume", checkpoints / "step_000002", "--steps", "6"]
    status, text = run("train", *go_on_from)
    assert status == 2 and "is no row of a run" in text
    assert (output / "config.json").read_text() == config
    assert names(checkpoints) == ["step_000002", "step_000004"]
    (output / "metrics.jsonl").write_text(rows)
    go_on(run, *go_on_from)
    steps = [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
