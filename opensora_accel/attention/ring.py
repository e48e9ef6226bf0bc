"""Ring attention: queries stay, keys and values go round, every rank attends to each block as it passes.

A rank holds its queries and, at each of P steps, the keys and values of one rank (`ring_pipeline` has the picture).
It attends to that block and merges the result into that of the blocks before (`local` says how). After P steps each
query has seen every key, and no rank ever held more than two blocks.

Backward sends the blocks round once more. A block's gradient takes the output and the log-sum-exp of the whole row,
which forward kept, so the steps need no particular order. Gradients of queries stay and are added up; those of keys
and values are added up along the way, P − 1 hops in fp32, and end at the rank that owns the keys.

Under a causal mask, a rank computes the tiles of a block that its queries see (`balance`); keys may also be masked
one by one, and the mask then travels with them. Shares may differ in size.

Source: Liu et al., Ring Attention, arXiv:2310.01889.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from opensora_accel.attention.balance import Tile, TokenLayout, causal_tiles, check_layout
from opensora_accel.attention.blocks import Rows, RowsBackward, accumulator_dtype, add_parts, make_operators
from opensora_accel.attention.call import AttentionCall, autocast, enter_call
from opensora_accel.attention.local import attend_whole
from opensora_accel.attention.packed_keys import pack_keys, packed_size, split_keys, unpack_keys
from opensora_accel.attention.ring_pipeline import RingPipeline
from opensora_accel.attention.sliced import sliced_attend
from opensora_accel.attention.slices import AttentionSlices, Deal
from opensora_accel.communications import check_group
from opensora_accel.parallel_states import get_parallel_group


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    layout: TokenLayout = "contiguous",
    splits: Sequence[int] | None = None,
    kv_splits: Sequence[int] | None = None,
    slices: AttentionSlices | Deal | None = None,
) -> Tensor:
    """This rank's rows of the attention over the whole sequence, equal to that of one device.

    Args:
        q: [B, S_q/P, H, D].
        k, v: [B, S_kv/P, H_kv, D]; H is a multiple of H_kv, and key heads travel as few as they are.
        group: the P ranks; by default the registered sequence group.
        mask: [B, S_kv/P], true where a key may be seen; it travels with its keys.
        causal: query i sees keys 0…i of the whole sequence; needs S_q = S_kv.
        scale: 1/√D by default.
        layout: which tokens a rank holds, where that matters (causal): see `balance`. "zigzag" and "striped" give all
            ranks the same work.
        splits, kv_splits: every rank's number of queries and of keys, where all callers know them; otherwise
            they are exchanged.
        slices: which queries see which keys of the whole sequence; with a key mask beside it, both count. Where tokens
            are dealt out (`deal`), what says so, of these P ranks.

    Returns:
        [B, S_q/P, H, D].

    Raises:
        ValueError: the shapes are no attention; on every rank and before any data is sent, unless the sizes are
        given. RuntimeError: a second derivative is asked for.

    Communication: P−1 hops of k and v (and the mask) to the next rank; in backward the same, and P−1 hops of their
    gradients in fp32. In units of the bytes of q, with H_kv = H: 6 (P−1) in fp32, 8 (P−1) in bf16.

    Gradient: keeps q, k, v, the mask, the output and its log-sum-exp. Where a rank fails on the way, the others do
    not wait for it: gradients of keys that passed it are NaN.
    """
    group = check_group(get_parallel_group("sequence") if group is None else group)
    q, k, v = autocast(q, k, v)
    call = enter_call(
        q, k, v, mask, [group],
        splits=splits, kv_splits=kv_splits, causal=causal, scale=scale, slices=slices, layout=layout,
    )  # fmt: skip
    if causal:
        check_layout(layout, call.splits, call.kv_splits)
    return ring_attend(q, k, v, mask, group, call)


def ring_attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, group: dist.ProcessGroup | None, call: AttentionCall
) -> Tensor:
    """`ring_attention` of what was checked, with the ring's sizes in the call; without a group, of this rank alone.

    Args:
        q: [B, S_q/P, H, D]; k, v: [B, S_kv/P, H_kv, D]; mask: [B, S_kv/P].

    Returns:
        [B, S_q/P, H, D].
    """
    if group is None or group.size() == 1:
        # A ring of one sends nothing: torch's own attention serves, with an autograd of its own.
        return attend_whole(q, k, v, mask, call)
    if call.slices is not None:
        return sliced_attend(q, k, v, mask, group, call.slices, call.scale)
    # An operator takes no None for a float.
    scale = float(q.size(-1) ** -0.5 if call.scale is None else call.scale)
    options = (call.splits, call.kv_splits, group.group_name, call.causal, call.layout, scale)
    return _RingAttention.apply(q, k, v, mask, *options)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any) -> Tensor:
        """q: [B, S_q/P, H, D]; k, v: [B, S_kv/P, H_kv, D]; mask: [B, S_kv/P] → [B, S_q/P, H, D]."""
        out, lse = torch.ops.opensora_accel.ring_attention(q, k, v, mask, *options)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """grad: [B, S_q/P, H, D]."""
        # All three gradients, whichever are asked for: other ranks may ask for others, and wait for what passes here.
        # The node that refuses a second derivative is only needed where one could be taken.
        second = torch.is_grad_enabled()
        backward = (
            _RingAttentionBackward.apply if second else torch.ops.opensora_accel.ring_attention_backward
        )
        grads = backward(grad, *ctx.saved_tensors, *ctx.options)
        return *grads, None, *(None,) * len(ctx.options)


class _RingAttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.opensora_accel.ring_attention_backward(*arguments)

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Any:
        """Refuses a derivative of the gradients, whatever their shapes."""
        raise RuntimeError(
            "ring attention has no second derivative; use ulysses_attention, or local_attention on gathered keys"
        )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    splits: Sequence[int],
    kv_splits: Sequence[int],
    group_name: str,
    causal: bool,
    layout: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output [B, S_q/P, H, D] in the dtype of q, and the log-sum-exp [B, H, S_q/P]."""
    ring = _Ring(_resolve_process_group(group_name), splits, kv_splits, causal, layout)  # type: ignore[arg-type]
    rows = Rows(q, v.size(3), scale)
    packed, sizes = pack_keys(k, v, mask), ring.block_sizes(k, v, mask)
    with RingPipeline(ring.group, packed, sizes) as pipeline:
        # All P steps are run, also where this rank's queries see nothing of a block: the next rank waits for it.
        for step in range(len(kv_splits)):
            block = pipeline.next_block()
            num_tokens = kv_splits[pipeline.owner]
            # Its own block a rank has unpacked already.
            unpacked = (k, v, mask) if step == 0 else unpack_keys(block, k, v, mask, num_tokens)
            for tile in ring.tiles(pipeline.owner):
                rows.add(tile, *unpacked)
    return rows.result()


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    splits: Sequence[int],
    kv_splits: Sequence[int],
    group_name: str,
    causal: bool,
    layout: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in their shapes and dtypes.

    grad, q, out: [B, S_q/P, H, D]; k, v: [B, S_kv/P, H_kv, D]; mask: [B, S_kv/P]; lse: [B, H, S_q/P].
    """
    ring = _Ring(_resolve_process_group(group_name), splits, kv_splits, causal, layout)  # type: ignore[arg-type]
    dtype = accumulator_dtype(q.dtype)
    rows = RowsBackward(grad, q, out, lse, scale, is_masked=mask is not None)
    packed, sizes = pack_keys(k, v, mask), ring.block_sizes(k, v, mask)
    # A mask has no gradient, so gradients are counted in elements also where blocks are counted in bytes.
    grad_sizes = ring.block_sizes(k, v, None)

    # It runs while the block is the current one: `parts` and the owner are then those of this step.
    def put(grads: Tensor, is_new: bool) -> None:
        """Adds this rank's gradients of the current block to those of the ranks before; grads: [N], flat."""
        both = split_keys(grads, k, v, kv_splits[pipeline.owner])  # views: what is added fills the buffer
        if is_new and len(parts) == 1 and parts[0][1].size(1) == both[0].size(1):
            # There is nothing to add to yet, and the part is of all keys.
            for grad_, part in zip(both, parts[0][1:], strict=True):
                grad_.copy_(part)
            return
        if is_new:
            grads.zero_()
        add_parts(both, parts)

    with RingPipeline(ring.group, packed, sizes, grad_sizes, dtype) as pipeline:
        for step in range(len(kv_splits)):
            block = pipeline.next_block()
            num_tokens = kv_splits[pipeline.owner]
            unpacked = (k, v, mask) if step == 0 else unpack_keys(block, k, v, mask, num_tokens)
            parts = [(tile.keys, *rows.add(tile, *unpacked)) for tile in ring.tiles(pipeline.owner)]
            if step == 0:
                own = parts  # they stay here: the sum of the other ranks' parts comes back at the end
            else:
                pipeline.send_grads(put)
        grad_k, grad_v = split_keys(pipeline.receive_grads(), k, v, k.size(1))
        add_parts((grad_k, grad_v), own)
    # Copies: an operator's outputs may not share memory.
    return rows.result(), grad_k.to(k.dtype, copy=True), grad_v.to(v.dtype, copy=True)


_OPTIONS = "int[] splits, int[] kv_splits, str group, bool causal, str layout, float scale"
_OPERATORS = make_operators("ring_attention", "Tensor? mask", _OPTIONS, _forward, _backward)


class _Ring:
    """The facts of one trip round."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        splits: Sequence[int],
        kv_splits: Sequence[int],
        causal: bool,
        layout: str,
    ):
        self.group, self.splits, self.kv_splits = group, tuple(splits), tuple(kv_splits)
        self.causal, self.layout = causal, layout

    def tiles(self, owner: int) -> tuple[Tile, ...]:
        """What this rank's queries see of the owner's keys."""
        rank = self.group.rank()
        if self.causal:
            return causal_tiles(self.layout, self.splits, self.kv_splits, rank, owner)
        # Without a causal mask a row sees all of a block, whatever the layout.
        whole = Tile(slice(0, self.splits[rank]), slice(0, self.kv_splits[owner]), causal=False)
        return (whole,) if self.splits[rank] and self.kv_splits[owner] else ()

    def block_sizes(self, k: Tensor, v: Tensor, mask: Tensor | None) -> list[int]:
        """The size of every rank's packed block: in elements of k, with a mask in bytes.

        k, v: [B, S_kv/P, H_kv, D]; mask: [B, S_kv/P].
        """
        per_token = packed_size(k, v, mask)
        return [num_tokens * per_token for num_tokens in self.kv_splits]
