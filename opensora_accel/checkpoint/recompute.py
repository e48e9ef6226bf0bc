"""One checkpointed call, and Open-Sora's names for it: recomputed in backward, its input in host memory meanwhile.

Always on torch's non-reentrant engine. So keyword arguments, nested calls and inputs without gradient work, and the
tensors that it keeps for the recomputation pass through autograd's hooks, where the offload engine takes the marked
ones. What happens to `y = checkpoint(block, x, timestep)`:

    forward     block(x, timestep) runs without a graph of its own; x is copied out, timestep stays on the device
    in between  autograd holds a ticket for x, and nothing of what the block has computed
    backward    x is copied in, mostly in advance; block(x, timestep) runs again with a graph; gradients flow
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from opensora_accel.checkpoint.selective import attention_contexts
from opensora_accel.offload import GLOBAL_ACTIVATION_MANAGER, Measurement, OffloadEngine, can_move, is_plain
from opensora_accel.regions import region

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

# For every forward that runs now, the outermost first.
_preserving: list[Wrapper] = []


@contextmanager
def preserve_state(wrapper: Wrapper) -> Iterator[None]:
    """Within it, what is checkpointed is `wrapper(function)`: called in forward and again in the recomputation.

    For state that belongs to a forward and is gone when the recomputation runs.
    """
    _preserving.append(wrapper)
    try:
        yield
    finally:
        _preserving.remove(wrapper)


def with_preserved_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a checkpoint that runs now must call it: in all wrappers of `preserve_state`."""
    for wrapper in _preserving:
        function = wrapper(function)
    return function


def run_checkpointed(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    engine: OffloadEngine,
    *,
    marked: Sequence[Tensor],
    selective: bool = False,
    measurement: Measurement | None = None,
    **options: Any,
) -> Any:
    """`function(*args, **kwargs)`, recomputed in backward; gradients must be enabled.

    Args:
        marked: those of `args` that wait in host memory.
        selective: attention's outputs are kept, or moved where anything is marked.
        options: of `torch.utils.checkpoint.checkpoint`.
    """
    assert torch.is_grad_enabled()
    function = with_preserved_state(function)
    # Autograd rebuilds what its hooks return as a plain tensor, except of wrappers (DTensor).
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if marked and not all(is_plain(t) or is_traceable_wrapper_subclass(t) for t in tensors):
        engine.keep(marked, "an argument is of a subclass of Tensor, which autograd's hooks lose")
        marked = ()
    with engine.call(marked, measurement) as call:
        # torch calls `run` once in forward; every later call is a recomputation, in backward.
        is_recomputation = False

        def run(*run_args: Any, **run_kwargs: Any) -> Any:
            nonlocal is_recomputation
            if not is_recomputation:
                is_recomputation = True
                return function(*run_args, **run_kwargs)
            with region("block", phase="recompute"):
                engine.begin_backward(call)
                return function(*run_args, **run_kwargs)

        if selective:
            options["context_fn"] = attention_contexts(engine, call if marked else None)
        return torch_checkpoint(run, *args, use_reentrant=False, **options, **kwargs)


def tensors_at(positions: Sequence[int], args: Sequence[Any]) -> list[Tensor]:
    """The tensors there, and those of `args` that share memory with them.

    A block may return two slices of one tensor: while one of them stays, all of the memory does.
    """
    marked = [args[i] for i in positions if i < len(args) and isinstance(args[i], Tensor)]
    # By memory, not by tensor: views of one tensor keep all of it alive.
    storages = {tensor.untyped_storage()._cdata for tensor in marked if can_move(tensor)}
    others = [
        arg
        for i, arg in enumerate(args)
        if i not in positions and isinstance(arg, Tensor) and can_move(arg)
        if arg.untyped_storage()._cdata in storages
    ]
    return [*marked, *others]


# ---- Open-Sora's calls: the same names, arguments and order


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
    # Without a graph nothing is kept that a recomputation could save.
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return run_checkpointed(
        function,
        args,
        kwargs,
        GLOBAL_ACTIVATION_MANAGER.engine,
        marked=tensors_at(offload_args, args),
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

    Raises:
        ValueError: no module, or fewer than one segment.
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

    Raises:
        ValueError: an empty list.
    """
    if not isinstance(module, Iterable):
        marked = getattr(module, "grad_checkpointing", False)
        return checkpoint(module, *args, **kwargs) if marked else module(*args, **kwargs)
    blocks = list(module)
    if not blocks:
        raise ValueError("auto_grad_checkpoint was given an empty list of blocks")
    if not getattr(blocks[0], "grad_checkpointing", False):
        return _run_segment(blocks, *args, **kwargs)
    # Of 10 blocks in 4 segments: 2, 3, 2, 3.
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
