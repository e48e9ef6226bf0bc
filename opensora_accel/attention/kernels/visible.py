"""torch's flash kernel over the keys that a mask lets see, where the kernel itself takes no mask.

A key that is hidden from a sample's queries is hidden from all of them, so it can be left out instead of masked. Two
samples of three keys, of which a, c and d are seen:

    keys      a b c | d e f        order    0 2 3 | 1 4 5
    mask      1 0 1 | 1 0 0        packed   a c d | b e f
    lengths     2   |   1          starts   0 2 3

Keys are gathered in that order, and the kernel's form for samples of different lengths reads from one start to the
next. It never reaches b, e and f, and leaves their gradients unwritten. Gradients are gathered back to where the keys
stood. All of it happens on the device: the longest length, which the kernel wants as a number, is bounded by 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora_accel.attention.kernels.base import Grads, Problem, Scores, dense_rows
from opensora_accel.attention.kernels.cuda import FlashKernel, unused_seed


class VisibleKeysKernel:
    """`aten::_flash_attention_forward` with cumulative lengths: key masks, grouped heads, fp16 and bf16.

    Its backward is deterministic where torch is set to be. Beside what flash takes, keys and values are copied once,
    and their gradients once.
    """

    name = "aten flash over visible keys"

    def refuses(self, problem: Problem) -> str | None:
        if not problem.masked:
            return "it is for key masks, and there is none"
        unfit = FlashKernel().refuses(problem._replace(masked=False))
        if unfit is None and problem.causal:
            return "the keys before a query are not the first ones any more where hidden ones are left out"
        if unfit is None and torch.version.hip:
            return "only NVIDIA's build is known to lay out the log-sum-exp as it is read here"
        return unfit

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """[B, S, H, D] → output [B, S_q, H, D], log-sum-exp [B, H, S_q]."""
        assert scores.mask is not None
        order, starts = _packed(scores.mask)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(_rows(q), _rows(k)[order], _rows(v)[order], _query_starts(q), starts, q.size(1), k.size(1)),
            *(0.0, False, False),
            scale=scores.scale,
        )
        return out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        """grad, out: [B, S_q, H, D]; lse: [B, H, S_q] → gradients [B, S, H, D] of q, k and v."""
        assert scores.mask is not None
        order, starts = _packed(scores.mask)
        # [B, H, S_q] → [H, B·S_q], in one piece: the kernel reads it through its pointer.
        rows_of_heads = lse.transpose(0, 1).flatten(1).contiguous()
        seed = unused_seed(q)
        grad_q, *grads = torch.ops.aten._flash_attention_backward(
            *(_rows(grad), _rows(q), _rows(k)[order], _rows(v)[order], _rows(out), rows_of_heads),
            *(_query_starts(q), starts, q.size(1), k.size(1), 0.0, False, seed, seed),
            scale=scores.scale,
        )
        # Where a visible key stands among the packed ones; hidden ones take any, and then 0.
        place = scores.mask.flatten().cumsum(0).sub_(1).clamp_(min=0)
        hidden = ~scores.mask.flatten()[:, None, None]
        grad_k, grad_v = (packed[place].masked_fill_(hidden, 0).unflatten(0, k.shape[:2]) for packed in grads)
        return grad_q.unflatten(0, q.shape[:2]), grad_k, grad_v


def _packed(mask: Tensor) -> tuple[Tensor, Tensor]:
    """A mask [B, S_kv] → the order [B·S_kv] that puts visible keys first, and every sample's start [B + 1] in it."""
    order = mask.flatten().argsort(descending=True, stable=True)  # stable: samples stay behind each other
    return order, F.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)


def _query_starts(q: Tensor) -> Tensor:
    """Where every sample of q [B, S_q, H, D] starts among all rows: [B + 1]."""
    return torch.arange(q.size(0) + 1, dtype=torch.int32, device=q.device) * q.size(1)


def _rows(tensor: Tensor) -> Tensor:
    """[B, S, H, D] → [B·S, H, D], of dense rows."""
    return dense_rows(tensor.flatten(0, 1))
