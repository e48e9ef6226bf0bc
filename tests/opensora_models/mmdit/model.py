"""`MMDiTModel` of Open-Sora v2 (opensora/models/mmdit/model.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opensora_accel.checkpoint import auto_grad_checkpoint
from tests.opensora_models.mmdit.layers import (
    DoubleStreamBlock,
    EmbedND,
    LastLayer,
    LigerEmbedND,
    MLPEmbedder,
    SingleStreamBlock,
    timestep_embedding,
)


@dataclass
class MMDiTConfig:
    from_pretrained: str | None
    cache_dir: str | None
    in_channels: int
    vec_in_dim: int
    context_in_dim: int
    hidden_size: int
    mlp_ratio: float
    num_heads: int
    depth: int
    depth_single_blocks: int
    axes_dim: list[int]
    theta: int
    qkv_bias: bool
    guidance_embed: bool
    cond_embed: bool = False
    fused_qkv: bool = True
    grad_ckpt_settings: tuple[int, int] | None = None
    use_liger_rope: bool = False
    patch_size: int = 2


class MMDiTModel(nn.Module):
    config_class = MMDiTConfig

    def __init__(self, config: MMDiTConfig):
        super().__init__()
        self.config = config
        self.in_channels = self.out_channels = config.in_channels
        self.patch_size = config.patch_size
        self.hidden_size, self.num_heads = config.hidden_size, config.num_heads
        size, pe_dim = config.hidden_size, config.hidden_size // config.num_heads
        assert size % config.num_heads == 0 and sum(config.axes_dim) == pe_dim

        embedder = LigerEmbedND if config.use_liger_rope else EmbedND
        self.pe_embedder = embedder(dim=pe_dim, theta=config.theta, axes_dim=config.axes_dim)
        self.img_in = nn.Linear(self.in_channels, size, bias=True)
        self.time_in = MLPEmbedder(in_dim=256, hidden_dim=size)
        self.vector_in = MLPEmbedder(config.vec_in_dim, size)
        self.guidance_in = MLPEmbedder(256, size) if config.guidance_embed else nn.Identity()
        cond_channels = self.in_channels + self.patch_size**2
        self.cond_in = nn.Linear(cond_channels, size, bias=True) if config.cond_embed else nn.Identity()
        self.txt_in = nn.Linear(config.context_in_dim, size)

        heads, ratio, fused = config.num_heads, config.mlp_ratio, config.fused_qkv
        self.double_blocks = nn.ModuleList(
            DoubleStreamBlock(size, heads, mlp_ratio=ratio, qkv_bias=config.qkv_bias, fused_qkv=fused)
            for _ in range(config.depth)
        )
        self.single_blocks = nn.ModuleList(
            SingleStreamBlock(size, heads, mlp_ratio=ratio, fused_qkv=fused)
            for _ in range(config.depth_single_blocks)
        )
        self.final_layer = LastLayer(size, 1, self.out_channels)

        # On the instance, as there: code that patches the class's forward does not reach it.
        self.forward = self.forward_selective_ckpt if config.grad_ckpt_settings else self.forward_ckpt
        self._input_requires_grad = False

    def prepare_block_inputs(
        self,
        img: Tensor,
        img_ids: Tensor,
        txt: Tensor,
        txt_ids: Tensor,
        timesteps: Tensor,
        y_vec: Tensor,
        cond: Tensor | None = None,
        guidance: Tensor | None = None,
    ):
        """Embedded image and text tokens, the modulation vector, and positions of text, then image."""
        if img.ndim != 3 or txt.ndim != 3:
            raise ValueError("Input img and txt tensors must have 3 dimensions.")
        img = self.img_in(img)
        if self.config.cond_embed:
            if cond is None:
                raise ValueError("Didn't get conditional input for conditional model.")
            img = img + self.cond_in(cond)
        vec = self.time_in(timestep_embedding(timesteps, 256))
        if self.config.guidance_embed:
            if guidance is None:
                raise ValueError("Didn't get guidance strength for guidance distilled model.")
            vec = vec + self.guidance_in(timestep_embedding(guidance, 256))
        vec = vec + self.vector_in(y_vec)
        txt = self.txt_in(txt)
        pe = self.pe_embedder(torch.cat((txt_ids, img_ids), dim=1))
        if self._input_requires_grad:
            img.requires_grad_()
            txt.requires_grad_()
        return img, txt, vec, pe

    def enable_input_require_grads(self):
        self._input_requires_grad = True

    def forward_ckpt(
        self,
        img: Tensor,
        img_ids: Tensor,
        txt: Tensor,
        txt_ids: Tensor,
        timesteps: Tensor,
        y_vec: Tensor,
        cond: Tensor | None = None,
        guidance: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        """Every block through `auto_grad_checkpoint`."""
        inputs = self.prepare_block_inputs(img, img_ids, txt, txt_ids, timesteps, y_vec, cond, guidance)
        return self._run_blocks(*inputs, len(self.double_blocks), len(self.single_blocks))

    def forward_selective_ckpt(
        self,
        img: Tensor,
        img_ids: Tensor,
        txt: Tensor,
        txt_ids: Tensor,
        timesteps: Tensor,
        y_vec: Tensor,
        cond: Tensor | None = None,
        guidance: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        """The first `grad_ckpt_settings` blocks of each kind through `auto_grad_checkpoint`."""
        inputs = self.prepare_block_inputs(img, img_ids, txt, txt_ids, timesteps, y_vec, cond, guidance)
        return self._run_blocks(*inputs, *self.config.grad_ckpt_settings)

    def _run_blocks(self, img, txt, vec, pe, num_double: int, num_single: int) -> Tensor:
        for i, block in enumerate(self.double_blocks):
            if i < num_double:
                img, txt = auto_grad_checkpoint(block, img, txt, vec, pe)
            else:
                img, txt = block(img, txt, vec, pe)
        img = torch.cat((txt, img), 1)
        for i, block in enumerate(self.single_blocks):
            img = auto_grad_checkpoint(block, img, vec, pe) if i < num_single else block(img, vec, pe)
        return self.final_layer(img[:, txt.shape[1] :, ...], vec)
