"""Norms on a CPU, a cache-sized tile of rows at a time: the values of the plain order, in a fraction of the time.

Written as tensor operations, a norm streams its input through memory once for every operation, and autograd keeps
two or three copies of it. Here all operations on a tile run while it is in the L2 cache, and what is kept is the
input, which its producer holds anyway. Every element sees the same operations in the same order, so the output is
the plain one's bit for bit. Gradients are computed in fp32 and rounded once.

Shapes: R rows (all dims but the last), C features, B batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardformer.modeling.norms.order import Order, resolve_eps

TILE_BYTES = 1 << 20
"""In fp32, per thread. Of 0.5, 1, 2 and 4 MiB no other is faster by more than its noise (EPYC, 1 MiB L2 per core,
2 cores, torch 2.13, November 2026)."""
LEAST_ELEMENTS = 1 << 18
_LEAST_ELEMENTS_WITHOUT_BACKWARD = 1 << 21
"""Below, everything stays in a cache anyway and the plain order has fewer calls. A backward gains earlier."""


def rows_of(x: Tensor) -> Tensor | None:
    """x as [R, C] without a copy, its rows in the order of memory; None where its strides do not allow it."""
    try:
        return x.permute(_memory_order(x)).view(-1, x.size(-1))
    except RuntimeError:
        return None


def worth_tiling(x: Tensor) -> bool:
    """Whether tiles are no slower than the plain order on this input."""
    trains = torch.is_grad_enabled() and x.requires_grad
    least = LEAST_ELEMENTS if trains else _LEAST_ELEMENTS_WITHOUT_BACKWARD
    return x.numel() >= least and x.stride(-1) == 1 and rows_of(x) is not None


def _memory_order(x: Tensor) -> list[int]:
    # [B, H, S, D] that was [B, S, H, D] is common: queries and keys are normalised per head, after a transpose.
    return [*sorted(range(x.dim() - 1), key=x.stride, reverse=True), x.dim() - 1]


def as_input(rows: Tensor, x: Tensor) -> Tensor:
    """[R, C] in x's shape; it has x's order in memory, as the result of an elementwise operation would."""
    order = _memory_order(x)
    inverse = sorted(range(x.dim()), key=order.__getitem__)
    return rows.view([x.size(dim) for dim in order]).permute(inverse)


def rows_per_tile(num_features: int) -> int:
    """How many rows fit in a tile: at least one."""
    return max(1, TILE_BYTES * torch.get_num_threads() // (4 * num_features))


class TiledRMSNorm(torch.autograd.Function):
    """An RMS order on fp32 or half x, as rows [R, C]. Keeps x, the weight and R fp32 numbers for backward.

    `tiled_rms_norm` gives them x's shape: a view that is made in here could not be written to in place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, order: Order, eps: float | None) -> Tensor:
        rows = rows_of(x)
        assert rows is not None
        dtype = order.output_dtype(x.dtype, None if weight is None else weight.dtype)
        # Whatever the default dtype and device are set to.
        out = torch.empty(rows.shape, dtype=dtype, device=x.device)
        inverse = torch.empty(len(rows), 1, dtype=torch.float32, device=x.device)
        step = rows_per_tile(rows.size(1))
        wide = torch.empty(min(step, len(rows)), rows.size(1), dtype=torch.float32, device=x.device)
        scale = _end_scale(order, weight)
        for source, target, inv in zip(rows.split(step), out.split(step), inverse.split(step), strict=True):
            tile = wide[: len(source)]
            values = source if source.dtype == torch.float32 else source.float()
            torch.mean(torch.mul(values, values, out=tile), -1, keepdim=True, out=inv)
            inv.add_(resolve_eps(eps, x.dtype)).rsqrt_()
            torch.mul(values, inv, out=tile)
            _write(target, tile, weight, scale, order, x.dtype)
        ctx.save_for_backward(x, weight, inverse)
        ctx.order, ctx.eps = order, eps
        return out

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: through operations that can be differentiated again
            return *_differentiable(ctx, as_input(incoming.contiguous(), x), x, weight), None, None
        rows = rows_of(x)
        assert rows is not None
        dx = torch.empty(rows.shape, dtype=x.dtype, device=x.device) if ctx.needs_input_grad[0] else None
        step = rows_per_tile(rows.size(1))
        scale = None if weight is None else ctx.order.offset + weight.float()
        sums = []
        shape = min(step, len(rows)), rows.size(1)
        buffers = [torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(3)]
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            values, g, product = (buffer[: len(rows[part])] for buffer in buffers)
            values.copy_(rows[part])
            g.copy_(incoming[part])
            inv = inverse[part]
            if ctx.needs_input_grad[1]:
                torch.mul(values, inv, out=product)
                sums.append(product.mul_(g).sum(0))
            if dx is not None:
                if scale is not None:
                    g.mul_(scale)
                along = torch.mul(g, values, out=product).mean(-1, keepdim=True)
                dx[part] = g.mul_(inv).addcmul_(values, along.mul_(inv.pow(3)), value=-1)
        dweight = torch.stack(sums).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return None if dx is None else as_input(dx, x), dweight, None, None


def tiled_rms_norm(x: Tensor, weight: Tensor | None, order: Order, eps: float | None) -> Tensor:
    """The order's norm of x [..., C]."""
    return as_input(TiledRMSNorm.apply(x, weight, order, eps), x)


def _end_scale(order: Order, weight: Tensor | None) -> Tensor | None:
    """What a tile is multiplied by before it is rounded, in the orders that round at the end."""
    if weight is None or order.rounds != "end":
        return None
    return order.offset + weight.float() if order.offset else weight.float()


def _write(
    target: Tensor,
    tile: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    order: Order,
    dtype: torch.dtype,
) -> None:
    """The order's last steps: round, multiply, or multiply, round."""
    if scale is not None:
        target.copy_(tile.mul_(scale))
    elif weight is None:
        target.copy_(tile)
    elif target.dtype == torch.float32 and (order.rounds == "weight" or dtype == torch.float32):
        torch.mul(tile, weight, out=target)
    elif order.rounds == "weight" or dtype == target.dtype:
        target.copy_(tile).mul_(weight)
    else:
        target.copy_(tile.to(dtype) * weight)


def _differentiable(
    ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    out = ctx.order(x, weight, None, ctx.eps)
    pairs = zip((x, weight), ctx.needs_input_grad[:2], strict=True)
    wanted = [tensor for tensor, needed in pairs if needed and tensor is not None]
    grads: Iterator[Tensor] = iter(torch.autograd.grad(out, wanted, gradient, create_graph=True))
    dx, dweight = (next(grads) if needed else None for needed in ctx.needs_input_grad[:2])
    return dx, dweight
