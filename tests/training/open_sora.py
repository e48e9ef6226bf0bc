"""Open-Sora's own sampling and losses, as plain loops on one device, and the trainer's objective of the same weights.

Source: hpcaitech/Open-Sora, opensora/utils/sampling.py and train.py, scripts/diffusion/train.py and
opensora/models/text/conditioner.py (main); of 1.2 opensora/schedulers/rf and opensora/models/text_encoder/t5.py.
"""

import functools
import itertools
from types import SimpleNamespace

import torch

from opensora_accel.training import configured, one_clip
from opensora_accel.training.classes import arguments_of, make
from opensora_accel.training.codec import VideoVAE, latent_shape
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.encoding import Encoders
from opensora_accel.training.objective import Objective
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.text_encoders import build_text_encoder, train_tokenizer
from tests.training.language import clip
from tests.training.pipelines import CAPTIONS, CPU
from tests.training.vaes import hunyuan_video_vae, picture_vae

# Stand-ins for the authors' classes.
MMDIT = "tests.opensora_models.mmdit:MMDiTModel"
STDIT3 = "tests.opensora_models.stdit3:STDiT3"
CLASSES = {"MMDiTModel": MMDIT, "STDiT3": STDIT3}


def MMDiTModel():
    """Has the name of a class, and is none."""


STEPS, GUIDANCE, OF_FRAMES = 4, 7.5, 3.0


@functools.cache
def encoders(name):
    """A small T5, and of an MMDiT a small CLIP, in fp64."""
    torch.manual_seed(0)
    config = config_from_dict({"text": {"length": 8, "width": 32}}, "the test").text
    taken = RECIPES[name].text
    t5 = build_text_encoder(config, train_tokenizer(CAPTIONS), 0, CPU, torch.float64, taken)
    return [t5, *(clip(each, t5.tokenizer) for each in taken[1:])]


def setting(size=(13, 32, 48), name="MMDiTModel", **changes):
    """The trainer's objective of a tiny model, in fp64, for clips of `size`."""
    torch.manual_seed(0)
    codec = VideoVAE((hunyuan_video_vae if name == "MMDiTModel" else picture_vae)().double())
    values = {
        "data": dict(zip(("num_frames", "height", "width"), size, strict=True)),
        "model": {"class_name": CLASSES[name], "config": dict(RECIPES[name].tiny)},
        "text": {"length": 8, "width": 32, "cache": False},
        "flow": {"guidance": GUIDANCE, "sample_steps": STEPS},
        "conditions": {"i2v_head": 1.0},
    }
    if name == "MMDiTModel":
        values["flow"]["frame_guidance"] = OF_FRAMES
    for table, value in changes.items():
        values[table] = {**values.get(table, {}), **value}
    config, texts = config_from_dict(values, "the test"), encoders(name)
    arguments = configured.model_arguments(config, codec, [text.shape for text in texts])
    model = make(configured.model_class(config.model), arguments).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    shape = latent_shape(codec, *size)
    (bucket,) = config.data.sizes
    around = arguments_of(model), {bucket: shape}, 24.0, CPU, torch.float64
    recipe, conditioning = configured.recipe_of(config.model), configured.conditioning_of(config, codec)
    of_clips = Encoders(config, recipe, codec, None, conditioning, None, *around)
    tokens = {bucket: one_clip.tokens_per_sample(shape, model)}
    objective = Objective(config, recipe, of_clips, texts, model, model, tokens)
    return SimpleNamespace(objective=objective, model=model, vae=codec.model, bucket=bucket, shape=shape)


def packed(x):
    """[B, C, T, 2H, 2W] → [B, T·H·W, 4C]."""
    return x.unfold(3, 2, 2).unfold(4, 2, 2).permute(0, 2, 3, 4, 1, 5, 6).flatten(4).flatten(1, 3)


def unpacked(tokens, shape):
    """[B, T·H·W, 4C] → [B, C, T, 2H, 2W] of this `shape` [C, T, 2H, 2W]."""
    channels, frames, height, width = shape
    patches = tokens.unflatten(1, (frames, height // 2, width // 2)).unflatten(4, (channels, 2, 2))
    return patches.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)


def states_of(texts, prompts):
    """Every token of T5, padding among them, which it attends to; and CLIP's pooled state."""
    found = []
    for text, key in zip(texts, ("last_hidden_state", "pooler_output"), strict=True):
        tokens = text.tokenizer(
            prompts,
            truncation=True,
            max_length=text.shape.length if key == "last_hidden_state" else 77,
            padding="max_length",
            return_tensors="pt",
        )
        found.append(text.model(input_ids=tokens["input_ids"], attention_mask=None)[key])
    return found


def inputs_of(made, prompts, pooled_of=None):
    """What the model gets beside a clip: places, states of text."""
    _, frames, height, width = made.shape
    places = [[t, h, w] for t in range(frames) for h in range(height // 2) for w in range(width // 2)]
    txt, _ = states_of(made.objective.texts, prompts)
    _, vec = states_of(made.objective.texts, pooled_of or prompts)
    return {
        "img_ids": torch.tensor(places, dtype=torch.float64).repeat(len(prompts), 1, 1),
        "txt": txt,
        "txt_ids": torch.zeros(len(prompts), txt.size(1), 3, dtype=torch.float64),
        "y_vec": vec,
    }


def encoded(vae, frames):
    """uint8 [B, (T,) H, W, 3] → latents, scaled."""
    with torch.no_grad():
        pixels = frames.movedim(-1, 1).double() / 127.5 - 1
        return vae.encode(pixels).latent_dist.mode() * vae.config.scaling_factor


def condition_of(made, frames, kinds, lengths):
    """Of each clip the mask, and the latents of the frames that are given, which are encoded alone: [B, 1 + C, …].

    Args:
        lengths: how many frames those that go on with a clip, or lead to one, are given.
    """
    masks = torch.zeros(len(kinds), 1, *made.shape[1:], dtype=torch.float64)
    latents = torch.zeros(len(kinds), *made.shape, dtype=torch.float64)
    for i, kind in enumerate(kinds):
        for end in ("head", "tail"):
            if not (kind.endswith(end) or kind == "i2v_loop"):
                continue
            count = lengths if kind.startswith("v2v") else 1
            num_latents = (count - 1) // 4 + 1
            given, of_frames = (
                (slice(0, num_latents), slice(0, count))
                if end == "head"
                else (slice(-num_latents, None), slice(-count, None))
            )
            masks[i, :, given] = 1
            latents[i, :, given] = encoded(made.vae, frames[i : i + 1, of_frames])[0]
    return torch.cat([masks, masks * latents], dim=1)


def shift_of(made):
    _, frames, height, width = made.shape
    slope = (3 - 1) / (4096 - 256)
    return (slope * (height * width // 4) + 1 - slope * 256) * frames**0.5


@torch.no_grad()
def sampled(made, noise, prompts, condition, guidance=GUIDANCE, of_frames=OF_FRAMES):
    """Latents by three answers a step: with caption and frames, with frames, with neither."""
    count, alpha = len(prompts), shift_of(made)
    times = torch.linspace(1, 0, STEPS + 1, dtype=torch.float64)
    times = alpha * times / (1 + (alpha - 1) * times)
    inputs = inputs_of(made, [*prompts, *[""] * (2 * count)])
    cond = packed(condition)
    img = packed(noise)
    for now, then in itertools.pairwise(times):
        answer = made.model(
            img=torch.cat([img] * 3),
            **inputs,
            cond=torch.cat([cond, cond, torch.zeros_like(cond)]),
            timesteps=now.repeat(3 * count),
            guidance=torch.full((3 * count,), guidance, dtype=torch.float64),
        )
        whole, without_text, without_all = answer.chunk(3)
        step = without_all + of_frames * (without_text - without_all) + guidance * (whole - without_text)
        img = img + (then - now) * step
    return unpacked(img, made.shape)


def loss_of(made, clean, noise, times, prompts, pooled_of, condition, sigma_min=1e-5):
    """The mean squared error of the velocity, in packed latents; a model that is told is told 4."""
    x_0, x_1, t_rev = packed(clean), packed(noise), (1 - times)[:, None, None]
    x_t = t_rev * x_0 + (1 - (1 - sigma_min) * t_rev) * x_1
    answer = made.model(
        img=x_t,
        **inputs_of(made, prompts, pooled_of),
        cond=packed(condition),
        timesteps=times,
        guidance=torch.full((len(prompts),), 4.0, dtype=torch.float64),
    )
    return torch.nn.functional.mse_loss(answer, (1 - sigma_min) * x_1 - x_0)


# 1.2


def text_of_1_2(made, prompts):
    """States of T5, which leaves padding out, and where there are any."""
    (text,) = made.objective.texts
    tokens = text.tokenizer(
        prompts, max_length=text.shape.length, padding="max_length", truncation=True, return_tensors="pt"
    )
    mask = tokens["attention_mask"]
    states = text.model(input_ids=tokens["input_ids"], attention_mask=mask)["last_hidden_state"]
    return states[:, None], mask


def sizes_of(made, count):
    """What it is told of clips: frames a second, and pixels; an image has 120."""
    fps = made.objective.encoders.frame_rate if made.bucket.num_frames > 1 else 120.0
    numbers = {"fps": fps, "height": made.bucket.height, "width": made.bucket.width}
    return {
        name: torch.full((count,), float(number), dtype=torch.float64) for name, number in numbers.items()
    }


def transformed(made, timesteps):
    """Timesteps in 0…1000, moved towards noise by the root of pixels and that of latent frames."""
    t = timesteps / 1000
    ratio = (made.bucket.height * made.bucket.width / 512**2) ** 0.5 * made.shape[1] ** 0.5
    return 1000 * ratio * t / (1 + (ratio - 1) * t)


@torch.no_grad()
def sampled_1_2(made, noise, prompts, x_mask=None, given=None):
    """Latents by two answers a step; frames that are given, where `x_mask` [B, T] is not set, stay as they are."""
    count = len(prompts)
    y, mask = text_of_1_2(made, prompts)
    y = torch.cat([y, made.model.y_embedder.y_embedding[None, None].repeat(count, 1, 1, 1)])
    more = sizes_of(made, 2 * count) | ({} if x_mask is None else {"x_mask": x_mask.repeat(2, 1)})
    z = noise if x_mask is None else torch.where(x_mask[:, None, :, None, None], noise, given)
    steps = torch.tensor([(1 - i / STEPS) * 1000 for i in range(STEPS)], dtype=torch.float64)
    timesteps = [*transformed(made, steps), torch.zeros(())]
    for now, then in itertools.pairwise(timesteps):
        before = z
        answer = made.model(torch.cat([z, z]), now.repeat(2 * count), y=y, mask=mask, **more)
        with_text, without = answer.chunk(2, dim=1)[0].chunk(2)
        z = z + (without + GUIDANCE * (with_text - without)) * (now - then) / 1000
        if x_mask is not None:
            z = torch.where(x_mask[:, None, :, None, None], z, before)
    return z


def loss_of_1_2(made, clean, noise, times, prompts, is_dropped, x_mask):
    """The mean of each clip over the frames that are not given, then of clips."""
    y, mask = text_of_1_2(made, prompts)
    y = torch.where(is_dropped[:, None, None, None], made.model.y_embedder.y_embedding, y)
    t = (1 - times)[:, None, None, None, None]
    noisy = torch.where(x_mask[:, None, :, None, None], t * clean + (1 - t) * noise, clean)
    answer = made.model(noisy, times * 1000, y=y, mask=mask, x_mask=x_mask, **sizes_of(made, len(prompts)))
    errors = (answer.chunk(2, dim=1)[0] - (clean - noise)).square().transpose(1, 2).flatten(2)
    learned = (errors * x_mask[:, :, None]).sum((1, 2)) / (x_mask.sum(1) * errors.size(2))
    return learned.mean()
