"""Checkpoints: whole or not there, pruned only where this run wrote them, verified before they are read."""

import json
import os
import shutil

import pytest

from opensora_accel.training.state import MODEL_WEIGHTS, list_checkpoints, read_record


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def checkpoints(run, config_file, tmp_path):
    """Of a run with step_000002 and step_000004."""
    assert run("train", "--config", config_file)[0] == 0
    return tmp_path / "run" / "checkpoints"


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
        "is outside of the checkpoint",
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
    assert [path.name for path in list_checkpoints(checkpoints)] == ["step_000002", "step_000004"]
