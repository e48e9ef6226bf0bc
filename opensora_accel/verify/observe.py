"""One call of the step, with what it did to the model: gradients, weights, inputs, and in which order."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from opensora_accel.verify.fp64 import LiftOperations
from opensora_accel.verify.on_cpu import accelerator_stand_ins, launcher_environment
from opensora_accel.verify.run import Run

_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")
"""What torch's wrappers put into parameter names."""


@dataclass
class Observation:
    """Of one call on one rank. Tensors are whole, also where parameters are sharded."""

    scalars: dict[str, float] = field(default_factory=dict)
    """What the step returned: its loss, or all that it reports."""
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    """Digests of the parameters."""
    shards: dict[str, str] = field(default_factory=dict)
    """Digests of this rank's shards, of parameters that are sharded."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that the model's first forward was given."""
    input_gradients: dict[str, Tensor] = field(default_factory=dict)
    backward_order: list[str] = field(default_factory=list)
    """Parameters as their gradients became ready, the nearest to the loss first. On the single device only."""
    notes: list[str] = field(default_factory=list)


class Observer:
    """Watches a model while the step runs. `output_weight` multiplies the gradient that enters its outputs."""

    def __init__(self, run: Run, output_weight: float | None = None):
        self.observation = Observation()
        self._run, self._output_weight = run, output_weight
        self._model: nn.Module | None = None
        self._inputs: dict[str, Tensor] | None = None
        self._captured = False
        self._undo: list[Callable[[], None]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        hook = register_optimizer_step_pre_hook(lambda *_: self.capture())
        self._undo.append(hook.remove)
        try:
            yield
            self.capture()
        finally:
            for undo in reversed(self._undo):
                undo()

    def watch(self, model: nn.Module) -> None:
        if self._model is not None:
            raise ValueError("run.watch(model) was called twice; a step is verified for one model")
        self._model = model
        self._undo.append(model.register_forward_pre_hook(self._see_inputs, with_kwargs=True).remove)
        if self._output_weight is not None:
            self._undo.append(model.register_forward_hook(self._weigh_output).remove)
        if self._run.is_reference:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    order, clean = self.observation.backward_order, _clean(name)
                    hook = parameter.register_post_accumulate_grad_hook(_Once(order, clean))
                    self._undo.append(hook.remove)

    def _see_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        first = self._inputs is None
        seen: dict[str, Tensor] = {} if self._inputs is None else self._inputs
        self._inputs = seen
        leaves, structure = tree_flatten_with_path((args, kwargs))
        names = list(inspect.signature(module.forward).parameters)
        replaced = []
        for path, leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not isinstance(leaf, DTensor):
                leaf = leaf.double()
                if torch.is_grad_enabled():
                    leaf = leaf if leaf.requires_grad else leaf.detach().requires_grad_()
                    leaf.retain_grad()
            if first and isinstance(leaf, Tensor):
                seen[_input_name(path, names)] = leaf
            replaced.append(leaf)
        return tree_unflatten(replaced, structure)

    def _weigh_output(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        weight = self._output_weight
        leaves, structure = tree_flatten_with_path(output)
        weighed = []
        for _, leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf = leaf.view_as(leaf)  # a hook of this use alone
                leaf.register_hook(lambda gradient: gradient * weight)
            weighed.append(leaf)
        return tree_unflatten(weighed, structure)

    def capture(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        """Reads gradients and weights, once: before the first optimizer step, or when the step has ended."""
        if self._captured:
            return
        self._captured = True
        if self._model is None:
            raise ValueError("the step never called run.watch(model), and no model_fn was given")
        found = self.observation
        for name, parameter in self._model.named_parameters():
            name = _clean(name)
            if gradients is None and parameter.requires_grad:
                found.gradients[name] = _whole(parameter.grad)
            if isinstance(parameter, DTensor) and any(isinstance(p, Shard) for p in parameter.placements):
                found.shards[name] = digest(parameter.to_local())
            whole = _whole(parameter)
            assert whole is not None
            found.weights[name] = digest(whole)
        if gradients is not None:
            found.gradients = {_clean(name): _whole(gradient) for name, gradient in gradients.items()}
        for name, tensor in (self._inputs or {}).items():
            found.inputs[name] = tensor.detach().clone()
            if tensor.grad is not None:
                found.input_gradients[name] = tensor.grad.detach().clone()


class _Once:
    """Notes a name the first time."""

    def __init__(self, order: list[str], name: str):
        self._order, self._name = order, name

    def __call__(self, _parameter: Tensor) -> None:
        if self._name not in self._order:
            self._order.append(self._name)


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _input_name(path: Any, names: list[str]) -> str:
    """`hidden_states`, or `frames[0]` for a tensor within a list."""
    where, first, *rest = path
    is_positional = where.idx == 0
    if is_positional:
        name = names[first.idx] if first.idx < len(names) else f"argument {first.idx}"
    else:
        name = str(first.key)
    return name + keystr(tuple(rest))


def _whole(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.double().cpu().clone()


def digest(tensor: Tensor) -> str:
    values = tensor.detach().double().cpu().contiguous()
    return hashlib.sha256(values.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def prepare(model: nn.Module) -> list[str]:
    """Makes the model fit for a proof in fp64: no cast down, no dropout, no parameter that hides others.

    Returns what was changed, in words.
    """
    notes = []
    model.double()
    dropouts = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
    for dropout in dropouts:
        dropout.p = 0.0
    if dropouts:
        notes.append(f"{len(dropouts)} dropouts were set to 0: a split sequence cannot draw the same masks")
    constant = [(n, p) for n, p in model.named_parameters() if not p.is_meta and _is_constant(p)]
    for name, parameter in constant:
        _excite(name, parameter)
    if constant:
        notes.append(
            f"{len(constant)} parameters with one value throughout (gates and biases of 0, norms of 1) were given "
            "random ones: behind a gate of 0 every gradient is 0, right or wrong"
        )
    return notes


def _is_constant(parameter: Tensor) -> bool:
    return parameter.numel() > 0 and bool((parameter == parameter.flatten()[0]).all())


@torch.no_grad()
def _excite(name: str, parameter: Tensor) -> None:
    """Random values that depend on the name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    fan_in = math.prod(parameter.shape[1:]) if parameter.dim() > 1 else 25
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    parameter.add_(noise * 0.5 / math.sqrt(fan_in))


def observe(
    step: Callable[..., Any],
    model_fn: Callable[[], nn.Module] | None,
    run: Run,
    seed: int = 0,
    output_weight: float | None = None,
) -> Observation:
    """Builds the model, runs the step once and tells what it did. Collective on the ranks of `run`.

    The weights depend on `seed` alone; what the step draws itself depends on the data rank too.
    """
    observer = Observer(run, output_weight)
    run = dataclasses.replace(run, watch=observer.watch)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with observer.watching():
            arguments: tuple[Any, ...] = (run,)
            if model_fn is not None:
                torch.manual_seed(seed)
                model = model_fn()
                observer.observation.notes += prepare(model)
                observer.watch(model)
                arguments = (model, run)
            torch.manual_seed(seed + 1 + run.data_rank)
            with launcher_environment(run), accelerator_stand_ins(), LiftOperations():
                returned = step(*arguments)
            gradients = None
            if isinstance(returned, Mapping) and isinstance(returned.get("gradients"), Mapping):
                returned = dict(returned)
                gradients = returned.pop("gradients")
            if gradients is not None:
                observer.capture(gradients)
        observer.observation.scalars = _scalars(returned)
    finally:
        torch.set_default_dtype(default_dtype)
    return observer.observation


def _scalars(returned: Any) -> dict[str, float]:
    if returned is None:
        return {}
    values = returned if isinstance(returned, Mapping) else {"loss": returned}
    found = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"the step returned {name} of shape {tuple(value.shape)}; return numbers (the loss)"
                )
            value = value.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = float(value)
    return found
