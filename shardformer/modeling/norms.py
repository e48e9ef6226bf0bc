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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardformer.modeling.kernels import modulated_norm
from shardformer.modeling.kernels.choose import why_plain, why_single_operations
from shardformer.modeling.norm_orders import FLOATS, LeftAlone, Meaning, NotANorm, Order, agree, find_meaning

Mode = Literal["strict", "fast"]
# The dtype of the input, and of the weight if there is one.
Dtypes = tuple[torch.dtype, torch.dtype | None]
# A weight or bias [C]; None where the norm has none.
Weight = Tensor | None
# None is torch.nn.RMSNorm's default, which hangs on the dtype.
Eps = float | None
# (x [..., C], weight, bias, order, eps) -> [..., C]; raises Unfit.
Run = Callable[[Tensor, Weight, Weight, Order, Eps], Tensor]

# Rows of the inputs for comparisons: a prime that divides no number of features, so that a tensor kept for
# backward is known by its size to be one of activations.
_ROWS = 23


class Unfit(Exception):
    """The kernel does not compute this order on these dtypes, or is not installed; the message is shown."""


@dataclass(frozen=True)
class Kernel:
    """One way to compute orders."""

    run: Run
    # Whether it is for layer norms, or for RMS norms.
    centres: bool = False
    # From another package, and for a GPU. Strict mode takes none, so that it does not depend on what is installed.
    foreign: bool = False


def _check_rms(x: Tensor, weight: Weight, bias: Weight, order: Order) -> None:
    """Raises Unfit unless x [..., C] and weight [C] share a dtype, without bias or offset."""
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
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise Unfit(f"{package} is not installed") from error
        raise Unfit(f"the package {package} here has no {path}.{name}: another of that name?") from error


def _torch_rms_norm(x: Tensor, weight: Weight, bias: Weight, order: Order, eps: Eps) -> Tensor:
    """[..., C] → [..., C], the product with the weight included."""
    _check_rms(x, weight, bias, order)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _torch_rms_norm_times_weight(x: Tensor, weight: Weight, bias: Weight, order: Order, eps: Eps) -> Tensor:
    """[..., C] → [..., C], rounded before the product with the weight."""
    _check_rms(x, weight, bias, order)
    if weight is None or order.rounds == "end":
        raise Unfit("the order rounds after the product")
    return weight * F.rms_norm(x, x.shape[-1:], None, eps)


def _quack(x: Tensor, weight: Weight, bias: Weight, order: Order, eps: Eps) -> Tensor:
    """[..., C] → [..., C]. Raises: Unfit, where it is not installed or does not take this order."""
    _check_rms(x, weight, bias, order)
    return _function("quack", "rmsnorm")(x, weight, eps=eps)


def _liger(x: Tensor, weight: Weight, bias: Weight, order: Order, eps: Eps) -> Tensor:
    """[..., C] → [..., C]. Raises: Unfit, where it is not installed or does not take this order."""
    _check_rms(x, weight, bias, replace(order, offset=0.0))
    # Liger's own words: gemma multiplies by the weight before it rounds, llama afterwards.
    casting = "gemma" if order.rounds == "end" else "llama"
    # Not in place (the last argument): the gradient that comes in belongs to autograd.
    function = _function("liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
    return function.apply(x, weight, eps, order.offset, casting, False)


def _apex(x: Tensor, weight: Weight, bias: Weight, order: Order, eps: Eps) -> Tensor:
    """[..., C] → [..., C]. Raises: Unfit, where it is not installed or does not take this order."""
    _check_rms(x, weight, bias, order)
    function = _function("apex.normalization.fused_layer_norm", "fused_rms_norm_affine")
    return function(x, weight, x.shape[-1:], eps)


def _triton(x: Tensor, weight: Weight, bias: Weight, order: Order, eps: Eps) -> Tensor:
    """[..., C] → [..., C], any order. Raises: Unfit, where no kernel of ours can run, or torch's does the same."""
    if order.rounds == "native":
        raise Unfit("F.layer_norm computes this order in one pass")
    is_one_dtype = weight is None or weight.dtype == x.dtype
    if not order.centres and bias is None and is_one_dtype and (weight is None or order.name == "product"):
        raise Unfit("F.rms_norm computes this order in one pass")
    reason = why_plain(x, weight, bias)
    if reason is not None:
        raise Unfit(reason)
    return modulated_norm(x, None, None, weight, bias, order=order, eps=eps)


# In the order in which they are tried. Ours stand behind torch's for what torch computes in one pass: no GPU has
# timed them yet.
KERNELS = {
    "quack": Kernel(_quack, foreign=True),
    "liger": Kernel(_liger, foreign=True),
    "apex": Kernel(_apex, foreign=True),
    "F.rms_norm": Kernel(_torch_rms_norm),
    "F.layer_norm": Kernel(
        lambda x, weight, bias, _, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps or 0.0), centres=True
    ),
    "triton.rms_norm": Kernel(_triton),
    "triton.layer_norm": Kernel(_triton, centres=True),
    "F.rms_norm × weight": Kernel(_torch_rms_norm_times_weight),
}


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
        mode: `strict` changes no value beyond the last bit of an fp32 sum, and takes kernels of torch and our own.
            `fast` may round a half elsewhere, and takes kernels of quack, Liger or apex, if they agree.
        within: paths below which norms may be swapped, `*` for any one name: `("blocks.*.attn1",)`.

    Returns:
        What was done with each norm and why; its `undo()` takes the kernels away again.

    Raises:
        ValueError: an unknown mode, or a path that no module has.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} is unknown; use one of {', '.join(get_args(Mode))}")
    # Under every name: a norm that is held twice is swapped once and stands in the report twice.
    modules = dict(model.named_modules(remove_duplicate=False))
    # With a dot behind both, a path is a prefix of whole names: `blocks.*.attn1.` of `blocks.0.attn1.norm_q.`.
    patterns = [re.compile(re.escape(path and f"{path}.").replace(r"\*", r"[^.]+")) for path in within]
    for path, pattern in zip(within, patterns, strict=True):
        if not any(pattern.match(f"{name}.") for name in modules):
            raise ValueError(f"within={path!r} fits no module of {type(model).__name__}")
    # What a norm without parameters runs on.
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    meanings: dict[object, Meaning] = {}
    choose = cache(partial(_choose, mode=mode))
    rows: dict[int, Row] = {}
    reported: list[Row] = []
    # What norms are probed with is drawn on the host, whatever device the caller makes tensors on by default.
    with ExitStack() as undo, torch.device("cpu"):
        for name, module in modules.items():
            if not any(pattern.match(f"{name}.") for pattern in patterns):
                continue
            if id(module) not in rows:
                if isinstance(module, SwappedNorm):  # by an earlier call
                    continue
                try:
                    rows[id(module)] = _swap(module, mode, like, meanings, choose, undo)
                except NotANorm:
                    continue
                except LeftAlone as error:
                    rows[id(module)] = Row(was=type(module).__name__, reason=str(error))
            reported.append(replace(rows[id(module)], name=name))
        return SwapReport(mode, reported, undo.pop_all().close)


def _swap(
    module: nn.Module,
    mode: Mode,
    like: Tensor,
    meanings: dict[object, Meaning],
    choose: Callable[[Meaning, Dtypes, torch.device], Row],
    undo: ExitStack,
) -> Row:
    """Swaps one norm, if a kernel is found for its own dtype; the report's row.

    like: a tensor, whose dtype and device count where the norm has no weight.
    """
    meaning = find_meaning(module, meanings)
    weight, bias = _parameters(module, meaning)
    own = like if weight is None else weight
    device = torch.device("cpu") if own.is_meta else own.device
    # In every mix of dtypes, because the norm may be cast, or called on others, later.
    mixes = product(FLOATS, FLOATS if meaning.weight else (None,))
    choices = {dtypes: choose(meaning, dtypes, device) for dtypes in mixes}
    unknown = Row(reason=f"no kernel is for {own.dtype}")
    choice = choices.get((own.dtype, None if weight is None else own.dtype), unknown)
    # Without a weight, the orders of RMS norms differ in nothing.
    order = meaning.order.name if meaning.weight or meaning.order.centres else "rms"
    row = replace(choice, was=type(module).__name__, order=order, eps=meaning.eps)
    if row.to is None:
        return row
    if not own.is_meta:
        x = torch.randn(1, _ROWS, meaning.num_features, generator=torch.Generator().manual_seed(2))
        x = x.to(device, own.dtype)
        with torch.no_grad():
            expected, out = module(x), KERNELS[row.to].run(x, weight, bias, meaning.order, meaning.eps)
        if not agree(out, expected, mode):
            reason = "with its own parameters its values are others"
            return Row(was=row.was, order=order, eps=meaning.eps, reason=reason)
        # The order stands for what it computes, not for how: torch's own norm may run on that very kernel.
        saved_before = row.saved_before if own.is_inference() else _kept_by(module, x)
        if row.saved_after >= saved_before:
            reason = f"it keeps {saved_before} B a token for backward itself, and {row.to} {row.saved_after}"
            return Row(was=row.was, order=order, eps=meaning.eps, reason=reason)
        row = replace(row, saved_before=saved_before)
        row = replace(row, difference=max(row.difference, _largest_difference(out, expected)))
    kernels = {(device.type, *dtypes): each.to for dtypes, each in choices.items() if each.to}
    original: Any = type(module)
    # The module stays the same object: whoever holds it, its parameters or its hooks notices nothing.
    module.__class__ = _swapped_class(original)
    undo.callback(setattr, module, "__class__", original)
    module._runs_on = meaning, kernels  # type: ignore[assignment]
    undo.callback(delattr, module, "_runs_on")
    return row


def _parameters(module: nn.Module, meaning: Meaning) -> Iterator[Weight]:
    return (None if name is None else getattr(module, name) for name in (meaning.weight, meaning.bias))


class SwappedNorm(nn.Module):
    """Stands before a norm's own class and runs a kernel where one was compared, else the norm's own forward."""

    # What it computes, and the names of kernels that agree, by the type of device and the dtypes.
    _runs_on: tuple[Meaning, dict[tuple[object, ...], str]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The norm's own signature; a kernel is for one tensor [..., C]."""
        meaning, kernels = self._runs_on
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        # Compilers, tracers, autocast, transforms and tensor subclasses act on single operations; they get them.
        if x is not None and why_single_operations(x) is None:
            weight, bias = _parameters(self, meaning)
            name = kernels.get((x.device.type, x.dtype, None if weight is None else weight.dtype))
            if name is not None:
                return KERNELS[name].run(x, weight, bias, meaning.order, meaning.eps)
        return super().forward(*args, **kwargs)

    def extra_repr(self) -> str:
        kernels = ", ".join(dict.fromkeys(self._runs_on[1].values()))
        return ", ".join(filter(None, [super().extra_repr(), f"runs on {kernels}"]))

    def __reduce__(self) -> tuple[Any, ...]:
        # A class made here has no name that pickle could import; its base has.
        return _new, (type(self).__mro__[2],), self.__dict__


@cache
def _swapped_class(base: Any) -> Any:
    return type(f"Swapped{base.__name__}", (SwappedNorm, base), {"__doc__": base.__doc__})


def _new(base: Any) -> SwappedNorm:
    made: type[SwappedNorm] = _swapped_class(base)
    return made.__new__(made)


@torch.inference_mode(False)
@torch.enable_grad()
def _choose(meaning: Meaning, dtypes: Dtypes, device: torch.device, mode: Mode) -> Row:
    """The first kernel that agrees with the order on these dtypes: output, dtype and every gradient.

    Where none does, the row says why of each.
    """
    order, eps, num_features = meaning.order, meaning.eps, meaning.num_features
    # A generator of its own leaves the draws of the caller's run as they would be.
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = (draw(_ROWS, num_features) * 2).to(device, dtypes[0])
    weight, bias = (
        None if name is None else draw(num_features).to(device, dtypes[1])
        for name in (meaning.weight, meaning.bias)
    )
    grad = draw(_ROWS, num_features)
    inputs = (x, weight, bias)
    try:
        expected, own, saved_before = _measure(order, inputs, grad, eps)
    except RuntimeError as error:
        return Row(reason=f"the norm itself refuses {dtypes}: {error}")
    # The judge of both: the order in fp64, on the CPU, from the same rounded inputs.
    wide = [None if tensor is None else tensor.cpu().double() for tensor in inputs]
    _, exact, _ = _measure(order, wide, grad, eps)

    fp32 = torch.finfo(torch.float32).eps
    reasons = []
    for name, kernel in KERNELS.items():
        is_allowed = not kernel.foreign or (mode == "fast" and device.type == "cuda")
        if kernel.centres != order.centres or not is_allowed:
            continue
        try:
            out, gradients, saved_after = _measure(kernel.run, inputs, grad, order, eps)
            difference = _largest_difference(out, expected)
            if out.dtype != expected.dtype:
                raise Unfit(f"it returns {tuple(out.shape)} {out.dtype}")
            if not agree(out, expected, mode):
                raise Unfit(f"its values differ by {difference:.1e}")
            for mine, original, right in zip(gradients, own, exact, strict=True):
                # Rounding is noise in both, so a kernel may be a little further from fp64 than the order itself.
                wrong, before = _relative_error(mine, right), _relative_error(original, right)
                allowed = 1.25 * before + 4 * fp32 if mode == "strict" else 2 * before + 16 * fp32
                if not wrong <= allowed:
                    raise Unfit(f"a gradient's error is {wrong:.1e}, {allowed:.1e} allowed")
            # What a swap is for is memory. A kernel that keeps as much stays out, however fast it is.
            if saved_after >= saved_before:
                raise Unfit(f"it keeps {saved_after} B a token for backward, no less than the norm itself")
        except Unfit as unfit:
            reasons.append(f"{name}: {unfit}")
        except Exception as error:  # noqa: BLE001  (a kernel of others may raise anything: it is not taken)
            reasons.append(f"{name}: it failed: {type(error).__name__}: {error}".splitlines()[0])
        else:
            return Row(to=name, difference=difference, saved_before=saved_before, saved_after=saved_after)
    return Row(reason="; ".join(reasons))


def _measure(
    function: Callable[..., Tensor], inputs: Sequence[Weight], grad: Tensor, *options: Any
) -> tuple[Tensor, tuple[Tensor, ...], int]:
    """The output [N, C], the gradient of every input, and the bytes a token kept for backward beside the inputs."""
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs]
    given = [tensor for tensor in leaves if tensor is not None]
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        # By address: several views of one storage are kept once. Scalars and weights do not grow with the tokens.
        if tensor.numel() % _ROWS == 0:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function(*leaves, *options)
    # Inputs are alive anyhow, so a kernel that keeps them costs nothing.
    for tensor in given:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    gradients = torch.autograd.grad(out, given, grad.to(out.device, out.dtype))
    return out, gradients, sum(kept.values()) // _ROWS


@torch.inference_mode(False)
@torch.enable_grad()
def _kept_by(norm: nn.Module, x: Tensor) -> int:
    """Bytes a token that a norm keeps for backward of x [1, N, C], beside it."""
    x = torch.empty_like(x).copy_(x)  # one of inference mode could not be kept
    return _measure(norm, (x,), torch.ones_like(x))[2]


def _largest_difference(out: Tensor, expected: Tensor) -> float:
    """Between tensors [..., C], over the largest value expected of the row."""
    row = expected.double().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return ((out.double() - expected.double()).abs() / row).max().item()


def _relative_error(actual: Tensor, exact: Tensor) -> float:
    """The relative error of a tensor in the Frobenius norm; `exact` in fp64 on the CPU."""
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
        # Rows that say the same stand once: `blocks.*.attn1.norm_q` for those of all blocks.
        groups: dict[tuple[str, Row], list[str]] = {}
        for row in self.rows:
            pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", row.name)
            groups.setdefault((pattern, replace(row, name="")), []).append(row.name)
        lines = [("", "module", "class", "order", "eps", "now")]
        for (pattern, row), names in groups.items():
            name = pattern if len(names) > 1 else names[0]
            eps = "" if row.eps is None else f"{row.eps:.3g}"
            lines.append((f"{len(names)} ×", name, row.was, row.order, eps, row.outcome))
        # The last column is not padded.
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1] + [0]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        head = f"norms swapped ({self.mode}): {self.num_swapped} of {len(self.rows)}"
        return "\n".join([head, *table] if groups else [head])
