"""Which kernel takes a call, and why."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from opensora_accel.attention.kernels.base import Kernel, PiecesKernel, Problem
from opensora_accel.attention.kernels.cpu import CpuFlashKernel
from opensora_accel.attention.kernels.cuda import CudnnKernel, EfficientKernel, FlashKernel
from opensora_accel.attention.kernels.flash_attn import FlashAttn2Kernel, FlashAttn3Kernel
from opensora_accel.attention.kernels.flex import FlexKernel
from opensora_accel.attention.kernels.magi import MagiKernel
from opensora_accel.attention.kernels.plain import PlainKernel
from opensora_accel.attention.kernels.varlen import (
    VarlenFlashAttn2Kernel,
    VarlenFlashAttn3Kernel,
    VarlenFlashKernel,
)
from opensora_accel.attention.kernels.visible import VisibleKeysKernel
from opensora_accel.attention.slices import PieceFacts
from opensora_accel.wrapping import replaced

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


# They take all pieces of a block of keys at once.
_OF_PIECES: tuple[PiecesKernel, ...] = (
    MagiKernel(),
    VarlenFlashAttn3Kernel(),
    VarlenFlashAttn2Kernel(),
    VarlenFlashKernel(),
    FlexKernel(),
)
# From so many pairs a tile on, cuDNN and flash-attn 3 are worth a call for each tile beside slower kernels that take
# all at once. This is reckoned and not measured. By rates published for an H100 (cuDNN 617 and 533 TFLOP/s forward and
# backward, flash-attn 2 375 and 335, flex attention's backward 288) a pair costs 25, 40 and 45 fs for each number of
# its query. With 3,072 of these, 15 fs more make up for the 70 µs that the host takes for a tile at 1.5 million pairs.
_LARGE_TILE = 2048 * 2048


Taken = TypeVar("Taken", bound="Kernel | PiecesKernel")


@dataclass(frozen=True)
class Choice(Generic[Taken]):
    """The kernel that takes a call, and for each one that was preferred to it, why it does not."""

    kernel: Taken
    refused: tuple[tuple[str, str], ...]
    # Which release a library is, where it is called by what that looks like.
    release: str = ""
    # How often it is called: once a tile, where it knows no pieces.
    num_calls: int = 1

    def __str__(self) -> str:
        refused = [f"not {name}: {reason}" for name, reason in self.refused]
        reasons = "; ".join([self.release, *refused] if self.release else refused)
        calls = f", a call for each of {self.num_calls} tiles" if self.num_calls > 1 else ""
        return self.kernel.name + calls + (f" ({reasons})" if reasons else "")


@lru_cache
def choose_kernel(problem: Problem) -> Choice[Kernel]:
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
    choice = Choice(kernel, tuple(refused), _release_of(kernel))
    if isinstance(kernel, PlainKernel):
        logger.warning(
            "attention on %s in %s runs unfused and holds S_q × S_kv scores a head: %s",
            problem.device,
            problem.dtype,
            choice,
        )
    return choice


class PiecesChoice(NamedTuple):
    """The kernel that takes all pieces at once, None if none does; and for each that was preferred, why it does not."""

    kernel: PiecesKernel | None
    refused: tuple[tuple[str, str], ...]


@lru_cache
def choose_for_pieces(problem: Problem, facts: PieceFacts) -> PiecesChoice:
    """The first kernel, in order of preference, that takes all pieces of a block of keys; a single tile none does."""
    if facts.num_tiles < 2:
        return PiecesChoice(None, ())
    refused: list[tuple[str, str]] = []
    for kernel in _OF_PIECES:
        reason = kernel.refuses(problem, facts) or _is_slower(kernel, problem, facts)
        if reason is None:
            return PiecesChoice(kernel, tuple(refused))
        refused.append((kernel.name, reason))
    return PiecesChoice(None, tuple(refused))


def explain_pieces(problem: Problem, facts: PieceFacts) -> Choice[Any]:
    """What computes the pieces of a block, as one call or tile by tile."""
    found = choose_for_pieces(problem, facts)
    if found.kernel is not None:
        return Choice(found.kernel, found.refused, _release_of(found.kernel))
    of_tile = choose_kernel(problem)
    return Choice(of_tile.kernel, found.refused + of_tile.refused, of_tile.release, max(facts.num_tiles, 1))


def _is_slower(kernel: PiecesKernel, problem: Problem, facts: PieceFacts) -> str | None:
    """Why a call for each tile is quicker, where it is: for few and large tiles on a GPU with a quicker kernel."""
    if isinstance(kernel, (MagiKernel, VarlenFlashAttn3Kernel)):
        return None
    of_tile = choose_kernel(problem).kernel
    mean = facts.num_pairs // facts.num_tiles
    if mean < _LARGE_TILE or not isinstance(of_tile, (CudnnKernel, FlashAttn3Kernel)):
        return None
    return f"a tile has {mean:,} pairs on average, for which a call of {of_tile.name} for each is quicker"


def _release_of(kernel: Kernel | PiecesKernel) -> str:
    """Which release of a library it is of."""
    release: str = kernel.release() if hasattr(kernel, "release") else ""
    return release


def _prefers_cudnn(device: torch.device) -> bool:
    """Whether cuDNN, where it takes a call, comes first: torch's own rule for `scaled_dot_product_attention`.

    Source: `check_prefer_cudnn_attention`, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    major, minor = torch.cuda.get_device_capability(device)
    # Among builds for CUDA 12 torch trusts those of sm_90, sm_100 and sm_103 only.
    is_trusted = minor in (0, 3) or not (torch.version.cuda or "").startswith("12.")
    return major in (9, 10) and is_trusted and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"


@contextlib.contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Within it tensors without values on the CPU take the kernels that they would take on a GPU.

    Which one takes all tiles of a mask at once is asked of a GPU alone; here each tile is a call.
    """
    of = Problem.of

    def on_cuda(*operands: Any) -> Problem:
        return of(*operands)._replace(device=torch.device("cuda"))

    # Another GPU may have been asked about before, and the one that is there afterwards.
    choose_kernel.cache_clear()
    choose_for_pieces.cache_clear()
    try:
        with (
            replaced(Problem, "of", staticmethod(on_cuda)),
            replaced(sys.modules[__name__], "_OF_PIECES", ()),
        ):
            yield
    finally:
        choose_kernel.cache_clear()
        choose_for_pieces.cache_clear()
