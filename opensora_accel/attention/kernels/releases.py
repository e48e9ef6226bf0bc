"""Attention libraries whose releases differ: which one is installed, and how its functions are called.

Functions below autograd, which take the log-sum-exp as an argument, are nobody's public interface. So they are called
by the names of their parameters: those that we know get our values, and any other one that has no default makes the
release unknown.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from opensora_accel.attention.kernels.base import Problem

# Parameters of what is not asked for: packed samples, caches, sinks, 8-bit numbers. They are None.
_ABSENT = """
alibi_slopes rng_state k_new v_new qv out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k sequed_q
sequed_k max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale
k_descale v_descale sink dsink merge_q_ranges merge_k_ranges qk_map bwd_kq_map fwd_unique_count bwd_unique_count
ref_block_size
"""
# What their parameters are given that have no default and that we have nothing to say about.
_NEUTRAL: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size": (-1, -1),
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "return_softmax": False,
    "sink_layout": "sh",
    "sm_margin": 0,
    **dict.fromkeys(_ABSENT.split()),
}


# Names that releases have given a parameter beside the one that we know it by.
_ALIASES = {"causal": "is_causal"}


@dataclass(frozen=True)
class Function:
    """One of their functions, and its parameters: whether each has a default."""

    call: Callable[..., Any]
    parameters: dict[str, bool]

    @classmethod
    def of(cls, call: Callable[..., Any]) -> Function:
        """Asks an operator for its schema, and a function for its signature."""
        # An operator made by `torch.library.custom_op` takes anything by its Python signature.
        if (operator := getattr(call, "_opoverload", None)) is not None:
            return cls(call, {a.name: a.has_default_value() for a in operator._schema.arguments})
        parameters = inspect.signature(call).parameters.values()
        return cls(call, {p.name: p.default is not p.empty for p in parameters})

    def unknown(self, ours: frozenset[str]) -> str | None:
        """What is wrong with its parameters, if we have values for `ours`."""
        ours = frozenset(map(self._name, ours))
        if missing := sorted(ours - set(self.parameters)):
            return f"has no parameter {missing[0]}"
        known = ours | set(_NEUTRAL)
        unknown = [
            name for name, has_default in self.parameters.items() if name not in known and not has_default
        ]
        return f"wants {unknown[0]}" if unknown else None

    def __call__(self, **ours: Any) -> Any:
        """Runs it on tensors and options, all by name."""
        ours = {self._name(name): value for name, value in ours.items()}
        unsaid = [
            name for name, has_default in self.parameters.items() if not has_default and name not in ours
        ]
        return self.call(**{name: _NEUTRAL[name] for name in unsaid}, **ours)

    def _name(self, name: str) -> str:
        """What it calls a parameter of ours."""
        alias = _ALIASES.get(name)
        return alias if alias in self.parameters and name not in self.parameters else name


def unfit_operands(problem: Problem, most_head_dim: int) -> str | None:
    """Why none of these libraries takes the tensors, whatever the GPU."""
    if problem.device.type != "cuda":
        return f"it runs on CUDA, the tensors are on {problem.device.type}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes fp16 or bf16, not {problem.dtype}"
    if problem.masked:
        return "it takes no key mask"
    dims = problem.head_dim, problem.value_dim
    if dims[0] != dims[1] or dims[0] % 8 or dims[0] > most_head_dim:
        return f"it needs equal head dims, a multiple of 8 up to {most_head_dim}, not {dims[0]}, {dims[1]}"
    return None


@dataclass(frozen=True)
class Release:
    """What was found of a library: both functions, or why they are of no use."""

    name: str
    problem: str | None = None
    forward: Any = None
    backward: Any = None


@lru_cache
def find_release(
    module: str,
    distributions: tuple[str, ...],
    remedy: str,
    functions: str,
    of_forward: frozenset[str],
    of_backward: frozenset[str],
) -> Release:
    """The release that `import module` gives, asked for its version and for its signatures.

    Args:
        functions: what the names of its forward and backward begin with.
        of_forward, of_backward: the parameters that we have values for.
    """
    try:
        library = importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # a build for another torch fails in its own ways
        return Release("", f"{module} cannot be imported ({error})")
    name = _version(module, distributions)
    try:
        forward, backward = (
            Function.of(getattr(library, f"{functions}_{half}")) for half in ("forward", "backward")
        )
    except AttributeError:
        return Release(name, f"{name} has no functions {functions}_forward and _backward; {remedy}")
    for half, function, ours in (("forward", forward, of_forward), ("backward", backward, of_backward)):
        if wrong := function.unknown(ours):
            return Release(name, f"{name} has another interface: its {half} {wrong}; {remedy}")
    described = f"{name}, {'operators' if hasattr(forward.call, '_opoverload') else 'functions'}"
    if any(parameter.startswith("window_size") for parameter in forward.parameters):
        described += f", the window as {'a pair' if 'window_size' in forward.parameters else 'two numbers'}"
    return Release(described, None, forward, backward)


def _version(module: str, distributions: tuple[str, ...]) -> str:
    """The name and version of the package that holds the module."""
    version = getattr(importlib.import_module(module.partition(".")[0]), "__version__", None)
    for distribution in distributions:
        try:
            version = version or importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{distributions[0]} {version or 'of an unknown version'}"
