"""Decisions by the tokens: which blocks a forward leaves out must be the same on all ranks that share a sample.

A cache asks by how much the tokens have changed since the last step, and leaves out blocks where it is little. With
P = 3 ranks and a threshold of 0.06, each would ask by its own tokens:

    rank 0: 0.087 → computes      rank 1: 0.030 → skips      rank 2: 0.059 → skips      one device: 0.059 → skips

Rank 0 then waits in the next attention for the others, without end. So such a number is made of all ranks' tokens: for
diffusers' first-block cache here, and in code of one's own by `sum_over_tokens`. Code that reads a number out of a
rank's tokens in any other way is refused. A mode marks what is made of a rank's tokens, in the model's first forward
with gradients and in every forward without, where caches are used. A tensor without a mark is the same on all ranks: it
was there before the tokens were split, or was made beside them, as a scheduler's timesteps are. What a compiled
function returns has none.

The marks cost time for every call of a torch function. A forward without gradients of 12 blocks of 384 channels, 320
tokens on 2 CPU ranks, takes 0.98 to 1.07 times as long with them, and one of 2 blocks of 36 channels 1.2 to 1.4 times
(four runs, November 2026).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opensora_accel.arguments import tensors_in
from shardformer.spread import Tokens, is_own, mark_own, running_tokens

# What makes one answer of two tensors.
_COMPARES = {torch.equal, torch.allclose, Tensor.equal, Tensor.allclose}
# And what makes Python numbers of one: by either a program may then decide.
_READS = _COMPARES | {torch.is_nonzero}
_READS |= {
    getattr(Tensor, name)
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "is_nonzero", "numpy", "__array__")
}
# A cache asks by some numbers; a model that reads more than these, of a whole tensor, does not decide by them.
_MOST_NUMBERS = 64
# What holds nothing yet: a collective may write a rank's tokens to it.
_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
_PLACES = ("torch.", "opensora_accel.", "shardformer.")
_DECIDE_NOTHING = ("torch.distributed.fsdp.", "shardformer.modeling.masks")


def sum_over_tokens(tensor: Tensor) -> Tensor:
    """A sum over this rank's tokens becomes the sum over all ranks' tokens, in the sharded forward that runs.

    For code that decides by its tokens, as a cache does. A mean is a quotient of two such sums. Outside of a sharded
    forward, and where the tokens are not split, it is the tensor itself, so that one line serves a single device too.
    There is no gradient.

    Args:
        tensor: of any shape, the same on all ranks.

    Communication: one all-reduce of it.
    """
    tokens = running_tokens()
    if tokens is None or tokens.state.splits is None or tokens.state.have_ended or tokens.group.size() == 1:
        return tensor
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    with torch._C.DisableTorchFunction():  # it is known what this is made of
        dist.all_reduce(total, group=tokens.group)
    return mark_own(total, False)


@contextmanager
def watch_decisions(model: nn.Module, tokens: Tokens) -> Iterator[None]:
    """Within it, a forward's caches decide by all ranks' tokens, and other decisions by a rank's own are refused."""
    for module in model.modules():  # at every forward: caches are enabled later, too
        registry = vars(module).get("_diffusers_hook")
        hook = None if registry is None else registry.get_hook("fbc_leader_block_hook")
        if hook is not None:
            hook._should_compute_remaining_blocks = functools.partial(has_changed, hook)
    if not _is_watched(model, tokens):
        yield
        return
    with _Reads(model, tokens):
        yield


def _is_watched(model: nn.Module, tokens: Tokens) -> bool:
    # Compiled code ends its graph under a mode; its first forward runs uncompiled.
    return tokens.state.is_first or not (
        torch.is_grad_enabled() or any(module._compiled_call_impl is not None for module in model.modules())
    )


class _Reads(TorchFunctionMode):
    """Marks what is made of a rank's own tokens, and refuses to read a number out of it."""

    def __init__(self, model: nn.Module, tokens: Tokens):
        super().__init__()
        self._model, self._tokens = model, tokens

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():  # a function that the model compiles by itself is not followed
            return function(*args, **kwargs or {})
        has_own = _have_own(args) or (kwargs is not None and _have_own(kwargs.values()))
        if has_own and function in _READS and self._decides(function, args, kwargs) and (caller := _caller()):
            raise ValueError(
                f"{caller} reads a number out of one rank's tokens while {type(self._model).__name__} runs: ranks "
                "that decide by it, which blocks to leave out for one, would wait for each other without end. Make it "
                "of all tokens, by shardformer.sum_over_tokens(sum of this rank's tokens); what is only logged is read "
                "after the forward"
            )
        out = function(*args, **kwargs or {})
        if has_own or function in _EMPTY:
            # What is written to in place is returned, except by an assignment to a part of it.
            for tensor in tensors_in(args[0] if function is Tensor.__setitem__ else out):
                mark_own(tensor)
        return out

    def _decides(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Whether a program may choose by what is read. Counts and indices are a rank's own."""
        state = self._tokens.state
        if state.splits is None or state.have_ended:
            return False
        tensor = tensors_in((args, kwargs or {}))[0]
        is_few = function in _COMPARES or tensor.numel() <= _MOST_NUMBERS
        return is_few and (tensor.is_floating_point() or tensor.dtype == torch.bool)


def _have_own(values: Iterable[Any]) -> bool:
    """Whether there is a tensor of a rank's own tokens among the values, or in lists, tuples and dicts of them."""
    for value in values:
        if isinstance(value, Tensor):
            if is_own(value):
                return True
        elif isinstance(value, (tuple, list, dict)) and _have_own(
            value.values() if isinstance(value, dict) else value
        ):
            return True
    return False


def _caller() -> str | None:
    """The line of code that reads, outside of torch and of this project; None where it decides nothing by tokens.

    FSDP gathers weights, into empty buffers that a collective writes to, as those of tokens are. Of masks the ranks
    decide alike (`MaskReader`).
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and (name := frame.f_globals.get("__name__", "")).startswith(_PLACES):
        if name.startswith(_DECIDE_NOTHING):
            return None
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def has_changed(hook: Any, residual: Tensor) -> bool:
    """Whether what the first block adds to the tokens, [B, S/P, C], has changed by more than the cache's threshold.

    Communication: one all-reduce of two numbers.
    """
    before = hook.state_manager.get_state().head_block_residual
    if before is None:
        return True
    # Over all tokens, as on one device: a ratio of sums is that of means.
    sums = torch.stack([each.abs().sum(dtype=torch.float32) for each in (residual - before, before)])
    change, size = sum_over_tokens(sums).tolist()
    return bool(change > hook.threshold * size)
