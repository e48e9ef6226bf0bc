"""Blocks and embedders of Open-Sora v2 (opensora/models/mmdit/layers.py).

A block keeps the weights and its `processor` the forward, as there: a policy may replace either. Letters: `B` batch,
`L` tokens, `C` channels, `H` heads, `D` head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.opensora_models.mmdit.math import attention, liger_rope, rope


class EmbedND(nn.Module):
    """Positions [B, L, axes] → rotation matrices [B, 1, L, D/2, 2, 2]."""

    def __init__(self, dim: int, theta: int, axes_dim: list[int]):
        super().__init__()
        self.dim, self.theta, self.axes_dim = dim, theta, axes_dim

    def forward(self, ids: Tensor) -> Tensor:
        axes = [rope(ids[..., i], dim, self.theta) for i, dim in enumerate(self.axes_dim)]
        return torch.cat(axes, dim=-3).unsqueeze(1)


class LigerEmbedND(EmbedND):
    """Positions [B, L, axes] → cosines and sines, each [B, L, D]."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        axes = [liger_rope(ids[..., i], dim, self.theta) for i, dim in enumerate(self.axes_dim)]
        cos, sin = (torch.cat(parts, dim=-1).repeat(1, 1, 2) for parts in zip(*axes, strict=True))
        return cos, sin


def timestep_embedding(t: Tensor, dim: int, max_period: float = 10000, time_factor: float = 1000.0) -> Tensor:
    """[B] → [B, dim], cosines first."""
    half = dim // 2
    steps = torch.arange(half, dtype=torch.float32, device=t.device)
    args = (time_factor * t)[:, None].float() * torch.exp(-math.log(max_period) / half * steps)
    return torch.cat([args.cos(), args.sin()], dim=-1).to(t)


class MLPEmbedder(nn.Module):
    def __init__(self, in_dim: int, hidden_dim: int):
        super().__init__()
        self.in_layer = nn.Linear(in_dim, hidden_dim, bias=True)
        self.silu = nn.SiLU()
        self.out_layer = nn.Linear(hidden_dim, hidden_dim, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(self.silu(self.in_layer(x)))


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        rrms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-6)
        return (wide * rrms).to(dtype=x.dtype) * self.scale


class FusedRMSNorm(RMSNorm):
    """liger-kernel's there, with the same numbers."""


class QKNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.query_norm = FusedRMSNorm(dim)
        self.key_norm = FusedRMSNorm(dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q).to(v), self.key_norm(k).to(v)


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, L, H·D] → [B, H, L, D]."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _qkv(attn: nn.Module, x: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of a SelfAttention's fused or separate projections: normed q and k, and v, each [B, H, L, D]."""
    if attn.fused_qkv:
        q, k, v = attn.qkv(x).chunk(3, dim=-1)
    else:
        q, k, v = attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)
    q, k, v = (_heads(part, num_heads) for part in (q, k, v))
    return *attn.norm(q, k, v), v


class SelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int = 8, qkv_bias: bool = False, fused_qkv: bool = True):
        super().__init__()
        self.num_heads, self.fused_qkv = num_heads, fused_qkv
        if fused_qkv:
            self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        else:
            self.q_proj = nn.Linear(dim, dim, bias=qkv_bias)
            self.k_proj = nn.Linear(dim, dim, bias=qkv_bias)
            self.v_proj = nn.Linear(dim, dim, bias=qkv_bias)
        self.norm = QKNorm(dim // num_heads)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, pe: Tensor) -> Tensor:
        return self.proj(attention(*_qkv(self, x, self.num_heads), pe=pe))


@dataclass
class ModulationOut:
    shift: Tensor
    scale: Tensor
    gate: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return (1 + self.scale) * x + self.shift


class Modulation(nn.Module):
    def __init__(self, dim: int, double: bool):
        super().__init__()
        self.is_double = double
        self.multiplier = 6 if double else 3
        self.lin = nn.Linear(dim, self.multiplier * dim, bias=True)

    def forward(self, vec: Tensor) -> tuple[ModulationOut, ModulationOut | None]:
        out = self.lin(F.silu(vec))[:, None, :].chunk(self.multiplier, dim=-1)
        return ModulationOut(*out[:3]), ModulationOut(*out[3:]) if self.is_double else None


class DoubleStreamBlockProcessor:
    def __call__(
        self, attn: nn.Module, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor
    ) -> tuple[Tensor, Tensor]:
        img_mod1, img_mod2 = attn.img_mod(vec)
        txt_mod1, txt_mod2 = attn.txt_mod(vec)
        of_img = _qkv(attn.img_attn, img_mod1(attn.img_norm1(img)), attn.num_heads)
        of_txt = _qkv(attn.txt_attn, txt_mod1(attn.txt_norm1(txt)), attn.num_heads)

        # One attention over both, text first.
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(of_txt, of_img, strict=True))
        out = attention(q, k, v, pe=pe)
        txt_attn, img_attn = out[:, : txt.size(1)], out[:, txt.size(1) :]

        img = img + img_mod1.gate * attn.img_attn.proj(img_attn)
        img = img + img_mod2.gate * attn.img_mlp(img_mod2(attn.img_norm2(img)))
        txt = txt + txt_mod1.gate * attn.txt_attn.proj(txt_attn)
        txt = txt + txt_mod2.gate * attn.txt_mlp(txt_mod2(attn.txt_norm2(txt)))
        return img, txt


class _Block(nn.Module):
    """What both kinds of block have: a processor that runs them."""

    def set_processor(self, processor) -> None:
        self.processor = processor

    def get_processor(self):
        return self.processor


def _norm(hidden_size: int) -> nn.LayerNorm:
    return nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)


def _mlp(hidden_size: int, mlp_hidden_dim: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(hidden_size, mlp_hidden_dim, bias=True),
        nn.GELU(approximate="tanh"),
        nn.Linear(mlp_hidden_dim, hidden_size, bias=True),
    )


class DoubleStreamBlock(_Block):
    """Image and text, each with weights of its own, attend to both."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_ratio: float,
        qkv_bias: bool = False,
        fused_qkv: bool = True,
    ):
        super().__init__()
        self.num_heads, self.hidden_size = num_heads, hidden_size
        self.head_dim = hidden_size // num_heads
        for stream in ("img", "txt"):
            self.add_module(f"{stream}_mod", Modulation(hidden_size, double=True))
            self.add_module(f"{stream}_norm1", _norm(hidden_size))
            self.add_module(f"{stream}_attn", SelfAttention(hidden_size, num_heads, qkv_bias, fused_qkv))
            self.add_module(f"{stream}_norm2", _norm(hidden_size))
            self.add_module(f"{stream}_mlp", _mlp(hidden_size, int(hidden_size * mlp_ratio)))
        self.set_processor(DoubleStreamBlockProcessor())

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor, **kwargs) -> tuple[Tensor, Tensor]:
        return self.processor(self, img, txt, vec, pe)


class SingleStreamBlockProcessor:
    def __call__(self, attn: nn.Module, x: Tensor, vec: Tensor, pe: Tensor) -> Tensor:
        mod, _ = attn.modulation(vec)
        x_mod = mod(attn.pre_norm(x))
        if attn.fused_qkv:
            qkv, mlp = torch.split(attn.linear1(x_mod), [3 * attn.hidden_size, attn.mlp_hidden_dim], dim=-1)
            q, k, v = qkv.chunk(3, dim=-1)
        else:
            q, k = attn.q_proj(x_mod), attn.k_proj(x_mod)
            v, mlp = torch.split(attn.v_mlp(x_mod), [attn.hidden_size, attn.mlp_hidden_dim], dim=-1)
        q, k, v = (_heads(part, attn.num_heads) for part in (q, k, v))
        q, k = attn.norm(q, k, v)
        output = attn.linear2(torch.cat([attention(q, k, v, pe=pe), attn.mlp_act(mlp)], dim=2))
        return x + mod.gate * output


class SingleStreamBlock(_Block):
    """Attention and MLP side by side (arXiv:2302.05442), over text and image joined."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qk_scale: float | None = None,
        fused_qkv: bool = True,
    ):
        super().__init__()
        self.hidden_dim = self.hidden_size = hidden_size
        self.num_heads, self.fused_qkv = num_heads, fused_qkv
        self.head_dim = hidden_size // num_heads
        self.scale = qk_scale or self.head_dim**-0.5
        self.mlp_hidden_dim = int(hidden_size * mlp_ratio)
        if fused_qkv:
            self.linear1 = nn.Linear(hidden_size, hidden_size * 3 + self.mlp_hidden_dim)
        else:
            self.q_proj = nn.Linear(hidden_size, hidden_size)
            self.k_proj = nn.Linear(hidden_size, hidden_size)
            self.v_mlp = nn.Linear(hidden_size, hidden_size + self.mlp_hidden_dim)
        self.linear2 = nn.Linear(hidden_size + self.mlp_hidden_dim, hidden_size)
        self.norm = QKNorm(self.head_dim)
        self.pre_norm = _norm(hidden_size)
        self.mlp_act = nn.GELU(approximate="tanh")
        self.modulation = Modulation(hidden_size, double=False)
        self.set_processor(SingleStreamBlockProcessor())

    def forward(self, x: Tensor, vec: Tensor, pe: Tensor, **kwargs) -> Tensor:
        return self.processor(self, x, vec, pe)


class LastLayer(nn.Module):
    def __init__(self, hidden_size: int, patch_size: int, out_channels: int):
        super().__init__()
        self.norm_final = _norm(hidden_size)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels, bias=True)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size, bias=True))

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(vec).chunk(2, dim=1)
        return self.linear((1 + scale[:, None, :]) * self.norm_final(x) + shift[:, None, :])
