"""`WanModel` as SkyReels-V2's authors build it, at toy widths: with diffusion forcing, every frame has its own time.

Names, arguments and order of computation are those of SkyworkAI/SkyReels-V2 at abed76f
(skyreels_v2_infer/modules/transformer.py), the code is not. Its attention is that of Wan's authors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.authors_models import wan
from tests.authors_models.wan import DIM, WanCrossAttention, WanSelfAttention


class WanAttentionBlock(wan.WanAttentionBlock):
    def __init__(self) -> None:
        super().__init__("rope_apply", "k_lens")
        self.self_attn, self.cross_attn = WanSelfAttention("rope_apply", "k_lens"), WanCrossAttention()

    def forward(
        self, x: Tensor, e: Tensor, grid_sizes: Tensor, freqs: Tensor, context: Tensor, block_mask: Any
    ) -> Tensor:
        modulation = (
            self.modulation if e.dim() == 3 else self.modulation.unsqueeze(2)
        )  # e: [B, 6, C] or [B, 6, S, C]
        parts = (modulation + e).chunk(6, 1)
        shift, scale, gate, shift2, scale2, gate2 = (
            parts if e.dim() == 3 else (each.squeeze(1) for each in parts)
        )
        lengths, grids = grid_sizes.prod().expand(x.size(0)), grid_sizes.expand(x.size(0), 3)
        x = x + self.self_attn(self.norm1(x) * (1 + scale) + shift, lengths, grids, freqs) * gate
        x = x + self.cross_attn(x, context, None)
        return x + self.ffn(self.norm2(x) * (1 + scale2) + shift2) * gate2


class Head(wan.Head):
    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        if e.dim() == 2:
            return super().forward(x, e)
        shift, scale = (self.modulation.unsqueeze(2) + e.unsqueeze(1)).unbind(1)
        return self.head(self.norm(x) * (1 + scale) + shift)


class WanModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv3d(4, DIM, kernel_size=(1, 2, 2), stride=(1, 2, 2))
        self.text_embedding, self.time_embedding = nn.Linear(wan.TEXT, DIM), nn.Linear(1, DIM)
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))
        self.blocks = nn.ModuleList([WanAttentionBlock() for _ in range(2)])
        self.head, self.enable_teacache = Head(), False
        self.freqs = wan.rope_params(128, DIM // wan.HEADS)

    def forward(
        self, x: Tensor, t: Tensor, context: Tensor, clip_fea: Any = None, y: Any = None, fps: Any = None
    ) -> Tensor:
        """Clips [B, 4, F, H, W], times [B] or [B, F] → [B, S, 16]."""
        self.freqs = self.freqs.to(x.device)
        x = self.patch_embedding(x)
        grid_sizes = torch.tensor(x.shape[2:])
        num_places = x[0, 0, 0].numel()
        x = x.flatten(2).transpose(1, 2)
        e = self.time_embedding(t.flatten()[:, None] / 1000)
        e0 = self.time_projection(e).unflatten(1, (6, DIM))
        if t.dim() == 2:
            e, e0 = (each.unflatten(0, t.shape).repeat_interleave(num_places, 1) for each in (e, e0))
            e0 = e0.transpose(1, 2)  # [B, 6, S, C]
        text = self.text_embedding(context)
        for block in self.blocks:
            x = block(x, e=e0, grid_sizes=grid_sizes, freqs=self.freqs, context=text, block_mask=None)
        return self.head(x, e)
