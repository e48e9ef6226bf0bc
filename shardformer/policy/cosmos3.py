"""Cosmos 3 (diffusers `Cosmos3OmniTransformer`): text for itself; video, sound and actions look at it."""

from shardformer.policy.base import Blocks, GatherOutput, JointAttention, Policy, SplitInput

COSMOS3 = Policy(
    models=("Cosmos3OmniTransformer",),
    split_inputs=(
        SplitInput("layers.0", "gen_seq", dim=0),
        SplitInput("layers.*", "rotary_emb", index=2, dim=0),
        SplitInput("layers.*", "rotary_emb", index=3, dim=0),
    ),
    gather_outputs=(GatherOutput("norm_moe_gen", dim=0),),
    joint_attention=(JointAttention("layers.*.self_attn", text="first", text_alone=True),),
    blocks=(Blocks("layers", ("gen_seq",)),),
    mlps=("layers.*.mlp_moe_gen",),
)
