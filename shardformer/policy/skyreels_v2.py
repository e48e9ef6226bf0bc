"""SkyReels-V2 (diffusers `SkyReelsV2Transformer3DModel`, and `WanModel` in its authors' own repository).

Text- and image-to-video, and diffusion forcing.
"""

from dataclasses import replace

from shardformer.policy import wan
from shardformer.policy.base import Blocks, GatherOutput, Policy, SplitInput, SplitOutput

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
    blocks=(Blocks("blocks"),),
    mlps=("blocks.*.ffn",),
)

# Built like its ancestor, the Wan of Wan's authors, but clips have one length and come as one tensor, and with
# diffusion forcing the embedding of time is [B, 6, S, C].
SKYREELS_V2_AUTHORS = replace(
    wan.WAN_AUTHORS,
    arguments="x t context clip_fea y fps",
    split_inputs=(
        SplitInput("blocks.0", "x"),
        SplitInput("blocks.*", "e", dim=2, ndim=4),
        SplitInput("head", "e", ndim=3),
    ),
)
