"""What can be wrong with a step: every cause is a type, and says what is wrong (`what`) and what to do (`remedy`).

Wording stands here, and where a part looks at the step in another way (`derivatives`, `in_bf16`, `later_steps`,
`loads`). Every cause also says on which meshes it shows and which parameters it concerns. `where` is the simplest rule
that tells the meshes with the error from those without: an error on data=2 × ulysses=2 and ulysses=3, but not on
data=3, is one "over ulysses".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from opensora_accel.observe import MeshShape, compose_axes, subsets
from opensora_accel.verify.fit import Factor

# Which ranks have a gradient, where the single device has one (or, only in parallel, has none).
Side = Literal["none", "some ranks only", "only in parallel"]

_NUM_SHOWN = 4
# Modules that make keys and values: to_k, k_proj, norm_k, key.
_OF_KEYS = re.compile(r"(^|_)(k|v|kv|key|value)(_|$|s)")
_SAME_CALLS = (
    "every rank of a group must make the same calls in the same order: look for a collective that only "
    "some ranks reach, a send without its receive, or a group of the wrong ranks"
)


def count_names(names: Sequence[str], total: int) -> str:
    """`all 69 parameters`, or `2 of 69 parameters (a, b)`."""
    if len(names) == total:
        return f"all {total} parameters" if total != 1 else f"the only parameter ({names[0]})"
    return f"{len(names)} of {total} parameters ({list_names(names)})"


def list_names(names: Sequence[str]) -> str:
    more = f", … {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(names[:_NUM_SHOWN]) + more


def join_words(words: Sequence[str], last: str = "and") -> str:
    return "".join(words) if len(words) < 2 else f"{', '.join(words[:-1])} {last} {words[-1]}"


@dataclass(frozen=True)
class Where:
    """The meshes that show an error, and what they have in common, if anything.

    They have `least` ranks along any of `axes` (over), along all of them (together), or several ranks (everywhere).
    """

    meshes: tuple[MeshShape, ...] = ()
    rule: Literal["over", "together", "everywhere", "only there"] = "only there"
    axes: tuple[str, ...] = ()
    least: int = 2
    members: tuple[str, ...] = ()  # every single axis, where `axes` has one word for several

    @classmethod
    def of(cls, bad: Sequence[MeshShape], good: Sequence[MeshShape], axes: Sequence[str]) -> Where:
        """The simplest rule that holds for all meshes in `bad` and for none in `good`."""
        meshes = tuple(bad)
        # From the simplest rule on; the first that tells bad from good counts.
        rules = [
            # A ring that is right on two ranks may be wrong from three on.
            *(cls(meshes, "over", (axis,), least) for axis in axes for least in (2, 3, 4)),
            # Any of all axes would be "everywhere", which is the last rule.
            *(cls(meshes, "over", some) for some in subsets(axes, 2) if len(some) < len(axes)),
            *(cls(meshes, "together", some) for some in subsets(axes, 2)),
            cls(meshes, "everywhere", tuple(axes)),
        ]
        fitting = (rule for rule in rules if all(map(rule._holds, bad)) and not any(map(rule._holds, good)))
        fit = next(fitting, cls(meshes))
        return replace(fit, axes=compose_axes(fit.axes, axes), members=fit.axes)

    def _holds(self, shape: MeshShape) -> bool:
        if self.rule == "everywhere":
            return shape.world_size > 1
        are_used = [shape.degree(axis) >= self.least for axis in self.axes]
        return all(are_used) if self.rule == "together" else any(are_used)

    def __str__(self) -> str:
        """`over ulysses`, `wherever ring has 3 ranks or more`, `where ring and ulysses are used together`."""
        if self.rule == "over" and self.least > 2:
            return f"wherever {self.axes[0]} has {self.least} ranks or more"
        if self.rule == "over":
            return f"over {join_words(self.axes, 'or')}"
        if self.rule == "together":
            return f"where {join_words(self.members or self.axes)} are used together"
        if self.rule == "everywhere":
            return "on every mesh"
        return f"on {join_words([str(mesh) for mesh in self.meshes])} only"


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong. The words of a type are templates, unless they depend on its numbers."""

    kind: ClassVar[str]  # its word in JSON
    WHAT: ClassVar[str] = ""
    REMEDY: ClassVar[str] = ""

    where: Where
    names: tuple[str, ...] = ()  # the parameters (or results) concerned
    num_names: int = 0  # how many there are, wrong or right
    # The axes over which it goes wrong, where they do not follow from the rest.
    over: tuple[str, ...] | None = None
    by: Factor | None = None  # by which gradients (or results) are multiplied, where that is what is wrong
    is_everywhere: bool = True  # whether `by` holds on all meshes; otherwise on those of `where`
    # What of the trial it takes, where it is not the step as given: `with tokens = 13`, `with dropout`.
    at: str = field(default="", kw_only=True)

    @property
    def what(self) -> str:
        """What is wrong, in one line."""
        # What the templates below may name, beside the fields themselves.
        over = join_words(self.axes) if self.axes else ""
        values = vars(self) | {"count": self.count, "listed": list_names(self.names), "over": over}
        return self.WHAT.format(**values)

    @property
    def remedy(self) -> str:
        return self.REMEDY

    @property
    def count(self) -> str:
        return count_names(self.names, self.num_names)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which it goes wrong."""
        if self.over is not None:
            return self.over
        if self.by is None:
            return self.where.axes
        shown = () if self.is_everywhere else self.where.axes
        return tuple(dict.fromkeys((*shown, *self.by.axes)))

    @property
    def factor(self) -> str:
        """`sequence⁻¹`, or nothing."""
        return "" if self.by is None else str(self.by)

    @property
    def meshes(self) -> tuple[str, ...]:
        return tuple(map(str, self.where.meshes))

    @property
    def sentence(self) -> str:
        """What is wrong, and what it takes to see it."""
        return f"{self.at}: {self.what}" if self.at else self.what

    def __str__(self) -> str:
        return f"{self.sentence}\n  {self.remedy}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "what": self.what,
            "at": self.at,
            "remedy": self.remedy,
            "axes": list(self.axes),
            "factor": self.factor,
            "parameters": list(self.names),
            "meshes": list(self.meshes),
        }


# A step that does not end well, or that starts from something else than the single device: nothing can be compared.


@dataclass(frozen=True)
class StepFails(Cause):
    kind = "failure"
    WHAT = "the step fails {where}: {message} (rank {rank})"
    REMEDY = "the whole traceback is in the report's errors"
    message: str = ""
    rank: int = 0


@dataclass(frozen=True)
class UnlikeCollectives(Cause):
    kind = "failure"
    REMEDY = _SAME_CALLS
    line: str = ""  # `file.py:12`, the user's line where it was noticed
    rank: int = 0

    @property
    def what(self) -> str:
        noticed = f": noticed at {self.line}" if self.line else ""
        return (
            f"the step fails {self.where}: ranks meet in collectives that are not the same, as one of them skips or "
            f"adds a call{noticed} (rank {self.rank})"
        )


class Hang(Cause):
    kind = "failure"
    WHAT = "the step never ends {where}: a rank waits for another that does not answer"
    REMEDY = _SAME_CALLS


class WrongWeights(Cause):
    kind = "weights"
    WHAT = "the ranks start from other weights than the single device {where}: {count}"
    REMEDY = "initialise by one seed on all ranks, or broadcast from rank 0 (DDP does), before the first step"


class RepeatedShard(Cause):
    kind = "weights"
    WHAT = (
        "every rank holds the same shard of {count}: the model starts with one slice of its weights, repeated"
    )
    REMEDY = (
        "to_empty() and reset_parameters() draw the same numbers on every rank; draw each whole parameter from a seed "
        "of its own and keep this rank's slice, or load a checkpoint"
    )


class DifferentDraws(Cause):
    kind = "inputs"
    WHAT = (
        "ranks that share a sample drew different noise (or were given different data) {where}: {listed} differ "
        "between them"
    )
    REMEDY = (
        "noise, timestep, caption drop and the sampler of the data must depend on the data rank only: seed by it "
        "(run.data_rank), not by the global rank"
    )


class WrongInput(Cause):
    kind = "inputs"
    WHAT = "the ranks were given other data than the single device {where}: {listed}"
    REMEDY = (
        "what a sample is must depend on the data rank (run.data_rank of run.data_size) only, not on the rank, the "
        "world size or what was drawn before"
    )


class SameSamples(Cause):
    kind = "inputs"
    WHAT = (
        "all data ranks were given the same samples {where}: a missing average between them could not be seen"
    )
    REMEDY = (
        "draw with torch's generator, which is seeded by the data rank before the step, or choose samples by "
        "run.data_rank; do not seed it anew"
    )


# Wrong gradients.


@dataclass(frozen=True)
class Place:
    """Where in backward an error comes in: the nearest wrong gradient to the loss."""

    nearest: str
    num_right_before: int

    def __str__(self) -> str:
        """To be appended to a remedy."""
        right = f"; the {self.num_right_before} nearer to it are right" if self.num_right_before else ""
        return f". Nearest to the loss: {self.nearest}{right}"


@dataclass(frozen=True)
class MissingGradient(Cause):
    kind = "missing gradient"
    side: Side = "none"

    @property
    def what(self) -> str:
        return f"{self.count} {self._words()[0]} {self.where}"

    @property
    def remedy(self) -> str:
        return self._words()[1]

    def _words(self) -> tuple[str, str]:
        return {
            "none": (
                "get no gradient",
                "a detach, a collective without a backward, or no_grad cuts them off",
            ),
            "some ranks only": (
                "get a gradient on some ranks only",
                "ranks without a share must still take part: add their output times zero, or use static shapes",
            ),
            "only in parallel": (
                "get a gradient that the single device does not give",
                "look for another branch",
            ),
        }[self.side]


class HeldBack(Cause):
    kind = "missing sum"
    WHAT = (
        "missing average over {over} for {count}: FSDP2 holds back what it has added up within each replica, and gives "
        "no gradient"
    )
    REMEDY = (
        "set_requires_all_reduce(False) is for all microbatches but the last: True before that one's backward"
    )


@dataclass(frozen=True)
class MissingSum(Cause):
    """The ranks along some axes (`over`) hold parts of one gradient, which nobody adds up; the sum is off `by`."""

    kind = "missing sum"
    is_average: bool = False
    place: Place | None = None

    @property
    def what(self) -> str:
        beside = "" if self.by is None else f", beside a scale {self.by}"
        missing = "average" if self.is_average else "sum"
        return f"missing {missing} over {join_words(self.axes)} for {self.count}{beside}"

    @property
    def remedy(self) -> str:
        along = join_words(self.axes)
        # Where most parameters are concerned the average itself is wrong; a few lie in a region of their own.
        if 2 * len(self.names) > self.num_names:
            axes = {axis for mesh in self.where.meshes for axis in mesh.axes if mesh.uses(axis)}
            data = {axis for mesh in self.where.meshes for axis in mesh.data_axes}
            all_ranks = "the mixed group (data × sequence)" if axes - data else f"all ranks along {along}"
            late = (
                "; what was frozen, or not there yet, when DDP or fully_shard was put around the model is averaged by "
                "nobody"
            )
            return (
                f"the ranks along {along} hold parts of one gradient: average gradients over {all_ranks}, not over "
                f"fewer{late if len(self.names) < self.num_names else ''}"
            )
        return (
            f"these get parts of one gradient on the ranks along {along}: all-reduce them there, or let what they are "
            f"applied to enter through copy_forward_reduce_backward{self.place or ''}"
        )


@dataclass(frozen=True)
class Scale(Cause):
    """Every rank has the right gradient times a factor that goes with the degrees of the mesh."""

    kind = "scale"
    data_powers: tuple[int, ...] = ()  # exponents of the degrees of data axes,
    sharing_powers: tuple[int, ...] = ()  # and of those of other axes
    place: Place | None = None  # where not all parameters are concerned

    @property
    def what(self) -> str:
        return f"scale {self.by} on {self.count}" + ("" if self.is_everywhere else f" {self.where}")

    @property
    def remedy(self) -> str:
        # By the exponents over data axes, and over axes whose ranks share a sample.
        match tuple(set(self.data_powers)), tuple(set(self.sharing_powers)):
            case (), ():
                text = (
                    "a constant, the same on every mesh: a collective or a loss that counts twice, or a divisor that "
                    "is not a number of ranks"
                )
            case (), (-1,):
                text = (
                    "averaged over a group whose gradients are partial: set the divisor to the data degree (FSDP2: "
                    "set_gradient_divide_factor), or scale the gradient by the degree where the ranks' shares join "
                    '("up")'
                )
            case (), (1,):
                text = (
                    "counted once per rank that shares the sample: summed where whole gradients are averaged, or a "
                    'gather scales "up" and its split not "down"'
                )
            case (-1,), ():
                text = "averaged over the data ranks twice: is the loss divided by their number as well?"
            case (1,), ():
                text = "summed over the data ranks, not averaged: divide by their number (DDP and FSDP2 do by default)"
            case _:
                text = "a divisor or a sum counts other ranks than those that hold parts of this gradient"
        if self.by is not None and self.by.of_others:
            text = "the own rank is not counted: P − 1 stands where P, the number of ranks, should"
        # A factor that one mesh has and another has not goes with no exponent.
        if not self.is_everywhere:
            text = "a number where the number of ranks should stand, or a collective that counts twice"
        return f"{text}{self.place or ''}"


@dataclass(frozen=True)
class StrangeScale(Cause):
    """One factor on all ranks of a mesh, which goes with no degree."""

    kind = "scale"
    REMEDY = (
        "look for a divisor that is no number of ranks but depends on them, and for gradients that are normalised or "
        "clipped by hand: leave that out of the step, or do it on the single device, too"
    )
    factors: tuple[tuple[str, float], ...] = ()  # by mesh

    @property
    def what(self) -> str:
        shown = ", ".join(f"{factor:.4g} on {mesh}" for mesh, factor in self.factors)
        return f"a factor that goes with no number of ranks ({shown}) on {self.count}"


@dataclass(frozen=True)
class ScaledByShares(Cause):
    """Each rank's part of the gradient is multiplied by a factor of its own."""

    kind = "shares"
    factors: tuple[float, ...] = ()
    shares: str = ""  # `4:4:3`, where the factors are shares of a whole
    data_axes: tuple[
        str, ...
    ] = ()  # axes along which the factors differ and whose ranks see different samples

    @property
    def factor(self) -> str:
        return "share" if self.shares else ""

    @property
    def what(self) -> str:
        shown = ", ".join(f"{factor:.4g}" for factor in self.factors)
        shares = f": its share of an uneven split, {self.shares}" if self.shares else ""
        return (
            f"each rank's part of the gradient is multiplied by a factor of its own on {self.meshes[0]} ({shown}), in "
            f"{self.count}{shares}"
        )

    @property
    def remedy(self) -> str:
        if not self.data_axes:
            return "an uneven split is scaled by exactly the number of ranks (P up, 1/P down), never by a rank's share"
        return (
            f"ranks along {join_words(self.data_axes)} hold different numbers of samples or tokens, and each divides "
            "by its own: divide by the number over all ranks (all-reduce it), times the number of ranks that the "
            "gradients are then averaged over"
        )


@dataclass(frozen=True)
class Origin:
    """The first module whose forward is wrong."""

    name: str | None  # None where no output is wrong, as far as can be known
    # False where what it was given was wrong already, and no module before it was; None where that cannot be known.
    # Where no output is wrong: whether the model's own is known to be right.
    are_inputs_right: bool | None = True
    before: str | None = None  # the first module that was given something wrong, where the origin has several


@dataclass(frozen=True)
class WrongValues(Cause):
    """No factor and no sum makes these gradients right."""

    kind = "values"
    WHAT = "wrong values (no factor, no sum explains them) {where}: {count}, up to {error:.1e} of the largest"
    error: float = 0.0
    origin: Origin | None = None
    first_wrong: tuple[str, ...] = ()  # parameters of the module whose gradient is the first to be wrong
    place: Place | None = None

    @property
    def remedy(self) -> str:
        origin = self.origin
        if origin is not None and origin.name is not None:
            module = origin.name or "the model itself, outside of its modules"
            module += f", before {origin.before}" if origin.before else ""
            given = {True: " (its inputs are right)", False: " (what it is given is wrong already)", None: ""}
            return (
                f"the forward is wrong already, first in {module}{given[origin.are_inputs_right]}: mostly it takes its "
                "rank's tokens for all, counts them (positions, masks) from 0, or parts heads that do not divide"
            )
        if not self.first_wrong:
            if origin is not None and origin.are_inputs_right:
                nearest = f", nearest to the loss at {self.place.nearest}" if self.place is not None else ""
                return f"the forward is right on all ranks: look at what is communicated in backward{nearest}"
            return "look at what the forward communicates"
        # blocks.1.attn1.to_k.weight is of the module to_k.
        modules = [name.split(".")[-2] for name in self.first_wrong if "." in name]
        comment = ": look at what is communicated there in backward"
        if modules and all(_OF_KEYS.search(module) for module in modules):
            comment = (
                ", the gradients of keys and values (not those of queries): where they travel round a ring, they meet "
                "the keys of another step"
            )
        return f"they come in at {list_names(self.first_wrong)}{comment}{self.place or ''}"


@dataclass(frozen=True)
class RightToFp32(Cause):
    kind = "values"
    WHAT = "{count} are right to fp32 only {where}, up to {error:.1e} of the largest"
    REMEDY = (
        "something computes or adds up in a narrower type than fp64: where that is meant (convert_to_fp32 of "
        "diffusers), turn it off for the proof"
    )
    error: float = 0.0


class Consequence(Cause):
    """Wrong gradients whose cause is found already."""

    kind = "values"
    WHAT = "the gradients of {count} differ, as they must after the above"
    REMEDY = "mend that first, then verify again"


# What is wrong beside gradients.


class ClippedByOtherNorms(Cause):
    kind = "clipping"
    WHAT = "ranks clip by other norms than that of the whole gradient {where}: {count} are wrong after it"
    REMEDY = (
        "the norm is that of all parameters, whole, after gradients are averaged: torch.nn.utils.clip_grad_norm_ on "
        "the DTensors of FSDP2, FSDP1's own clip_grad_norm_, or an all-reduce of the squares of shards' norms"
    )


class ClippedByFactor(Cause):
    kind = "clipping"
    WHAT = "clipping leaves {by} times the single device's gradient of {count}"
    REMEDY = "the limit, or the norm, is multiplied by it"


class ClippedTooEarly(Cause):
    kind = "clipping"
    WHAT = (
        "ranks clip their own parts of {count}, before these are added up over {over}: each by another norm"
    )
    REMEDY = "average gradients first, then clip"


class NeverClipped(Cause):
    kind = "clipping"
    WHAT = "one device clips {count}, and ranks clip nothing {where}"
    REMEDY = (
        "the clip function is never called there, or is given no parameters that are this model's: a generator "
        "(model.parameters()) is empty once something has gone through it, so make a list of it"
    )


class StaleOptimizer(Cause):
    kind = "optimizer"
    WHAT = (
        "the optimizer trains tensors that are the model's no longer {where}, in place of {count}: they would stay as "
        "they are"
    )
    REMEDY = "fully_shard and others give the model new parameters: build the optimizer after that"


class OutsideParameters(Cause):
    """The loss reaches parameters that the model does not have; `names` are their shapes."""

    kind = "outside"
    REMEDY = "build what is trained as one module in model_fn, or freeze what is not (requires_grad_(False))"

    @property
    def what(self) -> str:
        count = "a parameter" if len(self.names) == 1 else f"{len(self.names)} parameters"
        return (
            f"the loss reaches {count} outside of the model, of shape {list_names(self.names)}: not compared"
        )


@dataclass(frozen=True)
class WrongResult(Cause):
    """What the step returns, or the gradients of the model's inputs."""

    kind = "result"
    is_input: bool = False

    @property
    def what(self) -> str:
        # A factor that holds everywhere needs no place.
        how = "wrong" if self.by is None else f"off by the factor {self.by}"
        if self.by is None or not self.is_everywhere:
            how += f" {self.where}"
        if self.is_input:
            return f"the gradients of inputs ({list_names(self.names)}) are {how}"
        return f"what the step returns as {list_names(self.names)} is {how}"

    @property
    def remedy(self) -> str:
        if self.is_input:
            return "what is upstream of them would be trained with it"
        return "the mean over all ranks should be the single device's"
