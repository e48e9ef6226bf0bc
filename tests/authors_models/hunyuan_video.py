"""`HYVideoDiffusionTransformer` as HunyuanVideo's authors build it, at toy widths: flash-attn on packed tokens.

Names, arguments and order of computation are those of Tencent-Hunyuan/HunyuanVideo at fa14b00 (models.py and
attenion.py in hyvideo/modules), the code is not. Each sample has two segments of keys: its video and visible text, and
its padding.

Letters: `B` clips, `L` video and text tokens, `H` heads, `D` head dim, `C` channels.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS, TEXT, POOLED = 24, 3, 16, 10
Rotary = tuple[Tensor, Tensor]


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
) -> Tensor:  # fmt: skip
    """[B·L, H, D], every segment by itself; written out, as flash-attn is no function of torch either."""
    ends = cu_seqlens_q.tolist()
    segments = [slice(start, stop) for start, stop in pairwise(ends)]
    return torch.cat([_attend(q[at], k[at], v[at]) for at in segments])


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("lhd,mhd->hlm", q, k).mul(q.size(-1) ** -0.5).softmax(-1)
    return torch.einsum("hlm,mhd->lhd", weights, v)


def get_cu_seqlens(text_mask: Tensor, img_len: int) -> Tensor:
    """[2·B + 1]: where each sample's tokens, and its padding, end."""
    total = img_len + text_mask.size(1)
    ends = [0]
    for sample, visible in enumerate(text_mask.sum(1).tolist()):
        ends += [sample * total + img_len + visible, (sample + 1) * total]
    return torch.tensor(ends, dtype=torch.int32)


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, batch_size: int
) -> Tensor:
    """[B, L, H, D] → [B, L, C]."""
    packed = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    out = flash_attn_varlen_func(*packed, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return out.view(batch_size, max_seqlen, HEADS, -1).flatten(2)


def apply_rotary_emb(x: Tensor, freqs_cis: Rotary) -> Tensor:
    """[B, S, H, D] turned by tables [S, D]."""
    cos, sin = (table[None, :, None] for table in freqs_cis)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    return (x * cos + torch.stack([-imaginary, real], -1).flatten(3) * sin).to(x)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class MMDoubleStreamBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for stream in ("img", "txt"):
            self.add_module(f"{stream}_mod", nn.Linear(DIM, 6 * DIM))
            self.add_module(f"{stream}_attn_qkv", nn.Linear(DIM, 3 * DIM))
            self.add_module(f"{stream}_attn_q_norm", nn.RMSNorm(DIM // HEADS, eps=1e-6))
            self.add_module(f"{stream}_attn_k_norm", nn.RMSNorm(DIM // HEADS, eps=1e-6))
            self.add_module(f"{stream}_attn_proj", nn.Linear(DIM, DIM))
            mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU("tanh"), nn.Linear(2 * DIM, DIM))
            self.add_module(f"{stream}_mlp", mlp)

    def forward(
        self, img: Tensor, txt: Tensor, vec: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor,
        max_seqlen_q: int, max_seqlen_kv: int, freqs_cis: Rotary,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        gates, projected = {}, []
        for stream, x in (("img", img), ("txt", txt)):
            shift, scale, *gates[stream] = getattr(self, f"{stream}_mod")(vec).chunk(6, dim=-1)
            x = modulate(F.layer_norm(x, (DIM,)), shift, scale)
            q, k, v = getattr(self, f"{stream}_attn_qkv")(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
            q, k = getattr(self, f"{stream}_attn_q_norm")(q), getattr(self, f"{stream}_attn_k_norm")(k)
            if stream == "img":
                q, k = apply_rotary_emb(q, freqs_cis), apply_rotary_emb(k, freqs_cis)
            projected.append((q, k, v))
        q, k, v = (torch.cat(pair, dim=1) for pair in zip(*projected, strict=True))
        attended = attention(q, k, v, cu_seqlens_q, max_seqlen_q, img.size(0))
        streams = []
        parts = attended.split([img.size(1), txt.size(1)], dim=1)
        for stream, x, part in zip(gates, (img, txt), parts, strict=True):
            gate, shift, scale, gate2 = gates[stream]
            x = x + getattr(self, f"{stream}_attn_proj")(part) * gate[:, None]
            normed = modulate(F.layer_norm(x, (DIM,)), shift, scale)
            streams.append(x + getattr(self, f"{stream}_mlp")(normed) * gate2[:, None])
        return streams[0], streams[1]


class MMSingleStreamBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(DIM, 3 * DIM)
        self.linear1, self.linear2 = nn.Linear(DIM, 5 * DIM), nn.Linear(3 * DIM, DIM)
        self.q_norm, self.k_norm = (nn.RMSNorm(DIM // HEADS, eps=1e-6) for _ in range(2))

    def forward(
        self, x: Tensor, vec: Tensor, txt_len: int, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor,
        max_seqlen_q: int, max_seqlen_kv: int, freqs_cis: Rotary,
    ) -> Tensor:  # fmt: skip
        shift, scale, gate = self.modulation(vec).chunk(3, dim=-1)
        qkv, mlp = self.linear1(modulate(F.layer_norm(x, (DIM,)), shift, scale)).split([3 * DIM, 2 * DIM], -1)
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = (
            torch.cat([apply_rotary_emb(each[:, :-txt_len], freqs_cis), each[:, -txt_len:]], dim=1)
            for each in (q, k)
        )
        attended = attention(q, k, v, cu_seqlens_q, max_seqlen_q, x.size(0))
        return x + self.linear2(torch.cat([attended, F.gelu(mlp)], 2)) * gate[:, None]


class FinalLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adaLN_modulation, self.linear = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, 16)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.linear(modulate(F.layer_norm(x, (DIM,)), *self.adaLN_modulation(c).chunk(2, dim=1)))


class HYVideoDiffusionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.img_in = nn.Conv3d(4, DIM, kernel_size=(1, 2, 2), stride=(1, 2, 2))
        self.txt_in, self.vector_in, self.time_in = (nn.Linear(size, DIM) for size in (TEXT, POOLED, 1))
        self.double_blocks = nn.ModuleList([MMDoubleStreamBlock() for _ in range(2)])
        self.single_blocks = nn.ModuleList([MMSingleStreamBlock() for _ in range(2)])
        self.final_layer = FinalLayer()

    def forward(
        self, x: Tensor, t: Tensor, text_states: Tensor, text_mask: Tensor, text_states_2: Tensor,
        freqs_cos: Tensor, freqs_sin: Tensor, guidance: Tensor | None = None, return_dict: bool = True,
    ) -> Tensor | dict[str, Tensor]:  # fmt: skip
        """x [B, 4, F, H, W] → [B, F·H/2·W/2, 16]."""
        vec = self.time_in(t[:, None].to(x)) + self.vector_in(text_states_2)
        img, txt = self.img_in(x).flatten(2).transpose(1, 2), self.txt_in(text_states)
        img_len, txt_len = img.size(1), txt.size(1)
        ends, total = get_cu_seqlens(text_mask, img_len), img_len + txt_len
        for block in self.double_blocks:
            img, txt = block(img, txt, vec, ends, ends, total, total, (freqs_cos, freqs_sin))
        tokens = torch.cat((img, txt), 1)
        for block in self.single_blocks:
            tokens = block(tokens, vec, txt_len, ends, ends, total, total, (freqs_cos, freqs_sin))
        out = self.final_layer(tokens[:, :img_len], vec)
        return {"x": out} if return_dict else out
