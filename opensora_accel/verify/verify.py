"""The step on every mesh, beside the step on one device."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from opensora_accel.plan import MESH_AXES, Plan
from opensora_accel.verify.diagnose import Diagnosis, Shares
from opensora_accel.verify.findings import list_names
from opensora_accel.verify.fit import are_equal, are_factors, fit_ranks
from opensora_accel.verify.gradients import first_wrong
from opensora_accel.verify.observe import Observation, observe
from opensora_accel.verify.pool import RankError, RankPool
from opensora_accel.verify.report import Report
from opensora_accel.verify.results import Expected, MeshResult, Reference
from opensora_accel.verify.run import ModelFn, Run, Step
from opensora_accel.verify.shapes import MeshShape, meshes_of
from opensora_accel.verify.trace import Origin, find_origin

_GRACE_S = 5.0
"""How long the other ranks may take to notice that one of them failed."""

_INSISTS = re.compile(r"cuda|\bgpu\b|float32|fp32|float16|bfloat16|\bhalf\b|\bdtype\b|triton", re.IGNORECASE)
"""What a model speaks of that runs in one type or on one device only."""

Meshes = Plan | Mapping[str, int] | Sequence[Plan | Mapping[str, int]]


def verify(
    step: Step,
    model_fn: ModelFn | None,
    meshes: Meshes,
    *,
    data_axes: Sequence[str] | None = None,
    reference: Reference = "turns",
    seed: int = 0,
    timeout_s: float = 60,
    pool: RankPool | None = None,
    preload: Sequence[str] = (),
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Report:
    """Whether a training step has the gradients of one device on every mesh, and if not, what is wrong.

    The step runs in fp64 on gloo processes of this machine: it and the model should be tiny. Both functions must be
    defined at the top level of a module or script (they go to other processes).

    Args:
        step: `step(model, run)` does what the training loop does up to `backward()`: wraps the model as the loop does
            (not if `run.is_reference`), computes the loss of this data rank's samples, calls `backward()`, and returns
            the loss (or a dict of numbers, or nothing). Gradients are read from `model`'s parameters; where they lie
            elsewhere it returns them whole under "gradients". An optimizer step may follow.
        model_fn: builds the model, the same on every rank. None for a step that builds it itself: `step(run)`, which
            then calls `run.watch(model)` and takes care of fp64.
        meshes: a Plan (tried on small meshes of its axes, see `meshes_of`), or meshes: Plans, or degrees by axis name
            such as {"data": 2, "sequence": 2}, outermost axis first.
        data_axes: axes whose ranks see different samples; by default those called data, dp, dp_replicate, dp_shard.
        reference: what one device does. "turns": every data rank has a batch of its own, and the mean of their
            gradients is right. "whole": one batch is shared out over the data ranks, and its gradient is right.
        timeout_s: past it a mesh counts as hanging.
        pool: processes to run on, where the caller has some.
        preload: modules that the processes import once for all.
        on_progress: called with what runs now, how many parts are done, and how many there are.

    Raises ValueError for meshes that cannot be, functions that cannot be sent, a step that fails on one device.
    """
    shapes = _shapes(meshes, data_axes)
    if reference not in ("turns", "whole"):
        raise ValueError(f'reference must be "turns" or "whole"; got {reference!r}')
    verification = _Verification(step, model_fn, reference, seed, on_progress, len(shapes))
    with _pool(pool, shapes, timeout_s, preload) as ranks:
        return verification.run(ranks, shapes)


def _shapes(meshes: Meshes, data_axes: Sequence[str] | None) -> list[MeshShape]:
    if isinstance(meshes, Plan):
        meshes = meshes_of(meshes)
    elif isinstance(meshes, Mapping):
        meshes = [meshes]
    shapes = [MeshShape.of(mesh, data_axes) for mesh in meshes]
    if not any(shape.world_size > 1 for shape in shapes):
        raise ValueError(
            'there is no mesh of several ranks to verify on; give a Plan, or for example [{"data": 2, "sequence": 2}]'
        )
    axes = {axis for shape in shapes for axis in shape.axes}
    unknown = [axis for axis in data_axes or () if axis not in axes]
    if unknown:
        raise ValueError(
            f"data_axes names {', '.join(unknown)}, but the meshes have {', '.join(sorted(axes))}"
        )
    return shapes


@contextlib.contextmanager
def _pool(
    pool: RankPool | None, shapes: Sequence[MeshShape], timeout_s: float, preload: Sequence[str]
) -> Iterator[RankPool]:
    with contextlib.ExitStack() as stack:
        if pool is None:
            size = max(shape.world_size for shape in shapes)
            pool = stack.enter_context(RankPool(size, preload=preload))
        stack.enter_context(pool.patience(timeout_s, _GRACE_S))
        yield pool


class _Verification:
    def __init__(
        self,
        step: Step,
        model_fn: ModelFn | None,
        reference: Reference,
        seed: int,
        on_progress: Callable[[str, int, int], None] | None,
        num_meshes: int,
    ):
        self.step, self.model_fn, self.reference, self.seed = step, model_fn, reference, seed
        self._on_progress = on_progress
        self._done, self._total = 0, num_meshes
        self._expected: dict[tuple[int, str], Expected] = {}

    def run(self, pool: RankPool, shapes: Sequence[MeshShape]) -> Report:
        started = time.perf_counter()
        # Before anything parallel: what a step patches in its process would reach the single device too.
        references = [self._reference(pool, shape) for shape in shapes]
        results = []
        for shape, expected in zip(shapes, references, strict=True):
            self._say(str(shape))
            results.append(self._mesh(pool, shape, expected))
            self._done += 1
        diagnosis, shares, origin = Diagnosis(results), None, None
        if diagnosis.unexplained:
            self._say("looking for where it comes in")
            origin = self._origin(pool, diagnosis)
            if not diagnosis.causes(origin):
                self._say("looking for factors of single ranks")
                shares = diagnosis.slices() or self._shares(pool, diagnosis)
        findings = diagnosis.findings(shares, origin)
        seeded = () if findings else self._seeded(pool, results)
        self._say("done")
        return Report(results, findings, time.perf_counter() - started, seeded)

    def _say(self, what: str) -> None:
        if self._on_progress is not None:
            self._on_progress(what, self._done, self._total)

    def _mesh(self, pool: RankPool, shape: MeshShape, expected: Expected) -> MeshResult:
        started = time.perf_counter()
        result = MeshResult(shape, expected)
        try:
            result.observations = self._observe(pool, shape)
        except RankError as error:
            result.errors = error.errors
        result.seconds = time.perf_counter() - started
        return result

    def _observe(
        self,
        pool: RankPool,
        shape: MeshShape,
        *,
        weighed: int | None = None,
        traced: bool = False,
        reseeded: bool = False,
    ) -> list[Observation]:
        """Of every rank. What the step left patched in its processes ends with them."""
        arguments = (self.step, self.model_fn, shape, self.reference, self.seed, weighed, traced, reseeded)
        try:
            found: list[Observation] = pool(shape.world_size, _on_rank, *arguments)
        except RankError:
            pool.renew()  # nobody knows what those that did not fail were left with
            raise
        if any(each.leaves_patches for each in found):
            pool.renew()
        return found

    def _reference(self, pool: RankPool, shape: MeshShape) -> Expected:
        key = self._num_turns(shape), "" if shape.plan is None else shape.plan.precision
        if key not in self._expected:
            self._say("one device")
            try:
                turns = self._turns(pool, shape)
            except RankError as error:
                text = error.errors[0].strip()
                raise ValueError(
                    f"the step fails on a single device, before anything is parallel:\n{text}{_advice(text)}"
                ) from error
            self._expected[key] = Expected(tuple(turns))
            _check_reference(self._expected[key])
        return self._expected[key]

    def _num_turns(self, shape: MeshShape) -> int:
        return shape.data_size if self.reference == "turns" else 1

    def _turns(self, pool: RankPool, shape: MeshShape, *, traced: bool = False) -> list[Observation]:
        """Of the single device."""
        turns: list[Observation]
        (turns,) = pool(
            1,
            _on_one,
            self.step,
            self.model_fn,
            _single(shape),
            self._num_turns(shape),
            self.reference,
            self.seed,
            traced,
        )
        if any(each.leaves_patches for each in turns):
            pool.renew()
        return turns

    def _origin(self, pool: RankPool, diagnosis: Diagnosis) -> Origin | None:
        """On the smallest mesh that is wrong: the first module whose forward is."""
        result = diagnosis.smallest_unexplained()
        try:
            turns = self._turns(pool, result.shape, traced=True)
            ranks = self._observe(pool, result.shape, traced=True)
        except RankError:
            return None
        groups = [[ranks[r].calls for r in result.sharing(data)] for data in range(result.shape.data_size)]
        in_turns = len(turns) == len(groups)
        return find_origin(
            [turn.calls for turn in turns], [[group] for group in groups] if in_turns else [groups]
        )

    def _shares(self, pool: RankPool, diagnosis: Diagnosis) -> Shares | None:
        """On the smallest mesh that is wrong: is every rank's contribution multiplied by a factor of its own?"""
        result = diagnosis.smallest_unexplained()
        found = result.parameters()
        wrong = [
            n for n in diagnosis.unexplained if n in found and not found[n].is_right and found[n].is_provable
        ]
        parts = self._contributions(pool, result, wrong)
        if parts is None:
            return None
        expected = {n: gradient for n in wrong if (gradient := result.expected.gradients[n]) is not None}
        for some in filter(None, (wrong, first_wrong(diagnosis.view, wrong))):
            factors = fit_ranks([[part[n] for n in some] for part in parts], [expected[n] for n in some])
            if factors is not None and not are_equal(factors):
                told = [n for n in wrong if are_factors([p[n] for p in parts], factors, expected[n])]
                return Shares(factors, result.shape, told)
        return None

    def _seeded(self, pool: RankPool, results: Sequence[MeshResult]) -> Sequence[str]:
        """Default generators whose seed changes the gradients of ranks that share a sample."""
        shared = [each for each in results if each.shape.world_size > each.shape.data_size]
        drawn = [name for each in shared for seen in each.observations for name in seen.draws]
        if not drawn:
            return ()
        self._say("another seed")
        result = min(shared, key=lambda each: each.shape.world_size)
        try:
            others = self._observe(pool, result.shape, reseeded=True)
        except RankError:
            return tuple(dict.fromkeys(drawn))  # collectives of other sizes, for one
        other = MeshResult(result.shape, result.expected, others)
        is_same = all(each.is_right for each in other.parameters().values()) and not other.one_sided()
        return () if is_same else tuple(dict.fromkeys(drawn))

    def _contributions(
        self, pool: RankPool, result: MeshResult, names: Sequence[str]
    ) -> list[dict[str, Tensor]] | None:
        """What the outputs of each rank alone contribute to the gradients called `names`."""
        parts = []
        for weighed in range(result.shape.world_size):
            try:
                observations = self._observe(pool, result.shape, weighed=weighed)
            except RankError:
                return None
            found = MeshResult(result.shape, result.expected, observations).parameters()
            if any(name not in found for name in names):
                return None
            parts.append({name: found[name].found[0] for name in names})
        return parts


def _advice(text: str) -> str:
    """For a model that insists on a type or a device, as words to append to its traceback."""
    last = "\n".join(text.splitlines()[-6:])
    if not _INSISTS.search(last):
        return ""
    return (
        "\n\nThe step runs in fp64 on a CPU, and this asks for another type or device. In the step file, exchange what "
        "asks (a kernel, a check: `my_model.attention = plain_attention`) for plain torch; the parallelism is what is "
        "proven. Of flash_attn there is a stand-in, where the package is not installed."
    )


def _check_reference(expected: Expected) -> None:
    """ValueError where a single device gives nothing to hold a gradient against."""
    gradients = {name: g for name, g in expected.gradients.items() if g is not None}
    infinite = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
    if infinite:
        raise ValueError(f"on a single device already, gradients are not finite: {list_names(infinite)}")
    if not any(gradient.any() for gradient in gradients.values()):
        raise ValueError(
            "the step leaves no gradient on a single device: does it call backward(), does it clear gradients (other "
            "than after an optimizer's step), is the loss a constant? Gradients that lie elsewhere are returned: "
            '{"loss": loss, "gradients": {name: tensor}}'
        )


def _single(shape: MeshShape) -> MeshShape:
    """The mesh's axes with one rank each, and a Plan that does nothing."""
    plan = None if shape.plan is None else Plan(precision=shape.plan.precision)
    return replace(shape, degrees=tuple((axis, 1) for axis in shape.axes or MESH_AXES), plan=plan)


def _on_one(
    step: Step,
    model_fn: ModelFn | None,
    shape: MeshShape,
    num_turns: int,
    reference: Reference,
    seed: int,
    traced: bool,
) -> list[Observation]:
    runs = [Run(shape, 0, turn, num_turns, is_reference=True) for turn in range(num_turns)]
    found = []
    for run in runs:
        found.append(observe(step, model_fn, run, seed, one_batch=reference == "whole", traced=traced))
        _forget_groups()
    return found


def _on_rank(
    step: Step,
    model_fn: ModelFn | None,
    shape: MeshShape,
    reference: Reference,
    seed: int,
    weighed: int | None,
    traced: bool,
    reseeded: bool,
) -> Observation:
    """`weighed`: the one rank whose outputs' gradient counts; None for all. `reseeded`: by the rank, and anew."""
    rank = torch.distributed.get_rank()
    weight = None if weighed is None else float(rank == weighed)
    run = Run(shape, rank, shape.data_rank(rank), shape.data_size)
    return observe(
        step,
        model_fn,
        run,
        seed,
        one_batch=reference == "whole",
        output_weight=weight,
        traced=traced,
        reseeded=reseeded,
    )


def _forget_groups() -> None:
    """What the step registered, so that the next turn may register it again."""
    from opensora_accel import parallel_states

    parallel_states.reset()
