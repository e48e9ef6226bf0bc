"""Open-Sora's own transformers: STDiT3 (v1.2) and MMDiT (v2, `MMDiTModel`), by the names in its repository."""

from shardformer.policy.base import (
    Blocks,
    GatherGrid,
    GatherOutput,
    Grid,
    JointAttention,
    Policy,
    SplitInput,
)

_TOKENS = ("x", "B (T S) C")
_COUNTS = (("T", "T"), ("S", "S"))

STDIT3 = Policy(
    models=("STDiT3",),
    grids=(
        # A spatial block needs whole frames, a temporal one whole clips of a place.
        Grid("spatial_blocks.*", "T", _TOKENS, layouts=(("x_mask", "B T"),), counts=_COUNTS),
        Grid("temporal_blocks.*", "S", _TOKENS, layouts=(("x_mask", "B T"),), counts=_COUNTS),
    ),
    gather_grids=(GatherGrid("temporal_blocks.-1", "B (T S) C"),),
    blocks=(Blocks("spatial_blocks", ("x",), alternating=("temporal_blocks",)),),
    mlps=("spatial_blocks.*.mlp", "temporal_blocks.*.mlp"),
)

MMDIT = Policy(
    models=("MMDiTModel",),
    split_inputs=(
        SplitInput("img_in", "input"),
        SplitInput("cond_in", "input"),
        SplitInput("pe_embedder", "ids", text="first"),
    ),
    gather_outputs=(GatherOutput("final_layer"),),
    joint_attention=(JointAttention("double_blocks.*", "first"), JointAttention("single_blocks.*", "first")),
    kernel_functions=("flash_attn_func",),
    blocks=(Blocks("double_blocks", ("img", "txt")), Blocks("single_blocks", ("x",))),
)
