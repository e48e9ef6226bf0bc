"""`CausalWanModel` as CausVid's and Self-Forcing's authors build it, at toy widths: blocks of frames see those before.

Names, arguments and order of computation are those of guandeh17/Self-Forcing at 33593df (wan/modules/causal_model.py),
the code is not. A block mask of flex attention is made at the first forward and kept, tokens are padded to its blocks
of 128 inside attention, and of two clips, a clean one before the noisy one, both have the same positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tests.authors_models import wan
from tests.authors_models.wan import DIM, HEADS, TEXT, WanCrossAttention, rope_apply, rope_params


def flex_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """[B, H, S, D]; torch's own has no gradients on a CPU."""
    from tests.video_models import flex  # whose package has the cases of this model too

    return flex.flex_attention(query, key, value, scale=None, kernel_options=None, **options)


class CausalWanSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, DIM // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(
        self, x: Tensor, seq_lens: Tensor, grid_sizes: Tensor, freqs: Tensor, block_mask: BlockMask | None
    ) -> Tensor:
        b, s = x.shape[:2]
        q = self.norm_q(self.q(x)).view(b, s, self.num_heads, self.head_dim)
        k = self.norm_k(self.k(x)).view(b, s, self.num_heads, self.head_dim)
        v = self.v(x).view(b, s, self.num_heads, self.head_dim)
        if s == seq_lens[0].item() * 2:  # a clean clip and a noisy one
            q, k = (
                torch.cat([rope_apply(half, grid_sizes, freqs) for half in each.chunk(2, dim=1)], 1)
                for each in (q, k)
            )
        else:
            q, k = rope_apply(q, grid_sizes, freqs), rope_apply(k, grid_sizes, freqs)
        padded_length = math.ceil(s / 128) * 128 - s
        padded = [
            torch.cat([each, each.new_zeros(b, padded_length, *each.shape[2:])], 1) for each in (q, k, v)
        ]
        query, key, value = (each.transpose(2, 1) for each in padded)
        out = flex_attention(query=query, key=key, value=value, block_mask=block_mask)
        return self.o(out[:, :, :-padded_length].transpose(2, 1).flatten(2))


class CausalWanAttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(DIM, elementwise_affine=False) for _ in range(2))
        self.self_attn, self.cross_attn = CausalWanSelfAttention(), WanCrossAttention()
        self.ffn = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.modulation = nn.Parameter(torch.randn(1, 6, DIM) / DIM**0.5)

    def forward(
        self, x: Tensor, e: Tensor, seq_lens: Tensor, grid_sizes: Tensor, freqs: Tensor, context: Tensor,
        context_lens: Tensor | None, block_mask: BlockMask | None,
    ) -> Tensor:  # fmt: skip
        """x: [B, L, C]; e: [B, F, 6, C]."""
        frames = e.shape[1], x.shape[1] // e.shape[1]
        shift, scale, gate, shift2, scale2, gate2 = (self.modulation.unsqueeze(1) + e).chunk(6, dim=2)
        y = (self.norm1(x).unflatten(1, frames) * (1 + scale) + shift).flatten(1, 2)
        y = self.self_attn(y, seq_lens, grid_sizes, freqs, block_mask)
        x = x + (y.unflatten(1, frames) * gate).flatten(1, 2)
        x = x + self.cross_attn(x, context, context_lens)
        y = self.ffn((self.norm2(x).unflatten(1, frames) * (1 + scale2) + shift2).flatten(1, 2))
        return x + (y.unflatten(1, frames) * gate2).flatten(1, 2)


class CausalHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(DIM, elementwise_affine=False), nn.Linear(DIM, 16)
        self.modulation = nn.Parameter(torch.randn(1, 2, DIM) / DIM**0.5)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        """x: [B, L, C]; e: [B, F, 1, C] → [B, F, L / F, 16]."""
        shift, scale = (self.modulation.unsqueeze(1) + e).chunk(2, dim=2)
        return self.head(self.norm(x).unflatten(1, (e.shape[1], -1)) * (1 + scale) + shift)


class CausalWanModel(nn.Module):
    def __init__(self, num_frame_per_block: int = 1, local_attn_size: int = -1):
        super().__init__()
        self.num_frame_per_block, self.local_attn_size = num_frame_per_block, local_attn_size
        self.patch_embedding = nn.Conv3d(4, DIM, kernel_size=(1, 2, 2), stride=(1, 2, 2))
        self.text_embedding, self.time_embedding = nn.Linear(TEXT, DIM), nn.Linear(1, DIM)
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))
        self.blocks = nn.ModuleList([CausalWanAttentionBlock() for _ in range(2)])
        self.head, self.block_mask = CausalHead(), None
        self.freqs = rope_params(128, DIM // HEADS)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        assert kwargs.get("kv_cache") is None, "sampling has code of its own"
        return self._forward_train(*args, **kwargs)

    def _forward_train(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor,
        seq_len: int,
        clean_x: Tensor | None = None,
        aug_t: Tensor | None = None,
    ) -> Tensor:
        """x, clean_x: [B, 4, F, H, W]; t, aug_t: [B, F] → [B, F, L / F, 16]."""
        frames, tokens_per_frame = x.shape[2], x.shape[-2] * x.shape[-1] // 4
        if self.block_mask is None:
            prepare = self._blockwise_causal if clean_x is None else self._teacher_forcing
            self.block_mask = prepare(frames, tokens_per_frame)
        clips = self.patch_embedding(x)
        grid_sizes = torch.tensor([clips.shape[2:]] * len(x))
        tokens = clips.flatten(2).transpose(1, 2)
        seq_lens = torch.tensor([tokens.size(1)] * len(x))
        e = self.time_embedding(t.flatten()[:, None].type_as(tokens)).unflatten(0, t.shape)
        e0 = self.time_projection(e).unflatten(2, (6, DIM))
        if clean_x is not None:
            clean = self.patch_embedding(clean_x).flatten(2).transpose(1, 2)
            tokens = torch.cat([clean, tokens], dim=1)
            aug_t = torch.zeros_like(t) if aug_t is None else aug_t
            e_clean = self.time_embedding(aug_t.flatten()[:, None].type_as(tokens)).unflatten(0, t.shape)
            e0 = torch.cat([self.time_projection(e_clean).unflatten(2, (6, DIM)), e0], dim=1)
        for block in self.blocks:
            tokens = block(
                tokens, e=e0, seq_lens=seq_lens, grid_sizes=grid_sizes, freqs=self.freqs,
                context=self.text_embedding(context), context_lens=None, block_mask=self.block_mask,
            )  # fmt: skip
        if clean_x is not None:
            tokens = tokens[:, tokens.shape[1] // 2 :]
        return self.head(tokens, e.unsqueeze(2))

    def _blockwise_causal(self, frames: int, tokens_per_frame: int) -> BlockMask:
        total, block = frames * tokens_per_frame, tokens_per_frame * self.num_frame_per_block
        ends = torch.zeros(_padded(total), dtype=torch.long)
        for start in range(0, total, block):
            ends[start : start + block] = start + block

        def mask(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen = k < ends[q]
            if self.local_attn_size != -1:
                seen = seen & (k >= ends[q] - self.local_attn_size * tokens_per_frame)
            return seen | (q == k)

        return _block_mask(mask, len(ends))

    def _teacher_forcing(self, frames: int, tokens_per_frame: int) -> BlockMask:
        clean, block = frames * tokens_per_frame, tokens_per_frame * self.num_frame_per_block
        size = _padded(2 * clean)
        context, starts, ends = (torch.zeros(size, dtype=torch.long) for _ in range(3))
        for start in range(0, clean, block):
            context[start : start + block] = start + block
            context[clean + start : clean + start + block] = start
            starts[clean + start : clean + start + block] = clean + start
            ends[clean + start : clean + start + block] = clean + start + block

        def mask(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k < context[q]) | ((k >= starts[q]) & (k < ends[q])) | (q == k)

        return _block_mask(mask, size)


def _padded(length: int) -> int:
    return math.ceil(length / 128) * 128


def _block_mask(mask: Any, size: int) -> BlockMask:
    return create_block_mask(mask, B=None, H=None, Q_LEN=size, KV_LEN=size, device="cpu", _compile=False)


def causal_wan_inputs(frames: int = 5, clean: bool = False) -> dict[str, Any]:
    """Clips of 3 × 5 tokens a frame, a time for each frame."""
    generator = torch.Generator().manual_seed(1)
    clips = [torch.randn(2, 4, frames, 6, 10, generator=generator) for _ in range(2)]
    inputs = {
        "x": clips[0],
        "t": torch.rand(2, frames, generator=generator),
        "context": torch.randn(2, 7, wan.TEXT, generator=generator),
        "seq_len": frames * 15,
    }
    if clean:
        inputs |= {"clean_x": clips[1], "aug_t": torch.rand(2, frames, generator=generator)}
    return inputs
