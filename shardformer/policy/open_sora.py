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
from shardformer.policy.tensors import ColumnParallel, RowParallel, TensorRegion

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


def _projections(stream: str) -> tuple[ColumnParallel, ...]:
    """Queries, keys and values of a stream: one layer where `fused_qkv`, otherwise three."""
    return (
        ColumnParallel(f"{stream}_attn.qkv", segments=("hidden_size",) * 3, optional=True),
        *(ColumnParallel(f"{stream}_attn.{name}_proj", optional=True) for name in "qkv"),
    )


MMDIT_TENSORS = (
    TensorRegion(
        "double_blocks.*",
        steps=(
            (*_projections("img"), *_projections("txt")),
            (RowParallel("img_attn.proj"), RowParallel("txt_attn.proj")),
        ),
        heads=("num_heads", "img_attn.num_heads", "txt_attn.num_heads"),
        head_widths=("hidden_size",),
        shared=("img_attn.norm", "txt_attn.norm"),
    ),
    *(
        TensorRegion(f"double_blocks.*.{stream}_mlp", steps=((ColumnParallel("0"),), (RowParallel("2"),)))
        for stream in ("img", "txt")
    ),
    TensorRegion(
        "single_blocks.*",
        steps=(
            (
                ColumnParallel("linear1", segments=("hidden_size",) * 3 + ("mlp_hidden_dim",), optional=True),
                ColumnParallel("q_proj", optional=True),
                ColumnParallel("k_proj", optional=True),
                ColumnParallel("v_mlp", segments=("hidden_size", "mlp_hidden_dim"), optional=True),
            ),
            (RowParallel("linear2", segments=("hidden_size", "mlp_hidden_dim")),),
        ),
        heads=("num_heads",),
        head_widths=("hidden_size",),
        widths=("mlp_hidden_dim",),
        shared=("norm",),
    ),
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
    tensors=MMDIT_TENSORS,
    blocks=(Blocks("double_blocks", ("img", "txt")), Blocks("single_blocks", ("x",))),
)
