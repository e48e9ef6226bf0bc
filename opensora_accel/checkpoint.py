"""Activation checkpointing with the marked block input in host memory. Open-Sora's names, on torch's engine.

Always torch's non-reentrant engine: keyword arguments, nested calls and inputs without gradient work, and the
tensors it keeps for the recomputation pass through autograd's hooks, where `offload` takes the marked ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from opensora_accel.offload import GLOBAL_ACTIVATION_MANAGER, ActivationManager
from opensora_accel.wrapping import Forward, wrap_forward

__all__ = [
    "GLOBAL_ACTIVATION_MANAGER",
    "ActivationManager",
    "CheckpointFunctionWithOffload",
    "auto_grad_checkpoint",
    "checkpoint",
    "checkpoint_blocks",
    "set_grad_checkpoint",
]

Scope = Callable[[], AbstractContextManager[Any]]

_ATTENTION_KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


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
    marked = [args[i] for i in offload_args if i < len(args) and isinstance(args[i], Tensor)]
    with GLOBAL_ACTIVATION_MANAGER.saving(marked):
        return torch_checkpoint(
            function,
            *args,
            use_reentrant=False,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            preserve_rng_state=preserve_rng_state,
            **kwargs,
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


def checkpoint_blocks(
    blocks: Sequence[nn.Module],
    mode: Literal["full", "selective"],
    offload: float | Literal["auto"] = 0.0,
    *,
    boundary: Sequence[str] = (),
    capture_scope: Callable[[], Scope] | None = None,
) -> Callable[[], None]:
    """Checkpoints every block's forward in place; returns the function that undoes it.

    The wrapper sits inside `block.__call__`, so hooks of the block (FSDP's, for one) run outside of it, and names
    and parameters stay as they are.

    Args:
        blocks: in the order in which they run.
        mode: "full" recomputes everything; "selective" keeps the attention kernels' outputs.
        offload: share of the blocks, from the first, whose boundary tensors wait in host memory. "auto" moves
            all but the last block's, which backward needs at once.
        boundary: names of the forward arguments that are moved; by default the first one.
        capture_scope: called at every forward; the scope that it returns is entered around the recomputation.
    """
    num_offloaded = len(blocks) - 1 if offload == "auto" else round(float(offload) * len(blocks))
    context_fn = _keep_attention if mode == "selective" else noop_context_fn
    undo_each = []
    for index, block in enumerate(blocks):
        moved = boundary if index < num_offloaded else None
        scope = capture_scope or (lambda: nullcontext)
        undo_each.append(wrap_forward(block, partial(_checkpointed, context_fn, moved, scope)))

    def undo() -> None:
        for step in reversed(undo_each):
            step()

    return undo


def _checkpointed(
    context_fn: Callable[[], tuple[Any, Any]],
    boundary: Sequence[str] | None,
    capture_scope: Callable[[], Scope],
    original: Forward,
) -> Forward:
    signature = inspect.signature(original)
    positions = [] if boundary is None else _positions(signature, boundary)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        scope = capture_scope()

        def run(*run_args: Any, **run_kwargs: Any) -> Any:
            with scope():
                return original(*run_args, **run_kwargs)

        # Tensors passed by keyword become positional: the engine keeps only those where hooks can see them.
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return checkpoint(run, *bound.args, context_fn=context_fn, offload_args=positions, **bound.kwargs)

    return forward


def _positions(signature: inspect.Signature, boundary: Sequence[str]) -> list[int]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
    for name in boundary:
        if name not in names:
            raise ValueError(
                f"the block's forward has no argument {name!r} to offload; it has {', '.join(names)}"
            )
    return [names.index(name) for name in boundary] or [0]


def _keep_attention() -> tuple[Any, Any]:
    """Contexts that keep what attention kernels return (output and log-sum-exp) and recompute the rest."""
    kept = {
        getattr(torch.ops.aten, name).default for name in _ATTENTION_KERNELS if hasattr(torch.ops.aten, name)
    }

    def policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
