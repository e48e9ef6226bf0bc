"""What torch.autocast could change about a model's operators, on either kind of device."""

import contextlib
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CastByAutocast(TorchDispatchMode):
    """Within it, notes operators that torch.autocast may cast for, on the CPU or on CUDA, and where they were called.

    On a machine without CUDA, or for fp32 on the CPU, autocast is off whatever a model asks for. So what is asked for
    is followed, not what is on. Where a model asks for the dtype that everything in there has already, nothing is cast,
    and a cast that the model makes itself is on no list.
    """

    def __init__(self):
        super().__init__()
        self.found, self.num_operators, self._asked = set(), 0, []

    def __enter__(self):
        self._patches = contextlib.ExitStack()
        init, enter, leave = (torch.autocast.__dict__[name] for name in ("__init__", "__enter__", "__exit__"))

        def asked(context, device_type, dtype=None, enabled=True, cache_enabled=None):
            init(context, device_type, dtype, enabled, cache_enabled)
            context.asked_for = context.fast_dtype if enabled else None

        def entered(context):
            self._asked.append(context.asked_for)
            return enter(context)

        def left(context, *exception):
            self._asked.pop()
            return leave(context, *exception)

        for name, function in (("__init__", asked), ("__enter__", entered), ("__exit__", left)):
            self._patches.enter_context(mock.patch.object(torch.autocast, name, function))
        return super().__enter__()

    def __exit__(self, *exception):
        self._patches.close()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operators += 1
        asked_for = self._asked[-1] if self._asked else None
        if asked_for is not None:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            floats = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
            if not floats <= {asked_for} and func is not torch.ops.aten._to_copy.default:
                self.found.add((str(func), asked_for, *sorted(map(str, floats))))
        elif torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))
