"""T5 and UMT5 text encoders (transformers): every RMSNorm becomes `shardformer.modeling.t5.T5LayerNorm`."""

from shardformer.modeling import replace_t5_norms
from shardformer.policy.base import Blocks, Policy
from shardformer.policy.tensors import ColumnParallel, RowParallel, TensorRegion

T5_TENSORS = (
    TensorRegion(
        "encoder.block.*.layer.0.SelfAttention",
        steps=(
            (
                ColumnParallel("q"),
                ColumnParallel("k"),
                ColumnParallel("v"),
                # An embedding with a column for every head: T5's first block has it, UMT5's blocks all do.
                ColumnParallel("relative_attention_bias", optional=True),
            ),
            (RowParallel("o"),),
        ),
        heads=("n_heads",),
        head_widths=("inner_dim",),
    ),
    TensorRegion(
        "encoder.block.*.layer.1.DenseReluDense",
        steps=(
            # wi, or wi_0 and wi_1 of a gated MLP
            tuple(ColumnParallel(name, optional=True) for name in ("wi", "wi_0", "wi_1")),
            (RowParallel("wo"),),
        ),
    ),
)

T5_ENCODER = Policy(
    models=("T5EncoderModel", "UMT5EncoderModel"),
    origin=("transformers",),
    blocks=(Blocks("encoder.block"),),
    tensors=T5_TENSORS,
    norms=("encoder",),
    replacements=(replace_t5_norms,),
)
