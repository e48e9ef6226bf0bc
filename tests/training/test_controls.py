"""Controls: what a model follows beside text, on any mesh, in samples and in what is kept."""

import dataclasses
import logging
import shutil

import pytest
import torch

from opensora_accel import Plan
from opensora_accel.training import configured
from opensora_accel.training.beside import with_controls
from opensora_accel.training.conditions import KINDS
from opensora_accel.training.disk_cache import entries
from opensora_accel.training.entries import entries_of
from opensora_accel.training.planned import planned_sizes
from opensora_accel.training.recipes import RECIPES, check_recipe
from opensora_accel.training.samples import write_video
from opensora_accel.training.tiny_run import proof_of, write_clips
from opensora_accel.training.tiny_run import tiny_config as tiny_proof
from opensora_accel.training.video import index_videos, probe, read_clip
from tests.tiers import PROVE, some
from tests.training.runs import losses, tiny_config
from tests.training.test_pretrained import vae

NAME = "WanVACETransformer3DModel"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five clips of 12 frames, and controls of four, which move otherwise."""
    folder = tmp_path_factory.mktemp("controlled")
    write_clips(folder / "clips")
    (folder / "controls").mkdir()
    for number in range(4):
        ramp = torch.arange(12).view(12, 1, 1, 1) * 15 + torch.arange(24).view(1, 24, 1, 1) * (number + 1)
        frames = ramp.expand(12, 24, 40, 3).clamp(max=255).to(torch.uint8)
        write_video(folder / "controls" / f"{number}.mp4", frames.contiguous(), 12, None)
    return folder


def config_of(folder, output, plan=None, **changes):
    options = {"data.controls": str(folder / "controls"), "data.batch_size": 6}
    options |= {"model": {"class_name": NAME, "config": dict(RECIPES[NAME].tiny)}}
    return tiny_config(folder / "clips", output, plan, **{**options, **changes})


PLANS = [
    Plan(ulysses=3, precision="fp64"),
    Plan(ring=2, precision="fp64"),
    Plan(dp_shard=2, sharding="zero3", precision="fp64"),
]


@pytest.mark.parametrize("plan", some(PLANS), ids=str)
def test_controls_are_the_same_on_any_mesh(ranks, folder, tmp_path, plan):
    changes = {"conditions.t2v": 1, "conditions.i2v_head": 1, "conditions.i2v_loop": 1}
    whole = ranks(1, losses, config_of(folder, tmp_path / "one", Plan(precision="fp64"), **changes))[0]
    shared = ranks(plan.world_size, losses, config_of(folder, tmp_path / "shared", plan, **changes))
    assert all(rank == pytest.approx(whole, rel=1e-9) for rank in shared)


def told(config):
    """Of the first batch: its files, what the branch is told [B, C', t, h, w], and by hand what it should be."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    objective, batch = trainer.objective, next(iter(trainer.loader))
    encoded = objective.encoders.encode(batch)
    kinds = objective.encoders._draw_conditions(batch.bucket, batch.positions)
    grey = torch.zeros(5, 3, 24, 40)
    expected = []
    for row, (kind, clip) in enumerate(zip(kinds, batch.clips, strict=True)):
        shown = KINDS[kind].frames(5)[:, None, None, None]
        pixels, control = batch.frames[row].permute(0, 3, 1, 2) / 127.5 - 1, grey
        if clip.control is not None:
            sizes = {"stride": 1, "height": 24, "width": 40}
            read = read_clip(f"{config.data.controls}/{clip.file}", clip.start, 5, **sizes)
            control = read.permute(0, 3, 1, 2) / 127.5 - 1
        # A latent is a patch of 4 × 4 of one frame.
        parts = [torch.where(shown, pixels, grey), torch.where(shown, grey, control)]
        parts = [torch.nn.functional.pixel_unshuffle(each, 4).transpose(0, 1) for each in parts]
        mask = (~shown).float().view(1, 5, 1, 1).expand(16, 5, 6, 10)
        expected.append(torch.cat([*parts, mask]))
    return batch.files, kinds, encoded.condition.latents, torch.stack(expected)


def test_the_branch_is_told_what_is_given_and_the_control(ranks, folder, tmp_path):
    changes = {"conditions.t2v": 1, "conditions.i2v_head": 1, "conditions.i2v_tail": 1}
    config = config_of(folder, tmp_path, Plan(), **changes, **{"data.batch_size": 24})
    files, kinds, found, expected = ranks(1, told, config)[0]
    assert {("4.mp4" in file, kind) for file, kind in zip(files, kinds, strict=True)} >= {
        (False, "t2v"),
        (False, "i2v_head"),
        (True, "t2v"),
    }
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def looked_at(config):
    videos, _ = index_videos(entries_of(config), config.root, config)
    return with_controls(videos, config)


def test_a_control_that_is_not_its_clips_is_set_aside_with_it(folder, tmp_path, caplog):
    controls = shutil.copytree(folder / "controls", tmp_path / "controls")
    write_video(controls / "0.mp4", torch.zeros(12, 40, 24, 3, dtype=torch.uint8), 12, None)
    write_video(controls / "1.mp4", torch.zeros(11, 24, 40, 3, dtype=torch.uint8), 12, None)
    config = config_of(folder, tmp_path).data
    config = dataclasses.replace(config, controls=str(controls))
    with caplog.at_level(logging.WARNING):
        videos, set_aside = looked_at(config)
    assert [video.file for video in videos] == ["2.mp4", "3.mp4", "4.mp4"]
    assert [video.control for video in videos] == [str(controls / "2.mp4"), str(controls / "3.mp4"), None]
    assert "is 24 × 40, and the clip of this control" in set_aside["0.mp4"]
    assert "has 11 frames" in set_aside["1.mp4"] and set_aside["1.mp4"].endswith("make it of as many")
    assert "1 of 5 files have no control" in caplog.text and "learned from text alone" in caplog.text
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"has a control for none of the 5 files; .*none/0\.mp4$"):
        looked_at(dataclasses.replace(config, controls=str(tmp_path / "none")))
    with pytest.raises(FileNotFoundError, match="is no folder; give one with a control for each file"):
        looked_at(dataclasses.replace(config, controls="/nowhere"))


def test_other_families_follow_none(folder, tmp_path):
    config = config_of(folder, tmp_path)
    who = [name for name, recipe in RECIPES.items() if recipe.follows_controls]
    for recipe in RECIPES.values():
        if recipe.follows_controls:
            check_recipe(recipe, config)
            continue
        with pytest.raises(ValueError, match=f"follows no controls; .* {' or '.join(who)}$"):
            check_recipe(recipe, config)


def sampled(config):
    """What the first sample shows, and how far it moves where its control is another."""
    from opensora_accel.training import samples
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    trainer.train()
    made = []
    for swap in (False, True):
        videos = list(trainer.loader.videos)
        videos = [video for video in videos if video.control is not None][:2]
        if swap:
            controls = [video.control for video in videos]
            videos = [
                dataclasses.replace(video, control=control)
                for video, control in zip(videos, reversed(controls), strict=True)
            ]
        with torch.no_grad():
            made.append(samples.sample_clips(trainer.objective, videos))
    return made, [video.control for video in videos]


@PROVE
def test_samples_follow_the_control_of_the_video_beside_them(ranks, folder, tmp_path):
    changes = {"steps": 3, "num_samples": 2, "flow.sample_steps": 2, "optim.lr": 0.05, "optim.ema_decay": 0.0}
    changes |= {"validation.num_clips": 1, "validation.every": 2}
    ((made, swapped), controls), *_ = ranks(
        2, sampled, config_of(folder, tmp_path, Plan(ulysses=2), **changes)
    )
    for each, other, control in zip(made, swapped, reversed(controls), strict=True):
        expected = read_clip(control, 3, 5, height=24, width=40)
        assert torch.equal(each.control, expected) and not torch.equal(other.control, expected)
        assert not torch.equal(each.clip, other.clip), "the control counts"
        assert each.shown.shape[2] == 3 * each.clip.shape[2] * (each.shown.shape[1] // each.clip.shape[1])
    shown = [probe(path).width for path in sorted(tmp_path.glob("samples/step_000003/*.mp4"))]
    assert max(shown) == 3 * 40 * 10


def trained(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    found = trainer.train()
    counts = trainer.disk_cache.counts if trainer.disk_cache else None
    return found, counts and (counts.hits, counts.misses, counts.stored)


@PROVE
def test_latents_of_controls_are_kept(ranks, folder, tmp_path):
    vae("AutoencoderKLWan").save_pretrained(tmp_path / "vae")

    def run(name, **changes):
        options = {
            "steps": 2,
            "conditions.i2v_head": 1,
            "data.num_frames": 9,
            "data.height": 32,
            "data.width": 48,
        }
        options |= {"codec": {"path": str(tmp_path / "vae"), "dtype": "fp32"}}
        return ranks(1, trained, config_of(folder, tmp_path / name, Plan(), **options, **changes))[0]

    plain, _ = run("plain")
    cached = {"cache_folder": str(tmp_path / "cache")}
    in_memory, _ = run("memory", **{"codec.cache": True})
    cold, (_, _, stored) = run("cold", **cached)
    warm, (hits, misses, again) = run("warm", **cached)
    assert plain == in_memory == cold == warm and misses == again == 0 < hits and stored
    assert len(list(entries(tmp_path / "cache"))) == stored
    # Another control, at the same place, is found to be another.
    changed = shutil.copytree(folder, tmp_path / "changed")
    write_video(changed / "controls" / "0.mp4", torch.zeros(12, 24, 40, 3, dtype=torch.uint8), 12, None)
    cached |= {"data.controls": str(changed / "controls")}
    other, (_, misses, _) = run("other", **cached)
    assert other != warm and misses


def test_a_proof_and_a_plan_have_controls_and_masks(folder, tmp_path):
    config = config_of(folder, tmp_path, Plan(), **{"data.masks": str(folder / "controls")})
    small = tiny_proof(config, write_clips(tmp_path / "clips"))
    videos, set_aside = looked_at(small.data)
    assert small.data.masks and not set_aside and all(video.control for video in videos)
    assert configured.recipe_of(small.model).follows_controls
    (size,) = planned_sizes(config)
    assert size.true.condition.is_apart and size.true.inputs(2).apart.shape == (2, 2 * 48 + 16, 5, 6, 10)
    assert proof_of(config, tmp_path / "proof", 2).step is not None
