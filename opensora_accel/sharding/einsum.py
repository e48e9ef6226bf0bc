"""Four rules that say, for one mesh axis, where an einsum's result lies, and what must be communicated first.

    1. All operands replicated → the result is replicated; all of them Invariant → it is Invariant.
    2. A label sharded in every operand that has it, all other operands replicated → the result is sharded along it
       where it is kept, and Partial where it is summed.
    3. One operand Partial, all others replicated → Partial. Sums and averages pass through, because an einsum is linear
       in each operand; a largest or smallest term only where nothing is added or multiplied.
    4. Everything else needs a collective first. The error names it.

A linear layer, `sbi,io->sbo`, on three ranks, as column- and then as row-parallel:

    weight cut along o    rank r holds a third of the columns. The label o is kept: the output is S(o)      (rule 2)
    weight cut along i    the input must be cut along i as well. The label i is summed: each rank has a
                          term of every output, P, and an all-reduce makes it whole                         (rule 2)
    only the weight cut   the input has the label i too and is whole: a rank would multiply its third with
    along i               all of it. The error says: split the input along i                                (rule 4)

Mesh axes are independent of each other: each rule holds for the shares that the other axes leave.

The gradient of an operand is an einsum too, with the letters swapped: of the output's gradient and the other
operands. Its placement is always the dual of the operand's (R ↔ P, S ↔ S, I ↔ I), which `derive_gradients` derives by
the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opensora_accel.sharding.equation import Equation
from opensora_accel.sharding.placement import LINEAR, Invariant, Partial, Placement, Replicate, Shard, dual

# By mesh axis, in the mesh's order. An axis that is left out replicates.
Placements = Mapping[str, Placement]


class ShardingError(ValueError):
    """No rule fits. Says which operand is in the way, and the collectives that would make room."""

    def __init__(self, message: str, operand: int, remedies: Sequence[str]):
        super().__init__(f"{message}; " + ", or ".join(remedies))
        self.operand, self.remedies = operand, tuple(remedies)


@dataclass(frozen=True)
class Derivation:
    """Where a result lies along one mesh axis, and by which rule."""

    placement: Placement
    rule: int
    words: str


def derive(
    equation: Equation, placements: Sequence[Placements], *, names: Sequence[str] | None = None
) -> dict[str, Derivation]:
    """For every mesh axis, the placement of the output.

    Args:
        placements: for each operand, its placement on each mesh axis.
        names: of the operands, for messages; by default their labels.

    Raises:
        ShardingError: a collective is needed first.
        ValueError: a placement that the operand cannot have.
    """
    names = names or ["".join(labels) for labels in equation.operands]
    if len(placements) != len(equation.operands) or len(names) != len(equation.operands):
        raise ValueError(
            f"{equation} has {len(equation.operands)} operands; got {len(placements)} placements, {len(names)} names"
        )
    # In the order in which they are met, which makes messages the same from run to run.
    axes = dict.fromkeys(axis for each in placements for axis in each)
    derived = {}
    for axis in axes:
        on_axis = [each.get(axis, Replicate()) for each in placements]
        derived[axis] = _derive_on_axis(equation, on_axis, names, axis)
    return derived


def derive_gradients(
    equation: Equation, placements: Sequence[Placements], *, names: Sequence[str] | None = None
) -> list[dict[str, Derivation]]:
    """For every operand and mesh axis, the placement of its gradient, where the output's gradient lies dual to it."""
    names = list(names or ["".join(labels) for labels in equation.operands])
    outputs = {axis: derived.placement for axis, derived in derive(equation, placements, names=names).items()}
    gradients = []
    for operand in range(len(equation.operands)):
        transposed, alone = equation.transpose(operand)
        others = [i for i in range(len(equation.operands)) if i != operand]
        of_output = {axis: dual(placement) for axis, placement in outputs.items()}
        sources: list[Placements] = [of_output, *(placements[i] for i in others)]
        source_names = ["the output's gradient", *(names[i] for i in others)]
        # A label that this operand alone has was summed over: its gradient is repeated along it, by an einsum
        # with ones.
        if alone:
            # The ones are cut as the operand is, so that its gradient comes out in its shares.
            cut = {a: p for a, p in placements[operand].items() if isinstance(p, Shard) and p.label in alone}
            sources.append(cut)
            source_names.append("ones")
        gradients.append(derive(transposed, sources, names=source_names))
    return gradients


def _derive_on_axis(
    equation: Equation, placements: Sequence[Placement], names: Sequence[str], axis: str
) -> Derivation:
    _check(equation, placements, names, axis)
    # I stands apart from R: its gradient is whole on every rank, where that of R comes in terms.
    invariant = [i for i, p in enumerate(placements) if isinstance(p, Invariant)]
    if len(invariant) == len(placements):
        words = f"all operands are the same on every rank of {axis}, and all ranks compute alike: I (rule 1)"
        return Derivation(Invariant(), 1, words)
    # Beside shards or terms a rank computes a part of the gradient only, where an I one is whole on each.
    if invariant:
        name = names[invariant[0]]
        raise ShardingError(
            f"{name} is I over {axis} and meets operands that are not: its gradient would come in terms",
            invariant[0],
            [f"make {name} R over {axis} (nothing in forward, an all-reduce in backward)"],
        )
    partial = [i for i, p in enumerate(placements) if isinstance(p, Partial)]
    sharded = [i for i, p in enumerate(placements) if isinstance(p, Shard)]
    if not partial and not sharded:
        return Derivation(
            Replicate(), 1, f"all operands are replicated over {axis}: so is the result (rule 1)"
        )
    # Terms come first: whatever shards stand beside them, a product of terms would be wrong.
    if partial:
        return _from_partial(equation, placements, names, axis, partial, sharded)
    return _from_shards(equation, placements, names, axis, sharded)


def _check(equation: Equation, placements: Sequence[Placement], names: Sequence[str], axis: str) -> None:
    for number, (placement, labels) in enumerate(zip(placements, equation.operands, strict=True)):
        if not isinstance(placement, Shard):
            continue
        if placement.label not in labels:
            raise ValueError(
                f"{names[number]} is sharded along {placement.label!r} over {axis}, but its labels are "
                f"{''.join(labels)}"
            )
        if labels.count(placement.label) > 1:
            raise ValueError(
                f"{names[number]} repeats the label {placement.label!r}: a diagonal is no product of shards, since the "
                f"ranks of {axis} hold no square blocks of it; take the diagonal first and give it one label"
            )
        if placement.label in equation.broadcast[number]:
            raise ValueError(
                f"{names[number]} has size 1 along {placement.label!r} and is repeated there: replicate it over {axis}"
            )


def _from_partial(
    equation: Equation,
    placements: Sequence[Placement],
    names: Sequence[str],
    axis: str,
    partial: Sequence[int],
    sharded: Sequence[int],
) -> Derivation:
    first = partial[0]
    placement = placements[first]
    assert isinstance(placement, Partial)
    reduce_first = f"all-reduce {names[first]} over {axis}"
    # (a1 + a2)(b1 + b2) has the products a1·b2 and a2·b1 too, and no rank holds both of their factors.
    if len(partial) > 1:
        second = names[partial[1]]
        raise ShardingError(
            f"{names[first]} and {second} are both Partial over {axis}: a product of sums is not the sum of the "
            "products of their terms",
            partial[1],
            [reduce_first, f"all-reduce {second}"],
        )
    if sharded:
        other = placements[sharded[0]]
        raise ShardingError(
            f"{names[first]} is Partial and {names[sharded[0]]} is {other} over {axis}: each rank's term would meet "
            "one shard only",
            first,
            [reduce_first, *_reduce_scatter(equation, first, other, names, axis)],
        )
    # The largest of transposed terms is the transposed largest; the largest of products is something else.
    only_rearranges = len(equation.operands) == 1 and set(equation.operands[0]) == set(equation.output)
    if placement.reduction not in LINEAR and not only_rearranges:
        raise ShardingError(
            f"{names[first]} is {placement} over {axis}: the {placement.reduction} of terms does not pass through "
            "products and sums",
            first,
            [f"all-reduce {names[first]} over {axis} by {placement.reduction}"],
        )
    return Derivation(
        placement,
        3,
        f"{names[first]} is {placement} over {axis} and the einsum is linear in it: so is the result (rule 3)"
        if placement.reduction in LINEAR
        else f"{names[first]} is {placement} over {axis} and is only rearranged: so is the result (rule 3)",
    )


def _reduce_scatter(
    equation: Equation, operand: int, shard: Placement, names: Sequence[str], axis: str
) -> list[str]:
    # Half of an all-reduce is enough: each rank keeps of the sum what meets its shard of the other operand.
    if isinstance(shard, Shard) and equation.has(operand, shard.label):
        return [f"reduce-scatter it along {shard.label!r}"]
    return []


def _from_shards(
    equation: Equation,
    placements: Sequence[Placement],
    names: Sequence[str],
    axis: str,
    sharded: Sequence[int],
) -> Derivation:
    first = sharded[0]
    placement = placements[first]
    assert isinstance(placement, Shard)
    label = placement.label
    # Cut along two labels, rank r would multiply shard r of one with shard r of the other, and no rank the rest.
    for other in sharded[1:]:
        other_placement = placements[other]
        assert isinstance(other_placement, Shard)
        if other_placement.label != label:
            raise _two_labels(equation, names, axis, (first, label), (other, other_placement.label))
    # Rule 2 asks that every operand with the label is cut along it.
    for holder in equation.holders(label):
        if isinstance(placements[holder], Replicate):
            raise ShardingError(
                f"{names[first]} is sharded along {label!r} over {axis}, but {names[holder]} has that label too and is "
                "replicated: a rank would multiply its share with the whole",
                holder,
                [
                    f"split {names[holder]} along {label!r} (no communication in forward, an all-gather in backward)",
                    f"all-gather {names[first]} along {label!r}",
                ],
            )
    who = " and ".join(names[i] for i in sharded)
    verb = "are" if len(sharded) > 1 else "is"
    # With a label that is kept, a rank has its own part of the result. With one that is summed, it has a term
    # of all of it.
    if label in equation.output:
        words = (
            f"{who} {verb} sharded along {label!r} over {axis}, which the result keeps: S({label}) (rule 2)"
        )
        return Derivation(Shard(label), 2, words)
    words = (
        f"{who} {verb} sharded along {label!r} over {axis}, which is summed: each rank has a term, P (rule 2)"
    )
    return Derivation(Partial(), 2, words)


def _two_labels(
    equation: Equation, names: Sequence[str], axis: str, one: tuple[int, str], two: tuple[int, str]
) -> ShardingError:
    remedies = [
        f"all-gather {names[two[0]]} along {two[1]!r}",
        f"all-gather {names[one[0]]} along {one[1]!r}",
    ]
    # Less is sent than by a gather, where one operand has both labels: its shares only change direction.
    if equation.has(two[0], one[1]):
        remedies.insert(0, f"all-to-all {names[two[0]]} from {two[1]!r} to {one[1]!r}")
    elif equation.has(one[0], two[1]):
        remedies.insert(0, f"all-to-all {names[one[0]]} from {one[1]!r} to {two[1]!r}")
    return ShardingError(
        f"{names[one[0]]} is sharded along {one[1]!r} and {names[two[0]]} along {two[1]!r} over {axis}: the ranks "
        "would hold blocks of a diagonal",
        two[0],
        remedies,
    )
