"""One call of the step, with what it did to the model: gradients, weights, inputs, and in which order."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
import random
import re
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

_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod|module)\.")
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
        self._undo.append(register_optimizer_step_pre_hook(self._before_optimizer).remove)
        try:
            yield
            self.capture()
        finally:
            for undo in reversed(self._undo):
                undo()

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._model is None or self._captured:
            return
        mine = {id(parameter) for parameter in self._model.parameters()}
        if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            return  # of another model
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "an optimizer steps within backward, when not all gradients are there; verify the step without it"
            )
        self.capture()

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
        is_first = self._inputs is None
        if is_first:
            self._inputs = {}
            for name, parameter in module.named_parameters():
                if not isinstance(parameter, DTensor):
                    self.observation.weights[_clean(name)] = digest(parameter)
        names = list(inspect.signature(module.forward).parameters)
        positional = [names[i] if i < len(names) else f"argument {i}" for i in range(len(args))]
        args = tuple(self._see(name, value, is_first) for name, value in zip(positional, args, strict=True))
        return args, {name: self._see(name, value, is_first) for name, value in kwargs.items()}

    def _see(self, name: str, value: Any, is_first: bool) -> Any:
        """The argument with its floating-point tensors as fp64 that take a gradient; itself, where it has none."""
        leaves, structure = tree_flatten_with_path(value)
        replaced = [self._see_tensor(name + keystr(path), leaf, is_first) for path, leaf in leaves]
        if all(new is old for new, (_, old) in zip(replaced, leaves, strict=True)):
            return value
        return tree_unflatten(replaced, structure)

    def _see_tensor(self, name: str, leaf: Any, is_first: bool) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
            return leaf
        if is_first:
            self.observation.inputs[name] = leaf.detach().clone()
        if not leaf.is_floating_point():
            return leaf
        leaf = leaf.double()
        if not torch.is_grad_enabled():
            return leaf
        leaf = leaf if leaf.requires_grad else leaf.detach().requires_grad_()
        leaf.retain_grad()
        if is_first and self._inputs is not None:
            self._inputs[name] = leaf
        return leaf.clone()  # which the model may change in place

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
            if isinstance(parameter, DTensor) or name not in found.weights:
                found.weights[name] = digest(parameter)
        if gradients is not None:
            found.gradients = {_clean(name): _whole(gradient) for name, gradient in gradients.items()}
        for name, tensor in (self._inputs or {}).items():
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
    return _WRAPPERS.sub("", name)


def _whole(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.double().cpu().clone()


def digest(tensor: Tensor) -> str:
    """Of shape and values; of a sharded tensor, the whole."""
    values = tensor.detach()
    values = values.full_tensor() if isinstance(values, DTensor) else values
    values = values.double().cpu().flatten().clone()  # numpy would pin a storage that FSDP2 frees
    found = hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{list(tensor.shape)} {found}"


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
    *,
    one_batch: bool = False,
    output_weight: float | None = None,
) -> Observation:
    """Builds the model, runs the step once and tells what it did. Collective on the ranks of `run`.

    The weights depend on `seed` alone; what the step draws itself depends on the data rank too, unless all of them
    share `one_batch`.
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
            draws = seed + 1 + (0 if one_batch else run.data_rank)
            torch.manual_seed(draws)
            random.seed(draws)
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
        if value is None:
            continue
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"the step returned {name} of shape {tuple(value.shape)}; return numbers (the loss)"
                )
            value = value.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
        if not isinstance(value, (Tensor, int, float)):
            raise ValueError(
                f"the step returned {name} as {type(value).__name__}; return the loss, or a dict of numbers"
            )
        found[name] = float(value)
    return found
