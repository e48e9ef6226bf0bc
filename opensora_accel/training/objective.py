"""What is learned: the velocity from a clip to noise, at a time, by a caption, and by the frames that are given.

    clip ──► codec ──► latents ──┬──► x_t = (1 − t) latents + t noise ──► model ──► velocity ──► loss
    caption ──► text encoder ────┼──────────────────────────────────────►
    frames that are given ───────┴──► mask, latents, picture ───────────►

A model that makes sound too has two streams of latents, at the same time t, and two velocities. The sound of a clip
that has none is silence, which is not learned.

Everything that is drawn (what is given, time, noise, whether the caption is dropped) follows from the seed and the
sample's position in the job (`flow.py`), so that the same samples give the same loss on any mesh.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.regions import region
from opensora_accel.training.adapters import without_adapters
from opensora_accel.training.buckets import Bucket
from opensora_accel.training.classes import arguments_of
from opensora_accel.training.conditions import Condition
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.encoding import Encoded, Encoders
from opensora_accel.training.flow import TIMESTEPS, Stream, drop_captions, flow_loss, time_shift
from opensora_accel.training.kept import CaptionSource, EmbeddedCaptions
from opensora_accel.training.recipes import Inputs, Recipe
from shardformer import run_blocks


@dataclass(frozen=True)
class _Drawn:
    """Of a batch: its streams with their noise, its times [B] or [B, t], what these count, and what else is known."""

    streams: list[Stream]
    times: Tensor
    weights: Tensor | None
    # Arguments of `Objective.predict`.
    known: dict[str, Any]

    def noisy(self, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """The latents of each stream at these times, and the timesteps."""
        return [stream.noisy(self.times) for stream in self.streams], self.times.to(device) * TIMESTEPS


class Objective:
    """The loss of a batch, and what it is made of.

    Args:
        encoders: of clips, and what goes with them.
        model: the sharded one, whose blocks run by the plan of a clip's bucket, where that has its own.
        forward: the same, as a step calls it.
        num_tokens: of a clip of each size.
    """

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        encoders: Encoders,
        texts: Sequence[CaptionSource],
        model: nn.Module,
        forward: Callable[..., Any],
        num_tokens: Mapping[Bucket, int],
    ):
        self.config, self.recipe, self.encoders, self.texts = config, recipe, encoders, texts
        # Parsed once: every forward asks.
        self.plans = config.plans
        self.model, self.forward = model, forward
        self.num_tokens = num_tokens
        self.device, self.dtype = encoders.device, encoders.dtype
        # That of the second of two experts, which learns the times below this one's.
        self.second: Objective | None = None

    def add_second(self, config: TrainConfig, model: nn.Module, forward: Callable[..., Any]) -> Objective:
        """That of a second expert, of the same clips and encoders, by its own configuration."""
        self.second = second = copy.copy(self)
        second.config, second.model, second.forward = config, model, forward
        return second

    def at(self, timestep: Tensor) -> Objective:
        """That of the expert whose velocity a sample takes at this timestep [B]; the boundary is the first one's."""
        if self.second is None or float(timestep[0]) >= self.config.flow.time_range[0] * TIMESTEPS:
            return self
        return self.second

    def loss(self, batch: Encoded) -> Tensor:
        """The mean loss of this data rank's samples, a scalar."""
        drawn = self._draw(batch)
        predict = partial(self.predict, **drawn.known)
        if batch.is_regularisation is not None:
            streams = self._kept_as_it_is(drawn.streams, drawn.times, batch.is_regularisation, predict)
            drawn = dataclasses.replace(drawn, streams=streams)
        return flow_loss(
            predict, drawn.streams, drawn.times, weights=drawn.weights, huber=self.config.flow.huber
        )

    def loss_of_row(self, row: Sequence[Encoded]) -> Tensor:
        """The sum of the losses of samples that share a row, a scalar: of each what `loss` is of it alone."""
        drawn = [self._draw(sample) for sample in row]
        inputs, losses = [], []
        for each in drawn:
            noisy, timestep = each.noisy(self.device)
            inputs.append(self.inputs(noisy, timestep, **each.known))
        velocities = self.recipe.predict_row(self.model, self.forward, inputs)
        for each, answer in zip(drawn, velocities, strict=True):
            weights = None if each.weights is None else each.weights.to(self.device)
            of_streams = zip(each.streams, answer, strict=True)
            losses += [stream.loss(found, weights, self.config.flow.huber) for stream, found in of_streams]
        return torch.stack(losses).sum()

    def _draw(self, batch: Encoded) -> _Drawn:
        """What follows from the seed and the samples' positions."""
        config, seed = self.config.flow, self.config.seed
        drop = partial(drop_captions, batch.captions, config.caption_drop, seed, batch.positions)
        captions = drop()
        alpha = self.time_shift(batch.bucket)
        times = self.recipe.draw_times(config, alpha, seed, batch.positions, batch.clean.size(2))
        known = {
            "bucket": batch.bucket,
            "captions": captions,
            "captions_2": drop(purpose="second caption") if self.recipe.drops_apart else captions,
            "condition": batch.condition,
            "in_place_of": batch.captions,
        }
        sound_alpha = self.sound_alpha(batch.bucket)
        streams = batch.streams(seed, config.noise_offset, sound_alpha, self.recipe.least_noise)
        return _Drawn(streams, times, self.recipe.loss_weights(config, alpha, times), known)

    def _kept_as_it_is(
        self,
        streams: list[Stream],
        times: Tensor,
        is_regularisation: Tensor,
        predict: Callable[..., list[Tensor]],
    ) -> list[Stream]:
        """What is learned, where some samples, bool [B], learn what the model answers without adapters.

        It is asked whatever samples this rank has: another may have one, and sharded parameters are gathered by all.
        """
        with torch.no_grad(), without_adapters(self.model):
            answers = predict([each.noisy(times) for each in streams], times.to(self.device) * TIMESTEPS)
        kept = []
        for stream, answer in zip(streams, answers, strict=True):
            each = is_regularisation.view(-1, *[1] * (answer.dim() - 1))
            target = torch.where(each, answer.to(stream.clean), stream.noise - stream.clean)
            kept.append(dataclasses.replace(stream, target=target))
        return kept

    def loss_at(self, batch: Encoded, time: float, num_clean: int = 0) -> Tensor:
        """The mean loss of these samples at one time, a scalar: with all captions, and without weights of times.

        Args:
            num_clean: how many of the first latent frames are without noise, at time 0, and do not count, of a model
                whose latent frames have times of their own.
        """
        alpha = self.time_shift(batch.bucket)
        times = self.recipe.times_at(torch.full((len(batch.captions),), time, dtype=torch.float64), alpha)
        expert = self.at(times * TIMESTEPS)
        sound_alpha = self.sound_alpha(batch.bucket)
        streams = batch.streams(self.config.seed, 0.0, sound_alpha, self.recipe.least_noise)
        if num_clean:
            counts = (torch.arange(batch.clean.size(2)) >= num_clean).to(times)
            times = times[:, None] * counts
            counts = counts.to(batch.clean).view(1, 1, -1, 1, 1)
            (clips,) = streams
            learned = counts if clips.learned is None else counts * clips.learned
            streams = [dataclasses.replace(clips, learned=learned)]
        return flow_loss(
            partial(expert.predict, bucket=batch.bucket, captions=batch.captions, condition=batch.condition),
            streams,
            times,
            weights=None if self.recipe.levels is None else self.recipe.levels.weights(times),
        )

    def predict(
        self,
        noisy: Sequence[Tensor],
        timestep: Tensor,
        bucket: Bucket,
        *known: Any,
        **others: Any,
    ) -> list[Tensor]:
        """The velocities that the model predicts, [B, C, …] of each stream; arguments are those of `inputs`."""
        inputs = self.inputs(noisy, timestep, bucket, *known, **others)
        of_bucket = str(bucket) if bucket in self.plans else None
        with run_blocks(self.model, of_bucket) if self.plans else nullcontext():
            return self.recipe.predict(self.forward, inputs)

    def inputs(
        self,
        noisy: Sequence[Tensor],
        timestep: Tensor,
        bucket: Bucket,
        captions: Sequence[str],
        condition: Condition | None = None,
        guidance: float | None = None,
        in_place_of: Sequence[str] | None = None,
        captions_2: Sequence[str] | None = None,
    ) -> Inputs:
        """What the model is called with, as the recipe takes it.

        Args:
            noisy: latents [B, C, …] of each stream, the clips' first.
            timestep: [B], or [B, t] of latent frames.
            bucket: of all B clips.
            condition: what is given of the clips; None is nothing.
            guidance: what a model is told that was distilled from guided ones; None is what it is told in training.
            in_place_of: the captions of the clips, some of which are left out in `captions`.
            captions_2: what a second encoder reads; None is the same.
        """
        encoders = self.encoders
        shown = None if condition is None else condition.shown()
        with region("encode", "captions"):
            masks: list[Tensor] = []
            lengths: list[list[int]] = []
            seen: Tensor | None = None
            if shown is not None:
                texts, lengths, seen = self._see(captions, shown)
            else:
                read = [captions, captions if captions_2 is None else captions_2][: len(self.texts)]
                of_each = [*zip(self.texts, read, strict=True)]
                texts = [text.encode(each, self.device, self.dtype) for text, each in of_each]
                if self.recipe.text_of_nothing:
                    learned = self.model.get_buffer(self.recipe.text_of_nothing).to(texts[0])
                    is_there = torch.tensor([bool(each) for each in captions], device=self.device)
                    texts[0] = torch.where(is_there[:, None, None], texts[0], learned[: texts[0].size(1)])
                if self.recipe.takes_text_masks or self.recipe.packs:
                    lengths = [_num_tokens(text, each, in_place_of) for text, each in of_each]
            if self.recipe.takes_text_masks:
                for length, text in zip(lengths, texts, strict=True):
                    ends = torch.tensor(length)
                    masks.append((torch.arange(text.size(1)) < ends[:, None]).to(self.device))
        if condition is None and encoders.conditioning is not None:
            condition = encoders.condition_of_nothing(noisy[0], bucket)
        sizes = encoders.frame_rate, encoders.codec.spatial, encoders.codec.latent_frames
        return Inputs(
            noisy[0],
            timestep,
            texts,
            masks,
            condition,
            *sizes,
            self.time_shift(bucket),
            self.recipe.told_guidance if guidance is None else guidance,
            arguments_of(self.model),
            sound=noisy[1] if encoders.sounds is not None else None,
            num_tokens=lengths,
            seen=seen,
        )

    def _see(
        self, captions: Sequence[str], frames: Sequence[Sequence[Tensor]]
    ) -> tuple[list[Tensor], list[list[int]], Tensor]:
        """States [B, L, width] of captions, with the frames that the first encoder sees, how many each has, and which
        of the first encoder's are the frames'."""
        text, *others = self.texts
        assert not isinstance(text, EmbeddedCaptions), "it knows no frames; text.cache is refused"
        states = text.encode(captions, self.device, self.dtype, frames)
        seen = torch.zeros(states.shape[:2], dtype=torch.bool)
        for row, marks in zip(seen, text.are_seen(frames), strict=True):
            row[: len(marks)] = torch.tensor(marks, dtype=torch.bool)
        return (
            [states, *(each.encode(captions, self.device, self.dtype) for each in others)],
            [text.num_tokens(captions, frames), *(each.num_tokens(captions) for each in others)],
            seen.to(self.device),
        )

    def sound_alpha(self, bucket: Bucket) -> float:
        """By how much the times of sound are shifted against those of clips of this size."""
        return 1.0 if self.recipe.sound is None else self.recipe.sound.alpha(self.time_shift(bucket))

    def time_shift(self, bucket: Bucket) -> float:
        """α of clips of this size."""
        # Levels of noise lie where they lie, however long a clip is.
        if self.recipe.levels is not None and self.config.flow.shift == "auto":
            return 1.0
        num_frames = self.encoders.latent_shapes[bucket][1]
        return time_shift(self.config.flow, self.num_tokens[bucket] // num_frames, num_frames)


def _num_tokens(text: CaptionSource, captions: Sequence[str], in_place_of: Sequence[str] | None) -> list[int]:
    """How many states of each caption the model sees: no more than those of the one in whose place it stands."""
    own = text.num_tokens(captions)
    if in_place_of is None or captions == in_place_of:
        return own
    return [*map(min, own, text.num_tokens(in_place_of))]
