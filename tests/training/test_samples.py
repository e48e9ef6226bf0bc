"""Clips that are sampled while a run trains: where they are written, who shows them, and the page of the run."""

import importlib.util
import json
import os
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from opensora_accel import Plan, cli
from opensora_accel.profiler.run_page import is_run, write_run_page
from opensora_accel.training import metrics
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.samples import SampledClip, gif_of, write_comparison
from opensora_accel.training.video import probe
from tests.tiers import PROVE
from tests.training.runs import tiny_config

# `make prove` puts it there, because it asks for another Pillow than ours.
APART = Path(sys.prefix) / "trackio"
CAPTIONS = ["a <red> gradient", "nothing at all"]
EVERY = {
    "steps": 5,
    "sample_every": 2,
    "sample_captions": CAPTIONS,
    "num_samples": 1,
    "flow.sample_steps": 2,
    "trackers": ["tensorboard"],
}


def trained(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    losses = trainer.train()
    return losses, [parameter.detach().clone() for parameter in trainer.state.model.parameters()]


def trained_with(config, environment):
    os.environ.update(environment)
    sys.path.append(str(APART))
    return trained(config)


@pytest.fixture(scope="module")
def sampled(ranks, clips, tmp_path_factory):
    """Losses and weights of a run that samples as it goes, and its output."""
    output = tmp_path_factory.mktemp("sampled") / "run"
    return ranks(2, trained, tiny_config(clips, output, Plan(ulysses=2), **EVERY))[0], output


def read_for_samples(config):
    """How many clips this rank reads while it samples."""
    from opensora_accel.training import samples
    from opensora_accel.training.loop import Trainer

    trainer, count, read = Trainer(config), [], samples.read_clip

    def counted(*arguments, **options):
        count.append(arguments)
        return read(*arguments, **options)

    samples.read_clip = counted
    try:
        trainer.write_samples()
    finally:
        samples.read_clip = read
    return len(count)


@pytest.mark.parametrize(
    "given,on_the_other",
    [({}, 0), pytest.param({"conditions.i2v_head": 1}, 2, marks=PROVE)],
    ids=["", "given"],
)
def test_who_shows_a_clip_reads_it(ranks, clips, tmp_path, given, on_the_other):
    changes = {"num_samples": 2, "flow.sample_steps": 1, **given}
    config = tiny_config(clips, tmp_path / "run", Plan(ulysses=2), **changes)
    assert ranks(2, read_for_samples, config) == [2, on_the_other]


def test_a_run_samples_every_few_steps_and_at_its_end(sampled):
    _, output = sampled
    folders = sorted(path.name for path in (output / "samples").iterdir())
    assert folders == ["step_000002", "step_000004", "step_000005"]
    last = output / "samples" / folders[-1]
    assert (last / "captions.txt").read_text().splitlines()[1:] == CAPTIONS
    # The first has its source beside it, the others have none.
    assert probe(last / "clip_1.mp4").width == 2 * probe(last / "clip_2.mp4").width
    assert (last / "strip.png").is_file() and (last / "clip_3.mp4").is_file()


def test_sampling_changes_nothing_of_the_training(ranks, clips, sampled, tmp_path):
    (losses, weights), _ = sampled
    options = {**EVERY, "sample_every": 0, "sample_captions": [], "num_samples": 0}
    config = tiny_config(clips, tmp_path, Plan(ulysses=2), **options)
    found, quiet = ranks(2, trained, config)[0]
    assert found == losses and all(map(torch.equal, quiet, weights))


def test_tensorboard_has_the_clips_as_moving_pictures(sampled):
    _, output = sampled
    events = EventAccumulator(str(output / "tensorboard")).Reload()
    tags = events.Tags()["images"]
    assert len(tags) == 3 and "samples/2: a <red> gradient" in tags
    shown = events.Images(tags[0])
    assert [image.step for image in shown] == [2, 4, 5]
    assert all(image.encoded_image_string[:6] == b"GIF89a" for image in shown)


@PROVE
def test_a_gif_is_small_moves_and_keeps_its_time():
    from io import BytesIO

    from PIL import Image

    clip = torch.randint(0, 256, (81, 48, 80, 3), dtype=torch.uint8)
    gif, width, height = gif_of(SampledClip("", clip, clip.clone(), 16.0))
    with Image.open(BytesIO(gif)) as image:
        assert (
            image.size == (width, height)
            and width <= 640
            and width / height == pytest.approx(160 / 48, rel=0.02)
        )
        assert image.n_frames == 48
        assert 48 * image.info["duration"] == pytest.approx(81 / 16 * 1000, rel=0.1)


def test_the_page_of_a_run_shows_what_is_beside_it(sampled, capsys):
    _, output = sampled
    page = (output / "run.html").read_text()
    places = re.findall(r'<video src="([^"]+)"', page)
    assert len(places) == 9 and all((output / place).is_file() for place in places)
    assert "a &lt;red&gt; gradient" in page and "<script" not in page
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert f"<td>{row['grad_norm']:.4g}</td>" in page
    assert "5 of 5" in page and "Learning rate" in page
    (output / "run.html").unlink()
    assert cli.main(["report", str(output)]) == 0 and str(output / "run.html") in capsys.readouterr().out
    assert (output / "run.html").read_text() == page
    assert cli.main(["report", str(output), "--compare"]) == 2
    assert "is the output of a training run" in capsys.readouterr().err


def test_a_page_of_a_run_that_was_killed_skipped_steps_and_had_buckets(tmp_path):
    assert not is_run(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"steps": 9, "data": {"buckets": ["1x8x8"]}}))
    rows = [
        {
            "step": 1,
            "loss": 2.0,
            "step_s": 1.0,
            "tokens": 8,
            "clips/1x8x8": 4,
            "cache_hits": 1,
            "cache_misses": 3,
        },
        {
            "step": 2,
            "loss": None,
            "step_s": 1.0,
            "tokens": 8,
            "clips/9x8x8": 2,
            "cache_hits": 4,
            "cache_misses": 0,
        },
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3, "lo')
    page = write_run_page(tmp_path).read_text()
    assert "Skipped, because their gradients were no use: steps 2." in page and "2 of 9" in page
    assert "found 5: 62.5%" in page and "<td>66.7%</td>" in page and "Sampled clips" not in page
    (tmp_path / "metrics.jsonl").write_text("no JSON\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl:1 is no step of a run"):
        write_run_page(tmp_path)


class Service(types.ModuleType):
    """Stands for wandb and trackio: the functions that are called, and what with."""

    def __init__(self, name, error=None):
        super().__init__(name)
        self.__spec__ = types.SimpleNamespace(name=name)
        self.calls, self.error = [], error

    def init(self, **options):
        if self.error is not None:
            raise self.error
        self.calls.append(("init", options))

    def log(self, values, step):
        self.calls.append(("log", step, values))

    def finish(self):
        self.calls.append(("finish",))

    def Video(self, path, caption, format):
        return (path, caption, format)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services_are_told_of_steps_and_clips(tmp_path, monkeypatch, name):
    service = Service(name)
    monkeypatch.setitem(sys.modules, name, service)
    config = tiny_config(tmp_path, tmp_path / "run", **{"trackers": [name], "tracker_project": "clips"})
    metrics.check_trackers(config)
    clip = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
    with metrics.Tracker(config, "abcdef0123", 0, 2) as tracker:
        tracker.step(1, {"loss": 1.5, "tokens_per_s": 2.0, "memory_gib": 0.1})
        samples = [SampledClip("a clip", clip, None, 8.0)]
        tracker.clips(1, samples, write_comparison(tmp_path / "samples", samples))
    begun, step, clips, ended = service.calls
    assert (
        begun[1]["project"] == "clips" and begun[1]["name"] == "run-abcdef" and begun[1]["resume"] == "allow"
    )
    assert begun[1].get("id") == ("abcdef0123" if name == "wandb" else None)
    assert step[1:] == (1, {"loss": 1.5, "tokens_per_s": 2.0, "memory_gib": 0.1})
    assert clips[2]["samples/1"] == (str(tmp_path / "samples" / "clip_1.mp4"), "a clip", "mp4")
    assert ended == ("finish",) and not (tmp_path / "run" / "tensorboard").exists()


def test_the_loss_that_a_person_sees_is_called_smoothed(tmp_path, capsys):
    config = tiny_config(tmp_path, tmp_path / "run", trackers=[])
    with metrics.Tracker(config, "abc", 0, 2) as tracker:
        for step, loss in ((1, 2.0), (2, 1.0)):
            tracker.step(step, {"loss": loss, "tokens_per_s": 2.0, "memory_gib": 0.1})
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/2  smoothed loss 2.0000  ")
    assert last.startswith("step 2/2  smoothed loss 1.9500  ")
    assert '"loss": 1.0' in (tmp_path / "run/metrics.jsonl").read_text()


def test_a_service_that_cannot_be_started_is_told_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Service("wandb", RuntimeError("no api key")))
    config = tiny_config(tmp_path, tmp_path / "run", **{"trackers": ["wandb"]})
    with pytest.raises(ValueError, match=r"wandb cannot be started \(.*no api key.*\); set it up"):
        metrics.Tracker(config, "abc", 0, 2)
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"trackers names wandb, which is not installed; pip install"):
        metrics.check_trackers(config)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"sample_every": 2, "num_samples": 0}, "sample_every has nothing to sample"),
        (
            {"sample_captions": ["a"], "conditions": {"t2v": 0, "i2v_head": 1}},
            "sample_captions have no frames to begin with",
        ),
        ({"tracker_project": "mine"}, "tracker_project is for wandb and trackio"),
        ({"trackers": ["wandb", "wandb"]}, "trackers names one twice"),
        ({"trackers": ["mlflow"]}, "trackers"),
    ],
)
def test_options_that_contradict_each_other(values, told):
    with pytest.raises(ValueError, match=told):
        config_from_dict(values, "the test")


@pytest.mark.parametrize("name", [pytest.param("wandb", marks=PROVE), pytest.param("trackio", marks=PROVE)])
def test_the_libraries_themselves_take_a_run(ranks, clips, tmp_path, name):
    """In their offline forms: every step and every clip is in what they keep."""
    if importlib.util.find_spec(name) is None and not (APART / name).is_dir():
        pytest.skip(f"there is no {name} here: make prove installs it, where it can be had")
    places = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    config = tiny_config(clips, tmp_path / "run", Plan(), **{**EVERY, "trackers": [name]})
    ranks(1, trained_with, config, places)
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and (tmp_path / "run") not in path.parents]
    assert any(path.suffix == ".mp4" for path in kept), "clips"
    assert any(path.suffix in (".wandb", ".db") for path in kept), "steps"
