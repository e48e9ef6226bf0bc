"""All published bugs, what no tool finds yet, and what is found by another name than the one it should have."""

from __future__ import annotations

from tests.published import collectives, draws, kernels, precision, scales, state

BUGS = [*scales.BUGS, *collectives.BUGS, *kernels.BUGS, *precision.BUGS, *draws.BUGS, *state.BUGS]

NOT_FOUND_YET = {
    "diffusers #1868": "one device computes the same",
}
"""By the bug's name, with the reason. A test fails when one of these is found: it then leaves this table."""

NAMED_OTHERWISE = {
    "torchtune #1875": "each call of the model has a factor of its own; factors are looked for by rank",
    "vllm-omni #5716": "wrong on two of three meshes of one axis, which is said of these meshes and not of the axis",
}
"""Found, and not by the kind, axes and factor that it has. A test fails when one of these is named right."""


def _first_of_each_tool() -> list[str]:
    names = {bug.tool: bug.name for bug in reversed(BUGS)}
    return [bug.name for bug in BUGS if bug.name in names.values()]


IN_A_PLAIN_RUN = _first_of_each_tool()
"""One bug for each tool, for `make test`."""
