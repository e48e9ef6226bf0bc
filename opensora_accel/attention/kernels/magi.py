"""The kernel of the MagiAttention library, where it is installed: pieces of all four kinds in one call.

It takes a run of queries and a run of keys for each piece, and the piece's kind by a number. Its triangles have their
corners where those of pieces are: a causal one ends at the last query and key, an inverse one begins at the first, a
band does both. Runs may overlap and stand in any order, and what they give a query is merged within the kernel. Outputs
and gradients come in fp32, log-sum-exps [S, H] in fp32 by the natural logarithm.

Like flash-attn's, its functions below autograd are nobody's public interface, and are called by their parameters'
names: those of 1.0.5 and of 1.1 are known. It compiles its kernels for a head dim when they are first asked for.

Source: arXiv:2505.13211; magi_attention/functional/flex_flash_attn.py and csrc/flexible_flash_attention/ of
SandAI-org/MagiAttention (Apache 2.0) at v1.0.5, v1.1.1 and 2c64135 of May 2026.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opensora_accel.attention.kernels.base import Grads, Problem, Scores, dense_rows, is_deterministic
from opensora_accel.attention.kernels.releases import Release, find_release, unfit_operands
from opensora_accel.attention.slices import Kind, PieceFacts, Pieces

_KINDS: dict[Kind, int] = {"full": 0, "causal": 1, "inverse causal": 2, "band": 3}
_OF_BOTH = {
    "q_ranges",
    "k_ranges",
    "attn_type_map",
    "softmax_scale",
    "deterministic",
    "q",
    "k",
    "v",
    "out",
    "lse",
}
_FORWARD = _OF_BOTH | {"out_type", "disable_fwd_atomic_reduction"}
_TYPES = {f"d{name}_type" for name in "qkv"}
_BACKWARD = _OF_BOTH | _TYPES | {"dout", "dq", "dk", "dv", "disable_bwd_dkv_atomic_reduction"}


class MagiKernel:
    """`flex_flash_attn`: bf16 and fp16 on Hopper, head dims up to 128, grouped heads; deterministic where asked."""

    name = "MagiAttention"

    def refuses(self, problem: Problem, facts: PieceFacts) -> str | None:
        if unfit := unfit_operands(problem, 128):
            return unfit
        if torch.cuda.get_device_capability(problem.device) != (9, 0):
            return "it runs on Hopper"
        return self._release().problem

    def release(self) -> str:
        """Which release was found, and its interface."""
        return self._release().name

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pieces: Pieces
    ) -> tuple[Tensor, Tensor]:
        """[B, S, H, D] → output [B, S_q, H, D] in fp32, log-sum-exp [B, H, S_q]."""
        out, lse, *_ = self._release().forward(
            **{"q": _rows(q), "k": _rows(k), "v": _rows(v), "out": None, "lse": None},
            **_ranges(pieces, q),
            **{"softmax_scale": scores.scale, "deterministic": is_deterministic()},
            # Parts of a query are added up in the kernel, in fp32.
            **{"out_type": torch.float32, "disable_fwd_atomic_reduction": False},
        )
        # From 1.1 on it comes with what else there is to say of a forward.
        lse = getattr(lse, "lse", lse)
        return out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2]).transpose(1, 2)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scores: Scores,
        pieces: Pieces,
    ) -> Grads:
        """grad, out: [B, S_q, H, D]; lse: [B, H, S_q] → gradients [B, S, H, D] of q, k and v, in fp32."""
        grads = self._release().backward(
            **{"dout": _rows(grad), "q": _rows(q), "k": _rows(k), "v": _rows(v), "out": _rows(out)},
            # [B, H, S_q] → [B·S_q, H], whose last dim lies in one piece.
            lse=lse.transpose(1, 2).flatten(0, 1).contiguous(),
            # It makes those that it is not given, of zeros.
            **{"dq": None, "dk": None, "dv": None},
            **_ranges(pieces, q),
            **{"softmax_scale": scores.scale, "deterministic": is_deterministic()},
            **dict.fromkeys(_TYPES, torch.float32),
            disable_bwd_dkv_atomic_reduction=False,
        )
        grad_q, grad_k, grad_v = (
            part.unflatten(0, like.shape[:2]) for part, like in zip(grads[:3], (q, k, v), strict=True)
        )
        return grad_q, grad_k, grad_v

    def _release(self) -> Release:
        return find_release(
            "magi_attention.functional.flex_flash_attn",
            ("magi-attention", "magi_attention"),
            "install MagiAttention 1.0.5, 1.1.0 or 1.1.1",
            "_flex_flash_attn",
            frozenset(_FORWARD),
            frozenset(_BACKWARD),
        )


def _rows(tensor: Tensor) -> Tensor:
    """[B, S, H, D] → [B·S, H, D], of dense rows."""
    return dense_rows(tensor.flatten(0, 1))


def _ranges(pieces: Pieces, q: Tensor) -> dict[str, Tensor]:
    """Where the pieces of all samples start and stop, [B·N, 2] of queries and of keys, and their kinds [B·N]."""

    def make() -> dict[str, Tensor]:
        table = torch.tensor([each[:4] for each in pieces.pieces]).view(-1, 2, 2)
        sample = torch.arange(q.size(0)).view(-1, 1, 1, 1)
        # Of the samples, which lie one behind the other: [B, N, queries and keys, start and stop].
        table = table + sample * torch.tensor([pieces.num_rows, pieces.num_keys]).view(2, 1)
        kinds = torch.tensor([_KINDS[each.kind] for each in pieces.pieces]).repeat(q.size(0))
        ranges = {"q_ranges": table[:, :, 0].flatten(0, 1), "k_ranges": table[:, :, 1].flatten(0, 1)}
        return {
            name: tensor.to(torch.int32).contiguous().to(q.device)
            for name, tensor in (ranges | {"attn_type_map": kinds}).items()
        }

    return pieces.kept(("magi", q.size(0), q.device), make)
