"""From numbers to words: what is wrong with a step, over which axis, and what is probably missing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import torch

from opensora_accel.verify.findings import (
    Blame,
    Finding,
    blame,
    compose_axes,
    compose_factor,
    count_names,
    join,
    list_names,
)
from opensora_accel.verify.fit import Factor, Remedy, Samples, find_remedy, find_scale, fit_slices
from opensora_accel.verify.results import MeshResult
from opensora_accel.verify.shapes import MeshShape

_OF_KEYS = re.compile(r"(^|_)(k|v|kv|key|value)(_|$|s)")
"""Modules that make keys and values: to_k, k_proj, norm_k, key."""
_ROUNDING = 1e-5
"""Errors below it are what fp32 leaves."""


class Diagnosis:
    """Findings, the root causes first. Meshes are those on which the step ran; others are failures."""

    def __init__(self, results: Sequence[MeshResult]):
        self.results = list(results)
        self.ran = [each for each in results if each.observations]
        self.axes = _used_axes([each.shape for each in results])
        self.data_axes = results[0].shape.data_axes
        self.parameters = [each.parameters() for each in self.ran]
        self.names = list(self.ran[0].expected.gradients) if self.ran else []
        self.unexplained: dict[str, list[Samples]] = {}
        """Wrong parameters that neither a factor nor a sum makes right."""

    def findings(self) -> list[Finding]:
        causes = [*self._weights(), *self._inputs()]
        found = [*self._failures(), *causes]
        wrong = {
            name: samples for name, samples in self._by_name().items() if any(not s.is_right for s in samples)
        }
        if wrong and causes:
            # A different model, or different data: factors would explain nothing.
            return [*found, self._consequence(wrong)]
        found += self._one_sided()
        found += self._wrong_gradients(wrong)
        found += self._wrong_inputs()
        found += self._wrong_scalars()
        return found

    def _by_name(self) -> dict[str, list[Samples]]:
        return {
            name: [samples[name] for samples in self.parameters if name in samples] for name in self.names
        }

    def _blame(self, bad: Sequence[MeshShape], among: Sequence[MeshResult] | None = None) -> Blame:
        shapes = [each.shape for each in (self.ran if among is None else among)]
        found = blame(bad, [s for s in shapes if s not in bad], self.axes)
        composed = compose_axes(found.axes, self.axes)
        if composed != found.axes and found.words.startswith("over "):
            return Blame(composed, f"over {join(composed, 'or')}")
        return Blame(composed, found.words)

    # What makes a comparison of gradients pointless.

    def _failures(self) -> list[Finding]:
        by_cause: dict[str, list[MeshResult]] = {}
        for result in self.results:
            if result.errors:
                # Sizes differ from mesh to mesh.
                by_cause.setdefault(_SIZES.sub(" ", _cause(result.errors)[1]), []).append(result)
        found = []
        for failed in by_cause.values():
            rank, text = _cause(failed[0].errors)
            others = [each for each in self.results if each in failed or not each.errors]
            where = self._blame([each.shape for each in failed], others)
            if text.startswith(_HANGS):
                what = f"the step never ends {where.words}: a rank waits for another that does not answer"
                remedy = (
                    "every rank of a group must make the same calls in the same order: look for a collective that only "
                    "some ranks reach, a send without its receive, or a group of the wrong ranks"
                )
            else:
                what = f"the step fails {where.words}: {text} (rank {rank})"
                remedy = "the whole traceback is in the report's errors"
            found.append(
                Finding("failure", what, remedy, where.axes, meshes=_names(each.shape for each in failed))
            )
        return found

    def _weights(self) -> list[Finding]:
        bad: dict[str, list[MeshShape]] = {}
        repeated: dict[str, list[MeshShape]] = {}
        for result in self.ran:
            first = result.observations[0]
            for name, expected in result.expected.weights.items():
                if all(each.weights.get(name) == expected for each in result.observations):
                    continue
                bad.setdefault(name, []).append(result.shape)
                shards = {each.shards[name] for each in result.observations if name in each.shards}
                if name in first.shards and len(shards) == 1:
                    repeated.setdefault(name, []).append(result.shape)
        found = []
        if repeated:
            where = self._blame(_any(repeated))
            found.append(
                Finding(
                    "weights",
                    f"every rank holds the same shard of {count_names(list(repeated), len(self._weight_names()))}: "
                    "the model starts with one slice of its weights, repeated",
                    "to_empty() and reset_parameters() draw the same numbers on every rank; draw each whole parameter "
                    "from a seed of its own and keep this rank's slice, or load a checkpoint",
                    where.axes,
                    names=tuple(repeated),
                    meshes=_names(_any(repeated)),
                )
            )
        others = [name for name in bad if name not in repeated]
        if others:
            where = self._blame(_any({name: bad[name] for name in others}))
            found.append(
                Finding(
                    "weights",
                    f"the ranks start from other weights than the single device {where.words}: "
                    f"{count_names(others, len(self._weight_names()))}",
                    "initialise by one seed on all ranks, or broadcast from rank 0 (DDP does), before the first step",
                    where.axes,
                    names=tuple(others),
                    meshes=_names(_any({name: bad[name] for name in others})),
                )
            )
        return found

    def _weight_names(self) -> list[str]:
        return list(self.ran[0].expected.weights)

    def _inputs(self) -> list[Finding]:
        apart: dict[str, list[MeshShape]] = {}
        other: dict[str, list[MeshShape]] = {}
        for result in self.ran:
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
            where = self._blame(_any(apart))
            found.append(
                Finding(
                    "inputs",
                    f"ranks that share a sample drew different noise (or were given different data) {where.words}: "
                    f"{list_names(list(apart))} differ between them",
                    "noise, timestep, caption drop and the sampler of the data must depend on the data rank only: seed "
                    "by it (run.data_rank), not by the global rank",
                    where.axes,
                    names=tuple(apart),
                    meshes=_names(_any(apart)),
                )
            )
        only = [name for name in other if name not in apart]
        if only:
            where = self._blame(_any({name: other[name] for name in only}))
            found.append(
                Finding(
                    "inputs",
                    f"the ranks were given other data than the single device {where.words}: {list_names(only)}",
                    "what a sample is must depend on the data rank (run.data_rank of run.data_size) only, not on the "
                    "rank, the world size or what was drawn before",
                    where.axes,
                    names=tuple(only),
                    meshes=_names(_any({name: other[name] for name in only})),
                )
            )
        return found

    # Gradients.

    def _one_sided(self) -> list[Finding]:
        where: dict[str, dict[str, list[MeshShape]]] = {}
        for result in self.ran:
            for name, side in result.one_sided().items():
                where.setdefault(side, {}).setdefault(name, []).append(result.shape)
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
        for side, names in where.items():
            blamed = self._blame(_any(names))
            what, remedy = words[side]
            found.append(
                Finding(
                    "missing gradient",
                    f"{count_names(list(names), len(self.names))} {what} {blamed.words}",
                    remedy,
                    blamed.axes,
                    names=tuple(names),
                    meshes=_names(_any(names)),
                )
            )
        return found

    def _consequence(self, wrong: Mapping[str, Sequence[Samples]]) -> Finding:
        return Finding(
            "values",
            f"the gradients of {count_names(list(wrong), len(self.names))} differ, as they must after the above",
            "mend that first, then verify again",
            names=tuple(wrong),
            meshes=_names(_bad_shapes(wrong)),
        )

    def _wrong_gradients(self, wrong: Mapping[str, Sequence[Samples]]) -> list[Finding]:
        by_remedy: dict[tuple[tuple[str, ...], str, bool], tuple[Remedy, list[str]]] = {}
        for name, samples in wrong.items():
            provable = [each for each in samples if each.is_provable]
            remedy = find_remedy(provable, self.axes) if provable else None
            if remedy is None:
                self.unexplained[name] = list(samples)
            else:
                key = remedy.missing, str(remedy.factor), remedy.is_everywhere
                by_remedy.setdefault(key, (remedy, []))[1].append(name)
        groups = sorted(by_remedy.values(), key=lambda group: -len(group[1]))
        found = [self._explained(remedy, names, wrong) for remedy, names in groups]
        if self.unexplained:
            values = self._slices() or self._values()
            # Where the forward is wrong already, what a factor happens to explain is not the cause.
            found = [values, *found] if self._is_forward_wrong() else [*found, values]
        return found

    def _is_forward_wrong(self) -> bool:
        scalars = [samples for each in self.ran for samples in each.scalars().values()]
        return bool(scalars) and any(
            all(not each.is_right for each in scalars if each.shape == shape)
            for shape in {each.shape for each in scalars}
        )

    def _explained(self, remedy: Remedy, names: list[str], wrong: Mapping[str, Sequence[Samples]]) -> Finding:
        shapes = _bad_shapes({name: wrong[name] for name in names})
        if remedy.missing:
            return self._missing_sum(remedy, names, shapes)
        factor = compose_factor(remedy.factor, self.axes)
        what, axes = f"scale {factor} on {count_names(names, len(self.names))}", factor.axes
        advice = self._scale_advice(remedy.factor)
        if not remedy.is_everywhere:
            where = self._blame(shapes)
            what, axes = f"{what} {where.words}", tuple(dict.fromkeys((*where.axes, *axes)))
            advice = "a number where the number of ranks should stand, or a collective that counts twice"
        if len(names) < len(self.names):
            advice += self._place(names)
        return Finding("scale", what, advice, axes, str(factor), tuple(names), _names(shapes))

    def _missing_sum(self, remedy: Remedy, names: list[str], shapes: Sequence[MeshShape]) -> Finding:
        missing = compose_axes(remedy.missing, self.axes)
        averaged = all(dict(remedy.factor.exponents).get(axis) == 1 for axis in remedy.missing)
        exponents = remedy.factor.exponents
        kept = tuple((a, e) for a, e in exponents if not (averaged and a in remedy.missing))
        rest = replace(remedy.factor, exponents=kept)
        factor = "" if str(rest) == "1" else str(compose_factor(rest, self.axes))
        operation = "average" if averaged else "sum"
        what = f"missing {operation} over {join(missing)} for {count_names(names, len(self.names))}"
        if factor:
            what += f", beside a scale {factor}"
        remedy_text = (
            f"the ranks along {join(missing)} hold parts of one gradient: average gradients over the mixed group "
            "(data × sequence), not over fewer ranks"
            if 2 * len(names) > len(self.names)
            else f"these get parts of one gradient on the ranks along {join(missing)}: all-reduce them there, or let "
            f"what they are applied to enter through copy_forward_reduce_backward{self._place(names)}"
        )
        return Finding("missing sum", what, remedy_text, missing, factor, tuple(names), _names(shapes))

    def _scale_advice(self, factor: Factor) -> str:
        exponents = dict(factor.exponents)
        data = {axis: e for axis, e in exponents.items() if axis in self.data_axes}
        other = {axis: e for axis, e in exponents.items() if axis not in self.data_axes}
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
            return "summed over the data ranks, not averaged: divide by their number (DDP and FSDP2 do by default)"
        return "a divisor or a sum counts other ranks than those that hold parts of this gradient"

    def _place(self, names: Sequence[str]) -> str:
        """Where in the backward the error comes in, as words to append."""
        order = [name for name in self.ran[0].expected.backward_order if name in self.names]
        positions = [order.index(name) for name in names if name in order]
        if not positions:
            return ""
        nearest = order[min(positions)]
        before = order[: min(positions)]
        right = f"; the {len(before)} nearer to it are right" if before else ""
        return f". Nearest to the loss: {nearest}{right}"

    def _values(self) -> Finding:
        names = list(self.unexplained)
        shapes = _bad_shapes(self.unexplained)
        where = self._blame(shapes)
        error = max(each.error() for samples in self.unexplained.values() for each in samples)
        if error < _ROUNDING:
            return Finding(
                "values",
                f"{count_names(names, len(self.names))} are right to fp32 only {where.words}, up to {error:.1e} of the "
                "largest",
                "something computes or adds up in a narrower type than fp64: where that is meant (convert_to_fp32 of "
                "diffusers), turn it off for the proof",
                where.axes,
                names=tuple(names),
                meshes=_names(shapes),
            )
        what = (
            f"wrong values (no factor, no sum explains them) {where.words}: {count_names(names, len(self.names))}, "
            f"up to {error:.1e} of the largest"
        )
        return Finding(
            "values", what, self._origin(names), where.axes, names=tuple(names), meshes=_names(shapes)
        )

    def _origin(self, names: Sequence[str]) -> str:
        """Where wrong values come in, the nearest place to the loss."""
        siblings = self.first_wrong(names)
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
        return advice + self._place(names)

    def first_wrong(self, names: Sequence[str]) -> list[str]:
        """The wrong parameters of the module whose gradient is the first to be wrong."""
        order = [name for name in self.ran[0].expected.backward_order if name in names]
        if not order:
            return []
        module = order[0].rsplit(".", 2)[0]
        return [name for name in order if name.startswith(module + ".")]

    def _slices(self) -> Finding | None:
        """The finding that the tokens of each rank have a factor of their own, as the gradients of inputs show it."""
        for result in sorted(self.ran, key=lambda each: each.shape.world_size):
            num_sharing = result.shape.world_size // result.shape.data_size
            for samples in result.inputs().values() if num_sharing > 1 else ():
                factors = None if samples.is_right else fit_slices(samples, num_sharing)
                if factors is not None and _as_shares(factors) is not None:
                    names = list(self.unexplained)
                    self.unexplained = {}
                    return self.shares(factors, result.shape, names)
        return None

    def by_shares(
        self, factors: Sequence[float], shape: MeshShape, names: Sequence[str], findings: Sequence[Finding]
    ) -> list[Finding]:
        """`findings` with those wrong values that factors of single ranks explain told as such."""
        place = next(i for i, each in enumerate(findings) if set(each.names) == set(self.unexplained))
        self.unexplained = {name: each for name, each in self.unexplained.items() if name not in names}
        rest = [self._values()] if self.unexplained else []
        return [
            *findings[:place],
            self.shares(factors, shape, names),
            *rest,
            *findings[place + 1 :],
        ]

    def shares(self, factors: Sequence[float], shape: MeshShape, names: Sequence[str]) -> Finding:
        """The finding that each rank's contribution is multiplied by a factor of its own."""
        shown = ", ".join(f"{factor:.4g}" for factor in factors)
        axes = compose_axes([axis for axis in self.axes if axis not in self.data_axes], self.axes)
        what = (
            f"each rank's part of the gradient is multiplied by a factor of its own on {shape} ({shown}), in "
            f"{count_names(names, len(self.names))}"
        )
        shares = _as_shares(factors)
        if shares is not None:
            what += f": its share of an uneven split, {shares}"
        return Finding(
            "shares",
            what,
            "an uneven split is scaled by exactly the number of ranks (P up, 1/P down), never by a rank's share",
            axes,
            "" if shares is None else "share",
            tuple(names),
            (str(shape),),
        )

    # What the step returned, and gradients of inputs.

    def _wrong_inputs(self) -> list[Finding]:
        return self._wrong_results(
            [each.inputs() for each in self.ran],
            "the gradients of inputs ({names}) are",
            "what is upstream of them would be trained with it",
        )

    def _wrong_scalars(self) -> list[Finding]:
        return self._wrong_results(
            [each.scalars() for each in self.ran],
            "what the step returns as {names} is",
            "the mean over all ranks should be the single device's",
        )

    def _wrong_results(
        self, results: Sequence[Mapping[str, Samples]], what: str, remedy: str
    ) -> list[Finding]:
        alike: dict[tuple[str, tuple[str, ...], str, tuple[str, ...]], list[str]] = {}
        for name in dict.fromkeys(name for each in results for name in each):
            samples = [each[name] for each in results if name in each]
            bad = [each.shape for each in samples if not each.is_right]
            if not bad:
                continue
            scale, where = find_scale(samples, self.axes), self._blame(bad)
            if scale is None:
                key = f"wrong {where.words}", where.axes, "", _names(bad)
            else:
                composed = compose_factor(scale.factor, self.axes)
                axes, words = composed.axes, f"off by the factor {composed}"
                if not scale.is_everywhere:
                    axes, words = tuple(dict.fromkeys((*where.axes, *axes))), f"{words} {where.words}"
                key = words, axes, str(composed), _names(bad)
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


_HANGS = "hangs"
_SIZES = re.compile(r"[\d, ()\[\]]+")
_TIMEOUT_WORDS = ("hangs", "Timed out", "timed out", "timeout")
_FOLLOWING_WORDS = ("Connection closed by peer", "Connection reset", "Socket closed", "Broken pipe")


def _cause(errors: Mapping[int, str]) -> tuple[int, str]:
    """The rank that failed first, as far as can be told, and why in one line."""
    lines = {rank: _message(text) for rank, text in errors.items()}
    follows = (*_TIMEOUT_WORDS, *_FOLLOWING_WORDS)
    for rank, line in sorted(lines.items()):
        if not any(word in line for word in follows):
            return rank, line
    return min(lines), _HANGS


def _message(text: str) -> str:
    """The first line of the exception that a traceback ends with."""
    lines = text.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in after if line and not line.startswith(" ")), lines[-1])


def _used_axes(shapes: Sequence[MeshShape]) -> tuple[str, ...]:
    names = dict.fromkeys(axis for shape in shapes for axis in shape.axes)
    return tuple(axis for axis in names if any(shape.degree(axis) > 1 for shape in shapes))


def _any(by_name: Mapping[str, Sequence[MeshShape]]) -> list[MeshShape]:
    return list(dict.fromkeys(shape for shapes in by_name.values() for shape in shapes))


def _bad_shapes(wrong: Mapping[str, Sequence[Samples]]) -> list[MeshShape]:
    return list(dict.fromkeys(s.shape for samples in wrong.values() for s in samples if not s.is_right))


def _names(shapes: Iterable[MeshShape]) -> tuple[str, ...]:
    return tuple(str(shape) for shape in shapes)


def _as_shares(factors: Sequence[float]) -> str | None:
    """`4:4:3`, where the factors are shares of a whole (or one over them), times the number of ranks or not."""
    num_ranks = len(factors)
    for candidates in (factors, [1 / factor for factor in factors]):
        for scale in (num_ranks, 1):
            shares = [each / scale for each in candidates]
            if math.isclose(sum(shares), 1, rel_tol=1e-6) and min(shares) > 0:
                parts = [Fraction(share).limit_denominator(4096) for share in shares]
                whole = math.lcm(*(part.denominator for part in parts))
                return ":".join(str(part.numerator * (whole // part.denominator)) for part in parts)
    return None
