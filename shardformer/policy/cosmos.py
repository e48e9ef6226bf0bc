"""Cosmos 1, 2 and Transfer (diffusers `CosmosTransformer3DModel`)."""

from shardformer.policy.base import Blocks, GatherOutput, Policy, SplitInput, SplitOutput

COSMOS = Policy(
    models=("CosmosTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep encoder_hidden_states block_controlnet_hidden_states attention_mask fps "
        "condition_mask padding_mask return_dict"
    ),
    split_outputs=(SplitOutput("rope", indices=(0, 1), dim=0),),
    split_inputs=(
        SplitInput("transformer_blocks.0", "hidden_states"),
        # One for the clip, or for every token where frames have timesteps of their own.
        SplitInput("transformer_blocks.*", "embedded_timestep", ndim=3),
        SplitInput("transformer_blocks.*", "temb", ndim=3),
        SplitInput("transformer_blocks.*", "extra_pos_emb"),
        SplitInput("transformer_blocks.*", "controlnet_residual"),
        SplitInput("norm_out", "embedded_timestep", ndim=3),
        SplitInput("norm_out", "temb", ndim=3),
    ),
    gather_outputs=(GatherOutput("proj_out"),),
    self_attention=("transformer_blocks.*.attn1",),
    blocks=(Blocks("transformer_blocks"),),
    mlps=("transformer_blocks.*.ff",),
)
