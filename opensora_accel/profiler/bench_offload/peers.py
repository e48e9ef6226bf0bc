"""What others do with a block's input: torch's `save_on_cpu`, Open-Sora's stack, torchtune's streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


@dataclass
class Traffic:
    """Bytes that a peer copies, and a way to make host memory that is not counted as the device's."""

    out_bytes: int = 0
    in_bytes: int = 0
    on_host: Callable[[], contextlib.AbstractContextManager[Any]] = field(default=contextlib.nullcontext)

    def clear(self) -> None:
        self.out_bytes = self.in_bytes = 0


class SaveOnCpu:
    """torch's checkpoint for each block; what it saves, its inputs, goes through torch's `save_on_cpu`."""

    def __init__(self, blocks: Sequence[nn.Module], traffic: Traffic):
        self._blocks, self._traffic = blocks, traffic

    def __call__(self, hidden: Tensor, timestep: Tensor) -> Tensor:
        for block in self._blocks:
            hooks = save_on_cpu(pin_memory=torch.cuda.is_available())
            with _counted(hooks, self._traffic):
                hidden = checkpoint(block, hidden, timestep, use_reentrant=False, preserve_rng_state=False)
        return hidden


class TorchtuneOffload:
    """torch's checkpoint for each block within torchtune's `OffloadActivations`."""

    def __init__(self, blocks: Sequence[nn.Module], traffic: Traffic):
        from torchtune.training import OffloadActivations

        self._blocks, self._traffic, self._make_hooks = blocks, traffic, OffloadActivations

    def __call__(self, hidden: Tensor, timestep: Tensor) -> Tensor:
        # A new one for each step: an aborted step leaves entries behind, which it refuses to start with.
        with _counted(self._make_hooks(), self._traffic, smallest_bytes=1024):
            for block in self._blocks:
                hidden = checkpoint(block, hidden, timestep, use_reentrant=False, preserve_rng_state=False)
        return hidden


def why_no_torchtune(device: torch.device) -> str | None:
    """One line where torchtune cannot run here; None where it can."""
    try:
        from torchtune.training import OffloadActivations  # noqa: F401
    except ModuleNotFoundError as error:
        return "not installed" if error.name == "torchtune" else f"not importable: {_one_line(error)}"
    except Exception as error:  # noqa: BLE001  another package's import, which may fail in any way
        return f"not importable: {_one_line(error)}"
    return None if device.type == "cuda" else "its OffloadActivations asks for CUDA streams"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _counted(hooks: saved_tensors_hooks, traffic: Traffic, smallest_bytes: int = 1) -> saved_tensors_hooks:
    """The same hooks, which also count; smaller tensors stay where they are."""
    pack_hook, unpack_hook = hooks.pack_hook, hooks.unpack_hook

    def pack(tensor: Tensor) -> Any:
        if tensor.nbytes < smallest_bytes:
            return 0, pack_hook(tensor)
        traffic.out_bytes += tensor.nbytes
        if tensor.device.type == "cpu":
            # There `tensor.cpu()` is the tensor itself: the host copy is made here, as it would be on a device.
            with traffic.on_host():
                tensor = tensor.clone()
        return tensor.nbytes, pack_hook(tensor)

    def unpack(counted: tuple[int, Any]) -> Tensor:
        size_bytes, packed = counted
        # torchtune still has the latest ones on the device.
        traffic.in_bytes += 0 if _is_stashed(hooks, packed) else size_bytes
        tensor = unpack_hook(packed)
        return tensor.clone() if size_bytes and tensor.device.type == "cpu" else tensor

    hooks.pack_hook, hooks.unpack_hook = pack, unpack
    return hooks


def _is_stashed(hooks: saved_tensors_hooks, packed: Any) -> bool:
    return isinstance(packed, int) and packed in getattr(hooks, "fwd_stash", {})


class HostStack:
    """One flat host buffer of a fixed size: a tensor is pushed on its end, or popped from it, while all wait."""

    def __init__(self, num_elements: int, dtype: torch.dtype, traffic: Traffic):
        self.buffer = torch.empty(num_elements, dtype=dtype, pin_memory=torch.cuda.is_available())
        self._top, self._traffic = 0, traffic

    def clear(self) -> None:
        self._top = 0

    def push(self, tensor: Tensor) -> torch.Size:
        self._piece(self._top, tensor.numel()).copy_(tensor.detach().view(-1))
        self._top += tensor.numel()
        self._traffic.out_bytes += tensor.nbytes
        return tensor.shape

    def pop(self, shape: torch.Size, device: torch.device) -> Tensor:
        self._top -= shape.numel()
        tensor = torch.empty(shape, dtype=self.buffer.dtype, device=device)
        tensor.view(-1).copy_(self._piece(self._top, shape.numel()))
        self._traffic.in_bytes += tensor.nbytes
        return tensor

    def _piece(self, start: int, num_elements: int) -> Tensor:
        return self.buffer[start : start + num_elements]


class StackedCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint whose one big input lies on the stack between forward and backward."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, stack: HostStack, hidden: Tensor, timestep: Tensor) -> Tensor:
        ctx.block, ctx.stack, ctx.device = block, stack, hidden.device
        ctx.shape = stack.push(hidden)
        ctx.save_for_backward(timestep)
        with torch.no_grad():
            return block(hidden, timestep)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor | None, Tensor | None]:
        hidden = ctx.stack.pop(ctx.shape, ctx.device).requires_grad_()
        timestep = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.block(hidden, timestep)
        torch.autograd.backward(output, gradients[0])
        return None, None, hidden.grad, timestep.grad


class SynchronousStack:
    """Open-Sora's scheme, written from its description: every block's input, copied at once, last in first out."""

    def __init__(self, blocks: Sequence[nn.Module], stack: HostStack):
        self._blocks, self._stack = blocks, stack

    def __call__(self, hidden: Tensor, timestep: Tensor) -> Tensor:
        self._stack.clear()  # an aborted step leaves entries behind
        for block in self._blocks:
            hidden = StackedCheckpoint.apply(block, self._stack, hidden, timestep)
        return hidden
