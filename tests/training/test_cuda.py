"""The trainer on one GPU, a rank by itself over NCCL: every plan has the same losses, and every family a CPU's."""

import json
from dataclasses import asdict

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_common

from opensora_accel.profiler.records import rank_files, read_rank
from opensora_accel.training.recipes import RECIPES
from tests.tiers import CPU_AND_GPU
from tests.training.test_families import config_of

# Not promised to anybody, but installed on machines with a GPU.
IS_TORCH_211 = not hasattr(_fsdp_common, "ShardPlacementResult")
PLANS = {
    "checkpointed, offloaded": ("--plan.checkpoint", "full", "--plan.offload", "1.0"),
    "selective": ("--plan.checkpoint", "selective", "--plan.offload", "0.5"),
    "sharded": ("--plan.sharding", "zero3"),
    "sharded, on the host": ("--plan.sharding", "zero3", "--plan.cpu-offload", "True"),
}
# Each family's first class; those of authors need their repositories.
FAMILIES_ALONE = [name for name, each in RECIPES.items() if name == each.models[0] and not each.home]


def losses(output):
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return torch.tensor([json.loads(line)["loss"] for line in lines], dtype=torch.float64)


@pytest.fixture
def on(device, monkeypatch):
    """A run of the command sees this device."""
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return device


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_every_plan_has_the_same_losses(on, run, config_file, tmp_path):
    def train(name, *options):
        status, text = run("train", "--config", config_file, "--output", tmp_path / name, *options)
        assert status == 0, text
        assert ("GPU rank(s)" in text) == (on == "cuda"), text
        return losses(tmp_path / name)

    expected = train("plain")
    for name, options in PLANS.items():
        found = train(name, *options)
        assert (found - expected).abs().max() < 1e-5, (name, found, expected)
    # In bf16 a loss has rounding of its own; one that is learnt at all lies near.
    if IS_TORCH_211:
        pytest.skip("shards in bf16 need torch 2.12")
    assert (train("bf16", "--plan.precision", "bf16") - expected).abs().max() < 0.05


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize("name", FAMILIES_ALONE)
def test_every_family_learns_what_it_learns_on_a_cpu(on, run, clips, tmp_path, monkeypatch, name):
    """With samples at the end, of a model that was built without memory."""

    def train(output, device):
        path = tmp_path / "run.json"
        changes = {"num_samples": 1, "flow.sample_steps": 2}
        config = config_of(name, clips, output, **changes)
        path.write_text(json.dumps(asdict(config)), encoding="utf-8")
        status, text = run("train", "--config", path)
        assert status == 0 and list(output.glob("samples/*/*.mp4")), text
        assert ("GPU rank(s)" in text) == (device == "cuda"), text
        return losses(output)

    found = train(tmp_path / "here", on)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert (found - train(tmp_path / "on the host", "cpu")).abs().max() < 1e-4


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_a_resumed_run_goes_on(on, run, config_file, tmp_path):
    status, text = run("train", "--config", config_file)
    assert status == 0, text
    whole = losses(tmp_path / "run")
    status, text = run("train", "--config", config_file, "--resume", tmp_path / "run/checkpoints/step_000002")
    assert status == 0, text
    assert (losses(tmp_path / "run") - whole).abs().max() < 1e-5


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_a_step_is_profiled(on, run, config_file, tmp_path):
    options = PLANS["checkpointed, offloaded"] + (() if IS_TORCH_211 else PLANS["sharded"])
    status, text = run("profile", "--config", config_file, "--num-steps", "3", "--memory", *options)
    assert status == 0, text
    (file,) = rank_files(tmp_path / "run_profile" / "profile")
    records = list(read_rank(file)[1])
    assert len(records) == 3
    for record in records:
        assert 0 < record.seconds < 60
        for call in record.calls:
            # On a CPU who waits is woken when there is a core for it, which is part of the time that it waits.
            longest = record.seconds if on == "cpu" else call.end_s - call.start_s
            assert 0 <= call.exposed_s <= longest + 1e-4 <= record.seconds + 2e-4
