"""The step that every scheme runs: a stack of plain DiT blocks, forward, loss and backward.

B batch, S sequence, H heads, D head dim, C channels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

LATENT_CHANNELS = 64
"""What a patch of latents holds. The stack's own input is as small as a model's, its hidden state is not."""

Forward = Callable[[Tensor, Tensor], Tensor]
"""All blocks: hidden [B, S, C], timestep embedding [B, C] → hidden [B, S, C]."""


@dataclass(frozen=True)
class Case:
    """The sizes of one stack."""

    hidden: int
    heads: int
    tokens: int
    batch: int
    blocks: int
    dtype: torch.dtype
    device: torch.device
    keep_last: int

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"hidden {self.hidden}, {self.tokens} tokens, {self.blocks} blocks, batch {self.batch}, {dtype}"
        )

    @property
    def input_bytes(self) -> int:
        """Of one block's input, and of what its attention puts out."""
        return self.batch * self.tokens * self.hidden * self.dtype.itemsize

    @property
    def log_sum_exp_bytes(self) -> int:
        return self.batch * self.tokens * self.heads * torch.float32.itemsize

    @property
    def moved_blocks(self) -> int:
        """Of ours, where all move that may."""
        return max(0, self.blocks - self.keep_last)

    def to_dict(self) -> dict[str, Any]:
        names = {"dtype": str(self.dtype).removeprefix("torch."), "device": self.device.type}
        return {**asdict(self), **names, "block_input_bytes": self.input_bytes}


class Block(nn.Module):
    """Attention and MLP, each scaled, shifted and gated from the timestep (adaLN)."""

    def __init__(self, case: Case):
        super().__init__()
        self.heads = case.heads
        self.modulation = nn.Linear(case.hidden, 6 * case.hidden)
        self.qkv = nn.Linear(case.hidden, 3 * case.hidden)
        self.projection = nn.Linear(case.hidden, case.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(case.hidden, 4 * case.hidden),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * case.hidden, case.hidden),
        )

    def forward(self, hidden: Tensor, timestep: Tensor) -> Tensor:
        parts = self.modulation(functional.silu(timestep)).unsqueeze(1).chunk(6, dim=-1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        hidden = hidden + gate * self._attention(_normed(hidden) * (1 + scale) + shift)
        return hidden + mlp_gate * self.mlp(_normed(hidden) * (1 + mlp_scale) + mlp_shift)

    def _attention(self, hidden: Tensor) -> Tensor:
        batch, tokens, channels = hidden.shape
        qkv = self.qkv(hidden).view(batch, tokens, 3, self.heads, -1)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # [B, H, S, D]
        # Fused ones only: the plain kernel would keep [S, S].
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            attended = functional.scaled_dot_product_attention(q, k, v)
        return self.projection(attended.transpose(1, 2).reshape(batch, tokens, channels))


def _normed(hidden: Tensor) -> Tensor:
    return functional.layer_norm(hidden, hidden.shape[-1:])


class Workload:
    """Weights, data and gradients of one case, which all schemes share, and the step over them."""

    def __init__(self, case: Case):
        self.case = case
        with torch.random.fork_rng(), torch.device(case.device):
            torch.manual_seed(0)
            self.projection = nn.Linear(LATENT_CHANNELS, case.hidden).to(case.dtype)
            self.blocks = nn.ModuleList(Block(case).to(case.dtype) for _ in range(case.blocks))
            self.head = nn.Linear(case.hidden, LATENT_CHANNELS).to(case.dtype)
            shape = (case.batch, case.tokens, LATENT_CHANNELS)
            self.latents = torch.randn(shape, dtype=case.dtype).requires_grad_()
            self.target = torch.randn(shape, dtype=case.dtype)
            self.timestep = torch.randn(case.batch, case.hidden, dtype=case.dtype).requires_grad_()
        # Held before the step, so that what the step adds is activations alone.
        for _, tensor in self.differentiated():
            tensor.grad = torch.zeros_like(tensor)

    def twin_blocks(self) -> list[nn.Module]:
        """Modules of a scheme's own, which it may wrap, on the shared weights."""
        return list(copy.deepcopy(self.blocks, {id(weight): weight for weight in self.blocks.parameters()}))

    def differentiated(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that gets a gradient, by name."""
        for part in ("projection", "blocks", "head"):
            yield from getattr(self, part).named_parameters(prefix=part)
        yield from (("latents (the input)", self.latents), ("timestep (the input)", self.timestep))

    def held(self) -> Iterator[Tensor]:
        """What lies on the device between steps."""
        for _, tensor in self.differentiated():
            yield tensor
            if tensor.grad is not None:
                yield tensor.grad
        yield self.target

    def step(self, forward: Forward, after_forward: Callable[[], None] | None = None) -> None:
        """One training step without the optimizer's part. Gradients are added to."""
        # No local name for the hidden state: it would keep the first block's input alive.
        output = self.head(forward(self.projection(self.latents), self.timestep))
        loss = functional.mse_loss(output, self.target)
        del output
        if after_forward is not None:
            after_forward()
        loss.backward()

    def clear_gradients(self) -> None:
        for _, tensor in self.differentiated():
            if tensor.grad is not None:
                tensor.grad.zero_()
