"""Several einsums one after another: placements from the first tensor to the last, and every collective in between.

A chain is written step by step, in the order in which a model runs, with every redistribution named. Each step is
checked when it is added, by the rules of `einsum`. The gradient of every tensor lies dual to the tensor, whatever uses
it, so the collectives of backward follow from those of forward: a move from A to B is, in backward, one from the dual
of B to the dual of A.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opensora_accel.sharding.cost import (
    Balance,
    Collective,
    Link,
    einsum_flops,
    local_sizes,
    num_elements,
    redistribution,
)
from opensora_accel.sharding.einsum import derive
from opensora_accel.sharding.equation import Equation, Labels, refuse_repeats
from opensora_accel.sharding.placement import Invariant, Partial, Placement, Replicate, Shard, dual


@dataclass(frozen=True)
class Node:
    """A tensor of the chain: what it is made of, and where it lies on each axis."""

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
    """One redistribution of forward, and what it is in backward."""

    tensor: str
    axis: str
    before: Placement
    after: Placement
    forward: Collective | None
    backward: Collective | None


@dataclass(frozen=True)
class Left:
    """What no step does, and has to be done: terms at the end, and gradients in terms of what every rank holds."""

    what: str
    collective: Collective


class Chain:
    """`degrees`: ranks by mesh axis. `sizes`: of the labels, for bytes and FLOPs, which are 0 without them."""

    def __init__(
        self, degrees: Mapping[str, int], sizes: Mapping[str, int] | None = None, element_bytes: int = 2
    ):
        self.degrees, self.element_bytes = dict(degrees), element_bytes
        self.nodes: dict[str, Node] = {}
        self.moves: list[Move] = []
        self.flops = 0.0
        self._sizes = sizes

    def tensor(self, name: str, labels: str, **placements: Placement) -> str:
        """An input or a parameter; Invariant on the axes that are not named."""
        refuse_repeats(tuple(labels), f"{name}[{labels}]")
        for axis, placement in placements.items():
            if axis not in self.degrees:
                raise ValueError(f"{name}: there is no axis {axis!r}; the axes are {', '.join(self.degrees)}")
            if isinstance(placement, Shard) and placement.label not in labels:
                raise ValueError(f"{name}[{labels}] has no label {placement.label!r} to be sharded along")
        placed = {axis: placements.get(axis, Invariant()) for axis in self.degrees}
        return self._add(Node(name, tuple(labels), placed, "tensor"))

    def einsum(self, name: str, labels: str, *operands: str) -> str:
        """The product of the operands, by their letters."""
        nodes = [self._get(operand, name) for operand in operands]
        equation = Equation(tuple(node.labels for node in nodes), tuple(labels))
        found = derive(equation, [node.placements for node in nodes], names=operands)
        placed = {axis: found[axis].placement for axis in self.degrees}
        self._count(equation, nodes)
        return self._add(Node(name, tuple(labels), placed, "einsum", operands))

    def map(self, name: str, operand: str, along: str = "") -> str:
        """A function that is not linear: of every number alone, or (`along`) of whole rows, as softmax and norms."""
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
        """The sum of tensors that lie alike."""
        first, *others = (self._get(operand, name) for operand in operands)
        for other in others:
            if other.labels != first.labels or other.placements != first.placements:
                raise ValueError(
                    f"{name} adds {first} and {other}, which do not lie alike; move one of them first"
                )
        return self._add(Node(name, first.labels, first.placements, "add", operands))

    def rename(self, name: str, operand: str, labels: str) -> str:
        """The same tensor with other letters: keys are tokens too, but not the queries'."""
        node = self._get(operand, name)
        if len(labels) != len(node.labels):
            raise ValueError(f"{name}: {operand} has {len(node.labels)} labels; got {labels!r}")
        refuse_repeats(tuple(labels), f"{name}[{labels}]")
        for old, label in zip(node.labels, labels, strict=True):
            if self._sizes is not None and self._size(old) != self._size(label):
                raise ValueError(
                    f"{name}: {old!r} of {operand} is {self._size(old)} and {label!r} is {self._size(label)}; a rename "
                    "changes letters and no sizes"
                )
        new = dict(zip(node.labels, labels, strict=True))
        placed = {
            axis: Shard(new[p.label]) if isinstance(p, Shard) else p for axis, p in node.placements.items()
        }
        return self._add(Node(name, tuple(labels), placed, "rename", (operand,)))

    def move(self, name: str, operand: str, **placements: Placement) -> str:
        """The same tensor, placed otherwise on the axes that are named."""
        node = self._get(operand, name)
        placed = dict(node.placements)
        for axis, after in placements.items():
            if axis not in placed:
                raise ValueError(f"{name}: there is no axis {axis!r}; the axes are {', '.join(self.degrees)}")
            if isinstance(after, Shard) and after.label not in node.labels:
                raise ValueError(f"{name}: {operand}[{''.join(node.labels)}] has no label {after.label!r}")
            before = placed.pop(axis)
            forward = self._redistribution(before, after, axis, node.labels, placed)
            backward = self._redistribution(dual(after), dual(before), axis, node.labels, placed)
            self.moves.append(Move(operand, axis, before, after, forward, backward))
            placed[axis] = after
        ordered = {axis: placed[axis] for axis in self.degrees}
        return self._add(Node(name, node.labels, ordered, "move", (operand,)))

    def gradient(self, name: str) -> dict[str, Placement]:
        """Where the gradient of a tensor lies."""
        return {axis: dual(placement) for axis, placement in self._get(name, "gradient").placements.items()}

    @property
    def has_sizes(self) -> bool:
        return self._sizes is not None

    @property
    def left(self) -> list[Left]:
        """To be done besides the moves that the chain names."""
        used = {operand for node in self.nodes.values() for operand in node.operands}
        found = []
        for node in self.nodes.values():
            for axis, placement in node.placements.items():
                others = {other: placed for other, placed in node.placements.items() if other != axis}
                if node.name not in used and isinstance(placement, Partial):
                    what = f"{node.name} is left in terms over {axis}: forward"
                elif node.operation == "tensor" and node.name in used and isinstance(placement, Replicate):
                    what = f"{node.name} is R over {axis}, and its gradient comes in terms: backward"
                else:
                    continue
                reduced = self._redistribution(Partial(), Replicate(), axis, node.labels, others)
                assert reduced is not None
                found.append(Left(what, reduced))
        return found

    @property
    def collectives(self) -> list[Collective]:
        """Of forward and backward."""
        moved = [each for move in self.moves for each in (move.forward, move.backward) if each is not None]
        return [*moved, *(left.collective for left in self.left)]

    @property
    def sent_bytes(self) -> float:
        """By one rank, forward and backward."""
        return sum(collective.sent_bytes for collective in self.collectives)

    def balance(self, link: Link, flops_per_s: float) -> Balance:
        """Compute beside communication of one rank, forward and backward."""
        return Balance(self.flops / flops_per_s, sum(each.time_s(link) for each in self.collectives))

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

    def _size(self, label: str) -> int:
        assert self._sizes is not None
        return self._sizes[label]

    def _redistribution(
        self, before: Placement, after: Placement, axis: str, labels: Labels, others: Mapping[str, Placement]
    ) -> Collective | None:
        """Of a tensor that lies so on the other axes."""
        degree = self.degrees[axis]
        if self._sizes is None:
            return redistribution(before, after, axis, degree, 0)
        sizes = {label: self._size(label) for label in labels}
        left = local_sizes(sizes, [others], {other: self.degrees[other] for other in others})
        return redistribution(
            before, after, axis, degree, num_elements(labels, left) * self.element_bytes, left
        )

    def _count(self, equation: Equation, nodes: Sequence[Node]) -> None:
        """FLOPs of one rank, forward and backward: two einsums more, where both operands want a gradient."""
        if self._sizes is None:
            return
        left = local_sizes(self._sizes, [node.placements for node in nodes], self.degrees)
        self.flops += 3 * einsum_flops(equation, left)
