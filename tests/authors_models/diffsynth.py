"""`WanTrainingModule` as DiffSynth-Studio builds it, at toy widths: its forward is a step, from latents to the loss.

The loss calls the parts of `pipe.dit` one by one and never the model itself, each block under torch's own checkpoint.
Names, arguments and order of computation are those of DiffSynth-Studio (diffsynth/models/wan_video_dit.py,
diffsynth/pipelines/wan_video.py), the code is not.

Letters: `B` clips, `S` tokens, `D` head dim, `C` channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.authors_models.wan import DIM, HEADS, TEXT, angles_of_grid, rope_params


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, S, C], heads side by side."""
    q, k, v = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        q, k = (self._turn(layer(x), freqs) for layer in (self.q, self.k))
        return self.o(attend(q, k, self.v(x)))

    def _turn(self, x: Tensor, freqs: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.double().unflatten(2, (HEADS, -1, 2)))
        return torch.view_as_real(pairs * freqs).flatten(2).to(x.dtype)


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.o(attend(self.q(x), self.k(y), self.v(y)))


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = SelfAttention(), CrossAttention()
        self.norm1, self.norm2 = (nn.LayerNorm(DIM, elementwise_affine=False) for _ in range(2))
        self.ffn = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.modulation = nn.Parameter(torch.randn(1, 6, DIM) / DIM**0.5)

    def forward(self, x: Tensor, context: Tensor, t_mod: Tensor, freqs: Tensor) -> Tensor:
        """`t_mod`: [B, 6, C] of the clip, or [B, S, 6, C] of every token."""
        shift, scale, gate, shift2, scale2, gate2 = (self.modulation + t_mod).unbind(-2)
        if t_mod.dim() == 3:
            shift, scale, gate, shift2, scale2, gate2 = (
                each[:, None] for each in (shift, scale, gate, shift2, scale2, gate2)
            )
        x = x + gate * self.self_attn(self.norm1(x) * (1 + scale) + shift, freqs)
        x = x + self.cross_attn(x, context)
        return x + gate2 * self.ffn(self.norm2(x) * (1 + scale2) + shift2)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, 16)
        self.modulation = nn.Parameter(torch.randn(1, 2, DIM) / DIM**0.5)

    def forward(self, x: Tensor, t_mod: Tensor) -> Tensor:
        """`t_mod`: [B, C] of the clip, or [B, S, C] of every token."""
        shift, scale = (self.modulation + t_mod.view(t_mod.size(0), -1, 1, DIM)).unbind(2)
        return self.head(x * (1 + scale) + shift)


class WanModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv3d(4, DIM, kernel_size=(1, 2, 2), stride=(1, 2, 2))
        self.text_embedding = nn.Linear(TEXT, DIM)
        self.time_embedding = nn.Sequential(nn.Linear(1, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.time_projection = nn.Linear(DIM, 6 * DIM)
        self.blocks = nn.ModuleList([DiTBlock() for _ in range(2)])
        self.head = Head()
        self.freqs = rope_params(128, DIM // HEADS)


class Pipeline(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dit = WanModel()


class WanTrainingModule(nn.Module):
    def __init__(self, time_per_token: bool):
        super().__init__()
        torch.manual_seed(0)
        self.pipe, self.time_per_token = Pipeline(), time_per_token

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        """A clip [1, 4, F, H, W], its text [1, L, TEXT] and its time [1] → the loss."""
        dit = self.pipe.dit
        tokens = dit.patch_embedding(data["latents"])
        grid = tuple(tokens.shape[2:])
        x = tokens.flatten(2).transpose(1, 2)
        time = data["time"][:, None]
        if self.time_per_token:  # the first frame is clean
            time = time.repeat(x.size(1), 1)
            time[: grid[1] * grid[2]] = 0
        t = dit.time_embedding(time)
        t_mod = dit.time_projection(t).unflatten(1, (6, DIM))
        if self.time_per_token:
            t, t_mod = t[None], t_mod[None]
        context, freqs = dit.text_embedding(data["text"]), angles_of_grid(grid, dit.freqs)
        for block in dit.blocks:
            x = checkpoint(block, x, context, t_mod, freqs, use_reentrant=False)
        return dit.head(x, t).square().mean()
