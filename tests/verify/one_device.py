"""Models whose backward is not the derivative of their forward, on one device already, each beside its right twin.

No mesh shows any of these: the single device makes the same mistake.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opensora_accel.observe.meshes import Run


class Norm(torch.autograd.Function):
    """x / rms(x) · w. Its backward takes the root for a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, w, inverse)
        return x * inverse * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w, inverse = ctx.saved_tensors
        return grad * w * inverse, (grad * x * inverse).flatten(0, -2).sum(0)


class RightNorm(Norm):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w, inverse = ctx.saved_tensors
        y, grad_y = x * inverse, grad * w
        own = inverse * (grad_y - y * (grad_y * y).mean(-1, keepdim=True))
        return own, (grad * y).flatten(0, -2).sum(0)


class Gated(torch.autograd.Function):
    """x · sigmoid(w), whose backward gives w the gradient of the first sample alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        gate = w.sigmoid()
        return grad * gate, (grad * x * gate * (1 - gate))[0].flatten(0, -2).sum(0)


class RightGated(Gated):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        gate = w.sigmoid()
        return grad * gate, (grad * x * gate * (1 - gate)).flatten(0, -2).sum(0)


@torch.library.custom_op("opensora_accel_tests::scaled", mutates_args=())
def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_of_scaled(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return grad * w, (grad * x).flatten(0, -2).sum(0)


scaled.register_autograd(_backward_of_scaled, setup_context=_keep)


@torch.library.custom_op("opensora_accel_tests::twice_scaled", mutates_args=())
def twice_scaled(x: Tensor, w: Tensor) -> Tensor:
    return 2 * x * w


# The factor of the forward is forgotten.
twice_scaled.register_autograd(_backward_of_scaled, setup_context=_keep)


class Small(nn.Module):
    """Layers around `middle`, the identity, which is exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.w = nn.Parameter(torch.rand(6) + 0.5)
        self.dropout = nn.Dropout(0.3)

    def middle(self, x: Tensor) -> Tensor:
        return x * self.w

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.middle(torch.tanh(self.inner(self.enter(x)))))


class WrongNorm(Small):
    def middle(self, x: Tensor) -> Tensor:
        return Norm.apply(x, self.w)


class GoodNorm(Small):
    def middle(self, x: Tensor) -> Tensor:
        return RightNorm.apply(x, self.w)


class WrongGate(Small):
    def middle(self, x: Tensor) -> Tensor:
        return Gated.apply(x, self.w)


class GoodGate(Small):
    def middle(self, x: Tensor) -> Tensor:
        return RightGated.apply(x, self.w)


class WrongLibrary(Small):
    def middle(self, x: Tensor) -> Tensor:
        return twice_scaled(x, self.w)


class GoodLibrary(Small):
    def middle(self, x: Tensor) -> Tensor:
        return 2 * scaled(x, self.w)


class WithoutBackward(Small):
    """A kernel of a library that knows nothing of autograd: what it gives has no graph."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.from_numpy((x.detach() * self.w.detach()).numpy() * 2.0)


class BesideItsInput(Small):
    """The same with a residual around it: everything but the weight has some gradient."""

    def middle(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy((x.detach() * self.w.detach()).numpy() * 2.0)


class LostDraws(Small):
    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(self.drop, x, use_reentrant=False, preserve_rng_state=False)

    def drop(self, x: Tensor) -> Tensor:
        return self.dropout(x * self.w)


class KeptDraws(LostDraws):
    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(self.drop, x, use_reentrant=False)


class KeptDrawsReentrant(LostDraws):
    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(self.drop, x, use_reentrant=True)


class _Offset(torch.autograd.Function):
    """Keeps what it is given by reference, past autograd's count of versions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.kept = x.detach(), w.detach()
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.kept
        return grad * w, (grad * x).flatten(0, -2).sum(0)


class Overwritten(Small):
    """An activation is written to behind a function that kept it for its backward."""

    def middle(self, x: Tensor) -> Tensor:
        x = x.clone()
        out = _Offset.apply(x, self.w)
        x.data.mul_(0.5)
        return out


class NotOverwritten(Small):
    def middle(self, x: Tensor) -> Tensor:
        return _Offset.apply(x.clone(), self.w)


class Transposed(torch.autograd.Function):
    """x @ w, whose backward forgets to transpose w: only a square weight lets it pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, x.flatten(0, -2).T @ grad.flatten(0, -2)


class RightTransposed(Transposed):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.T, x.flatten(0, -2).T @ grad.flatten(0, -2)


class WrongSquare(Small):
    def middle(self, x: Tensor) -> Tensor:
        return Transposed.apply(x, self.inner.weight)


class GoodSquare(Small):
    def middle(self, x: Tensor) -> Tensor:
        return RightTransposed.apply(x, self.inner.weight)


class AnotherForward(Small):
    def middle(self, x: Tensor) -> Tensor:
        return x * self.w if torch.is_grad_enabled() else x * self.w * 1.01


class Detached(Small):
    """A scale that is meant to be a constant."""

    def middle(self, x: Tensor) -> Tensor:
        return x * self.w * (1 + x.detach().square().mean())


class WithoutGradients(Small):
    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.zeros(6, dtype=x.dtype)
            scale.copy_(x.square().flatten(0, -2).mean(0))
            scale += 1
        return x * self.w * scale


class OfANumber(Small):
    def middle(self, x: Tensor) -> Tensor:
        return x * self.w * (1 + x.square().mean().item())


class StraightThrough(Small):
    """Rounded in forward, and let through by backward."""

    def middle(self, x: Tensor) -> Tensor:
        return x * self.w + ((10 * x).round() / 10 - x).detach()


class WithKinks(Small):
    def middle(self, x: Tensor) -> Tensor:
        return torch.relu(x * self.w)


class WithDropout(Small):
    def middle(self, x: Tensor) -> Tensor:
        return self.dropout(x * self.w)


class ThroughSpectrum(Small):
    """Complex weights, as neural operators have them."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def middle(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.spectrum[:, None], n=x.size(1), dim=1) * self.w


def step(model: nn.Module, run: Run) -> Tensor:
    loss = model(torch.randn(2, 5, 4)).square().mean()
    loss.backward()
    return loss


def accumulated(model: nn.Module, run: Run) -> Tensor:
    """Two backwards, gradients divided afterwards by hand."""
    for _ in range(2):
        loss = model(torch.randn(2, 5, 4)).square().mean()
        loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 2
    return loss.detach()


def with_a_teacher(model: nn.Module, run: Run) -> Tensor:
    """The model's own answer without gradients is the target of another one."""
    x = torch.randn(2, 5, 4)
    with torch.no_grad():
        target = model(x + 0.1)
    loss = (model(x) - target).square().mean()
    loss.backward()
    return loss


def trained_twice(model: nn.Module, run: Run) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 5, 4)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


def with_a_penalty(model: nn.Module, run: Run) -> Tensor:
    """The gradient of a gradient."""
    x = torch.randn(2, 5, 4, requires_grad=True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    loss = out.square().mean() + 0.1 * slope.square().mean()
    loss.backward()
    return loss
