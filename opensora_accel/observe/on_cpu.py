"""A step in fp64 on CPU ranks: a model fit for it, and stand-ins for what only runs beside an accelerator.

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

import torch
from torch import Tensor, nn

from opensora_accel.observe.call_site import find_call_site
from opensora_accel.observe.meshes import Run
from opensora_accel.precision import LiftOperations, widest
from opensora_accel.wrapping import replaced

_aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def casts_lifted(halves: dict[str, None]) -> Iterator[None]:
    """Within it fp64 stays fp64, and `halves` takes the dtype and the line of every cast or autocast to half precision.

    In training these round, which the proof does not see; casts to fp32 are in nearly every model.
    """

    def note(dtype: torch.dtype | None, how: str = "") -> None:
        if dtype in _HALVES:
            halves[f"{how}{str(dtype).removeprefix('torch.')} at {find_call_site().caller}"] = None

    enter = torch.autocast.__enter__

    def noted(region: torch.autocast) -> Any:
        if region._enabled:
            note(region.fast_dtype, "autocast to ")
        return enter(region)

    with replaced(torch.autocast, "__enter__", noted), LiftOperations(note):
        yield


def prepare_model(model: nn.Module, *, keeps_dropout: bool = False) -> list[str]:
    """Makes the model fit for a proof in fp64, and returns what was changed, in sentences.

    Its parameters become fp64, its dropouts 0. A parameter with one value throughout gets others: behind a gate of 0
    every gradient is 0, right or wrong.
    """
    notes = []
    model._apply(widest)
    dropouts = [] if keeps_dropout else [module for module in dropouts_of(model) if module.p > 0]
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


def dropouts_of(model: nn.Module) -> list[nn.modules.dropout._DropoutNd]:
    """Of all kinds and numbers of dimensions."""
    return [module for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]


@contextlib.contextmanager
def accelerator_stand_ins() -> Iterator[None]:
    """Within it, code that needs an accelerator finds one where there is none."""
    if torch.accelerator.is_available():
        yield
        return

    def enter_on_cpu(region: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(region, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    autocast: Any = torch.autocast.__init__
    with (
        replaced(torch.accelerator, "device_count", lambda: 1),
        replaced(torch.autocast, "__init__", enter_on_cpu),
    ):
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
    with replaced(torch.amp.GradScaler, "_enabled", never):
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

    with replaced(os, "_exit", refuse):
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
def launcher_environment(run: Run, ranks_per_node: int | None = None) -> Iterator[None]:
    """Within it, the environment that torchrun gives a rank: accelerate and others look nowhere else.

    accelerate remembers for the life of a process what it found; it is made to forget, as the next mesh is another.
    `ranks_per_node` divides all of them; by default they are on one machine, where the local rank is the rank.
    """
    own = ranks_per_node or run.world_size
    place = {"RANK": run.rank, "LOCAL_RANK": run.rank % own, "GROUP_RANK": run.rank // own}
    place |= {"WORLD_SIZE": run.world_size, "LOCAL_WORLD_SIZE": own}
    rest = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    _forget_accelerate()  # what was found by whoever had this process before
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in place.items()} | rest)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        _forget_accelerate()


def _forget_accelerate() -> None:
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
