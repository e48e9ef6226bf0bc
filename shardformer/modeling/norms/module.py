"""The modules that stand where a norm was: the same class and parameter objects, with a kernel where it is faster."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.modeling.norms.choose import Choice, DtypePair, choose
from shardformer.modeling.norms.compare import Mode
from shardformer.modeling.norms.kernels import KERNELS, may_replace
from shardformer.modeling.norms.order import resolve_eps
from shardformer.modeling.norms.probe import FLOATS, Finding, LeftAlone, NotANorm, identify
from shardformer.modeling.t5 import T5LayerNorm


@dataclass(frozen=True)
class Running:
    """What a norm was found to compute, and the kernels that agree, by (input dtype, weight dtype).

    No kernel is faster on fewer than `least_elements`: it is asked first, as it costs a microsecond less.
    """

    finding: Finding
    device_type: str
    kernels: Mapping[DtypePair, str]
    least_elements: int


class SwappedNorm(nn.Module):
    """Stands before the norm's own class: runs a kernel where one agrees and is faster, else the norm's forward.

    So whatever was not compared is the original's, bit for bit: other devices and dtypes, autocast, compilers,
    function transforms, tensor subclasses.
    """

    _running: Running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The norm's own signature; a kernel is for one tensor [..., C]."""
        x = args[0] if len(args) == 1 and not kwargs else None
        # A compiler must not guard on sizes that only matter to kernels.
        if (
            type(x) is Tensor
            and not torch.compiler.is_compiling()
            and x.numel() >= self._running.least_elements
        ):
            out = self.on_kernel(x)
            if out is not None:
                return out
        return super().forward(*args, **kwargs)

    def on_kernel(self, x: Tensor, always: bool = False) -> Tensor | None:
        """The output, or None where no kernel agrees, or none is faster and it is not `always` wanted."""
        running = self._running
        finding = running.finding
        weight = None if finding.weight is None else getattr(self, finding.weight)
        name = running.kernels.get((x.dtype, None if weight is None else weight.dtype))
        if name is None or x.device.type != running.device_type:
            return None
        kernel = KERNELS[name]
        if not (always or kernel.worth(x, finding.order)) or not may_replace(x):
            return None
        bias = None if finding.bias is None else getattr(self, finding.bias)
        return kernel.run(x, weight, bias, finding.order, finding.eps)

    def extra_repr(self) -> str:
        kernels = ", ".join(dict.fromkeys(self._running.kernels.values()))
        return ", ".join(filter(None, [super().extra_repr(), f"runs on {kernels}"]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (type(self).__mro__[2],), self.__dict__


@functools.cache
def _swapped_class(base: Any) -> type[SwappedNorm]:
    return type(f"Swapped{base.__name__}", (SwappedNorm, base), {"__doc__": base.__doc__})


def _empty(base: Any) -> SwappedNorm:
    made = _swapped_class(base)
    return made.__new__(made)


def swapped(
    module: nn.Module, finding: Finding, mode: Mode, chosen: dict[object, Choice], like: Tensor | None = None
) -> tuple[SwappedNorm, Choice] | str:
    """A norm of `module`'s class on its parameter objects, and the choice for its own dtype; or why there is none.

    `like` has the device and dtype that a norm without parameters runs on; `chosen` keeps choices for the next norm.
    """
    found = _running(module, finding, mode, chosen, like)
    if isinstance(found, str):
        return found
    running, choice = found
    return _with_state_of(module, _empty(type(module)), running), choice


def _with_state_of(module: nn.Module, made: SwappedNorm, running: Running) -> SwappedNorm:
    """Parameters and buffers lie in one table for both: what is put into the one (`load_state_dict(assign=True)`,
    `to_empty`) is found in the other, where a swap is undone. Other tables are copied: hooks are each one's own."""
    shared = ("_parameters", "_buffers")
    made.__dict__.update(
        {k: v.copy() if isinstance(v, dict) and k not in shared else v for k, v in vars(module).items()}
    )
    made._running = running
    return made


def _running(
    module: nn.Module, finding: Finding, mode: Mode, chosen: dict[object, Choice], like: Tensor | None
) -> tuple[Running, Choice] | str:
    own = like if finding.weight is None else getattr(module, finding.weight)
    device = torch.device("cpu") if own is None or own.is_meta else own.device
    dtype = torch.float32 if own is None else own.dtype
    choices = {
        (x_dtype, w_dtype): choose(finding, (x_dtype, w_dtype), device, mode, chosen)
        for x_dtype in FLOATS
        for w_dtype in (FLOATS if finding.weight is not None else (None,))
    }
    primary = choices.get((dtype, None if finding.weight is None else dtype))
    if primary is None or primary.kernel is None:
        return f"no kernel is for {dtype}" if primary is None else primary.reason
    kernels = {dtypes: choice.kernel for dtypes, choice in choices.items() if choice.kernel is not None}
    least = min(KERNELS[name].least_elements for name in kernels.values())
    return Running(finding, device.type, kernels, least), primary


class FusedT5LayerNorm(SwappedNorm, T5LayerNorm):
    """`T5LayerNorm` on a fused kernel; `T5LayerNorm.from_native_module` is the way back."""

    @staticmethod
    def from_native_module(  # type: ignore[override]
        module: nn.Module, process_group: object = None, *, mode: Mode = "strict"
    ) -> T5LayerNorm:
        """T5's norm on `module`'s own parameter object, on the kernels that agree with it on its device.

        `process_group` is what ColossalAI passes to every replacement; a norm needs none.
        Raises ValueError for a module that does not compute T5's norm, or for which no kernel is to be had.
        """
        reason = _refusal(module, mode)
        if isinstance(reason, str):
            raise ValueError(
                f"FusedT5LayerNorm cannot replace this {type(module).__name__}: {reason}; leave it out"
            )
        plain = T5LayerNorm.from_native_module(module)
        plain.variance_epsilon = resolve_eps(reason.finding.eps, plain.weight.dtype)
        return _with_state_of(plain, FusedT5LayerNorm.__new__(FusedT5LayerNorm), reason)  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        return FusedT5LayerNorm.__new__, (FusedT5LayerNorm,), self.__dict__


def _refusal(module: nn.Module, mode: Mode) -> Running | str:
    try:
        finding = identify(module)
    except NotANorm:
        return "it does not normalise its last dimension"
    except LeftAlone as error:
        return str(error)
    if finding.order.rounds != "weight" or finding.weight != "weight" or finding.bias is not None:
        return f"it computes the order {finding.order.name!r}, and T5's norm is another"
    found = _running(module, finding, mode, {}, None)
    return found if isinstance(found, str) else found[0]
