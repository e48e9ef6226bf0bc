"""A model that a run trains: its part of a step, from the gradients of a batch to the optimizer.

A run has one, or the two experts of a pair as Wan 2.2 is: the high-noise one learns late times, the low-noise one
early ones. They see the same clips, which are decoded and encoded once, and are otherwise trained as each would be
alone. Of a step of two batches:

    clips 1, 2 ──► encoded once ──┬──► high-noise: gradients of 1, of 2, clipped, optimizer, averages
                                  └──► low-noise:  gradients of 1, of 2, clipped, optimizer, averages

One after the other, so that only one of them has gradients at a time.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_accel.communications import gather_objects
from opensora_accel.fsdp import forget_rounding, set_last_microbatch
from opensora_accel.profiler import explain_out_of_memory
from opensora_accel.training.config import TrainConfig
from opensora_accel.training.encoding import Encoded, EncodedRows
from opensora_accel.training.objective import Objective
from opensora_accel.training.optim import (
    EMA,
    FreeAverage,
    build_optimizer,
    learning_rate,
    set_learning_rate,
)
from opensora_accel.training.saved_state import Saver, TrainState
from opensora_accel.watching import watch
from shardformer import blocks_of
from shardformer.clipping import clip_grad_norm_, total_grad_norm
from shardformer.paths import find
from shardformer.policy import find_policy

logger = logging.getLogger(__name__)

_MAX_SKIPPED_STEPS = 10
# Gradient norms that the next one is compared with, and how few of them say nothing yet.
_NUM_NORMS, _FEWEST_NORMS = 100, 20
_MAX_SHOWN_FILES = 8


class Expert:
    """One model in training.

    Args:
        name: tells two of them apart in what is shown; empty for the only one.
        config: its run, as if it were trained alone (`TrainConfig.experts`).
        objective: its loss.
        saver: whose copies its optimizer waits for.
    """

    def __init__(self, name: str, config: TrainConfig, objective: Objective, saver: Saver):
        self.name, self.config, self.objective, self._saver = name, config, objective, saver
        model = objective.model
        optimizer = build_optimizer(model, config.optim)
        ema: EMA | FreeAverage | None = None
        if config.optim.schedule == "free":
            ema = FreeAverage(model, optimizer)
        elif config.optim.ema_decay:
            ema = EMA(model, config.optim.ema_decay)
        self.state = TrainState(model, optimizer, ema)
        self.norms = deque[float](maxlen=_NUM_NORMS)
        self.skipped_in_a_row, self.num_trained = 0, 0
        self.watch: watch | None = None
        # The plan of the batch that ran last, for what is said when memory runs out.
        self._batch_plan = config.plan
        self._total = torch.zeros((), dtype=torch.float64, device=objective.device)

    def start_watching(self) -> None:
        """From the next step on, where the configuration says so. Its `watch` is a context to train in."""
        if self.config.watch:
            # Mistakes of a loop are for loops of other people: the tests hold this one against a single device.
            every, first = self.config.watch, self.state.step + 1
            self.watch = watch(
                self.state.model, self.config.plan, every=every, check_steps=0, first_step=first
            )

    def begin(self) -> float:
        """Begins a step; its learning rate, of Prodigy that of the schedule times what it has found so far."""
        rate = learning_rate(self.config.optim, self.state.step, self.config.steps)
        set_learning_rate(self.state.optimizer, rate)
        self._total.zero_()
        return rate * float(self.state.optimizer.param_groups[0].get("d", 1.0))

    def give_up(self) -> None:
        """Forgets the gradients of a step that was begun."""
        self.state.optimizer.zero_grad()

    def backward(self, batch: Encoded | EncodedRows, is_last: bool) -> None:
        """Adds the gradients of a batch, the last one of the step or not.

        What takes a clip or a row a call has a backward of each: of several at once, autograd would hold whole
        gradients of all sharded parameters until the last.
        """
        if isinstance(batch, EncodedRows):
            self._batch_plan = self.config.plan
            for number, row in enumerate(batch.rows):
                loss = partial(self.objective.loss_of_row, row)
                self._backward(
                    loss, batch.samples_per_rank, is_last=is_last and number == len(batch.rows) - 1
                )
            return
        self._batch_plan = self.objective.plans.get(batch.bucket, self.config.plan)
        parts = [*batch.one_by_one()] if self.objective.recipe.packs else [batch]
        for number, part in enumerate(parts):
            loss = partial(self.objective.loss, part)
            self._backward(loss, len(parts), is_last=is_last and number == len(parts) - 1)

    def _backward(self, part_loss: Callable[[], Tensor], num_parts: float, *, is_last: bool) -> None:
        # Whole gradients stay local until the last batch of a step; sharded ones are reduced to their shards each time.
        forward = self.objective.forward
        local: AbstractContextManager[Any] = nullcontext()
        if isinstance(forward, nn.parallel.DistributedDataParallel) and not is_last:
            local = forward.no_sync()
        set_last_microbatch(self.state.model, is_last)
        with local:
            loss = part_loss() / (num_parts * self.config.optim.accumulation)
            loss.backward()
        self._total += loss.detach()

    def update(self, files: Sequence[str]) -> dict[str, float]:
        """Ends a step with the optimizer, or skips it; its loss, the mean over all data ranks, and gradient norm.

        Args:
            files: those of this rank's clips.

        Communication: an all-reduce of the loss, and those of the norm.

        Raises:
            ValueError: this is the tenth step in a row that was skipped.
        """
        state = self.state
        total = self._total.clone()
        # Equal on all ranks of a sequence group, so the mean over the world is the mean over data ranks.
        dist.all_reduce(total)
        whole_norm = total_grad_norm(state.model)
        # Read at once, and before the optimizer is given its work: the host would wait for that too.
        loss, norm = torch.stack([total, whole_norm.to(total)]).tolist()
        if self.watch is not None:
            self.watch.loss(self._total.clone(), files)
            self.watch.check(norm)  # before clipping hides a spike
        clip_grad_norm_(state.model, self.config.optim.clip_norm, whole_norm)
        # The norm is equal on all ranks, so that all of them step, or none.
        reason = self._why_skip(norm)
        if reason is None:
            self.norms.append(norm)
            self._saver.wait_for_copy()
            state.optimizer.step()
            self.num_trained += 1
            if state.ema is not None:
                state.ema.update()
        state.optimizer.zero_grad()
        state.step += 1
        self.skipped_in_a_row = 0 if reason is None else self.skipped_in_a_row + 1
        metrics = {"loss": loss / dist.get_world_size(), "grad_norm": norm}
        if self.watch is not None:
            if self.watch.last_look == state.step:
                metrics |= {f"grad_norm/{name}": each for name, each in self.watch.block_norms.items()}
            self.watch.step()
        if reason is not None:
            forget_rounding(state.model)
            self._warn_of_skipped(reason, files)
        return metrics

    def _why_skip(self, norm: float) -> str | None:
        """Why the optimizer must not step with gradients of this norm; None where it may."""
        if not math.isfinite(norm):
            return f"its gradient norm is {norm}"
        factor = self.config.optim.skip_factor
        if factor and len(self.norms) >= _FEWEST_NORMS and norm > factor * statistics.median(self.norms):
            times = norm / statistics.median(self.norms)
            return f"its gradient norm is {norm:.3g}, {times:.1f} times the median of {len(self.norms)} steps"
        return None

    def _warn_of_skipped(self, reason: str, files: Sequence[str]) -> None:
        """Names the clips of a step that was skipped.

        Communication: an object all-gather.

        Raises:
            ValueError: on all ranks, where ten steps in a row were skipped.
        """
        by_rank = gather_objects((bool(self._total.isfinite()), list(files)))
        # The clips of ranks whose loss is not finite are to blame; where all are finite, any may be.
        blamed = [of_rank for is_finite, of_rank in by_rank if not is_finite] or [of for _, of in by_rank]
        names = list(dict.fromkeys(file for of_rank in blamed for file in of_rank))
        shown = ", ".join(names[:_MAX_SHOWN_FILES]) + (", …" if len(names) > _MAX_SHOWN_FILES else "")
        which = f" of the {self.name} expert" if self.name else ""
        message = f"step {self.state.step}{which} skipped: {reason}; its clips: {shown}"
        if dist.get_rank() == 0:
            logger.warning("%s", message)
        # One bad batch is no reason to end a run; a run of them will not recover by itself.
        if self.skipped_in_a_row >= _MAX_SKIPPED_STEPS:
            raise ValueError(
                f"{_MAX_SKIPPED_STEPS} steps in a row were skipped ({message}); lower --optim.lr, look at these clips, "
                "or resume from an earlier saved state"
            )

    def explained(self) -> AbstractContextManager[Any]:
        """Around a step of a watched run on a GPU: where memory runs out, the error says what filled it and what fits.

        On a CPU that would follow every operator, and the system ends a process without asking.
        """
        if self.watch is None or self.objective.device.type != "cuda":
            return nullcontext()
        model = self.state.model
        mlps = [mlp for path in find_policy(model).mlps for _, mlp in find(model, path)]
        return explain_out_of_memory(
            model, self.state.optimizer, lambda: self._batch_plan, blocks=blocks_of(model), mlps=mlps
        )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the model is as it is used: in evaluation mode, with averaged weights where there are any."""
        self.state.model.eval()
        try:
            with self.state.ema.applied() if self.state.ema is not None else nullcontext():
                yield
        finally:
            self.state.model.train()
