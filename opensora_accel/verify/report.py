"""What was verified and found, as text and for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opensora_accel.verify.findings import Finding, join, list_names
from opensora_accel.verify.fit import Samples, magnitude
from opensora_accel.verify.results import MeshResult
from opensora_accel.verify.view import View

_BESIDE = {
    "inputs": "the samples that ranks were given do not prove the average between them",
    "clipping": "not what is left of it after clipping",
    "optimizer": "the optimizer does not train them all",
    "outside": "not all that is trained was compared",
    "result": "not what the step returns or hands upstream",
}
"""What may be wrong beside gradients, by the kind of finding, in words for the verdict."""


@dataclass
class Report:
    """`ok`, findings (root causes first), and every mesh's figures."""

    results: Sequence[MeshResult]
    findings: Sequence[Finding]
    seconds: float
    seeded: Sequence[str] = ()
    """Default generators whose seed counts, which the step left to others."""

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def notes(self) -> list[str]:
        """What a reader should know of the proof: what was changed for it, and what it does not cover."""
        first = self.results[0].expected.turns[0]
        notes = list(first.notes)
        unproven = self.unproven()
        if unproven:
            notes.append(
                f"{len(unproven)} parameters could not be told: their gradient is zero, or rounding errors, on one "
                f"device too ({list_names(unproven)})"
            )
        tied = self._tied_axes()
        if tied:
            notes.append(
                f"the degrees of {join(tied)} go together on these meshes: which of them a factor belongs to cannot be "
                "told; add meshes on which each is alone"
            )
        idle = [name for name, gradient in self.results[0].expected.gradients.items() if gradient is None]
        if idle:
            notes.append(f"{len(idle)} parameters take no part in the loss ({list_names(idle)})")
        return notes

    def _tied_axes(self) -> list[str]:
        """Axes whose powers these meshes cannot tell apart."""
        axes = list(
            dict.fromkeys(axis for result in self.results for axis, n in result.shape.degrees if n > 1)
        )
        rows = [[math.log(result.shape.degree(axis)) for axis in axes] for result in self.results]
        rank = int(torch.linalg.matrix_rank(torch.tensor(rows, dtype=torch.float64)))
        return axes if rank < len(axes) else []

    def unproven(self) -> list[str]:
        expected, floor = self.results[0].expected.gradients, self.results[0].expected.floor
        return [
            name
            for name, gradient in expected.items()
            if gradient is not None and magnitude(gradient) <= floor
        ]

    def __str__(self) -> str:
        gradients = self.results[0].expected.gradients
        lines = [
            f"verified in fp64: {len(gradients)} parameters on {len(self.results)} meshes, {self.seconds:.1f} s"
        ]
        view = View(self.results)
        width = max(len(str(result.shape)) for result in self.results)
        for result in self.results:
            lines.append(
                f"  {'✓' if _is_right(result, view) else '✗'} {result.shape!s:{width}}  {_describe(result)}"
            )
        if self.findings:
            lines.append("")
            for number, finding in enumerate(self.findings, 1):
                lines += [f"{number}. {finding.what}", f"   {finding.remedy}"]
        if self.notes:
            lines.append("")
            lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, "", self.verdict()])

    def verdict(self) -> str:
        """In one sentence."""
        if not self.findings:
            return f"the gradients are those of a single device{self._assumption()}"
        kinds = {finding.kind for finding in self.findings}
        failed = [result for result in self.results if result.errors]
        if kinds == {"failure"} and len(failed) < len(self.results):
            return (
                f"the step fails on {len(failed)} of {len(self.results)} meshes; on the others the gradients are those "
                "of a single device"
            )
        if not kinds <= set(_BESIDE):
            return "the gradients are NOT those of a single device"
        but = join([words for kind, words in _BESIDE.items() if kind in kinds])
        return f"every gradient that was compared is that of a single device, but {but}"

    def _assumption(self) -> str:
        """What the proof took for granted: how generators are seeded that the step only draws from."""
        if not self.seeded:
            return ""
        return (
            f", if the loop seeds the default generator of {join(self.seeded)} by the data rank: what the step draws "
            "from it counts, and here it was seeded so; ranks that share a sample and are seeded by their rank draw "
            "different noise"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON: infinite errors are null."""
        view = View(self.results)
        return {
            "ok": self.ok,
            "verdict": self.verdict(),
            "seeded": list(self.seeded),
            "seconds": self.seconds,
            "findings": [finding.to_dict() for finding in self.findings],
            "notes": self.notes,
            "unproven": self.unproven(),
            "meshes": [
                {
                    "mesh": str(result.shape),
                    "degrees": dict(result.shape.degrees),
                    "ok": _is_right(result, view),
                    "seconds": result.seconds,
                    "errors": {str(rank): text for rank, text in result.errors.items()},
                    "parameters": _errors(result.parameters()),
                    "inputs": _errors(result.inputs()) if result.observations else {},
                    "results": _errors(view.scalars(result)),
                }
                for result in self.results
            ],
        }

    def findings_of(self, result: MeshResult) -> list[Finding]:
        """Those that show on this mesh."""
        return [finding for finding in self.findings if str(result.shape) in finding.meshes]


def _is_right(result: MeshResult, view: View) -> bool:
    if result.errors:
        return False
    compared = [result.parameters(), result.inputs(), view.scalars(result)]
    return not result.one_sided() and all(each.is_right for samples in compared for each in samples.values())


def _describe(result: MeshResult) -> str:
    if result.errors:
        return f"failed on {len(result.errors)} of {result.shape.world_size} ranks"
    parameters = result.parameters()
    wrong = [each for each in parameters.values() if not each.is_right]
    worst = max((each.error() for each in parameters.values()), default=0.0)
    count = f"{len(wrong)} of {len(parameters)} wrong" if wrong else f"{len(parameters)} right"
    inputs = result.inputs()
    if inputs:
        bad = sum(not each.is_right for each in inputs.values())
        count += f", inputs: {bad} of {len(inputs)} wrong" if bad else f", {len(inputs)} inputs right"
    return f"{count}, largest error {worst:.1e}"


def _errors(samples: dict[str, Samples]) -> dict[str, float | None]:
    errors = {name: each.error() for name, each in samples.items()}
    return {name: error if math.isfinite(error) else None for name, error in errors.items()}
