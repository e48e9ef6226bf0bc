"""Attention on one rank, in the layout that every parallel attention here shares: [B, S, H, D].

`local_attention` is the whole of it. The rest is attention over keys that come in blocks, as a ring needs it. A row's
result over a block is its output o and its log-sum-exp, lse = log Σ exp(score). Two blocks a and b make the whole
row:

    o = (1 − w)·o_a + w·o_b    with w = exp(lse_b) / (exp(lse_a) + exp(lse_b)) = σ(lse_b − lse_a)
    lse = log(exp(lse_a) + exp(lse_b))

If the row's scores over a add up to 3 and those over b to 1, w is ¼. The sigmoid neither overflows nor divides. In
backward no merging is needed: each block is given the output and the log-sum-exp of the whole row, and its weights
exp(score − lse) are then those of the whole softmax.

Source: the online softmax of Milakov and Gimelshein, arXiv:1805.02867; FlashAttention-2's backward, arXiv:2307.08691.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opensora_accel.attention.balance import Tile
from opensora_accel.attention.call import AttentionCall, autocast, enter_call, torch_attention
from opensora_accel.attention.kernels import Choice, Grads, Problem, Scores, choose_kernel


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale) v, by torch's own choice of kernel.

    Args:
        q: [B, S_q, H, D].
        k, v: [B, S_kv, H_kv, D]; H is a multiple of H_kv (grouped heads).
        mask: [B, S_kv], true where a key may be seen. A query that may see none gives 0, and no gradient.
        causal: query i sees keys 0…i; needs S_q = S_kv.
        scale: 1/√D by default.

    Returns:
        [B, S_q, H, D].

    Raises:
        ValueError: the shapes are no attention.
    """
    q, k, v = autocast(q, k, v)
    return attend_whole(q, k, v, mask, enter_call(q, k, v, mask, [], causal=causal, scale=scale))


def attend_whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: AttentionCall) -> Tensor:
    """`local_attention` of what was checked, with the mask, `causal` and `scale` of the call; tensors may be empty.

    Args:
        q: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D]; mask: [B, S_kv].

    Returns:
        [B, S_q, H, D].
    """
    if q.numel() == 0 or k.numel() == 0:
        # There is no query, no key or no head. The zeros stay connected to the inputs: autograd must reach the
        # collectives before them, in which other ranks wait.
        connection = sum(tensor.flatten()[:0].sum() for tensor in (q, k, v))
        return q.new_zeros(*q.shape[:3], v.size(3)) + connection
    if mask is not None and not call.causal and _leaves_hidden_keys_out(q, v):
        return _MaskedAttention.apply(q, k, v, mask, q.size(3) ** -0.5 if call.scale is None else call.scale)
    causal, attention_mask, sees_none = call.causal, None, None
    if mask is not None:
        # [B, 1, 1, S_kv]: the same for all heads and all queries.
        attention_mask = mask[:, None, None, :]
        if causal:
            # Kernels take a mask or the causal flag, not both.
            triangle = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device).tril()
            attention_mask, causal = attention_mask & triangle, False
        # Kernels differ in what they make of a row without keys: let it see all, and drop what it saw.
        sees_none = ~attention_mask.any(-1, keepdim=True)
        attention_mask = attention_mask | sees_none
    # torch wants [B, H, S, D]; these are views, and nothing is copied here. Which kernel comes first is its own rule,
    # the one that `choose_kernel` follows: cuDNN on Hopper and Blackwell, else flash.
    out = torch_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=attention_mask,
        is_causal=causal,
        scale=call.scale,
        enable_gqa=q.size(2) != k.size(2),
    )
    if sees_none is not None:
        out = out.masked_fill(sees_none, 0)
    return out.transpose(1, 2)


def _leaves_hidden_keys_out(q: Tensor, v: Tensor) -> bool:
    """Whether one of our kernels serves a masked call better than torch's own choice; q, v: [B, S, H, D].

    Under a mask torch leaves flash for the memory-efficient kernel: for a few hidden text tokens, a whole video would.
    """
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.size(3) == v.size(3) and q.size(3) % 8 == 0
    return fits and q.device.type == "cuda" and not torch.version.hip


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        """q: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D]; mask: [B, S_kv] → [B, S_q, H, D]."""
        out, lse = torch.ops.opensora_accel.masked_attention(q, k, v, mask, scale)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """grad: [B, S_q, H, D]."""
        operator = torch.ops.opensora_accel.masked_attention_backward
        # The node that refuses a second derivative is only needed where one could be taken.
        backward = _MaskedAttentionBackward.apply if torch.is_grad_enabled() else operator
        return *backward(grad, *ctx.saved_tensors, ctx.scale), None, None


class _MaskedAttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, *arguments: Any) -> Grads:
        return torch.ops.opensora_accel.masked_attention_backward(*arguments)

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Any:
        """Refuses a derivative of the gradients, whatever their shapes."""
        raise RuntimeError(
            "masked attention has no second derivative in fp16 and bf16 on a GPU, nor has any fused kernel of torch; "
            "take it in fp32 under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


# Operators of their own, as those of the ring: opaque to torch.compile, which need not know which kernel they take.
_OPERATORS = torch.library.Library("opensora_accel", "FRAGMENT")
_OPERATORS.define(
    "masked_attention(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> (Tensor, Tensor)"
)
_OPERATORS.define(
    "masked_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor out, Tensor lse, "
    "float scale) -> (Tensor, Tensor, Tensor)"
)


def _masked_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output [B, S_q, H, D] in the dtype of q, and the log-sum-exp [B, H, S_q]."""
    out, lse = attend(q, k, v, Scores(scale, mask))
    return out.to(q.dtype).contiguous(), lse.to(accumulator_dtype(q.dtype)).contiguous()


def _masked_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Grads:
    """The gradients of q, k and v, in their shapes and dtypes.

    grad, q, out: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D]; mask: [B, S_kv]; lse: [B, H, S_q].
    """
    lse = lse.masked_fill(lse == float("-inf"), 0)  # as `attend_backward` wants it of rows without keys
    grad_q, grad_k, grad_v = attend_backward(grad, q, k, v, out, lse, Scores(scale, mask))
    return grad_q.to(q.dtype).contiguous(), grad_k.to(k.dtype).contiguous(), grad_v.to(v.dtype).contiguous()


_OPERATORS.impl("masked_attention", _masked_forward, "CompositeExplicitAutograd")
_OPERATORS.impl("masked_attention_backward", _masked_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("opensora_accel::masked_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _dim = q.shape
    lse = q.new_empty((batch, heads, tokens), dtype=accumulator_dtype(q.dtype))
    return q.new_empty((batch, tokens, heads, v.size(3))), lse


@torch.library.register_fake("opensora_accel::masked_attention_backward")
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def explain_kernel(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Choice:
    """The kernel that a ring takes for these tensors, and on a GPU masked attention too; and why not those before it.

    `print` it.

    Args:
        q: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D]; mask: [B, S_kv].
    """
    return choose_kernel(Problem.of(q, k, v, mask, causal))


def attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Attention over one block of keys. Not differentiable.

    Args:
        q: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D], the keys and values of the block.

    Returns:
        The output [B, S_q, H, D] and the log-sum-exp [B, H, S_q]; 0 and −inf for a row that sees no key.
    """
    if q.numel() == 0 or k.numel() == 0:
        lse = q.new_full((q.size(0), q.size(2), q.size(1)), float("-inf"), dtype=accumulator_dtype(q.dtype))
        return q.new_zeros(*q.shape[:3], v.size(3)), lse
    if scores.reversed:
        # Read from its end, a reversed triangle is one that kernels know.
        out, lse = attend(q.flip(1), k.flip(1), v.flip(1), scores.from_the_end())
        return out.flip(1), lse.flip(2)
    mask = scores.mask
    out, lse = choose_kernel(Problem.of(q, k, v, mask, scores.causal)).kernel.forward(q, k, v, scores)
    if mask is not None:
        # [B, S_q] or [B, 1]: kernels differ in what they make of a row that sees nothing.
        sees_none = mask.cumsum(1) == 0 if scores.causal else ~mask.any(1, keepdim=True)
        out = out.masked_fill(sees_none[:, :, None, None], 0)
        lse = lse.masked_fill(sees_none[:, None, :], float("-inf"))
    return out, lse


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Makes `out` and `lse`, in place, the attention over their keys and those of the block. Not differentiable.

    Start from a first block, or from zeros with a log-sum-exp of −inf. A row that sees no key in either has output 0
    and log-sum-exp −inf, never NaN.

    Args:
        out: [B, S, H, D], fp32 or fp64: accumulated in fp32, the error does not grow with the number of blocks.
        lse: [B, S, H], of the same dtype, the natural logarithm of the sum over the scaled scores' exponentials.
        block_out: [B, S, H, D], of any dtype.
        block_lse: [B, S, H].

    Raises:
        ValueError: `out` is of a narrower dtype.
    """
    if out.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"partial results are accumulated in fp32 or fp64; got out in {out.dtype}, use out.float()"
        )
    block_lse = block_lse.to(lse.dtype)
    # The block's share of the row, w above. Where both are −inf the difference is NaN, and the share is 0.
    share = torch.sigmoid(block_lse - lse).nan_to_num_(nan=0.0).unsqueeze(-1)
    # The share is exactly 0 for a block that a row sees nothing of, and such a row keeps its bits.
    out.lerp_(block_out.to(out.dtype), share)
    # Last, because the share needs the log-sum-exp from before. Of −inf and −inf it is −inf.
    torch.logaddexp(lse, block_lse, out=lse)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Grads:
    """Gradients of q, k and v through one block of keys.

    Args:
        grad, out: [B, S_q, H, D], of the whole row; q: [B, S_q, H, D]; k, v: [B, S_kv, H_kv, D], of the block. lse:
        [B, H, S_q], of the whole row, finite: 0 in place of −inf, for a row without keys, gives all of its masked
            keys the weight 0.
    """
    # A rank without queries takes part in a ring as well, and adds zeros to the gradients of keys.
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if scores.reversed:
        grad, q, k, v, out = (tensor.flip(1) for tensor in (grad, q, k, v, out))
        grads = attend_backward(grad, q, k, v, out, lse.flip(2), scores.from_the_end())
        grad_q, grad_k, grad_v = (each.flip(1) for each in grads)
        return grad_q, grad_k, grad_v
    kernel = choose_kernel(Problem.of(q, k, v, scores.mask, scores.causal)).kernel
    return kernel.backward(grad, q, k, v, out, lse, scores)


class Rows:
    """Attention of this rank's queries over keys that come tile by tile. Not differentiable.

    Args:
        q: [B, S_q, H, D].
        value_dim: D of the values.
    """

    def __init__(self, q: Tensor, value_dim: int, scale: float):
        self._q, self._value_dim, self._scale = q, value_dim, scale
        self._dtype = accumulator_dtype(q.dtype)
        # Until a first part has come there is nothing to merge with, and the part itself is the sum.
        self._out: Tensor | None = None  # [B, S_q, H, D], in fp32 or fp64
        self._lse: Tensor | None = None  # [B, S_q, H]

    def add(self, tile: Tile, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        """Attends to the tile's keys; k, v: [B, S_kv, H_kv, D] and mask [B, S_kv], of the block that it is of."""
        q = rows_of(self._q, tile.rows)
        scores = scores_of(tile, self._scale, mask)
        part, part_lse = attend(q, rows_of(k, tile.keys), rows_of(v, tile.keys), scores)
        part_lse = part_lse.transpose(1, 2)  # [B, rows, H], beside the output's layout
        if self._out is None and part.size(1) == self._q.size(1):
            self._out, self._lse = part.to(self._dtype), part_lse.to(self._dtype)
            return
        # In place: the rows of this tile change, and all others stay as they are.
        out, lse = self._sums()
        merge_(rows_of(out, tile.rows), rows_of(lse, tile.rows), part, part_lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """The output [B, S_q, H, D] in the dtype of q, and the log-sum-exp [B, H, S_q]; 0 and −inf without keys."""
        out, lse = self._sums()
        # Rounded to the dtype of q once, after the last merge. The log-sum-exp stays wide and is contiguous,
        # because kernels on CUDA read it in backward through its raw pointer.
        return out.to(self._q.dtype).contiguous(), lse.transpose(1, 2).contiguous()

    def _sums(self) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            shape = (*self._q.shape[:3], self._value_dim)
            self._out = self._q.new_zeros(shape, dtype=self._dtype)
            self._lse = self._q.new_full(shape[:3], float("-inf"), dtype=self._dtype)
        return self._out, self._lse


class RowsBackward:
    """The gradients of `Rows`, tile by tile.

    Args:
        grad, q, out: [B, S_q, H, D]; lse: [B, H, S_q], of the whole rows.
        is_masked: whether keys may be hidden, so that a row may have seen none.
    """

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float, *, is_masked: bool):
        if is_masked:
            lse = lse.masked_fill(
                lse == float("-inf"), 0
            )  # as `attend_backward` wants it of rows without keys
        self._grad, self._q, self._out, self._lse, self._scale = grad, q, out, lse, scale
        self._grad_q: Tensor | None = None  # [B, S_q, H, D], added up over all tiles in fp32 or fp64

    def add(self, tile: Tile, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The gradients [B, keys, H_kv, D] of the tile's keys and values, of a block as in `Rows.add`."""
        rows, scores = tile.rows, scores_of(tile, self._scale, mask)
        grad_q, grad_k, grad_v = attend_backward(
            rows_of(self._grad, rows), rows_of(self._q, rows), rows_of(k, tile.keys), rows_of(v, tile.keys),
            rows_of(self._out, rows), rows_of(self._lse, rows, 2), scores,
        )  # fmt: skip
        if self._grad_q is None and grad_q.size(1) == self._q.size(1):
            self._grad_q = grad_q.to(accumulator_dtype(self._q.dtype))
            return grad_k, grad_v
        of_tile = rows_of(self._sum(), rows)
        of_tile += grad_q
        return grad_k, grad_v

    def result(self) -> Tensor:
        """The gradient of q [B, S_q, H, D], in its dtype."""
        return self._sum().to(self._q.dtype)

    def _sum(self) -> Tensor:
        if self._grad_q is None:
            self._grad_q = self._q.new_zeros(self._q.shape, dtype=accumulator_dtype(self._q.dtype))
        return self._grad_q


def scores_of(tile: Tile, scale: float, mask: Tensor | None) -> Scores:
    """How a tile's products become scores; mask: [B, S_kv], of the block that the tile is of."""
    return Scores(scale, None if mask is None else rows_of(mask, tile.keys), tile.causal, tile.reversed)


def rows_of(tensor: Tensor, rows: slice, dim: int = 1) -> Tensor:
    """Rows along a dim of a tensor [B, S, ...]: a view, or the tensor itself where they are all of it (quicker)."""
    if rows.stop - rows.start == tensor.size(dim):
        return tensor
    return tensor.narrow(dim, rows.start, rows.stop - rows.start)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results are added up in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
