"""Helios (diffusers `HeliosTransformer3DModel`): the clip's past, at several scales, stands before its tokens."""

from shardformer.policy.base import Blocks, GatherOutput, Policy, SplitInput
from shardformer.policy.counts import count_own
from shardformer.spread import Spread


def count_context(spread: Spread) -> None:
    """Blocks get the number of the clip's tokens, which stand last."""
    count_own(spread, "blocks.*", "original_context_length", last=True)


HELIOS = Policy(
    models=("HeliosTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep encoder_hidden_states indices_hidden_states indices_latents_history_short "
        "indices_latents_history_mid indices_latents_history_long latents_history_short "
        "latents_history_mid latents_history_long return_dict attention_kwargs"
    ),
    split_inputs=(
        SplitInput("blocks.0", "hidden_states"),
        SplitInput("blocks.*", "temb"),  # of every token: the past has a timestep of its own
        SplitInput("blocks.*", "rotary_emb"),
    ),
    functions=(count_context,),
    gather_outputs=(GatherOutput("blocks.-1"),),  # the past is dropped after it
    self_attention=("blocks.*.attn1",),
    blocks=(Blocks("blocks"),),
    mlps=("blocks.*.ffn",),
)
