"""When the memory ran out: what was alive, by kind and by block, and the smallest change of the Plan that would fit.

    with explain_out_of_memory(model, optimizer, plan):
        trainer.step()

Around a step it notes what each block takes. On a GPU that is a look at the allocator wherever the step comes to
another block (`memory.AllocatorCounter`), on a CPU every operator (`memory.StorageCounter`). When the step raises
torch.OutOfMemoryError it prints one screen, and the exception goes on as it was.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opensora_accel.observe import (
    FORWARD,
    RECOMPUTE,
    BlockMemory,
    Change,
    Place,
    StepMemory,
    changes,
    plain_tensors,
    smallest_change,
)
from opensora_accel.offload import default_limit_bytes
from opensora_accel.plan import Plan
from opensora_accel.profiler.memory import Holdings, MemoryPeak, MemoryTimeline, by_kind, table_of, unit_of

# Kinds that are there whether a step runs or not, and what a block's forward makes.
_ACTIVATIONS = ("block inputs", "recomputation", "communication", "other")
_ROWS = 8
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class explain_out_of_memory:
    """Around a step: when it raises torch.OutOfMemoryError, prints what was alive and what would have fitted.

    The exception is the same object with the same traceback. From Python 3.11 on the change is added to it as a note.

    Args:
        plan: that the model runs under, or what gives it at the end, where batches have their own.
        blocks: the blocks that the plan checkpoints (`shardformer.blocks_of(model)`), by default the items of the
            model's outermost lists of modules.
        mlps: their MLPs, which `mlp_chunks` cuts; without them that change is not considered.
        limit_bytes: what tensors may take of the device; by default all that this process could have of the GPU.
        host_limit_bytes: what this rank may move to the host's memory; by default what the arena of offload would take,
            beside what this step holds there.
        file: where the screen is printed, by default stderr.

    Raises:
        ValueError: a block or MLP is no part of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        plan: Plan | Callable[[], Plan] | None = None,
        *,
        blocks: Sequence[nn.Module] | None = None,
        mlps: Sequence[nn.Module] = (),
        limit_bytes: int | None = None,
        host_limit_bytes: int | None = None,
        file: TextIO | None = None,
    ):
        self._plan = plan or Plan()
        self.timeline = MemoryTimeline(model, optimizer, blocks=blocks, moved=self._moved)
        self._optimizer, self._file = optimizer, file
        self._limit_bytes, self._host_limit_bytes = limit_bytes, host_limit_bytes
        self._blocks = self.timeline.places.blocks
        inside = {id(module) for block in self._blocks.values() for module in block.modules()}
        for mlp in mlps:
            if id(mlp) not in inside:
                raise ValueError(f"a {type(mlp).__name__} of `mlps` is in none of the blocks; give theirs")
        self._mlps = mlps
        # Activations when a block began and ended, by block; of MLPs by identity.
        self._begin: dict[str, int] = {}
        self._kept: dict[str, int] = {}
        self._recomputed: dict[str, int] = {}
        self._inputs: dict[str, int] = {}
        self._mlp_kept: dict[str, int] = {}
        self._has_gradients_before = False
        # Storages that were inputs of a block in this forward, which a checkpoint keeps once.
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._hooks: list[Any] = []

    @property
    def plan(self) -> Plan:
        return self._plan if isinstance(self._plan, Plan) else self._plan()

    def __enter__(self) -> MemoryTimeline:
        for name, block in self._blocks.items():
            self._hooks.append(block.register_forward_pre_hook(self._note_inputs(name), with_kwargs=True))
            for mlp in self._mlps:
                if any(mlp is module for module in block.modules()):
                    begins, ends = self._note_mlp(name)
                    self._hooks.append(mlp.register_forward_pre_hook(begins))
                    self._hooks.append(mlp.register_forward_hook(ends, always_call=True))
        return self.timeline.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        is_memory = isinstance(error, torch.OutOfMemoryError)
        holdings = self.timeline.counter.holdings() if is_memory else {}
        self.timeline.__exit__(kind, error, traceback)
        for hook in self._hooks:
            hook.remove()
        if error is not None and is_memory:
            lines = self.explain(str(error), holdings)
            print("\n".join(lines), file=self._file or sys.stderr, flush=True)
            if hasattr(error, "add_note"):
                error.add_note(lines[-1])

    # ---- what each block takes

    def _moved(self, before: Place, now: Place, holdings: Holdings) -> None:
        if self.timeline.places.failed is not None:
            return
        activations = _activations(holdings)
        if now.phase == FORWARD and now.block:
            if now.block == next(iter(self._blocks)):
                self._has_gradients_before = by_kind(holdings)["gradients"] > 0
            self._begin[now.block] = activations
        elif before.phase == FORWARD and before.block in self._begin:
            self._kept[before.block] = activations - self._begin[before.block]
        elif before.phase == RECOMPUTE and before.block:
            self._recomputed[before.block] = by_kind(holdings)["recomputation"]

    def _note_inputs(self, name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.timeline.places.is_recomputation:
                return
            self._inputs[name] = 0
            for tensor in tree_leaves((args, kwargs)):
                for plain in plain_tensors(tensor) if isinstance(tensor, Tensor) else ():
                    storage = plain.untyped_storage()
                    if storage not in self._seen:
                        self._seen.add(storage)
                        self._inputs[name] += storage.nbytes()

        return hook

    def _note_mlp(self, name: str) -> tuple[Any, Any]:
        """Hooks that measure what an MLP keeps besides its output."""
        begin = 0

        def before(_mlp: nn.Module, _args: Any) -> None:
            nonlocal begin
            begin = _activations(self.timeline.counter.holdings())

        def after(_mlp: nn.Module, _args: Any, output: Any) -> None:
            # There is no output where a recomputation stops in the midst of it, with all that it keeps.
            outputs = sum(t.nbytes for t in tree_leaves(output) if isinstance(t, Tensor))
            kept = _activations(self.timeline.counter.holdings()) - begin - outputs
            # Without a graph, as in the forward of a checkpointed block, it keeps nothing.
            if torch.is_grad_enabled() and not isinstance(sys.exc_info()[1], torch.OutOfMemoryError):
                self._mlp_kept[name] = max(self._mlp_kept.get(name, 0), kept)

        return before, after

    # ---- the report

    def memory(self, message: str, holdings: Holdings) -> StepMemory:
        """What the step was seen to need until it failed, with the message of the error."""
        plan, places, kinds = self.plan, self.timeline.places, by_kind(holdings)
        model, names = self.timeline.owners.model, list(self._blocks)
        sizes = {name: 0 for name in ("", *names)}
        for owned in self.timeline.owners.by_address().values():
            # A shard stands for all of them: sizes are those of whole parameters.
            if owned.owner.kind == "parameters":
                sizes[owned.owner.block if owned.owner.block in sizes else ""] += (
                    owned.size_bytes * plan.num_shards
                )
        whole = max(1, sum(sizes.values()))
        is_checkpointed = plan.checkpoint != "none"
        kept_by_class: dict[type, list[int]] = {}
        inputs_by_class: dict[type, list[int]] = {}
        for name, block in self._blocks.items():
            kept = self._recomputed.get(name) if is_checkpointed else self._kept.get(name)
            if kept is not None:
                kept_by_class.setdefault(type(block), []).append(kept)
            # The first one's are those of all blocks too.
            if self._inputs.get(name):
                inputs_by_class.setdefault(type(block), []).append(self._inputs[name])
        blocks = []
        failed = places.failed or Place()
        so_far = _activations(holdings) - self._begin.get(failed.block, 0) if failed.block else 0
        for name, block in self._blocks.items():
            inputs = self._inputs.get(name) or _typical(inputs_by_class, type(block))
            known = self._recomputed.get(name) if is_checkpointed else self._kept.get(name)
            kept = known if known is not None else _typical(kept_by_class, type(block))
            # What the block that failed has kept so far may be more already.
            if known is None and name == failed.block:
                kept = max(kept, so_far)
            mlp = self._mlp_kept.get(name) or max(self._mlp_kept.values(), default=0)
            blocks.append(BlockMemory(sizes[name], inputs, max(kept, inputs), min(mlp, kept)))
        asked = _asked_bytes(message)
        trainable = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        all_parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        gradient_ratio = trainable / max(1, all_parameters)
        # Bytes of state for each byte of weights.
        state = kinds["optimizer state"] * plan.num_shards / whole
        largest = max([asked, *self.timeline.counter.largest.values()])
        memory = StepMemory(
            plan,
            tuple(blocks),
            sizes[""],
            gradient_ratio,
            max(state, _state_ratio(self._optimizer) * gradient_ratio),
            has_gradients_before=self._has_gradients_before,
            # In an MLP's backward the gradient of its hidden layer comes beside what was kept.
            work=largest,
        )
        before = min(self._begin.values(), default=0) - (blocks[0].inputs if blocks else 0)
        # DDP's buckets are there too when the blocks begin, and are no activations.
        memory = replace(memory, outside=max(0, round(before - memory.buckets_of(plan))))
        return memory.explained(_device_bytes(holdings) + asked, failed.region == "optimizer")

    def explain(self, message: str, holdings: Holdings) -> list[str]:
        """At most 40 lines of at most 100 columns; the last one names the change."""
        places, in_use = self.timeline.places, _device_bytes(holdings)
        memory = self.memory(message, holdings)
        limit = self._limit_bytes if self._limit_bytes is not None else self._limit_of_device(in_use)
        host_limit = self._host_limit_bytes
        if host_limit is None:
            host_limit = default_limit_bytes() + memory.host_bytes(memory.plan)
        unit, num_bytes = unit_of(limit)

        def shown(size_bytes: float) -> str:
            return f"{size_bytes / num_bytes:,.1f}"

        place = places.failed or Place()
        held: dict[str, dict[str, int]] = {}
        for owner, size_bytes in holdings.items():
            if size_bytes:
                held.setdefault(owner.block, {})[owner.kind] = size_bytes
        now = MemoryPeak(self.timeline.counter.sample(holdings, 0.0), held, place, places.step)
        asked = _asked_bytes(message)
        needed = memory.needs(memory.plan)
        lines = [
            f"Out of memory in {place}, step {places.step + 1} of those that were watched.",
            f"In use: {shown(in_use)} of {shown(limit)} {unit}; asked for: {shown(asked)} {unit}. By block and kind:",
            "",
            *table_of(now, _ROWS),
            "",
            f"{'What one step needs at its peak, estimated':54}{unit:>12}",
            f"  {'the plan as it is':52}{shown(needed):>12}",
        ]
        rows = changes(memory)
        fits, best = smallest_change(memory, limit, host_limit)
        for change in [*rows, *([fits] if fits is not None and fits not in rows else [])]:
            verdict = "  fits" if change.needs_bytes <= limit else ""
            if change.host_bytes > host_limit:
                verdict = "  not on the host"
            text = str(change)
            text = text if len(text) <= 52 else text[:51] + "…"
            lines.append(f"  {text:52}{shown(change.needs_bytes):>12}{verdict}")
        return [*lines, "", self._verdict(fits, best, shown, unit)]

    def _verdict(self, fits: Change | None, best: Change | None, shown: Any, unit: str) -> str:
        ranks = ""
        chosen = fits or best
        if chosen is not None:
            world = self.plan.replace(**chosen.fields).world_size
            if world != self.plan.world_size:
                ranks = f" on {world} ranks"
        if fits is not None:
            return f"Set {fits}{ranks}: the smallest change that would fit, with {shown(fits.needs_bytes)} {unit}."
        if best is None:
            return "No change of the plan would fit; use a smaller batch, fewer frames or a smaller model."
        return f"No change would fit. The most is saved by {best}{ranks}: {shown(best.needs_bytes)} {unit}."

    def _limit_of_device(self, in_use_bytes: int) -> int:
        parameter = next(self.timeline.owners.model.parameters(), None)
        if parameter is None or parameter.device.type != "cuda":
            return in_use_bytes
        free, _total = torch.cuda.mem_get_info(parameter.device)
        stats = torch.cuda.memory_stats(parameter.device)
        # What the allocator holds and what nobody does; the rest is other processes' and libraries'.
        return int(free + stats["reserved_bytes.all.current"])


def _activations(holdings: Holdings) -> int:
    kinds = by_kind(holdings)
    return sum(kinds[kind] for kind in _ACTIVATIONS)


def _device_bytes(holdings: Holdings) -> int:
    return sum(size for kind, size in by_kind(holdings).items() if not kind.endswith("host"))


def _typical(sizes: dict[type, list[int]], kind: type) -> int:
    """The mean of the blocks of this class, or else of all; the first one is left out, whose inputs all share."""
    known = sizes.get(kind) or [size for each in sizes.values() for size in each]
    known = known[1:] or known
    return sum(known) // len(known) if known else 0


def _state_ratio(optimizer: torch.optim.Optimizer | None) -> float:
    """Bytes of state that an optimizer will have for each byte of weights, before it has any."""
    if optimizer is None:
        return 0.0
    defaults = optimizer.defaults
    if optimizer.param_groups[0].get("is_matrix"):
        return 1.0  # Muon has one average of matrices, which are nearly all
    if "d_numerator" in defaults:
        return 4.0  # Prodigy has two moments, a sum of gradients and the first weights
    if "betas" in defaults:
        return 3.0 if defaults.get("amsgrad") else 2.0
    return 1.0 if defaults.get("momentum") else 0.0


def _asked_bytes(message: str) -> int:
    """What was asked for when nothing was left, from the message of torch."""
    match = re.search(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)", message)
    return int(float(match[1]) * _UNITS[match[2]]) if match else 0
