"""Kandinsky 5 and 6 (diffusers `Kandinsky5Transformer3DModel`, `Kandinsky6Transformer3DModel`)."""

from shardformer.policy.base import Blocks, GatherOutput, Policy, SplitInput

KANDINSKY5 = Policy(
    models=("Kandinsky5Transformer3DModel",),
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
    blocks=(Blocks("visual_transformer_blocks", ("visual_embed",)),),
    mlps=("visual_transformer_blocks.*.feed_forward",),
    refuses=(
        ("sparse_params", "block-sparse attention chooses its blocks from all queries and keys; pass None"),
    ),
)

KANDINSKY6 = Policy(
    models=("Kandinsky6Transformer3DModel",),
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
