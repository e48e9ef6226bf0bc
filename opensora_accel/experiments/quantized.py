"""Frozen linear layers whose weight takes 8 or 4 bits an element, under adapters that are trained (QLoRA).

A weight [out, in] is kept as codes and scales, row by row, so that a rank of sharded parameters reads, quantizes and
holds its rows alone:

    int8    codes [out, in]        one scale a row, its largest |value| / 127; a code is the nearest of −127 … 127
    nf4     codes [out, in/2]      one scale for every 64 elements of a row, the largest |value| there; a code is the
                                   nearest of 16 values, of which a normal distribution has as many to each

    a row                  1.0    −0.3    0.06    0.0        its scale is 1.0
    nearest of nf4         1.0    −0.284  0.080   0.0        codes 15, 4, 8, 7: two bytes

    of 14 billion weights    fp32 56 GB    bf16 28 GB    int8 14 GB    nf4 7.4 GB (7.9 with scales in fp32)

A scale is rounded to bf16 at once, and so does not change where the parameters of a model are cast to it. A product
makes the weight when it needs it, in forward and again in backward, and lets it go: autograd keeps the codes, which
FSDP2 gathers as they are.

The values of nf4 and the 64 are those of QLoRA (Dettmers et al. 2023, arXiv:2305.14314, appendix E), which also
quantizes its scales; bitsandbytes has them as constants.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opensora_accel.deferred import resume_recording
from opensora_accel.fsdp import kept_in_fp32
from opensora_accel.weights import Stored, fill, find_stored
from shardformer import blocks_of

Kind = Literal["int8", "nf4"]
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Elements of a row that share a scale.
_BLOCK = 64


def quantize(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight [out, in].

    Returns:
        codes: int8 [out, in], or uint8 [out, n·64/2] of two elements each, the first in the high bits, where rows are
            filled up with zeros to n blocks.
        scales: of the weight's dtype, [out, 1] or [out, n].
    """
    blocks, scales = _in_blocks(weight, kind)
    # Where all is zero, so is every code's value times the scale.
    ratios = blocks / (scales + (scales == 0))[..., None]
    if kind == "int8":
        return ratios.round().clamp(-127, 127).to(torch.int8).flatten(1), scales
    # A weight that waits for its values is on no device yet; these have theirs.
    values = torch.tensor(_NF4, dtype=weight.dtype, device=None if weight.is_meta else weight.device)
    nearest = torch.bucketize(ratios, (values[1:] + values[:-1]) / 2, out_int32=True).view(
        weight.size(0), -1, 2
    )
    return (nearest[..., 0] * 16 + nearest[..., 1]).to(torch.uint8), scales


def _in_blocks(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """A weight [out, in] as the blocks [out, n, 64] or [out, 1, in] that share a scale, and those scales [out, n]."""
    if kind == "int8":
        blocks, most = weight[:, None], 127
    else:
        blocks, most = F.pad(weight, (0, -weight.size(1) % _BLOCK)).view(weight.size(0), -1, _BLOCK), 1
    return blocks, (blocks.abs().amax(2) / most).to(torch.bfloat16).to(weight.dtype)


def _pairs() -> Tensor:
    """The two values [256, 2] of each byte of nf4."""
    values = torch.tensor(_NF4)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], 1)


class QuantizedLinear(nn.Linear):
    """A linear layer that is not trained, of a weight in codes; `weight` makes it each time."""

    def __init__(self, linear: nn.Linear, kind: Kind):
        # Not nn.Linear's own, which would make a weight.
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        codes, scales = quantize(linear.weight.detach(), kind)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.register_parameter("bias", linear.bias)
        if kind == "nf4":
            self.register_buffer("pairs", _pairs(), persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out, in], of the scales' dtype."""
        return self.values(self.codes, self.scales)

    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The weight that these codes and scales stand for."""
        if self.kind == "int8":
            return codes.to(scales.dtype) * scales
        pairs: Any = self.pairs
        made = F.embedding(codes.int(), pairs.to(scales.dtype)).view(*scales.shape, _BLOCK)
        return (made * scales[..., None]).flatten(1)[:, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        product: Tensor = _Product.apply(x, self.codes, self.scales, self.bias, self)
        return product

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.kind}"


class _Product(torch.autograd.Function):
    """x·Wᵀ + bias, of which autograd keeps W's codes alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, layer: QuantizedLinear
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.layer = layer
        return F.linear(x, layer.values(codes, scales), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.values(*ctx.saved_tensors), None, None, None, None


@dataclass(frozen=True)
class _Part(Stored):
    """Codes (0) or scales (1) of a weight in a file."""

    kind: Kind
    part: int

    def read(self, dtype: torch.dtype, region: tuple[slice, ...] = ()) -> Tensor:
        rows, columns = region or (slice(None), slice(None))
        weight = super().read(torch.float32, (rows, slice(None)))
        return self._made_of(weight)[:, columns].to(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._made_of(torch.empty(super().shape, device="meta")).shape)

    def _made_of(self, weight: Tensor) -> Tensor:
        # Scales need no codes, which take most of the time.
        return _in_blocks(weight, self.kind)[1] if self.part else quantize(weight, self.kind)[0]


def quantize_frozen(model: nn.Module, kind: Kind, folder: str = "") -> None:
    """Keeps the frozen linear layers of the blocks of a model, adapted ones among them, as codes and scales.

    What the model's class keeps in fp32, or leaves out of layerwise casting (diffusers' lists), stays as it is.

    Args:
        folder: where the weights of a model lie that waits for its values. Each rank then reads its rows alone.

    Raises:
        ValueError: it has no linear layers in blocks.
    """
    within = {id(module) for block in blocks_of(model) for module in block.modules()}
    in_fp32, patterns = kept_in_fp32(model), getattr(model, "_skip_layerwise_casting_patterns", None) or ()
    chosen = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and id(module) in within and not module.weight.requires_grad
        and id(module.weight) not in in_fp32 and not any(re.search(each, name) for each in patterns)
    ]  # fmt: skip
    if not chosen:
        raise ValueError(
            f"lora.base={kind!r} keeps frozen linear layers of blocks so, and {type(model).__name__} has none; leave "
            "it out"
        )
    with resume_recording(model):
        for name in chosen:
            path, _, last = name.rpartition(".")
            parent = model.get_submodule(path)
            parent._modules[last] = QuantizedLinear(model.get_submodule(name), kind)  # type: ignore[arg-type]
    if folder:
        stored = find_stored(Path(folder))
        fill(
            model,
            {
                f"{name}.{part}": _Part(weight.path, weight.name, kind, number)
                for name in chosen
                # An adapted layer is within PEFT's.
                for weight in (stored[f"{name.removesuffix('.base_layer')}.weight"],)
                for number, part in enumerate(("codes", "scales"))
            },
        )
