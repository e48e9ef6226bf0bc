"""MiniMax-H3 (diffusers `MiniMaxH3Transformer3DModel`): text, video and audio packed into one sequence."""

from shardformer.policy.base import Blocks, GatherOutput, PackedAttention, Policy, SplitInput, SplitOutput

MINIMAX_H3 = Policy(
    models=("MiniMaxH3Transformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states audio_hidden_states encoder_hidden_states timestep timestep_indices token_tags "
        "position_ids video_indices audio_indices text_indices attention_kwargs return_dict"
    ),
    split_outputs=(SplitOutput("rope", indices=(0, 1), dim=0),),
    split_inputs=(
        SplitInput("transformer_blocks.0", "hidden_states"),
        # Every token's row in a table of modulations, which is whole on every rank.
        SplitInput("transformer_blocks.*", "adaln_indices", dim=0),
        SplitInput("norm_out", "timestep_indices", dim=0),
    ),
    gather_outputs=(GatherOutput("proj_out"), GatherOutput("audio_proj_out")),
    self_attention=("transformer_blocks.*.attn",),
    # The row that has everything has its positions for an argument.
    packed_attention=(
        PackedAttention("transformer_blocks.*.attn", "position_ids"),
        PackedAttention("token_refiner.refiner_blocks.*.attn", "encoder_hidden_states"),
    ),
    blocks=(Blocks("transformer_blocks"),),
    mlps=("transformer_blocks.*.ff",),
)
