"""What can be wrong with a step, as data: `diagnose` finds causes, `explain` puts them into words.

Every cause says on which meshes it shows and which parameters it concerns. `where` is the simplest rule that tells
the meshes with the error from those without: an error on data=2 × ulysses=2 and ulysses=3, but not on data=3, is one
"over ulysses".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from opensora_accel.verify.fit import Factor
from opensora_accel.verify.meshes import MeshShape, subsets

Kind = Literal[
    "failure",
    "weights",
    "inputs",
    "missing gradient",
    "scale",
    "missing sum",
    "shares",
    "values",
    "clipping",
    "optimizer",
    "outside",
    "result",
]
"""The word for a cause in JSON."""
Side = Literal["none", "some ranks only", "only in parallel"]
"""Which ranks have a gradient, where the single device has one (or, only in parallel, has none)."""


@dataclass(frozen=True)
class Where:
    """The meshes that show an error, and what they have in common."""

    meshes: tuple[MeshShape, ...] = ()
    rule: Literal["over", "together", "everywhere", "only there"] = "only there"
    """The meshes have `least` ranks along any of `axes`, along all of them, have several ranks, or nothing of these."""
    axes: tuple[str, ...] = ()
    least: int = 2
    members: tuple[str, ...] = ()
    """Every single axis, where `axes` has one word for several."""

    @classmethod
    def of(cls, bad: Sequence[MeshShape], good: Sequence[MeshShape], axes: Sequence[str]) -> Where:
        """The simplest rule that holds for all meshes in `bad` and for none in `good`."""
        meshes = tuple(bad)

        def tells_apart(rule: Callable[[MeshShape], bool]) -> bool:
            return all(map(rule, bad)) and not any(map(rule, good))

        # A ring that is right on two ranks may be wrong from three on.
        for axis in axes:
            for least in (2, 3, 4):
                if tells_apart(lambda shape, axis=axis, least=least: shape.degree(axis) >= least):  # type: ignore[misc]
                    return cls(meshes, "over", (axis,), least)
        for some in subsets(axes, 2):
            # All axes are "everywhere", below.
            if len(some) < len(axes) and tells_apart(lambda shape, some=some: any(map(shape.uses, some))):  # type: ignore[misc]
                return cls(meshes, "over", some)
        for some in subsets(axes, 2):
            if tells_apart(lambda shape, some=some: all(map(shape.uses, some))):  # type: ignore[misc]
                return cls(meshes, "together", some)
        if tells_apart(lambda shape: shape.world_size > 1):
            return cls(meshes, "everywhere", tuple(axes))
        return cls(meshes)


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong."""

    kind: ClassVar[Kind]
    where: Where
    names: tuple[str, ...] = ()
    """The parameters (or results) concerned."""
    num_names: int = 0
    """How many there are, wrong or right."""
    over: tuple[str, ...] | None = None
    """The axes over which it goes wrong, where these are not simply those of `where`."""
    by: Factor | None = None
    """By which gradients (or results) are multiplied, where that is what is wrong."""

    @property
    def axes(self) -> tuple[str, ...]:
        return self.where.axes if self.over is None else self.over

    @property
    def factor(self) -> str:
        """`sequence⁻¹`, or nothing."""
        return "" if self.by is None else str(self.by)

    @property
    def meshes(self) -> tuple[str, ...]:
        return tuple(map(str, self.where.meshes))


# A step that does not end well, or that starts from something else than the single device: nothing can be compared.


@dataclass(frozen=True)
class StepFails(Cause):
    """A rank raises."""

    kind = "failure"
    message: str = ""
    rank: int = 0


@dataclass(frozen=True)
class UnlikeCollectives(Cause):
    """Ranks of a group meet in collectives that are not the same."""

    kind = "failure"
    line: str = ""
    """The user's line where it was noticed."""
    rank: int = 0


@dataclass(frozen=True)
class Hang(Cause):
    """A rank waits for another that does not answer."""

    kind = "failure"


@dataclass(frozen=True)
class WrongWeights(Cause):
    """Ranks start from other weights than the single device."""

    kind = "weights"


@dataclass(frozen=True)
class RepeatedShard(Cause):
    """Every rank holds the same shard of a parameter."""

    kind = "weights"


@dataclass(frozen=True)
class DifferentDraws(Cause):
    """Ranks that share a sample were given different tensors."""

    kind = "inputs"


@dataclass(frozen=True)
class WrongInput(Cause):
    """Ranks were given other tensors than the single device."""

    kind = "inputs"


@dataclass(frozen=True)
class SameSamples(Cause):
    """All data ranks have one and the same gradient: of their average nothing can be told."""

    kind = "inputs"


# Wrong gradients.


@dataclass(frozen=True)
class Place:
    """How far from the loss the first wrong gradient is, in the order of backward."""

    nearest: str
    num_right_before: int


@dataclass(frozen=True)
class MissingGradient(Cause):
    """One side has a gradient and the other has none."""

    kind = "missing gradient"
    side: Side = "none"


@dataclass(frozen=True)
class HeldBack(Cause):
    """FSDP2 was told not to add gradients up over replicas, and was never told to."""

    kind = "missing sum"


@dataclass(frozen=True)
class MissingSum(Cause):
    """The ranks along some axes (`over`) hold parts of one gradient, which nobody adds up; the sum is off `by`."""

    kind = "missing sum"
    is_average: bool = False
    place: Place | None = None
    """Where fewer than half of the parameters are concerned."""


@dataclass(frozen=True)
class Scale(Cause):
    """Every rank has the right gradient times a factor that goes with the degrees of the mesh."""

    kind = "scale"
    is_everywhere: bool = True
    """Whether the factor holds on all meshes; otherwise on those of `where`."""
    data_powers: tuple[int, ...] = ()
    """Exponents of the degrees of data axes, and of those of other axes."""
    sharing_powers: tuple[int, ...] = ()
    place: Place | None = None
    """Where not all parameters are concerned."""


@dataclass(frozen=True)
class StrangeScale(Cause):
    """One factor on all ranks of a mesh, which goes with no degree."""

    kind = "scale"
    factors: tuple[tuple[str, float], ...] = ()
    """By mesh."""


@dataclass(frozen=True)
class ScaledByShares(Cause):
    """Each rank's part of the gradient is multiplied by a factor of its own."""

    kind = "shares"
    factors: tuple[float, ...] = ()
    shares: str = ""
    """`4:4:3`, where the factors are shares of a whole."""
    data_axes: tuple[str, ...] = ()
    """Axes along which the factors differ and whose ranks see different samples."""

    @property
    def factor(self) -> str:
        return "share" if self.shares else ""


@dataclass(frozen=True)
class Origin:
    """The first module whose forward is wrong."""

    name: str | None
    """None where no output is wrong, as far as can be told."""
    are_inputs_right: bool | None = True
    """False where what it was given was wrong already, and no module before it was; None where that cannot be told.

    Where no output is wrong: whether the model's own is known to be right.
    """
    before: str | None = None
    """The first module that was given something wrong, where the origin has several."""


@dataclass(frozen=True)
class WrongValues(Cause):
    """No factor and no sum makes these gradients right."""

    kind = "values"
    error: float = 0.0
    """The largest, relative to the largest magnitude."""
    origin: Origin | None = None
    first_wrong: tuple[str, ...] = ()
    """The wrong parameters of the module whose gradient is the first to be wrong."""
    place: Place | None = None


@dataclass(frozen=True)
class RightToFp32(Cause):
    """Gradients that differ by what fp32 leaves."""

    kind = "values"
    error: float = 0.0


@dataclass(frozen=True)
class Consequence(Cause):
    """Wrong gradients whose cause is found already."""

    kind = "values"


# What is wrong beside gradients.


@dataclass(frozen=True)
class ClippedByOtherNorms(Cause):
    """Ranks clip by other norms than that of the whole gradient."""

    kind = "clipping"


@dataclass(frozen=True)
class ClippedByFactor(Cause):
    """After clipping a factor is left on all gradients."""

    kind = "clipping"


@dataclass(frozen=True)
class ClippedTooEarly(Cause):
    """Ranks clip their own parts of a gradient, before these are added up over some axes (`over`)."""

    kind = "clipping"


@dataclass(frozen=True)
class StaleOptimizer(Cause):
    """The optimizer steps tensors that the model has replaced."""

    kind = "optimizer"


@dataclass(frozen=True)
class OutsideParameters(Cause):
    """The loss reaches parameters that the model does not have; `names` are their shapes."""

    kind = "outside"


@dataclass(frozen=True)
class WrongResult(Cause):
    """What the step returns, or the gradients of the model's inputs."""

    kind = "result"
    is_input: bool = False
    is_everywhere: bool = True
