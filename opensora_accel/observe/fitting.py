"""What a step of another Plan would need, from what was counted of this one.

The profiler fills a `StepMemory` from the live bytes of a step that ran out of memory, the planner from traced steps.

A step's peak lies in the backward of some block, or in the optimizer. Of four blocks, in the backward of the third, a
checkpointed model holds

    parameters, optimizer state | inputs of blocks 0, 1, 2 | all that block 2 computes | gradients of block 3

and without a checkpoint, in the place of the inputs, all that blocks 0, 1 and 2 have computed. So the peak is the
largest of such sums. Checkpointing swaps what a block keeps for its input. Offload takes the inputs away but for two
slots. Sharding divides parameters, gradients and state by the ranks that share them, and adds what is gathered; the
shards may lie on the host. Whole gradients are averaged by DDP, which keeps buckets of their size. More sequence ranks
divide whatever has tokens. bf16 halves activations and gathered weights, not parameters.

These are estimates: blocks that did not run are taken for the mean of those that did, and the memory of kernels is
unknown. From fp32 to bf16 they are a lower bound: what a model computes in fp32 anyway, as its norms, is not halved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from opensora_accel.checkpoint import KEEP_LAST
from opensora_accel.offload import num_blocks_to_move
from opensora_accel.plan import Plan

# How many pieces of an MLP, and times as many sequence ranks, are tried.
_CHUNKS, _TIMES = (2, 4, 8), (2, 4, 8)


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of one block on this rank."""

    # Bytes of its weights, whole (of all shards); where they compute in bf16, twice what they take there.
    parameters: int
    # What a checkpoint keeps of it.
    inputs: int
    # What autograd keeps of it without one, its output included.
    kept: int
    # What its MLP keeps of that.
    mlp: int = 0


@dataclass(frozen=True)
class StepMemory:
    """What a step of `plan` was seen to need, in bytes of one rank. Weights and state are whole, of all shards."""

    plan: Plan
    blocks: tuple[BlockMemory, ...]
    # Weights outside of the blocks, counted as `BlockMemory.parameters`; gradients and optimizer state for each byte of
    # weights.
    parameters_outside: int
    gradient_ratio: float
    state_ratio: float
    # Gradients that were there before the forward, as when they are accumulated.
    has_gradients_before: bool = False
    # What the model's other parts have made when the blocks begin, and what a backward takes beside what was kept.
    outside: int = 0
    work: int = 0
    # What the optimizer's step takes for itself.
    optimizer_work: int = 0
    # What is kept for each byte of weights: frozen ones lie in the bf16 that they are computed in.
    kept_ratio: float = 1.0

    @property
    def parameters(self) -> int:
        return self.parameters_outside + sum(block.parameters for block in self.blocks)

    def needs(self, plan: Plan) -> int:
        """The peak of a step under `plan`, in bytes of one rank."""
        shards, blocks = plan.num_shards, self.blocks
        scale = self._scale(plan)
        weights = [block.parameters for block in blocks]
        # With shards on the host their gradients and state are there too.
        on_device = 0 if plan.cpu_offload else 1 / shards
        static = self.parameters * (self.kept_ratio + self.state_ratio) * on_device + self.buckets_of(plan)
        in_bf16 = plan.precision == "bf16"
        # In bf16 each block's weights are made from fp32 ones when it runs, also where those are whole.
        is_sharded = in_bf16 or plan.cpu_offload or (plan.is_sharded and shards > 1)
        moved = self.moved_by(plan)
        is_moved = [index < moved for index in range(len(blocks))]
        slots = 2 * max((self.checkpointed(block, plan) for block in blocks[:moved]), default=0)
        kept = [self._kept(block, plan) for block in blocks]
        held = [
            0 if is_moved[i] else self.checkpointed(block, plan) if plan.checkpoint != "none" else kept[i]
            for i, block in enumerate(blocks)
        ]
        highest = 0.0
        for index in range(len(blocks)):
            here = self._at_once(blocks[index], plan)
            activations = sum(held[: index + 1]) + here + slots + self.outside + self.work_of(plan)
            done = sum(weights) if self.has_gradients_before else sum(weights[index + 1 :])
            gradients = self.gradient_ratio * done * on_device
            whole = 0.0
            if is_sharded:
                # Weights of the block and of those fetched ahead; under zero2 of all that the forward went through.
                # Its gradients are there as autograd made them and as the reduction's input.
                first = 0 if plan.sharding == "zero2" else max(0, index - plan.prefetch)
                gathered = self.parameters_outside + sum(weights[first : index + 1])
                gradient = self.gradient_ratio * weights[index]
                whole = 0.5 * (gathered + gradient) + gradient if in_bf16 else gathered + 2 * gradient
            highest = max(highest, activations * scale + gradients + whole)
        optimizer = (self.gradient_ratio * self.parameters + self.optimizer_work) * on_device
        return round(static + max(highest, optimizer))

    def host_bytes(self, plan: Plan) -> int:
        """What a rank holds in host memory under `plan`."""
        moved = self.blocks[: self.moved_by(plan)]
        held = sum(self.checkpointed(block, plan) for block in moved) * self._scale(plan)
        if plan.cpu_offload:
            ratio = self.kept_ratio + self.gradient_ratio + self.state_ratio
            held += self.parameters * ratio / plan.num_shards
        return round(held)

    def checkpointed(self, block: BlockMemory, plan: Plan) -> int:
        """Bytes that a checkpoint keeps of a block, on the device or on the host, under this step's width and split."""
        # What its attention returned is of the size of its input.
        return block.inputs * (2 if plan.checkpoint == "selective" else 1)

    def moved_by(self, plan: Plan) -> int:
        """How many blocks' inputs wait on the host under `plan`."""
        if plan.checkpoint == "none":
            return 0
        return num_blocks_to_move(plan.offload, len(self.blocks), KEEP_LAST)

    def _scale(self, plan: Plan) -> float:
        """Activations under `plan`, over those under this step's."""
        in_bf16, was_in_bf16 = plan.precision == "bf16", self.plan.precision == "bf16"
        width = 1.0 if in_bf16 == was_in_bf16 else 0.5 if in_bf16 else 2.0
        return width * self.plan.sequence / plan.sequence

    def buckets_of(self, plan: Plan) -> float:
        """What DDP keeps between steps where it averages whole gradients: a copy of them in buckets."""
        return self.gradient_ratio * self.parameters if plan.averages_by_ddp else 0.0

    def work_of(self, plan: Plan) -> float:
        """What backward takes beside what was kept: mostly gradients of an MLP's hidden layer, which chunks divide."""
        return self.work * self.plan.mlp_chunks / plan.mlp_chunks

    def _kept(self, block: BlockMemory, plan: Plan) -> float:
        # A chunked MLP is recomputed by itself.
        return block.kept if plan.mlp_chunks == self.plan.mlp_chunks else block.kept - block.mlp

    def _at_once(self, block: BlockMemory, plan: Plan) -> float:
        """What is alive of a block in its backward, besides what it holds from the forward on."""
        share = self.plan.mlp_chunks / plan.mlp_chunks
        if plan.checkpoint == "none":
            return 0 if share == 1 else block.mlp * share
        return block.kept - block.mlp * (1 - share)

    def explained(self, seen_bytes: int, in_optimizer: bool) -> StepMemory:
        """The same with at least as much work as the bytes that were seen to be needed."""
        missing = seen_bytes - self.needs(self.plan)
        if missing <= 0:
            return self
        # With the optimizer on the host it takes nothing here.
        if in_optimizer and not self.plan.cpu_offload:
            # What of it lies below the backward's peak shows only when more is missing.
            ratio = self.kept_ratio + self.state_ratio + self.gradient_ratio
            static = self.parameters * ratio / self.plan.num_shards
            static += self.buckets_of(self.plan)
            return replace(self, optimizer_work=round((seen_bytes - static) * self.plan.num_shards))
        return replace(self, work=self.work + missing)


@dataclass(frozen=True)
class Change:
    """Fields of the Plan to set, and what a step would need then."""

    fields: dict[str, Any]
    needs_bytes: int
    host_bytes: int

    def __str__(self) -> str:
        return ", ".join(
            f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
            for name, value in self.fields.items()
        )


def changes(memory: StepMemory) -> list[Change]:
    """Each by itself, in the order of what it costs: time first, then time and the host's memory, then more ranks."""
    plan, wanted = memory.plan, list[dict[str, Any]]()
    checkpoint = {} if plan.checkpoint != "none" else {"checkpoint": "full"}
    if plan.checkpoint != "full":
        wanted.append({"checkpoint": "full"})
    wanted += [
        checkpoint | {"offload": share}
        for share in (0.5, 1.0)
        if plan.offload != "auto" and share > plan.offload
    ]
    if any(block.mlp for block in memory.blocks):
        wanted += [{"mlp_chunks": number} for number in _CHUNKS if number > plan.mlp_chunks]
    if not plan.is_sharded:
        # Over the ranks that there are, or over two.
        degrees = {"dp_replicate": 1, "dp_shard": plan.data} if plan.data > 1 else {}
        degrees = degrees if plan.mixed > 1 else {"dp_shard": 2}
        wanted += [{"sharding": name, **degrees} for name in ("zero2", "zero3")]
        # A single rank's shard is all of it.
        wanted.append({"sharding": "zero3", **(degrees if plan.mixed > 1 else {}), "cpu_offload": True})
    elif plan.sharding == "zero2":
        wanted.append({"sharding": "zero3"})
    if plan.is_sharded and not plan.cpu_offload:
        wanted.append({"cpu_offload": True})
    axis = "ring" if plan.ring > 1 else "ulysses"
    wanted += [{axis: getattr(plan, axis) * times} for times in _TIMES]
    return [change for fields in wanted if (change := _change(memory, fields)) is not None]


def smallest_change(
    memory: StepMemory, limit_bytes: int, host_limit_bytes: float = math.inf
) -> tuple[Change | None, Change | None]:
    """The first change that fits: one by itself, or else as many together as it takes. And the best, if none does.

    A change that the host's memory does not hold is none.
    """
    alone = [change for change in changes(memory) if change.host_bytes <= host_limit_bytes]
    for change in alone:
        if change.needs_bytes <= limit_bytes:
            return change, None
    together: dict[str, Any] = {}
    best = min(alone, key=lambda change: change.needs_bytes, default=None)
    for change in alone:
        merged = _change(memory, together | change.fields)
        if merged is None or merged.host_bytes > host_limit_bytes:
            continue
        together |= change.fields
        if merged.needs_bytes <= limit_bytes:
            return merged, None
        if best is None or merged.needs_bytes < best.needs_bytes:
            best = merged
    return None, best


def _change(memory: StepMemory, fields: dict[str, Any]) -> Change | None:
    try:
        changed = memory.plan.replace(**fields)
    except ValueError:
        return None  # not together with what the plan has
    return Change(fields, memory.needs(changed), memory.host_bytes(changed))
