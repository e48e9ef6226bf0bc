"""What a step does through torch that its gradients do not show: what it clips, shards, reaches, patches and draws.

Clipping comes first, as it hides everything else. Clipped to one norm, all gradients look alike whatever factor they
had: a gradient of half its size is clipped to the same one. So each gradient is compared as a clip function found it.
Whether all ranks clip by the norm of the whole gradient is compared apart.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from opensora_accel.verify.parameters import named_parameters

How = Literal["norm", "value"]

_EPSILON = 1e-6
"""That torch adds to a norm before it divides by it."""
_NORMS = (2.0, float("inf"), 1.0)


@dataclass(frozen=True)
class Clip:
    """One call of a clip function."""

    how: How
    limit: float
    names: tuple[str, ...]
    """The parameters that it was given."""

    def without(self, names: Collection[str]) -> Clip:
        return replace(self, names=tuple(name for name in self.names if name not in names))


@contextlib.contextmanager
def before_clipping(see: Callable[[How, float, Sequence[Tensor]], None]) -> Iterator[None]:
    """Within it, `see(how, limit, parameters)` is called before torch's clip functions change a gradient.

    accelerate, lightning and others call these; FSDP1 has a method of its own. A clip written by hand is not seen.
    """

    def seen_first(how: How, clip: Any) -> Any:
        def call(parameters: Any, limit: float, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            see(how, float(limit), given)
            return clip(given, limit, *args, **kwargs)

        return call

    # Not by torch's functions: its parameters are flat, and their norms are added up over ranks.
    clip_of_fsdp1 = FullyShardedDataParallel.clip_grad_norm_

    def by_fsdp1(self: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        see("norm", float(max_norm), list(self.parameters()))
        return clip_of_fsdp1(self, max_norm, *args, **kwargs)

    with (
        _exchanged(torch.nn.utils.clip_grads_with_norm_, lambda clip: seen_first("norm", clip)),
        _exchanged(torch.nn.utils.clip_grad_value_, lambda clip: seen_first("value", clip)),
        mock.patch.object(FullyShardedDataParallel, "clip_grad_norm_", by_fsdp1),
    ):
        yield


@contextlib.contextmanager
def _exchanged(function: Any, wrapper: Callable[[Any], Any]) -> Iterator[None]:
    """Within it, `function` runs what `wrapper` makes of it, for those too that have imported it by its name.

    torch decorates its clip functions, so the one that does the work lies in a cell of what is imported.
    """
    (cell,) = (cell for cell in function.__closure__ if cell.cell_contents is function.__wrapped__)
    original = cell.cell_contents
    cell.cell_contents = wrapper(original)
    try:
        yield
    finally:
        cell.cell_contents = original


def expected_after_clipping(
    clips: Sequence[Clip], gradients: Mapping[str, Tensor | None], limits: Mapping[tuple[How, str], float]
) -> list[dict[str, Tensor]]:
    """What `gradients`, of any shapes, should be after `clips`: one answer for each norm that may have been meant.

    That is the norm of each call's parameters, or of all that are clipped by norm (accelerate calls once for each
    mesh).

    Args:
        limits: those of the single device where it clips too, by how it clips and the parameter's name.
    """
    present = {name: g for clip in clips for name in clip.names if (g := gradients.get(name)) is not None}
    by_norm = dict.fromkeys(name for clip in clips if clip.how == "norm" for name in clip.names)
    answers = []
    # Which norm a hand-made call of clip_grads_with_norm_ was given cannot be seen, so every usual one is tried.
    for order, is_together in itertools.product(_NORMS, (False, True)):
        found = dict(present)
        norm_of_all = _norm([found[name] for name in by_norm if name in found], order)
        for clip in clips:
            names = [name for name in clip.names if name in found]
            norm = norm_of_all if is_together else _norm([found[name] for name in names], order)
            for name in names:
                limit = limits.get((clip.how, name), clip.limit)
                if clip.how == "norm":
                    found[name] = found[name] * min(1.0, limit / (norm + _EPSILON))
                else:
                    found[name] = found[name].clamp(-limit, limit)
        answers.append(found)
    return answers


def _norm(tensors: Sequence[Tensor], order: float) -> float:
    if not tensors:
        return 0.0
    return torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in tensors]), order).item()


@dataclass
class FSDPCalls:
    """What a step asks of FSDP."""

    fsdp1_modules: list[FullyShardedDataParallel] = field(default_factory=list)
    """The outermost one holds what it wraps, not the reverse: nothing else leads to it."""
    requires_all_reduce: dict[nn.Module, bool] = field(default_factory=dict)
    """FSDP2 modules that were told whether to add up gradients over replicas."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        make: Any = FullyShardedDataParallel.__init__
        tell = FSDPModule.set_requires_all_reduce

        def init(module: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
            make(module, *args, **kwargs)
            self.fsdp1_modules.append(module)

        def set_requires_all_reduce(module: Any, requires_all_reduce: bool, *, recurse: bool = True) -> None:
            modules = module.modules() if recurse else [module]
            self.requires_all_reduce |= dict.fromkeys(modules, requires_all_reduce)
            tell(module, requires_all_reduce, recurse=recurse)

        with (
            mock.patch.object(FullyShardedDataParallel, "__init__", init),
            mock.patch.object(FSDPModule, "set_requires_all_reduce", set_requires_all_reduce),
        ):
            yield

    def held_back(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Parameters without a gradient that FSDP2 was told not to add up over replicas, with the replicas' axes."""
        off = {
            parameter
            for module, is_required in self.requires_all_reduce.items()
            if not is_required
            for parameter in module.parameters(recurse=False)
        }
        found = {}
        for name, parameter in named_parameters(model):
            if isinstance(parameter, DTensor) and parameter.grad is None and parameter in off:
                axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False)
                found[name] = tuple(axis for axis, placement in axes if isinstance(placement, Replicate))
        return found


class ReachedParameters:
    """The parameters at the leaves of every graph that a backward runs through."""

    def __init__(self) -> None:
        self._parameters: dict[int, nn.Parameter] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        backward = torch.autograd.backward

        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._walk([tensors] if isinstance(tensors, Tensor) else list(tensors))
            backward(tensors, *args, **kwargs)

        with mock.patch.object(torch.autograd, "backward", watched):
            yield

    def _walk(self, tensors: Sequence[Tensor]) -> None:
        # Before backward runs: it frees the graph.
        ahead: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        seen = set(ahead)
        while ahead:
            node = ahead.pop()
            leaf = getattr(node, "variable", None)  # where gradients are accumulated
            if isinstance(leaf, nn.Parameter):
                self._parameters.setdefault(id(leaf), leaf)
            following = {next_ for next_, _ in node.next_functions if next_ is not None} - seen
            seen |= following
            ahead += following

    def outside_of(self, model: nn.Module) -> list[str]:
        """The shapes of those that `model` does not have."""
        mine = {id(parameter) for parameter in model.parameters()}
        return [str(tuple(parameter.shape)) for key, parameter in self._parameters.items() if key not in mine]


class Definitions:
    """The functions of a model's classes, and of the modules that define them and the step, as they are now."""

    def __init__(self, model: nn.Module | None, step: Callable[..., Any]):
        modules = model.modules() if model is not None else ()
        classes = {cls for module in modules for cls in type(module).__mro__ if cls is not object}
        names = {"torch.nn.functional", getattr(step, "__module__", ""), *(cls.__module__ for cls in classes)}
        self._owners: list[Any] = [
            *classes,
            *(sys.modules[name] for name in sorted(names) if name in sys.modules),
        ]
        self._before = [_functions(owner) for owner in self._owners]

    def have_changed(self) -> bool:
        """Whether a function was exchanged and not put back: the next step in this process would meet it."""
        return any(
            now.keys() != before.keys()
            or any(now[n][0] is not f or now[n][1] is not c for n, (f, c) in before.items())
            for now, before in zip(map(_functions, self._owners), self._before, strict=True)
        )


def _functions(owner: Any) -> dict[str, tuple[Any, Any]]:
    """By name, with their code: a decorator may keep the function and exchange what it does."""
    return {
        name: (value, getattr(value, "__code__", None))
        for name, value in list(vars(owner).items())
        if callable(value) or isinstance(value, (staticmethod, classmethod, property))
    }


def seed_generators(seed: int) -> None:
    """Seeds the generators that code draws from by default: torch's, Python's, and numpy's where it is loaded."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def generator_states() -> dict[str, Any]:
    """The states of these generators, to be compared."""
    states: dict[str, Any] = {
        "torch": (torch.initial_seed(), torch.get_rng_state().numpy().tobytes()),
        "random": random.getstate(),
    }
    if numpy := sys.modules.get("numpy"):
        state = numpy.random.get_state()
        states["numpy"] = (*state[:1], state[1].tobytes(), *state[2:])
    return states
