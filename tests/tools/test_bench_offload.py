"""The offload benchmark's bytes, gradients, arithmetic and honesty are checked; its times are not."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER
from opensora_accel.profiler.bench_offload import main, measure, peers
from opensora_accel.profiler.bench_offload.claims import claims
from opensora_accel.profiler.bench_offload.measure import Measured, Options, measure_case
from opensora_accel.profiler.bench_offload.memory import MemoryFigures, longest_tokens
from opensora_accel.profiler.bench_offload.trace import merged, queue_times, shared_ms, without
from opensora_accel.profiler.bench_offload.workload import Case

REPOSITORY = Path(__file__).parents[2]
SMALL = ["--device", "cpu", "--hidden", "32", "--tokens", "40", "--blocks", "4", "--rounds", "2"]
CASE = Case(32, 1, 40, 1, 4, torch.float32, torch.device("cpu"), keep_last=1)
INPUT = 40 * 32 * 4
LSE = 40 * 4


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    paths = ["--output", str(folder / "result.json"), f"--picture={folder}/result.png"]
    assert main([*SMALL, *paths]) == 0
    assert (folder / "result.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "result.json").read_text())


def test_the_result_says_where_it_was_made_without_paths_and_that_a_cpu_only_counts(result):
    assert {"hardware", "versions", "command", "date", "cases", "claims"} < set(result)
    assert result["note"].startswith("accounting only")
    assert result["command"].endswith("--output result.json --picture=result.png")
    assert result["hardware"]["cpu"] and result["versions"]["torch"] == torch.__version__


def test_every_scheme_has_the_same_gradients_and_moves_what_theory_says(result):
    schemes = result["cases"][0]["schemes"]
    both = 2 * INPUT + LSE
    moved = {
        **{"none": 0, "full": 0, "full+offload": 3 * INPUT, "full+auto": 0},
        **{"selective": 0, "selective+offload": 3 * both, "synchronous stack": 4 * INPUT},
        "save_on_cpu": 4 * (INPUT + 32 * 4),  # and the timestep's embedding with every block
    }
    for name, size_bytes in moved.items():
        scheme = schemes[name]
        assert scheme["gradients_equal"] and len(scheme["step_time_ms"]["rounds"]) == 2
        assert scheme["out_bytes"] == scheme["in_bytes"] == size_bytes, name
        assert name == "save_on_cpu" or scheme["theory_bytes"] == size_bytes
    assert schemes["torchtune"]["status"] == "skipped" and schemes["torchtune"]["reason"]
    assert "0 of 4 blocks" in schemes["full+auto"]["decision"]


def test_what_stays_after_the_forward_is_two_slots_and_the_last_block(result):
    resident = {
        name: scheme["resident_bytes"]
        for name, scheme in result["cases"][0]["schemes"].items()
        if scheme["status"] == "measured"
    }
    # The last block's output, which is the head's input, stays under every scheme; so does the loss's own.
    others = resident["full"] - 4 * INPUT
    assert INPUT < others <= INPUT + 2 * (40 * 64 * 4)
    assert resident["full+offload"] == others + 2 * INPUT + INPUT
    assert resident["selective"] == others + 4 * (2 * INPUT + LSE)
    assert resident["save_on_cpu"] == resident["synchronous stack"] == others
    assert resident["none"] > 5 * resident["full"]


def test_a_cpu_bears_out_the_accounting_and_leaves_times_open(result):
    for claim in result["claims"]:
        if "bytes that" in claim["claim"]:
            assert claim["held"] is True and claim["value"] == 1.0
        elif "time" in claim["claim"]:
            assert claim["held"] is None and claim["value"] is None


def test_memory_over_the_step_and_the_order_of_copies_are_recorded(result):
    schemes = result["cases"][0]["schemes"]
    for name in ("none", "full+offload", "save_on_cpu"):
        timeline = schemes[name]["timeline"]
        values = timeline["forward_bytes"] + timeline["backward_bytes"]
        assert max(values) == schemes[name]["peak_bytes"]
    queues = schemes["full+offload"]["queues"]
    assert len(queues["out_ms"]) == len(queues["in_ms"]) == 3
    assert queues["out_ms"][-1][1] < queues["in_ms"][0][0]
    order = list(dict.fromkeys(queues["labels"]))
    assert order == [f"forward {i}" for i in range(4)] + [f"backward {i}" for i in (3, 2, 1, 0)]
    assert shared_ms(queues["compute_ms"], queues["out_ms"] + queues["in_ms"]) == pytest.approx(0, abs=0.01)


def test_wrong_gradients_stop_the_run_and_name_the_scheme(monkeypatch, capsys):
    right = peers.SynchronousStack.__call__
    monkeypatch.setattr(peers.SynchronousStack, "__call__", lambda *args: right(*args) * 1.001)
    assert main([*SMALL, "--only", "stack"]) == 1
    error = capsys.readouterr().err
    assert "synchronous stack:" in error and "largest difference is" in error
    assert not GLOBAL_ACTIVATION_MANAGER.enable


def test_a_scheme_that_runs_out_of_memory_leaves_the_others_running(monkeypatch, capsys):
    def fail(*args):
        raise torch.OutOfMemoryError("as if")

    monkeypatch.setattr(peers.SynchronousStack, "__call__", fail)
    found = measure_case(CASE, Options(rounds=2, budget_bytes=2**30, only="s"), lambda text: None)
    assert found["synchronous stack"] == Measured("out of memory")
    assert found["save_on_cpu"].memory is not None and len(found["save_on_cpu"].times_ms) == 2


def test_weights_that_do_not_fit_are_reported_for_every_scheme(monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError("as if")

    monkeypatch.setattr(measure, "Workload", fail)
    found = measure_case(CASE, Options(rounds=2, budget_bytes=2**30, only="stack"), lambda text: None)
    assert found == dict.fromkeys(("full", "synchronous stack"), Measured("out of memory"))


def test_schemes_take_turns_in_an_order_that_changes():
    notes = []
    measure_case(CASE, Options(rounds=3, budget_bytes=2**30, only="full"), notes.append)
    rounds = [[note.partition(":")[0] for note in notes if note.endswith(f"round {n}")] for n in (1, 2, 3)]
    assert [sorted(names) for names in rounds] == [["full", "full+auto", "full+offload"]] * 3
    assert len({names[0] for names in rounds}) == 3


def test_the_extrapolated_length_fills_the_budget():
    budget_bytes = 4 * 2**20
    options = Options(rounds=2, budget_bytes=budget_bytes, only="stack", verify_longest=True)
    found = measure_case(CASE, options, lambda text: None)
    for name, result in found.items():
        assert result.verified, name
        assert 0.97 * budget_bytes < result.verified_bytes <= budget_bytes, name
    assert found["synchronous stack"].longest > found["full"].longest > 500
    assert longest_tokens((100, 200), (1000, 1500), 2500) == 400
    assert longest_tokens((100, 200), (1500, 1500), 2500) is None


# ---- the arithmetic of intervals


def test_intervals():
    assert merged([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert merged([(0, 2), (3, 4)], gap_ms=1) == [(0, 4)]
    assert shared_ms([(0, 10), (5, 12)], [(1, 2), (4, 6), (11, 20)]) == 1 + 2 + 1
    assert shared_ms([(0, 10), (0, 10)], [(1, 20), (2, 3)]) == 9
    assert without([(0, 10)], [(2, 3), (9, 12)]) == [(0, 2), (3, 9)]
    assert without([(0, 1)], [(0, 2)]) == []


def event(name, start_ms, end_ms, kind="CUDA", annotation=False):
    return SimpleNamespace(
        name=name,
        device_type=getattr(torch.autograd.DeviceType, kind),
        time_range=SimpleNamespace(start=start_ms * 1000, end=end_ms * 1000),
        is_user_annotation=annotation,
    )


def test_copy_time_counts_as_hidden_where_kernels_run_beside_it():
    times = queue_times(
        [
            event("flash_fwd_kernel", 0, 10),
            event("gemm", 8, 12),
            event("Memcpy DtoD (Device -> Device)", 12, 13),
            event("Memcpy DtoH (Device -> Pinned)", 2, 6),  # hidden
            event("Memcpy DtoH (Device -> Pinned)", 11, 15),  # two of four milliseconds
            event("Memcpy HtoD (Pinned -> Device)", 20, 22),  # nothing beside it
            event("aten::mm", 0, 30, kind="CPU"),
            event("a range of the user", 0, 30, annotation=True),
        ]
    )
    assert times.hidden_share() == pytest.approx((4 + 2 + 0) / (4 + 4 + 2))
    assert queue_times([event("gemm", 0, 1)]).hidden_share() is None


# ---- claims


def on_cuda(**changes):
    """What would bear every claim out, and with the changes not."""
    ours = {"time": 101.0, "peak": 500, "out": 3 * INPUT, "hidden": 0.97, "resident": 3 * INPUT} | changes
    full = figures(100.0, 700, 0, 0, 4 * INPUT)
    full.kept_bytes = 4 * INPUT
    offloaded = figures(ours["time"], ours["peak"], ours["out"], 2 * INPUT, ours["resident"])
    offloaded = dataclasses.replace(
        offloaded, theory_bytes=3 * INPUT, kept_bytes=INPUT, hidden_share=ours["hidden"]
    )
    found = {"full": full, "full+offload": offloaded, "save_on_cpu": figures(120.0, 600, 4 * INPUT, 0, 0)}
    case = dataclasses.replace(CASE, device=torch.device("cuda"))
    return [claim for claim in claims(case, found) if claim["held"] is not None]


def figures(time_ms, peak, out, slots, resident):
    memory = MemoryFigures(0, resident, peak, slots, out, out)
    return Measured(times_ms=[time_ms] * 3, memory=memory)


def test_claims_hold_where_the_figures_bear_them_out():
    assert len(on_cuda()) == 6 and all(claim["held"] for claim in on_cuda())


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({"time": 103.0}, "step time of full+offload over"),
        ({"time": 121.0}, "step time of save_on_cpu"),
        ({"peak": 600}, "peak of save_on_cpu"),
        ({"out": 2 * INPUT}, "moves each way"),
        ({"hidden": 0.9}, "copy time"),
        ({"resident": 4 * INPUT}, "keeps for the blocks"),
    ],
)
def test_each_claim_can_fail(change, failing):
    assert any(failing in claim["claim"] and not claim["held"] for claim in on_cuda(**change))


# ---- the command line


def test_help_teaches_and_bad_settings_are_refused(capsys, monkeypatch):
    script = [sys.executable, str(REPOSITORY / "tools" / "bench_offload.py"), "--help"]
    shown = subprocess.run(script, capture_output=True, text=True, cwd=REPOSITORY, timeout=100)
    assert shown.returncode == 0 and "how to read the table" in shown.stdout and "examples:" in shown.stdout
    for arguments, message in [
        (["--rounds", "1"], "at least 2"),
        (["--hidden", "100", "--heads", "3"], "(100) must be divisible by --heads (3)"),
        (["--only", "nothing"], "is in no scheme's name"),
        (["--tokens", "0"], "--tokens must be at least 1; got 0"),
        (["--keep-last", "-1"], "at least 0; got -1"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main(["--device", "cpu", *arguments])
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "cpu", "--picture", "picture.png"])
    assert "pip install matplotlib" in capsys.readouterr().err
