"""`WanModel` as musubi-tuner builds it, at toy widths: rotary positions in place, and one list for q, k and v.

Names, arguments and order of computation are those of musubi-tuner (src/musubi_tuner/wan/modules), the code is not. It
has a folder of its own, as a policy looks for functions among the files of a model's folder.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.authors_models import wan
from tests.authors_models.wan import DIM, HEADS, angles_of_grid


def rope_apply(x: Tensor, grid_sizes: Tensor, freqs: Tensor) -> Tensor:
    """There too, and called by nobody."""
    raise AssertionError("attention calls the other one")


def rope_apply_inplace_cached(x: Tensor, grid_sizes: Tensor, freqs_list: list[Tensor]) -> Tensor:
    """[B, L, H, D], whose own memory is turned; a table for every clip."""
    for sample, (grid, table) in enumerate(zip(grid_sizes.tolist(), freqs_list, strict=True)):
        length = grid[0] * grid[1] * grid[2]
        pairs = torch.view_as_complex(x[sample, :length].double().reshape(length, x.size(2), -1, 2))
        x[sample, :length] = torch.view_as_real(pairs * table).flatten(2).to(x.dtype)
    return x


def flash_attention(
    qkv: list[Tensor], q_lens: Any = None, k_lens: Any = None, dropout_p: float = 0.0, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), attn_mode: str | None = "torch", split_attn: bool = False,
) -> Tensor:  # fmt: skip
    """q, k, v: [B, L, H, D], taken out of their list."""
    q, k, v = (each.transpose(1, 2) for each in qkv)
    qkv.clear()
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=causal).transpose(1, 2)


class WanSelfAttention(wan.WanSelfAttention):
    def __init__(self) -> None:
        super().__init__("in place", "list")

    def forward(self, x: Tensor, seq_lens: Tensor, grid_sizes: Tensor, freqs: list[Tensor]) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (HEADS, -1)) for layer in (self.q, self.k, self.v))
        rope_apply_inplace_cached(q, grid_sizes, freqs)
        rope_apply_inplace_cached(k, grid_sizes, freqs)
        qkv = [q, k, v]
        return self.o(flash_attention(qkv, k_lens=seq_lens, attn_mode="torch", split_attn=False).flatten(2))


class WanModel(wan.WanModel):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.self_attn = WanSelfAttention()

    def forward(
        self, x: list[Tensor], t: Tensor, context: Tensor, seq_len: int, clip_fea: Any = None, y: Any = None,
        skip_block_indices: list[int] | None = None, f_indices: Any = None,
    ) -> Tensor:  # fmt: skip
        self.freqs = self.freqs.to(t.device)
        clips = [self.patch_embedding(clip[None]) for clip in x]
        grids = [tuple(clip.shape[2:]) for clip in clips]
        tokens = torch.cat([clip.flatten(2).transpose(1, 2) for clip in clips])
        assert tokens.size(1) == seq_len
        e = self.time_embedding(t[:, None])
        for index, block in enumerate(self.blocks):
            if index not in (skip_block_indices or ()):
                tokens = block(
                    tokens, e=self.time_projection(e).unflatten(1, (6, DIM)),
                    seq_lens=torch.full((len(x),), seq_len), grid_sizes=torch.tensor(grids),
                    freqs=[angles_of_grid(grid, self.freqs) for grid in grids],
                    context=self.text_embedding(context), context_lens=None,
                )  # fmt: skip
        return self.head(tokens, e)
