"""EasyAnimate 5 (diffusers `EasyAnimateTransformer3DModel`): text-, image- and control-to-video."""

from shardformer.policy.base import Blocks, GatherOutput, JointAttention, Policy, SplitInput, SplitOutput

EASYANIMATE = Policy(
    models=("EasyAnimateTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep timestep_cond encoder_hidden_states encoder_hidden_states_t5 "
        "inpaint_latents control_latents return_dict"
    ),
    split_outputs=(SplitOutput("rope_embedding", indices=(0, 1), dim=0),),
    split_inputs=(SplitInput("transformer_blocks.0", "hidden_states"),),
    gather_outputs=(GatherOutput("proj_out"),),
    joint_attention=(JointAttention("transformer_blocks.*.attn1", text="first"),),
    unpacked="a call has one time for all of its tokens",
    blocks=(Blocks("transformer_blocks"),),
    mlps=("transformer_blocks.*.ff",),
)
