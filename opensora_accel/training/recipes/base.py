"""What a recipe says: how the model of one family is called for a batch, and what it answers.

The trainer knows latents [B, C, t, h, w], times and captions. Every family takes them in a way of its own. LTX-Video
takes tokens, and is told how many there are along each dim and how far apart they lie. For clips of 17 × 64 × 96 pixels
at 25 frames a second, of which its VAE makes one position of 8 × 32 × 32 pixels:

    latents [B, 128, 3, 2, 3] → tokens [B, 18, 128]
    model(tokens, timestep, text, text mask, num_frames=3, height=2, width=3, scales of positions (8/25, 32, 32))
    its answer [B, 18, 128] → velocity [B, 128, 3, 2, 3]

A recipe is a table, as a policy is. Where a family needs more than names, an entry is a function. A recipe is held
against the family's own pipeline in diffusers: from the same weights and noise both make the same latents.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from opensora_accel.training.captions import TextShape, TextStates
from opensora_accel.training.codec import LatentFrames
from opensora_accel.training.conditions import Condition, Conditioning
from opensora_accel.training.flow import TIMESTEPS, draw_times, loss_weights, shifted
from opensora_accel.training.levels import NoiseLevels, as_noisy, of_noise_alone
from opensora_accel.training.pictures import PictureStates
from opensora_accel.training.recipes.rows import RowOf
from opensora_accel.training.sections import DataConfig, FlowConfig
from opensora_accel.training.sound import SoundShape, SoundTokens
from shardformer.packing import run_packed


@dataclass(frozen=True)
class Inputs:
    """A batch of B clips, of one size, as the trainer knows it."""

    # Noisy, [B, C, t, h, w].
    latents: Tensor
    # [B], 0 for a clip and 1000 for noise; under diffusion forcing [B, t], of each latent frame. For a model of noise
    # levels, as it is called, the number of the level.
    timestep: Tensor
    # [B, L, width] of each of the family's encoders, behind the end of a caption as the recipe's `text` says.
    texts: Sequence[Tensor]
    # Bool [B, L] of each, false behind the end of a caption; none where the model is not told.
    text_masks: Sequence[Tensor]
    # Frames that are given, or references in rows of their own.
    condition: Condition | None = None
    # Frames a second.
    frame_rate: float = 25.0
    # Pixels along each side of a latent position, and frames per latent frame.
    spatial: int = 8
    latent_frames: LatentFrames = field(default_factory=lambda: LatentFrames(4))
    # The time shift of clips of this size.
    alpha: float = 1.0
    # How far a sample is guided by its caption, which a model that was distilled is told; 1 is not at all.
    guidance: float = 1.0
    # What the model was made with.
    config: Mapping[str, Any] = field(default_factory=dict)
    # The sound of the clips, noisy, [B, C, L, M], of a model that makes sound.
    sound: Tensor | None = None
    # How many states of each caption are its own, of each encoder; none where the model need not know.
    num_tokens: Sequence[Sequence[int]] = ()
    # Bool [B, L]: which states of the first encoder are those of frames that it has seen; None where it sees none.
    seen: Tensor | None = None

    @property
    def text(self) -> Tensor:
        """That of the first encoder."""
        return self.texts[0]

    @property
    def text_mask(self) -> Tensor:
        """That of the first encoder."""
        return self.text_masks[0]

    @property
    def text_2(self) -> Tensor:
        """That of the second encoder."""
        return self.texts[1]

    @property
    def text_mask_2(self) -> Tensor:
        """That of the second encoder."""
        return self.text_masks[1]

    @property
    def pictures(self) -> Tensor | None:
        """States of first frames, [B, N, width], where the model takes them."""
        return None if self.condition is None else self.condition.pictures

    @property
    def apart(self) -> Tensor | None:
        """What is given, where the model takes it in an argument of its own, [B, C', t, h, w]."""
        condition = self.condition
        return condition.latents if condition is not None and condition.is_apart else None

    @property
    def grid(self) -> tuple[int, int, int]:
        """How many of the model's patches a clip has along time, height and width."""
        patches = patches_of(self.config)
        of_time, down, across = (
            size // each for size, each in zip(self.latents.shape[2:], patches, strict=True)
        )
        return of_time, down, across

    @property
    def frame_timestep(self) -> Tensor:
        """[B]; or [B, t] where latent frames have times of their own: 0 of those given in the place of noise."""
        if self.condition is None or self.condition.given is None:
            return self.timestep
        of_frames = self.timestep if self.timestep.dim() == 2 else self.timestep[:, None]
        return torch.where(self.condition.given, self.condition.timestep, of_frames)

    @property
    def token_timestep(self) -> Tensor:
        """[B]; or [B, t·h·w], `frame_timestep` of each token."""
        of_frames = self.frame_timestep
        if of_frames.dim() == 1:
            return of_frames
        of_time, down, across = self.grid
        assert of_time == of_frames.size(1), "a patch is of one latent frame"
        return of_frames.repeat_interleave(down * across, dim=1)

    def one_by_one(self) -> Iterator[Inputs]:
        """Those of each clip, its captions without padding."""
        for row in range(len(self.latents)):
            one = slice(row, row + 1)
            # A caption of which nothing is read has a state all the same.
            ends = [max(1, lengths[row]) for lengths in self.num_tokens]
            yield dataclasses.replace(
                self,
                latents=self.latents[one],
                timestep=self.timestep[one],
                texts=[text[one, :end] for text, end in zip(self.texts, ends, strict=True)],
                # None, where the model is not told.
                text_masks=[mask[one, :end] for mask, end in zip(self.text_masks, ends, strict=False)],
                condition=None if self.condition is None else self.condition.rows(one),
                sound=None if self.sound is None else self.sound[one],
                num_tokens=[lengths[one] for lengths in self.num_tokens],
                seen=None if self.seen is None else self.seen[one, : ends[0]],
            )


@dataclass(frozen=True)
class Sizes:
    """What the encoders and the configuration decide about a model."""

    # Of latents, and of what goes into the model: with the channels of frames that are given.
    channels: int
    input_channels: int
    # Of the states of a caption, of each encoder.
    texts: Sequence[TextShape]
    # Pixels along each side of a latent position, and frames per latent frame.
    spatial: int
    temporal: int
    # Width of picture states; None where there are none.
    picture_width: int | None
    # Of the sound of clips, where the model makes it.
    sound: SoundShape | None
    # The constructor's arguments that are given, with its defaults for the others.
    arguments: Mapping[str, Any]


def even_times(num_steps: int, alpha: float) -> Tensor:
    """[num_steps + 1] from 1 (noise) to 0, fp64: even, then shifted towards noise by α."""
    return shifted(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), alpha)


@dataclass(frozen=True)
class Recipe:
    """A family's models, how they are called, and what they predict."""

    # Classes of diffusers, or of an author.
    models: tuple[str, ...]
    # Its pipeline in diffusers, which it is held against; empty of an author's class, which is held against that
    # author's own sampling and loss.
    pipeline: str
    # Argument of the model's forward → a field of Inputs, or a function of them. What is None is left out.
    call: Mapping[str, str | Callable[[Inputs], Any]]
    # Arguments of the model's constructor that must fit the encoders.
    derive: Callable[[Sizes], dict[str, Any]]
    # Raises ValueError where no arguments would fit the encoders.
    check: Callable[[Sizes], None] = lambda _: None
    # How latents go in, and come out: as a clip [B, C, t, h, w], as frames [B, t, C, h, w], with channels last
    # [B, t, h, w, C], or as tokens, each of the numbers of one of the model's patches [B, t·h·w / patch, C · patch].
    layout: Literal["clip", "frames", "channels last", "tokens"] = "clip"
    # The noise levels that it was trained on, where it answers v or noise and not a velocity; None of a model of flow.
    levels: NoiseLevels | None = None
    # The module of an author's class, where it is not one of diffusers.
    home: str = ""
    # The argument of the model's forward that takes latents.
    latents: str = "hidden_states"
    # What a model without memory is made and called in, to try shapes; fakes where it asks what meta cannot answer.
    without_memory: Callable[[], AbstractContextManager[Any]] = lambda: torch.device("meta")
    # What its answer is multiplied by: −1 where it points from noise to the clip.
    sign: float = 1.0
    # Behind the channels of its answer there are as many that say how far a step may vary, which nothing learns.
    answers_variance: bool = False
    # How much noise a clip has at time 0 in training, where that is not none.
    least_noise: float = 0.0
    # What it takes of a caption, from each of its encoders.
    text: tuple[TextStates, ...] = (TextStates(),)
    # Whether a caption is left out for each encoder by itself.
    drops_apart: bool = False
    # What it sees of a first frame that is given, beside its latents; None takes no such states.
    pictures: PictureStates | None = None
    # How frames of a clip may be given: the first as a model has it that begins without weights.
    frames: tuple[Conditioning, ...] = ()
    # How many heads its attention to the clip has, by its config.
    num_heads: Callable[[Mapping[str, Any]], int] = lambda config: config["num_attention_heads"]
    # Whether each latent frame may have a time of its own.
    takes_forcing: bool = False
    # Whether it is told the frame rate.
    takes_frame_rate: bool = False
    # How it makes sound; None makes none.
    sound: SoundTokens | None = None
    # A call takes one clip and its caption without padding: they are one sequence, or padding would be seen.
    packs: bool = False
    # (number of steps, α) → the times that a sample passes, [steps + 1] from 1, or next to it, to 0.
    times: Callable[[int, float], Tensor] = even_times
    # A sample begins with noise times that first time, in place of noise.
    begins_at_first_time: bool = False
    # What a model that was distilled from guided answers is told in training.
    told_guidance: float = 1.0
    # Whether a sample may be guided by the frames that are given too, which a model learns that is shown clips without.
    guided_by_frames: bool = False
    # How much of a first frame that is given a sample begins with, in the noise of every latent frame.
    frame_in_noise: float = 0.0
    # The blocks of which the last gives states of text that nothing uses.
    unused_text: str = ""
    # The buffer with states that the model has learned for a caption that is left out, [L, width], of which it sees as
    # many as the caption has; empty where these are those of an empty caption.
    text_of_nothing: str = ""
    # Modules that are given numbers in whatever type the times have, and take those of their weights': so times need
    # not be rounded to bf16.
    embedders: tuple[str, ...] = ()
    # Arguments of a model that begins without weights, where they differ from its class's defaults.
    fresh: Mapping[str, Any] = field(default_factory=dict)
    # Arguments that a model of a run has whatever the configuration beside its weights says.
    forced: Mapping[str, Any] = field(default_factory=dict)
    # Options, by their full names, as what is published was trained with them.
    published: Mapping[str, Any] = field(default_factory=dict)
    # Arguments that make the model tiny, for proofs.
    tiny: Mapping[str, Any] = field(default_factory=dict)
    # How several samples stand in one row; None where the model takes no such rows.
    row: RowOf | None = None
    # What is published of the same classes with other arguments.
    variants: tuple[Recipe, ...] = ()
    # Whether a variant is for a model of these arguments; without weights they are those that are given.
    is_for: Callable[[Mapping[str, Any]], bool] = lambda _: True

    @property
    def follows_controls(self) -> bool:
        """Whether some of its weights take controls, and references."""
        return any(each.follows_controls for each in self.frames)

    def latent_frames_before(self, data: DataConfig) -> int:
        """How many latent frames of references stand before those of a clip, of a model that has them so."""
        return data.references_of_each if any(each.place == "branch" for each in self.frames) else 0

    @property
    def references_in_rows(self) -> bool:
        """Whether weights of its own take references, as pictures of a person, each in its own shape."""
        return any(each.takes_references for each in self.frames)

    @property
    def takes_references(self) -> bool:
        """Whether it takes references, in a branch or in rows."""
        return self.follows_controls or self.references_in_rows

    @property
    def begins_with_a_frame(self) -> bool:
        """Whether every clip begins with a first frame that is given."""
        return any(each.always_first for each in self.frames)

    @property
    def makes_sound(self) -> bool:
        return self.sound is not None

    @property
    def takes_text_masks(self) -> bool:
        return not {"text_mask", "text_mask_2"}.isdisjoint(
            source for source in self.call.values() if isinstance(source, str)
        )

    def prepare(self, model: nn.Module) -> None:
        """Makes a model one that can be trained as it is called here."""
        self.use_all(model)

        def cast(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            return (args[0].to(next(module.parameters()).dtype),)

        for name in self.embedders:
            embedder = model.get_submodule(name)
            # A model that is not told a number has nothing in the place of its embedder.
            if any(True for _ in embedder.parameters()):
                embedder.register_forward_pre_hook(cast)

    def use_all(self, model: nn.Module) -> None:
        """Adds 0 times what nothing uses to the answer of the model.

        So every parameter has a gradient, for which those who average gradients wait.
        """
        if not self.unused_text:
            return
        unused: list[Tensor] = []

        def keep(_module: nn.Module, _args: Any, output: tuple[Tensor, Tensor]) -> None:
            unused[:] = [output[1]]

        def add(_module: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return output[0] + 0 * unused.pop().sum().to(output[0]), *output[1:]

        blocks: Any = model.get_submodule(self.unused_text)
        blocks[-1].register_forward_hook(keep)
        model.register_forward_hook(add)

    def arguments(self, inputs: Inputs) -> dict[str, Any]:
        """What the model's forward is called with, latents first."""
        if self.levels is not None:
            times = inputs.timestep / TIMESTEPS
            inputs = dataclasses.replace(
                inputs,
                latents=as_noisy(inputs.latents, times),
                timestep=self.levels.numbers(times, inputs.alpha),
            )
        latents = inputs.latents
        in_rows: Sequence[Tensor] = ()
        if inputs.condition is not None:
            latents, in_rows = inputs.condition.put(latents), inputs.condition.in_rows()
        if self.layout == "tokens":
            # Rows of their own come first.
            patches = patches_of(inputs.config)
            latents = torch.cat([to_patches(each, patches) for each in (*in_rows, latents)], dim=1)
        elif self.layout == "frames":
            latents = latents.transpose(1, 2)
        elif self.layout == "channels last":
            latents = latents.movedim(1, -1)
        found = {
            name: getattr(inputs, source) if isinstance(source, str) else source(inputs)
            for name, source in self.call.items()
        }
        given = {name: value for name, value in found.items() if value is not None}
        # What diffusers wraps an answer in is not needed.
        return {self.latents: latents} | given | ({} if self.home else {"return_dict": False})

    def predict(self, forward: Callable[..., Sequence[Tensor] | Tensor], inputs: Inputs) -> list[Tensor]:
        """The velocities that a model answers: of clips [B, C, t, h, w], and of sound [B, C, L, M]."""
        calls = [*inputs.one_by_one()] if self.packs else [inputs]
        found = [self._velocities(forward(**self.arguments(each)), each) for each in calls]
        return found[0] if len(found) == 1 else [torch.cat(stream) for stream in zip(*found, strict=True)]

    def predict_row(
        self,
        model: nn.Module,
        forward: Callable[..., Sequence[Tensor] | Tensor],
        samples: Sequence[Inputs],
    ) -> list[list[Tensor]]:
        """The velocities of several samples, [1, C, …] each, of one call of the model for all of them.

        Args:
            model: the sharded one, whose `forward` is called, or what averages its gradients.
        """
        assert self.row is not None
        samples = [next(each.one_by_one()) if each.num_tokens else each for each in samples]
        calls = [self.arguments(each) for each in samples]
        arguments, streams = self.row.join(model, calls)
        with run_packed(model, **streams):
            answers = forward(**arguments)
        answers = [answers] if isinstance(answers, Tensor) else answers
        parts = self.row.part(model, answers, calls)
        return [self._velocities(part, each) for part, each in zip(parts, samples, strict=True)]

    def _velocities(self, answers: Sequence[Tensor] | Tensor, inputs: Inputs) -> list[Tensor]:
        # Some give their answer by itself.
        answers = [answers] if isinstance(answers, Tensor) else answers
        velocities = [self._velocity(answers[0], inputs)]
        if self.sound is not None:
            assert inputs.sound is not None
            velocities.append(self._signed(self.sound.from_tokens(answers[1], inputs.sound)))
        return velocities

    def _signed(self, answer: Tensor) -> Tensor:
        return answer if self.sign == 1.0 else self.sign * answer

    def _velocity(self, answer: Tensor, inputs: Inputs) -> Tensor:
        if self.layout == "tokens":
            of_clip = answer[:, -math.prod(inputs.grid) :]
            answer = from_patches(of_clip, inputs.latents, patches_of(inputs.config))
        elif self.layout == "frames":
            answer = answer.transpose(1, 2)
        elif self.layout == "channels last":
            answer = answer.movedim(-1, 1)
        elif self.answers_variance:
            answer = answer[:, : inputs.latents.size(1)]
        if self.levels is not None:
            return self.levels.velocity(answer, inputs.latents, inputs.timestep / TIMESTEPS)
        return self._signed(answer)

    def draw_times(
        self, config: FlowConfig, alpha: float, seed: int, positions: Sequence[int], num_frames: int = 1
    ) -> Tensor:
        """The times [B] that these samples are trained at; under diffusion forcing [B, num_frames]."""
        if self.levels is None:
            return draw_times(config, alpha, seed, positions, num_frames)
        # What is drawn says how far up the levels; the shift lies in their times.
        return self.levels.at(draw_times(config, 1.0, seed, positions), alpha)

    def times_at(self, shares: Tensor, alpha: float) -> Tensor:
        """The times [B] that are looked at in a validation, so many shares [B], each in 0…1, of the way to noise."""
        return shares if self.levels is None else self.levels.at(shares, alpha)

    def loss_weights(self, config: FlowConfig, alpha: float, times: Tensor) -> Tensor | None:
        """What each of `times`, [B] or [B, t], counts in the loss, of that shape; None where all count 1."""
        if self.levels is None:
            return loss_weights(config, alpha, times)
        return self.levels.weights(times, config.min_snr)

    def sample_times(self, num_steps: int, alpha: float) -> Tensor:
        """The times that a sample passes, [num_steps + 1] from 1, or next to it, to 0."""
        return (self.times if self.levels is None else self.levels.sampled)(num_steps, alpha)

    def start(self, noise: Tensor, times: Tensor, condition: Condition | None = None) -> Tensor:
        """Where a sample of clips begins, [B, C, t, h, w], of noise, the `times` that it passes and what is given."""
        if self.levels is not None:
            return of_noise_alone(noise, times[:1].to(noise.device))
        if self.frame_in_noise and condition is not None:
            first = condition.latents[:, : noise.size(1), :1]
            return (1 - self.frame_in_noise) * noise + self.frame_in_noise * first
        return noise * float(times[0]) if self.begins_at_first_time else noise


def derive_projected(sizes: Sizes) -> dict[str, Any]:
    """Arguments of a model that projects captions to the width of its transformer before it attends to them."""
    return {
        "in_channels": sizes.input_channels,
        "out_channels": sizes.channels,
        "caption_channels": sizes.texts[0].width,
        "cross_attention_dim": sizes.arguments["num_attention_heads"] * sizes.arguments["attention_head_dim"],
    }


def to_patches(latents: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """[B, C, t, h, w] → [B, n, C · patch], a token of the numbers of each patch (time, height, width)."""
    for dim, size in zip((4, 3, 2), reversed(patch), strict=True):
        latents = latents.unflatten(dim, (-1, size))
    # [B, C, t, pt, h, ph, w, pw] → [B, t, h, w, C, pt, ph, pw]
    return latents.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def from_patches(tokens: Tensor, like: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """[B, n, C · patch] → [B, C, t, h, w], as many of each as `like` [B, ·, t, h, w] has."""
    sizes = [size // each for size, each in zip(like.shape[2:], patch, strict=True)]
    folded = tokens.unflatten(2, (-1, *patch)).unflatten(1, sizes)
    return folded.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6).flatten(4, 5).flatten(2, 3)


def patches_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """The model's patch (time, height, width), by its config.

    Raises:
        ValueError: it is no such patch.
    """
    size = config["patch_size"]
    if isinstance(size, int):
        return int(config.get("patch_size_t") or 1), size, size
    if len(size) != 3:
        raise ValueError(
            f"model.config.patch_size must be three sizes (time, height, width); got {list(size)}"
        )
    return size[0], size[1], size[2]
