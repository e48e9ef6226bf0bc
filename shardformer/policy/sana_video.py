"""SANA-Video (diffusers `SanaVideoTransformer3DModel`): linear attention, and convolutions over space and time."""

from typing import Any

from opensora_accel.arguments import Arguments
from shardformer.modeling import add_halo
from shardformer.policy.base import Blocks, GatherOutput, Policy, SplitInput
from shardformer.policy.frames import count_own_frames, spread_by_frames
from shardformer.spread import Spread


def spread_frames(spread: Spread) -> None:
    """Shares are whole frames, on which convolutions over space run."""
    config: Any = spread.model.config
    spread_by_frames(spread, "hidden_states", dim=2, patch=config.patch_size[0])
    count_own_frames(spread, "transformer_blocks.*", "frames")


def exchange_frames(spread: Spread) -> None:
    """Convolutions over time see one frame of either neighbour."""
    tokens = spread.tokens
    for name, module in spread.modules("transformer_blocks.*.ff.conv_temp"):
        undo = add_halo(module, name, tokens.group, dim=2, reach=1, get_splits=lambda: tokens.state.frames)
        spread.undo.callback(undo)


def split_timestep(spread: Spread) -> None:
    """The timestep is one for the clip, [B, 1, 6 · C], or for every token, [B, S, 6 · C], which is split.

    Blocks reshape it with -1, so that none of the ranks may be without frames then.
    """
    tokens = spread.tokens

    def change(arguments: Arguments, name: str) -> None:
        timestep, what = arguments["timestep"], f"{name}'s timestep"
        num_tokens = timestep.size(1)
        if num_tokens == 1:
            return
        splits = tokens.share(num_tokens, what)
        tokens.check_all_have_some(num_tokens // tokens.state.unit, "frames", what)
        arguments["timestep"] = tokens.split(timestep, 1, splits, is_shared=True)

    spread.change_arguments("transformer_blocks.*", "timestep", change)


SANA_VIDEO = Policy(
    models=("SanaVideoTransformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states encoder_hidden_states timestep guidance encoder_attention_mask attention_mask "
        "attention_kwargs controlnet_block_samples return_dict"
    ),
    split_inputs=(
        SplitInput("transformer_blocks.0", "hidden_states"),
        SplitInput("transformer_blocks.*", "rotary_emb"),
        SplitInput("norm_out", "temb"),
    ),
    linear_attention=("transformer_blocks.*.attn1",),
    gather_outputs=(GatherOutput("proj_out"),),
    unpacked="its attention sums over all tokens, and its convolutions need the frame",
    blocks=(Blocks("transformer_blocks"),),
    functions=(spread_frames, split_timestep, exchange_frames),
    needs=("transformer_blocks.*.ff.conv_temp",),
    refuses=(("controlnet_block_samples", "the model adds them between its blocks, for all tokens"),),
)
