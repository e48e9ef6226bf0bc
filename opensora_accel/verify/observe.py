"""One call of the step, with what it did to the model: gradients, weights, inputs, and in which order."""

from __future__ import annotations

import dataclasses
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

from opensora_accel.communications.checks import without_comparing_inputs
from opensora_accel.verify.clipping import Clip, before_clipping
from opensora_accel.verify.containers import map_tensors
from opensora_accel.verify.flash_attn import flash_attn_stand_in
from opensora_accel.verify.fp64 import LiftOperations
from opensora_accel.verify.held_by_fsdp import Flat, Seen
from opensora_accel.verify.on_cpu import accelerator_stand_ins, launcher_environment, without_loss_scaling
from opensora_accel.verify.outside import Leaves
from opensora_accel.verify.parameters import digest, named, plain_name, whole
from opensora_accel.verify.patches import Patches
from opensora_accel.verify.prepare import prepare
from opensora_accel.verify.run import Run
from opensora_accel.verify.trace import Call, trace


@dataclass
class Observation:
    """Of one call on one rank. Tensors are whole, also where parameters are sharded."""

    scalars: dict[str, float] = field(default_factory=dict)
    """What the step returned: its loss, or all that it reports."""
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """As they are before anything clips them."""
    held_back: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Axes over which FSDP2 was told not to add a gradient up."""
    clips: list[Clip] = field(default_factory=list)
    clipped: dict[str, Tensor] = field(default_factory=dict)
    """Gradients after the clips."""
    weights: dict[str, str] = field(default_factory=dict)
    """Digests of the parameters."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """Parameters themselves: on the single device all, on a rank those of which it has made itself a slice."""
    shards: dict[str, str] = field(default_factory=dict)
    """Digests of this rank's shards, of parameters that are sharded."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that the model's forward was given, every call's up to the first optimizer step."""
    input_gradients: dict[str, Tensor] = field(default_factory=dict)
    backward_order: list[str] = field(default_factory=list)
    """Parameters as their gradients became ready, the nearest to the loss first. On the single device only."""
    outside: list[str] = field(default_factory=list)
    """Shapes of parameters that the loss reaches and the model does not have. On the single device only."""
    stale: list[str] = field(default_factory=list)
    """Parameters that an optimizer steps and the model no longer has."""
    draws: list[str] = field(default_factory=list)
    """Default generators that the step drew from, seeded for it."""
    calls: list[Call] = field(default_factory=list)
    """Of the model's modules, where they were traced."""
    leaves_patches: bool = False
    """Whether the process is no longer as it was before the step."""
    notes: list[str] = field(default_factory=list)


class Observer:
    """Watches a model while the step runs. `output_weight` multiplies the gradient that enters its outputs."""

    def __init__(self, run: Run, output_weight: float | None = None, traced: bool = False):
        self.observation = Observation()
        self._run, self._output_weight, self._traced = run, output_weight, traced
        self._model: nn.Module | None = None
        self._original: dict[int, tuple[str, nn.Parameter]] = {}
        self._generators: dict[str, Any] = {}
        self._inputs: dict[str, Tensor] = {}
        self._num_calls = 0
        self._calls_at_capture = 0
        self._before_clip: dict[int, Tensor] = {}
        self._captured = False
        self._fsdp = Seen()
        self._leaves = Leaves()
        self._undo: list[Callable[[], None]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._undo.append(register_optimizer_step_pre_hook(self._before_optimizer).remove)
        with ExitStack() as stack:
            stack.enter_context(before_clipping(self._before_clipping))
            stack.enter_context(self._fsdp.watching())
            if self._run.is_reference:
                stack.enter_context(self._leaves.watching())
            try:
                yield
                self.capture()
                self._end()
            finally:
                for undo in reversed(self._undo):
                    undo()

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._model is None:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = {id(parameter) for parameter in self._model.parameters()}
        for key, (name, _parameter) in self._original.items():
            if key in held and key not in mine and name not in self.observation.stale:
                self.observation.stale.append(name)
        if self._captured or not held & mine:
            return  # of another model
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "an optimizer steps within backward, when not all gradients are there; verify the step without it"
            )
        self.capture()

    def _before_clipping(
        self, how: Literal["norm", "value"], limit: float, parameters: Sequence[Tensor]
    ) -> None:
        if self._model is None or self._captured:
            return
        names = {id(parameter): name for name, parameter in named(self._model)}
        # Also those that this rank has no gradient of: of a flat parameter it may hold no piece.
        given = [parameter for parameter in parameters if id(parameter) in names]
        if not given:
            return
        is_flat = any(isinstance(parameter, FlatParameter) for parameter in given)
        theirs = [name for name, _ in self._original.values()] if is_flat else [names[id(p)] for p in given]
        # Clipped again the same way, after another microbatch: what counts is the last time.
        clips = [c.without(theirs) if c.how == how else c for c in self.observation.clips]
        is_first = {name for name in theirs if not any(name in clip.names for clip in clips)}
        self.observation.clips = [*(clip for clip in clips if clip.names), Clip(how, limit, tuple(theirs))]
        for parameter in given:
            if parameter.grad is not None and (is_flat or names[id(parameter)] in is_first):
                self._before_clip[id(parameter)] = parameter.grad.detach().clone()

    def watch(self, model: nn.Module) -> None:
        if self._model is not None:
            raise ValueError("run.watch(model) was called twice; a step is verified for one model")
        self._model = model
        self._generators = _generator_states()
        self._original = {id(parameter): (name, parameter) for name, parameter in named(model)}
        self._undo.append(model.register_forward_pre_hook(self._see_inputs, with_kwargs=True).remove)
        if self._output_weight is not None:
            self._undo.append(model.register_forward_hook(self._weigh_output).remove)
        if self._traced:
            self._undo += trace(model, self.observation.calls)
        if self._run.is_reference:
            for name, parameter in named(model):
                if parameter.requires_grad:
                    order = self.observation.backward_order
                    hook = parameter.register_post_accumulate_grad_hook(_Once(order, name))
                    self._undo.append(hook.remove)

    def _see_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._num_calls += 1
        if self._num_calls == 1:
            for name, parameter in named(module):
                if not isinstance(parameter, DTensor):
                    self.observation.weights[name] = digest(parameter)
        names = list(inspect.signature(module.forward).parameters)
        positional = [names[i] if i < len(names) else f"argument {i}" for i in range(len(args))]
        args = tuple(
            map_tensors(name, value, self._see_tensor) for name, value in zip(positional, args, strict=True)
        )
        return args, {name: map_tensors(name, value, self._see_tensor) for name, value in kwargs.items()}

    def _see_tensor(self, name: str, leaf: Tensor) -> Tensor:
        """In fp64, as a leaf that takes a gradient where it has numbers that can."""
        if isinstance(leaf, DTensor):
            return leaf
        name = name if self._num_calls == 1 else f"{name} (call {self._num_calls})"
        if not self._captured:
            self.observation.inputs[name] = leaf.detach().clone()
        if not leaf.is_floating_point():
            return leaf
        leaf = leaf.double()
        if not torch.is_grad_enabled():
            return leaf
        leaf = leaf if leaf.requires_grad else leaf.detach().requires_grad_()
        if not self._captured:
            leaf.retain_grad()
            self._inputs[name] = leaf
        return leaf.clone()  # which the model may change in place

    def _weigh_output(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        weight = self._output_weight

        def weigh(_name: str, tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            tensor = tensor.view_as(tensor)  # a hook of this use alone
            tensor.register_hook(lambda gradient: gradient * weight)
            return tensor

        return map_tensors("output", output, weigh)

    def capture(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        """Reads gradients and weights, once: before the first optimizer step, or when the step has ended."""
        if self._captured:
            return
        self._captured, self._calls_at_capture = True, self._num_calls
        if self._model is None:
            raise ValueError("the step never called run.watch(model), and no model_fn was given")
        found = self.observation
        shapes = {name: parameter.shape for name, parameter in self._original.values()}
        for name, parameter in named(self._model):
            if isinstance(parameter, DTensor) and any(isinstance(p, Shard) for p in parameter.placements):
                found.shards[name] = digest(parameter.to_local())
            if isinstance(parameter, DTensor) or name not in found.weights:
                found.weights[name] = digest(parameter)
            if self._run.is_reference or parameter.shape != shapes.get(name, parameter.shape):
                found.values[name] = whole(parameter)
        if gradients is None:
            self._read_gradients(self._model)
        else:
            names = [name for name, _ in named(self._model)]
            found.gradients = {plain_name(n, names): whole(gradient) for n, gradient in gradients.items()}
        for name, tensor in self._inputs.items():
            if tensor.grad is not None:
                found.input_gradients[name] = tensor.grad.detach().clone()

    def _read_gradients(self, model: nn.Module) -> None:
        found = self.observation

        def before(parameter: nn.Parameter) -> Tensor | None:
            return self._before_clip.get(id(parameter), parameter.grad)

        flat = Flat(model, self._fsdp.roots, [name for name, _ in self._original.values()])
        for name, parameter in named(model):
            if parameter.requires_grad and parameter not in flat:
                gradient = before(parameter)
                found.gradients[name] = None if gradient is None else whole(gradient)
                # On all ranks alike, whichever of them clipped: a DTensor's whole takes them all.
                if parameter.grad is not None and (
                    isinstance(parameter, DTensor) or gradient is not parameter.grad
                ):
                    found.clipped[name] = whole(parameter.grad)
        found.held_back = self._fsdp.held_back(model)
        weights = flat.whole(lambda parameter: parameter)
        found.weights |= {name: digest(weight) for name, weight in weights.items()}
        found.gradients |= dict.fromkeys(weights) | flat.whole(before)
        found.clipped |= flat.whole(lambda parameter: parameter.grad)

    def _end(self) -> None:
        """What shows when the step has ended."""
        assert self._model is not None
        found = self.observation
        found.outside = (
            [str(tuple(p.shape)) for p in self._leaves.outside(self._model)] if self._run.is_reference else []
        )
        now = _generator_states()
        # A step that seeds torch's generator itself takes nothing for granted.
        itself = {"torch"} if now["torch"][0] != self._generators["torch"][0] else set()
        found.draws = [n for n, state in self._generators.items() if now[n] != state and n not in itself]

    @property
    def goes_on(self) -> bool:
        """Whether the model ran again after the first optimizer step."""
        return self._num_calls > self._calls_at_capture


class _Once:
    """Notes a name the first time."""

    def __init__(self, order: list[str], name: str):
        self._order, self._name = order, name

    def __call__(self, _parameter: Tensor) -> None:
        if self._name not in self._order:
            self._order.append(self._name)


def seed_everything(seed: int) -> None:
    """The generators that code draws from by default."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _generator_states() -> dict[str, Any]:
    """Of the default generators, as something to compare."""
    states = {
        "torch": (torch.initial_seed(), torch.get_rng_state().numpy().tobytes()),
        "random": random.getstate(),
    }
    if numpy := sys.modules.get("numpy"):
        state = numpy.random.get_state()
        states["numpy"] = (*state[:1], state[1].tobytes(), *state[2:])
    return states


def observe(
    step: Callable[..., Any],
    model_fn: Callable[[], nn.Module] | None,
    run: Run,
    seed: int = 0,
    *,
    one_batch: bool = False,
    output_weight: float | None = None,
    traced: bool = False,
    reseeded: bool = False,
) -> Observation:
    """Builds the model, runs the step once and tells what it did. Collective on the ranks of `run`.

    The weights depend on `seed` alone; what the step draws itself depends on the data rank too, unless all of them
    share `one_batch`, or it is `reseeded`: each rank by itself.
    """
    observer = Observer(run, output_weight, traced)
    run = dataclasses.replace(run, watch=observer.watch)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with observer.watching(), flash_attn_stand_in(), without_comparing_inputs():
            arguments: tuple[Any, ...] = (run,)
            model = None
            if model_fn is not None:
                torch.manual_seed(seed)
                model = model_fn()
                observer.observation.notes += prepare(model)
                arguments = (model, run)
            patches = Patches(model, step)
            draws = 1 + (run.world_size + run.rank if reseeded else 0 if one_batch else run.data_rank)
            seed_everything(seed + draws)
            if model is not None:
                observer.watch(model)
            with launcher_environment(run), accelerator_stand_ins(), without_loss_scaling(), LiftOperations():
                returned = step(*arguments)
            observer.observation.leaves_patches = patches.left()
            gradients = None
            if isinstance(returned, Mapping) and isinstance(returned.get("gradients"), Mapping):
                returned = dict(returned)
                gradients = returned.pop("gradients")
            if gradients is not None:
                observer.capture(gradients)
        # After an optimizer's step one device, which took the turns of the data ranks, is no longer the same model.
        observer.observation.scalars = {} if observer.goes_on else _scalars(returned)
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
