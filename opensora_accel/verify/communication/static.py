"""A training step's communication at the true world size, recorded in one process without sending anything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from opensora_accel.communications.checks import without_comparing_inputs
from opensora_accel.plan import Plan
from opensora_accel.verify.communication.answers import Answers, Exchanges, are_answered, gathered
from opensora_accel.verify.communication.faking import FakeFloats, fake_world
from opensora_accel.verify.communication.record import Recorder
from opensora_accel.verify.communication.recorded import Parameter, RankRecord, Record
from opensora_accel.verify.on_cpu import accelerator_stand_ins, launcher_environment
from opensora_accel.verify.run import ModelFn, Run, Step
from opensora_accel.verify.shapes import MeshShape

_MOST_RECORDINGS = 4
"""Sizes that ranks tell each other are known once all have been recorded; then all are recorded again with them."""

_NOT_FAKE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedMutationAliasingException,
)
_FAKE_MESSAGES = (".numpy() is not supported", "data is not allocated", "Cannot access data pointer")


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
    known: Exchanges = {}
    for _ in range(_MOST_RECORDINGS):
        answers = {rank: Answers(known) for rank in wanted}
        found = tuple(
            _record_rank(step, model_fn, shape, fake_tensors, answers[rank], rank) for rank in wanted
        )
        exchanges = gathered({rank: answer.given for rank, answer in answers.items()})
        if are_answered(exchanges, known):
            break
        known = exchanges
    return Record(shape, found, _notes(found))


def _record_rank(
    step: Step,
    model_fn: ModelFn,
    shape: MeshShape,
    fake_tensors: bool,
    answers: Answers,
    rank: int,
) -> RankRecord:
    run = Run(shape, rank, shape.data_rank(rank), shape.data_size)
    with fake_world(rank, shape.world_size), _tensors(fake_tensors), answers:
        model = model_fn()
        recorder = Recorder(dict(model.named_parameters()))
        # As where gradients are compared, so that one step serves both.
        with launcher_environment(run), accelerator_stand_ins(), without_comparing_inputs(), recorder:
            step(model, run)
        parameters = _parameters(model, recorder.with_gradient)
    return RankRecord(rank, tuple(recorder.calls), parameters, recorder.num_backwards)


@contextlib.contextmanager
def _tensors(are_fake: bool) -> Iterator[None]:
    if not are_fake:
        yield
        return
    try:
        with FakeFloats():
            yield
    except (*_NOT_FAKE, RuntimeError) as error:
        if not isinstance(error, _NOT_FAKE) and not any(text in str(error) for text in _FAKE_MESSAGES):
            raise
        raise ValueError(
            "a step is recorded on tensors without values, and this one reads some "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); keep .item() and .numpy() out of it (return the "
            "tensor itself), or, in Python, call record_step(..., fake_tensors=False), which needs the model's memory"
        ) from error


def _parameters(model: nn.Module, with_gradient: frozenset[str]) -> tuple[Parameter, ...]:
    named, kept = dict(model.named_parameters()), _kept_by_root(model)
    seen = with_gradient | {name for name, parameter in named.items() if parameter.grad is not None}
    cleared = all(parameter.grad is None for parameter in named.values())
    found = []
    for name, parameter in named.items():
        is_followed = bool(with_gradient) and not isinstance(parameter, DTensor)
        is_trained = parameter.requires_grad and (name in seen or (cleared and not is_followed))
        shard_ranks, padded = _sharding(parameter)
        found.append(
            Parameter(
                name,
                parameter.numel(),
                is_trained,
                shard_ranks,
                padded,
                may_stay_gathered=id(parameter) in kept,
                has_gradient=name in seen,
            )
        )
    return tuple(found)


def _kept_by_root(model: nn.Module) -> set[int]:
    """The parameters that FSDP2's root holds itself, unless it was told what to do with them after forward."""
    found: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        # torch before 2.8 was not to be told: it always kept them.
        if getattr(state, "_is_root", False) and getattr(state, "_auto_reshard_after_forward", True):
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            found |= {id(each.sharded_param) for group in groups if group for each in group.fsdp_params}
    return found


def _sharding(parameter: nn.Parameter) -> tuple[int | None, int | None]:
    if not isinstance(parameter, DTensor):
        return None, None
    shard_ranks, rows = 1, 1
    for dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            shard_ranks *= parameter.device_mesh.size(dim)
            rows = parameter.shape[placement.dim]
    return shard_ranks, -(-rows // shard_ranks) * shard_ranks * (parameter.numel() // max(rows, 1))


def _notes(found: Sequence[RankRecord]) -> tuple[str, ...]:
    calls = [call for record in found for call in record.calls]
    unknown = sorted({call.operator for call in calls if call.kind == "unknown"})
    recorded = {record.rank for record in found}
    exchanges = sorted(
        {
            call.source
            for call in calls
            if call.dtype == "int64"
            and call.kind == "all-gather"
            and not recorded.issuperset(call.group)
            and not call.where.via.startswith("DDP")
        }
    )
    notes = [f"bytes of {operator} are not known" for operator in unknown]
    if any(call.where.via.startswith("FSDP1") for call in calls):
        notes.append("gradients are not followed through FSDP1's flat parameters; fully_shard's are")
    if exchanges:
        notes.append(
            "ranks told each other whole numbers; those that were not recorded are taken to say what the one that asks "
            f"does, so shares that differ look equal: {'; '.join(exchanges)}"
        )
    return tuple(notes)
