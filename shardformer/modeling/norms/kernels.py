"""What a norm may be replaced by. A kernel is taken where it was seen to agree, never because it can be imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from shardformer.modeling.norms.layer_tiles import TiledLayerNorm, worth_tiling_layer_norm
from shardformer.modeling.norms.order import HALVES, Order
from shardformer.modeling.norms.tiles import LEAST_ELEMENTS, rows_of, tiled_rms_norm, worth_tiling

Run = Callable[[Tensor, "Tensor | None", "Tensor | None", Order, "float | None"], Tensor]


class Unfit(Exception):
    """This kernel does not compute this order on these dtypes, or is not installed; the message is shown."""


@dataclass(frozen=True)
class Kernel:
    """One way to run an order.

    Attributes:
        run: (x, weight, bias, order, eps) -> out; raises `Unfit`.
        on_cpu: whether it is for the CPU, or for every other device.
        external: of another package. Strict mode takes none, so that it does not depend on what is installed.
        worth: whether it is no slower than the plain order on this input; never on fewer than `least_elements`.
    """

    name: str
    run: Run
    on_cpu: bool = False
    external: bool = False
    worth: Callable[[Tensor, Order], bool] = lambda x, order: True
    least_elements: int = 0


def may_replace(x: Tensor) -> bool:
    """Whether a kernel may run instead of the order's plain operations.

    Compilers, tracers, autocast, function transforms and tensor subclasses act on single operations; they get them.
    """
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
    )


def _tiled(x: Tensor, weight: Tensor | None, bias: Tensor | None, order: Order, eps: float | None) -> Tensor:
    if order.rounds == "float" and x.dtype in HALVES:
        rows = rows_of(x.contiguous())
        assert rows is not None and eps is not None
        w, b = (None if tensor is None else tensor[None] for tensor in (weight, bias))
        return TiledLayerNorm.apply(rows[None], w, b, eps, "wide").view(x.shape)
    if order.centres:
        raise Unfit("torch's layer norm is one pass already")
    if bias is not None or x.dtype == torch.float64 or (weight is not None and weight.dtype == torch.float64):
        raise Unfit("tiles take fp32 and halves, and no bias")
    return tiled_rms_norm(x, weight, order, eps)


def _worth_tiling(x: Tensor, order: Order) -> bool:
    return worth_tiling_layer_norm(x) if order.centres else worth_tiling(x)


def _torch_rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, order: Order, eps: float | None
) -> Tensor:
    _needs_plain_rms(x, weight, bias, order)
    if order.offset:
        raise Unfit("F.rms_norm adds nothing to the weight")
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _torch_rms_norm_times_weight(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, order: Order, eps: float | None
) -> Tensor:
    _needs_plain_rms(x, weight, bias, order)
    if weight is None or order.rounds == "end":
        raise Unfit("the order rounds after the product")
    return weight * F.rms_norm(x, x.shape[-1:], None, eps)


def _torch_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, order: Order, eps: float | None
) -> Tensor:
    if order.rounds != "float":
        raise Unfit("it is torch's own layer norm already" if order.centres else "it is no layer norm")
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)  # type: ignore[arg-type]


def _quack(x: Tensor, weight: Tensor | None, bias: Tensor | None, order: Order, eps: float | None) -> Tensor:
    _needs_plain_rms(x, weight, bias, order)
    if weight is None or order.offset or eps is None:
        raise Unfit("quack needs a weight without offset, and an eps")
    return _import("quack", "rmsnorm").rmsnorm(x, weight, eps=eps)


def _liger(x: Tensor, weight: Tensor | None, bias: Tensor | None, order: Order, eps: float | None) -> Tensor:
    _needs_plain_rms(x, weight, bias, order)
    if weight is None or eps is None:
        raise Unfit("Liger needs a weight and an eps")
    function = _import("liger_kernel.ops.rms_norm", "LigerRMSNormFunction").LigerRMSNormFunction
    # Not in place: the gradient that comes in belongs to autograd.
    casting = "gemma" if order.rounds == "end" else "llama"
    return function.apply(x, weight, eps, order.offset, casting, False)


def _apex(x: Tensor, weight: Tensor | None, bias: Tensor | None, order: Order, eps: float | None) -> Tensor:
    _needs_plain_rms(x, weight, bias, order)
    if weight is None or order.offset or eps is None:
        raise Unfit("apex needs a weight without offset, and an eps")
    module = _import("apex.normalization.fused_layer_norm", "fused_rms_norm_affine")
    return module.fused_rms_norm_affine(x, weight, weight.shape, eps)


def _needs_plain_rms(x: Tensor, weight: Tensor | None, bias: Tensor | None, order: Order) -> None:
    if order.centres:
        raise Unfit("it is for RMS norms")
    if bias is not None:
        raise Unfit("it takes no bias")
    if weight is not None and weight.dtype != x.dtype:
        raise Unfit("it takes one dtype for input and weight")


def _import(path: str, needed: str) -> ModuleType:
    """The module, if it has what is needed: `apex` on PyPI is a web toolkit, `quack` not the kernels."""
    package = path.partition(".")[0]
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise Unfit(f"{package} is not installed") from error
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise Unfit(f"the package {package} here has no {path} ({error}): another of that name?") from error
    if not hasattr(module, needed):
        raise Unfit(f"the package {package} here has no {path}.{needed}: another of that name?")
    return module


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("tiles", _tiled, on_cpu=True, worth=_worth_tiling, least_elements=LEAST_ELEMENTS),
        Kernel("quack", _quack, external=True),
        Kernel("liger", _liger, external=True),
        Kernel("apex", _apex, external=True),
        Kernel("F.rms_norm", _torch_rms_norm),
        Kernel("F.rms_norm × weight", _torch_rms_norm_times_weight),
        Kernel("F.layer_norm", _torch_layer_norm),
    )
}
"""In the order in which they are tried."""
