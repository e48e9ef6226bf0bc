"""One checkpointed call: torch's non-reentrant engine, with the offload engine told when backward reaches it.

Always non-reentrant: keyword arguments, nested calls and inputs without gradient work, and the tensors that it keeps
for the recomputation pass through autograd's hooks, where the offload engine takes the marked ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from opensora_accel.offload import GLOBAL_ACTIVATION_MANAGER, Call
from opensora_accel.offload.layout import can_move, is_plain
from opensora_accel.offload.measure import Measurement

Contexts = Callable[[Call], Callable[[], tuple[Any, Any]]]
Carry = Callable[[Callable[..., Any]], Callable[..., Any]]

_carriers: list[Carry] = []


@contextmanager
def carrying(carry: Carry) -> Iterator[None]:
    """Within it, what is checkpointed is `carry(function)`: called in forward and again in the recomputation.

    For state that belongs to a forward and is gone when the recomputation runs.
    """
    _carriers.append(carry)
    try:
        yield
    finally:
        _carriers.remove(carry)


def carried(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a checkpoint that runs now must call it: with everything that is being carried."""
    for carry in _carriers:
        function = carry(function)
    return function


def checkpointed(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    marked: Sequence[Tensor],
    contexts: Contexts | None = None,
    measurement: Measurement | None = None,
    **options: Any,
) -> Any:
    """`function(*args, **kwargs)`, recomputed in backward; gradients must be enabled.

    Args:
        marked: those of `args` that wait in host memory.
        contexts: for an open call, torch's `context_fn`.
        options: of `torch.utils.checkpoint.checkpoint`.
    """
    assert torch.is_grad_enabled()
    function = carried(function)
    if marked and any(map(_loses_its_class, args)):
        GLOBAL_ACTIVATION_MANAGER.keep(
            marked, "an argument is of a subclass of Tensor, which autograd's hooks lose"
        )
        marked = ()
    with GLOBAL_ACTIVATION_MANAGER.call(marked, measurement) as call:
        is_recomputation = False

        def run(*run_args: Any, **run_kwargs: Any) -> Any:
            nonlocal is_recomputation
            if is_recomputation:
                GLOBAL_ACTIVATION_MANAGER.begin_backward(call)
            is_recomputation = True
            return function(*run_args, **run_kwargs)

        if contexts is not None:
            options["context_fn"] = contexts(call)
        return torch_checkpoint(run, *args, use_reentrant=False, **options, **kwargs)


def at_positions(positions: Sequence[int], args: Sequence[Any]) -> list[Tensor]:
    """The tensors there, and those of `args` that share memory with them.

    A block may return two slices of one tensor: while one of them stays, all of the memory does.
    """
    marked = [args[i] for i in positions if i < len(args) and isinstance(args[i], Tensor)]
    storages = {tensor.untyped_storage()._cdata for tensor in marked if can_move(tensor)}
    others = [
        arg
        for i, arg in enumerate(args)
        if i not in positions and isinstance(arg, Tensor) and can_move(arg)
        if arg.untyped_storage()._cdata in storages
    ]
    return [*marked, *others]


def _loses_its_class(argument: Any) -> bool:
    """Autograd rebuilds what its hooks return as a plain tensor, except of wrappers (DTensor)."""
    return (
        isinstance(argument, Tensor)
        and not is_plain(argument)
        and not is_traceable_wrapper_subclass(argument)
    )
