"""Runs a workload's step on tensors without values, with as few blocks as show what the others do."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.modules.module import register_module_forward_pre_hook

from opensora_accel.checkpoint import KEEP_LAST
from opensora_accel.observe import (
    CPU,
    MeshShape,
    OtherRanks,
    Owners,
    Places,
    Run,
    accelerator_stand_ins,
    fake_world,
    find_blocks,
    launcher_environment,
    operators_of_cuda,
    without_values,
)
from opensora_accel.offload import GLOBAL_ACTIVATION_MANAGER, OffloadEngine, num_blocks_to_move
from opensora_accel.plan import Plan
from opensora_accel.planner.extend import NotRepeated, Stretch, extend
from opensora_accel.planner.recording import StepRecorder
from opensora_accel.planner.trace import Trace
from opensora_accel.planner.workload import Pass, Workload
from opensora_accel.wrapping import replaced
from shardformer import blocks_of
from shardformer.paths import children
from shardformer.policy import find_policy, has_policy

# Blocks of a stretch that are recorded at first: the first and the last ones differ, and two in between are compared.
# Prefetching lets two more differ for each block ahead, and averaging gradients of whole parameters one.
_FEW = 3
# No plan's arena is that large.
_UNLIMITED_BYTES = 2**62


def trace_step(workload: Workload, plan: Plan, *, rank: int = 0, num_blocks: int | None = None) -> Trace:
    """The step of one rank of the plan's world, in this process: the second one, or a later one.

    Args:
        num_blocks: traces the model as if it had no more than so many of its blocks. By default the trace is of all of
            them, and only so many are run as show what the others do.

    Raises:
        ValueError: a process group exists already; a rank outside of the world. What the model or its policy raises
            for a plan that it cannot run passes through.
    """
    if not 0 <= rank < plan.world_size:
        raise ValueError(f"rank must be one of the plan's {plan.world_size} ranks, from 0; got {rank}")
    if plan.offload == "auto":
        # What "auto" moves depends on times. All is the most that it may move.
        plan = plan.replace(offload=1.0)
    few = _FEW + (2 * plan.prefetch if plan.is_sharded else plan.mixed > 1)
    while True:
        session = _Session(workload, plan, rank, num_blocks, few)
        try:
            return session.trace()
        except NotRepeated as error:
            assert session.leaves_blocks_out, error
            few *= 2


class _Session:
    """One recording."""

    def __init__(self, workload: Workload, plan: Plan, rank: int, num_blocks: int | None, few: int):
        self.workload, self.plan, self.rank = workload, plan, rank
        self._most, self._few = num_blocks, few
        self.leaves_blocks_out = False

    def trace(self) -> Trace:
        plan, shape = self.plan, MeshShape.of(self.plan)
        recorder = StepRecorder(shape)
        run = Run(shape, self.rank, shape.data_rank(self.rank), shape.data_size)
        engine, others = OffloadEngine(recorder.queues), OtherRanks()
        architecture = self.workload.architecture
        with (
            fake_world(self.rank, plan.world_size),
            without_values(),
            others,
            GLOBAL_ACTIVATION_MANAGER.show(engine),
            recorder,
            launcher_environment(run),
            accelerator_stand_ins(),
            nullcontext() if architecture == CPU else operators_of_cuda(architecture),
            replaced(_fsdp_param, "_chunk_with_empty", _Chunks),
        ):
            if plan.offload:
                engine.setup_arena(limit_bytes=_UNLIMITED_BYTES)
            model = self.workload.model_fn()
            stretches, shortened = self._shorten(model)
            run = replace(run, shape=replace(shape, plan=shortened))
            names = self._record(model, run, recorder, others)
            engine.close()
            step = extend(recorder, names, stretches, plan.cpu_offload)
        true_blocks = sum(stretch.true for stretch in stretches)
        return Trace(
            plan=plan,
            rank=self.rank,
            num_blocks=true_blocks,
            operations=tuple(step.operations),
            memory=tuple(step.memory),
            host_bytes=step.host_bytes,
            parameter_bytes=step.parameter_bytes,
            trained_bytes=step.trained_bytes,
            largest_bytes=step.largest_bytes,
            storages=step.storages,
            groups=tuple(recorder.groups),
            attention=recorder.attention,
        )

    def _record(self, model: nn.Module, run: Run, recorder: StepRecorder, others: OtherRanks) -> list[str]:
        """Runs the step; the names of the blocks."""
        one_pass = self.workload.prepare(model, run)
        with ExitStack() as recording:
            if self.workload.is_repeatable:
                optimizer, names = self._optimizer_of(model), self._names_of(model)
                for _ in range(self._num_warm_ups(run.plan, len(names))):
                    self._step(one_pass, optimizer, others)
                self._begin(model, optimizer, recorder, recording)
                self._step(one_pass, optimizer, others)
            else:
                # The step applies the plan itself. What it records begins when it calls the model.
                made: list[torch.optim.Optimizer] = []

                def begin(module: nn.Module, _args: Any) -> None:
                    if not made and any(each is model for each in module.modules()):
                        made.append(self._optimizer_of(model))
                        self._begin(model, made[0], recorder, recording)

                recording.callback(register_module_forward_pre_hook(begin).remove)
                one_pass(True)
                if not made:
                    raise ValueError("the step never calls the model that model_fn() has made; call it")
                self._finish(made[0], others)
                names = self._names_of(model)
        return names

    def _begin(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recorder: StepRecorder,
        recording: ExitStack,
    ) -> None:
        blocks = find_blocks(model, blocks_of(model) if has_policy(model) else None)
        owners = Owners(model, blocks, optimizer)
        places = Places(model, blocks, optimizer, moved=recorder.moved, saved=owners.add_inputs)
        recording.enter_context(places)
        recording.enter_context(recorder.recording(places, owners, list(blocks)))

    def _names_of(self, model: nn.Module) -> list[str]:
        return list(find_blocks(model, blocks_of(model) if has_policy(model) else None))

    def _optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW with the state that it has from its first step on."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        is_fused = self.workload.fused_optimizer
        on_gpu = self.workload.architecture != CPU
        optimizer = torch.optim.AdamW(trained, fused=is_fused, foreach=on_gpu and not is_fused)
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    def _step(self, one_pass: Pass, optimizer: torch.optim.Optimizer, others: OtherRanks) -> None:
        for number in range(self.workload.accumulation):
            one_pass(number == self.workload.accumulation - 1)
        self._finish(optimizer, others)

    def _finish(self, optimizer: torch.optim.Optimizer, others: OtherRanks) -> None:
        optimizer.step()
        optimizer.zero_grad()
        # The simulated all-reduces hold what they have summed, which real ones let go of: shards of gradients.
        others.forget_works()

    def _num_warm_ups(self, plan: Plan, num_blocks: int) -> int:
        """Steps to run before the one that is recorded, so that it is like all that follow."""
        if plan.averages_by_ddp:
            return (
                2  # DDP learns the order of gradients in the first, and makes its buckets anew in the second
            )
        if num_blocks_to_move(plan.offload, num_blocks, KEEP_LAST) == 1:
            return 2  # each reserves one of the two slots
        # The arena and both slots, and what rounding left out, are made in the first.
        return 1 if plan.offload or plan.reduce_dtype != "same" else 0

    def _shorten(self, model: nn.Module) -> tuple[list[Stretch], Plan]:
        """Takes blocks away that others stand for; the stretches of those left, and the plan that fits."""
        if not has_policy(model):
            count = len(find_blocks(model))
            return [Stretch(0, count, count)], self.plan
        policy = find_policy(model)
        if self._most is not None:
            _cut(model, policy, self._most)
        blocks = blocks_of(model)
        moved = (
            num_blocks_to_move(self.plan.offload, len(blocks), KEEP_LAST)
            if self.plan.checkpoint != "none"
            else 0
        )
        is_regular = all(not entry.alternating for entry in policy.blocks)
        groups: list[list[nn.Module]] = []
        kinds: list[Any] = []
        for index, block in enumerate(blocks):
            kind = _kind_of(block), index < moved
            if not groups or kind != kinds[-1]:
                groups.append([])
                kinds.append(kind)
            groups[-1].append(block)
        stretches, first, dropped = [], 0, set[int]()
        for group in groups:
            recorded = min(len(group), self._few) if is_regular else len(group)
            stretches.append(Stretch(first, recorded, len(group)))
            dropped |= {id(block) for block in group[recorded:]}
            first += recorded
        self.leaves_blocks_out = bool(dropped)
        for entry in policy.blocks:
            _keep(model, entry.module, lambda block: id(block) not in dropped)
        kept_moved = sum(s.recorded for s, kind in zip(stretches, kinds, strict=True) if kind[1])
        return stretches, self._plan_that_moves(kept_moved, first)

    def _plan_that_moves(self, moved: int, num_blocks: int) -> Plan:
        """The plan whose share of so many blocks is `moved`."""
        if not self.plan.offload:
            return self.plan
        return self.plan.replace(offload=min(1.0, moved / num_blocks))


class _Chunks:
    """The chunks of a tensor that FSDP2 asks for, its own and the first, without making those of 1,024 ranks."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int):
        self._tensor, self._dim = tensor, dim
        self._rows = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        left = self._tensor.size(self._dim) - index * self._rows
        if left <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, index * self._rows, min(self._rows, left))


def _kind_of(block: nn.Module) -> tuple[Any, ...]:
    """What tells blocks of different kinds apart: class, parameters and their shapes."""
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
    return type(block), shapes


def _cut(model: nn.Module, policy: Any, most: int) -> None:
    """Leaves the first `most` blocks of each list."""
    for entry in policy.blocks:
        for path in (entry.module, *entry.alternating):
            allowed = {id(block) for block in children(model, path)[:most]}
            _keep(model, path, lambda block, allowed=allowed: id(block) in allowed)


def _keep(model: nn.Module, path: str, wanted: Any) -> None:
    """Leaves those blocks of a list of modules that are wanted."""
    blocks = children(model, path)
    left = [block for block in blocks if wanted(block)]
    if len(left) < len(blocks):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, nn.ModuleList(left))
