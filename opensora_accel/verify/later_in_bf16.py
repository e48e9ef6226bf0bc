"""Whether one device's gradients in bf16 are right after the first step too, where weights have moved.

What was cast once and kept is right in step 1, and old from the first step of the optimizer on. No rounding of step 1
says how far off step 2 may be: it has another batch, and weights that bf16 has not. So what rounding explains there is
measured, by a run that is at these weights from the begin and stays there. In it nothing can be old.

    as it is    W₁  step  W₂  step  W₃     in bf16, and in fp64 with the weights that bf16 came to
    kept at W₂  W₂  step  W₂  step  W₂     in bf16 and in fp64: the second gradient is off by 0.4 %, by rounding
                          ↑ as it is, the second one is off by 40 %: it was computed with W₁

A teacher that follows, a queue of old samples or a schedule are another thing in both runs, and the same in bf16 as in
fp64 in each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from opensora_accel.observe import MeshShape
from opensora_accel.verify.causes import Cause, Where
from opensora_accel.verify.fit import NEGLIGIBLE, largest
from opensora_accel.verify.in_bf16 import (
    CHANCE,
    NUM_RUNS,
    TWICE,
    Errors,
    InBf16,
    Runner,
    autocast_wraps,
    ratios,
)
from opensora_accel.verify.iterations import Replay
from opensora_accel.verify.observation import Observation
from opensora_accel.verify.results import Results
from opensora_accel.verify.rounding import Rounding

# As many steps of the optimizer are followed.
MOST_STEPS = 4


@dataclass(frozen=True)
class OldInBf16(Cause):
    kind = "values"
    REMEDY = (
        "something keeps weights in bf16 from before the optimizer stepped: autocast keeps what it has cast until its "
        "outermost region ends, so put it around each forward and leave it before the step (or call "
        "torch.clear_autocast_cache()); a copy in bf16 is to be written after each step"
    )
    step: int = 0
    parameter: str = ""
    error: float = 0.0
    rounding: float = 0.0

    @property
    def what(self) -> str:
        before = "step 1" if self.step == 2 else f"steps 1 to {self.step - 1}"
        return (
            f"in bf16, as it is run, one device's gradients are right in {before} and wrong in step {self.step}, of "
            f"{self.count}: that of {self.parameter} is off by {self.error:.1%} from fp64 at the same weights, where "
            f"rounding explains {self.rounding:.2%}"
        )


def look_in_later_steps(
    found: InBf16, results: Results, runner: Runner, say: Callable[[str], None]
) -> InBf16:
    """`found`, with what later steps of one device have wrong in bf16, or how many of them are right."""
    first = results.expected.first
    num_steps = min(len(first.iterations), MOST_STEPS)
    if num_steps < 2 or results.expected.no_replay or found.causes or found.reason:
        return found
    shape = min((mesh.shape for mesh in results.ran), key=lambda each: each.data_size)
    as_it_is = [Errors() for _ in range(num_steps)]
    by_rounding = [Errors() for _ in range(num_steps)]
    for number in range(NUM_RUNS):
        wide, narrow = (Rounding(number, is_narrow, autocast_wraps(results)) for is_narrow in (False, True))
        say(f"in bf16, {num_steps} steps of one device, {number + 1} of {NUM_RUNS}")
        ran = runner.turns(shape, rounding=narrow, replay=Replay())
        if any(len(turn.iterations) < num_steps for turn in ran):
            return found
        # By turn: the weights after each step.
        weights = [[each.after for each in turn.iterations] for turn in ran]
        exact = runner.turns(shape, rounding=wide, replay=Replay(weights=tuple(map(tuple, weights))))
        for step in range(1, num_steps):
            _add(as_it_is[step], ran, exact, step)
            kept = tuple((turn[step - 1],) for turn in weights)
            there, right = (
                runner.turns(shape, rounding=each, replay=Replay(weights=kept, starts_there=True))
                for each in (narrow, wide)
            )
            _add(by_rounding[step], there, right, step)
    for step in range(1, num_steps):
        cause = _cause(results, shape, step, as_it_is[step], by_rounding[step])
        if cause is not None:
            return replace(found, causes=(cause,))
    return replace(found, num_steps=num_steps)


def _add(errors: Errors, found: Sequence[Observation], right: Sequence[Observation], step: int) -> None:
    for narrow, wide in zip(found, right, strict=True):
        mine, theirs = (each.iterations[step].gradients for each in (narrow, wide))
        floor = NEGLIGIBLE * largest(theirs.values())
        for name, gradient in theirs.items():
            own = mine.get(name)
            if gradient is not None and own is not None and float(gradient.abs().max()) > floor:
                errors.add(("gradient", name), own, gradient)


def _cause(
    results: Results, shape: MeshShape, step: int, as_it_is: Errors, by_rounding: Errors
) -> OldInBf16 | None:
    wrong = {
        name: ratio
        for (_, name), ratio in ratios(as_it_is, by_rounding).items()
        if ratio >= TWICE * (1 + CHANCE / math.sqrt(as_it_is.number(("gradient", name))))
        and math.isfinite(ratio)
    }
    if not wrong:
        return None
    # The one that shows it best.
    worst = max(wrong, key=wrong.__getitem__)
    key = "gradient", worst
    return OldInBf16(
        Where((shape,)),
        tuple(wrong),
        len(results.names),
        over=(),
        step=step + 1,
        parameter=worst,
        error=as_it_is[key],
        rounding=by_rounding[key],
    )
