"""A step in fp64 on CPU ranks: precision that stays double, and stand-ins for what only runs beside an accelerator.

Nearly every transformer of diffusers calls `.float()` or `.to(torch.float32)` somewhere, so an "fp64" run of it
carries fp32 noise: the gradients of two halves of a loss then add up to the whole to 3e-7 only, and to 1e-14 with
the casts lifted (Wan, CPU, torch 2.13, 2026-11).

diffusers' `enable_parallelism` divides by the number of accelerators, and its ring calls torch's flash attention for
CUDA, as it needs the log-sum-exp (0.42.1). Here a CPU counts as one accelerator, and torch's flash kernel for CPUs runs
under the name of the other, so that all around it is diffusers' own.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_accel.verify.meshes import Run
from opensora_accel.verify.parameters import widest
from opensora_accel.wrapping import Forward, wrap_forward

_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type_as}
_aten = torch.ops.aten
_FACTORIES = {
    *(_aten.zeros, _aten.ones, _aten.empty, _aten.full, _aten.arange, _aten.linspace, _aten.rand, _aten.randn),
    *(_aten.scalar_tensor, _aten._to_copy),  # a cast of whole numbers makes a value as well
}  # fmt: skip


def _narrow(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype != torch.float64


class LiftCasts(TorchFunctionMode):
    """Within it, an fp64 tensor is never cast to a narrower floating-point type."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], Tensor) or args[0].dtype != torch.float64:
            return function(*args, **kwargs)
        if function in _CASTS and not (function is Tensor.type_as and not args[1].is_floating_point()):
            return args[0]
        # `x.to(other)` takes other's dtype.
        if function is Tensor.to:
            args = tuple(
                torch.float64 if _narrow(arg) else widest(arg) if isinstance(arg, Tensor) else arg
                for arg in args
            )
        if _narrow(kwargs.get("dtype")):
            kwargs = {**kwargs, "dtype": torch.float64}
        return function(*args, **kwargs)


class LiftOperations(TorchDispatchMode):
    """`LiftCasts` for all that runs within it, backward and recomputation too, where function modes are off.

    What is made in fp32 from nothing or from whole numbers is made in fp64 as well, since it will meet fp64. Slower
    than `LiftCasts`, and not seen by torch.compile.

    Args:
        lifted: takes the type and the line of every cast to half precision that was lifted. In training these round,
            which the proof does not see; casts to fp32 are in nearly every model.
    """

    def __init__(self, lifted: dict[str, None] | None = None):
        super().__init__()
        self._lifted = lifted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Below autograd: what backward computes comes by here too.
        is_double = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if (is_double or func.overloadpacket in _FACTORIES) and _narrow(kwargs.get("dtype")):
            if self._lifted is not None and func.overloadpacket is _aten._to_copy and is_double:
                _note_half(self._lifted, "", kwargs["dtype"])
            kwargs = {**kwargs, "dtype": torch.float64}
        result = func(*args, **kwargs)
        is_literal = func is _aten.lift_fresh.default  # torch.tensor(numbers, dtype=torch.float32)
        return result.double() if is_literal and _narrow(result.dtype) else result


def _note_half(lifted: dict[str, None], how: str, dtype: torch.dtype | None) -> None:
    if dtype in (torch.bfloat16, torch.float16):
        from opensora_accel.verify.communication.call_site import find_call_site  # imports this module

        lifted[f"{how}{str(dtype).removeprefix('torch.')} at {find_call_site().caller}"] = None


@contextlib.contextmanager
def noting_autocast(lifted: dict[str, None]) -> Iterator[None]:
    """Within it, `lifted` takes the regions of autocast to half precision: fp64 goes through them as it is."""
    enter = torch.autocast.__enter__

    def noted(region: torch.autocast) -> Any:
        if region._enabled:
            _note_half(lifted, "autocast to ", region.fast_dtype)
        return enter(region)

    with mock.patch.object(torch.autocast, "__enter__", noted):
        yield


def lift_casts(model: nn.Module) -> Callable[[], None]:
    """Makes the model's forward keep fp64 as fp64; returns the function that undoes it.

    The recomputation of a checkpointed block runs outside of the model's forward, and keeps fp64 too. Therefore call
    this before checkpointing is applied, and undo it after that is undone.
    """

    def lifted(original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with LiftCasts():
                return original(*args, **kwargs)

        return forward

    # Blocks are wrapped by themselves too: checkpointing calls them again without the model.
    lists = (child for child in model.modules() if isinstance(child, nn.ModuleList))
    modules = [model, *(block for blocks in lists for block in blocks)]
    undo_each = [wrap_forward(module, lifted) for module in modules]

    def undo() -> None:
        for step in reversed(undo_each):
            step()

    return undo


def prepare_model(model: nn.Module) -> list[str]:
    """Makes the model fit for a proof in fp64, and returns what was changed, in sentences.

    Its parameters become fp64, its dropouts 0. A parameter with one value throughout gets others: behind a gate of 0
    every gradient is 0, right or wrong.
    """
    notes = []
    model._apply(widest)
    # All kinds of dropout, of any number of dimensions.
    dropouts = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
    for dropout in dropouts:
        dropout.p = 0.0
    if dropouts:
        notes.append(f"{len(dropouts)} dropouts were set to 0: a split sequence cannot draw the same masks")
    numbers = [p for p in model.named_parameters() if p[1].is_floating_point() or p[1].is_complex()]
    filled = [(n, p) for n, p in numbers if p.numel() and not p.is_meta]
    constant = [(n, p) for n, p in filled if bool((p == p.flatten()[0]).all())]
    for name, parameter in constant:
        # Random values that depend on the name alone, near what is there.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        fan_in = math.prod(parameter.shape[1:]) if parameter.dim() > 1 else 25
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        # Small enough beside the fan-in that activations keep their size.
        noise *= 0.5 / math.sqrt(fan_in)
        with torch.no_grad():
            # A scale under a root keeps its sign.
            parameter.copy_(parameter * noise.exp() if parameter.any() else parameter + noise)
    if constant:
        notes.append(
            f"{len(constant)} parameters with one value throughout (gates and biases of 0, norms of 1) were given "
            "random ones: behind a gate of 0 every gradient is 0, right or wrong"
        )
    return notes


@contextlib.contextmanager
def accelerator_stand_ins() -> Iterator[None]:
    """Within it, code that needs an accelerator finds one where there is none."""
    if torch.accelerator.is_available():
        yield
        return
    with mock.patch.object(torch.accelerator, "device_count", return_value=1):
        kernels = flash_attention_of_cuda()
        try:
            yield
        finally:
            kernels._destroy()


def flash_attention_of_cuda() -> torch.library.Library:
    """torch's flash attention for CUDA, on CPU tensors [B, H, S, D], for as long as what is returned lives."""

    # torch leaves out what has its default.
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        causal: bool = False,
        *_: Any,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """q, k, v [B, H, S, D] → output [B, H, S_q, D], log-sum-exp [B, H, S_q], and what CUDA's adds."""
        operation = _aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = operation(q, k, v, dropout_p, causal, scale=scale)
        lengths, seeds = (torch.empty(0), torch.empty(0)), (torch.empty(0), torch.empty(0))
        return out, lse, *lengths, q.size(2), k.size(2), *seeds, torch.empty(0)

    def backward(grad: Tensor, *given: Any, scale: float | None = None) -> tuple[Tensor, ...]:
        """grad: [B, H, S_q, D] → gradients [B, H, S, D] of q, k and v."""
        q_to_lse, (dropout_p, causal) = given[:5], given[9:11]  # in between are lengths, after them seeds
        operation = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return operation(grad, *q_to_lse, dropout_p, causal, scale=scale)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    return library


@contextlib.contextmanager
def without_loss_scaling() -> Iterator[None]:
    """Within it every GradScaler is one that is not enabled: fp64 has nothing to scale, and torch no kernel for it."""

    def ignore(scaler: torch.amp.GradScaler, enabled: bool) -> None:
        vars(scaler)["_enabled"] = enabled  # as it was, afterwards

    # A property of the class stands before what an instance has under the same name.
    never = property(lambda scaler: False, ignore)
    with mock.patch.object(torch.amp.GradScaler, "_enabled", never, create=True):
        yield


class ProcessExit(SystemExit):
    """In the place of `os._exit`, which would end the proof as well, with the status that it was given."""


@contextlib.contextmanager
def without_exit() -> Iterator[None]:
    """Within it, `os._exit` raises; in another thread it ends the process, but not with success.

    Raises:
        ProcessExit: this thread calls it.
    """
    leave, process, thread = os._exit, os.getpid(), threading.get_ident()

    def refuse(status: int) -> Any:
        # The worker of a DataLoader, forked within the step, ends itself so.
        if os.getpid() != process:
            leave(status)
        if threading.get_ident() != thread:
            print(
                f"error: a thread of the step ends the process: os._exit({status})",
                file=sys.stderr,
                flush=True,
            )
            leave(2)
        raise ProcessExit(f"os._exit({status})")

    with mock.patch.object(os, "_exit", refuse):
        yield


def call_to_its_end(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`.

    Raises:
        ValueError: it ends the process.
    """
    with without_exit():
        try:
            return function(*arguments)
        except SystemExit as end:
            how = str(end) if isinstance(end, ProcessExit) else f"sys.exit({end.code!r})"
            raise ValueError(
                f"{name} ends its process: {how}; it has to return, as nothing is proven otherwise"
            ) from end


@contextlib.contextmanager
def launcher_environment(run: Run) -> Iterator[None]:
    """Within it, the environment that torchrun gives a rank: accelerate and others look nowhere else.

    accelerate remembers for the life of a process what it found; it is made to forget, as the next mesh is another.
    """
    # All ranks are on this machine: the local rank is the rank.
    place = dict.fromkeys(("RANK", "LOCAL_RANK"), str(run.rank))
    place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(run.world_size))
    rest = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    _forget_accelerate()  # what was found by whoever had this process before
    with mock.patch.dict(os.environ, place | rest):
        try:
            yield
        finally:
            _forget_accelerate()


def _forget_accelerate() -> None:
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
