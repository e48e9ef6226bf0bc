"""A recipe is held against the family's own pipeline in diffusers: same weights and noise, same latents and frames."""

import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.transformers import transformer_cosmos
from diffusers.pipelines.cosmos import pipeline_cosmos2_5_predict
from PIL import Image

from opensora_accel.precision import LiftOperations
from opensora_accel.training import build
from opensora_accel.training.captions import TextShape
from opensora_accel.training.codec import VideoVAE, latent_shape
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.data import Batch, Clip
from opensora_accel.training.flow import draw_noise, draw_times
from opensora_accel.training.objective import Encoded, Objective
from opensora_accel.training.pictures import build_picture_encoder
from opensora_accel.training.recipes import RECIPES, Inputs, Sizes
from opensora_accel.training.samples import sample_latents
from opensora_accel.training.sound import SpectrumVAE
from opensora_accel.training.text_encoders import build_text_encoder, train_tokenizer
from tests.tiers import CPU_AND_GPU, PROVE, some
from tests.training.language import byt5, clip, gemma, gemma3, llama, qwen, qwen2
from tests.training.vaes import (
    allegro_vae,
    cogvideox_vae,
    easyanimate_vae,
    hunyuan_video15_vae,
    hunyuan_video_vae,
    ltx2_audio_vae,
    ltx2_vae,
    ltx2_vocoder,
    ltx_vae,
    mochi_vae,
    wan_vae,
)

CPU = torch.device("cpu")
CAPTIONS = ['a rabbit looks "up"', "two birds"]
STEPS, GUIDANCE, FRAME_RATE = 5, 3.0, 20.0


@dataclasses.dataclass(frozen=True)
class Family:
    """What a pipeline has around the model."""

    vae: Callable[[], Any]
    # Its scheduler, as published, and the shift that belongs to it.
    scheduler: dict[str, Any]
    shift: float | str
    # Of a clip.
    size: tuple[int, int, int]
    # More arguments of the pipeline.
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    # And of the model.
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Of the run's `flow`.
    flow: dict[str, Any] = dataclasses.field(default_factory=dict)
    # The pipeline, where it is not the recipe's.
    pipeline: str = ""
    # Tokens of a caption: with a template, room for the caption behind it.
    length: int = 8
    # What makes latents of sound, and what makes sound of spectrograms.
    audio_vae: Callable[[], Any] | None = None
    vocoder: Callable[[], Any] | None = None


LEVELS = {
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    "rescale_betas_zero_snr": True,
    "clip_sample": False,
}
NOISE_LEVELS = {
    "prediction_type": "epsilon",
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "timestep_spacing": "trailing",
    "clip_sample": False,
    "snr_shift_scale": 1.0,
}
LTX = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}
# By the caption alone: LTX-2's pipeline has three more kinds, and rescales.
PLAIN_GUIDANCE = {
    "frame_rate": FRAME_RATE,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_scale": GUIDANCE,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
    "audio_guidance_rescale": 0.0,
}
# Of the first order, and not corrected: Euler's steps.
KARRAS = {
    "use_karras_sigmas": True,
    "use_flow_sigmas": True,
    "prediction_type": "flow_prediction",
    "sigma_max": 200.0,
    "sigma_min": 0.01,
    "solver_order": 1,
    "disable_corrector": list(range(STEPS)),
}
FORCING = {"diffusion_forcing": "non-decreasing"}
ROTARY = {"use_rotary_positional_embeddings": True, "sample_height": 4, "sample_width": 6}
# By the class of the model, and what is published under one.
FAMILIES = {
    "WanTransformer3DModel": Family(wan_vae, {"shift": 3.0}, 3.0, (9, 32, 48)),
    "SkyReelsV2Transformer3DModel": Family(wan_vae, {"shift": 8.0}, 8.0, (9, 32, 48), flow=FORCING),
    "SkyReelsV2Transformer3DModel, causal blocks": Family(
        wan_vae,
        {"shift": 8.0},
        8.0,
        (13, 32, 48),
        {"ar_step": 2, "causal_block_size": 2},
        flow=FORCING | {"ar_step": 2, "causal_block_size": 2},
    ),
    "SkyReelsV2Transformer3DModel, one time": Family(
        wan_vae, {"shift": 8.0}, 8.0, (9, 32, 48), pipeline="SkyReelsV2Pipeline"
    ),
    "LTXVideoTransformer3DModel": Family(ltx_vae, LTX, "ltx", (9, 32, 64), {"frame_rate": FRAME_RATE}),
    "MochiTransformer3DModel": Family(mochi_vae, {"invert_sigmas": True}, 1.0, (7, 32, 48)),
    "CogVideoXTransformer3DModel, 2B": Family(
        cogvideox_vae, {**LEVELS, "snr_shift_scale": 3.0}, 3**0.5, (9, 32, 48), config={"sample_frames": 9}
    ),
    "CogVideoXTransformer3DModel, 5B": Family(
        cogvideox_vae, {**LEVELS, "snr_shift_scale": 1.0}, "auto", (9, 32, 48), config=ROTARY
    ),
    "CogVideoXTransformer3DModel, 1.5": Family(
        cogvideox_vae,
        {**LEVELS, "snr_shift_scale": 1.0},
        1.0,
        (13, 32, 48),
        config={**ROTARY, "patch_size_t": 2, "patch_bias": False},
    ),
    # Of two tiles.
    "AllegroTransformer3DModel": Family(allegro_vae, NOISE_LEVELS, "auto", (24, 128, 176)),
    # Its pipeline pads captions to so many tokens, and the model sees them.
    "EasyAnimateTransformer3DModel": Family(easyanimate_vae, {"shift": 5.0}, 5.0, (9, 32, 48), length=256),
    "HunyuanVideoTransformer3DModel": Family(
        hunyuan_video_vae, {"shift": 7.0}, 7.0, (9, 32, 48), config={"guidance_embeds": True}, length=96
    ),
    "HunyuanVideoTransformer3DModel, not distilled": Family(
        hunyuan_video_vae, {"shift": 7.0}, 7.0, (9, 32, 48), {"true_cfg_scale": GUIDANCE}, length=96
    ),
    "HunyuanVideo15Transformer3DModel": Family(
        hunyuan_video15_vae, {"shift": 5.0}, 5.0, (9, 64, 96), length=96
    ),
    "Kandinsky5Transformer3DModel": Family(hunyuan_video_vae, {"shift": 5.0}, 5.0, (9, 32, 48), length=64),
    # Its guidance begins with 0.
    "CosmosTransformer3DModel": Family(
        wan_vae, KARRAS, 5.0, (9, 32, 48), {"guidance_scale": GUIDANCE - 1}, length=64
    ),
    "SanaVideoTransformer3DModel": Family(
        wan_vae, {"shift": 8.0}, 8.0, (9, 32, 64), {"use_resolution_binning": False}
    ),
}


# As the audio VAE has it.
OF_SOUND = {
    "audio_in_channels": 8,
    "audio_out_channels": 8,
    "audio_sampling_rate": 16000,
    "audio_hop_length": 160,
}
WITH_SOUND = {
    "LTX2VideoTransformer3DModel": Family(
        ltx2_vae,
        LTX,
        "ltx",
        (9, 32, 64),
        PLAIN_GUIDANCE,
        OF_SOUND,
        audio_vae=ltx2_audio_vae,
        vocoder=ltx2_vocoder,
    ),
    "LTX2VideoTransformer3DModel, 2.3": Family(
        ltx2_vae,
        LTX,
        "ltx",
        (9, 32, 64),
        PLAIN_GUIDANCE,
        {
            "gated_attn": True,
            "cross_attn_mod": True,
            "audio_gated_attn": True,
            "audio_cross_attn_mod": True,
            "rope_type": "split",
            "use_prompt_embeddings": False,
            "perturbed_attn": True,
            **OF_SOUND,
        },
        audio_vae=ltx2_audio_vae,
        vocoder=ltx2_vocoder,
    ),
}
EVERY = FAMILIES | WITH_SOUND


@dataclasses.dataclass(frozen=True)
class FromFrame:
    """A pipeline that begins with a frame, where it differs from the family's."""

    family: str
    pipeline: str
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    vae: Callable[[], Any] | None = None
    # What it sees of the frame beside its latents.
    picture_width: int = 0


WAN_FRAME, COGVIDEOX_FRAME = "WanImageToVideoPipeline", "CogVideoXImageToVideoPipeline"
FROM_FRAMES = {
    "Wan 2.1": FromFrame("WanTransformer3DModel", WAN_FRAME),
    "Wan 2.2 5B": FromFrame(
        "WanTransformer3DModel", WAN_FRAME, {"expand_timesteps": True}, {"in_channels": 16}
    ),
    "SkyReels-V2": FromFrame(
        "SkyReelsV2Transformer3DModel",
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        config={"inject_sample_info": True},
    ),
    "LTX-Video": FromFrame(
        "LTXVideoTransformer3DModel",
        "LTXImageToVideoPipeline",
        # The pipeline leaves it out of what is given; in all that is published it is 1.
        vae=functools.partial(ltx_vae, scaling_factor=1.0),
    ),
    "CogVideoX": FromFrame("CogVideoXTransformer3DModel, 5B", COGVIDEOX_FRAME),
    "CogVideoX 1.5": FromFrame(
        "CogVideoXTransformer3DModel, 1.5",
        COGVIDEOX_FRAME,
        config={"ofs_embed_dim": 8},
        vae=functools.partial(cogvideox_vae, invert_scale_latents=True),
    ),
    "SANA-Video": FromFrame("SanaVideoTransformer3DModel", "SanaImageToVideoPipeline"),
    "Kandinsky 5": FromFrame("Kandinsky5Transformer3DModel", "Kandinsky5I2VPipeline"),
    "Cosmos-Predict 2.5": FromFrame(
        "CosmosTransformer3DModel",
        "Cosmos2_5_PredictBasePipeline",
        # As what is published has it.
        config={"concat_padding_mask": True},
    ),
    "HunyuanVideo 1.5": FromFrame(
        "HunyuanVideo15Transformer3DModel", "HunyuanVideo15ImageToVideoPipeline", picture_width=8
    ),
}


# One of those that have the same; that of HunyuanVideo 1.5 takes long to decode.
OF_OWN_VAE = [
    name
    for name in FAMILIES
    if not name.endswith(("2B", "1.5", "distilled"))
    and not any(each in name for each in ("Video15", "SkyReels"))
]


class Unguarded:
    """In place of Cosmos's guardrail: nothing is unsafe."""

    def to(self, device):
        return self

    def check_text_safety(self, text):
        return True


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


def class_of(name):
    return name.split(",")[0]


@functools.cache
def encoders(name):
    """What a family's captions are encoded by, in fp64."""
    torch.manual_seed(0)
    config = config_from_dict({"text": {"length": 8, "width": 32}}, "the test").text
    length, taken = EVERY[name].length, RECIPES[class_of(name)].text
    small = build_text_encoder(config, train_tokenizer(CAPTIONS), 0, CPU, torch.float64, taken)
    kinds = {
        "llama": lambda each: llama(each, length, CAPTIONS),
        "clip_text_model": lambda each: clip(each, small.tokenizer),
        "qwen2_5_vl_text": lambda each: qwen(each, length, CAPTIONS),
        "qwen2_vl": lambda each: qwen2(each, length, CAPTIONS),
        "qwen2_5_vl": lambda each: qwen(each, length, CAPTIONS),
        "gemma2": lambda each: gemma(each, length, CAPTIONS),
        "gemma3": lambda each: gemma3(each, length, CAPTIONS, per_stream="2.3" in name),
    }
    return [
        byt5(each) if each.length == 256 else kinds.get(each.encoders[0], lambda _: small)(each)
        for each in taken
    ]


def exact_scheduler(options, times):
    """A scheduler of diffusers. One of flow is held against our times, and gets them: its own are rounded to fp32."""
    if options.get("prediction_type") in ("v_prediction", "epsilon"):
        scheduler = diffusers.CogVideoXDDIMScheduler(**options)
        if options.get("beta_schedule") == "linear":
            ends = options["beta_start"], options["beta_end"]
            signal = (1 - torch.linspace(*ends, 1000, dtype=torch.float64)).cumprod(0)
            # Its own are rounded to fp32.
            torch.testing.assert_close(scheduler.alphas_cumprod.double(), signal, atol=1e-6, rtol=1e-4)
            scheduler.alphas_cumprod = signal
        return scheduler
    of_euler = "solver_order" not in options
    base = FlowMatchEulerDiscreteScheduler if of_euler else UniPCMultistepScheduler

    class Exact(base):
        @functools.wraps(base.set_timesteps)
        def set_timesteps(self, *args, sigmas=None, **kwargs):
            if sigmas is None and of_euler:
                # Wan's own code passes these (wan/utils/fm_solvers.py, get_sampling_sigmas), its pipeline none.
                args, sigmas = (), numpy.linspace(1, 1 / STEPS, STEPS)
            super().set_timesteps(*args, sigmas=sigmas, **kwargs)
            # Mochi's own time runs from noise to clip.
            own = 1 - times if self.config.get("invert_sigmas") else times
            torch.testing.assert_close(self.sigmas.double(), own, atol=1e-6, rtol=0)
            self.sigmas, self.timesteps = own, own[:-1] * 1000

    return Exact(**options)


def force_exactly(pipeline, times):
    """Has a pipeline of diffusion forcing take our times: its own are whole numbers, and 999 before a frame begins."""
    generate, prepare = pipeline.generate_timestep_matrix, pipeline.prepare_latents

    def generate_exactly(*arguments):
        matrix, numbers, *others = generate(*arguments)
        exact = torch.cat([times[:1], times])[numbers] * 1000
        assert (exact - matrix).abs().max() <= 1
        return exact, numbers, *others

    def prepare_all(*arguments, **options):
        found = prepare(*arguments, **options)
        # From text it forgets to say how many frames there are, where it is given noise (diffusers 0.42).
        return (found, found.size(2), None, 0) if isinstance(found, torch.Tensor) else found

    pipeline.generate_timestep_matrix, pipeline.prepare_latents = generate_exactly, prepare_all


@contextmanager
def without_rounding():
    """Pipelines cast the prediction to fp32, and mix it so."""
    with torch.no_grad(), LiftOperations():
        yield


def setting(name, vae=None, frame=None):
    """The objective of the trainer, and the pipeline of diffusers, of the same weights in fp64."""
    family, recipe = EVERY[name], RECIPES[class_of(name)]
    num_frames, height, width = family.size
    torch.manual_seed(0)
    codec = VideoVAE((vae or family.vae)().double())
    config = config_from_dict(
        {
            "data": {"num_frames": num_frames, "height": height, "width": width},
            "model": {
                "class_name": class_of(name),
                "config": {**recipe.tiny, **family.config, **(frame.config if frame else {})},
            },
            "conditions": {"t2v": 0.0, "i2v_head": 1.0} if frame else {},
            "image": {"width": frame.picture_width if frame else 0},
            "text": {"length": family.length, "width": 32},
            "flow": {"shift": family.shift, "guidance": GUIDANCE, "sample_steps": STEPS, **family.flow},
        },
        "the test",
    )
    # Some tests change the types of their parts.
    texts = copy.deepcopy(encoders(name))
    arguments = build.model_arguments(config, codec, [text.shape for text in texts])
    model = build.model_class(config.model)(**arguments).double().eval()
    for parameter in model.parameters():
        # Some begin at zero, and would hide what is wrong before them.
        torch.nn.init.normal_(parameter, std=0.1)
    shape = latent_shape(codec, num_frames, height, width)
    (bucket,) = config.data.sizes
    sounds = None
    if family.audio_vae is not None:
        vocoder = family.vocoder().double()
        sounds = SpectrumVAE(family.audio_vae().double(), lambda: vocoder)
    tokens = build.tokens_per_sample(shape, model)
    rate = family.given.get("frame_rate", 25.0)
    around = ({bucket: shape}, {bucket: tokens}, rate, CPU, torch.float64)
    conditioning = build.conditioning_of(config, codec)
    pictures = None
    if config.image.is_used:
        pictures = build_picture_encoder(config.image, 0, CPU, torch.float64, build.pictures_of(config))
    objective = Objective(config, recipe, codec, texts, pictures, conditioning, sounds, model, model, *around)
    times = recipe.sample_times(STEPS, objective.time_shift(bucket))
    parts = {"vae": codec.model, "transformer": model}
    if sounds is not None:
        parts |= {"audio_vae": sounds.model, "vocoder": vocoder, "connectors": texts[0].connectors}
    for text, number in zip(texts, ("", "_2"), strict=False):
        parts |= {f"text_encoder{number}": text.model, f"tokenizer{number}": text.tokenizer}
    if pictures is not None:
        parts |= {"image_encoder": pictures.model, "feature_extractor": pictures.processor}
    if recipe.pipeline == "HunyuanVideo15Pipeline":
        parts["guider"] = diffusers.ClassifierFreeGuidance(guidance_scale=GUIDANCE)
    if recipe.pipeline.startswith("Cosmos"):
        parts["safety_checker"] = Unguarded()
    parts |= frame.given if frame else {}
    # Cosmos's rounds one over the standard deviations of latents when it is made.
    with without_rounding():
        pipeline = getattr(diffusers, frame.pipeline if frame else family.pipeline or recipe.pipeline)(
            **parts, scheduler=exact_scheduler(family.scheduler, times)
        )
    if config.flow.is_forced:
        force_exactly(pipeline, times)
    pipeline.tokenizer_max_length = family.length
    pipeline.set_progress_bar_config(disable=True)
    return SimpleNamespace(
        objective=objective, pipeline=pipeline, bucket=bucket, shape=shape, given=family.given
    )


def as_laid_out(made, latents):
    """[B, C, t, h, w], or frames before channels where its model has them so."""
    return latents.transpose(1, 2) if made.objective.recipe.layout == "frames" else latents


def as_given(made, latents):
    """Latents [B, C, t, h, w] as its pipeline has them, without what stands beside them for the model."""
    config = made.objective.model.config
    nothing = [torch.zeros(len(latents), 1, 1)] * 2
    sound = torch.zeros(len(latents), 1, 1, 1)
    inputs = Inputs(latents, torch.zeros(len(latents)), nothing, nothing, config=config, sound=sound)
    return made.objective.recipe.arguments(inputs)["hidden_states"]


def in_channels(made, latents):
    """Kandinsky's pipeline leaves channels of frames that are given out, where it is given noise."""
    if "Kandinsky" not in made.objective.recipe.pipeline:
        return latents
    return torch.nn.functional.pad(latents, (0, latents.size(-1) + 1))


def by_pipeline(made, noise, output_type, captions=CAPTIONS, *, whole=False, **given):
    """Of the pipeline's own making, from captions on: frames or latents, or the whole answer."""
    size = made.bucket
    # Some have their guidance, the length of a caption, or their size beside the call.
    by_call = {
        "num_frames": size.num_frames,
        "frames": size.num_frames,
        "height": size.height,
        "width": size.width,
        "guidance_scale": GUIDANCE,
        "max_sequence_length": made.objective.config.text.length,
    }
    known = inspect.signature(made.pipeline.__call__).parameters
    if made.objective.recipe.packs and len(captions) > 1:
        # It pads the captions of several clips, and sees the padding.
        rows = [
            by_pipeline(made, noise[row : row + 1], output_type, captions[row : row + 1], **given)
            for row in range(len(captions))
        ]
        return (numpy if isinstance(rows[0], numpy.ndarray) else torch).concatenate(rows)
    # Some ask for it where it is not installed; captions here have nothing to mend.
    vars(sys.modules[type(made.pipeline).__module__]).setdefault("ftfy", SimpleNamespace(fix_text=str))
    answer = made.pipeline(
        prompt=captions,
        negative_prompt=[""] * len(captions),
        num_inference_steps=STEPS,
        output_type=output_type,
        **{name: value for name, value in by_call.items() if name in known}
        | made.given
        # Some write into it.
        | {"latents": in_channels(made, as_given(made, noise)).clone()}
        | given,
    )
    return answer if whole else answer.frames


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
        condition, _ = made.objective.encode_condition(["i2v_head"], frames, noise, [Clip("", 0, size)])
        (found,) = sample_latents(made.objective, [noise], CAPTIONS[:1], made.bucket, condition)
        other = condition._replace(latents=torch.zeros_like(condition.latents))
        (without,) = sample_latents(made.objective, [noise], CAPTIONS[:1], made.bucket, other)
    if "Cosmos" in name:
        # Its pipeline walks from noise to the frame by as much as the times do, 200/201, and leaves it there.
        expected[:, :, 0] += (1 - 200 / 201) * (found - noise)[:, :, 0]
    assert (as_given(made, found) - expected).abs().max() < 1e-10
    assert (found - without).abs().max() > 1e-3, "the frame counts"


@pytest.mark.parametrize("name", WITH_SOUND)
def test_a_sample_with_sound_is_the_pipelines(name):
    made = setting(name)
    objective, pipeline, rng = made.objective, made.pipeline, torch.Generator().manual_seed(1)
    of_sound = objective.sound_latents(made.bucket)
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
        frames, (samples, rate) = objective.codec.decode(found[0]), objective.sounds.decode(found[1])
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
    shapes = (made.shape, objective.sound_latents(size))
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
        condition, _ = objective.encode_condition(["i2v_head"], frames, noise[0], [Clip("", 0, size)])
        found = sample_latents(objective, noise, CAPTIONS[:1], size, condition)
        without = sample_latents(objective, noise, CAPTIONS[:1], size)
        clips = pipeline._denormalize_latents(found[0], *statistics)
        sounds = found[1].transpose(1, 2).flatten(2) * std + mean
    assert (clips - expected.frames).abs().max() < 1e-10
    assert (sounds - expected.audio.transpose(1, 2).flatten(2)).abs().max() < 1e-10
    assert all((each - other).abs().max() > 1e-3 for each, other in zip(found, without, strict=True))


def moved(made, device):
    """The same, whose model, encoders and decoders lie there."""
    made.pipeline.to(device)
    made.objective.device = torch.device(device)
    return made


def answers(made):
    """Of two clips, one with sound: the loss and its gradients, samples of the clips' kind, their frames and sound."""
    objective, size, rng = made.objective, made.bucket, torch.Generator().manual_seed(1)
    shape = 2, size.num_frames, size.height, size.width, 3
    frames = torch.randint(256, shape, dtype=torch.uint8, generator=rng)
    clips, sounds = [Clip("", start, size) for start in range(2)], [None, None]
    latents = [made.shape]
    if objective.sounds is not None:
        latents.append(objective.sound_latents(size))
        of_clip = objective.sounds.shape
        length = of_clip.num_samples(size.num_frames / objective.frame_rate)
        sounds[0] = torch.rand(of_clip.num_channels, length, generator=rng) - 0.5
    noise = [torch.randn(2, *each, dtype=torch.float64, generator=rng) for each in latents]
    with LiftOperations():
        batch = objective.encode(Batch(frames, CAPTIONS, [0, 1], ["", ""], clips, sounds))
        parts = list(batch.one_by_one()) if objective.recipe.packs else [batch]
        loss = sum(objective.loss(each) for each in parts)
        gradients = torch.autograd.grad(loss, list(objective.model.parameters()), allow_unused=True)
        with torch.no_grad():
            noise = [each.to(objective.device) for each in noise]
            made_of = sample_latents(objective, noise, CAPTIONS, size, batch.condition)
            decoded = [objective.codec.decode(made_of[0]).double() / 255]
            if objective.sounds is not None:
                decoded.append(objective.sounds.decode(made_of[1])[0].double())
    # Of one length, as some are zero but for rounding: those of keys' biases, where nothing turns or scales the keys.
    gradient = torch.cat([each.flatten() for each in gradients if each is not None])
    return [each.detach().cpu() for each in (loss, gradient, *made_of, *decoded)]


def assert_the_answers_of_the_host(made, device):
    expected, found = answers(made), answers(moved(made, device))
    errors = [float((there - here).norm() / here.norm()) for here, there in zip(expected, found, strict=True)]
    num_rounded = 1 + (made.objective.sounds is not None)
    # Pixels and samples are computed and rounded in fp32.
    assert max(errors[:-num_rounded]) < 1e-6 and max(errors[-num_rounded:]) < 1e-2, errors


def settings():
    return [(name, None) for name in EVERY] + [(frame.family, name) for name, frame in FROM_FRAMES.items()]


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize(("name", "frame"), settings())
def test_what_is_learned_and_made_on_a_gpu_is_that_of_the_host(name, frame, device):
    frame = FROM_FRAMES.get(frame)
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
    objective.add_second(low, second, second)
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
        ("LTXVideoTransformer3DModel", "denoises"),
    ]


@pytest.mark.parametrize(("name", "kind"), decoders())
def test_frames_are_the_pipelines(name, kind):
    vae = None if kind is None else lambda: ltx_vae(timestep_conditioning=True)
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
        found = made.objective.codec.decode(latents)
    levels = torch.from_numpy(numpy.round(expected * 255)).int()
    # One level: the pipeline rounds x/2 + ½ times 255, the codec x + 1 times 127.5, in fp32.
    assert found.shape == levels.shape and (found.int() - levels).abs().max() <= 1
    assert found.float().std() > 5, "there is a picture"


@pytest.mark.parametrize("name", some(FAMILIES, *OF_OWN_VAE, "HunyuanVideo15Transformer3DModel"))
def test_what_is_encoded_is_decoded(name):
    torch.manual_seed(0)
    family = FAMILIES[name]
    codec = VideoVAE(family.vae().double())
    frames = torch.randint(256, (1, *family.size, 3), dtype=torch.uint8)
    latents = codec.encode(frames)
    pixels = (frames.double() / 127.5 - 1).permute(0, 4, 1, 2, 3)
    with torch.no_grad():
        raw = codec.model.encode(pixels).latent_dist.mode()
        expected = codec.model.decode(raw).sample
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
    answers_noise = made.objective.recipe.levels.answer == "noise"
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
        (given,) = called
        levels, noise = given["timestep"], draw_noise(clean, objective.config.seed, range(4))
        frames = [as_laid_out(made, each) for each in (clean, noise)]
        torch.testing.assert_close(
            given["hidden_states"], scheduler.add_noise(*frames, levels), rtol=0, atol=1e-12
        )
        (answer,) = objective.model(**given)
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
        assert times[-1] == pytest.approx(last, abs=1e-5 * (levels.answer == "noise"))
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
    for name, recipe in RECIPES.items():
        parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
        defaults = {key: each.default for key, each in parameters.items()}
        texts = [TextShape(32, 16)] * len(recipe.text)
        of_sound = recipe.sound and recipe.sound.folded
        derived = recipe.derive(Sizes(4, 8, texts, 8, 4, None, of_sound, defaults))
        assert set(derived) <= set(parameters)
        assert recipe.models[0] != name or set(recipe.tiny) <= set(parameters)
        call = inspect.signature(getattr(diffusers, name).forward).parameters
        assert set(recipe.call) <= set(call)
