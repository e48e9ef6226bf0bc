"""Helios (diffusers `HeliosTransformer3DModel`): the clip's past, at several scales, stands before its tokens."""

from shardformer.policy.base import Blocks, CountInput, GatherOutput, Policy, SplitInput

HELIOS = Policy(
    models=("HeliosTransformer3DModel",),
    split_inputs=(
        SplitInput("blocks.0", "hidden_states"),
        SplitInput("blocks.*", "temb"),  # of every token: the past has a timestep of its own
        SplitInput("blocks.*", "rotary_emb"),
    ),
    count_inputs=(CountInput("blocks.*", "original_context_length", last=True),),
    gather_outputs=(GatherOutput("blocks.-1"),),  # the past is dropped after it
    self_attention=("blocks.*.attn1",),
    blocks=(Blocks("blocks"),),
    mlps=("blocks.*.ffn",),
)
