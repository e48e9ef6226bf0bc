"""Swaps the norms of a model for kernels that compute the same and keep less for backward, and back.

A norm written in PyTorch operations keeps one or two copies of its input in fp32 for backward. A fused kernel keeps
nothing but the input. `norm_orders` finds out what a norm computes; here each kernel is run beside that order, in
every mix of dtypes, on the device of the model. It is taken if its output and dtype agree, if each gradient is as
close to the one in fp64 as the order's own, and if it keeps fewer bytes. It is never taken because it can be
imported.

The norm itself stays: the same module, parameters and hooks, of a subclass of its class that runs the kernel.
Whatever was not compared runs the original's forward: other devices and dtypes, autocast, compilers, tensor
subclasses.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardformer.modeling.norm_orders import (
    FLOATS,
    LeftAlone,
    Meaning,
    NotANorm,
    Order,
    agree,
    find_meaning,
    refuse_unseen,
)

Mode = Literal["strict", "fast"]
# The dtype of the input, and of the weight if there is one.
Dtypes = tuple[torch.dtype, "torch.dtype | None"]
# A weight or bias [C]; None where the norm has none.
Weight = Tensor | None
# None is torch.nn.RMSNorm's default, which hangs on the dtype.
Eps = float | None
# (x [..., C], weight, bias, order, eps) -> [..., C]; raises Unfit.
Run = Callable[[Tensor, Weight, Weight, Order, Eps], Tensor]

# Rows of the inputs for comparisons: a prime that divides no number of features.
_ROWS = 23


class Unfit(Exception):
    """The kernel does not compute this order on these dtypes, or is not installed; the message is shown."""


@dataclass(frozen=True)
class Row:
    """One norm of the model, or what norms of one meaning and dtypes become."""

    name: str = ""
    # Its class, and what it was found to compute; "" and None where nothing was found.
    was: str = ""
    order: str = ""
    eps: float | None = None
    # What runs instead; None where it was kept, for this reason.
    to: str | None = None
    reason: str = ""
    # The largest of the outputs on random input, over the largest value of a row; 0 is bit for bit.
    difference: float = 0.0
    # Bytes kept for backward per token, beside the input and the parameters.
    saved_before: int = 0
    saved_after: int = 0

    @property
    def outcome(self) -> str:
        """In words."""
        if self.to is None:
            return f"kept: {self.reason}"
        change = "bit for bit" if self.difference == 0 else f"within {self.difference:.1e}"
        return (
            f"{self.to}, {change}, keeps {self.saved_after} B a token for backward, not {self.saved_before}"
        )


def swap_norms(model: nn.Module, mode: Mode = "strict", *, within: Sequence[str] = ("",)) -> SwapReport:
    """Makes every norm whose meaning is known run on a kernel that computes the same and keeps less for backward.

    Names, modules, parameters and state_dict keys stay. Swap on the device and in the dtype that the model will run
    in, before it is sharded, wrapped or compiled.

    Args:
        mode: `strict` changes no value beyond the last bit of an fp32 sum, and takes torch's own kernels only.
            `fast` may round a half elsewhere, and takes kernels of quack, Liger or apex, if they agree.
        within: paths below which norms may be swapped, `*` for any one name: `("blocks.*.attn1",)`.

    Returns:
        What was done with each norm and why; its `undo()` takes the kernels away again.

    Raises:
        ValueError: an unknown mode, or a path that no module has.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} is unknown; use one of {', '.join(get_args(Mode))}")
    expressions = [
        re.compile(r"(.+\.)?[^.]*" if not path else re.escape(path).replace(r"\*", r"[^.]+") + r"(\..+)?")
        for path in within
    ]
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, expression in zip(within, expressions, strict=True):
        if not any(expression.fullmatch(name) for name in modules):
            raise ValueError(f"within={path!r} fits no module of {type(model).__name__}")
    # What a norm without parameters runs on.
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    meanings: dict[object, Meaning] = {}
    choices: dict[tuple[Meaning, Dtypes, torch.device], Row] = {}
    rows: dict[int, Row] = {}
    reported: list[Row] = []
    with ExitStack() as undo:
        for name, module in modules.items():
            if isinstance(module, SwappedNorm) and id(module) not in rows:
                continue
            if not any(expression.fullmatch(name) for expression in expressions):
                continue
            if id(module) not in rows:
                try:
                    row = _swap(module, mode, like, meanings, choices, undo)
                except NotANorm:
                    continue
                except LeftAlone as error:
                    row = Row(was=type(module).__name__, reason=str(error))
                rows[id(module)] = row
            reported.append(replace(rows[id(module)], name=name))
        return SwapReport(mode, reported, undo.pop_all().close)


def _swap(
    module: nn.Module,
    mode: Mode,
    like: Tensor,
    meanings: dict[object, Meaning],
    choices: dict[tuple[Meaning, Dtypes, torch.device], Row],
    undo: ExitStack,
) -> Row:
    """Swaps one norm, if a kernel is found for its own dtype; the report's row."""
    refuse_unseen(module)
    # Norms of one class with the same attributes are probed once; each is compared with its own parameters below.
    attributes = tuple((name, repr(v)) for name, v in vars(module).items() if not name.startswith("_"))
    parameters = tuple((name, p.shape, p.device) for name, p in module.named_parameters())
    kind = (type(module), attributes, parameters)
    if kind not in meanings:
        meanings[kind] = find_meaning(module)
    meaning = meanings[kind]
    order = meaning.order.name if meaning.weight or meaning.order.centres else "rms"
    kept = Row(was=type(module).__name__, order=order, eps=meaning.eps)
    own = like if meaning.weight is None else getattr(module, meaning.weight)
    device = torch.device("cpu") if own.is_meta else own.device
    for x_dtype in FLOATS:
        for dtype in FLOATS if meaning.weight else (None,):
            key = (meaning, (x_dtype, dtype), device)
            if key not in choices:
                choices[key] = _choose(meaning, (x_dtype, dtype), device, mode)
    choice = choices.get((meaning, (own.dtype, own.dtype if meaning.weight else None), device))
    if choice is None or choice.to is None:
        return replace(kept, reason=choice.reason if choice else f"no kernel is for {own.dtype}")
    kernels = {
        dtypes: each.to
        for (of, dtypes, on), each in choices.items()
        if each.to and of == meaning and on == device
    }

    x = torch.randn(2, 5, meaning.num_features, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = None if own.is_meta else module(x.to(device, own.dtype))
        original: Any = type(module)
        module.__class__ = _swapped_class(original)
        module._runs_on = RunsOn(meaning, device.type, kernels)  # type: ignore[assignment]

        def restore() -> None:
            module.__class__ = original
            vars(module).pop("_runs_on", None)

        undo.callback(restore)
        difference = choice.difference
        if expected is not None:
            out = module(x.to(device, own.dtype))
            if not agree(out, expected, mode):
                restore()
                return replace(kept, reason="with its own parameters its values are others")
            difference = max(difference, _largest_difference(out, expected))
    return replace(choice, was=kept.was, order=order, eps=meaning.eps, difference=difference)


@dataclass(frozen=True)
class RunsOn:
    """What a swapped norm computes, and the kernels that agree, by dtypes."""

    meaning: Meaning
    device_type: str
    kernels: Mapping[Dtypes, str]


class SwappedNorm(nn.Module):
    """Stands before a norm's own class and runs a kernel where one was compared, else the norm's own forward."""

    _runs_on: RunsOn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The norm's own signature; a kernel is for one tensor [..., C]."""
        runs_on = self._runs_on
        x: Tensor | None = args[0] if len(args) == 1 and not kwargs else None
        meaning = runs_on.meaning
        weight, bias = (
            None if name is None else getattr(self, name) for name in (meaning.weight, meaning.bias)
        )
        if (
            x is not None
            # Compilers, tracers, autocast, transforms and tensor subclasses act on single operations; they get them.
            and type(x) in (Tensor, nn.Parameter)
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()
            and not torch.is_autocast_enabled(x.device.type)
            and not torch._C._are_functorch_transforms_active()
            and torch.autograd.forward_ad._current_level < 0
            and x.device.type == runs_on.device_type
        ):
            name = runs_on.kernels.get((x.dtype, None if weight is None else weight.dtype))
            if name is not None:
                return KERNELS[name].run(x, weight, bias, meaning.order, meaning.eps)
        return super().forward(*args, **kwargs)

    def extra_repr(self) -> str:
        kernels = ", ".join(dict.fromkeys(self._runs_on.kernels.values()))
        return ", ".join(filter(None, [super().extra_repr(), f"runs on {kernels}"]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, (type(self).__mro__[2],), self.__dict__


@cache
def _swapped_class(base: Any) -> Any:
    return type(f"Swapped{base.__name__}", (SwappedNorm, base), {"__doc__": base.__doc__})


def _new(base: Any) -> SwappedNorm:
    made: type[SwappedNorm] = _swapped_class(base)
    return made.__new__(made)


def _torch_rms_norm(x: Tensor, weight: Weight, bias: Weight, order: Order, eps: Eps) -> Tensor:
    _check_rms(x, weight, bias, order)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _torch_rms_norm_times_weight(x: Tensor, weight: Weight, bias: Weight, order: Order, eps: Eps) -> Tensor:
    _check_rms(x, weight, bias, order)
    if weight is None or order.rounds == "end":
        raise Unfit("the order rounds after the product")
    return weight * F.rms_norm(x, x.shape[-1:], None, eps)


def _torch_layer_norm(x: Tensor, weight: Weight, bias: Weight, order: Order, eps: Eps) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps or 0.0)


def _quack(x: Tensor, weight: Weight, bias: Weight, order: Order, eps: Eps) -> Tensor:
    _check_rms(x, weight, bias, order)
    return _function("quack", "rmsnorm")(x, weight, eps=eps)


def _liger(x: Tensor, weight: Weight, bias: Weight, order: Order, eps: Eps) -> Tensor:
    _check_rms(x, weight, bias, replace(order, offset=0.0))
    casting = "gemma" if order.rounds == "end" else "llama"
    # Not in place (the last argument): the gradient that comes in belongs to autograd.
    function = _function("liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
    return function.apply(x, weight, eps, order.offset, casting, False)


def _apex(x: Tensor, weight: Weight, bias: Weight, order: Order, eps: Eps) -> Tensor:
    _check_rms(x, weight, bias, order)
    function = _function("apex.normalization.fused_layer_norm", "fused_rms_norm_affine")
    return function(x, weight, x.shape[-1:], eps)


@dataclass(frozen=True)
class Kernel:
    """One way to compute orders."""

    run: Run
    # Whether it is for layer norms, or for RMS norms.
    centres: bool = False
    # Of another package, and for a GPU. Strict mode takes none, so that it does not depend on what is installed.
    foreign: bool = False


# In the order in which they are tried.
KERNELS = {
    "quack": Kernel(_quack, foreign=True),
    "liger": Kernel(_liger, foreign=True),
    "apex": Kernel(_apex, foreign=True),
    "F.rms_norm": Kernel(_torch_rms_norm),
    "F.rms_norm × weight": Kernel(_torch_rms_norm_times_weight),
    "F.layer_norm": Kernel(_torch_layer_norm, centres=True),
}


def _check_rms(x: Tensor, weight: Weight, bias: Weight, order: Order) -> None:
    if bias is not None:
        raise Unfit("it takes no bias")
    if weight is not None and weight.dtype != x.dtype:
        raise Unfit("it takes one dtype for input and weight")
    if order.offset:
        raise Unfit("it adds nothing to the weight")


def _function(path: str, name: str) -> Any:
    """A function of an optional package: `apex` on PyPI is a web toolkit, `quack` not the kernels."""
    package = path.partition(".")[0]
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise Unfit(f"{package} is not installed") from error
    try:
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise Unfit(f"the package {package} here has no {path}.{name}: another of that name?") from error


@torch.inference_mode(False)
@torch.enable_grad()
def _choose(meaning: Meaning, dtypes: Dtypes, device: torch.device, mode: Mode) -> Row:
    """The first kernel that agrees with the order on these dtypes: output, dtype and every gradient.

    Where none does, the row tells why of each.
    """
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    order, eps = meaning.order, meaning.eps
    names = (meaning.weight, meaning.bias)
    x = (draw(_ROWS, meaning.num_features) * 2).to(device, dtypes[0]).requires_grad_()
    weight, bias = (
        None if name is None else draw(meaning.num_features).to(device, dtypes[1]).requires_grad_()
        for name in names
    )
    leaves = [tensor for tensor in (x, weight, bias) if tensor is not None]
    grad = draw(_ROWS, meaning.num_features)

    def gradients(out: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, grad.to(out.device, out.dtype))

    try:
        expected, saved_before = _run_and_count(lambda: order(x, weight, bias, eps), leaves)
    except RuntimeError as error:
        return Row(reason=f"the norm itself refuses {dtypes}: {error}")
    own = gradients(expected, leaves)
    wide = {id(leaf): leaf.detach().cpu().double().requires_grad_() for leaf in leaves}
    wide_weight, wide_bias = (None if tensor is None else wide[id(tensor)] for tensor in (weight, bias))
    exact_order = Order("layer", "native") if order.centres else order
    exact = gradients(exact_order(wide[id(x)], wide_weight, wide_bias, eps), list(wide.values()))

    fp32 = torch.finfo(torch.float32).eps
    reasons = []
    for name, kernel in KERNELS.items():
        if kernel.centres != order.centres or (
            kernel.foreign and (mode == "strict" or device.type != "cuda")
        ):
            continue
        try:
            out, saved_after = _run_and_count(partial(kernel.run, x, weight, bias, order, eps), leaves)
            _refuse_values(out, expected, mode)
            for mine, original, right in zip(gradients(out, leaves), own, exact, strict=True):
                wrong, before = _relative_error(mine, right), _relative_error(original, right)
                allowed = 1.25 * before + 4 * fp32 if mode == "strict" else 2 * before + 16 * fp32
                if not wrong <= allowed:
                    raise Unfit(f"a gradient's error is {wrong:.1e}, {allowed:.1e} allowed")
            if saved_after >= saved_before:
                raise Unfit(f"it keeps {saved_after} B a token for backward, no less than the norm itself")
        except Unfit as unfit:
            reasons.append(f"{name}: {unfit}")
        except Exception as error:  # noqa: BLE001  (a kernel of others may raise anything: it is not taken)
            reasons.append(f"{name}: it failed: {type(error).__name__}: {error}".splitlines()[0])
        else:
            difference = _largest_difference(out, expected)
            return Row(to=name, difference=difference, saved_before=saved_before, saved_after=saved_after)
    return Row(reason="; ".join(reasons))


def _refuse_values(out: Tensor, expected: Tensor, mode: Mode) -> None:
    if out.dtype != expected.dtype or out.shape != expected.shape:
        raise Unfit(f"it returns {tuple(out.shape)} {out.dtype}")
    if not agree(out, expected, mode):
        raise Unfit(f"its values differ by {_largest_difference(out, expected):.1e}")


def _run_and_count(function: Callable[[], Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The output, and the bytes a token that autograd keeps for its backward, beside the inputs."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() % _ROWS == 0:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function()
    for tensor in inputs:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return out, sum(kept.values()) // _ROWS


def _largest_difference(out: Tensor, expected: Tensor) -> float:
    """Over the largest value expected of the row."""
    row = expected.double().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return ((out.double() - expected.double()).abs() / row).max().item()


def _relative_error(actual: Tensor, exact: Tensor) -> float:
    """In the Frobenius norm; `exact` in fp64 on the CPU."""
    return ((actual.detach().cpu().double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


class SwapReport:
    """Every norm of a model in order, and the way back: `print` it."""

    def __init__(self, mode: Mode, rows: list[Row], undo: Callable[[], None]):
        self.mode = mode
        self.rows = rows
        self._undo: Callable[[], None] | None = undo

    @property
    def num_swapped(self) -> int:
        return sum(row.to is not None for row in self.rows)

    def undo(self) -> None:
        """Makes the norms what they were. Raises ValueError the second time."""
        if self._undo is None:
            raise ValueError("these swaps were undone already")
        self._undo()
        self._undo = None

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"mode": self.mode, "norms": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        # Rows that tell the same stand once: `blocks.*.attn1.norm_q` for those of all blocks.
        groups: dict[tuple[str, Row], list[Row]] = {}
        for row in self.rows:
            pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", row.name)
            groups.setdefault((pattern, replace(row, name="")), []).append(row)
        lines = [("", "module", "class", "order", "eps", "now")]
        for (pattern, row), rows in groups.items():
            name = pattern if len(rows) > 1 else rows[0].name
            epsilon = "" if row.eps is None else f"{row.eps:.3g}"
            lines.append((f"{len(rows)} ×", name, row.was, row.order, epsilon, row.outcome))
        widths = [max(len(line[column]) for line in lines) for column in range(5)]
        head = f"norms swapped ({self.mode}): {self.num_swapped} of {len(self.rows)}"
        table = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[5]])
            for line in lines
        ]
        return "\n".join([head, *(line.rstrip() for line in table)] if groups else [head])
