"""Without its folder of experiments the package runs every other Plan, and says so where one asks for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys

class Removed:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opensora_accel.experiments"):
            raise ModuleNotFoundError(name, name="opensora_accel.experiments")

sys.meta_path.insert(0, Removed())
import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.experimental import experiments_of
from opensora_accel.observe import fake_world, without_values
from tests.models import wan

with fake_world(0, 4), without_values():
    plan = Plan(dp_replicate=2, ulysses=2, sharding="zero3", checkpoint="full")
    init_parallel(plan)
    shardformer.shard(wan(), plan)
from opensora_accel.planner.candidates import Residents, _extras
from opensora_accel.planner.hardware import Hardware

class Request:
    hardware, world_size, residents = Hardware.named("h100x2-ib400"), 4, Residents()

fields = {"dp_shard": 1, "ring": 1, "ulysses": 4, "tp": 1, "sharding": "none"}
assert _extras(Request, fields) == [{}], "the planner proposes no experiment"
try:
    experiments_of(Plan(ulysses=2, overlap_ulysses=True))
except ValueError as error:
    print(error)
"""


@pytest.mark.prove  # imports of experiments are refused by tests/test_layers.py
def test_the_package_runs_without_them():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(
        "overlap is an experiment, and opensora_accel.experiments is not installed"
    )
