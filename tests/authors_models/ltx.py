"""`Transformer3DModel` as LTX-Video's authors build it, at toy widths: tokens and their places are its inputs.

Names, arguments and order of computation are those of Lightricks/LTX-Video at 5260738
(ltx_video/models/transformers/transformer3d.py, attention.py), the code is not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS, CHANNELS, TEXT = 36, 3, 8, 16
Rotary = tuple[Tensor, Tensor]


class Attention(nn.Module):
    def __init__(self, use_rope: bool):
        super().__init__()
        self.use_rope = use_rope
        self.q_norm, self.k_norm = (nn.RMSNorm(DIM, eps=1e-5) for _ in range(2))
        self.to_q, self.to_k, self.to_v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(DIM, DIM), nn.Identity()])

    def forward(
        self,
        hidden_states: Tensor,
        freqs_cis: Rotary,
        encoder_hidden_states: Tensor | None,
        attention_mask: Any,
    ) -> Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = self.q_norm(self.to_q(hidden_states)), self.k_norm(self.to_k(context)), self.to_v(context)
        if self.use_rope:
            q, k = turn(q, freqs_cis), turn(k, freqs_cis)
        q, k, v = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, dropout_p=0.0, is_causal=False
        )
        return self.to_out[0](out.transpose(1, 2).flatten(2))


def turn(x: Tensor, freqs_cis: Rotary) -> Tensor:
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * freqs_cis[0] + torch.stack([-imaginary, real], -1).flatten(2) * freqs_cis[1]


class BasicTransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn1, self.attn2 = Attention(use_rope=True), Attention(use_rope=False)
        self.ff = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU("tanh"), nn.Linear(2 * DIM, DIM))
        self.scale_shift_table = nn.Parameter(torch.zeros(6, DIM))

    def forward(
        self, hidden_states: Tensor, freqs_cis: Rotary, encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None, timestep: Tensor,
    ) -> Tensor:  # fmt: skip
        modulation = self.scale_shift_table + timestep.unflatten(2, (6, DIM))  # [B, 1 or S, 6, C]
        shift, scale, gate, shift2, scale2, gate2 = modulation.unbind(2)
        x = hidden_states
        x = x + gate * self.attn1(F.rms_norm(x, (DIM,)) * (1 + scale) + shift, freqs_cis, None, None)
        x = x + self.attn2(x, freqs_cis, encoder_hidden_states, encoder_attention_mask)
        return x + gate2 * self.ff(F.rms_norm(x, (DIM,)) * (1 + scale2) + shift2)


class Transformer3DModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patchify_proj, self.proj_out = nn.Linear(CHANNELS, DIM), nn.Linear(DIM, CHANNELS)
        self.caption_projection = nn.Linear(TEXT, DIM)
        self.adaln_single = nn.Sequential(nn.Linear(1, DIM), nn.SiLU(), nn.Linear(DIM, 6 * DIM))
        self.transformer_blocks = nn.ModuleList([BasicTransformerBlock() for _ in range(2)])
        self.norm_out = nn.LayerNorm(DIM, elementwise_affine=False)
        self.scale_shift_table = nn.Parameter(torch.zeros(2, DIM))

    def precompute_freqs_cis(self, indices_grid: Tensor) -> Rotary:
        """Places [B, 3, S] → [B, S, C] twice."""
        powers = torch.arange(DIM // 6, device=indices_grid.device)
        angles = indices_grid[..., None] * 0.3**powers  # [B, 3, S, C / 6]
        angles = angles.transpose(1, 2).flatten(2).repeat_interleave(2, dim=-1)
        return angles.cos(), angles.sin()

    def forward(
        self, hidden_states: Tensor, indices_grid: Tensor, encoder_hidden_states: Tensor, timestep: Tensor,
        class_labels: Any = None, cross_attention_kwargs: Any = None, attention_mask: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None, skip_layer_mask: Any = None, skip_layer_strategy: Any = None,
        return_dict: bool = True,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Tokens [B, S, 8], times [B] or [B, S] → [B, S, 8]."""
        if encoder_attention_mask is not None:
            encoder_attention_mask = encoder_attention_mask[:, None, None].bool()
        x = self.patchify_proj(hidden_states)
        # Tables and times are cast where the authors cast them.
        cos, sin = self.precompute_freqs_cis(indices_grid)
        freqs_cis = cos.to(x), sin.to(x)
        time = self.adaln_single(timestep.flatten()[:, None].to(x))
        time = time.unflatten(0, (x.size(0), -1))  # [B, 1 or S, 6·C]
        text = self.caption_projection(encoder_hidden_states)
        for block in self.transformer_blocks:
            x = block(x, freqs_cis, text, encoder_attention_mask, time)
        shift, scale = (self.scale_shift_table + time[..., None, :DIM]).unbind(2)
        return (self.proj_out(self.norm_out(x) * (1 + scale) + shift),)
