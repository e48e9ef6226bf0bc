"""What a step does through torch that its gradients do not show: what it clips, shards, reaches, patches and draws.

Clipping comes first, as it hides everything else. Clipped to one norm, all gradients look alike whatever factor they
had: a gradient of half its size is clipped to the same one. So each gradient is compared as a clip function found it.
Whether all ranks clip by the norm of the whole gradient is compared apart. With P = 3 shards whose gradients have the
norms 2, 3 and 6, the whole has the norm 7. Clipped to 1, each shard is divided by 7. Ranks that divide by their own
norms 2, 3 and 6 leave three shards of norm 1.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from opensora_accel.observe import ClipKind
from opensora_accel.verify.parameters import named_parameters
from opensora_accel.wrapping import replaced

# torch adds it to a norm before it divides by it.
_EPSILON = 1e-6
_NORMS = (2.0, float("inf"), 1.0)


@dataclass(frozen=True)
class Clip:
    """One call of a clip function, with the parameters that it was given."""

    how: ClipKind
    limit: float
    names: tuple[str, ...]


def expected_after_clipping(
    clips: Sequence[Clip],
    gradients: Mapping[str, Tensor | None],
    limits: Mapping[tuple[ClipKind, str], float],
) -> list[dict[str, Tensor]]:
    """What `gradients` should be after `clips`: one answer for each norm that may have been meant.

    That is the norm of each call's parameters, or of all that are clipped by norm (accelerate calls once for each
    mesh).

    Args:
        limits: those of the single device where it clips too, by how it clips and the parameter's name.
    """
    # A parameter without a gradient has no part in any norm.
    present = {name: g for clip in clips for name in clip.names if (g := gradients.get(name)) is not None}
    by_norm = dict.fromkeys(name for clip in clips if clip.how == "norm" for name in clip.names)
    answers = []
    # Which norm a hand-made call of clip_grads_with_norm_ was given cannot be seen, so every usual one is tried.
    for order, is_together in itertools.product(_NORMS, (False, True)):
        # The clips one after another, each on what the ones before it left.
        clipped = dict(present)
        norm_of_all = _norm([clipped[name] for name in by_norm if name in clipped], order)
        for clip in clips:
            names = [name for name in clip.names if name in clipped]
            norm = norm_of_all if is_together else _norm([clipped[name] for name in names], order)
            for name in names:
                limit = limits.get((clip.how, name), clip.limit)
                if clip.how == "norm":
                    clipped[name] = clipped[name] * min(1.0, limit / (norm + _EPSILON))
                else:
                    clipped[name] = clipped[name].clamp(-limit, limit)
        answers.append(clipped)
    return answers


def _norm(tensors: Sequence[Tensor], order: float) -> float:
    """The norm of all numbers in tensors together."""
    if not tensors:
        return 0.0
    return torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in tensors]), order).item()


@contextlib.contextmanager
def fsdp1_modules() -> Iterator[list[FullyShardedDataParallel]]:
    """Those that are made within it. The outermost one holds what it wraps: nothing else leads to it."""
    make: Any = FullyShardedDataParallel.__init__
    made: list[FullyShardedDataParallel] = []

    def init(module: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
        make(module, *args, **kwargs)
        made.append(module)

    with replaced(FullyShardedDataParallel, "__init__", init):
        yield made


def held_back_by_fsdp2(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Parameters without a gradient that FSDP2 is configured not to add up over replicas, with the replicas' axes."""
    # `set_requires_gradient_sync(False)` clears both flags: then nothing is added up at all, which is another matter.
    held: set[Any] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            for group in state._fsdp_param_groups:
                if group.reduce_grads and not group.all_reduce_grads:
                    held |= {each.sharded_param for each in group.fsdp_params}
    axes_of = {}
    for name, parameter in named_parameters(model):
        if isinstance(parameter, DTensor) and parameter.grad is None and parameter in held:
            axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False)
            axes_of[name] = tuple(axis for axis, placement in axes if isinstance(placement, Replicate))
    return axes_of


@contextlib.contextmanager
def reached_parameters(note_loss: Callable[[float], None]) -> Iterator[dict[int, nn.Parameter]]:
    """The parameters at the leaves of every graph that a backward within it runs through, by id.

    Args:
        note_loss: is called with what is backwarded, as one number whose gradient it is.
    """
    backward = torch.autograd.backward
    reached: dict[int, nn.Parameter] = {}

    def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        # Within backward it is part of another one: a checkpoint's.
        if torch._C._current_graph_task_id() == -1:
            weights = args[0] if args else kwargs.get("grad_tensors")
            weights = (
                [weights] * len(given) if weights is None or isinstance(weights, Tensor) else list(weights)
            )
            for tensor, weight in zip(given, weights, strict=True):
                value = tensor.detach() if weight is None else tensor.detach() * weight.detach()
                note_loss(float(value.real.double().sum()))
        # Before backward runs: it frees the graph.
        ahead: list[Any] = [tensor.grad_fn for tensor in given if tensor.grad_fn is not None]
        seen = set(ahead)
        # Every node of the graph once, from the loss down to the leaves.
        while ahead:
            node = ahead.pop()
            leaf = getattr(node, "variable", None)  # where gradients are accumulated
            if isinstance(leaf, nn.Parameter):
                reached.setdefault(id(leaf), leaf)
            following = {next_ for next_, _ in node.next_functions if next_ is not None} - seen
            seen |= following
            ahead += following
        backward(tensors, *args, **kwargs)

    with replaced(torch.autograd, "backward", watched):
        yield reached


class Definitions:
    """The functions of a model's classes, and of the modules that define them and the step, as they are now."""

    def __init__(self, model: nn.Module | None, step: Callable[..., Any]):
        modules = model.modules() if model is not None else ()
        # Also the classes that they inherit from: libraries patch those.
        classes = {cls for module in modules for cls in type(module).__mro__ if cls is not object}
        names = {"torch.nn.functional", getattr(step, "__module__", ""), *(cls.__module__ for cls in classes)}
        self._owners: list[Any] = [*classes, *(sys.modules[name] for name in names if name in sys.modules)]
        self._before = self._functions()

    def _functions(self) -> list[tuple[str, Any, Any]]:
        """With their code: a decorator may keep the function and exchange what it does."""
        return [
            (name, value, getattr(value, "__code__", None))
            for owner in self._owners
            for name, value in sorted(vars(owner).items())
            if callable(value) or isinstance(value, (staticmethod, classmethod, property))
        ]

    def have_changed(self) -> bool:
        """Whether a function was exchanged and not put back: the next step in this process would meet it."""
        now = self._functions()
        pairs = zip(now, self._before, strict=False)
        return len(now) != len(self._before) or any(
            n[0] != b[0] or n[1] is not b[1] or n[2] is not b[2] for n, b in pairs
        )


def seed_generators(seed: int) -> None:
    """Seeds the generators that code draws from by default: torch's, Python's, and numpy's where it is loaded."""
    torch.manual_seed(seed)
    random.seed(seed)
    # Not imported for this: a step that never imports numpy draws nothing from it.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def generator_states() -> dict[str, Any]:
    """The states of these generators, to be compared."""
    states: dict[str, Any] = {
        "torch": (torch.initial_seed(), bytes(torch.get_rng_state().tolist())),
        "random": random.getstate(),
    }
    if numpy := sys.modules.get("numpy"):
        state = numpy.random.get_state()
        states["numpy"] = (*state[:1], state[1].tobytes(), *state[2:])
    return states
