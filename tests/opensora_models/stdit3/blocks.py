"""Layers of STDiT3 (opensora/models/layers/blocks.py, with timm's Mlp and lucidrains' RotaryEmbedding).

Letters: `B` batch, `N` tokens, `C` channels, `H` heads, `D` head dim, `T` frames, `S` tokens of a frame.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def t2i_modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def t_mask_select(x_mask: Tensor, x: Tensor, masked_x: Tensor, T: int, S: int) -> Tensor:
    """`x` where the frame is to be denoised (`x_mask`: [B, T]), `masked_x` where it is given."""
    x, masked_x = (tensor.unflatten(1, (T, S)) for tensor in (x, masked_x))
    return torch.where(x_mask[:, :, None, None], x, masked_x).flatten(1, 2)


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class RotaryEmbedding(nn.Module):
    """rotary_embedding_torch's: pairs (0, 1), (2, 3), ...; its frequencies are a frozen parameter."""

    def __init__(self, dim: int, theta: float = 10000):
        super().__init__()
        frequencies = theta ** -(torch.arange(0, dim, 2).float() / dim)
        self.freqs = nn.Parameter(frequencies, requires_grad=False)

    def rotate_queries_or_keys(self, t: Tensor) -> Tensor:
        """[..., N, D] at positions 0 ... N-1."""
        positions = torch.arange(t.size(-2), device=t.device, dtype=self.freqs.dtype)
        angles = (positions[:, None] * self.freqs).repeat_interleave(2, dim=-1)
        even, odd = t.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-odd, even], dim=-1).flatten(-2)
        return (t * angles.cos() + turned * angles.sin()).to(t.dtype)


class Mlp(nn.Module):
    def __init__(self, in_features: int, hidden_features: int, out_features: int | None = None):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU(approximate="tanh")
        self.drop1 = nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(hidden_features, out_features or in_features)
        self.drop2 = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class PatchEmbed3D(nn.Module):
    """[B, C, T, H, W], padded to whole patches → [B, N, C]."""

    def __init__(self, patch_size: tuple[int, int, int], in_chans: int, embed_dim: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv3d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        missing = [-size % patch for size, patch in zip(x.shape[2:], self.patch_size, strict=True)]
        x = F.pad(x, [side for size in reversed(missing) for side in (0, size)])
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] = LlamaRMSNorm,
        enable_flash_attn: bool = False,
        rope=None,
    ):
        super().__init__()
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.enable_flash_attn = enable_flash_attn
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.q_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.rope = rope is not None
        if rope is not None:
            self.rotary_emb = rope

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            q, k = self.rotary_emb(q), self.rotary_emb(k)
        x = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


class MultiHeadCrossAttention(nn.Module):
    """Every sample's tokens attend to its own text, of which all samples' is packed into one row."""

    def __init__(self, d_model: int, num_heads: int, attn_drop: float = 0.0, proj_drop: float = 0.0):
        super().__init__()
        self.d_model, self.num_heads, self.head_dim = d_model, num_heads, d_model // num_heads
        self.q_linear = nn.Linear(d_model, d_model)
        self.kv_linear = nn.Linear(d_model, d_model * 2)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(d_model, d_model)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, cond: Tensor, mask: list[int] | None = None) -> Tensor:
        """`x`: [B, N, C]; `cond`: [1, sum of lengths, C]; `mask`: the text length of every sample."""
        B, N, C = x.shape
        if mask is None:
            assert cond.shape[0] == B
            mask = [cond.shape[1]] * B
        q = self.q_linear(x).view(1, -1, self.num_heads, self.head_dim)
        kv = self.kv_linear(cond).view(1, -1, 2, self.num_heads, self.head_dim)
        k, v = kv.unbind(2)
        # xformers' BlockDiagonalMask, as a plain one.
        query_sample = torch.arange(B, device=x.device).repeat_interleave(N)
        key_sample = torch.arange(B, device=x.device).repeat_interleave(torch.tensor(mask, device=x.device))
        own_text = query_sample[:, None] == key_sample
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=own_text)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, -1, C)))


class T2IFinalLayer(nn.Module):
    def __init__(self, hidden_size: int, num_patch: int, out_channels: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, num_patch * out_channels, bias=True)
        self.scale_shift_table = nn.Parameter(torch.randn(2, hidden_size) / hidden_size**0.5)
        self.out_channels = out_channels

    def forward(self, x, t, x_mask=None, t0=None, T=None, S=None):
        shift, scale = (self.scale_shift_table[None] + t[:, None]).chunk(2, dim=1)
        x = t2i_modulate(self.norm_final(x), shift, scale)
        if x_mask is not None:
            shift, scale = (self.scale_shift_table[None] + t0[:, None]).chunk(2, dim=1)
            # Of the modulated x, as there.
            x = t_mask_select(x_mask, x, t2i_modulate(self.norm_final(x), shift, scale), T, S)
        return self.linear(x)


class TimestepEmbedder(nn.Module):
    def __init__(self, hidden_size: int, frequency_embedding_size: int = 256):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(frequency_embedding_size, hidden_size, bias=True),
            nn.SiLU(),
            nn.Linear(hidden_size, hidden_size, bias=True),
        )
        self.frequency_embedding_size = frequency_embedding_size

    @staticmethod
    def timestep_embedding(t: Tensor, dim: int, max_period: float = 10000) -> Tensor:
        half = dim // 2
        steps = torch.arange(half, dtype=torch.float32, device=t.device)
        args = t[:, None].float() * torch.exp(-math.log(max_period) / half * steps)
        return torch.cat([args.cos(), args.sin()], dim=-1)

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        return self.mlp(self.timestep_embedding(t, self.frequency_embedding_size).to(dtype))


class SizeEmbedder(TimestepEmbedder):
    """One embedding for each of a sample's numbers (here its frame rate), side by side."""

    def forward(self, s: Tensor, bs: int) -> Tensor:  # type: ignore[override]
        s = s[:, None] if s.ndim == 1 else s
        s = s.repeat(bs // s.shape[0], 1)
        embedded = super().forward(s.flatten(), next(self.parameters()).dtype)
        return embedded.view(bs, -1)


class CaptionEmbedder(nn.Module):
    def __init__(self, in_channels: int, hidden_size: int, uncond_prob: float, token_num: int = 120):
        super().__init__()
        self.y_proj = Mlp(in_channels, hidden_size, hidden_size)
        self.register_buffer("y_embedding", torch.randn(token_num, in_channels) / in_channels**0.5)
        self.uncond_prob = uncond_prob

    def forward(self, caption: Tensor, train: bool) -> Tensor:
        """[B, 1, N, C]; in training a caption is dropped with `uncond_prob`."""
        if train and self.uncond_prob > 0:
            assert caption.shape[2:] == self.y_embedding.shape
            dropped = torch.rand(caption.shape[0], device=caption.device) < self.uncond_prob
            caption = torch.where(dropped[:, None, None, None], self.y_embedding, caption)
        return self.y_proj(caption)


class PositionEmbedding2D(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        assert dim % 4 == 0, "dim must be divisible by 4"
        half = dim // 2
        inv_freq = 10000 ** -(torch.arange(0, half, 2).float() / half)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: Tensor, h: int, w: int, scale: float = 1.0, base_size: int | None = None) -> Tensor:
        """[1, h·w, dim]: rows in the first half of the channels, columns in the second."""
        halves = []
        for number, repeat in ((w, lambda grid: grid.repeat(h)), (h, lambda grid: grid.repeat_interleave(w))):
            grid = torch.arange(number, device=x.device, dtype=self.inv_freq.dtype) / scale
            grid = grid if base_size is None else grid * (base_size / number)
            angles = repeat(grid)[:, None] * self.inv_freq
            halves += [angles.sin(), angles.cos()]
        return torch.cat(halves, dim=-1).unsqueeze(0).to(x.dtype)
