"""A recipe is held against the family's own pipeline in diffusers: same weights and noise, same latents and frames."""

import copy
import dataclasses
import functools
import inspect
import sys
from types import SimpleNamespace

import diffusers
import numpy
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.transformers import transformer_cosmos
from diffusers.pipelines.cosmos import pipeline_cosmos2_5_predict
from PIL import Image

from opensora_accel.precision import LiftOperations
from opensora_accel.training.captions import TextShape
from opensora_accel.training.classes import import_class, parameters_of
from opensora_accel.training.clips import Clip
from opensora_accel.training.codec import VideoVAE, latent_shape
from opensora_accel.training.conditions import KINDS, Given
from opensora_accel.training.encoding import Encoded
from opensora_accel.training.flow import draw_noise, draw_times
from opensora_accel.training.recipes import RECIPES, Sizes
from opensora_accel.training.samples import sample_latents
from tests.tiers import CPU_AND_GPU, PROVE, some
from tests.training.open_sora import CLASSES
from tests.training.pipelines import (
    CAPTIONS,
    CPU,
    EVERY,
    FAMILIES,
    FROM_FRAMES,
    FROM_VIDEOS,
    WITH_SOUND,
    FromFrame,
    as_given,
    as_laid_out,
    assert_the_answers_of_the_host,
    by_pipeline,
    setting,
    without_rounding,
)
from tests.training.runs import class_of
from tests.training.vaes import (
    allegro_vae,
    ltx_vae,
    picture_vae_for_frames,
)

FRAMES = FROM_FRAMES | FROM_VIDEOS
# One of those that have the same; those of HunyuanVideo 1.5 and Allegro take long to decode.
OF_OWN_VAE = [
    name
    for name in FAMILIES
    if not name.endswith(("2B", "1.5", "distilled"))
    and not any(each in name for each in ("Video15", "SkyReels", "Allegro"))
]


@pytest.fixture(autouse=True)
def torchvision(monkeypatch):
    """What Cosmos takes of it, where it is not installed: a mask in another size, and a picture as numbers."""
    functional = SimpleNamespace(
        resize=lambda mask, size, interpolation: torch.nn.functional.interpolate(
            mask, size, mode=interpolation
        ),
        to_tensor=lambda picture: torch.from_numpy(numpy.array(picture)).movedim(-1, 0) / 255,
    )
    transforms = SimpleNamespace(functional=functional, InterpolationMode=SimpleNamespace(NEAREST="nearest"))
    monkeypatch.setattr(transformer_cosmos, "transforms", transforms, raising=False)
    module = SimpleNamespace(transforms=transforms)
    monkeypatch.setattr(pipeline_cosmos2_5_predict, "torchvision", module, raising=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sample_is_the_pipelines(name):
    made = setting(name)
    noise = torch.randn(2, *made.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with without_rounding():
        expected = by_pipeline(made, noise, "latent")
        (found,) = sample_latents(made.objective, [noise], CAPTIONS, made.bucket)
    assert (found - noise).abs().max() > 0.1, "the model does something"
    assert (as_given(made, found) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("name", FROM_FRAMES)
def test_a_sample_that_begins_with_a_frame_is_the_pipelines(name, monkeypatch):
    frame = FROM_FRAMES[name]
    made = setting(frame.family, frame.vae, frame)
    module = sys.modules[type(made.pipeline).__module__]
    generator, size = torch.Generator().manual_seed(1), made.bucket
    noise = torch.randn(1, *made.shape, dtype=torch.float64, generator=generator)
    # The trainer takes what is most likely, and pipelines draw.
    monkeypatch.setattr(
        module, "retrieve_latents", lambda output, *_, **__: output.latent_dist.mode(), raising=False
    )
    # LTX's would have the frame in the noise that it is given.
    monkeypatch.setattr(
        module,
        "randn_tensor",
        lambda *_, **__: as_given(made, noise).clone() if "Kandinsky" in name else noise,
    )
    if "Kandinsky" in name:
        monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
        # What it does to a clip afterwards.
        monkeypatch.setattr(made.pipeline, "normalize_first_frame", lambda latents: latents)
    if made.objective.recipe.frame_in_noise:
        # Which it rounds to fp32.
        monkeypatch.setattr(module, "torch", ExactNumbers())
    # Of pixels that are the same however they are scaled.
    frames = torch.randint(
        0, 2, (1, size.num_frames, size.height, size.width, 3), dtype=torch.uint8, generator=generator
    )
    frames *= 255
    if hasattr(made.pipeline.video_processor, "calculate_default_height_width"):
        # HunyuanVideo 1.5's chooses a size by itself.
        made.pipeline.video_processor.calculate_default_height_width = lambda **_: (size.height, size.width)
    with without_rounding():
        given = {"image": Image.fromarray(frames[0, 0].numpy())} | (
            {"latents": None} if "LTX" in name or "Kandinsky" in name else {}
        )
        expected = by_pipeline(made, noise, "latent", CAPTIONS[:1], **given)
        condition, _ = made.objective.encoders.encode_condition(
            ["i2v_head"], frames, noise, [Clip("", 0, size)], [0]
        )
        (found,) = sample_latents(made.objective, [noise], CAPTIONS[:1], made.bucket, condition)
        other = condition._replace(latents=torch.zeros_like(condition.latents))
        (without,) = sample_latents(made.objective, [noise], CAPTIONS[:1], made.bucket, other)
    if "2.5" in name:
        # Its pipeline walks from noise to the frame by as much as the times do, 200/201, and leaves it there.
        expected[:, :, 0] += (1 - 200 / 201) * (found - noise)[:, :, 0]
    if "latent_concat" in name:
        # Its pipeline leaves the first latent frame out.
        assert expected.size(2) == found.size(2) - 1
        found, without = found[:, :, 1:], without[:, :, 1:]
    assert (as_given(made, found) - expected).abs().max() < 1e-10
    assert (found - without).abs().max() > 1e-3, "the frame counts"


class ExactNumbers:
    """What a pipeline has as torch, whose tensors of given numbers are in fp64."""

    tensor = staticmethod(functools.partial(torch.tensor, dtype=torch.float64))

    def __getattr__(self, name):
        return getattr(torch, name)


def black_and_white(made, rng):
    """A clip of pixels that are the same however they are scaled: uint8 [1, T, H, W, 3]."""
    shape = 1, made.bucket.num_frames, made.bucket.height, made.bucket.width, 3
    return torch.randint(0, 2, shape, dtype=torch.uint8, generator=rng) * 255


def as_pictures(frames):
    """uint8 [1, T, H, W, 3] as pipelines take a video: [T, 3, H, W] in 0…1."""
    return (frames[0] / 255).permute(0, 3, 1, 2)


OF_BRANCH = [
    (kind, follows)
    for kind in ("t2v", "i2v_head", "i2v_tail", "i2v_loop", "v2v_head")
    for follows in (False, True)
]


@pytest.mark.parametrize(("kind", "follows"), OF_BRANCH)
def test_a_sample_that_follows_a_control_is_the_pipelines(kind, follows, monkeypatch):
    """What is given is black in the mask of VACE's pipeline; where it is white stands the control, or grey."""
    # Of nine frames, so that latent frames are marked.
    monkeypatch.setitem(KINDS, "v2v_head", Given(5, 0))
    made, rng = setting("WanVACETransformer3DModel"), torch.Generator().manual_seed(1)
    objective, size = made.objective, made.bucket
    frames, control = black_and_white(made, rng), black_and_white(made, rng)
    noise = torch.randn(1, *made.shape, dtype=torch.float64, generator=rng)
    shown = KINDS[kind].frames(size.num_frames)[:, None, None, None]
    grey = torch.full_like(as_pictures(frames), 0.5)
    video = torch.where(shown, as_pictures(frames), as_pictures(control) if follows else grey)
    mask = torch.where(shown, 0.0, torch.ones_like(grey))
    given = {} if kind == "t2v" and not follows else {"video": [video], "mask": [mask]}
    clip, called = Clip("", 0, size, control=Clip("a control", 0, size) if follows else None), []
    objective.model.register_forward_pre_hook(lambda _, args, kwargs: called.append(kwargs), with_kwargs=True)
    with without_rounding():
        expected = by_pipeline(made, noise, "latent", CAPTIONS[:1], **given)
        by_its_pipeline = called[0]["control_hidden_states"]
        condition, whole = objective.encoders.encode_condition([kind], frames, noise, [clip], [0], control)
        (found,) = sample_latents(objective, [noise], CAPTIONS[:1], size, condition)
        (without,) = sample_latents(objective, [noise], CAPTIONS[:1], size)
    assert condition.latents.shape == (1, 96, *made.shape[1:])
    assert (condition.latents - by_its_pipeline).abs().max() < 1e-10
    assert (found - expected).abs().max() < 1e-10
    assert ((found - without).abs().max() > 1e-5) == bool(given), "what is given counts"
    # Of five frames that are given two latent frames are, and the mask is black.
    first = [kind == "v2v_head"] * 2 + [False]
    assert (condition.latents[0, -1, :, 0, 0] == 0).tolist() == first
    assert whole[0].tolist() == [kind in ("i2v_head", "i2v_loop", "v2v_head"), *first[1:]]


@pytest.mark.parametrize("name", WITH_SOUND)
def test_a_sample_with_sound_is_the_pipelines(name):
    made = setting(name)
    objective, pipeline, rng = made.objective, made.pipeline, torch.Generator().manual_seed(1)
    of_sound = objective.encoders.sound_latents(made.bucket)
    noise = [torch.randn(2, *shape, dtype=torch.float64, generator=rng) for shape in (made.shape, of_sound)]
    vae, audio_vae = pipeline.vae, pipeline.audio_vae
    # Noise of sound is taken for latents of the VAE, and normalised.
    given = noise[1].transpose(1, 2).flatten(2) * audio_vae.latents_std + audio_vae.latents_mean

    def expected(output_type):
        return by_pipeline(made, noise[0], output_type, whole=True, audio_latents=given.clone())

    with without_rounding():
        found = sample_latents(objective, noise, CAPTIONS, made.bucket)
        latents = expected("latent")
        clips = pipeline._denormalize_latents(found[0], vae.latents_mean, vae.latents_std)
        sounds = found[1].transpose(1, 2).flatten(2) * audio_vae.latents_std + audio_vae.latents_mean
        whole = expected("np")
        encoders = objective.encoders
        frames, (samples, rate) = encoders.codec.decode(found[0]), encoders.sounds.decode(found[1])
    assert (clips - latents.frames).abs().max() < 1e-10
    assert (sounds - latents.audio.transpose(1, 2).flatten(2)).abs().max() < 1e-10
    assert all((each - before).abs().max() > 0.1 for each, before in zip(found, noise, strict=True))
    levels = torch.from_numpy(numpy.round(whole.frames * 255)).int()
    assert frames.shape == levels.shape and (frames.int() - levels).abs().max() <= 1
    assert rate == 24000 and torch.allclose(samples.double(), whole.audio.double(), atol=1e-6)
    # Of 9 frames at 20 a second: 11 positions, 41 spectra, 4 samples for each.
    assert of_sound == (4, 11, 2) and samples.shape == (2, 2, 41 * 4) and samples.std() > 0.01


@pytest.mark.parametrize("name", WITH_SOUND)
def test_a_sample_with_sound_that_begins_with_a_frame_is_the_pipelines(name, monkeypatch):
    made = setting(name, frame=FromFrame(name, "LTX2ImageToVideoPipeline"))
    objective, pipeline, size = made.objective, made.pipeline, made.bucket
    module, rng = sys.modules[type(pipeline).__module__], torch.Generator().manual_seed(1)
    shapes = (made.shape, objective.encoders.sound_latents(size))
    noise = [torch.randn(1, *shape, dtype=torch.float64, generator=rng) for shape in shapes]
    frames = torch.randint(
        0, 2, (1, size.num_frames, size.height, size.width, 3), dtype=torch.uint8, generator=rng
    )
    frames *= 255
    monkeypatch.setattr(module, "retrieve_latents", lambda output, *_, **__: output.latent_dist.mode())
    # It draws what the frame stands in, and no sound beside what is given.
    monkeypatch.setattr(
        module, "randn_tensor", lambda shape, **_: noise[0] if len(shape) == 5 else torch.zeros(shape)
    )
    statistics = pipeline.vae.latents_mean, pipeline.vae.latents_std
    mean, std = pipeline.audio_vae.latents_mean, pipeline.audio_vae.latents_std
    # Not as a video would have worn it.
    given = {"image": Image.fromarray(frames[0, 0].numpy()), "image_crf": 0, "latents": None}
    given |= {"audio_latents": noise[1].transpose(1, 2).flatten(2) * std + mean}
    with without_rounding():
        expected = by_pipeline(made, noise[0], "latent", CAPTIONS[:1], whole=True, **given)
        condition, _ = objective.encoders.encode_condition(
            ["i2v_head"], frames, noise[0], [Clip("", 0, size)], [0]
        )
        found = sample_latents(objective, noise, CAPTIONS[:1], size, condition)
        without = sample_latents(objective, noise, CAPTIONS[:1], size)
        clips = pipeline._denormalize_latents(found[0], *statistics)
        sounds = found[1].transpose(1, 2).flatten(2) * std + mean
    assert (clips - expected.frames).abs().max() < 1e-10
    assert (sounds - expected.audio.transpose(1, 2).flatten(2)).abs().max() < 1e-10
    assert all((each - other).abs().max() > 1e-3 for each, other in zip(found, without, strict=True))


def settings():
    return [(name, None) for name in EVERY] + [(frame.family, name) for name, frame in FRAMES.items()]


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize(("name", "frame"), settings())
def test_what_is_learned_and_made_on_a_gpu_is_that_of_the_host(name, frame, device):
    frame = FRAMES.get(frame)
    made = setting(name, frame.vae if frame else None, frame)
    assert_the_answers_of_the_host(made, device)


def test_experts_have_the_times_that_their_pipeline_gives_them():
    """Wan 2.2's boundary is one of shifted times: meant before a shift of 12, T2V's 0.875 would be 0.988."""
    made = setting("WanTransformer3DModel")
    boundary, called = 0.875, {"transformer": [], "transformer_2": []}
    made.pipeline.register_modules(transformer_2=copy.deepcopy(made.pipeline.transformer))
    made.pipeline.register_to_config(boundary_ratio=boundary)
    for name, times in called.items():
        getattr(made.pipeline, name).register_forward_pre_hook(
            lambda _, args, kwargs, times=times: times.append(kwargs["timestep"]), with_kwargs=True
        )
    with without_rounding():
        by_pipeline(made, torch.randn(2, *made.shape, dtype=torch.float64), "latent")
    alpha = made.objective.time_shift(made.bucket)
    for name, time_range in (("transformer", (boundary, 1.0)), ("transformer_2", (0.0, boundary))):
        config = dataclasses.replace(made.objective.config.flow, time_range=time_range)
        drawn = draw_times(config, alpha, 0, range(500)) * 1000
        given = torch.cat(called[name])
        assert len(given) and time_range[0] * 1000 <= given.min() and given.max() <= time_range[1] * 1000
        assert drawn.min() >= time_range[0] * 1000 and drawn.max() <= time_range[1] * 1000


def test_a_sample_with_two_experts_is_the_pipelines():
    made = setting("WanTransformer3DModel")
    objective, boundary = made.objective, 0.875
    second = copy.deepcopy(objective.model)
    for parameter in second.parameters():
        parameter.data.mul_(1.5)
    made.pipeline.register_modules(transformer_2=second)
    made.pipeline.register_to_config(boundary_ratio=boundary)
    both = dataclasses.replace(
        objective.config, flow=dataclasses.replace(objective.config.flow, boundary=boundary)
    )
    objective.config, low = both.experts
    of_second = objective.add_second(low, second, second)
    assert of_second.encoders is objective.encoders, "what is released by one is not held by the other"
    noise = torch.randn(2, *made.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with without_rounding():
        expected = by_pipeline(made, noise, "latent")
        (found,) = sample_latents(objective, [noise], CAPTIONS, made.bucket)
        objective.second = None
        (with_one,) = sample_latents(objective, [noise], CAPTIONS, made.bucket)
    assert (as_given(made, found) - expected).abs().max() < 1e-10
    assert (found - with_one).abs().max() > 0.01, "the second one was asked"


def decoders():
    return [
        *(pytest.param(name, None, marks=() if name in OF_OWN_VAE else PROVE) for name in FAMILIES),
        ("LTXVideoTransformer3DModel", functools.partial(ltx_vae, timestep_conditioning=True)),
        ("LatteTransformer3DModel", picture_vae_for_frames),
    ]


@pytest.mark.parametrize(("name", "vae"), decoders())
def test_frames_are_the_pipelines(name, vae):
    made = setting(name, vae)
    noise = torch.randn(2, *made.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with without_rounding():
        if class_of(name) in ("HunyuanVideo15Transformer3DModel", "AllegroTransformer3DModel"):
            # Their VAEs decode one clip at a time, or fail (diffusers 0.42).
            each = zip(noise.split(1), CAPTIONS, strict=True)
            expected = numpy.concatenate([by_pipeline(made, one, "np", [caption]) for one, caption in each])
        else:
            expected = by_pipeline(made, noise, "np")
        (latents,) = sample_latents(made.objective, [noise], CAPTIONS, made.bucket)
        found = made.objective.encoders.codec.decode(latents)
    levels = torch.from_numpy(numpy.round(expected * 255)).int()
    # One level: the pipeline rounds x/2 + ½ times 255, the codec x + 1 times 127.5, in fp32.
    assert found.shape == levels.shape and (found.int() - levels).abs().max() <= 1
    assert found.float().std() > 5, "there is a picture"


@pytest.mark.parametrize("name", some(FAMILIES, *OF_OWN_VAE))
def test_what_is_encoded_is_decoded(name):
    torch.manual_seed(0)
    family = FAMILIES[name]
    codec = VideoVAE(family.vae().double())
    frames = torch.randint(256, (1, *family.size, 3), dtype=torch.uint8)
    latents = codec.encode(frames)
    pixels = (frames.double() / 127.5 - 1).permute(0, 4, 1, 2, 3)

    def decoded(raw):
        return codec.model.decode(raw).sample

    with torch.no_grad():
        if name == "LatteTransformer3DModel":
            # Frame by frame.
            stored = [codec.model.encode(pixels[:, :, n]).latent_dist.mode() for n in range(pixels.size(2))]
            raw, expected = (
                torch.stack(each, dim=2) for each in (stored, [decoded(each) for each in stored])
            )
        else:
            raw = codec.model.encode(pixels).latent_dist.mode()
            expected = decoded(raw)
        if name == "AllegroTransformer3DModel":
            expected = expected.transpose(1, 2)
    levels = ((expected.clamp(-1, 1) + 1) * 127.5).round().permute(0, 2, 3, 4, 1).int()
    assert (codec.decode(latents).int() - levels).abs().max() <= 1
    assert not torch.allclose(latents.double(), raw, atol=0.1), "its statistics do something"


WITH_T5_ALONE = (
    "LTXVideoTransformer3DModel",
    "MochiTransformer3DModel",
    "CogVideoXTransformer3DModel, 5B",
    "AllegroTransformer3DModel",
)


@pytest.mark.parametrize("name", WITH_T5_ALONE)
def test_text_is_the_pipelines(name):
    made = setting(name)
    (text,) = made.objective.texts
    states, mask = made.pipeline.encode_prompt(
        CAPTIONS, do_classifier_free_guidance=False, max_sequence_length=8
    )[:2]
    found = text.encode(CAPTIONS, CPU, torch.float64)
    if text.taken.padding == "kept":
        assert torch.equal(found, states) and text.num_tokens(CAPTIONS) == [8, 8]
        return
    assert mask.sum(1).tolist() == text.num_tokens(CAPTIONS) and 0 < mask.sum() < mask.numel()
    assert torch.equal(found[mask.bool()], states[mask.bool()])


def test_text_that_is_cut_with_the_caption_is_the_pipelines():
    made = setting("LatteTransformer3DModel")
    (text,) = made.objective.texts
    given = []
    made.objective.forward = lambda **arguments: (
        given.append(arguments["encoder_hidden_states"]) or torch.zeros(1, 8, *made.shape[1:])
    )
    noise = [torch.zeros(1, *made.shape, dtype=torch.float64)]
    for caption in ("Two birds", "one"):
        expected = made.pipeline.encode_prompt(caption, negative_prompt="")
        (length,), timestep = text.num_tokens([caption]), torch.tensor([500.0])
        for left_out in (False, True):
            captions = [""] if left_out else [caption]
            made.objective.predict(noise, timestep, made.bucket, captions, in_place_of=[caption])
            assert expected[left_out].size(1) == length
            torch.testing.assert_close(given.pop(), expected[left_out], rtol=0, atol=1e-12)
        dropping = dataclasses.replace(made.objective.config.flow, caption_drop=0.999)
        made.objective.config = dataclasses.replace(made.objective.config, flow=dropping)
        made.objective.loss(Encoded(made.bucket, range(1), [caption], noise[0], None, None))
        torch.testing.assert_close(given.pop(), expected[1], rtol=0, atol=1e-12)
    made.objective.predict(noise, timestep, made.bucket, [""], in_place_of=[""])
    assert given.pop().size(1) == text.shape.length > length, "nothing says how long it would be"


def test_states_in_a_template_and_of_the_whole_are_the_pipelines():
    made = setting("HunyuanVideoTransformer3DModel")
    captions, length = [*CAPTIONS, ""], made.objective.config.text.length
    states, pooled, mask = made.pipeline.encode_prompt(captions, max_sequence_length=length)
    first, second = made.objective.texts
    found = first.encode(captions, CPU, torch.float64)
    assert mask.sum(1).tolist() == first.num_tokens(captions) and 0 < mask.sum() < mask.numel()
    assert torch.equal(found[mask.bool()], states[mask.bool()])
    assert not torch.equal(found[0], found[1]), "the captions are seen"
    assert torch.equal(second.encode(captions, CPU, torch.float64).squeeze(1), pooled)
    assert second.num_tokens(captions) == [1, 1, 1] and second.shape == (1, 24)


def test_states_of_all_layers_are_the_pipelines():
    made = setting("CosmosTransformer3DModel")
    captions, length = [*CAPTIONS, "", " ".join(CAPTIONS * 5)], made.objective.config.text.length
    (text,) = made.objective.texts
    states, _ = made.pipeline.encode_prompt(captions, None, False, max_sequence_length=length)
    found = text.encode(captions, CPU, torch.float64)
    assert text.shape == (length, 4 * 32) and text.num_tokens(captions) == [length] * 4
    assert (found - states).abs().max() < 1e-12
    assert all(not torch.equal(found[0], other) for other in found[1:]), "captions are seen"
    # Words of the small tokenizer leave lines out.
    chat = [
        {"role": role, "content": content}
        for role, content in (
            ("system", "You are a helpful assistant who will provide prompts to an image generator."),
            ("user", CAPTIONS[0]),
        )
    ]
    assert text.taken.text_of(CAPTIONS[0]) == text.tokenizer.apply_chat_template(chat, tokenize=False)


def test_states_of_what_stands_in_quotes_are_the_pipelines():
    made = setting("HunyuanVideo15Transformer3DModel")
    captions = [*CAPTIONS, "", 'signs “OPEN” and "SALE" and "SALE"']
    found = made.pipeline.encode_prompt(captions, batch_size=4, dtype=torch.float64)
    for text, states, mask in zip(made.objective.texts, found[::2], found[1::2], strict=True):
        ours = text.encode(captions, CPU, torch.float64)
        assert mask.sum(1).tolist() == text.num_tokens(captions)
        assert torch.equal(ours[mask.bool()], states[mask.bool()])
    # Of bytes: Text "up". and its end; and Text "OPEN". Text "SALE". and its end.
    assert found[3].sum(1).tolist() == [12, 0, 0, 27]


@pytest.mark.parametrize("name", [name for name in FAMILIES if RECIPES[class_of(name)].levels])
def test_levels_of_noise_are_learned_as_their_scheduler_has_them(name):
    """The loss of a velocity, at a time, is that of v or ε, at a level: of the same noise, as its scheduler adds it."""
    made = setting(name)
    answers_noise = made.objective.recipe.levels.answer != "v"
    objective, scheduler, bucket = made.objective, made.pipeline.scheduler, made.bucket
    rng = torch.Generator().manual_seed(1)
    clean = torch.randn(4, *made.shape, dtype=torch.float64, generator=rng)
    batch = Encoded(bucket, range(4), [CAPTIONS[0]] * 4, clean, None, None)
    config, called = objective.config.flow, []
    objective.config = dataclasses.replace(
        objective.config, flow=dataclasses.replace(config, caption_drop=0.0, time_distribution="uniform")
    )
    objective.model.register_forward_pre_hook(lambda _, args, kwargs: called.append(kwargs), with_kwargs=True)
    with without_rounding():
        found = objective.loss(batch)
        # Of one clip each, where a call takes one.
        given = {name: torch.cat([each[name] for each in called]) if isinstance(value, torch.Tensor) else value
                 for name, value in called[0].items()}  # fmt: skip
        levels, noise = given["timestep"], draw_noise(clean, objective.config.seed, range(4))
        frames = [as_laid_out(made, each) for each in (clean, noise)]
        torch.testing.assert_close(
            given["hidden_states"], scheduler.add_noise(*frames, levels), rtol=0, atol=1e-12
        )
        (answer,) = objective.model(**given)
        if objective.recipe.levels.answer == "noise and variance":
            answer = answer[:, : made.shape[0]]
        errors = answer - (frames[1] if answers_noise else scheduler.get_velocity(*frames, levels))
        objective.config = dataclasses.replace(
            objective.config, flow=dataclasses.replace(objective.config.flow, min_snr=5.0)
        )
        weighted = objective.loss(batch)
    assert len(set(levels.tolist())) == 4
    torch.testing.assert_close(found, errors.square().mean(), rtol=1e-12, atol=0)
    snr = scheduler.alphas_cumprod / (1 - scheduler.alphas_cumprod)
    weights = (snr.clamp(max=5.0) / (snr if answers_noise else snr + 1))[levels.cpu()].double()
    expected = (weights * errors.square().flatten(1).mean(1)).mean()
    torch.testing.assert_close(weighted, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.levels])
def test_the_last_level_is_noise_alone_and_every_level_is_found_again(name):
    levels = RECIPES[name].levels
    for alpha in (1.0, 3**0.5):
        times = levels.times(alpha)
        # Of one that answers noise the last level has some signal left.
        last = 1.0 if levels.answer == "v" else 1 / (1 + 0.00635 / alpha)
        assert times[-1] == pytest.approx(last, abs=1e-5 * (levels.answer != "v"))
        assert (times.diff() > 0).all() and 0 < times[0] < 0.05
        # As rounded as a step in fp32 has them.
        assert torch.equal(levels.numbers(times.float(), alpha), torch.arange(1000))
    assert levels.at(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64), 1.0).tolist() == [
        levels.times(1.0)[n].item() for n in (0, 500, 999)
    ]


@pytest.mark.parametrize("name", [name for name in FAMILIES if RECIPES[class_of(name)].unused_text])
def test_what_nothing_uses_has_a_gradient_all_the_same(name):
    made = setting(name)
    objective, clean = made.objective, torch.randn(1, *made.shape, dtype=torch.float64)

    def num_without():
        with LiftOperations():
            loss = objective.loss(Encoded(made.bucket, range(1), CAPTIONS[:1], clean, None, None))
            gradients = torch.autograd.grad(loss, list(objective.model.parameters()), allow_unused=True)
        return sum(each is None for each in gradients)

    assert num_without()
    objective.recipe.use_all(objective.model)
    assert num_without() == 0


def test_clips_fill_the_tiles_of_a_vae_that_works_on_these():
    codec = VideoVAE(allegro_vae())
    frames = codec.latent_frames
    assert frames.starts(6).tolist() == [0, 4, 8, 12, 16, 20] and frames.num_frames(22) == 88
    assert frames.numbers(24)[:, -1].tolist() == [20, 21, 22, 23] and frames.num_latents(88) == 22
    assert latent_shape(codec, 88, 720, 1280) == (4, 22, 90, 160)
    for size, message in (
        ((20, 128, 128), r"data\.num_frames \(20\) must be 24, or a multiple of 16 more, .* use 24$"),
        ((28, 128, 128), r"use 24 or 40$"),
        ((24, 64, 128), r"data\.height \(64\) must be 128, or a multiple of 8 more, for the codec; use 128$"),
        ((24, 128, 200), r"data\.width \(200\) must be 128, or a multiple of 48 more, .* use 176 or 224$"),
    ):
        with pytest.raises(ValueError, match=message):
            latent_shape(codec, *size)


def test_every_recipe_says_what_its_constructor_takes():
    found = [(name, each) for name, recipe in RECIPES.items() for each in (recipe, *recipe.variants)]
    for name, recipe in found:
        cls = import_class(CLASSES[name]) if recipe.home else getattr(diffusers, name)
        parameters = parameters_of(cls)
        defaults = {key: each.default for key, each in parameters.items()}
        texts = [TextShape(32, 16)] * len(recipe.text)
        of_sound = recipe.sound and recipe.sound.folded
        derived = recipe.derive(Sizes(4, 8, texts, 8, 4, None, of_sound, defaults))
        assert set(derived) <= set(parameters)
        assert recipe.models[0] != name or set(recipe.tiny) <= set(parameters)
        # Of Open-Sora's it is chosen when the model is made.
        call = inspect.signature(cls.forward_ckpt if name == "MMDiTModel" else cls.forward).parameters
        assert {*recipe.call, recipe.latents} <= set(call)
