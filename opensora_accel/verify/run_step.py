"""One call of the step, with what it did to the model: gradients, weights, inputs, and in which order."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from opensora_accel.communications import exact_collectives, without_comparing_inputs
from opensora_accel.flash_attn import flash_attn_stand_in
from opensora_accel.observe import (
    ClipKind,
    ModelFn,
    Run,
    Step,
    accelerator_stand_ins,
    before_clipping,
    call_to_its_end,
    casts_lifted,
    dropouts_of,
    launcher_environment,
    prepare_model,
    without_loss_scaling,
)
from opensora_accel.verify.draws import DrawProbe
from opensora_accel.verify.iterations import CannotReplay, Replay, after_each_backward, most_steps_of
from opensora_accel.verify.loads import is_training, watch_loads, without_workers
from opensora_accel.verify.observation import Observation, Probe, numbers_of
from opensora_accel.verify.parameters import (
    FlatParameters,
    digest,
    is_transformed,
    map_tensors,
    named_modules,
    named_parameters,
    plain,
    plain_name,
    whole,
)
from opensora_accel.verify.rounding import Rounding, as_in_training, narrow, round_weights, rounded
from opensora_accel.verify.side_effects import (
    Clip,
    Definitions,
    fsdp1_modules,
    generator_states,
    held_back_by_fsdp2,
    reached_parameters,
    seed_generators,
)
from opensora_accel.verify.ties import TieProbe
from opensora_accel.wrapping import StepArguments, when_gradients_are_there


class Observer:
    """Watches a model while the step runs. `output_weight` multiplies the gradient that enters its outputs."""

    def __init__(
        self,
        run: Run,
        output_weight: float | None = None,
        is_traced: bool = False,
        probes: Sequence[Probe] = (),
        rounding: Rounding | None = None,
        replay: Replay | None = None,
    ):
        # What is seen goes into that of the current iteration.
        self.observation = self._current = Observation()
        self._probes, self._rounding = probes, rounding
        self._run, self._output_weight, self._is_traced = run, output_weight, is_traced
        self._model: nn.Module | None = None
        self._was_training = False
        self._modules: dict[nn.Module, None] = {}
        self._original: dict[int, tuple[str, nn.Parameter]] = {}
        self._generators: dict[str, Any] = {}
        self._inputs: dict[str, Tensor] = {}
        self._before_clip: dict[int, Tensor] = {}
        self._num_calls, self._num_backwards, self._has_seen_weights = 0, 0, False
        self._most = 1  # iterations that are kept
        self._is_captured = False  # gradients of the current iteration were read
        self._replay = replay
        self._previous: Observation | None = None  # the iteration before, until its parameters are read
        self._stepping: list[int] = []  # optimizers within whose step this is
        self._stepped: set[int] = set()  # those that have stepped in the current iteration
        self._hooks = ExitStack()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it the step runs; at its end gradients are read, if no optimizer's step had them read before."""
        with self._hooks as hooks:
            hooks.callback(register_optimizer_step_pre_hook(self._before_optimizer).remove)
            hooks.callback(register_optimizer_step_post_hook(self._after_optimizer).remove)
            hooks.enter_context(before_clipping(self._before_clipping))
            loads = watch_loads(self.observation.loads, lambda: is_training(self._model, self._was_training))
            hooks.enter_context(loads)
            hooks.enter_context(without_workers(self.observation.notes))
            self._fsdp1_modules = hooks.enter_context(fsdp1_modules())
            reached: dict[int, nn.Parameter] = {}
            if self._run.is_reference:
                reached = hooks.enter_context(reached_parameters(self._note_loss))
                hooks.enter_context(after_each_backward(self._after_backward))
            yield
            if self._current is self.observation:
                self.capture()
            assert self._model is not None
            self._end_iteration()
            mine = {id(parameter) for parameter in self._model.parameters()}
            self.observation.outside = [str(tuple(p.shape)) for key, p in reached.items() if key not in mine]
            now, before = generator_states(), self._generators
            # A step that seeds torch's generator itself takes nothing for granted.
            seeds_torch = now["torch"][0] != before["torch"][0]
            changed = [name for name, state in before.items() if now[name] != state]
            self.observation.drawn_from = [n for n in changed if not (n == "torch" and seeds_torch)]

    def __deepcopy__(self, _memo: dict[int, Any]) -> Observer:
        # A step may copy its model (an EMA, a teacher), with the hooks that it has here. They know the copy by its
        # modules, and let it alone.
        return self

    def _note_loss(self, value: float) -> None:
        if self._current is self.observation and not self._is_captured:
            self.observation.loss = (self.observation.loss or 0.0) + value

    def watch(self, model: nn.Module) -> None:
        """Compares this model's gradients.

        Raises:
            ValueError: there is one already.
        """
        if self._model is not None:
            raise ValueError("run.watch(model) was called twice; a step is verified for one model")
        self._model, self._was_training = model, model.training
        self._generators = generator_states()
        self._original = {id(parameter): (name, parameter) for name, parameter in named_parameters(model)}
        if self._replay is not None:
            self._most = min(self._replay.most, most_steps_of(self._original))
            self._replay.put_weights(model, self._run.data_rank, 0)
        # Hooks on the model itself: what the step wraps it in calls it in the end.
        self._hooks.callback(model.register_forward_pre_hook(self._see_inputs, with_kwargs=True).remove)
        if self._output_weight is not None:
            self._hooks.callback(model.register_forward_hook(self._weigh_output).remove)
        self._modules = dict.fromkeys(model.modules())
        for probe in self._probes:
            self._hooks.callback(probe.watch(model))
        if self._is_traced:
            for name, module in named_modules(model):
                hook = module.register_forward_hook(partial(self._note_call, name), with_kwargs=True)
                self._hooks.callback(hook.remove)
        if self._run.is_reference:
            order = self.observation.backward_order
            for name, parameter in named_parameters(model):
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(lambda _, n=name: order.setdefault(n))
                    self._hooks.callback(hook.remove)

    def _note_call(self, name: str, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        # After the first optimizer step rounding has made other weights of them.
        if self._current is not self.observation:
            return
        # It is recomputed within backward, of a copy, or stands for several calls at once.
        if torch._C._current_graph_task_id() != -1 or module not in self._modules or is_transformed():
            return
        sides: tuple[list[Tensor], list[Tensor]] = ([], [])

        def note(tensors: list[Tensor], _name: str, tensor: Tensor) -> Tensor:
            # A single whole number is a count, or where a rank's tokens begin: ranks differ in it, and are right.
            is_count = tensor.dim() == 0 and not tensor.is_floating_point() and not tensor.is_complex()
            if not isinstance(tensor, DTensor) and not is_count:
                tensors.append(whole(tensor))
            return tensor

        for tensors, value in zip(sides, ((args, kwargs), output), strict=True):
            map_tensors("", value, partial(note, tensors))
        number = sum(called == name for called, _ in self.observation.calls)
        self.observation.calls[name, number] = tuple(map(tuple, sides))

    def _see_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if module is not self._model:
            return None
        if self._is_captured and not self._stepping:
            self._begin_iteration()
        self._num_calls += 1
        # torch.func puts tensors of its own in the place of parameters.
        if not self._has_seen_weights and not is_transformed():
            self._has_seen_weights = True
            for probe in self._probes:
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    probe.before_first_forward(module)
            # Before the step has trained anything, and after the loop has wrapped and broadcast.
            with torch._C.DisableTorchFunction():  # which is none of the step's own
                for name, parameter in named_parameters(module):
                    if not isinstance(parameter, DTensor):
                        self.observation.weights[name] = digest(parameter)
        names = list(inspect.signature(module.forward).parameters)
        names += [f"argument {i}" for i in range(len(names), len(args))]
        seen = [map_tensors(name, value, self._see_tensor) for name, value in zip(names, args, strict=False)]
        return tuple(seen), {
            name: map_tensors(name, value, self._see_tensor) for name, value in kwargs.items()
        }

    def _see_tensor(self, name: str, leaf: Tensor) -> Tensor:
        """The input in fp64, as a leaf that takes a gradient where it has numbers that can."""
        if isinstance(leaf, DTensor):  # the step has sharded it itself
            return leaf
        name = name if self._num_calls == 1 else f"{name} (call {self._num_calls})"
        is_seen = self._is_followed and not self._is_captured
        if is_seen:
            self._current.inputs[name] = plain(leaf)
        if not leaf.is_floating_point():
            return leaf
        leaf = leaf.double()
        if self._rounding is not None:
            leaf = leaf if leaf.requires_grad else rounded(leaf)
            leaf = narrow(leaf) if self._rounding.is_narrow else leaf
        # Within a transform of torch.func its gradient is taken there, and a leaf would cut it off.
        if not torch.is_grad_enabled() or is_transformed():
            return leaf
        # An input that is a result of the step's own graph stays in it.
        leaf = leaf if leaf.requires_grad else leaf.detach().requires_grad_()
        if is_seen:
            leaf.retain_grad()
            self._inputs[name] = leaf
        return leaf.clone()  # which the model may change in place

    def _weigh_output(self, module: nn.Module, _args: Any, output: Any) -> Any:
        if module is not self._model or is_transformed():
            return output

        def weigh(_name: str, tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            tensor = tensor.view_as(tensor)  # a hook on the tensor itself would weigh its other uses as well
            tensor.register_hook(lambda gradient: gradient * self._output_weight)
            return tensor

        return map_tensors("output", output, weigh)

    def _before_optimizer(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments | None:
        if self._model is None:
            return None
        # By identity: fully_shard leaves the optimizer tensors of the same names that are the model's no longer.
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = {id(parameter) for parameter in self._model.parameters()}
        for key, (name, _parameter) in self._original.items():
            if key in held and key not in mine and name not in self.observation.stale:
                self.observation.stale.append(name)
        if not held & mine or self._stepping:
            return None  # an optimizer of another model, or one within another
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "an optimizer steps within backward, when not all gradients are there; verify the step without it"
            )
        # Another optimizer of the same iteration, unless it steps again.
        if self._is_captured and id(optimizer) in self._stepped:
            self._begin_iteration()
        self.observation.num_steps += not self._stepped
        self._stepping.append(id(optimizer))
        self._stepped.add(id(optimizer))

        def look() -> None:
            assert self._model is not None
            if not self._is_captured and self._previous is not None:
                self._read_parameters(self._previous)
                self._previous = None
            self.capture()
            if self._is_followed and self._replay is not None:
                self._current.held.add(optimizer, self._model)

        return when_gradients_are_there(args, kwargs, look)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._stepping and self._stepping[-1] == id(optimizer):
            self._stepping.pop()
            if self._replay is not None and self._model is not None:
                self._replay.put_weights(self._model, self._run.data_rank, self.observation.num_steps)

    @property
    def _is_followed(self) -> bool:
        return self._current is self.observation.iterations[-1]

    def _begin_iteration(self) -> None:
        """What comes after an optimizer's step is seen apart."""
        first = self.observation
        if not self._stepped:  # gradients were handed over, and nothing steps
            return
        self._previous = self._current if self._is_followed else None
        self._current = Observation(
            weights=first.weights,
            values=first.values,
            backward_order=first.backward_order,
            tied=first.tied,
            untied_at=first.untied_at,
        )
        if first.num_steps < self._most:
            first.later.append(self._current)
        self._is_captured, self._num_calls, self._num_backwards = False, 0, 0
        self._inputs, self._before_clip, self._stepped = {}, {}, set()

    def _end_iteration(self) -> None:
        """The step has ended."""
        first = self.observation
        first.goes_on = self._current is not first
        # What runs after the last optimizer step is no iteration.
        if first.later and self._is_followed and not self._is_captured:
            first.later.pop()
        elif self._is_followed and self._stepped:
            self._previous = self._current
        if self._previous is not None:
            self._read_parameters(self._previous)

    def _after_backward(self) -> None:
        """On the single device gradients are exchanged for those of all turns."""
        if self._model is None or self._replay is None or not self._is_followed:
            return
        if self._is_captured and not self._stepping:
            self._begin_iteration()  # of a graph that was kept
        if self._is_captured:
            self.observation.no_replay = "an optimizer's closure runs several times in a step"
            return
        number, self._num_backwards = self._num_backwards, self._num_backwards + 1
        place = self._run.data_rank, len(self.observation.later), number
        try:
            own = self._replay.exchange(self._model, *place)
        except CannotReplay as reason:
            self.observation.no_replay = str(reason)
            return
        if own is not None:
            self._current.backwards.append(own)

    def _without_backward(self) -> None:
        """Gradients that no backward has made (torch.autograd.grad) are there before they are clipped or read."""
        if self._run.is_reference and self._num_backwards == 0:
            self._after_backward()

    def _before_clipping(self, how: ClipKind, limit: float, parameters: Sequence[Tensor]) -> None:
        if self._model is None or self._is_captured or not self._is_followed:
            return
        names = {id(parameter): name for name, parameter in named_parameters(self._model)}
        # Also those that this rank has no gradient of: of a flat parameter it may hold no piece.
        given = [parameter for parameter in parameters if id(parameter) in names]
        if not given:
            return
        self._without_backward()
        is_flat = any(isinstance(parameter, FlatParameter) for parameter in given)
        clipped = [name for name, _ in self._original.values()] if is_flat else [names[id(p)] for p in given]
        # Clipped again the same way, after another microbatch: what counts is the last time.
        clips = []
        for clip in self._current.clips:
            left = tuple(name for name in clip.names if clip.how != how or name not in clipped)
            clips.append(dataclasses.replace(clip, names=left))
        is_first = set(clipped).difference(*(clip.names for clip in clips))
        self._current.clips = [*(c for c in clips if c.names), Clip(how, limit, tuple(clipped))]
        for parameter in given:
            if parameter.grad is not None and (is_flat or names[id(parameter)] in is_first):
                self._before_clip[id(parameter)] = parameter.grad.detach().clone()

    def capture(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        """Reads gradients, once an iteration: before its first optimizer step, or when the step has ended.

        Args:
            gradients: those that the step handed over, whole, by the names of the parameters.

        Raises:
            ValueError: no model is watched.
        """
        if self._is_captured:
            return
        if self._model is None:
            raise ValueError("the step never called run.watch(model), and no model_fn was given")
        if self._is_followed and gradients is None:
            self._without_backward()
        self._is_captured = True
        if not self._is_followed:
            return
        if self._current is self.observation:
            self._read_weights(self._model)
        if gradients is None:
            self._read_gradients(self._model)
        else:
            names = [name for name, _ in named_parameters(self._model)]
            self._current.gradients = {
                plain_name(n, names): whole(gradient) for n, gradient in gradients.items()
            }
        for name, tensor in self._inputs.items():
            if tensor.grad is not None:
                self._current.input_gradients[name] = tensor.grad.detach().clone()

    def _read_weights(self, model: nn.Module) -> None:
        observation = self.observation
        shapes = {name: parameter.shape for name, parameter in self._original.values()}
        for name, parameter in named_parameters(model):
            if isinstance(parameter, DTensor) and any(isinstance(p, Shard) for p in parameter.placements):
                observation.shards[name] = digest(parameter.to_local())
            # A sharded one is read whole only now: all ranks must take part, which they do at the step's end.
            if isinstance(parameter, DTensor) or name not in observation.weights:
                observation.weights[name] = digest(parameter)
            if self._run.is_reference or parameter.shape != shapes.get(name, parameter.shape):
                observation.values[name] = whole(parameter)

    def _flat(self, model: nn.Module) -> FlatParameters:
        return FlatParameters(model, self._fsdp1_modules, [name for name, _ in self._original.values()])

    def _read_parameters(self, into: Observation) -> None:
        """Communication: an all-gather of what is sharded."""
        assert self._model is not None
        if self._replay is not None:
            flat = self._flat(self._model)
            rest = ((name, each) for name, each in named_parameters(self._model) if each not in flat)
            into.after = {name: whole(each) for name, each in rest} | flat.whole(lambda parameter: parameter)

    def _read_gradients(self, model: nn.Module) -> None:
        observation = self._current

        # What a gradient was before it was clipped.
        def before(parameter: nn.Parameter) -> Tensor | None:
            return self._before_clip.get(id(parameter), parameter.grad)

        flat = self._flat(model)
        for name, parameter in named_parameters(model):
            if not parameter.requires_grad or parameter in flat:
                continue
            gradient = before(parameter)
            observation.gradients[name] = None if gradient is None else whole(gradient)
            # A DTensor is read on all ranks, whichever of them clipped: all take part in making it whole.
            is_clipped = gradient is not parameter.grad
            if parameter.grad is not None and (isinstance(parameter, DTensor) or is_clipped):
                observation.clipped[name] = whole(parameter.grad)
        observation.trained = {name: each.requires_grad for name, each in named_parameters(model)}
        observation.held_back = held_back_by_fsdp2(model)
        weights = flat.whole(lambda parameter: parameter)
        if observation is self.observation:
            observation.weights |= {name: digest(weight) for name, weight in weights.items()}
        observation.gradients |= dict.fromkeys(weights) | flat.whole(before)
        observation.clipped |= flat.whole(lambda parameter: parameter.grad)


def observe(
    step: Step,
    model_fn: ModelFn | None,
    run: Run,
    seed: int = 0,
    *,
    one_batch: bool = False,
    output_weight: float | None = None,
    is_traced: bool = False,
    is_reseeded: bool = False,
    keeps_dropout: bool = False,
    probes: Sequence[Probe] = (),
    rounding: Rounding | None = None,
    replay: Replay | None = None,
) -> Observation:
    """Builds the model, runs the step once and returns what it did. Collective on the ranks of `run`.

    The weights depend on `seed` alone. What the step draws itself depends on the data rank too, unless all of them
    share `one_batch`, or it is `is_reseeded`: by the rank, and anew.

    Raises:
        ValueError: the step watches no model, or returns what is no number. What the step itself raises passes
            through.
    """
    drawn = DrawProbe()
    probes = [*probes, drawn] if is_traced else [*probes]
    observer = Observer(run, output_weight, is_traced, probes, rounding, replay)
    probes.append(TieProbe(observer.observation))
    observation, run = observer.observation, dataclasses.replace(run, watch=observer.watch)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with observer.watching(), flash_attn_stand_in(), without_comparing_inputs(), exact_collectives():
            model = None
            if model_fn is not None:
                # Weights are drawn alike everywhere; only then the generators are seeded by place.
                torch.manual_seed(seed)
                model = call_to_its_end("model_fn()", model_fn)
                if not isinstance(model, nn.Module):
                    raise ValueError(f"model_fn() returned {type(model).__name__}; return a torch.nn.Module")
                observation.has_dropout = any(module.p > 0 for module in dropouts_of(model))
                observation.notes += prepare_model(model, keeps_dropout=keeps_dropout)
                if rounding is not None:
                    round_weights(model, rounding.number)
            definitions = Definitions(model, step)
            if rounding is not None and rounding.is_narrow:
                run = _in_bf16(run)
                torch.set_default_dtype(torch.float32)
                if model is not None:
                    model._apply(narrow)
            own_seed = run.world_size + run.rank if is_reseeded else 0 if one_batch else run.data_rank
            seed_generators(seed + 1 + own_seed)
            if model is not None:
                observer.watch(model)
            with ExitStack() as around:
                around.enter_context(launcher_environment(run, ranks_per_node(run)))
                around.enter_context(accelerator_stand_ins())
                around.enter_context(without_loss_scaling())
                if rounding is not None and rounding.is_narrow:
                    around.enter_context(as_in_training(rounding))
                else:
                    around.enter_context(casts_lifted(observation.lifted))
                for probe in probes:
                    around.enter_context(probe.around())
                arguments = (run,) if model is None else (model, run)
                returned = call_to_its_end(f"step({'model, ' * (model is not None)}run)", step, *arguments)
            # While the step's own patches stand and the verifier's are undone.
            observation.leaves_patches = definitions.have_changed()
            if isinstance(returned, Mapping) and isinstance(returned.get("gradients"), Mapping):
                observer.capture(returned["gradients"])
                returned = {name: value for name, value in returned.items() if name != "gradients"}
        observation.scalars = numbers_of(returned)
        observation.draws = drawn.draws
    finally:
        torch.set_default_dtype(default_dtype)
    return observation


def ranks_per_node(run: Run) -> int:
    """What a step is told of its nodes: as the Plan says, as those that started this launched it, or two nodes.

    On one node a local rank is a rank, and who takes one for the other is right.
    """
    of_plan = None if run.shape.plan is None else run.shape.plan.ranks_per_node
    own = of_plan or int(os.environ.get("LOCAL_WORLD_SIZE", run.world_size))
    if not of_plan and own >= run.world_size >= 4:
        own = run.world_size // 2
    return own if run.world_size % own == 0 else run.world_size


def _in_bf16(run: Run) -> Run:
    """A plan that asks for fp64, as a proof's does, asks for bf16 instead."""
    plan = run.shape.plan
    if plan is None or plan.precision != "fp64":
        return run
    return dataclasses.replace(run, shape=dataclasses.replace(run.shape, plan=plan.replace(precision="bf16")))
