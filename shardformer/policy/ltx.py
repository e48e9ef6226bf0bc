"""LTX-Video, LTX-2 and LTX-2.3 (diffusers `LTXVideoTransformer3DModel`, `LTX2VideoTransformer3DModel`).

And the refiner of SANA-WM, which is LTX-2's video half (`SanaWMLTX2RefinerTransformer3DModel`).
"""

from dataclasses import replace

from shardformer.policy.base import (
    Blocks,
    GatherOutput,
    PackedAttention,
    Policy,
    SplitInput,
    SplitOutput,
    WholeSequence,
)

LTX = Policy(
    models=("LTXVideoTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states encoder_hidden_states timestep encoder_attention_mask num_frames height width "
        "rope_interpolation_scale video_coords attention_kwargs return_dict"
    ),
    # The model's input is tokens, and what is split there is never computed whole.
    split_inputs=(
        SplitInput("", "hidden_states"),
        SplitInput("", "timestep", ndim=2),  # of every token, or of the clip
    ),
    split_outputs=(SplitOutput("rope", indices=(0, 1)),),
    gather_outputs=(GatherOutput("proj_out"),),
    self_attention=("transformer_blocks.*.attn1",),
    packed_attention=(
        PackedAttention("transformer_blocks.*.attn1", "hidden_states"),
        PackedAttention("transformer_blocks.*.attn2", "hidden_states", "encoder_hidden_states"),
    ),
    blocks=(Blocks("transformer_blocks"),),
    mlps=("transformer_blocks.*.ff",),
)

LTX2 = replace(
    LTX,
    models=("LTX2VideoTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states audio_hidden_states encoder_hidden_states audio_encoder_hidden_states timestep "
        "audio_timestep sigma audio_sigma encoder_attention_mask audio_encoder_attention_mask num_frames "
        "height width fps audio_num_frames video_coords audio_coords isolate_modalities "
        "spatio_temporal_guidance_blocks perturbation_mask use_cross_timestep attention_kwargs "
        "video_self_attention_mask video_keyframes_mask return_dict"
    ),
    split_inputs=(*LTX.split_inputs, SplitInput("", "video_keyframes_mask")),
    # [B, S, D], or [B, H, S, D] where every head has positions of its own.
    split_outputs=(
        SplitOutput("rope", indices=(0, 1), dim=-2),
        SplitOutput("cross_attn_rope", indices=(0, 1), dim=-2),
    ),
    whole_queries=("transformer_blocks.*.video_to_audio_attn",),  # the audio is on every rank
    packed_attention=(
        *LTX.packed_attention,
        PackedAttention("transformer_blocks.*.audio_attn1", "audio_hidden_states"),
        PackedAttention(
            "transformer_blocks.*.audio_attn2", "audio_hidden_states", "audio_encoder_hidden_states"
        ),
        PackedAttention("transformer_blocks.*.audio_to_video_attn", "hidden_states", "audio_hidden_states"),
        PackedAttention("transformer_blocks.*.video_to_audio_attn", "audio_hidden_states", "hidden_states"),
    ),
    blocks=(Blocks("transformer_blocks", ("hidden_states", "audio_hidden_states")),),
    refuses=(
        (
            "video_self_attention_mask",
            "the model pads a mask of all tokens to its own number of tokens; leave it out in training",
        ),
    ),
)

# VideoX-Fun's copy of diffusers' class, with an attention function of its own, which is flash-attn's where that is
# installed and torch's else.
LTX2_VIDEOX = replace(
    LTX2,
    origin=("videox_fun", "diffusers"),
    arguments=LTX2.arguments.replace("video_self_attention_mask video_keyframes_mask ", ""),
    split_inputs=LTX.split_inputs,
    kernel_functions=("flash_attention",),
    packed_attention=(),
    unpacked="of the two classes of this name diffusers' was tried",
    refuses=(),
)

# A window that moves over a clip: its first frames and some before it are seen by their keys, from a cache. A rank's
# cache holds its heads of all tokens. Here with a gate for every head.
SANA_WM_REFINER_GATED = Policy(
    models=("SanaWMLTX2RefinerTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states encoder_hidden_states timestep video_rotary_emb encoder_attention_mask kv_cache kv_cache_mode "
        "attention_kwargs return_dict"
    ),
    split_inputs=LTX.split_inputs,
    gather_outputs=LTX.gather_outputs,
    whole_sequences=(
        WholeSequence(
            "transformer_blocks.*.attn1",
            ("norm_q", "norm_k", "to_v", "to_gate_logits"),
            tables=("query_rotary_emb", "sink_rotary_emb"),  # every head has positions of its own
        ),
    ),
    blocks=LTX.blocks,
    mlps=LTX.mlps,
)

SANA_WM_REFINER = replace(
    SANA_WM_REFINER_GATED,
    whole_sequences=tuple(
        replace(entry, projections=("norm_q", "norm_k", "to_v"))
        for entry in SANA_WM_REFINER_GATED.whole_sequences
    ),
)

# LTX-Video in its authors' own repository.
LTX_AUTHORS = Policy(
    models=("Transformer3DModel",),
    arguments=(
        "hidden_states indices_grid encoder_hidden_states timestep class_labels cross_attention_kwargs "
        "attention_mask encoder_attention_mask skip_layer_mask skip_layer_strategy return_dict"
    ),
    refuses=(
        (
            "attention_mask",
            "the model pads a mask of all tokens to its own number of tokens; leave it out in training",
        ),
    ),
    split_inputs=(
        SplitInput("patchify_proj", "input"),
        SplitInput("", "indices_grid", dim=2),
        SplitInput("", "timestep", ndim=2),  # of every token, or of the clip
    ),
    gather_outputs=(GatherOutput("proj_out"),),
    self_attention=("transformer_blocks.*.attn1",),
    blocks=(Blocks("transformer_blocks"),),
    mlps=("transformer_blocks.*.ff",),
)

# LTX-2 and LTX-2.3 in their authors' own repository: what belongs to the video is in one dataclass.
LTX2_AUTHORS = Policy(
    models=("LTXModel",),
    arguments="video audio perturbations",
    split_inputs=(
        SplitInput("", "video.latent"),
        SplitInput("", "video.timesteps"),
        SplitInput("", "video.positions", dim=2),
        SplitInput("", "video.keyframes_mask"),
    ),
    gather_outputs=(GatherOutput("proj_out"),),
    self_attention=("transformer_blocks.*.attn1",),
    whole_queries=("transformer_blocks.*.video_to_audio_attn",),  # the audio is on every rank
    blocks=(Blocks("transformer_blocks", ("video.x", "audio.x")),),
    mlps=("transformer_blocks.*.ff",),
)

LTX2_AUTHORS_VIDEO = replace(
    LTX2_AUTHORS, whole_queries=(), blocks=(Blocks("transformer_blocks", ("video.x",)),)
)
