"""Kandinsky 5, 6 and 6's super-resolution (diffusers `Kandinsky5/6/6SRTransformer3DModel`), 5 also as its authors'."""

from dataclasses import replace

from shardformer.policy.base import Blocks, GatherOutput, Policy, SplitInput, WholeSequence

KANDINSKY5 = Policy(
    models=("Kandinsky5Transformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states encoder_hidden_states timestep pooled_projections visual_rope_pos text_rope_pos "
        "scale_factor sparse_params return_dict"
    ),
    split_inputs=(
        SplitInput("visual_transformer_blocks.0", "visual_embed"),
        SplitInput("visual_transformer_blocks.*", "rope"),
    ),
    gather_outputs=(GatherOutput("visual_transformer_blocks.-1"),),
    self_attention=("visual_transformer_blocks.*.self_attention",),
    unpacked="a call has one time for all of its tokens",
    blocks=(Blocks("visual_transformer_blocks", ("visual_embed",)),),
    mlps=("visual_transformer_blocks.*.feed_forward",),
    refuses=(
        ("sparse_params", "block-sparse attention chooses its blocks from all queries and keys; pass None"),
    ),
)

# In its authors' own repository, whose clip has no batch: [S, C]. Of its attention engines "sdpa" is seen.
KANDINSKY5_AUTHORS = replace(
    KANDINSKY5,
    models=("DiffusionTransformer3D",),
    origin=(),
    arguments=(
        "x text_embed pooled_text_embed time visual_rope_pos text_rope_pos scale_factor sparse_params attention_mask"
    ),
    split_inputs=tuple(replace(split, dim=0) for split in KANDINSKY5.split_inputs),
    gather_outputs=(GatherOutput("visual_transformer_blocks.-1", dim=0),),
)

KANDINSKY6 = Policy(
    models=("Kandinsky6Transformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states encoder_hidden_states pooled_projections timestep audio_hidden_states "
        "visual_rope_pos encoder_attention_mask visual_token_type_ids return_dict"
    ),
    split_inputs=(
        SplitInput("visual_transformer_blocks.0", "vis"),
        SplitInput("visual_transformer_blocks.*", "vis_rope", dim=0),
    ),
    gather_outputs=(GatherOutput("visual_transformer_blocks.-1", index=0),),
    self_attention=("visual_transformer_blocks.*.video_dec_block.self_attention",),
    whole_queries=("visual_transformer_blocks.*.av_cross_attention",),  # the audio is on every rank
    blocks=(Blocks("visual_transformer_blocks", ("vis", "aud")),),
    mlps=("visual_transformer_blocks.*.video_dec_block.feed_forward",),
)

KANDINSKY6_SR = Policy(
    models=("Kandinsky6SRTransformer3DModel",),
    origin=("diffusers",),
    arguments="hidden_states timestep return_dict",
    split_inputs=(SplitInput("visual_transformer_blocks.0", "hidden_states"),),
    gather_outputs=(GatherOutput("visual_transformer_blocks.-1"),),
    # Each head chooses blocks of 64 keys by the means of all queries and keys in a block.
    whole_sequences=(
        WholeSequence(
            "visual_transformer_blocks.*.self_attention",
            ("to_query", "to_key", "to_value"),
            out="out_layer",
            heads="num_heads",
        ),
    ),
    blocks=(Blocks("visual_transformer_blocks"),),
    mlps=("visual_transformer_blocks.*.feed_forward",),
)
