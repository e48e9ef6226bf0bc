"""`DiffusionTransformer3D` as Kandinsky-5's authors build it, at toy widths: one clip without a batch, [T, H, W, C].

Names, arguments and order of computation are those of kandinskylab/kandinsky-5 at 6e2a805 (kandinsky/models/dit.py,
nn.py), the code is not. Blocks of their own look at the caption first, before the clip's blocks begin.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS, TIME, TEXT, POOLED = 36, 3, 8, 16, 10
AXES = (4, 4, 4)


def angles_of(positions: Tensor, dim: int) -> Tensor:
    return positions[:, None] * 0.1 ** torch.arange(dim // 2, device=positions.device)


def rotations(angles: Tensor) -> Tensor:
    """[..., D / 2] → [..., 1, D / 2, 2, 2], the same for every head."""
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2)).unsqueeze(-4)


def apply_rotary(x: Tensor, rope: Tensor) -> Tensor:
    return (rope.to(x) * x.unflatten(-1, (-1, 1, 2))).sum(-1).flatten(-2)


class Modulation(nn.Module):
    def __init__(self, num_params: int):
        super().__init__()
        self.activation, self.out_layer = nn.SiLU(), nn.Linear(TIME, num_params * DIM)

    def forward(self, time_embed: Tensor) -> Tensor:
        return self.out_layer(self.activation(time_embed))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_query, self.to_key, self.to_value, self.out_layer = (nn.Linear(DIM, DIM) for _ in range(4))
        self.query_norm, self.key_norm = nn.RMSNorm(DIM // HEADS), nn.RMSNorm(DIM // HEADS)

    def forward(
        self, x: Tensor, cond: Tensor | None, rope: Tensor | None, attention_mask: Any = None
    ) -> Tensor:
        """[S, C] or [1, S, C] → [S, C]."""
        cond = x if cond is None else cond
        q, k = self.query_norm(_heads(self.to_query(x))), self.key_norm(_heads(self.to_key(cond)))
        if rope is not None:
            q, k = apply_rotary(q, rope), apply_rotary(k, rope)
        q, k, v = (
            each.unsqueeze(0) if each.dim() == 3 else each for each in (q, k, _heads(self.to_value(cond)))
        )
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return self.out_layer(out.transpose(1, 2)[0].flatten(-2))


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1))


class MultiheadSelfAttentionDec(Attention):
    def forward(self, x: Tensor, rope: Tensor, sparse_params: Any = None) -> Tensor:
        return super().forward(x, None, rope)


class TransformerEncoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text_modulation, self.self_attention = Modulation(6), Attention()
        self.feed_forward = _feed_forward()

    def forward(self, x: Tensor, time_embed: Tensor, rope: Tensor, attention_mask: Any = None) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.text_modulation(time_embed).chunk(6, -1)
        x = x + gate * self.self_attention(_modulated(x, scale, shift), None, rope, attention_mask)
        return x + gate2 * self.feed_forward(_modulated(x, scale2, shift2))


class TransformerDecoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual_modulation = Modulation(9)
        self.self_attention, self.cross_attention = MultiheadSelfAttentionDec(), Attention()
        self.feed_forward = _feed_forward()

    def forward(
        self, visual_embed: Tensor, text_embed: Tensor, time_embed: Tensor, rope: Tensor, sparse_params: Any,
        attention_mask: Any = None,
    ) -> Tensor:  # fmt: skip
        own, cross, last = self.visual_modulation(time_embed).chunk(3, -1)
        shift, scale, gate = own.chunk(3, -1)
        x = visual_embed
        x = x + gate * self.self_attention(_modulated(x, scale, shift), rope, sparse_params)
        shift, scale, gate = cross.chunk(3, -1)
        x = x + gate * self.cross_attention(_modulated(x, scale, shift), text_embed, None, attention_mask)
        shift, scale, gate = last.chunk(3, -1)
        return x + gate * self.feed_forward(_modulated(x, scale, shift))


def _feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 2 * DIM, bias=False), nn.GELU(), nn.Linear(2 * DIM, DIM, bias=False))


def _modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, (DIM,)) * (scale + 1) + shift


class DiffusionTransformer3D(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time_embeddings = nn.Sequential(nn.Linear(1, TIME), nn.SiLU(), nn.Linear(TIME, TIME))
        self.text_embeddings, self.pooled_text_embeddings = nn.Linear(TEXT, DIM), nn.Linear(POOLED, TIME)
        self.visual_embeddings = nn.Linear(4 * 4, DIM)
        self.text_transformer_blocks = nn.ModuleList([TransformerEncoderBlock() for _ in range(2)])
        self.visual_transformer_blocks = nn.ModuleList([TransformerDecoderBlock() for _ in range(2)])
        self.out_modulation, self.out_layer = Modulation(2), nn.Linear(DIM, 4 * 4)

    def forward(
        self, x: Tensor, text_embed: Tensor, pooled_text_embed: Tensor, time: Tensor, visual_rope_pos: list[Tensor],
        text_rope_pos: Tensor, scale_factor: tuple[float, ...] = (1.0, 1.0, 1.0), sparse_params: Any = None,
        attention_mask: Any = None,
    ) -> Tensor:  # fmt: skip
        """A clip [T, H, W, 4], a caption [1, L, 16] → [T, H / 2, W / 2, 16]."""
        time_embed = self.time_embeddings(time[:, None] / 1000) + self.pooled_text_embeddings(
            pooled_text_embed
        )
        text = self.text_embeddings(text_embed)
        text_rope = rotations(angles_of(text_rope_pos, DIM // HEADS))
        for block in self.text_transformer_blocks:
            text = block(text, time_embed, text_rope, attention_mask)
        T, H, W, _ = x.shape
        patches = x.view(T, H // 2, 2, W // 2, 2, 4).permute(0, 1, 3, 2, 4, 5).flatten(3)
        visual = self.visual_embeddings(patches)  # [T, H / 2, W / 2, C]
        places = zip(torch.meshgrid(*visual_rope_pos, indexing="ij"), scale_factor, AXES, strict=True)
        angles = [angles_of(each.flatten() / factor, dim) for each, factor, dim in places]
        rope, shape = rotations(torch.cat(angles, -1)), visual.shape[:3]
        visual = visual.flatten(0, 2)
        for block in self.visual_transformer_blocks:
            visual = block(visual, text, time_embed, rope, sparse_params, attention_mask)
        shift, scale = self.out_modulation(time_embed).chunk(2, -1)
        return self.out_layer(_modulated(visual.unflatten(0, shape), scale, shift))
