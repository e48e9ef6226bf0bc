"""How one tensor lies along one mesh axis: whole on every rank, cut along a label, or as terms still to be combined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Reduction = Literal["sum", "avg", "max", "min"]
LINEAR = ("sum", "avg")


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Invariant:
    """Every rank holds the tensor, and its whole gradient: what all ranks compute alike, up to one loss.

    Replicate is the same tensor with a gradient in terms. To use an Invariant beside shards is to make it Replicate,
    which costs an all-reduce in backward (Megatron's f).
    """

    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True)
class Shard:
    """Every rank holds its share of `label`, by any sizes that all operands agree on."""

    label: str

    def __str__(self) -> str:
        return f"S({self.label})"


@dataclass(frozen=True)
class Partial:
    """Every rank holds a term of the tensor's size; the tensor is their sum (average, largest, smallest)."""

    reduction: Reduction = "sum"

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise ValueError(
                f"a Partial is reduced by {', '.join(get_args(Reduction))}; got {self.reduction!r}"
            )

    def __str__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"


Placement = Replicate | Invariant | Shard | Partial


def dual(placement: Placement) -> Placement:
    """The placement of a tensor's gradient, where every rank differentiates the sum of all ranks' losses.

    Each use of a replicated tensor on a rank of its own gives a term of the gradient: R ↔ P. A shard's gradient is
    the shard of the gradient: S ↔ S. What all ranks compute alike has one gradient: I ↔ I.

    Raises:
        ValueError: the placement is a largest, smallest or average term, which has no such rule.
    """
    if isinstance(placement, Replicate):
        return Partial()
    if isinstance(placement, (Shard, Invariant)):
        return placement
    if placement.reduction == "sum":
        return Replicate()
    raise ValueError(
        f"{placement} has no dual: a {placement.reduction} is not the sum of its terms; reduce it in forward"
    )


def parse_placement(text: str, labels: Sequence[str]) -> Placement:
    """The placement that is typed as a label, S(label), R, I, P, P(avg), P(max) or P(min).

    Args:
        labels: the labels of the tensor.

    Raises:
        ValueError: the text is none of these, or it is both a label and a placement.
    """
    if text in ("R", "I", "P") and text in labels:
        raise ValueError(
            f"{text!r} is a placement, and a label of {''.join(labels)} too; write S({text}) to cut the tensor along "
            "it, or give the label another letter"
        )
    if text == "R":
        return Replicate()
    if text == "I":
        return Invariant()
    if text == "P":
        return Partial()
    if text.startswith("P(") and text.endswith(")"):
        return Partial(text[2:-1])  # type: ignore[arg-type]  # checked there
    if text.startswith("S(") and text.endswith(")"):
        text = text[2:-1]
    if not text.isalpha():
        raise ValueError(f"a placement is a label, R, I, P, P(avg), P(max) or P(min); got {text!r}")
    return Shard(text)
