"""Latte (diffusers `LatteTransformer3DModel`, its authors' `Latte`): spatial and temporal blocks in turn."""

from shardformer.policy.base import Blocks, GatherGrid, Grid, Policy

# Letters: B clips, F frames, N places of a frame, L text tokens, C, D, E and O channels.
LATTE = Policy(
    models=("LatteTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep encoder_hidden_states encoder_attention_mask enable_temporal_attentions "
        "return_dict"
    ),
    grid_sizes=(("F", "hidden_states", 2),),
    grids=(
        Grid(
            "transformer_blocks.*",
            "F",
            ("hidden_states", "(B F) N C"),
            layouts=(
                ("encoder_hidden_states", "(B F) L D"),
                ("encoder_attention_mask", "(B F) L"),
                ("encoder_attention_mask", "(B F) Q L"),
                ("timestep", "(B F) E"),
            ),
            may_be_empty=False,  # it reshapes with -1
            leave="N",  # the model adds its temporal positions between the blocks
        ),
        Grid(
            "temporal_transformer_blocks.*",
            "N",
            ("hidden_states", "(B N) F C"),
            layouts=(("timestep", "(B N) E"),),
        ),
    ),
    gather_grids=(GatherGrid("proj_out", "(B F) N O"),),
    blocks=(Blocks("transformer_blocks", alternating=("temporal_transformer_blocks",)),),
    attention_regions=("transformer_blocks.*.attn1", "temporal_transformer_blocks.*.attn1"),
)

# In its authors' own repository both kinds of blocks stand in one list. The model adds temporal positions before the
# first temporal block.
LATTE_AUTHORS = Policy(
    models=("Latte",),
    arguments="x t y text_embedding use_fp16",
    grid_sizes=(("F", "x", 1),),
    grids=(
        Grid("blocks.0::2", "F", ("x", "(B F) N C"), layouts=(("c", "(B F) E"),), leave="N"),
        Grid("blocks.1::2", "N", ("x", "(B N) F C"), layouts=(("c", "(B N) E"),)),
    ),
    gather_grids=(GatherGrid("final_layer", "(B F) N O"),),
    blocks=(Blocks("blocks", ("x",)),),
    attention_regions=("blocks.*.attn",),
    mlps=("blocks.*.mlp",),
)
