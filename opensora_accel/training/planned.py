"""A configured run as the planner asks for it: its transformer and inputs at true size, and what stays beside them."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from opensora_accel.observe import Forecast
from opensora_accel.plan import Plan
from opensora_accel.planner import Frozen, Job, Residents, Workload, choose_foreseen
from opensora_accel.training import configured
from opensora_accel.training.classes import arguments_of
from opensora_accel.training.codec import VideoVAE, build_codec
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.pictures import build_picture_encoder
from opensora_accel.training.sound import build_sound_codec
from opensora_accel.training.text_encoders import build_text_encoder, text_paths
from opensora_accel.training.true_size import TrueRow, TrueSize, true_sizes

_MOMENTS = {"fp32": "adamw", "8bit": "adamw-8bit", "4bit": "adamw-4bit", "fp8": "adamw-fp8"}


@dataclass(frozen=True)
class PlannedSize:
    """One size of clips of a run."""

    # "33x480x832".
    name: str
    true: TrueSize
    num_tokens: int
    num_heads: int

    def workload(self, batch: int) -> Workload:
        """A pass of so many clips on each data rank, as the trainer has it."""
        return Workload(
            self.name,
            self.true.model,
            partial(self.true.prepare, batch=batch),
            batch=batch,
            num_tokens=self.num_tokens,
            text_tokens=self.true.config.text.length + self.true.picture_tokens,
            num_heads=self.num_heads,
        )


def job_of(config: TrainConfig) -> Job:
    """The run, as the planner takes it.

    Raises:
        ValueError, FileNotFoundError: as `planned_sizes` and `frozen_parts`.
    """
    config.refuse_two_experts("the planner counts")
    residents = Residents(
        _MOMENTS[config.optim.state] if config.optim.algorithm == "adamw" else config.optim.algorithm,
        bool(config.optim.ema_decay),
        {kind: Frozen(*part) for kind, part in frozen_parts(config).items()},
        clips=config.optim.clip_norm > 0,
    )
    if config.data.packed_tokens:
        # A sample is a row. A data rank runs its rows one after the other, each with a backward of its own.
        mix = ((workload_of_rows(config), 1.0),)
        return Job(mix, config.plan.precision, residents, config.data.batch_size)
    sizes = {size.name: size for size in planned_sizes(config)}
    return Job(
        tuple((size.workload(1), 1.0) for size in sizes.values()),
        config.plan.precision,
        residents,
        config.data.batch_size,
        config.optim.accumulation,
        lambda workload, batch: sizes[workload.name].workload(batch),
    )


def choose_plan(config: TrainConfig) -> tuple[Plan, Forecast]:
    """For `plan = "auto"`: the best that fits this machine, or a calibrated file of it, and what is foreseen of it.

    Call it before any group.

    On GPUs it computes in bf16.

    Raises:
        ValueError: no plan fits, and what would help.
    """
    job = job_of(config)
    if torch.cuda.is_available():
        job = dataclasses.replace(job, precision="bf16")
    return choose_foreseen(job, int(os.environ.get("WORLD_SIZE", "1")))


def planned_sizes(config: TrainConfig) -> list[PlannedSize]:
    """Every size of clips of the run, in the order of the configuration.

    Loads the VAE that the run names, for its sizes, and reads the headers of references in their own shapes.

    Raises:
        ValueError: the model cannot be made, or a size does not fit the codec; as the trainer would say it.
        FileNotFoundError: `data.references` of such is no folder.
    """
    sizes = []
    for size, true in true_sizes(config).items():
        with torch.device("meta"):
            outline: Any = true.model()
        tokens = true.tokens_of_clip(outline) + true.tokens_of_references(outline)
        heads = configured.recipe_of(config.model).num_heads(arguments_of(outline))
        sizes.append(PlannedSize(str(size), true, tokens, heads))
    return sizes


def workload_of_rows(config: TrainConfig) -> Workload:
    """The fullest row of a run of rows, as `TrueRow` says which that is.

    Raises:
        ValueError: as `TrueRow.of`.
    """
    row = TrueRow.of(config)
    with torch.device("meta"):
        arguments = arguments_of(row.model())
    return Workload(
        f"a row of {row.num_tokens:,} tokens ({row.name})",
        row.model,
        row.prepare,
        num_tokens=row.num_tokens,
        text_tokens=sum(clip.config.text.length + clip.picture_tokens for clip in row.clips),
        num_heads=configured.recipe_of(config.model).num_heads(arguments),
    )


def frozen_parts(config: TrainConfig) -> dict[str, tuple[int, str]]:
    """Bytes of the encoders that are on the device while the run trains, by kind, each with the option that names it.

    A VAE and a picture encoder are counted with a cache too: they stay until the last clip is encoded. A text encoder
    with text.cache is gone before the transformer comes. The small encoders of a run without folders are not counted.
    Sizes are read, and no weights: these need not be there.

    Raises:
        FileNotFoundError, ValueError: a folder holds none; as the trainer would say it.
    """
    meta, dtype = torch.device("meta"), torch.float32
    parts: dict[str, tuple[nn.Module, str]] = {}
    if config.text.path and not config.text.cache:
        taken = configured.texts_of(config)
        for number, (option, path) in enumerate(text_paths(config.text, taken)):
            text = build_text_encoder(config.text, "", config.seed, meta, dtype, taken, number)
            kind = ("text encoder", "second text encoder")[number]
            parts[kind] = text.model, f"{option} {path} in {config.text.dtype}"
            if text.connectors is not None:
                parts["connectors"] = (
                    text.connectors,
                    f"text.path_2 {config.text.path_2} in {config.text.dtype}",
                )
    codec = build_codec(config.codec, meta, dtype)
    if isinstance(codec, VideoVAE):
        parts["vae"] = codec.model, f"codec.path {config.codec.path} in {config.codec.dtype}"
    of_sound = configured.recipe_of(config.model).sound
    if config.codec.sound_path and of_sound is not None:
        sounds: Any = build_sound_codec(config.codec, of_sound, meta, dtype)
        parts["sound vae"] = sounds.model, f"codec.sound_path {config.codec.sound_path} in fp32"
    if config.image.path:
        taken_pictures = configured.pictures_of(config)
        pictures = build_picture_encoder(config.image, config.seed, meta, dtype, taken_pictures)
        parts["image encoder"] = pictures.model, f"image.path {config.image.path} in {config.image.dtype}"
    return {
        kind: (sum(each.nbytes for each in (*model.parameters(), *model.buffers())), source)
        for kind, (model, source) in parts.items()
    }
