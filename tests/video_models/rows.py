"""Samples of several lengths, and the row that has all of them: for models whose tables take rows.

What a model gives of a row is what it gives of its samples, joined as the row is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.packing import per_token, to_row
from tests.models import wan
from tests.video_models.case import Inputs, randn
from tests.video_models.ltx import ltx, ltx2, ltx23
from tests.video_models.minimax_h3 import minimax_h3
from tests.video_models.skyreels_v2 import skyreels

GRIDS = ((3, 6, 4), (1, 4, 6), (4, 4, 10))  # of latents: 18, 6 and 40 tokens of 2 × 2
CAPTIONS = (5, 1, 3)
TIMES = (100.0, 850.0, 420.0)
PATCH = (1, 2, 2)

# The row's input, of the model and the samples' inputs.
Join = Callable[[nn.Module, list[Inputs]], Inputs]


@dataclass(frozen=True)
class Row:
    """Samples, and how they stand in one row."""

    make: Callable[[], nn.Module]
    samples: Callable[[nn.Module], list[Inputs]]
    join: Join
    streams: dict[str, Any]
    differentiated: tuple[str, ...]
    # The row's outputs, of the samples' outputs: they lie along dim 1, unless they are grids.
    outputs: Callable[[list[tuple[Tensor, ...]]], tuple[Tensor, ...]] = lambda outs: tuple(
        torch.cat(each, 1) for each in zip(*outs, strict=True)
    )


def _grids(outs: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return (to_row([out[0].squeeze(0) for out in outs], PATCH),)


def _wan_samples(
    _model: nn.Module, channels: int = 16, text_dim: int = 32, forcing: bool = False
) -> list[Inputs]:
    samples = []
    for number, (grid, length, time) in enumerate(zip(GRIDS, CAPTIONS, TIMES, strict=True)):
        sample: Inputs = {
            "hidden_states": randn(1, channels, *grid, seed=10 + number),
            "timestep": torch.tensor([time]),
            "encoder_hidden_states": randn(1, length, text_dim, seed=20 + number),
        }
        if forcing:  # every frame its own
            sample["timestep"] = time - 20 * torch.arange(grid[0])[None]
            sample["enable_diffusion_forcing"] = True
        samples.append(sample)
    return samples


def _wan_row(_model: nn.Module, samples: list[Inputs]) -> Inputs:
    row: Inputs = {
        "hidden_states": to_row([sample["hidden_states"].squeeze(0) for sample in samples], PATCH),
        "timestep": per_token([sample["timestep"].flatten() for sample in samples], GRIDS, PATCH),
        "encoder_hidden_states": torch.cat([sample["encoder_hidden_states"] for sample in samples], 1),
    }
    return row | {name: samples[0][name] for name in ("enable_diffusion_forcing",) if name in samples[0]}


def _wan_like(make: Callable[[], nn.Module], **options: Any) -> Row:
    differentiated = ("hidden_states", "encoder_hidden_states")
    streams = {"hidden_states": GRIDS, "encoder_hidden_states": CAPTIONS}
    return Row(make, partial(_wan_samples, **options), _wan_row, streams, differentiated, _grids)


# (T, H, W) of tokens
_LTX_GRIDS = ((3, 2, 3), (1, 1, 5), (4, 3, 3))
_SOUND = (4, 1, 6)


def _ltx_samples(_model: nn.Module) -> list[Inputs]:
    samples = []
    for number, ((frames, height, width), length, time) in enumerate(
        zip(_LTX_GRIDS, CAPTIONS, TIMES, strict=True)
    ):
        tokens = frames * height * width
        places = torch.cartesian_prod(*(torch.arange(size) for size in (frames, height, width))).double()
        samples.append(
            {
                "hidden_states": randn(1, tokens, 4, seed=10 + number),
                "encoder_hidden_states": randn(1, length, 16, seed=20 + number),
                "timestep": torch.full((1, tokens), time),
                "video_coords": places.reshape(tokens, 3).T[None] * 8,
                "encoder_attention_mask": None,
                "num_frames": None,
                "height": None,
                "width": None,
            }
        )
    return samples


def _ltx2_samples(model: Any, new: bool = False) -> list[Inputs]:
    samples = _ltx_samples(model)
    for number, (sample, sound, length) in enumerate(zip(samples, _SOUND, CAPTIONS, strict=True)):
        sample |= {
            "video_coords": model.rope.prepare_video_coords(
                1, *_LTX_GRIDS[number], torch.device("cpu"), fps=25.0
            ),
            "audio_hidden_states": randn(1, sound, 6, seed=30 + number),
            "audio_encoder_hidden_states": randn(1, length, 16, seed=40 + number),
            "audio_encoder_attention_mask": None,
            "audio_timestep": torch.full((1, sound), TIMES[number] + 50),
            "audio_coords": model.audio_rope.prepare_audio_coords(1, sound, torch.device("cpu")),
        }
        if new:
            sample |= {
                "encoder_hidden_states": randn(1, length, 24, seed=20 + number),
                "audio_encoder_hidden_states": randn(1, length, 12, seed=40 + number),
                # It modulates the captions, each of whose tokens has its sample's then.
                "sigma": torch.full((1, length), TIMES[number] / 1000),
                "audio_sigma": torch.full((1, length), TIMES[number] / 1000 + 0.05),
            }
    return samples


def _ltx_row(_model: nn.Module, samples: list[Inputs]) -> Inputs:
    return {
        name: torch.cat([sample[name] for sample in samples], 2 if name.endswith("coords") else 1)
        if isinstance(value, Tensor)
        else value
        for name, value in samples[0].items()
    }


_LTX_STREAMS = {
    "hidden_states": [frames * height * width for frames, height, width in _LTX_GRIDS],
    "encoder_hidden_states": CAPTIONS,
}
_LTX2_STREAMS = _LTX_STREAMS | {"audio_hidden_states": _SOUND, "audio_encoder_hidden_states": CAPTIONS}


def _h3_samples(_model: nn.Module) -> list[Inputs]:
    """Text, a given first frame, the others of the video, and sound: in each sample of another length."""
    samples = []
    for number, ((frames, height, width), text, sound) in enumerate(
        zip(_LTX_GRIDS, CAPTIONS, _SOUND, strict=True)
    ):
        video = frames * height * width
        rows = torch.arange(text + video + sound)
        places = torch.cartesian_prod(*(torch.arange(size) for size in (frames, height, width)))
        samples.append(
            {
                "hidden_states": randn(1, video, 16, seed=10 + number),
                "audio_hidden_states": randn(1, sound, 6, seed=30 + number),
                "encoder_hidden_states": randn(1, text, 16, seed=20 + number),
                "timestep": torch.tensor([0.001, TIMES[number] / 1000]),
                "timestep_indices": (rows >= text + height * width).long(),
                "token_tags": torch.cat(
                    [torch.full((n,), tag) for tag, n in ((1, text), (0, video), (2, sound))]
                ),
                "position_ids": torch.cat(
                    [
                        rows[:text, None].repeat(1, 3),
                        places.reshape(video, 3),
                        rows[:sound, None].repeat(1, 3),
                    ]
                ).double(),
                "video_indices": rows[text : text + video],
                "audio_indices": rows[text + video :],
                "text_indices": rows[:text],
            }
        )
    return samples


def _h3_row(_model: nn.Module, samples: list[Inputs]) -> Inputs:
    """Indices of rows and of times are counted on from sample to sample."""
    row: Inputs = {}
    starts = torch.tensor([len(sample["token_tags"]) for sample in samples]).cumsum(0)
    for name in samples[0]:
        parts = [sample[name] for sample in samples]
        if name in ("video_indices", "audio_indices", "text_indices"):
            parts = [part + start for part, start in zip(parts, [0, *starts.tolist()], strict=False)]
        if name == "timestep_indices":
            parts = [part + 2 * number for number, part in enumerate(parts)]
        row[name] = torch.cat(parts, 1 if "hidden_states" in name else 0)
    return row


_H3_LENGTHS = [
    text + frames * height * width + sound
    for (frames, height, width), text, sound in zip(_LTX_GRIDS, CAPTIONS, _SOUND, strict=True)
]
_H3_STREAMS = {"position_ids": _H3_LENGTHS, "encoder_hidden_states": CAPTIONS}

_OF_LTX = ("hidden_states", "encoder_hidden_states")
_OF_LTX2 = (*_OF_LTX, "audio_hidden_states", "audio_encoder_hidden_states")

ROWS = {
    "Wan": _wan_like(wan),
    "SkyReels-V2, diffusion forcing": _wan_like(skyreels, channels=4, text_dim=16, forcing=True),
    "LTX-Video": Row(ltx, _ltx_samples, _ltx_row, _LTX_STREAMS, _OF_LTX),
    "LTX-2": Row(ltx2, _ltx2_samples, _ltx_row, _LTX2_STREAMS, _OF_LTX2),
    "LTX-2.3": Row(ltx23, partial(_ltx2_samples, new=True), _ltx_row, _LTX2_STREAMS, _OF_LTX2),
    "MiniMax-H3": Row(
        minimax_h3,
        _h3_samples,
        _h3_row,
        _H3_STREAMS,
        ("hidden_states", "encoder_hidden_states", "audio_hidden_states"),
    ),
}
