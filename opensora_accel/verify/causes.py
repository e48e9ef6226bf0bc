"""What makes a comparison of gradients pointless: a step that fails, other weights, other data."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from opensora_accel.verify.findings import Finding, count_names, list_names
from opensora_accel.verify.results import MeshResult
from opensora_accel.verify.shapes import MeshShape
from opensora_accel.verify.view import View, shape_names

_HANGS = "hangs"
_SIZES = re.compile(r"[\d, ()\[\]]+")
_TIMEOUT_WORDS = ("hangs", "Timed out", "timed out", "timeout")
_MISMATCH = "ranks meet in collectives that are not the same"
_MISMATCH_WORDS = ("op.preamble", "EnforceNotMet")
"""In which gloo tells that one rank sends another number of bytes than the other expects."""
_SAME_CALLS = (
    "every rank of a group must make the same calls in the same order: look for a collective that only "
    "some ranks reach, a send without its receive, or a group of the wrong ranks"
)
_FOLLOWING_WORDS = ("Connection closed by peer", "Connection reset", "Socket closed", "Broken pipe")


def same_samples(view: View) -> list[Finding]:
    """Data ranks with one and the same gradient: nothing can be told of their average."""
    shapes = []
    for result in view.ran:
        first, *others = (turn.gradients for turn in result.expected.turns)
        if others and all(_are_equal(first, other) for other in others):
            shapes.append(result.shape)
    if not shapes:
        return []
    where = view.blame(shapes)
    return [
        Finding(
            "inputs",
            f"all data ranks were given the same samples {where.words}: a missing average between them could not be "
            "seen",
            "draw with torch's generator, which is seeded by the data rank before the step, or choose samples by "
            "run.data_rank; do not seed it anew",
            where.axes,
            meshes=shape_names(shapes),
        )
    ]


def _are_equal(first: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]) -> bool:
    return all(
        gradient is None or (found is not None and torch.equal(gradient, found))
        for gradient, found in ((gradient, other.get(name)) for name, gradient in first.items())
    )


def not_compared(view: View) -> list[Finding]:
    """Parameters that the loss reaches outside of the model, which nothing is known of."""
    shapes = view.results[0].expected.outside
    if not shapes:
        return []
    count = "a parameter" if len(shapes) == 1 else f"{len(shapes)} parameters"
    return [
        Finding(
            "outside",
            f"the loss reaches {count} outside of the model, of shape {list_names(shapes)}: not compared",
            "build what is trained as one module in model_fn, or freeze what is not (requires_grad_(False))",
            meshes=shape_names(each.shape for each in view.results),
        )
    ]


def stale_parameters(view: View) -> list[Finding]:
    """An optimizer that steps parameters which the model has replaced."""
    where: dict[str, list[MeshShape]] = {}
    for result in view.ran:
        for name in dict.fromkeys(name for each in result.observations for name in each.stale):
            where.setdefault(name, []).append(result.shape)
    if not where:
        return []
    return [
        view.finding(
            "optimizer",
            f"the optimizer trains tensors that are the model's no longer {{where}}, in place of "
            f"{count_names(list(where), len(view.weight_names))}: they would stay as they are",
            "fully_shard and others give the model new parameters: build the optimizer after that",
            where,
        )
    ]


def failures(view: View) -> tuple[list[Finding], list[Finding]]:
    """Steps that raise or never end, by their cause; and those that every rank refuses in the same words.

    A mesh that is refused (heads that do not divide) says nothing of what is wrong on others.
    """
    by_cause: dict[str, list[MeshResult]] = {}
    for result in view.results:
        if result.errors:
            # Sizes differ from mesh to mesh.
            by_cause.setdefault(_SIZES.sub(" ", _cause(result.errors)[1]), []).append(result)
    failed: list[Finding] = []
    refused: list[Finding] = []
    for results in by_cause.values():
        rank, text = _cause(results[0].errors)
        others = [each for each in view.results if each in results or not each.errors]
        where = view.blame([each.shape for each in results], others)
        if text.startswith(_HANGS):
            what = f"the step never ends {where.words}: a rank waits for another that does not answer"
            remedy = _SAME_CALLS
        elif text.startswith(_MISMATCH):
            what = f"the step fails {where.words}: {text} (rank {rank})"
            remedy = _SAME_CALLS
        else:
            what = f"the step fails {where.words}: {text} (rank {rank})"
            remedy = "the whole traceback is in the report's errors"
        finding = Finding(
            "failure", what, remedy, where.axes, meshes=shape_names(each.shape for each in results)
        )
        (refused if all(map(_is_refused, results)) else failed).append(finding)
    return failed, refused


def _is_refused(result: MeshResult) -> bool:
    words = {_SIZES.sub(" ", _message(text)) for text in result.errors.values()}
    return (
        len(result.errors) == result.shape.world_size and len(words) == 1 and not words & {_HANGS, _MISMATCH}
    )


def other_weights(view: View) -> list[Finding]:
    """Ranks that start from other weights than the single device."""
    bad: dict[str, list[MeshShape]] = {}
    repeated: dict[str, list[MeshShape]] = {}
    for result in view.ran:
        first = result.observations[0]
        for name, expected in result.expected.weights.items():
            if all(_is_same(each.weights.get(name), expected) for each in result.observations):
                continue
            bad.setdefault(name, []).append(result.shape)
            shards = {each.shards[name] for each in result.observations if name in each.shards}
            if name in first.shards and len(shards) == 1:
                repeated.setdefault(name, []).append(result.shape)
    found, total = [], len(view.weight_names)
    if repeated:
        found.append(
            view.finding(
                "weights",
                f"every rank holds the same shard of {count_names(list(repeated), total)}: the model starts with one "
                "slice of its weights, repeated",
                "to_empty() and reset_parameters() draw the same numbers on every rank; draw each whole parameter "
                "from a seed of its own and keep this rank's slice, or load a checkpoint",
                repeated,
            )
        )
    others = {name: shapes for name, shapes in bad.items() if name not in repeated}
    if others:
        found.append(
            view.finding(
                "weights",
                f"the ranks start from other weights than the single device {{where}}: "
                f"{count_names(list(others), total)}",
                "initialise by one seed on all ranks, or broadcast from rank 0 (DDP does), before the first step",
                others,
            )
        )
    return found


def _is_same(digest: str | None, expected: str) -> bool:
    """A parameter of another shape is this rank's part of it: a step with parts hands gradients over whole."""
    return digest is None or digest == expected or digest.split("]")[0] != expected.split("]")[0]


def other_inputs(view: View) -> list[Finding]:
    """Ranks whose model is given other tensors than the single device's, or than its peers'."""
    apart: dict[str, list[MeshShape]] = {}
    other: dict[str, list[MeshShape]] = {}
    for result in view.ran:
        in_turns = len(result.expected.turns) == result.shape.data_size
        for name in result.observations[0].inputs:
            for data_rank in range(result.shape.data_size):
                given = [result.observations[r].inputs.get(name) for r in result.sharing(data_rank)]
                first = given[0]
                turn = result.expected.turns[data_rank if in_turns else 0].inputs.get(name)
                if first is None or turn is None or (in_turns and first.shape != turn.shape):
                    continue  # the step splits this input itself
                if any(each is None or not torch.equal(each, first) for each in given):
                    apart.setdefault(name, []).append(result.shape)
                elif in_turns and not torch.equal(first, turn):
                    other.setdefault(name, []).append(result.shape)
    found = []
    if apart:
        found.append(
            view.finding(
                "inputs",
                "ranks that share a sample drew different noise (or were given different data) {where}: "
                f"{list_names(list(apart))} differ between them",
                "noise, timestep, caption drop and the sampler of the data must depend on the data rank only: seed "
                "by it (run.data_rank), not by the global rank",
                apart,
            )
        )
    only = {name: shapes for name, shapes in other.items() if name not in apart}
    if only:
        found.append(
            view.finding(
                "inputs",
                f"the ranks were given other data than the single device {{where}}: {list_names(list(only))}",
                "what a sample is must depend on the data rank (run.data_rank of run.data_size) only, not on the "
                "rank, the world size or what was drawn before",
                only,
            )
        )
    return found


def _cause(errors: Mapping[int, str]) -> tuple[int, str]:
    """The rank that failed first, as far as can be told, and why in one line."""
    lines = {rank: _message(text) for rank, text in sorted(errors.items())}
    follows = (*_TIMEOUT_WORDS, *_FOLLOWING_WORDS)
    first = {rank: line for rank, line in lines.items() if not any(word in line for word in follows)}
    for rank, line in first.items():
        if not line.startswith(_MISMATCH):
            return rank, line
    for rank in first:
        place = _user_line(errors[rank])
        return rank, f"{_MISMATCH}, as one of them skips or adds a call{place}"
    return min(lines), _HANGS


def _message(text: str) -> str:
    """The first line of the exception that a traceback ends with."""
    lines = text.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    line = next((line for line in after if line and not line.startswith(" ")), lines[-1])
    return _MISMATCH if any(word in text for word in _MISMATCH_WORDS) else line


def _user_line(text: str) -> str:
    """The innermost line of a traceback that is none of torch's, as words to append."""
    places = re.findall(r'^  File "(.+)", line (\d+)', text, re.M)
    own = [
        (file, line)
        for file, line in places
        if "site-packages" not in file and "opensora_accel/verify" not in file
    ]
    # A process that gloo ended had no time for a traceback.
    return f": noticed at {own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]}" if own else ""
