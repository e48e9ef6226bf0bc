"""Wan 2.1 and 2.2 (diffusers): text- and image-to-video, VACE, and ChronoEdit, which is built like it."""

from dataclasses import replace

from torch import Tensor

from opensora_accel.arguments import Arguments
from shardformer.policy.base import (
    BlockMask,
    Blocks,
    GatherOutput,
    PackedAttention,
    PackedPositions,
    Policy,
    Positions,
    SplitInput,
    SplitOutput,
)
from shardformer.policy.frames import split_frames, spread_by_frames
from shardformer.spread import Spread

WAN = Policy(
    models=("WanTransformer3DModel", "ChronoEditTransformer3DModel"),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep encoder_hidden_states encoder_hidden_states_image return_dict "
        "attention_kwargs"
    ),
    split_outputs=(
        SplitOutput("rope", indices=(0, 1)),
        # Wan 2.2 TI2V gives every token its own timestep: the embeddings then have a token dimension.
        SplitOutput("condition_embedder", indices=(0, 1), ndim=3),
    ),
    split_inputs=(SplitInput("blocks.0", "hidden_states"),),
    gather_outputs=(GatherOutput("proj_out"),),
    self_attention=("blocks.*.attn1",),
    packed_attention=(
        PackedAttention("blocks.*.attn1", "hidden_states"),
        PackedAttention("blocks.*.attn2", "hidden_states", "encoder_hidden_states"),
    ),
    packed_positions=PackedPositions("rope", "hidden_states"),
    blocks=(Blocks("blocks"),),
    mlps=("blocks.*.ffn",),
)

WAN_VACE = replace(
    WAN,
    models=("WanVACETransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep encoder_hidden_states encoder_hidden_states_image control_hidden_states "
        "control_hidden_states_scale return_dict attention_kwargs"
    ),
    split_inputs=(
        SplitInput("vace_blocks.*", "hidden_states"),  # every one gets what the first block gets
        SplitInput("vace_blocks.0", "control_hidden_states"),
        SplitInput("blocks.0", "hidden_states"),
    ),
    self_attention=("vace_blocks.*.attn1", "blocks.*.attn1"),
    packed_attention=(),
    packed_positions=None,
    unpacked="a call has one time for all of its tokens",
    blocks=(Blocks("vace_blocks", ("control_hidden_states",)), Blocks("blocks")),
    mlps=("vace_blocks.*.ffn", "blocks.*.ffn"),
)


def spread_frames(spread: Spread) -> None:
    """Shares are whole frames, as the face adapter attends frame by frame."""
    spread_by_frames(spread, "hidden_states", dim=2, may_be_empty=False)
    split_frames(spread, "face_adapter.*", "encoder_hidden_states")


WAN_ANIMATE = replace(
    WAN,
    models=("WanAnimateTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep encoder_hidden_states encoder_hidden_states_image pose_hidden_states "
        "face_pixel_values motion_encode_batch_size return_dict attention_kwargs"
    ),
    packed_attention=(),
    packed_positions=None,
    unpacked="its face adapter attends frame by frame",
    functions=(spread_frames,),
    needs=("face_adapter.*",),
)

# Wan 2.1 and 2.2 in their authors' own repository, which counts positions and hides padding inside attention.
_AUTHORS = Policy(
    models=("WanModel",),
    arguments="x t context seq_len clip_fea y",
    unfit=(("enable_teacache", "it leaves out blocks, which split the tokens; turn it off"),),
    split_inputs=(
        SplitInput("blocks.0", "x"),
        SplitInput("blocks.*", "e", ndim=4),  # 2.2: of every token
        SplitInput("head", "e", ndim=3),
    ),
    gather_outputs=(GatherOutput("head"),),
    self_attention=("blocks.*.self_attn",),
    value_projections=("v",),
    kernel_functions=("flash_attention",),
    positions=(Positions("rope_apply", tokens=("x",)),),
    blocks=(Blocks("blocks", ("x",)),),
    mlps=("blocks.*.ffn",),
)

# musubi-tuner's copy turns queries and keys in place, and hands them to its kernels in one list. It has the function of
# the authors' copy as well, which it does not call: this table is looked at before theirs.
WAN_MUSUBI = replace(
    _AUTHORS,
    arguments=f"{_AUTHORS.arguments} skip_block_indices f_indices",
    positions=(Positions("rope_apply_inplace_cached", tokens=("x",), in_place=True),),
)

# VideoX-Fun's, which has the name of diffusers' class. Its attention is flash-attn's where that is installed, else
# torch's. Reference frames join the tokens before the first block.
WAN_VIDEOX = replace(
    _AUTHORS,
    models=("WanTransformer3DModel", "Wan2_2Transformer3DModel"),
    arguments=f"{_AUTHORS.arguments} y_camera full_ref subject_ref cond_flag",
    unfit=(("teacache", "it leaves out blocks, which split and join the tokens; disable it for training"),),
)

# SkyReels-V2's, which is built like its ancestor, the Wan of Wan's authors, but clips have one length and come as one
# tensor, and with diffusion forcing the embedding of time is [B, 6, S, C].
SKYREELS_V2_AUTHORS = replace(
    _AUTHORS,
    arguments="x t context clip_fea y fps",
    split_inputs=(
        SplitInput("blocks.0", "x"),
        SplitInput("blocks.*", "e", dim=2, ndim=4),
        SplitInput("head", "e", ndim=3),
    ),
)


def spread_times(spread: Spread) -> None:
    """A time for each frame becomes one for each of this rank's tokens, which may be of parts of frames.

    The block then takes a token for a frame: it asks for as many times as there are frames, and tokens of a frame.
    """
    tokens = spread.tokens

    def change(arguments: Arguments, name: str) -> None:
        tokens.check_known(f"{name}'s e")
        times = arguments["e"]
        tokens_per_frame = tokens.total() // times.size(1)

        def make() -> Tensor:
            # A plain choice of rows: a rank's gradient of what all ranks have is what passed through it.
            return times.index_select(1, tokens.own_places(times.device) // tokens_per_frame)

        arguments["e"] = tokens.once(times, ("of own tokens",), make)

    spread.change_arguments("blocks.*", "e", change)


def refuse_shots(spread: Spread) -> None:
    """LongLive 2 gives each shot of a clip a caption of its own, and cuts what it has of the clip into as many shots.

    A rank's tokens would be cut so too: half of the first shot would see the second one's caption.
    """

    def check(arguments: Arguments, name: str) -> None:
        num_clips, num_captions = arguments["x"].size(0), arguments["context"].size(0)
        if num_captions != num_clips:
            raise ValueError(
                f"{name} has {num_captions} captions for {num_clips} clips, one for each shot, and a rank does not "
                "hold whole shots: give each clip one caption, or keep this model on one device a sequence"
            )

    spread.change_arguments("blocks.*", "x context", check)


# The students of CausVid and Self-Forcing: Wan with a mask of blocks of frames, a clean clip before the noisy one where
# they are taught so. A cache of keys is sampling's.
CAUSAL_WAN = Policy(
    models=("CausalWanModel",),
    arguments="x t context seq_len clean_x aug_t clip_fea y",
    block_mask=BlockMask("blocks.0", "block_mask", "x"),
    split_inputs=(SplitInput("blocks.0", "x"),),
    gather_outputs=(GatherOutput("blocks.-1"),),
    self_attention=("blocks.*.self_attn",),
    value_projections=("v",),
    kernel_functions=("flex_attention",),
    positions=(Positions("rope_apply", tokens=("x",), grid="grid_sizes"),),
    blocks=(Blocks("blocks", ("x",)),),
    mlps=("blocks.*.ffn",),
    functions=(spread_times, refuse_shots),
)

# Last: the copies above have all that it speaks of.
WAN_AUTHORS = _AUTHORS
