"""Sequence-parallel attention inside a model's own attention module.

The module keeps its projections, norms and rotary embedding; only the kernel call at its heart is replaced. So one
piece of code serves every model that calls `scaled_dot_product_attention`, which all processors of diffusers do on
their native backend.

    module.forward(x)                                                    x: this rank's tokens
      q, k, v = projections, norms, rotary                               the model's own code
      F.scaled_dot_product_attention(q, k, v)   →   attention(q, k, v)   over the tokens of all ranks
      output projection                                                  the model's own code

Uncompiled, the operator is intercepted, by whatever name the model's code has it. Within `torch.compile` the call is
replaced while the module is traced, and the graph holds what `attention` computes: collectives and kernels that are
operators. So a block is one graph, as it is on one device.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opensora_accel.attention import torch_attention
from opensora_accel.interception import intercept, seen_anyway, switched_on
from opensora_accel.wrapping import Forward, wrap_forward
from shardformer.modeling.origins import Origins

# (q, k, v, *, mask, causal, scale) -> out, in the layout [B, S, H, D]; the mask as the model gave it.
Attention = Callable[..., Tensor]

_running = threading.local()  # autograd recomputes on threads of its own


class Redirection:
    """One call of an attention module, in which `attention` takes the place of kernel calls; they are counted."""

    def __init__(self, attention: Attention, origins: Origins | None = None):
        self.attention, self.origins = attention, origins
        self.num_calls = self.num_masked = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, **options: Any) -> Tensor:
        """Calls what takes the kernel's place: q, k, v [B, S/P, H, D] → [B, S/P, H, D].

        Raises:
            ValueError: the model drops attention weights.
        """
        if dropout:
            raise ValueError(
                f"attention dropout ({dropout}) would drop other weights than on one device; set it to 0"
            )
        self.num_calls += 1
        self.num_masked += options["mask"] is not None
        if self.origins is not None and isinstance(options["mask"], Tensor):
            self.origins.check_mask(options["mask"], k.size(1))
        # What takes the place of a kernel may call one, which is not to be redirected.
        self._set_running(None)
        try:
            out = self.attention(q, k, v, **options)
        finally:
            self._set_running(self)
        if self.origins is not None:
            self.origins.note_attention(out)
        return out

    def scaled_dot_product_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """torch's own arguments, [B, H, S, D]. `enable_gqa` is not needed: the shapes show grouped heads."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = self.attend(q, k, v, dropout_p, mask=attn_mask, causal=is_causal, scale=scale)
        return out.transpose(1, 2)

    def _set_running(self, redirection: Any) -> None:
        """Makes a redirection of this kind, or None, the one that runs."""
        raise NotImplementedError


class RedirectAttention(Redirection):
    """Within it, `F.scaled_dot_product_attention` is `attention` on this thread, by whatever name it is called."""

    def __enter__(self) -> RedirectAttention:
        self._outer: RedirectAttention | None = getattr(_running, "redirection", None)
        _install()
        self._guards = [switched_on()]
        if self.origins is not None:
            self._guards.append(_NoteOrigins(self, self.origins))
        for guard in self._guards:
            guard.__enter__()
        self._set_running(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self._set_running(self._outer)
        for guard in reversed(self._guards):
            guard.__exit__(*error)

    def _set_running(self, redirection: RedirectAttention | None) -> None:
        _running.redirection = redirection


@lru_cache(maxsize=1)
def _install() -> torch.library.Library:
    return intercept("aten::scaled_dot_product_attention", _redirect)


def _redirect(_operator: Any, *args: Any, **kwargs: Any) -> Any:
    """What the kernel returns, [B, H, S, D], or NotImplemented: a kernel that ours calls runs as it is."""
    running: RedirectAttention | None = getattr(_running, "redirection", None)
    if running is None:
        return NotImplemented
    # Kernels and collectives further in are for others to see: a selective checkpoint, a profiler.
    with seen_anyway():
        return running.scaled_dot_product_attention(*args, **kwargs)


class _NoteOrigins(TorchFunctionMode):
    """Notes what every function of torch makes within a module's first call."""

    def __init__(self, redirection: RedirectAttention, origins: Origins):
        super().__init__()
        self._redirection, self._origins = redirection, origins

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        # Attention notes its own output, and what happens within it, or within another module, is not this one's.
        if function is not torch_attention and _running.redirection is self._redirection:
            self._origins.note(function, (args, kwargs), out)
        return out


class _Traced:
    """What `torch.compile` traces through now; it knows no threads."""

    def __init__(self) -> None:
        # Of the instance and not of the class, which the compiler asks.
        self.running: RedirectTraced | None = None


_traced = _Traced()


class RedirectTraced(Redirection):
    """The same while `torch.compile` traces a module: for the trace, torch's function is another one.

    Nothing of it is left in the graph, and torch's function is back when the trace ends. Under a function mode the
    compiler (2.13) would end its graph at nearly every method of a tensor.
    """

    _kernel: Callable[..., Tensor]

    def __enter__(self) -> RedirectTraced:
        self._outer = _traced.running
        self._kernel = F.scaled_dot_product_attention if self._outer is None else self._outer._kernel
        self._set_running(self)
        return self

    def __exit__(self, *_error: Any) -> None:
        self._set_running(self._outer)

    def _set_running(self, redirection: RedirectTraced | None) -> None:
        _traced.running = redirection
        F.scaled_dot_product_attention = (
            self._kernel if redirection is None else redirection.scaled_dot_product_attention
        )


def running_redirection() -> Redirection | None:
    """The redirection of the attention module that runs on this thread; None where none is redirected."""
    if not torch.compiler.is_compiling() and getattr(_running, "redirection", None) is not None:
        return _running.redirection
    return _traced.running


def running_attention() -> Callable[..., Tensor] | None:
    """What takes the place of kernel calls in the module that runs on this thread; None where it is not redirected."""
    redirection = running_redirection()
    return None if redirection is None else redirection.attend


def _check_masks(name: str, total: int, arguments: Mapping[str, Any]) -> None:
    """Refuses a mask of all `total` tokens, or more, that hides some and did not reach a kernel.

    Then the module's own code has cut or weighed a rank's tokens by it, whose places are those of the whole sequence.
    A mask of text alone may be used up by the module: every rank has that text whole.

    Raises:
        ValueError: an argument is such a mask.
    """
    for argument, value in arguments.items():
        is_mask = "mask" in argument and isinstance(value, Tensor) and value.dim() > 0
        if not is_mask or not 0 < total <= value.size(-1):
            continue
        hides = value.detach() < 0 if value.is_floating_point() else value == 0
        if hides.any():
            raise ValueError(
                f"{name} was given {argument}, which hides tokens, and called the kernel without a mask: its own code "
                "applied it to one rank's tokens as if they were the whole sequence. Leave the mask out, or let the "
                "module pass it to scaled_dot_product_attention"
            )


def _other_kernel() -> str:
    """What to do about attention that calls another kernel than torch's."""
    bound: Any = F.scaled_dot_product_attention
    if bound is torch_attention:
        return 'select that backend (diffusers: model.set_attention_backend("native"))'
    name = f"{getattr(bound, '__module__', None)}.{getattr(bound, '__qualname__', type(bound).__name__)}"
    return (
        f"this program has put {name} in the place of torch.nn.functional.scaled_dot_product_attention, and that "
        "called another kernel; choose its backend that calls torch's, or leave torch's function where it was"
    )


def redirect_attention(
    module: nn.Module,
    name: str,
    attention: Attention,
    counts: Callable[[], frozenset[int]],
    total: Callable[[], int],
    is_traceable: Callable[[], bool],
) -> Callable[[], None]:
    """Replaces the kernel call inside `module.forward` by `attention`; returns the function that undoes it.

    `counts()`: this rank's number of tokens, and of frames, in the forward that runs. In the module's first call
    nothing may be made from them: `Origins`. `total()`: the clip's number of tokens. `is_traceable()`: whether the
    module may be part of a compiled region in the forward that runs. Where it is not, or was not checked yet, the graph
    ends before it and goes on behind it.
    """
    is_checked = False

    def redirected(original: Forward) -> Forward:
        @torch.compiler.disable(
            reason="sequence-parallel attention is compiled when a first call was checked"
        )
        def uncompiled(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_checked
            # Without a graph, what autograd functions return cannot be told from what the model makes.
            looks = not is_checked and torch.is_grad_enabled()
            origins = Origins(name, counts, (args, kwargs)) if looks else None
            with RedirectAttention(attention, origins) as redirection:
                out = original(*args, **kwargs)
            is_checked = is_checked or looks
            if redirection.num_calls and not redirection.num_masked and looks:
                _check_masks(name, total(), inspect.signature(original).bind(*args, **kwargs).arguments)
            if redirection.num_calls == 0:
                raise ValueError(
                    f"{name} attended to this rank's tokens alone: it did not call scaled_dot_product_attention; "
                    + _other_kernel()
                )
            return out

        def forward(*args: Any, **kwargs: Any) -> Any:
            # What a program has bound to the name may do more than call the kernel, which no trace would see.
            is_torchs = _traced.running is not None or F.scaled_dot_product_attention is torch_attention
            if not (torch.compiler.is_compiling() and is_checked and is_traceable() and is_torchs):
                return uncompiled(*args, **kwargs)
            with RedirectTraced(attention) as redirection:
                out = original(*args, **kwargs)
            if redirection.num_calls == 0:
                raise ValueError(
                    f"torch.compile sees no kernel call in {name}, as uncompiled code does: the model imports "
                    "scaled_dot_product_attention by name; call torch.nn.functional.scaled_dot_product_attention, or "
                    "do not compile what holds it"
                )
            return out

        return forward

    return wrap_forward(module, redirected)
