"""LTX-Video, LTX-2 and LTX-2.3 (diffusers `LTXVideoTransformer3DModel`, `LTX2VideoTransformer3DModel`)."""

from dataclasses import replace

from shardformer.policy.base import Blocks, GatherOutput, Policy, SplitInput, SplitOutput

LTX = Policy(
    models=("LTXVideoTransformer3DModel",),
    # The model's input is tokens, and what is split there is never computed whole.
    split_inputs=(
        SplitInput("", "hidden_states"),
        SplitInput("", "timestep", ndim=2),  # of every token, or of the clip
    ),
    split_outputs=(SplitOutput("rope", indices=(0, 1)),),
    gather_outputs=(GatherOutput("proj_out"),),
    self_attention=("transformer_blocks.*.attn1",),
    blocks=(Blocks("transformer_blocks"),),
    mlps=("transformer_blocks.*.ff",),
)

LTX2 = replace(
    LTX,
    models=("LTX2VideoTransformer3DModel",),
    split_inputs=(*LTX.split_inputs, SplitInput("", "video_keyframes_mask")),
    # [B, S, D], or [B, H, S, D] where every head has positions of its own.
    split_outputs=(
        SplitOutput("rope", indices=(0, 1), dim=-2),
        SplitOutput("cross_attn_rope", indices=(0, 1), dim=-2),
    ),
    whole_queries=("transformer_blocks.*.video_to_audio_attn",),  # the audio is on every rank
    blocks=(Blocks("transformer_blocks", ("hidden_states", "audio_hidden_states")),),
    refuses=(
        (
            "video_self_attention_mask",
            "the model pads a mask of all tokens to its own number of tokens; leave it out in training",
        ),
    ),
)
