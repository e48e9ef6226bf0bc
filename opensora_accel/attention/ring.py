"""Ring attention: queries stay, keys and values go round, every rank attends to each block as it passes.

Source: Liu et al., Ring Attention, arXiv:2310.01889. Here shares may differ in size, keys may be masked, and the
gradient of a rank's keys needs P−1 hops: its own part never leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from opensora_accel.attention.balance import Layout, Tile, causal_tiles, check_layout, layout_number
from opensora_accel.attention.checks import agreed_splits
from opensora_accel.attention.circulate import Circulation
from opensora_accel.attention.kernels import Scores
from opensora_accel.attention.local import (
    accumulator_dtype,
    attend,
    attend_backward,
    attend_whole,
    autocast,
)
from opensora_accel.attention.merge import merge_
from opensora_accel.communications.checks import check_group
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
    layout: Layout = "contiguous",
    splits: Sequence[int] | None = None,
    kv_splits: Sequence[int] | None = None,
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

    Returns:
        [B, S_q/P, H, D].

    Communication: P−1 hops of k and v (and the mask) to the next rank; in backward the same, and P−1 hops of their
    gradients in fp32. In units of the bytes of q, with H_kv = H: 6 (P−1) in fp32, 8 (P−1) in bf16.

    Gradient: keeps q, k, v, the mask, the output and its log-sum-exp; has no second derivative. Where a rank fails on
    the way, the others do not wait for it: gradients of keys that passed it are NaN.

    Raises ValueError, before any data is sent, for shapes that are no attention.
    """
    group = check_group(get_parallel_group("sequence") if group is None else group)
    q, k, v = autocast(q, k, v)
    splits, kv_splits = agreed_splits(
        {"q": q, "k": k, "v": v, "mask": mask},
        {"causal": causal, "scale": scale, "layout": layout_number(layout)},
        [group],
        splits,
        kv_splits,
    )
    check_layout(layout, *((splits, kv_splits) if causal else ()))
    return ring_attend(q, k, v, group, mask, causal, scale, layout, splits, kv_splits)


def ring_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    layout: Layout,
    splits: Sequence[int],
    kv_splits: Sequence[int],
) -> Tensor:
    """`ring_attention` of what was checked."""
    if group.size() == 1:
        return attend_whole(q, k, v, mask, causal, scale)
    scale = q.size(-1) ** -0.5 if scale is None else scale
    out, _lse = _ring_op(q, k, v, mask, splits, kv_splits, group.group_name, causal, layout, float(scale))
    return out


@dataclass(frozen=True)
class _Ring:
    """What stays the same during one trip round."""

    group: dist.ProcessGroup
    splits: tuple[int, ...]
    kv_splits: tuple[int, ...]
    causal: bool
    layout: str

    def tiles(self, owner: int) -> tuple[Tile, ...]:
        rank = self.group.rank()
        if self.causal:
            return causal_tiles(self.layout, self.splits, self.kv_splits, rank, owner)
        # Without a causal mask a row sees all of a block, whatever the layout.
        whole = Tile(slice(0, self.splits[rank]), slice(0, self.kv_splits[owner]), causal=False)
        return (whole,) if self.splits[rank] and self.kv_splits[owner] else ()

    def block_sizes(self, k: Tensor, v: Tensor, mask: Tensor | None) -> list[int]:
        """Every rank's keys, values and mask, in bytes."""
        per_token = k.size(2) * (k.size(3) + v.size(3)) * k.element_size() + (mask is not None)
        return [k.size(0) * num_tokens * per_token for num_tokens in self.kv_splits]

    def grad_sizes(self, k: Tensor, v: Tensor) -> list[int]:
        """Every rank's gradients of keys and values, in elements."""
        per_token = k.size(0) * k.size(2) * (k.size(3) + v.size(3))
        return [num_tokens * per_token for num_tokens in self.kv_splits]


class _Block:
    """Keys, values and their mask of one rank, in one buffer of bytes."""

    def __init__(self, buffer: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, num_tokens: int):
        """`k`, `v` and `mask` tell dtypes and all sizes but the number of tokens."""
        shapes = [(tensor.size(0), num_tokens, *tensor.shape[2:]) for tensor in (k, v)]
        sizes = [_num_bytes(shape, k.dtype) for shape in shapes]
        parts = buffer.split([*sizes, buffer.numel() - sum(sizes)])
        self._k, self._v = (p.view(k.dtype).view(shape) for p, shape in zip(parts, shapes, strict=False))
        self._mask = None if mask is None else parts[2].view(torch.bool).view(k.size(0), num_tokens)

    def cut(self, tile: Tile, scale: float) -> tuple[Tensor, Tensor, Scores]:
        mask = None if self._mask is None else self._mask[:, tile.keys]
        return self._k[:, tile.keys], self._v[:, tile.keys], Scores(scale, mask, tile.causal)

    @staticmethod
    def pack(k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        parts = [k, v] if mask is None else [k, v, mask]
        return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: _Ring, scale: float
) -> tuple[Tensor, Tensor]:
    """Output in the dtype of q and log-sum-exp [B, H, S_q/P]."""
    dtype = accumulator_dtype(q.dtype)
    out = q.new_zeros(*q.shape[:3], v.size(3), dtype=dtype)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
    with Circulation(ring.group, _Block.pack(k, v, mask), ring.block_sizes(k, v, mask)) as trip:
        for _ in ring.kv_splits:
            buffer = trip.next_block()
            block = _Block(buffer, k, v, mask, ring.kv_splits[trip.owner])
            for tile in ring.tiles(trip.owner):
                part, part_lse = attend(q[:, tile.rows], *block.cut(tile, scale))
                merge_(out[:, tile.rows], lse[:, tile.rows], part, part_lse.transpose(1, 2))
    return out.to(q.dtype), lse.transpose(1, 2).contiguous()


class _KeyGrads:
    """This rank's part of the gradients of one block's keys and values, to be added to those of other ranks."""

    def __init__(self, k: Tensor, v: Tensor, num_tokens: int):
        self._shapes = [(k.size(0), num_tokens, k.size(2), dim) for dim in (k.size(3), v.size(3))]
        self._parts: list[tuple[slice, Tensor, Tensor]] = []

    def append(self, keys: slice, grad_k: Tensor, grad_v: Tensor) -> None:
        self._parts.append((keys, grad_k, grad_v))

    def add_to(self, sums: Tensor, is_new: bool) -> None:
        if is_new:
            sums.zero_()
        k, v = self.within(sums)
        for keys, grad_k, grad_v in self._parts:
            k[:, keys] += grad_k
            v[:, keys] += grad_v

    def within(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        k, v = sums.split([torch.Size(shape).numel() for shape in self._shapes])
        return k.view(self._shapes[0]), v.view(self._shapes[1])


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    ring: _Ring,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulator_dtype(q.dtype)
    grad_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = lse.masked_fill(lse == float("-inf"), 0)  # as `attend_backward` wants it of rows without keys
    block_sizes, grad_sizes = ring.block_sizes(k, v, mask), ring.grad_sizes(k, v)
    with Circulation(ring.group, _Block.pack(k, v, mask), block_sizes, grad_sizes, dtype) as trip:
        own = _KeyGrads(k, v, k.size(1))
        for step in range(len(ring.kv_splits)):
            buffer = trip.next_block()
            num_tokens = ring.kv_splits[trip.owner]
            block, found = _Block(buffer, k, v, mask, num_tokens), _KeyGrads(k, v, num_tokens)
            for tile in ring.tiles(trip.owner):
                rows = tile.rows
                block_k, block_v, scores = block.cut(tile, scale)
                whole = out[:, rows], lse[:, :, rows]
                parts = attend_backward(grad[:, rows], q[:, rows], block_k, block_v, *whole, scores)
                grad_q[:, rows] += parts[0]
                found.append(tile.keys, *parts[1:])
            if step == 0:
                own = found
            else:
                trip.send_home(found.add_to)
        sums = trip.come_home()
        own.add_to(sums, is_new=False)
    grad_k, grad_v = own.within(sums)
    # Copies: an operation's outputs may not share memory.
    return grad_q.to(q.dtype), grad_k.to(k.dtype, copy=True), grad_v.to(v.dtype, copy=True)


def _group_called(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]  # a NewType of torch's


# As operations of their own they are opaque to torch.compile, and selective checkpointing keeps what they return
# instead of sending everything round again.


@torch.library.custom_op("opensora_accel::ring_attention", mutates_args=())
def _ring_op(
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
    ring = _Ring(_group_called(group_name), tuple(splits), tuple(kv_splits), causal, layout)
    with torch.autocast(
        q.device.type, enabled=False
    ):  # kernels' own products are of the dtype that was given
        return _forward(q, k, v, mask, ring, scale)


@_ring_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _dim = q.shape
    lse = q.new_empty((batch, heads, tokens), dtype=accumulator_dtype(q.dtype))
    return q.new_empty((batch, tokens, heads, v.size(3))), lse


@torch.library.custom_op("opensora_accel::ring_attention_backward", mutates_args=())
def _ring_backward_op(
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
    ring = _Ring(_group_called(group_name), tuple(splits), tuple(kv_splits), causal, layout)
    with torch.autocast(q.device.type, enabled=False):
        return _backward(grad, q, k, v, mask, out, lse, ring, scale)


@_ring_backward_op.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, mask, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, mask, out, lse = ctx.saved_tensors
    # All three, whichever are asked for: other ranks may ask for others, and wait for what passes here.
    grads = _ring_backward_op(grad, q, k, v, mask, out, lse, *ctx.options)
    return *grads, *(None,) * (1 + len(ctx.options))


_ring_op.register_autograd(_differentiate, setup_context=_keep)


def _refuse(_ctx: Any, *_grads: Tensor) -> None:
    raise RuntimeError(
        "ring attention has no second derivative; use ulysses_attention, or local_attention on gathered keys"
    )


_ring_backward_op.register_autograd(_refuse)
