"""Norms as they are published, with the order and eps that a probe must find."""

import torch
from torch import nn


def published():
    """(name, module, order, eps, has weight, has bias)."""
    from diffusers.models.normalization import FP32LayerNorm, MochiRMSNorm, RMSNorm
    from diffusers.models.transformers.transformer_cosmos3 import Cosmos3NemotronRMSNorm
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm
    from transformers.models.umt5.modeling_umt5 import UMT5LayerNorm

    from shardformer.modeling.t5 import T5LayerNorm as PlainT5LayerNorm

    return [
        ("T5", T5LayerNorm(24), "t5", 1e-6, True, False),
        ("UMT5", UMT5LayerNorm(24, 1e-5), "t5", 1e-5, True, False),
        ("plain T5", PlainT5LayerNorm(24), "t5", 1e-6, True, False),
        ("diffusers", RMSNorm(24, 1e-5), "t5", 1e-5, True, False),
        ("diffusers, no weight", RMSNorm(24, 1e-6, False), "t5", 1e-6, False, False),
        ("diffusers, no size", RMSNorm(0, 1e-5, False), "t5", 1e-5, False, False),
        ("diffusers, bias", RMSNorm(24, 1e-5, bias=True), "t5", 1e-5, True, True),
        ("Mochi", MochiRMSNorm(24, 1e-5), "product", 1e-5, True, False),
        ("Cosmos3", Cosmos3NemotronRMSNorm(24, 1e-5), "product", 1e-5, True, False),
        ("Llama", LlamaRMSNorm(24), "llama", 1e-6, True, False),
        ("Qwen2", Qwen2RMSNorm(24, 1e-5), "llama", 1e-5, True, False),
        ("Gemma2", Gemma2RMSNorm(24), "gemma", 1e-6, True, False),
        ("Gemma3", Gemma3RMSNorm(24), "gemma", 1e-6, True, False),
        ("torch RMS", nn.RMSNorm(24, eps=1e-6), "product", 1e-6, True, False),
        ("torch RMS, eps=None", nn.RMSNorm(24), "product", None, True, False),
        ("torch RMS, no weight", nn.RMSNorm(24, 1e-6, False), "t5", 1e-6, False, False),
        ("torch Layer", nn.LayerNorm(24), "layer", 1e-5, True, True),
        ("torch Layer, no bias", nn.LayerNorm(24, 1e-6, bias=False), "layer", 1e-6, True, False),
        ("torch Layer, no weight", nn.LayerNorm(24, 1e-6, False), "layer", 1e-6, False, False),
        ("FP32Layer", FP32LayerNorm(24), "layer, fp32", 1e-5, True, True),
        ("FP32Layer, no weight", FP32LayerNorm(24, 1e-6, False), "layer, fp32", 1e-6, False, False),
    ]


class Lookalike(nn.Module):
    """A T5 norm by every name; `compute(x, weight)` is what it does."""

    def __init__(self, compute, size=24, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps
        self.compute = compute

    def forward(self, x):
        return self.compute(x, self.weight)


Lookalike.__name__ = "T5LayerNorm"


def t5(x, weight, eps=1e-6):
    """Written otherwise than the published one: a division, a sum instead of a mean."""
    wide = x.float()
    out = x / torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.size(-1) + eps)
    if weight.dtype in (torch.bfloat16, torch.float16):
        out = out.to(weight.dtype)
    return out * weight
