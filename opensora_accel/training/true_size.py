"""A configured run at its true size, for tools that trace its step on tensors without values: nothing is computed.

What a batch gives the model is made of shapes alone: those of a clip's latents, of its caption's states, and of what
else the run's model gets. No file of clips is read.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
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
from opensora_accel.training.buckets import Bucket
from opensora_accel.training.captions import TextShape
from opensora_accel.training.classes import arguments_of, make
from opensora_accel.training.codec import LatentFrames, build_codec, latent_shape
from opensora_accel.training.conditions import Condition
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.flow import TIMESTEPS, Stream, flow_loss
from opensora_accel.training.recipes import Inputs, check_rows
from opensora_accel.training.rows import check_room, fullest_row
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

    def tokens_of_clip(self, outline: nn.Module) -> int:
        """How many tokens the model makes of a clip."""
        return one_clip.tokens_per_sample(self.latents, outline)

    def tokens_of_references(self, outline: nn.Module) -> int:
        """How many it makes of references in their own shapes, beside the clip."""
        if self.condition is None or self.condition.references is None:
            return 0
        (references,) = self.condition.references
        shapes = [each.shape[1:] for each in references]
        return sum(one_clip.tokens_per_sample((c, t, h, w), outline) for c, t, h, w in shapes)

    def step(self, model: nn.Module, run: Run) -> None:
        """Forward and backward of one batch, as the trainer has them."""
        self.prepare(model, run)(True)

    def prepare(self, model: nn.Module, run: Run, batch: int | None = None) -> Callable[[bool], None]:
        """Applies the run's plan; returns what runs forward and backward of one batch.

        Its argument says whether the batch is the last one of a step.

        Args:
            batch: how many clips a data rank has; None is its share of the configured ones.
        """
        model, forward = _parallelized(model, run)
        batch = batch or max(1, self.batch_size // run.data_size)
        recipe = configured.recipe_of(self.config.model)
        # What takes a clip a call has a backward of each.
        num_passes, batch = (batch, 1) if recipe.packs else (1, batch)
        drawn = self.inputs(batch, weight_dtype(run.plan))

        def predict(noisy: list[torch.Tensor], timestep: torch.Tensor) -> list[torch.Tensor]:
            """noisy [B, ...] of each stream and timestep [B], or [B, t], → their velocities."""
            return recipe.predict(forward, _with_noise(drawn, noisy, timestep))

        def loss() -> torch.Tensor:
            return flow_loss(predict, _streams_of(drawn), self.times(batch))

        one_pass = _pass_of(model, forward, loss)

        def all_clips(is_last: bool) -> None:
            for number in range(num_passes):
                one_pass(is_last and number == num_passes - 1)

        return all_clips


@dataclass(frozen=True)
class TrueRow:
    """The fullest row that a run's clips can share (`data.packed_tokens`), and its step, as `TrueSize` has a batch.

    Which clips share a row is known once their files are; sizes are known before. Of all rows of them none has more
    tokens than this one, and of those as full as it is none has more pairs of tokens that see each other: what it takes
    of memory no row of the run takes more of, and the mean row has fewer pairs. Every caption is the longest.
    """

    # The largest first.
    clips: tuple[TrueSize, ...]
    num_tokens: int
    # "2 × 81x480x832, 3 × 1x480x832".
    name: str

    @classmethod
    def of(cls, config: TrainConfig) -> TrueRow:
        """Of all sizes of the run, whether or not it has files for each.

        Raises:
            ValueError: the model takes no rows, a clip has no room in one, or as `TrueSize.of`.
        """
        sizes = {str(size): true for size, true in true_sizes(config).items()}
        first = next(iter(sizes.values()))
        with torch.device("meta"):
            outline: Any = first.model()
        check_rows(config, configured.recipe_of(config.model), arguments_of(outline))
        tokens = {name: true.tokens_of_clip(outline) for name, true in sizes.items()}
        check_room(tokens, config.data.packed_tokens)
        names = fullest_row(tokens, config.data.packed_tokens)
        clips = tuple(sizes[name] for name in names)
        total = sum(tokens[name] + sizes[name].tokens_of_references(outline) for name in names)
        counts = Counter(names)
        return cls(clips, total, ", ".join(f"{count} × {name}" for name, count in counts.items()))

    @property
    def plan(self) -> Plan:
        return self.clips[0].plan

    def model(self) -> nn.Module:
        return self.clips[0].model()

    def step(self, model: nn.Module, run: Run) -> None:
        """Forward and backward of a data rank's rows, one after the other, as the trainer has them."""
        one_row = self.prepare(model, run)
        num_rows = max(1, self.clips[0].batch_size // run.data_size)
        for number in range(num_rows):
            one_row(number == num_rows - 1)

    def prepare(self, model: nn.Module, run: Run) -> Callable[[bool], None]:
        """Applies the run's plan; returns what runs forward and backward of one row.

        Its argument says whether the row is the last one of a step.
        """
        model, forward = _parallelized(model, run, packed=True)
        recipe = configured.recipe_of(self.clips[0].config.model)
        drawn = [clip.inputs(1, weight_dtype(run.plan)) for clip in self.clips]

        def loss() -> torch.Tensor:
            streams = [_streams_of(each) for each in drawn]
            samples = []
            for clip, inputs, of_clip in zip(self.clips, drawn, streams, strict=True):
                times = clip.times(1)
                noisy = [stream.noisy(times) for stream in of_clip]
                samples.append(_with_noise(inputs, noisy, times * TIMESTEPS))
            velocities = recipe.predict_row(model, forward, samples)
            losses = [
                stream.loss(found, None, 0.0)
                for of_clip, answer in zip(streams, velocities, strict=True)
                for stream, found in zip(of_clip, answer, strict=True)
            ]
            return torch.stack(losses).sum()

        return _pass_of(model, forward, loss)


def true_sizes(config: TrainConfig) -> dict[Bucket, TrueSize]:
    """Every size of clips of a run, in the order of the configuration.

    Raises:
        ValueError: as `TrueSize.of`.
    """
    sizes = {}
    for size in config.data.sizes:
        # A configuration of this size alone.
        data = dataclasses.replace(
            config.data, buckets=(), num_frames=size.num_frames, height=size.height, width=size.width
        )
        sizes[size] = TrueSize.of(dataclasses.replace(config, data=data))
    return sizes


def _parallelized(
    model: nn.Module, run: Run, *, packed: bool = False
) -> tuple[nn.Module, Callable[..., Any]]:
    from opensora_accel.parallel_states import init_parallel

    # On fake tensors: the world of the plan is simulated in this process.
    init_parallel(run.plan, "cpu")
    return parallelize(model, run.plan, torch.device("cpu"), packed=packed)


def _streams_of(drawn: Inputs) -> list[Stream]:
    clean = [drawn.latents, *([] if drawn.sound is None else [drawn.sound])]
    return [Stream(each, torch.randn_like(each)) for each in clean]


def _with_noise(drawn: Inputs, noisy: Sequence[torch.Tensor], timestep: torch.Tensor) -> Inputs:
    sound = noisy[1] if len(noisy) == 2 else None
    return dataclasses.replace(drawn, latents=noisy[0], timestep=timestep, sound=sound)


def _pass_of(
    model: nn.Module, forward: Callable[..., Any], loss: Callable[[], torch.Tensor]
) -> Callable[[bool], None]:
    """Runs forward and backward of a loss; its argument says whether they are the last of a step."""
    is_ddp = isinstance(forward, nn.parallel.DistributedDataParallel)

    def one_pass(is_last: bool) -> None:
        set_last_microbatch(model, is_last)
        with nullcontext() if is_last or not is_ddp else cast(Any, forward).no_sync():
            loss().backward()

    return one_pass
