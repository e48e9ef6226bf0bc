"""What a module computes, found out by running it: which order, which eps, which parameter is the weight.

Names decide nothing. A copy of the module with random parameters is run in fp32 and both halves, on values around 1,
around 30, and so small that eps shows; an order fits if it gives all of these outputs, and a module that fits none is
left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor, nn

from shardformer.modeling.norms.compare import agree
from shardformer.modeling.norms.order import ORDERS, Order, resolve_eps
from shardformer.modeling.norms.saved import run_and_count

USUAL_EPS = (1e-5, 1e-6, 1e-7, 1e-8, 1e-12, torch.finfo(torch.float32).eps)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TOKENS = 23
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Finding:
    """A module's meaning.

    Attributes:
        exact: bit for bit the order, in every probe; else to the last bit of its fp32 sums.
        weight, bias: the parameters' names in the module, or None.
        num_features: C; for a module that takes any, the number it was probed with.
    """

    order: Order
    eps: float | None
    exact: bool
    weight: str | None
    bias: str | None
    num_features: int


class NotANorm(Exception):
    """The module does not normalise its last dimension: no row of a report."""


class LeftAlone(Exception):
    """It may be a norm, but is not to be replaced; the message says why."""


@dataclass
class _Probe:
    x: Tensor
    parameters: dict[str, Tensor]
    out: Tensor


def identify(module: nn.Module) -> Finding:
    """The order, eps and parameters of `module`. Changes nothing of it, and draws no global random number.

    Raises:
        NotANorm: it normalises nothing.
        LeftAlone: it cannot be probed, or fits no order.
    """
    parameters = _vectors(module)
    refuse_unseen(module)
    num_features = _num_features(module, parameters)
    try:
        twin = _twin(module)
    except Exception as error:  # whatever a foreign class raises when it is copied
        raise LeftAlone(f"it cannot be copied to be probed: {error}") from error
    probes = list(_probes(twin, num_features))
    if not probes or not _ignores_magnitude(probes):
        raise NotANorm
    _refuse_state(twin, probes[0])
    measured = _measure_eps(twin, num_features)
    candidates = [eps for eps in _eps_candidates(module) if _near(resolve_eps(eps, torch.float32), measured)]
    if not candidates:
        raise LeftAlone(f"its eps, measured as {measured:.3g}, is in no attribute and not a usual one")
    for require_bits in (True, False):
        for eps in candidates:
            for order in ORDERS:
                for weight, bias in _roles(parameters):
                    if _fits(order, eps, weight, bias, probes, require_bits):
                        found = _with_or_without_copies(order, twin, num_features)
                        return Finding(found, eps, require_bits, weight, bias, num_features)
    raise LeftAlone("its values fit no known order of normalisation")


def _vectors(module: nn.Module) -> dict[str, nn.Parameter]:
    parameters = dict(module.named_parameters(recurse=False))
    sizes = {tuple(parameter.shape) for parameter in parameters.values()}
    has_children = next(module.children(), None) is not None
    if has_children or len(parameters) > 2 or len(sizes) > 1 or any(len(size) != 1 for size in sizes):
        raise NotANorm
    return parameters


def refuse_unseen(module: nn.Module) -> None:
    """Raises LeftAlone for what running the module would not show, and replacing it would lose."""
    if "forward" in vars(module):
        raise LeftAlone("its forward is wrapped")
    if any(getattr(module, hooks, None) for hooks in HOOKS):
        raise LeftAlone("it has hooks")
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
            raise LeftAlone(
                f"its {name} is a {type(parameter.data).__name__}; swap before sharding or quantising"
            )
        if not parameter.is_floating_point():
            raise LeftAlone(f"its {name} is {parameter.dtype}")


def _num_features(module: nn.Module, parameters: dict[str, nn.Parameter]) -> int:
    if parameters:
        return next(iter(parameters.values())).numel()
    for name in ("normalized_shape", "dim", "hidden_size"):
        size = getattr(module, name, None)
        if isinstance(size, (tuple, list)):
            if len(size) != 1:
                raise LeftAlone(f"it normalises {len(size)} dimensions")
            size = size[0]
        if isinstance(size, int) and size > 1:
            return size
    return 64


def _twin(module: nn.Module) -> nn.Module:
    """A copy to experiment on; of a module on the meta device, on the CPU: its forward is the same."""
    twin = copy.deepcopy(module).requires_grad_(False)
    if any(parameter.is_meta for parameter in twin.parameters()):
        twin.to_empty(device="cpu")
    return twin


def _probes(twin: nn.Module, num_features: int) -> Iterator[_Probe]:
    device = next((p.device for p in twin.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    draws = {
        name: 0.5 + torch.randn(num_features, generator=generator, dtype=torch.float64)
        for name, _ in twin.named_parameters()
    }
    x = torch.randn(
        2, max(3, 512 // num_features + 1), num_features, generator=generator, dtype=torch.float64
    )
    for magnitude in (1.0, 30.0, 1e-3):
        for x_dtype in FLOATS:
            for dtype in FLOATS if draws else (x_dtype,):
                values = (x * magnitude).to(device, x_dtype)
                parameters = {name: draw.to(device, dtype) for name, draw in draws.items()}
                out = _run(twin, values, parameters)
                if out is not None:
                    yield _Probe(values, parameters, out)


@torch.no_grad()
def _run(twin: nn.Module, x: Tensor, parameters: dict[str, Tensor]) -> Tensor | None:
    """The output, or None where the module does not take these dtypes."""
    for name, value in parameters.items():
        getattr(twin, name).data = value
    try:
        out = twin(x.clone())
    except Exception:  # noqa: BLE001  (foreign code; what it refuses is not compared)
        return None
    return out if isinstance(out, Tensor) and out.shape == x.shape else None


def _ignores_magnitude(probes: list[_Probe]) -> bool:
    """A normalisation gives x and 30 x the same values, up to eps; an activation does not."""
    first = probes[0]
    for probe in probes:
        if probe.x.dtype == first.x.dtype and probe.out.dtype == first.out.dtype:
            ratio = (probe.x.double().norm() / first.x.double().norm()).item()
            same = {name: v.dtype for name, v in probe.parameters.items()} == {
                name: v.dtype for name, v in first.parameters.items()
            }
            if same and 29 < ratio < 31:
                return torch.allclose(probe.out, first.out, rtol=0.02, atol=0.02)
    return False


def _refuse_state(twin: nn.Module, probe: _Probe) -> None:
    if next(twin.buffers(), None) is not None:
        raise LeftAlone("it keeps state in buffers")
    for training in (True, False):
        out = _run(twin.train(training), probe.x, probe.parameters)
        if out is None or not torch.equal(out, probe.out):
            raise LeftAlone("it gives the same input other values in training or at a second call")


def _with_or_without_copies(order: Order, twin: nn.Module, num_features: int) -> Order:
    """A layer norm on fp32 copies differs from torch's own in 5e-6 of bf16 values: few probes show it, its copies do.

    Both are right about the values, but only one of them is worth replacing.
    """
    if not order.centres or num_features < 8:
        return order
    device = next((p.device for p in twin.parameters()), torch.device("cpu"))
    x = torch.zeros(_TOKENS, num_features, dtype=torch.bfloat16, device=device, requires_grad=True)
    try:
        _, kept = run_and_count(lambda: twin.to(torch.bfloat16)(x), [x], _TOKENS)
    except Exception:  # noqa: BLE001  (foreign code; it refuses this dtype)
        return order
    copies = kept >= 4 * num_features
    return next(o for o in ORDERS if o.rounds == ("float" if copies else "native"))


def _measure_eps(twin: nn.Module, num_features: int) -> float:
    """From how much smaller a tiny input's output is: sqrt(m / (m + eps)) for a mean square m."""
    device = next((p.device for p in twin.parameters()), torch.device("cpu"))
    ones = {name: torch.ones(num_features, device=device) for name, _ in twin.named_parameters()}
    row = torch.linspace(-1, 1, num_features, dtype=torch.float64)
    row = (row / row.square().mean().sqrt()).to(device, torch.float32)
    mean_square = 1e-8
    spans = []
    for magnitude in (mean_square**0.5, 1e4):
        above, below = (_run(twin, sign * magnitude * row[None], ones) for sign in (1, -1))
        if above is None or below is None:
            raise LeftAlone("it does not take fp32, in which its eps is measured")
        spans.append((above - below).double().norm().item())  # a bias cancels
    return mean_square * ((spans[1] / max(spans[0], 1e-30)) ** 2 - 1)


def _near(eps: float, measured: float) -> bool:
    return abs(eps - measured) <= 0.02 * eps + 1e-14


def _eps_candidates(module: nn.Module) -> list[float | None]:
    """Values that attributes hold come first: one of them is the exact number, whatever its name."""
    held: list[float | None] = [value for value in vars(module).values() if isinstance(value, float)]
    if getattr(module, "eps", 0.0) is None:
        held.append(None)
    return list(dict.fromkeys([*held, *USUAL_EPS]))


def _roles(parameters: dict[str, nn.Parameter]) -> list[tuple[str | None, str | None]]:
    names = list(parameters)
    if len(names) == 2:
        return [(a, b) for a, b in permutations(names)]
    return [(names[0], None), (None, names[0])] if names else [(None, None)]


def _fits(
    order: Order, eps: float | None, weight: str | None, bias: str | None, probes: list[_Probe], bits: bool
) -> bool:
    if eps is None and order.centres:
        return False
    for probe in probes:
        w, b = (None if name is None else probe.parameters[name] for name in (weight, bias))
        try:
            expected = order(probe.x, w, b, eps)
        except RuntimeError:  # dtypes that this order does not take, but the module does
            return False
        same = expected.dtype == probe.out.dtype and torch.equal(expected, probe.out)
        if not (same or (not bits and agree(probe.out, expected, "strict"))):
            return False
    return True
