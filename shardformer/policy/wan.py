"""Wan 2.1 and 2.2 (diffusers `WanTransformer3DModel`), text- and image-to-video."""

from shardformer.policy.base import Blocks, GatherOutput, Policy, SplitInput, SplitOutput

WAN = Policy(
    models=("WanTransformer3DModel",),
    split_outputs=(
        SplitOutput("rope", indices=(0, 1)),
        # Wan 2.2 TI2V gives every token its own timestep: the embeddings then have a token dimension.
        SplitOutput("condition_embedder", indices=(0, 1), ndim=3),
    ),
    split_inputs=(SplitInput("blocks.0", "hidden_states"),),
    gather_outputs=(GatherOutput("proj_out"),),
    self_attention=("blocks.*.attn1",),
    blocks=(Blocks("blocks"),),
    mlps=("blocks.*.ffn",),
)
