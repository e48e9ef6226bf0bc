"""`Latte` as its authors build it, at toy widths: one list of blocks, over places and over frames in turn.

Names, arguments and order of computation are those of Vchitect/Latte at b27c24a (models/latte.py), the code is not.
Attention is written out, which nothing has to redirect: a block has the dimension whole that it attends along.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS, FRAMES, PLACES = 36, 3, 5, 9


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT * (C // HEADS) ** -0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(B, N, C))


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.adaLN_modulation = Attention(), nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU("tanh"), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.adaLN_modulation(c)[:, None].chunk(6, -1)
        x = x + gate * self.attn(F.layer_norm(x, (DIM,)) * (1 + scale) + shift)
        return x + gate2 * self.mlp(F.layer_norm(x, (DIM,)) * (1 + scale2) + shift2)


class FinalLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.adaLN_modulation = (
            nn.Linear(DIM, 16),
            nn.Sequential(nn.SiLU(), nn.Linear(DIM, 2 * DIM)),
        )

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, -1)
        return self.linear(F.layer_norm(x, (DIM,)) * (1 + scale) + shift)


class Latte(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x_embedder, self.t_embedder = nn.Conv2d(4, DIM, kernel_size=2, stride=2), nn.Linear(1, DIM)
        self.pos_embed = nn.Parameter(torch.zeros(1, PLACES, DIM), requires_grad=False)
        self.temp_embed = nn.Parameter(torch.zeros(1, FRAMES, DIM), requires_grad=False)
        for table in (self.pos_embed, self.temp_embed):
            table.data += torch.arange(float(table[0].numel())).view_as(table).sin()
        self.blocks = nn.ModuleList([TransformerBlock() for _ in range(4)])
        self.final_layer = FinalLayer()

    def forward(
        self, x: Tensor, t: Tensor, y: Tensor | None = None, text_embedding: Tensor | None = None,
        use_fp16: bool = False,
    ) -> Tensor:  # fmt: skip
        """Clips [B, F, 4, H, W] → [B, F, H · W / 4, 16]."""
        B, T = x.shape[:2]
        x = self.x_embedder(x.flatten(0, 1)).flatten(2).transpose(1, 2) + self.pos_embed  # [B·F, N, C]
        t = self.t_embedder(t[:, None].to(x) / 1000)
        for_frames, for_places = (t.repeat_interleave(n, 0) for n in (self.temp_embed.size(1), x.size(1)))
        for index in range(0, len(self.blocks), 2):
            x = self.blocks[index](x, for_frames)
            x = x.unflatten(0, (B, T)).transpose(1, 2).flatten(0, 1)  # [B·N, F, C]
            if index == 0:
                x = x + self.temp_embed
            x = self.blocks[index + 1](x, for_places)
            x = x.unflatten(0, (B, x.size(0) // B)).transpose(1, 2).flatten(0, 1)
        return self.final_layer(x, for_frames).unflatten(0, (B, T))
