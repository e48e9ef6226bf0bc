"""`doctor --calibrate` writes a file of this machine that can be planned with. How near forecasts come to measured
steps is `tools/bench/forecast.py`'s to tell, on a machine that does nothing else."""

import subprocess
import sys

import pytest

from opensora_accel.planner.hardware import Hardware


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
    assert {*hardware.phases} == {"forward", "backward", "optimizer"} and hardware.phases[
        "forward"
    ].launch == 1
    assert all(0 < each.launch < 100 and 0.8 <= each.slowness <= 4 for each in hardware.phases.values())
    since_s, late_s = zip(*hardware.lateness["2"], strict=True)
    assert sorted(since_s) == [*since_s] and sorted(late_s) == [*late_s] and late_s[0] > 0
    assert hardware.crowding["1"] == 1 <= hardware.crowding["2"] and hardware.beside_collective >= 1
    assert hardware.uncertainties["crowding"] >= 0.08
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
