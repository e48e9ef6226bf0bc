"""CogVideoX 1.0 and 1.5 (diffusers `CogVideoXTransformer3DModel`), and ConsisID, which adds faces to it."""

from shardformer.policy.base import Blocks, GatherOutput, JointAttention, Policy, SplitInput

COGVIDEOX = Policy(
    models=("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"),
    origin=("diffusers",),
    arguments=(
        "hidden_states encoder_hidden_states timestep timestep_cond ofs image_rotary_emb attention_kwargs "
        "return_dict id_cond id_vit_hidden"
    ),
    split_inputs=(
        SplitInput("transformer_blocks.0", "hidden_states"),
        SplitInput("transformer_blocks.*", "image_rotary_emb", dim=0),
    ),
    gather_outputs=(GatherOutput("proj_out"),),
    joint_attention=(JointAttention("transformer_blocks.*.attn1", text="first"),),
    unpacked="a call has one time for all of its tokens",
    blocks=(Blocks("transformer_blocks"),),
)
