"""Which kernel takes a call, and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache

from opensora_accel.attention.kernels.base import Kernel, Problem
from opensora_accel.attention.kernels.cpu import CpuFlashKernel
from opensora_accel.attention.kernels.cuda import CudnnKernel, EfficientKernel, FlashKernel
from opensora_accel.attention.kernels.flash_attn import FlashAttn2Kernel, FlashAttn3Kernel
from opensora_accel.attention.kernels.plain import PlainKernel

logger = logging.getLogger(__name__)

_PREFERENCE: tuple[Kernel, ...] = (
    FlashAttn3Kernel(),
    FlashAttn2Kernel(),
    FlashKernel(),
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

    def __str__(self) -> str:
        refused = "; ".join(f"not {name}: {reason}" for name, reason in self.refused)
        return self.kernel.name + (f" ({refused})" if refused else "")


@lru_cache
def choose_kernel(problem: Problem) -> Choice:
    """The first kernel, in order of speed, that takes the problem. The plain one takes all."""
    refused = []
    for kernel in _PREFERENCE:
        reason = kernel.refuses(problem)
        if reason is None:
            break
        refused.append((kernel.name, reason))
    choice = Choice(kernel, tuple(refused))
    if isinstance(kernel, PlainKernel):
        logger.warning(
            "attention on %s in %s runs unfused and holds S_q × S_kv scores a head: %s",
            problem.device,
            problem.dtype,
            choice,
        )
    return choice
