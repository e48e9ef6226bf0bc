"""The output folder: one run at a time, nothing of the user's touched, and nothing written through links."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opensora_accel.training.tiny_run import write_clips
from tests.tiers import PROVE, some

HOLDS_THE_FOLDER = """
import sys
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.output import claim
with claim(TrainConfig(output=sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def files(folder):
    """Every file and link below it, with its content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_file():
            found[str(path)] = path.read_bytes()
    return found


def steps_of(output):
    return [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]


@PROVE
def test_a_second_run_is_refused_while_the_first_one_lives(run, config_file, tmp_path):
    output = tmp_path / "run"
    assert run("train", "--config", config_file)[0] == 0
    before = files(output)
    command = [sys.executable, "-c", HOLDS_THE_FOLDER, str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        for options in ([], ["--resume"], ["--resume", "auto"]):
            status, text = run("train", "--config", config_file, *options)
            assert status == 2 and f"in use by another run (process {first.pid} on" in text, text
        lock = {path: content for path, content in files(output).items() if path not in before}
        assert list(lock) == [f"{output}/.opensora-accel.lock"] and before.items() <= files(output).items()
        first.kill()  # whoever is killed holds nothing
        first.wait()
    status, text = run("train", "--config", config_file, "--resume", "--steps", "5")
    assert status == 0 and steps_of(output) == [1, 2, 3, 4, 5]
    assert not (output / ".opensora-accel.lock").exists()


@pytest.mark.parametrize("name", ["config.json", "checkpoints", "samples", "metrics.jsonl"])
def test_a_folder_that_is_no_run_is_refused_and_left_as_it_is(run, config_file, tmp_path, name):
    model = tmp_path / "model"
    (model / "weights").mkdir(parents=True)
    if name == "config.json":
        (model / name).write_text('{"_class_name": "WanTransformer3DModel"}')
    elif name.endswith("jsonl"):
        (model / name).write_text("mine\n")
    else:
        (model / name / "step_000001").mkdir(parents=True)
        (model / name / "step_000001" / "notes.txt").write_text("mine")
    before = files(tmp_path)
    status, text = run("train", "--config", config_file, "--output", model)
    assert status == 2 and f"has {name}, which no run of opensora-accel wrote" in text, text
    assert files(tmp_path) == before


@pytest.mark.prove
def test_an_earlier_run_is_moved_inside_a_folder_that_cannot_be_renamed(
    run, config_file, tmp_path, monkeypatch
):
    """A mounted volume answers EBUSY to its own renaming."""
    output, rename = tmp_path / "run", Path.rename
    assert run("train", "--config", config_file)[0] == 0

    def busy(path, target):
        if path == output:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", busy)
    (output / "notes.txt").write_text("mine")
    status, text = run("train", "--config", config_file, "--steps", "2")
    assert status == 0 and f"it is in {output}/earlier_1 now" in text, text
    assert steps_of(output) == [1, 2] and steps_of(output / "earlier_1") == [1, 2, 3, 4]
    assert (output / "notes.txt").read_text() == "mine"
    assert run("train", "--config", config_file, "--steps", "3")[0] == 0
    assert steps_of(output / "earlier_2") == [1, 2] and steps_of(output / "earlier_1") == [1, 2, 3, 4]
    earlier = output / "earlier_1" / "checkpoints" / "step_000004"
    assert run("train", "--resume", earlier, "--steps", "5")[0] == 0
    assert steps_of(output / "earlier_1") == [1, 2, 3, 4, 5] and steps_of(output) == [1, 2, 3]


@pytest.mark.parametrize(
    "option", some(["data.folder", "model.path", "lora.path", "image.path"], "lora.path")
)
def test_what_a_run_reads_is_not_moved_away_from_it(run, config_file, tmp_path, option):
    assert run("train", "--config", config_file)[0] == 0
    inside = tmp_path / "run" / "checkpoints" / "step_000004" / "transformer"
    write_clips(inside)
    options = {
        "model.path": ["--model.config", "{}"],
        "image.path": ["--conditions.i2v_head", "1", "--text.length", "512"],
    }.get(option, [])
    status, text = run("train", "--config", config_file, f"--{option}", inside, *options)
    assert status == 2 and f"--{option} {inside} lies in what an earlier run wrote" in text, text
    assert inside.is_dir()


LINKS = ["config.json", "metrics.jsonl", "tensorboard", "offload.json", "checkpoints", "samples/step_000009"]


@pytest.mark.parametrize("name", some(LINKS, "samples/step_000009"))
def test_nothing_is_written_through_a_link_in_a_received_run(run, config_file, tmp_path, name):
    output, mine = tmp_path / "run", tmp_path / "mine"
    assert run("train", "--config", config_file, "--num-samples", "1")[0] == 0
    mine.mkdir()
    place = output / name
    if place.exists():
        place.rename(mine / "target")
    elif name == "offload.json":
        (mine / "target").write_text("mine")
    else:
        (mine / "target").mkdir()
    place.symlink_to(mine / "target")
    before = files(mine)
    checkpoint = mine / "target" if name == "checkpoints" else output / "checkpoints"
    options = ["--resume", checkpoint / "step_000004", "--output", output, "--steps", "9"]
    for given in (options, ["--resume"], []):
        status, text = run("train", "--config", config_file, *given)
        assert status == 2 and f"{place} is a link (to {mine}/target)" in text, text
    assert files(mine) == before


def test_a_lock_that_is_a_link_is_not_followed(run, config_file, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run" / ".opensora-accel.lock").symlink_to(tmp_path / "precious")
    status, text = run("train", "--config", config_file)
    assert status == 2 and ".opensora-accel.lock" in text and (tmp_path / "precious").read_text() == "mine"


def test_an_output_that_cannot_be_written_is_found_before_the_model_is_built(
    run, config_file, tmp_path, monkeypatch
):
    from opensora_accel.training import build

    monkeypatch.setattr(build, "build_model", lambda *_: pytest.fail("the model was built"))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loose").symlink_to(tmp_path / "nothing")
    for output, message in {
        tmp_path / "file": "is a file; name a folder",
        tmp_path / "file" / "run": "Not a directory",
        tmp_path / "loose": "is a link to nothing; name a folder",
        tmp_path / ("x" * 300): "File name too long",
    }.items():
        status, text = run("train", "--config", config_file, "--output", output)
        assert status == 2 and message in text and len(text.splitlines()) == 1, text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loose", "run.json"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_full_or_read_only_output_is_found_first(run, config_file, tmp_path, monkeypatch, number):
    (tmp_path / "run").mkdir()
    open_file = os.open

    def refused(path, *args, **options):
        if str(path).startswith(str(tmp_path / "run")):
            raise OSError(number, os.strerror(number), str(path))
        return open_file(path, *args, **options)

    monkeypatch.setattr(os, "open", refused)
    status, text = run("train", "--config", config_file)
    assert status == 2 and text.startswith(f"error: {tmp_path}/run") and os.strerror(number) in text, text
    assert len(text.splitlines()) == 1 and "parameters" not in text


def test_a_run_that_does_not_start_leaves_nothing(run, config_file, tmp_path):
    status, _ = run("train", "--config", config_file, "--output", tmp_path / "a" / "b", "--data.height", "26")
    assert status == 2 and not (tmp_path / "a").exists()


@pytest.mark.prove
def test_a_full_disk_costs_nothing_that_was_there(run, config_file, tmp_path, monkeypatch):
    """config.json says that the folder is a run, and metrics.jsonl is written anew when a run goes on."""
    output, write_text = tmp_path / "run", Path.write_text
    assert run("train", "--config", config_file)[0] == 0
    before = {name: (output / name).read_text() for name in ("config.json", "metrics.jsonl")}
    for name in before:

        def full(path, text, name=name, **options):
            if name in path.name:
                write_text(path, text[: len(text) // 2], **options)
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return write_text(path, text, **options)

        monkeypatch.setattr(Path, "write_text", full)
        status, text = run("train", "--config", config_file, "--resume", "--steps", "5")
        assert status == 2 and "No space left on device" in text, text
        assert (output / name).read_text() == before[name]
        monkeypatch.setattr(Path, "write_text", write_text)
    assert run("train", "--config", config_file, "--resume", "--steps", "5")[0] == 0


def test_metrics_that_are_none_are_named(run, config_file, tmp_path):
    assert run("train", "--config", config_file)[0] == 0
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write("\0\0\n")
    status, text = run("train", "--config", config_file, "--resume", "--steps", "5")
    assert status == 2 and "metrics.jsonl:5 is no row of a run" in text, text
