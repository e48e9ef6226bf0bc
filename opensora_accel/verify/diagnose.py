"""From what every mesh found to the causes: what is wrong with a step, the root causes first.

`diagnose` is pure: it looks at results and changes nothing. First stands what makes a comparison pointless (a step
that fails, other weights, other data), then wrong gradients by what would make them right, then what is wrong beside
gradients. Wrong gradients go through a few questions, and the first answer counts:

    Does a sum over some axes, and a factor of degrees, make it right on all meshes?   MissingSum, Scale
    Has every mesh one factor on all its ranks, of whatever size?                      StrangeScale
    Does a sum and a factor make it right on some meshes?                              MissingSum, Scale there
    Is each rank's contribution multiplied by a factor of its own?                     ScaledByShares
    None of these                                                                      WrongValues

A missing all-reduce is named so: on tensor=3 the ranks hold 0.2 r, 0.3 r and 0.5 r of a gradient r. No rank has a
factor, so sums are tried, and that over tensor gives r on every mesh: MissingSum(missing=("tensor",)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from opensora_accel.verify import causes
from opensora_accel.verify.causes import Cause, Origin, Place, Where
from opensora_accel.verify.fit import (
    Remedy,
    Samples,
    are_equal,
    as_shares,
    compose_factor,
    find_remedy,
    find_scale,
    fit_slices,
    has_remedy,
)
from opensora_accel.verify.meshes import MeshShape, compose_axes
from opensora_accel.verify.preconditions import failures, same_samples, wrong_inputs, wrong_weights
from opensora_accel.verify.results import Results, wrong_shapes

_FP32 = 1e-5
"""Errors below it are what fp32 leaves."""

ByName = Mapping[str, Sequence[Samples]]
"""Wrong parameters, with their samples on some or all meshes."""


@dataclass(frozen=True)
class GradientFits:
    """Wrong gradients by what makes them right."""

    remedies: Sequence[tuple[Remedy, ByName]]
    """Those of the most parameters first."""
    strange: Sequence[ByName]
    """One factor on all ranks of a mesh, which goes with no degree."""
    unexplained: ByName
    """On the meshes where nothing makes them right."""


@dataclass(frozen=True)
class Shares:
    """Each rank's contribution to the gradients `names` is multiplied by a factor of its own."""

    factors: Sequence[float]
    shape: MeshShape
    names: Sequence[str]


def fit_gradients(results: Results) -> GradientFits:
    remedies: dict[tuple[tuple[str, ...], str, bool], tuple[Remedy, dict[str, list[Samples]]]] = {}
    strange: dict[tuple[tuple[MeshShape, float], ...], dict[str, list[Samples]]] = {}
    unexplained: dict[str, list[Samples]] = {}
    for name, samples in results.wrong.items():
        provable = [each for each in samples if each.is_provable]
        remedy = find_remedy(provable, results.axes) if provable else None
        # One factor on every mesh is a better answer than a remedy on some of them.
        if remedy is None and (factors := _factors(provable)):
            strange.setdefault(factors, {})[name] = provable
        elif remedy is None:
            # A remedy on some meshes must not be hidden by another error on others.
            provable = [each for each in provable if has_remedy(each, results.axes)]
            is_wrong_on_several = sum(not each.is_right for each in provable) > 1
            remedy = find_remedy(provable, results.axes) if is_wrong_on_several else None
            if remedy is not None and not remedy.missing and not remedy.factor.exponents:
                remedy = None
            explained = {each.shape for each in provable} if remedy is not None else set()
            unexplained[name] = [each for each in samples if each.shape not in explained]
        if remedy is not None:
            key = remedy.missing, str(remedy.factor), remedy.is_everywhere
            remedies.setdefault(key, (remedy, {}))[1][name] = provable
    by_number = sorted(remedies.values(), key=lambda group: -len(group[1]))
    return GradientFits(by_number, list(strange.values()), unexplained)


def _factors(samples: Sequence[Samples]) -> tuple[tuple[MeshShape, float], ...]:
    """Each mesh's factor, where all have one; nothing for single numbers, which always have."""
    found = [(each.shape, factor) for each in samples if (factor := each.factor()) is not None]
    if len(found) < len(samples) or not samples or samples[0].expected.numel() == 1:
        return ()
    # Six digits: parameters that share a factor differ in it by rounding.
    return tuple((shape, round(factor, 6 - int(math.log10(abs(factor))))) for shape, factor in found)


def diagnose(
    results: Results,
    fits: GradientFits | None = None,
    *,
    origin: Origin | None = None,
    shares: Shares | None = None,
) -> list[Cause]:
    """What is wrong, the root causes first; nothing where all is right.

    Args:
        fits: `fit_gradients(results)`, where the caller has it.
        origin: the first module whose forward is wrong, where that was looked for.
        shares: factors of single ranks, where these were measured.
    """
    fits = fits or fit_gradients(results)
    failed, refused = failures(results)
    beside = parameters_not_trained(results)
    unlike = find_unlike_starts(results, fits, origin)
    if unlike:
        # Of another model, or of other data, factors would explain nothing.
        consequence = causes.Consequence(
            Where(tuple(wrong_shapes(results.wrong))), tuple(results.wrong), len(results.names)
        )
        return [*failed, *unlike, consequence, *refused, *beside]
    gradients = [*one_sided_gradients(results), *wrong_gradients(results, fits, origin, shares)]
    returned = wrong_results(results, is_input=False)
    return [
        *failed,
        *wrong_weights(results),
        *same_samples(results),
        *gradients,
        *refused,
        *(wrong_inputs(results) if returned and not gradients else []),
        *([] if gradients else wrong_clips(results)),
        *wrong_results(results, is_input=True),
        *beside,
        *returned,
    ]


def find_unlike_starts(results: Results, fits: GradientFits, origin: Origin | None) -> list[Cause]:
    """Other weights or other data, which make a comparison of gradients pointless.

    Inputs may differ and nothing be wrong with it, where a step splits them itself or tells ranks their places. Then
    every wrong gradient is explained by a remedy (other noise leaves no exact factor), or the first module whose
    output is wrong was given the right inputs.
    """
    weights = wrong_weights(results) if results.wrong else []
    inputs = wrong_inputs(results) if fits.unexplained else []
    return [*weights, *(inputs if origin is None or not origin.are_inputs_right else [])]


def find_slices(results: Results, fits: GradientFits) -> Shares | None:
    """Factors of each rank's tokens, as the gradients of inputs show them."""
    for mesh in sorted(results.ran, key=lambda each: each.shape.world_size):
        num_sharing = mesh.shape.world_size // mesh.shape.data_size
        for samples in mesh.inputs().values() if num_sharing > 1 else ():
            factors = None if samples.is_right else fit_slices(samples, num_sharing)
            if factors is not None and as_shares(factors):
                return Shares(factors, mesh.shape, list(fits.unexplained))
    return None


def one_sided_gradients(results: Results) -> list[Cause]:
    by_side: dict[causes.Side, dict[str, list[MeshShape]]] = {}
    held_back: dict[str, list[MeshShape]] = {}
    replicas: dict[str, None] = {}
    for mesh in results.ran:
        for name, side in mesh.one_sided().items():
            # A gradient that FSDP2 was told to keep is not cut off, but not yet added up.
            axes = mesh.observations[0].held_back.get(name)
            replicas |= dict.fromkeys(axes or ())
            by_name = by_side.setdefault(side, {}) if axes is None else held_back
            by_name.setdefault(name, []).append(mesh.shape)
    found: list[Cause] = []
    total = len(results.weight_names)
    if held_back:
        over = tuple(replicas) or results.data_axes
        found.append(causes.HeldBack(results.where_of(held_back), tuple(held_back), total, over))
    for side, by_name in by_side.items():
        found.append(causes.MissingGradient(results.where_of(by_name), tuple(by_name), total, side=side))
    return found


def wrong_gradients(
    results: Results, fits: GradientFits, origin: Origin | None, shares: Shares | None
) -> list[Cause]:
    by_shares = set(() if shares is None else shares.names)
    wrong_forward = set()
    for mesh in results.ran:
        scalars = results.scalars(mesh)
        if scalars and not any(each.is_right for each in scalars.values()):
            wrong_forward.add(mesh.shape)
    first: list[Cause] = []
    last: list[Cause] = []
    for remedy, samples in fits.remedies:
        wrong = {name: each for name, each in samples.items() if name not in by_shares}
        if wrong:
            # Where all that the step returns is wrong, so is the forward: what a factor happens to explain there is
            # not the cause.
            group = last if wrong_forward & set(wrong_shapes(wrong)) else first
            group.append(cause_of_remedy(results, remedy, wrong))
    total = len(results.names)
    for strange in fits.strange:
        one = next(iter(strange.values()))
        factors = tuple((str(each.shape), each.factor() or 0.0) for each in one if not each.is_right)
        where = results.where(wrong_shapes(strange))
        first.append(causes.StrangeScale(where, tuple(strange), total, factors=factors))
    if shares is not None:
        first.append(cause_of_shares(results, shares))
    rest = {name: each for name, each in fits.unexplained.items() if name not in by_shares}
    if rest:
        names, where = tuple(rest), results.where(wrong_shapes(rest))
        error = max(each.error() for samples in rest.values() for each in samples)
        nearest, place = tuple(first_wrong(results, names)), place_of(results, names)
        first.append(
            causes.RightToFp32(where, names, total, error=error)
            if error < _FP32
            else causes.WrongValues(
                where, names, total, error=error, origin=origin, first_wrong=nearest, place=place
            )
        )
    return [*first, *last]


def cause_of_remedy(results: Results, remedy: Remedy, wrong: ByName) -> Cause:
    """The cause of gradients that a sum and a factor make right."""
    names, total, shapes = tuple(wrong), len(results.names), wrong_shapes(wrong)
    powers, place = dict(remedy.factor.exponents), place_of(results, names)
    if remedy.missing:
        if is_clipped_too_early(results, names, remedy.missing):
            clipped = [mesh.shape for mesh in results.ran if any(seen.clips for seen in mesh.observations)]
            return causes.ClippedTooEarly(Where(tuple(clipped)), names, total, remedy.missing)
        is_average = all(powers.get(axis) == 1 for axis in remedy.missing)
        if is_average:  # the sum is too large by what an average divides by
            powers = {axis: e for axis, e in powers.items() if axis not in remedy.missing}
        by = compose_factor(replace(remedy.factor, exponents=tuple(powers.items())), results.axes)
        return causes.MissingSum(
            Where(tuple(shapes)),
            names,
            total,
            over=compose_axes(remedy.missing, results.axes),
            by=None if by.is_one else by,
            is_average=is_average,
            place=place if 2 * len(names) <= total else None,
        )
    where, by = Where(tuple(shapes)), compose_factor(remedy.factor, results.axes)
    if not remedy.is_everywhere:
        where = results.where(shapes)
    return causes.Scale(
        where,
        names,
        total,
        over=tuple(dict.fromkeys((*where.axes, *by.axes))),
        by=by,
        is_everywhere=remedy.is_everywhere,
        data_powers=tuple(e for axis, e in powers.items() if axis in results.data_axes),
        sharing_powers=tuple(e for axis, e in powers.items() if axis not in results.data_axes),
        place=place if len(names) < total else None,
    )


def is_clipped_too_early(results: Results, names: Sequence[str], missing: Sequence[str]) -> bool:
    """Whether, once clipped, the gradients are the same on all ranks that hold parts of them."""
    clipped = [mesh for mesh in results.ran if any(seen.clips for seen in mesh.observations)]
    for mesh in clipped:
        for name in names:
            after = [each.clipped.get(name) for each in mesh.observations]
            for ranks in mesh.shape.groups(missing):
                first = after[ranks[0]]
                if first is None or any((other := after[r]) is None or not other.equal(first) for r in ranks):
                    return False
    return bool(clipped)


def place_of(results: Results, names: Sequence[str]) -> Place | None:
    """Where in backward the error comes in."""
    order = [name for name in results.expected.first.backward_order if name in results.names]
    positions = [order.index(name) for name in names if name in order]
    return Place(order[min(positions)], min(positions)) if positions else None


def first_wrong(results: Results, names: Sequence[str]) -> list[str]:
    """Those of `names` that belong to the module whose gradient is the first to be wrong."""
    order = [name for name in results.expected.first.backward_order if name in names]
    if not order:
        return []
    module = order[0].rsplit(".", 2)[0]  # the parent of the layer: to_q's siblings are to_k and to_v
    return [name for name in order if name.startswith(module + ".")]


def cause_of_shares(results: Results, shares: Shares) -> Cause:
    varied = []
    for axis in results.axes:
        groups = shares.shape.groups([axis])  # of ranks that differ along this axis only
        if not all(are_equal([shares.factors[rank] for rank in ranks]) for ranks in groups):
            varied.append(axis)
    return causes.ScaledByShares(
        Where((shares.shape,)),
        tuple(shares.names),
        len(results.names),
        over=compose_axes(varied, results.axes),
        factors=tuple(shares.factors),
        shares=as_shares(shares.factors),
        data_axes=tuple(axis for axis in varied if axis in results.data_axes),
    )


def wrong_clips(results: Results) -> list[Cause]:
    """Gradients that are right until they are clipped."""
    found = [mesh.clipped() for mesh in results.ran]
    names = dict.fromkeys(name for each in found for name in each)
    samples = {name: [each[name] for each in found if name in each] for name in names}
    wrong = {name: each for name, each in samples.items() if any(not s.is_right for s in each)}
    if not wrong:
        return []
    where, total = results.where(wrong_shapes(wrong)), len(results.names)
    scales = [find_scale(each, results.axes) for each in wrong.values()]
    factors = {str(scale.factor): scale.factor for scale in scales if scale is not None}
    if len(factors) > 1 or not all(scales):
        return [causes.ClippedByOtherNorms(where, tuple(wrong), total)]
    (by,) = (compose_factor(factor, results.axes) for factor in factors.values())
    return [causes.ClippedByFactor(where, tuple(wrong), total, by.axes, by)]


def wrong_results(results: Results, *, is_input: bool) -> list[Cause]:
    """What the step returns, or the gradients of inputs; those that are wrong in the same way together."""
    found = [mesh.inputs() if is_input else results.scalars(mesh) for mesh in results.ran]
    alike: dict[causes.WrongResult, list[str]] = {}
    for name in dict.fromkeys(name for each in found for name in each):
        samples = [each[name] for each in found if name in each]
        bad = [each.shape for each in samples if not each.is_right]
        if not bad:
            continue
        where, scale = results.where(bad), find_scale(samples, results.axes)
        cause = causes.WrongResult(where, is_input=is_input)
        if scale is not None:
            by = compose_factor(scale.factor, results.axes)
            over = by.axes if scale.is_everywhere else tuple(dict.fromkeys((*where.axes, *by.axes)))
            cause = replace(cause, over=over, by=by, is_everywhere=scale.is_everywhere)
        alike.setdefault(cause, []).append(name)
    return [replace(cause, names=tuple(names)) for cause, names in alike.items()]


def parameters_not_trained(results: Results) -> list[Cause]:
    """Parameters that the model does not have and the loss reaches, or that it has replaced and an optimizer steps."""
    found: list[Cause] = []
    shapes = tuple(results.expected.first.outside)
    if shapes:
        everywhere = Where(tuple(mesh.shape for mesh in results.meshes))
        found.append(causes.OutsideParameters(everywhere, shapes, over=()))
    stale: dict[str, list[MeshShape]] = {}
    for mesh in results.ran:
        for name in dict.fromkeys(name for each in mesh.observations for name in each.stale):
            stale.setdefault(name, []).append(mesh.shape)
    if stale:
        found.append(causes.StaleOptimizer(results.where_of(stale), tuple(stale), len(results.weight_names)))
    return found
