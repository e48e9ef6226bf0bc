"""Open-Sora's calls: the same names, arguments and order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import noop_context_fn

from opensora_accel.checkpoint.core import at_positions, checkpointed


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    preserve_rng_state: bool = True,
    offload_args: Sequence[int] = (0,),
    **kwargs: Any,
) -> Any:
    """`function(*args, **kwargs)`, recomputed in backward instead of kept.

    Args:
        use_reentrant: accepted for code written for torch or Open-Sora. Either value runs the non-reentrant
            engine, which gives the same gradients and also handles what the other cannot.
        context_fn, determinism_check, debug, preserve_rng_state: as in `torch.utils.checkpoint.checkpoint`.
        offload_args: positions in `args` of the tensors that wait in host memory, when
            `GLOBAL_ACTIVATION_MANAGER` has an arena. By default the first argument, a block's hidden state;
            what every block shares (timestep, text, positions) stays alive anyhow and is not worth moving.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return checkpointed(
        function,
        args,
        kwargs,
        marked=at_positions(offload_args, args),
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        preserve_rng_state=preserve_rng_state,
    )


class CheckpointFunctionWithOffload:
    """Open-Sora's entry point: `.apply(run_function, preserve_rng_state, *args)`."""

    @staticmethod
    def apply(run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return checkpoint(run_function, *args, preserve_rng_state=preserve_rng_state)


def set_grad_checkpoint(model: nn.Module, use_fp32_attention: bool = False, gc_step: int = 1) -> None:
    """Marks every module for `auto_grad_checkpoint`.

    Args:
        use_fp32_attention: stored as `fp32_attention`, for models that read it.
        gc_step: into how many segments `auto_grad_checkpoint` cuts a list of blocks.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"set_grad_checkpoint takes an nn.Module; got {type(model).__name__}")
    if gc_step < 1:
        raise ValueError(f"gc_step is a number of segments, at least 1; got {gc_step}")
    for module in model.modules():
        module.grad_checkpointing = True  # type: ignore[assignment]
        module.fp32_attention = use_fp32_attention  # type: ignore[assignment]
        module.grad_checkpointing_step = gc_step  # type: ignore[assignment]


def auto_grad_checkpoint(module: nn.Module | Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """`module(*args, **kwargs)`, checkpointed when `set_grad_checkpoint` marked it.

    A list of blocks is run one after the other, the first argument passing through, in `gc_step` segments.
    """
    if not isinstance(module, Iterable):
        marked = getattr(module, "grad_checkpointing", False)
        return checkpoint(module, *args, **kwargs) if marked else module(*args, **kwargs)
    blocks = list(module)
    if not blocks:
        raise ValueError("auto_grad_checkpoint was given an empty list of blocks")
    if not getattr(blocks[0], "grad_checkpointing", False):
        return _run_segment(blocks, *args, **kwargs)
    num_segments = min(int(getattr(blocks[0], "grad_checkpointing_step", 1)), len(blocks))
    hidden, *others = args
    for index in range(num_segments):
        start, end = (len(blocks) * i // num_segments for i in (index, index + 1))
        hidden = checkpoint(partial(_run_segment, blocks[start:end]), hidden, *others, **kwargs)
    return hidden


def _run_segment(blocks: Sequence[nn.Module], hidden: Any, *args: Any, **kwargs: Any) -> Any:
    for block in blocks:
        hidden = block(hidden, *args, **kwargs)
    return hidden
