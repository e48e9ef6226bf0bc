"""`STDiT3` of Open-Sora v1.2: spatial and temporal blocks in turn. Letters as in `blocks`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opensora_accel.checkpoint import auto_grad_checkpoint
from tests.opensora_models.stdit3.blocks import (
    Attention,
    CaptionEmbedder,
    Mlp,
    MultiHeadCrossAttention,
    PatchEmbed3D,
    PositionEmbedding2D,
    RotaryEmbedding,
    SizeEmbedder,
    T2IFinalLayer,
    TimestepEmbedder,
    t2i_modulate,
    t_mask_select,
)


class STDiT3Block(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        rope=None,
        qk_norm: bool = False,
        temporal: bool = False,
        enable_flash_attn: bool = False,
        enable_layernorm_kernel: bool = False,
        enable_sequence_parallelism: bool = False,
    ):
        super().__init__()
        refused = (drop_path, enable_flash_attn, enable_layernorm_kernel, enable_sequence_parallelism)
        assert not any(refused), "the stand-in does without"
        self.temporal = temporal
        self.hidden_size = hidden_size
        self.enable_flash_attn = enable_flash_attn
        self._enable_sequence_parallelism = enable_sequence_parallelism
        self.norm1 = nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)
        self.attn = Attention(hidden_size, num_heads=num_heads, qkv_bias=True, qk_norm=qk_norm, rope=rope)
        self.cross_attn = MultiHeadCrossAttention(hidden_size, num_heads)
        self.norm2 = nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)
        self.mlp = Mlp(in_features=hidden_size, hidden_features=int(hidden_size * mlp_ratio))
        self.drop_path = nn.Identity()
        self.scale_shift_table = nn.Parameter(torch.randn(6, hidden_size) / hidden_size**0.5)

    def t_mask_select(self, x_mask, x, masked_x, T, S):
        return t_mask_select(x_mask, x, masked_x, T, S)

    def forward(
        self,
        x,
        y,
        t,
        mask=None,  # text lengths
        x_mask=None,  # frames to denoise, [B, T]
        t0=None,  # t of a frame that is given
        T=None,  # number of frames
        S=None,  # number of tokens of a frame
    ):
        return self._run(x, t, x_mask, t0, T, S, lambda x: self.cross_attn(x, y, mask))

    def _run(self, x, t, x_mask, t0, T, S, look_at_text):
        B = x.size(0)
        # shift, scale and gate of attention, then of the MLP, each [B, 1, C]
        of_t = (self.scale_shift_table[None] + t.reshape(B, 6, -1)).chunk(6, dim=1)
        of_t0 = None
        if x_mask is not None:
            of_t0 = (self.scale_shift_table[None] + t0.reshape(B, 6, -1)).chunk(6, dim=1)

        def by_frame(function, first: int, last: int) -> Tensor:
            """`function` of the frame's modulation: of t, or of t0 where the frame is given."""
            out = function(*of_t[first:last])
            if of_t0 is None:
                return out
            return self.t_mask_select(x_mask, out, function(*of_t0[first:last]), T, S)

        norm = self.norm1(x)
        x_m = by_frame(lambda shift, scale: t2i_modulate(norm, shift, scale), 0, 2)
        attended = self._attend(x_m.unflatten(1, (T, x_m.size(1) // T)))  # einops divides by T too, also by 0
        x = x + self.drop_path(by_frame(lambda gate: gate * attended, 2, 3))
        x = x + look_at_text(x)
        norm2 = self.norm2(x)
        fed = self.mlp(by_frame(lambda shift, scale: t2i_modulate(norm2, shift, scale), 3, 5))
        return x + self.drop_path(by_frame(lambda gate: gate * fed, 5, 6))

    def _attend(self, x: Tensor) -> Tensor:
        """[B, T, S, C] → [B, T·S, C], along time or within each frame."""
        x = x.transpose(1, 2) if self.temporal else x
        x = self.attn(x.flatten(0, 1)).view_as(x)
        return (x.transpose(1, 2) if self.temporal else x).flatten(1, 2)


@dataclass
class STDiT3Config:
    """The original's is a transformers config; the fields are its own."""

    input_size: tuple = (None, None, None)
    input_sq_size: int = 512
    in_channels: int = 4
    patch_size: tuple[int, int, int] = (1, 2, 2)
    hidden_size: int = 1152
    depth: int = 28
    num_heads: int = 16
    mlp_ratio: float = 4.0
    class_dropout_prob: float = 0.1
    pred_sigma: bool = True
    drop_path: float = 0.0
    caption_channels: int = 4096
    model_max_length: int = 300
    qk_norm: bool = True
    enable_flash_attn: bool = False
    enable_layernorm_kernel: bool = False
    enable_sequence_parallelism: bool = False
    only_train_temporal: bool = False
    freeze_y_embedder: bool = False
    skip_y_embedder: bool = False


class STDiT3(nn.Module):
    config_class = STDiT3Config

    def __init__(self, config: STDiT3Config):
        super().__init__()
        self.config = config
        self.in_channels = config.in_channels
        self.out_channels = config.in_channels * 2 if config.pred_sigma else config.in_channels
        self.depth, self.hidden_size, self.num_heads = config.depth, config.hidden_size, config.num_heads
        self.patch_size, self.input_sq_size = config.patch_size, config.input_sq_size
        self.enable_sequence_parallelism = config.enable_sequence_parallelism

        size = config.hidden_size
        self.pos_embed = PositionEmbedding2D(size)
        self.rope = RotaryEmbedding(dim=size // config.num_heads)
        self.x_embedder = PatchEmbed3D(config.patch_size, config.in_channels, size)
        self.t_embedder = TimestepEmbedder(size)
        self.fps_embedder = SizeEmbedder(size)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(size, 6 * size, bias=True))
        self.y_embedder = CaptionEmbedder(
            in_channels=config.caption_channels,
            hidden_size=size,
            uncond_prob=config.class_dropout_prob,
            token_num=config.model_max_length,
        )
        options = {
            "mlp_ratio": config.mlp_ratio,
            "drop_path": config.drop_path,
            "qk_norm": config.qk_norm,
            "enable_flash_attn": config.enable_flash_attn,
            "enable_layernorm_kernel": config.enable_layernorm_kernel,
            "enable_sequence_parallelism": config.enable_sequence_parallelism,
        }
        self.spatial_blocks = nn.ModuleList(
            STDiT3Block(size, config.num_heads, **options) for _ in range(config.depth)
        )
        rotate = self.rope.rotate_queries_or_keys
        self.temporal_blocks = nn.ModuleList(
            STDiT3Block(size, config.num_heads, temporal=True, rope=rotate, **options)
            for _ in range(config.depth)
        )
        self.final_layer = T2IFinalLayer(size, math.prod(config.patch_size), self.out_channels)
        if config.only_train_temporal:
            self.requires_grad_(False)
            self.temporal_blocks.requires_grad_(True)
        if config.freeze_y_embedder:
            self.y_embedder.requires_grad_(False)

    def get_dynamic_size(self, x):
        """Frames, rows and columns of tokens; what does not divide is padded."""
        return tuple(-(-size // patch) for size, patch in zip(x.shape[2:], self.patch_size, strict=True))

    def encode_text(self, y, mask=None):
        """Text of all samples in one row, [1, sum of lengths, C], and the lengths."""
        y = self.y_embedder(y, self.training).squeeze(1)
        if mask is None:
            return y.reshape(1, -1, self.hidden_size), [y.shape[1]] * y.shape[0]
        if mask.shape[0] != y.shape[0]:
            mask = mask.repeat(y.shape[0] // mask.shape[0], 1)
        mask = mask.squeeze(1).squeeze(1)
        y = y.masked_select(mask.unsqueeze(-1) != 0).view(1, -1, self.hidden_size)
        return y, mask.sum(dim=1).tolist()

    def forward(self, x, timestep, y, mask=None, x_mask=None, fps=None, height=None, width=None, **kwargs):
        dtype = self.x_embedder.proj.weight.dtype
        x, timestep, y = x.to(dtype), timestep.to(dtype), y.to(dtype)
        Tx, Hx, Wx = x.shape[2:]
        T, H, W = self.get_dynamic_size(x)
        S = H * W
        resolution = (height[0].item() * width[0].item()) ** 0.5
        pos_emb = self.pos_embed(x, H, W, scale=resolution / self.input_sq_size, base_size=round(S**0.5))

        fps = self.fps_embedder(fps.unsqueeze(1), x.size(0))
        t = self.t_embedder(timestep, dtype=dtype) + fps
        t_mlp = self.t_block(t)
        t0 = t0_mlp = None
        if x_mask is not None:
            t0 = self.t_embedder(torch.zeros_like(timestep), dtype=dtype) + fps
            t0_mlp = self.t_block(t0)

        if self.config.skip_y_embedder:
            y_lens = mask.long().tolist() if isinstance(mask, Tensor) else mask
        else:
            y, y_lens = self.encode_text(y, mask)

        x, more = self.embed(x, H, W, **kwargs)
        x = (x.unflatten(1, (T, S)) + pos_emb).flatten(1, 2)
        for block in self.blocks_in_turn():
            x = auto_grad_checkpoint(block, x, y, t_mlp, y_lens, x_mask, t0_mlp, T, S, **more)
        x = self.final_layer(x, t, x_mask, t0, T, S)
        return self.unpatchify(x, T, H, W, Tx, Hx, Wx).to(torch.float32)

    def embed(self, x, H, W, **kwargs):
        """Tokens, and what the blocks get besides."""
        return self.x_embedder(x), {}

    def blocks_in_turn(self):
        return [
            block for pair in zip(self.spatial_blocks, self.temporal_blocks, strict=True) for block in pair
        ]

    def unpatchify(self, x, N_t, N_h, N_w, R_t, R_h, R_w):
        """[B, N, C] → [B, C_out, T, H, W], without the padding."""
        T_p, H_p, W_p = self.patch_size
        x = x.view(x.size(0), N_t, N_h, N_w, T_p, H_p, W_p, self.out_channels).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return x.flatten(2, 3).flatten(3, 4).flatten(4, 5)[:, :, :R_t, :R_h, :R_w]
