"""`LTXModel` as LTX-2's authors build it, at toy widths: blocks hand on an object that holds all of a stream.

Names, arguments and order of computation are those of Lightricks/LTX-2 at 400fd31 (ltx_core/model/transformer), the
code is not. Video looks at audio and audio at video; the audio is short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, VIDEO, AUDIO, LATENT, AUDIO_LATENT, TEXT = 3, 36, 24, 8, 6, 16
Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Modality:
    """What the caller passes of a stream: latents [B, S, D], times [B, S], places [B, 1 or 3, S, 2], captions."""

    latent: Tensor
    sigma: Tensor
    timesteps: Tensor
    positions: Tensor
    context: Tensor
    attention_mask: Tensor | None = None
    keyframes_mask: Tensor | None = None


@dataclass(frozen=True)
class TransformerArgs:
    """The same, as blocks get it."""

    x: Tensor
    context: Tensor
    timesteps: Tensor
    positional_embeddings: Rotary
    cross_positional_embeddings: Rotary | None
    cross_gate_timestep: Tensor | None
    self_attention_mask: Tensor | None


class Attention(nn.Module):
    def __init__(self, query_dim: int, context_dim: int, inner_dim: int):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (
            nn.Linear(dim, inner_dim) for dim in (query_dim, context_dim, context_dim)
        )
        self.q_norm, self.k_norm = nn.RMSNorm(inner_dim), nn.RMSNorm(inner_dim)
        self.to_out = nn.Linear(inner_dim, query_dim)

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None, pe: Rotary | None = None,
        k_pe: Rotary | None = None,
    ) -> Tensor:  # fmt: skip
        context = x if context is None else context
        q, k, v = self.q_norm(self.to_q(x)), self.k_norm(self.to_k(context)), self.to_v(context)
        q, k, v = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
        if pe is not None:
            q, k = turn(q, pe), turn(k, pe if k_pe is None else k_pe)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.to_out(out.transpose(1, 2).flatten(2))


def turn(x: Tensor, rotary: Rotary) -> Tensor:
    """x: [B, H, S, D], tables [B, H, S, D / 2]."""
    (first, second), (cos, sin) = x.chunk(2, -1), rotary
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class BasicAVTransformerBlock(nn.Module):
    def __init__(self, has_audio: bool):
        super().__init__()
        self.attn1, self.attn2 = Attention(VIDEO, VIDEO, VIDEO), Attention(VIDEO, TEXT, VIDEO)
        self.ff, self.scale_shift_table = _feed_forward(VIDEO), nn.Parameter(torch.zeros(6, VIDEO))
        if has_audio:
            self.audio_attn1, self.audio_attn2 = Attention(AUDIO, AUDIO, AUDIO), Attention(AUDIO, TEXT, AUDIO)
            self.audio_to_video_attn = Attention(VIDEO, AUDIO, AUDIO)
            self.video_to_audio_attn = Attention(AUDIO, VIDEO, AUDIO)
            self.audio_ff, self.audio_scale_shift_table = (
                _feed_forward(AUDIO),
                nn.Parameter(torch.zeros(6, AUDIO)),
            )

    def forward(
        self, video: TransformerArgs, audio: TransformerArgs | None
    ) -> tuple[TransformerArgs, TransformerArgs | None]:
        shift, scale, gate, shift2, scale2, gate2 = _modulation(self.scale_shift_table, video.timesteps)
        vx = video.x
        normed = _norm(vx) * (1 + scale) + shift
        vx = vx + gate * self.attn1(normed, None, video.self_attention_mask, video.positional_embeddings)
        vx = vx + self.attn2(_norm(vx), video.context)
        if audio is not None:
            vx, audio = self._with_audio(vx, video, audio)
        vx = vx + gate2 * self.ff(_norm(vx) * (1 + scale2) + shift2)
        return replace(video, x=vx), audio

    def _with_audio(
        self, vx: Tensor, video: TransformerArgs, audio: TransformerArgs
    ) -> tuple[Tensor, TransformerArgs]:
        shift, scale, gate, shift2, scale2, gate2 = _modulation(self.audio_scale_shift_table, audio.timesteps)
        ax = audio.x
        ax = ax + gate * self.audio_attn1(_norm(ax) * (1 + scale) + shift, pe=audio.positional_embeddings)
        ax = ax + self.audio_attn2(_norm(ax), audio.context)
        places = video.cross_positional_embeddings, audio.cross_positional_embeddings
        to_video = self.audio_to_video_attn(_norm(vx), _norm(ax), None, *places) * video.cross_gate_timestep
        to_audio = (
            self.video_to_audio_attn(_norm(ax), _norm(vx), None, *places[::-1]) * audio.cross_gate_timestep
        )
        vx, ax = vx + to_video, ax + to_audio
        ax = ax + gate2 * self.audio_ff(_norm(ax) * (1 + scale2) + shift2)
        return vx, replace(audio, x=ax)


def _feed_forward(dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU("tanh"), nn.Linear(2 * dim, dim))


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _modulation(table: Tensor, timesteps: Tensor) -> tuple[Tensor, ...]:
    return (table + timesteps.unflatten(2, table.shape)).unbind(2)


class Stream(nn.Module):
    """The layers of one stream outside of the blocks; the authors hold them in the model itself."""

    def __init__(self, dim: int, cross_dim: int):
        super().__init__()
        self.adaln_single, self.cross_gate = nn.Linear(1, 6 * dim), nn.Linear(1, dim)
        self.keyframes_embedding = nn.Parameter(torch.zeros(1, dim))
        self.dim, self.cross_dim = dim, cross_dim

    def prepare(
        self, patchify_proj: nn.Module, modality: Modality, other: Modality | None
    ) -> TransformerArgs:
        x = patchify_proj(modality.latent)
        if modality.keyframes_mask is not None:
            x = x + (modality.keyframes_mask > 0).to(x) * self.keyframes_embedding
        mask = modality.attention_mask
        has_other = other is not None
        return TransformerArgs(
            x=x,
            context=modality.context,
            timesteps=self.adaln_single(modality.timesteps[..., None]),
            positional_embeddings=rotary_of(modality.positions, self.dim, x),
            cross_positional_embeddings=(
                rotary_of(modality.positions[:, :1], self.cross_dim, x) if has_other else None
            ),
            cross_gate_timestep=self.cross_gate(other.sigma[:, None, None]) if other is not None else None,
            self_attention_mask=None if mask is None else mask.clamp(min=1e-9).log()[:, None],
        )


def rotary_of(positions: Tensor, dim: int, x: Tensor) -> Rotary:
    """Places [B, N, S, 2] → [B, H, S, D / 2] twice; what is left over of a head is not turned."""
    num = positions.size(1)
    powers = 0.3 ** torch.arange(dim // (2 * num), device=positions.device)
    angles = (positions.mean(-1)[..., None] * powers).transpose(1, 2).flatten(2)
    angles = F.pad(angles, (dim // 2 - angles.size(-1), 0)).unflatten(2, (HEADS, -1)).transpose(1, 2)
    return angles.cos().to(x), angles.sin().to(x)


class LTXModel(nn.Module):
    def __init__(self, has_audio: bool = True):
        super().__init__()
        self.patchify_proj, self.proj_out = nn.Linear(LATENT, VIDEO), nn.Linear(VIDEO, LATENT)
        self.video = Stream(VIDEO, AUDIO)
        if has_audio:
            self.audio_patchify_proj, self.audio_proj_out = (
                nn.Linear(AUDIO_LATENT, AUDIO),
                nn.Linear(AUDIO, AUDIO_LATENT),
            )
            self.audio = Stream(AUDIO, AUDIO)
        self.transformer_blocks = nn.ModuleList([BasicAVTransformerBlock(has_audio) for _ in range(2)])

    def forward(
        self, video: Modality, audio: Modality | None, perturbations: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        v = self.video.prepare(self.patchify_proj, video, audio)
        a = None if audio is None else self.audio.prepare(self.audio_patchify_proj, audio, video)
        for block in self.transformer_blocks:
            v, a = block(video=v, audio=a)
        return self.proj_out(_norm(v.x)), None if a is None else self.audio_proj_out(_norm(a.x))
