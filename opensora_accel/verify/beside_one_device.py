"""The step on every mesh, beside the step on one device.

A parallel step is right where its gradients are those of one device, whatever it does to get them. So the verifier
asks the step itself: it runs on small meshes of gloo processes and on one process, in fp64, where right and wrong are
1e-13 and 1e-8 apart, with the same weights and samples. Everything else is to name what is wrong:

    1. one device      every data rank's batch in turn; their mean gradient is what is right, if backward is the
                       derivative of its own forward (`derivatives`)
    2. every mesh      what each rank found: gradients, weights, inputs, what it returned
    3. diagnose        a factor or a sum that makes all meshes right?
    4. look closer     only at what that leaves unexplained, on the smallest wrong mesh: which module's forward is
                       wrong first, and by which factor each rank's contribution alone is off
    5. another seed    only where all is right: would it still be, had the loop seeded otherwise?
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from opensora_accel.observe import MeshShape, ModelFn, Step, meshes_of
from opensora_accel.plan import Plan
from opensora_accel.verify.causes import Cause, Origin, ScaledByShares, StepFails, Where
from opensora_accel.verify.derivatives import causes_on_one_device
from opensora_accel.verify.diagnose import (
    GradientFits,
    diagnose,
    find_slices,
    find_unlike_starts,
    fit_gradients,
    fit_shares,
)
from opensora_accel.verify.in_bf16 import FailsInBf16, InBf16, look_in_bf16
from opensora_accel.verify.iterations import Replay
from opensora_accel.verify.later_in_bf16 import look_in_later_steps
from opensora_accel.verify.later_steps import Followed, follow
from opensora_accel.verify.loads import check_loads
from opensora_accel.verify.pool import RankError, RankPool
from opensora_accel.verify.report import Report
from opensora_accel.verify.results import MeshResult, Reference, Results, wrong_shapes
from opensora_accel.verify.runner import Runner
from opensora_accel.verify.variations import Outcome, Trial, try_variations

# How long the other ranks may take to notice that one of them failed.
_GRACE_S = 5.0
# torch imports these when a model is wrapped or checkpointed: once for all ranks, not once in each.
_EVERY_STEP_LOADS = (__name__, "torch._dynamo", "torch.onnx", "numpy.random")

Dtype = Literal["fp64", "bf16"]
Say = Callable[[str, int, int], None]
Meshes = Plan | Mapping[str, int] | Sequence[Plan | Mapping[str, int]]


def verify(
    step: Step,
    model_fn: ModelFn | None,
    meshes: Meshes,
    *,
    data_axes: Sequence[str] | None = None,
    reference: Reference = "turns",
    dtype: Dtype = "fp64",
    plain_model_fn: ModelFn | None = None,
    seed: int = 0,
    timeout_s: float = 60,
    pool: RankPool | None = None,
    preload: Sequence[str] = (),
    on_progress: Say | None = None,
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
        dtype: "bf16" runs the step in bf16 as well, under autocast where it has none of its own and no casts, and says
            whether ranks round more than one device.
        plain_model_fn: builds the same model with plain operators in the place of fused ones and kernels; on one device
            both must give the same.
        timeout_s: past it a mesh counts as hanging.
        pool: processes to run on, where the caller has some.
        preload: modules that the processes import once for all.
        on_progress: called with what runs now, how many parts are done, and how many there are.

    Raises:
        ValueError: meshes that cannot be, functions that cannot be sent, a step that fails on one device.
    """
    shapes = _shapes(meshes, data_axes)
    if reference not in ("turns", "whole"):
        raise ValueError(f'reference must be "turns" or "whole"; got {reference!r}')
    if dtype not in ("fp64", "bf16"):
        raise ValueError(f'dtype must be "fp64" or "bf16"; got {dtype!r}')
    with contextlib.ExitStack() as stack:
        # Processes are started for the largest mesh; smaller ones use some of them.
        if pool is None:
            size = max(shape.world_size for shape in shapes)
            pool = stack.enter_context(RankPool(size, preload=(*_EVERY_STEP_LOADS, *preload)))
        stack.enter_context(pool.patience(timeout_s, _GRACE_S))
        runner = Runner(pool, step, model_fn, reference, seed, plain_model_fn)
        say = on_progress or (lambda *_: None)
        report = _varied(_prove(runner, shapes, say), runner, shapes, say)
        return report if dtype == "fp64" else _in_bf16(report, runner, say)


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
    # A misspelt data axis would make all its ranks share one sample.
    axes = {axis for shape in shapes for axis in shape.axes}
    unknown = [axis for axis in data_axes or () if axis not in axes]
    if unknown:
        raise ValueError(
            f"data_axes names {', '.join(unknown)}, but the meshes have {', '.join(sorted(axes))}"
        )
    return shapes


def _prove(
    runner: Runner,
    shapes: Sequence[MeshShape],
    say: Say,
    *,
    is_varied: bool = False,
    looks_closer: bool = True,
) -> Report:
    """`is_varied`: what is asked of the step as given alone is known. `looks_closer`: at what is wrong."""
    started, total = time.perf_counter(), len(shapes)
    say("one device", 0, total)
    # Before anything parallel: what a step patches in its process would reach the single device too.
    expected = [runner.on_one_device(shape) for shape in shapes]
    derivatives = runner.derivatives(shapes[0])
    unlike_plain = None if is_varied else runner.beside_plain(shapes[0])
    meshes: list[MeshResult] = []
    for shape, right in zip(shapes, expected, strict=True):
        say(str(shape), len(meshes), total)
        # Of what one device was followed through; one more shows whether ranks step on.
        replay = Replay(most=right.num_followed) if right.replayed else None
        meshes.append(runner.on_mesh(shape, right, replay=replay))
    # From here on everything is arithmetic on what was observed.
    results = Results(meshes)
    fits = fit_gradients(results)
    # Runs that can only show more of what is wrong already.
    closer = _look_closer(runner, results, fits, say) if looks_closer and fits.unexplained else Closer()
    causes = [
        *([] if unlike_plain is None else [replace(unlike_plain, where=Where(tuple(shapes), "everywhere"))]),
        *causes_on_one_device(derivatives, results),
        *diagnose(results, fits, origin=closer.origin, shares=closer.shares, drawn=closer.draws),
    ]
    # What a later step does wrong is told before what it returns.
    followed = follow(results) if all(cause.kind == "result" for cause in causes) else Followed()
    causes = [*check_loads(results), *followed.causes, *causes]
    # A right step may be right only because it was seeded here as it should be: does another seed change the gradients
    # of ranks that share a sample?
    shared = [mesh for mesh in meshes if mesh.shape.world_size > mesh.shape.data_size]
    drawn = dict.fromkeys(n for mesh in shared for seen in mesh.observations for n in seen.drawn_from)
    if drawn and not causes and not is_varied:
        say("another seed", total, total)
        smallest = min(shared, key=lambda mesh: mesh.shape.world_size)
        other = runner.on_mesh(smallest.shape, smallest.expected, is_reseeded=True)
        # Other sizes make collectives fail, for one.
        is_same = not other.errors and not other.one_sided()
        if is_same and all(each.is_right for each in other.parameters().values()):
            drawn = {}
    say("done", total, total)
    return Report(
        results,
        causes,
        time.perf_counter() - started,
        derivatives,
        followed=followed,
        unproven_seeds=() if causes else tuple(drawn),
    )


@dataclass(frozen=True)
class Closer:
    """What more runs show of gradients that nothing explains."""

    origin: Origin | None = None
    shares: ScaledByShares | None = None
    draws: Sequence[Cause] = ()


def _look_closer(runner: Runner, results: Results, fits: GradientFits, say: Say) -> Closer:
    """Two more runs, and one for each rank where they can show something that the meshes cannot."""
    # The fewest ranks say it as well, and sooner.
    bad = {shape for shapes in wrong_shapes(fits.unexplained).values() for shape in shapes}
    smallest = min((m for m in results.ran if m.shape in bad), key=lambda mesh: mesh.shape.world_size)
    total = len(results.meshes)
    say("looking for where it comes in", total, total)
    origin, draws = runner.trace(smallest.shape, results.where(bad))
    if draws or find_unlike_starts(results, fits, origin):
        return Closer(origin, None, draws)
    say("looking for factors of single ranks", total, total)
    shares = find_slices(results, fits)
    if shares is None:
        # The outputs of all other ranks get a gradient of 0.
        right, ranks = smallest.expected, range(smallest.shape.world_size)
        alone = [runner.on_mesh(smallest.shape, right, only_rank=rank) for rank in ranks]
        shares = fit_shares(results, fits, smallest, alone)
    return Closer(origin, shares, draws)


def _varied(report: Report, runner: Runner, shapes: Sequence[MeshShape], say: Say) -> Report:
    """The report, with what is said of the step at other sizes and with dropout."""
    if not report.ok or (runner.builds_its_model and not runner.sizes):
        return report
    started = time.perf_counter()

    # A whole sequence draws the masks of one device, a split one cannot, nor a part of one device's batch.
    whole = [shape for shape in shapes if shape.world_size == runner.num_turns(shape) > 1]

    def prove(trial: Trial, looks_closer: bool) -> Outcome:
        varied = runner.with_dropout() if trial.has_dropout else runner.at(trial.sizes)
        on = whole if trial.has_dropout else shapes
        try:
            found = _prove(varied, on, lambda *_: None, is_varied=True, looks_closer=looks_closer)
        except ValueError:
            return Outcome(does_run=False)
        refusals = [cause for cause in found.causes if isinstance(cause, StepFails)]
        causes = [cause for cause in found.causes if cause not in refusals]
        refused = refusals and not causes
        return Outcome(causes, refusal=f"{refusals[0].where}: {refusals[0].message}" if refused else "")

    found = try_variations(
        runner.sizes,
        prove,
        say,
        degree=max(degree for shape in shapes for _, degree in shape.degrees),
        with_dropout=bool(whole) and report.all_results.expected.first.has_dropout,
    )
    seconds = report.seconds + time.perf_counter() - started
    return replace(report, causes=found.causes, seconds=seconds, variations=found)


def _in_bf16(report: Report, runner: Runner, say: Say) -> Report:
    """The report, with what is said of bf16."""
    started, total = time.perf_counter(), len(report.results)
    if not report.ok:
        found = InBf16(reason="not looked at, as the gradients in fp64 are not right")
    elif runner.builds_its_model:
        found = InBf16(reason="not looked at, as the step builds its model itself; give a model_fn")
    else:
        try:
            asked = report.all_results, runner, lambda what: say(what, total, total)
            found = look_in_later_steps(look_in_bf16(*asked), *asked)
        except RankError as error:
            last = error.errors[min(error.errors)].strip().splitlines()[-1]
            found = InBf16(causes=(FailsInBf16(Where(), message=last),))
    seconds = report.seconds + time.perf_counter() - started
    return replace(report, causes=[*report.causes, *found.causes], seconds=seconds, in_bf16=found)
