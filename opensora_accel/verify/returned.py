"""What the step returned, the gradients of the model's inputs, and gradients after they were clipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opensora_accel.verify.findings import Finding, compose_factor, count_names, join, list_names
from opensora_accel.verify.fit import Samples, find_scale
from opensora_accel.verify.view import View, shape_names, wrong_shapes


def wrong_inputs(view: View) -> list[Finding]:
    """Of what is upstream of the model."""
    return _wrong_results(
        view,
        [each.inputs() for each in view.ran],
        "the gradients of inputs ({names}) are",
        "what is upstream of them would be trained with it",
    )


def wrong_scalars(view: View) -> list[Finding]:
    """Of loss, gradient norm, or whatever the step tells."""
    return _wrong_results(
        view,
        [view.scalars(each) for each in view.ran],
        "what the step returns as {names} is",
        "the mean over all ranks should be the single device's",
    )


def wrong_clips(view: View) -> list[Finding]:
    """Of gradients that are right until they are clipped."""
    found = [each.clipped() for each in view.ran]
    names = dict.fromkeys(name for each in found for name in each)
    samples = {name: [each[name] for each in found if name in each] for name in names}
    wrong = {name: each for name, each in samples.items() if any(not s.is_right for s in each)}
    if not wrong:
        return []
    where = view.blame(wrong_shapes(wrong))
    scales = {str(scale.factor): scale for each in wrong.values() if (scale := find_scale(each, view.axes))}
    is_one = len(scales) == 1 and all(find_scale(each, view.axes) for each in wrong.values())
    factor = compose_factor(next(iter(scales.values())).factor, view.axes) if is_one else None
    count = count_names(list(wrong), len(view.names))
    if factor is None:
        what = f"ranks clip by other norms than that of the whole gradient {where.words}: {count} are wrong after it"
        remedy = (
            "the norm is that of all parameters, whole, after gradients are averaged: torch.nn.utils.clip_grad_norm_ "
            "on the DTensors of FSDP2, FSDP1's own clip_grad_norm_, or an all-reduce of the squares of shards' norms"
        )
    else:
        what = f"clipping leaves {factor} times the single device's gradient of {count}"
        remedy = "the limit, or the norm, is multiplied by it"
    axes = where.axes if factor is None else factor.axes
    return [
        Finding(
            "clipping",
            what,
            remedy,
            axes,
            "" if factor is None else str(factor),
            tuple(wrong),
            shape_names(wrong_shapes(wrong)),
        )
    ]


def clipped_too_early(view: View, names: Sequence[str], missing: Sequence[str]) -> Finding | None:
    """The finding that gradients are clipped as parts, and only then added up over `missing`."""
    results = [each for each in view.ran if any(seen.clips for seen in each.observations)]
    for result in results:
        for name in names:
            after = [each.clipped.get(name) for each in result.observations]
            for ranks in result.shape.groups(missing):
                first = after[ranks[0]]
                if first is None or any((other := after[r]) is None or not other.equal(first) for r in ranks):
                    return None
    if not results:
        return None
    return Finding(
        "clipping",
        f"ranks clip their own parts of {count_names(names, len(view.names))}, before these are added up over "
        f"{join(missing)}: each by another norm",
        "average gradients first, then clip",
        tuple(missing),
        names=tuple(names),
        meshes=shape_names(each.shape for each in results),
    )


def _wrong_results(
    view: View, results: Sequence[Mapping[str, Samples]], what: str, remedy: str
) -> list[Finding]:
    alike: dict[tuple[str, tuple[str, ...], str, tuple[str, ...]], list[str]] = {}
    for name in dict.fromkeys(name for each in results for name in each):
        samples = [each[name] for each in results if name in each]
        bad = [each.shape for each in samples if not each.is_right]
        if not bad:
            continue
        scale, where = find_scale(samples, view.axes), view.blame(bad)
        if scale is None:
            key = f"wrong {where.words}", where.axes, "", shape_names(bad)
        else:
            composed = compose_factor(scale.factor, view.axes)
            axes, words = composed.axes, f"off by the factor {composed}"
            if not scale.is_everywhere:
                axes, words = tuple(dict.fromkeys((*where.axes, *axes))), f"{words} {where.words}"
            key = words, axes, str(composed), shape_names(bad)
        alike.setdefault(key, []).append(name)
    return [
        Finding(
            "result",
            f"{what.format(names=list_names(names))} {words}",
            remedy,
            axes,
            factor,
            tuple(names),
            meshes,
        )
        for (words, axes, factor, meshes), names in alike.items()
    ]
