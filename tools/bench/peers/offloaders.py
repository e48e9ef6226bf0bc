"""What others do with a block's input: torch's `save_on_cpu`, Open-Sora's stack, torchtune's streams.

Each takes the blocks and a `Traffic` and is called with hidden [B, S, C] and timestep [B, C], as all blocks are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    on_host: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


class SaveOnCpu:
    """torch's checkpoint for each block; what it saves, its inputs, goes through torch's `save_on_cpu`."""

    smallest_bytes = 1

    def __init__(self, blocks: Sequence[nn.Module], traffic: Traffic):
        self._blocks, self._traffic = blocks, traffic

    def hooks(self) -> saved_tensors_hooks:
        return save_on_cpu(pin_memory=torch.cuda.is_available())

    def __call__(self, hidden: Tensor, timestep: Tensor) -> Tensor:
        with _counted(self.hooks(), self._traffic, self.smallest_bytes):
            for block in self._blocks:
                hidden = checkpoint(block, hidden, timestep, use_reentrant=False, preserve_rng_state=False)
        return hidden


class TorchtuneOffload(SaveOnCpu):
    """The same through torchtune's `OffloadActivations`."""

    smallest_bytes = 1024

    def hooks(self) -> saved_tensors_hooks:
        """New ones for each step: an aborted step leaves entries behind, which they refuse to start with."""
        from torchtune.training import OffloadActivations

        return OffloadActivations()


def why_no_torchtune(device: torch.device) -> str | None:
    """One line where torchtune cannot run here; None where it can."""
    try:
        from torchtune.training import OffloadActivations  # noqa: F401
    except Exception as error:  # noqa: BLE001 - another package's import, which may fail in any way
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torchtune"
        return "not installed" if missing else f"not importable: {' '.join(str(error).split())}"
    return None if device.type == "cuda" else "its OffloadActivations asks for CUDA streams"


def _counted(hooks: saved_tensors_hooks, traffic: Traffic, smallest_bytes: int) -> saved_tensors_hooks:
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
        is_stashed = isinstance(packed, int) and packed in getattr(hooks, "fwd_stash", {})
        traffic.in_bytes += 0 if is_stashed else size_bytes
        tensor = unpack_hook(packed)
        return tensor.clone() if size_bytes and tensor.device.type == "cpu" else tensor

    hooks.pack_hook, hooks.unpack_hook = pack, unpack
    return hooks


class SynchronousStack:
    """Open-Sora's scheme, written from its description: each block's input is copied at once onto the end of one flat
    host buffer, and popped in backward, while all wait."""

    def __init__(self, blocks: Sequence[nn.Module], traffic: Traffic):
        self.blocks, self.traffic, self.top = blocks, traffic, 0
        self.buffer = torch.empty(0)

    def __call__(self, hidden: Tensor, timestep: Tensor) -> Tensor:
        self.top = 0  # an aborted step leaves entries behind
        if not self.buffer.numel():
            num_elements, pinned = len(self.blocks) * hidden.numel(), torch.cuda.is_available()
            self.buffer = torch.empty(num_elements, dtype=hidden.dtype, pin_memory=pinned)
        for block in self.blocks:
            hidden = _StackedCheckpoint.apply(block, self, hidden, timestep)
        return hidden

    def push(self, hidden: Tensor) -> None:
        """hidden [...]: goes to the end of the buffer."""
        with self.traffic.on_host():
            self.buffer[self.top : self.top + hidden.numel()].copy_(hidden.view(-1))
        self.top += hidden.numel()
        self.traffic.out_bytes += hidden.nbytes

    def pop(self, hidden: Tensor) -> None:
        """hidden [...]: is filled from the end of the buffer."""
        self.top -= hidden.numel()
        with self.traffic.on_host():
            hidden.view(-1).copy_(self.buffer[self.top : self.top + hidden.numel()])
        self.traffic.in_bytes += hidden.nbytes


class _StackedCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint whose one big input lies on the stack between forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, block: nn.Module, stack: SynchronousStack, hidden: Tensor, timestep: Tensor
    ) -> Tensor:
        """hidden [B, S, C], timestep [B, C] → [B, S, C]."""
        ctx.block, ctx.stack, ctx.shape, ctx.device = block, stack, hidden.shape, hidden.device
        stack.push(hidden.detach())
        ctx.save_for_backward(timestep)
        with torch.no_grad():
            return block(hidden, timestep)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor | None, Tensor | None]:
        hidden = torch.empty(ctx.shape, dtype=ctx.stack.buffer.dtype, device=ctx.device)
        ctx.stack.pop(hidden)
        hidden.requires_grad_()
        timestep = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.block(hidden, timestep)
        torch.autograd.backward(output, gradients[0])
        return None, None, hidden.grad, timestep.grad
