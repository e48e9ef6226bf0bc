"""A configured run made tiny, for the verifier: the trainer's own step, from the clips to the optimizer.

What is proven must be what runs. So the verifier is not given a copy of the loop: it is given the Trainer itself, with
a config in which all that is large is small (2 layers, 3 heads, clips of 5 × 24 × 40 pixels) and all that decides
about gradients is the user's (plan, model class, accumulation, flow matching). For the list of what the run will send,
the configured model is traced at its true size, without memory (`TrueSize`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from opensora_accel.communications import gather_objects
from opensora_accel.plan import Plan
from opensora_accel.training import build, configured
from opensora_accel.training.captions import TextShape
from opensora_accel.training.classes import is_path, parameters_of
from opensora_accel.training.codec import build_codec
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.encoding import Encoded
from opensora_accel.training.recipes import Sizes
from opensora_accel.training.sections import (
    CodecConfig,
    ConditionsConfig,
    DataConfig,
    ImageConfig,
    ModelConfig,
    TextConfig,
    ValidationConfig,
)
from opensora_accel.training.true_size import TrueRow, TrueSize, true_sizes
from opensora_accel.verify import Proof, Run, meshes_of
from opensora_accel.wrapping import replaced

# Of the small codec: pixels a side of a latent position.
_PATCH = 4
# Sizes of clips that share rows: files of 12 and of 6 frames have one each.
_ROW_BUCKETS = ("9x24x40", "5x24x40")
# Where references lie in the folder of generated clips, and their shorter side where they keep their shape.
_REFERENCES, _SIDE = "references", 16


def proof_of(config: TrainConfig, folder: Path, max_ranks: int) -> Proof:
    """What `opensora-accel verify` proves of a run, whose clips are written to `folder`.

    Raises:
        ValueError, OSError: the run cannot be built, as the trainer would say it.
    """
    # Two experts go the same way, one after the other: what holds for one at its times holds for the other.
    config = config.experts[0]
    with_sound = configured.recipe_of(config.model).makes_sound
    clips = write_clips(
        folder / "clips",
        with_sound=with_sound,
        of_lengths=True,
        of_sizes=bool(config.data.packed_tokens),
        num_references=config.data.references_of_each,
    )
    tiny = tiny_config(config, clips)
    true = TrueRow.of(config) if config.data.packed_tokens else TrueSize.of(config)
    return Proof(
        step=TrainerStep(tiny),
        model_fn=None,
        meshes=proof_meshes(config, max_ranks),
        reference="whole",
        preload=("diffusers.models.transformers", "opensora_accel.training.loop"),
        world=true.plan if true.plan.world_size > 1 else None,
        true_step=true.step,
        true_model_fn=true.model,
    )


def tiny_config(config: TrainConfig, folder: Path) -> TrainConfig:
    """The run on generated clips in `folder`, with a tiny model of the same class: 75 tokens, 3 heads.

    What is kept: model class and its options, flow matching, caption drop, accumulation, the optimizer. Gradients are
    not clipped: clipping to one norm would hide a factor on all of them. VAE and text encoder are small stand-ins:
    neither is trained.
    """
    arguments = configured.given_arguments(config.model)
    is_causal = max(config.flow.causal_block_size, configured.causal_block_size(arguments)) > 1
    data = dataclasses.replace(
        config.data,
        folder=str(folder),
        folders={},
        regularisation=(),
        # Clips are their own here, of the same frames.
        masks=str(folder) if config.data.masks else "",
        controls=str(folder) if config.data.controls else "",
        references=str(folder / _REFERENCES) if config.data.references else "",
        reference_side=_SIDE if config.data.reference_side else 0,
        # Three causal blocks where there are any.
        num_frames=6 if is_causal else 5,
        frame_stride=1,
        height=24,
        width=40,
        buckets=(),
        packed_tokens=0,
        batch_size=4,
        num_workers=0,
        frame_rate=0.0,
    )
    # Moments in fp32, because what is proven runs in fp64; gradients do not depend on them.
    optim = dataclasses.replace(
        config.optim, clip_norm=0.0, state="fp32", accumulation=min(2, config.optim.accumulation)
    )
    saved = build.saved_adapter(config)
    # Of 5 frames, what is given of longer clips is the first or the last.
    given = config.conditions
    conditions = ConditionsConfig(
        t2v=given.t2v,
        i2v_head=given.i2v_head + given.v2v_head + given.v2v_head_easy,
        i2v_tail=given.i2v_tail + given.v2v_tail + given.v2v_tail_easy,
        i2v_loop=given.i2v_loop,
        learn_given=given.learn_given,
    )
    conditioning = None
    if given.are_used or configured.recipe_of(config.model).follows_controls:
        sizes = build_codec(config.codec, torch.device("meta"), torch.float32)
        conditioning = configured.conditioning_of(config, sizes)
    tiny = dataclasses.replace(
        config,
        output=str(folder / "run"),
        steps=1,
        num_samples=0,
        sample_captions=(),
        sample_every=0,
        memory_target_gib=0.0,
        cache_folder="",
        resume="",
        data=data,
        model=_tiny_model(config.model, conditioning, is_causal),
        codec=CodecConfig(patch=_PATCH),
        # As wide as LTX-2.3 attends to, whose states are projected to no other width.
        text=TextConfig(
            length=512 if config.image.is_used else 8,
            width=36 if configured.recipe_of(config.model).makes_sound else 32,
            # What frames it has seen is not known beforehand.
            cache=not configured.texts_of(config)[0].picture,
        ),
        image=ImageConfig(width=16 if config.image.is_used else 0),
        conditions=conditions,
        # Of samples nothing is proven.
        flow=dataclasses.replace(
            config.flow, causal_block_size=0, addnoise_condition=0.0, sample_frames=0, overlap_history=0
        ),
        optim=optim,
        bucket_plans={},
        validation=ValidationConfig(),
        lora=config.lora
        if saved is None
        else dataclasses.replace(saved.config_by_ends, base=config.lora.base),
    )
    return _in_rows(tiny) if config.data.packed_tokens else tiny


def _in_rows(tiny: TrainConfig) -> TrainConfig:
    """With clips of unlike lengths: a row has room for one of each size, and half of the largest one more."""
    # Sizes are said by the buckets alone.
    left_out = {"num_frames", "height", "width"}
    fields = dataclasses.fields(DataConfig)
    default: dict[str, Any] = {each.name: each.default for each in fields if each.name in left_out}
    tiny = dataclasses.replace(tiny, data=dataclasses.replace(tiny.data, buckets=_ROW_BUCKETS, **default))
    sizes = list(true_sizes(tiny).values())
    with torch.device("meta"):
        outline = sizes[0].model()
    tokens = [size.tokens_of_clip(outline) for size in sizes]
    data = dataclasses.replace(tiny.data, packed_tokens=sum(tokens) + max(tokens) // 2)
    return dataclasses.replace(tiny, data=data)


def _tiny_model(config: ModelConfig, conditioning: Conditioning | None, is_causal: bool) -> ModelConfig:
    cls, recipe = configured.model_class(config), configured.recipe_of(config)
    known = parameters_of(cls)
    # Those that follow from codec and text encoder follow here from the small ones.
    texts = [TextShape(1, 1)] * len(recipe.text)
    of_sound = None if recipe.sound is None else recipe.sound.folded
    sizes = Sizes(1, 1, texts, 1, 1, 1, of_sound, configured.all_arguments(config))
    derived = {*recipe.derive(sizes), "pos_embed_seq_len"}
    given = configured.given_arguments(config)
    arguments = {name: value for name, value in given.items() if name not in derived}
    arguments |= {name: value for name, value in recipe.tiny.items() if name in known and name not in derived}
    if conditioning is not None and "in_channels" in known and len(recipe.frames) > 1:
        # By its channels a model says in which of several ways it takes frames.
        channels = 3 * _PATCH**2
        arguments["in_channels"] = channels + conditioning.num_channels(channels, 1)
    if is_causal:
        arguments["num_frame_per_block"] = 2
    if given.get("use_learned_positional_embeddings"):
        # It takes clips of one size.
        arguments |= {"sample_frames": 5, "sample_height": 24 // _PATCH, "sample_width": 40 // _PATCH}
    name = config.class_name if is_path(config.class_name) else cls.__name__
    return ModelConfig(class_name=name, config=arguments)


@dataclass(frozen=True)
class TrainerStep:
    """`step(run)` for `verify(..., model_fn=None, reference="whole")`: one optimizer step of the real trainer."""

    config: TrainConfig

    def __call__(self, run: Run) -> dict[str, float]:
        """Loss and gradient norm, as the trainer reports them."""
        from opensora_accel.training.loop import Trainer

        trainer = Trainer(dataclasses.replace(self.config, plan=run.plan.replace(precision="fp64")))
        objective = trainer.objective

        def apart(row: Sequence[Encoded]) -> torch.Tensor:
            return torch.stack([objective.loss(sample) for sample in row]).sum()

        # One device calls the model for each clip of a row by itself. So what a row mixes up is found too.
        of_row = apart if run.is_reference else objective.loss_of_row
        run.watch(trainer.state.model)
        with replaced(objective, "loss_of_row", of_row):
            metrics = trainer.step()
        assert metrics is not None, "nobody interrupts it"
        return compared_between_ranks(metrics)


def compared_between_ranks(metrics: Mapping[str, float]) -> dict[str, float]:
    """Loss and gradient norm, which the trainer reports for all ranks, and how far apart the ranks are in them (0).

    Communication: one object all-gather.
    """
    numbers = {name: metrics[name] for name in ("loss", "grad_norm")}
    everyone = gather_objects(numbers)
    for name, value in list(numbers.items()):
        values = [each[name] for each in everyone]
        apart = max(values) - min(values)
        numbers[f"difference of {name} between ranks"] = apart if apart > 1e-9 * abs(value) else 0.0
    return numbers


def proof_meshes(config: TrainConfig, max_ranks: int) -> list[Plan]:
    """Small meshes of the run's plan, and of each that a bucket has, in fp64."""
    plans = [config.plan, *config.plans.values()]
    meshes = [mesh for plan in plans for mesh in meshes_of(plan.replace(precision="fp64"), max_ranks)]
    return list(dict.fromkeys(meshes))


def write_clips(
    folder: Path,
    num_videos: int = 5,
    num_frames: int = 12,
    *,
    with_sound: bool = False,
    of_lengths: bool = False,
    of_sizes: bool = False,
    num_references: int = 0,
) -> Path:
    """A folder of moving gradients, each of another colour, with captions; small enough that decoding is nothing.

    With sound each hums another tone. With `of_lengths` the captions are of different lengths, with `of_sizes` every
    second clip has half of the frames. References are pictures of other shapes, in the folder references in it.
    """
    from opensora_accel.training.samples import write_video

    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for number in range(num_videos):
        length = num_frames // 2 if of_sizes and number % 2 else num_frames
        ramp = torch.arange(40).view(1, 1, 40, 1) * 4 + torch.arange(length).view(-1, 1, 1, 1) * 3
        tint = torch.tensor([number * 40, 120, 200 - number * 40])
        frames = ((ramp + tint) % 256).expand(length, 24, 40, 3).to(torch.uint8)
        seconds = torch.arange(8000 * length // 12) / 8000
        hum = (0.3 * torch.sin(2 * torch.pi * 110 * (1 + number) * seconds))[None], 8000
        write_video(folder / f"{number}.mp4", frames, 12, hum if with_sound else None)
        words = f"a gradient of colour number {number}".split()
        caption = " ".join(words[number % 3 :] if of_lengths else words)
        for reference in range(num_references):
            (folder / _REFERENCES).mkdir(exist_ok=True)
            shape = 24 + 8 * reference, 32, 3
            shades = (torch.arange(math.prod(shape)).view(shape) * (number + 1) + 50 * reference) % 256
            ending = f".{reference}" if num_references > 1 else ""
            picture = Image.fromarray(shades.to(torch.uint8).numpy())
            picture.save(folder / _REFERENCES / f"{number}{ending}.png")
        lines.append(json.dumps({"file": f"{number}.mp4", "caption": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
