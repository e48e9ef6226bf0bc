"""How fast kernels of each class run on this device, by their shapes: what `calibrate` puts into a hardware file.

On a CPU, seconds are those of the process and not of the clock on the wall, so that another program beside it does not
count. Calls take turns with several inputs, and a call's output lives for a few more calls: as in a step, nothing is in
the nearest cache that was not just made, and memory is new.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# A product or an attention of more operations than this is not measured: it takes too long on a CPU.
_MOST_FLOPS_ON_CPU, _MOST_FLOPS_ON_GPU = 4e9, 1e13
# Inputs that take turns, and outputs that are kept.
_KEPT = 4

Unary = Callable[[Tensor], Any]


class Meter:
    """Seconds of a function on a device."""

    def __init__(self, device: torch.device, dtype: str = ""):
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.most_flops = _MOST_FLOPS_ON_GPU if self.is_gpu else _MOST_FLOPS_ON_CPU
        self.dtypes = ("bfloat16", "float32") if self.is_gpu else ("float32", "bfloat16")
        self.dtype: torch.dtype = getattr(torch, dtype or self.dtypes[0])

    def seconds(self, make: Callable[[], Callable[[], Any]], least_s: float = 0.01, rounds: int = 3) -> float:
        """The least of some rounds, each of as many calls as `least_s` needs, of functions that `make` gives."""
        functions = [make() for _ in range(_KEPT)]
        for function in functions:
            function()
        once = max(1e-7, self._round_s(functions, 1))
        calls = max(_KEPT, min(1000, math.ceil(least_s / once)))
        return min(self._round_s(functions, calls) / calls for _ in range(rounds))

    def load(self, seconds: float) -> None:
        """Keeps the device busy with products, so that its clock is that of a long run and not of the first second.

        A GPU that has come to its power limit lowers its clock.
        """
        x, end = (
            self.tensor(4096 if self.is_gpu else 256, 4096 if self.is_gpu else 256),
            time.monotonic() + seconds,
        )
        while time.monotonic() < end:
            for _ in range(20):
                x @ x
            if self.is_gpu:
                torch.cuda.synchronize()

    def _round_s(self, functions: Sequence[Callable[[], Any]], calls: int) -> float:
        kept: list[Any] = [None] * _KEPT
        if self.is_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for number in range(calls):
                kept[number % _KEPT] = functions[number % _KEPT]()
            end.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(end)) / 1e3
        before = time.thread_time()
        for number in range(calls):
            kept[number % _KEPT] = functions[number % _KEPT]()
        return time.thread_time() - before

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)


def products(meter: Meter) -> dict[str, Any]:
    """Peaks by dtype, and (m, n, k) → operations a second of products with and without a bias."""
    sides = (32, 128, 512, 2048) if not meter.is_gpu else (128, 1024, 4096, 16384)
    shapes = [
        (m, n, k) for m, n, k in itertools.product(sides, repeat=3) if 2 * m * n * k <= meter.most_flops
    ]
    rates: dict[str, dict[tuple[int, ...], float]] = {"gemm": {}, "gemm aten.addmm": {}}
    for m, n, k in shapes:

        def product(m: int = m, n: int = n, k: int = k) -> Callable[[], Any]:
            # As a linear layer has it, with its weight [n, k].
            a, b = meter.tensor(m, k), meter.tensor(n, k)
            return lambda: a @ b.T

        def with_bias(m: int = m, n: int = n, k: int = k) -> Callable[[], Any]:
            a, b, bias = meter.tensor(m, k), meter.tensor(n, k), meter.tensor(n)
            return lambda: functional.linear(a, b, bias)

        rates["gemm"][m, n, k] = 2.0 * m * n * k / meter.seconds(product)
        rates["gemm aten.addmm"][m, n, k] = 2.0 * m * n * k / meter.seconds(with_bias)
    fastest = {meter.dtypes[0]: max(max(each.values()) for each in rates.values())}
    for name in meter.dtypes[1:]:
        side, dtype = sides[2], getattr(torch, name)

        def square(side: int = side, dtype: torch.dtype = dtype) -> Callable[[], Any]:
            a, b = meter.tensor(side, side, dtype=dtype), meter.tensor(side, side, dtype=dtype)
            return lambda: a @ b.T

        fastest[name] = 2.0 * side**3 / meter.seconds(square)
    return {"peak_flops": fastest, "rates": rates}


def attention(meter: Meter) -> dict[str, dict[tuple[int, ...], float]]:
    """(heads, queries, keys, head_dim) → operations a second, forward and backward."""
    lengths = (64, 256, 1024, 2048) if not meter.is_gpu else (512, 2048, 8192, 32768)
    rates: dict[str, dict[tuple[int, ...], float]] = {"attention": {}, "attention backward": {}}
    for sizes in itertools.product((1, 8), lengths, lengths, (16, 32, 64, 128)):
        heads, queries, keys, head_dim = sizes
        flops = 4.0 * heads * queries * keys * head_dim
        if flops > meter.most_flops / 4 or (head_dim < 64 and meter.is_gpu):
            continue

        def inputs(sizes: tuple[int, ...] = sizes) -> list[Tensor]:
            heads, queries, keys, head_dim = sizes
            return [meter.tensor(1, heads, length, head_dim) for length in (queries, keys, keys)]

        def forward() -> Callable[[], Any]:
            q, k, v = inputs()
            return lambda: functional.scaled_dot_product_attention(q, k, v)

        def backward() -> Callable[[], Any]:
            q, k, v = (each.requires_grad_() for each in inputs())
            out = functional.scaled_dot_product_attention(q, k, v)
            grad = torch.randn_like(out)
            return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

        rates["attention"][sizes] = flops / meter.seconds(forward)
        rates["attention backward"][sizes] = 2.5 * flops / meter.seconds(backward)
    return rates


def _operators() -> dict[str, tuple[Unary, float]]:
    """Operators by their names in a trace, and how many times the bytes of their first input they move."""
    aten = torch.ops.aten

    def norm(x: Tensor) -> Any:
        return aten.native_layer_norm(x, [x.shape[-1]], None, None, 1e-6)

    def norm_backward(x: Tensor) -> Any:
        mean = x[..., :1]
        return aten.native_layer_norm_backward(
            x, x, [x.shape[-1]], mean, mean, None, None, [True, False, False]
        )

    return {
        "aten.add": (lambda x: x + x, 3),
        "aten.mul": (lambda x: x * x, 3),
        "aten.add_": (lambda x: x.add_(x), 3),
        "aten.mul_": (lambda x: x.mul_(0.999), 2),
        "aten.copy_": (lambda x: torch.empty_like(x).copy_(x), 2),
        "aten.clone": (lambda x: x.clone(), 2),
        "aten._to_copy": (lambda x: x.to(torch.float64 if x.dtype == torch.float32 else torch.float32), 3),
        "aten.cat": (lambda x: torch.cat([x, x], -1), 4),
        "aten.fill_": (lambda x: torch.empty_like(x).fill_(0.0), 1),
        "aten.gelu": (lambda x: functional.gelu(x, approximate="tanh"), 2),
        "aten.gelu_backward": (lambda x: aten.gelu_backward(x, x, approximate="tanh"), 3),
        "aten.silu": (functional.silu, 2),
        "aten.silu_backward": (lambda x: aten.silu_backward(x, x), 3),
        "aten.pow": (lambda x: x**2, 2),
        "aten.rsqrt": (lambda x: x.rsqrt(), 2),
        "aten.sqrt": (lambda x: x.sqrt(), 2),
        "aten.mean": (lambda x: x.mean(-1, keepdim=True), 1),
        "aten.sum": (lambda x: x.sum(0), 1),
        "aten.native_layer_norm": (norm, 2),
        "aten.native_layer_norm_backward": (norm_backward, 3),
        "aten.lerp_": (lambda x: x.lerp_(x, 0.1), 3),
        "aten.addcmul_": (lambda x: x.addcmul_(x, x, value=1e-6), 4),
        "aten.addcdiv_": (lambda x: x.addcdiv_(x, x, value=1e-6), 4),
        "aten.div": (lambda x: x / x, 3),
    }


def traffic(meter: Meter) -> dict[str, dict[tuple[float, ...], float]]:
    """By operator, bytes → bytes a second."""
    sizes = (2**14, 2**17, 2**20, 2**23, 2**26) if not meter.is_gpu else (2**16, 2**20, 2**24, 2**28)
    rates: dict[str, dict[tuple[float, ...], float]] = {}
    with torch.no_grad():
        for name, (function, moves) in _operators().items():
            of_name = rates.setdefault(f"memory {name}", {})

            def on(rows: int, columns: int, function: Unary = function) -> Callable[[], Any]:
                x = (torch.rand(rows, columns, device=meter.device) + 0.5).to(meter.dtype)
                return lambda: function(x)

            # What it takes for hardly any data is not its work, and belongs to the host.
            nothing_s = meter.seconds(partial(on, 1, 2), 0.002)
            for size in sizes:
                taken_s = meter.seconds(partial(on, size // meter.dtype.itemsize // 128, 128), 0.004)
                of_name[(moves * size,)] = moves * size / max(taken_s - nothing_s, taken_s / 20)
    # Any other operator is taken for an addition.
    rates["memory"] = dict(rates["memory aten.add"])
    return rates
