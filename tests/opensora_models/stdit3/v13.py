"""`STDiT3` of Open-Sora v1.3, which has v1.2's class name and more arguments: frames that are given by their index.

Tokens of the frames in `mask_index` look at another text, `y_null`; `cond` and `cond_mask` are embedded besides the
clip. `skip_temporal` leaves the temporal blocks out. Attention in windows (`kernel_size`) is not here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.opensora_models.stdit3 import model as v12
from tests.opensora_models.stdit3.blocks import PatchEmbed3D


class STDiT3Block(v12.STDiT3Block):
    def forward(
        self,
        x,
        y,
        t,
        mask=None,
        x_mask=None,
        t0=None,
        T=None,
        S=None,
        H=None,
        W=None,
        scale=None,
        mask_index=None,
        y_null=None,
    ):
        def look_at_text(x):
            if not mask_index:
                return self.cross_attn(x, y, mask)
            frames = x.unflatten(1, (T, S))
            parts = []
            for frame in range(T):
                text = y_null if frame in mask_index else y
                parts.append(self.cross_attn(frames[:, frame], text, mask))
            return torch.cat(parts, 1)

        return self._run(x, t, x_mask, t0, T, S, look_at_text)


@dataclass
class STDiT3Config(v12.STDiT3Config):
    skip_temporal: bool = False
    kernel_size: tuple[int, ...] | None = None


class STDiT3(v12.STDiT3):
    config_class = STDiT3Config

    def __init__(self, config: STDiT3Config):
        super().__init__(config)
        for blocks in (self.spatial_blocks, self.temporal_blocks):
            for block in blocks:
                block.__class__ = STDiT3Block
        if config.skip_temporal:
            del self.temporal_blocks
        embedder = (config.patch_size, config.in_channels, config.hidden_size)
        self.x_embedder_cond = PatchEmbed3D(*embedder)
        self.x_embedder_cond_mask = PatchEmbed3D(*embedder)

    def forward(
        self,
        x,
        timestep,
        y,
        mask=None,
        x_mask=None,
        fps=None,
        height=None,
        width=None,
        cond=None,
        cond_mask=None,
        mask_index=None,
        y_null=None,
        text_uncond_prob=None,
        **kwargs,
    ):
        given = {"cond": cond, "cond_mask": cond_mask, "mask_index": mask_index}
        if y_null is not None:
            given["y_null"], _ = self.encode_text(y_null, mask)
        return super().forward(x, timestep, y, mask, x_mask, fps, height, width, **given)

    def embed(self, x, H, W, cond=None, cond_mask=None, mask_index=None, y_null=None):
        x = self.x_embedder(x)
        if mask_index is not None:
            x = x + self.x_embedder_cond(cond) + self.x_embedder_cond_mask(cond_mask)
        return x, {"H": H, "W": W, "scale": 1.0, "mask_index": mask_index, "y_null": y_null}

    def blocks_in_turn(self):
        return list(self.spatial_blocks) if self.config.skip_temporal else super().blocks_in_turn()
