"""Motif-Video (diffusers `MotifVideoTransformer3DModel`): as HunyuanVideo, and a decoder of single-stream blocks."""

from shardformer.policy.base import Blocks, GatherOutput, JointAttention, Policy, SplitOutput

MOTIF_VIDEO = Policy(
    models=("MotifVideoTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep encoder_hidden_states encoder_attention_mask image_embeds "
        "attention_kwargs return_dict"
    ),
    # Before the blocks: the decoder starts from the embedded clip.
    split_outputs=(SplitOutput("rope", indices=(0, 1), dim=0), SplitOutput("x_embedder")),
    gather_outputs=(GatherOutput("proj_out"),),
    joint_attention=(
        JointAttention("transformer_blocks.*.attn", text="last"),
        # The decoder's blocks attend to what the encoder made of the video.
        JointAttention("single_transformer_blocks.*.attn", text="last", decoders="num_decoder_layers"),
    ),
    blocks=(
        Blocks("transformer_blocks"),
        Blocks("single_transformer_blocks", ("hidden_states", "encoder_hidden_states")),
    ),
    mlps=("transformer_blocks.*.ff",),
)
