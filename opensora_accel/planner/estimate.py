"""What a Plan would need and take, from two traced steps of a single rank: quick, and near enough to choose finalists.

A reference rank has the whole model and all tokens. Under a Plan with P sequence ranks each of its operations has a
P-th of the tokens, and what the axes send follows from sizes. With 2 blocks of 1 s forward and 2 s backward, and a
gather of a block's parameters that takes 0.4 s, all but the first gather hides: 0.4 + 2·1 + 2·2 = 6.4 s. Where the
gather takes 1.5 s, each block's forward waits 0.5 s for the next one's.

    seconds   compute of every operation by its shape, what communication and copies last longer than the compute that
              they run beside, the optimizer, and the host's time where it is the longer one
    memory    observe.fitting.StepMemory, whose blocks are read from the reference steps

What is chosen in the end was traced under its own Plan (search.py); these numbers carry a wider interval.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import NamedTuple

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from opensora_accel.attention import slices
from opensora_accel.experimental import experiment
from opensora_accel.observe import BlockMemory, StepMemory
from opensora_accel.plan import Plan
from opensora_accel.planner.cost import (
    HOST_OPTIMIZER_BYTES_PER_S,
    Placement,
    collective_s,
    core_share,
    kernel_s,
    launch_s,
)
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.run import trace_step
from opensora_accel.planner.trace import Operation, Phase, Trace
from opensora_accel.planner.workload import Workload
from shardformer import blocks_of
from shardformer.policy import find_policy, has_policy

# Share by which an estimate may be off in either direction: seen against traces (docs/planner.md), not fitted.
TIME_INTERVAL, MEMORY_INTERVAL = 0.3, 0.08
# DDP's first and last buckets cannot hide; torch's default of 25 MiB.
_BUCKET_BYTES = 25 * 2**20
_KERNELS = ("gemm", "attention", "memory")


def axis_groups(plan: Plan, rank: int = 0) -> dict[str, tuple[int, ...]]:
    """The ranks of a rank's group for each axis that has several, by the order of the mesh."""
    groups = {}
    for axis, stride, size in _strides(plan):
        first = rank - rank // stride % size * stride
        groups[axis] = tuple(range(first, first + stride * size, stride))
    return groups


def _strides(plan: Plan) -> tuple[tuple[str, int, int], ...]:
    """How far apart neighbours along an axis are, and how many they are, for each axis that has several."""
    tp, shards = plan.tp, plan.num_shards
    strides = {
        "tp": (1, tp),
        "ulysses": (tp, plan.ulysses),
        "ring": (tp * plan.ulysses, plan.ring),
        "shards": (tp, shards),
        "copies": (tp * shards, plan.mixed // shards),
        "mixed": (tp, plan.mixed),
    }
    return tuple((axis, stride, size) for axis, (stride, size) in strides.items() if size > 1)


def farthest_rank(plan: Plan, placement: Placement) -> int:
    """The first rank whose groups are on most nodes: it is what all others wait for.

    With ulysses=3 on nodes of 8, ranks 0, 1, 2 are on one node, and ranks 6, 7, 8 on two: it is rank 6. Mostly all
    ranks are alike, and it is rank 0.
    """
    return _farthest(_strides(plan), placement)


@lru_cache(maxsize=10_000)
def _farthest(strides: tuple[tuple[str, int, int], ...], placement: Placement) -> int:
    num_nodes = [0] * placement.world_size
    for _axis, stride, size in strides:
        for first in range(placement.world_size):
            if first // stride % size == 0:
                group = range(first, first + stride * size, stride)
                on = len({rank // placement.ranks_per_node for rank in group})
                for rank in group:
                    num_nodes[rank] += on
    return num_nodes.index(max(num_nodes))


class Weights(NamedTuple):
    """Bytes of parameters. Of 100 in fp32 that train, and 100 that are frozen, bf16 has 800 computed, 600 kept."""

    # As `BlockMemory.parameters` has them: twice what bf16 takes, and else what they are.
    computed: int
    # Shards, all together.
    kept: int
    # Of those the ones that are trained.
    trained: int

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], in_bf16: bool) -> Weights:
        computed = kept = trained = 0
        for each in parameters:
            is_narrowed = in_bf16 and each.is_floating_point()
            in_use = 2 * each.numel() if is_narrowed else each.nbytes
            computed += 2 * in_use if in_bf16 else in_use
            kept += each.nbytes if each.requires_grad else in_use
            trained += each.nbytes if each.requires_grad else 0
        return cls(computed, kept, trained)


class InRing(NamedTuple):
    """What a rank of a ring has of attention; by default, where all tokens see each other."""

    # The largest share over the mean.
    uneven: float = 1.0
    # What it sends at each step, of all of its keys.
    moved: float = 1.0
    # Queries of a call of the kernel, of those on a rank that has all tokens. A mask's tiles are fewer, not as small.
    rows: float = 1.0


@dataclass(frozen=True)
class Reference:
    """Steps of one rank that has all of the model and the tokens: plain, with checkpoints, with its MLPs in pieces."""

    workload: Workload
    whole: Trace
    light: Trace
    in_pieces: Trace
    # For each block, and for all that is in none.
    blocks: tuple[Weights, ...]
    outside: Weights
    # Whether the model's policy says where its layers are cut for tensor parallelism.
    has_tensor_table: bool

    @classmethod
    def of(cls, workload: Workload, precision: str) -> Reference:
        plan = Plan(precision=precision)  # type: ignore[arg-type]
        whole = trace_step(workload, plan)
        light = trace_step(workload, plan.replace(checkpoint="full"))
        try:
            in_pieces = trace_step(workload, plan.replace(mlp_chunks=4))
        except ValueError:
            in_pieces = whole  # no policy says where its MLPs are
        with FakeTensorMode():
            model = workload.model_fn()
        knows = has_policy(model)
        in_bf16 = precision == "bf16"
        modules = blocks_of(model) if knows else []
        blocks = tuple(Weights.of(block.parameters(), in_bf16) for block in modules)
        within = {id(parameter) for block in modules for parameter in block.parameters()}
        outside = Weights.of((each for each in model.parameters() if id(each) not in within), in_bf16)
        if not workload.num_tokens:
            workload = replace(workload, num_tokens=_tokens_of(whole))  # a user's own step does not say it
        return cls(
            workload, whole, light, in_pieces, blocks, outside, knows and bool(find_policy(model).tensors)
        )

    @property
    def num_blocks(self) -> int:
        return max(1, len(self.blocks))

    @cached_property
    def weights(self) -> Weights:
        """Of the whole model."""
        return Weights(*map(sum, zip(self.outside, *self.blocks, strict=True)))

    @cached_property
    def kernels(self) -> dict[tuple[str, bool], Counter[Operation]]:
        """How often each kernel runs, by its phase and whether it is in a block. Their order does not matter here."""
        counts: dict[tuple[str, bool], Counter[Operation]] = defaultdict(Counter)
        for each in self.whole.operations:
            if each.kind in _KERNELS:
                same = replace(each, after=(), block=None, region=None, stream="compute")
                counts[each.phase, each.block is not None][same] += 1
        return dict(counts)

    @cached_property
    def hidden_bytes(self) -> int:
        """Bytes of one rank's tokens in a block, all channels: what an attention's queries take."""
        attentions = [each for each in self.whole.operations if each.kind == "attention"]
        if not attentions:
            return 0
        largest = max(attentions, key=lambda each: each.flops)
        batch, heads, queries, _keys, head_dim = largest.shape
        # One of many tiles, where attention is by slices of a mask.
        queries = max(queries, self.workload.num_tokens)
        return batch * heads * queries * head_dim * element_bytes(largest.dtype)

    def in_ring(self, ring: int) -> InRing:
        """How attention is shared in a ring: by slices as tokens are dealt out, and as the first rank has it."""
        if self.whole.attention is None or ring == 1:
            return InRing(rows=1 / ring)
        mask = self.whole.attention.deal.mask
        deal = slices.deal(mask, ring)
        _own, *others = deal.steps(0)
        moved = sum(max(step.num_sent, step.num_received) for step in others) / len(others)
        rows = _mean_rows(deal) / _mean_rows(slices.deal(mask, 1))
        return InRing(deal.imbalance, moved / max(deal.splits), rows)

    def memory(self, optimizer_ratio: float, tp: int, samples: int = 1) -> StepMemory:
        """As the profiler's forecasts take it, of so many times the samples."""
        weights = [block.computed // tp for block in self.blocks]
        whole = self.weights
        trained = whole.trained / max(1, whole.computed)
        kept, inputs, others = (self._held(trace) for trace in (self.whole, self.light, self.in_pieces))
        blocks = tuple(
            BlockMemory(parameters=size, inputs=inputs[i], kept=kept[i], mlp=max(0, kept[i] - others[i]))
            for i, size in enumerate(weights)
        )
        # What is missing to the reference's peak is work, which grows with the samples too.
        memory = StepMemory(
            self.light.plan,
            blocks,
            self.outside.computed,
            gradient_ratio=trained,
            state_ratio=2 * trained,
            kept_ratio=whole.kept / max(1, whole.computed),
        )
        peak = self.light.peak
        explained = memory.explained(peak.device_bytes, peak.phase == "optimizer")
        grown = tuple(
            BlockMemory(each.parameters, *(samples * size for size in (each.inputs, each.kept, each.mlp)))
            for each in blocks
        )
        return replace(
            explained,
            blocks=grown,
            work=explained.work * samples,
            outside=explained.outside * samples,
            state_ratio=optimizer_ratio * trained,
        )

    def _held(self, trace: Trace) -> list[int]:
        """Bytes by which each block's forward raises what is held."""
        first: dict[int, int] = {}
        last = 0
        for state in trace.memory:
            if state.phase == "forward" and state.block is not None:
                first.setdefault(state.block, state.device_bytes)
                last = max(last, state.block)
        known = [first[i + 1] - first[i] for i in range(last) if i in first and i + 1 in first]
        typical = max(0, round(sum(known) / len(known))) if known else 0
        return [max(0, first[i + 1] - first[i]) if i in first and i + 1 in first else typical
                for i in range(self.num_blocks)]  # fmt: skip


def _mean_rows(deal: slices.Deal) -> float:
    """Queries of a call of the kernel, on the first rank."""
    rows = [tile.rows.stop - tile.rows.start for step in deal.steps(0) for tile in step.tiles]
    return sum(rows) / max(1, len(rows))


def _tokens_of(trace: Trace) -> int:
    """How many tokens see each other in the largest attention of one rank that has all; 0 without attention."""
    if trace.attention is not None:
        return trace.attention.deal.mask.num_queries
    attentions = [each for each in trace.operations if each.kind == "attention"]
    return max(attentions, key=lambda each: each.flops).shape[2] if attentions else 0


def element_bytes(dtype: str) -> int:
    return {"bfloat16": 2, "float16": 2, "float64": 8, "float8": 1}.get(dtype, 4)


class Estimator:
    """Estimates of many Plans for one workload on one machine."""

    def __init__(self, reference: Reference, hardware: Hardware, optimizer_ratio: float = 2.0):
        self.reference, self.hardware, self._ratio = reference, hardware, optimizer_ratio
        # Thousands of Plans have few different degrees between them.
        self._compute = lru_cache(maxsize=None)(self._compute_s)
        self._memory = lru_cache(maxsize=None)(self.reference.memory)
        self._needs = lru_cache(maxsize=None)(self._needed_bytes)
        self._collective = lru_cache(maxsize=None)(self._collective_s)
        self._in_ring = lru_cache(maxsize=None)(self.reference.in_ring)

    # ---- memory

    def _needed_bytes(self, tp: int, plan: Plan, samples: int) -> int:
        return self._memory(self._ratio, tp, samples).needs(plan)

    def bytes_by_kind(self, plan: Plan, samples: int = 1) -> dict[str, int]:
        """The device's bytes at the peak, by kind, with so many times the samples of the reference."""
        memory = self._memory(self._ratio, plan.tp, samples)
        # What does not change the answer is left out of the question, which then is asked more often.
        plain = plan.replace(
            tp=1, ring=plan.sequence, ulysses=1, overlap_ulysses=False, two_level="off", ranks_per_node=None,
            gather_dtype="same", reduce_dtype="same", sharding_factor=None,
        )  # fmt: skip
        total = self._needs(plan.tp, plain, samples)
        on_device = 0 if plan.cpu_offload else 1 / plan.num_shards
        kinds = {
            "parameters": round(memory.parameters * memory.kept_ratio * on_device),
            "optimizer state": round(memory.parameters * memory.state_ratio * on_device),
            "gradients": round(memory.buckets_of(plan)),
        }
        kinds["activations and work"] = max(0, total - sum(kinds.values()))
        return kinds

    def trained_bytes(self, plan: Plan) -> int:
        """A rank's own share of the weights that are trained."""
        return self.reference.weights.trained // plan.tp // plan.num_shards

    def host_bytes(self, plan: Plan, samples: int = 1) -> int:
        """What a rank holds in host memory."""
        return self._memory(self._ratio, plan.tp, samples).host_bytes(plan)

    # ---- seconds

    def seconds_by_kind(self, plan: Plan, accumulation: int = 1, samples: int = 1) -> dict[str, float]:
        """A step's seconds, by what takes them; they add up to the step."""
        blocks, hardware = self.reference.num_blocks, self.hardware
        placement = Placement.on(hardware, plan.world_size)
        pass_s = defaultdict[str, float](float)
        degrees = plan.ring, plan.ulysses, plan.tp, samples
        forward = self._compute("forward", degrees, 1, placement)
        backward = self._compute("backward", degrees, 1, placement)
        for part in (forward, backward):
            for kind in (*_KERNELS, "host"):
                pass_s[kind] += part[kind]
        again_s = 0.0
        if plan.checkpoint != "none":
            again = forward["in blocks"] - (forward["attention"] if plan.checkpoint == "selective" else 0.0)
            pass_s["recomputation"] = again_s = max(0.0, again)
        if plan.mlp_chunks > 1:
            pass_s["MLPs in pieces"] = self._pieces_s * samples / plan.sequence / plan.tp
        forward_s = forward["in blocks"] / blocks
        backward_s = (backward["in blocks"] + again_s) / blocks
        groups = axis_groups(plan, farthest_rank(plan, placement))
        pass_s.update(
            self._sequence_s(plan, groups, placement, samples, forward["attention"], backward["attention"])
        )
        pass_s["parameters sent"] = self._parameters_s(plan, groups, placement, forward_s, backward_s)
        memory = self._memory(self._ratio, plan.tp, samples)
        copied = memory.checkpointed(memory.blocks[0], plan) / plan.sequence if memory.blocks else 0
        copy_s = hardware.host_link.time_s(1, copied)
        pass_s["copies"] = memory.moved_by(plan) * (
            max(0.0, copy_s - forward_s) + max(0.0, copy_s - backward_s)
        )
        step = defaultdict(float, {kind: seconds * accumulation for kind, seconds in pass_s.items()})
        optimizer = self._compute("optimizer", degrees, plan.num_shards, placement)
        step["optimizer"] = optimizer["memory"] + optimizer["host"]
        if plan.cpu_offload:
            trained = self.trained_bytes(plan)
            kept = self.reference.weights.kept / plan.tp / plan.num_shards
            step["optimizer"] = trained * 7 / HOST_OPTIMIZER_BYTES_PER_S
            step["copies"] += hardware.host_link.time_s(1, trained + (kept + trained) * accumulation)
        return {kind: seconds for kind, seconds in step.items() if seconds > 0}

    @cached_property
    def _pieces_s(self) -> float:
        """What kernels of a pass take longer where MLPs run in pieces, on one rank that has all."""
        whole, in_pieces = (
            sum(kernel_s(each, self.hardware) for each in trace.operations if each.kind in _KERNELS)
            for trace in (self.reference.whole, self.reference.in_pieces)
        )
        return max(0.0, in_pieces - whole)

    def _compute_s(
        self, phase: Phase, degrees: tuple[int, int, int, int], shards: int, placement: Placement
    ) -> dict[str, float]:
        """Seconds of a phase's kernels by kind, and those in blocks; the host's where it is longer, beside them."""
        seconds_by_kind = dict.fromkeys(("gemm", "attention", "memory", "host", "in blocks"), 0.0)
        slower = core_share(self.hardware, placement)
        host = launch_s(phase, self.hardware) * slower
        for in_blocks in (False, True):
            kernels_s, count = 0.0, 0
            for operation, times in self.reference.kernels.get((phase, in_blocks), Counter()).items():
                own = self._scaled(operation, degrees, shards, in_blocks)
                seconds = times * kernel_s(own, self.hardware) * slower
                seconds_by_kind[own.kind] += seconds
                kernels_s += seconds
                count += times
            # On a device the host runs ahead, and is waited for where it is the slower one.
            waited = max(0.0, count * host - kernels_s) if self.hardware.runs_ahead else count * host
            seconds_by_kind["host"] += waited
            if in_blocks:
                seconds_by_kind["in blocks"] = kernels_s + waited
        return seconds_by_kind

    def _scaled(
        self, operation: Operation, degrees: tuple[int, int, int, int], shards: int, in_blocks: bool
    ) -> Operation:
        """The operation as one rank of a Plan has it."""
        ring, ulysses, tp, samples = degrees
        if operation.phase == "optimizer":
            return replace(operation, num_bytes=-(-operation.num_bytes // (shards * tp)))
        sequence, tp = ring * ulysses, tp if in_blocks else 1
        if operation.kind == "memory":
            return replace(operation, num_bytes=-(-operation.num_bytes * samples // sequence))
        own: tuple[int, ...]
        parts: float
        if operation.kind == "attention":
            batch, heads, queries, keys, head_dim = operation.shape
            # Of 12 heads on 8 ranks the others wait for those that have two.
            own_heads = -(-heads // (ulysses * tp))
            shared = self._in_ring(ring)
            own = (batch * samples, own_heads, ceil(queries * shared.rows), keys, head_dim)
            parts = ring * heads / own_heads / shared.uneven
        else:
            rows, parts = self.reference.workload.num_tokens * self.reference.workload.batch, tp
            batch, m, n, k = operation.shape
            if m >= rows:
                m, parts = -(-m * samples // sequence), parts * sequence
            elif k >= rows:
                k, parts = -(-k * samples // sequence), parts * sequence
            own = (batch, m, -(-n // tp), k)
        flops, num_bytes = (ceil(each * samples / parts) for each in (operation.flops, operation.num_bytes))
        return replace(operation, shape=own, flops=flops, num_bytes=num_bytes)

    def _collective_s(
        self, kind: str, group: tuple[int, ...], sent_bytes: float, placement: Placement
    ) -> float:
        call = Operation(
            kind, "collective", "exchange", num_bytes=round(sent_bytes), collective=kind, group=group
        )
        return collective_s(call, self.hardware, placement)

    def _sequence_s(
        self,
        plan: Plan,
        groups: dict[str, tuple[int, ...]],
        placement: Placement,
        samples: int,
        forward_s: float,
        backward_s: float,
    ) -> dict[str, float]:
        """What attention's exchanges take that compute waits for; also what tensor parallelism sums."""
        reference, blocks = self.reference, self.reference.num_blocks
        local = reference.hidden_bytes * samples / plan.sequence
        passes = {"none": 2, "selective": 2, "full": 3}[plan.checkpoint]
        seconds_by_kind: dict[str, float] = {}
        if plan.ulysses > 1:
            u, group = plan.ulysses, groups["ulysses"]
            sent = local / plan.tp * (u - 1) / u
            nodes, per_node = placement.spread(group)
            if plan.two_level == "on" and nodes > 1 and per_node > 1:
                links = self.hardware.within, self.hardware.between or self.hardware.within
                two_levels_s = experiment("by_node").two_levels_s
                once = two_levels_s("all-to-all", 3 * local / plan.tp, nodes, per_node, links)
                once += two_levels_s("all-to-all", local / plan.tp, nodes, per_node, links)
            else:
                once = self._collective("all-to-all", group, 3 * sent, placement)
                once += self._collective("all-to-all", group, sent, placement)
            # Overlapped, about a half hides under the projections and the heads' attention.
            seconds_by_kind["exchange over ulysses"] = (
                blocks * passes * once * (0.5 if plan.overlap_ulysses else 1.0)
            )
        if plan.ring > 1:
            ring = plan.ring
            # Keys and values of a ring rank's tokens and heads.
            moved = self._in_ring(ring).moved * 2 * reference.hidden_bytes * samples / plan.sequence / plan.tp
            send = self._collective("send", groups["ring"], moved, placement)
            forward_part, backward_part = (seconds / blocks / ring for seconds in (forward_s, backward_s))
            # Backward sends keys and values on, and their gradients after them in fp32.
            waits = (passes - 1) * max(0.0, send - forward_part) + max(0.0, 3 * send - backward_part)
            seconds_by_kind["ring"] = blocks * (ring - 1) * waits
        if plan.tp > 1:
            sent = 2 * local * (plan.tp - 1) / plan.tp
            seconds_by_kind["sums over tp"] = (
                blocks * 2 * passes * self._collective("all-reduce", groups["tp"], sent, placement)
            )
        return seconds_by_kind

    def _parameters_s(
        self,
        plan: Plan,
        groups: dict[str, tuple[int, ...]],
        placement: Placement,
        forward_s: float,
        backward_s: float,
    ) -> float:
        """What gathering parameters and reducing gradients lasts longer than the compute beside it."""
        if plan.mixed == 1:
            return 0.0
        reference, shards = self.reference, plan.num_shards
        weights = sum(block.computed for block in reference.blocks) / reference.num_blocks / plan.tp
        trained = sum(block.trained for block in reference.blocks) / reference.num_blocks / plan.tp
        total = reference.weights.trained / plan.tp
        in_bf16 = plan.precision == "bf16"
        gathered = weights * {"same": 0.5 if in_bf16 else 1.0, "int8": 0.26, "fp8": 0.26}[plan.gather_dtype]
        reduced = trained * (0.5 if plan.reduce_dtype == "bf16" else 1.0)
        if not plan.uses_fsdp:
            group = groups["mixed"]
            share = 2 * (len(group) - 1) / len(group)
            all_s = self._collective("all-reduce", group, total * share, placement)
            last_s = self._collective("all-reduce", group, min(total, _BUCKET_BYTES) * share, placement)
            return max(last_s, all_s - backward_s * reference.num_blocks)
        gather = scatter = between = 0.0
        if shards > 1:
            gather = self._collective(
                "all-gather", groups["shards"], gathered * (shards - 1) / shards, placement
            )
            scatter = self._collective(
                "reduce-scatter", groups["shards"], reduced * (shards - 1) / shards, placement
            )
        if "copies" in groups:
            share = 2 * (len(groups["copies"]) - 1) / len(groups["copies"])
            between = self._collective("all-reduce", groups["copies"], reduced / shards * share, placement)
        ahead = 1.0 if plan.prefetch else 0.0
        again = gather if plan.sharding == "zero3" else 0.0
        waits = max(0.0, gather - ahead * forward_s) + max(
            0.0, again + scatter + between - ahead * backward_s
        )
        return reference.num_blocks * waits + gather + scatter + between
