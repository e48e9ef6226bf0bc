"""What a published bug is: where it was reported, a wrong step and its right twin, and the tool that should tell them.

A pair is one function, `step(model, run, is_wrong)`. What both twins share stands once, and the lines that ask
`is_wrong` are the bug. Its docstring says the mechanism as the thread reports it, in our words. The step is the bug as
it was published, cut down to a page; it is not written for what our tools look at.

    the function    `times_the_data_ranks` multiplies a loss by the number of data ranks: wrong, or of all ranks: right
    where           ByteDance-Seed/VeOmni #338, 2025
    its name        a scale over sequence, by sequence⁻¹
    Bug.found       what a tool says: [("scale sequence⁻¹ on all 8 parameters", True)], and of the twin nothing: []

A bug that only a loop shows takes `step(model, run, is_wrong, watched)`, and `watch` goes around it. What no tool finds
yet stands in `suite.NOT_FOUND_YET`, with what it needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from opensora_accel import Plan, init_parallel
from opensora_accel.observe.meshes import MeshShape, Run
from opensora_accel.verify.pool import RankPool
from opensora_accel.verify.results import Reference
from opensora_accel.watching import LoopMistake, watch
from tests.verify.defects import Mutant
from tests.verify.loops import Small
from tests.verify.meshes import Meshes

Tool = Literal["verify", "watch", "loader", "single device", "bf16", "several steps"]
"""Which tool should tell, and of `verify` by which part:

- verify: the meshes beside one device, in fp64
- single device: one device beside the measured change of its loss, or beside a plain model
- bf16: the step as it is run, in bf16, beside fp64 (`--dtype bf16`)
- watch: around the loop
- loader: what is loaded is held against what was saved, by `watch` where a loop says both, and data are gone through
  once
- several steps: what comes after the first step of the optimizer
"""

Finding = tuple[str, bool]
"""A line that a tool says, and whether it names the bug."""


@dataclass(frozen=True)
class Bug:
    repository: str
    number: int
    """Of the issue or the pull request."""
    year: int
    step: Callable[..., Any]
    hides: str
    """Why nobody saw it."""
    kind: str
    """What it is rightly called: the kind of a cause of `verify`, its axes and factor, or a name of `watch`."""
    axes: tuple[str, ...] = ()
    factor: str = ""
    _: KW_ONLY
    model_fn: Callable[[], nn.Module] = Small
    meshes: Meshes = ({"data": 2}, {"data": 3})
    tool: Tool = "verify"
    data_axes: tuple[str, ...] | None = None
    reference: Reference = "turns"
    plain_model_fn: Callable[[], nn.Module] | None = None
    """The model without kernels of its own, where its forward is wrong and its gradient fits."""
    was_read: bool = True
    """Whether the mechanism was read in the thread; otherwise it is as others have told it."""

    @property
    def name(self) -> str:
        return f"{self.repository.split('/')[1]} #{self.number}"

    @property
    def url(self) -> str:
        return f"https://github.com/{self.repository}/issues/{self.number}"

    @property
    def mechanism(self) -> str:
        """The first paragraph of the step's docstring, in one line."""
        text = inspect.getdoc(self.step)
        assert text is not None, self.name
        return " ".join(text.split("\n\n")[0].split())

    def found(self, ranks: RankPool, is_wrong: bool) -> list[Finding]:
        """What the tool says of the wrong step or of its twin, the root cause first.

        `verify` runs whatever is not a loop for `watch`, also what it is not made for yet.
        """
        twin = Twin(self, is_wrong)
        if "watched" in inspect.signature(self.step).parameters:
            (plan,) = self.meshes
            assert isinstance(plan, Plan)
            (names, text), *_ = ranks(plan.world_size, _watched, twin, plan)
            lines = [line.strip() for line in text.splitlines()[1:]]
            return [(line, name == self.kind) for name, line in zip(names, lines, strict=True)]
        options = {"reference": self.reference, "data_axes": self.data_axes}
        options |= {"dtype": "bf16"} if self.tool == "bf16" else {}
        options |= {"plain_model_fn": self.plain_model_fn}
        defect = Mutant(self.name, (), twin, self.meshes, self.kind, self.axes, self.factor, **options)
        report = defect.verify(ranks)
        assert report.has_compared, report
        return [(cause.what, defect.is_named_by(cause)) for cause in report.causes]


@dataclass(frozen=True)
class Twin:
    """The wrong step or the right one, in the form in which `verify` takes a user's two functions."""

    bug: Bug
    is_wrong: bool

    def model(self) -> nn.Module:
        return self.bug.model_fn()

    def __call__(self, model: nn.Module, run: Run, *watched: Any) -> Any:
        return self.bug.step(model, run, self.is_wrong, *watched)


def _run_of(plan_or_axes: Plan | Mapping[str, int], data_axes: tuple[str, ...] | None) -> Run:
    """This rank's place on a mesh."""
    shape, rank = MeshShape.of(plan_or_axes, data_axes), dist.get_rank()
    return Run(shape, rank, shape.data_rank(rank), shape.data_size)


def _watched(twin: Twin, plan: Plan) -> tuple[tuple[str, ...], str]:
    """On a rank: the loop within `watch`, and what that raises."""
    init_parallel(plan)
    torch.manual_seed(0)
    model, run = twin.model(), _run_of(plan, None)
    torch.manual_seed(run.data_rank)
    try:
        with watch(model, plan) as watched:
            twin(model, run, watched)
    except LoopMistake as mistake:
        return mistake.names, str(mistake)
    return (), ""


def what_is_left(twin: Twin) -> list[float]:
    """On a rank of the bug's first mesh: numbers of what the step returns and leaves, as it is run, in fp32."""
    torch.manual_seed(0)
    model, run = twin.model(), _run_of(twin.bug.meshes[0], twin.bug.data_axes)
    torch.manual_seed(run.data_rank)
    returned = twin(model, run)
    returned = returned if isinstance(returned, dict) else {"loss": returned}
    tensors = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    tensors += [*model.parameters(), *returned.values()]
    return [float(tensor.detach().norm()) for tensor in tensors]
