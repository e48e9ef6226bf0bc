"""The one way in which tools see operators: a mode that is called before and after each, whatever calls them.

class Count(OperatorMode):
    num_products = 0

    def after(self, func, args, kwargs, outputs):
        self.num_products += func is torch.ops.aten.mm.default

with Count() as count:
    loss = model(x).sum()     # forward
    loss.backward()           # backward and recomputation too: autograd's thread has the modes of its caller
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_accel.observe.operators import NAMESPACES

_COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd
# Operators of other namespaces are made of others, where they have a kernel for every device.
_OPAQUE = (*NAMESPACES, "aten", "prim", "prims")


class OperatorMode(TorchDispatchMode):
    """Within it `before` and `after` are called around each operator on plain tensors, which stays what it was."""

    # Whether a custom operator is seen as what it is made of: a ring as attention and messages.
    sees_parts = False

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operator is about to run."""

    def after(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """It has run."""

    def inside(self, func: Any, args: Any, kwargs: Any) -> None:
        """A custom operator is about to be seen as what it is made of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor shows the sizes of the whole. Its operation is taken apart first, and comes back with local tensors.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # torch's C++ asks for every second operator
        if self.sees_parts and func.namespace not in _OPAQUE and func.has_kernel_for_dispatch_key(_COMPOSITE):
            self.inside(func, args, kwargs)
            # torch has left this mode to call it. What the operator does is to be seen again.
            TorchDispatchMode.__enter__(self)
            try:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
        self.before(func, args, kwargs)
        outputs = func(*args, **kwargs)
        self.after(func, args, kwargs, outputs)
        return outputs
