"""MiniMax H3: a caption, sound and a clip in one sequence of rows, at a place and a time each.

A clip of 22 frames of 64 × 96 pixels at 24 a second, of which its VAE makes 7 latent frames of 4 × 6, with a caption of
9 tokens; its sound has 37 positions, of two channels:

    row          what               place (time, height, width)             time of the noise
    0…8          caption            0…8, 0, 0                               the clip's
    9…45         sound, left        9, 10, 11, …, 45;  0;  left edge        the sound's
    46…82        sound, right       9, 10, 11, …, 45;  0;  right edge       the sound's
    83…124       clip               9 + 5/3 · (0, 1, 5, 9, 13, 17, 18)      the clip's

A second is 40 long, as many as there are positions of sound. Times run from noise (0) to the clip (1), and answers
point there; the sampler shifts those of clips by 12 and those of sound by 3, of the same share of its way. So does
training.

Where the first frame is given, the last, or both, each is encoded alone, and has rows behind the caption's, at the
place of its frame in time and almost without noise. The caption begins with what its encoder sees of them:

    0…18         "<Picture 1>: ", 4 parts of the frame between two marks, caption
    19…24        first frame        19 (the last: 19 + 5/3 · 21)            0.999, or the clip's where that is more

Weights of its own take references in the same way, each in a shape of its own: the first at the moment behind the
caption, the second at the next, and sound and clip begin behind the last. Two, of 64 × 64 and 96 × 64 pixels, which the
encoder has seen as 4 and 6 parts, before a caption of 9 tokens:

    0…35         "<Picture 1>: ", 4 parts, "<Picture 2>: ", 6 parts, caption
    36…39        first reference    36                                      as that of frames
    40…45        second reference   37
    46…          sound, clip        38 and on

Rows have no batch: what differs between two clips (time, length of the caption) is the model's for all of a call, which
therefore takes one clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.training.captions import TextStates
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.flow import TIMESTEPS, shifted
from opensora_accel.training.recipes.base import Inputs, Recipe, Sizes, patches_of
from opensora_accel.training.recipes.rows import Arguments, RowOf, joined, lengths, part_tokens
from opensora_accel.training.sound import SoundShape, SoundTokens

# How long a second is among the places, and a side of a square clip.
_SECOND, _SIDE = 40.0, 32.0
# Tags of rows: the model modulates each kind in its own way.
_TAG_CLIP, _TAG_TEXT, _TAG_SOUND = 0, 1, 2

# A token for each channel of a position, all of the left one first: [B, C, L, M] → [B, M · L, C].
_SOUND = SoundTokens(
    vae="AutoencoderKLMiniMaxH3Audio",
    folded=SoundShape(8000, 1, 200, 1, 200, 1),
    to_tokens=lambda sound: sound.permute(0, 3, 2, 1).flatten(1, 2),
    from_tokens=lambda tokens, like: tokens.unflatten(1, (like.size(3), like.size(2))).permute(0, 3, 2, 1),
    shift=3.0,
)


def _sound(inputs: Inputs) -> Tensor:
    """[1, M · L, C]."""
    assert inputs.sound is not None
    return _SOUND.to_tokens(inputs.sound)


def _timestep(inputs: Inputs) -> Tensor:
    """[3], the times of the clip, of its sound and of what is given, from 0 (noise) to 1; else [2]."""
    time = inputs.timestep / TIMESTEPS
    times = [time, shifted(time, _SOUND.alpha(inputs.alpha))]
    if inputs.condition is not None:
        times.append(time.clamp(max=inputs.condition.timestep / TIMESTEPS))
    return 1 - torch.cat(times)


def _given(inputs: Inputs) -> Sequence[Tensor]:
    """[1, C, 1, h, w] of each frame that is given, or of each reference."""
    return () if inputs.condition is None else inputs.condition.in_rows()


def _given_times(inputs: Inputs) -> list[float]:
    """How far behind the caption, in time, each of those has its place."""
    condition = inputs.condition
    if condition is None or condition.ends is None:
        return [float(number) for number in range(len(_given(inputs)))]
    (given,) = condition.ends
    last = inputs.latent_frames.num_frames(inputs.grid[0]) - 1
    return [end * last * (_SECOND / inputs.frame_rate) for end in given.numbers]


def _start(inputs: Inputs) -> int:
    """How far behind the caption, in time, sound and clip begin: a moment for each reference."""
    has_references = inputs.condition is not None and inputs.condition.references is not None
    return len(_given(inputs)) if has_references else 0


def _counts(inputs: Inputs) -> tuple[int, int, int, int]:
    """Rows of the caption, of frames that are given or references, of sound and of the clip."""
    assert inputs.sound is not None
    of_time, down, across = inputs.grid
    _, *patch = patches_of(inputs.config)
    return (
        inputs.text.size(1),
        sum(each.size(3) // patch[0] * (each.size(4) // patch[1]) for each in _given(inputs)),
        inputs.sound.size(2) * inputs.sound.size(3),
        of_time * down * across,
    )


def _of_kinds(inputs: Inputs, *of_kinds: int) -> Tensor:
    """[rows], a number for each kind of row."""
    numbers = zip(_counts(inputs), of_kinds, strict=True)
    return torch.cat(
        [torch.full((count,), number, device=inputs.latents.device) for count, number in numbers]
    )


def _tags(inputs: Inputs) -> Tensor:
    """[rows]; what the encoder has seen of a frame counts as the clip's."""
    tags = _of_kinds(inputs, _TAG_TEXT, _TAG_CLIP, _TAG_SOUND, _TAG_CLIP)
    if inputs.seen is not None:
        of_text = tags[: inputs.text.size(1)]
        of_text[inputs.seen[0]] = _TAG_CLIP
    return tags


def _rows(inputs: Inputs, *kinds: int) -> Tensor:
    """[n], which rows the caption (0), what is given (1), the sound (2) or the clip (3) have."""
    counts, device = _counts(inputs), inputs.latents.device
    firsts = [sum(counts[:kind]) for kind in kinds]
    return torch.cat(
        [
            torch.arange(first, first + counts[kind], device=device)
            for first, kind in zip(firsts, kinds, strict=True)
        ]
    )


def _side(size: int, other: int, num_patches: int, device: torch.device) -> Tensor:
    """[num_patches], fp64: where patches begin along a side, of latents; a square's begin at 0 and end at 32."""
    ratio = size / (size * other) ** 0.5
    numbers = torch.arange(num_patches, dtype=torch.float64, device=device)
    return ((1 - ratio) / 2 + numbers * (ratio / num_patches)) * _SIDE


def _places(inputs: Inputs) -> Tensor:
    """[rows, 3], fp64."""
    assert inputs.sound is not None
    device = inputs.latents.device
    length = inputs.text.size(1)
    start = length + _start(inputs)
    _, *patch = patches_of(inputs.config)

    def numbers(count: int) -> Tensor:
        return torch.arange(count, dtype=torch.float64, device=device)

    def places(*sides: Tensor) -> Tensor:
        """[a], [b], [c] → [a · b · c, 3]."""
        return torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1).flatten(0, 2)

    zero = numbers(1)

    def sides(latents: Tensor) -> tuple[Tensor, Tensor]:
        """Of the patches of a frame."""
        height, width = latents.shape[3:]
        return (
            _side(height, width, height // patch[0], device),
            _side(width, height, width // patch[1], device),
        )

    rows, columns = sides(inputs.latents)
    edges = [columns[:1], columns[-1:]]
    channels = [
        places(start + numbers(inputs.sound.size(2)), zero, edge) for edge in edges[: inputs.sound.size(3)]
    ]
    before = inputs.latent_frames.starts(inputs.grid[0], device).double()
    clip = places(start + before * (_SECOND / inputs.frame_rate), rows, columns)
    given = [
        places(length + zero + time, *sides(each))
        for each, time in zip(_given(inputs), _given_times(inputs), strict=True)
    ]
    return torch.cat([places(numbers(length), zero, zero), *given, *channels, clip])


def _join(_model: nn.Module, calls: Sequence[Arguments]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row of rows: numbers of rows and of times are counted on from clip to clip."""
    counts = [len(call["token_tags"]) for call in calls]
    num_times = [len(call["timestep"]) for call in calls]
    moved = [
        {
            **call,
            "timestep_indices": call["timestep_indices"] + first_time,
            **{name: call[name] + first for name in ("text_indices", "audio_indices", "video_indices")},
        }
        for call, first, first_time in zip(
            calls, accumulate(counts, initial=0), accumulate(num_times, initial=0), strict=False
        )
    ]
    states = {name: 1 for name in ("hidden_states", "audio_hidden_states", "encoder_hidden_states")}
    row = joined(moved, {name: states.get(name, 0) for name in calls[0] if name != "return_dict"})
    streams = {"position_ids": counts, "encoder_hidden_states": lengths(calls, "encoder_hidden_states")}
    return row | {"return_dict": False}, streams


def _derive(sizes: Sizes) -> dict[str, Any]:
    assert sizes.sound is not None
    return {
        "in_channels": sizes.input_channels,
        "audio_in_channels": sizes.sound.channels,
        "text_dim": sizes.texts[0].width,
    }


RECIPE = Recipe(
    models=("MiniMaxH3Transformer3DModel",),
    pipeline="MiniMaxH3ModularPipeline",
    call={
        "audio_hidden_states": _sound,
        "encoder_hidden_states": "text",
        "timestep": _timestep,
        # Which of the times a row has.
        "timestep_indices": lambda inputs: _of_kinds(inputs, 0, 2, 1, 0),
        "token_tags": _tags,
        "position_ids": _places,
        "text_indices": lambda inputs: _rows(inputs, 0),
        "audio_indices": lambda inputs: _rows(inputs, 2),
        "video_indices": lambda inputs: _rows(inputs, 1, 3),
    },
    derive=_derive,
    row=RowOf(_join, part_tokens("hidden_states", "audio_hidden_states")),
    layout="tokens",
    sign=-1.0,
    text=(
        TextStates(
            encoders=("qwen3_vl", "qwen3_vl_text"),
            # An encoder gives no state where there is no token.
            reads=lambda caption: caption or " ",
            layer=50,
            special_tokens=False,
            picture="<Picture {}>: ",
        ),
    ),
    # Noise and seed are those of its pipeline (keyframe_noise_aug, keyframe_encode_seed).
    frames=(Conditioning("rows", timestep=1.0, drawn=42, takes_references=True),),
    takes_frame_rate=True,
    sound=_SOUND,
    packs=True,
    published={
        "data.num_frames": 124,
        "data.height": 768,
        "data.width": 1344,
        "data.frame_rate": 24.0,
        "data.reference_side": 2048,
        "text.length": 512,
        "flow.shift": 12.0,
        # It was distilled from guided answers, and is asked with a caption alone.
        "flow.caption_drop": 0.0,
    },
    tiny={
        "num_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": 3,
        "attention_head_dim": 12,
        "hidden_size": 36,
        "ffn_dim": 32,
        "freq_dim": 32,
        "time_embed_hidden_dim": 24,
        "time_embed_dim": 20,
        "rope_freq_dim": 2,
    },
)
