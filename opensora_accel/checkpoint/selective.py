"""Selective checkpointing: what self-attention kernels return is kept, everything else is recomputed.

Attention is most of a long block's time and its output is as small as the block's input. Kept outputs may wait in
host memory beside it, which torch's own selective mode has no place for.

torch's own is also a dispatch mode around the whole block, so that each of its hundreds of operators passes through
Python, twice. Here attention kernels alone are intercepted (`opensora_accel/interception.py`), and a mode is on the
stack only while one is called.

    operator                     what happens
    addmm, gelu, ...             runs
    attention, in forward        `_enter_modes` → _Keep → runs, and its results are kept
    attention, recomputed        `_enter_modes` → _Reuse → what was kept, and nothing runs

The mode lies below autograd. So an attention that does not run has its node in the graph all the same, with the
kept tensors in it, and torch's checkpoint counts as many saved tensors as in forward.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _len_torch_dispatch_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_map_only

from opensora_accel.interception import intercept, switched_on
from opensora_accel.offload import Call, Kept, OffloadEngine, Saved

logger = logging.getLogger(__name__)

# Operations that are kept, with the token dim of their queries and keys. None: always, whatever this rank's share of
# either: all ranks must do the same, and running it again would communicate again.
ATTENTION_KERNELS = {
    "aten::_scaled_dot_product_flash_attention": -2,
    "aten::_scaled_dot_product_flash_attention_for_cpu": -2,
    "aten::_scaled_dot_product_efficient_attention": -2,
    "aten::_scaled_dot_product_cudnn_attention": -2,
    "aten::_scaled_dot_product_fused_attention_overrideable": -2,
    # flash-attn 2.7 and newer, flash_attn/flash_attn_interface.py; varlen has its samples in one row, [S, H, D].
    "flash_attn::_flash_attn_forward": -3,
    "flash_attn::_flash_attn_varlen_forward": -3,
    # flash-attn 3: hopper/flash_api.cpp, and hopper/flash_attn_interface.py, which wraps it in newer versions. An
    # operator that runs within another one of these is a part of it.
    "flash_attn_3::fwd": -3,
    "flash_attn_3::_flash_attn_forward": -3,
    "torch_attn::_varlen_attn": -3,  # torch.nn.attention.varlen
    "opensora_accel::masked_attention": -3,
    "opensora_accel::ring_attention": None,
    "opensora_accel::sliced_attention": None,
}


def attention_contexts(engine: OffloadEngine, call: Call | None) -> Callable[[], tuple[Any, Any]]:
    """torch's `context_fn` for one checkpointed call: the forward keeps what recomputation then takes.

    Args:
        call: the outputs wait in host memory, as a part of this call; None keeps them on the device.
    """
    # It lives as long as autograd may recompute: `retain_graph` reads it again.
    outputs: list[tuple[Any, Any]] = []
    return lambda: (_Keep(outputs, engine, call), _Reuse(outputs, engine))


def _alias(tensor: Tensor) -> Tensor:
    """A tensor detached, with one version counter: views made below autograd have their own otherwise."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _Active(threading.local):
    """The modes of the checkpointed calls that this thread is in, outermost first, each with the depth of torch's
    stack of modes where it was entered."""

    def __init__(self) -> None:
        self.modes: list[tuple[TorchDispatchMode, int]] = []


_active = _Active()


@lru_cache(maxsize=1)
def _install() -> list[torch.library.Library]:
    # Operators of libraries that are not imported yet, or are not there, are among them.
    return [intercept(name, _enter_modes) for name in ATTENTION_KERNELS]


def _enter_modes(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls an attention operator, with q first in `args`, through the modes of this thread."""
    # A compiler that looks at an operator keeps nothing of it.
    is_compiled = TracingContext.try_get() is not None
    if is_compiled or not _active.modes or not _is_kept(kernel, args, kwargs):
        return kernel(*args, **kwargs)
    with _on_stack(_active.modes):
        return kernel(*args, **kwargs)


@contextmanager
def _on_stack(modes: list[tuple[TorchDispatchMode, int]]) -> Iterator[None]:
    """Puts the modes on torch's stack where they would lie if they had been there since they were entered.

    Modes entered later, as by a selective checkpoint within the block, lie above them: they see the operator first.
    """
    start = modes[0][1]
    above = [_pop_mode() for _ in range(_len_torch_dispatch_stack() - start)][::-1]
    merged = above.copy()
    for index, (mode, depth) in enumerate(modes):
        merged.insert(depth - start + index, mode)
    for mode in merged:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in merged:
            _pop_mode()
        for mode in above:
            _push_mode(mode)


class _AttentionMode(TorchDispatchMode):
    """Entered, it sees the attention kernels that this thread calls, and no other operator."""

    def __enter__(self) -> Any:
        _install()
        _active.modes.append((self, _len_torch_dispatch_stack()))
        self._guard = switched_on()
        self._guard.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._guard.__exit__(*exception)
        _active.modes.pop()


class _Keep(_AttentionMode):
    def __init__(self, outputs: list[tuple[Any, Any]], engine: OffloadEngine, call: Call | None):
        super().__init__()
        self._outputs, self._engine, self._call = outputs, engine, call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}):
            self._outputs.append((func, tree_map_only(Tensor, self._keep, outputs)))
        return outputs

    def _keep(self, tensor: Tensor) -> Saved | Kept:
        """An output as it waits for the recomputation: in host memory, or on the device."""
        tensor = _alias(tensor)  # without the graph, which would keep itself alive
        saved = None
        # Only output and log-sum-exp; the state of random numbers is a few bytes.
        if self._call is not None and tensor.is_floating_point():
            saved = self._engine.save(tensor, self._call)
        return saved or Kept(tensor, tensor._version)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if not self._outputs and exception[0] is None:
            _warn_nothing_kept()


class _Reuse(_AttentionMode):
    def __init__(self, outputs: list[tuple[Any, Any]], engine: OffloadEngine):
        super().__init__()
        self._outputs, self._engine, self._position = outputs, engine, 0

    def __enter__(self) -> Any:
        self._position = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_kept(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        # The n-th attention of a recomputation is given what the n-th one of the forward returned.
        self._position += 1
        if self._position > len(self._outputs) or self._outputs[self._position - 1][0] is not func:
            raise RuntimeError(
                f"recomputation called {func} as attention number {self._position}, the forward did not: "
                "a block must do the same in both"
            )
        outputs = tree_map_only(Saved, self._engine.load, self._outputs[self._position - 1][1])
        # Aliases: autograd will write its history onto what it is given.
        return tree_map_only(Kept, lambda kept: _alias(kept.tensor_unchanged()), outputs)


def _is_kept(func: Any, args: Any, kwargs: Any) -> bool:
    """Self-attention. Cross-attention to a short text is recomputed: it costs less than a projection, and its output
    would take as much memory. Not with dropout: a kernel that does not run again draws no numbers, and all later
    draws would differ."""
    name = func.name().partition(".")[0]
    if name not in ATTENTION_KERNELS:
        return False
    token_dim = ATTENTION_KERNELS[name]
    if token_dim is not None and args[1].size(token_dim) < args[0].size(token_dim):
        return False
    position = _dropout_position(func)
    return not kwargs.get("dropout_p", args[position] if position < len(args) else 0.0)


@lru_cache
def _dropout_position(func: Any) -> int:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else len(names)


@lru_cache(maxsize=1)
def _warn_nothing_kept() -> None:
    logger.warning(
        'checkpoint="selective" kept nothing: no fused self-attention kernel without dropout ran in the block, so all '
        "of it is recomputed; see which backend torch.nn.functional.scaled_dot_product_attention takes"
    )
