"""The orders in which normalisations are computed: what is summed in fp32, where a half is rounded.

Two norms with the same formula differ in a quarter of their bf16 outputs if they round in different places. An
`Order` is such a place, as data; calling it runs the operations of the published code, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Order:
    """(x [..., C], weight [C] or None, bias [C] or None, eps) -> [..., C]. In fp64 it computes in fp64 throughout.

    Attributes:
        rounds: where a normalised value is rounded: to the dtype of a half `"weight"` before the product (T5), to
            the `"input"`'s before the product (Llama), or at the `"end"`, after it (Mochi, F.rms_norm). `"native"` is
            F.layer_norm as it is, and `"float"` F.layer_norm on fp32 copies (FP32LayerNorm).
        offset: what is added to the weight: 1 in Gemma.
    """

    name: str
    rounds: Literal["weight", "input", "end", "native", "float"]
    offset: float = 0.0

    @property
    def centres(self) -> bool:
        """Whether the mean is subtracted: a layer norm."""
        return self.rounds in ("native", "float")

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None) -> Tensor:
        return (_layer_norm if self.centres else _rms_norm)(self, x, weight, bias, eps)

    def output_dtype(self, x: torch.dtype, weight: torch.dtype | None) -> torch.dtype:
        """What a norm of this order returns; its RMS forms only."""
        if weight is None or self.rounds == "end":
            return x
        if self.rounds == "weight":
            return weight if weight in HALVES else torch.promote_types(weight, torch.float32)
        return torch.promote_types(x, weight)


def resolve_eps(eps: float | None, dtype: torch.dtype) -> float:
    """torch.nn.RMSNorm(eps=None) takes that of the dtype it computes in: 1.19e-7 for fp32 and halves."""
    if eps is not None:
        return eps
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def _rms_norm(
    order: Order, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None
) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + resolve_eps(eps, x.dtype))
    if weight is None:
        out = out.to(x.dtype)
    elif order.rounds == "end":
        out = (out * (order.offset + weight.to(out.dtype) if order.offset else weight)).to(x.dtype)
    elif order.rounds == "input":
        out = weight * out.to(x.dtype)
    else:
        out = weight * (out.to(weight.dtype) if weight.dtype in HALVES else out)
    return out if bias is None else out + bias


def _layer_norm(
    order: Order, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None
) -> Tensor:
    assert eps is not None
    if order.rounds == "native":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    weight, bias = (None if tensor is None else tensor.float() for tensor in (weight, bias))
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


ORDERS = (
    Order("t5", "weight"),
    Order("llama", "input"),
    Order("product", "end"),
    Order("gemma", "end", offset=1.0),
    Order("layer", "native"),
    Order("layer, fp32", "float"),
)
"""Named after who published it. Without a weight the first three give the same numbers, and the first counts."""
