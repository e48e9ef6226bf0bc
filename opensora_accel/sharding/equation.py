"""An einsum's letters: which operand has which label, what is kept, what is summed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ELLIPSIS = "..."

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Equation:
    """`operands` → `output`, each a tuple of labels; an operand that repeats one is its diagonal.

    Labels from an ellipsis are called ...1 (the last dim), ...2.
    """

    operands: tuple[Labels, ...]
    output: Labels
    # For each operand, its labels of size 1 that are larger elsewhere: it is repeated along them.
    broadcast: tuple[frozenset[str], ...] = field(default=())

    def __post_init__(self) -> None:
        # The default hangs on the number of operands, and a frozen dataclass is set in this way only.
        if not self.broadcast:
            object.__setattr__(self, "broadcast", (frozenset(),) * len(self.operands))
        refuse_repeats(self.output, "the output")
        known = set().union(*self.operands)
        for label in self.output:
            if label not in known:
                raise ValueError(f"the output has the label {label!r}, which no operand has: {self}")

    def __str__(self) -> str:
        return ",".join(map("".join, self.operands)) + "->" + "".join(self.output)

    def has(self, operand: int, label: str) -> bool:
        """Whether the operand varies along the label."""
        return label in self.operands[operand] and label not in self.broadcast[operand]

    def holders(self, label: str) -> list[int]:
        return [i for i in range(len(self.operands)) if self.has(i, label)]

    @property
    def labels(self) -> Labels:
        """All of them, in order of first appearance."""
        return tuple(dict.fromkeys(label for operand in self.operands for label in operand))

    @classmethod
    def parse(cls, text: str, shapes: Sequence[Sequence[int]] | None = None) -> Equation:
        """The equation of torch.einsum's notation. An ellipsis needs the operands' shapes, and so does a broadcast.

        Without `->` the output has the labels that occur once, in alphabetical order, as in NumPy.

        Raises:
            ValueError: the text is no equation, or the shapes do not fit it.
        """
        left, arrow, right = text.replace(" ", "").partition("->")
        terms = left.split(",")
        if shapes is not None and len(shapes) != len(terms):
            raise ValueError(f"{text!r} has {len(terms)} operands, but {len(shapes)} shapes were given")
        num_dims = [
            _ellipsis_dims(term, None if shapes is None else shapes[i], text) for i, term in enumerate(terms)
        ]
        # Ellipses meet at their last dims, as in NumPy: a shorter one lacks the first labels of the longest.
        most = max(num_dims)
        operands = tuple(_labels(term, number, text) for term, number in zip(terms, num_dims, strict=True))
        if arrow:
            output = _labels(right, most if ELLIPSIS in right else 0, text)
        else:
            # A letter that occurs twice is summed over. What the ellipses stand for is always kept, and comes first.
            counts = Counter(
                label for labels in operands for label in labels if not label.startswith(ELLIPSIS)
            )
            kept = sorted(label for label, count in counts.items() if count == 1)
            output = (*_dots(most), *kept)
        broadcast: tuple[frozenset[str], ...] = ()
        if shapes is not None:
            sizes = sizes_of(operands, shapes, text)
            # Size 1 beside a larger one: the operand is repeated along that label.
            broadcast = tuple(
                frozenset(
                    label for label, size in zip(labels, shape, strict=True) if size == 1 and sizes[label] > 1
                )
                for labels, shape in zip(operands, shapes, strict=True)
            )
        return cls(operands, output, broadcast)

    def transpose(self, operand: int) -> tuple[Equation, Labels]:
        """The einsum that gives the gradient of `operand`, of: the output's gradient, then the other operands, then,
        where labels of the operand occur nowhere else, a tensor of ones with these, which are returned too.

        Labels along which the operand was repeated are summed, and come back with size 1.
        """
        others = [i for i in range(len(self.operands)) if i != operand]
        sources = [self.output, *(self.operands[i] for i in others)]
        # Beside a diagonal, "ii", the gradient is zero elsewhere: what is derived is the diagonal's.
        wanted = tuple(dict.fromkeys(label for label in self.operands[operand] if self.has(operand, label)))
        # Along a label that nobody else has, the operand was summed: its gradient is the same all along it.
        known = set(self.output).union(*(set(self.operands[i]) - self.broadcast[i] for i in others))
        alone = tuple(label for label in wanted if label not in known)
        broadcast = [frozenset[str](), *(self.broadcast[i] for i in others)]
        if alone:
            sources.append(alone)
            broadcast.append(frozenset())
        return Equation(tuple(sources), wanted, tuple(broadcast)), alone


def refuse_repeats(labels: Labels, name: str) -> None:
    """Refuses a tensor that is made with two dims of one label.

    Raises:
        ValueError: a label is repeated.
    """
    for label, count in Counter(labels).items():
        if count > 1:
            raise ValueError(f"{name} repeats the label {label!r}; give each of its dims a label of its own")


def _ellipsis_dims(term: str, shape: Sequence[int] | None, text: str) -> int:
    letters = term.replace(ELLIPSIS, "")
    if not letters.isalpha() and letters:
        raise ValueError(f"labels are letters; got {term!r} in {text!r}")
    if ELLIPSIS not in term:
        if shape is not None and len(shape) != len(letters):
            raise ValueError(
                f"{term!r} in {text!r} has {len(letters)} labels, but its shape is {tuple(shape)}"
            )
        return 0
    if term.count(ELLIPSIS) > 1:
        raise ValueError(f"{term!r} in {text!r} has more than one ellipsis")
    if shape is None:
        raise ValueError(f"{text!r} has an ellipsis: give the operands' shapes, so that its dims are known")
    if len(shape) < len(letters):
        raise ValueError(
            f"{term!r} in {text!r} needs {len(letters)} dims or more; its shape is {tuple(shape)}"
        )
    return len(shape) - len(letters)


def _dots(number: int) -> Labels:
    return tuple(f"{ELLIPSIS}{place}" for place in range(number, 0, -1))


def _labels(term: str, num_dots: int, text: str) -> Labels:
    before, dots, after = term.partition(ELLIPSIS)
    if not (before + after).isalpha() and before + after:
        raise ValueError(f"labels are letters; got {term!r} in {text!r}")
    return (*before, *(_dots(num_dots) if dots else ()), *after)


def sizes_of(
    operands: Sequence[Labels], shapes: Sequence[Sequence[int]], text: str = "the equation"
) -> Mapping[str, int]:
    """Every label's size; 1 gives way to what another operand has.

    Raises:
        ValueError: a label has two sizes, or a shape another number of dims than labels.
    """
    sizes: dict[str, int] = {}
    for labels, shape in zip(operands, shapes, strict=True):
        if len(labels) != len(shape):
            raise ValueError(f"{text}: the labels {''.join(labels)} do not fit the shape {tuple(shape)}")
        for label, size in zip(labels, shape, strict=True):
            known = sizes.get(label, 1)
            if size != known and 1 not in (size, known):
                raise ValueError(f"{text}: the label {label!r} has the sizes {known} and {size}")
            # Also an empty dim goes before a 1, which is repeated no times.
            sizes[label] = max(size, known) if size and known else 0
    return sizes
