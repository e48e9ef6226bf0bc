"""From numbers to findings: what is wrong with a step, the root causes first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from opensora_accel.verify.causes import (
    failures,
    not_compared,
    other_inputs,
    other_weights,
    same_samples,
    stale_parameters,
)
from opensora_accel.verify.findings import Finding
from opensora_accel.verify.fit import Remedy, Samples, find_remedy, fit_slices
from opensora_accel.verify.gradients import (
    as_shares,
    consequence,
    explained,
    irregular_scale,
    one_sided,
    scaled_by_shares,
    wrong_values,
)
from opensora_accel.verify.results import MeshResult
from opensora_accel.verify.returned import clipped_too_early, wrong_clips, wrong_inputs, wrong_scalars
from opensora_accel.verify.shapes import MeshShape
from opensora_accel.verify.trace import Origin
from opensora_accel.verify.view import View, wrong_shapes


@dataclass(frozen=True)
class Shares:
    """Each rank's part of the gradients `names` is multiplied by a factor of its own."""

    factors: Sequence[float]
    shape: MeshShape
    names: Sequence[str]


class Diagnosis:
    """Of all meshes. `unexplained` are wrong parameters that neither a factor nor a sum makes right."""

    def __init__(self, results: Sequence[MeshResult]):
        self.view = View(results)
        self.wrong = self.view.wrong_parameters()
        self.unexplained: dict[str, list[Samples]] = {}
        """Where no remedy was found: on some meshes, or on all."""
        self._irregular: dict[tuple[tuple[MeshShape, float], ...], dict[str, list[Samples]]] = {}
        """Wrong parameters with one factor on every mesh, by these factors."""
        self._remedies: list[tuple[Remedy, dict[str, list[Samples]]]] = []
        self._find_remedies()

    def _find_remedies(self) -> None:
        by_remedy: dict[tuple[tuple[str, ...], str, bool], tuple[Remedy, dict[str, list[Samples]]]] = {}
        for name, samples in self.wrong.items():
            provable = [each for each in samples if each.is_provable]
            remedy = find_remedy(provable, self.view.axes) if provable else None
            if remedy is None and (factors := _factors(provable)):
                self._irregular.setdefault(factors, {})[name] = provable
            elif remedy is None:
                remedy, provable = self._on_some(provable)
                told = {each.shape for each in provable} if remedy is not None else set()
                self.unexplained[name] = [each for each in samples if each.shape not in told]
            if remedy is not None:
                key = remedy.missing, str(remedy.factor), remedy.is_everywhere
                by_remedy.setdefault(key, (remedy, {}))[1][name] = provable
        self._remedies = sorted(by_remedy.values(), key=lambda group: -len(group[1]))

    def _on_some(self, samples: Sequence[Samples]) -> tuple[Remedy | None, list[Samples]]:
        """The remedy on meshes that have one, where others have none: another error there must not hide it."""
        axes = self.view.axes
        subsets = [some for count in range(len(axes) + 1) for some in itertools.combinations(axes, count)]
        have = [
            each
            for each in samples
            if any(
                (reduced := each.reduced(some)) is not None and reduced.factor() is not None
                for some in subsets
            )
        ]
        remedy = find_remedy(have, axes) if sum(not each.is_right for each in have) > 1 else None
        if remedy is None or (not remedy.missing and not remedy.factor.exponents):
            return None, []
        return remedy, have

    def causes(self, origin: Origin | None) -> list[Finding]:
        """What makes a comparison pointless: other weights, other data.

        Inputs may differ and nothing be wrong with it, where a step splits them itself or tells ranks their places:
        then every wrong gradient is explained by a remedy (other noise leaves no exact factor), or the first module
        whose output is wrong was given the right inputs.
        """
        weights = other_weights(self.view) if self.wrong else []
        inputs = other_inputs(self.view) if self.unexplained else []
        return [*weights, *(inputs if origin is None or not origin.are_inputs_right else [])]

    def findings(self, shares: Shares | None = None, origin: Origin | None = None) -> list[Finding]:
        """All of them. `origin`: where the forward goes wrong first, where that was looked for."""
        view, (failed, refused) = self.view, failures(self.view)
        beside = [*not_compared(view), *stale_parameters(view)]
        if causes := self.causes(origin):
            # A different model, or different data: factors would explain nothing.
            return [*failed, *causes, consequence(view, self.wrong), *refused, *beside]
        gradients = [*one_sided(view), *self._wrong_gradients(shares, origin)]
        returned = wrong_scalars(view)
        return [
            *failed,
            *other_weights(view),
            *same_samples(view),
            *gradients,
            *refused,
            *(other_inputs(view) if returned and not gradients else []),
            *([] if gradients else wrong_clips(view)),
            *wrong_inputs(view),
            *beside,
            *returned,
        ]

    def _wrong_gradients(self, shares: Shares | None, origin: Origin | None) -> list[Finding]:
        by_shares = set(() if shares is None else shares.names)
        first: list[Finding] = []
        last: list[Finding] = []
        wrong_forward = self._shapes_of_wrong_forward()
        for remedy, samples in self._remedies:
            names = {name: each for name, each in samples.items() if name not in by_shares}
            if not names:
                continue
            early = clipped_too_early(self.view, list(names), remedy.missing) if remedy.missing else None
            finding = early or explained(self.view, remedy, list(names), names)
            # Where the forward is wrong already, what a factor happens to explain is not the cause.
            (last if wrong_forward & set(wrong_shapes(names)) else first).append(finding)
        first += [irregular_scale(self.view, each) for each in self._irregular.values()]
        rest = {name: each for name, each in self.unexplained.items() if name not in by_shares}
        values = (
            []
            if shares is None
            else [scaled_by_shares(self.view, shares.factors, shares.shape, shares.names)]
        )
        values += [wrong_values(self.view, rest, origin)] if rest else []
        return [*first, *values, *last]

    def smallest_unexplained(self) -> MeshResult:
        """The mesh of the fewest ranks on which something is wrong that no remedy mends."""
        bad = wrong_shapes(self.unexplained)
        return min(
            (each for each in self.view.ran if each.shape in bad), key=lambda each: each.shape.world_size
        )

    def _shapes_of_wrong_forward(self) -> set[MeshShape]:
        """Meshes on which everything that the step returns is wrong."""
        return {
            each.shape
            for each in self.view.ran
            if (scalars := self.view.scalars(each)) and not any(one.is_right for one in scalars.values())
        }

    def slices(self) -> Shares | None:
        """Tokens of each rank that have a factor of their own, as the gradients of inputs show it."""
        for result in sorted(self.view.ran, key=lambda each: each.shape.world_size):
            num_sharing = result.shape.world_size // result.shape.data_size
            for samples in result.inputs().values() if num_sharing > 1 else ():
                factors = None if samples.is_right else fit_slices(samples, num_sharing)
                if factors is not None and as_shares(factors) is not None:
                    return Shares(factors, result.shape, list(self.unexplained))
        return None


def _factors(samples: Sequence[Samples]) -> tuple[tuple[MeshShape, float], ...]:
    """Of each mesh, where all have one; nothing for single numbers, which always have."""
    found = [(each.shape, factor) for each in samples if (factor := each.factor()) is not None]
    if len(found) < len(samples) or not samples or samples[0].expected.numel() == 1:
        return ()
    return tuple((shape, round(factor, 6 - int(math.log10(abs(factor))))) for shape, factor in found)
