"""diffusers' own context parallelism, under the comparison that our policies stand under."""

from __future__ import annotations

import torch.distributed as dist

from opensora_accel import Plan, init_parallel
from opensora_accel.observe.on_cpu import accelerator_stand_ins
from opensora_accel.parallel_states import get_mesh
from opensora_accel.precision import LiftOperations
from tests.shardformer.conformance import fp64_model, in_double, step
from tests.tolerances import relative_error
from tests.video_models.even import EVEN


def theirs(name: str, plan: Plan) -> dict[str, float]:
    """Relative errors in fp64 of outputs and gradients, as `conformance.errors` gives them.

    diffusers says of no gradient whether it is to be summed or averaged over the ranks; both are tried, and each
    gradient counts by the one that is closer.
    """
    from diffusers import ContextParallelConfig

    init_parallel(plan)
    case = EVEN[name]
    inputs = in_double(case.inputs())
    with LiftOperations():
        expected = step(fp64_model(case), case, inputs)
        model = fp64_model(case)
        # For all models of the process; "native" returns no log-sum-exp, which a ring needs.
        model.set_attention_backend("_native_flash" if plan.ring > 1 else "native")
        with accelerator_stand_ins():
            model.enable_parallelism(
                config=ContextParallelConfig(
                    ring_degree=plan.ring, ulysses_degree=plan.ulysses, mesh=get_mesh()["ring", "ulysses"]
                ),
                # Plans may name blocks of the released size.
                cp_plan={path: entry for path, entry in model._cp_plan.items() if _is_there(model, path)},
            )
            found = step(model, case, inputs)
    largest = max(value.abs().max().item() for value in expected.values())
    errors = {}
    for key, value in expected.items():
        if key.startswith("output "):
            errors[key] = relative_error(found[key], value, largest)
            continue
        total = found[key].clone()
        dist.all_reduce(total)
        ways = (total, total / plan.sequence)
        errors[key] = min(relative_error(way, value, largest) for way in ways)
    return errors


def _is_there(model: object, path: str) -> bool:
    names = {name for name, _module in model.named_modules()}  # type: ignore[attr-defined]
    return "*" in path or path in names
