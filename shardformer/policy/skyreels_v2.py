"""SkyReels-V2 (diffusers `SkyReelsV2Transformer3DModel`; the `WanModel` of its authors stands in `wan.py`).

Text- and image-to-video, and diffusion forcing.
"""

from shardformer.policy.base import (
    Blocks,
    GatherOutput,
    PackedAttention,
    PackedPositions,
    Policy,
    SplitInput,
    SplitOutput,
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
    packed_attention=(
        PackedAttention("blocks.*.attn1", "hidden_states"),
        PackedAttention("blocks.*.attn2", "hidden_states", "encoder_hidden_states"),
    ),
    packed_positions=PackedPositions("rope", "hidden_states"),
    blocks=(Blocks("blocks"),),
    mlps=("blocks.*.ffn",),
)
