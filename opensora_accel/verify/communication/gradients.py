"""Whether the gradient of every parameter is reduced over the axes that it should be, and how often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opensora_accel.plan import MIXED_AXES
from opensora_accel.verify.communication.agreement import Violation, sources_of
from opensora_accel.verify.communication.groups import group_of, used
from opensora_accel.verify.communication.record import BACKWARD, FORWARD, Call
from opensora_accel.verify.communication.record_step import Parameter, RankRecord
from opensora_accel.verify.meshes import MeshShape

_REDUCTIONS = ("all-reduce", "reduce-scatter")
_LEADS_ELSEWHERE = ("broadcast", "scatter", "recv", "barrier")
"""Kinds by which no rank gets the gradients of all others. Any other may be a part of an average by hand."""
_SHOWN = 3


def unreduced_gradients(rank: RankRecord, shape: MeshShape) -> Iterator[Violation]:
    """Violations of one rank. Several backward passes may reduce as often: DDP without `no_sync` does.

    Gradients of whole parameters are followed by name, from `.grad` (or DDP's buckets) into the collective. Those
    that FSDP2 shards are counted by elements, which must be those of its parameters, padded as it pads them. Under
    FSDP1 nothing can be said, and the record's notes say so.
    """
    axes = used(MIXED_AXES, shape)
    if not axes or not rank.num_backwards or _is_by_fsdp1(rank):
        return
    reductions = [call for call in rank.calls if call.kind in _REDUCTIONS]
    trained = [parameter for parameter in rank.parameters if parameter.is_trained]
    whole = [parameter for parameter in trained if parameter.padded_elements is None]
    sharded = [parameter for parameter in trained if parameter.padded_elements is not None]
    if whole:
        yield from _by_name(whole, reductions, axes, rank.num_backwards, shape)
    if sharded:
        yield from _by_elements(sharded, reductions, axes, rank.num_backwards, shape)


def _by_name(
    parameters: Sequence[Parameter],
    reductions: Sequence[Call],
    axes: tuple[str, ...],
    most: int,
    shape: MeshShape,
) -> Iterator[Violation]:
    carrying = [call for call in reductions if call.gradients]
    times: dict[str, dict[str, int]] = {parameter.name: dict.fromkeys(axes, 0) for parameter in parameters}
    for call in carrying:
        for name in call.gradients:
            for axis in group_of(call.group, shape).axes or ():
                if axis in times.get(name, ()):
                    times[name][axis] += 1
    wrong: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for name, counts in times.items():
        off = tuple((axis, count) for axis, count in counts.items() if not 1 <= count <= most)
        if off:
            wrong.setdefault(off, []).append(name)
    for off, names in wrong.items():
        shown = _shown(names)
        often = " and ".join(f"{_often(count)} over {axis}" for axis, count in off)
        yield Violation(
            _rule(axes),
            f"that of {len(names)} of {len(parameters)} parameters ({shown}) is reduced {often}",
            _REMEDY,
            sources_of(call for call in carrying if set(names) & set(call.gradients)),
        )


def _by_elements(
    parameters: Sequence[Parameter],
    reductions: Sequence[Call],
    axes: tuple[str, ...],
    most: int,
    shape: MeshShape,
) -> Iterator[Violation]:
    by_fsdp = [call for call in reductions if call.is_by_fsdp]
    least = sum(parameter.num_elements for parameter in parameters)
    padded = sum(parameter.padded_elements or 0 for parameter in parameters)
    parts = max((len(call.group) for call in by_fsdp if call.kind == "reduce-scatter"), default=1)
    reduced = dict.fromkeys(axes, 0)
    for call in by_fsdp:
        # HSDP: what is reduced over the replicas is the part that the reduce-scatter has left here.
        share = parts if call.kind == "all-reduce" else 1
        for axis in group_of(call.group, shape).axes or ():
            if axis in reduced:
                reduced[axis] += share * call.num_elements
    off = [axis for axis, count in reduced.items() if not least <= count <= most * padded]
    if off:
        counts = " and ".join(f"{reduced[axis]:,} elements over {axis}" for axis in off)
        exact = f"{least:,} elements" + ("" if least == padded else f" (up to {padded:,} with padding)")
        yield Violation(
            f"{_rule(axes)}: {exact} of sharded parameters",
            f"FSDP2 reduces {counts}",
            _REMEDY,
            sources_of(by_fsdp),
        )


def gradients_kept_from_data(rank: RankRecord, shape: MeshShape) -> Iterator[Violation]:
    """Violations of one rank of a mesh given as axes: whole gradients that never meet those of other samples.

    Followed by name. What a call carries beyond that, such as gradients that lie elsewhere than in `.grad`, or the
    parameters themselves, may be what is missed: nothing is said where it is large enough.
    """
    if not rank.num_backwards or _is_by_fsdp1(rank):
        return
    sizes = {p.name: p.num_elements for p in rank.parameters if p.padded_elements is None and p.has_gradient}
    for axis in used(shape.data_axes, shape):
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
                f"the gradient of {_shown(names)} ({len(names)} of {len(sizes)} parameters) is never reduced over "
                f"{axis}",
                f"average it over a group that contains {axis} (DDP's process_group, or all_reduce after backward); "
                f"if ranks along {axis} see the same samples, name the axes that do not in data_axes",
                sources_of(call for call in calls if call.gradients),
            )


def _may_carry(calls: Sequence[Call], sizes: Mapping[str, int], missed: int) -> bool:
    """Whether calls hold as many elements more than those of the gradients that are known to be in them."""
    unknown = 0
    for call in calls:
        known = sum(sizes.get(name, 0) for name in call.gradients)
        is_packed = call.phase == BACKWARD and call.num_elements < known
        if is_packed or _is_hook_that_packs(call):
            return True
        unknown += max(0, call.num_elements - known) if call.carries_numbers else 0
    return unknown >= missed


def _is_hook_that_packs(call: Call) -> bool:
    """DDP's communication hooks, but for the default ones, send something else than the gradients."""
    via = call.where.via
    return via.startswith("torch/distributed/algorithms/") and "default_hooks" not in via


def _is_by_fsdp1(rank: RankRecord) -> bool:
    return any(call.where.via.startswith("FSDP1") for call in rank.calls)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _rule(axes: tuple[str, ...]) -> str:
    return f"the gradient of every trained parameter is reduced exactly once over mixed ({' × '.join(axes)})"


def _often(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


_REMEDY = (
    'average over parallel_states.get_parallel_group("mixed") (DDP\'s process_group, or the mesh of fully_shard), '
    "and over nothing else"
)
