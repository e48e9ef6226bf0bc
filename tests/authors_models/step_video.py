"""`StepVideoModel` as Step-Video's authors build it, at toy widths, with `attention_type="torch"`.

Names, arguments and order of computation are those of stepfun-ai/Step-Video-T2V at 675e08c (stepvideo/modules), the
code is not, and gradients are on. Positions are counted inside attention, by an object that is no module.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS, TEXT = 36, 3, 16
SPLIT = (4, 4, 4)


class RoPE3D:
    def __call__(
        self, tokens: Tensor, rope_positions: list[int], ch_split: tuple[int, ...], parallel: bool = False
    ) -> Tensor:
        """[B, S, H, D], with D in three parts: of time, row and column."""
        places = torch.cartesian_prod(*(torch.arange(size) for size in rope_positions)).T
        parts = []
        for part, along in zip(tokens.split(ch_split, -1), places, strict=True):
            angles = along[:, None] * 0.1 ** torch.arange(part.size(-1) // 2)
            cos, sin = (table.repeat(1, 2)[:, None].to(part) for table in (angles.cos(), angles.sin()))
            first, second = part.chunk(2, -1)
            parts.append(part * cos + torch.cat([-second, first], -1) * sin)
        return torch.cat(parts, -1)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wqkv, self.wo = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.q_norm, self.k_norm, self.rope_3d = nn.RMSNorm(12), nn.RMSNorm(12), RoPE3D()

    def forward(
        self, x: Tensor, cu_seqlens: Any = None, max_seqlen: Any = None, rope_positions: Any = None,
        attn_mask: Any = None,
    ) -> Tensor:  # fmt: skip
        q, k, v = self.wqkv(x).unflatten(-1, (HEADS, -1)).chunk(3, -1)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = (self.rope_3d(each, rope_positions, SPLIT, False) for each in (q, k))
        return self.wo(_attend(q, k, v, attn_mask))


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wkv, self.wo = (nn.Linear(DIM, n * DIM, bias=False) for n in (1, 2, 1))
        self.q_norm, self.k_norm = nn.RMSNorm(12), nn.RMSNorm(12)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor, attn_mask: Any = None) -> Tensor:
        q = self.wq(x).unflatten(-1, (HEADS, -1))
        k, v = self.wkv(encoder_hidden_states).unflatten(-1, (HEADS, -1)).chunk(2, -1)
        return self.wo(_attend(self.q_norm(q), self.k_norm(k), v, attn_mask))


def _attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
    """q: [B, S, H, D], k, v: [B, L, H, D], a mask [B, S, L] → [B, S, C]."""
    mask = None if attn_mask is None else attn_mask[:, None].repeat(1, HEADS, 1, 1)
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class StepVideoTransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn1, self.attn2 = SelfAttention(), CrossAttention()
        self.ff = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU("tanh"), nn.Linear(2 * DIM, DIM))
        self.scale_shift_table = nn.Parameter(torch.zeros(6, DIM))

    def forward(
        self, q: Tensor, kv: Tensor, timestep: Tensor, attn_mask: Any = None, rope_positions: Any = None
    ) -> Tensor:
        modulation = self.scale_shift_table[None] + timestep.unflatten(-1, (6, DIM))
        shift, scale, gate, shift2, scale2, gate2 = modulation.chunk(6, 1)
        normed = F.layer_norm(q, (DIM,)) * (1 + scale) + shift
        q = gate * self.attn1(normed, rope_positions=rope_positions) + q
        q = self.attn2(q, kv, attn_mask) + q
        return gate2 * self.ff(F.layer_norm(q, (DIM,)) * (1 + scale2) + shift2) + q


class StepVideoModel(nn.Module):
    def __init__(self, parallel: bool = False) -> None:
        super().__init__()
        self.pos_embed, self.parallel = nn.Conv2d(4, DIM, kernel_size=1), parallel
        self.caption_projection, self.clip_projection = nn.Linear(TEXT, DIM), nn.Linear(8, DIM)
        self.adaln_single = nn.Linear(1, 6 * DIM)
        self.transformer_blocks = nn.ModuleList([StepVideoTransformerBlock() for _ in range(2)])
        self.norm_out, self.proj_out = nn.LayerNorm(DIM, elementwise_affine=False), nn.Linear(DIM, 4)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, encoder_hidden_states_2: Tensor, timestep: Tensor,
        added_cond_kwargs: Any = None, encoder_attention_mask: Any = None, fps: Any = None, return_dict: bool = True,
    ) -> Tensor:  # fmt: skip
        """Clips [B, T, 4, H, W], captions [B, L, 16], of which the clip's [B, 2, 8] come first → [B, S, 4]."""
        B, T, _, H, W = hidden_states.shape
        x = self.pos_embed(hidden_states.flatten(0, 1)).flatten(2).transpose(1, 2).reshape(B, T * H * W, DIM)
        text = self.caption_projection(encoder_hidden_states)
        text = torch.cat([self.clip_projection(encoder_hidden_states_2), text], 1)
        lengths = encoder_attention_mask.sum(1)
        seen = torch.arange(int(lengths.max()), device=x.device) < lengths[:, None]
        attn_mask, text = seen[:, None].repeat(1, x.size(1), 1), text[:, : seen.size(1)]
        time = self.adaln_single(timestep[:, None].to(x) / 1000)
        for block in self.transformer_blocks:
            x = block(x, text, timestep=time, attn_mask=attn_mask, rope_positions=[T, H, W])
        frames = x.unflatten(1, (T, H * W)).flatten(0, 1)
        return self.proj_out(self.norm_out(frames)).unflatten(0, (B, T)).flatten(1, 2)
