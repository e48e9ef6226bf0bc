"""The examples of docs/integrations/torch.md, as they stand there, against the same steps in one process."""

import contextlib
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from opensora_accel import Plan
from opensora_accel.observe.on_cpu import launcher_environment
from opensora_accel.precision import lift_casts
from tests.integrations.pages import programs, replaced
from tests.tiers import some
from tests.tolerances import relative_errors

DDP, FSDP, SYNC = programs("torch.md")
CLIP = 0.1
# A gradient that is rounding alone would move a parameter of AdamW as far as any other.
IN_DOUBLE = (
    ("in range(16)]", "in range(24)]; clips = [(a.double(), b.double(), n) for a, b, n in clips]"),
    ("plan = Plan(ulysses=2)", "lift(model.double()); before = copies(model); plan = PLAN"),
    ("AdamW(model.parameters(), lr=1e-3)", "SGD(model.parameters(), lr=0.1, momentum=0.9)"),
    ("norm_(model.parameters(), 1.0)", "norm_(model.parameters(), CLIP)"),
)  # fmt: skip
WITH_FSDP = (
    ("wrapped = DistributedDataParallel(model)\n", FSDP),
    ("    with contextlib.nullcontext() if steps else wrapped.no_sync():\n", SYNC + "    if True:\n"),
)
TWO_DIMENSIONS = (
    "(plan.world_size,))",
    '(2, plan.world_size // 2), mesh_dim_names=("replicate", "shard"))',
)


def updates(plan, source):
    """What the example changes in each parameter."""

    def copies(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    scope = {"PLAN": plan, "CLIP": CLIP, "lift": lift_casts, "copies": copies}
    run = SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())
    with launcher_environment(run), contextlib.redirect_stdout(None):
        exec(compile(source, "docs/integrations/torch.md", "exec"), scope)
    after = dict(scope["model"].named_parameters())
    full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in after.items()}
    return {name: full[name].detach() - value for name, value in scope["before"].items()}


PLANS = {"ulysses": Plan(ulysses=2), "ring": Plan(ring=3), "data": Plan(ulysses=2, dp_replicate=2)}
CASES = [(wrapper, name) for wrapper in ("DDP", "FSDP2") for name in PLANS] + [("HSDP", "data")]


@pytest.mark.parametrize("case", some(CASES, 0, 4), ids=" ".join)
def test_parameters_move_as_in_one_process(ranks, case):
    wrapper, name = case
    plan = PLANS[name]
    # A batch of all data ranks together is one of the single process: the sampler deals them out in turn.
    whole = ("batch_size=2", f"batch_size={2 * plan.data}")
    num_clips = ("in range(24)", f"in range({12 * plan.data})")
    (expected,) = ranks(1, updates, Plan(), replaced(DDP, *IN_DOUBLE, num_clips, whole))
    source = replaced(DDP, *IN_DOUBLE, num_clips)
    if wrapper != "DDP":
        source = replaced(source, *WITH_FSDP)
    if wrapper == "HSDP":
        source = replaced(source, TWO_DIMENSIONS)
    for moved in ranks(plan.world_size, updates, plan, source):
        errors = relative_errors(moved, expected)
        assert len(errors) == len(expected) and max(errors.values()) < 1e-9, errors
