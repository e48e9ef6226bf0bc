"""What a training loop enters, so that what goes wrong in it is named: by mistake, rank, parameter, step and file.

    with watch(model, plan, every=100, ema=ema) as run:      # the sharded model, before or after DDP; FSDP2 first
        for batch in loader:
            loss = loss_of(model, batch)                     # the mean over this rank's samples, as ever
            run.loss(loss, samples=batch.files)              # where it is, before the backward
            loss.backward()
            run.check()                                      # where gradients are clipped, before it
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()                                 # a step ends here
            optimizer.zero_grad()

A mistake between ranks leaves no trace in the loss. What is looked at, and when:

    first two steps  all mistakes of `mistakes.REMEDIES`, by up to eleven forwards more in each (`first_steps`)
    every step       the norm of all gradients: NaN, an infinity, a spike, with the step's files
                     when it is not finite: the step runs again, and the first module and rank are named
    every N steps    weights, gradients and optimizer states, on the ranks that should hold the same
                     (`observe.equality`)
                     a microbatch of another rank is run again, or less often, so that it costs less than a hundredth
                     of the time (`replays`)
                     sample, noise and timestep, on the ranks that share a sample (`shardformer`'s own check)
                     the norm of each block's gradients; weights, samples and draws that stand still (`standstill`)

A mistake between ranks ends the run by a `LoopMistake` on all of them, because no step after it is worth its time.
Anything else is logged. After the first two steps it takes at most a hundredth of the run's time.
"""

from __future__ import annotations

import logging
import math
import statistics
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from opensora_accel.communications import compare_next_forwards, gather_objects
from opensora_accel.observe import (
    StepInputs,
    Whole,
    find_blocks,
    first_difference,
    holders_of,
    local_part,
    norms,
    sums_of,
    trace_nonfinite,
    unlike_file,
)
from opensora_accel.parallel_states import get_sequence_parallel_group
from opensora_accel.plan import Plan
from opensora_accel.watching.first_steps import FirstSteps, mistakes_of_saved_weights
from opensora_accel.watching.mistakes import LoopMistake
from opensora_accel.watching.replays import Replays
from opensora_accel.watching.rest import AtRest
from opensora_accel.watching.rhythm import Rhythm
from opensora_accel.watching.standstill import SameBatches, StillWeights
from opensora_accel.weights import find_stored
from opensora_accel.wrapping import StepArguments, when_gradients_are_there
from shardformer import blocks_of
from shardformer.policy import Policy, find_policy, has_policy
from shardformer.spread import uncompiled

logger = logging.getLogger(__name__)

# Steps that a spike is measured against, and how few of them say nothing yet.
_NUM_STEPS, _FEWEST_STEPS = 100, 20
_SHOWN_FILES = 8
OUTSIDE = "outside of the blocks"


class watch:
    """Watches a training run; all ranks enter it together.

    Args:
        model: as `shardformer.shard` made it, before or after DDP was put around it.
        plan: for a check that its ranks are those of the job.
        every: steps between two looks over the ranks; the first step is one.
        check_steps: so many first steps are looked at in depth; 0 for none.
        ema: the averaged copy, on the ranks that keep one, for the first steps.
        spike: times the median of the last hundred steps from which a loss or a norm is logged.
        replay_every: steps between two microbatches of another rank that are run again; 0 for never. By default a
            multiple of `every` that keeps them below a hundredth of the time, as it was measured.
        policy: as given to `shardformer.shard`; without any, the items of the model's outermost lists of modules count
            as blocks.

    Communication: see the methods, and `first_steps`.

    Raises:
        LoopMistake: on all ranks, where one of them does what `mistakes.REMEDIES` lists.
        ValueError: `every` is not positive, `check_steps` or `replay_every` negative, `spike` not above 1, the plan
            has other ranks than the job, or `model` is a wrapper.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        *,
        every: int = 100,
        check_steps: int = 2,
        ema: nn.Module | None = None,
        spike: float = 5.0,
        replay_every: int | None = None,
        policy: Policy | None = None,
        first_step: int = 1,
    ):
        if every < 1:
            raise ValueError(f"every must be at least 1 step between two looks; got {every}")
        if check_steps < 0:
            raise ValueError(f"check_steps must be 0 or a number of first steps; got {check_steps}")
        if replay_every is not None and replay_every < 0:
            raise ValueError(f"replay_every must be 0 or a number of steps; got {replay_every}")
        if not spike > 1:
            raise ValueError(f"spike must be above 1, times the median of the steps before; got {spike}")
        if hasattr(model, "module") and isinstance(model.module, nn.Module):
            raise ValueError(
                f"watch takes the model that shardformer.shard returned, not the {type(model).__name__} around it; "
                "pass model.module"
            )
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if plan is not None and plan.world_size != num_ranks:
            raise ValueError(f"the plan is for {plan.world_size} ranks, and the job has {num_ranks}")
        self._model, self._every, self._spike = model, every, spike
        self._number, self._first_step, self._last_equal = first_step, first_step, 0
        policy = policy or (find_policy(model) if has_policy(model) else None)
        blocks = find_blocks(model, None if policy is None else blocks_of(model, policy))
        # The block that each parameter is in, by its place among these names.
        self._names = [*blocks, OUTSIDE]
        block_of = {id(p): place for place, block in enumerate(blocks.values()) for p in block.parameters()}
        self._places = {name: block_of.get(id(p), len(blocks)) for name, p in model.named_parameters()}
        self._holders = holders_of(model)
        self._replays = Replays(model, blocks)
        self._rhythm = Rhythm(first_step, every, replay_every)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._still, self._same = StillWeights(model), SameBatches()
        self._has_stepped = False  # since the last look
        self._first_unfollowed = first_step + check_steps if check_steps else 0
        # Of shards that no other rank holds, before a step that is looked at.
        self._at_rest = AtRest(model, self._holders)
        self._inputs = StepInputs(model)
        self._first = FirstSteps(model, self._inputs, ema, check_steps) if check_steps else None
        # The losses that the loop has given in this step, and the samples that they are of.
        self._losses_given: list[float | Tensor] = []
        self._samples: list[str] = []
        self._norms, self._losses = deque[float](maxlen=_NUM_STEPS), deque[float](maxlen=_NUM_STEPS)
        self._is_checked = self._is_looking = False
        # Optimizers that have stepped in this step.
        self._stepped: set[int] = set()
        # The norm of each block's gradients when they were last looked at, and in which step.
        self.block_norms: dict[str, float] = {}
        self.last_look = 0

    def __enter__(self) -> watch:
        own = {id(parameter) for parameter in self._model.parameters()}

        def before(
            optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> StepArguments | None:
            # A step may have more than one optimizer; other models of the program have theirs.
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                return None

            self._optimizers.add(optimizer)

            def look() -> None:
                self._stepped.add(id(optimizer))
                self._has_stepped = True
                self.check()

            return when_gradients_are_there(args, kwargs, look)

        with ExitStack() as undo:
            undo.enter_context(self._inputs)
            # First, so that a mistake has its own name.
            if self._first is not None:
                undo.enter_context(self._first)
            undo.callback(register_optimizer_step_pre_hook(before).remove)
            # Before the hooks above, which keep this forward's inputs.
            begins = self._model.register_forward_pre_hook(uncompiled(self._before_forward), prepend=True)
            undo.callback(begins.remove)
            undo.callback(compare_next_forwards, False)
            self._undo = undo.pop_all()
        compare_next_forwards(self._is_due)
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: Any) -> None:
        if kind is None:
            self._look_at_losses()
        self._replays.forget()
        self._same.close()
        self._undo.__exit__(kind, *others)

    def _before_forward(self, model: nn.Module, _args: Any) -> None:
        """The forward of a new step ends the one before, where the loop has not said so.

        That is one with gradients, after an optimizer has stepped, or after the loop has looked and stepped none.
        """
        is_own = model is self._model and not self._is_looking and torch.is_grad_enabled()
        if is_own and (self._stepped or self._is_checked):
            self.step()
        if is_own and self._is_past_first_steps:
            if self._is_due or self._is_replay_due:
                self._at_rest.before_forward(self._optimizers)
                # The draws of the first steps are followed until the forward after them.
                if self._number > self._first_unfollowed:
                    self._same.begin()
            if self._is_replay_due:
                self._replays.before_forward()

    @property
    def _is_due(self) -> bool:
        return (self._number - self._first_step) % self._every == 0

    @property
    def _is_replay_due(self) -> bool:
        return self._replays.is_on and self._is_past_first_steps and self._rhythm.is_due(self._number)

    # ---- what a loop calls

    def loss(self, loss: float | Tensor, samples: Sequence[Any] = ()) -> None:
        """The loss that is reported, once before each backward: the mean over this rank's samples.

        Args:
            loss: a scalar that has the model's outputs in its graph, not yet divided for accumulation; the first steps
                compare gradients with it. A number is enough for spikes. When the step ends it is read, for which the
                host waits for a GPU.
            samples: what this rank's samples are known by (files, indices): the same on the ranks that share them,
                others elsewhere. They are named where a norm or a loss is not what it should be.
        """
        self._losses_given.append(loss.detach() if isinstance(loss, Tensor) else loss)
        self._samples += map(str, samples)
        if self._first is not None and isinstance(loss, Tensor):
            self._first.loss(loss, samples)

    def check(self, norm: float | None = None) -> None:
        """Looks at the gradients of this step, once. Where the loop does not call it, the optimizer's step does.

        Clipped gradients have no spikes, so a loop that clips calls it before.

        Args:
            norm: of all gradients, the same on every rank, where the loop knows it already: it saves a reduction and
                a wait for the device.

        Communication: where `norm` is not given, an all-reduce of a number for each block; every N-th step, two
        integers for each parameter.

        Raises:
            LoopMistake: on all ranks, where a weight or a gradient is not what the ranks that should hold the same
                have.
        """
        if self._is_checked:
            return
        self._is_checked = self._is_looking = True
        try:
            self._look(norm)
        finally:
            self._is_looking = False
            if self._is_past_first_steps:
                self._inputs.calls.clear()

    def step(self) -> None:
        """A step has ended. Where the loop does not say so, it ends with the first forward of the next one."""
        self._look_at_losses()
        self._same.step(self._number, self._samples)
        self._samples.clear()
        if self._is_past_first_steps:
            self._inputs.calls.clear()
        self._replays.forget()
        self._at_rest.forget()
        self._number += 1
        self._is_checked = False
        self._stepped.clear()
        compare_next_forwards(self._is_due)

    @contextmanager
    def sampling(self, may_keep_bytes: int = 64 << 20) -> Iterator[None]:
        """Around validation and sampling in mid-training, which all ranks enter; looked at between the first steps.

        Args:
            may_keep_bytes: what may be alive afterwards on the device that was not before.
        """
        if self._first is None:
            yield
            return
        with self._first.sampling(may_keep_bytes):
            yield

    def saves(self, state: Mapping[str, Any]) -> dict[str, int]:
        """What the loop is about to write, on the ranks that write: names and shapes have to be the model's own.

        Args:
            state: by name, tensors; of adapters (LoRA) alone, or of the whole model. Moments and averages may be among
                them, under names of their own.

        Returns:
            A number of each tensor's bits, by its name. Written beside the state, as JSON, they tell `loaded` what it
            was, in whatever form and cut it is written and read.

        Raises:
            LoopMistake: on this rank alone.
        """
        wrong = mistakes_of_saved_weights(self._model, state)
        if wrong:
            raise LoopMistake([("saved weights", wrong)], self._number)
        return sums_of({name: each for name, each in state.items() if isinstance(each, Tensor)})

    def loaded(
        self, state: Mapping[str, Tensor], saved: str | Path | Mapping[str, int | Tensor] | None
    ) -> None:
        """What the ranks hold after a load; it has to be what was saved, to the bit. All ranks call it.

        Args:
            state: by name, what this rank holds: whole tensors or DTensors; of the model `model.state_dict()`.
            saved: a folder or a file of safetensors, whole tensors as they were read, or the numbers that `saves` gave;
                None on ranks that do not know. Whatever it names has to be in `state`.

        Communication: two object all-gathers of a number for each tensor.

        Raises:
            LoopMistake: on all ranks, with the first tensor that is another, and the rank.
            ValueError, OSError: on all ranks, where what was saved cannot be read on one of them.
        """
        stored: Mapping[str, Any] | None = None
        error = ""
        if isinstance(saved, (str, Path)):
            try:
                stored = find_stored(Path(saved))
            except (OSError, ValueError) as failure:
                error = str(failure)
        elif saved is not None:
            stored = {name: Whole(each) if isinstance(each, Tensor) else each for name, each in saved.items()}
        errors = [each for each in gather_objects(error) if each]
        if errors:
            raise ValueError(f"what was loaded cannot be compared: {errors[0]}")
        unlike = unlike_file(state, stored)
        if unlike:
            raise LoopMistake([("loaded state", unlike)], self._number)

    # ---- what it looks at

    @property
    def _is_past_first_steps(self) -> bool:
        return self._first is None or self._first.is_over

    def _look(self, norm: float | None) -> None:
        before = self.block_norms
        if norm is None or self._is_due:
            self._look_at_blocks()
            norm = math.sqrt(sum(each**2 for each in self.block_norms.values())) if norm is None else norm
        if not math.isfinite(norm):
            where = trace_nonfinite(self._model, self._inputs.calls)
            self._warn(f"the gradient norm of step {self._number} is {norm}: {where}")
        elif len(self._norms) >= _FEWEST_STEPS and norm > self._spike * statistics.median(self._norms):
            if self.last_look != self._number:
                self._look_at_blocks()
            name = max(self.block_norms, key=self.block_norms.__getitem__)
            self._warn(
                f"the gradient norm of step {self._number} is {norm:.3g}, {norm / statistics.median(self._norms):.1f} "
                f"times the median of {len(self._norms)} steps; most of it in {name}: {self.block_norms[name]:.3g}, "
                f"{before.get(name, math.nan):.3g} when last looked at"
            )
        if math.isfinite(norm):
            self._norms.append(norm)
            # What is computed with other weights is other, and says nothing of the one who computes.
            if self._is_due or self._is_replay_due:
                self._look_over_ranks()
            if self._is_replay_due:
                self._replay()

    def _look_at_losses(self) -> None:
        """Looks at the mean of what the loop has given in this step."""
        if not self._losses_given:
            return
        loss = math.fsum(float(each) for each in self._losses_given) / len(self._losses_given)
        self._losses_given.clear()
        median = statistics.median(self._losses) if len(self._losses) >= _FEWEST_STEPS else math.inf
        group = get_sequence_parallel_group() if dist.is_initialized() else None
        # Ranks that share a sample have the same loss: one of them says so.
        if loss > self._spike * median > 0 and (group is None or group.rank() == 0):
            rank = dist.get_rank() if dist.is_initialized() else 0
            logger.warning(
                "the loss of step %d on rank %d is %.3g, %.1f times the median of %d steps%s",
                self._number,
                rank,
                loss,
                loss / median,
                len(self._losses),
                _shown(self._samples),
            )
        if math.isfinite(loss):
            self._losses.append(loss)

    def _warn(self, what: str) -> None:
        """Rank 0 warns, with the files of all ranks. Communication: an object all-gather."""
        files = [file for each in gather_objects(list(self._samples)) for file in each]
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning("%s%s", what, _shown(files))

    @torch.no_grad()
    def _look_over_ranks(self) -> None:
        # First, as what one rank alone holds differs from nothing.
        changed = self._at_rest.changed(self._optimizers)
        if changed:
            raise LoopMistake([("shard at rest", changed)], self._number)
        difference = first_difference(self._model, self._holders, self._optimizers)
        if difference is not None:
            name, what = str(difference.kind), difference.text
            if self._last_equal:
                name, what = f"drifted {name}", f"{what}; they were equal in step {self._last_equal}"
            raise LoopMistake([(name, what)], self._number)
        self._last_equal = self._number
        self._still.look(self._number, self._optimizers, self._has_stepped)
        self._has_stepped = False

    def _replay(self) -> None:
        with self._rhythm.measured(self._number):
            wrong = self._replays.look(self._inputs.calls, self._number, self._samples)
        if wrong:
            raise LoopMistake([("device", wrong)], self._number)

    @torch.no_grad()
    def _look_at_blocks(self) -> None:
        """The 2-norm of each block's gradients over all ranks. Communication: an all-reduce of a number a block."""
        # By the ranks that hold the other parts, in one order on all ranks, as parameters have one.
        gradients: dict[Any, list[tuple[int, Tensor]]] = {each.parts: [] for each in self._holders.values()}
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                local = local_part(grad)
                gradients[self._holders[name].parts].append((self._places[name], local))
        device = next(self._model.parameters()).device
        total = torch.zeros(len(self._names), device=device)
        for parts, local_gradients in gradients.items():
            squares = torch.zeros_like(total)
            if local_gradients:
                own = torch.stack(norms([grad for _, grad in local_gradients]))
                index = torch.tensor([place for place, _ in local_gradients], device=device)
                squares.index_add_(0, index, own.to(device, squares.dtype).square())
            # Also by ranks that have no gradient here, or the others would wait.
            for group in parts:
                dist.all_reduce(squares, group=group)
            total += squares
        self.block_norms = dict(zip(self._names, total.sqrt().tolist(), strict=True))
        self.last_look = self._number


def _shown(files: Sequence[str]) -> str:
    names = list(dict.fromkeys(files))
    if not names:
        return ""
    return f"; its files: {', '.join(names[:_SHOWN_FILES])}{', …' if len(names) > _SHOWN_FILES else ''}"
