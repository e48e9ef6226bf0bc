"""Classes of VideoX-Fun that have the names of diffusers', at toy widths: its Wan, and its LTX-2.

Names, arguments and order of computation are those of VideoX-Fun (videox_fun/models), the code is not. Both attend by a
function of its own, which calls flash-attn where that is installed, and torch's kernel elsewhere.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.nn.functional as F
from diffusers import LTX2VideoTransformer3DModel as TheirLTX2
from diffusers.models.transformers.transformer_ltx2 import apply_interleaved_rotary_emb
from torch import Tensor, nn

from tests.authors_models import wan
from tests.authors_models.wan import HEADS, rope_apply


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, q_lens: Any = None, k_lens: Any = None, dropout_p: float = 0.0,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), version: int | None = None,
) -> Tensor:  # fmt: skip
    """[B, L, H, D]"""
    return wan.flash_attention(q, k, v, k_lens=k_lens)


def attention(
    q: Tensor, k: Tensor, v: Tensor, k_lens: Any = None, window_size: tuple[int, int] = (-1, -1),
    attn_mask: Any = None, is_installed: bool = False,
) -> Tensor:  # fmt: skip
    if is_installed and attn_mask is None:
        return flash_attention(q=q, k=k, v=v, k_lens=k_lens, window_size=window_size)
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask).transpose(1, 2)


class WanSelfAttention(wan.WanSelfAttention):
    def __init__(self, is_installed: bool) -> None:
        super().__init__("", "")
        self.is_installed = is_installed

    def forward(self, x: Tensor, seq_lens: Tensor, grid_sizes: Tensor, freqs: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (HEADS, -1)) for layer in (self.q, self.k, self.v))
        q, k = rope_apply_qk(q, k, grid_sizes, freqs)
        return self.o(attention(q, k, v=v, k_lens=seq_lens, is_installed=self.is_installed).flatten(2))


def rope_apply_qk(q: Tensor, k: Tensor, grid_sizes: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    return rope_apply(q, grid_sizes, freqs), rope_apply(k, grid_sizes, freqs)


class WanTransformer3DModel(wan.WanModel):
    teacache = None

    def __init__(self, is_installed: bool = False) -> None:
        super().__init__()
        for block in self.blocks:
            block.self_attn = WanSelfAttention(is_installed)

    def forward(
        self, x: list[Tensor], t: Tensor, context: Tensor, seq_len: int, clip_fea: Any = None, y: Any = None,
        y_camera: Any = None, full_ref: Any = None, subject_ref: Any = None, cond_flag: bool = True,
    ) -> Tensor:  # fmt: skip
        return super().forward(x, t, context, seq_len)


class Wan2_2Transformer3DModel(WanTransformer3DModel):
    """The same code."""


class LTX2AudioVideoAttnProcessor:
    def __call__(
        self, attn: nn.Module, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None, query_rotary_emb: Any = None, key_rotary_emb: Any = None,
    ) -> Tensor:  # fmt: skip
        asked = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if attention_mask is not None:
            attention_mask = attn.prepare_attention_mask(attention_mask, asked.size(1), asked.size(0))
            attention_mask = attention_mask.unflatten(0, (asked.size(0), attn.heads))
        q, k, v = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(asked)), attn.to_v(asked)
        if query_rotary_emb is not None:
            q = apply_interleaved_rotary_emb(q, query_rotary_emb)
            k = apply_interleaved_rotary_emb(k, key_rotary_emb or query_rotary_emb)
        q, k, v = (each.unflatten(2, (attn.heads, -1)) for each in (q, k, v))
        return attn.to_out[0](attention(q=q, k=k, v=v, attn_mask=attention_mask).flatten(2))


class LTX2VideoTransformer3DModel(TheirLTX2):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for module in self.modules():
            if hasattr(module, "set_processor"):
                module.set_processor(LTX2AudioVideoAttnProcessor())

    def forward(
        self,
        hidden_states: Tensor,
        audio_hidden_states: Tensor,
        encoder_hidden_states: Any = None,
        audio_encoder_hidden_states: Any = None,
        timestep: Any = None,
        audio_timestep: Any = None,
        sigma: Any = None,
        audio_sigma: Any = None,
        encoder_attention_mask: Any = None,
        audio_encoder_attention_mask: Any = None,
        num_frames: Any = None,
        height: Any = None,
        width: Any = None,
        fps: Any = 24.0,
        audio_num_frames: Any = None,
        video_coords: Any = None,
        audio_coords: Any = None,
        isolate_modalities: Any = False,
        spatio_temporal_guidance_blocks: Any = None,
        perturbation_mask: Any = None,
        use_cross_timestep: Any = False,
        attention_kwargs: Any = None,
        return_dict: Any = True,
    ) -> Any:
        """All of diffusers' arguments but two."""
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        return super().forward(**given)


# Where they come from is told by their modules, and a policy looks for functions in those.
_HOME = "videox_fun.models"
sys.modules.setdefault(f"{_HOME}.stand_in", sys.modules[__name__])
for _cls in (LTX2AudioVideoAttnProcessor, LTX2VideoTransformer3DModel):
    _cls.__module__ = f"{_HOME}.ltx2_transformer3d"
LTX2AudioVideoAttnProcessor.__call__.__module__ = f"{_HOME}.ltx2_transformer3d"
