"""Several einsums one after another: placements from the first tensor to the last, and every collective in between.

A chain is written step by step, in the order in which a model runs, with every redistribution named. Each step is
checked when it is added, by the rules of `einsum`. The gradient of every tensor lies dual to the tensor, whatever uses
it, so the collectives of backward follow from those of forward: a move from A to B is, in backward, one from the dual
of B to the dual of A.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opensora_accel.sharding.collectives import (
    Collective,
    Figures,
    Pending,
    einsum_flops,
    local_sizes,
)
from opensora_accel.sharding.einsum import derive
from opensora_accel.sharding.equation import Equation, Labels, refuse_repeats
from opensora_accel.sharding.placement import Invariant, Partial, Placement, Replicate, Shard, dual


@dataclass(frozen=True)
class Node:
    """A tensor of the chain: its labels, its placement on each axis, and the step that made it."""

    name: str
    labels: Labels
    placements: Mapping[str, Placement]
    operation: str
    operands: tuple[str, ...] = ()
    along: Labels = ()

    def __str__(self) -> str:
        placed = " ".join(f"{axis}:{placement}" for axis, placement in self.placements.items())
        made = f" = {self.operation} {' '.join(self.operands)}" if self.operands else ""
        return f"{self.name}[{''.join(self.labels)}] {placed}{made}"


@dataclass(frozen=True)
class Move:
    """One redistribution: the collective of forward and that of backward, or None."""

    tensor: str
    axis: str
    before: Placement
    after: Placement
    forward: Collective | None
    backward: Collective | None


class Chain:
    """The steps of a block, in order; every method adds one, and returns the new tensor's name.

    Args:
        degrees: the number of ranks of each mesh axis.
        sizes: the size of each label. Without them bytes and FLOPs are 0.
        element_bytes: bytes of one element.

    Raises:
        ValueError: from every method, for a step that the rules forbid, and for a name, axis or label that is unknown.
    """

    def __init__(
        self, degrees: Mapping[str, int], sizes: Mapping[str, int] | None = None, element_bytes: int = 2
    ):
        self.degrees = dict(degrees)
        self.nodes: dict[str, Node] = {}
        self.moves: list[Move] = []
        self.flops = 0.0
        self._sizes = sizes
        self._figures = Figures(self.degrees, sizes, element_bytes)

    def tensor(self, name: str, labels: str, **placements: Placement) -> str:
        """Adds an input or a parameter. It is Invariant on the axes that are not named.

        Raises:
            ValueError: an axis or a label that is not there, or a label that is repeated.
        """
        refuse_repeats(tuple(labels), f"{name}[{labels}]")
        for axis, placement in placements.items():
            if axis not in self.degrees:
                raise ValueError(f"{name}: there is no axis {axis!r}; the axes are {', '.join(self.degrees)}")
            if isinstance(placement, Shard) and placement.label not in labels:
                raise ValueError(f"{name}[{labels}] has no label {placement.label!r} to be sharded along")
        # An input is the same on every rank unless the caller says something else.
        placed = {axis: placements.get(axis, Invariant()) for axis in self.degrees}
        return self._add(Node(name, tuple(labels), placed, "tensor"))

    def einsum(self, name: str, labels: str, *operands: str) -> str:
        """Adds the product of the operands, by their letters."""
        nodes = [self._get(operand, name) for operand in operands]
        equation = Equation(tuple(node.labels for node in nodes), tuple(labels))
        derived = derive(equation, [node.placements for node in nodes], names=operands)
        placed = {axis: derived[axis].placement for axis in self.degrees}
        if self._sizes is not None:
            # Backward has two einsums of the same size, where both operands want a gradient.
            local = local_sizes(self._sizes, [node.placements for node in nodes], self.degrees)
            self.flops += 3 * einsum_flops(equation, local)
        return self._add(Node(name, tuple(labels), placed, "einsum", operands))

    def map(self, name: str, operand: str, along: str = "") -> str:
        """Adds a function that is not linear: of each number, or of whole rows `along` labels (softmax, norms).

        Raises:
            ValueError: the operand is in terms, or a row that the function needs is cut.
        """
        node = self._get(operand, name)
        for label in along:
            if label not in node.labels:
                raise ValueError(
                    f"{name}: {operand}[{''.join(node.labels)}] has no label {label!r} to run along"
                )
        for axis, placement in node.placements.items():
            if isinstance(placement, Partial):
                raise ValueError(
                    f"{name}: {operand} is {placement} over {axis}, and the function of a sum is not the sum of the "
                    f"functions; move {operand} to I, R or a shard first"
                )
            if isinstance(placement, Shard) and placement.label in along:
                raise ValueError(
                    f"{name}: {operand} is {placement} over {axis}, and the function needs whole rows along "
                    f"{placement.label!r}; move it to another label first"
                )
        return self._add(Node(name, node.labels, node.placements, "map", (operand,), tuple(along)))

    def add(self, name: str, *operands: str) -> str:
        """Adds the sum of tensors that have the same labels and placements.

        Raises:
            ValueError: they have not.
        """
        first, *others = (self._get(operand, name) for operand in operands)
        for other in others:
            # A whole tensor added to terms would be counted once for every rank.
            if other.labels != first.labels or other.placements != first.placements:
                raise ValueError(
                    f"{name} adds {first} and {other}, which do not lie alike; move one of them first"
                )
        return self._add(Node(name, first.labels, first.placements, "add", operands))

    def rename(self, name: str, operand: str, labels: str) -> str:
        """Adds the same tensor with other letters: keys are tokens too, but not the queries'.

        Raises:
            ValueError: another number of labels, or other sizes.
        """
        node = self._get(operand, name)
        if len(labels) != len(node.labels):
            raise ValueError(f"{name}: {operand} has {len(node.labels)} labels; got {labels!r}")
        refuse_repeats(tuple(labels), f"{name}[{labels}]")
        for old, label in zip(node.labels, labels, strict=True):
            if self._sizes is not None and self._sizes[old] != self._sizes[label]:
                raise ValueError(
                    f"{name}: {old!r} of {operand} is {self._sizes[old]} and {label!r} is {self._sizes[label]}; a "
                    "rename changes letters and no sizes"
                )
        # A shard stays where it is and takes the new letter.
        new = dict(zip(node.labels, labels, strict=True))
        placed = {
            axis: Shard(new[p.label]) if isinstance(p, Shard) else p for axis, p in node.placements.items()
        }
        return self._add(Node(name, tuple(labels), placed, "rename", (operand,)))

    def move(self, name: str, operand: str, **placements: Placement) -> str:
        """Adds the same tensor with other placements on the axes that are named, one axis after another.

        Raises:
            ValueError: an axis or a label that is not there, or a move that no single collective does.
        """
        node = self._get(operand, name)
        placed = dict(node.placements)
        for axis, after in placements.items():
            if axis not in placed:
                raise ValueError(f"{name}: there is no axis {axis!r}; the axes are {', '.join(self.degrees)}")
            if isinstance(after, Shard) and after.label not in node.labels:
                raise ValueError(f"{name}: {operand}[{''.join(node.labels)}] has no label {after.label!r}")
            before = placed.pop(axis)  # what is left are the other axes
            forward = self._figures.redistribution(before, after, axis, node.labels, placed)
            # From the dual of what came out to the dual of what went in: S → R, an all-gather, has P → S in
            # backward, which is a reduce-scatter.
            backward = self._figures.redistribution(dual(after), dual(before), axis, node.labels, placed)
            self.moves.append(Move(operand, axis, before, after, forward, backward))
            placed[axis] = after
        # `pop` has moved these axes to the end; shown and listed they stand in the mesh's order.
        ordered = {axis: placed[axis] for axis in self.degrees}
        return self._add(Node(name, node.labels, ordered, "move", (operand,)))

    def gradient(self, name: str) -> dict[str, Placement]:
        """The placement of a tensor's gradient on each axis."""
        return {axis: dual(placement) for axis, placement in self._get(name, "gradient").placements.items()}

    @property
    def has_sizes(self) -> bool:
        return self._sizes is not None

    @property
    def pending(self) -> list[Pending]:
        """Reductions that no step does: of terms at the end, and of gradients that come in terms."""
        # A tensor that nothing uses is a result; what is in terms there, somebody has to add up.
        used = {operand for node in self.nodes.values() for operand in node.operands}
        collectives = []
        for node in self.nodes.values():
            for axis, placement in node.placements.items():
                others = {other: placed for other, placed in node.placements.items() if other != axis}
                if node.name not in used and isinstance(placement, Partial):
                    direction, why = "forward", f"{node.name} is left in terms over {axis}"
                # What a move made R has its all-reduce in the backward of that move; what began as R has none.
                elif node.operation == "tensor" and node.name in used and isinstance(placement, Replicate):
                    direction, why = (
                        "backward",
                        f"{node.name} is R over {axis}, and its gradient comes in terms",
                    )
                else:
                    continue
                # Either is an all-reduce along this axis, of what the other axes leave of the tensor on a rank.
                reduced = self._figures.redistribution(Partial(), Replicate(), axis, node.labels, others)
                assert reduced is not None
                collectives.append(Pending(direction, why, reduced))
        return collectives

    @property
    def collectives(self) -> list[Collective]:
        """All collectives of forward and backward."""
        moved = [each for move in self.moves for each in (move.forward, move.backward) if each is not None]
        return [*moved, *(pending.collective for pending in self.pending)]

    @property
    def sent_bytes(self) -> float:
        """The bytes that one rank sends, forward and backward."""
        return sum(collective.sent_bytes for collective in self.collectives)

    def _get(self, name: str, by: str) -> Node:
        if name not in self.nodes:
            raise ValueError(
                f"{by}: there is no tensor {name!r} yet; there are {', '.join(self.nodes) or 'none'}"
            )
        return self.nodes[name]

    def _add(self, node: Node) -> str:
        if node.name in self.nodes:
            raise ValueError(f"the chain has a tensor {node.name!r} already")
        self.nodes[node.name] = node
        return node.name
