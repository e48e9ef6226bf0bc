"""What is wrong with a gradient, as numbers: a factor, a sum that was left out, or neither.

A gradient g that should be r is fitted as g = s·r + rest. Where s comes out the same on all ranks and `rest` is
nothing, the factors of several meshes are fitted together as c · Π degreeᵉ, e whole: a factor of 1/2 on two ranks
may be many things, but 1/2, 1/3 and 1/4 on two, three and four are that axis's degree, to the power −1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opensora_accel.verify.shapes import MeshShape

TOLERANCE = 1e-8
"""Largest difference over the largest magnitude, in fp64. Correct plans on the models of the tests reach 1e-13."""
NEGLIGIBLE = 1e-6
"""Of the largest gradient of the model: an error below TOLERANCE of that is none, and a gradient below it is too
small to be held against another (biases that softmax cancels have a gradient of rounding errors)."""
_EXPONENTS = (0, -1, 1, -2, 2)


@dataclass(frozen=True)
class Samples:
    """One quantity on one mesh: what every rank found (in rank order) and what it should be."""

    shape: MeshShape
    found: tuple[Tensor, ...]
    expected: Tensor
    floor: float = 0.0
    """Magnitude under which nothing can be told."""

    def error(self) -> float:
        """Of the worst rank, relative to the largest magnitude expected; infinite where shapes or NaNs disagree."""
        return max(_difference(each, self.expected, self.floor) for each in self.found)

    @property
    def is_right(self) -> bool:
        return self.error() <= TOLERANCE

    @property
    def is_provable(self) -> bool:
        return magnitude(self.expected) > self.floor

    def reduced(self, axes: Sequence[str]) -> Samples | None:
        """With the ranks that differ along `axes` summed, as one rank each; None where shapes disagree."""
        if any(each.shape != self.expected.shape for each in self.found):
            return None
        groups = self.shape.groups(axes)
        return Samples(
            self.shape,
            tuple(torch.stack([self.found[r] for r in ranks]).sum(0) for ranks in groups),
            self.expected,
            self.floor,
        )

    def factor(self) -> float | None:
        """s, where found = s · expected on all ranks."""
        if not self.is_provable or any(each.shape != self.expected.shape for each in self.found):
            return None
        first = self.found[0]
        s = ((first * self.expected).sum() / self.expected.square().sum()).item()
        scaled = Samples(self.shape, self.found, s * self.expected, self.floor)
        return s if math.isfinite(s) and s != 0 and scaled.is_right else None


def magnitude(tensor: Tensor) -> float:
    """Of the largest element; 0 where there is none."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _difference(found: Tensor, expected: Tensor, floor: float) -> float:
    if found.shape != expected.shape or not torch.isfinite(found).all():
        return math.inf
    scale = max(magnitude(expected), floor)
    difference = magnitude(found - expected)
    return difference / scale if scale else math.inf if difference else 0.0


@dataclass(frozen=True)
class Factor:
    """c · Π degreeᵉ · (degree − 1)ᶠ over axes."""

    exponents: tuple[tuple[str, int], ...] = ()
    constant: float = 1.0
    of_others: tuple[tuple[str, int], ...] = ()
    """Exponents f: of the ranks along an axis without the own one."""

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(axis for axis, _ in (*self.exponents, *self.of_others)))

    def __str__(self) -> str:
        powers = [axis + _superscript(exponent) for axis, exponent in self.exponents]
        powers += [f"({axis} − 1)" + _superscript(exponent) for axis, exponent in self.of_others]
        if not powers or not math.isclose(self.constant, 1, rel_tol=1e-6):
            powers.insert(0, f"{self.constant:.6g}")
        return " · ".join(powers)


def _superscript(exponent: int) -> str:
    digits = str(abs(exponent)).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return ("" if exponent > 0 else "⁻") + ("" if exponent == 1 else digits)


def fit_powers(factors: Mapping[MeshShape, float], axes: Sequence[str]) -> Factor | None:
    """The simplest c · Π degreeᵉ that all meshes agree on, or that times one (degree − 1); None where there is none.

    No constant is simpler than one, then fewer and smaller exponents are.
    """
    found = _fit_degrees(factors, axes)
    if found is not None:
        return found
    for axis, exponent in itertools.product(axes, (1, -1)):
        rest = {s: factor / max(1, s.degree(axis) - 1) ** exponent for s, factor in factors.items()}
        found = _fit_degrees(rest, axes)
        if found is not None and math.isclose(found.constant, 1, rel_tol=1e-6):
            return replace(found, of_others=((axis, exponent),))
    return None


def _fit_degrees(factors: Mapping[MeshShape, float], axes: Sequence[str]) -> Factor | None:
    if not factors:
        return None
    best: tuple[tuple[int, int], Factor] | None = None
    for exponents in itertools.product(_EXPONENTS, repeat=len(axes)):
        powers = {
            shape: math.prod(shape.degree(axis) ** e for axis, e in zip(axes, exponents, strict=True))
            for shape in factors
        }
        constants = [factor / powers[shape] for shape, factor in factors.items()]
        if not all(math.isclose(c, constants[0], rel_tol=1e-6) for c in constants):
            continue
        has_constant = not math.isclose(constants[0], 1, rel_tol=1e-6)
        cost = (int(has_constant), sum(map(abs, exponents)))
        if best is None or cost < best[0]:
            used = tuple((axis, e) for axis, e in zip(axes, exponents, strict=True) if e)
            best = cost, Factor(used, constants[0])
    return None if best is None else best[1]


@dataclass(frozen=True)
class Remedy:
    """What would make a gradient right: a sum over `missing` axes, and division by `factor`."""

    missing: tuple[str, ...]
    factor: Factor
    is_everywhere: bool = True
    """Whether `factor` holds on all meshes; otherwise on those that are wrong."""


def find_remedy(samples: Sequence[Samples], axes: Sequence[str]) -> Remedy | None:
    """The smallest change that makes every mesh's gradient the expected one; None where no such change does.

    Args:
        samples: of one parameter, on all meshes where it can be told.
        axes: those of more than one rank on some mesh.
    """
    for count in range(len(axes) + 1):
        for missing in itertools.combinations(axes, count):
            factors: dict[MeshShape, float] = {}
            for each in samples:
                reduced = each.reduced(missing)
                factor = None if reduced is None else reduced.factor()
                if factor is None:
                    break
                factors[each.shape] = factor
            else:
                powers = fit_powers(factors, axes)
                if powers is not None:
                    return Remedy(missing, powers)
    return _fit_wrong(samples, axes)


def find_scale(samples: Sequence[Samples], axes: Sequence[str]) -> Remedy | None:
    """`find_remedy` without sums: of what all ranks have whole."""
    factors = {each.shape: factor for each in samples if (factor := each.factor()) is not None}
    powers = fit_powers(factors, axes) if len(factors) == len(samples) else None
    return _fit_wrong(samples, axes) if powers is None else Remedy((), powers)


def _fit_wrong(samples: Sequence[Samples], axes: Sequence[str]) -> Remedy | None:
    """A factor on the wrong meshes alone: 2 wherever an axis is used is 1 where it is not."""
    factors = {each.shape: each.factor() for each in samples if not each.is_right}
    known = {shape: factor for shape, factor in factors.items() if factor is not None}
    if len(known) < len(factors) or (len(known) == 1 and samples[0].expected.numel() == 1):
        return None  # one number is always another one times a factor
    powers = fit_powers(known, axes)
    return None if powers is None else Remedy((), powers, is_everywhere=False)


def fit_ranks(parts: Sequence[Sequence[Tensor]], expected: Sequence[Tensor]) -> list[float] | None:
    """f, where Σ parts[k] / f[k] = expected: by how much each rank's contribution was multiplied.

    Args:
        parts: for every rank k, what its outputs contribute to each of several gradients.
        expected: these gradients.
    """
    columns = [torch.cat([tensor.flatten() for tensor in part]) for part in parts]
    matrix, target = torch.stack(columns, 1), torch.cat([tensor.flatten() for tensor in expected])
    if not torch.isfinite(matrix).all():
        return None
    if matrix.size(0) <= matrix.size(1):
        return None  # as many unknowns as facts: anything would fit
    solution = torch.linalg.lstsq(matrix, target, driver="gelsd").solution
    rest = _difference(matrix @ solution, target, 0.0)
    if rest > TOLERANCE or bool((solution.abs() < TOLERANCE).any()):
        return None
    return [1 / c for c in solution.tolist()]


def are_equal(factors: Sequence[float]) -> bool:
    return all(math.isclose(factor, factors[0], rel_tol=1e-6) for factor in factors)


def are_factors(parts: Sequence[Tensor], factors: Sequence[float], expected: Tensor) -> bool:
    """Whether Σ parts[k] / factors[k] = expected."""
    total = torch.stack([part / factor for part, factor in zip(parts, factors, strict=True)]).sum(0)
    return _difference(total, expected, 0.0) <= TOLERANCE


def fit_slices(samples: Samples, num_slices: int) -> list[float] | None:
    """f, where found = f[r] · expected on the r-th slice along one dim, by the rule of `torch.tensor_split`."""
    (found,), expected = samples.found, samples.expected
    for dim in range(1, expected.dim()):
        if expected.size(dim) < num_slices or found.shape != expected.shape:
            continue
        pairs = zip(found.tensor_split(num_slices, dim), expected.tensor_split(num_slices, dim), strict=True)
        factors = [Samples(samples.shape, (f,), e, samples.floor).factor() for f, e in pairs]
        known = [factor for factor in factors if factor is not None]
        if len(known) == num_slices and not are_equal(known):
            return known
    return None
