"""One step in the processes of a pool: on one device, on every rank of a mesh, and changed in one way or another."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from opensora_accel import parallel_states
from opensora_accel.observe import MeshShape, ModelFn, Run, Step
from opensora_accel.verify.causes import Cause, Origin, Where, list_names
from opensora_accel.verify.derivatives import PATCHED, Derivatives, OtherThanPlain, check_derivatives
from opensora_accel.verify.draws import find_draws
from opensora_accel.verify.iterations import MeanGradients, Replay
from opensora_accel.verify.observation import Observation, Probe
from opensora_accel.verify.pool import RankError, RankPool
from opensora_accel.verify.results import Expected, MeshResult, Reference, find_origin
from opensora_accel.verify.run_step import observe
from opensora_accel.verify.variations import AtSizes, Sizes, sizes_of

# What a model's error speaks of that runs in one type or on one device only.
_INSISTS = re.compile(r"cuda|\bgpu\b|float32|fp32|float16|bfloat16|\bhalf\b|\bdtype\b|triton", re.IGNORECASE)
_ADVICE = (
    "\n\nThe step runs in fp64 on a CPU, and this asks for another type or device. In the step file, exchange what "
    "asks (a kernel, a check: `my_model.attention = plain_attention`) for plain torch; the parallelism is what is "
    "proven. flash_attn has a stand-in, where the package is not installed."
)


class Runner:
    """Runs the step in the pool's processes. What the step left patched in a process ends with it."""

    def __init__(
        self,
        pool: RankPool,
        step: Step,
        model_fn: ModelFn | None,
        reference: Reference,
        seed: int,
        plain_model_fn: ModelFn | None = None,
        keeps_dropout: bool = False,
    ):
        self._pool, self._step, self._model_fn = pool, step, model_fn
        self._plain_model_fn = plain_model_fn
        self._reference, self._seed = reference, seed
        self._keeps_dropout = keeps_dropout
        self._expected: dict[tuple[int, str], Expected] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """Those that the step and its model are given by default."""
        return sizes_of(self._model_fn, self._step)

    def at(self, sizes: Sizes) -> Runner:
        """Of the same step at other sizes."""
        model_fn = None if self._model_fn is None else AtSizes(self._model_fn, sizes)
        return Runner(self._pool, AtSizes(self._step, sizes), model_fn, self._reference, self._seed)

    def with_dropout(self) -> Runner:
        """Of the same step, whose dropouts stay on."""
        return Runner(self._pool, self._step, self._model_fn, self._reference, self._seed, keeps_dropout=True)

    def on_one_device(self, shape: MeshShape) -> Expected:
        """What is right on a mesh; one run serves all meshes with as many data ranks.

        Raises:
            ValueError: the step fails, or leaves no gradient.
        """
        # What one device does depends on the mesh by nothing else.
        key = self.num_turns(shape), "" if shape.plan is None else shape.plan.precision
        if key in self._expected:
            return self._expected[key]
        try:
            expected = Expected(tuple(self.turns(shape, replay=Replay())))
        except RankError as error:
            text = error.errors[0].strip()
            # What asks for a type or a device says so at the end of its traceback.
            advice = _ADVICE if _INSISTS.search("\n".join(text.splitlines()[-6:])) else ""
            raise ValueError(
                f"the step fails on a single device, before anything is parallel:\n{text}{advice}"
            ) from error
        gradients = {name: g for name, g in expected.gradients.items() if g is not None}
        # NaN on one device says nothing of any mesh.
        infinite = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
        if infinite:
            raise ValueError(f"on a single device already, gradients are not finite: {list_names(infinite)}")
        if not any(gradient.any() for gradient in gradients.values()):
            raise ValueError(
                "the step leaves no gradient on a single device: does it call backward(), does it clear gradients "
                "(other than after an optimizer's step), is the loss a constant? Gradients that lie elsewhere are "
                'returned: {"loss": loss, "gradients": {name: tensor}}'
            )
        self._expected[key] = self._replayed(shape, expected)
        return self._expected[key]

    def _replayed(self, shape: MeshShape, expected: Expected) -> Expected:
        """With all optimizer steps, as data ranks take them that average their gradients (`iterations`)."""
        turns, first = expected.turns, expected.first
        if not first.num_steps:
            return expected
        reason = next((turn.no_replay for turn in turns if turn.no_replay), "")
        if any(turn.num_steps != first.num_steps for turn in turns):
            reason = "data ranks have unlike numbers of optimizer steps"
        if reason:  # one turn is right as it is
            return replace(expected, replayed=turns if len(turns) == 1 else (), no_replay=reason)
        means: tuple[MeanGradients, ...] = ()
        try:
            while len(means) < len(first.iterations):
                seen = [turn.iterations[len(means)].backwards for turn in turns]
                means = *means, MeanGradients.of(seen)
                turns = tuple(self.turns(shape, replay=Replay(means=means))) if len(turns) > 1 else turns
            moved = tuple(self.turns(shape, replay=Replay(means=means, is_noisy=True)))
        except RankError as error:
            last = error.errors[0].strip().splitlines()[-1]
            return replace(expected, no_replay=f"the step does not run as often as that: {last}")
        return replace(expected, replayed=turns, moved=moved)

    def derivatives(self, shape: MeshShape) -> Derivatives:
        """Whether the single device's backward is the derivative of its forward."""
        options = {"one_batch": self._reference == "whole"}
        arguments = self._step, self._model_fn, shape.alone, self.num_turns(shape), self._seed, options
        found: Derivatives
        try:
            (found,) = self._pool(1, _derive, *arguments)
        except RankError as error:
            self._pool.renew()
            last = error.errors[0].strip().splitlines()[-1]
            return Derivatives(reason=f"the step does not run as often as that: {last}")
        if found.reason == PATCHED:
            self._pool.renew()
        return found

    def beside_plain(self, shape: MeshShape) -> OtherThanPlain | None:
        """What the model does on one device that its plain version does not.

        Raises:
            ValueError: the two have other parameters, or start from other weights.
        """
        if self._plain_model_fn is None:
            return None
        found, plain = (
            self._run(1, shape.alone, self.num_turns(shape), {"is_traced": True}, model_fn)[0][0]
            for model_fn in (self._model_fn, self._plain_model_fn)
        )
        unlike = [
            n for n in {**found.weights, **plain.weights} if found.weights.get(n) != plain.weights.get(n)
        ]
        if unlike:
            raise ValueError(
                f"plain_model_fn() has other parameters or weights than model_fn(): {list_names(sorted(unlike))}; "
                "build the same model, and exchange its operators after that"
            )
        mesh = MeshResult(shape.alone, Expected((plain,)), (found,))
        wrong = {name: each for name, each in mesh.parameters().items() if not each.is_right}
        if not wrong:
            return None
        return OtherThanPlain(
            Where(),
            tuple(wrong),
            len(plain.gradients),
            over=(),
            error=max(each.error() for each in wrong.values()),
            origin=find_origin(shape.alone, [plain], [found]),
        )

    def on_mesh(self, shape: MeshShape, expected: Expected, **options: Any) -> MeshResult:
        """Every rank's observation, or the errors of those that failed; for `options` see `_observe`."""
        started = time.perf_counter()
        observations: Sequence[Observation] = ()
        errors: Mapping[int, str] = {}
        try:
            observations = self.ranks(shape, **options)
        except RankError as error:
            errors = error.errors
        return MeshResult(shape, expected, observations, errors, time.perf_counter() - started)

    def trace(self, shape: MeshShape, where: Where) -> tuple[Origin | None, list[Cause]]:
        """The first module whose forward is wrong on the mesh, and what ranks draw otherwise within the model.

        Nothing where the step does not run again. `where`: all meshes that are wrong.
        """
        try:
            turns, ranks = self.turns(shape, is_traced=True), self.ranks(shape, is_traced=True)
        except RankError:
            return None, []
        return find_origin(shape, turns, ranks), find_draws(shape, turns, ranks, where)

    def num_turns(self, shape: MeshShape) -> int:
        """How many batches the single device has, one after another."""
        return shape.data_size if self._reference == "turns" else 1

    @property
    def builds_its_model(self) -> bool:
        """Whether the step does so itself."""
        return self._model_fn is None

    def turns(self, shape: MeshShape, **options: Any) -> list[Observation]:
        """The single device, every data rank's turn; for `options` see `_observe`."""
        (turns,) = self._run(1, shape.alone, self.num_turns(shape), options)
        return turns

    def ranks(self, shape: MeshShape, **options: Any) -> list[Observation]:
        """Every rank of the mesh."""
        return [observation for (observation,) in self._run(shape.world_size, shape, None, options)]

    def _run(
        self,
        num_ranks: int,
        shape: MeshShape,
        num_turns: int | None,
        options: dict[str, Any],
        model_fn: ModelFn | None = None,
    ) -> list[list[Observation]]:
        options = {
            "one_batch": self._reference == "whole",
            "keeps_dropout": self._keeps_dropout,
            **options,
        }
        arguments = self._step, model_fn or self._model_fn, shape, num_turns, self._seed, options
        try:
            observations: list[list[Observation]] = self._pool(num_ranks, _observe, *arguments)
        except RankError:
            self._pool.renew(num_ranks)  # nobody knows what those that did not fail were left with
            raise
        # A class that the step patches would be patched once more on the next mesh.
        if any(each.leaves_patches for rank in observations for each in rank):
            self._pool.renew()
        return observations


def _derive(
    step: Step,
    model_fn: ModelFn | None,
    shape: MeshShape,
    num_turns: int,
    seed: int,
    options: dict[str, Any],
) -> Derivatives:
    """In a process of the pool: of the first turn, with its dropouts, which no mesh could draw alike."""
    run = Run(shape, 0, 0, num_turns, is_reference=True)

    def observe_turn(*probes: Probe) -> Observation:
        try:
            return observe(step, model_fn, run, seed, keeps_dropout=True, probes=probes, **options)
        finally:
            parallel_states.reset()

    return check_derivatives(observe_turn)


def _observe(
    step: Step,
    model_fn: ModelFn | None,
    shape: MeshShape,
    num_turns: int | None,
    seed: int,
    options: dict[str, Any],
) -> list[Observation]:
    """In a process of the pool: all turns of the single device, or (without `num_turns`) this rank of the mesh.

    `options` are those of `observe`, and `only_rank`: the only one whose outputs count.
    """
    rank = torch.distributed.get_rank()
    only_rank = options.pop("only_rank", None)
    if only_rank is not None:
        options["output_weight"] = float(rank == only_rank)
    if num_turns is None:
        run = Run(shape, rank, shape.data_rank(rank), shape.data_size)
        return [observe(step, model_fn, run, seed, **options)]
    observations = []
    for turn in range(num_turns):
        run = Run(shape, 0, turn, num_turns, is_reference=True)
        observations.append(observe(step, model_fn, run, seed, **options))
        parallel_states.reset()  # what the step registered, so that the next turn may register it again
    return observations
