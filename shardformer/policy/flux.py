"""FLUX.1 and FLUX.2 (diffusers `FluxTransformer2DModel`, `Flux2Transformer2DModel`), which make images."""

from dataclasses import replace

from shardformer.policy.base import Blocks, GatherOutput, JointAttention, Policy, SplitInput, SplitOutput

FLUX = Policy(
    models=("FluxTransformer2DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states encoder_hidden_states pooled_projections timestep img_ids txt_ids guidance "
        "joint_attention_kwargs return_dict controlnet_block_samples controlnet_single_block_samples "
        "controlnet_blocks_repeat"
    ),
    # The model's input is tokens, and what is split there is never computed whole.
    split_inputs=(
        SplitInput("", "hidden_states"),
        SplitInput("", "controlnet_block_samples"),
        SplitInput("", "controlnet_single_block_samples"),
    ),
    # Positions of text and image, in this order.
    split_outputs=(SplitOutput("pos_embed", indices=(0, 1), dim=0, text="first"),),
    gather_outputs=(GatherOutput("proj_out"),),
    joint_attention=(
        JointAttention("transformer_blocks.*.attn", text="first"),
        JointAttention("single_transformer_blocks.*.attn", text="first"),
    ),
    blocks=(
        Blocks("transformer_blocks", ("hidden_states", "encoder_hidden_states")),
        Blocks("single_transformer_blocks", ("hidden_states", "encoder_hidden_states")),
    ),
    mlps=("transformer_blocks.*.ff",),
)

FLUX2 = replace(
    FLUX,
    models=("Flux2Transformer2DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states encoder_hidden_states timestep img_ids txt_ids guidance joint_attention_kwargs "
        "return_dict kv_cache kv_cache_mode num_ref_tokens ref_fixed_timestep"
    ),
    refuses=tuple(
        (
            argument,
            "it keeps keys of a reference image from step to step of sampling; leave it out in training",
        )
        for argument in ("kv_cache", "kv_cache_mode")
    ),
    split_inputs=(
        SplitInput("", "hidden_states"),
        SplitInput("", "img_ids", dim=-2),  # [S, 4], or [B, S, 4]
    ),
    split_outputs=(),
    blocks=(
        Blocks("transformer_blocks", ("hidden_states", "encoder_hidden_states")),
        Blocks("single_transformer_blocks"),
    ),
)
