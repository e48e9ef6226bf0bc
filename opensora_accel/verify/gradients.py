"""What is wrong with gradients, in words: a factor, a sum left out, each rank's own factor, or none of these."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from opensora_accel.verify.findings import (
    Finding,
    compose_axes,
    compose_factor,
    count_names,
    join,
    list_names,
)
from opensora_accel.verify.fit import Factor, Remedy, Samples, are_equal
from opensora_accel.verify.shapes import MeshShape
from opensora_accel.verify.trace import Origin
from opensora_accel.verify.view import View, shape_names, wrong_shapes

_OF_KEYS = re.compile(r"(^|_)(k|v|kv|key|value)(_|$|s)")
"""Modules that make keys and values: to_k, k_proj, norm_k, key."""
_ROUNDING = 1e-5
"""Errors below it are what fp32 leaves."""


def one_sided(view: View) -> list[Finding]:
    """Gradients that one side has and the other has not."""
    where: dict[str, dict[str, list[MeshShape]]] = {}
    held_back: dict[str, tuple[str, ...]] = {}
    for result in view.ran:
        for name, side in result.one_sided().items():
            axes = result.observations[0].held_back.get(name)
            held_back |= {} if axes is None else {name: axes}
            where.setdefault(side if axes is None else "held back", {}).setdefault(name, []).append(
                result.shape
            )
    words = {
        "none": (
            "get no gradient",
            "a detach, a collective without a backward, or no_grad cuts them off",
        ),
        "some ranks only": (
            "get a gradient on some ranks only",
            "ranks without a share must still take part: add their output times zero, or use static shapes",
        ),
        "only in parallel": (
            "get a gradient that the single device does not give",
            "look for another branch",
        ),
    }
    found = []
    if names := where.pop("held back", {}):
        axes = tuple(dict.fromkeys(axis for name in names for axis in held_back[name])) or view.data_axes
        found.append(
            Finding(
                "missing sum",
                f"missing average over {join(axes)} for {count_names(list(names), len(view.weight_names))}: FSDP2 "
                "holds back what it has added up within each replica, and gives no gradient",
                "set_requires_all_reduce(False) is for all microbatches but the last: True before that one's backward",
                axes,
                names=tuple(names),
                meshes=shape_names(dict.fromkeys(shape for each in names.values() for shape in each)),
            )
        )
    return found + [
        view.finding(
            "missing gradient",
            f"{count_names(list(names), len(view.weight_names))} {words[side][0]} {{where}}",
            words[side][1],
            names,
        )
        for side, names in where.items()
    ]


def consequence(view: View, wrong: Mapping[str, Sequence[Samples]]) -> Finding:
    """Wrong gradients whose cause is found already."""
    return Finding(
        "values",
        f"the gradients of {count_names(list(wrong), len(view.names))} differ, as they must after the above",
        "mend that first, then verify again",
        names=tuple(wrong),
        meshes=shape_names(wrong_shapes(wrong)),
    )


def explained(
    view: View, remedy: Remedy, names: list[str], wrong: Mapping[str, Sequence[Samples]]
) -> Finding:
    """Wrong gradients that `remedy` makes right."""
    shapes = wrong_shapes({name: wrong[name] for name in names})
    if remedy.missing:
        return _missing_sum(view, remedy, names, shapes)
    factor = compose_factor(remedy.factor, view.axes)
    what, axes = f"scale {factor} on {count_names(names, len(view.names))}", factor.axes
    advice = _scale_advice(view, remedy.factor)
    if not remedy.is_everywhere:
        where = view.blame(shapes)
        what, axes = f"{what} {where.words}", tuple(dict.fromkeys((*where.axes, *axes)))
        advice = "a number where the number of ranks should stand, or a collective that counts twice"
    if len(names) < len(view.names):
        advice += _place(view, names)
    return Finding("scale", what, advice, axes, str(factor), tuple(names), shape_names(shapes))


def _missing_sum(view: View, remedy: Remedy, names: list[str], shapes: Sequence[MeshShape]) -> Finding:
    missing = compose_axes(remedy.missing, view.axes)
    averaged = all(dict(remedy.factor.exponents).get(axis) == 1 for axis in remedy.missing)
    exponents = remedy.factor.exponents
    kept = tuple((a, e) for a, e in exponents if not (averaged and a in remedy.missing))
    rest = replace(remedy.factor, exponents=kept)
    factor = "" if str(rest) == "1" else str(compose_factor(rest, view.axes))
    operation = "average" if averaged else "sum"
    what = f"missing {operation} over {join(missing)} for {count_names(names, len(view.names))}"
    if factor:
        what += f", beside a scale {factor}"
    remedy_text = (
        f"the ranks along {join(missing)} hold parts of one gradient: average gradients over the mixed group "
        "(data × sequence), not over fewer ranks"
        if 2 * len(names) > len(view.names)
        else f"these get parts of one gradient on the ranks along {join(missing)}: all-reduce them there, or let "
        f"what they are applied to enter through copy_forward_reduce_backward{_place(view, names)}"
    )
    return Finding("missing sum", what, remedy_text, missing, factor, tuple(names), shape_names(shapes))


def irregular_scale(view: View, wrong: Mapping[str, Sequence[Samples]]) -> Finding:
    """Gradients that have one factor on every rank of a mesh, which goes with no number of ranks."""
    shapes = wrong_shapes(wrong)
    where = view.blame(shapes)
    first = next(iter(wrong.values()))
    shown = ", ".join(f"{each.factor():.4g} on {each.shape}" for each in first if not each.is_right)
    return Finding(
        "scale",
        f"a factor that goes with no number of ranks ({shown}) on {count_names(list(wrong), len(view.names))}",
        "look for a divisor that is no number of ranks but depends on them, and for gradients that are normalised or "
        "clipped by hand: leave that out of the step, or do it on the single device, too",
        where.axes,
        names=tuple(wrong),
        meshes=shape_names(shapes),
    )


def _scale_advice(view: View, factor: Factor) -> str:
    exponents = dict(factor.exponents)
    data = {axis: e for axis, e in exponents.items() if axis in view.data_axes}
    other = {axis: e for axis, e in exponents.items() if axis not in view.data_axes}
    if factor.of_others:
        return "the own rank is not counted: P − 1 stands where P, the number of ranks, should"
    if not exponents:
        return (
            "a constant, the same on every mesh: a collective or a loss that counts twice, or a divisor that is "
            "not a number of ranks"
        )
    if other and not data and all(e == -1 for e in other.values()):
        return (
            "averaged over a group whose gradients are partial: set the divisor to the data degree (FSDP2: "
            'set_gradient_divide_factor), or scale the gradient by the degree where the ranks\' shares join ("up")'
        )
    if other and not data and all(e == 1 for e in other.values()):
        return (
            "counted once per rank that shares the sample: summed where whole gradients are averaged, or a gather "
            'scales "up" and its split not "down"'
        )
    if data and not other and all(e == -1 for e in data.values()):
        return "averaged over the data ranks twice: is the loss divided by their number as well?"
    if data and not other and all(e == 1 for e in data.values()):
        return (
            "summed over the data ranks, not averaged: divide by their number (DDP and FSDP2 do by default)"
        )
    return "a divisor or a sum counts other ranks than those that hold parts of this gradient"


def _place(view: View, names: Sequence[str]) -> str:
    """Where in the backward the error comes in, as words to append."""
    order = [name for name in view.backward_order if name in view.names]
    positions = [order.index(name) for name in names if name in order]
    if not positions:
        return ""
    nearest = order[min(positions)]
    before = order[: min(positions)]
    right = f"; the {len(before)} nearer to it are right" if before else ""
    return f". Nearest to the loss: {nearest}{right}"


def wrong_values(
    view: View, unexplained: Mapping[str, Sequence[Samples]], origin: Origin | None = None
) -> Finding:
    """Wrong gradients that nothing explains: over which axis, and where they come in."""
    names = list(unexplained)
    shapes = wrong_shapes(unexplained)
    where = view.blame(shapes)
    error = max(each.error() for samples in unexplained.values() for each in samples)
    if error < _ROUNDING:
        return Finding(
            "values",
            f"{count_names(names, len(view.names))} are right to fp32 only {where.words}, up to {error:.1e} of the "
            "largest",
            "something computes or adds up in a narrower type than fp64: where that is meant (convert_to_fp32 of "
            "diffusers), turn it off for the proof",
            where.axes,
            names=tuple(names),
            meshes=shape_names(shapes),
        )
    what = (
        f"wrong values (no factor, no sum explains them) {where.words}: {count_names(names, len(view.names))}, "
        f"up to {error:.1e} of the largest"
    )
    return Finding(
        "values",
        what,
        _where_from(view, names, origin),
        where.axes,
        names=tuple(names),
        meshes=shape_names(shapes),
    )


def _where_from(view: View, names: Sequence[str], origin: Origin | None) -> str:
    """Where wrong values come in: in the forward, or in backward, the nearest place to the loss."""
    if origin is not None and origin.name is not None:
        place = origin.name or "the model itself, outside of its modules"
        place += f", before {origin.before}" if origin.before else ""
        given = {True: " (its inputs are right)", False: " (what it is given is wrong already)", None: ""}
        return (
            f"the forward is wrong already, first in {place}{given[origin.are_inputs_right]}: mostly it takes its "
            "rank's tokens for all, counts them (positions, masks) from 0, or parts heads that do not divide"
        )
    siblings = first_wrong(view, names)
    if not siblings:
        return "look at what the forward communicates"
    advice = f"they come in at {list_names(siblings)}"
    leaves = [name.split(".")[-2] for name in siblings if "." in name]
    if leaves and all(_OF_KEYS.search(leaf) for leaf in leaves):
        advice += (
            ", the gradients of keys and values (not those of queries): where they travel round a ring, they meet "
            "the keys of another step"
        )
    else:
        advice += ": look at what is communicated there in backward"
    return advice + _place(view, names)


def first_wrong(view: View, names: Sequence[str]) -> list[str]:
    """The wrong parameters of the module whose gradient is the first to be wrong."""
    order = [name for name in view.backward_order if name in names]
    if not order:
        return []
    module = order[0].rsplit(".", 2)[0]
    return [name for name in order if name.startswith(module + ".")]


def scaled_by_shares(view: View, factors: Sequence[float], shape: MeshShape, names: Sequence[str]) -> Finding:
    """The finding that each rank's contribution is multiplied by a factor of its own."""
    shown = ", ".join(f"{factor:.4g}" for factor in factors)
    varied = tuple(axis for axis in view.axes if not _is_alike(factors, shape, axis))
    what = (
        f"each rank's part of the gradient is multiplied by a factor of its own on {shape} ({shown}), in "
        f"{count_names(names, len(view.names))}"
    )
    shares = as_shares(factors)
    if shares is not None:
        what += f": its share of an uneven split, {shares}"
    over_data = [axis for axis in varied if axis in view.data_axes]
    remedy = (
        f"ranks along {join(over_data)} hold different numbers of samples or tokens, and each divides by its own: "
        "divide by the number over all ranks (all-reduce it), times the number of ranks that the gradients are then "
        "averaged over"
        if over_data
        else "an uneven split is scaled by exactly the number of ranks (P up, 1/P down), never by a rank's share"
    )
    return Finding(
        "shares",
        what,
        remedy,
        compose_axes(varied, view.axes),
        "" if shares is None else "share",
        tuple(names),
        (str(shape),),
    )


def _is_alike(factors: Sequence[float], shape: MeshShape, axis: str) -> bool:
    """Whether ranks that differ along `axis` only have the same factor."""
    return all(are_equal([factors[rank] for rank in ranks]) for ranks in shape.groups([axis]))


def as_shares(factors: Sequence[float]) -> str | None:
    """`4:4:3`, where the factors are shares of a whole (or one over them), times the number of ranks or not."""
    num_ranks = len(factors)
    if are_equal(factors):
        return None
    for candidates in (factors, [1 / factor for factor in factors]):
        for scale in (num_ranks, 1):
            shares = [each / scale for each in candidates]
            if math.isclose(sum(shares), 1, rel_tol=1e-6) and min(shares) > 0:
                parts = [Fraction(share).limit_denominator(4096) for share in shares]
                whole = math.lcm(*(part.denominator for part in parts))
                return ":".join(str(part.numerator * (whole // part.denominator)) for part in parts)
    return None
