"""Latte (diffusers `LatteTransformer3DModel`, its authors' `Latte`): spatial and temporal blocks in turn."""

from shardformer.policy.base import Blocks, Policy
from shardformer.policy.grids import gather_grid, read_sizes, spread_grid
from shardformer.spread import Spread

# Letters: B clips, F frames, N places of a frame, L text tokens, C, D, E and O channels.


def spread_in_turn(spread: Spread) -> None:
    """Spatial blocks have a rank's frames, temporal ones its places."""
    read_sizes(spread, ("F", "hidden_states", 2))
    spread_grid(
        spread,
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
    )
    spread_grid(
        spread,
        "temporal_transformer_blocks.*",
        "N",
        ("hidden_states", "(B N) F C"),
        layouts=(("timestep", "(B N) E"),),
    )
    gather_grid(spread, "proj_out", "(B F) N O")


def spread_in_one_list(spread: Spread) -> None:
    """The same of blocks in one list, before the first temporal one of which the model adds temporal positions."""
    read_sizes(spread, ("F", "x", 1))
    spread_grid(spread, "blocks.0::2", "F", ("x", "(B F) N C"), layouts=(("c", "(B F) E"),), leave="N")
    spread_grid(spread, "blocks.1::2", "N", ("x", "(B N) F C"), layouts=(("c", "(B N) E"),))
    gather_grid(spread, "final_layer", "(B F) N O")


LATTE = Policy(
    models=("LatteTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep encoder_hidden_states encoder_attention_mask enable_temporal_attentions "
        "return_dict"
    ),
    unpacked="it attends along time and along space by turns, for which clips have one shape",
    blocks=(Blocks("transformer_blocks", alternating=("temporal_transformer_blocks",)),),
    attention_regions=("transformer_blocks.*.attn1", "temporal_transformer_blocks.*.attn1"),
    functions=(spread_in_turn,),
    needs=("transformer_blocks.*", "temporal_transformer_blocks.*", "proj_out"),
)

# In its authors' own repository both kinds of blocks stand in one list.
LATTE_AUTHORS = Policy(
    models=("Latte",),
    arguments="x t y text_embedding use_fp16",
    blocks=(Blocks("blocks", ("x",)),),
    attention_regions=("blocks.*.attn",),
    mlps=("blocks.*.mlp",),
    functions=(spread_in_one_list,),
    needs=("blocks.0::2", "blocks.1::2", "final_layer"),
)
