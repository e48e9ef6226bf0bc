"""What a Plan promises about communication, compared with what a step was recorded to do.

A promise is a rule on the recorded calls, such as "the gradient of every trained parameter is reduced exactly once
over every axis of mixed". On ring=2 × ulysses=3 with DDP over ulysses only, a record of rank 0 has

    a.weight: all-reduce over ulysses × 1, over ring × 0

so the rule is broken for a.weight on ring, which is how a missing all-reduce is named: "that of a.weight is reduced
never over ring". Nothing is computed for it, so that it is told for 1,024 ranks as for 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
    found = [violation for rank in record.ranks for violation in _of_rank(rank, record)]
    if record.shape.plan is not None:
        found += _missing_attention(record, record.shape.plan)
    return [*dict.fromkeys(found), *disagreements(record)]


def _of_rank(rank: RankRecord, record: Record) -> Iterator[Violation]:
    yield from _strange_groups(rank, record)
    plan = record.shape.plan
    if plan is None:
        yield from gradients_kept_from_data(rank, record.shape)
        return
    yield from _misplaced(rank, record, plan)
    yield from unreduced_gradients(rank, record.shape)
    yield from _wrong_gathers(rank, record, plan)


def _strange_groups(rank: RankRecord, record: Record) -> Iterator[Violation]:
    shape, promised = record.shape, promised_groups(record.shape)
    strange: dict[str, list[Call]] = {}
    for call in rank.calls:
        group = group_of(call.group, shape)
        if group.axes is None or (group.axes and shape.plan is not None and group.axes not in promised):
            strange.setdefault(group.name, []).append(call)
    names = ", ".join(sorted({name_of(axes, shape) for axes in promised if axes}))
    for name, calls in strange.items():
        yield Violation(
            f"ranks communicate over the groups of the mesh only ({names})",
            f"{_counted(calls)} over {name}",
            "take the group from parallel_states.get_parallel_group(name), or from run.mesh[axes].get_group()",
            sources_of(calls),
        )


def _misplaced(rank: RankRecord, record: Record, plan: Plan) -> Iterator[Violation]:
    """Sends along other axes than ring, and all-to-alls of data over other axes than ulysses."""
    for axis, kind, what in (
        ("ring", "send", "messages travel along"),
        ("ulysses", "all-to-all", "tokens and heads are exchanged over"),
    ):
        calls = [call for call in rank.calls if call.kind == kind and call.carries_numbers]
        wrong: dict[str, list[Call]] = {}
        for call in calls:
            along = _axes_of(call, rank, record)
            if along and along != (axis,):
                wrong.setdefault(name_of(along, record.shape), []).append(call)
        for name, misplaced in wrong.items():
            yield Violation(
                f"{what} {axis} only ({axis}={getattr(plan, axis)})",
                f"{_counted(misplaced)} over {name}",
                f"pass the {axis} group, or give the plan the degree that the step uses",
                sources_of(misplaced),
            )


def _missing_attention(record: Record, plan: Plan) -> Iterator[Violation]:
    for axis, kind in (("ring", "send"), ("ulysses", "all-to-all")):
        degree = getattr(plan, axis)
        if degree == 1:
            continue
        calls = {rank.rank: _calls_along(rank, record, axis, kind) for rank in record.ranks}
        # All ranks together: one without heads or tokens has nothing to send.
        if not any(call.phase in _FORWARD for of_rank in calls.values() for call in of_rank):
            yield Violation(
                f"attention needs {kind}s over {axis} ({axis}={degree})",
                "the forward has none",
                "apply the plan to the model (shardformer.shard), or set the degree to 1",
            )
        for rank in record.ranks:
            if axis == "ring":
                yield from _broken_rounds(calls[rank.rank], degree)
            yield from _missing_duals(rank, calls[rank.rank], axis, kind)


def _calls_along(rank: RankRecord, record: Record, axis: str, kind: str) -> list[Call]:
    calls = [call for call in rank.calls if call.kind == kind and call.carries_numbers]
    return [call for call in calls if _axes_of(call, rank, record) == (axis,)]


def _broken_rounds(sends: Sequence[Call], degree: int) -> Iterator[Violation]:
    for phases in (_FORWARD, (RECOMPUTE,), (BACKWARD,)):
        some = [call for call in sends if call.phase in phases]
        over = len(some) % (degree - 1)
        if over:
            yield Violation(
                f"a ring passes each block on {degree - 1} times: sends come in rounds of as many (ring={degree})",
                f"{phases[0]} has {len(some)} sends along ring, {over} more than whole rounds",
                "send at every step but the last; where there are fewer tokens than ranks, record with more",
                sources_of(some),
            )


def _missing_duals(rank: RankRecord, calls: Sequence[Call], axis: str, kind: str) -> Iterator[Violation]:
    there = [call for call in calls if call.phase in _FORWARD]
    back = [call for call in calls if call.phase == BACKWARD]
    # Frozen layers may need no gradient of their input.
    least = len(there) if all(parameter.is_trained for parameter in rank.parameters) else min(1, len(there))
    if rank.num_backwards and len(back) < least:
        yield Violation(
            f"what travels over {axis} in forward has its gradient travel back: backward has a dual of each {kind}",
            f"there are {len(there)} {kind}s over {axis} in forward, and {len(back)} in backward",
            "use the differentiable communication (opensora_accel.communications), not torch.distributed's",
            sources_of([*there, *back]),
        )


def _wrong_gathers(rank: RankRecord, record: Record, plan: Plan) -> Iterator[Violation]:
    shape, shard_axes = record.shape, used(SHARD_AXES, record.shape)
    gathers = [c for c in rank.calls if c.kind == "all-gather" and c.is_by_fsdp and len(c.group) > 1]
    name = name_of(shard_axes, shape) if shard_axes else "one rank"
    if plan.sharding == "none" or not shard_axes:
        if gathers:
            yield Violation(
                f'parameters are whole on every rank (sharding="{plan.sharding}", {name})',
                f"FSDP gathers them over {_names(gathers, record)}",
                "set sharding to zero3 (or zero2) in the plan, or leave fully_shard out",
                sources_of(gathers),
            )
        return
    wrong = [call for call in gathers if group_of(call.group, shape).axes != shard_axes]
    if wrong:
        yield Violation(
            f"parameters are sharded over {name}",
            f"FSDP gathers them over {_names(wrong, record)}",
            "give fully_shard that mesh (opensora_accel.fsdp.shard_parameters does)",
            sources_of(wrong),
        )
        return
    yield from _gathered_amount(rank, plan, gathers, name)


def _gathered_amount(rank: RankRecord, plan: Plan, gathers: Sequence[Call], name: str) -> Iterator[Violation]:
    sharded = [parameter for parameter in rank.parameters if parameter.padded_elements is not None]
    whole = sum(parameter.padded_elements or 0 for parameter in sharded)
    gathered = sum(call.num_elements * len(call.group) for call in gathers)
    has_backward = rank.num_backwards > 0
    often = 2 if plan.sharding == "zero3" and has_backward else 1
    steps = range(1, max(rank.num_backwards, 1) + 1)
    # Parameters that need no gradient may not be needed again in backward.
    once = sum(p.padded_elements or 0 for p in sharded if p.may_stay_gathered)
    is_relaxed = not all(parameter.is_trained for parameter in sharded)
    least = whole if often == 1 or is_relaxed else 2 * whole - once
    if whole and any(least * n <= gathered <= often * whole * n for n in steps):
        return
    yield Violation(
        f"{plan.sharding} gathers every parameter {'twice' if often == 2 else 'once'} a step over {name}: "
        f"{often * whole:,} elements",
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
    calls = list(calls)
    kinds = dict.fromkeys(call.kind for call in calls)
    return ", ".join(f"{sum(call.kind == kind for call in calls)} × {kind}" for kind in kinds)


def _names(calls: Iterable[Call], record: Record) -> str:
    return " and ".join(dict.fromkeys(group_of(call.group, record.shape).name for call in calls))
