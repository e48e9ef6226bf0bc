"""What a Plan promises about communication, compared with what a step was recorded to do.

A promise is a rule on the recorded calls, such as "the gradient of every trained parameter is reduced exactly once
over every axis of mixed". On ring=2 × ulysses=3 with DDP over ulysses only, a record of rank 0 has

    a.weight: all-reduce over ulysses × 1, over ring × 0

so the rule is broken for a.weight on ring, which is how a missing all-reduce is named: "that of a.weight is reduced
never over ring". Nothing is computed for it, so that it is checked for 1,024 ranks as for 6.

Where the plan compresses, an all-to-all of FSDP2 counts as a reduce-scatter, and a gather counts the elements that its
messages hold. Where it has two levels, their groups count as the group that they are levels of.

Gradients of whole parameters are followed by name into the collectives. Those that FSDP2 shards are counted by
elements: of a parameter of 10 rows on 3 shards, which FSDP2 pads to 12, reduce-scatters must hold 10 to 12 rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from opensora_accel.links import levels_of
from opensora_accel.observe import (
    AFTER,
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    CollectiveCall,
    MeshShape,
    axes_between,
    group_of,
    name_of,
    promised_groups,
)
from opensora_accel.plan import MIXED_AXES, Plan
from opensora_accel.verify.communication.agreement import Violation, disagreements, sources_of
from opensora_accel.verify.communication.record_step import RankRecord, Record

_FORWARD = (FORWARD, AFTER)  # a second microbatch's forward comes after the first one's backward
_REDUCTIONS = ("all-reduce", "reduce-scatter")
# What FSDP2 sends with reduce_dtype="bf16": numbers that are rounded are exchanged, and added up by who gets them.
_REDUCTIONS_BY_FSDP = (*_REDUCTIONS, "all-to-all")
# Kinds by which no rank gets the gradients of all others. Any other may be a part of an average by hand.
_LEADS_ELSEWHERE = ("broadcast", "scatter", "recv", "barrier")
_NUM_SHOWN = 3
_AVERAGE_OVER_MIXED = (
    'average over parallel_states.get_parallel_group("mixed") (DDP\'s process_group, or the mesh of fully_shard), '
    "and over nothing else"
)
# What attention sends over each of its axes.
_TRAVELS = {"ring": "send", "ulysses": "all-to-all"}


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
    violations: list[Violation] = []
    for rank in record.ranks:
        # Nothing can be said of gradients under FSDP1, as the record's notes say.
        uses_fsdp1 = any(call.where.via.startswith("FSDP1") for call in rank.calls)
        has_gradients = rank.num_backwards > 0 and not uses_fsdp1
        # Groups are looked at on any mesh, and all else as far as the mesh promises it.
        violations += strange_groups(rank, record)
        if plan is not None:
            violations += misplaced_calls(rank, record, plan)
        if has_gradients and plan is None:
            violations += gradients_kept_from_data(rank, record.shape)
        elif has_gradients:
            # Several backward passes may reduce as often: DDP without `no_sync` does.
            violations += unreduced_whole_gradients(rank, record.shape)
            violations += unreduced_sharded_gradients(rank, record.shape)
        if plan is not None:
            violations += wrong_gathers(rank, record, plan)
    if plan is not None:
        for axis in _TRAVELS:
            violations += missing_attention(record, axis, getattr(plan, axis))
    return [*dict.fromkeys(violations), *disagreements(record)]


def strange_groups(rank: RankRecord, record: Record) -> Iterator[Violation]:
    """Calls over groups that the mesh does not have."""
    shape, promised, levels = record.shape, promised_groups(record.shape), _levels(record.shape)
    strange: dict[str, list[CollectiveCall]] = defaultdict(list)
    for call in rank.calls:
        group = group_of(call.group, shape)
        if call.group in levels:
            continue
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
        misplaced: dict[str, list[CollectiveCall]] = defaultdict(list)
        for call in rank.calls:
            along = _axes_of(call, rank, record)
            # Gradients that are summed in bf16 travel by all-to-alls too.
            if call.is_by_fsdp and plan.reduce_dtype != "same":
                continue
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
        # What a recomputation sends again is in neither count.
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
    shape, shard_axes = record.shape, record.shape.used(plan.shard_axes)
    gathers = [
        call
        for call in rank.calls
        if call.kind == "all-gather"
        and call.is_by_fsdp
        and len(call.group) > 1
        # Averages that are put together again are no parameters.
        and "foreach_reduce" not in call.where.via
    ]
    name = name_of(shard_axes, shape) if shard_axes else "one rank"
    # Gathers of FSDP over one rank send nothing and are left out above.
    wrong = [call for call in gathers if group_of(call.group, shape).axes != shard_axes]
    over = " and ".join(dict.fromkeys(group_of(call.group, shape).name for call in wrong or gathers))
    if not plan.is_sharded or not shard_axes:
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
    if plan.gather_dtype != "same" and not rank.elements_of_message:
        yield Violation(
            f'parameters are gathered in {plan.gather_dtype} (gather_dtype="{plan.gather_dtype}")',
            f"FSDP gathers them in {', '.join(sorted({call.dtype for call in gathers})) or 'nothing'}",
            "shard them by opensora_accel.fsdp.shard_parameters (shardformer.shard does) with this plan",
            sources_of(gathers),
        )
        return
    sharded = [parameter for parameter in rank.parameters if parameter.padded_elements is not None]
    whole = sum(parameter.padded_elements or 0 for parameter in sharded)
    # A compressed message is counted by the elements that it stands for.
    of_message = rank.elements_of_message if plan.gather_dtype != "same" else {}
    gathered = sum(
        (of_message.get(call.input_bytes, 0) if of_message and call.dtype == "uint8" else call.num_elements)
        * len(call.group)
        for call in gathers
    )
    # zero3 frees the parameters after forward and gathers them again in backward; zero2 keeps them.
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


def unreduced_whole_gradients(rank: RankRecord, shape: MeshShape) -> Iterator[Violation]:
    """Gradients of whole parameters that are not reduced exactly once over every axis of mixed, counted by name."""
    axes = shape.used(MIXED_AXES)
    whole = [p for p in rank.parameters if p.is_trained and p.padded_elements is None]
    reductions = [call for call in rank.calls if call.kind in _REDUCTIONS]
    # How often each parameter's gradient was in a reduction over a group that has this axis.
    times = {parameter.name: dict.fromkeys(axes, 0) for parameter in whole}
    for call in reductions:
        for name in call.gradients:
            for axis in group_of(call.group, shape).axes or ():
                if axis in times.get(name, ()):
                    times[name][axis] += 1
    alike: dict[tuple[tuple[str, int], ...], list[str]] = defaultdict(list)
    for name, counts in times.items():
        off = tuple((axis, count) for axis, count in counts.items() if not 1 <= count <= rank.num_backwards)
        if off:
            alike[off].append(name)
    words = {0: "never", 1: "once", 2: "twice"}
    for off, names in alike.items():
        often = " and ".join(f"{words.get(count, f'{count} times')} over {axis}" for axis, count in off)
        yield Violation(
            _reduced_once(axes),
            f"that of {len(names)} of {len(whole)} parameters ({_list(names)}) is reduced {often}",
            _AVERAGE_OVER_MIXED,
            sources_of(call for call in reductions if set(names) & set(call.gradients)),
        )


def unreduced_sharded_gradients(rank: RankRecord, shape: MeshShape) -> Iterator[Violation]:
    """The same of parameters that FSDP2 shards, counted by elements."""
    axes = shape.used(MIXED_AXES)
    sharded = [p for p in rank.parameters if p.is_trained and p.padded_elements is not None]
    levels, num_shards, slack = _levels(shape), 1, 0
    by_fsdp = [call for call in rank.calls if call.kind in _REDUCTIONS_BY_FSDP and call.is_by_fsdp]
    shard_axes = None if shape.plan is None else shape.used(shape.plan.shard_axes)
    if shard_axes is None:
        num_shards = max((len(call.group) for call in by_fsdp if call.kind == "reduce-scatter"), default=1)
    else:
        num_shards = shape.plan.num_shards if shape.plan is not None else 1
    reduced = dict.fromkeys(axes, 0)
    # Within nodes, and between them: a sum over copies in two levels needs both.
    near, far = 0, 0
    for call in by_fsdp:
        call_axes = group_of(call.group, shape).axes or ()
        if call.group in levels:
            level = levels[call.group]
            # Between nodes travel the parts that the ranks of a node have.
            near += num_shards * call.num_elements if level.is_within else 0
            far += 0 if level.is_within else num_shards * call.num_elements * level.per_node
            slack += num_shards * len(call.group) * level.per_node
            continue
        # HSDP: what is reduced over the replicas is the shard that the reduce-scatter has left here.
        is_between_copies = call.kind == "all-reduce" or (
            call.kind == "all-to-all" and call_axes != shard_axes
        )
        shards = num_shards if is_between_copies else 1
        # A sum in bf16 is filled up to a multiple of the ranks.
        slack += shards * len(call.group) if call.kind == "all-to-all" else 0
        for axis in call_axes:
            if axis in reduced:
                reduced[axis] += shards * call.num_elements
    for axis in {axis for level in levels.values() if not level.is_of_ulysses for axis in level.axes}:
        if axis in reduced:
            # A sum is done where both levels have carried it, and so the lesser counts.
            reduced[axis] += min(near, far)
    # Collectives may carry the padding or leave it out: all counts from the one to the other are right.
    least = sum(parameter.num_elements for parameter in sharded)
    padded = sum(parameter.padded_elements or 0 for parameter in sharded)
    most = rank.num_backwards * padded + slack
    missed = [axis for axis, count in reduced.items() if not least <= count <= most]
    if sharded and missed:
        counted = " and ".join(f"{reduced[axis]:,} elements over {axis}" for axis in missed)
        exact = f"{least:,} elements" + ("" if least == padded else f" (up to {padded:,} with padding)")
        yield Violation(
            f"{_reduced_once(axes)}: {exact} of sharded parameters",
            f"FSDP2 reduces {counted}",
            _AVERAGE_OVER_MIXED,
            sources_of(by_fsdp),
        )


def gradients_kept_from_data(rank: RankRecord, shape: MeshShape) -> Iterator[Violation]:
    """On a mesh given as axes: gradients of whole parameters that never meet those of other samples.

    They are followed by name. What a call carries beyond that, such as gradients that lie elsewhere than in `.grad`,
    or the parameters themselves, may be what is missed: nothing is said where it is large enough.
    """
    # Frozen and unused parameters have no gradient to be kept.
    sizes = {p.name: p.num_elements for p in rank.parameters if p.padded_elements is None and p.has_gradient}
    for axis in shape.used(shape.data_axes):
        calls = [
            call
            for call in rank.calls
            if axis in (group_of(call.group, shape).axes or ())
            and call.phase != FORWARD
            and call.kind not in _LEADS_ELSEWHERE
            and not call.is_by_fsdp
        ]
        carried = {name for call in calls for name in call.gradients}
        names = [name for name in sizes if name not in carried]
        if names and not _may_carry(calls, sizes, sum(sizes[name] for name in names)):
            yield Violation(
                f"the gradient of every whole parameter is reduced over every data axis ({axis}={shape.degree(axis)})",
                f"the gradient of {_list(names)} ({len(names)} of {len(sizes)} parameters) is never reduced over "
                f"{axis}",
                f"average it over a group that contains {axis} (DDP's process_group, or all_reduce after backward); "
                f"if ranks along {axis} see the same samples, name the axes that do not in data_axes",
                sources_of(call for call in calls if call.gradients),
            )


def _may_carry(calls: Sequence[CollectiveCall], sizes: Mapping[str, int], missed: int) -> bool:
    """Whether calls hold as many elements more than those of the gradients that are known to be in them."""
    unknown = 0
    for call in calls:
        known, via = sum(sizes.get(name, 0) for name in call.gradients), call.where.via
        # DDP's communication hooks, but for the default ones, send something else than the gradients.
        is_hook_that_packs = via.startswith("torch/distributed/algorithms/") and "default_hooks" not in via
        if is_hook_that_packs or (call.phase == BACKWARD and call.num_elements < known):
            return True
        unknown += max(0, call.num_elements - known) if call.carries_numbers else 0
    return unknown >= missed


def _reduced_once(axes: Sequence[str]) -> str:
    return f"the gradient of every trained parameter is reduced exactly once over mixed ({' × '.join(axes)})"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:_NUM_SHOWN]) + (", …" if len(names) > _NUM_SHOWN else "")


class _Level(NamedTuple):
    """One level of a group that the plan has in two."""

    axes: tuple[str, ...]
    is_of_ulysses: bool
    is_within: bool
    per_node: int


@lru_cache(maxsize=64)
def _levels(shape: MeshShape) -> dict[tuple[int, ...], _Level]:
    """The groups of ranks within nodes, and of those at one place of their nodes, where the plan has two levels."""
    plan, levels_by_ranks = shape.plan, dict[tuple[int, ...], _Level]()
    # Without ranks_per_node a recording takes all ranks to be on one machine.
    if plan is None or plan.two_level == "off" or plan.ranks_per_node is None:
        return levels_by_ranks
    ranks, groups = range(shape.world_size), [(shape.groups(("ulysses",)), True)]
    if plan.is_sharded:
        # tp is the innermost axis, and shards are the innermost ranks of mixed.
        inner = plan.num_shards * plan.tp
        groups.insert(0, ([list(ranks[first::inner]) for first in range(inner)], False))
    for lines, is_of_ulysses in groups:
        levels = levels_of(lines, plan.ranks_per_node)
        for of_level, is_within in zip(levels or (), (True, False), strict=False):
            for line in of_level:
                whole = next(each for each in lines if line[0] in each)
                axes = group_of(tuple(whole), shape).axes or ()
                per_node = len(levels[0][0]) if levels else 1
                levels_by_ranks[tuple(line)] = _Level(axes, is_of_ulysses, is_within, per_node)
    return levels_by_ranks


def _axes_of(call: CollectiveCall, rank: RankRecord, record: Record) -> tuple[str, ...] | None:
    """The axes that a call runs along: a message runs between its two ends, whatever group it was given."""
    if call.is_point_to_point and call.peer is not None:
        return axes_between(rank.rank, call.peer, record.shape)
    level = _levels(record.shape).get(call.group)
    return group_of(call.group, record.shape).axes if level is None else level.axes


def _counted(calls: Iterable[CollectiveCall]) -> str:
    kinds = [call.kind for call in calls]
    return ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
