"""Qwen-Image and Qwen-Image-Edit (diffusers `QwenImageTransformer2DModel`)."""

from shardformer.policy.base import Blocks, GatherOutput, JointAttention, Policy, SplitInput, SplitOutput

QWEN_IMAGE = Policy(
    models=("QwenImageTransformer2DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states encoder_hidden_states encoder_hidden_states_mask timestep img_shapes guidance "
        "attention_kwargs controlnet_block_samples additional_t_cond return_dict"
    ),
    split_inputs=(
        SplitInput("", "hidden_states"),  # images to edit stand behind the noisy one, in the same sequence
        SplitInput("", "controlnet_block_samples"),
        SplitInput("transformer_blocks.*", "modulate_index"),  # which of two timesteps a token has
    ),
    split_outputs=(SplitOutput("pos_embed", indices=(0,), dim=0),),  # item 1 is the text's
    gather_outputs=(GatherOutput("proj_out"),),
    joint_attention=(JointAttention("transformer_blocks.*.attn", text="first"),),
    blocks=(Blocks("transformer_blocks", ("hidden_states", "encoder_hidden_states")),),
    mlps=("transformer_blocks.*.img_mlp",),
)
