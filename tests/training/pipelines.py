"""Pipelines of diffusers beside the trainer: a small one of each family, and an objective of the same weights."""

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
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video_image2video

from opensora_accel.precision import LiftOperations
from opensora_accel.training import configured, one_clip
from opensora_accel.training.classes import arguments_of
from opensora_accel.training.clips import Batch, Clip
from opensora_accel.training.codec import VideoVAE, latent_shape
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.encoding import Encoders
from opensora_accel.training.objective import Objective
from opensora_accel.training.pictures import build_picture_encoder
from opensora_accel.training.recipes import Inputs
from opensora_accel.training.samples import sample_latents
from opensora_accel.training.sections import ModelConfig
from opensora_accel.training.sound import SpectrumVAE
from opensora_accel.training.text_encoders import build_text_encoder, train_tokenizer
from tests.training.language import byt5, clip, gemma, gemma3, llama, llava, qwen, qwen2
from tests.training.runs import class_of
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
    picture_vae,
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
    "WanVACETransformer3DModel": Family(wan_vae, {"shift": 3.0}, 3.0, (9, 32, 48)),
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
    "LatteTransformer3DModel": Family(picture_vae, NOISE_LEVELS, "auto", (5, 32, 48)),
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


# The pipeline's own, but for where `language.llava` has the nine parts of a picture.
OF_PICTURE = pipeline_hunyuan_video_image2video.DEFAULT_PROMPT_TEMPLATE | {
    "image_emb_start": 6,
    "image_emb_end": 15,
    "image_emb_len": 9,
}


def hunyuan_from_frame(kind, **config):
    given = {"prompt_template": OF_PICTURE}
    if not config:
        given["true_cfg_scale"] = GUIDANCE
    config = {"image_condition_type": kind, **config}
    return Family(hunyuan_video_vae, {"shift": 7.0}, 7.0, (9, 32, 48), given, config, length=24)


# Whose pipeline begins with frames, always.
WITH_FRAMES = {
    "HunyuanVideoTransformer3DModel, token_replace": hunyuan_from_frame("token_replace"),
    "HunyuanVideoTransformer3DModel, token_replace, distilled": hunyuan_from_frame(
        "token_replace", guidance_embeds=True
    ),
    "HunyuanVideoTransformer3DModel, latent_concat": hunyuan_from_frame("latent_concat"),
    "HunyuanVideoTransformer3DModel, latent_concat, distilled": hunyuan_from_frame(
        "latent_concat", guidance_embeds=True
    ),
    # Its guidance begins with 0.
    "CosmosTransformer3DModel, Predict 2": Family(
        wan_vae,
        {"use_karras_sigmas": True},
        5.0,
        (9, 32, 48),
        {"guidance_scale": GUIDANCE - 1, "fps": FRAME_RATE},
        {"use_crossattn_projection": False},
    ),
}


EVERY = FAMILIES | WITH_SOUND | WITH_FRAMES


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


HUNYUAN_FRAME = "HunyuanVideoImageToVideoPipeline"
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
    "Cosmos-Predict 2": FromFrame("CosmosTransformer3DModel, Predict 2", "Cosmos2VideoToWorldPipeline"),
    "HunyuanVideo 1.5": FromFrame(
        "HunyuanVideo15Transformer3DModel", "HunyuanVideo15ImageToVideoPipeline", picture_width=8
    ),
    **{
        f"HunyuanVideo, {name.partition(', ')[2]}": FromFrame(name, HUNYUAN_FRAME)
        for name in WITH_FRAMES
        if name.startswith("Hunyuan")
    },
}


# Whose pipeline takes a video and a mask.
FROM_VIDEOS = {
    "EasyAnimate": FromFrame("EasyAnimateTransformer3DModel", "EasyAnimateInpaintPipeline"),
    "EasyAnimate, no noise": FromFrame(
        "EasyAnimateTransformer3DModel",
        "EasyAnimateInpaintPipeline",
        config={"add_noise_in_inpaint_model": False},
    ),
}


class Unguarded:
    """In place of Cosmos's guardrail: nothing is unsafe."""

    def to(self, device):
        return self

    def check_text_safety(self, text):
        return True


def recipe_of(name):
    return configured.recipe_of(ModelConfig(class_name=class_of(name), config=EVERY[name].config))


@functools.cache
def encoders(name):
    """What a family's captions are encoded by, in fp64."""
    torch.manual_seed(0)
    config = config_from_dict({"text": {"length": 8, "width": 32}}, "the test").text
    length, taken = EVERY[name].length, recipe_of(name).text
    small = build_text_encoder(config, train_tokenizer(CAPTIONS), 0, CPU, torch.float64, taken)
    kinds = {
        "llama": lambda each: llama(each, length, CAPTIONS),
        "llava": lambda each: llava(each, length, CAPTIONS),
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
            # Mochi's own time runs from noise to clip, and Cosmos-Predict 2's is noise over clip.
            own = 1 - times if self.config.get("invert_sigmas") else times
            if self.config.get("sigma_data"):
                own = times / (1 - times)
            torch.testing.assert_close(self.sigmas.double(), own, atol=1e-6, rtol=1e-6)
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
    family, recipe = EVERY[name], recipe_of(name)
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
            # As nothing is kept here, all may see frames.
            "text": {"length": family.length, "width": 32, "cache": False},
            "flow": {"shift": family.shift, "guidance": GUIDANCE, "sample_steps": STEPS, **family.flow},
        },
        "the test",
    )
    # Some tests change the types of their parts.
    texts = copy.deepcopy(encoders(name))
    arguments = configured.model_arguments(config, codec, [text.shape for text in texts])
    model = configured.model_class(config.model)(**arguments).double().eval()
    for parameter in model.parameters():
        # Some begin at zero, and would hide what is wrong before them.
        torch.nn.init.normal_(parameter, std=0.1)
    shape = latent_shape(codec, num_frames, height, width)
    (bucket,) = config.data.sizes
    sounds = None
    if family.audio_vae is not None:
        vocoder = family.vocoder().double()
        sounds = SpectrumVAE(family.audio_vae().double(), lambda: vocoder)
    tokens = one_clip.tokens_per_sample(shape, model)
    rate = family.given.get("frame_rate", family.given.get("fps", 25.0))
    conditioning = configured.conditioning_of(config, codec)
    pictures = None
    if config.image.is_used:
        pictures = build_picture_encoder(config.image, 0, CPU, torch.float64, configured.pictures_of(config))
    around = arguments_of(model), {bucket: shape}, rate, CPU, torch.float64
    of_clips = Encoders(config, recipe, codec, pictures, conditioning, sounds, *around)
    objective = Objective(config, recipe, of_clips, texts, model, model, {bucket: tokens})
    times = recipe.sample_times(STEPS, objective.time_shift(bucket))
    parts = {"vae": codec.model, "transformer": model}
    if sounds is not None:
        parts |= {"audio_vae": sounds.model, "vocoder": vocoder, "connectors": texts[0].connectors}
    for text, number in zip(texts, ("", "_2"), strict=False):
        whole = getattr(text, "whole", text.model)
        parts |= {f"text_encoder{number}": whole, f"tokenizer{number}": text.tokenizer}
    if pictures is not None:
        parts |= {"image_encoder": pictures.model, "feature_extractor": pictures.processor}
    if texts[0].processor is not None:
        parts["image_processor"] = texts[0].processor
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
    if recipe.pipeline == "Cosmos2VideoToWorldPipeline":
        # Or it would leave out the last step, and some noise.
        pipeline.scheduler.register_to_config(final_sigmas_type="zero")
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
        "video_length": size.num_frames,
        "height": size.height,
        "width": size.width,
        "guidance_scale": GUIDANCE,
        "max_sequence_length": made.objective.config.text.length,
    }
    known = inspect.signature(made.pipeline.__call__).parameters
    takes_one = "VACE" in made.objective.recipe.pipeline
    if (made.objective.recipe.packs or takes_one) and len(captions) > 1:
        # It pads the captions of several clips, and sees the padding; VACE's takes one clip.
        rows = [
            by_pipeline(made, noise[row : row + 1], output_type, captions[row : row + 1], **given)
            for row in range(len(captions))
        ]
        return (numpy if isinstance(rows[0], numpy.ndarray) else torch).concatenate(rows)
    # Some ask for it where it is not installed; captions here have nothing to mend.
    vars(sys.modules[type(made.pipeline).__module__]).setdefault("ftfy", SimpleNamespace(fix_text=str))
    answer = made.pipeline(
        prompt=captions[0] if takes_one else captions,
        negative_prompt="" if takes_one else [""] * len(captions),
        num_inference_steps=STEPS,
        output_type=output_type,
        **{name: value for name, value in by_call.items() if name in known}
        | made.given
        # Some write into it.
        | {"latents": in_channels(made, as_given(made, noise)).clone()}
        | given,
    )
    return answer if whole else answer.frames


def moved(made, device):
    """The same, whose model, encoders and decoders lie there."""
    made.pipeline.to(device)
    made.objective.device = made.objective.encoders.device = torch.device(device)
    return made


def answers(made):
    """Of two clips, one with sound: the loss and its gradients, samples of the clips' kind, their frames and sound."""
    objective, size, rng = made.objective, made.bucket, torch.Generator().manual_seed(1)
    shape = 2, size.num_frames, size.height, size.width, 3
    frames = torch.randint(256, shape, dtype=torch.uint8, generator=rng)
    clips, sounds = [Clip("", start, size) for start in range(2)], [None, None]
    latents = [made.shape]
    if objective.encoders.sounds is not None:
        latents.append(objective.encoders.sound_latents(size))
        of_clip = objective.encoders.sounds.shape
        length = of_clip.num_samples(size.num_frames / objective.encoders.frame_rate)
        sounds[0] = torch.rand(of_clip.num_channels, length, generator=rng) - 0.5
    noise = [torch.randn(2, *each, dtype=torch.float64, generator=rng) for each in latents]
    with LiftOperations():
        batch = objective.encoders.encode(Batch(frames, CAPTIONS, [0, 1], ["", ""], clips, sounds))
        parts = list(batch.one_by_one()) if objective.recipe.packs else [batch]
        loss = sum(objective.loss(each) for each in parts)
        gradients = torch.autograd.grad(loss, list(objective.model.parameters()), allow_unused=True)
        with torch.no_grad():
            noise = [each.to(objective.device) for each in noise]
            made_of = sample_latents(objective, noise, CAPTIONS, size, batch.condition)
            decoded = [objective.encoders.codec.decode(made_of[0]).double() / 255]
            if objective.encoders.sounds is not None:
                decoded.append(objective.encoders.sounds.decode(made_of[1])[0].double())
    # Of one length, as some are zero but for rounding: those of keys' biases, where nothing turns or scales the keys.
    gradient = torch.cat([each.flatten() for each in gradients if each is not None])
    return [each.detach().cpu() for each in (loss, gradient, *made_of, *decoded)]


def assert_the_answers_of_the_host(made, device):
    expected, found = answers(made), answers(moved(made, device))
    errors = [float((there - here).norm() / here.norm()) for here, there in zip(expected, found, strict=True)]
    num_rounded = 1 + (made.objective.encoders.sounds is not None)
    # Pixels and samples are computed and rounded in fp32.
    assert max(errors[:-num_rounded]) < 1e-6 and max(errors[-num_rounded:]) < 1e-2, errors
