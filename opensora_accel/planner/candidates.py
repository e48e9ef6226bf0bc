"""What is asked of the planner, which Plans there are for it, and what is found out about each.

On 8 GPUs with a model of 12 heads: ulysses may be 1, 2 or 4, and 8 is excluded, because 12 heads are not divisible by
it. With a global batch of 4, dp=8 is excluded: a data rank would have no sample. What is left has, say, ulysses=2 with
four data ranks, or ulysses=4 with two of them and two microbatches; and each with every way to save memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from opensora_accel.documents import MOST_RANKS
from opensora_accel.experimental import has_experiments
from opensora_accel.plan import Plan, check_field
from opensora_accel.planner.foresee import StepParts
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.simulate import Timeline
from opensora_accel.planner.trace import Trace
from opensora_accel.planner.workload import Workload

GIB = 2**30
# No simulation tells plans apart that are within this factor of each other.
_TIED = 1.01
# Bytes of optimizer state for each parameter: two moments, the low-bit ones with a scale for every 256 (4bit: 128).
# Muon has one of the blocks' matrices and two of the rest: 4.03 to 4.24 of all models of the trainer but SANA-Video,
# whose feed-forwards are convolutions, and which has 6.3. Prodigy has two moments, a sum of gradients and the first
# weights.
OPTIMIZERS = {
    "adamw": 8.0,
    "muon": 4.1,
    "prodigy": 16.0,
    "adamw-8bit": 2.03,
    "adamw-fp8": 2.03,
    "adamw-4bit": 1.06,
    "sgd": 0.0,
}
_NOT_UNDER_TP = {"muon": "muon takes whole matrices", "prodigy": "prodigy adds up over whole parameters"}
_CHECKPOINTS = (
    ("none", 0.0),
    ("selective", 0.0),
    ("selective", 1.0),
    ("full", 0.0),
    ("full", 0.5),
    ("full", 1.0),
)
_CHUNKS = (1, 4)


class Frozen(NamedTuple):
    """Weights that lie on a device and do not train."""

    size_bytes: int
    # Which model it is, and who says how large.
    source: str


@dataclass(frozen=True)
class Residents:
    """What is on a device beside the step of the transformer.

    Raises:
        ValueError: an unknown optimizer, or negative bytes.
    """

    optimizer: str = "adamw"
    # A second copy of the weights that are trained, sharded as they are.
    ema: bool = False
    # By the kind that memory is shown with: "text encoder", "vae", ...
    frozen: Mapping[str, Frozen] = field(default_factory=dict)
    # The norm of all gradients is taken, and they are scaled by it.
    clips: bool = True

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}; got {self.optimizer!r}")
        for kind, part in self.frozen.items():
            if part.size_bytes < 0:
                raise ValueError(f"the bytes of a {kind} must be at least 0; got {part.size_bytes}")

    @property
    def state_ratio(self) -> float:
        """Bytes of optimizer state for each byte of fp32 weights."""
        return OPTIMIZERS[self.optimizer] / 4


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Raises:
        ValueError: no ranks, shares that are not above 0, a batch that is none, or ranks without a network.
    """

    # Sizes of clips, and how often each comes.
    mix: tuple[tuple[Workload, float], ...]
    hardware: Hardware
    world_size: int
    precision: str = "bf16"
    residents: Residents = Residents()
    # Samples of an optimizer step over all ranks; None: those of one microbatch of every data rank.
    global_batch: int | None = None
    # Gives a workload with so many samples in a pass: then each data rank has its share of the global batch in one
    # pass, as the trainer does it, and `accumulation` of them. None: a pass has the workload's samples, always.
    resize: Callable[[Workload, int], Workload] | None = None
    accumulation: int = 1
    # Fields of the Plan that are not to be searched.
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.world_size, int) or isinstance(self.world_size, bool) or self.world_size < 1:
            raise ValueError(
                f"the number of GPUs must be a whole number, at least 1; got {self.world_size!r}"
            )
        if not self.mix or any(not share > 0 for _workload, share in self.mix):
            raise ValueError("a mix names at least one size of clips, each with a share above 0")
        if self.global_batch is not None and self.global_batch < 1:
            raise ValueError(f"the global batch is a number of samples, at least 1; got {self.global_batch}")
        if self.world_size > MOST_RANKS:
            raise ValueError(f"plans are for at most {MOST_RANKS:,} GPUs; got {self.world_size:,}")
        for name, value in self.fixed.items():
            check_field(name, value)
        self.hardware.nodes_of(self.world_size)

    def as_run(self, workload: Workload, samples: int = 1) -> Workload:
        """A size of the mix as it runs on the hardware, with so many times the samples in a pass."""
        if self.resize is not None:
            workload = self.resize(workload, samples)
        hardware = self.hardware
        is_fused = workload.fused_optimizer and hardware.runs_ahead
        return replace(workload, fused_optimizer=is_fused, architecture=hardware.architecture)

    @property
    def largest(self) -> Workload:
        return max((workload for workload, _share in self.mix), key=lambda each: each.num_tokens * each.batch)


class Passes(NamedTuple):
    """Microbatches of an optimizer step, and how many times the workload's samples each has on a data rank."""

    accumulation: int = 1
    samples: int = 1


@dataclass(frozen=True)
class Candidate:
    """A Plan, and what it needs and takes."""

    plan: Plan
    passes: Passes
    # In an optimizer step, over all ranks.
    samples: int
    # [low, high], of the device and of an optimizer step.
    memory_bytes: tuple[int, int]
    step_time_s: tuple[float, float]
    expected_s: float
    bytes_by_kind: Mapping[str, int]
    seconds_by_kind: Mapping[str, float]
    # On one rank.
    host_bytes: int
    fits: bool
    # Why it is not the best, or "".
    reason: str = ""
    # The trace of the largest size of clips; None for an estimate.
    trace: Trace | None = None
    timeline: Timeline | None = None
    # The step by its parts; None for an estimate.
    foreseen: StepParts | None = None
    # Seconds of a step that plans of the same degrees take at least, with its checkpoints and without.
    floor_s: tuple[float, float] = (0.0, 0.0)

    @property
    def is_traced(self) -> bool:
        return self.trace is not None

    @property
    def seconds_per_sample(self) -> float:
        return self.expected_s / self.samples

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_dict(),
            "accumulation": self.passes.accumulation,
            "samples": self.samples,
            "memory_bytes": list(self.memory_bytes),
            "step_time_s": list(self.step_time_s),
            "seconds_per_sample": self.seconds_per_sample,
            "bytes_by_kind": dict(self.bytes_by_kind),
            "seconds_by_kind": dict(self.seconds_by_kind),
            "host_bytes": self.host_bytes,
            "fits": self.fits,
            "traced": self.is_traced,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Outcome:
    """All candidates, the best first, then those that fit, then the others by what they need."""

    request: Request
    candidates: tuple[Candidate, ...]
    # Rules that exclude, with how many sets of degrees each took.
    excluded: Mapping[str, int]
    seconds: float
    # Plans that were not traced and may be faster than the best, as far as estimates have been off, by at most
    # `gain` of its time.
    may_win: tuple[Plan, ...] = ()
    gain: float = 0.0
    # The best with one change that is not the planner's to make, and why not.
    priced: tuple[tuple[Candidate, str], ...] = ()

    @property
    def ties(self) -> tuple[Candidate, ...]:
        """Traced plans that are within a hundredth of the best, and it."""
        best = self.best
        if best is None:
            return ()
        fit = (each for each in self.candidates if each.fits and each.is_traced)
        return tuple(each for each in fit if each.seconds_per_sample <= _TIED * best.seconds_per_sample)

    @property
    def best(self) -> Candidate | None:
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and first.fits else None


def describe(plan: Plan) -> str:
    """A Plan in few words: what is not the default."""
    default = Plan()
    parts = [
        f"{name}={value}" if not isinstance(value, bool) else name
        for name, value in plan.to_dict().items()
        if value != getattr(default, name) and name not in ("precision", "sharding_factor", "ranks_per_node")
    ]
    return " ".join(parts) or "one rank, nothing saved"


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def candidates(
    request: Request, excluded: Counter[str], has_tensor_table: bool = False
) -> Iterator[tuple[Plan, Passes]]:
    """Plans that keep the rules, each with its microbatches; what the rules exclude is counted."""
    for degrees, data in _meshes(request, excluded, has_tensor_table):
        passes = passes_of(request, data)
        if passes is None:
            excluded[
                f"the data ranks' samples must divide the global batch of {request.global_batch}; put more ranks on "
                "ring or ulysses, or raise the batch"
            ] += 1
            continue
        for sharding, (checkpoint, offload), chunks in itertools.product(
            _shardings(request, degrees, data), _CHECKPOINTS, _CHUNKS
        ):
            for extra in _extras(request, {**degrees, **sharding}):
                fields = {
                    "precision": request.precision, "checkpoint": checkpoint, "offload": offload, "mlp_chunks": chunks,
                    **degrees, **sharding, **extra,
                }  # fmt: skip
                if any(fields.get(name, value) != value for name, value in request.fixed.items()):
                    continue
                try:
                    plan = Plan.from_dict({**fields, **request.fixed})
                except ValueError:
                    continue  # not with what is fixed
                if plan.world_size == request.world_size:
                    yield plan, passes


def _meshes(
    request: Request, excluded: Counter[str], has_tensor_table: bool
) -> Iterator[tuple[dict[str, int], int]]:
    """Degrees of ring, ulysses and tp, with the data ranks that are left."""
    largest = request.largest
    # A user's own step may not say what it has.
    heads = largest.num_heads or request.world_size
    tokens = min(workload.num_tokens for workload, _share in request.mix) or request.world_size
    wanted = {axis: request.fixed.get(axis) for axis in ("ring", "ulysses", "tp")}

    def choices(axis: str, number: int) -> list[int]:
        return [each for each in divisors(number) if wanted[axis] in (None, each)]

    for tp in choices("tp", request.world_size):
        if tp > 1 and request.residents.optimizer in _NOT_UNDER_TP:
            excluded[f"tp > 1: {_NOT_UNDER_TP[request.residents.optimizer]}"] += 1
            continue
        if tp > 1 and not has_tensor_table:
            excluded[f"tp > 1: no policy says where the layers of {largest.name} are cut"] += 1
            continue
        if heads % tp or tp > request.hardware.ranks_per_node:
            excluded[
                f"tp must divide the {heads} heads and stay in a node of {request.hardware.ranks_per_node}"
            ] += 1
            continue
        for ulysses in choices("ulysses", request.world_size // tp):
            if heads % (ulysses * tp):
                excluded[f"ulysses × tp must divide the {heads} heads"] += 1
                continue
            for ring in choices("ring", request.world_size // tp // ulysses):
                if ring * ulysses > tokens:
                    excluded[f"ring × ulysses may not pass the {tokens} tokens of the shortest clips"] += 1
                    continue
                data = request.world_size // (tp * ulysses * ring)
                yield {"ring": ring, "ulysses": ulysses, "tp": tp}, data


def passes_of(request: Request, data: int) -> Passes | None:
    """So that a step has the global batch; None where so many data ranks cannot have it."""
    if request.global_batch is None:
        return Passes(request.accumulation)
    of_a_pass = data * request.largest.batch
    if request.global_batch % of_a_pass:
        return None
    times = request.global_batch // of_a_pass
    return Passes(request.accumulation, times) if request.resize is not None else Passes(times)


def _shardings(request: Request, degrees: Mapping[str, int], data: int) -> list[dict[str, Any]]:
    """Whole parameters, and ZeRO over all ranks, over a node's, and over four and sixteen nodes'."""
    choices: list[dict[str, Any]] = [{"sharding": "none", "dp_replicate": data, "dp_shard": 1}]
    sequence, per_node = (
        degrees["ring"] * degrees["ulysses"],
        request.hardware.ranks_per_node // degrees["tp"],
    )
    sizes = {data}
    for nodes in (1, 4, 16):
        if data * sequence > nodes * per_node:
            sizes.add(
                max(each for each in divisors(data) if each == 1 or each * sequence <= nodes * per_node)
            )
    for size, stage in itertools.product(sorted(sizes), ("zero2", "zero3")):
        # A single rank has nothing to share; with ZeRO-3 its shard may lie in host memory.
        if size * sequence > 1 or stage == "zero3":
            choices.append({"sharding": stage, "dp_replicate": data // size, "dp_shard": size})
    return choices


def _extras(request: Request, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Shards in host memory, and collectives in two levels where a group leaves its node with several ranks on it."""
    choices: list[dict[str, Any]] = [{}]
    shards = fields["dp_shard"] * fields["ring"] * fields["ulysses"]
    # A device that computes in host memory has nothing to move there, and muon iterates matrices where they lie.
    may_move = request.hardware.runs_ahead and request.residents.optimizer != "muon"
    if fields["sharding"] == "zero3" and may_move:
        choices.append({"cpu_offload": True})
        if shards == 1:
            return choices[1:]
    per_node = request.hardware.ranks_per_node
    span = fields["ulysses"] * fields["tp"]
    if 1 < per_node < span and request.world_size % per_node == 0 and has_experiments():
        choices.append({"two_level": "on", "ranks_per_node": per_node})
    return choices
