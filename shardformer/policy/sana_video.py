"""SANA-Video (diffusers `SanaVideoTransformer3DModel`): linear attention, and convolutions over space and time."""

from shardformer.policy.base import Blocks, Frames, GatherOutput, Halo, Policy, SplitInput

SANA_VIDEO = Policy(
    models=("SanaVideoTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states encoder_hidden_states timestep guidance encoder_attention_mask attention_mask "
        "attention_kwargs controlnet_block_samples return_dict"
    ),
    frames=Frames("transformer_blocks.*", "frames", sizes=("height", "width")),
    split_inputs=(
        SplitInput("transformer_blocks.0", "hidden_states"),
        SplitInput("transformer_blocks.*", "rotary_emb"),
        # One for every token, which the block reshapes with -1, or of the clip.
        SplitInput("transformer_blocks.*", "timestep", may_be_empty=False),
        SplitInput("norm_out", "temb"),
    ),
    halos=(Halo("transformer_blocks.*.ff.conv_temp", dim=2),),
    linear_attention=("transformer_blocks.*.attn1",),
    gather_outputs=(GatherOutput("proj_out"),),
    blocks=(Blocks("transformer_blocks"),),
    refuses=(("controlnet_block_samples", "the model adds them between its blocks, for all tokens"),),
)
