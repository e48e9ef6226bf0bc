"""EasyAnimate from frames that are given: as its pipeline takes them, and as runs learn them."""

import sys

import pytest
import torch

from opensora_accel import Plan
from opensora_accel.training import configured
from opensora_accel.training.clips import Clip
from opensora_accel.training.codec import build_codec
from opensora_accel.training.conditions import KINDS, Given, middle_mask, pixel_noise
from opensora_accel.training.planned import planned_sizes
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.samples import sample_latents
from opensora_accel.training.text_encoders import text_shapes
from opensora_accel.training.tiny_run import proof_of
from opensora_accel.training.tiny_run import tiny_config as tiny_proof
from tests.tiers import PROVE, some
from tests.training.pipelines import CAPTIONS, FROM_VIDEOS, by_pipeline, setting, without_rounding
from tests.training.runs import losses, tiny_config
from tests.training.vaes import easyanimate_vae

NAME = "EasyAnimateTransformer3DModel"


class NoiseOf:
    """What a pipeline has as torch, whose noise is this one's."""

    def __init__(self, noise):
        self.noise = noise

    def randn_like(self, pixels):
        assert pixels.shape == self.noise.shape
        return self.noise

    def __getattr__(self, name):
        return getattr(torch, name)


OF_VIDEO = [
    (name, kind)
    for name in FROM_VIDEOS
    for kind in ("t2v", "i2v_head", "i2v_tail", "i2v_loop", "v2v_head", "v2v_tail")
]


@pytest.mark.parametrize("case", some(OF_VIDEO, *OF_VIDEO[:6], OF_VIDEO[7]), ids=str)
def test_a_sample_with_given_frames_is_the_pipelines(case, monkeypatch):
    name, kind = case
    # Of nine frames: of three the middle of a latent frame is half given, or all of it.
    monkeypatch.setitem(KINDS, "v2v_head", Given(3, 0))
    monkeypatch.setitem(KINDS, "v2v_tail", Given(0, 3))
    frame, rng = FROM_VIDEOS[name], torch.Generator().manual_seed(1)
    made = setting(frame.family, frame.vae, frame)
    objective, size, given = made.objective, made.bucket, KINDS[kind]
    # The VAEs that are published say so; its class does not know it.
    made.pipeline.vae.register_to_config(cache_mag_vae=True)
    shape = 1, size.num_frames, size.height, size.width, 3
    # Of pixels that are the same however they are scaled. Black ones have no noise.
    frames = torch.randint(0, 2, shape, dtype=torch.uint8, generator=rng) * 255
    noise = torch.randn(1, *made.shape, dtype=torch.float64, generator=rng)
    with without_rounding():
        on_pixels = pixel_noise(frames, [given], objective.config.seed, [0], in_sample=True).transpose(1, 2)
    shown = given.frames(size.num_frames)
    on_pixels /= 0.0563
    on_pixels[:, :, ~shown] = 1.0
    module = sys.modules[type(made.pipeline).__module__]
    monkeypatch.setattr(module, "torch", NoiseOf(on_pixels))
    # It fails where it is given latents (diffusers 0.42).
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: noise.clone())
    # uint8 [B, T, H, W, 3] as the pipeline takes it: [B, 3, T, H, W] in 0…1, and a mask in 0…255.
    video = (frames / 255).permute(0, 4, 1, 2, 3)
    mask = torch.where(shown[:, None, None], 0.0, 255.0).expand(1, 1, *shape[1:4])
    called = []
    objective.model.register_forward_pre_hook(lambda _, args, kwargs: called.append(kwargs), with_kwargs=True)
    with without_rounding():
        masked = {"video": video, "mask_video": mask.contiguous(), "latents": None}
        expected = by_pipeline(made, noise, "latent", CAPTIONS[:1], **masked)
        condition, _ = objective.encoders.encode_condition(
            [kind], frames, noise, [Clip("", 0, size)], [0], in_sample=True
        )
        (found,) = sample_latents(objective, [noise], CAPTIONS[:1], size, condition)
        (without,) = sample_latents(objective, [noise], CAPTIONS[:1], size)
    by_its_pipeline = called[0]["inpaint_latents"]
    assert (condition.latents - by_its_pipeline[:1]).abs().max() < 1e-10
    assert (found - expected).abs().max() < 1e-10
    assert ((found - without).abs().max() > 1e-5) == (kind != "t2v"), "what is given counts"
    factor = made.pipeline.vae.config.scaling_factor
    marked = {"t2v": [0, 0, 0], "i2v_tail": [0, 0, 0], "v2v_head": [1, 0.5, 0], "v2v_tail": [0, 0, 1]}
    expected = torch.tensor(marked.get(kind, [1, 0, 0])) * factor
    torch.testing.assert_close(condition.latents[0, 0, :, 0, 0].float(), expected)


def test_the_mask_of_a_clip_has_the_middle_frames_of_each_latent_frame():
    for given, expected in (
        ([0], [1, 0, 0]),
        ([2], [0, 0.5, 0]),
        ([2, 3, 6], [0, 1, 0.5]),
        ([1, 4, 5, 8], [0, 0, 0]),
    ):
        frames = torch.zeros(1, 9, dtype=torch.bool)
        frames[0, given] = True
        assert middle_mask(frames, 3).tolist() == [expected]
    assert middle_mask(torch.ones(2, 1, dtype=torch.bool), 1).tolist() == [[1], [1]]


def test_noise_of_pixels_is_drawn_for_each_sample_and_is_that_of_its_trainer():
    frames, given = torch.zeros(400, 3, 8, 8, 3, dtype=torch.uint8), [KINDS["i2v_tail"]] * 400
    noise = pixel_noise(frames, given, 0, range(400), in_sample=False)
    assert noise.shape == (400, 3, 3, 8, 8) and not noise[:, :2].any()
    # Of 192 numbers each, a level is known to 5 %.
    levels = noise[:, 2].flatten(1).std(1).log()
    assert levels.mean().item() == pytest.approx(-3, abs=0.1) and levels.std().item() == pytest.approx(
        0.5, abs=0.06
    )
    again = pixel_noise(frames[:1], given[:1], 0, [7], in_sample=False)
    assert torch.equal(again[0], noise[7]), "a position has its noise, whatever comes with it"
    of_samples = pixel_noise(frames, given, 0, range(400), in_sample=True)
    assert of_samples[:, 2].std().item() == pytest.approx(0.0563, rel=0.02)


GIVEN = {"conditions.t2v": 1, "conditions.i2v_head": 2, "conditions.i2v_loop": 1, "conditions.i2v_tail": 1}


def config_of(clips, output, plan=None, **changes):
    model = {"class_name": NAME, "config": dict(RECIPES[NAME].tiny)}
    options = {"model": model, "data.batch_size": 6, **GIVEN, **changes}
    return tiny_config(clips, output, plan, **options)


PLANS = [
    Plan(ulysses=3, precision="fp64"),
    Plan(ring=2, precision="fp64"),
    Plan(dp_shard=2, sharding="zero3", precision="fp64"),
]


@pytest.mark.parametrize("plan", some(PLANS), ids=str)
def test_given_frames_are_the_same_on_any_mesh(ranks, clips, tmp_path, plan):
    whole = ranks(1, losses, config_of(clips, tmp_path / "one", Plan(precision="fp64")))[0]
    shared = ranks(plan.world_size, losses, config_of(clips, tmp_path / "shared", plan))
    assert all(rank == pytest.approx(whole, rel=1e-9) for rank in shared)


def trained(config):
    """Losses, how much is stored, and how often the VAE is loaded again while clips are learned."""
    from opensora_accel.training import encoding
    from opensora_accel.training.loop import Trainer

    loaded, build_codec = [], encoding.build_codec
    # What is kept remembers by what it is loaded.
    encoding.build_codec = lambda *arguments: loaded.append(arguments) or build_codec(*arguments)
    trainer = Trainer(config)
    found = [trainer.step()["loss"] for _ in range(config.steps)]
    encoding.build_codec = build_codec
    return found, trainer.disk_cache and trainer.disk_cache.counts.stored, len(loaded)


@PROVE
def test_clips_are_kept_and_what_is_in_noise_is_not(ranks, clips, tmp_path):
    easyanimate_vae().save_pretrained(tmp_path / "vae")

    def run(name, noisy=True, **changes):
        options = {"steps": 2, "data.num_frames": 9, "data.height": 32, "data.width": 48}
        options |= {"codec": {"path": str(tmp_path / "vae"), "dtype": "fp32"}}
        options["model"] = {
            "class_name": NAME,
            "config": dict(RECIPES[NAME].tiny) | {"add_noise_in_inpaint_model": noisy},
        }
        return ranks(1, trained, config_of(clips, tmp_path / name, Plan(), **{**options, **changes}))[0]

    stored = {}
    for noisy in (True, False):
        plain, *_ = run(f"plain {noisy}", noisy)
        in_memory, _, loaded = run(f"memory {noisy}", noisy, **{"codec.cache": True})
        assert loaded == 0, "it stays as long as it is needed"
        cached = {"cache_folder": str(tmp_path / f"cache {noisy}")}
        cold, stored[noisy], _ = run(f"cold {noisy}", noisy, **cached)
        warm, *_ = run(f"warm {noisy}", noisy, **cached)
        assert plain == in_memory == cold == warm
    assert 0 < stored[True] < stored[False], "frames without noise are kept too"


def test_a_proof_and_a_plan_have_given_frames(clips, tmp_path):
    config = config_of(clips, tmp_path, Plan())
    small = tiny_proof(config, clips)
    assert small.conditions.i2v_loop == 1
    codec = build_codec(small.codec, torch.device("meta"), torch.float32)
    arguments = configured.model_arguments(small, codec, text_shapes(small.text, configured.texts_of(small)))
    assert arguments["in_channels"] == 48 + 1 + 48
    (size,) = planned_sizes(config)
    assert size.true.inputs(2).apart.shape == (2, 1 + 48, 5, 6, 10)
    assert size.true.condition.put(torch.zeros(1, 48, 5, 6, 10)).size(1) == 48
    assert proof_of(config, tmp_path / "proof", 2).step is not None


def levels_of(config):
    """Of the noise of pixels, while clips are learned and in samples."""
    from opensora_accel.training import encoding, samples
    from opensora_accel.training.loop import Trainer

    trainer, found = Trainer(config), []

    def noise(*arguments, in_sample):
        drawn = pixel_noise(*arguments, in_sample=in_sample)
        found.append(drawn[drawn != 0].std().item())
        return drawn

    encoding.pixel_noise = noise
    trainer.step()
    with torch.no_grad():
        samples.sample_clips(trainer.objective, trainer.loader.videos[:1])
    encoding.pixel_noise = pixel_noise
    return found


def test_samples_have_the_noise_of_the_pipeline(ranks, clips, tmp_path):
    options = {"conditions.t2v": 0, "conditions.i2v_tail": 0, "data.batch_size": 1, "flow.sample_steps": 1}
    learned, sampled = ranks(1, levels_of, config_of(clips, tmp_path, Plan(), **options))[0]
    assert sampled == pytest.approx(0.0563, rel=0.05) and abs(learned / 0.0563 - 1) > 0.1
