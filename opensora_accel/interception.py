"""Sees chosen operators as they are called, and costs nothing at all others.

torch's dispatcher has for each operator a table of kernels by key, and a thread may switch a key on. One key is free:

    operator                  key off     key on
    addmm, gelu, ...          runs        runs: the key has no kernel and falls through, in C++
    one that is intercepted   runs        a Python function, which calls it again without the key

A mode of torch (TorchDispatchMode, TorchFunctionMode) would lead every operator through Python. What C++ calls is seen
too: DDP's all-reduces, for one. Autograd's threads have the keys of the thread that called backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch

# Above autograd; it was reserved for torchdistx, which is archived. torch's bindings know it by this name only.
_KEY: Any = "DeferredInit"
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@lru_cache(maxsize=1)
def _fall_through() -> torch.library.Library:
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    return everything


def intercept(name: str, function: Callable[..., Any]) -> torch.library.Library:
    """Within `switched_on`, `name` calls `function(operator, *args, **kwargs)`, for as long as the result lives.

    The function runs with the key off: operators that it calls are not intercepted, and are seen by autograd, autocast
    and modes as always. Where it returns NotImplemented, the operator runs as if it had not been seen; those that it
    calls in turn are.

    Args:
        name: as "c10d::allreduce_"; the library that defines it need not be imported yet.
    """
    _fall_through()
    namespace, operator = name.split("::")
    library = torch.library.Library(namespace, "IMPL")
    library.impl(operator, partial(_call, namespace, operator, function), _KEY, with_keyset=True)
    return library


def _call(
    namespace: str, name: str, function: Callable[..., Any], keys: Any, *args: Any, **kwargs: Any
) -> Any:
    operator = _operator(namespace, name)
    with torch._C._SetExcludeDispatchKeyGuard(_key(_KEY), True):
        result = function(operator, *args, **kwargs)
    if result is not NotImplemented:
        return result
    others = keys.remove(_key(_KEY))
    # A trace switches torch's dispatcher in Python on. That begins anew with an operator that others are made of, and
    # so would come here again, and again.
    if others.has(_key("PythonDispatcher")) and operator.has_kernel_for_dispatch_key(_COMPOSITE):
        others = others.remove(_key("PythonDispatcher"))
    return operator.redispatch(others, *args, **kwargs)


@lru_cache
def _operator(namespace: str, name: str) -> Any:
    return getattr(getattr(torch.ops, namespace), name).default


@lru_cache(maxsize=2)
def _key(name: str) -> Any:
    """The key as torch's sets of keys take it, which have no names; its guards take it quicker than by name."""
    return torch._C._parse_dispatch_key(name)


def switched_on() -> Any:
    """A context manager: within it this thread's operators are intercepted."""
    return torch._C._IncludeDispatchKeyGuard(_key(_KEY))


def seen_anyway() -> AbstractContextManager[Any]:
    """Within it operators are intercepted also inside of one that is; where nothing is, it does nothing.

    For collectives inside of an operator of this package, which selective checkpointing intercepts as a whole.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    return torch._C._SetExcludeDispatchKeyGuard(_key(_KEY), False)
