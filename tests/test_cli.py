"""The command line as a user meets it: help, errors in one line, resuming, launchers."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from opensora_accel.cli import COMMANDS
from opensora_accel.profiler.records import rank_files, read_rank
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.options import option_names
from opensora_accel.training.saved_state import MODEL_WEIGHTS
from opensora_accel.training.tiny_run import write_clips
from tests.test_layers import ROOT
from tests.tiers import PROVE, some
from tests.training.fuzz import BAD, GOOD, configurations
from tests.training.runs import tiny_config


def test_help_teaches(run):
    status, text = run("--help")
    assert status == 0 and "torchrun --nproc-per-node 2" in text and "doctor" in text
    status, text = run("train", "--help")
    assert status == 0 and "--plan.ulysses" in text and "--data.folder" in text
    status, text = run("cache", "--help")
    assert status == 0 and "--keep" in text


def test_a_folder_that_is_not_there_has_no_cache(run):
    status, text = run("cache", "/nowhere")
    assert status == 2 and "there is no folder /nowhere; give what --cache_folder names" in text


def test_an_unknown_command_or_option(run):
    status, text = run("trian")
    assert status == 2 and "did you mean 'train'?" in text
    status, text = run("train", "--plan.ulyses", "2")
    assert status == 2 and "--plan.ulysses" in text
    status, text = run("train", "--config")
    assert status == 2 and "--config needs a file" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--data.folder", "/nowhere"],
            "there is no /nowhere; point --data.folder at a folder",
        ),
        (["--plan.ulysses", "2"], "the plan needs 2 ranks"),
        (["--data.height", "26"], "data.height (26) must be a multiple of 4 for the codec; use 24 or 28"),
        (["--data.height", "28"], "multiple of 8 for codec (4) × model patch (2); use 24 or 32"),
        (["--data.num-frames", "50"], "too short"),
        (["--model.config", '{"num_layer": 2}'], "has no argument 'num_layer'; did you mean 'num_layers'?"),
        (["--model.config", '{"in_channels": 3}'], "the model's in_channels is 3, but the encoders"),
        (["--model.config", '{"num_layers": 400}'], "140.8 B parameters: 524 GiB for"),
        (
            ["--model.class-name", "Wan"],
            "model class 'Wan' cannot be trained here; choose one of WanTransformer3D",
        ),
        (
            ["--model.class-name", "HeliosTransformer3DModel"],
            "has no recipe yet, which would say how this trainer is to call it; choose one of Wan",
        ),
        (
            ["--model.path", "/nowhere", "--model.config", "{}"],
            "no config.json; give the local folder of a diffusers model",
        ),
        (["--plan.tp", "2"], "the plan needs 2 ranks"),
        (["--data.batch-size", str(10**12)], "GiB are free; set data.batch_size"),
        (["--data.height", str(8 * 10**9), "--data.width", "8"], "GiB are free; set data.batch_size"),
        (["--model.config", '{"num_layers": 10000000}'], "num_layers is 10,000,000, and 1,000 are the most"),
        (
            ["--model.config", '{"num_layers": "two"}'],
            "model.config.num_layers must be a valid integer; got 'two'",
        ),
        (["--model.config", '{"num_layers": 0}'], "model.config.num_layers must be at least 1; got 0"),
        (["--model.config", '{"num_layers": 2.0}'], "num_layers must be a valid integer; got 2.0"),
        (["--model.config", '{"num_layers": null}'], "num_layers must be a valid integer; got None"),
        (["--model.config", '{"ffn_dim": -4}'], "model.config.ffn_dim must be at least 1; got -4"),
        (
            ["--model.config", '{"patch_size": [2, 2]}'],
            "patch_size must be three sizes (time, height, width)",
        ),
        (["--model.config", '{"patch_size": 2}'], "patch_size must be a valid array; got 2"),
        (["--model.config", '{"patch_size": [1, 0, 2]}'], "patch_size must be at least 1; got [1, 0, 2]"),
        (["--model.config", '{"attention_head_dim": 11, "num_layers": 1}'], "WanTransformer3DModel"),
        (["--model.config", '{"ffn_dim": 1000000000000000000}'], "cannot be made with this model.config"),
        (["--model.config", '{"rope_max_seq_len": 3, "num_layers": 1}'], "cannot take clips of 5 × 6 × 10"),
        (["--model.config", '{"eps": NaN}'], "model.config.eps must be a finite number"),
        (["--model.config", '{"qk_norm": 3}'], "model.config.qk_norm must be a valid string; got 3"),
        (["--model.path", "/nowhere", "--model.config", '{"num_layers": 2}'], "leave model.config out"),
        (["--codec.path", "/nowhere", "--codec.patch", "2"], "codec.patch is for a run without a VAE"),
        (["--plan.offload", "auto"], "checkpoint is none"),
        (["--resume"], "there is no saved state in"),
        (["--resume", "/nowhere"], "/nowhere is no saved state"),
    ],
)
def test_bad_input_is_one_line_with_the_remedy(run, config_file, tmp_path, options, message):
    status, text = run("train", "--config", config_file, *options)
    assert status == 2 and message in text and "Traceback" not in text
    assert not (tmp_path / "run").exists(), "something was written"


def test_train_resume_and_what_differs(run, config_file, tmp_path):
    status, text = run("train", "--config", config_file, "--num-samples", "1")
    assert status == 0 and "WanTransformer3DModel" in text and "step 4/4" in text
    assert (tmp_path / "run" / "samples" / "step_000004" / "clip_1.mp4").is_file()

    changed = json.loads(config_file.read_text())
    changed["optim"]["lr"] = 0.5
    config_file.write_text(json.dumps(changed))
    status, text = run("train", "--config", config_file, "--resume", "--steps", "6", "--num-samples", "0")
    assert status == 0 and "resuming" in text and "step_000004" in text
    assert "steps: 4 → 6 (from the command line)" in text
    assert "optim.lr: stays 0.003 as saved; the file has 0.5 (--optim.lr changes it)" in text
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4, 5, 6]

    # Another model: refused, and the run stays as it is.
    before = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    model = json.dumps({**changed["model"]["config"], "num_layers": 3})
    status, text = run("train", "--config", config_file, "--resume", "--model.config", model)
    assert status == 2 and "is of another model" in text and "tensors differ" in text
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == before

    # A flipped byte is found before anything is loaded.
    weights = tmp_path / "run" / "checkpoints" / "step_000006" / MODEL_WEIGHTS
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    status, text = run("train", "--config", config_file, "--resume")
    assert status == 2 and f"{MODEL_WEIGHTS} was changed since it was written; resume from another" in text

    # Starting again in the same folder loses nothing.
    status, text = run("train", "--config", config_file)
    assert (
        status == 0
        and f"it is in {tmp_path}/run/earlier_1 now" in text
        and (tmp_path / "run" / "earlier_1" / "metrics.jsonl").is_file()
    )


def test_profile_records_some_steps_and_leaves_the_run_alone(run, config_file, tmp_path):
    status, text = run("profile", "--help")
    assert status == 0 and "--num-steps" in text and "torchrun" in text
    status, text = run("profile", "--config", config_file, "--num-steps", "0")
    assert status == 2 and "--num-steps is a number of steps, at least 1; got 0" in text
    for wrong in ("25e9", "ring=", "ring=-1", "=1e9"):
        status, text = run("profile", "--config", config_file, "--link", wrong)
        assert status == 2 and "as in --link ring=25e9; got " in text
    status, text = run("train", "--config", config_file, "--num-samples", "0")
    assert status == 0
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    status, text = run("profile", "--config", config_file, "--steps", "3", "--num-steps", "4")
    assert status == 2 and "--num-steps 4 asks for more steps than the run has left (3 of 3)" in text
    assert not (tmp_path / "run_profile" / "profile").exists()
    status, text = run("profile", "--config", config_file, "--steps", "3", "--output", tmp_path / "all")
    assert status == 0 and "step 3/3" in text
    given = ["--link", "ring=2e9", "--peak-flops", "1e12"]
    status, text = run("profile", "--config", config_file, "--num-steps", "2", "--memory", *given)
    assert status == 0 and "step 2/2" in text and "step 3" not in text
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    (file,) = rank_files(tmp_path / "run_profile" / "profile")
    record, steps = read_rank(file)
    steps = list(steps)
    assert (record.link_bytes_per_s, record.peak_flops, record.peak_flops_source) == (
        {"ring": 2e9},
        1e12,
        "given",
    )
    assert [step.step for step in steps] == [1, 2]
    assert not steps[0].memory and max(sample.device_bytes for sample in steps[1].memory) > 0
    assert {span.region for span in steps[1].spans} >= {"data", "encode", "block", "attention", "optimizer"}


def test_an_unreadable_video_is_named_and_left_out(run, config_file, tmp_path):
    videos = tmp_path / "videos"
    write_clips(videos, num_videos=3)
    (videos / "1.mp4").write_bytes(b"this is no video")
    status, text = run("train", "--config", config_file, "--data.folder", videos)
    assert status == 0 and "2 videos in" in text
    (videos / "0.mp4").write_bytes(b"")
    (videos / "2.mp4").unlink()
    status, text = run("train", "--config", config_file, "--data.folder", videos)
    assert status == 2 and "none of the 3 videos" in text and "0.mp4" in text


def test_the_version(run):
    status, text = run("--version")
    assert (
        status == 0
        and text.startswith("opensora-accel 0.")
        and f"(torch {torch.__version__.split('+')[0]}" in text
    )


@pytest.mark.parametrize("missing", some(["tyro", "diffusers", "av", "torchdata"], "tyro"))
def test_training_without_its_extra_says_what_to_install(config_file, missing):
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from opensora_accel.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "train", "--config", str(config_file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    expected = (
        f"error: train needs the package {missing}; install it with pip install 'opensora-accel[train]'\n"
    )
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b""])
def test_a_file_that_cannot_be_read_is_named(run, tmp_path, content):
    for name in ("run.toml", "run.json"):
        (tmp_path / name).write_bytes(content)
        status, text = run("train", "--config", tmp_path / name)
        if content or name == "run.json":
            assert (
                status == 2 and f"{tmp_path / name} cannot be read as" in text and len(text.splitlines()) == 1
            )
    (tmp_path / "metadata.jsonl").write_bytes(content or b"null")
    status, text = run("train", "--data.folder", tmp_path)
    assert status == 2 and "metadata.jsonl:1: is " in text and len(text.splitlines()) == 1


IO_ERRORS = [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT]


@pytest.mark.parametrize("number", some(IO_ERRORS, errno.ENOSPC), ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["metrics.jsonl", "optimizer.safetensors", "state.json"])
def test_an_error_of_the_file_system_is_one_line(run, config_file, tmp_path, monkeypatch, name, number):
    from opensora_accel.training import metrics
    from opensora_accel.training.saved_state import save

    def fail(*args, **options):
        raise OSError(number, os.strerror(number), str(args[-1] if name == "optimizer.safetensors" else name))

    def save_file(entries, path, **options):
        return fail(path) if path.name == name else original(entries, path, **options)

    original, write_text = save.save_file, Path.write_text
    if name == "optimizer.safetensors":
        monkeypatch.setattr(save, "save_file", save_file)
    elif name == "metrics.jsonl":
        monkeypatch.setattr(metrics.json, "dumps", fail)
    else:
        monkeypatch.setattr(
            Path,
            "write_text",
            lambda path, *a, **o: fail() if path.name == name else write_text(path, *a, **o),
        )
    status, text = run("train", "--config", config_file)
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert status == 2 and os.strerror(number) in line and "Traceback" not in text
    if name != "metrics.jsonl":
        assert "could not be saved" in line and "--resume" in line
        assert list((tmp_path / "run" / "checkpoints").iterdir()) == [], "half a checkpoint was left"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


TWO_RANKS = [
    *("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
]
TORCHRUN = [*TWO_RANKS, "-m", "opensora_accel.cli", "train"]
# `--multi_gpu` is accelerate's name for "start several ranks"; without GPUs they are CPU ranks.
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1"),
    *("--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())),
    *("-m", "opensora_accel.cli", "train"),
]


def launched(launcher, config_file, output, *options):
    command = [sys.executable, *launcher, "--config", config_file, "--output", output, *options]
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
    )
    return done, [json.loads(x)["loss"] for x in (output / "metrics.jsonl").read_text().splitlines()]


LAUNCHERS = {"torchrun": TORCHRUN, "accelerate": ACCELERATE}


@PROVE
@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_launcher_starts_the_same_run(run, config_file, tmp_path, name):
    assert run("train", "--config", config_file)[0] == 0
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    done, found = launched(LAUNCHERS[name], config_file, tmp_path / name, "--plan.ulysses", "2")
    assert done.returncode == 0, done.stderr
    assert "on 2 CPU rank(s)" in done.stdout
    assert found == pytest.approx([json.loads(row)["loss"] for row in rows], rel=1e-4)


DIES_ONCE = """
import os, signal, sys
from opensora_accel.cli import main
from opensora_accel.training.loop import Trainer

step = Trainer.step

def dying_step(trainer, *args):
    if trainer.state.step == 3:
        trainer.saver.wait()  # or the state of step 2 may still lack what the rank that dies would have sent
    if trainer.state.step == 3 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(trainer, *args)

Trainer.step = dying_step
sys.exit(main(sys.argv[1:]))
"""


FAILS = """
import os, sys
from opensora_accel.cli import main
from opensora_accel.training.loop import Trainer

def step(trainer, *args):
    if os.environ["RANK"] == "1":
        raise ValueError("the rule that was broken")
    return original(trainer, *args)

original, Trainer.step = Trainer.step, step
sys.exit(main(sys.argv[1:]))
"""


@PROVE
def test_an_error_under_torchrun_is_one_line_a_rank(config_file, tmp_path):
    """The failing rank says the cause, and the others that it did; torchrun's summary repeats the cause."""
    (tmp_path / "fails.py").write_text(FAILS)
    command = [sys.executable, *TWO_RANKS, tmp_path / "fails.py", "train", "--config", config_file]
    command += ["--plan.ulysses", "2"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=180, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr  # torchrun's own
    assert "error (rank 1): the rule that was broken\n" in done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("error")]
    named = "rank 1 failed: ValueError: the rule that was broken"
    assert len(ours) <= 2 and all(named in line for line in ours if "error (rank 1)" not in line), ours
    summary = done.stderr[done.stderr.index("FAILED\n") :]
    assert "ValueError: the rule that was broken" in summary and "To enable traceback" not in summary, summary


@pytest.mark.prove
@pytest.mark.faults
def test_torchrun_starts_again_where_the_run_was(config_file, tmp_path, fault):
    (tmp_path / "dies_once.py").write_text(DIES_ONCE)
    launcher = [*TWO_RANKS, "--max-restarts", "1", tmp_path / "dies_once.py", "train"]
    output = tmp_path / "run"
    done, _ = launched(launcher, config_file, output, "--plan.ulysses", "2", "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert f"resuming {output}/checkpoints/step_000002" in done.stdout
    rows = [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4] and not (output / "earlier_1").exists()
    fault("a rank that fails under torchrun --max-restarts")


def test_doctor_runs(run):
    status, text = run("doctor")
    assert status == 0 and "GPUs: none" in text and "a group of one CPU process started and summed" in text
    status, text = run("doctor", "--json")
    assert {"torch", "gloo", "threads"} <= {finding["topic"] for finding in json.loads(text)}


def saved_steps(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_going_back_keeps_what_came_after(run, config_file, tmp_path):
    """Resuming an earlier checkpoint sets the later ones aside, and never removes what it has just written."""
    options = ["train", "--config", config_file, "--keep-checkpoints", "2"]
    assert run(*options, "--steps", "6")[0] == 0
    first = tmp_path / "run"
    assert saved_steps(first) == ["step_000004", "step_000006"]
    status, text = run(*options, "--resume", first / "checkpoints" / "step_000004", "--steps", "5")
    assert status == 0 and "step_000006.kept_1" in text
    assert saved_steps(first) == ["step_000004", "step_000005", "step_000006.kept_1"]
    rows = [json.loads(line)["step"] for line in (first / "metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4, 5], "one row a step"


def test_a_run_that_was_moved_goes_on_where_it_lies(run, config_file, tmp_path):
    assert run("train", "--config", config_file)[0] == 0
    assert run("train", "--config", config_file, "--steps", "2")[0] == 0
    moved, second = tmp_path / "run" / "earlier_1", tmp_path / "run"
    assert saved_steps(second) == ["step_000002"]
    assert run("train", "--resume", moved / "checkpoints" / "step_000004", "--steps", "5")[0] == 0
    assert saved_steps(second) == ["step_000002"] and "step_000005" in saved_steps(moved)


def test_folders_of_the_user_are_left_alone(run, config_file, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    status, text = run("train", "--config", config_file, "--output", mine, "--steps", "1")
    assert status == 0 and "moved" not in text and (mine / "notes.txt").read_text() == "mine"
    write_clips(mine / "clips", num_videos=2)
    options = ["train", "--config", config_file, "--output", mine, "--steps", "1"]
    assert run(*options, "--data.folder", mine / "clips")[0] == 0 and (mine / "earlier_1").is_dir()
    write_clips(mine / "samples" / "clips", num_videos=2)
    status, text = run(*options, "--data.folder", mine / "samples" / "clips")
    assert status == 2 and "would be moved with it" in text and not (mine / "earlier_2").exists()


def test_resume_in_the_file_is_honoured(run, config_file, tmp_path):
    assert run("train", "--config", config_file)[0] == 0
    values = json.loads(config_file.read_text())
    values["resume"] = str(tmp_path / "run" / "checkpoints" / "step_000004")
    config_file.write_text(json.dumps(values))
    status, text = run("train", "--config", config_file, "--steps", "5")
    assert status == 0 and "resuming" in text and "step 5/5" in text


@pytest.mark.parametrize(("command", "hint"), [("train", True), ("verify", False)])
def test_an_interrupt_says_what_is_left(run, monkeypatch, command, hint):
    def interrupted(_arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, command, interrupted)
    status, text = run(command)
    assert status == 130 and "interrupted" in text and ("--resume" in text) == hint


# Whatever is given: it runs, or one line says what is wrong

# A few by default; in `make prove` every value of every option, which takes about five minutes.
NUM_CASES = 720
CASES = configurations(int(os.environ.get("OPENSORA_ACCEL_FUZZ_SEED", "0")), NUM_CASES)


def too_slow(_number, _frame):
    raise TimeoutError("this configuration hangs")


@pytest.mark.faults
@pytest.mark.parametrize("case", some(CASES, *CASES[:4]), ids=str)
def test_any_configuration_runs_or_is_refused_in_one_line(run, clips, tmp_path, monkeypatch, case, fault):
    monkeypatch.chdir(tmp_path)
    values = asdict(tiny_config(clips, tmp_path / "run", steps=1, log_every=1))
    values["flow"]["sample_steps"] = 1
    for name, value in case.changes.items():
        *tables, key = name.split(".")
        place = values
        for table in tables:
            place = place[table]
        place[key] = value
    (tmp_path / "run.json").write_text(json.dumps(values))
    before = signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(60)
    try:
        status, text = run("train", "--config", tmp_path / "run.json")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if case.is_good:
        assert status == 0 and "step 1/1" in text, text
    else:
        lines = [line for line in text.splitlines() if not line.startswith("WARNING: ")]
        # The one error of several lines: why each of the first five videos cannot be used.
        is_short = len(lines) == 1 or ("the first reasons" in lines[0] and len(lines) <= 7)
        assert status == 2 and is_short and lines[0].startswith("error: ") and len(lines[0]) > 20, text
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"], "something was written"
    fault("a right configuration that runs" if case.is_good else "a wrong configuration that is refused")


def test_every_option_is_fuzzed():
    options = set(option_names(TrainConfig)) - {
        "data",
        "model",
        "codec",
        "text",
        "lora",
        "flow",
        "conditions",
        "image",
        "optim",
        "validation",
        "plan",
        "model.config",
    }
    assert options <= set(BAD)
    values = sum(map(len, BAD.values())), sum(map(len, GOOD.values()))
    assert max(values) <= NUM_CASES // 2, "the cases no longer try every value"
