"""What a Plan promises about communication, compared with what a step was recorded to do.

A promise is a rule on the recorded calls, such as "the gradient of every trained parameter is reduced exactly once
over every axis of mixed". On ring=2 × ulysses=3 with DDP over ulysses only, a record of rank 0 has

    a.weight: all-reduce over ulysses × 1, over ring × 0

so the rule is broken for a.weight on ring, which is how a missing all-reduce is named: "that of a.weight is reduced
never over ring". Nothing is computed for it, so that it is told for 1,024 ranks as for 6.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from opensora_accel.plan import Plan
from opensora_accel.verify.communication.agreement import Violation, disagreements, sources_of
from opensora_accel.verify.communication.gradients import gradients_kept_from_data, unreduced_gradients
from opensora_accel.verify.communication.groups import (
    SHARD_AXES,
    axes_between,
    group_of,
    name_of,
    promised_groups,
    used,
)
from opensora_accel.verify.communication.record import AFTER, BACKWARD, FORWARD, RECOMPUTE, Call
from opensora_accel.verify.communication.record_step import RankRecord, Record

_FORWARD = (FORWARD, AFTER)  # a second microbatch's forward comes after the first one's backward
_TRAVELS = {"ring": "send", "ulysses": "all-to-all"}
"""What attention sends over each of its axes."""


def broken_promises(record: Record) -> list[Violation]:
    """Everything in a record that its Plan does not promise, and every promise that it does not keep.

    - Every group that is communicated over is one of the Plan's.
    - Messages travel along ring, all-to-alls over ulysses; both appear where the axis has ranks, in whole rounds, and
      come back in backward.
    - The gradient of every trained parameter is reduced exactly once over every axis of mixed.
    - Sharded parameters are gathered over dp_shard × ring × ulysses: once a step under zero2, twice under zero3 (or
      once, where FSDP2 keeps the root module's own, as it does by default).
    - The ranks that were recorded agree: see `disagreements`.

    A mesh that was given as axes promises the first and the last, and that the gradient of every whole parameter is
    reduced over every data axis at least once.
    """
    plan = record.shape.plan
    found: list[Violation] = []
    for rank in record.ranks:
        found += strange_groups(rank, record)
        if plan is None:
            found += gradients_kept_from_data(rank, record.shape)
        else:
            found += misplaced_calls(rank, record, plan)
            found += unreduced_gradients(rank, record.shape)
            found += wrong_gathers(rank, record, plan)
    if plan is not None:
        for axis in _TRAVELS:
            found += missing_attention(record, axis, getattr(plan, axis))
    return [*dict.fromkeys(found), *disagreements(record)]


def strange_groups(rank: RankRecord, record: Record) -> Iterator[Violation]:
    """Calls over groups that the mesh does not have."""
    shape, promised = record.shape, promised_groups(record.shape)
    strange: dict[str, list[Call]] = defaultdict(list)
    for call in rank.calls:
        group = group_of(call.group, shape)
        if group.axes is None or (group.axes and shape.plan is not None and group.axes not in promised):
            strange[group.name].append(call)
    names = ", ".join(sorted({name_of(axes, shape) for axes in promised if axes}))
    for name, calls in strange.items():
        yield Violation(
            f"ranks communicate over the groups of the mesh only ({names})",
            f"{_counted(calls)} over {name}",
            "take the group from parallel_states.get_parallel_group(name), or from run.mesh[axes].get_group()",
            sources_of(calls),
        )


def misplaced_calls(rank: RankRecord, record: Record, plan: Plan) -> Iterator[Violation]:
    """Sends along other axes than ring, and all-to-alls of data over other axes than ulysses."""
    rules = {"ring": "messages travel along", "ulysses": "tokens and heads are exchanged over"}
    for axis, kind in _TRAVELS.items():
        misplaced: dict[str, list[Call]] = defaultdict(list)
        for call in rank.calls:
            along = _axes_of(call, rank, record)
            if call.kind == kind and call.carries_numbers and along and along != (axis,):
                misplaced[name_of(along, record.shape)].append(call)
        for name, calls in misplaced.items():
            yield Violation(
                f"{rules[axis]} {axis} only ({axis}={getattr(plan, axis)})",
                f"{_counted(calls)} over {name}",
                f"pass the {axis} group, or give the plan the degree that the step uses",
                sources_of(calls),
            )


def missing_attention(record: Record, axis: str, degree: int) -> Iterator[Violation]:
    """An axis of ranks over which attention sends nothing, not in whole rounds, or nothing back."""
    kind = _TRAVELS[axis]
    if degree == 1:
        return
    along = {
        rank.rank: [
            call
            for call in rank.calls
            if call.kind == kind and call.carries_numbers and _axes_of(call, rank, record) == (axis,)
        ]
        for rank in record.ranks
    }
    # All ranks together: one without heads or tokens has nothing to send.
    if not any(call.phase in _FORWARD for calls in along.values() for call in calls):
        yield Violation(
            f"attention needs {kind}s over {axis} ({axis}={degree})",
            "the forward has none",
            "apply the plan to the model (shardformer.shard), or set the degree to 1",
        )
    for rank in record.ranks:
        calls = along[rank.rank]
        for phases in (_FORWARD, (RECOMPUTE,), (BACKWARD,)) if axis == "ring" else ():
            of_phase = [call for call in calls if call.phase in phases]
            over = len(of_phase) % (degree - 1)
            if over:
                yield Violation(
                    f"a ring passes each block on {degree - 1} times: sends come in rounds of as many (ring={degree})",
                    f"{phases[0]} has {len(of_phase)} sends along ring, {over} more than whole rounds",
                    "send at every step but the last; where there are fewer tokens than ranks, record with more",
                    sources_of(of_phase),
                )
        there = [call for call in calls if call.phase in _FORWARD]
        back = [call for call in calls if call.phase == BACKWARD]
        # Frozen layers may need no gradient of their input.
        all_trained = all(parameter.is_trained for parameter in rank.parameters)
        if rank.num_backwards and len(back) < (len(there) if all_trained else min(1, len(there))):
            yield Violation(
                f"what travels over {axis} in forward has its gradient travel back: backward has a dual of each {kind}",
                f"there are {len(there)} {kind}s over {axis} in forward, and {len(back)} in backward",
                "use the differentiable communication (opensora_accel.communications), not torch.distributed's",
                sources_of([*there, *back]),
            )


def wrong_gathers(rank: RankRecord, record: Record, plan: Plan) -> Iterator[Violation]:
    """Parameters that FSDP gathers over other ranks than the plan's, or too often, or not at all."""
    shape, shard_axes = record.shape, used(SHARD_AXES, record.shape)
    gathers = [
        call for call in rank.calls if call.kind == "all-gather" and call.is_by_fsdp and len(call.group) > 1
    ]
    name = name_of(shard_axes, shape) if shard_axes else "one rank"
    wrong = [call for call in gathers if group_of(call.group, shape).axes != shard_axes]
    over = " and ".join(dict.fromkeys(group_of(call.group, shape).name for call in wrong or gathers))
    if plan.sharding == "none" or not shard_axes:
        if gathers:
            yield Violation(
                f'parameters are whole on every rank (sharding="{plan.sharding}", {name})',
                f"FSDP gathers them over {over}",
                "set sharding to zero3 (or zero2) in the plan, or leave fully_shard out",
                sources_of(gathers),
            )
        return
    if wrong:
        yield Violation(
            f"parameters are sharded over {name}",
            f"FSDP gathers them over {over}",
            "give fully_shard that mesh (opensora_accel.fsdp.shard_parameters does)",
            sources_of(wrong),
        )
        return
    sharded = [parameter for parameter in rank.parameters if parameter.padded_elements is not None]
    whole = sum(parameter.padded_elements or 0 for parameter in sharded)
    gathered = sum(call.num_elements * len(call.group) for call in gathers)
    often = 2 if plan.sharding == "zero3" and rank.num_backwards else 1
    least = most = often * whole
    if often == 2:
        # The root's own parameters may stay gathered, and those without a gradient may not be needed in backward.
        all_trained = all(parameter.is_trained for parameter in sharded)
        kept = (p.padded_elements or 0 for p in sharded if p.may_stay_gathered or not all_trained)
        least -= sum(kept)
    # Several backward passes may gather as often.
    steps = range(1, max(rank.num_backwards, 1) + 1)
    if not whole or not any(least * n <= gathered <= most * n for n in steps):
        yield Violation(
            f"{plan.sharding} gathers every parameter {'twice' if often == 2 else 'once'} a step over {name}: "
            f"{most:,} elements",
            f"{gathered:,} elements were gathered" if whole else "no parameter is sharded",
            "apply fully_shard to every block and to the model, with reshard_after_forward="
            f"{plan.sharding == 'zero3'} (opensora_accel.fsdp.shard_parameters does)",
            sources_of(gathers),
        )


def _axes_of(call: Call, rank: RankRecord, record: Record) -> tuple[str, ...] | None:
    """The axes that a call runs along: a message runs between its two ends, whatever group it was given."""
    if call.is_point_to_point and call.peer is not None:
        return axes_between(rank.rank, call.peer, record.shape)
    return group_of(call.group, record.shape).axes


def _counted(calls: Iterable[Call]) -> str:
    kinds = [call.kind for call in calls]
    return ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
