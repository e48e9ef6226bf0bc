"""From numbers to findings: what is wrong with a step, the root causes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opensora_accel.verify.causes import failures, other_inputs, other_weights, same_samples
from opensora_accel.verify.findings import Finding
from opensora_accel.verify.fit import Remedy, Samples, find_remedy, fit_slices
from opensora_accel.verify.gradients import (
    as_shares,
    consequence,
    explained,
    one_sided,
    scaled_by_shares,
    wrong_values,
)
from opensora_accel.verify.results import MeshResult
from opensora_accel.verify.returned import wrong_inputs, wrong_scalars
from opensora_accel.verify.shapes import MeshShape
from opensora_accel.verify.view import View


class Diagnosis:
    """Of all meshes. `unexplained` are wrong parameters that neither a factor nor a sum makes right."""

    def __init__(self, results: Sequence[MeshResult]):
        self.view = View(results)
        self.unexplained: dict[str, list[Samples]] = {}

    def findings(self) -> list[Finding]:
        view, wrong = self.view, self.view.wrong_parameters()
        returned = wrong_scalars(view)
        # Inputs may differ and nothing be wrong: a step that splits them itself, or one that computes them.
        causes = [*other_weights(view), *(other_inputs(view) if wrong or returned else [])]
        if wrong and causes:
            # A different model, or different data: factors would explain nothing.
            return [*failures(view), *causes, consequence(view, wrong)]
        gradients = [*one_sided(view), *self._wrong_gradients(wrong)]
        return [*failures(view), *causes, *same_samples(view), *gradients, *wrong_inputs(view), *returned]

    def _wrong_gradients(self, wrong: Mapping[str, Sequence[Samples]]) -> list[Finding]:
        by_remedy: dict[tuple[tuple[str, ...], str, bool], tuple[Remedy, list[str]]] = {}
        for name, samples in wrong.items():
            provable = [each for each in samples if each.is_provable]
            remedy = find_remedy(provable, self.view.axes) if provable else None
            if remedy is None:
                self.unexplained[name] = list(samples)
            else:
                key = remedy.missing, str(remedy.factor), remedy.is_everywhere
                by_remedy.setdefault(key, (remedy, []))[1].append(name)
        groups = sorted(by_remedy.values(), key=lambda group: -len(group[1]))
        found = [explained(self.view, remedy, names, wrong) for remedy, names in groups]
        if self.unexplained:
            values = self._slices() or wrong_values(self.view, self.unexplained)
            # Where the forward is wrong already, what a factor happens to explain is not the cause.
            found = [values, *found] if self._is_forward_wrong() else [*found, values]
        return found

    def _is_forward_wrong(self) -> bool:
        scalars = [samples for each in self.view.ran for samples in each.scalars().values()]
        return bool(scalars) and any(
            all(not each.is_right for each in scalars if each.shape == shape)
            for shape in {each.shape for each in scalars}
        )

    def _slices(self) -> Finding | None:
        """The finding that the tokens of each rank have a factor of their own, as the gradients of inputs show it."""
        for result in sorted(self.view.ran, key=lambda each: each.shape.world_size):
            num_sharing = result.shape.world_size // result.shape.data_size
            for samples in result.inputs().values() if num_sharing > 1 else ():
                factors = None if samples.is_right else fit_slices(samples, num_sharing)
                if factors is not None and as_shares(factors) is not None:
                    names = list(self.unexplained)
                    self.unexplained = {}
                    return scaled_by_shares(self.view, factors, result.shape, names)
        return None

    def by_shares(
        self, factors: Sequence[float], shape: MeshShape, names: Sequence[str], findings: Sequence[Finding]
    ) -> list[Finding]:
        """`findings` with those wrong values that factors of single ranks explain told as such."""
        place = next(i for i, each in enumerate(findings) if set(each.names) == set(self.unexplained))
        self.unexplained = {name: each for name, each in self.unexplained.items() if name not in names}
        rest = [wrong_values(self.view, self.unexplained)] if self.unexplained else []
        return [
            *findings[:place],
            scaled_by_shares(self.view, factors, shape, names),
            *rest,
            *findings[place + 1 :],
        ]
