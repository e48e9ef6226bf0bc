"""AnyFlow (diffusers `AnyFlowTransformer3DModel`), a Wan whose every token has its own timesteps."""

from shardformer.policy.base import Blocks, GatherOutput, Policy, SplitInput

ANYFLOW = Policy(
    models=("AnyFlowTransformer3DModel",),
    arguments=(
        "hidden_states timestep r_timestep encoder_hidden_states encoder_hidden_states_image "
        "attention_kwargs return_dict"
    ),
    split_inputs=(
        SplitInput("blocks.0", "hidden_states"),
        SplitInput("blocks.*", "temb"),
        SplitInput("blocks.*", "rotary_emb", dim=2),
    ),
    gather_outputs=(GatherOutput("blocks.-1"),),  # before the output's modulation, which has all tokens there
    self_attention=("blocks.*.attn1",),
    blocks=(Blocks("blocks"),),
    mlps=("blocks.*.ffn",),
)
