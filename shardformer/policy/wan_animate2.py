"""Wan Animate 2 (diffusers): a clip that sees the frames of a reference, whose keys a pass before it left in a cache.

The reference's pass is self-attention that stores its keys and values. In the clip's pass every token sees all of the
clip, and of the reference the frame of its own number; the clip's first frame, an image, has none. Of a video of three
frames and the image, a reference a b c and a clip A B C D:

    / A B C D a b c
    A # # # # . . .
    B # # # # # . .
    C # # # # . # .
    D # # # # . . #

The model says so by a block mask for buffers of whole frames, and its own code lays queries and keys out in them. Where
a clip or a reference is smaller than the video, zeros are left there, which are keys like others to its softmax.

On P = 2 ranks the cache of each holds the keys of its own tokens of the reference: rank 0 those of a and of half of b.
In the clip's pass the mask is read into slices of what there is (`Buffers`), the clip's tokens are dealt out by what
they see, and each rank attends with its own queries to all ranks' keys of the clip, of the reference and of zeros. The
reference's keys stay where they are, and their gradients come back there.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora_accel.arguments import Arguments
from shardformer.modeling import running_attention
from shardformer.policy.base import BlockMask, Blocks, GatherOutput, Policy, SplitInput
from shardformer.spread import Spread, Tokens, streams


def stand_in_buffers(tokens: Tokens, arguments: Arguments, name: str) -> streams.Buffers:
    """Where the clip's tokens, and the cache's keys of the reference, stand in the buffers of the block mask.

    Raises:
        ValueError: they do not fit in, or the cache does not hold the reference's keys as this model has left them.
    """
    per_frame, num_frames = arguments["origin_latent_hw"], arguments["origin_latent_frames"]
    # Of the clip and of the reference, each in whole blocks of flex attention.
    sizes = [math.ceil(frames * per_frame / 128) * 128 for frames in (num_frames + 1, num_frames)]
    grids = [arguments[f"{which}grid_sizes"][0].tolist() for which in ("", "reference_")]
    places, start = [], 0
    for what, size, (frames, height, width) in zip(("a clip", "a reference"), sizes, grids, strict=True):
        if height * width > per_frame or frames * per_frame > size:
            raise ValueError(
                f"{name} has {what} of {frames} frames of {height * width} tokens, and its mask is for a video of "
                f"{num_frames} frames of {per_frame} tokens, and an image; pass an origin_len and origin_area that "
                "both fit in"
            )
        places.append(_of_frames(start, frames, height * width, per_frame))
        start += size
    held = held_splits(tokens, arguments["kv_cache"], math.prod(grids[1]), name)
    return streams.Buffers(sizes[0], sum(sizes), places[0], places[1], held)


def _of_frames(start: int, frames: int, num_tokens: int, per_frame: int) -> tuple[range, ...]:
    """Runs of the first tokens of each frame."""
    if num_tokens == per_frame:
        return (range(start, start + frames * per_frame),)
    firsts = range(start, start + frames * per_frame, per_frame)
    return tuple(range(first, first + num_tokens) for first in firsts)


def held_splits(tokens: Tokens, cache: Any, num_tokens: int, name: str) -> tuple[int, ...]:
    """How many of the reference's `num_tokens` tokens every rank has in a layer's cache.

    Raises:
        ValueError: this model, as it is sharded, did not fill it, or with another number of tokens.
        RuntimeError: it is empty, which the cache says by itself.
    """
    key, _value = cache.get()
    splits = tokens.cached.get(cache)
    again = "run the reference's pass (kv_cache_mode=\"extract\") with this model and that cache before the clip's"
    if splits is None or key.size(1) != splits[tokens.group.rank()]:
        raise ValueError(
            f"{name}'s kv_cache holds keys of {key.size(1)} tokens that were not left there by this model as it is "
            f"sharded now, and ranks would take them for others: {again}"
        )
    if sum(splits) != num_tokens:
        raise ValueError(
            f"{name}'s kv_cache holds a reference of {sum(splits)} tokens, and reference_grid_sizes are of "
            f"{num_tokens}: {again}"
        )
    return splits


def attend_beside_reference(spread: Spread) -> None:
    """Every self-attention treats a rank's own tokens, with the rotations of their places."""
    tokens, model = spread.tokens, cast(Any, spread.model)
    stride = model.config.refer_stride

    def rotate(arguments: Arguments, name: str) -> None:
        tokens.check_known(name)
        is_clip = arguments["kv_cache_mode"] == "cached"
        table, grids = arguments["rotary_emb"], arguments["grid_sizes"]
        arguments["rotary_emb"] = tokens.once(
            table,
            ("rotations", "own"),
            lambda: rotations(table, grids, tokens.own_places(table.device), 1 if is_clip else stride),
        )
        if not is_clip:
            # What the processor stores. Not there: it may be compiled, anew for each cache that a graph has noted.
            assert tokens.state.splits is not None
            tokens.cached[arguments["kv_cache"]] = tokens.state.splits
            return
        of_reference, reference_grids = arguments["reference_rotary_emb"], arguments["reference_grid_sizes"]
        num_tokens = math.prod(reference_grids[0].tolist())
        splits, rank = held_splits(tokens, arguments["kv_cache"], num_tokens, name), tokens.group.rank()
        first = sum(splits[:rank])

        def make() -> Tensor:
            places = torch.arange(first, first + splits[rank], device=of_reference.device)
            return rotations(of_reference, reference_grids, places, stride)

        arguments["reference_rotary_emb"] = tokens.once(of_reference, ("rotations", "reference"), make)

    spread.change_arguments("blocks.*", "rotary_emb grid_sizes kv_cache kv_cache_mode", rotate)
    attentions: list[tuple[str, Any]] = spread.modules("blocks.*.self_attn")
    for _name, attention in attentions:
        spread.undo.callback(attention.set_processor, attention.processor)
        attention.set_processor(OwnTokens(tokens))


def rotations(table: Tensor, grids: Tensor, places: Tensor, stride: int) -> Tensor:
    """The rotary embedding of tokens at `places` [n]: [B, n, 1, D/2], complex; of clips of one shape [1, n, 1, D/2].

    Args:
        table: [512, D/2], complex: columns for time, height and width, a row for each place along them.
        grids: [B, 3], the clips' shapes.
        stride: of time.
    """
    num_side = table.size(1) // 3
    parts = table.split([table.size(1) - 2 * num_side, num_side, num_side], 1)

    def of_grid(height: int, width: int) -> Tensor:
        along = (places // (height * width) * stride, places // width % height, places % width)
        return torch.cat([part.index_select(0, at) for part, at in zip(parts, along, strict=True)], 1)

    sizes = [(height, width) for _frames, height, width in grids.tolist()]
    made = {size: of_grid(*size) for size in dict.fromkeys(sizes)}
    clips = list(made) if len(made) == 1 else sizes
    return torch.stack([made[size] for size in clips])[:, :, None]


class OwnTokens:
    """The processor of self-attention: what diffusers' `WanAnimate2AttnProcessor` computes, of a rank's own tokens."""

    # It asks for no backend of diffusers, which looks for these.
    _attention_backend = None
    _parallel_config = None

    def __init__(self, tokens: Tokens):
        self._tokens = tokens

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: Tensor,
        kv_cache: Any,
        kv_cache_mode: str,
        reference_rotary_emb: Tensor | None = None,
        attention_mask: Any = None,
        **_of_layout: Any,
    ) -> Tensor:
        """hidden_states: [B, S/P, C] → [B, S/P, C].

        Args:
            rotary_emb, reference_rotary_emb: the `rotations` of this rank's tokens, and of its keys in the cache.
            _of_layout: grids, strides and sizes of buffers, which are in the rotations and the slices by now.
        """
        attend = running_attention()
        assert attend is not None
        if attn.fused_projections:
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = (project(hidden_states) for project in (attn.to_q, attn.to_k, attn.to_v))
        query, key = attn.norm_q(query), attn.norm_k(key)
        query, key, value = (each.unflatten(2, (attn.heads, -1)) for each in (query, key, value))
        own_key = _rotated(key, rotary_emb).type_as(value)
        query = _rotated(query, rotary_emb).type_as(value)
        if kv_cache_mode == "extract":
            kv_cache.store(key, value)
            key = own_key
        else:
            assert reference_rotary_emb is not None
            key, value = self._beside_reference(own_key, value, kv_cache, reference_rotary_emb)
        out = attend(query, key, value, 0.0, mask=attention_mask, causal=False, scale=None)
        out = attn.to_out[0](out.flatten(2, 3).type_as(query))
        return cast(Tensor, attn.to_out[1](out))

    def _beside_reference(
        self, key: Tensor, value: Tensor, cache: Any, rotation: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[B, S/P, H, D] → with this rank's keys of the reference behind them, and its zeros."""
        of_reference, values = cache.get()
        key = torch.cat([key, _rotated(of_reference, rotation).type_as(value)], 1)
        value = torch.cat([value, values], 1)
        deal = self._tokens.state.deal
        assert deal is not None
        zeros = (0, 0, 0, 0, 0, deal.kv_splits[self._tokens.group.rank()] - key.size(1))
        return F.pad(key, zeros), F.pad(value, zeros)


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """[B, n, H, D], in fp32 like diffusers' `rope_apply`."""
    pairs = torch.view_as_complex(x.to(torch.float64).unflatten(3, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(3).float()


WAN_ANIMATE2 = Policy(
    models=("WanAnimate2Transformer3DModel",),
    origin=("diffusers",),
    arguments=(
        "hidden_states timestep encoder_hidden_states condition_latents kv_cache kv_cache_mode seq_len "
        "encoder_hidden_states_image offset_grid_sizes reference_grid_sizes origin_len origin_area is_uncondtion "
        "return_dict"
    ),
    block_mask=BlockMask("blocks.0", "attention_mask", "hidden_states", buffers=stand_in_buffers),
    split_inputs=(SplitInput("blocks.0", "hidden_states"),),
    gather_outputs=(GatherOutput("head"),),
    self_attention=("blocks.*.self_attn",),
    blocks=(Blocks("blocks"),),
    mlps=("blocks.*.ffn",),
    functions=(attend_beside_reference,),
)
