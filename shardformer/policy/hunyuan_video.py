"""HunyuanVideo (diffusers `HunyuanVideoTransformer3DModel`), text- and image-to-video, and its FramePack."""

from dataclasses import replace

from shardformer.policy.base import (
    Blocks,
    GatherOutput,
    JointAttention,
    Policy,
    SplitInput,
    SplitOutput,
)
from shardformer.policy.counts import count_own
from shardformer.spread import Spread


def count_first_frame(spread: Spread) -> None:
    """Where the first frame is given, its tokens have a timestep of their own."""
    count_own(spread, "transformer_blocks.*", "num_tokens")
    count_own(spread, "single_transformer_blocks.*", "num_tokens")


def count_packed(spread: Spread) -> None:
    """The kernel's packed output is taken apart into samples of so many tokens of text and video."""
    count_own(spread, "double_blocks.*", "max_seqlen_q", text=True)
    count_own(spread, "single_blocks.*", "max_seqlen_q", text=True)


HUNYUAN_VIDEO = Policy(
    models=("HunyuanVideoTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep encoder_hidden_states encoder_attention_mask pooled_projections guidance "
        "attention_kwargs return_dict"
    ),
    split_outputs=(SplitOutput("rope", indices=(0, 1), dim=0),),
    split_inputs=(SplitInput("transformer_blocks.0", "hidden_states"),),
    functions=(count_first_frame,),
    gather_outputs=(GatherOutput("proj_out"),),
    joint_attention=(
        JointAttention("transformer_blocks.*.attn", text="last"),
        JointAttention("single_transformer_blocks.*.attn", text="last"),
    ),
    unpacked="a call has one time for all of its tokens, and reads its captions as one",
    blocks=(Blocks("transformer_blocks"), Blocks("single_transformer_blocks")),
    mlps=("transformer_blocks.*.ff",),
)

FRAMEPACK = replace(
    HUNYUAN_VIDEO,
    models=("HunyuanVideoFramepackTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep encoder_hidden_states encoder_attention_mask pooled_projections "
        "image_embeds indices_latents guidance latents_clean indices_latents_clean latents_history_2x "
        "indices_latents_history_2x latents_history_4x indices_latents_history_4x attention_kwargs "
        "return_dict"
    ),
    # The clip's past, at several scales, is put before its tokens once all have their positions.
    split_outputs=(),
    split_inputs=(
        SplitInput("transformer_blocks.0", "hidden_states"),
        SplitInput("transformer_blocks.*", "freqs_cis", dim=0),
        SplitInput("single_transformer_blocks.*", "image_rotary_emb", dim=0),
    ),
    gather_outputs=(GatherOutput("single_transformer_blocks.-1", index=0),),  # the past is dropped after it
)

# HunyuanVideo in its authors' own repository, which calls flash-attn on packed tokens within each block.
HUNYUAN_VIDEO_AUTHORS = Policy(
    models=("HYVideoDiffusionTransformer",),
    arguments="x t text_states text_mask text_states_2 freqs_cos freqs_sin guidance return_dict",
    split_inputs=(
        SplitInput("", "freqs_cos", dim=0),
        SplitInput("", "freqs_sin", dim=0),
        SplitInput("double_blocks.0", "img"),
    ),
    functions=(count_packed,),
    gather_outputs=(GatherOutput("single_blocks.-1", text="last"),),  # the text is cut off behind it
    joint_attention=(
        JointAttention("double_blocks.*", text="last"),
        JointAttention("single_blocks.*", text="last"),
    ),
    kernel_functions=("flash_attn_varlen_func",),
    blocks=(Blocks("double_blocks", ("img", "txt")), Blocks("single_blocks", ("x",))),
    mlps=("double_blocks.*.img_mlp",),
    attention_regions=(
        ("double_blocks.*.txt_attn_k_norm", "double_blocks.*.img_attn_proj"),
        ("single_blocks.*.k_norm", "single_blocks.*.linear2"),
    ),
)
