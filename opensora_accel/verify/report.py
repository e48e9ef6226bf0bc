"""What was verified and found: as text, for JSON, and as a JUnit report for CI servers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

import torch

from opensora_accel.verify.causes import Cause, join_words, list_names
from opensora_accel.verify.derivatives import Derivatives
from opensora_accel.verify.fit import Samples, magnitude
from opensora_accel.verify.in_bf16 import InBf16
from opensora_accel.verify.later_steps import Followed
from opensora_accel.verify.results import MeshResult, Results
from opensora_accel.verify.variations import Variations

# What may be wrong beside gradients, by the kind of cause, in words for the verdict.
_BESIDE_GRADIENTS = {
    "rounding": "in bf16 the step is not what it is in fp64",
    "forward": "the model computes something else without gradients",
    "inputs": "the samples that ranks were given do not prove the average between them",
    "clipping": "not what is left of it after clipping",
    "optimizer": "the optimizer does not train them all",
    "outside": "not all that is trained was compared",
    "data": "the samples that ranks load are not those that an epoch deals them",
    "state": "what one step leaves for the next is not that of one device",
    "steps": "the optimizer steps more or less often",
    "trained": "other parameters are trained",
    "update": "the optimizer makes something else of it",
    "result": "not what the step returns or hands upstream",
}
# From here on a common factor is told.
_SCALED = 1e-6
# Colours of a terminal, and characters that XML 1.0 has not.
_NOT_XML = re.compile(r"(\x1b\[[0-9;]*m)|[^\t\n\r\x20-\ud7ff\ue000-\ufffd]")


@dataclass(frozen=True)
class Report:
    """`ok`, what is wrong (root causes first), and every mesh's figures. It prints itself."""

    all_results: Results
    causes: Sequence[Cause]
    seconds: float
    derivatives: Derivatives = field(default_factory=Derivatives)  # of the single device
    followed: Followed = field(default_factory=Followed)  # optimizer steps
    in_bf16: InBf16 | None = None
    variations: Variations | None = None
    unproven_seeds: Sequence[str] = ()  # default generators whose seed counts, which the step left to others

    @property
    def ok(self) -> bool:
        return not self.causes

    @property
    def has_compared(self) -> bool:
        """Whether the step came to its end on a mesh. Otherwise nothing is known of its gradients."""
        return bool(self.all_results.ran)

    @property
    def findings(self) -> Sequence[Cause]:
        """The causes by the name that they have in JSON; every one has words (`what`, `remedy`)."""
        return self.causes

    @property
    def results(self) -> Sequence[MeshResult]:
        return self.all_results.meshes

    @property
    def notes(self) -> list[str]:
        """What a reader should know of the proof: what was changed for it, and what it does not cover."""
        expected, axes = self.all_results.expected, self.all_results.axes
        notes = list(expected.first.notes)
        unproven = self.unproven()
        if unproven:
            notes.append(
                f"{len(unproven)} parameters could not be judged: their gradient is zero, or rounding errors, on one "
                f"device too ({list_names(unproven)})"
            )
        # Factors are products of powers of degrees: their logarithms must be independent over the meshes.
        rows = [[math.log(mesh.shape.degree(axis)) for axis in axes] for mesh in self.results]
        if int(torch.linalg.matrix_rank(torch.tensor(rows, dtype=torch.float64))) < len(axes):
            notes.append(
                f"the degrees of {join_words(axes)} go together on these meshes: which of them a factor belongs to "
                "cannot be known; add meshes on which each is alone"
            )
        seen = [*expected.turns, *(each for mesh in self.results for each in mesh.observations)]
        lifted = list(dict.fromkeys(cast for each in seen for cast in each.lifted))
        if lifted:
            is_judged = self.in_bf16 is not None and not self.in_bf16.reason
            judged = "was judged in bf16" if is_judged else "is not proven (--dtype bf16 judges it)"
            notes.append(
                f"{len(lifted)} casts to half precision were lifted in fp64, and what they round in training {judged}: "
                f"{list_names(lifted)}"
            )
        if self.derivatives.stops and not self.derivatives.cut_off:
            notes.append(
                "the loss also depends on parameters by way of what is taken out of the graph, and was held constant: "
                f"{list_names(self.derivatives.stops)}"
            )
        if abs(self.derivatives.factor - 1) > _SCALED:
            notes.append(
                f"on one device gradients are {self.derivatives.factor:.6g} times those of what was backwarded, as the "
                "step leaves them"
            )
        idle = [
            name
            for name, gradient in expected.gradients.items()
            if gradient is None and name not in self.derivatives.cut_off
        ]
        if idle:
            notes.append(f"{len(idle)} parameters take no part in the loss ({list_names(idle)})")
        notes += self.followed.notes
        notes += [] if self.variations is None else self.variations.notes
        return notes

    def unproven(self) -> list[str]:
        """Parameters whose gradient is too small to be compared."""
        expected = self.all_results.expected
        gradients = expected.gradients.items()
        return [name for name, g in gradients if g is not None and magnitude(g) <= expected.floor]

    def verdict(self) -> str:
        """In one sentence."""
        # From the best case to the worst; the last is whatever is wrong beside gradients.
        kinds = {cause.kind for cause in self.causes}
        num_failed = sum(bool(mesh.errors) for mesh in self.results)
        if self.ok and self.unproven_seeds:
            return (
                "the gradients are those of a single device, if the loop seeds the default generator of "
                f"{join_words(self.unproven_seeds)} by the data rank: what the step draws from it counts, and here it "
                "was seeded so; ranks that share a sample and are seeded by their rank draw different noise"
            )
        if self.ok:
            return "the gradients are those of a single device"
        if not self.has_compared:
            return "nothing was compared: the step fails on every mesh"
        if all(cause.at for cause in self.causes):
            return f"the gradients are those of a single device as the step is given, but not {self.causes[0].at}"
        if kinds == {"failure"}:
            return (
                f"the step fails on {num_failed} of {len(self.results)} meshes; on the others the gradients are those "
                "of a single device"
            )
        if kinds & {"derivative", "plain"}:
            return "the gradients are NOT those of the loss, on one device already"
        # Any other kind is one of gradients, or makes their comparison pointless.
        if not kinds <= set(_BESIDE_GRADIENTS):
            return "the gradients are NOT those of a single device"
        but = join_words([words for kind, words in _BESIDE_GRADIENTS.items() if kind in kinds])
        return f"every gradient that was compared is that of a single device, but {but}"

    def __str__(self) -> str:
        num_parameters, num_meshes = len(self.all_results.names), len(self.results)
        lines = [
            f"verified in fp64: {num_parameters} parameters on {num_meshes} meshes, {self.seconds:.1f} s"
        ]
        # One line for every mesh, its figures in a column.
        width = max(len("other sizes"), *(len(str(mesh.shape)) for mesh in self.results))
        if self.derivatives.slopes or self.derivatives.reason:
            mark = "·" if self.derivatives.reason else "✗" if self.derivatives.causes_doubt else "✓"
            lines.append(f"  {mark} {'one device':{width}}  {self.derivatives}")
        for mesh in self.results:
            is_later = self.followed.is_wrong(mesh.shape)
            is_right = self.all_results.is_right(mesh) and not is_later
            steps = self.followed.describe(mesh.shape)
            first = "in step 1 " if is_later else ""
            lines.append(
                f"  {'✓' if is_right else '✗'} {mesh.shape!s:{width}}  {first}{_describe(mesh)}{steps}"
            )
        if self.variations is not None:
            mark = "✗" if self.variations.causes else "✓" if self.variations.tried else "·"
            lines.append(f"  {mark} {'other sizes':{width}}  {self.variations}")
        if self.in_bf16 is not None:
            mark = "·" if self.in_bf16.reason else "✗" if self.in_bf16.causes else "✓"
            lines.append(f"  {mark} {self.in_bf16}")
        # Causes and notes are paragraphs of their own, where there are any.
        lines += [""] if self.causes else []
        for number, cause in enumerate(self.causes, 1):
            # What it takes is said once of those that it takes the same to see.
            is_said = number > 1 and cause.at == self.causes[number - 2].at
            lines += [f"{number}. {cause.what if is_said else cause.sentence}", f"   {cause.remedy}"]
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join([*lines, "", self.verdict()])

    def to_dict(self) -> dict[str, Any]:
        """For JSON: infinite errors are null."""
        return {
            "ok": self.ok,
            "compared": self.has_compared,
            "verdict": self.verdict(),
            "in_bf16": None
            if self.in_bf16 is None
            else {
                "text": str(self.in_bf16),
                "error": self.in_bf16.error,
                "ratios": dict(self.in_bf16.ratios),
            },
            "variations": None
            if self.variations is None
            else {
                "tried": list(self.variations.tried),
                "refused": dict(self.variations.refused),
                "wrong": bool(self.variations.causes),
                "reason": self.variations.reason,
            },
            "one_device": {
                "text": str(self.derivatives),
                "error": self.derivatives.error,
                "directions": len(self.derivatives.slopes),
            },
            "seeded": list(self.unproven_seeds),
            "seconds": self.seconds,
            "findings": [cause.to_dict() for cause in self.causes],
            "notes": self.notes,
            "unproven": self.unproven(),
            "meshes": [
                {
                    "mesh": str(mesh.shape),
                    "degrees": dict(mesh.shape.degrees),
                    "ok": self.all_results.is_right(mesh) and not self.followed.is_wrong(mesh.shape),
                    "steps": self.followed.steps.get(mesh.shape, 0),
                    "seconds": mesh.seconds,
                    "errors": {str(rank): text for rank, text in mesh.errors.items()},
                    "parameters": _errors(mesh.parameters()),
                    "inputs": _errors(mesh.inputs()),
                    "results": _errors(self.all_results.scalars(mesh)),
                }
                for mesh in self.results
            ],
        }


def _describe(mesh: MeshResult) -> str:
    if mesh.errors:
        return f"failed on {len(mesh.errors)} of {mesh.shape.world_size} ranks"
    parameters, inputs = mesh.parameters(), mesh.inputs()
    num_wrong = sum(not each.is_right for each in parameters.values())
    worst = max((each.error() for each in parameters.values()), default=0.0)
    count = f"{num_wrong} of {len(parameters)} wrong" if num_wrong else f"{len(parameters)} right"
    if inputs:
        bad = sum(not each.is_right for each in inputs.values())
        count += f", inputs: {bad} of {len(inputs)} wrong" if bad else f", {len(inputs)} inputs right"
    return f"{count}, largest error {worst:.1e}"


def _errors(samples: Mapping[str, Samples]) -> dict[str, float | None]:
    errors = {name: each.error() for name, each in samples.items()}
    return {name: error if math.isfinite(error) else None for name, error in errors.items()}


def to_junit(report: Report | None, violations: Sequence[str] | None, error: str | None = None) -> str:
    """JUnit's XML: one test case for each mesh, and one for the communication (`violations` None: not recorded).

    `error`: why nothing, or not all, was compared.
    """
    cases: list[tuple[str, float, Sequence[str], str]] = []
    # A mesh fails with every cause that shows on it; a cause of no mesh fails none.
    if report is not None:
        for mesh in report.results:
            shown = [str(cause) for cause in report.causes if str(mesh.shape) in cause.meshes]
            failures = [*shown, *mesh.errors.values()]
            kind = "failure" if report.has_compared else "error"
            cases.append((f"gradients on {mesh.shape}", mesh.seconds, failures, kind))
    if violations is not None:
        cases.append(("communication", 0.0, violations, "failure"))
    if error is not None:
        cases.append(("verify", 0.0, [error], "error"))
    suite = ElementTree.Element("testsuite", name="opensora-accel verify", tests=str(len(cases)))
    for name, seconds, texts, kind in cases:
        case = ElementTree.SubElement(suite, "testcase", classname="verify", name=name, time=f"{seconds:.3f}")
        # The message is the first line; readers show the rest on demand.
        if texts:
            text = _NOT_XML.sub("", "\n".join(texts))
            ElementTree.SubElement(case, kind, message=text.splitlines()[0]).text = text
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("errors", str(len(suite.findall("testcase/error"))))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)
