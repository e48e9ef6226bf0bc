"""Kandinsky 5 (diffusers `Kandinsky5Transformer3DModel`)."""

from shardformer.policy.base import Blocks, GatherOutput, Policy, SplitInput

KANDINSKY5 = Policy(
    models=("Kandinsky5Transformer3DModel",),
    split_inputs=(
        SplitInput("visual_transformer_blocks.0", "visual_embed"),
        SplitInput("visual_transformer_blocks.*", "rope"),
    ),
    gather_outputs=(GatherOutput("visual_transformer_blocks.-1"),),
    self_attention=("visual_transformer_blocks.*.self_attention",),
    blocks=(Blocks("visual_transformer_blocks", ("visual_embed",)),),
    mlps=("visual_transformer_blocks.*.feed_forward",),
    refuses=(
        ("sparse_params", "block-sparse attention chooses its blocks from all queries and keys; pass None"),
    ),
)
