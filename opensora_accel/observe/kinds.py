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
# What operators are for, by parts of their names, and what those that only bring bytes to their place begin with.
_CLASSES = (
    ("attention", ("attention", "scaled_dot_product")),
    ("norms", ("norm",)),
    ("matrix products", ("mm", "linear", "convolution", "einsum", "matmul")),
    ("copies", ("copy",)),
)
_COPIES = ("cat", "clone", "fill", "zero", "empty", "new_")


def class_of(operator: str) -> str:
    """What an operator is for: "addmm" is a matrix product, "native_layer_norm" a norm, "mul" elementwise."""
    name = operator.strip("_")
    if name.startswith(_COPIES):
        return "copies"
    return next((found for found, parts in _CLASSES if any(part in name for part in parts)), "elementwise")
