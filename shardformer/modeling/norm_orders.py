"""Finds out what a norm computes by running it: which order of operations, which eps, which parameter is the weight.

Two norms with the same formula, x / rms(x) · w, differ in a quarter of their bf16 outputs if they round in different
places. For x / rms(x) = 1.238 and w = 3, T5 rounds 1.238 to 1.2344 and multiplies: 3.7031. torch.nn.RMSNorm
multiplies first and rounds 3.714 to 3.7188. So names decide nothing. A copy of the module with random parameters is
run in fp32 and both halves, on values around 1, around 30, and so small that eps shows. An order fits if it gives all
of these outputs, bit for bit or to the last bit of an fp32 sum. A module that fits none is left alone.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)

_FP32_EPS = torch.finfo(torch.float32).eps
_USUAL_EPS = (1e-5, 1e-6, 1e-7, 1e-8, 1e-12, _FP32_EPS)

# How many half values may round the other way because the fp32 value before them lies a last bit off. Sums in another
# order flip 5e-6 of bf16 and 1e-4 of fp16 values, and an order that rounds elsewhere a quarter (CPU, 2026-11).
_SHARE_OF_FLIPS = 0.01

# An input [2, rows, C], the parameters [C] by name, and the output of the module.
Probe = tuple[Tensor, dict[str, Tensor], Tensor]


class NotANorm(Exception):
    """The module does not normalise its last dimension."""


class LeftAlone(Exception):
    """The module may be a norm, but is not to be replaced; the message says why."""


@dataclass(frozen=True)
class Order:
    """A normalisation as somebody published it, operation by operation. In fp64 it computes in fp64 throughout."""

    name: str
    # Where a normalised value is rounded: to the dtype of a half "weight" before the product (T5), to the "input"'s
    # before the product (Llama), or at the "end", after it (Mochi, F.rms_norm). "native" is F.layer_norm as it is,
    # and "float" F.layer_norm on fp32 copies (FP32LayerNorm).
    rounds: Literal["weight", "input", "end", "native", "float"]
    # What is added to the weight: 1 in Gemma.
    offset: float = 0.0

    @property
    def centres(self) -> bool:
        """Whether the mean is subtracted: a layer norm."""
        return self.rounds in ("native", "float")

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None) -> Tensor:
        """x: [..., C]; weight, bias: [C]; returns [..., C]."""
        out = x if self.rounds == "native" or x.dtype == torch.float64 else x.float()
        if self.centres:
            if self.rounds == "float":
                weight, bias = (None if tensor is None else tensor.to(out.dtype) for tensor in (weight, bias))
            return F.layer_norm(out, x.shape[-1:], weight, bias, eps or 0.0).to(x.dtype)
        # torch.nn.RMSNorm(eps=None) takes that of the dtype it computes in: 1.19e-7 for fp32 and halves.
        eps = torch.finfo(out.dtype).eps if eps is None else eps
        out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + eps)
        if weight is None:
            out = out.to(x.dtype)
        elif self.rounds == "end":
            out = (out * (self.offset + weight.to(out.dtype) if self.offset else weight)).to(x.dtype)
        elif self.rounds == "input":
            out = weight * out.to(x.dtype)
        else:
            out = weight * (out.to(weight.dtype) if weight.dtype in HALVES else out)
        return out if bias is None else out + bias


# Named after who published it. Orders that give the same numbers in a case go by the first's name.
ORDERS = (
    Order("t5", "weight"),
    Order("llama", "input"),
    Order("product", "end"),
    Order("gemma", "end", offset=1.0),
    Order("layer", "native"),
    Order("layer, fp32", "float"),
)


@dataclass(frozen=True)
class Meaning:
    """What a module computes."""

    order: Order
    eps: float | None
    # Bit for bit the order, in every probe; else to the last bit of its fp32 sums.
    exact: bool
    # The parameters' names in the module, or None.
    weight: str | None
    bias: str | None
    # C; for a module that takes any, the number it was probed with.
    num_features: int


def agree(out: Tensor, expected: Tensor, mode: Literal["strict", "fast"] = "strict") -> bool:
    """Whether `out` [..., C] may stand for `expected` [..., C].

    `strict`: fp32 to 4 units in the last place of its row's largest value; of halves at most one in a hundred off,
    by one unit. `fast`: fp32 to 16 units, halves to two, any number of them.
    """
    if out.dtype != expected.dtype or out.shape != expected.shape:
        return False
    if torch.equal(out, expected):
        return True
    size, difference = expected.double().abs(), (out.double() - expected.double()).abs()
    allowed = size.amax(-1, keepdim=True) * _FP32_EPS * (4 if mode == "strict" else 16)
    max_flips = out.numel()
    if out.dtype in HALVES:
        half = torch.finfo(out.dtype)
        allowed = allowed + half.eps * size.clamp_min(half.tiny) * (1 if mode == "strict" else 2)
        if mode == "strict":
            max_flips = max(1, int(_SHARE_OF_FLIPS * out.numel()))
    return bool((difference <= allowed).all()) and int((difference > 0).sum()) <= max_flips


def find_meaning(module: nn.Module, known: dict[object, Meaning] | None = None) -> Meaning:
    """The order, eps and parameters of a norm. Changes nothing of it, and draws no global random number.

    Args:
        known: what was found before. Norms of one class with the same attributes and shapes are run only once.

    Raises:
        NotANorm: it normalises nothing.
        LeftAlone: it cannot be probed, fits no order, or has what replacing it would lose.
    """
    parameters = dict(module.named_parameters(recurse=False))
    shapes = {tuple(parameter.shape) for parameter in parameters.values()}
    is_leaf = next(module.children(), None) is None
    if not is_leaf or len(parameters) > 2 or len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        raise NotANorm
    if "forward" in vars(module):
        raise LeftAlone("its forward is wrapped")
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind, None) for kind in hooks):
        raise LeftAlone("it has hooks")
    for name, parameter in parameters.items():
        kind = type(parameter.data)
        if type(parameter) is not nn.Parameter or kind is not Tensor:
            raise LeftAlone(f"its {name} is a {kind.__name__}; swap before sharding or quantising")
        if not parameter.is_floating_point():
            raise LeftAlone(f"its {name} is {parameter.dtype}")
    known = {} if known is None else known
    attributes = tuple((name, repr(v)) for name, v in vars(module).items() if not name.startswith("_"))
    alike = (type(module), attributes, *((name, p.shape, p.device) for name, p in parameters.items()))
    if alike not in known:
        known[alike] = _find_by_running(module, shapes.pop()[0] if shapes else _normalized_size(module))
    return known[alike]


def _find_by_running(module: nn.Module, num_features: int) -> Meaning:
    try:
        twin = copy.deepcopy(module).requires_grad_(False)
    except Exception as error:  # whatever a foreign class raises when it is copied
        raise LeftAlone(f"it cannot be copied to be probed: {error}") from error
    if any(parameter.is_meta for parameter in twin.parameters()):
        twin.to_empty(device="cpu")
    probes = _probe(twin, num_features)
    if not probes:
        raise NotANorm
    x, values, expected = probes[0]
    # A normalisation gives x and 30 x the same values, up to eps; an activation does not.
    large = _run(twin, 30 * x, values)
    if large is None or not torch.allclose(large, expected, rtol=0.02, atol=0.02):
        raise NotANorm
    if next(twin.buffers(), None) is not None:
        raise LeftAlone("it keeps state in buffers")
    for training in (True, False):
        out = _run(twin.train(training), x, values)
        if out is None or not torch.equal(out, expected):
            raise LeftAlone("it gives the same input other values in training or at a second call")
    candidates = _eps_candidates(module, twin, num_features)
    # Names mean as little here: a bias may be called weight. A missing parameter is None.
    roles = dict.fromkeys(permutations((*values, None, None)[:2], 2))
    for exact, eps, order, (weight, bias) in product((True, False), candidates, ORDERS, roles):
        meaning = Meaning(order, eps, exact, weight, bias, num_features)
        if _fits(meaning, probes):
            return meaning
    raise LeftAlone("its values fit no known order of normalisation")


def _normalized_size(module: nn.Module) -> int:
    """C of a module without parameters; one that has no size takes any."""
    for name in ("normalized_shape", "dim", "hidden_size"):
        size = getattr(module, name, None)
        if isinstance(size, (tuple, list)):
            if len(size) != 1:
                raise LeftAlone(f"it normalises {len(size)} dimensions")
            size = size[0]
        if isinstance(size, int) and size > 1:
            return size
    return 64


def _probe(twin: nn.Module, num_features: int) -> list[Probe]:
    """Every magnitude of the input in every mix of dtypes, except those that the module refuses."""
    device = next((p.device for p in twin.parameters()), torch.device("cpu"))
    # Drawn in fp64 on the CPU: the same numbers for every dtype and device, and no global random state.
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = {name: 0.5 + draw(num_features) for name, _ in twin.named_parameters()}
    x = draw(2, max(3, 512 // num_features + 1), num_features)
    probes = []
    for magnitude, x_dtype, dtype in product((1.0, 30.0, 1e-3), FLOATS, FLOATS if drawn else (None,)):
        values = (x * magnitude).to(device, x_dtype)
        parameters = {name: value.to(device, dtype) for name, value in drawn.items()}
        out = _run(twin, values, parameters)
        if out is not None:
            probes.append((values, parameters, out))
    return probes


@torch.no_grad()
def _run(twin: nn.Module, x: Tensor, parameters: dict[str, Tensor]) -> Tensor | None:
    """The output [..., C] for x [..., C], or None where the module does not take these dtypes."""
    for name, value in parameters.items():
        getattr(twin, name).data = value
    try:
        out = twin(x.clone())
    except Exception:  # noqa: BLE001  (foreign code; what it refuses is not compared)
        return None
    return out if isinstance(out, Tensor) and out.shape == x.shape else None


def _eps_candidates(module: nn.Module, twin: nn.Module, num_features: int) -> list[float | None]:
    """Values near the eps measured, from how much smaller a tiny input's output is: sqrt(m / (m + eps)).

    Here m is the mean square of the input. Values that attributes hold come first, whatever their name: they are exact.
    """
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
    measured = mean_square * ((spans[1] / max(spans[0], 1e-30)) ** 2 - 1)

    held: list[float | None] = [value for value in vars(module).values() if isinstance(value, float)]
    if getattr(module, "eps", 0.0) is None:
        held.append(None)
    candidates: list[float | None] = []
    for eps in dict.fromkeys([*held, *_USUAL_EPS]):
        value = _FP32_EPS if eps is None else eps
        if abs(value - measured) <= 0.02 * value + 1e-14:
            candidates.append(eps)
    if not candidates:
        raise LeftAlone(f"its eps, measured as {measured:.3g}, is in no attribute and not a usual one")
    return candidates


def _fits(meaning: Meaning, probes: list[Probe]) -> bool:
    if meaning.eps is None and meaning.order.centres:  # no layer norm has a default that hangs on the dtype
        return False
    for x, parameters, out in probes:
        weight, bias = (None if n is None else parameters[n] for n in (meaning.weight, meaning.bias))
        try:
            expected = meaning.order(x, weight, bias, meaning.eps)
        except RuntimeError:  # dtypes that this order does not take, but the module does
            return False
        if not agree(out, expected) or (meaning.exact and not torch.equal(out, expected)):
            return False
    return True
