"""Checkpointing a model's blocks from outside: which are recomputed, what of them moves, and with which engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from opensora_accel.arguments import change_at, value_at
from opensora_accel.checkpoint.recompute import run_checkpointed, tensors_at
from opensora_accel.offload import (
    GLOBAL_ACTIVATION_MANAGER,
    OffloadEngine,
    OffloadShare,
    num_blocks_to_move,
)
from opensora_accel.plan import check_offload
from opensora_accel.wrapping import wrap_forward

Mode = Literal["full", "selective"]

# Blocks at the end that never leave: backward needs them at once.
KEEP_LAST = 1


def checkpoint_blocks(
    blocks: Sequence[nn.Module],
    mode: Mode,
    offload: float | Literal["auto"] = 0.0,
    *,
    boundary: Sequence[str] | Callable[[nn.Module], Sequence[str]] = (),
    keep_last: int = KEEP_LAST,
    when: Callable[[], bool] | None = None,
) -> Callable[[], None]:
    """Checkpoints every block's forward in place; returns the function that undoes it.

    The wrapper sits inside `block.__call__`, so hooks of the block (FSDP's, for one) run outside of it, and names
    and parameters stay as they are. `block.compile()` afterwards compiles what is inside of the wrapper.

    Where something moves, `GLOBAL_ACTIVATION_MANAGER` says with which engine. If nothing has set that up, the
    blocks get an engine of their own, which it shows from then on, and which closes with the last blocks that use it.

    Args:
        blocks: in the order in which they run.
        mode: "full" recomputes everything; "selective" keeps what self-attention kernels return (output
            and log-sum-exp) and recomputes the rest.
        offload: share of the blocks, from the first, whose boundary tensors wait in host memory, and in the
            selective mode what their attention returned. "auto" measures a pass after the first optimizer step,
            then moves as many blocks as the memory needs and the link carries; until then all.
        boundary: names of the forward arguments that are moved, or paths into what they hold ("video.x"), for all
            blocks or as a function of the block; by default the first one. What shares its memory goes along.
        keep_last: blocks at the end that never leave, whatever `offload` says.
        when: says at each forward of a block whether it is checkpointed so; by default it always is. Blocks may be
            given to several calls, of which at most one says yes at a time.

    Raises:
        ValueError: an option that does not exist, a negative `keep_last`, a boundary that is no argument, or a block
            compiled already.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}; got {mode!r}")
    check_offload(offload)
    if keep_last < 0:
        raise ValueError(f"keep_last is a number of blocks, at least 0; got {keep_last}")
    manager = GLOBAL_ACTIVATION_MANAGER
    engine = OffloadEngine(memory_target_bytes=manager.memory_target_bytes)  # closed, it moves nothing
    # Left by an exception, the stack takes back what was done.
    with ExitStack() as undo:
        if num_blocks_to_move(offload, len(blocks), keep_last):
            if manager.enable:
                engine = manager.engine
            manager.engine = engine
            engine.join()
            undo.callback(engine.leave)
        share = OffloadShare(engine, offload, len(blocks), keep_last)
        for index, block in enumerate(blocks):
            names = boundary(block) if callable(boundary) else boundary
            undo.callback(_checkpoint_block(block, index, mode, names, share, when))
        return undo.pop_all().close


# Stands in an argument for a tensor that is passed by itself.
_TAKEN_OUT = object()


class _HeldInside:
    """Tensors that arguments hold inside, by their paths: a checkpoint gets them as arguments of its own, first.

    Autograd's hooks see only tensors that are arguments.
    """

    def __init__(self, paths: list[str], signature: inspect.Signature):
        self.paths, self._signature = paths, signature

    def take(self, bound: inspect.BoundArguments) -> tuple[Any, ...]:
        """The tensors, which are no longer in the arguments."""
        tensors = tuple(value_at(bound.arguments, path) for path in self.paths)
        for path in self.paths:
            change_at(bound.arguments, path, lambda _: _TAKEN_OUT)
        return tensors

    def put_back(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, called with the tensors where they were."""

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = self._signature.bind(*args[len(self.paths) :], **kwargs)
            for path, tensor in zip(self.paths, args, strict=False):
                change_at(bound.arguments, path, partial(_value, tensor))
            return function(*bound.args, **bound.kwargs)

        return call if self.paths else function


def _value(value: Any, _before: Any) -> Any:
    return value


def _checkpoint_block(
    block: nn.Module,
    index: int,
    mode: Mode,
    boundary: Sequence[str],
    share: OffloadShare,
    when: Callable[[], bool] | None,
) -> Callable[[], None]:
    original = block.forward
    signature = inspect.signature(original)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
    for name in boundary:
        if name.split(".")[0] not in names:
            raise ValueError(
                f"the block's forward has no argument {name!r} to offload; it has {', '.join(names)}"
            )
    held = _HeldInside([name for name in boundary if "." in name], signature)
    # Positions, because tensors reach the checkpoint by position, whatever the caller named.
    passed = [*held.paths, *names]
    positions = [passed.index(name) for name in boundary] or [0]
    if getattr(block, "_compiled_call_impl", None) is not None:
        raise ValueError(
            f"this {type(block).__name__} is compiled already, which would put its checkpoint inside of the compiled "
            "region; checkpoint first (shardformer.shard), then call block.compile()"
        )
    inside = original  # what is recomputed: the block's own forward, or what block.compile() makes of it
    compile_before = vars(block).get("compile")  # of a checkpoint inside of this one
    compile_options: tuple[Any, Any] | None = None

    @torch.compiler.disable(
        reason="a checkpoint is no part of a compiled region; compile what is inside by block.compile()"
    )
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or (when is not None and not when()):
            return inside(*args, **kwargs)
        # Tensors passed by keyword become positional: torch's engine keeps only those where hooks can see them.
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call_args = (*held.take(bound), *bound.args)
        marked = tensors_at(positions, call_args)
        # `moves` has to run before `measurement` is read: it begins a pass, and with that may set it.
        return run_checkpointed(
            held.put_back(inside),
            call_args,
            bound.kwargs,
            share.engine,
            marked=marked if share.moves(index, marked) else (),
            selective=mode == "selective",
            measurement=share.measurement,
        )

    def compile_inside(*args: Any, **kwargs: Any) -> None:
        nonlocal inside, compile_options
        if mode == "selective":
            raise ValueError(
                'checkpoint="selective" has to see the attention kernels, which a compiled block hides; compile '
                'parts of the block (block.ffn.compile()), or use checkpoint="full"'
            )
        if compile_before is not None:
            compile_before(*args, **kwargs)
            return
        compile_options = args, kwargs
        # Blocks that alternate between two shapes have a graph for one of them and one for any. Of graphs that fit,
        # torch takes the one used last: in backward perhaps another than in forward, which keeps other tensors
        # (pytorch#166926). In the order in which they were made, both find the same.
        torch._C._dynamo.eval_frame._set_lru_cache(False)  # type: ignore[attr-defined]
        inside = torch.compile(original, *args, **kwargs)

    def undo() -> None:
        undo_forward()
        if compile_before is not None:
            block.compile = compile_before  # type: ignore[method-assign]
            return
        del block.compile
        # What was compiled inside of the checkpoint stays compiled without it.
        if compile_options is not None:
            args, kwargs = compile_options
            block.compile(*args, **kwargs)

    undo_forward = wrap_forward(block, lambda _: forward)
    block.compile = compile_inside  # type: ignore[method-assign]
    return undo
