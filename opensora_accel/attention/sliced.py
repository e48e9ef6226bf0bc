"""Attention by slices of a mask, on one rank and over many: what it costs is the mask's area.

A kernel that knows pieces takes all that is seen of a block of keys in one call. For others slices are cut into tiles,
whose results are merged by their log-sum-exps, as blocks of a ring are. Over ranks each sends the keys that others'
queries see straight to them (`direct_pipeline.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from opensora_accel import regions
from opensora_accel.attention.blocks import (
    Part,
    Rows,
    RowsBackward,
    accumulator_dtype,
    add_parts,
    make_operators,
)
from opensora_accel.attention.direct_pipeline import Counts, DirectPipeline
from opensora_accel.attention.packed_keys import packed_size, split_keys, unpack_keys
from opensora_accel.attention.slices.dealing import Deal, Step, dealt


def sliced_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    group: dist.ProcessGroup | None,
    deal: Deal,
    scale: float | None,
) -> Tensor:
    """Attention of what was checked, by the slices of a deal; without a group, of one rank that has all tokens.

    Args:
        q: [B, S_q/P, H, D]; k, v: [B, S_kv/P, H_kv, D]; mask: [B, S_kv/P], or None.

    Returns:
        [B, S_q/P, H, D].

    Communication: each rank sends another one, of its keys and values (and their mask), those that the other's queries
    see; in backward the same, and as many gradients in fp32 back.
    """
    # An operator takes no None for a float.
    scale = float(q.size(-1) ** -0.5 if scale is None else scale)
    return _SlicedAttention.apply(q, k, v, mask, deal, "" if group is None else group.group_name, scale)


class _SlicedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, deal: Deal, *rest: Any
    ) -> Tensor:
        """q: [B, S_q/P, H, D]; k, v: [B, S_kv/P, H_kv, D]; mask: [B, S_kv/P] → [B, S_q/P, H, D]."""
        out, lse = torch.ops.opensora_accel.sliced_attention(q, k, v, mask, deal.name, *rest)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        # It lives as long as backward may ask for it by its name.
        ctx.deal, ctx.rest = deal, rest
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """grad: [B, S_q/P, H, D]."""
        operator = torch.ops.opensora_accel.sliced_attention_backward
        # The node that refuses a second derivative is only needed where one could be taken.
        backward = _SlicedAttentionBackward.apply if torch.is_grad_enabled() else operator
        grads = backward(grad, *ctx.saved_tensors, ctx.deal.name, *ctx.rest)
        return *grads, None, None, None, None


class _SlicedAttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.opensora_accel.sliced_attention_backward(*arguments)

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Any:
        """Refuses a derivative of the gradients, whatever their shapes."""
        raise RuntimeError("attention by slices has no second derivative; use a dense mask on one device")


class _Exchange:
    """The steps of this rank, and how its keys go into messages and out of them.

    Args:
        k, v: [B, S_kv/P, H_kv, D]; mask: [B, S_kv/P].
    """

    def __init__(self, k: Tensor, v: Tensor, mask: Tensor | None, deal: str, group_name: str):
        self.group = _resolve_process_group(group_name) if group_name else None  # type: ignore[arg-type]
        self.place = 0 if self.group is None else self.group.rank()
        self.deal = dealt(deal)
        self.steps: Sequence[Step] = self.deal.steps(self.place)
        self._keys = (k, v, mask)
        self._message = k if mask is None else k.new_empty(0, dtype=torch.uint8)

    def pipeline(self, **of_grads: Any) -> DirectPipeline:
        assert self.group is not None
        counts = [Counts(step.num_sent, step.num_received) for step in self.steps]
        size = packed_size(*self._keys)
        return DirectPipeline(self.group, counts, (self._message, size), self._fill, **of_grads)

    def received(self, step: Step, flat: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values [B, n, H_kv, D] and mask [B, n] of a message; at the first step this rank's own."""
        if step is self.steps[0]:
            return self._keys
        return unpack_keys(flat, *self._keys, step.num_received)

    def _fill(self, number: int, flat: Tensor) -> None:
        step = self.steps[number]
        for place, own in zip(unpack_keys(flat, *self._keys, step.num_sent), self._keys, strict=True):
            if place is not None and own is not None:
                for run, of_run in _parts(place, step.sends):
                    of_run.copy_(own[:, run.start : run.stop])


def _parts(tensor: Tensor, runs: Sequence[range]) -> list[tuple[range, Tensor]]:
    """Runs of tokens, and where each stands in a tensor [B, n, …] that has them one behind the other."""
    return list(zip(runs, tensor.split([len(run) for run in runs], 1), strict=True)) if runs else []


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, deal: str, group: str, scale: float
) -> tuple[Tensor, Tensor]:
    """The output [B, S_q/P, H, D] in the dtype of q, and the log-sum-exp [B, H, S_q/P]."""
    exchange, rows = _Exchange(k, v, mask, deal, group), Rows(q, v.size(3), scale)
    regions.attends(exchange.deal, exchange.place, q.size(0))
    if exchange.group is None:
        rows.add_pieces(exchange.steps[0].pieces, k, v, mask)
        return rows.result()
    with exchange.pipeline() as pipeline:
        for step in exchange.steps:
            rows.add_pieces(step.pieces, *exchange.received(step, pipeline.next_keys()))
    return rows.result()


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    deal: str,
    group: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in their shapes and dtypes.

    grad, q, out: [B, S_q/P, H, D]; k, v: [B, S_kv/P, H_kv, D]; mask: [B, S_kv/P]; lse: [B, H, S_q/P].
    """
    exchange = _Exchange(k, v, mask, deal, group)
    rows = RowsBackward(grad, q, out, lse, scale, is_masked=mask is not None)
    dtype = accumulator_dtype(q.dtype)
    grads = k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)
    if exchange.group is None:
        add_parts(grads, rows.add_pieces(exchange.steps[0].pieces, k, v, mask))
        return rows.result(), grads[0].to(k.dtype), grads[1].to(v.dtype)

    def take(number: int, flat: Tensor) -> None:
        """Adds what came back of keys that were sent."""
        step = exchange.steps[number]
        for own, came in zip(grads, split_keys(flat, k, v, step.num_sent), strict=True):
            for run, of_run in _parts(came, step.sends):
                own[:, run.start : run.stop] += of_run

    def fill(num_tokens: int, parts: Sequence[Part], flat: Tensor) -> None:
        """Puts what goes back into a message."""
        flat.zero_()
        add_parts(split_keys(flat, k, v, num_tokens), parts)

    of_grads = (dtype, packed_size(k, v, None))
    with exchange.pipeline(grads=of_grads, take=take) as pipeline:
        for number, step in enumerate(exchange.steps):
            parts = list(rows.add_pieces(step.pieces, *exchange.received(step, pipeline.next_keys())))
            if number == 0:
                add_parts(grads, parts)
            else:
                pipeline.send_grads(partial(fill, step.num_received, parts))
        pipeline.finish_grads()
    return rows.result(), grads[0].to(k.dtype), grads[1].to(v.dtype)


_OPERATORS = make_operators(
    "sliced_attention", "Tensor? mask", "str deal, str group, float scale", _forward, _backward
)
