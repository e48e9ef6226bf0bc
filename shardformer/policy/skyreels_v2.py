"""SkyReels-V2 (diffusers `SkyReelsV2Transformer3DModel`; the `WanModel` of its authors stands in `wan.py`).

Text- and image-to-video, and diffusion forcing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from opensora_accel.arguments import Arguments
from shardformer.policy.base import (
    BlockMask,
    Blocks,
    GatherOutput,
    PackedAttention,
    PackedPositions,
    Policy,
    SplitInput,
    SplitOutput,
)

if TYPE_CHECKING:
    from opensora_accel.attention import slices


def blocks_of_frames(model: nn.Module, arguments: Arguments) -> slices.AttentionSlices | None:
    """Frames see their own block of `num_frame_per_block` and those before, if it is more than 1; otherwise all."""
    config: Any = model.config
    if config.num_frame_per_block <= 1:
        return None
    from opensora_accel.attention import slices  # loads attention, which not every plan needs

    frames, height, width = (
        size // side
        for size, side in zip(arguments["hidden_states"].shape[2:], config.patch_size, strict=True)
    )
    return slices.AttentionSlices.block_causal(
        frames, height * width, block_frames=config.num_frame_per_block
    )


SKYREELS_V2 = Policy(
    models=("SkyReelsV2Transformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep encoder_hidden_states encoder_hidden_states_image "
        "enable_diffusion_forcing fps return_dict attention_kwargs"
    ),
    split_outputs=(SplitOutput("rope", indices=(0, 1)),),
    split_inputs=(
        SplitInput("blocks.0", "hidden_states"),
        SplitInput("blocks.*", "temb", dim=2, ndim=4),  # diffusion forcing: a timestep for every frame
    ),
    # Before the output's modulation, which has all tokens there.
    gather_outputs=(GatherOutput("blocks.-1"),),
    self_attention=("blocks.*.attn1",),
    block_mask=BlockMask("blocks.0", "attention_mask", "hidden_states", of_clip=blocks_of_frames),
    packed_attention=(
        PackedAttention("blocks.*.attn1", "hidden_states"),
        PackedAttention("blocks.*.attn2", "hidden_states", "encoder_hidden_states"),
    ),
    packed_positions=PackedPositions("rope", "hidden_states"),
    blocks=(Blocks("blocks"),),
    mlps=("blocks.*.ffn",),
)
