"""Mochi (diffusers `MochiTransformer3DModel`)."""

from shardformer.policy.base import Blocks, GatherOutput, JointAttention, Policy, SplitInput, SplitOutput

MOCHI = Policy(
    models=("MochiTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states encoder_hidden_states timestep encoder_attention_mask attention_kwargs return_dict"
    ),
    # Angles are made for the whole clip, and a rank needs those of its tokens.
    split_outputs=(SplitOutput("rope", indices=(0, 1), dim=0),),
    split_inputs=(SplitInput("transformer_blocks.0", "hidden_states"),),
    gather_outputs=(GatherOutput("proj_out"),),
    joint_attention=(JointAttention("transformer_blocks.*.attn1", text="last"),),
    unpacked="a call has one time for all of its tokens, and pools its captions",
    blocks=(Blocks("transformer_blocks"),),
    mlps=("transformer_blocks.*.ff",),
)
