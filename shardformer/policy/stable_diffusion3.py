"""Stable Diffusion 3 and 3.5 (diffusers `SD3Transformer2DModel`)."""

from dataclasses import replace

from shardformer.policy.base import Blocks, GatherOutput, JointAttention, Policy, SplitInput

SD35 = Policy(
    models=("SD3Transformer2DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states encoder_hidden_states pooled_projections timestep block_controlnet_hidden_states "
        "joint_attention_kwargs return_dict skip_layers"
    ),
    split_inputs=(
        SplitInput("transformer_blocks.0", "hidden_states"),
        SplitInput("", "block_controlnet_hidden_states"),
    ),
    gather_outputs=(GatherOutput("proj_out"),),
    joint_attention=(JointAttention("transformer_blocks.*.attn", text="last"),),
    # Some blocks attend to the image once more, without the text.
    self_attention=("transformer_blocks.*.attn2",),
    blocks=(Blocks("transformer_blocks", ("hidden_states", "encoder_hidden_states")),),
    mlps=("transformer_blocks.*.ff",),
)

SD3 = replace(
    SD35,
    unfit=(("dual_attention_layers", "its blocks have no second attention"),),
    self_attention=(),
)
