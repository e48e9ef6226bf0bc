"""What makes a comparison of gradients pointless: a step that fails, other weights, other data."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from opensora_accel.verify.causes import (
    Cause,
    DifferentDraws,
    Hang,
    RepeatedShard,
    SameSamples,
    StepFails,
    UnlikeCollectives,
    WrongInput,
    WrongWeights,
)
from opensora_accel.verify.meshes import MeshShape
from opensora_accel.verify.results import MeshResult, Results

_HANGS, _UNLIKE = "hangs", "unlike collectives"
"""In place of a message."""
_SIZES = re.compile(r"[\d, ()\[\]]+")
_UNLIKE_WORDS = ("op.preamble", "EnforceNotMet")
"""In which gloo says that one rank sends another number of bytes than the other expects."""
_FOLLOWING_WORDS = (
    *("hangs", "Timed out", "timed out", "timeout"),
    *("Connection closed by peer", "Connection reset", "Socket closed", "Broken pipe"),
)
"""In the errors of ranks that fail because another one has failed."""


def failures(results: Results) -> tuple[list[Cause], list[Cause]]:
    """Steps that raise or never end, by their cause; and those that every rank refuses in the same words.

    A mesh that is refused (heads that do not divide) says nothing of what is wrong on others.
    """
    by_message: dict[str, list[MeshResult]] = {}
    for mesh in results.meshes:
        if mesh.errors:
            # Sizes differ from mesh to mesh.
            message = _SIZES.sub(" ", _first_failure(mesh.errors)[1])
            by_message.setdefault(message, []).append(mesh)
    failed: list[Cause] = []
    refused: list[Cause] = []
    for meshes in by_message.values():
        rank, message = _first_failure(meshes[0].errors)
        others = [each for each in results.meshes if each in meshes or not each.errors]
        where = results.where([each.shape for each in meshes], others)
        if message == _HANGS:
            failed.append(Hang(where))
        elif message == _UNLIKE:
            failed.append(UnlikeCollectives(where, line=_line_of_user(meshes[0].errors[rank]), rank=rank))
        else:
            cause = StepFails(where, message=message, rank=rank)
            (refused if all(map(_is_refused, meshes)) else failed).append(cause)
    return failed, refused


def _first_failure(errors: Mapping[int, str]) -> tuple[int, str]:
    """The rank that failed first, as far as can be told, and why in one line."""
    lines = {rank: _message(text) for rank, text in sorted(errors.items())}
    # A rank whose peer has gone says so; the one that went has a reason of its own.
    first = {rank: line for rank, line in lines.items() if not any(word in line for word in _FOLLOWING_WORDS)}
    for rank, line in first.items():
        if line != _UNLIKE:
            return rank, line
    return next(iter(first.items()), (min(lines), _HANGS))


def _message(text: str) -> str:
    """The first line of the exception that a traceback ends with."""
    if any(word in text for word in _UNLIKE_WORDS):
        return _UNLIKE
    lines = text.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in after if line and not line.startswith(" ")), lines[-1])


def _is_refused(mesh: MeshResult) -> bool:
    messages = {_SIZES.sub(" ", _message(text)) for text in mesh.errors.values()}
    return len(mesh.errors) == mesh.shape.world_size and len(messages) == 1 and _UNLIKE not in messages


def _line_of_user(text: str) -> str:
    """`file.py:12`, the innermost line of a traceback that is none of torch's; empty where gloo left no traceback."""
    places = re.findall(r'^  File "(.+)", line (\d+)', text, re.M)
    own = [
        place
        for place in places
        if "site-packages" not in place[0] and "opensora_accel/verify" not in place[0]
    ]
    return f"{own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]}" if own else ""


def wrong_weights(results: Results) -> list[Cause]:
    """Ranks that start from other weights than the single device."""
    wrong: dict[str, list[MeshShape]] = {}
    repeated: dict[str, list[MeshShape]] = {}
    for mesh in results.ran:
        for name, expected in mesh.expected.first.weights.items():
            if all(_is_same(each.weights.get(name), expected) for each in mesh.observations):
                continue
            shards = {each.shards[name] for each in mesh.observations if name in each.shards}
            is_repeated = name in mesh.observations[0].shards and len(shards) == 1
            (repeated if is_repeated else wrong).setdefault(name, []).append(mesh.shape)
    wrong = {name: shapes for name, shapes in wrong.items() if name not in repeated}
    kinds: tuple[tuple[type[Cause], dict[str, list[MeshShape]]], ...] = (
        (RepeatedShard, repeated),
        (WrongWeights, wrong),
    )
    return [
        kind(results.where_of(by_name), tuple(by_name), len(results.weight_names))
        for kind, by_name in kinds
        if by_name
    ]


def _is_same(digest: str | None, expected: str) -> bool:
    """A parameter of another shape is this rank's part of it: a step with parts hands gradients over whole."""
    return digest is None or digest == expected or digest.split("]")[0] != expected.split("]")[0]


def wrong_inputs(results: Results) -> list[Cause]:
    """Ranks whose model is given other tensors than the single device's, or than its peers'."""
    apart: dict[str, list[MeshShape]] = {}
    other: dict[str, list[MeshShape]] = {}
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
                    apart.setdefault(name, []).append(mesh.shape)
                elif in_turns and not torch.equal(first, expected):
                    other.setdefault(name, []).append(mesh.shape)
    other = {name: shapes for name, shapes in other.items() if name not in apart}
    found: list[Cause] = []
    if apart:
        found.append(DifferentDraws(results.where_of(apart), tuple(apart)))
    if other:
        found.append(WrongInput(results.where_of(other), tuple(other)))
    return found


def same_samples(results: Results) -> list[Cause]:
    """Data ranks with one and the same gradient on the single device."""
    shapes = []
    for mesh in results.ran:
        # Equal to the last bit: other samples cannot give that.
        first, *others = (turn.gradients for turn in mesh.expected.turns)
        if others and all(_are_equal(first, other) for other in others):
            shapes.append(mesh.shape)
    return [SameSamples(results.where(shapes))] if shapes else []


def _are_equal(first: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]) -> bool:
    pairs = [(gradient, other.get(name)) for name, gradient in first.items()]
    return all(one is None or (two is not None and torch.equal(one, two)) for one, two in pairs)
