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
factor, so sums are tried, and that over tensor gives r on every mesh: MissingSum(over=("tensor",)).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from opensora_accel.observe import MeshShape
from opensora_accel.verify import causes
from opensora_accel.verify.causes import Cause, Origin, Place, ScaledByShares
from opensora_accel.verify.fit import (
    TOLERANCE,
    Remedy,
    Samples,
    are_equal,
    are_factors,
    as_shares,
    find_remedy,
    fit_ranks,
    fit_slices,
    has_remedy,
    relative_error,
)
from opensora_accel.verify.results import MeshResult, Results, wrong_shapes
from opensora_accel.verify.side_effects import expected_after_clipping
from opensora_accel.verify.ties import find_untied

# Errors below it are what fp32 leaves.
_FP32 = 1e-5
_NOT_USERS = re.compile("site-packages|opensora_accel/(verify|observe|precision)")
_SIZES = re.compile(r"[\d, ()\[\]]+")
# In which gloo says that one rank sends another number of bytes than the other expects.
_UNLIKE = re.compile(r"op\.preamble|EnforceNotMet")
# In the errors of ranks that fail because another one has failed.
_FOLLOWING = re.compile(
    r"hangs|[Tt]imed out|timeout|Connection closed by peer|Connection reset|Socket closed|Broken pipe"
)

# Wrong parameters, with their samples on some or all meshes.
ByName = Mapping[str, Sequence[Samples]]
# Names of what is wrong, with the meshes on which it is.
Shapes = defaultdict[str, list[MeshShape]]


@dataclass(frozen=True)
class GradientFits:
    """Wrong gradients by what makes them right."""

    remedies: Sequence[tuple[Remedy, ByName]]  # those of the most parameters first
    strange: Sequence[ByName]  # one factor on all ranks of a mesh, which goes with no degree
    unexplained: ByName  # on the meshes where nothing makes them right


def diagnose(
    results: Results,
    fits: GradientFits | None = None,
    *,
    origin: Origin | None = None,
    shares: ScaledByShares | None = None,
    drawn: Sequence[Cause] = (),
) -> list[Cause]:
    """What is wrong, the root causes first; nothing where all is right.

    Args:
        fits: `fit_gradients(results)`, where the caller has it.
        origin: the first module whose forward is wrong, where that was looked for.
        shares: factors of single ranks, where these were measured.
        drawn: what ranks have drawn otherwise than the single device, where that was looked for.
    """
    fits = fits or fit_gradients(results)
    failed, refused = _failures(results)
    beside = _parameters_not_trained(results)
    unlike = find_unlike_starts(results, fits, origin) or list(drawn)
    if unlike:
        # Where the model or the data are others, factors would explain nothing.
        consequence = results.cause(causes.Consequence, wrong_shapes(results.wrong), over=())
        return [*failed, *unlike, consequence, *refused, *beside]
    gradients = [
        *find_untied(results),
        *_one_sided_gradients(results),
        *_wrong_gradients(results, fits, origin, shares),
    ]
    returned = _wrong_results(results, is_input=False)
    return [
        *failed,
        *_wrong_weights(results),
        *_same_samples(results),
        *gradients,
        *refused,
        *(_wrong_inputs(results) if returned and not gradients else []),
        *([] if gradients else _wrong_clips(results)),
        *_wrong_results(results, is_input=True),
        *beside,
        *returned,
    ]


def diagnose_gradients(results: Results) -> list[Cause]:
    """What is wrong with gradients, or with what the model was given, where nothing else was observed."""
    fits = fit_gradients(results)
    unlike = find_unlike_starts(results, fits, None)
    gradients = [
        *find_untied(results),
        *_one_sided_gradients(results),
        *_wrong_gradients(results, fits, None, None),
    ]
    return unlike or gradients or _wrong_clips(results)


# What makes a comparison pointless: a step that fails, other weights, other data.


def find_unlike_starts(results: Results, fits: GradientFits, origin: Origin | None) -> list[Cause]:
    """Other weights or other data, which make a comparison of gradients pointless.

    Inputs may differ and nothing be wrong with it, where a step splits them itself or gives ranks their places. Then
    every wrong gradient is explained by a remedy (other noise leaves no exact factor), or the first module whose
    output is wrong was given the right inputs.
    """
    weights = _wrong_weights(results) if results.wrong else []
    weights += [each for each in find_untied(results) if each.starts_apart]
    inputs = _wrong_inputs(results) if fits.unexplained else []
    return [*weights, *(inputs if origin is None or not origin.are_inputs_right else [])]


def _failures(results: Results) -> tuple[list[Cause], list[Cause]]:
    """Steps that raise or never end, by their cause; and those that every rank refuses in the same words.

    A mesh that is refused (heads that do not divide) says nothing of what is wrong on others.
    """
    alike: dict[tuple[type[Cause], str], tuple[dict[str, Any], list[MeshResult]]] = {}
    for mesh in results.meshes:
        if mesh.errors:
            kind, fields = _first_failure(mesh.errors)
            key = kind, _SIZES.sub(" ", fields.get("message", ""))  # sizes differ from mesh to mesh
            alike.setdefault(key, (fields, []))[1].append(mesh)
    failed: list[Cause] = []
    refused: list[Cause] = []
    for (kind, _), (fields, meshes) in alike.items():
        others = [each for each in results.meshes if each in meshes or not each.errors]
        where = results.where([each.shape for each in meshes], others)
        # Every rank refuses in the same words, but for sizes.
        words = [{_SIZES.sub(" ", _message(text)) for text in mesh.errors.values()} for mesh in meshes]
        is_of_all = all(len(mesh.errors) == mesh.shape.world_size for mesh in meshes)
        is_refused = kind is causes.StepFails and is_of_all and all(len(each) == 1 for each in words)
        (refused if is_refused else failed).append(kind(where, **fields))
    return failed, refused


def _first_failure(errors: Mapping[int, str]) -> tuple[type[Cause], dict[str, Any]]:
    """What failed first, as far as can be known, with what else its cause says."""
    messages = {rank: _message(text) for rank, text in sorted(errors.items())}
    # A rank whose peer has gone says so; the one that went has a reason of its own.
    first = {rank: line for rank, line in messages.items() if not _FOLLOWING.search(line)}
    for rank, line in first.items():
        if line:
            return causes.StepFails, {"message": line, "rank": rank}
    if first:
        rank = min(first)
        # The innermost line of the user's; gloo may leave no traceback.
        places = re.findall(r'^  File "(.+)", line (\d+)', errors[rank], re.M)
        own = [(file, line) for file, line in places if not _NOT_USERS.search(file)]
        line = f"{own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]}" if own else ""
        return causes.UnlikeCollectives, {"line": line, "rank": rank}
    return causes.Hang, {}


def _message(text: str) -> str:
    """The first line of the exception that a traceback ends with; empty where collectives are unlike."""
    if _UNLIKE.search(text):
        return ""
    lines = text.strip().splitlines()
    # Behind the last frame: an exception's own lines are not indented, source lines are.
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in after if line and not line.startswith(" ")), lines[-1])


def _wrong_weights(results: Results) -> list[Cause]:
    """Ranks that start from other weights than the single device."""
    wrong, repeated = Shapes(list), Shapes(list)
    for mesh in results.ran:
        for name, expected in mesh.expected.first.weights.items():
            digests = [each.weights.get(name, expected) for each in mesh.observations]
            # A parameter of another shape is this rank's part of it: a step with parts hands gradients over whole.
            size = expected.split("]")[0]
            if any(digest != expected and digest.split("]")[0] == size for digest in digests):
                shards = {each.shards.get(name) for each in mesh.observations}
                is_repeated = None not in shards and len(shards) == 1
                (repeated if is_repeated else wrong)[name].append(mesh.shape)
    # On a mesh of one shard nothing repeats, but it is the same mistake.
    for name in repeated:
        wrong.pop(name, None)
    kinds = (causes.RepeatedShard, repeated), (causes.WrongWeights, wrong)
    return [results.cause(k, bad, num_names=len(results.weight_names)) for k, bad in kinds if bad]


def _wrong_inputs(results: Results) -> list[Cause]:
    """Ranks whose model is given other tensors than the single device's, or than its peers'."""
    apart, other = Shapes(list), Shapes(list)
    for mesh in results.ran:
        in_turns = len(mesh.expected.turns) == mesh.shape.data_size
        for name in mesh.observations[0].inputs:
            for data_rank in range(mesh.shape.data_size):
                given = [mesh.observations[rank].inputs.get(name) for rank in mesh.shape.ranks_of(data_rank)]
                first = given[0]
                expected = mesh.expected.turns[data_rank if in_turns else 0].inputs.get(name)
                if first is None or expected is None or (in_turns and first.shape != expected.shape):
                    continue  # the step splits this input itself
                if any(each is None or not torch.equal(each, first) for each in given):
                    apart[name].append(mesh.shape)
                elif in_turns and not torch.equal(first, expected):
                    other[name].append(mesh.shape)
    # Ranks that differ among themselves cannot all be the single device's: that is reported once.
    for name in apart:
        other.pop(name, None)
    kinds = (causes.DifferentDraws, apart), (causes.WrongInput, other)
    return [results.cause(kind, bad) for kind, bad in kinds if bad]


def _same_samples(results: Results) -> list[Cause]:
    """Data ranks with one and the same gradient on the single device."""
    shapes = []
    for mesh in results.ran:
        # Equal to the last bit: other samples cannot give that.
        first, *others = (turn.gradients for turn in mesh.expected.turns)
        pairs = [(gradient, other.get(name)) for other in others for name, gradient in first.items()]
        if others and all(a is None or (b is not None and torch.equal(a, b)) for a, b in pairs):
            shapes.append(mesh.shape)
    return [causes.SameSamples(results.where(shapes))] if shapes else []


# Wrong gradients.


def fit_gradients(results: Results) -> GradientFits:
    remedies: dict[tuple[tuple[str, ...], str, bool], tuple[Remedy, dict[str, list[Samples]]]] = {}
    strange: defaultdict[tuple[tuple[MeshShape, float], ...], dict[str, list[Samples]]] = defaultdict(dict)
    unexplained: dict[str, list[Samples]] = {}
    for name, samples in results.wrong.items():
        provable = [each for each in samples if each.is_provable]
        remedy = find_remedy(provable, results.axes) if provable else None
        # One factor on every mesh is a better answer than a remedy on some of them.
        if remedy is None and (factors := _factors(provable)):
            strange[factors][name] = provable
        elif remedy is None:
            # A remedy on some meshes must not be hidden by another error on others.
            provable = [each for each in provable if has_remedy(each, results.axes)]
            is_wrong_on_several = sum(not each.is_right for each in provable) > 1
            remedy = find_remedy(provable, results.axes) if is_wrong_on_several else None
            # A bare constant on some meshes is chance more often than a cause.
            if remedy is not None and not remedy.missing and not remedy.factor.exponents:
                remedy = None
            explained = {each.shape for each in provable} if remedy is not None else set()
            unexplained[name] = [each for each in samples if each.shape not in explained]
        # Parameters that the same change makes right have one cause.
        if remedy is not None:
            key = remedy.missing, str(remedy.factor), remedy.is_everywhere
            remedies.setdefault(key, (remedy, {}))[1][name] = provable
    by_number = sorted(remedies.values(), key=lambda group: -len(group[1]))
    return GradientFits(by_number, list(strange.values()), unexplained)


def _factors(samples: Sequence[Samples]) -> tuple[tuple[MeshShape, float], ...]:
    """Each mesh's factor, where all have one; nothing for single numbers, which always have."""
    factors = [(each.shape, factor) for each in samples if (factor := each.factor()) is not None]
    if len(factors) < len(samples) or not samples or samples[0].expected.numel() == 1:
        return ()
    # Six digits: parameters that share a factor differ in it by rounding.
    return tuple((shape, round(factor, 6 - int(math.log10(abs(factor))))) for shape, factor in factors)


def find_slices(results: Results, fits: GradientFits) -> ScaledByShares | None:
    """Factors of each rank's tokens, as the gradients of inputs show them."""
    # The fewest ranks first: their factors are the shortest to read.
    for mesh in sorted(results.ran, key=lambda each: each.shape.world_size):
        num_sharing = mesh.shape.world_size // mesh.shape.data_size
        for samples in mesh.inputs().values() if num_sharing > 1 else ():
            factors = None if samples.is_right else fit_slices(samples, num_sharing)
            if factors is not None and as_shares(factors):
                return _cause_of_shares(results, mesh.shape, factors, list(fits.unexplained))
    return None


def fit_shares(
    results: Results, fits: GradientFits, mesh: MeshResult, alone: Sequence[MeshResult]
) -> ScaledByShares | None:
    """By which factor each rank's contribution is off, if these factors explain a gradient.

    Args:
        alone: the mesh once more for every rank, of which only that rank's outputs count.
    """
    parameters = mesh.parameters()
    wrong = [
        n
        for n in fits.unexplained
        if n in parameters and parameters[n].is_provable and not parameters[n].is_right
    ]
    each_alone = [each.parameters() for each in alone]
    # A parameter without a gradient where one rank counts alone gives no equation for that rank's factor.
    if any(name not in each for name in wrong for each in each_alone):
        return None
    # After the step's own average over ranks, so that the contributions add up to the whole gradient.
    parts = {name: [each[name].found[0] for each in each_alone] for name in wrong}
    # All of them, or only those nearest to the loss, where the factors are not yet mixed by what lies behind.
    for some in filter(None, (wrong, _first_wrong(results, wrong))):
        of_ranks = [[parts[name][rank] for name in some] for rank in range(len(alone))]
        factors = fit_ranks(of_ranks, [parameters[name].expected for name in some])
        if factors is not None and not are_equal(factors):
            # The factors may come from a few of the parameters; named are all that they make right.
            expected = {name: parameters[name].expected for name in wrong}
            names = [name for name in wrong if are_factors(parts[name], factors, expected[name])]
            return _cause_of_shares(results, mesh.shape, factors, names)
    return None


def _cause_of_shares(
    results: Results, shape: MeshShape, factors: Sequence[float], names: Sequence[str]
) -> ScaledByShares:
    # The axes along which the factors differ are those of the split.
    varied = []
    for axis in results.axes:
        groups = shape.groups([axis])  # of ranks that differ along this axis only
        if not all(are_equal([factors[rank] for rank in ranks]) for ranks in groups):
            varied.append(axis)
    return results.cause(
        ScaledByShares,
        {name: [shape] for name in names},
        over=tuple(varied),
        factors=tuple(factors),
        shares=as_shares(factors),
        data_axes=tuple(axis for axis in varied if axis in results.data_axes),
    )


def _one_sided_gradients(results: Results) -> list[Cause]:
    # By which side lacks the gradient, and apart from them what FSDP2 is configured to keep.
    by_side: defaultdict[causes.Side, Shapes] = defaultdict(lambda: Shapes(list))
    held_back, replicas = Shapes(list), dict[str, None]()
    for mesh in results.ran:
        for name, side in mesh.one_sided().items():
            # A gradient that FSDP2 is configured to keep is not cut off, but not yet added up.
            axes = mesh.observations[0].held_back.get(name)
            replicas |= dict.fromkeys(axes or ())
            (by_side[side] if axes is None else held_back)[name].append(mesh.shape)
    total = len(results.weight_names)
    found: list[Cause] = []
    if held_back:
        over = tuple(replicas) or results.data_axes
        found.append(results.cause(causes.HeldBack, held_back, num_names=total, over=over))
    for side, bad in by_side.items():
        found.append(results.cause(causes.MissingGradient, bad, num_names=total, side=side))
    return found


def _wrong_gradients(
    results: Results, fits: GradientFits, origin: Origin | None, shares: ScaledByShares | None
) -> list[Cause]:
    by_shares = set(() if shares is None else shares.names)
    wrong_forward = set()
    for mesh in results.ran:
        scalars = results.scalars(mesh)
        if scalars and not any(each.is_right for each in scalars.values()):
            wrong_forward.add(mesh.shape)
    first: list[Cause] = []
    # What may be chance is listed as well, but behind the causes that leave no doubt.
    last: list[Cause] = []
    for remedy, samples in fits.remedies:
        wrong = {name: each for name, each in samples.items() if name not in by_shares}
        if wrong:
            # Where all that the step returns is wrong, so is the forward: what a factor happens to explain there is
            # not the cause.
            is_chance = any(wrong_forward & set(shapes) for shapes in wrong_shapes(wrong).values())
            (last if is_chance else first).append(_cause_of_remedy(results, remedy, wrong))
    for strange in fits.strange:
        one = next(iter(strange.values()))
        factors = tuple((str(each.shape), each.factor() or 0.0) for each in one if not each.is_right)
        first.append(results.cause(causes.StrangeScale, wrong_shapes(strange), factors=factors))
    if shares is not None:
        first.append(shares)
    # What neither a remedy nor shares explain.
    rest = {name: each for name, each in fits.unexplained.items() if name not in by_shares}
    if rest:
        bad = wrong_shapes(rest)
        error = max(each.error() for samples in rest.values() for each in samples)
        nearest, place = tuple(_first_wrong(results, tuple(rest))), _place_of(results, rest)
        first.append(
            results.cause(causes.RightToFp32, bad, error=error)
            if error < _FP32
            else results.cause(
                causes.WrongValues, bad, error=error, origin=origin, first_wrong=nearest, place=place
            )
        )
    return [*first, *last]


def _cause_of_remedy(results: Results, remedy: Remedy, wrong: ByName) -> Cause:
    """The cause of gradients that a sum and a factor make right."""
    bad, place, powers = wrong_shapes(wrong), _place_of(results, wrong), dict(remedy.factor.exponents)
    if remedy.missing:
        clipped = [mesh.shape for mesh in results.ran if any(seen.clips for seen in mesh.observations)]
        if clipped and _are_alike_once_clipped(results, wrong, remedy.missing):
            bad = dict.fromkeys(wrong, clipped)
            return results.cause(causes.ClippedTooEarly, bad, over=remedy.missing)
        # A sum that comes out P times too large is an average that was left out, as DDP and FSDP take it.
        is_average = all(powers.get(axis) == 1 for axis in remedy.missing)
        if is_average:  # the sum is too large by what an average divides by
            powers = {axis: e for axis, e in powers.items() if axis not in remedy.missing}
        by = replace(remedy.factor, exponents=tuple(powers.items()))
        return results.cause(
            causes.MissingSum,
            bad,
            over=remedy.missing,
            by=None if str(by) == "1" else by,
            is_average=is_average,
            place=place,
        )
    return results.cause(
        causes.Scale,
        bad,
        by=remedy.factor,
        is_everywhere=remedy.is_everywhere,
        data_powers=tuple(e for axis, e in powers.items() if axis in results.data_axes),
        sharing_powers=tuple(e for axis, e in powers.items() if axis not in results.data_axes),
        place=None if len(wrong) == len(results.names) else place,
    )


def _are_alike_once_clipped(results: Results, names: ByName, missing: Sequence[str]) -> bool:
    """Whether, once clipped, the gradients are the same on all ranks that hold parts of them."""
    for mesh in results.ran:
        if not any(seen.clips for seen in mesh.observations):
            continue
        for name in names:
            after = [each.clipped.get(name) for each in mesh.observations]
            for ranks in mesh.shape.groups(missing):
                first = after[ranks[0]]
                if first is None or any((other := after[r]) is None or not other.equal(first) for r in ranks):
                    return False
    return True


def _place_of(results: Results, names: ByName) -> Place | None:
    order = [name for name in results.expected.first.backward_order if name in results.names]
    positions = [order.index(name) for name in names if name in order]
    return Place(order[min(positions)], min(positions)) if positions else None


def _first_wrong(results: Results, names: Sequence[str]) -> list[str]:
    """Those of `names` that belong to the module whose gradient is the first to be wrong."""
    # Backward runs from the loss to the input, so the first one in this order is nearest to the mistake.
    order = [name for name in results.expected.first.backward_order if name in names]
    if not order:
        return []
    module = order[0].rsplit(".", 2)[0]  # the parent of the layer: to_q's siblings are to_k and to_v
    return [name for name in order if name.startswith(module + ".")]


# What is wrong beside gradients.


def _wrong_clips(results: Results) -> list[Cause]:
    """Gradients that are right until they are clipped."""
    unclipped = _never_clipped(results)
    if unclipped:
        return [results.cause(causes.NeverClipped, unclipped)]
    wrong = results.wrong_of(MeshResult.clipped)
    if not wrong:
        return []
    # One factor on all of them: the limit or the norm is off by it. Otherwise each rank took a norm of its own.
    scales = [find_remedy(each, results.axes, is_summed=True) for each in wrong.values()]
    factors = {str(scale.factor): scale.factor for scale in scales if scale is not None}
    if len(factors) > 1 or not all(scales):
        return [results.cause(causes.ClippedByOtherNorms, wrong_shapes(wrong))]
    return [results.cause(causes.ClippedByFactor, wrong_shapes(wrong), by=next(iter(factors.values())))]


def _never_clipped(results: Results) -> Shapes:
    """Gradients that one device clips, and that ranks leave as they are."""
    bad = Shapes(list)
    for mesh in results.ran:
        # Gradients that were handed over may have been clipped where they lie.
        if any(each.clips or not each.trained for each in mesh.observations):
            continue
        first, right = mesh.expected.first, mesh.expected.gradients
        (clipped, *_) = expected_after_clipping(first.clips, right, {})
        for name, after in clipped.items():
            before = right[name]
            if before is not None and relative_error(after, before) > TOLERANCE:
                bad[name].append(mesh.shape)
    return bad


def _wrong_results(results: Results, *, is_input: bool) -> list[Cause]:
    """What the step returns, or the gradients of inputs; those that are wrong in the same way together."""
    alike: defaultdict[Cause, list[str]] = defaultdict(list)
    for name, samples in results.wrong_of(MeshResult.inputs if is_input else results.scalars).items():
        scale = find_remedy(samples, results.axes, is_summed=True)
        by = {} if scale is None else {"by": scale.factor, "is_everywhere": scale.is_everywhere}
        bad = wrong_shapes({name: samples})
        cause = results.cause(causes.WrongResult, bad, is_input=is_input, **by)
        alike[replace(cause, names=())].append(name)  # all but the name is compared
    return [replace(cause, names=tuple(names)) for cause, names in alike.items()]


def _parameters_not_trained(results: Results) -> list[Cause]:
    """Parameters that the model does not have and the loss reaches, or that it has replaced and an optimizer steps."""
    found: list[Cause] = []
    if results.expected.first.outside:
        everywhere = [mesh.shape for mesh in results.meshes]
        shapes = tuple(results.expected.first.outside)
        found.append(causes.OutsideParameters(causes.Where(tuple(everywhere)), shapes, over=()))
    stale = Shapes(list)
    for mesh in results.ran:
        for name in dict.fromkeys(name for each in mesh.observations for name in each.stale):
            stale[name].append(mesh.shape)
    if stale:
        found.append(results.cause(causes.StaleOptimizer, stale, num_names=len(results.weight_names)))
    return found
