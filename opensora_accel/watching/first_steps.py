"""The first steps of a loop, looked at in depth: each mistake under sequence parallelism is named within two of them.

None of these mistakes stops a run, and most leave the loss as it was. What is looked at, and when:

    at the start          the ranks hold the same weights
    before each forward   who has whose clip, text and timestep (`inputs`); train or eval mode
    at each backward      old gradients
    at the optimizer      gradients are equal where weights are, those of the loss (`gradients`), clipped alike
    after two steps       every weight that has a gradient moved (`weights`), and the EMA on every rank

What ranks send each other begins with the place where they are, so that a rank which skips a step is named, and nobody
waits for it. All ranks raise the same error. After these steps the hooks are gone, and a step costs what it did.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from opensora_accel.arguments import tensors_in
from opensora_accel.communications import gather_objects, without_comparing_inputs
from opensora_accel.fsdp import reshard
from opensora_accel.observe import (
    LiveBytes,
    StepInputs,
    before_clipping,
    digest,
    first_difference,
    holders_of,
    local_part,
)
from opensora_accel.parallel_states import get_data_parallel_group
from opensora_accel.watchdog import named
from opensora_accel.watching.accumulated import Composition, Parts, composition, sums_of_gradients
from opensora_accel.watching.gradients import (
    Losses,
    Scaled,
    mistakes_of_gradients,
    norms_of_gradients,
    scaled_since,
)
from opensora_accel.watching.inputs import Draws, Repeats, look_at_inputs, mistakes_of_inputs
from opensora_accel.watching.mistakes import LoopMistake
from opensora_accel.watching.weights import TrainedWeights, digests
from opensora_accel.wrapping import StepArguments, replaced, when_gradients_are_there
from shardformer.spread import uncompiled

logger = logging.getLogger(__name__)

# Where a rank may be when ranks compare.
_FORWARD, _OPTIMIZER, _SAMPLING, _END = "calls the model", "steps the optimizer", "samples", "ends the loop"
_PLURAL = {"calls": "call", "steps": "step", "samples": "sample", "ends": "end"}
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def _describe_place(place: str, ranks: list[int]) -> str:
    verb, _, rest = place.partition(" ")
    return f"{named(ranks, 'rank')} {verb if len(ranks) == 1 else _PLURAL[verb]} {rest}".rstrip()


class FirstSteps:
    """Checks the first steps of a training loop; all ranks enter it together.

    Args:
        model: as `shardformer.shard` made it, not the wrapper that DDP puts around it.
        inputs: of the model's forwards, kept by whoever enters this.
        ema: the averaged copy, on the ranks that keep one.
        num_steps: of the optimizer, that are checked.

    Communication: a gather of a few numbers before each forward; in each step that of two more looks over all weights,
    and of up to eleven forwards without gradients for each of the step's.

    Raises:
        LoopMistake: on all ranks, where one of them does what `mistakes.REMEDIES` lists.
    """

    def __init__(self, model: nn.Module, inputs: StepInputs, ema: nn.Module | None, num_steps: int):
        self._inputs = inputs
        self._model, self._ema, self._num_steps = model, ema, num_steps
        self._holders = holders_of(model)
        data = get_data_parallel_group() if dist.is_initialized() else None
        self._data_rank = 0 if data is None else data.rank()
        self._num_steps_done, self._is_finished = 0, False
        self._was_training: bool | None = None
        self._weights, self._repeats, self._parts = TrainedWeights(model), Repeats(), Parts(model)
        self._place, self._is_comparing = _FORWARD, False
        self._begin_step()

    def _begin_step(self) -> None:
        self._is_first_forward = True
        self._outputs: list[Tensor] = []
        self._losses = Losses()
        self._repeats.begin_step()
        self._parts.begin_step()
        self._old: list[tuple[str, str]] | None = None  # None before the first backward
        # After the last backward, and when gradients were clipped first after it.
        self._norms_after_backward: dict[str, Tensor] = {}
        self._norms_at_clip: dict[str, Tensor] | None = None
        self._sums_at_clip: Tensor | None = None
        self._is_clipped_by_value = False
        # For each clip a number of the gradients, by the ranks that should have the same ones, and their norm.
        self._clips: list[tuple[dict[tuple[int, ...], int], float]] = []

    # ---- what a loop calls

    def __enter__(self) -> FirstSteps:
        self._draws = Draws()
        with ExitStack() as undo:
            # Its own comparison names an argument, and ends the run before anything else can be said.
            undo.enter_context(without_comparing_inputs())
            for hook in (
                self._model.register_forward_pre_hook(
                    uncompiled(self._before_forward), prepend=True, with_kwargs=True
                ),
                self._model.register_forward_hook(uncompiled(self._after_forward)),
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
            ):
                undo.callback(hook.remove)
            undo.enter_context(before_clipping(self._before_clipping))
            undo.enter_context(self._before_ddp())
            undo.enter_context(self._draws)
            self._raise_if_any(self._unequal())
            self._weights.start()
            self._ema_before = None if self._ema is None else digests(self._ema)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._undo.close()

    def loss(self, loss: Tensor, samples: Sequence[Any] = ()) -> None:
        """The loss that is reported, once before each backward: the mean over this rank's samples.

        Args:
            loss: a scalar that has the model's outputs in its graph; not yet divided for accumulation.
            samples: what this rank's samples are known by (files, indices): the same on the ranks that share them,
                others elsewhere.
        """
        if self.is_over:
            return
        # The outputs' hooks take it for a backward.
        kept = [(call, dict(call.gradients)) for call in self._inputs.calls]
        self._is_comparing = True
        try:
            self._losses.add(loss, self._outputs, samples)
        finally:
            self._is_comparing = False
            for call, gradients in kept:
                call.gradients = gradients

    @contextmanager
    def sampling(self, may_keep_bytes: int = 64 << 20) -> Iterator[None]:
        """Around validation and sampling in mid-training, which all ranks enter.

        Args:
            may_keep_bytes: what may be alive afterwards on the device that was not before.
        """
        if self.is_over:
            yield
            return
        self._place = _SAMPLING
        was_training, random = self._model.training, self._random_states()
        live = LiveBytes()
        device = next(self._model.parameters()).device
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self._draws.is_paused = True
        try:
            with live:
                yield
        finally:
            self._draws.is_paused = False
        kept = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else live.now_bytes
        mistakes = []
        if kept > may_keep_bytes:
            mistakes.append(("sampling", f"{kept / 2**20:.1f} MiB are alive that were not before"))
        if was_training and not self._model.training:
            mistakes.append(("eval mode", "the model is in eval mode after sampling, and was in train mode"))
        after = self._random_states()
        if len(set(random)) == 1 and len(set(after)) > 1:
            mistakes.append(
                (
                    "sampling",
                    "ranks that share a sample draw other random numbers after it, and drew the same before",
                )
            )
        self._raise_if_any(mistakes)

    # ---- when it looks

    @property
    def _step(self) -> int:
        return min(self._num_steps_done + 1, self._num_steps)

    @property
    def is_over(self) -> bool:
        """Whether so many steps were made: nothing more is looked at."""
        return self._num_steps_done >= self._num_steps

    @contextmanager
    def _before_ddp(self) -> Iterator[None]:
        """Ranks meet before DDP's own forward, which waits for all of them: one that skipped a step is found first."""
        forward = DistributedDataParallel.forward

        def met(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            is_ours = wrapper.module is self._model and torch.is_grad_enabled()
            if not is_ours or self.is_over or torch.compiler.is_compiling():
                return forward(wrapper, *args, **kwargs)
            self._place = _FORWARD
            self._gather(None)
            output = forward(wrapper, *args, **kwargs)
            # What lies between the model's output and DDP's counts its backwards, of which `loss` would make one more.
            self._outputs = [each for each in tensors_in(output) if each.requires_grad]
            return output

        with replaced(DistributedDataParallel, "forward", met):
            yield

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A copy that the loop makes of the model has its hooks.
        if model is not self._model:
            return
        draws, self._draws.seen = self._draws.seen, []
        self._draws.is_paused = True
        # Validation draws what it likes.
        if not torch.is_grad_enabled():
            return
        self._place = _FORWARD
        if self.is_over:
            self._finish()
            return
        mine = look_at_inputs(model, args, kwargs, self._data_rank, draws), model.training
        everyone = self._gather(mine)
        inputs = [each for each, _ in everyone]
        mistakes = list(mistakes_of_inputs(inputs))
        # Ranks whose inputs are wrong have no other mistake to name.
        mistakes += [] if mistakes else self._repeats.of_timesteps(inputs)
        self._repeats.note_noise(inputs, self._parts.num_backwards)
        in_eval = [rank for rank, (_, training) in enumerate(everyone) if not training]
        if in_eval and (self._was_training or len(in_eval) < len(everyone)):
            mistakes.append(("eval mode", f"the model is in eval mode on {named(in_eval, 'rank')}"))
        self._was_training = model.training
        self._is_first_forward = False
        self._raise_if_any(mistakes)

    def _after_forward(self, model: nn.Module, _args: Any, output: Any) -> None:
        if model is not self._model:
            return
        self._draws.is_paused = False
        known = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if known and not self.is_over:
            self._outputs = known
            # Whichever comes first: by the second one, weights may have a gradient of this backward.
            for output_tensor in known:
                output_tensor.register_hook(self._at_backward)
        elif known:
            # No hook of a module may be removed while its hooks are called.
            known[0].register_hook(lambda _gradient: self._undo.close())

    def _at_backward(self, _gradient: Tensor) -> None:
        if self._is_comparing:
            return
        if self._old is None:
            self._old = self._old_gradient()
        else:
            self._parts.begin_backward()
        # Wrappers reduce gradients in callbacks of their own, at the end of a backward. One that is queued by a
        # callback comes after all of them.
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def note() -> None:
            self._norms_after_backward = norms_of_gradients(self._model)
            self._norms_at_clip = self._sums_at_clip = None
            self._parts.end_backward(self._losses.num_given, len(self._inputs.calls))

        queue(lambda: queue(note))

    @torch.no_grad()
    def _before_clipping(self, how: str, _limit: float, parameters: Sequence[Tensor]) -> None:
        own = {id(parameter) for parameter in self._model.parameters()}
        if self.is_over or not any(id(parameter) in own for parameter in parameters):
            return
        norms = norms_of_gradients(self._model)
        self._is_clipped_by_value |= how == "value"
        if self._norms_at_clip is None:
            self._norms_at_clip, self._sums_at_clip = norms, sums_of_gradients(self._model)
        by_ranks: dict[tuple[int, ...], int] = {}
        for name, parameter in self._model.named_parameters():
            for group in self._holders[name].same.values() if parameter.grad is not None else ():
                ranks = tuple(dist.get_process_group_ranks(group))
                number = int(digest(local_part(parameter.grad)))  # type: ignore[arg-type]
                by_ranks[ranks] = hash((by_ranks.get(ranks, 0), number))
        total = float(torch.stack(list(norms.values())).norm()) if norms else 0.0
        self._clips.append((by_ranks, total))

    def _before_optimizer(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments | None:
        if self.is_over:
            return None
        return when_gradients_are_there(args, kwargs, lambda: self._look_at_gradients(optimizer))

    def _look_at_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self._weights.note(optimizer)
        # A step may have more than one optimizer; the first one ends it.
        if not self._weights.held_by(optimizer) or self._is_first_forward:
            return
        self._place = _OPTIMIZER
        self._draws.is_paused = True
        try:
            # Each of them supposes that there is none of the kind before, on any rank.
            self._raise_if_any(self._old or [])
            used = sums_of_gradients(self._model) if self._sums_at_clip is None else self._sums_at_clip
            made, is_known = self._made_of(used)
            scaled = scaled_since(
                self._norms_after_backward,
                self._norms_at_clip,
                norms_of_gradients(self._model),
                self._losses.scale(),
            )
            # Of one part whose own gradients are used norms are known to more digits than sums.
            if scaled is not None and made is not None and (made.is_average or len(made.factors) > 1):
                scaled = replace(scaled, by_hand=self._parts.by_hand(made, used))
            by_hand = 1.0 if scaled is None else scaled.by_hand
            everyone = self._gather((self._data_rank, self._losses.given))
            found = self._losses.mistakes(everyone, by_hand if is_known else None)
            self._raise_if_any(list(found) if self._losses.given else [])
            self._raise_if_any(self._repeats.of_noise())
            self._raise_if_any(self._unequal())
            self._raise_if_any(self._mistakes_of_clips())
            self._raise_if_any(self._of_size(self._gather(scaled), made) if is_known else [])
        finally:
            self._draws.is_paused = False

    def _made_of(self, used: Tensor) -> tuple[Composition | None, bool]:
        """Of which of the step's backwards the gradients are made; what was thrown away is forgotten.

        Returns:
            the composition, if it is known, and whether the size of a gradient may be judged without it.
        """
        parts = self._parts.all
        everyone = self._gather(([part.sums.tolist() for part in parts], used.tolist()))
        made = composition(everyone)
        if made is None and max(len(sums) for sums, _ in everyone) > 1:
            logger.warning(
                "watch: in step %d gradients were taken out of parameter.grad between backwards, and what the "
                "optimizer uses is not a sum of them times numbers: so their size is not checked",
                self._step,
            )
            return None, False
        for losses, backwards in self._parts.thrown_away(made) if made is not None else ():
            self._losses.forget(losses)
            self._repeats.forget_noise(backwards)
        return made, True

    def _mistakes_of_clips(self) -> Iterator[tuple[str, str]]:
        """Ranks that clip before they average, each by the norm of its own gradients."""
        for clips in zip(*self._gather(self._clips), strict=False):
            for ranks in {ranks for by_ranks, _ in clips for ranks in by_ranks}:
                if len({clips[rank][0].get(ranks) for rank in ranks}) > 1:
                    norms = ", ".join(f"{clips[rank][1]:.4g}" for rank in ranks)
                    yield (
                        "clipping",
                        f"{named([*ranks])} clip other gradients, of the norms {norms}: not averaged yet",
                    )
                    return

    def _of_size(self, scaled: Sequence[Scaled | None], made: Composition | None) -> list[tuple[str, str]]:
        """Mistakes of gradients that are equal on all ranks that hold the same weights."""
        calls = self._inputs.calls if made is None else self._parts.weighed(made, self._inputs.calls)
        watched = [call for call in calls if call.gradients]
        if not all(self._gather(bool(watched))) or all(each is None for each in scaled):
            logger.warning(
                "watch: in step %d no gradients are in parameter.grad, and so they are not checked",
                self._step,
            )
            return []
        keeps_direction = not any(self._gather(self._is_clipped_by_value))
        return list(mistakes_of_gradients(self._model, self._holders, watched, scaled, keeps_direction))

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._weights.held_by(optimizer) and not self.is_over and not self._is_first_forward:
            self._num_steps_done += 1
            self._inputs.calls.clear()
            self._begin_step()

    def _finish(self) -> None:
        """What only several steps show. Called once, when the steps are over or the loop is."""
        if self._is_finished:
            return
        self._is_finished, self._place = True, _END
        reshard(self._model)  # sampling may have left gathered parameters, which no optimizer has
        num_steps = self._num_steps_done
        self._raise_if_any([*self._weights.mistakes(num_steps), *self._mistakes_of_ema()])
        if dist.is_initialized() and dist.get_rank() > 0:
            return
        if num_steps == 0:
            logger.warning(
                "watch: nothing was compared: the loop ended before an optimizer of the model's parameters stepped"
            )
        else:
            logger.info("watch: %d steps train as one device would", num_steps)

    # ---- what it looks at

    def _unequal(self) -> list[tuple[str, str]]:
        difference = first_difference(self._model, self._holders)
        return [] if difference is None else [(difference.kind, difference.text)]

    def _old_gradient(self) -> list[tuple[str, str]]:
        old = {
            name: id(parameter)
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None and local_part(parameter.grad).any()
        }
        if not old:
            return []
        has_optimizer = self._weights.with_optimizer
        left = [name for name in old if has_optimizer and old[name] not in has_optimizer]
        if len(left) == len(old):
            return [("optimizer", f"{left[0]} has a gradient and no optimizer; {len(left)} weights in all")]
        return [("stale gradients", f"{next(iter(old))} has a gradient of the step before")]

    def _mistakes_of_ema(self) -> Iterator[tuple[str, str]]:
        moved = self._ema is not None and digests(self._ema) != self._ema_before
        everyone = self._gather((self._ema is not None, moved, self._weights.has_moved()))
        has_one = [rank for rank, (there, _, _) in enumerate(everyone) if there]
        still = [rank for rank, (there, is_moved, _) in enumerate(everyone) if there and not is_moved]
        if not has_one or not any(has_trained for _, _, has_trained in everyone):
            return
        if still:
            yield "ema", f"the weights moved, and the EMA did not on {named(still, 'rank')}"
        elif len(has_one) == len(everyone) and self._ema is not None:
            difference = first_difference(self._ema, holders_of(self._ema))
            if difference is not None:
                yield "ema", difference.text

    # ---- the ranks

    def _random_states(self) -> list[int]:
        """A number of the random state of each rank that shares this one's sample."""
        states = [torch.get_rng_state()]
        device = next(self._model.parameters()).device
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        mine = (self._data_rank, tuple(int(digest(state)) for state in states))
        return [state for data_rank, state in self._gather(mine) if data_rank == self._data_rank]

    def _gather(self, mine: Any) -> list[Any]:
        everyone = gather_objects((self._place, mine))
        places: dict[str, list[int]] = {}
        for rank, (place, _) in enumerate(everyone):
            places.setdefault(place, []).append(rank)
        if len(places) > 1:
            # All of them know where the others are, and wait for nothing.
            places_text = ", and ".join(_describe_place(place, ranks) for place, ranks in places.items())
            raise LoopMistake([("skipped step", places_text)], self._step)
        return [theirs for _, theirs in everyone]

    def _raise_if_any(self, mine: Iterable[tuple[str, str]]) -> None:
        """Raises on all ranks where one has found something, with what the first of them found under each name."""
        mistakes: dict[str, str] = {}
        for rank in self._gather(list(mine)):
            for name, what in rank:
                mistakes.setdefault(name, what)
        if mistakes:
            raise LoopMistake(list(mistakes.items()), self._step)


def mistakes_of_saved_weights(model: nn.Module, state: Mapping[str, Any]) -> str:
    """What is wrong with the names and shapes of weights that are about to be written; "" where they are right."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    wrong = []
    for name, tensor in state.items():
        wrapper = next((each for each in _WRAPPERS if f".{each}" in f".{name}"), None)
        if wrapper is not None:
            wrong.append(f"{name} has the name of a wrapper, {wrapper[:-1]}")
        elif isinstance(tensor, DTensor):
            wrong.append(f"{name} is a DTensor, of which this rank has a shard")
        elif isinstance(tensor, Tensor) and shapes.get(name, tuple(tensor.shape)) != tuple(tensor.shape):
            wrong.append(f"{name} has the shape {tuple(tensor.shape)}, and the model's is {shapes[name]}")
    if not wrong:
        return ""
    return wrong[0] + (f"; {len(wrong) - 1} more like it" if len(wrong) > 1 else "")
