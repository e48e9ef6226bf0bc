"""Takes the first kernel that agrees with an order on this device: output, dtype and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardformer.modeling.norms.compare import (
    Mode,
    agree,
    gradient_allowance,
    largest_difference,
    relative_error,
)
from shardformer.modeling.norms.kernels import KERNELS, Kernel, Unfit
from shardformer.modeling.norms.probe import Finding
from shardformer.modeling.norms.saved import run_and_count

DtypePair = tuple[torch.dtype, "torch.dtype | None"]
_ROWS = 23


@dataclass(frozen=True)
class Choice:
    """What one pair of dtypes (input, weight) runs on, and what that changes.

    Attributes:
        kernel: its name; None where nothing that is tried agrees, and `reason` tells why of each.
        difference: the largest of the outputs, over the largest value of the row.
        saved_before, saved_after: bytes kept for backward per token, beside the input and the parameters.
    """

    kernel: str | None
    reason: str
    difference: float = 0.0
    saved_before: int = 0
    saved_after: int = 0


@torch.inference_mode(False)
@torch.enable_grad()
def choose(
    finding: Finding, dtypes: DtypePair, device: torch.device, mode: Mode, chosen: dict[object, Choice]
) -> Choice:
    """The choice for one pair of dtypes; `chosen` keeps those made before, as norms of one kind share them."""
    key = (finding, dtypes, device, mode)
    if key not in chosen:
        try:
            case = _Case(finding, dtypes, device)
        except RuntimeError as error:
            chosen[key] = Choice(None, f"the norm itself refuses {dtypes}: {error}")
            return chosen[key]
        reasons = {}
        for kernel in KERNELS.values():
            if kernel.on_cpu != (device.type == "cpu") or (kernel.external and mode == "strict"):
                continue
            choice = case.try_kernel(kernel, mode)
            if choice.kernel is not None:
                break
            reasons[kernel.name] = choice.reason
        else:
            choice = Choice(None, _joined(reasons) or f"no kernel is for {device.type}")
        chosen[key] = choice
    return chosen[key]


def _joined(reasons: dict[str, str]) -> str:
    if len(reasons) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


class _Case:
    """Inputs for one pair of dtypes, and what the order makes of them: by itself, and exactly, in fp64."""

    def __init__(self, finding: Finding, dtypes: DtypePair, device: torch.device):
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.order, self.eps = finding.order, finding.eps
        x_dtype, dtype = dtypes
        self.x = (draw(_ROWS, finding.num_features) * 2).to(device, x_dtype).requires_grad_()
        self.parameters = [
            None if name is None else draw(finding.num_features).to(device, dtype).requires_grad_()
            for name in (finding.weight, finding.bias)
        ]
        self.gradient = draw(_ROWS, finding.num_features)
        self.leaves = [t for t in (self.x, *self.parameters) if t is not None]
        self.out, self.kept = self._run(self.order)
        self.gradients = self._gradients(self.out)
        self.exact = self._exact_gradients()

    def try_kernel(self, kernel: Kernel, mode: Mode) -> Choice:
        try:
            out, kept = self._run(lambda x, weight, bias, eps: kernel.run(x, weight, bias, self.order, eps))
            gradients = self._gradients(out) if agree(out, self.out, mode) else None
        except Unfit as error:
            return Choice(None, str(error))
        except Exception as error:  # noqa: BLE001  (a kernel of others may raise anything: it is not taken)
            return Choice(None, f"it failed: {type(error).__name__}: {error}".splitlines()[0])
        if gradients is None:
            if out.shape != self.out.shape or out.dtype != self.out.dtype:
                return Choice(None, f"it returns {tuple(out.shape)} {out.dtype}")
            return Choice(None, f"its values differ by {largest_difference(out, self.out):.1e}")
        for mine, original, exact in zip(gradients, self.gradients, self.exact, strict=True):
            allowed = gradient_allowance(relative_error(original, exact), mode)
            if not (wrong := relative_error(mine, exact)) <= allowed:
                return Choice(None, f"a gradient's error is {wrong:.1e}, {allowed:.1e} allowed")
        difference = largest_difference(out, self.out)
        return Choice(kernel.name, "", difference, self.kept, kept)

    def _run(self, function: Callable[..., Tensor]) -> tuple[Tensor, int]:
        return run_and_count(lambda: function(self.x, *self.parameters, self.eps), self.leaves, _ROWS)

    def _gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, self.gradient.to(out.device, out.dtype))

    def _exact_gradients(self) -> tuple[Tensor, ...]:
        x, weight, bias = (
            None if t is None else t.detach().cpu().double().requires_grad_()
            for t in (self.x, *self.parameters)
        )
        assert x is not None
        if self.order.centres:
            out = F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)  # type: ignore[arg-type]
        else:
            out = self.order(x, weight, bias, self.eps)
        gradient = self.gradient.to(self.out.dtype).double()
        return torch.autograd.grad(out, [t for t in (x, weight, bias) if t is not None], gradient)
