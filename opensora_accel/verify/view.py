"""The meshes that were tried, and on which of them something shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from opensora_accel.verify.findings import Blame, Finding, Kind, blame, compose_axes, join
from opensora_accel.verify.fit import Samples
from opensora_accel.verify.results import MeshResult
from opensora_accel.verify.shapes import MeshShape


class View:
    """Every mesh's result, and what all diagnosis asks of them."""

    def __init__(self, results: Sequence[MeshResult]):
        self.results = list(results)
        self.ran = [each for each in results if each.observations]
        """Meshes on which the step ran to its end."""
        self.axes = _used_axes([each.shape for each in results])
        self.data_axes = results[0].shape.data_axes
        expected = results[0].expected
        self.names = list(expected.gradients)
        self.weight_names = list(expected.weights)
        self.backward_order = [name for name in expected.backward_order if name in self.names]

    def wrong_parameters(self) -> dict[str, list[Samples]]:
        """On all meshes, those that are wrong on one of them."""
        found = [each.parameters() for each in self.ran]
        by_name = {name: [samples[name] for samples in found if name in samples] for name in self.names}
        return {name: each for name, each in by_name.items() if any(not s.is_right for s in each)}

    def scalars(self, result: MeshResult) -> dict[str, Samples]:
        """Of what the step returned on a mesh. Numbers of parts stand for the whole where they do on all meshes."""
        return result.scalars(self._of_parts)

    @cached_property
    def _of_parts(self) -> set[str]:
        names = self.results[0].expected.scalars
        return {name for name in names if all(each.are_parts(name) for each in self.ran)}

    def blame(self, bad: Sequence[MeshShape], among: Sequence[MeshResult] | None = None) -> Blame:
        """The axes that an error goes with which shows on the meshes `bad` and not on the others."""
        shapes = [each.shape for each in (self.ran if among is None else among)]
        found = blame(bad, [s for s in shapes if s not in bad], self.axes)
        composed = compose_axes(found.axes, self.axes)
        if composed != found.axes and found.words.startswith("over "):
            return Blame(composed, f"over {join(composed, 'or')}")
        return Blame(composed, found.words)

    def finding(
        self, kind: Kind, what: str, remedy: str, by_name: Mapping[str, Sequence[MeshShape]]
    ) -> Finding:
        """The finding on these names and the meshes on which each shows; `{where}` in `what` becomes the axes."""
        shapes = list(dict.fromkeys(shape for each in by_name.values() for shape in each))
        where = self.blame(shapes)
        told = what.replace("{where}", where.words)
        return Finding(kind, told, remedy, where.axes, names=tuple(by_name), meshes=shape_names(shapes))


def _used_axes(shapes: Sequence[MeshShape]) -> tuple[str, ...]:
    names = dict.fromkeys(axis for shape in shapes for axis in shape.axes)
    return tuple(axis for axis in names if any(shape.degree(axis) > 1 for shape in shapes))


def wrong_shapes(wrong: Mapping[str, Sequence[Samples]]) -> list[MeshShape]:
    """Meshes on which any of them is wrong."""
    return list(dict.fromkeys(s.shape for samples in wrong.values() for s in samples if not s.is_right))


def shape_names(shapes: Iterable[MeshShape]) -> tuple[str, ...]:
    return tuple(str(shape) for shape in shapes)
