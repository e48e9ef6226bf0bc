"""Joint attention of an MMDiT: video tokens are spread over the ranks, text tokens are whole on every one.

Text is never cut to a multiple of anything and never sent as keys of its own: a rank attends with its heads of the
text (ulysses) and its part of the text tokens (ring), which it has already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from opensora_accel.attention.checks import Tensors, agreed_splits
from opensora_accel.attention.local import autocast
from opensora_accel.attention.ring import ring_attend
from opensora_accel.attention.ulysses import Heads, scatter_heads
from opensora_accel.attention.usp import SequenceGroups
from opensora_accel.communications import (
    all_to_all_packed,
    gather_forward_reduce_scatter_backward,
    share_sizes,
)
from opensora_accel.communications.sizes import Sizes


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

    Returns:
        out: [B, S/P, H, D] and text_out: [B, T, H, D], the same on every rank.

    Communication: as `usp_attention`, with T/P rows more a rank in the exchange back, and where the ring has ranks,
    T/ring tokens more in it and one all-gather of the text's output (in backward a reduce-scatter).

    Gradient: of the text tensors, each rank has the part that passed through it; the parts add up to the whole, as
    parameters whose gradients are averaged over the ranks need it (gradients are P times the single device's there).

    Raises ValueError, before any data is sent, for shapes that are no attention.
    """
    groups = SequenceGroups.of(mesh)
    q, k, v, text_q, text_k, text_v = autocast(q, k, v, text_q, text_k, text_v)
    tensors: Tensors = {"q": q, "k": k, "v": v, "mask": mask}
    texts: Tensors = {"text_q": text_q, "text_k": text_k, "text_v": text_v, "text_mask": text_mask}
    options = {"causal": False, "text_first": text_first, "scale": scale}
    splits, _ = agreed_splits({**tensors, **texts}, options, groups.inner_first, splits, splits)
    num_heads, own, ulysses = q.size(2), groups.of_ulysses(splits), groups.ulysses
    if mask is None and text_mask is not None:
        mask = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)

    text_splits, text_kv_splits = (share_sizes(t.size(1), groups.ring.size()) for t in (text_q, text_k))
    text = [
        _own_tokens(text_q, groups, text_splits),
        *(_own_tokens(t, groups, text_kv_splits) for t in (text_k, text_v)),
    ]
    heads = Heads.shared(num_heads, k.size(2), ulysses.size())
    if ulysses.size() > 1:
        q, k, v, mask = scatter_heads(q, k, v, mask, ulysses, own, own)
        text = _own_heads(text, heads, ulysses.rank())
    q, k, v = (_joined(pair, text_first) for pair in zip((q, k, v), text, strict=True))
    if mask is not None:
        whole = text_k.new_ones(text_k.shape[:2], dtype=torch.bool) if text_mask is None else text_mask
        mask = _joined((mask, _own_tokens(whole, groups, text_kv_splits)), text_first)
    both, kv_both = (
        tuple(map(sum, zip(groups.of_ring(splits), of_text, strict=True)))
        for of_text in (text_splits, text_kv_splits)
    )
    out = ring_attend(q, k, v, groups.ring, mask, False, scale, "contiguous", both, kv_both)

    num_text = text_splits[groups.ring.rank()]
    sizes = [num_text, out.size(1) - num_text]
    text_out, video_out = out.split(sizes, 1) if text_first else reversed(out.split(sizes[::-1], 1))
    if ulysses.size() > 1:
        video_out, text_out = _gather_heads(video_out, text_out, groups, own, heads)
    if groups.ring.size() > 1 and text_q.size(1):
        text_out = gather_forward_reduce_scatter_backward(text_out, groups.ring, 1, splits=text_splits)
    return video_out, text_out


def _own_tokens(tensor: Tensor, groups: SequenceGroups, text_splits: Sizes) -> Tensor:
    return tensor.split(text_splits, 1)[groups.ring.rank()]


def _own_heads(text: Sequence[Tensor], heads: Heads, rank: int) -> list[Tensor]:
    def cut(tensor: Tensor, which: range) -> Tensor:
        return tensor[:, :, which.start : which.stop]

    q, k, v = text
    return [
        cut(q, heads.query_range(rank)),
        *(heads.align_keys(cut(tensor, heads.keys[rank]), rank) for tensor in (k, v)),
    ]


def _joined(pair: Sequence[Tensor], text_first: bool) -> Tensor:
    video, text = pair
    return torch.cat([text, video] if text_first else [video, text], 1)


def _gather_heads(
    video: Tensor, text: Tensor, groups: SequenceGroups, splits: Sizes, heads: Heads
) -> tuple[Tensor, Tensor]:
    """All heads of this rank's video tokens and of all the ring rank's text tokens, in one all-to-all."""
    num_ranks, num_text = groups.ulysses.size(), text.size(1)
    copies = text.unsqueeze(1).expand(-1, num_ranks, -1, -1, -1).flatten(1, 2)
    video, text = all_to_all_packed(
        [video, copies],
        groups.ulysses,
        scatter_dim=1,
        gather_dim=2,
        splits=[heads.queries, heads.queries],
        scatter_splits=[splits, (num_text,) * num_ranks],
    )
    return video, text
