"""What is wrong with a gradient, as numbers: a factor, a sum that was left out, or neither.

Every mesh gives one sample: the gradient that each rank found, and the one that is right. With P = 3 ranks on an axis
called tensor, and a right gradient r, the ranks may have found:

    ranks 0, 1, 2            says
    r/3    r/3    r/3        the factor 1/3 on all ranks: divided by P, or by a constant 3
    0.2 r  0.3 r  0.5 r      no factor, but their sum is r: the sum over tensor is missing
    0.4 r  0.6 r  1.0 r      their sum is 2 r: the sum is missing, beside a factor of 2

A factor on one mesh may be many things; on several it is one. All meshes' factors are fitted together as
c · Π degreeᵉ with whole exponents e:

    mesh                     found / right    says
    data=2 × ulysses=2       1/2              data⁻¹, ulysses⁻¹, or a constant
    ulysses=3                1/3              ulysses⁻¹: no constant, and data has one rank here
    data=3                   1                not data⁻¹
                                              → scale ulysses⁻¹: averaged over ranks that hold parts

Where neither a factor nor a sum holds, each rank's contribution alone is measured and one factor for each is solved
for: an uneven split of 11 tokens that scales by the shares 11/4, 11/4 and 11/3, and not by P = 3, leaves the factors
11/12, 11/12 and 11/9.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opensora_accel.observe import MeshShape, compose_axes, subsets

# Largest difference over the largest magnitude, in fp64. Correct plans on the models of the tests reach 1e-13.
TOLERANCE = 1e-8
# Share of the model's largest gradient. A gradient below it is too small to be compared (biases that softmax cancels
# have a gradient of rounding errors), and an error below TOLERANCE of it is none.
NEGLIGIBLE = 1e-6
# What ranks share out in a tiny step has few tokens. Chance shares of a whole up to it come once in three thousand.
_MOST_TOKENS, _WHOLE = 256, 1e-6


def magnitude(tensor: Tensor) -> float:
    """The largest element's, of a tensor of any shape; 0 where there is none."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def largest(tensors: Iterable[Tensor | None]) -> float:
    """The magnitude of the largest of them, of any shapes."""
    return max((magnitude(tensor) for tensor in tensors if tensor is not None), default=0.0)


def relative_error(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """The largest difference over the largest magnitude expected; infinite where shapes or NaNs disagree.

    Args:
        found, expected: of one shape.
        floor: magnitude below which errors are measured by it.
    """
    if found.shape != expected.shape or not torch.isfinite(found).all():
        return math.inf
    scale, difference = max(magnitude(expected), floor), magnitude(found - expected)
    return difference / scale if scale else math.inf if difference else 0.0


def is_close(one: float, other: float) -> bool:
    """Whether two factors are the same."""
    return math.isclose(one, other, rel_tol=1e-6)


def are_equal(factors: Sequence[float]) -> bool:
    return all(is_close(factor, factors[0]) for factor in factors)


@dataclass(frozen=True)
class Samples:
    """One quantity on one mesh: what every rank found (in rank order) and what it should be."""

    shape: MeshShape
    found: tuple[Tensor, ...]
    expected: Tensor
    floor: float = 0.0  # magnitude under which nothing can be judged

    def error(self) -> float:
        """The worst rank's."""
        return max(relative_error(each, self.expected, self.floor) for each in self.found)

    @property
    def is_right(self) -> bool:
        return self.error() <= TOLERANCE

    @property
    def is_provable(self) -> bool:
        return magnitude(self.expected) > self.floor

    def summed(self, axes: Sequence[str]) -> Samples | None:
        """With the ranks that differ along `axes` summed, as one rank each; None where shapes disagree."""
        if not axes:
            return self
        if any(each.shape != self.expected.shape for each in self.found):
            return None
        # One tensor for each group of ranks that differ along these axes only.
        sums = [torch.stack([self.found[r] for r in ranks]).sum(0) for ranks in self.shape.groups(axes)]
        return replace(self, found=tuple(sums))

    def factor(self) -> float | None:
        """The s with found = s · expected on all ranks."""
        if not self.is_provable or any(each.shape != self.expected.shape for each in self.found):
            return None
        # Least squares on the first rank; then all ranks must agree.
        s = ((self.found[0] * self.expected).sum() / self.expected.square().sum()).item()
        scaled = replace(self, expected=s * self.expected)
        return s if math.isfinite(s) and s != 0 and scaled.is_right else None


@dataclass(frozen=True)
class Factor:
    """c · Π degreeᵉ · (degree − 1)ᶠ over axes."""

    exponents: tuple[tuple[str, int], ...] = ()
    constant: float = 1.0
    of_others: tuple[tuple[str, int], ...] = ()  # exponents f: of the ranks along an axis without the own one

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(axis for axis, _ in (*self.exponents, *self.of_others)))

    def __str__(self) -> str:
        powers = [axis + _superscript(exponent) for axis, exponent in self.exponents]
        powers += [f"({axis} − 1)" + _superscript(exponent) for axis, exponent in self.of_others]
        if not powers or not is_close(self.constant, 1):
            powers.insert(0, f"{self.constant:.6g}")
        return " · ".join(powers)

    def composed(self, used: Sequence[str]) -> Factor:
        """With the Plan's own words for several axes of one exponent, see `compose_axes`."""
        by_exponent: dict[int, list[str]] = {}
        for axis, exponent in self.exponents:
            by_exponent.setdefault(exponent, []).append(axis)
        pairs = [(word, e) for e, axes in by_exponent.items() for word in compose_axes(axes, used)]
        return replace(self, exponents=tuple(pairs))


def _superscript(exponent: int) -> str:
    digits = str(abs(exponent)).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return ("" if exponent > 0 else "⁻") + ("" if exponent == 1 else digits)


def fit_powers(factors: Mapping[MeshShape, float], axes: Sequence[str]) -> Factor | None:
    """The simplest c · Π degreeᵉ that all meshes agree on, or that times one (degree − 1); None where there is none.

    No constant is simpler than one, then fewer and smaller exponents are.
    """
    for axis, exponent in (("", 0), *itertools.product(axes, (1, -1))):
        # An axis of one rank has no others; where it is used, P − 1 may stand in place of P.
        rest = {s: factor / max(1, s.degree(axis) - 1) ** exponent for s, factor in factors.items()}
        # Every product of powers that leaves the same constant on all meshes, with what it costs in simplicity.
        fitting: list[tuple[tuple[bool, int], Factor]] = []
        for exponents in itertools.product((0, -1, 1, -2, 2), repeat=len(axes)):
            powers = tuple((axis, e) for axis, e in zip(axes, exponents, strict=True) if e)
            constants = [f / math.prod(s.degree(axis) ** e for axis, e in powers) for s, f in rest.items()]
            if constants and are_equal(constants):
                cost = not is_close(constants[0], 1), sum(map(abs, exponents))
                fitting.append((cost, Factor(powers, constants[0])))
        found = min(fitting, key=lambda pair: pair[0])[1] if fitting else None
        if found is not None and not axis:
            return found
        # With a constant beside it, one (degree − 1) would explain too much.
        if found is not None and is_close(found.constant, 1):
            return replace(found, of_others=((axis, exponent),))
    return None


@dataclass(frozen=True)
class Remedy:
    """What would make a gradient right: a sum over `missing` axes, and division by `factor`."""

    missing: tuple[str, ...]
    factor: Factor
    is_everywhere: bool = True  # whether `factor` holds on all meshes; otherwise on those that are wrong


def find_remedy(samples: Sequence[Samples], axes: Sequence[str], *, is_summed: bool = False) -> Remedy | None:
    """The smallest change that makes every mesh's gradient the expected one; None where no such change does.

    Args:
        samples: of one parameter, on all meshes where it can be judged.
        axes: those of more than one rank on some mesh.
        is_summed: no sum can be missing, as all ranks have the whole: only factors are tried.
    """
    # The fewest axes first, and none before all: a factor alone is a smaller change than a sum.
    for missing in [()] if is_summed else subsets(axes):
        factor = _common_factor([each.summed(missing) for each in samples], axes)
        if factor is not None:
            return Remedy(missing, factor)
    # A factor on the wrong meshes alone: 2 wherever an axis is used is 1 where it is not.
    wrong = [each for each in samples if not each.is_right]
    if len(wrong) == 1 and samples[0].expected.numel() == 1:
        return None  # one number is always another one times a factor
    factor = _common_factor(wrong, axes)
    return None if factor is None else Remedy((), factor, is_everywhere=False)


def _common_factor(samples: Sequence[Samples | None], axes: Sequence[str]) -> Factor | None:
    factors: dict[MeshShape, float] = {}
    for each in samples:
        factor = None if each is None else each.factor()
        if each is None or factor is None:
            return None
        factors[each.shape] = factor
    return fit_powers(factors, axes)


def has_remedy(samples: Samples, axes: Sequence[str]) -> bool:
    """Whether on this mesh alone a sum and a factor make it right."""
    sums = (samples.summed(some) for some in subsets(axes))
    return any(each is not None and each.factor() is not None for each in sums)


def fit_ranks(parts: Sequence[Sequence[Tensor]], expected: Sequence[Tensor]) -> list[float] | None:
    """f, where Σ parts[k] / f[k] = expected: by how much each rank's contribution was multiplied.

    Args:
        parts: for every rank k, what its outputs contribute to each of several gradients.
        expected: these gradients.
    """
    columns = [torch.cat([tensor.flatten() for tensor in part]) for part in parts]
    # matrix: [elements of all gradients, ranks]
    matrix, target = torch.stack(columns, 1), torch.cat([tensor.flatten() for tensor in expected])
    if not torch.isfinite(matrix).all() or matrix.size(0) <= matrix.size(1):
        return None  # as many unknowns as facts: anything would fit
    # Least squares always has an answer. It is one only where it leaves nothing, and no rank counts for nothing.
    solution = torch.linalg.lstsq(matrix, target, driver="gelsd").solution
    if relative_error(matrix @ solution, target) > TOLERANCE or bool((solution.abs() < TOLERANCE).any()):
        return None
    return [1 / c for c in solution.tolist()]


def are_factors(parts: Sequence[Tensor], factors: Sequence[float], expected: Tensor) -> bool:
    """Whether Σ parts[k] / factors[k] = expected; all of one shape."""
    total = torch.stack([part / factor for part, factor in zip(parts, factors, strict=True)]).sum(0)
    return relative_error(total, expected) <= TOLERANCE


def fit_slices(samples: Samples, num_slices: int) -> list[float] | None:
    """f, where found = f[r] · expected on the r-th slice along one dim, by the rule of `torch.tensor_split`."""
    (found,), expected = samples.found, samples.expected
    for dim in range(1, expected.dim()):  # dim 0 is the data ranks'
        if expected.size(dim) < num_slices or found.shape != expected.shape:
            continue
        pairs = zip(found.tensor_split(num_slices, dim), expected.tensor_split(num_slices, dim), strict=True)
        factors = [replace(samples, found=(f,), expected=e).factor() for f, e in pairs]
        known = [factor for factor in factors if factor is not None]
        if len(known) == num_slices and not are_equal(known):
            return known
    return None


def as_shares(factors: Sequence[float]) -> str:
    """`4:4:3`, where the factors are shares of few tokens (or one over them), times the number of ranks or not."""
    if are_equal(factors):
        return ""
    inverses = [1 / factor for factor in factors]
    for candidates, scale in itertools.product((factors, inverses), (len(factors), 1)):
        shares = [each / scale for each in candidates]
        if is_close(sum(shares), 1) and min(shares) > 0:
            # 4/11, 4/11 and 3/11 become 4:4:3. Any two numbers add up to a whole of some thousands.
            for total in range(len(shares), _MOST_TOKENS + 1):
                parts = [round(share * total) for share in shares]
                if all(abs(share * total - part) < _WHOLE for share, part in zip(shares, parts, strict=True)):
                    return ":".join(map(str, parts))
    return ""
