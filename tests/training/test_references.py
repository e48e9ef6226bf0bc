"""References: what they are to VACE's pipeline, and to runs on any mesh, to samples and to what is kept."""

import dataclasses
import logging
import shutil

import pytest
import torch
from PIL import Image

from opensora_accel import Plan
from opensora_accel.training.beside import with_references
from opensora_accel.training.clips import Clip
from opensora_accel.training.conditions import KINDS
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.disk_cache import entries
from opensora_accel.training.encoding import before_clips
from opensora_accel.training.entries import entries_of
from opensora_accel.training.planned import planned_sizes
from opensora_accel.training.recipes import RECIPES, check_recipe
from opensora_accel.training.samples import sample_latents, write_comparison
from opensora_accel.training.tiny_run import proof_of, write_clips
from opensora_accel.training.tiny_run import tiny_config as tiny_proof
from opensora_accel.training.video import Reference, index_videos, read_whole_picture
from tests.tiers import PROVE, some
from tests.training.pipelines import CAPTIONS, by_pipeline, setting, without_rounding
from tests.training.runs import losses, tiny_config
from tests.training.test_families import trained as resumed
from tests.training.test_pretrained import vae
from tests.training.test_recipes import as_pictures, black_and_white

NAME = "WanVACETransformer3DModel"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five clips of 12 frames, with two references each."""
    return write_clips(tmp_path_factory.mktemp("referred"), num_references=2)


def config_of(folder, output, plan=None, **changes):
    options = {"data.references": str(folder / "references"), "data.num_references": 2, "data.batch_size": 6}
    options |= {"model": {"class_name": NAME, "config": dict(RECIPES[NAME].tiny)}}
    return tiny_config(folder, output, plan, **{**options, **changes})


CASES = [
    (count, kind, follows) for count in (1, 2) for kind in ("t2v", "i2v_loop") for follows in (False, True)
]


@pytest.mark.parametrize(("count", "kind", "follows"), CASES)
def test_a_sample_with_references_is_the_pipelines(count, kind, follows):
    made, rng = setting(NAME), torch.Generator().manual_seed(1)
    objective, size = made.objective, made.bucket
    frames, control = black_and_white(made, rng), black_and_white(made, rng)
    # Of the size of the clip, of black and white: they are not scaled.
    references = torch.cat([black_and_white(made, rng)[:, :1] for _ in range(count)], dim=1)
    channels, num_frames, *sides = made.shape
    noise = torch.randn(1, channels, count + num_frames, *sides, dtype=torch.float64, generator=rng)
    shown = KINDS[kind].frames(size.num_frames)[:, None, None, None]
    grey = torch.full_like(as_pictures(frames), 0.5)
    video = torch.where(shown, as_pictures(frames), as_pictures(control) if follows else grey)
    mask = torch.where(shown, 0.0, torch.ones_like(grey))
    given = {} if kind == "t2v" and not follows else {"video": [video], "mask": [mask]}
    given["reference_images"] = [Image.fromarray(each.numpy()) for each in references[0]]
    shown_in = tuple(Clip(f"reference {number}", 0, size, is_reference=True) for number in range(count))
    control_of = Clip("a control", 0, size) if follows else None
    clips = [Clip("", 0, size, control=control_of, references=shown_in)]
    called = []
    objective.model.register_forward_pre_hook(lambda _, args, kwargs: called.append(kwargs), with_kwargs=True)
    with without_rounding():
        expected = by_pipeline(made, noise, "latent", CAPTIONS[:1], **given)
        by_its_pipeline = called[0]["control_hidden_states"]
        before = before_clips(objective.encoders.encode_references([[*references[0]]], clips))
        condition, _ = objective.encoders.encode_condition([kind], frames, noise, clips, [0], control, before)
        (found,) = sample_latents(objective, [noise], CAPTIONS[:1], size, condition)
        whole = by_pipeline(made, noise, "np", CAPTIONS[:1], **given)
        decoded = objective.encoders.codec.decode(found[:, :, count:])
    assert condition.latents.shape == (1, 96, count + num_frames, *sides)
    assert (condition.latents - by_its_pipeline).abs().max() < 1e-10
    assert found.shape == noise.shape and (found - expected).abs().max() < 1e-10
    levels = torch.from_numpy(whole * 255).round().int()
    assert decoded.shape == levels.shape and (decoded.int() - levels).abs().max() <= 1


@pytest.mark.parametrize("size", [(32, 48), (17, 90), (96, 33), (10, 10), (400, 120), (7, 60)])
def test_a_reference_fits_as_the_pipeline_makes_it_fit(tmp_path, size):
    made = setting(NAME)
    pixels = torch.randint(256, (*size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    picture = Image.fromarray(pixels.numpy())
    picture.save(tmp_path / "a.png")
    found = read_whole_picture(tmp_path / "a.png", 32, 48)
    assert found.shape == (32, 48, 3) and found.dtype == torch.uint8
    if min(size) < 8:
        return  # of which the pipeline would make nothing
    _, _, ((canvas,),) = made.pipeline.preprocess_conditions(
        reference_images=picture, height=32, width=48, num_frames=9, dtype=torch.float32, device="cpu"
    )
    assert (found.permute(2, 0, 1) - (canvas + 1) * 127.5).abs().max() < 0.51


def test_what_can_be_seen_through_is_white(tmp_path):
    picture = Image.new("RGBA", (48, 32), (255, 0, 0, 0))
    picture.paste((0, 0, 255, 255), (0, 0, 24, 32))
    picture.save(tmp_path / "a.png")
    found = read_whole_picture(tmp_path / "a.png", 32, 48)
    assert (
        found[:, :24].unique(dim=0).unique(dim=1).tolist() == [[[0, 0, 255]]] and (found[:, 24:] == 255).all()
    )


PLANS = [
    Plan(ulysses=3, precision="fp64"),
    Plan(ring=2, precision="fp64"),
    Plan(dp_shard=2, sharding="zero3", precision="fp64"),
]


@pytest.mark.parametrize("plan", some(PLANS), ids=str)
def test_references_are_the_same_on_any_mesh(ranks, folder, tmp_path, plan):
    changes = {"conditions.t2v": 1, "conditions.i2v_head": 1, "data.controls": str(folder)}
    whole = ranks(1, losses, config_of(folder, tmp_path / "one", Plan(precision="fp64"), **changes))[0]
    shared = ranks(plan.world_size, losses, config_of(folder, tmp_path / "shared", plan, **changes))
    assert all(rank == pytest.approx(whole, rel=1e-9) for rank in shared)


@PROVE
def test_a_run_with_references_goes_on_bit_by_bit(ranks, folder, tmp_path):
    plan = Plan(ulysses=2, sharding="zero2", checkpoint="full")
    config = config_of(folder, tmp_path / "run", plan, steps=4, save_every=2)
    whole, weights = ranks(2, resumed, config)[0]
    again, found = ranks(2, resumed, config, tmp_path / "run" / "checkpoints" / "step_000002")[0]
    assert again == whole[2:] and len(again) == 2
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def told(config):
    """Of the first batch: its files, what is learned of it and how far, and what the branch is told."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    batch = next(iter(trainer.loader))
    encoded = trainer.objective.encoders.encode(batch)
    learned = None if encoded.learned is None else encoded.learned.expand(-1, -1, 6, 10)
    (shape,) = trainer.objective.encoders.latent_shapes.values()
    (tokens,) = trainer.objective.num_tokens.values()
    clean = trainer.objective.encoders.codec.encode(batch.frames)
    return batch.files, clean, encoded.clean, encoded.condition.latents, learned, shape, tokens


def test_latents_of_references_come_before_those_of_their_clip(ranks, folder, tmp_path):
    files, of_clips, clean, branch, learned, shape, tokens = ranks(1, told, config_of(folder, tmp_path))[0]
    assert shape == (48, 2 + 5, 6, 10) and tokens == 7 * 3 * 5 and learned is None
    assert clean.shape == (6, *shape) and torch.equal(clean[:, :, 2:], of_clips)
    for row, file in enumerate(files):
        for number in range(2):
            path = folder / "references" / file.replace(".mp4", f".{number}.png")
            pixels = read_whole_picture(path, 24, 40).permute(2, 0, 1) / 127.5 - 1
            # A latent is a patch of 4 × 4; the last reference is the first.
            expected = torch.nn.functional.pixel_unshuffle(pixels, 4)
            torch.testing.assert_close(clean[row, :, 1 - number], expected, rtol=0, atol=1e-6)
    assert torch.equal(branch[:, :48, :2], clean[:, :, :2]) and not branch[:, 48:, :2].any()
    assert not branch[:, :96, 2:].any() and (branch[:, 96:, 2:] == 1).all()


@pytest.mark.parametrize("learn_given", [True, False])
def test_references_are_learned_as_frames_that_are_given(ranks, folder, tmp_path, learn_given):
    masks = tmp_path / "masks"
    masks.mkdir()
    for number in range(5):
        Image.new("L", (40, 24), 0 if number else 255).save(masks / f"{number}.png")
    changes = {"conditions.t2v": 0, "conditions.i2v_head": 1, "conditions.learn_given": learn_given}
    changes |= {"data.masks": str(masks)}
    files, *_, learned, _, _ = ranks(1, told, config_of(folder, tmp_path, **changes))[0]
    for file, each in zip(files, learned[:, :, 0, 0].tolist(), strict=True):
        of_clip = float(file == "0.mp4")
        assert each == [float(learn_given)] * 2 + [of_clip * learn_given] + [of_clip] * 4


def looked_at(config):
    videos, _ = index_videos(entries_of(config), config.root, config)
    return with_references(videos, config)


def test_references_of_which_there_are_not_as_many_are_refused(folder, tmp_path, caplog):
    references = shutil.copytree(folder / "references", tmp_path / "references")
    config = dataclasses.replace(config_of(folder, tmp_path).data, references=str(references))
    videos, set_aside = looked_at(config)
    assert not set_aside
    expected = [Reference(str(references / f"3.{number}.png"), 24, 40) for number in range(2)]
    assert [*videos[3].references] == expected
    for count, message in (
        (
            1,
            r"5 of 5 files do not have 1 in .*; of 0\.mp4 there is 0\.0\.png, 0\.1\.png, and would be 0\.png: add",
        ),
        (
            3,
            r"5 of 5 files do not have 3 in .*; of 0\.mp4 .* would be 0\.0\.png to 0\.2\.png: add what is missing",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            looked_at(dataclasses.replace(config, num_references=count))
    (references / "2.1.png").rename(references / "2.2.png")
    with pytest.raises(
        ValueError, match=r"1 of 5 files do not have 2 .* of 2\.mp4 there is 2\.0\.png, 2\.2\.png"
    ):
        looked_at(config)
    (references / "2.2.png").rename(references / "2.1.png")
    # One that cannot be read is set aside with its file.
    (references / "4.1.png").write_bytes(b"no picture")
    with caplog.at_level(logging.WARNING):
        videos, set_aside = looked_at(config)
    assert [video.file for video in videos] == [f"{number}.mp4" for number in range(4)]
    assert "4.1.png: cannot be decoded" in set_aside["4.mp4"]
    shutil.copy(references / "0.0.png", references / "0.0.jpg")
    with pytest.raises(ValueError, match=r"0\.0\.jpg and .*0\.0\.png for one file; leave one of them"):
        looked_at(config)
    with pytest.raises(FileNotFoundError, match="is no folder; give one with a reference for each file"):
        looked_at(dataclasses.replace(config, references="/nowhere"))
    with pytest.raises(ValueError, match=r"data\.num_references \(2\) says how many .* name that folder"):
        config_from_dict({"data": {"num_references": 2}}, "the test")


def test_one_reference_has_the_name_of_its_file(folder, tmp_path):
    (tmp_path / "references").mkdir()
    for number in range(5):
        ending = ".0" if number == 3 else ""
        shutil.copy(folder / "references" / "0.0.png", tmp_path / "references" / f"{number}{ending}.png")
    config = config_of(folder, tmp_path).data
    config = dataclasses.replace(config, references=str(tmp_path / "references"), num_references=1)
    videos, _ = looked_at(config)
    assert [len(video.references) for video in videos] == [1] * 5


def test_other_families_take_none(folder, tmp_path):
    config = config_of(folder, tmp_path)
    for recipe in RECIPES.values():
        if recipe.latent_frames_before(config.data):
            check_recipe(recipe, config)
        if recipe.latent_frames_before(config.data) or recipe.references_in_rows:
            continue
        message = r"takes one reference, in the place of a first frame; set data\.num_references to 1"
        if not recipe.follows_controls:
            message = f"takes no references; .* {NAME}, EasyAnimateTransformer3DModel or MiniMaxH3"
        with pytest.raises(ValueError, match=message):
            check_recipe(recipe, config)


def sampled(config):
    """What samples show, with the references of their videos and with those of each other, and of a caption alone."""
    from opensora_accel.training import samples
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    trainer.train()
    videos = trainer.loader.videos[:2]
    first, second = (video.references for video in videos)
    swapped = [
        dataclasses.replace(video, references=references)
        for video, references in zip(videos, (second, first), strict=True)
    ]
    with torch.no_grad():
        made = [samples.sample_clips(trainer.objective, each, ["a clip"]) for each in (videos, swapped)]
    return made, [video.file for video in videos]


def test_samples_have_the_references_of_the_video_beside_them(ranks, folder, tmp_path):
    changes = {"steps": 3, "num_samples": 2, "flow.sample_steps": 2, "optim.lr": 0.05, "optim.ema_decay": 0.0}
    changes |= {"validation.num_clips": 1, "validation.every": 2, "sample_captions": ["a clip"]}
    ((made, swapped), files), *_ = ranks(2, sampled, config_of(folder, tmp_path, Plan(ulysses=2), **changes))
    for each, other, file in zip(made[:2], swapped, files, strict=False):
        paths = [folder / "references" / file.replace(".mp4", f".{number}.png") for number in range(2)]
        assert torch.equal(each.references, torch.stack([read_whole_picture(path, 24, 40) for path in paths]))
        assert not torch.equal(each.clip, other.clip), "the references count"
    alone, again = made[2], swapped[2]
    assert alone.references is None and torch.equal(alone.clip, again.clip)
    assert all(len(each.clip) == 5 for each in made), "what is made in their place is left out"
    assert len(list(tmp_path.glob("samples/step_000003/*.mp4"))) == 3
    write_comparison(tmp_path / "with", made[:1])
    write_comparison(tmp_path / "without", [dataclasses.replace(made[0], references=None)])
    heights = [Image.open(tmp_path / name / "strip.png").height for name in ("with", "without")]
    assert heights[0] > heights[1], "they have a row"


def kept(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    found = trainer.train()
    counts = trainer.disk_cache.counts if trainer.disk_cache else None
    return found, counts and (counts.hits, counts.misses, counts.stored)


@PROVE
def test_latents_of_references_are_kept(ranks, folder, tmp_path):
    vae("AutoencoderKLWan").save_pretrained(tmp_path / "vae")

    def run(name, **changes):
        options = {"steps": 2, "data.num_frames": 9, "data.height": 32, "data.width": 48}
        options |= {"codec": {"path": str(tmp_path / "vae"), "dtype": "fp32"}}
        return ranks(1, kept, config_of(folder, tmp_path / name, Plan(), **options, **changes))[0]

    plain, _ = run("plain")
    cached = {"cache_folder": str(tmp_path / "cache")}
    in_memory, _ = run("memory", **{"codec.cache": True})
    cold, (_, _, stored) = run("cold", **cached)
    warm, (hits, misses, again) = run("warm", **cached)
    assert plain == in_memory == cold == warm and misses == again == 0 < hits and stored
    assert len(list(entries(tmp_path / "cache"))) == stored
    # Another reference, at the same place, is found to be another.
    changed = shutil.copytree(folder / "references", tmp_path / "references")
    Image.new("RGB", (40, 24), "red").save(changed / "0.1.png")
    other, (_, misses, _) = run("other", **cached, **{"data.references": str(changed)})
    assert other != warm and misses == 1


def test_a_proof_and_a_plan_have_references(folder, tmp_path):
    config = config_of(folder, tmp_path, Plan())
    clips = write_clips(tmp_path / "clips", num_references=2)
    videos, set_aside = looked_at(tiny_proof(config, clips).data)
    assert not set_aside and all(len(video.references) == 2 for video in videos)
    (size,) = planned_sizes(config)
    assert size.num_tokens == (2 + 5) * 3 * 5 and size.true.latents == (48, 7, 6, 10)
    assert size.true.inputs(2).apart.shape == (2, 2 * 48 + 16, 7, 6, 10)
    assert proof_of(config, tmp_path / "proof", 2).step is not None
    assert (tmp_path / "proof" / "clips" / "references" / "4.1.png").is_file()


def test_a_picture_that_is_a_clip_and_its_own_reference_is_kept_as_both(ranks, tmp_path):
    """As a clip it is cropped, and as a reference it stands on white."""
    vae("AutoencoderKLWan").save_pretrained(tmp_path / "vae")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(2):
        Image.linear_gradient("L").resize((48 + 16 * number, 80)).convert("RGB").save(
            pictures / f"{number}.png"
        )
        (pictures / f"{number}.txt").write_text("a gradient")
    options = {"steps": 2, "data.num_frames": 1, "data.height": 32, "data.width": 48, "data.batch_size": 2}
    options |= {"data.references": str(pictures), "data.num_references": 1}
    options |= {"codec": {"path": str(tmp_path / "vae"), "dtype": "fp32"}}
    plain, stored = (
        ranks(
            1, kept, config_of(pictures, tmp_path / f"run {folder}", Plan(), **options, cache_folder=folder)
        )[0]
        for folder in ("", str(tmp_path / "cache"))
    )
    assert plain[0] == stored[0]
