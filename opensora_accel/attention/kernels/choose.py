"""Which kernel takes a call, and why."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import lru_cache

import torch

from opensora_accel.attention.kernels.base import Kernel, Problem
from opensora_accel.attention.kernels.cpu import CpuFlashKernel
from opensora_accel.attention.kernels.cuda import CudnnKernel, EfficientKernel, FlashKernel
from opensora_accel.attention.kernels.flash_attn import FlashAttn2Kernel, FlashAttn3Kernel, FlashAttnKernel
from opensora_accel.attention.kernels.plain import PlainKernel
from opensora_accel.attention.kernels.visible import VisibleKeysKernel

logger = logging.getLogger(__name__)

_PREFERENCE: tuple[Kernel, ...] = (
    FlashAttn3Kernel(),
    FlashAttn2Kernel(),
    FlashKernel(),
    VisibleKeysKernel(),
    CudnnKernel(),
    EfficientKernel(),
    CpuFlashKernel(),
    PlainKernel(),
)


@dataclass(frozen=True)
class Choice:
    """The kernel that takes a call, and for each one that was preferred to it, why it does not."""

    kernel: Kernel
    refused: tuple[tuple[str, str], ...]
    # Which release a library is, where it is called by what that looks like.
    release: str = ""

    def __str__(self) -> str:
        refused = [f"not {name}: {reason}" for name, reason in self.refused]
        reasons = "; ".join([self.release, *refused] if self.release else refused)
        return self.kernel.name + (f" ({reasons})" if reasons else "")


@lru_cache
def choose_kernel(problem: Problem) -> Choice:
    """The first kernel, in order of speed, that takes the problem. The plain one takes all."""
    refused, order = [], _PREFERENCE
    if problem.device.type == "cuda" and _prefers_cudnn(problem.device):
        # The sort is stable: the others keep their order behind it.
        order = tuple(sorted(order, key=lambda kernel: not isinstance(kernel, CudnnKernel)))
    for kernel in order:
        reason = kernel.refuses(problem)
        if reason is None:
            break
        refused.append((kernel.name, reason))
    release = kernel.release() if isinstance(kernel, FlashAttnKernel) else ""
    choice = Choice(kernel, tuple(refused), release)
    if isinstance(kernel, PlainKernel):
        logger.warning(
            "attention on %s in %s runs unfused and holds S_q × S_kv scores a head: %s",
            problem.device,
            problem.dtype,
            choice,
        )
    return choice


def _prefers_cudnn(device: torch.device) -> bool:
    """Whether cuDNN, where it takes a call, comes first: torch's own rule for `scaled_dot_product_attention`.

    Source: `check_prefer_cudnn_attention`, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    major, minor = torch.cuda.get_device_capability(device)
    # Among builds for CUDA 12 torch trusts those of sm_90, sm_100 and sm_103 only.
    is_trusted = minor in (0, 3) or not (torch.version.cuda or "").startswith("12.")
    return major in (9, 10) and is_trusted and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
