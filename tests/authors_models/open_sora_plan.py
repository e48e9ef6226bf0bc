"""`OpenSoraT2V_v1_3` as Open-Sora-Plan's authors build it, at toy widths: tokens come first, [S, B, C].

Names, arguments and order of computation are those of PKU-YuanGroup/Open-Sora-Plan at f7fa604
(opensora/models/diffusion/opensora_v1_3, common.py), the code is not. Positions are made inside attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS, TEXT = 36, 3, 16


class PositionGetter3D:
    def __call__(self, t: int, h: int, w: int, device: torch.device) -> Tensor:
        """[3, S]: the place of every token of a clip."""
        return torch.cartesian_prod(*(torch.arange(size, device=device) for size in (t, h, w))).T


class RoPE3D(nn.Module):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[S, B, H, D], a third of D for each of time, row and column."""
        parts = []
        for part, places in zip(tokens.chunk(3, dim=-1), positions, strict=True):
            half = part.size(-1) // 2
            angles = places[:, None] * 0.1 ** torch.arange(half, device=places.device)  # [S, D / 6]
            cos, sin = (table.repeat(1, 2)[:, None, None].to(part) for table in (angles.cos(), angles.sin()))
            parts.append(part * cos + torch.cat([-part[..., half:], part[..., :half]], -1) * sin)
        return torch.cat(parts, -1)


class Attention(nn.Module):
    def __init__(self, is_cross_attn: bool):
        super().__init__()
        self.is_cross_attn = is_cross_attn
        self.to_q, self.to_k, self.to_v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(DIM, DIM), nn.Identity()])
        self.rope, self.position_getter = RoPE3D(), PositionGetter3D()

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None, attention_mask: Tensor,
        frame: int, height: int, width: int,
    ) -> Tensor:  # fmt: skip
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (
            layer(x).unflatten(2, (HEADS, -1))
            for layer, x in zip(
                (self.to_q, self.to_k, self.to_v), (hidden_states, context, context), strict=True
            )
        )
        if not self.is_cross_attn:
            positions = self.position_getter(frame, height, width, q.device)
            q, k = self.rope(q, positions), self.rope(k, positions)
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))  # [B, H, S, D]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, dropout_p=0.0, is_causal=False
        )
        return self.to_out[0](out.permute(2, 0, 1, 3).flatten(2))


class BasicTransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn1, self.attn2 = Attention(is_cross_attn=False), Attention(is_cross_attn=True)
        self.ff = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU("tanh"), nn.Linear(2 * DIM, DIM))
        self.scale_shift_table = nn.Parameter(torch.zeros(6, DIM))

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor, timestep: Tensor, frame: int, height: int, width: int,
    ) -> Tensor:  # fmt: skip
        shift, scale, gate, shift2, scale2, gate2 = self.scale_shift_table[:, None] + timestep  # [B, C] each
        x, grid = hidden_states, (frame, height, width)
        x = x + gate * self.attn1(F.layer_norm(x, (DIM,)) * (1 + scale) + shift, None, attention_mask, *grid)
        x = x + self.attn2(x, encoder_hidden_states, encoder_attention_mask, *grid)
        return x + gate2 * self.ff(F.layer_norm(x, (DIM,)) * (1 + scale2) + shift2)


class OpenSoraT2V_v1_3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Conv2d(4, DIM, kernel_size=2, stride=2)
        self.caption_projection, self.adaln_single = nn.Linear(TEXT, DIM), nn.Linear(1, 6 * DIM)
        self.transformer_blocks = nn.ModuleList([BasicTransformerBlock() for _ in range(2)])
        self.norm_out, self.proj_out = nn.LayerNorm(DIM, elementwise_affine=False), nn.Linear(DIM, 16)

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, attention_mask: Tensor,
        encoder_attention_mask: Tensor, return_dict: bool = True,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Clips [B, 4, T, H, W], captions [B, 1, L, 16], masks [B, T, H, W] and [B, 1, L] → [B, S, 16]."""
        B, _, T, _, _ = hidden_states.shape
        grid = self.pos_embed(hidden_states.transpose(1, 2).flatten(0, 1))  # [B·T, C, H / 2, W / 2]
        size = T, grid.size(2), grid.size(3)
        x = grid.flatten(2).transpose(1, 2).reshape(B, -1, DIM).transpose(0, 1)
        seen = F.max_pool3d(attention_mask[:, None].to(x), (1, 2, 2)).flatten(1)
        masks = [_bias(seen, x), _bias(encoder_attention_mask[:, 0], x)]
        text = self.caption_projection(encoder_hidden_states[:, 0]).transpose(0, 1)
        time = self.adaln_single(timestep[:, None].to(x)).unflatten(1, (6, DIM)).transpose(0, 1)
        for block in self.transformer_blocks:
            x = block(x, masks[0], text, masks[1], time, *size)
        return (self.proj_out(self.norm_out(x.transpose(0, 1))),)


def _bias(seen: Tensor, x: Tensor) -> Tensor:
    """[B, S] of ones and zeros → [B, H, 1, S]: nothing where a token is seen, −10,000 where it is not."""
    return ((1 - seen.bool().to(x)) * -10000.0)[:, None, None].repeat_interleave(HEADS, dim=1)
