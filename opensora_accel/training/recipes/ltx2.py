"""LTX-2 and LTX-2.3: clips and their sound, two streams of tokens that see each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from opensora_accel.training.captions import TextStates
from opensora_accel.training.conditions import Conditioning
from opensora_accel.training.recipes import ltx
from opensora_accel.training.recipes.base import Inputs, Recipe, Sizes
from opensora_accel.training.recipes.rows import Arguments, RowOf, joined, lengths, part_tokens, per_token
from opensora_accel.training.sound import SoundShape, SoundTokens

# A token has all numbers of a position: [B, C, L, M] → [B, L, C · M].
_SOUND = SoundTokens(
    vae="AutoencoderKLLTX2Audio",
    folded=SoundShape(8000, 1, 80, 4, 20, 16),
    to_tokens=lambda sound: sound.transpose(1, 2).flatten(2),
    from_tokens=lambda tokens, like: tokens.unflatten(2, (like.size(1), like.size(3))).transpose(1, 2),
)


def _sound(inputs: Inputs) -> Tensor:
    """[B, L, C · M]."""
    assert inputs.sound is not None
    return _SOUND.to_tokens(inputs.sound)


def _text_widths(config: Mapping[str, Any]) -> tuple[int, int]:
    """How wide the states of a caption are that clips see, and those that sound sees."""
    if config["use_prompt_embeddings"]:
        return config["caption_channels"], config["caption_channels"]
    return config["cross_attention_dim"], config["audio_cross_attention_dim"]


def _widths(given: Mapping[str, Any]) -> tuple[int, int]:
    """Of the transformer, for clips and for sound."""
    return (
        given["num_attention_heads"] * given["attention_head_dim"],
        given["audio_num_attention_heads"] * given["audio_attention_head_dim"],
    )


def _derive(sizes: Sizes) -> dict[str, Any]:
    given, sound = sizes.arguments, sizes.sound
    assert sound is not None
    width, sound_width = _widths(given)
    derived = {
        "in_channels": sizes.input_channels,
        "out_channels": sizes.channels,
        # A token is one latent position here, as in all that is published.
        "patch_size": 1,
        "patch_size_t": 1,
        # Where tokens lie in seconds and pixels.
        "vae_scale_factors": [sizes.temporal, sizes.spatial, sizes.spatial],
        "audio_in_channels": sound.channels * sound.bins,
        "audio_out_channels": sound.channels * sound.bins,
        "audio_sampling_rate": sound.rate,
        "audio_hop_length": sound.hop,
        "audio_scale_factor": sound.spectra,
        "cross_attention_dim": width,
        "audio_cross_attention_dim": sound_width,
    }
    # What the connectors make for clips and for sound, side by side.
    of_text = sizes.texts[0].width
    if given["use_prompt_embeddings"]:
        # Of one width, and projected to those of the transformer before they are attended to.
        return derived | {"caption_channels": of_text // 2}
    return derived


def _check(sizes: Sizes) -> None:
    given, of_text = sizes.arguments, sizes.texts[0].width
    width, sound_width = _widths(given)
    if not given["use_prompt_embeddings"] and of_text != width + sound_width:
        raise ValueError(
            f"captions have {of_text} numbers, and a model with use_prompt_embeddings=false attends to {width} for "
            f"clips and {sound_width} for sound; choose the connectors of its pipeline, or, without an encoder, set "
            f"text.width to {(width + sound_width) // 2}"
        )


_STREAMS = (
    "hidden_states",
    "audio_hidden_states",
    "encoder_hidden_states",
    "audio_encoder_hidden_states",
)


def _join(model: Any, calls: Sequence[Arguments]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row is told where its tokens lie. Clip and sound have one time, so that each takes its own tokens' (and not,
    by `use_cross_timestep`, the other's, of which there are other numbers of tokens). Captions are modulated by the
    time of their clip."""
    placed = []
    for call in calls:
        device, time = call["hidden_states"].device, call["sigma"]
        counts = {name: call[name].size(1) for name in _STREAMS}
        placed.append(
            {
                **call,
                "timestep": per_token(call["timestep"], counts["hidden_states"]),
                "audio_timestep": per_token(time, counts["audio_hidden_states"]),
                "sigma": per_token(time, counts["encoder_hidden_states"]),
                "audio_sigma": per_token(time, counts["audio_encoder_hidden_states"]),
                "video_coords": model.rope.prepare_video_coords(
                    1, call["num_frames"], call["height"], call["width"], device, fps=call["fps"]
                ),
                "audio_coords": model.audio_rope.prepare_audio_coords(1, call["audio_num_frames"], device),
            }
        )
    times = ("timestep", "audio_timestep", "sigma", "audio_sigma")
    row = joined(placed, dict.fromkeys((*_STREAMS, *times), 1) | {"video_coords": 2, "audio_coords": 2})
    return (
        row | {"use_cross_timestep": False, "return_dict": False},
        {name: lengths(calls, name) for name in _STREAMS},
    )


def _refuses(config: Any, _arguments: Arguments) -> str:
    if config.conditions.are_used:
        return "conditions: frames that are given have another time than their sound, which a row's tokens are not told"
    return ""


RECIPE = Recipe(
    models=("LTX2VideoTransformer3DModel",),
    pipeline="LTX2Pipeline",
    call={
        "audio_hidden_states": _sound,
        "encoder_hidden_states": lambda inputs: inputs.text[..., : _text_widths(inputs.config)[0]],
        "audio_encoder_hidden_states": lambda inputs: inputs.text[..., -_text_widths(inputs.config)[1] :],
        "timestep": "token_timestep",
        # Clip and sound have one time. Their authors also train them at two; diffusers' model would then take scale and
        # shift from the other stream's, where theirs takes its own.
        "audio_timestep": "timestep",
        "sigma": "timestep",
        "num_frames": lambda inputs: inputs.latents.size(2),
        "height": lambda inputs: inputs.latents.size(3),
        "width": lambda inputs: inputs.latents.size(4),
        "fps": "frame_rate",
        "audio_num_frames": lambda inputs: _sound(inputs).size(1),
        # As the pipeline has it.
        "use_cross_timestep": lambda _: True,
    },
    derive=_derive,
    check=_check,
    row=RowOf(_join, part_tokens("hidden_states", "audio_hidden_states"), _refuses),
    layout="tokens",
    frames=(Conditioning("latents"),),
    text=(
        TextStates(
            encoders=("gemma3", "gemma3_text"),
            reads=str.strip,
            padding_side="left",
            connectors=("LTX2TextConnectors",),
        ),
    ),
    takes_frame_rate=True,
    sound=_SOUND,
    times=ltx.RECIPE.times,
    published={
        "data.num_frames": 121,
        "data.height": 512,
        "data.width": 768,
        "text.length": 1024,
        "flow.shift": "ltx",
        "flow.time_distribution": "stretched",
    },
    tiny={
        "num_layers": 2,
        "num_attention_heads": 3,
        "attention_head_dim": 12,
        "audio_num_attention_heads": 3,
        "audio_attention_head_dim": 12,
    },
)
