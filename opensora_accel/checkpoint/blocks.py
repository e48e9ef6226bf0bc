"""Checkpointing a model's blocks from outside: which are recomputed, what of them moves, and when."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from opensora_accel.checkpoint.core import at_positions, checkpointed
from opensora_accel.checkpoint.selective import attention_contexts
from opensora_accel.offload import GLOBAL_ACTIVATION_MANAGER, AutoOffload
from opensora_accel.plan import check_offload
from opensora_accel.wrapping import Forward, wrap_forward

Mode = Literal["full", "selective"]

_NOT_COMPILED = "a checkpoint is no part of a compiled region; compile what is inside by block.compile()"

KEEP_LAST = 1
"""Blocks at the end that never leave: backward needs them at once."""


def checkpoint_blocks(
    blocks: Sequence[nn.Module],
    mode: Mode,
    offload: float | Literal["auto"] = 0.0,
    *,
    boundary: Sequence[str] | Callable[[nn.Module], Sequence[str]] = (),
    keep_last: int = KEEP_LAST,
) -> Callable[[], None]:
    """Checkpoints every block's forward in place; returns the function that undoes it.

    The wrapper sits inside `block.__call__`, so hooks of the block (FSDP's, for one) run outside of it, and names
    and parameters stay as they are. `block.compile()` afterwards compiles what is inside of the wrapper.

    Where something moves and there is no arena yet, an open one is set up, until this is undone.

    Args:
        blocks: in the order in which they run.
        mode: "full" recomputes everything; "selective" keeps what self-attention kernels return (output
            and log-sum-exp) and recomputes the rest.
        offload: share of the blocks, from the first, whose boundary tensors wait in host memory, and in the
            selective mode what their attention returned. "auto" measures a pass after the first optimizer step,
            then moves as many blocks as the memory needs and the link carries; until then all.
        boundary: names of the forward arguments that are moved, for all blocks or as a function of the block;
            by default the first one. What shares its memory goes along.
        keep_last: blocks at the end that never leave, whatever `offload` says.
    """
    _check_options(mode, offload, keep_last)
    auto = AutoOffload(GLOBAL_ACTIVATION_MANAGER, len(blocks), keep_last) if offload == "auto" else None
    share = 1.0 if offload == "auto" else float(offload)
    num_moved = min(round(share * len(blocks)), max(0, len(blocks) - keep_last))
    undo_each: list[Callable[[], None]] = []
    try:
        if num_moved:
            undo_each.append(GLOBAL_ACTIVATION_MANAGER.use())
        for index, block in enumerate(blocks):
            positions = _positions(block, boundary(block) if callable(boundary) else boundary)
            moved = _Moved(index, positions if index < num_moved else [], auto)
            undo_each.append(_wrap(block, mode, moved))
    except ValueError:
        _undo_all(undo_each)
        raise
    return partial(_undo_all, undo_each)


def _check_options(mode: str, offload: float | str, keep_last: int) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}; got {mode!r}")
    check_offload(offload)
    if keep_last < 0:
        raise ValueError(f"keep_last is a number of blocks, at least 0; got {keep_last}")


def _undo_all(steps: Sequence[Callable[[], None]]) -> None:
    for step in reversed(steps):
        step()


@dataclass(frozen=True)
class _Moved:
    """Which arguments of a block's forward move."""

    index: int
    positions: Sequence[int]
    auto: AutoOffload | None

    def now(self, args: Sequence[Any]) -> list[Tensor]:
        marked = at_positions(self.positions, args)
        if self.auto is None or not GLOBAL_ACTIVATION_MANAGER.is_open():
            return marked
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in marked)
        device = marked[0].device if marked else torch.device("cpu")
        return marked if self.auto.moves(self.index, size_bytes, device) else []


def _wrap(block: nn.Module, mode: Mode, moved: _Moved) -> Callable[[], None]:
    if getattr(block, "_compiled_call_impl", None) is not None:
        raise ValueError(
            f"this {type(block).__name__} is compiled already, which would put its checkpoint inside of the compiled "
            "region; checkpoint first (shardformer.shard), then call block.compile()"
        )
    inner = _Compilable(block.forward, mode)
    undo_forward = wrap_forward(block, partial(_checkpointed, inner, mode, moved))
    block.compile = inner.compile  # type: ignore[method-assign]

    def undo() -> None:
        undo_forward()
        del block.compile
        if inner.options is not None:
            args, kwargs = inner.options
            block.compile(*args, **kwargs)

    return undo


class _Compilable:
    """A block's own forward, which `block.compile()` compiles without the checkpoint around it."""

    def __init__(self, forward: Forward, mode: Mode):
        self.call, self._forward, self._mode = forward, forward, mode
        self.options: tuple[Any, Any] | None = None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        if self._mode == "selective":
            raise ValueError(
                'checkpoint="selective" has to see the attention kernels, which a compiled block hides; compile '
                'parts of the block (block.ffn.compile()), or use checkpoint="full"'
            )
        self.options = args, kwargs
        self.call = torch.compile(self._forward, *args, **kwargs)


def _checkpointed(inner: _Compilable, mode: Mode, moved: _Moved, original: Forward) -> Forward:
    signature = inspect.signature(original)

    @torch.compiler.disable(reason=_NOT_COMPILED)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner.call(*args, **kwargs)
        # Tensors passed by keyword become positional: the engine keeps only those where hooks can see them.
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        marked = moved.now(bound.args)
        return checkpointed(
            inner.call,
            bound.args,
            bound.kwargs,
            marked=marked,
            contexts=partial(attention_contexts, bool(marked)) if mode == "selective" else None,
            measurement=moved.auto.measurement if moved.auto is not None else None,
        )

    return forward


def _positions(block: nn.Module, boundary: Sequence[str]) -> list[int]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(block.forward).parameters
    names = [name for name, parameter in parameters.items() if parameter.kind in kinds]
    for name in boundary:
        if name not in names:
            raise ValueError(
                f"the block's forward has no argument {name!r} to offload; it has {', '.join(names)}"
            )
    return [names.index(name) for name in boundary] or [0]
