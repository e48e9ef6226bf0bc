"""A batch of clips as every model of a run takes it, encoded once: latents, what is given of them, and sound.

    clip ──► codec ──► latents [B, C, t, h, w], behind those of its references, where it has some
    frames that are given ──► mask, latents, picture: a `Condition` (`conditions.py`)
    control ──► codec ──► what a branch takes, or channels behind those of the noisy clip
    sound ──► latents, or silence, which is not learned

No model is needed for it, so that it is the same for both experts of a run and at every time. What is computed here may
be kept: from then on a clip is encoded once, and the encoder's weights go (`Encoders.keep`). So with `codec.cache` a
clip of 9 frames, of which Wan 2.1 is given the first, has two entries: whole, and with 8 frames in grey.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor

from opensora_accel.communications import gather_objects
from opensora_accel.regions import region
from opensora_accel.training.beside import latent_shares
from opensora_accel.training.buckets import Bucket
from opensora_accel.training.clips import Batch, Clip, Rows
from opensora_accel.training.codec import Codec, LatentShape, build_codec
from opensora_accel.training.conditions import (
    KINDS,
    Condition,
    Conditioning,
    Given,
    branch_condition,
    draw_conditions,
    encode_condition,
    pixel_noise,
)
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.disk_cache import DiskCache
from opensora_accel.training.flow import TIMESTEPS, Stream, draw_noise
from opensora_accel.training.kept import CachedLatents, KeptPictures
from opensora_accel.training.pictures import PictureEncoder, PictureStates, build_picture_encoder
from opensora_accel.training.recipes import Recipe
from opensora_accel.training.sound import EncodedSound, SoundCodec
from opensora_accel.training.stored import Stored


@dataclass(frozen=True)
class Encoded:
    """A batch of B clips as every model of the run takes it, whatever its times."""

    bucket: Bucket
    positions: Sequence[int]
    captions: Sequence[str]
    # Latents [B, C, t, h, w].
    clean: Tensor
    # Where the model takes frames that are given: those.
    condition: Condition | None
    # How far each latent is learned, 0…1 or bool, to be broadcast over [B, t, h, w]; None where all are.
    learned: Tensor | None
    # Where the model makes sound: that of the clips.
    sound: EncodedSound | None = None
    # Bool [B], the clips on which adapters change nothing; None where the run has no such clips.
    is_regularisation: Tensor | None = None

    def one_by_one(self) -> Iterator[Encoded]:
        """A batch of each of its clips."""
        for row in range(len(self.captions)):
            one = slice(row, row + 1)
            yield Encoded(
                self.bucket,
                self.positions[one],
                self.captions[one],
                self.clean[one],
                None if self.condition is None else self.condition.rows(one),
                None if self.learned is None else self.learned[one],
                None if self.sound is None else EncodedSound(*(each[one] for each in self.sound)),
                None if self.is_regularisation is None else self.is_regularisation[one],
            )

    def streams(
        self, seed: int, noise_offset: float = 0.0, sound_alpha: float = 1.0, least_noise: float = 0.0
    ) -> list[Stream]:
        """What is learned of the batch, with noise by the samples' positions; the times of sound are shifted.

        Args:
            least_noise: how much noise a clip has at time 0.
        """
        noise = draw_noise(self.clean, seed, self.positions, noise_offset)
        learned = None if self.learned is None else self.learned.unsqueeze(1)
        clean = self.clean + least_noise * noise if least_noise else self.clean
        streams = [Stream(clean, noise, learned)]
        if self.sound is not None:
            latents, is_there = self.sound
            noise = draw_noise(latents, seed, self.positions, purpose="noise of sound")
            streams.append(Stream(latents, noise, is_there[:, None, None, None], alpha=sound_alpha))
        return streams


@dataclass(frozen=True)
class EncodedRows:
    """This rank's rows of a step, of samples one by one, and how many samples a data rank has in the mean."""

    rows: list[list[Encoded]]
    samples_per_rank: float


class Encoders:
    """Makes of a batch what its models take: latents, what is given of clips, and sound.

    Of two experts both take the same.

    Args:
        conditioning: how the models take frames that are given; None where they take none.
        sounds: makes latents of the clips' sound; None where the models make no sound.
        arguments: those that the models were made with.
        latent_shapes: of a clip of each size.
        frame_rate: frames a second, as the models are told.
    """

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        codec: Codec,
        pictures: PictureEncoder | None,
        conditioning: Conditioning | None,
        sounds: SoundCodec | None,
        arguments: Mapping[str, Any],
        latent_shapes: Mapping[Bucket, LatentShape],
        frame_rate: float,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.config, self.recipe, self.arguments, self.frame_rate = config, recipe, arguments, frame_rate
        self.codec: Codec | CachedLatents = codec
        self.pictures: PictureEncoder | KeptPictures | None = pictures
        self.conditioning, self.sounds = conditioning, sounds
        self.latent_shapes = latent_shapes
        self.device, self.dtype = device, dtype
        # Latents [1, C, t, h, w] of a grey clip of each size that a model with a branch was asked for.
        self._grey: dict[Bucket, Tensor] = {}

    def encode_rows(self, rows: Rows) -> EncodedRows:
        """`encode` of each sample."""
        encoded = [[self.encode(sample) for sample in row] for row in rows.rows]
        return EncodedRows(encoded, rows.num_clips.total() / self.config.plan.data)

    def encode(self, batch: Batch) -> Encoded:
        """What no model is needed for, and every model takes."""
        frames = batch.frames.to(self.device)
        condition, learned = None, None
        with region("encode", "clips"):
            clean = self._encode(frames, batch.clips).to(self.dtype)
            references = None
            if batch.references is not None:
                found = self.encode_references(batch.references, batch.clips)
                if self.recipe.references_in_rows:
                    condition = self.condition_of_references(batch.references, found, batch.positions)
                else:
                    references = before_clips(found)
            kinds = self._draw_conditions(batch.bucket, batch.positions) if self.conditioning else []
            if self.conditioning is not None and self.conditioning.is_needed(kinds):
                controls = None if batch.controls is None else batch.controls.to(self.device)
                given = kinds, frames, clean, batch.clips, batch.positions
                condition, whole = self.encode_condition(*given, controls, references)
                # What stands in the place of noise is put back after a sample.
                if condition.given is not None or not self.config.conditions.learn_given:
                    learned = ~whole[:, :, None, None]
            if batch.masks is not None:
                masks = batch.masks.to(self.device)
                shares = latent_shares(masks, self.codec.latent_frames, *clean.shape[-2:])
                learned = shares if learned is None else shares * learned
            if references is not None and self.recipe.latent_frames_before(self.config.data):
                # A sampler makes them too.
                clean = torch.cat([references, clean], dim=2)
                if learned is not None:
                    size = len(learned), references.size(2), *learned.shape[2:]
                    of_references = learned.new_full(size, self.config.conditions.learn_given)
                    learned = torch.cat([of_references, learned], dim=1)
            sound = None if self.sounds is None else self._encode_sound(self.sounds, batch)
        kept = None
        if self.config.data.regularisation:
            kept = torch.tensor([self.config.data.is_regularisation(file) for file in batch.files])
            kept = kept.to(self.device)
        return Encoded(batch.bucket, batch.positions, batch.captions, clean, condition, learned, sound, kept)

    def sound_latents(self, bucket: Bucket) -> tuple[int, int, int] | None:
        """The shape [C, L, M] of the sound of a clip of this size, where the model makes sound."""
        if self.sounds is None:
            return None
        return self.sounds.shape.latents(bucket.num_frames / self.frame_rate)

    def _encode_sound(self, sounds: SoundCodec, batch: Batch) -> EncodedSound:
        num_samples = sounds.shape.num_samples(batch.bucket.num_frames / self.frame_rate)
        silence = torch.zeros(sounds.shape.num_channels, num_samples)
        samples = torch.stack([silence if each is None else each for each in batch.sounds])
        is_there = torch.tensor([each is not None for each in batch.sounds]).to(self.device)
        return EncodedSound(sounds.encode(samples.to(self.device)).to(self.dtype), is_there)

    def condition_of_nothing(self, like: Tensor, bucket: Bucket) -> Condition | None:
        """What the model gets of clips of latents like [B, C, t, h, w], of which nothing is given."""
        assert self.conditioning is not None
        if self.conditioning.place != "branch":
            return self.conditioning.of_nothing(like, self.codec.latent_frames.temporal)
        size = len(like), bucket.num_frames, bucket.height, bucket.width, 3
        nothing = torch.zeros(size, dtype=torch.uint8, device=like.device)
        return self.encode_condition(["t2v"] * len(like), nothing, like, (), ())[0]

    def encode_condition(
        self,
        kinds: Sequence[str],
        frames: Tensor,
        like: Tensor,
        clips: Sequence[Clip],
        positions: Sequence[int],
        controls: Tensor | None = None,
        references: Tensor | None = None,
        *,
        in_sample: bool = False,
    ) -> tuple[Condition, Tensor]:
        """What the model gets of clips, of which frames of these kinds are given, and which latent frames are whole.

        Args:
            frames: uint8 [B, T, H, W, 3] of these B clips.
            like: of the shape [B, C, t, h, w] of their latents.
            positions: by which noise is drawn, where what is given is held in noise.
            controls: frames of the controls of those clips that have one, as `frames`; None has none.
            references: their latents [B, C, N, h, w], as `before_clips` gives them.
            in_sample: whether a sample gets it, whose pixels have the noise that the pipeline gives them.

        Returns:
            What it gets, and bool [B, t], the latent frames whose frames are all given.
        """
        assert self.conditioning is not None
        given = [KINDS[kind] for kind in kinds]

        def encode(rows: list[int]) -> Tensor:
            of_rows, parts = [clips[row] for row in rows], [given[row] for row in rows]
            if not self._noise_on_pixels:
                return self._encode(frames[rows], of_rows, parts)
            numbers = [positions[row] for row in rows]
            noise = pixel_noise(frames[rows], parts, self.config.seed, numbers, in_sample=in_sample)
            codec = self.codec.encoder() if isinstance(self.codec, CachedLatents) else self.codec
            assert self.conditioning is not None
            return self.conditioning.encode(codec, frames[rows], parts, noise)

        sizes = frames.size(1), self.codec.latent_frames
        if self.conditioning.place == "branch":
            kept = self._in_grey(frames, given, clips, like)
            of_none: list[Clip | None] = [None] * len(given)
            followed = of_none if controls is None else [clip.control for clip in clips]
            # What is given stands in the place of the control.
            parts = [
                KINDS["t2v"] if clip is None else each.others
                for clip, each in zip(followed, given, strict=True)
            ]
            to_be_made = self._in_grey(frames if controls is None else controls, parts, followed, like)
            return branch_condition(kept, to_be_made, given, *sizes, self.codec.spatial, references)
        condition, whole = encode_condition(self.conditioning, encode, given, *sizes, like, self.codec.factor)
        if self.conditioning.of_control:
            behind = self._behind_control(condition.latents, given, clips, controls, references)
            condition = condition._replace(latents=behind)
        if self.conditioning.timestep:
            noise = draw_noise(
                condition.latents, self.config.seed, positions, purpose="noise of given frames"
            )
            condition = condition.with_noise(noise, self.conditioning.timestep)
        if self.recipe.text[0].picture:
            condition = condition._replace(frames=frames[:, [0] if condition.ends is None else [0, -1]])
        if self.pictures is not None:
            shape = len(frames), self.pictures.num_states, self.pictures.width
            # Zeros where the first frame is not given.
            pictures = torch.zeros(shape, dtype=self.dtype, device=frames.device)
            shown = [row for row, each in enumerate(given) if each.head]
            if shown:
                states = self._encode_pictures(frames[shown, 0], [clips[row] for row in shown])
                pictures[shown] = states.to(pictures)
            condition = condition._replace(pictures=pictures)
        return condition, whole

    def encode_references(
        self, references: Sequence[Sequence[Tensor]], clips: Sequence[Clip]
    ) -> list[list[Tensor]]:
        """uint8 [H, W, 3] of each reference of these clips → latents [1, C, 1, h, w] of each."""
        assert self.conditioning is not None
        codec, drawn = self.codec, self.conditioning.drawn

        def encode(picture: Tensor, clip: Clip) -> Tensor:
            frames = picture[None, None].to(self.device)
            if isinstance(codec, CachedLatents):
                return codec.encode(frames, [clip]).to(self.dtype)
            return codec.encode(frames, drawn=drawn).to(self.dtype)

        return [
            [encode(*each) for each in zip(pictures, clip.references, strict=True)]
            for pictures, clip in zip(references, clips, strict=True)
        ]

    def condition_of_references(
        self,
        pictures: Sequence[Sequence[Tensor]],
        latents: Sequence[Sequence[Tensor]],
        positions: Sequence[int],
    ) -> Condition:
        """What the model gets of clips with references, each of which stands in rows of its own, held in noise.

        Args:
            pictures: uint8 [H, W, 3] of each reference of each clip.
            latents: those of them, as `encode_references` gives them.
            positions: by which noise is drawn.
        """
        assert self.conditioning is not None
        t, rows = self.conditioning.timestep / TIMESTEPS, list[Sequence[Tensor]]()
        for of_clip, position in zip(latents, positions, strict=True):
            purposes = (f"noise of reference {number}" for number in range(1, len(of_clip) + 1))
            noise = (
                draw_noise(each, self.config.seed, [position], purpose=purpose)
                for each, purpose in zip(of_clip, purposes, strict=True)
            )
            rows.append([(1 - t) * each + t * drawn for each, drawn in zip(of_clip, noise, strict=True)])
        nothing = torch.empty(len(rows), 0, 1, 1, 1, dtype=self.dtype, device=self.device)
        return Condition(
            nothing,
            timestep=self.conditioning.timestep,
            references=rows,
            pictures_of_references=[*pictures],
        )

    def _behind_control(
        self,
        pictures: Tensor,
        given: Sequence[Given],
        clips: Sequence[Clip],
        controls: Tensor | None,
        references: Tensor | None,
    ) -> Tensor:
        """[B, C, t, h, w], of first frames that are given → [B, 2C, t, h, w], behind controls, or zero.

        A reference stands where a first frame is not given; an image has no place for one.
        """
        followed = torch.zeros_like(pictures)
        if controls is not None:
            of_clips = {row: clip.control for row, clip in enumerate(clips) if clip.control is not None}
            if of_clips:
                rows = list(of_clips)
                followed[rows] = self._encode(controls[rows], list(of_clips.values())).to(followed)
        if references is not None and pictures.size(2) > 1:
            rows = [row for row, each in enumerate(given) if not each.head]
            pictures = pictures.clone()
            pictures[rows, :, :1] = references[rows].to(pictures)
        return torch.cat([followed, pictures], dim=1)

    def _in_grey(
        self, frames: Tensor, shown: Sequence[Given], clips: Sequence[Clip | None], like: Tensor
    ) -> Tensor:
        """Latents [B, C, t, h, w] of clips, of which what is not shown is grey.

        Grey alone is encoded once for each size. `clips` may be left out where nothing is shown.
        """
        size = tuple(frames.shape[1:4])
        (bucket,) = (
            each for each in self.latent_shapes if (each.num_frames, each.height, each.width) == size
        )
        if bucket not in self._grey:
            nothing = torch.zeros_like(frames[:1])
            self._grey[bucket] = self._encode(nothing, [_grey_clip(bucket)], [KINDS["t2v"]])
        latents = self._grey[bucket].to(like).repeat(len(like), 1, 1, 1, 1)
        rows = [row for row, each in enumerate(shown) if each != KINDS["t2v"]]
        if rows:
            of_rows = [clip for row in rows if (clip := clips[row]) is not None]
            latents[rows] = self._encode(frames[rows], of_rows, [shown[row] for row in rows]).to(like)
        return latents

    def keep(self, clips: Mapping[int, Clip], disk_cache: DiskCache | None) -> None:
        """From now on every clip is encoded once, and every first frame, where the configuration says so.

        Args:
            clips: those that this rank will ask for, by their positions in the job.

        Communication: at most three object all-gathers for each of the two encoders.

        Raises:
            ValueError: on all ranks, where what is kept in the memory of one of them does not fit.
        """
        config, image = self.config.codec, self.config.image
        whole: set[tuple[Clip, Given | None]] = {(clip, None) for clip in clips.values()}
        given = set[tuple[Clip, Given]]()
        if self.config.conditions.are_used:
            for position, clip in clips.items():
                (kind,) = self._draw_conditions(clip.bucket, [position])
                if kind != "t2v":
                    given.add((clip, KINDS[kind]))
        of_controls = self._needed_of_controls(clips)
        if config.path and (config.cache or disk_cache is not None):
            references = {(each, None) for clip in clips.values() for each in clip.references}
            kept_ones = whole | of_controls | references | (set() if self._noise_on_pixels else given)
            num_elements = sum(self._num_elements(clip) for clip, _ in kept_ones)
            if config.cache:
                _check_room("codec.cache keeps the latents of every clip", len(kept_ones), num_elements)
            # What is in new noise each time is never kept, so that the VAE stays.
            needed = kept_ones | given
            build = partial(build_codec, config, self.device, self.dtype)
            stored = None if disk_cache is None else Stored.latents(disk_cache, self.config, self.device)
            assert not isinstance(self.codec, CachedLatents)
            kept: Any = {"in_memory": config.cache, "stored": stored, "conditioning": self.conditioning}
            self.codec = CachedLatents(self.codec, build, needed, **kept)
        encoder = self.pictures
        if isinstance(encoder, PictureEncoder) and (image.cache or (image.path and disk_cache is not None)):
            shown = {clip for clip, kind in given if kind.head}
            if image.cache:
                num_elements = len(shown) * encoder.num_states * encoder.width
                _check_room("image.cache keeps the states of every first frame", len(shown), num_elements)
            taken = self.recipe.pictures or PictureStates()
            again = partial(build_picture_encoder, image, self.config.seed, self.device, self.dtype, taken)
            in_folder = None
            if disk_cache is not None and image.path:
                in_folder = Stored.pictures(disk_cache, image, self.device, taken)
            self.pictures = KeptPictures(encoder, again, shown, in_memory=image.cache, stored=in_folder)

    def _num_elements(self, clip: Clip) -> int:
        """Numbers in the latents of a clip, or of a reference."""
        if clip.is_reference:
            sides = clip.bucket.height, clip.bucket.width
            return self.codec.channels * math.prod(each // self.codec.spatial for each in sides)
        channels, num_frames, height, width = self.latent_shapes[clip.bucket]
        return channels * (num_frames - self.recipe.latent_frames_before(self.config.data)) * height * width

    @property
    def _noise_on_pixels(self) -> bool:
        """Whether pixels of frames that are given are in noise, which is drawn each time."""
        name = "" if self.conditioning is None else self.conditioning.noise_if
        return bool(name and self.arguments[name])

    def _needed_of_controls(self, clips: Mapping[int, Clip]) -> set[tuple[Clip, Given | None]]:
        """What is encoded of controls of these clips, by their positions, and in a branch of grey."""
        needed = set[tuple[Clip, Given | None]]()
        if self.conditioning is None or not self.conditioning.follows_controls:
            return needed
        in_branch = self.conditioning.place == "branch"
        for position, clip in clips.items():
            if in_branch:
                needed.add((_grey_clip(clip.bucket), KINDS["t2v"]))
            if clip.control is not None:
                (kind,) = self._draw_conditions(clip.bucket, [position])
                needed.add((clip.control, _part(KINDS[kind].others) if in_branch else None))
        return needed

    def _encode(self, frames: Tensor, clips: Sequence[Clip], given: Sequence[Given] | None = None) -> Tensor:
        """frames: uint8 [B, T, H, W, 3] of these clips, and what is shown of each → latents [B, C, t, h, w]."""
        if isinstance(self.codec, CachedLatents):
            return self.codec.encode(frames, clips, given and [_part(each) for each in given])
        if given is None:
            return self.codec.encode(frames)
        assert self.conditioning is not None
        return self.conditioning.encode(self.codec, frames, given)

    def _encode_pictures(self, pictures: Tensor, clips: Sequence[Clip]) -> Tensor:
        """pictures: uint8 [B, H, W, 3], the first frames of these clips → states [B, N, width]."""
        assert self.pictures is not None
        if isinstance(self.pictures, KeptPictures):
            return self.pictures.encode(pictures, clips)
        return self.pictures.encode(pictures)

    def _draw_conditions(self, bucket: Bucket, positions: Sequence[int]) -> list[str]:
        config = self.config
        return draw_conditions(
            config.conditions, bucket.num_frames, self.codec.latent_frames, config.seed, positions
        )


def before_clips(references: Sequence[Sequence[Tensor]]) -> Tensor:
    """Latents [1, C, 1, h, w] of each reference of B clips → [B, C, N, h, w], the last reference first."""
    return torch.cat([torch.cat([*reversed(of_clip)], dim=2) for of_clip in references])


def _grey_clip(bucket: Bucket) -> Clip:
    """Stands for a clip of which nothing is shown, which is kept as others are."""
    return Clip("a grey clip", 0, bucket, "a grey clip")


def _part(shown: Given) -> Given | None:
    """What is shown of a clip; None is all of it."""
    return None if shown == KINDS["t2v"].others else shown


def _check_room(what: str, count: int, num_elements: int) -> None:
    """Checks that this rank's clips fit into the memory of its machine.

    Communication: an object all-gather.

    Raises:
        ValueError: on all ranks, where those of one do not.
    """
    needed_bytes = num_elements * torch.float32.itemsize
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = psutil.virtual_memory().available
    if any(gather_objects(needed_bytes * num_ranks > available)):
        option = what.split()[0]
        raise ValueError(
            f"{what} of the run: {count:,} clips, {needed_bytes / 2**30:.1f} GiB on this rank, are more than this "
            "machine has free; cut the videos to data.num_frames, so that each has one clip, or set "
            f"{option} to False (cache_folder keeps them on disk)"
        )
