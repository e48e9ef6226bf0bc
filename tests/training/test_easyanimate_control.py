"""EasyAnimate that follows controls: as its pipeline is told of them, and as runs learn them."""

import dataclasses
import json
import shutil

import pytest
import torch

from opensora_accel import Plan
from opensora_accel.observe.fakes import fake_world
from opensora_accel.parallel_states import init_parallel
from opensora_accel.training import configured
from opensora_accel.training.build import build_model
from opensora_accel.training.clips import Clip
from opensora_accel.training.codec import build_codec
from opensora_accel.training.disk_cache import entries
from opensora_accel.training.encoding import before_clips
from opensora_accel.training.planned import planned_sizes
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.samples import sample_latents, write_video
from opensora_accel.training.text_encoders import text_shapes
from opensora_accel.training.tiny_run import proof_of, write_clips
from opensora_accel.training.tiny_run import tiny_config as tiny_proof
from opensora_accel.training.video import read_clip, read_whole_picture
from tests.tiers import PROVE, some
from tests.training.pipelines import CAPTIONS, FromFrame, by_pipeline, setting, without_rounding
from tests.training.runs import losses, tiny_config
from tests.training.test_easyanimate import trained
from tests.training.test_families import trained as resumed
from tests.training.test_new import steps, tiny, written
from tests.training.test_recipes import black_and_white
from tests.training.test_references import kept
from tests.training.vaes import easyanimate_vae

NAME = "EasyAnimateTransformer3DModel"
# The VAE of tests has 4 channels.
CONTROL = FromFrame(NAME, "EasyAnimateControlPipeline", config={"in_channels": 12})


def as_video(frames):
    """uint8 [1, T, H, W, 3] as its pipeline takes a video: [1, 3, T, H, W] in 0…1."""
    return (frames / 255).permute(0, 4, 1, 2, 3)


CASES = [(follows, picture) for follows in (False, True) for picture in ("none", "reference", "first frame")]


@pytest.mark.parametrize(("follows", "picture"), CASES)
@pytest.mark.parametrize("num_frames", [9, 1])
def test_a_sample_that_follows_a_control_is_the_pipelines(num_frames, follows, picture):
    made, rng = setting(NAME, frame=CONTROL), torch.Generator().manual_seed(1)
    objective, pipeline = made.objective, made.pipeline
    # Which passes one argument that its own function knows nothing of (diffusers 0.42).
    encode_prompt = pipeline.encode_prompt
    pipeline.encode_prompt = lambda *args, text_encoder_index, **kwargs: encode_prompt(*args, **kwargs)
    # The VAEs that are published say so; its class does not know it.
    pipeline.vae.register_to_config(cache_mag_vae=True)
    size = dataclasses.replace(made.bucket, num_frames=num_frames)
    shape = made.shape[0], (num_frames + 3) // 4, *made.shape[2:]
    encoders = objective.encoders
    encoders.latent_shapes, objective.num_tokens = {size: shape}, {size: 1}
    frames, control = (black_and_white(made, rng)[:, :num_frames] for _ in range(2))
    reference = black_and_white(made, rng)[:, :1]
    noise = torch.randn(1, *shape, dtype=torch.float64, generator=rng)
    shown = {"reference": reference, "first frame": frames[:, :1]}.get(picture)
    given = {"num_frames": num_frames}
    given |= {"control_video": as_video(control)} if follows else {}
    given |= {} if shown is None else {"ref_image": as_video(shown)}
    of_control = Clip("a control", 0, size) if follows else None
    of_reference = (Clip("a reference", 0, size, is_reference=True),) if picture == "reference" else ()
    clips = [Clip("", 0, size, control=of_control, references=of_reference)]
    called = []
    objective.model.register_forward_pre_hook(lambda _, args, kwargs: called.append(kwargs), with_kwargs=True)
    with without_rounding():
        expected = by_pipeline(made, noise, "latent", CAPTIONS[:1], **given)
        pictures = None
        if of_reference:
            pictures = before_clips(encoders.encode_references([[*reference[0]]], clips))
        kind = "i2v_head" if picture == "first frame" else "t2v"
        condition, whole = encoders.encode_condition(
            [kind], frames, noise, clips, [0], control if follows else None, pictures
        )
        (found,) = sample_latents(objective, [noise], CAPTIONS[:1], size, condition)
        (without,) = sample_latents(objective, [noise], CAPTIONS[:1], size)
    by_its_pipeline = called[0]["control_latents"][:1]
    if num_frames == 1 and picture == "first frame":
        # Which leaves nothing to learn of an image: the pipeline shows it none, and a run never draws it.
        assert not by_its_pipeline[:, 4:].any()
        return
    assert condition.latents.shape == (1, 8, *shape[1:]) and condition.is_apart
    assert (condition.latents - by_its_pipeline).abs().max() < 1e-10
    assert (found - expected).abs().max() < 1e-10
    is_given = follows or (picture != "none" and num_frames > 1)
    assert ((found - without).abs().max() > 1e-5) == is_given, "what is given counts"
    assert whole[0].tolist() == [picture == "first frame"] + [False] * (shape[1] - 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five clips of 12 frames, with a reference each, and controls of four, which move otherwise."""
    folder = tmp_path_factory.mktemp("controlled")
    write_clips(folder / "clips", num_references=1)
    (folder / "controls").mkdir()
    for number in range(4):
        ramp = torch.arange(12).view(12, 1, 1, 1) * 15 + torch.arange(24).view(1, 24, 1, 1) * (number + 1)
        frames = ramp.expand(12, 24, 40, 3).clamp(max=255).to(torch.uint8)
        write_video(folder / "controls" / f"{number}.mp4", frames.contiguous(), 12, None)
    return folder


GIVEN = {"conditions.t2v": 1, "conditions.i2v_head": 1}


def config_of(folder, output, plan=None, **changes):
    options = {"model": {"class_name": NAME, "config": dict(RECIPES[NAME].tiny)}, "data.batch_size": 6}
    options |= {"data.controls": str(folder / "controls")}
    options |= {"data.references": str(folder / "clips" / "references")}
    return tiny_config(folder / "clips", output, plan, **{**options, **GIVEN, **changes})


PLANS = [
    Plan(ulysses=3, precision="fp64"),
    Plan(ring=2, precision="fp64"),
    Plan(dp_shard=2, sharding="zero3", precision="fp64"),
]


@pytest.mark.parametrize("plan", some(PLANS), ids=str)
def test_controls_and_references_are_the_same_on_any_mesh(ranks, folder, tmp_path, plan):
    whole = ranks(1, losses, config_of(folder, tmp_path / "one", Plan(precision="fp64")))[0]
    shared = ranks(plan.world_size, losses, config_of(folder, tmp_path / "shared", plan))
    assert all(rank == pytest.approx(whole, rel=1e-9) for rank in shared)


@PROVE
def test_a_run_with_controls_goes_on_bit_by_bit(ranks, folder, tmp_path):
    plan = Plan(ulysses=2, sharding="zero2", checkpoint="full")
    config = config_of(folder, tmp_path / "run", plan, steps=4, save_every=2)
    whole, weights = ranks(2, resumed, config)[0]
    again, found = ranks(2, resumed, config, tmp_path / "run" / "checkpoints" / "step_000002")[0]
    assert again == whole[2:] and len(again) == 2
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def told(config):
    """Of the first batch: what the model is told [B, 2C, t, h, w], by hand what it should be, and what is learned."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    objective, batch = trainer.objective, next(iter(trainer.loader))
    encoded = objective.encoders.encode(batch)
    kinds = objective.encoders._draw_conditions(batch.bucket, batch.positions)
    expected = []
    for row, (kind, clip) in enumerate(zip(kinds, batch.clips, strict=True)):
        sizes = {"stride": 1, "height": 24, "width": 40}
        parts = torch.zeros(2, 48, 5, 6, 10)
        if clip.control is not None:
            parts[0] = as_latents(read_clip(f"{config.data.controls}/{clip.file}", clip.start, 5, **sizes))
        picture = f"{config.data.references}/{clip.file.replace('.mp4', '.png')}"
        shown = batch.frames[row, :1] if kind == "i2v_head" else read_whole_picture(picture, 24, 40)[None]
        parts[1, :, :1] = as_latents(shown)
        expected.append(parts.flatten(0, 1))
    (shape,) = objective.encoders.latent_shapes.values()
    learned = None if encoded.learned is None else encoded.learned[:, :, 0, 0].tolist()
    shapes = shape, encoded.clean.shape[1:]
    return batch.files, kinds, encoded.condition.latents, torch.stack(expected), learned, shapes


def as_latents(frames):
    """uint8 [T, H, W, 3] → [C, T, h, w]: a latent is a patch of 4 × 4 of one frame."""
    pixels = frames.permute(0, 3, 1, 2) / 127.5 - 1
    return torch.nn.functional.pixel_unshuffle(pixels, 4).transpose(0, 1)


@pytest.mark.parametrize("learn_given", [True, False])
def test_it_is_told_the_control_and_a_picture(ranks, folder, tmp_path, learn_given):
    config = config_of(
        folder, tmp_path, Plan(), **{"data.batch_size": 24, "conditions.learn_given": learn_given}
    )
    files, kinds, found, expected, learned, shapes = ranks(1, told, config)[0]
    assert {("4.mp4" in file, kind) for file, kind in zip(files, kinds, strict=True)} == {
        (without, kind) for without in (False, True) for kind in ("t2v", "i2v_head")
    }
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert shapes == ((48, 5, 6, 10), (48, 5, 6, 10)), "a reference takes no latent frame"
    if learn_given:
        assert learned is None
    else:
        assert learned == [[kind == "t2v"] + [True] * 4 for kind in kinds]


def sampled(config):
    """How samples differ where control, reference, or both are those of another video."""
    from opensora_accel.training import samples
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    trainer.train()
    videos = [video for video in trainer.loader.videos if video.control is not None][:2]
    other = videos[1]
    cases = [
        {},
        {"control": other.control},
        {"references": other.references},
        {"control": None},
    ]
    with torch.no_grad():
        made = [
            samples.sample_clips(trainer.objective, [dataclasses.replace(videos[0], **case)], ["a clip"])
            for case in cases
        ]
    return [(each.clip, alone.clip) for each, alone in made]


def test_samples_follow_the_control_and_have_the_reference(ranks, folder, tmp_path):
    changes = {"steps": 3, "num_samples": 1, "flow.sample_steps": 2, "optim.lr": 0.05, "optim.ema_decay": 0.0}
    changes |= {"conditions.t2v": 2, "sample_captions": ["a clip"]}
    made = ranks(2, sampled, config_of(folder, tmp_path, Plan(ulysses=2), **changes))[0]
    clips, alone = zip(*made, strict=True)
    for number, each in enumerate(clips):
        assert all(not torch.equal(each, other) for other in clips[:number])
    assert all(torch.equal(each, alone[0]) for each in alone), "a caption alone has neither"
    assert all(len(each) == 5 for each in clips)


@PROVE
def test_what_is_encoded_is_kept(ranks, folder, tmp_path):
    easyanimate_vae().save_pretrained(tmp_path / "vae")

    def run(name, what=kept, **changes):
        options = {"steps": 2, "data.num_frames": 9, "data.height": 32, "data.width": 48}
        options |= {"codec": {"path": str(tmp_path / "vae"), "dtype": "fp32"}}
        return ranks(1, what, config_of(folder, tmp_path / name, Plan(), **options, **changes))[0]

    plain, _ = run("plain")
    cached = {"cache_folder": str(tmp_path / "cache")}
    in_memory, _, loaded = run("memory", trained, **{"codec.cache": True})
    assert loaded == 0, "the VAE stays as long as it is needed"
    cold, (_, _, stored) = run("cold", **cached)
    warm, (hits, misses, again) = run("warm", **cached)
    assert plain == in_memory == cold == warm and misses == again == 0 < hits and stored
    assert len(list(entries(tmp_path / "cache"))) == stored
    # Another control, at the same place, is found to be another.
    changed = shutil.copytree(folder, tmp_path / "changed")
    for number in range(4):
        black = torch.zeros(12, 24, 40, 3, dtype=torch.uint8)
        write_video(changed / "controls" / f"{number}.mp4", black, 12, None)
    other, (_, misses, _) = run("other", **cached, **{"data.controls": str(changed / "controls")})
    assert other != warm and misses


def test_a_proof_and_a_plan_have_controls(folder, tmp_path):
    for changes in ({}, {"data.references": "", **dict.fromkeys(GIVEN, 1), "conditions.i2v_head": 0}):
        config = config_of(folder, tmp_path, Plan(), **changes)
        small = tiny_proof(config, write_clips(tmp_path / "clips", num_references=1))
        codec = build_codec(small.codec, torch.device("meta"), torch.float32)
        arguments = configured.model_arguments(
            small, codec, text_shapes(small.text, configured.texts_of(small))
        )
        assert arguments["in_channels"] == 3 * 48
        (size,) = planned_sizes(config)
        assert size.true.latents == (48, 5, 6, 10) and size.true.inputs(2).apart.shape == (2, 96, 5, 6, 10)
    assert proof_of(config, tmp_path / "proof", 2).step is not None


def test_weights_have_channels_for_a_control_or_for_frames_or_for_neither(folder, tmp_path):
    def channels(expected=None, **changes):
        config = config_of(folder, tmp_path, Plan(), **changes)
        if expected is not None:
            model = {"class_name": NAME, "config": {**RECIPES[NAME].tiny, "in_channels": expected}}
            config = config_of(folder, tmp_path, Plan(), **changes, model=model)
        codec = build_codec(config.codec, torch.device("cpu"), torch.float32)
        texts = text_shapes(config.text, configured.texts_of(config))
        model, _ = build_model(config, codec, texts, torch.float32)
        return model.config.in_channels

    nothing = {"data.controls": "", "data.references": ""}
    alone = {**nothing, "conditions.i2v_head": 0}
    with fake_world(0, 1):
        init_parallel(Plan(), "cpu")
        assert channels() == channels(**{"data.controls": ""}) == channels(**{"data.references": ""}) == 144
        assert channels(**nothing) == 97 and channels(**alone) == 48
        # Weights for controls stay so, whatever a run gives.
        assert channels(144, **nothing) == channels(144, **alone) == 144
        for count, changes in ((48, {}), (97, {}), (97, {"data.controls": ""})):
            with pytest.raises(ValueError, match=f"in_channels is {count}, .* give 144 .* have 96 of 144"):
                channels(count, **changes)
        for kind in ("i2v_tail", "i2v_loop", "v2v_head", "v2v_tail"):
            with pytest.raises(
                ValueError, match=f"{kind} gives other frames than the first, .*conditions.i2v_head above"
            ):
                channels(**{f"conditions.{kind}": 1, "data.num_frames": 81})


def test_new_writes_a_run_that_follows_controls(ranks, tmp_path):
    made = setting(NAME, frame=CONTROL)
    made.pipeline.to(torch.float32).save_pretrained(tmp_path / "pipeline")
    config, text = written(tmp_path / "pipeline")
    assert (config.conditions.t2v, config.conditions.i2v_head) == (1.0, 1.0) and "data.controls" in text
    run = tiny(config, NAME, tmp_path)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, controls=str(tmp_path / "clips")))
    assert len(ranks(1, steps, run)[0]) == 2
    # Weights from text are told nothing of it.
    config = json.loads((tmp_path / "pipeline" / "transformer" / "config.json").read_text())
    (tmp_path / "pipeline" / "transformer" / "config.json").write_text(
        json.dumps(config | {"in_channels": 4})
    )
    config, text = written(tmp_path / "pipeline")
    assert not config.conditions.are_used and "data.controls" not in text
