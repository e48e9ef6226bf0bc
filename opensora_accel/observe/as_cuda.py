"""CUDA's operators on CPU tensors without values: what a GPU would run, keep for backward and allocate.

torch chooses by device what an operator is made of. Of `rms_norm` in bf16, of N numbers:

    CPU     _to_copy, pow, mean, rsqrt, mul, mul, _to_copy    keeps 4 N bytes twice, in fp32
    CUDA    _fused_rms_norm                                   keeps its input, which others keep too, and 1/rms

The choice is made in C++ before Python sees an operator. A fake tensor on "cuda" would make it, but a torch that is
built for CPUs ends the process where autograd asks for that device (`InputMetadata` in torch/csrc/autograd:
"PyTorch is not linked with support for cuda devices"; `_ensureCUDADeviceGuardSet` helps a torch that is built for CUDA
alone), and FSDP2 asks for streams. So the tensors stay on the CPU, and for as long as `operators_of_cuda` lasts the
dispatcher's table for CPUs has the entries of the table for CUDA:

- an operator that only CUDA has a kernel of gets one for CPUs, by which the dispatcher takes autograd's formula of it
  in place of what it is made of. That kernel never runs: tensors without values ask for shapes alone;
- functions that look at the device in C++ (attention, dropout) get CUDA's branch, written out here;
- autocast's lists for CPUs become CUDA's.

What is not told apart: convolutions, whose kernel cuDNN chooses when it runs, and grouped heads in the
memory-efficient kernel, which older versions of torch refuse.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.backends import cuda as switches
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves, tree_map_only

from opensora_accel.attention import kernels_of_cuda
from opensora_accel.observe.fakes import FakeFloats
from opensora_accel.wrapping import replaced

_aten = torch.ops.aten
CPU = "cpu"
_HALVES = (torch.float16, torch.bfloat16)
# CompositeImplicitAutograd beside a kernel of CUDA's, in aten/src/ATen/native/native_functions.yaml.
_FUSED = ("_fused_rms_norm", "_fused_rms_norm_backward")
# A wheel of torch 2.13 for CUDA 13 brings a cuDNN of this version or a newer one: assumed.
_CUDNN, _CUDA = 91900, "13.0"


class Architecture(NamedTuple):
    """What decides which kernels a GPU runs: NVIDIA's compute capability, or that it is AMD's."""

    major: int
    minor: int
    is_amd: bool = False

    @classmethod
    def of(cls, name: str) -> Architecture:
        """By the name that compilers have for it: sm_90, gfx942.

        Raises:
            ValueError: it is no such name.
        """
        match = re.fullmatch(r"(sm_|gfx)(\d{1,3})([0-9a-f])", name)
        if match is None:
            raise ValueError(
                f"an architecture is sm_ or gfx and a number, as sm_80, sm_90 or gfx942, or {CPU!r}; got {name!r}"
            )
        # gfx942 is 9.4.2, of which torch shows (9, 4).
        is_amd = match[1] == "gfx"
        digits = match[2] if is_amd else match[2] + match[3]
        return cls(int(digits[:-1]), int(digits[-1], 16), is_amd)


def architecture_of(device: torch.device) -> str:
    """The name of a device's architecture, or `CPU`."""
    if device.type != "cuda":
        return CPU
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@contextlib.contextmanager
def operators_of_cuda(name: str) -> Iterator[None]:
    """Within it tensors without values on the CPU take the operators that they would take on a GPU.

    Args:
        name: of its architecture, as `Architecture.of` takes it.
    """
    architecture = Architecture.of(name)
    capability = architecture.major, architecture.minor
    library = torch.library.Library("aten", "IMPL")
    try:
        for operator in _FUSED:
            library.impl(operator, _shapes_alone, "CPU")
        attention = Attention(architecture)
        library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        with contextlib.ExitStack() as entered:
            for owner, attribute, value in (
                (torch.cuda, "get_device_capability", lambda device=None: capability),
                (torch.backends.cudnn, "version", lambda: None if architecture.is_amd else _CUDNN),
                (torch.version, "cuda", None if architecture.is_amd else _CUDA),
                (torch.version, "hip", "7.0" if architecture.is_amd else None),
                (FakeFloats, "corrections", {_aten.native_layer_norm.default: _with_wide_statistics}),
                (_foreach_utils, "_foreach_supported_types", [Tensor, torch.nn.Parameter, FakeTensor]),
            ):
                entered.enter_context(replaced(owner, attribute, value))
            entered.enter_context(kernels_of_cuda())
            entered.enter_context(_autocast_of_cuda(library))
            yield
    finally:
        library._destroy()


def _shapes_alone(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("operators of CUDA are for tensors without values")


def _with_wide_statistics(returned: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Mean and 1/deviation [..., 1] of a layer norm are fp32 at least: layer_norm_cuda, layer_norm_kernel.cu."""
    out, *statistics = returned
    return out, *(each.float() if each.dtype in _HALVES else each for each in statistics)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Of any shape. Source: `dropout` and `is_fused_kernel_acceptable`, aten/src/ATen/native/Dropout.cpp."""
    if p == 0 or not train or not x.numel():
        return x
    if p == 1:
        return x * x.new_zeros(())
    # It keeps a mask of a byte a number, where the CPU keeps a factor in the input's dtype.
    return _aten.native_dropout(x, p, train)[0]


# ---- attention


class Attention:
    """`scaled_dot_product_attention` of an architecture.

    Source: aten/src/ATen/native/transformers/attention.cpp, and for the choice cuda/sdp_utils.cpp beside it.
    """

    def __init__(self, architecture: Architecture):
        self._architecture = architecture

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """q [B, H, S_q, D], k and v [B, H_kv, S_kv, D] → [B, H, S_q, D]."""
        backend = self.backend(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:
            zero, hidden = (torch.full((), each, dtype=q.dtype) for each in (0.0, -math.inf))
            mask = torch.where(mask, zero, hidden)
        keeps_lse = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))
        if backend == SDPBackend.CUDNN_ATTENTION:
            operator = _aten._scaled_dot_product_cudnn_attention
            return operator(q, k, v, mask, keeps_lse, dropout_p, is_causal, scale=scale)[0]
        if backend == SDPBackend.FLASH_ATTENTION:
            width, missing = q.size(-1), -q.size(-1) % 8
            scale = width**-0.5 if scale is None else scale
            if missing:
                q, k, v = (functional.pad(each, (0, missing)) for each in (q, k, v))
            out = _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
            return out[..., :width] if missing else out
        if backend == SDPBackend.EFFICIENT_ATTENTION:
            if mask is not None:
                mask = _aligned(mask).expand(*q.shape[:3], k.size(2))
            operator = _aten._scaled_dot_product_efficient_attention
            return operator(q, k, v, mask, keeps_lse, dropout_p, is_causal, scale=scale)[0]
        operator = _aten._scaled_dot_product_attention_math
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return operator(q, k, v, mask, dropout_p, is_causal, None, **options)[0]

    def backend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        enable_gqa: bool,
    ) -> SDPBackend:
        """The first that takes the call, in torch's order: `select_sdp_backend` and `priority_order`.

        cuDNN comes first on sm_90 and sm_100, and behind all others elsewhere, where the plain one takes what is left.
        """
        is_fit = q.dim() == 4 and not (mask is not None and mask.requires_grad)
        is_fit &= q.size(0) == k.size(0) == v.size(0) and q.dtype == k.dtype == v.dtype
        is_fit &= all(each.stride(-1) == 1 and each.numel() > 0 for each in (q, k, v))
        if is_fit and self._prefers_cudnn and self._cudnn_takes(q, k, v, dropout_p, enable_gqa):
            return SDPBackend.CUDNN_ATTENTION
        if is_fit and mask is None and self._flash_takes(q, k, v, dropout_p, is_causal, enable_gqa):
            return SDPBackend.FLASH_ATTENTION
        if is_fit and self._efficient_takes(q, k, v):
            return SDPBackend.EFFICIENT_ATTENTION
        return SDPBackend.MATH

    @property
    def _prefers_cudnn(self) -> bool:
        """`check_prefer_cudnn_attention`, of a build for CUDA 13."""
        is_preferred = self._architecture.major in (9, 10) and not self._architecture.is_amd
        return is_preferred and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"

    def _cudnn_takes(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, enable_gqa: bool) -> bool:
        """`can_use_cudnn_attention`. Heads of up to 256 numbers need cuDNN 9.22, which no wheel is known to bring."""
        is_deterministic = (
            torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        widths = q.size(3), v.size(3)
        return (
            switches.cudnn_sdp_enabled()
            and not is_deterministic
            and q.dtype in _HALVES
            and (enable_gqa or q.size(1) == k.size(1) == v.size(1))
            and (16 * dropout_p).is_integer()
            and all(width <= 128 and width % 8 == 0 for width in widths)
            and k.size(2) != 1
            and not (dropout_p and q.size(2) == 1)
        )

    def _flash_takes(
        self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, enable_gqa: bool
    ) -> bool:
        """`can_use_flash_attention`. Consumers' GPUs have no backward of heads of 193 to 224 numbers."""
        major, minor, is_amd = self._architecture
        width, needs_grad = q.size(3), any(each.requires_grad for each in (q, k, v))
        is_small = not is_amd and ((major == 8 and minor >= 6) or major == 12)
        return (
            switches.flash_sdp_enabled()
            and q.dtype in _HALVES
            and (enable_gqa or q.size(1) == k.size(1) == v.size(1))
            and width == k.size(3) == v.size(3)
            and width <= (512 if is_amd else 256)
            and not (is_small and needs_grad and 192 < width <= (256 if dropout_p else 224))
            and not (is_causal and q.size(2) != k.size(2))
            and major >= 8
        )

    def _efficient_takes(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """`can_use_mem_efficient_attention`."""
        alignment = 8 if q.dtype in _HALVES else 4
        return (
            switches.mem_efficient_sdp_enabled()
            and q.dtype in (torch.float32, *_HALVES)
            and q.size(1) == k.size(1) == v.size(1)
            and q.size(3) == k.size(3)
            and all(each.size(3) % alignment == 0 for each in (q, v))
        )


def _aligned(mask: Tensor) -> Tensor:
    """A bias [..., S_kv] whose rows begin at multiples of 16 numbers: `preprocess_mask` of attention.cpp."""
    if mask.stride(-1) == 1 and all(stride % 16 == 0 for stride in mask.stride()[:-1]):
        return mask
    size = mask.size(-1)
    return functional.pad(mask, (0, 16 - size % 16))[..., :size]


# ---- autocast

# What CUDA's autocast does with the operators of its list: aten/src/ATen/autocast_mode.h. The list itself is in the
# dispatcher of every build, and what is in none of these sets is computed in fp32.
_LOWER = {
    *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "einsum", "linalg_multi_dot"),
    *("linalg_vecdot", "linear", "matmul", "mm", "mv", "prelu", "scaled_dot_product_attention"),
    *("_scaled_dot_product_flash_attention", "_convolution", "_convolution.deprecated", "convolution"),
    *("conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input"),
    *("conv_transpose3d.input", "cudnn_convolution", "cudnn_convolution_transpose", "gru_cell", "lstm_cell"),
    *("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
}
_WIDEST = {
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put"),
    *("scatter_add", "tensordot", "vdot"),
}
# They are told to give fp32, where their caller does not tell them otherwise.
_GIVE_FP32 = {
    *("cumprod", "cumsum", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_vector_norm"),
    *("log_softmax.int", "prod", "prod.dim_int", "softmax.int", "sum", "sum.dim_IntList"),
}
_REFUSED = "binary_cross_entropy"


@contextlib.contextmanager
def _autocast_of_cuda(library: torch.library.Library) -> Iterator[None]:
    """Within it autocast for CPUs has CUDA's lists, and fp16 for its default as CUDA's has."""
    on_cpu, on_cuda = (_listed(f"Autocast{device}") for device in ("CPU", "CUDA"))
    with warnings.catch_warnings():
        # That an entry of the table is another one for a while is what is wanted.
        warnings.filterwarnings(
            "ignore", message=".*other operators may also be overridden", category=UserWarning
        )
        for name in on_cpu - on_cuda:
            library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
        for name in on_cuda - on_cpu.intersection(_LOWER) - {_REFUSED}:
            library.impl(name, _cast_before(name), "AutocastCPU")
    before = torch.get_autocast_dtype(CPU)
    torch.set_autocast_dtype(CPU, torch.get_autocast_dtype("cuda"))
    try:
        yield
    finally:
        torch.set_autocast_dtype(CPU, before)


def _listed(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _cast_before(name: str) -> Callable[..., Any]:
    """A kernel for autocast, which casts and then calls the operator without it."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(_aten, packet), overload or "default")

    def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(dtype) if _is_cast(value) else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        found = {each.dtype for each in tree_leaves((args, kwargs)) if _is_cast(each)}
        if found and name in _GIVE_FP32:
            kwargs.setdefault("dtype", torch.float32)
        elif found:
            is_low = name in _LOWER or (name in _WIDEST and torch.float32 not in found)
            dtype = torch.get_autocast_dtype(CPU) if is_low else torch.float32
            args, kwargs = tree_map_only(Tensor, partial(cast, dtype=dtype), (args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return operator(*args, **kwargs)

    return kernel


def _is_cast(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
