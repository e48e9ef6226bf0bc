"""Allegro (diffusers `AllegroTransformer3DModel`)."""

from shardformer.policy.base import Blocks, GatherOutput, Policy, SplitInput

ALLEGRO = Policy(
    models=("AllegroTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states encoder_hidden_states timestep attention_mask encoder_attention_mask "
        "image_rotary_emb return_dict"
    ),
    split_inputs=(
        SplitInput("transformer_blocks.0", "hidden_states"),
        SplitInput("transformer_blocks.*", "attention_mask", dim=2),
        # Tables of angles, and every token's place in them: the places are split.
        SplitInput("transformer_blocks.*", "image_rotary_emb.1", dim=-1),
    ),
    gather_outputs=(GatherOutput("proj_out"),),
    self_attention=("transformer_blocks.*.attn1",),
    unpacked="a call has one time for all of its tokens",
    blocks=(Blocks("transformer_blocks"),),
    mlps=("transformer_blocks.*.ff",),
)
