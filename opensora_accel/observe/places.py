"""Where a training step is: in which block, and whether it computes forward, recomputes or goes backward.

A checkpointed block of a model, and what is known of each moment:

    model(x)             block blocks.0, forward      hooks around the block's call
    loss.backward()      block blocks.0, backward     a hook on the gradient of what the block returned
                         block blocks.0, recompute    torch's checkpoint calls the block's function again
                         block blocks.0, backward
    optimizer.step()     optimizer                    the optimizer's own hooks

No hook changes a value or keeps a tensor, and the graph has the same nodes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opensora_accel.observe.kinds import BACKWARD, FORWARD, RECOMPUTE
from opensora_accel.wrapping import replaced


@dataclass(frozen=True)
class Place:
    """One region of a step (`records.REGIONS`), the block's name, and the phase."""

    region: str = "other"
    block: str = ""
    phase: str = ""

    def __str__(self) -> str:
        if self.block:
            return f"{self.phase} of {self.block}"
        if self.region == "optimizer":
            return "the optimizer's step"
        return f"{self.phase} outside of the blocks" if self.phase else "outside of the model"


OUTSIDE, OPTIMIZER = Place(), Place("optimizer")


def find_blocks(model: nn.Module, blocks: Sequence[nn.Module] | None = None) -> dict[str, nn.Module]:
    """The model's blocks by name: those given, or the items of its outermost lists of modules.

    Raises:
        ValueError: one of `blocks` is no part of the model.
    """
    if blocks is not None:
        names = {id(module): name for name, module in model.named_modules()}
        for block in blocks:
            if id(block) not in names:
                raise ValueError(
                    f"a {type(block).__name__} of `blocks` is no part of the model; give its own"
                )
        return {names[id(block)]: block for block in blocks}
    named: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        # Lists within a block, as its MLP's layers often are, belong to the block.
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{block}.") for block in named):
            named |= {f"{name}.{index}" if name else str(index): item for index, item in enumerate(module)}
    return named


class Places:
    """Within it, follows the step that this process runs.

    Args:
        blocks: by name.
        moved: called with the place before and the one from now on, whenever that changes.
        saved: called with a block's name and the tensors that autograd saves as the inputs of a call that is
            checkpointed, by torch's non-reentrant checkpoint, ours or the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        moved: Callable[[Place, Place], None] = lambda before, now: None,
        saved: Callable[[str, Sequence[Tensor]], None] = lambda block, tensors: None,
    ):
        self.model, self.blocks, self.optimizer = model, blocks, optimizer
        self._moved, self._saved = moved, saved
        # Optimizer steps that are done.
        self.step = 0
        # Where torch.OutOfMemoryError was raised: by the time that anyone catches it, the step has left that place.
        self.failed: Place | None = None
        self._stack: list[Place] = []
        self._backward = Place("other", "", BACKWARD)
        self._stops = contextlib.ExitStack()
        self._is_open = False

    @property
    def now(self) -> Place:
        if self._stack:
            return self._stack[-1]
        return self._backward if torch._C._current_graph_task_id() != -1 else OUTSIDE

    @property
    def is_recomputation(self) -> bool:
        return any(place.phase == RECOMPUTE for place in self._stack)

    def __enter__(self) -> Places:
        self._is_open = True
        with contextlib.ExitStack() as stops:
            stops.callback(setattr, self, "_is_open", False)
            for name, module in {"": self.model, **self.blocks}.items():
                # Before FSDP2's own hooks, and after them: a block's gathered parameters arrive within the block.
                before = module.register_forward_pre_hook(
                    partial(self._begin_forward, name), prepend=True, with_kwargs=True
                )
                after = module.register_forward_hook(partial(self._end_forward, name), always_call=True)
                stops.callback(before.remove)
                stops.callback(after.remove)
            if self.optimizer is not None:
                step_begins = self.optimizer.register_step_pre_hook(self._begin_optimizer)
                step_ends = self.optimizer.register_step_post_hook(self._end_optimizer)
                stops.callback(step_begins.remove)
                stops.callback(step_ends.remove)
            generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator
            # torch looks it up for each checkpoint. It is given the function that backward then recomputes.
            stops.enter_context(
                replaced(
                    torch.utils.checkpoint,
                    "_checkpoint_without_reentrant_generator",
                    lambda function, *args, **kwargs: self._checkpoint(generator, function, *args, **kwargs),
                )
            )
            self._stops = stops.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stops.close()
        if isinstance(exception[1], torch.OutOfMemoryError) and self.failed is None:
            # The optimizer's hooks are not called, and an exception ends a backward without a word.
            self.failed = self._stack[-1] if self._stack else self._backward
        self._stack.clear()

    def _leave(self) -> None:
        if self.failed is None and isinstance(sys.exc_info()[1], torch.OutOfMemoryError):
            self.failed = self.now
        # Empty where the step was left while this ran.
        if self._stack:
            self._move(self._stack.pop)

    def _move(self, change: Callable[[], object]) -> None:
        before = self.now
        change()
        if self.now != before:
            self._moved(before, self.now)

    @contextlib.contextmanager
    def _within(self, place: Place) -> Iterator[None]:
        self._move(partial(self._stack.append, place))
        try:
            yield
        finally:
            self._leave()

    def _begin_forward(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        # A model's own checkpoint calls the block again.
        phase = RECOMPUTE if self.is_recomputation else FORWARD
        if not name and phase == FORWARD:
            self._backward = Place("other", "", BACKWARD)
        self._move(partial(self._stack.append, Place("block" if name else "other", name, phase)))
        if name and phase == FORWARD and torch.is_grad_enabled():
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    # The last block's input may be all that its backward ends with.
                    self._when_gradient_is_there(tensor, partial(self._end_backward, name))

    def _end_forward(self, name: str, _module: nn.Module, _args: Any, outputs: Any) -> None:
        place = self.now
        self._leave()
        if name and place.phase == FORWARD and torch.is_grad_enabled():
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    self._when_gradient_is_there(tensor, partial(self._begin_backward, name))

    def _when_gradient_is_there(self, tensor: Tensor, then: Callable[[], None]) -> None:
        """Calls `then` when the gradient of a tensor has been added up."""

        def hook(_gradient: Tensor) -> None:
            if self._is_open:
                then()

        handle = tensor.register_hook(hook)
        if tensor.is_leaf:
            # It outlives the step.
            self._stops.callback(handle.remove)

    def _begin_backward(self, name: str) -> None:
        self._move(lambda: setattr(self, "_backward", Place("block", name, BACKWARD)))

    def _end_backward(self, name: str) -> None:
        if self._backward.block == name:
            self._move(lambda: setattr(self, "_backward", Place("other", "", BACKWARD)))

    def _begin_optimizer(self, *_: Any) -> None:
        self._backward = Place("other", "", BACKWARD)
        self._move(partial(self._stack.append, OPTIMIZER))

    def _end_optimizer(self, *_: Any) -> None:
        self.step += 1
        self._leave()

    def _checkpoint(self, generator: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """torch's generator around one checkpointed call, with `function` called when it is recomputed."""
        block = self.now.block
        if not block:
            # A model's own checkpoint is around the block's call, and is given the block or a method of it.
            module = getattr(function, "__self__", function)
            block = next((name for name, each in self.blocks.items() if each is module), "")
        if self._is_open and not self.is_recomputation:
            # After five options of torch's come the arguments of the call.
            self._saved(block, [arg for arg in args if isinstance(arg, Tensor)])

        def recomputed(*call_args: Any, **call_kwargs: Any) -> Any:
            if not self._is_open:
                return function(*call_args, **call_kwargs)
            with self._within(Place("block" if block else "other", block, RECOMPUTE)):
                return function(*call_args, **call_kwargs)

        return generator(recomputed, *args, **kwargs)
