"""The training step that every offload scheme runs: a stack of plain DiT blocks, its forward, loss and backward.

B batch (one clip), S sequence, H heads, D head dim, C channels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

# The stack's own input is as small as a model's, its hidden state is not.
LATENT_CHANNELS = 64
# All blocks: hidden [B, S, C], timestep embedding [B, C] → hidden [B, S, C].
Forward = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """The sizes of one stack of blocks."""

    hidden: int
    heads: int
    tokens: int
    blocks: int
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"hidden {self.hidden}, {self.tokens} tokens, {self.blocks} blocks, {dtype}"

    @property
    def input_bytes(self) -> int:
        """Bytes of one block's input, and as many of its attention's output."""
        return self.tokens * self.hidden * self.dtype.itemsize

    @property
    def log_sum_exp_bytes(self) -> int:
        return self.tokens * self.heads * torch.float32.itemsize


class Block(nn.Module):
    """Attention and MLP, each scaled, shifted and gated from the timestep (adaLN)."""

    def __init__(self, case: Case):
        super().__init__()
        self.heads, width = case.heads, case.hidden
        self.modulation, self.qkv = nn.Linear(width, 6 * width), nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor, timestep: Tensor) -> Tensor:
        """hidden [B, S, C], timestep [B, C] → [B, S, C]."""
        shift, scale, gate, *mlp = self.modulation(functional.silu(timestep)).unsqueeze(1).chunk(6, dim=-1)
        normed = functional.layer_norm(hidden, hidden.shape[-1:])
        qkv = self.qkv(normed * (1 + scale) + shift).unflatten(-1, (3, self.heads, -1))
        # Fused ones only: the plain kernel would keep [S, S].
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            attended = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))  # [B, H, S, D]
        hidden = hidden + gate * self.projection(attended.transpose(1, 2).flatten(2))
        normed = functional.layer_norm(hidden, hidden.shape[-1:])
        return hidden + mlp[2] * self.mlp(normed * (1 + mlp[1]) + mlp[0])


class Workload:
    """Weights, data and gradients of one case, which all schemes share, and the step over them."""

    def __init__(self, case: Case):
        self.case = case
        with torch.random.fork_rng(), torch.device(case.device):
            torch.manual_seed(0)
            self.projection = nn.Linear(LATENT_CHANNELS, case.hidden).to(case.dtype)
            self.blocks = nn.ModuleList(Block(case).to(case.dtype) for _ in range(case.blocks))
            self.head = nn.Linear(case.hidden, LATENT_CHANNELS).to(case.dtype)
            self.latents = torch.randn(1, case.tokens, LATENT_CHANNELS, dtype=case.dtype).requires_grad_()
            self.timestep = torch.randn(1, case.hidden, dtype=case.dtype).requires_grad_()
            self.target = torch.randn(self.latents.shape, dtype=case.dtype)
        modules = nn.ModuleDict({"projection": self.projection, "blocks": self.blocks, "head": self.head})
        self.differentiated = {
            **dict(modules.named_parameters()),
            "latents (the input)": self.latents,
            "timestep (the input)": self.timestep,
        }
        # Held before the step, so that what the step adds is activations alone.
        self.gradients = {name: torch.zeros_like(tensor) for name, tensor in self.differentiated.items()}
        for name, tensor in self.differentiated.items():
            tensor.grad = self.gradients[name]

    def twin_blocks(self) -> list[nn.Module]:
        """Modules of a scheme's own, which it may wrap, on the shared weights."""
        return list(copy.deepcopy(self.blocks, {id(weight): weight for weight in self.blocks.parameters()}))

    def held(self) -> list[Tensor]:
        """What lies on the device between steps."""
        return [*self.differentiated.values(), *self.gradients.values(), self.target]

    def step(self, forward: Forward, after_forward: Callable[[], None] = lambda: None) -> None:
        """One training step without the optimizer's part."""
        for gradient in self.gradients.values():
            gradient.zero_()
        # No local name for the hidden state: it would keep the first block's input alive.
        output = self.head(forward(self.projection(self.latents), self.timestep))
        loss = functional.mse_loss(output, self.target)
        del output
        after_forward()
        loss.backward()
