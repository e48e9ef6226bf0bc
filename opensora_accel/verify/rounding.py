"""The step in bf16, as it is run: do the ranks round as one device does?

In bf16 every gradient is off by some tenths of a per cent, right or wrong, so no mesh has one device's gradients. What
can be compared is how far off they are. Ranks that exchange what they have computed make one device's roundings in
other places, and are as far off, give or take a little. A ring that merges its blocks in bf16 rounds one sum again and
again. Of a model of two blocks with 48 tokens (`tests/verify/in_bf16.py`), in errors of one device:

    ranks of the ring                                                  2       4
    what the layer behind attention is given, merged in fp32           1.22    1.12    no growth
    the same, merged in bf16                                           1.54    1.86    more with every rank
    the gradient of that layer's weight, merged in bf16                0.90    0.92    other roundings hide it

So what modules are given and give is compared too, each rank's in bf16 with the same rank's in fp64, where that is
proven. Everything is run from several sets of weights, since one run has one pattern of roundings, and errors are added
up as squares. Weights and inputs are numbers that bf16 has, in fp64 as well: rounding them would hide what ranks add.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from opensora_accel.verify.parameters import named_parameters
from opensora_accel.wrapping import replaced

_aten = torch.ops.aten
_MAKE = {_aten.randn, _aten.rand, _aten.randn_like, _aten.rand_like, _aten.normal}
_FILL = {_aten.normal_, _aten.uniform_, _aten.log_normal_, _aten.exponential_}


@dataclass(frozen=True)
class Rounding:
    """One of several runs from the same weights."""

    number: int  # of the weights
    is_narrow: bool  # in bf16; otherwise in fp64
    wraps: bool = True  # autocast stands around the step, which has none of its own
    in_fp32: bool = False  # without any autocast: only what the code itself casts is rounded to bf16


def round_weights(model: nn.Module, number: int) -> None:
    """Gives parameters other values of their size, such as bf16 has."""
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            if parameter.is_floating_point():
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + number)
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_((parameter * (1 + 0.1 * noise)).bfloat16())


def rounded(tensor: Tensor) -> Tensor:
    """fp64 numbers such as bf16 has."""
    with _disable_current_modes():  # one lifts casts
        return tensor.bfloat16().double()


def narrow(tensor: Tensor) -> Tensor:
    """fp64 in fp32, as weights and inputs of a run in bf16 are."""
    if tensor.dtype == torch.complex128:
        return tensor.to(torch.complex64)
    return tensor.float() if tensor.dtype == torch.float64 else tensor


class _DrawInDouble(TorchDispatchMode):
    """Draws fp32 noise in fp64: torch has other numbers for it, and both runs are to have one noise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in _MAKE and any(argument.name == "dtype" for argument in func._schema.arguments):
            like = args[0].dtype if args and isinstance(args[0], Tensor) else torch.get_default_dtype()
            dtype = kwargs.get("dtype") or like
            return func(*args, **{**kwargs, "dtype": torch.float64}).to(dtype)
        if packet in _FILL and args[0].is_floating_point():
            wide = args[0].double()
            func(wide, *args[1:], **kwargs)
            return args[0].copy_(wide)
        return func(*args, **kwargs)


@contextlib.contextmanager
def as_in_training(rounding: Rounding) -> Iterator[None]:
    """Within it the step rounds as it would in training."""
    with contextlib.ExitStack() as around:
        around.enter_context(_DrawInDouble())
        if rounding.wraps and not rounding.in_fp32:
            # Without a cache, which would live on from one forward to the next. Regions of the step's own have theirs.
            around.enter_context(torch.autocast("cpu", torch.bfloat16, cache_enabled=False))
        if rounding.in_fp32:
            init: Any = torch.autocast.__init__

            def disabled(region: torch.autocast, *args: Any, **kwargs: Any) -> None:
                init(region, *args, **kwargs)
                region._enabled = False

            around.enter_context(replaced(torch.autocast, "__init__", disabled))
        yield
