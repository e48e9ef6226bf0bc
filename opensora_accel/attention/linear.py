"""Linear attention over a sequence that is spread over ranks: sums over the tokens instead of a softmax.

A row of the output is (Σ v kᵀ) q / (Σ k · q), where the sums run over all tokens. Each of P = 3 ranks sums over its own
tokens, which gives a matrix [D, D] and a vector [D] a head; one all-reduce adds the three, and every rank computes the
rows of its own queries. What is sent does not grow with the sequence.

Source: linear transformers, arXiv:2006.16236; with rotary positions as in SANA-Video, arXiv:2509.24695.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications import (
    check_group,
    copy_forward_reduce_backward,
    reduce_forward_copy_backward,
)
from opensora_accel.parallel_states import get_parallel_group


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    rotated_q: Tensor | None = None,
    rotated_k: Tensor | None = None,
    eps: float = 1e-15,
) -> Tensor:
    """This rank's rows of (Σ v kᵀ) q / (Σ k · q + eps), the sums over all ranks' tokens.

    Args:
        q, k: [B, S/P, H, D], after the kernel function (ReLU, say): not negative.
        v: [B, S/P, H, D].
        group: the P ranks; by default the registered sequence group.
        rotated_q, rotated_k: q and k with their positions, for the numerator; the denominator has none.

    Returns:
        [B, S/P, H, D] in v's dtype; the numerator is in fp32 at least.

    Communication: one all-reduce of B·H·D·(D + 1) elements, whatever S is; as much in backward.
    """
    group = check_group(get_parallel_group("sequence") if group is None else group)
    wide = torch.promote_types(v.dtype, torch.float32)
    numerator_q = (q if rotated_q is None else rotated_q).to(wide)
    numerator_k = (k if rotated_k is None else rotated_k).to(wide)
    scores = torch.einsum("bshd,bshe->bhde", v.to(wide), numerator_k)
    # The denominator's sums travel as one more row: [B, H, D + 1, D].
    sums = torch.cat([scores, k.to(wide).sum(1).unsqueeze(-2)], -2)
    # Every rank goes on with the sums, so what they need of a gradient is summed as well.
    sums = copy_forward_reduce_backward(reduce_forward_copy_backward(sums, group), group)
    scores, total = sums[..., :-1, :], sums[..., -1, :]
    denominator = torch.einsum("bhd,bshd->bsh", total, q.to(wide)) + eps
    return (torch.einsum("bhde,bshe->bshd", scores, numerator_q) / denominator.unsqueeze(-1)).to(v.dtype)
