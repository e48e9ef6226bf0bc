"""What traced plans tell of those that are not traced: how estimates are off, by how much, and what no plan can beat.

    corrections  a plan like one that took 1.3 times its estimate is taken for 1.3 times slower as well
    errors       how far off what is foreseen has been, by how much the plan was like those that were traced
    floors       sharding, copies of shards, and offload change neither a rank's kernels nor what its sequence axes
                 send. So no plan is faster than the trace of one with the same degrees, in which parameters,
                 gradients, block inputs and the optimizer take no time

Of 64 ranks dp_shard=64 with selective checkpoints takes 43.9 s, and its kernels alone 43.7 s. Then dp_shard=8 with
dp_replicate=8 takes 43.7 s at least, whatever its collectives do, and 38.3 s without checkpoints: a plan that takes
43.6 s ends the search for the first, and leaves the second in it.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from opensora_accel.plan import Plan
from opensora_accel.planner.candidates import Candidate
from opensora_accel.planner.cost import Placement, alone_s
from opensora_accel.planner.estimate import axis_groups, farthest_rank
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.trace import Operation, Trace

# How far off, as a share, a corrected estimate is taken to be before any was seen, by `Corrections.level`. Those of
# Wan-14B on 8 GPUs, all traced, were off by up to 0.4, 3, 3, and 10 % (tools/bench/plan_search.py); these are wider.
_PRIORS = (0.01, 0.03, 0.04, 0.08, 0.2)
# The share of the foreseen memory that a plan needs at least, and where one was traced that keeps and moves the same:
# of the same plans 5 and 3 % less were needed at the most.
_LEAST_MEMORY, _LEAST_MEMORY_ALIKE = 0.95, 0.97
# Casts and copies of parameters are the kernels' that differ between ways to shard: by up to 0.3 % of a step.
_OF_PARAMETERS = 0.995
# On which a block's own collectives run, those of its parameters left out.
_OWN_AXES = ("ring", "ulysses", "tp")


class Errors:
    """How far off corrected estimates have been, by how much the plan was like those that were traced before."""

    def __init__(self) -> None:
        self._squares: list[list[float]] = [[] for _ in _PRIORS]

    def note(self, level: int, ratio: float) -> None:
        """`ratio`: what a plan took by its trace, of what was foreseen."""
        self._squares[level].append(math.log(ratio) ** 2)

    def least(self, level: int) -> float:
        """The share of what is foreseen that a plan takes at least: two standard deviations less.

        What is assumed counts as two plans: after errors of 1 % twice, 3 % become 2.2 %.
        """
        seen = self._squares[level]
        variance = (2 * _PRIORS[level] ** 2 + sum(seen)) / (2 + len(seen))
        return math.exp(-2 * math.sqrt(variance))


class Corrections:
    """What traced plans took and needed, over what was estimated of them: of plans like them, or of all."""

    def __init__(self, found: Sequence[Candidate], traced: Mapping[Plan, Candidate]):
        ratios = defaultdict[Any, list[float]](list)
        for each in found:
            exact_one = traced.get(each.plan)
            if exact_one is not None:
                plan, middle = each.plan, sum(each.memory_bytes) / 2
                for key in self._time_keys(plan):
                    ratios[key].append(exact_one.expected_s / each.expected_s)
                for key in self._memory_keys(plan):
                    ratios[key].append(exact_one.memory_bytes[1] / middle)
        self._median = {key: statistics.median(values) for key, values in ratios.items()}

    def of(self, plan: Plan) -> float:
        """For its seconds."""
        return next((self._median[key] for key in self._time_keys(plan) if key in self._median), 1.0)

    def level(self, plan: Plan) -> int:
        """How much a traced plan is like it: 0 in its degrees and what it keeps, 3 in nothing, 4 if none is traced."""
        return next(
            (i for i, key in enumerate(self._time_keys(plan)) if key in self._median), len(_PRIORS) - 1
        )

    def of_memory(self, plan: Plan) -> float:
        """For its bytes."""
        return next((self._median[key] for key in self._memory_keys(plan) if key in self._median), 1.0)

    def of_least_memory(self, plan: Plan) -> float:
        """For the bytes that it may need at least."""
        alike = self._memory_keys(plan)[0] in self._median
        return self.of_memory(plan) * (_LEAST_MEMORY_ALIKE if alike else _LEAST_MEMORY)

    @staticmethod
    def _time_keys(plan: Plan) -> tuple[Any, ...]:
        degrees, kept = (plan.ring, plan.ulysses, plan.tp), (plan.checkpoint, plan.mlp_chunks)
        return ("time", *degrees, *kept), ("time", *degrees), ("time", plan.ring), "time"

    @staticmethod
    def _memory_keys(plan: Plan) -> tuple[Any, ...]:
        kept = plan.checkpoint, plan.mlp_chunks
        moved = plan.sharding, plan.offload, plan.cpu_offload
        return ("memory", *kept, *moved), ("memory", *kept), ("memory", plan.checkpoint)


def floor_s(trace: Trace, hardware: Hardware, placement: Placement) -> tuple[float, float]:
    """Seconds that a step of a plan with the same degrees takes at least, with the trace's checkpoints and without."""
    own = [
        0.0 if _depends_on_sharding(each) else alone_s(_without_hooks(each), hardware, placement, trace.plan)
        for each in trace.operations
    ]
    plain = [
        0.0 if operation.phase == "recompute" else seconds
        for operation, seconds in zip(trace.operations, own, strict=True)
    ]
    return _longest_path_s(trace.operations, own), _longest_path_s(trace.operations, plain)


def _depends_on_sharding(operation: Operation) -> bool:
    return (
        operation.phase == "optimizer"
        or operation.stream not in ("compute", "exchange", "ring")
        or operation.name.startswith("fsdp.")
    )


def _without_hooks(operation: Operation) -> Operation:
    """Plans that shard nothing have no hooks of FSDP2."""
    return replace(operation, hooked=0) if operation.hooked else operation


def _longest_path_s(operations: Iterable[Operation], seconds: Iterable[float]) -> float:
    """When the last operation ends, where each has its links for itself and the host launches at once.

    No timeline of the same operations is shorter.
    """
    ends: list[float] = []
    free_s = defaultdict[str, float](float)
    for operation, taken_s in zip(operations, seconds, strict=True):
        start_s = max((ends[each] for each in operation.after), default=0.0)
        free_s[operation.stream] = max(start_s, free_s[operation.stream]) + taken_s
        ends.append(free_s[operation.stream])
    return max(free_s.values(), default=0.0)


class Floors:
    """Floors of plans that were traced, for others of the same degrees."""

    def __init__(self, hardware: Hardware):
        self._hardware = hardware
        self._traced = defaultdict[Any, dict[str, float]](dict)
        self._spreads: dict[Plan, Any] = {}

    def note(self, candidate: Candidate) -> None:
        """`candidate` was traced."""
        plan = candidate.plan
        floors = self._traced[self._key(candidate, plan.mlp_chunks)]
        for checkpoint, seconds in zip((plan.checkpoint, "none"), candidate.floor_s, strict=True):
            # Plans alike differ in casts of parameters alone: what the fewest take counts.
            floors[checkpoint] = min(seconds, floors.get(checkpoint, math.inf))

    def of(self, candidate: Candidate) -> float:
        """Seconds of a step that it takes at least; 0 where nothing like it was traced."""
        plan = candidate.plan
        # An MLP in pieces has all that a whole one has, and full checkpoints what selective ones recompute.
        less = {"none": ("none",), "selective": ("none", "selective"), "full": ("none", "selective", "full")}
        floors = (
            self._traced.get(self._key(candidate, chunks), {}).get(checkpoint, 0.0)
            for chunks in {1, plan.mlp_chunks}
            for checkpoint in less[plan.checkpoint]
        )
        return _OF_PARAMETERS * max(floors)

    def _key(self, candidate: Candidate, chunks: int) -> Any:
        """What decides over the kernels of the rank that is traced, and over where its sequence axes send."""
        plan = candidate.plan
        if plan not in self._spreads:
            placement = Placement.on(self._hardware, plan.world_size)
            groups = axis_groups(plan, farthest_rank(plan, placement))
            self._spreads[plan] = tuple(
                placement.spread(groups[axis]) for axis in _OWN_AXES if axis in groups
            )
        degrees = plan.ring, plan.ulysses, plan.tp
        return degrees, self._spreads[plan], plan.overlap_ulysses, plan.two_level, candidate.passes, chunks
