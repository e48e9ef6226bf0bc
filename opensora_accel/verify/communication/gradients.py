"""Whether the gradient of every parameter is reduced over the axes that it should be, and how often.

Gradients of whole parameters are followed by name into the collectives. Those that FSDP2 shards are counted by
elements. With P = 3 shards and a parameter of 10 rows, FSDP2 pads it to 12: the reduce-scatters must hold 10 to 12
rows in all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from opensora_accel.plan import MIXED_AXES
from opensora_accel.verify.communication.agreement import Violation, sources_of
from opensora_accel.verify.communication.groups import group_of, used
from opensora_accel.verify.communication.record import BACKWARD, FORWARD, Call
from opensora_accel.verify.communication.record_step import Parameter, RankRecord
from opensora_accel.verify.meshes import MeshShape

_LEADS_ELSEWHERE = ("broadcast", "scatter", "recv", "barrier")
"""Kinds by which no rank gets the gradients of all others. Any other may be a part of an average by hand."""
_NUM_SHOWN = 3
_REMEDY = (
    'average over parallel_states.get_parallel_group("mixed") (DDP\'s process_group, or the mesh of fully_shard), '
    "and over nothing else"
)


def unreduced_gradients(rank: RankRecord, shape: MeshShape) -> Iterator[Violation]:
    """Gradients that are not reduced exactly once over every axis of mixed.

    Several backward passes may reduce as often: DDP without `no_sync` does. Under FSDP1 nothing can be said, and the
    record's notes say so.
    """
    axes = used(MIXED_AXES, shape)
    if not axes or not rank.num_backwards or _uses_fsdp1(rank):
        return
    rule = f"the gradient of every trained parameter is reduced exactly once over mixed ({' × '.join(axes)})"
    reductions = [call for call in rank.calls if call.kind in ("all-reduce", "reduce-scatter")]
    trained = [parameter for parameter in rank.parameters if parameter.is_trained]
    whole = [parameter for parameter in trained if parameter.padded_elements is None]
    sharded = [parameter for parameter in trained if parameter.padded_elements is not None]
    if whole:
        yield from _unreduced_by_name(rule, whole, reductions, axes, rank.num_backwards, shape)
    if sharded:
        yield from _unreduced_by_elements(rule, sharded, reductions, axes, rank.num_backwards, shape)


def _unreduced_by_name(
    rule: str,
    parameters: Sequence[Parameter],
    reductions: Sequence[Call],
    axes: tuple[str, ...],
    most: int,
    shape: MeshShape,
) -> Iterator[Violation]:
    times = {parameter.name: dict.fromkeys(axes, 0) for parameter in parameters}
    for call in reductions:
        for name in call.gradients:
            for axis in group_of(call.group, shape).axes or ():
                if axis in times.get(name, ()):
                    times[name][axis] += 1
    alike: dict[tuple[tuple[str, int], ...], list[str]] = defaultdict(list)
    for name, counts in times.items():
        off = tuple((axis, count) for axis, count in counts.items() if not 1 <= count <= most)
        if off:
            alike[off].append(name)
    words = {0: "never", 1: "once", 2: "twice"}
    for off, names in alike.items():
        often = " and ".join(f"{words.get(count, f'{count} times')} over {axis}" for axis, count in off)
        yield Violation(
            rule,
            f"that of {len(names)} of {len(parameters)} parameters ({_list(names)}) is reduced {often}",
            _REMEDY,
            sources_of(call for call in reductions if set(names) & set(call.gradients)),
        )


def _unreduced_by_elements(
    rule: str,
    parameters: Sequence[Parameter],
    reductions: Sequence[Call],
    axes: tuple[str, ...],
    most: int,
    shape: MeshShape,
) -> Iterator[Violation]:
    by_fsdp = [call for call in reductions if call.is_by_fsdp]
    least = sum(parameter.num_elements for parameter in parameters)
    padded = sum(parameter.padded_elements or 0 for parameter in parameters)
    num_shards = max((len(call.group) for call in by_fsdp if call.kind == "reduce-scatter"), default=1)
    reduced = dict.fromkeys(axes, 0)
    for call in by_fsdp:
        # HSDP: what is reduced over the replicas is the shard that the reduce-scatter has left here.
        shards = num_shards if call.kind == "all-reduce" else 1
        for axis in group_of(call.group, shape).axes or ():
            if axis in reduced:
                reduced[axis] += shards * call.num_elements
    off = [axis for axis, count in reduced.items() if not least <= count <= most * padded]
    if off:
        counts = " and ".join(f"{reduced[axis]:,} elements over {axis}" for axis in off)
        exact = f"{least:,} elements" + ("" if least == padded else f" (up to {padded:,} with padding)")
        yield Violation(
            f"{rule}: {exact} of sharded parameters", f"FSDP2 reduces {counts}", _REMEDY, sources_of(by_fsdp)
        )


def gradients_kept_from_data(rank: RankRecord, shape: MeshShape) -> Iterator[Violation]:
    """On a mesh given as axes: gradients of whole parameters that never meet those of other samples.

    They are followed by name. What a call carries beyond that, such as gradients that lie elsewhere than in `.grad`,
    or the parameters themselves, may be what is missed: nothing is said where it is large enough.
    """
    if not rank.num_backwards or _uses_fsdp1(rank):
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
                f"the gradient of {_list(names)} ({len(names)} of {len(sizes)} parameters) is never reduced over "
                f"{axis}",
                f"average it over a group that contains {axis} (DDP's process_group, or all_reduce after backward); "
                f"if ranks along {axis} see the same samples, name the axes that do not in data_axes",
                sources_of(call for call in calls if call.gradients),
            )


def _may_carry(calls: Sequence[Call], sizes: Mapping[str, int], missed: int) -> bool:
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


def _uses_fsdp1(rank: RankRecord) -> bool:
    return any(call.where.via.startswith("FSDP1") for call in rank.calls)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:_NUM_SHOWN]) + (", …" if len(names) > _NUM_SHOWN else "")
