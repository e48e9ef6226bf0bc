"""The loss of clips that are held out: never trained, the same on any mesh, and without effect on the training."""

import json
import math

import pytest
import torch

from opensora_accel import Plan
from opensora_accel.training.data import ClipLoader
from opensora_accel.training.flow import draw_noise
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.saved_state import read_record
from opensora_accel.training.tiny_run import write_clips
from opensora_accel.training.validation import fixed_times
from tests.tiers import PROVE, some
from tests.training.runs import tiny_config

TIMES = fixed_times((0.0, 1.0), 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips"), num_videos=8)


def loader(folder, num_clips, data_rank=0, data_size=1, seed=0):
    config = tiny_config(folder, "nowhere").data
    return ClipLoader(
        config, seed=seed, data_rank=data_rank, data_size=data_size, group=None, held_out=num_clips
    )


def test_times_are_the_middles_of_equal_parts():
    assert TIMES == [0.125, 0.375, 0.625, 0.875]
    assert fixed_times((0.875, 1.0), 1) == [0.9375]


def test_what_is_held_out_is_never_trained(folder):
    clips = loader(folder, 3)
    held_out = {batch.files[0] for batch, _ in clips.held_out_batches()}
    trained = {file for _ in range(20) for file in next(clips).files}
    assert len(held_out) == 3 and len(trained) == 5 and not held_out & trained
    assert {clip.file for clip in clips.held_out_clips().values()} == held_out
    assert {clip.file for clip in clips.next_clips(20).values()} == trained
    assert {video.file for video in clips.videos} == trained
    others = {batch.files[0] for batch, _ in loader(folder, 3, seed=1).held_out_batches()}
    assert others != held_out, "the seed chooses"


def test_data_ranks_share_the_clips_and_get_as_many(folder):
    alone = [batch.files[0] for batch, _ in loader(folder, 3).held_out_batches()]
    shares = [list(loader(folder, 3, rank, 2).held_out_batches()) for rank in range(2)]
    assert [[batch.files[0] for batch, _ in share] for share in shares] == [
        [alone[0], alone[2]],
        [alone[1], alone[2]],
    ]
    assert [[counts for _, counts in share] for share in shares] == [[True, True], [True, False]]


def measured(config, steps=2):
    """The losses before the training, what they are by hand where the model is whole, and after some steps."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    before, again = trainer.validate(), trainer.validate()
    assert before == again and trainer.state.model.training
    by_hand = {}
    if config.plan.world_size == 1:
        objective = trainer.objective
        model, text = objective.model, objective.texts[0]
        for batch, counts in trainer.loader.held_out_batches():
            assert counts
            clean = objective.encoders.codec.encode(batch.frames).double()
            noise = draw_noise(clean, config.seed, batch.positions)
            states = text.encode(batch.captions, torch.device("cpu"), torch.float64)
            for time in TIMES:
                noisy = (1 - time) * clean + time * noise
                timestep = torch.tensor([time * 1000], dtype=torch.float64)
                with torch.no_grad():
                    (velocity,) = model(noisy, timestep, states, return_dict=False)
                error = (velocity - (noise - clean)).square().mean().item()
                by_hand.setdefault(f"validation/t={time:.3f}", []).append(error)
    for _ in range(steps):
        trainer.step()
    return before, by_hand, trainer.validate()


PLANS = [
    Plan(dp_replicate=2),
    Plan(ulysses=3),
    Plan(dp_shard=2, ring=2, sharding="zero3", checkpoint="full"),
    Plan(dp_replicate=4),
]


@pytest.mark.parametrize("plan", some(PLANS), ids=str)
def test_they_are_the_same_on_any_mesh_and_by_hand(ranks, folder, tmp_path, plan):
    changes = {"validation.num_clips": 3, "optim.ema_decay": 0.5, "optim.warmup_steps": 0}
    one = tiny_config(folder, tmp_path, Plan(precision="fp64"), **changes)
    before, by_hand, after = ranks(1, measured, one)[0]
    assert list(before)[1:] == list(by_hand)
    for key, losses in by_hand.items():
        assert len(losses) == 3 and before[key] == pytest.approx(math.fsum(losses) / 3, rel=1e-9)
    assert before["validation/loss"] == pytest.approx(math.fsum(before[key] for key in by_hand) / 4, rel=1e-9)
    assert all(abs(after[key] / before[key] - 1) > 1e-6 for key in before), "the training is seen"
    many = tiny_config(folder, tmp_path, plan.replace(precision="fp64"), **changes)
    for found, _, found_after in ranks(plan.world_size, measured, many):
        assert found == pytest.approx(before, rel=1e-9) and found_after == pytest.approx(after, rel=1e-9)


def trained(config, saved=None):
    from opensora_accel.training.loop import Trainer

    Trainer(config, saved, read_record(saved) if saved else None).train()
    return [json.loads(line) for line in open(f"{config.output}/metrics.jsonl")]


def test_a_look_changes_nothing_of_the_training(ranks, folder, tmp_path):
    changes = {"steps": 5, "validation.num_clips": 3, "save_every": 3, "keep_checkpoints": 9}
    plan = Plan(dp_replicate=2)
    often = tiny_config(folder, tmp_path / "often", plan, **changes, **{"validation.every": 2})
    rarely = tiny_config(folder, tmp_path / "rarely", plan, **changes)
    rows, expected = ranks(2, trained, often)[0], ranks(2, trained, rarely)[0]
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]
    assert [row["step"] for row in rows if "validation/loss" in row] == [2, 4, 5]
    assert [row["step"] for row in expected if "validation/loss" in row] == [5]
    assert rows[-1]["validation/loss"] == expected[-1]["validation/loss"]
    page = (tmp_path / "often" / "run.html").read_text()
    assert page.count('aria-label="validation loss over the steps') == 1
    # It goes on with the same clips.
    resumed = tiny_config(folder, tmp_path / "on", plan, **changes, **{"validation.every": 2})
    on = ranks(2, trained, resumed, tmp_path / "often/checkpoints/step_000003")[0]
    assert on[-1]["validation/loss"] == rows[-1]["validation/loss"] and on[-1]["loss"] == rows[-1]["loss"]


@PROVE
def test_with_two_experts_each_is_asked_at_its_times(ranks, folder, tmp_path):
    changes = {"steps": 1, "validation.num_clips": 2, "flow.boundary": 0.5}
    (both,) = ranks(1, trained, tiny_config(folder, tmp_path / "both", **changes))[0]
    for name, times, keys in (
        ("high", [0.5, 1.0], ("0.625", "0.875")),
        ("low", [0.0, 0.5], ("0.125", "0.375")),
    ):
        alone = {
            "flow.boundary": 0.0,
            "flow.time_range": times,
            "validation.num_times": 2,
            "validation.every": 1,
        }
        (row,) = ranks(1, trained, tiny_config(folder, tmp_path / name, **{**changes, **alone}))[0]
        for key in keys:
            assert row[f"validation/t={key}"] == both[f"validation/t={key}"]


def test_a_clip_that_cannot_be_read_is_told_and_left_out(ranks, tmp_path):
    folder = write_clips(tmp_path / "clips", num_videos=8)
    (batch, _), *_ = loader(folder, 3).held_out_batches()
    (path,) = [folder / file for file in batch.files]
    config = tiny_config(folder, tmp_path / "run", Plan(dp_replicate=2), **{"validation.num_clips": 3})
    found, told = ranks(2, spoiled, config, str(path))[0]
    assert math.isfinite(found["validation/loss"])
    assert any("left out of the validation" in line and path.name in line for line in told)


def spoiled(config, path):
    """The file goes bad after the run has begun."""
    import torch.distributed as dist

    from opensora_accel.training import data
    from opensora_accel.training.loop import Trainer

    trainer, told, warning = Trainer(config), [], data.logger.warning
    if dist.get_rank() == 0:
        with open(path, "r+b") as file:
            file.truncate(100)
    dist.barrier()
    data.logger.warning = lambda text, *values: told.append(text % values)
    try:
        return trainer.validate(), told
    finally:
        data.logger.warning = warning


def test_wrong_numbers_are_refused(folder):
    with pytest.raises(ValueError, match=r"holds out 8 of 8 files .* none is left to train on"):
        loader(folder, 8)
    with pytest.raises(ValueError, match=r"are for a run with validation\.num_clips"):
        tiny_config(folder, "nowhere", **{"validation.every": 2})


@PROVE
def test_latents_that_are_kept_are_those_of_a_look(ranks, folder, tmp_path):
    """Held-out clips are among those that a VAE is kept for."""
    from tests.training.vaes import wan_vae

    wan_vae().save_pretrained(tmp_path / "vae")
    changes = {
        "steps": 3,
        "validation.num_clips": 3,
        "codec": {"path": str(tmp_path / "vae"), "dtype": "fp32"},
        "data.num_frames": 9,
        "data.height": 32,
        "data.width": 48,
    }
    plain = ranks(2, trained, tiny_config(folder, tmp_path / "plain", Plan(ulysses=2), **changes))[0]
    for number, keep in enumerate(({"codec.cache": True}, {"cache_folder": str(tmp_path / "cache")})):
        for turn in range(2):
            output = tmp_path / f"{number}_{turn}"
            kept = ranks(2, trained, tiny_config(folder, output, Plan(ulysses=2), **{**changes, **keep}))[0]
            assert [row["loss"] for row in kept] == [row["loss"] for row in plain]
            assert kept[-1]["validation/loss"] == plain[-1]["validation/loss"]
    assert kept[-1]["cache_misses"] == 0


def gone_on(config):
    """What a look gives, and its last number by hand where the model is whole."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    found, objective, by_hand = trainer.validate(), trainer.objective, []
    is_whole = config.plan.world_size == 1 and config.data.num_frames > 1
    for batch, _ in trainer.loader.held_out_batches() if is_whole else ():
        clean = objective.encoders.codec.encode(batch.frames).double()
        noise = draw_noise(clean, config.seed, batch.positions)
        states = objective.texts[0].encode(batch.captions, torch.device("cpu"), torch.float64)
        for time in TIMES:
            of_frames = torch.tensor([0.0, 0.0, *[time] * (clean.size(2) - 2)], dtype=torch.float64)
            at = of_frames[:, None, None]
            arguments = {"enable_diffusion_forcing": True, "return_dict": False}
            with torch.no_grad():
                noisy, timestep = (1 - at) * clean + at * noise, 1000 * of_frames[None]
                (velocity,) = objective.model(noisy, timestep, states, **arguments)
            by_hand.append((velocity - (noise - clean))[:, :, 2:].square().mean().item())
    return found, by_hand


@PROVE
@pytest.mark.parametrize("num_frames", [5, 6])
def test_clips_of_diffusion_forcing_go_on_after_their_first_half(ranks, folder, tmp_path, num_frames):
    """Of five latent frames two are there; of three causal blocks of two frames one is."""
    name = "SkyReelsV2Transformer3DModel"
    changes = {"model": {"class_name": name, "config": dict(RECIPES[name].tiny)}}
    changes |= {"flow.diffusion_forcing": "non-decreasing", "validation.num_clips": 3}
    changes |= {"data.num_frames": num_frames}
    if num_frames == 6:
        changes["flow.causal_block_size"] = 2
    (found, by_hand), *_ = ranks(1, gone_on, tiny_config(folder, tmp_path, Plan(precision="fp64"), **changes))
    assert [*found][-1] == "validation/continued" and len(found) == 2 + len(TIMES) and len(by_hand) == 12
    assert found["validation/continued"] == pytest.approx(math.fsum(by_hand) / 12, rel=1e-9)
    shared = Plan(dp_shard=2, ulysses=2, sharding="zero3", precision="fp64")
    for each, _ in ranks(4, gone_on, tiny_config(folder, tmp_path, shared, **changes)):
        assert each == pytest.approx(found, rel=1e-9)
    images = changes | {"data.num_frames": 1, "flow.causal_block_size": 0}
    (of_images, _), *_ = ranks(1, gone_on, tiny_config(folder, tmp_path, Plan(), **images))
    assert "validation/continued" not in of_images, "an image has no halves"
