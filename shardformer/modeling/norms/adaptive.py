"""Adaptive layer norms: `norm(x) * (1 + scale) + shift`, with scale and shift from a linear layer.

AdaLayerNormZero, ...Single, ...Continuous and CogVideoXLayerNormZero of diffusers, and whatever computes the same.
The children, their names and parameters stay as they are: only the forward is led elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.wrapping import Forward, wrap_forward
from shardformer.modeling.norms.compare import largest_difference
from shardformer.modeling.norms.kernels import may_replace
from shardformer.modeling.norms.layer_tiles import Rounding, TiledLayerNorm, worth_tiling_layer_norm
from shardformer.modeling.norms.modulation import KnownChunks, Modulation, find_modulation, twin_of
from shardformer.modeling.norms.probe import HOOKS
from shardformer.modeling.norms.report import Row
from shardformer.modeling.norms.saved import run_and_count

_ROWS = 23


def swap_adaptive(module: nn.Module, path: str) -> tuple[Row, Callable[[], None]] | None:
    """The report's row, and the function that undoes the swap; None for what is no adaptive layer norm."""
    modulation = find_modulation(module)
    if modulation is None:
        return None
    row = Row(path, type(module).__name__, "adaptive layer", modulation.finding.eps)
    weight = getattr(module, modulation.linear).weight
    if weight.device.type not in ("cpu", "meta"):
        return replace(row, reason=f"nothing was measured on {weight.device.type}"), _nothing
    if weight.dtype != torch.float32:
        return replace(row, reason=f"in {weight.dtype} one pass was measured to be slower"), _nothing
    difference, before, after = _compare(module, modulation)
    if difference > 4 * torch.finfo(torch.float32).eps:
        return replace(row, reason=f"its values differ by {difference:.1e}"), _nothing
    undo = wrap_forward(module, lambda original: _Forward(module, modulation, original))
    return replace(row, to="tiles", difference=difference, saved_before=before, saved_after=after), undo


def _nothing() -> None:
    """Undoes nothing."""


class _Forward:
    """Stands for the module's forward; calls the original wherever it would not do the same, faster."""

    def __init__(self, module: nn.Module, modulation: Modulation, original: Forward):
        self.module = module
        self.modulation = modulation
        self.original = original
        self.signature = inspect.signature(original)
        self.__name__ = "forward"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get(self.modulation.streams[0][0])
        if (
            torch.compiler.is_compiling()
            or not isinstance(first, Tensor)
            or not worth_tiling_layer_norm(first)
        ):
            return self.original(*args, **kwargs)
        named = {k: v for k, v in self.signature.bind(*args, **kwargs).arguments.items() if v is not None}
        if not self._is_faster(named):
            return self.original(*args, **kwargs)
        return modulate(self.module, self.modulation, named)

    def _is_faster(self, named: dict[str, Any]) -> bool:
        modulation = self.modulation
        names = [*(name for name, _, _ in modulation.streams), modulation.condition]
        if sorted(named) != sorted(names) or not all(isinstance(tensor, Tensor) for tensor in named.values()):
            return False
        *streams, condition = (named[name] for name in names)
        linear, norm = (getattr(self.module, name) for name in (modulation.linear, modulation.norm))
        tensors = [*streams, condition, linear.weight, *norm.parameters()]
        return (
            condition.dim() == 2
            and all(x.dim() == 3 and condition.size(0) in (1, x.size(0)) for x in streams)
            and all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
            and all(may_replace(tensor) for tensor in (*streams, condition))
            and not any(getattr(norm, hooks, None) for hooks in HOOKS)
            and "forward" not in vars(norm)
        )


def modulate(module: nn.Module, modulation: Modulation, named: dict[str, Tensor]) -> Any:
    """What the module returns for these arguments, its norms and products in one pass each."""
    hidden = getattr(module, modulation.activation)(named[modulation.condition])
    chunks = getattr(module, modulation.linear)(hidden).chunk(modulation.num_chunks, dim=1)
    norm, finding = getattr(module, modulation.norm), modulation.finding
    weight, bias = (None if name is None else getattr(norm, name) for name in (finding.weight, finding.bias))
    rounding: Rounding = "steps" if weight is None and bias is None else "once"
    outs: list[Tensor] = []
    for name, scale, shift in modulation.streams:
        factor, term = 1 + chunks[scale], chunks[shift]
        if bias is not None:
            term = factor * bias + term
        if weight is not None:
            factor = factor * weight
        outs.append(TiledLayerNorm.apply(named[name], factor, term, finding.eps, rounding))
    outs += [chunks[index][:, None] if spread else chunks[index] for index, spread in modulation.rest]
    return tuple(outs) if modulation.is_tuple else outs[0]


@torch.inference_mode(False)
@torch.enable_grad()
def _compare(module: nn.Module, modulation: Modulation) -> tuple[float, int, int]:
    """The largest difference of the outputs, and the bytes kept for backward per token, before and after."""
    generator = torch.Generator().manual_seed(5)
    features = modulation.finding.num_features

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    known = KnownChunks(draw(1, modulation.num_chunks * features))
    twin = twin_of(module, {modulation.linear: known}, modulation.norm)
    x = draw(1, _ROWS, features)
    named = {name: x for name, _, _ in modulation.streams[:1]}
    named |= {name: draw(1, 1, features) for name, _, _ in modulation.streams[1:]}
    named[modulation.condition] = draw(1, getattr(module, modulation.linear).in_features)

    def first(outs: Any) -> Tensor:
        return outs[0] if isinstance(outs, tuple) else outs

    inputs = [*named.values(), known.out]
    out, before = run_and_count(lambda: first(twin(**named)), inputs, _ROWS)
    mine, after = run_and_count(lambda: first(modulate(twin, modulation, named)), inputs, _ROWS)
    return largest_difference(mine.detach(), out.detach()), before, after
