"""Names that what is recorded and what is shown of it have in common. Imports no torch: pages are made without it."""

from __future__ import annotations

# Phases. Recompute: within backward, a forward that runs again. After: when a backward has run; gradients that are
# averaged by hand stand there, and the forward of a second microbatch. Elsewhere the phase is "".
FORWARD, RECOMPUTE, BACKWARD, AFTER = "forward", "recompute", "backward", "after backward"
# Kinds of memory, in the order in which they are stacked.
KINDS = (
    "parameters",
    "gradients",
    "optimizer state",
    "block inputs",
    "block inputs on the host",
    "recomputation",
    "communication",
    "other",
)
