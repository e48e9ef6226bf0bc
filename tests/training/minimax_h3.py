"""MiniMax H3's pipeline in diffusers with tiny parts, and the trainer's objective of the same weights, in fp64."""

import copy
import dataclasses
import json
from types import SimpleNamespace

import torch
from diffusers import MiniMaxH3Blocks, MiniMaxH3Scheduler

from opensora_accel.training import configured, one_clip
from opensora_accel.training.captions import VISION_TOKENS, TextEncoder
from opensora_accel.training.classes import arguments_of
from opensora_accel.training.codec import VideoVAE, latent_shape
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.encoding import Encoders
from opensora_accel.training.flow import shifted
from opensora_accel.training.objective import Objective
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.sections import TextConfig
from opensora_accel.training.sound import WaveVAE
from opensora_accel.training.text_encoders import build_text_encoder
from opensora_accel.training.tiny_run import write_clips
from tests.training.language import qwen3, qwen_frames
from tests.training.vaes import minimax_h3_audio_vae, minimax_h3_vae

CPU = torch.device("cpu")
NAME = "MiniMaxH3Transformer3DModel"
RECIPE = RECIPES[NAME]
CAPTIONS = ["a rabbit looks up at the sky", "two birds"]
STEPS = 4
# Of 22 frames: 7 latent frames, and 37 positions of sound.
SIZE = (22, 32, 48)
CHANGES = {"model.class_name": NAME, "model.config": dict(RECIPE.tiny), "data.frame_rate": 12.0}
MESHES = [{"ulysses": 3}, {"ring": 2}, {"dp_replicate": 2}, {"dp_shard": 2, "sharding": "zero3"}]


class Processor:
    """What the pipeline asks which tokens are of frames, and how these are prepared."""

    image_processor = qwen_frames()

    def __init__(self, tokenizer):
        self.of_frame = tokenizer.convert_tokens_to_ids(VISION_TOKENS[1])

    def create_mm_token_type_ids(self, ids):
        return [[int(number == self.of_frame) for number in each] for each in ids]


def exact(times, shift):
    """Its scheduler, held against our times, and given them: its own are rounded to fp32."""

    class Exact(MiniMaxH3Scheduler):
        def set_timesteps(self, *args, **kwargs):
            super().set_timesteps(*args, **kwargs)
            torch.testing.assert_close(self.sigmas.double(), times, atol=1e-6, rtol=0)
            self.sigmas, self.timesteps = times, 1 - times[:-1]

    return Exact(shift=shift)


def make_parts():
    """What a pipeline has around the model, in fp64, whose captions have more layers than are looked at."""
    torch.manual_seed(0)
    reader, whole = qwen3(RECIPE.text[0], 12, [*CAPTIONS, "gradient of colour number 0 1 2 3 4"])
    return SimpleNamespace(
        reader=reader,
        whole=whole,
        vae=minimax_h3_vae().double().eval(),
        audio_vae=minimax_h3_audio_vae().double().eval(),
    )


def setting(parts, reader, **changes):
    """The objective of the trainer, and the pipeline of diffusers, of the same weights in fp64."""
    num_frames, height, width = SIZE
    config = config_from_dict(
        {
            "data": {"num_frames": num_frames, "height": height, "width": width},
            "model": {"class_name": NAME, "config": dict(RECIPE.tiny)},
            "text": {"length": 12, "width": 32},
            "flow": {"shift": 12.0, "sample_steps": STEPS},
            **changes,
        },
        "the test",
    )
    codec, sounds = VideoVAE(parts.vae), WaveVAE(parts.audio_vae)
    arguments = RECIPE.tiny | {"in_channels": 4, "audio_in_channels": 4, "text_dim": 32}
    torch.manual_seed(0)
    model = configured.model_class(config.model)(**arguments).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    shape, (bucket,) = latent_shape(codec, *SIZE), config.data.sizes
    around = arguments_of(model), {bucket: shape}, 24.0, CPU, torch.float64
    conditioning = configured.conditioning_of(config, codec)
    encoders = Encoders(config, RECIPE, codec, None, conditioning, sounds, *around)
    tokens = {bucket: one_clip.tokens_per_sample(shape, model)}
    objective = Objective(config, RECIPE, encoders, [reader], model, model, tokens)
    times = RECIPE.sample_times(STEPS, 12.0)
    pipeline = MiniMaxH3Blocks().init_pipeline()
    pipeline.update_components(
        vae=parts.vae,
        audio_vae=parts.audio_vae,
        transformer=model,
        text_encoder=parts.whole,
        tokenizer=parts.reader.tokenizer,
        processor=Processor(parts.reader.tokenizer),
        scheduler=exact(times, 12.0),
        audio_scheduler=exact(shifted(times, 3 / 12), 3.0),
    )
    pipeline.set_progress_bar_config(disable=True)
    return SimpleNamespace(objective=objective, pipeline=pipeline, bucket=bucket, shape=shape)


def seeing_setting(parts, **changes):
    """The same of a run whose encoder of captions sees frames or references."""
    sees = TextEncoder(parts.reader.tokenizer, parts.whole.model, 12, RECIPE.text[0], processor=qwen_frames())
    return setting(parts, sees, text={"length": 12, "width": 32, "cache": False}, **changes)


def noise_of(made, num_samples):
    rng = torch.Generator().manual_seed(1)
    shapes = made.shape, made.objective.encoders.sound_latents(made.bucket)
    return [torch.randn(num_samples, *shape, dtype=torch.float64, generator=rng) for shape in shapes]


def write_captioned(folder, **options):
    """Five that hum, with captions of different lengths, of which one says nothing."""
    folder = write_clips(folder, num_frames=24, with_sound=True, **options)
    lines = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["caption"] = " ".join(line["caption"].split()[:number])
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def folder_of(parts, folder, model):
    """A pipeline's folder, as it is published: an index of blocks, and each part in a folder of its own."""
    for name, part in {
        "vae": parts.vae,
        "audio_vae": parts.audio_vae,
        "text_encoder": parts.whole,
        "transformer": model,
    }.items():
        copy.deepcopy(part).float().save_pretrained(folder / name)
    parts.reader.tokenizer.save_pretrained(folder / "tokenizer")
    for name, shift in (("scheduler", 12.0), ("audio_scheduler", 3.0)):
        MiniMaxH3Scheduler(shift=shift).save_pretrained(folder / name)
    (folder / "modular_model_index.json").write_text('{"_class_name": "MiniMaxH3ModularPipeline"}')
    return folder


def seeing(parts, folder):
    """Options of an encoder that sees frames, with what prepares them beside it, and the encoder."""
    qwen_frames().save_pretrained(folder / "processor")
    config = TextConfig(path=str(folder / "text_encoder"), dtype="fp32", length=12, cache=False)
    return config, build_text_encoder(config, "", 0, CPU, torch.float32, RECIPE.text)


def replaced(config, **changes):
    """With values by their full names."""
    for name, value in changes.items():
        table, _, key = name.rpartition(".")
        if table:
            section = dataclasses.replace(getattr(config, table), **{key: value})
            config = dataclasses.replace(config, **{table: section})
        else:
            config = dataclasses.replace(config, **{key: value})
    return config
