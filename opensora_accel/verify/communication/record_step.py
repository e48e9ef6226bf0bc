"""A training step's communication at the true world size, recorded in one process without sending anything."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from opensora_accel.communications import without_comparing_inputs
from opensora_accel.fsdp import param_groups
from opensora_accel.observe import (
    CollectiveCall,
    CollectiveRecorder,
    Exchanges,
    MeshShape,
    ModelFn,
    OtherRanks,
    Run,
    Step,
    accelerator_stand_ins,
    are_settled,
    call_to_its_end,
    fake_world,
    group_of,
    launcher_environment,
    merge_exchanges,
    without_values,
)
from opensora_accel.plan import Plan

# Sizes that ranks send each other are known once all have been recorded; then all are recorded again with them.
_MOST_RECORDINGS = 4


@dataclass(frozen=True)
class Parameter:
    """What is known of a parameter once the step is done."""

    name: str
    # The whole parameter's.
    num_elements: int
    # It asks for a gradient, and has one, or had one (of sharded ones, where any has: a step may clear them).
    is_trained: bool
    # Ranks that hold a part of it each, where FSDP2 made it a DTensor.
    shard_ranks: int | None = None
    # What FSDP2 sends of it: the dim that is cut, filled up to a multiple of `shard_ranks`.
    padded_elements: int | None = None
    # FSDP2 keeps it gathered after forward, as it does by default with the root module's own parameters.
    may_stay_gathered: bool = False
    # One was seen after a backward, or is there.
    has_gradient: bool = False


@dataclass(frozen=True)
class RankRecord:
    """One rank's step."""

    rank: int
    calls: tuple[CollectiveCall, ...]
    parameters: tuple[Parameter, ...]
    num_backwards: int
    # For gathers that are compressed, how many elements a message of so many bytes has.
    elements_of_message: Mapping[int, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """What every recorded rank has called, in order."""

    shape: MeshShape
    ranks: tuple[RankRecord, ...]
    # What this record does not show.
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """Rows in the order of their first call: phase, collective, group, calls and bytes sent, source line."""
        # By phase, kind, group and source, on each rank.
        calls: dict[tuple[str, str, str, str], Counter[int]] = defaultdict(Counter)
        sent_bytes: dict[tuple[str, str, str, str], Counter[int]] = defaultdict(Counter)
        for rank in self.ranks:
            for call in rank.calls:
                key = (call.phase, call.kind, str(group_of(call.group, self.shape)), call.source)
                calls[key][rank.rank] += 1
                sent_bytes[key][rank.rank] += call.sent_bytes
        rows = [("phase", "collective", "over", "calls", "sent bytes", "source")]
        for key in calls:
            most_calls, most_bytes = max(calls[key].values()), max(sent_bytes[key].values())
            rows.append((*key[:3], f"{most_calls:,}", f"{most_bytes:,}", key[3]))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        shown = ", ".join(str(rank.rank) for rank in self.ranks)
        whose = "of the busiest of ranks" if len(self.ranks) > 1 else "of rank"
        lines = [f"{self.shape}, {self.shape.world_size:,} ranks; calls and bytes {whose} {shown}"]
        for row in rows:
            left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
            right = [cell.rjust(width) for cell, width in zip(row[3:5], widths[3:], strict=True)]
            lines.append("  ".join([*left, *right, row[5]]))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""

        def flat(call: CollectiveCall) -> dict[str, Any]:
            values = dataclasses.asdict(call)
            return values | values.pop("where")

        return {
            "mesh": dict(self.shape.degrees),
            "world_size": self.shape.world_size,
            "plan": None if self.shape.plan is None else self.shape.plan.to_dict(),
            "ranks": [
                {
                    "rank": rank.rank,
                    "num_backwards": rank.num_backwards,
                    "sent_bytes": sum(call.sent_bytes for call in rank.calls),
                    "calls": [
                        {**flat(call), "over": str(group_of(call.group, self.shape))} for call in rank.calls
                    ],
                    "parameters": [dataclasses.asdict(parameter) for parameter in rank.parameters],
                }
                for rank in self.ranks
            ],
            "notes": list(self.notes),
        }


def record_step(
    step: Step,
    model_fn: ModelFn,
    mesh: Plan | Mapping[str, int] | MeshShape,
    *,
    ranks: int | Sequence[int] = 0,
    data_axes: Sequence[str] | None = None,
    fake_tensors: bool = True,
) -> Record:
    """What `step(model, run)` communicates, on each of `ranks` of the mesh, one after the other in this process.

    The backend sends nothing, so there may be 1,024 ranks; fake tensors hold nothing, so the model may have its true
    size. The step is called as on a real rank: it applies the plan, makes its input, and runs forward and backward.
    With a Plan it calls `opensora_accel.init_parallel(run.plan, "cpu")` itself.

    Args:
        model_fn: builds the model on the CPU; the same on every rank.
        mesh: a Plan, or axes and degrees.
        data_axes: of a mesh given as axes, those whose ranks see different samples.
        fake_tensors: False for a step that reads values (`.item()`, `.numpy()`): it then needs the model's memory,
            and the values are those of one rank.

    Raises:
        ValueError: a process group exists already; a rank outside of the mesh; a step that reads values of fake
            tensors. What the step itself raises passes through.
    """
    shape = mesh if isinstance(mesh, MeshShape) else MeshShape.of(mesh, data_axes)
    wanted = [ranks] if isinstance(ranks, int) else list(ranks)
    outside = [rank for rank in wanted if not 0 <= rank < shape.world_size]
    if outside or not wanted or len(set(wanted)) < len(wanted):
        raise ValueError(
            f"ranks must be different ranks of the mesh, from 0 to {shape.world_size - 1} ({shape}); got {wanted}"
        )
    # Sizes that ranks send each other may decide about further ones: repeat until nothing new is said.
    known: Exchanges = {}
    for _ in range(_MOST_RECORDINGS):
        others = {rank: OtherRanks(known) for rank in wanted}
        found = tuple(
            _record_rank(step, model_fn, shape, fake_tensors, others[rank], rank) for rank in wanted
        )
        exchanges = merge_exchanges({rank: each.given for rank, each in others.items()})
        if are_settled(exchanges, known):
            break
        known = exchanges
    return Record(shape, found, _notes(found))


def _record_rank(
    step: Step, model_fn: ModelFn, shape: MeshShape, fake_tensors: bool, others: OtherRanks, rank: int
) -> RankRecord:
    # A function, so that one rank's model is gone before the next one's is built.
    run = Run(shape, rank, shape.data_rank(rank), shape.data_size)
    with fake_world(rank, shape.world_size), without_values(fake_tensors), others:
        model = call_to_its_end("model_fn()", model_fn)
        recorder = CollectiveRecorder(dict(model.named_parameters()))
        # In the same surroundings as where gradients are compared, so that one step serves both.
        with launcher_environment(run), accelerator_stand_ins(), without_comparing_inputs(), recorder:
            call_to_its_end("step(model, run)", step, model, run)
        parameters = _parameters(model, recorder.with_gradient)
        elements = _elements_of_messages(model)
    return RankRecord(rank, tuple(recorder.calls), parameters, recorder.num_backwards, elements)


def _elements_of_messages(model: nn.Module) -> dict[int, int]:
    """How many elements a message of so many bytes has, of all compressed gathers that have run."""
    elements: dict[int, int] = {}
    for module in model.modules():
        for group in param_groups(module) if isinstance(module, FSDPModule) else ():
            elements |= getattr(group._all_gather_comm, "elements_of_message", {})
    return elements


def _parameters(model: nn.Module, with_gradient: frozenset[str]) -> tuple[Parameter, ...]:
    named, kept = dict(model.named_parameters()), _kept_by_root(model)
    seen = with_gradient | {name for name, parameter in named.items() if parameter.grad is not None}
    # A step that clears its gradients leaves nothing to look at. Where none was followed either, whatever
    # asks for a gradient counts as trained.
    cleared = all(parameter.grad is None for parameter in named.values())
    parameters = []
    for name, parameter in named.items():
        is_followed = bool(with_gradient) and not isinstance(parameter, DTensor)
        is_trained = parameter.requires_grad and (name in seen or (cleared and not is_followed))
        sharding = _sharding(parameter)
        parameters.append(
            Parameter(name, parameter.numel(), is_trained, *sharding, id(parameter) in kept, name in seen)
        )
    return tuple(parameters)


def _kept_by_root(model: nn.Module) -> set[int]:
    """The parameters that FSDP2's root holds itself and keeps, where `reshard_after_forward` does not say otherwise."""
    kept: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        # torch before 2.8 has no such setting: it always kept them.
        if getattr(state, "_is_root", False) and getattr(state, "_auto_reshard_after_forward", True):
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            kept |= {id(each.sharded_param) for group in groups if group for each in group.fsdp_params}
    return kept


def _sharding(parameter: nn.Parameter) -> tuple[int | None, int | None]:
    if not isinstance(parameter, DTensor):
        return None, None
    shard_ranks, rows = 1, 1
    for dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            shard_ranks *= parameter.device_mesh.size(dim)
            rows = parameter.shape[placement.dim]
    # FSDP2 fills the dim that it cuts up to a multiple of the ranks, so that all of them send as much.
    return shard_ranks, -(-rows // shard_ranks) * shard_ranks * (parameter.numel() // max(rows, 1))


def _notes(found: Sequence[RankRecord]) -> tuple[str, ...]:
    calls = [call for record in found for call in record.calls]
    unknown = sorted({call.operator for call in calls if call.kind == "unknown"})
    recorded = {record.rank for record in found}
    sizes = [call for call in calls if call.kind == "all-gather" and call.dtype == "int64"]
    by_others = [call for call in sizes if not recorded.issuperset(call.group)]
    exchanges = sorted({call.source for call in by_others if not call.where.via.startswith("DDP")})
    notes = [f"bytes of {operator} are not known" for operator in unknown]
    if any(call.where.via.startswith("FSDP1") for call in calls):
        notes.append("gradients are not followed through FSDP1's flat parameters; fully_shard's are")
    if exchanges:
        notes.append(
            "ranks sent each other whole numbers; those that were not recorded are taken to say what the one that asks "
            f"does, so shares that differ look equal: {'; '.join(exchanges)}"
        )
    return tuple(notes)
