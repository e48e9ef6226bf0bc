"""The Plan: how one training job is spread over its ranks, as plain data.

Every other part of the toolkit takes or returns it: the planner proposes one, the registry builds its mesh,
shardformer and fsdp apply it, verify proves it, the trainer stores it in every checkpoint.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from opensora_accel.documents import MOST_RANKS, read_text

Checkpoint = Literal["none", "full", "selective"]
Sharding = Literal[
    "none", "zero2", "zero3", "NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"
]
Precision = Literal["fp32", "bf16", "fp64"]
ReduceDtype = Literal["same", "bf16"]
GatherDtype = Literal["same", "int8", "fp8"]
TwoLevel = Literal["off", "on", "auto"]

MESH_AXES = ("dp_replicate", "dp_shard", "ring", "ulysses", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")
SEQUENCE_AXES = ("ring", "ulysses")
MIXED_AXES = DATA_AXES + SEQUENCE_AXES

# The bound of a file; a Plan has 600.
_MOST_BYTES = 1 << 20
_CHOICES = {
    "checkpoint": Checkpoint,
    "sharding": Sharding,
    "precision": Precision,
    "reduce_dtype": ReduceDtype,
    "gather_dtype": GatherDtype,
    "two_level": TwoLevel,
}
# The names that FSDP's users know. A Plan stores the short ones.
_STRATEGIES: dict[str, Sharding] = {
    "NO_SHARD": "none",
    "SHARD_GRAD_OP": "zero2",
    "FULL_SHARD": "zero3",
    "HYBRID_SHARD": "zero3",
    "HYBRID_SHARD_ZERO2": "zero2",
}


def check_offload(offload: object) -> None:
    """Checks a share of the blocks.

    Raises:
        ValueError: it is neither a number from 0 to 1 nor "auto".
    """
    # True is a number to Python, and would move every block.
    is_number = isinstance(offload, (int, float)) and not isinstance(offload, bool)
    if offload != "auto" and not (is_number and 0.0 <= float(offload) <= 1.0):  # type: ignore[arg-type]
        raise ValueError(f'offload is a share of the blocks from 0.0 to 1.0, or "auto"; got {offload!r}')


@dataclass(frozen=True)
class Plan:
    """Degrees of every mesh axis, and what is done to activations, parameters and precision.

    The product of the five degrees is the number of ranks.

    Raises:
        ValueError: a value that cannot work; the message has the remedy.
    """

    dp_replicate: int = 1
    """Data parallel ranks that hold a full copy of the (sharded) parameters."""
    dp_shard: int = 1
    """Data parallel ranks over which parameters are sharded; needs sharding zero2 or zero3."""
    ring: int = 1
    """Sequence parallel ranks that pass keys and values round (ring attention)."""
    ulysses: int = 1
    """Sequence parallel ranks that exchange tokens for heads by all-to-all (Ulysses)."""
    tp: int = 1
    """Tensor parallel ranks."""
    overlap_ulysses: bool = False
    """Send what Ulysses exchanges under compute, in more and smaller collectives: v is projected while q and k travel,
    and heads attend in groups. The same numbers."""
    checkpoint: Checkpoint = "none"
    """Activation checkpointing: none; full (recompute every block); selective (keep attention outputs)."""
    offload: float | Literal["auto"] = 0.0
    """Share of the blocks, from the first, whose input waits in host memory, or auto; the last one always stays."""
    mlp_chunks: int = 1
    """Pieces along the tokens in which every block's MLP runs and is recomputed; 1 runs it whole."""
    sharding: Sharding = "none"
    """Parameters: none (replicated), zero2 (gradients and optimizer sharded), zero3 (parameters too); or FSDP's names:
    NO_SHARD, SHARD_GRAD_OP, FULL_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2."""
    sharding_factor: int | None = None
    """Ranks that hold one copy of the parameters between them, by default dp_shard × ring × ulysses. The data ranks are
    then split anew between dp_replicate and dp_shard: 16 ranks as dp_shard=8 × ulysses=2 with a factor of 4 become
    dp_replicate=4 × dp_shard=2 × ulysses=2."""
    prefetch: int = 1
    """Blocks whose sharded parameters are gathered ahead of the one that computes; 0 gathers each when it is needed."""
    cpu_offload: bool = False
    """Keep sharded parameters, their gradients and the optimizer's state in host memory."""
    precision: Precision = "fp32"
    """Compute precision. bf16 keeps fp32 master weights; fp64 is for proofs."""
    reduce_dtype: ReduceDtype = "same"
    """Gradients between ranks: same (in the precision that they are added up in), or bf16, added up in fp32, with what
    rounding leaves out kept for the next step (error feedback)."""
    gather_dtype: GatherDtype = "same"
    """Sharded weights while they are gathered: same (in the compute precision), or int8 or fp8 with a scale for each
    block of 128. The optimizer's own weights stay as they are."""
    two_level: TwoLevel = "off"
    """Whether Ulysses' all-to-all, and FSDP2's all-reduce between copies, run within nodes and then between them: off,
    on, or auto, which measures the links at the start and takes what is faster for each size. Collectives of DDP, tp
    and a ring stay as the backend has them."""
    ranks_per_node: int | None = None
    """Ranks that two_level takes for a node, by default those that the launcher has started on this machine."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            check_field(each.name, getattr(self, each.name))
        if self.world_size > MOST_RANKS:
            raise ValueError(f"a plan has at most {MOST_RANKS:,} ranks; this one has {self.world_size:,}")
        if self.checkpoint == "none" and (self.offload == "auto" or float(self.offload) > 0):
            raise ValueError(
                f"offload={self.offload} moves the inputs of checkpointed blocks, but checkpoint is none; "
                'set checkpoint="full" (or "selective"), or offload=0'
            )
        if self.overlap_ulysses and (self.ulysses == 1 or self.ring > 1):
            raise ValueError(
                "overlap_ulysses overlaps the exchange of a ulysses degree with attention to whole sequences; the plan "
                f"has ulysses={self.ulysses} and ring={self.ring}: put the ranks on ulysses, or leave it out (a ring "
                "overlaps by itself)"
            )
        self._check_sharding()
        self._check_compression()
        self._check_two_level()

    def _check_sharding(self) -> None:
        named = self.sharding
        # A frozen dataclass has no other way to store a value that it has translated.
        object.__setattr__(self, "sharding", _STRATEGIES.get(named, named))
        factor = self.sharding_factor
        if factor is not None:
            fits = [
                1,
                self.ulysses,
                *(self.sequence * n for n in range(1, self.data + 1) if self.data % n == 0),
            ]
            if factor not in fits:
                raise ValueError(
                    f"sharding_factor must be 1, ulysses ({self.ulysses}), or ring × ulysses ({self.sequence}) times a "
                    f"divisor of the {self.data} data ranks: one of {', '.join(map(str, sorted(set(fits))))}; "
                    f"got {factor!r}"
                )
            dp_shard = max(1, factor // self.sequence)
            object.__setattr__(self, "dp_replicate", self.data // dp_shard)
            object.__setattr__(self, "dp_shard", dp_shard)
        if self.sharding == "none" and (factor or 1) > 1:
            raise ValueError(
                f'sharding_factor={factor} shards parameters, but sharding="{named}" keeps them whole; '
                'set sharding="zero3" (or "zero2"), or leave sharding_factor out'
            )
        if self.sharding == "none" and self.cpu_offload:
            raise ValueError(
                f'cpu_offload keeps shards in host memory, but sharding="{named}" keeps parameters whole; '
                'set sharding="zero3" (or "zero2")'
            )
        is_hybrid = 1 < self.num_shards < self.mixed
        if named.startswith("HYBRID_SHARD") and not is_hybrid:
            raise ValueError(
                f'sharding="{named}" replicates shards, but all {self.mixed} ranks hold {self.num_shards} shards; '
                "set dp_replicate, or sharding_factor between 1 and all ranks (the GPUs of one machine, say)"
            )
        if named in ("SHARD_GRAD_OP", "FULL_SHARD") and self.num_shards < self.mixed:
            hybrid = "HYBRID_SHARD" if named == "FULL_SHARD" else "HYBRID_SHARD_ZERO2"
            raise ValueError(
                f'sharding="{named}" shards over all {self.mixed} ranks, but dp_replicate or sharding_factor asks for '
                f'{self.num_shards}; use sharding="{hybrid}"'
            )
        if self.dp_shard > 1 and self.sharding == "none":
            raise ValueError(
                f'dp_shard={self.dp_shard} shards parameters, but sharding="none" keeps them whole; '
                f'set sharding="zero3" (or "zero2"), or use dp_replicate={self.dp_shard * self.dp_replicate}'
            )

    def _check_compression(self) -> None:
        if self.reduce_dtype != "same" and (self.sharding == "none" or self.mixed == 1):
            raise ValueError(
                f'reduce_dtype="{self.reduce_dtype}" is for gradients that FSDP2 averages over several ranks; the plan '
                f'has sharding="{self.sharding}" on {self.mixed} rank(s): set sharding="zero3", with sharding_factor=1 '
                "to keep parameters whole, or leave reduce_dtype out"
            )
        if self.gather_dtype != "same" and self.num_shards == 1:
            raise ValueError(
                f'gather_dtype="{self.gather_dtype}" compresses the gather of sharded parameters, but each rank of '
                "this plan has them whole; set sharding to zero3 (or zero2) on several ranks, or leave it out"
            )

    def _check_two_level(self) -> None:
        per_node = self.ranks_per_node
        if per_node is not None and per_node > self.world_size:
            raise ValueError(
                f"ranks_per_node must be a whole number of the plan's {self.world_size} ranks; got {per_node!r}"
            )
        if self.two_level == "off":
            if per_node is not None:
                raise ValueError(
                    f"ranks_per_node={per_node} is what two_level takes for a node, but two_level is off; set it to "
                    '"on" or "auto", or leave ranks_per_node out'
                )
            return
        if per_node is not None and self.world_size % per_node:
            raise ValueError(
                f"ranks_per_node ({per_node}) must divide the plan's {self.world_size} ranks, so that every node has "
                "as many"
            )
        has_copies = self.sharding != "none" and self.num_shards < self.mixed
        if self.ulysses == 1 and not has_copies:
            raise ValueError(
                f'two_level="{self.two_level}" is for the all-to-all of a ulysses degree and the all-reduce between '
                'copies that FSDP2 shards (sharding="zero3" with dp_replicate or sharding_factor); the plan has '
                'neither: set two_level="off"'
            )
        if self.overlap_ulysses:
            raise ValueError(
                f'two_level="{self.two_level}" sends what Ulysses exchanges in one piece, and overlap_ulysses in '
                'several under compute; set overlap_ulysses=False, or two_level="off"'
            )

    @property
    def data(self) -> int:
        """Ranks that see different samples: dp_replicate × dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def sequence(self) -> int:
        """Ranks that share one sample: ring × ulysses."""
        return self.ring * self.ulysses

    @property
    def mixed(self) -> int:
        """Ranks over which gradients are averaged: data × sequence."""
        return self.data * self.sequence

    @property
    def num_shards(self) -> int:
        """Ranks that hold one copy of the parameters between them: the sharding factor."""
        if self.sharding == "none":
            return 1
        return self.sharding_factor or self.mixed // self.dp_replicate

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards parameters."""
        return self.sharding != "none"

    @property
    def uses_fsdp(self) -> bool:
        """Whether parameters are FSDP2's, in shards or whole and cast to bf16 for each block."""
        return self.is_sharded or self.precision == "bf16"

    @property
    def averages_by_ddp(self) -> bool:
        """Whether DDP averages gradients: of whole weights in the dtype that the model computes in."""
        return self.mixed > 1 and not self.uses_fsdp

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The mesh axes over which parameters are sharded, outermost first: the innermost of mixed."""
        axes, size = list[str](), 1
        for axis in reversed(MIXED_AXES):
            if size == self.num_shards:
                break
            axes.insert(0, axis)
            size *= int(getattr(self, axis))
        return tuple(axes)

    @property
    def world_size(self) -> int:
        return self.mixed * self.tp

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees in the order of `MESH_AXES`, outermost first."""
        return tuple(getattr(self, axis) for axis in MESH_AXES)

    def replace(self, **changes: Any) -> Plan:
        """A copy with some fields changed; an unknown field is a ValueError with the nearest name."""
        return Plan.from_dict({**self.to_dict(), **changes})

    def check_world_size(self, world_size: int) -> None:
        """Checks that the plan uses `world_size` ranks.

        Raises:
            ValueError: it does not; the message lists degrees that would fit.
        """
        if self.world_size == world_size:
            return
        degrees = " × ".join(f"{axis}={degree}" for axis, degree in zip(MESH_AXES, self.degrees, strict=True))
        # A change of one axis is the least to do; where none fits, any degrees are made of the divisors.
        fits = []
        for axis, degree in zip(MESH_AXES, self.degrees, strict=True):
            others = math.prod(self.degrees) // degree
            # More dp_shard ranks are no remedy where nothing is sharded.
            needs_sharding = axis == "dp_shard" and self.sharding == "none"
            if world_size % others == 0 and not needs_sharding:
                fits.append(f"{axis}={world_size // others}")
        divisors = [str(d) for d in range(1, world_size + 1) if world_size % d == 0]
        remedy = f"choose degrees that multiply to {world_size}: each one of {', '.join(divisors)}"
        if fits:
            remedy = f"set {' or '.join(fits)} (the others unchanged)"
        raise ValueError(
            f"the plan needs {self.world_size} ranks ({degrees}), but {world_size} are running; "
            f"{remedy}, or start {self.world_size} ranks "
            f"(torchrun --nproc-per-node {self.world_size} ...)"
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """The Plan with these fields; the others keep their defaults.

        Raises:
            ValueError: an unknown field (the message has the nearest one), or a value that cannot work.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
                hint = f"did you mean {nearest[0]!r}? " if nearest else ""
                raise ValueError(f"a Plan has no field {key!r}; {hint}its fields are {', '.join(names)}")
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The Plan that `to_json` wrote.

        Raises:
            ValueError: the text is no JSON object, or `from_dict` refuses it.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a Plan is read from a JSON object; this text is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"a Plan is read from a JSON object; got {type(values).__name__}")
        return cls.from_dict(values)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The Plan in a file.

        Raises:
            ValueError: it is no plain file of text, or `from_json` refuses it.
            OSError: it cannot be read.
        """
        return cls.from_json(read_text(Path(path), most_bytes=_MOST_BYTES))


def check_field(name: str, value: object) -> None:
    """Whether a field of a Plan may have this value, whatever the others have.

    Raises:
        ValueError: it may not, or no field has this name; the message has what it may have.
    """
    if name in MESH_AXES:
        _check_whole(name, value, 1, "of ranks")
    elif name in _CHOICES:
        _check_choice(name, value, get_args(_CHOICES[name]))
    elif name == "offload":
        check_offload(value)
    elif name in ("mlp_chunks", "prefetch"):
        _check_whole(name, value, *((1, "of pieces") if name == "mlp_chunks" else (0, "of blocks")))
    elif name in ("sharding_factor", "ranks_per_node"):
        if value is not None:
            _check_whole(name, value, 1, "of ranks")
    elif name in ("overlap_ulysses", "cpu_offload"):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false; got {value!r}")
    else:
        Plan.from_dict({name: value})  # says which fields there are


def _check_whole(name: str, value: object, least: int, of_what: str) -> None:
    # A bool is an int in Python, and True ranks are a mistake.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number {of_what}, at least {least}; got {value!r}")
    if of_what == "of ranks" and value > MOST_RANKS:
        raise ValueError(f"{name} is at most {MOST_RANKS:,}; got {value:,}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
