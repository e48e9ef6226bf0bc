"""All published bugs, what no tool finds yet, and what is found by another name than the one it should have."""

from __future__ import annotations

from tests.published import collectives, draws, kernels, precision, scales, state

BUGS = [*scales.BUGS, *collectives.BUGS, *kernels.BUGS, *precision.BUGS, *draws.BUGS, *state.BUGS]

_FIRST_STEP = "`verify` compares the first step of the optimizer, and this shows in a later one"

NOT_FOUND_YET = {
    "Flow-Factory #186": f"its first step is right, and {_FIRST_STEP}",
    "accelerate #4071": _FIRST_STEP,
    "accelerate #4233": _FIRST_STEP,
    "verl #7401": _FIRST_STEP,
    "KempnerForge #57": _FIRST_STEP,
    "diffusers #1868": f"one device does it too, and {_FIRST_STEP}",
    "DeepSpeed #8601": _FIRST_STEP,
    "Side-Step #38": "what a loop does not save cannot be missed, and the average itself is loaded right",
    "torchtitan #1258": "one device clips and the ranks clip nothing: `verify` compares clips where ranks have some",
}
"""By the bug's name, with the reason. A test fails when one of these is found: it then leaves this table."""

NAMED_OTHERWISE = {
    "torchtune #1875": "each call of the model has a factor of its own; factors are looked for by rank",
    "vllm-omni #5716": "wrong on two of three meshes of one axis, which is said of these meshes and not of the axis",
}
"""Found, and not by the kind, axes and factor that it has. A test fails when one of these is named right."""


def _first_of_each_kind() -> list[str]:
    names = {(bug.tool, bug.kind): bug.name for bug in reversed(BUGS)}
    return [bug.name for bug in BUGS if bug.name in names.values()]


IN_A_PLAIN_RUN = _first_of_each_kind()
"""One bug of each kind, for `make test`."""
