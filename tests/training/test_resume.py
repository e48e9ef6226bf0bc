"""Resuming: the checkpoint that was meant, in the run that it lies in, and the same one on all ranks."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from opensora_accel.training.saved_state import read_record
from tests.tiers import some


def steps_of(output):
    return [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def flip(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


# Which run a checkpoint lies in

PLACES = {
    "the step folder itself": ("run/checkpoints/step_000004", "."),
    "a relative step folder": ("run/checkpoints", "step_000004"),
    "from the run": ("run", "checkpoints/step_000004"),
    "a link beside the checkpoints": ("run", "checkpoints/latest"),
    "a link in the run": (".", "run/latest"),
    "a link outside": (".", "latest"),
    "with dots": ("run/samples", "../checkpoints/../checkpoints/step_000004/"),
}


@pytest.mark.parametrize("name", some(PLACES, "a relative step folder", "a link outside"))
def test_a_run_goes_on_where_its_checkpoint_lies(run, output, tmp_path, monkeypatch, name):
    place, given = PLACES[name]
    (output / "samples").mkdir()
    for link in (output / "checkpoints" / "latest", output / "latest", tmp_path / "latest"):
        link.symlink_to(output / "checkpoints" / "step_000004")
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.chdir(tmp_path / place)
    status, text = run("train", "--resume", given, "--steps", "5")
    assert status == 0, text
    assert steps_of(output) == [1, 2, 3, 4, 5] and (output / "checkpoints" / "step_000005").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "written beside the run"
    assert not (output / "earlier_1").exists()


def test_a_checkpoint_in_an_archive_goes_on_in_the_run_that_links_to_it(run, output, tmp_path):
    archive = tmp_path / "archive" / "old"
    archive.parent.mkdir()
    (output / "checkpoints" / "step_000004").rename(archive)
    (output / "checkpoints" / "step_000004").symlink_to(archive)
    status, text = run("train", "--resume", output / "checkpoints" / "step_000004", "--steps", "5")
    assert status == 0 and steps_of(output) == [1, 2, 3, 4, 5], text
    assert [path.name for path in archive.parent.iterdir()] == ["old"]

    # By itself it lies in no run.
    status, text = run("train", "--resume", archive, "--steps", "6")
    assert status == 2 and f"the saved state {archive} lies in no run" in text and "--output" in text
    status, text = run("train", "--resume", archive, "--steps", "6", "--output", tmp_path / "new")
    assert status == 0 and steps_of(tmp_path / "new") == [5, 6], text


def test_going_on_in_the_folder_of_another_run_moves_that_one_aside(run, config_file, output, tmp_path):
    other = tmp_path / "other"
    assert run("train", "--config", config_file, "--output", other, "--steps", "3")[0] == 0
    status, text = run(
        *("train", "--resume", output / "checkpoints" / "step_000004", "--steps", "5", "--output", other)
    )
    assert status == 0 and f"{other} had an earlier run" in text, text
    assert steps_of(other) == [5] and steps_of(other / "earlier_1") == [1, 2, 3]


def test_a_checkpoint_that_was_set_aside_can_be_gone_on_with(run, output):
    checkpoints = output / "checkpoints"
    assert run("train", "--resume", checkpoints / "step_000002", "--steps", "3")[0] == 0
    kept = checkpoints / "step_000004.kept_1"
    status, text = run("train", "--resume", kept, "--steps", "5")
    assert status == 0 and (checkpoints / "step_000005").is_dir() and not (output / "earlier_1").exists(), (
        text
    )


# --resume auto


def test_auto_starts_goes_on_and_skips_what_is_damaged(run, config_file, tmp_path):
    output = tmp_path / "run"
    options = ["train", "--config", config_file, "--resume", "auto"]
    status, text = run(*options)
    assert status == 0 and "resuming" not in text and steps_of(output) == [1, 2, 3, 4]
    status, text = run(*options, "--steps", "6")
    assert status == 0 and "step_000004" in text and steps_of(output) == [1, 2, 3, 4, 5, 6]
    assert not (output / "earlier_1").exists()

    newest = output / "checkpoints" / "step_000006"
    flip(newest / "optimizer.safetensors")
    status, text = run(*options, "--steps", "7", "--keep-checkpoints", "9")
    assert status == 0 and "resuming" in text and "step_000004" in text.split("resuming")[1], text
    assert f"skipping a saved state: {newest}/optimizer.safetensors was changed" in text
    assert steps_of(output) == [1, 2, 3, 4, 5, 6, 7]
    assert (output / "checkpoints" / "step_000006.kept_1").is_dir(), "a damaged checkpoint was thrown away"

    for checkpoint in (output / "checkpoints").glob("step_??????"):
        (checkpoint / "manifest.json").write_text("{}")
    status, text = run(*options)
    assert status == 0 and text.count("skipping a saved state") == 3 and "earlier run; it is in" in text, text
    assert steps_of(output) == [1, 2, 3, 4] and steps_of(output / "earlier_1") == [1, 2, 3, 4, 5, 6, 7]


def test_newest_does_not_skip_what_is_damaged(run, config_file, output):
    flip(output / "checkpoints" / "step_000004" / "optimizer.safetensors")
    status, text = run("train", "--config", config_file, "--resume")
    assert status == 2 and "optimizer.safetensors was changed since it was written" in text


def test_auto_in_the_file(run, config_file, output):
    values = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**values, "resume": "auto", "steps": 4}))
    status, text = run("train", "--config", config_file, "--steps", "5")
    assert status == 0 and steps_of(output) == [1, 2, 3, 4, 5], text


# Several ranks, each of which sees a folder of its own


def found(folders, resume):
    from opensora_accel.training.saved_state import find_saved_state

    with contextlib.chdir(folders[dist.get_rank()]):
        try:
            result = find_saved_state(resume, Path("run"))
        except (ValueError, OSError) as error:
            return type(error).__name__, str(error)
    return result and (str(result[0]), result[1].step)


@pytest.fixture
def views(output, tmp_path):
    """Two folders with equal copies of the run: what two ranks see."""
    folders = [tmp_path / "rank0", tmp_path / "rank1"]
    for folder in folders:
        shutil.copytree(output, folder / "run")
    return folders


def test_ranks_that_see_the_same_take_the_newest(ranks, views):
    newest = ("run/checkpoints/step_000004", 4)
    for resume in ("newest", "auto", "run/checkpoints/step_000004"):
        assert ranks(2, found, views, resume) == [newest, newest]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_an_old_listing_take_the_newest_that_all_see(ranks, views, rank):
    shutil.rmtree(views[rank] / "run" / "checkpoints" / "step_000004")
    for resume in ("newest", "auto"):
        assert ranks(2, found, views, resume) == [("run/checkpoints/step_000002", 2)] * 2
    first, second = ranks(2, found, views, "run/checkpoints/step_000004")
    assert (
        first == second and f"rank {rank}: error: run/checkpoints/step_000004 is no saved state" in first[1]
    )
    assert "a file system that all machines share" in first[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_which_one_sees_nothing_fail_together_and_never_start_anew(ranks, views, rank):
    shutil.rmtree(views[rank] / "run")
    for resume in ("newest", "auto"):
        first, second = ranks(2, found, views, resume)
        assert first == second and first[0] == "ValueError"
        assert f"step_000002 is not seen by rank {rank}; step_000004 is not seen by rank {rank}" in first[1]


def test_ranks_that_see_nothing(ranks, tmp_path):
    assert ranks(2, found, [tmp_path, tmp_path], "auto") == [None, None]
    first, second = ranks(2, found, [tmp_path, tmp_path], "newest")
    assert (
        first == second and first[0] == "FileNotFoundError" and "there is no saved state in run" in first[1]
    )


def test_a_checkpoint_of_another_digest_is_never_trained_on(ranks, views):
    """Both are whole, and of the same step; only their manifests tell that they are not the same."""
    other = views[1] / "run" / "checkpoints"
    shutil.rmtree(other / "step_000004")
    shutil.copytree(other / "step_000002", other / "step_000004")
    first, second = ranks(2, found, views, "newest")
    assert first == second and "the ranks see different files in run/checkpoints/step_000004" in first[1]
    assert "rank 0: manifest" in first[1] and "rank 1: manifest" in first[1]
    assert ranks(2, found, views, "auto") == [("run/checkpoints/step_000002", 2)] * 2


def test_a_file_that_one_rank_finds_damaged_is_damaged_for_all(ranks, views):
    flip(views[1] / "run" / "checkpoints" / "step_000004" / "optimizer.safetensors")
    first, second = ranks(2, found, views, "newest")
    assert (
        first == second and "rank 1: error: " in first[1] and "optimizer.safetensors was changed" in first[1]
    )
    assert ranks(2, found, views, "auto") == [("run/checkpoints/step_000002", 2)] * 2
    assert read_record(views[0] / "run" / "checkpoints" / "step_000004").step == 4
