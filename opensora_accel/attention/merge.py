"""Attention over keys that come in blocks: two partial results become one, exactly and without overflow."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Makes `out` and `lse`, in place, the attention over their keys and those of the block.

    Start from a first block, or from zeros with a log-sum-exp of −inf. A row that sees no key in either has output 0
    and log-sum-exp −inf, never NaN.

    Args:
        out: [B, S, H, D], fp32 or fp64: accumulated in fp32, the error does not grow with the number of blocks.
        lse: [B, S, H], of the same dtype, the natural logarithm of the sum over the scaled scores' exponentials.
        block_out: [B, S, H, D], of any dtype.
        block_lse: [B, S, H].

    Gradient: not meant to be differentiated; attention's backward starts from the merged lse.

    Source: the online softmax of Milakov and Gimelshein (arXiv:1805.02867), in the form of a sigmoid of the difference
    of the two log-sum-exps, which neither overflows nor divides.
    """
    if out.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"partial results are accumulated in fp32 or fp64; got out in {out.dtype}, use out.float()"
        )
    block_lse = block_lse.to(lse.dtype)
    # Both −inf: the difference is NaN, and no share of nothing is taken.
    share = torch.sigmoid(block_lse - lse).nan_to_num_(nan=0.0).unsqueeze(-1)
    out.lerp_(block_out.to(out.dtype), share)
    torch.logaddexp(lse, block_lse, out=lse)
