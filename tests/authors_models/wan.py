"""`WanModel` as Wan's authors build it, at toy widths: with positions made inside attention, and a kernel function.

Names, arguments and order of computation are those of Wan 2.1's repository (wan/modules/model.py, attention.py), the
code is not. What a model of this kind can do beside is an option: how it counts positions, how it hides keys.

Letters: `B` clips, `L` tokens, `H` heads, `D` head dim, `C` channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardformer

DIM, HEADS, TEXT = 36, 3, 20


def rope_params(max_seq_len: int, dim: int) -> Tensor:
    """[max_seq_len, dim / 2] rotations."""
    angles = torch.outer(torch.arange(max_seq_len), 100.0 ** -(torch.arange(0, dim, 2).double() / dim))
    return torch.polar(torch.ones_like(angles), angles)


def angles_of_grid(grid: tuple[int, int, int], freqs: Tensor) -> Tensor:
    """[F·H·W, 1, D / 2]: a table a dim, side by side."""
    half = freqs.size(1)
    tables = freqs.split([half - 2 * (half // 3), half // 3, half // 3], dim=1)
    rows = []
    for dim, (table, size) in enumerate(zip(tables, grid, strict=True)):
        shape = [size if each == dim else 1 for each in range(3)]
        rows.append(table[:size].view(*shape, -1).expand(*grid, -1))
    return torch.cat(rows, -1).reshape(math.prod(grid), 1, -1)


def rope_apply(x: Tensor, grid_sizes: Tensor, freqs: Tensor) -> Tensor:
    """[B, L, H, D] turned by the place of each token in its clip's grid; tokens behind the grid are padding."""
    turned = []
    for clip, grid in zip(x, grid_sizes.tolist(), strict=True):
        length = math.prod(grid)
        pairs = torch.view_as_complex(clip[:length].double().unflatten(-1, (-1, 2)))
        rotated = torch.view_as_real(pairs * angles_of_grid(tuple(grid), freqs)).flatten(2)
        turned.append(torch.cat([rotated.to(x.dtype), clip[length:]]))
    return torch.stack(turned)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Tensor | None = None,
    k_lens: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    q_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
    version: int | None = None,
) -> Tensor:
    """[B, L, H, D]; written out, as flash-attn is no function of torch either."""
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) * (softmax_scale or q.size(-1) ** -0.5)
    if k_lens is not None:
        # Counted on the host, as the authors' are.
        seen = torch.arange(k.size(1), device=k.device) < k_lens.to(k.device)[:, None]
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    return torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[B·L, H, D], every segment by itself."""
    out = []
    for start, stop in zip(cu_seqlens_k[:-1].tolist(), cu_seqlens_k[1:].tolist(), strict=True):
        out.append(flash_attention(*(t[None, start:stop] for t in (q, k, v)), softmax_scale=softmax_scale)[0])
    return torch.cat(out)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None
) -> Tensor:
    """[B, L, 3, H, D]"""
    return flash_attention(*qkv.unbind(2), softmax_scale=softmax_scale)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
) -> Tensor:
    """[B·L, 3, H, D]"""
    sizes = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(*qkv.unbind(1), *sizes, softmax_scale=softmax_scale)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0) -> Tensor:
    return flash_attention(q, *kv.unbind(2))


class WanSelfAttention(nn.Module):
    def __init__(self, positions: str, kernel: str):
        super().__init__()
        self.positions, self.kernel = positions, kernel
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, seq_lens: Tensor, grid_sizes: Tensor, freqs: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (HEADS, -1)) for layer in (self.q, self.k, self.v))
        q, k = (self._turn(each, grid_sizes, freqs) for each in (q, k))
        return self.o(self._attend(q, k, v, seq_lens).flatten(2))

    def _turn(self, x: Tensor, grid_sizes: Tensor, freqs: Tensor) -> Tensor:
        if self.positions == "rope_apply":
            return rope_apply(x, grid_sizes, freqs)
        if self.positions == "none":
            return x
        if self.positions == "local_tokens":
            table = angles_of_grid(tuple(grid_sizes[0].tolist()), freqs)
            table = table[shardformer.local_tokens(len(table))]
        elif self.positions == "counted":  # a line of tokens, from 0
            table = torch.polar(x.new_ones(()), torch.arange(x.size(1)).to(x) / 7.0)[:, None, None]
        else:  # "sliced": from a table that is longer than any clip
            table = freqs[: x.size(1), None]
        return (
            torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * table)
            .flatten(3)
            .to(x)
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> Tensor:
        if self.kernel == "k_lens":
            return flash_attention(q, k, v, k_lens=seq_lens, window_size=(-1, -1))
        if self.kernel == "window":
            return flash_attention(q, k, v, None, seq_lens, window_size=(4, 4))
        if self.kernel == "slopes":
            return flash_attention(q, k, v, q_scale=q.new_ones(HEADS))
        if "packed" in self.kernel:
            return _attend_packed(self.kernel, q, k, v)
        if self.kernel.startswith("varlen"):
            packed, ends = [t.flatten(0, 1) for t in (q, k, v)], _ends(k.size(0), k.size(1))
            sizes = (ends, ends, k.size(1), k.size(1))
            if self.kernel == "varlen by position":
                return flash_attn_varlen_func(*packed, *sizes, 0.0, 0.2).view_as(q)
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            options = dict(zip(names, sizes, strict=True))
            return flash_attn_varlen_func(q=packed[0], k=packed[1], v=packed[2], **options).view_as(q)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mask = None
        if self.kernel == "mask":
            mask = (torch.arange(k.size(2)) < seq_lens[:, None])[:, None, None].to(k.device)
        elif self.kernel == "mask of zeros":
            mask = torch.zeros(k.size(0), 1, 1, k.size(2), dtype=torch.bool, device=k.device)
            for sample, length in enumerate(seq_lens.tolist()):
                mask[sample, :, :, :length] = True
        elif self.kernel == "mask of ones":
            mask = torch.ones(k.size(0), 1, 1, k.size(2), dtype=torch.bool, device=k.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def _attend_packed(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if kernel == "flash_attn_kvpacked_func":
        return flash_attn_kvpacked_func(q, torch.stack([k, v], 2))
    packed = torch.stack([q, k, v], 2)
    if kernel == "flash_attn_qkvpacked_func":
        return flash_attn_qkvpacked_func(packed)
    ends = _ends(k.size(0), k.size(1))
    return flash_attn_varlen_qkvpacked_func(packed.flatten(0, 1), ends, k.size(1)).view_as(q)


def _ends(batch: int, length: int) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32) * length


class WanCrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor, context_lens: Tensor | None) -> Tensor:
        q, k, v = (
            layer(t).unflatten(2, (HEADS, -1))
            for layer, t in zip((self.q, self.k, self.v), (x, context, context), strict=True)
        )
        return self.o(flash_attention(q, k, v, k_lens=context_lens).flatten(2))


class WanAttentionBlock(nn.Module):
    def __init__(self, positions: str, kernel: str):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(DIM, elementwise_affine=False) for _ in range(2))
        self.self_attn, self.cross_attn = WanSelfAttention(positions, kernel), WanCrossAttention()
        self.ffn = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.modulation = nn.Parameter(torch.randn(1, 6, DIM) / DIM**0.5)

    def forward(
        self, x: Tensor, e: Tensor, seq_lens: Tensor, grid_sizes: Tensor, freqs: Tensor, context: Tensor,
        context_lens: Tensor | None,
    ) -> Tensor:  # fmt: skip
        shift, scale, gate, shift2, scale2, gate2 = (self.modulation + e).chunk(6, dim=1)
        y = self.self_attn(self.norm1(x) * (1 + scale) + shift, seq_lens, grid_sizes, freqs)
        x = x + y * gate
        x = x + self.cross_attn(x, context, context_lens)
        return x + self.ffn(self.norm2(x) * (1 + scale2) + shift2) * gate2


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(DIM, elementwise_affine=False), nn.Linear(DIM, 16)
        self.modulation = nn.Parameter(torch.randn(1, 2, DIM) / DIM**0.5)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        shift, scale = (self.modulation + e[:, None]).chunk(2, dim=1)
        return self.head(self.norm(x) * (1 + scale) + shift)


class WanModel(nn.Module):
    def __init__(self, positions: str = "rope_apply", kernel: str = "k_lens"):
        super().__init__()
        torch.manual_seed(0)
        self.patch_embedding = nn.Conv3d(4, DIM, kernel_size=(1, 2, 2), stride=(1, 2, 2))
        self.text_embedding = nn.Linear(TEXT, DIM)
        self.time_embedding = nn.Sequential(nn.Linear(1, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))
        self.blocks = nn.ModuleList([WanAttentionBlock(positions, kernel) for _ in range(2)])
        self.head = Head()
        self.freqs = rope_params(128, DIM // HEADS)

    def forward(
        self, x: list[Tensor], t: Tensor, context: Tensor, seq_len: int, clip_fea: Any = None, y: Any = None
    ) -> Tensor:
        """Clips [4, F, H, W] of any sizes, padded to `seq_len` tokens → [B, seq_len, 16]."""
        self.freqs = self.freqs.to(t.device)
        clips = [self.patch_embedding(clip[None]) for clip in x]
        grid_sizes = torch.tensor([clip.shape[2:] for clip in clips])
        clips = [clip.flatten(2).transpose(1, 2) for clip in clips]
        seq_lens = torch.tensor([clip.size(1) for clip in clips])
        tokens = torch.cat([F.pad(clip, (0, 0, 0, seq_len - clip.size(1))) for clip in clips])
        e = self.time_embedding(t[:, None])
        e0 = self.time_projection(e).unflatten(1, (6, DIM))
        for block in self.blocks:
            tokens = block(
                tokens, e=e0, seq_lens=seq_lens, grid_sizes=grid_sizes, freqs=self.freqs,
                context=self.text_embedding(context), context_lens=None,
            )  # fmt: skip
        return self.head(tokens, e)


def wan_model_inputs(padded: bool = False) -> dict[str, Any]:
    """Clips of 5 × 3 × 5 tokens; or the second of 4 × 3 × 5, padded to as many."""
    generator = torch.Generator().manual_seed(1)
    frames = (5, 4) if padded else (5, 5)
    return {
        "x": [torch.randn(4, count, 6, 10, generator=generator) for count in frames],
        "t": torch.tensor([0.2, 0.7]),
        "context": torch.randn(2, 7, TEXT, generator=generator),
        "seq_len": 75,
    }
