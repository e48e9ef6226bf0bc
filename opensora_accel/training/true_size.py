"""A configured run at its true size, for tools that trace its step on tensors without values: nothing is computed.

What a batch gives the model is made of shapes alone: those of a clip's latents, of its caption's states, and of what
else the run's model gets. No file of clips is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from opensora_accel.fsdp import set_last_microbatch
from opensora_accel.observe import Run
from opensora_accel.plan import Plan
from opensora_accel.training import build, configured, one_clip
from opensora_accel.training.beside import largest_reference
from opensora_accel.training.captions import TextShape
from opensora_accel.training.classes import make
from opensora_accel.training.codec import LatentFrames, build_codec, latent_shape
from opensora_accel.training.conditions import Condition
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.flow import Stream, flow_loss
from opensora_accel.training.recipes import Inputs
from opensora_accel.training.text_encoders import text_shapes
from shardformer import parallelize
from shardformer.engine import weight_dtype


@dataclass(frozen=True)
class TrueSize:
    """The configured transformer and its step at their true sizes, for `record_step`: nothing is computed."""

    config: TrainConfig
    plan: Plan
    # Arguments of the transformer.
    arguments: dict[str, Any]
    # [C, t, h, w] of a clip.
    latents: tuple[int, int, int, int]
    # Of the shapes of what one clip's model gets of frames that are given, or of references in their own shapes.
    condition: Condition | None
    # Pixels along each side of a latent position, and frames per latent frame.
    spatial: int
    latent_frames: LatentFrames
    # Clips of all data ranks together.
    batch_size: int
    texts: Sequence[TextShape]
    # Latents [1, C, L, M] of its sound, where the model makes sound.
    sound: torch.Tensor | None
    # The most states that frames which are given, or those references, have among those of a caption.
    picture_tokens: int

    @classmethod
    def of(cls, config: TrainConfig) -> TrueSize:
        """With the sizes of the VAE that the run names; none of its weights is read. Of references in their own shapes
        headers are, and each counts as the largest."""
        codec = build_codec(config.codec, torch.device("meta"), torch.float32)
        # With buckets, of the one that takes the most memory.
        largest = max(config.data.sizes, key=lambda size: size.num_frames * size.height * size.width)
        latents = latent_shape(codec, largest.num_frames, largest.height, largest.width)
        latents = one_clip.with_references(latents, config)
        texts = text_shapes(config.text, configured.texts_of(config))
        arguments = configured.model_arguments(config, codec, texts)
        references = list[tuple[int, int]]()
        if config.data.reference_side:
            size = largest_reference(config.data, one_clip.reference_unit(config))
            references = [size] * config.data.num_references
        condition = one_clip.condition_of_one(config, codec, latents, references)
        batch_size = largest.batch_size or config.data.batch_size
        plan = config.plans.get(largest, config.plan)
        compression = codec.spatial, codec.latent_frames
        sound = one_clip.sound_of_one(config, largest.num_frames)
        more = one_clip.picture_tokens_of(config, largest.height, largest.width, references)
        return cls(config, plan, arguments, latents, condition, *compression, batch_size, texts, sound, more)

    def model(self) -> nn.Module:
        model: nn.Module = make(configured.model_class(self.config.model), self.arguments)
        if self.config.lora.is_used:
            build.adapt(model, self.config)
        configured.recipe_of(self.config.model).prepare(model)
        return model

    def inputs(self, batch: int, dtype: torch.dtype = torch.float32) -> Inputs:
        """What the model is called with for so many clips; drawn at random."""
        condition = self.condition
        if condition is not None:
            pictures, given, marks = condition.pictures, condition.given, condition.marks
            condition = condition._replace(
                latents=torch.randn(batch, *condition.latents.shape[1:], dtype=dtype),
                given=None if given is None else given.expand(batch, -1),
                pictures=None if pictures is None else torch.ones(batch, *pictures.shape[1:], dtype=dtype),
                marks=None if marks is None else torch.zeros(batch, *marks.shape[1:], dtype=dtype),
                ends=None if condition.ends is None else condition.ends * batch,
                references=None
                if condition.references is None
                else [[torch.randn_like(each, dtype=dtype) for each in condition.references[0]]] * batch,
            )
        sound = None if self.sound is None else torch.randn(batch, *self.sound.shape[1:], dtype=dtype)
        texts = one_clip.with_pictures(self.texts, self.picture_tokens)
        return Inputs(
            latents=torch.randn(batch, *self.latents, dtype=dtype),
            timestep=self.times(batch),
            texts=[torch.randn(batch, *each, dtype=dtype) for each in texts],
            text_masks=[torch.ones(batch, each.length, dtype=torch.bool) for each in texts],
            condition=condition,
            spatial=self.spatial,
            latent_frames=self.latent_frames,
            config=configured.all_arguments(self.config.model) | self.arguments,
            sound=sound,
            num_tokens=[[each.length] * batch for each in texts],
        )

    def times(self, batch: int) -> torch.Tensor:
        """Times of so many clips, [B], or [B, t] of latent frames; drawn at random."""
        return torch.rand(batch, self.latents[1]) if self.config.flow.is_forced else torch.rand(batch)

    def step(self, model: nn.Module, run: Run) -> None:
        """Forward and backward of one batch, as the trainer has them."""
        self.prepare(model, run)(True)

    def prepare(self, model: nn.Module, run: Run, batch: int | None = None) -> Callable[[bool], None]:
        """Applies the run's plan; returns what runs forward and backward of one batch.

        Its argument says whether the batch is the last one of a step.

        Args:
            batch: how many clips a data rank has; None is its share of the configured ones.
        """
        from opensora_accel.parallel_states import init_parallel

        # On fake tensors: the world of the plan is simulated in this process.
        init_parallel(run.plan, "cpu")
        model, forward = parallelize(model, run.plan, torch.device("cpu"))
        batch = batch or max(1, self.batch_size // run.data_size)
        recipe = configured.recipe_of(self.config.model)
        # What takes a clip a call has a backward of each.
        num_passes, batch = (batch, 1) if recipe.packs else (1, batch)
        drawn = self.inputs(batch, weight_dtype(run.plan))

        def predict(noisy: list[torch.Tensor], timestep: torch.Tensor) -> list[torch.Tensor]:
            """noisy [B, ...] of each stream and timestep [B], or [B, t], → their velocities."""
            sound = noisy[1] if len(noisy) == 2 else None
            inputs = dataclasses.replace(drawn, latents=noisy[0], timestep=timestep, sound=sound)
            return recipe.predict(forward, inputs)

        def all_clips(is_last: bool) -> None:
            for number in range(num_passes):
                one_pass(is_last and number == num_passes - 1)

        def one_pass(is_last: bool) -> None:
            is_ddp = isinstance(forward, nn.parallel.DistributedDataParallel)
            set_last_microbatch(model, is_last)
            with nullcontext() if is_last or not is_ddp else cast(Any, forward).no_sync():
                clean = [drawn.latents, *([] if drawn.sound is None else [drawn.sound])]
                streams = [Stream(each, torch.randn_like(each)) for each in clean]
                flow_loss(predict, streams, self.times(batch)).backward()

        return all_clips
