"""What the step returned, and the gradients of the model's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opensora_accel.verify.findings import Finding, compose_factor, list_names
from opensora_accel.verify.fit import Samples, find_scale
from opensora_accel.verify.view import View, shape_names


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
        [each.scalars() for each in view.ran],
        "what the step returns as {names} is",
        "the mean over all ranks should be the single device's",
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
