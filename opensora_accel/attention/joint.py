"""Joint attention of an MMDiT: video tokens are spread over the ranks, text tokens are whole on every one.

P = 3 ranks, 6 video tokens, 4 text tokens t u v w, 3 heads a b c. By Ulysses, rank 0 gets head a of all video tokens
from the others. Head a of the text it has already: it cuts it out and attends to both with tokens 0…5 t u v w. Its
output for the text is head a of t u v w, which every rank needs whole; so a copy of it goes to each rank with the
video's way back.

On a ring of 3 the text tokens are shared instead, (2, 1, 1): rank 0 holds its two video tokens with t u, rank 1 with
v, rank 2 with w, and everything goes round as one sequence. The text's output is gathered at the end.

Text is never cut to a multiple of anything, and never sent as keys of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from opensora_accel.attention.call import Text, autocast, enter_call
from opensora_accel.attention.ring import ring_attend
from opensora_accel.attention.slices import AttentionSlices, Deal
from opensora_accel.attention.ulysses import Heads, scatter_heads
from opensora_accel.attention.usp import SequenceGroups
from opensora_accel.communications import (
    all_to_all_packed,
    gather_forward_reduce_scatter_backward,
    share_sizes,
)


def joint_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    text_q: Tensor,
    text_k: Tensor,
    text_v: Tensor,
    mesh: DeviceMesh | SequenceGroups | None = None,
    *,
    text_first: bool = True,
    mask: Tensor | None = None,
    text_mask: Tensor | None = None,
    scale: float | None = None,
    splits: Sequence[int] | None = None,
    slices: AttentionSlices | Deal | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of video and text tokens over both: this rank's rows of the video, and all of the text.

    Args:
        q, k, v: [B, S/P, H, D] and [B, S/P, H_kv, D], P = ring × ulysses ranks.
        text_q, text_k, text_v: [B, T, H, D] and [B, T, H_kv, D], the same on every rank. Text that is looked at and
            does not look has a text_q of [B, 0, H, D].
        mesh: with the axes `ring` and `ulysses`; by default the registered one (`init_parallel`).
        text_first: whether text stands before or after the video where they are joined. Only the order of additions
            depends on it: set it as the model does.
        mask: [B, S/P], true where a video key may be seen; text_mask: [B, T], the same for text.
        scale: 1/√D by default.
        splits: every rank's number of video tokens, where the caller knows them; otherwise they are exchanged.
        slices: which queries see which keys of text and video together, in the order of `text_first`. Where video
            tokens are dealt out, what says so: `deal(mask, P, tokens=range(T, T + S))`.

    Returns:
        out: [B, S/P, H, D] and text_out: [B, T, H, D], the same on every rank.

    Communication: as `usp_attention`, with T/P rows more a rank in the exchange back, and where the ring has ranks,
    T/ring tokens more in it and one all-gather of the text's output (in backward a reduce-scatter).

    Gradient: of the text tensors, each rank has the part that passed through it; the parts add up to the whole, as
    parameters whose gradients are averaged over the ranks need it (gradients are P times the single device's there).

    Raises:
        ValueError: the shapes are no attention; on every rank and before any data is sent, unless the sizes are
        given.
    """
    groups = SequenceGroups.of(mesh)
    q, k, v, text_q, text_k, text_v = autocast(q, k, v, text_q, text_k, text_v)
    # Text goes along into the check, so that its shapes too are refused on all ranks together.
    text = Text(text_q, text_k, text_v, text_mask, text_first)
    call = enter_call(
        q,
        k,
        v,
        mask,
        groups.inner_first,
        splits=splits,
        kv_splits=splits,
        scale=scale,
        text=text,
        slices=slices,
    )
    # Ulysses needs the shares of its own ranks; the ring needs, of each of its ranks, the sum over ulysses.
    num_heads, own, ulysses = q.size(2), groups.of_ulysses(call.splits), groups.ulysses
    # A mask of one of them needs a mask of both: what has none is seen whole.
    if mask is None and text_mask is not None:
        mask = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    if mask is not None and text_mask is None:
        text_mask = text_k.new_ones(text_k.shape[:2], dtype=torch.bool)

    # Text of this rank: its part of the tokens on the ring, its part of the heads within ulysses. Nothing is sent.
    text_splits, text_kv_splits = (share_sizes(t.size(1), groups.ring_size) for t in (text_q, text_k))
    text_q = text_q.split(text_splits, 1)[groups.ring_rank]
    text_k, text_v = (t.split(text_kv_splits, 1)[groups.ring_rank] for t in (text_k, text_v))
    # Ulysses runs inside of the ring: it gathers the tokens of its ranks, and these go round as one block.
    heads = Heads.shared(num_heads, k.size(2), groups.ulysses_size)
    if ulysses is not None and ulysses.size() > 1:
        q, k, v, mask = scatter_heads(q, k, v, mask, ulysses, own, own)
        rank = ulysses.rank()
        queries, keys = heads.query_range(rank), heads.keys[rank]
        # [B, T', H, D] → [B, T', H/U, D]. The gradient of a slice is zero for all other heads, which is why
        # the parts of the ranks add up to the whole.
        text_q = text_q[:, :, queries.start : queries.stop]
        text_k, text_v = (heads.align_keys(t[:, :, keys.start : keys.stop], rank) for t in (text_k, text_v))
    q, k, v = (_join(video, words, text_first) for video, words in ((q, text_q), (k, text_k), (v, text_v)))
    if mask is not None and text_mask is not None:
        mask = _join(mask, text_mask.split(text_kv_splits, 1)[groups.ring_rank], text_first)

    # On the ring video and text are one sequence: a rank's share is its video and its part of the text.
    video_splits = groups.of_ring(call.splits)
    slices_on_ring = None
    if call.slices is not None:
        merged = call.slices.merged(groups.ulysses_size)
        slices_on_ring = merged.with_text(text_splits, text_kv_splits, is_first=text_first)
    ring_call = replace(
        call,
        slices=slices_on_ring,
        splits=tuple(video + words for video, words in zip(video_splits, text_splits, strict=True)),
        kv_splits=tuple(video + words for video, words in zip(video_splits, text_kv_splits, strict=True)),
    )
    out = ring_attend(q, k, v, mask, groups.ring, ring_call)

    # [B, S' + T', H', D] → the video's rows and the text's.
    num_text = text_splits[groups.ring_rank]
    if text_first:
        text_out, video_out = out.split([num_text, out.size(1) - num_text], 1)
    else:
        video_out, text_out = out.split([out.size(1) - num_text, num_text], 1)
    if ulysses is not None and ulysses.size() > 1:
        # Each rank gets all heads of its own video tokens, and all heads of all text tokens of its ring rank.
        num_ranks = ulysses.size()
        # [B, T', H/U, D] → [B, U·T', H/U, D], U the ulysses ranks: scattered along dim 1, every rank gets all T'.
        copies = text_out.unsqueeze(1).expand(-1, num_ranks, -1, -1, -1).flatten(1, 2)
        video_out, text_out = all_to_all_packed(
            [video_out, copies],
            ulysses,
            scatter_dim=1,
            gather_dim=2,
            splits=[heads.queries, heads.queries],
            scatter_splits=[own, (num_text,) * num_ranks],
        )
    # Every rank goes on with the whole text, so in backward the gradients of its rows are summed over ranks.
    if groups.ring is not None and groups.ring.size() > 1 and any(text_splits):
        text_out = gather_forward_reduce_scatter_backward(text_out, groups.ring, 1, splits=text_splits)
    return video_out, text_out


def _join(video: Tensor, text: Tensor, text_first: bool) -> Tensor:
    """[B, S', ...] of the video and [B, T', ...] of the text → [B, S' + T', ...]."""
    return torch.cat([text, video] if text_first else [video, text], 1)
