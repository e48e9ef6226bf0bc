"""`doctor --calibrate` writes a file of this machine that can be planned with. How near forecasts come to measured
steps is `tools/bench/forecast.py`'s to tell, on a machine that does nothing else."""

import os
import subprocess
import sys
import time

import pytest
import torch

from opensora_accel.planner import rank_speeds
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.kernel_speeds import Meter


@pytest.mark.alone
def test_two_ranks_measure_their_machine(tmp_path):
    path = tmp_path / "hardware.json"
    launch = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", "2", "-m", "opensora_accel.cli", "doctor", "--calibrate", str(path)),
    ]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    hardware = Hardware.load(path)
    # Bounds that hold on any machine, however busy it is.
    assert 0 < hardware.launch_s < 1e-3 and 0 < hardware.sharded_launch_s < 1e-2
    assert 0 <= hardware.hook_s < 1e-2 and set(hardware.slowness.values()) == {1.0}
    assert {*hardware.phases} == {"forward", "recompute", "backward", "optimizer"} and hardware.phases[
        "forward"
    ].launch == 1
    assert all(0 < each.launch < 100 and 0.8 <= each.slowness <= 4 for each in hardware.phases.values())
    since_s, late_s = zip(*hardware.lateness["2"], strict=True)
    assert sorted(since_s) == [*since_s] and sorted(late_s) == [*late_s] and late_s[0] > 0
    assert hardware.crowding["1"] == 1 <= hardware.crowding["2"] and hardware.beside_collective >= 1
    assert hardware.uncertainties["crowding"] >= 0.07
    measured = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"}
    assert {name.split()[0] for name in hardware.collectives} == measured
    for name in (
        "crowding",
        "beside_collective",
        "sharded_launch_s",
        "hook_s",
        "phases",
        "lateness",
        "within",
    ):
        assert "measured by doctor --calibrate" in hardware.sources[name]
    assert Hardware.named(str(path)).name == "calibrated cpu"


def on_two_nodes():
    """Four ranks as two launchers of two ranks start them: what is measured on a node, and between nodes."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    rounds, rank_speeds.ROUNDS = rank_speeds.ROUNDS, 2
    try:
        cpu, places = torch.device("cpu"), rank_speeds.Places.now()
        between = rank_speeds.between_nodes(cpu)
        found = rank_speeds.collectives(cpu)
        shared = rank_speeds.beside_others(lambda: None)[1]
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        rank_speeds.ROUNDS = rounds
    ranks = torch.distributed.get_process_group_ranks(places.group(2, 2))
    return (places.nodes, places.per_node, places.place), ranks, {*found}, between, shared


@pytest.mark.prove
def test_ranks_on_several_nodes_measure_the_link_between_them(ranks):
    found = ranks(4, on_two_nodes)
    assert [each[0] for each in found] == [(2, 2, 0), (2, 2, 1), (2, 2, 0), (2, 2, 1)]
    assert [each[1] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for _places, _ranks, collectives, between, lateness in found:
        # No group of a plan is measured that is on both nodes.
        assert {name.split()[1] for name in collectives} == {"2/2"} and {*lateness} == {"2"}
        assert between == found[0][3] and between.latency_s > 0 and between.bandwidth_bytes_per_s > 0


def test_a_device_is_loaded_as_long_as_is_said():
    before = time.monotonic()
    Meter(torch.device("cpu")).load(0.2)
    assert time.monotonic() - before >= 0.2
