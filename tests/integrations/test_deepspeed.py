"""The example of docs/integrations/deepspeed.md, as it stands there, against the same steps in a plain loop."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from opensora_accel import Plan
from tests.integrations.pages import ROOT, programs, replaced
from tests.tiers import PROVE

# `make prove` puts it there, because its requirements are nobody else's.
APART = Path(sys.prefix) / "deepspeed"
(EXAMPLE,), (LOOP, *_) = programs("deepspeed.md"), programs("torch.md")
BEFORE_STEPS = "before = {n: p.detach().clone() for n, p in model.named_parameters()}; init_parallel(plan)"
CLIP, NUM_STEPS = 0.1, 6

pytestmark = [
    PROVE,
    pytest.mark.skipif(not (APART / "deepspeed").is_dir(), reason="there is no DeepSpeed here: make prove"),
]

# On a CPU, and without the operator for shared memory that every rank would compile first.
BEFORE = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
moved, norms = {}, []
"""
AFTER = """
for name, parameter in engine.module.named_parameters():
    with deepspeed.zero.GatheredParameters([parameter], enabled=STAGE == 3):
        moved[name] = parameter.detach() - before[name]
torch.save((moved, norms), f"OUTPUT_{torch.distributed.get_rank()}.pt")
"""


def run_example(stage, plan, folder):
    """What it changes in each parameter, and the norms that the engine reports, by rank."""
    script = folder / "train.py"
    source = replaced(
        EXAMPLE,
        ("in range(16)]", f"in range({4 * NUM_STEPS * plan.data})]"),
        ("Plan(ulysses=2)", repr(plan)),
        ("init_parallel(plan)", BEFORE_STEPS),
        ("AdamW(model.parameters(), lr=1e-3)", "SGD(model.parameters(), lr=0.1, momentum=0.9)"),
        ('"gradient_clipping": 1.0', f'"gradient_clipping": {CLIP}'),
        # Small parameters are sharded as well.
        ('"stage": 2', f'"stage": {stage}, "stage3_param_persistence_threshold": 0'),
        ("    engine.step()", "    engine.step(); norms.append(float(engine.get_global_grad_norm() or 0))"),
    )
    after = AFTER.replace("STAGE", str(stage)).replace("OUTPUT", str(folder / "moved"))
    script.write_text(BEFORE + source + after)
    launcher = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [sys.executable, "-m", *launcher, "--nproc-per-node", str(plan.world_size), str(script)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(APART)])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"moved_{rank}.pt") for rank in range(plan.world_size)]


def run_plain(num_data_ranks):
    """The same by the loop of torch alone, in one process, whose batches are those of all data ranks together."""
    scope, norms = {}, []
    source = replaced(
        LOOP,
        ("in range(16)]", f"in range({4 * NUM_STEPS * num_data_ranks})]"),
        ("batch_size=2", f"batch_size={2 * num_data_ranks}"),
        ("Plan(ulysses=2)", "Plan()"),
        ("init_parallel(plan)", BEFORE_STEPS),
        ("AdamW(model.parameters(), lr=1e-3)", "SGD(model.parameters(), lr=0.1, momentum=0.9)"),
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "norms.append(clip(model))"),
    )
    scope |= {"norms": norms, "clip": lambda model: clip_grad_norm_(model.parameters(), CLIP).item()}
    exec(compile(source, "docs/integrations/torch.md", "exec"), scope)
    before = scope["before"]
    return {n: p.detach() - before[n] for n, p in scope["model"].named_parameters()}, before, norms


@pytest.mark.parametrize(
    "plan", [Plan(ulysses=2), Plan(ring=3), Plan(ulysses=2, dp_replicate=2)], ids=["ulysses", "ring", "data"]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_move_as_in_a_plain_loop(ranks, stage, plan, tmp_path):
    ((expected, before, expected_norms),) = ranks(1, run_plain, plan.data)
    assert len(expected_norms) == NUM_STEPS and min(expected_norms) > CLIP, "gradients are clipped"
    resolution = torch.finfo(torch.float32).eps
    for moved, norms in run_example(stage, plan, tmp_path):
        # ZeRO-0 in fp32 reports none; the others the last one again after each batch.
        if stage:
            assert norms[1::2] == pytest.approx(expected_norms, rel=1e-5)
        for name, difference in expected.items():
            # What fp32 resolves of the weight, in each step, and what it resolves of the gradients.
            allowed = NUM_STEPS * resolution * before[name].abs().max() + 1e-4 * difference.abs().max()
            assert (moved[name] - difference).abs().max() <= allowed, name
