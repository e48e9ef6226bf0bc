"""AnyFlow (diffusers `AnyFlow[FAR]Transformer3DModel`), a Wan whose every token has its own timesteps."""

from dataclasses import replace

from shardformer.policy.base import BlockMask, Blocks, GatherOutput, Policy, SplitInput

ANYFLOW = Policy(
    models=("AnyFlowTransformer3DModel",),
    origin=("diffusers",),
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

# The clip in chunks of frames, each of which sees those before it; early ones are compressed, clean copies come last.
ANYFLOW_FAR = replace(
    ANYFLOW,
    models=("AnyFlowFARTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep r_timestep encoder_hidden_states chunk_partition encoder_hidden_states_image "
        "clean_hidden_states clean_timestep kv_cache kv_cache_flag attention_mask attention_kwargs return_dict"
    ),
    # Who sees whom is a block mask of flex attention, which diffusers looks up in torch at every call.
    block_mask=BlockMask("blocks.0", "attention_mask", "hidden_states"),
    kernel_functions=("torch.nn.attention.flex_attention.flex_attention",),
    refuses=tuple(
        (argument, "it keeps the keys of all heads from chunk to chunk of sampling; leave it out in training")
        for argument in ("kv_cache", "kv_cache_flag")
    ),
)
