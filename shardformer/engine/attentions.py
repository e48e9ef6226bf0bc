"""What takes the place of the kernel call in a model's attention modules: one function for each kind of entry.

    self_attention    q, k and v are all of this rank's tokens           ulysses, ring or both
    joint_attention   this rank's video tokens and all text tokens       joint attention, text whole on every rank
    whole_queries     every rank has all queries, keys are spread        each rank asks with its share of the queries
    decoders          this rank's video tokens stand there twice         like self-attention, with shares twice as long

A mask of keys goes along. A mask or bias of queries and keys cannot be cut by heads or blocks, and takes
`gathered_attention`. Every function here gets the projected q, k, v [B, S/P, H, D] of one module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_accel.attention import (
    SequenceGroups,
    gathered_attention,
    joint_attention,
    local_attention,
    slices,
    torch_attention,
    ulysses_attention,
    usp_attention,
)
from opensora_accel.communications import gather_forward_reduce_scatter_backward, share_sizes
from opensora_accel.experimental import call_experiments, from_experiments
from opensora_accel.parallel_states import has_parallel_group
from opensora_accel.plan import Plan
from shardformer.engine.packed import refuse_masks, slices_between
from shardformer.functions import replace_function
from shardformer.modeling import (
    Attention,
    Extent,
    Lengths,
    Mask,
    MaskReader,
    redirect_attention,
    redirect_flash_attn,
    redirect_flex_attention,
    redirect_linear_attention,
    running_attention,
)
from shardformer.paths import find
from shardformer.policy import JointAttention, PackedAttention, Policy
from shardformer.spread import Alone, Tokens, mark_own, streams

# q, k and v.
Projected = tuple[Tensor, Tensor, Tensor]


def redirect_attentions(
    model: nn.Module, plan: Plan, policy: Policy, tokens: Tokens, undo: ExitStack
) -> None:
    """Redirects the kernel calls of every attention module that the policy names to sequence-parallel attention."""
    for path in policy.linear_attention:
        for name, module in find(model, path):
            undo.callback(redirect_linear_attention(module, name, tokens.group))
    call_experiments("prepare_attentions", plan, model, policy, undo)
    kernels = _Kernels(plan, tokens.group)

    def is_traceable() -> bool:
        # A graph holds no transfer that has only begun.
        return tokens.are_followed() and not kernels.overlaps

    for name, module, attention in _attentions(model, kernels, policy, tokens):
        tokens.attentions.append(attention)
        undo.callback(
            redirect_attention(module, name, attention, tokens.own_counts, tokens.total, is_traceable)
        )
    for function in policy.kernel_functions:

        def redirect(original: Callable[..., Any], name: str = function) -> Callable[..., Any]:
            if name.endswith("flex_attention"):
                rank = tokens.group.rank()
                return redirect_flex_attention(
                    original, running_attention, lambda: tokens.state.splits or (), rank
                )
            return redirect_flash_attn(original, running_attention)

        undo.callback(replace_function(model, function, redirect))


def _attentions(
    model: nn.Module, kernels: _Kernels, policy: Policy, tokens: Tokens
) -> Iterator[tuple[str, nn.Module, Attention]]:
    packed = {entry.module: entry for entry in policy.packed_attention} if tokens.are_packed else {}
    if policy.block_mask is not None:
        stream = policy.block_mask.tokens
        packed |= {path: PackedAttention(path, stream) for path in policy.self_attention}
    for paths, make in ((policy.self_attention, _self_attention), (policy.whole_queries, _whole_queries)):
        for path in paths:
            for name, module in find(model, path):
                yield name, module, make(tokens, kernels, name, packed.get(path))
    for entry in policy.joint_attention:
        modules = find(model, entry.module)
        # Blocks are found in the order in which they stand in the model, and decoders are the last of them.
        num_encoders = len(modules) - _num_decoders(model, entry, len(modules))
        for name, module in modules[:num_encoders]:
            yield name, module, _joint_attention(tokens, kernels, entry, name)
        for name, module in modules[num_encoders:]:
            yield name, module, _decoder_attention(tokens, kernels, name)


def _num_decoders(model: nn.Module, entry: JointAttention, num_modules: int) -> int:
    if entry.decoders is None:
        return 0
    number = getattr(model, entry.decoders, None)
    if not isinstance(number, int) or not 0 <= number <= num_modules:
        raise ValueError(
            f"the policy counts decoders among {entry.module} by {type(model).__name__}.{entry.decoders}, which is "
            f"{number!r} and not a number of 0 to {num_modules}"
        )
    return number


class _Kernels:
    """A plan's attentions, over the groups that are registered when the model is sharded."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup):
        self._group = group
        # A sequence group that somebody else registered is all ring or all ulysses, as the plan says.
        is_ring = plan.ring == plan.sequence and not has_parallel_group("ring")
        self._axes = SequenceGroups(group, None) if is_ring else SequenceGroups.of(None)
        self._has_ring = plan.ring > 1
        self._ulysses = from_experiments(plan, ulysses_attention)
        # With keys and values of all ranks, for masks that neither heads nor blocks of keys could cut.
        self.gathered = from_experiments(plan, gathered_attention)
        # Whether transfers run under compute.
        self.overlaps = self._ulysses is not ulysses_attention

    def spread(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """q, k, v: [B, S/P, H, D] → [B, S/P, H, D]."""
        if isinstance(self._group, Alone):
            options = {name: options[name] for name in options.keys() - {"splits", "kv_splits"}}
            return local_attention(q, k, v, **options)
        # Ulysses, where it is all of the plan, needs no group but the sequence group.
        if not self._has_ring:
            return self._ulysses(q, k, v, self._group, **options)
        return usp_attention(q, k, v, self._axes, **options)

    def joint(self, video: Projected, text: Projected, **options: Any) -> tuple[Tensor, Tensor]:
        """q, k, v of the video [B, S/P, H, D] and of the text [B, T, H, D] → both outputs."""
        return joint_attention(*video, *text, self._axes, **options)


def _self_attention(
    tokens: Tokens, kernels: _Kernels, name: str, packed: PackedAttention | None
) -> Attention:
    reader = MaskReader(name)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | Lengths | None, causal: bool, scale: float | None
    ) -> Tensor:
        """q: [B, S/P, H, D]; k, v: the same, with further keys behind those of the tokens where slices say so."""
        splits = tokens.state.splits
        # Shares are known from the forward's first split, so attention exchanges no sizes.
        options = {"scale": scale, "splits": splits, "kv_splits": splits}
        if slices_between(tokens, packed, name) is not None:
            refuse_masks(name, tokens, mask, causal)
            dealt = tokens.state.deal
            assert dealt is not None
            return kernels.spread(q, k, v, slices=dealt, **options | {"kv_splits": dealt.kv_splits})
        if mask is None:
            return kernels.spread(q, k, v, causal=causal, **options)
        if causal:
            raise ValueError(f"{name} passed a mask and is_causal; pass one of them")
        extent = _extent(tokens, q.size(1), name)
        read = reader.read(mask, q.size(0), extent, extent, q.device)
        if read.bias is not None:
            # More than padding.
            return kernels.gathered(q, k, v, tokens.group, bias=read.bias, scale=scale, kv_splits=splits)
        return _of_padding(kernels.spread(q, k, v, mask=read.keys, **options), read)

    return attention


def _joint_attention(tokens: Tokens, kernels: _Kernels, entry: JointAttention, name: str) -> Attention:
    reader, text_first = MaskReader(name), entry.text == "first"

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | Lengths | None, causal: bool, scale: float | None
    ) -> Tensor:
        """q, k, v: [B, S/P + T, H, D]; q may be of the video, [B, S/P, H, D], or all of the text, [B, T, H, D]."""
        # Some models let the text attend to itself by a causal call of its own, in the same module.
        if causal and entry.text_alone:
            if mask is not None:
                raise ValueError(f"{name} passed a mask and is_causal; pass one of them")
            # Every rank has that text whole. All compute the same, each with its part of the gradient.
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # [B, H, T, D]
            grouped = q.size(1) != k.size(1)
            out = torch_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
            return out.transpose(1, 2)
        if causal:
            raise ValueError(f"{name} is causal, which a sequence of text and video is not")
        extent = _extent(tokens, k.size(1), name, text_first)
        # Text may be looked at without looking itself: then the queries are the video's alone.
        asking = extent if q.size(1) == k.size(1) else replace(extent, num_text=0)
        if q.size(1) != asking.num_local:
            raise ValueError(
                f"{name} asks {extent.num_local} keys with {q.size(1)} queries, which are neither those of "
                f"text and video nor this rank's {asking.num_local} of the video"
            )
        read = reader.read(mask, q.size(0), asking, extent, q.device)
        video_q, text_q = _cut(q, asking)
        (video_k, text_k), (video_v, text_v) = (_cut(t, extent) for t in (k, v))
        if read.bias is not None:
            return kernels.gathered(
                q, video_k, video_v, tokens.group, bias=read.bias, text_k=text_k, text_v=text_v,
                text_first=text_first, scale=scale, kv_splits=tokens.state.splits,
            )  # fmt: skip
        keys, text_keys = (None, None) if read.keys is None else _cut(read.keys, extent)
        outs = kernels.joint(
            (video_q, video_k, video_v), (text_q, text_k, text_v), text_first=text_first,
            mask=keys, text_mask=text_keys, scale=scale, splits=tokens.state.splits,
        )  # fmt: skip
        return _of_padding(torch.cat(outs[::-1] if text_first else outs, 1), read)

    return attention


def _decoder_attention(tokens: Tokens, kernels: _Kernels, name: str) -> Attention:
    """Attention over tokens that hold the video twice.

    Joined over ranks they stand in another order than on one device, which attention without a mask ignores.
    """

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | Lengths | None, causal: bool, scale: float | None
    ) -> Tensor:
        """q, k, v: [B, 2·S/P, H, D] → [B, 2·S/P, H, D]."""
        if mask is not None or causal:
            raise ValueError(f"{name} attends to the video twice, and cannot be causal or have a mask there")
        num_own = q.size(1) - _extent(tokens, q.size(1), name).num_text
        if q.size(1) != 2 * num_own:
            raise ValueError(f"{name} attends to {q.size(1)} tokens, not to this rank's {num_own} twice")
        # [own tokens, own tokens] on every rank, where one device has [all tokens, all tokens].
        assert tokens.state.splits is not None
        splits = tuple(2 * size for size in tokens.state.splits)
        return kernels.spread(q, k, v, scale=scale, splits=splits, kv_splits=splits)

    return attention


def _whole_queries(tokens: Tokens, kernels: _Kernels, name: str, packed: PackedAttention | None) -> Attention:
    """Each rank asks for its share of the queries; what comes back is gathered."""
    reader = MaskReader(name)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | Lengths | None, causal: bool, scale: float | None
    ) -> Tensor:
        """q: [B, S_q, H, D], whole on every rank; k, v: [B, S/P, H, D] → [B, S_q, H, D]."""
        if causal:
            raise ValueError(f"{name} is causal, but its queries are not of the sequence of its keys")
        group, splits = tokens.group, share_sizes(q.size(1), tokens.group.size())
        own = tokens.own_range(splits)
        kv_splits = tokens.state.splits
        # A plain slice, without communication in backward: the gradient of what every rank has is the part that passed
        # through this rank.
        share = q[:, own]
        seen = slices_between(tokens, packed, name)
        if seen is not None:
            refuse_masks(name, tokens, mask, causal)
            dealt = _ask_in_order(seen, tokens, splits)
            out = kernels.spread(share, k, v, scale=scale, splits=splits, kv_splits=kv_splits, slices=dealt)
        else:
            keys = _extent(tokens, k.size(1), name)
            read = reader.read(mask, q.size(0), Extent(group.rank(), splits), keys, q.device)
            if read.bias is not None:
                out = kernels.gathered(share, k, v, group, bias=read.bias, scale=scale, kv_splits=kv_splits)
            else:
                out = kernels.spread(
                    share, k, v, mask=read.keys, scale=scale, splits=splits, kv_splits=kv_splits
                )
                out = _of_padding(out, read)
        if group.size() > 1:
            out = gather_forward_reduce_scatter_backward(out, group, 1, splits=splits)
        return mark_own(out, False)

    return attention


def _ask_in_order(seen: slices.AttentionSlices, tokens: Tokens, splits: tuple[int, ...]) -> slices.Deal:
    """Each rank has a run of the queries, and of the keys what it was dealt."""
    assert tokens.state.deal is not None
    queries = streams.deal_in_order(seen, splits).runs
    return streams.deal_in_runs(seen, queries, tokens.state.deal.runs)


def _extent(tokens: Tokens, num_local: int, name: str, text_first: bool = False) -> Extent:
    """What a tensor of `num_local` tokens holds: this rank's share of the video, and the rest is text."""
    tokens.check_known(name)
    splits = tokens.state.splits
    if splits is None:
        raise ValueError(f"the policy spreads {name} over the ranks, but splits no tokens before it")
    own = tokens.own_range(splits)
    num_text = num_local - (own.stop - own.start)
    if num_text < 0:
        raise ValueError(
            f"{name} attends to {num_local} tokens, fewer than this rank's {own.stop - own.start}"
        )
    return Extent(tokens.group.rank(), splits, num_text, text_first)


def _cut(tensor: Tensor, extent: Extent) -> tuple[Tensor, Tensor]:
    """The video part and the text part of [B, S/P + T, ...]."""
    num_video = extent.num_local - extent.num_text
    sizes = [extent.num_text, num_video] if extent.text_first else [num_video, extent.num_text]
    first, second = tensor.split(sizes, 1)
    return (second, first) if extent.text_first else (first, second)


def _of_padding(out: Tensor, read: Mask) -> Tensor:
    """out: [B, S/P, H, D], with 0 for queries that are padding, as a kernel gives for a row that sees nothing."""
    return out if read.queries is None else out * read.queries[:, :, None, None]
