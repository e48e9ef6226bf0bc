"""What one call of the step did on one rank, and what else may look at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensora_accel.verify.iterations import Gradients, Held
from opensora_accel.verify.side_effects import Clip

if TYPE_CHECKING:
    from opensora_accel.verify.loads import Pass


@dataclass(frozen=True)
class Draw:
    """Random numbers that an operator has drawn."""

    line: str
    operator: str
    digest: str

    @property
    def shape(self) -> str:
        return self.digest.split("]")[0]


@dataclass
class Observation:
    """What one call of the step did on one rank. Tensors are whole, also where parameters are sharded.

    It is of the first iteration, which ends with an optimizer's step; each of the `later` ones has its own.
    """

    # What the step returned: its loss, or all that it reports.
    scalars: dict[str, float] = field(default_factory=dict)
    # Gradients as they are before anything clips them, and after that; every clip.
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    clipped: dict[str, Tensor] = field(default_factory=dict)
    clips: list[Clip] = field(default_factory=list)
    # Axes over which FSDP2 is configured not to add a gradient up.
    held_back: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # Digests of the parameters, and of this rank's shards of those that are sharded.
    weights: dict[str, str] = field(default_factory=dict)
    shards: dict[str, str] = field(default_factory=dict)
    # What was backwarded, up to the first optimizer step, on the single device; None where nothing was.
    loss: float | None = None
    # Parameters themselves: on the single device all, on a rank those of which it has made itself a slice.
    values: dict[str, Tensor] = field(default_factory=dict)
    # Tensors that the model's forward was given, every call's up to the first optimizer step, and their gradients.
    inputs: dict[str, Tensor] = field(default_factory=dict)
    input_gradients: dict[str, Tensor] = field(default_factory=dict)
    # On the single device only: parameters as their gradients became ready, the nearest to the loss first, and shapes
    # of parameters that the loss reaches and the model does not have.
    backward_order: dict[str, None] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)
    # Further names of parameters that have several, with their first ones; on ranks the lines at which they came apart.
    tied: dict[str, str] = field(default_factory=dict)
    untied_at: dict[str, str] = field(default_factory=dict)
    # Parameters that an optimizer steps and the model no longer has.
    stale: list[str] = field(default_factory=list)
    # Default generators that the step drew from and did not seed itself.
    drawn_from: list[str] = field(default_factory=list)
    # Where modules were traced: inputs and outputs of every call, by the module's name and how often it was called
    # before.
    calls: dict[tuple[str, int], tuple[tuple[Tensor, ...], ...]] = field(default_factory=dict)
    draws: list[Draw] = field(default_factory=list)  # within the model, in order
    # Where iterations are followed: parameters when the next one steps or the call ends, what optimizers held, which
    # parameters take gradients, and on the single device gradients after each backward, as they are.
    after: dict[str, Tensor] = field(default_factory=dict)
    held: Held = field(default_factory=Held)
    trained: dict[str, bool] = field(default_factory=dict)
    backwards: list[Gradients] = field(default_factory=list)
    later: list[Observation] = field(default_factory=list)
    num_steps: int = 0  # iterations in which an optimizer stepped, also of those that are not followed
    goes_on: bool = False  # the model ran again after the first of them
    no_replay: str = ""  # why turns cannot be replayed
    # What loaders asked their datasets for.
    loads: list[Pass] = field(default_factory=list)
    # Whether the process is no longer as it was before the step.
    leaves_patches: bool = False
    has_dropout: bool = False  # of the model, whether it was set to 0 or not
    # Casts to half precision that were left out, by type and line.
    lifted: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def iterations(self) -> list[Observation]:
        return [self, *self.later]


class Probe:
    """What else looks at a step, or changes it, beside the observer; by default it does nothing."""

    def around(self) -> AbstractContextManager[Any]:
        """The step runs within it."""
        return nullcontext()

    def watch(self, model: nn.Module) -> Callable[[], None]:
        """The model is there; returns what is to be called when the step has ended."""
        return lambda: None

    def before_first_forward(self, model: nn.Module) -> None:
        """The step has wrapped the model, given it weights, and calls it."""


def numbers_of(returned: Any) -> dict[str, float]:
    """What a step returned, by name; a tensor has one element, and a list is told apart by its places.

    Raises:
        ValueError: it is no number.
    """
    values: dict[str, Any] = {}
    for name, value in returned.items() if isinstance(returned, Mapping) else [("loss", returned)]:
        # One of each iteration.
        values |= (
            {f"{name} {i}": v for i, v in enumerate(value, 1)} if isinstance(value, list) else {name: value}
        )
    numbers = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"the step returned {name} of shape {tuple(value.shape)}; return numbers (the loss)"
                )
            value = value.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
        elif value is not None and not isinstance(value, (int, float)):
            raise ValueError(
                f"the step returned {name} as {type(value).__name__}; return the loss, or a dict of numbers"
            )
        if value is not None:
            numbers[name] = float(value)
    return numbers
