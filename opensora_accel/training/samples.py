"""Clips sampled from what was learned, beside the clips it was learned from, as mp4 and as a strip of frames."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from opensora_accel.files import replacing
from opensora_accel.training.buckets import Bucket
from opensora_accel.training.classes import arguments_of
from opensora_accel.training.clips import Clip, clip_of, read_references
from opensora_accel.training.conditions import Condition, weights_of
from opensora_accel.training.configured import causal_block_size
from opensora_accel.training.encoding import before_clips
from opensora_accel.training.flow import draw_noise, generator, sample, staggered
from opensora_accel.training.long_samples import goes_on, lengths_of
from opensora_accel.training.objective import Objective
from opensora_accel.training.sections import DataConfig
from opensora_accel.training.video import Reference, UnreadableVideo, Video, read_clip

logger = logging.getLogger(__name__)

STRIP = "strip.png"

_LEAST_HEIGHT = 240
# For clips that no video stands beside.
_FPS = 16.0
_GIF_WIDTH, _GIF_FRAMES = 640, 48
_STRIP_MARGIN = 6
_STRIP_FONT_SIZE = 15


@dataclass(frozen=True)
class SampledClip:
    """A sampled clip: `clip` uint8 [T, H, W, 3], and `source` of that shape, where a video has its caption.

    Beside a clip that is longer than those that are learned, a source is as long as those.
    """

    caption: str
    clip: Tensor
    source: Tensor | None
    # Frames a second.
    fps: float
    # What it sounds like, [channels, samples], and samples a second, where the model makes sound.
    sound: tuple[Tensor, int] | None = None
    # What was given of the source (`conditions.KINDS`).
    kind: str = "t2v"
    # The control that it follows, of the same shape, where the video has one.
    control: Tensor | None = None
    # Its references on white, uint8 [N, H', W', 3], where the run has them.
    references: Tensor | None = None

    @property
    def shown(self) -> Tensor:
        """uint8 [T, H', W', 3]: the source on the left, then the control, the clip on the right, in pixels large enough
        to look at; behind its end the last frame of a source stands still."""
        shown = [each for each in (self.source, self.control, self.clip) if each is not None]
        numbers = torch.arange(len(self.clip))
        pair = torch.cat([each[numbers.clamp(max=len(each) - 1)] for each in shown], dim=2)
        # Whole pixels are repeated.
        factor = max(1, _LEAST_HEIGHT // pair.size(1))
        return pair.repeat_interleave(factor, 1).repeat_interleave(factor, 2)


def sample_clips(
    objective: Objective, videos: Sequence[Video], others: Sequence[str] = ()
) -> list[SampledClip]:
    """A clip for each video's caption and each of the others; every rank has to call, and gets the same clips.

    The videos beside them are read on rank 0 alone, unless frames of them are given. Controls and references are read
    on all.

    A video's has the size that the video is trained with, and the video's control and references. Where frames are
    given in training, those of the kind with the greatest weight are given of the video. Clips of other captions have
    the size with the most tokens, and nothing is given of them.
    """
    config = objective.config
    # Rank 0 shows them; what is given of them goes into the model, on every rank.
    is_read = config.conditions.are_used or dist.get_rank() == 0
    folder = Path(config.data.root)
    sources = [_middle_of(video, config.data, folder / video.file) for video in videos] if is_read else []
    controls = [
        None if video.control is None else _middle_of(video, config.data, video.control) for video in videos
    ]
    references = [_references_of(video) for video in videos]
    rates = [max(1.0, (video.info.fps if video.info else 0) / config.data.frame_stride) for video in videos]
    samples: dict[int, SampledClip] = {}
    for bucket in dict.fromkeys(video.bucket for video in videos):
        numbers = [number for number, video in enumerate(videos) if video.bucket == bucket]
        weights = weights_of(config.conditions, bucket.num_frames, objective.encoders.codec.latent_frames)
        kind = max(weights, key=weights.__getitem__)
        clips = [clip_of(videos[number], _middle(videos[number], config.data)) for number in numbers]
        shown = torch.stack([sources[number] for number in numbers]) if sources else None
        captions = {number: videos[number].caption for number in numbers}
        beside = [controls[number] for number in numbers], [references[number] for number in numbers]
        sampled = _sample(objective, captions, bucket, kind, shown, clips, *beside)
        for number, (clip, sound) in zip(numbers, sampled, strict=True):
            source = sources[number] if sources else None
            # Sound is made for the frame rate that the model is told.
            rate = rates[number] if sound is None else objective.encoders.frame_rate
            of_video = rate, sound, kind, controls[number], _shown_references(videos[number])
            samples[number] = SampledClip(captions[number], clip, source, *of_video)
    captions = dict(enumerate(others, start=len(videos)))
    if captions:
        bucket = max(objective.num_tokens, key=objective.num_tokens.__getitem__)
        for number, (clip, sound) in zip(captions, _sample(objective, captions, bucket), strict=True):
            rate = (rates[0] if rates else _FPS) if sound is None else objective.encoders.frame_rate
            samples[number] = SampledClip(captions[number], clip, None, rate, sound)
    return [samples[number] for number in sorted(samples)]


def _sample(
    objective: Objective,
    captions: Mapping[int, str],
    bucket: Bucket,
    kind: str = "t2v",
    frames: Tensor | None = None,
    clips: Sequence[Clip] = (),
    controls: Sequence[Tensor | None] = (),
    references: Sequence[Sequence[Tensor]] = (),
) -> list[tuple[Tensor, tuple[Tensor, int] | None]]:
    """One clip per caption, uint8 [T, H, W, 3], and its sound, where the model makes it.

    Args:
        captions: each under the number that its noise is drawn by.
        kind: what is given of `frames`, uint8 [N, T, H, W, 3] of `clips`.
        controls: frames [T, H, W, 3] of the controls of those clips that have one.
        references: those of each clip, uint8 [H, W, 3] each, of a run that has references; a caption alone has none.
    """
    encoders = objective.encoders
    channels, num_frames, *sides = encoders.latent_shapes[bucket]
    before, pictures, condition = objective.recipe.latent_frames_before(objective.config.data), None, None
    if any(references):
        found = encoders.encode_references(references, clips)
        if not objective.recipe.references_in_rows:
            pictures = before_clips(found)
        else:
            condition = encoders.condition_of_references(references, found, [*captions])
    else:
        num_frames, before = num_frames - before, 0
    # From the caption's number and the seed: the same noise at every step of the training, to see it learn.
    noise = _noise(objective, (channels, num_frames, *sides), "sample", captions)
    if encoders.conditioning is not None and encoders.conditioning.is_needed([kind]):
        if frames is None:
            size = bucket.num_frames, bucket.height, bucket.width
            frames = torch.zeros(len(captions), *size, 3, dtype=torch.uint8)
        frames = frames.to(objective.device)
        followed = None
        if any(each is not None for each in controls):
            blank = torch.zeros_like(frames[0])
            followed = torch.stack([blank if each is None else each.to(blank) for each in controls])
        kinds, numbers = [kind] * len(captions), [*captions]
        condition, _ = encoders.encode_condition(
            kinds, frames, noise, clips, numbers, followed, pictures, in_sample=True
        )
    streams, of_sound = [noise], encoders.sound_latents(bucket)
    if of_sound is not None:
        streams.append(_noise(objective, of_sound, "sound of a sample", captions))
    latents = sample_latents(objective, streams, list(captions.values()), bucket, condition)
    latents[0] = continued(objective, latents[0], captions, bucket)
    # What was made in the place of references is left out.
    made = encoders.codec.decode(latents[0][:, :, before:])
    if encoders.sounds is None:
        return [(clip, None) for clip in made]
    samples, rate = encoders.sounds.decode(latents[1])
    return [(clip, (each, rate)) for clip, each in zip(made, samples, strict=True)]


def continued(objective: Objective, first: Tensor, captions: Mapping[int, str], bucket: Bucket) -> Tensor:
    """The latents [N, C, t', h, w] of samples that begin with `first` [N, C, t, h, w], of the run's length."""
    flow, latent_frames = objective.config.flow, objective.encoders.codec.latent_frames
    _, *lengths = lengths_of(flow, bucket, latent_frames)
    made = first
    for part, length in enumerate(lengths, start=1):
        overlap = latent_frames.num_latents(flow.overlap_history)
        shape = (first.size(1), length, *first.shape[3:])
        noise = _noise(objective, shape, f"sample, part {part}", captions)
        condition = goes_on(made, noise, overlap)
        (latents,) = sample_latents(objective, [noise], list(captions.values()), bucket, condition, part=part)
        made = torch.cat([made, latents[:, :, overlap:]], dim=2)
    return made


def _noise(objective: Objective, shape: tuple[int, ...], purpose: str, numbers: Iterable[int]) -> Tensor:
    """[N, *shape], each by the number of its caption."""
    rngs = (generator(objective.config.seed, purpose, number) for number in numbers)
    noise = torch.stack([torch.randn(shape, generator=rng) for rng in rngs])
    return noise.to(objective.device, objective.dtype)


def sample_latents(
    objective: Objective,
    noise: Sequence[Tensor],
    captions: Sequence[str],
    bucket: Bucket,
    condition: Condition | None = None,
    *,
    part: int = 0,
) -> list[Tensor]:
    """The latents that the model makes of noise by N captions: [N, C, …] of each stream, the clips' first.

    Args:
        part: which one of a sample that is longer than a clip, by which noise of given frames is drawn.
    """
    config, recipe = objective.config.flow, objective.recipe

    steps = itertools.count()

    def guided(latents: list[Tensor], timestep: Tensor) -> list[Tensor]:
        """latents [N, C, …] of each stream and timestep [N], or [N, t], → their velocities."""
        expert, given = objective.at(timestep), condition
        if given is not None and config.addnoise_condition:
            # Of each step, as the pipeline has it.
            purpose, numbers = f"noise of given frames, step {next(steps)}", range(len(captions))
            if part:
                purpose = f"{purpose} of part {part}"
            drawn = draw_noise(given.latents, objective.config.seed, numbers, purpose=purpose)
            given = given.with_noise(drawn, config.addnoise_condition)
        arguments = arguments_of(expert.model)
        # Distilled from guided answers, and told by how much they are to be guided.
        if arguments.get("guidance_embeds") or arguments.get("guidance_embed"):
            return expert.predict(latents, timestep, bucket, captions, given, config.guidance)
        conditional = expert.predict(latents, timestep, bucket, captions, given)
        without_caption = partial(
            expert.predict, latents, timestep, bucket, [""] * len(captions), in_place_of=captions
        )
        # At 1 a part cancels, and its call of the model is saved.
        by_frames = config.frame_guidance != 1.0 and given is not None
        if config.guidance == 1.0 and not by_frames:
            return conditional
        unconditional = without_caption(condition=given)
        found = _guided(unconditional, conditional, config.guidance)
        if by_frames:
            of_nothing = without_caption(condition=None)
            # v₀ + γ (v_frames − v₀) + g (v − v_frames)
            found = [
                each + (config.frame_guidance - 1) * (shown - nothing)
                for each, shown, nothing in zip(found, unconditional, of_nothing, strict=True)
            ]
        return found

    times = recipe.sample_times(config.sample_steps, objective.time_shift(bucket))
    if config.is_forced:
        arguments = arguments_of(objective.model)
        num_given = 0 if condition is None else condition.num_given
        times = staggered(
            times, noise[0].size(2), config.ar_step, causal_block_size(arguments), num_given=num_given
        )
    clips, *others = sample(
        guided,
        [recipe.start(noise[0], times, condition), *noise[1:]],
        times,
        [1.0, objective.sound_alpha(bucket)][: len(noise)],
    )
    # What was given in the place of noise is put back; what was given beside it, the model has made.
    return [clips if condition is None else condition.in_place(clips), *others]


def _guided(without: Sequence[Tensor], velocities: Sequence[Tensor], guidance: float) -> list[Tensor]:
    """Velocities of each stream, moved away from those without what guides them."""
    return [each + guidance * (velocity - each) for each, velocity in zip(without, velocities, strict=True)]


def _middle(video: Video, config: DataConfig) -> int:
    """The first frame of a clip in the middle of the video."""
    assert video.info is not None
    return (video.info.num_frames - video.bucket.frames_needed(config.frame_stride)) // 2


def _middle_of(video: Video, config: DataConfig, path: str | Path) -> Tensor:
    """Frames uint8 [T, H, W, 3] in the middle of a video, or of its control; grey where it cannot be read.

    Nobody may have tried before.
    """
    bucket, start = video.bucket, _middle(video, config)
    size = {"height": bucket.height, "width": bucket.width}
    try:
        return read_clip(path, start, bucket.num_frames, stride=config.frame_stride, **size)
    except UnreadableVideo as error:
        logger.warning("a sample has grey in the place of what cannot be read: %s", error)
        return torch.full((bucket.num_frames, bucket.height, bucket.width, 3), 128, dtype=torch.uint8)


def _references_of(video: Video) -> list[Tensor]:
    """uint8 [H, W, 3] of each; white where they cannot be read."""
    try:
        return read_references(video)
    except UnreadableVideo as error:
        logger.warning("a sample has white in the place of what cannot be read: %s", error)
        return [torch.full((each.height, each.width, 3), 255, dtype=torch.uint8) for each in video.references]


def _shown_references(video: Video) -> Tensor | None:
    """uint8 [N, H, W, 3], the references in the size of the video's clips, on white; None where it has none."""
    if not video.references:
        return None
    size = video.bucket.height, video.bucket.width
    as_clips = [Reference(each.path, *size) for each in video.references]
    return torch.stack(_references_of(dataclasses.replace(video, references=tuple(as_clips))))


def write_comparison(folder: Path, samples: Sequence[SampledClip]) -> list[Path]:
    """Writes one mp4 per clip, on its left the source where there is one, and strip.png of them all; the mp4 files."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, paths = [], []
    for number, each in enumerate(samples, start=1):
        paths.append(folder / f"clip_{number}.mp4")
        write_video(paths[-1], each.shown, each.fps, each.sound)
        if each.source is not None:
            rows.append((f"source {number}", each.source))
        if each.control is not None:
            rows.append((f"control {number}", each.control))
        if each.references is not None:
            rows.append((f"references {number}", each.references))
        given = "" if each.kind == "t2v" else f", {each.kind}"
        rows.append((f"sampled {number}{given}", each.clip))
    (folder / "captions.txt").write_text("".join(f"{each.caption}\n" for each in samples), encoding="utf-8")
    write_strip(folder / STRIP, rows)
    return paths


def gif_of(sampled: SampledClip) -> tuple[bytes, int, int]:
    """A moving GIF of what is shown, at most 640 pixels wide and of 48 frames, evenly spaced; its width and height."""
    shown = sampled.shown
    picks = torch.linspace(0, len(shown) - 1, min(len(shown), _GIF_FRAMES)).round().long()
    pictures = [Image.fromarray(frame.numpy()) for frame in shown[picks]]
    for picture in pictures:
        picture.thumbnail((_GIF_WIDTH, picture.height))
    # Browsers show no frame for less than 20 ms.
    frame_ms = max(20, round(1000 * len(shown) / len(picks) / sampled.fps))
    file = BytesIO()
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=frame_ms, loop=0)
    return file.getvalue(), *pictures[0].size


def write_video(
    path: str | os.PathLike[str], frames: Tensor, fps: float, sound: tuple[Tensor, int] | None = None
) -> None:
    """Writes `frames` (uint8 [T, H, W, 3]) to `path` as mp4: H.264 if this build of PyAV has it, else MPEG-4.

    Its sound, where there is one, are samples [channels, n] in −1…1 and how many a second has; it is written as AAC.
    yuv420p stores colour at half the size, so an odd height or width gets its last row or column repeated
    once. The file appears under its name only when it is complete.

    Raises:
        ValueError: another dtype or shape, no frames, or a rate that is not positive.
    """
    _check_frames(frames)
    if not fps > 0:
        raise ValueError(f"fps must be positive, got {fps}")
    array = frames.detach().cpu().numpy()
    _, height, width, _ = array.shape
    # In yuv420p one colour covers two by two pixels, so that encoders take even sizes only.
    array = numpy.pad(array, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    codec, options = "mpeg4", {"qscale": "3"}
    if "libx264" in av.codecs_available:
        codec, options = "libx264", {"crf": "16", "preset": "veryfast"}
    with replacing(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        # Containers hold a rate as a fraction of small numbers: 23.976 is 24000/1001.
        rate = Fraction(fps).limit_denominator(1001)
        stream: Any = container.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width, stream.pix_fmt = array.shape[1], array.shape[2], "yuv420p"
        audio: Any = None
        if sound is not None:
            layout = ("mono", "stereo")[len(sound[0]) - 1]
            audio = container.add_stream("aac", rate=sound[1], layout=layout)
        for picture in array:
            picture = numpy.ascontiguousarray(picture)  # as PyAV reads it
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
        if sound is not None:
            samples = numpy.ascontiguousarray(sound[0].numpy(), dtype=numpy.float32)
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
            frame.sample_rate, frame.pts = sound[1], 0
            container.mux(audio.encode(frame))
            container.mux(audio.encode())


def write_strip(
    path: str | os.PathLike[str],
    rows: Sequence[tuple[str, Tensor]],
    *,
    max_frames: int = 8,
    tile_width: int = 192,
) -> None:
    """Writes a PNG with one labelled row of frames per clip, to compare clips at a glance.

    Args: rows: (label, frames uint8 [T, H, W, 3]); up to `max_frames` frames, evenly spaced with the first
    and the last, are drawn, each scaled to `tile_width` pixels. A label too long for its row ends in "...".

    Raises:
        ValueError: there is no row, or frames have another dtype or shape.
    """
    if not rows or max_frames < 1 or tile_width < 1:
        raise ValueError(
            "a strip needs at least one row, one frame and one pixel; got "
            f"{len(rows)} rows, max_frames={max_frames}, tile_width={tile_width}"
        )
    tiles = [_tiles(frames, max_frames, tile_width) for _, frames in rows]
    margin, label_height = _STRIP_MARGIN, _STRIP_FONT_SIZE + _STRIP_MARGIN
    sheet_width = max(len(row) for row in tiles) * (tile_width + margin) + margin
    sheet_height = sum(label_height + row[0].height + margin for row in tiles) + margin
    sheet = Image.new("RGB", (sheet_width, sheet_height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_STRIP_FONT_SIZE)
    top = margin
    for (label, _), row in zip(rows, tiles, strict=True):
        draw.text((margin, top), _shorten(label, draw, font, sheet_width - 2 * margin), "black", font)
        for column, tile in enumerate(row):
            sheet.paste(tile, (margin + column * (tile_width + margin), top + label_height))
        top += label_height + row[0].height + margin
    with replacing(path) as temporary:
        sheet.save(temporary, format="PNG")


def _check_frames(frames: Tensor) -> None:
    """Raises ValueError unless the frames are uint8 [T, H, W, 3] with T of at least 1."""
    if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[3] != 3 or frames.shape[0] < 1:
        raise ValueError(
            f"frames must be uint8 [T, H, W, 3], T 1 or more, got {frames.dtype} {list(frames.shape)}; "
            "scale to 0..255, move channels last and call .to(torch.uint8)"
        )


def _tiles(frames: Tensor, max_frames: int, tile_width: int) -> list[Image.Image]:
    """Evenly spaced frames of a clip, uint8 [T, H, W, 3], each `tile_width` wide."""
    _check_frames(frames)
    num_frames, height, width, _ = frames.shape
    picks = torch.linspace(0, num_frames - 1, min(num_frames, max_frames)).round().long()
    size = (tile_width, max(1, round(height * tile_width / width)))
    pictures = (Image.fromarray(frames[index].cpu().contiguous().numpy()) for index in picks)
    return [picture.resize(size, Image.Resampling.BICUBIC) for picture in pictures]


def _shorten(label: str, draw: ImageDraw.ImageDraw, font: Any, width: int) -> str:
    """The label on one line, cut to `width` pixels."""
    label = shortened = " ".join(label.split())
    while shortened and draw.textlength(shortened, font=font) > width:
        label = label[:-1]
        shortened = label.rstrip() + "..."
        if not label:
            return ""
    return shortened
