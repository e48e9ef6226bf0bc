"""Open-Sora's own transformers: STDiT3 (v1.2, v1.3) and MMDiT (v2, `MMDiTModel`), by the names in its repository."""

from dataclasses import replace

from shardformer.policy.base import Blocks, GatherOutput, JointAttention, Policy, SplitInput
from shardformer.policy.grids import gather_grid, spread_grid
from shardformer.policy.tensors import ColumnParallel, RowParallel, TensorRegion
from shardformer.spread import Spread

# Letters: B clips, T frames, S places of a frame, C channels.


def _spread_blocks(spread: Spread, module: str) -> None:
    """The places of a frame are spread, and every rank has all frames: `x_mask` and `mask_index` speak of those."""
    counts = (("T", "T"), ("S", "S"))
    spread_grid(spread, module, "S", ("x", "B (T S) C"), counts=counts, may_be_empty=False)


def spread_spatial_blocks(spread: Spread) -> None:
    """A frame's own attention needs whole frames: there, and nowhere else, the rows R = B·T are spread in place of S.

    An image on several ranks is no special case.
    """
    _spread_blocks(spread, "spatial_blocks.*")
    spread_grid(spread, "spatial_blocks.*.attn", "R", ("x", "R S C"), lends_row=True, leave="S")


def spread_temporal_blocks(spread: Spread) -> None:
    """Each of them follows a spatial block; behind the last one tokens are whole again."""
    _spread_blocks(spread, "temporal_blocks.*")
    gather_grid(spread, "temporal_blocks.-1", "B (T S) C")


def gather_spatial_blocks(spread: Spread) -> None:
    """Without temporal blocks, tokens are whole again behind the last spatial one."""
    gather_grid(spread, "spatial_blocks.-1", "B (T S) C")


STDIT3 = Policy(
    models=("STDiT3",),
    arguments=(
        "x timestep y mask x_mask fps height width cond cond_mask mask_index y_null text_uncond_prob"
    ),
    unfit=(
        ("kernel_size", "attention in windows needs whole windows of a frame on a rank; use full attention"),
        ("enable_sequence_parallelism", "the model splits its tokens by itself then; make it with False"),
    ),
    blocks=(Blocks("spatial_blocks", ("x",), alternating=("temporal_blocks",)),),
    attention_regions=(
        "spatial_blocks.*.attn",
        "spatial_blocks.*.cross_attn",
        "temporal_blocks.*.attn",
        "temporal_blocks.*.cross_attn",
    ),
    mlps=("spatial_blocks.*.mlp", "temporal_blocks.*.mlp"),
    functions=(spread_spatial_blocks, spread_temporal_blocks),
    needs=("spatial_blocks.*.attn", "temporal_blocks.*"),
)  # fmt: skip

# v1.3 with `skip_temporal`, for images.
STDIT3_SPATIAL = replace(
    STDIT3,
    blocks=(Blocks("spatial_blocks", ("x",)),),
    attention_regions=("spatial_blocks.*.attn", "spatial_blocks.*.cross_attn"),
    mlps=("spatial_blocks.*.mlp",),
    functions=(spread_spatial_blocks, gather_spatial_blocks),
    needs=("spatial_blocks.*.attn",),
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
    arguments="img img_ids txt txt_ids timesteps y_vec cond guidance",
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
    attention_regions=(
        ("double_blocks.*.txt_attn.norm", "double_blocks.*.img_attn.proj"),
        ("single_blocks.*.norm", "single_blocks.*.linear2"),
    ),
)
