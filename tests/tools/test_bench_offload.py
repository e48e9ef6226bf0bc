"""The offload benchmark's bytes, gradients, arithmetic and honesty are checked; its times are not."""

import copy
import dataclasses
import json
from types import SimpleNamespace

import offload
import pytest
import torch
from dit_step import Case
from offload import claims, main, measure
from peers.offloaders import SynchronousStack
from queues import hidden_share, merge, split_by_queue

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER

SMALL = ["--device", "cpu", "--hidden", "32", "--tokens", "40", "--blocks", "4", "--rounds", "2"]
CASE = Case(32, 1, 40, 4, torch.float32, torch.device("cpu"))
INPUT = 40 * 32 * 4
LSE = 40 * 4


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    paths = ["--output", str(folder / "result.json"), f"--picture={folder}/result.png"]
    assert main([*SMALL, *paths]) == 0
    assert (folder / "result.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "result.json").read_text())


def test_the_result_says_where_it_was_made_and_that_a_cpu_only_counts(result):
    assert {"hardware", "versions", "command", "date", "cases", "claims"} < set(result)
    assert result["note"].startswith("accounting only")
    for claim in result["claims"]:
        if "bytes that" in claim["claim"]:
            assert claim["held"] is True and claim["value"] == 1.0
        elif "time" in claim["claim"]:
            assert claim["held"] is None and claim["value"] is None


def test_every_scheme_has_the_same_gradients_and_moves_what_theory_says(result):
    schemes = result["cases"][0]["schemes"]
    both = 2 * INPUT + LSE
    moved = {
        **{"none": 0, "full": 0, "full+offload": 3 * INPUT},
        **{"selective": 0, "selective+offload": 3 * both, "synchronous stack": 4 * INPUT},
        "save_on_cpu": 4 * (INPUT + 32 * 4),  # and the timestep's embedding with every block
    }
    for name, size_bytes in moved.items():
        scheme = schemes[name]
        assert scheme["gradients_equal"] and len(scheme["step_time_ms"]["rounds"]) == 2
        assert scheme["out_bytes"] == scheme["in_bytes"] == size_bytes, name
        assert name == "save_on_cpu" or scheme["theory_bytes"] == size_bytes
    assert schemes["torchtune"]["status"] == "skipped" and schemes["torchtune"]["reason"]


def test_what_stays_after_the_forward_is_two_slots_and_the_last_block(result):
    schemes = result["cases"][0]["schemes"]
    resident = {n: s["resident_bytes"] for n, s in schemes.items() if s["status"] == "measured"}
    # The last block's output, which is the head's input, stays under every scheme; so does the loss's own.
    others = resident["full"] - 4 * INPUT
    assert INPUT < others <= INPUT + 2 * (40 * 64 * 4)
    assert resident["full+offload"] == others + 2 * INPUT + INPUT
    assert resident["selective"] == others + 4 * (2 * INPUT + LSE)
    assert resident["save_on_cpu"] == resident["synchronous stack"] == others
    assert resident["none"] > 5 * resident["full"]


def test_memory_over_the_step_and_the_order_of_copies_are_recorded(result):
    schemes = result["cases"][0]["schemes"]
    for name in ("none", "full+offload", "save_on_cpu"):
        timeline = schemes[name]["timeline"]
        assert max(timeline["forward_bytes"] + timeline["backward_bytes"]) == schemes[name]["peak_bytes"]
    queues = schemes["full+offload"]["queues"]
    assert len(queues["out_ms"]) == len(queues["in_ms"]) == 3
    assert queues["out_ms"][-1][1] < queues["in_ms"][0][0]
    order = list(dict.fromkeys(queues["labels"]))
    assert order == [f"forward {i}" for i in range(4)] + [f"backward {i}" for i in (3, 2, 1, 0)]
    assert len(queues["labels"]) == len(queues["compute_ms"])
    share = hidden_share({key: queues[f"{key}_ms"] for key in ("compute", "out", "in")})
    assert share == pytest.approx(0, abs=0.01)


def test_wrong_gradients_stop_the_run_and_name_the_scheme(monkeypatch, capsys):
    right = SynchronousStack.__call__
    monkeypatch.setattr(SynchronousStack, "__call__", lambda *args: right(*args) * 1.001)
    assert main([*SMALL, "--only", "stack"]) == 1
    error = capsys.readouterr().err
    assert "synchronous stack:" in error and "largest difference is" in error
    assert not GLOBAL_ACTIVATION_MANAGER.enable


def test_a_scheme_that_runs_out_of_memory_leaves_the_others_running(monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError("as if")

    monkeypatch.setattr(SynchronousStack, "__call__", fail)
    found, seen = {}, []
    measure(CASE, "s", 2, found, lambda: seen.append(copy.deepcopy(found)))
    assert "step_time_ratio" in seen[0]["full"] and "peak_bytes" not in seen[0]["full"], (
        "times are kept first"
    )
    assert found["synchronous stack"]["status"] == "out of memory"
    assert found["save_on_cpu"]["peak_bytes"] and len(found["save_on_cpu"]["step_time_ms"]["rounds"]) == 2
    table = offload.make_table({"name": "", "block_input_bytes": 0, "schemes": found})
    assert "synchronous stack | out of memory | –" in table


def test_arithmetic():
    assert merge([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert merge([(0, 2), (3, 4)], gap_ms=1) == [(0, 4)]
    queues = {"compute": [(1, 2), (4, 6), (5, 6), (11, 20)], "out": [(0, 10)], "in": [(10, 12)]}
    assert hidden_share(queues) == pytest.approx(4 / 12)
    assert hidden_share({"compute": [(0, 1)], "out": [], "in": []}) is None


def event(name, start_ms, end_ms, kind="CUDA", annotation=False):
    return SimpleNamespace(
        name=name,
        device_type=getattr(torch.autograd.DeviceType, kind),
        time_range=SimpleNamespace(start=start_ms * 1000, end=end_ms * 1000),
        is_user_annotation=annotation,
    )


def test_copy_time_counts_as_hidden_where_kernels_run_beside_it():
    events = [
        event("flash_fwd_kernel", 0, 10),
        event("gemm", 8, 12),
        event("Memcpy DtoD (Device -> Device)", 12, 13),
        event("Memcpy DtoH (Device -> Pinned)", 2, 6),  # hidden
        event("Memcpy DtoH (Device -> Pinned)", 11, 15),  # two of four milliseconds
        event("Memcpy HtoD (Pinned -> Device)", 20, 22),  # nothing beside it
        event("aten::mm", 0, 30, kind="CPU"),
        event("a range of the user", 0, 30, annotation=True),
    ]
    assert hidden_share(split_by_queue(events)) == pytest.approx((4 + 2 + 0) / (4 + 4 + 2))


def on_cuda(**changes):
    """What would bear every claim out, and with the changes not."""
    ours = {"time": 101.0, "peak": 500, "out": 3 * INPUT, "hidden": 0.97, "resident": 3 * INPUT} | changes

    def row(time_ms, peak, out, slots, resident, kept, **more):
        sizes = {"peak_bytes": peak, "out_bytes": out, "in_bytes": out, "slot_bytes": slots}
        sizes |= {"resident_bytes": resident, "kept_bytes": kept, "theory_bytes": 3 * INPUT}
        return {"status": "measured", "step_time_ms": {"median": time_ms}, **sizes, **more}

    more = {"step_time_ratio": ours["time"] / 100, "copy_time_hidden_share": ours["hidden"]}
    found = {
        "full": row(100.0, 700, 0, 0, 4 * INPUT, 4 * INPUT),
        "full+offload": row(
            ours["time"], ours["peak"], ours["out"], 2 * INPUT, ours["resident"], INPUT, **more
        ),
        "save_on_cpu": row(120.0, 600, 4 * INPUT, 0, 0, 0),
    }
    case = dataclasses.replace(CASE, device=torch.device("cuda"))
    return [claim for claim in claims(case, found) if claim["held"] is not None]


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


def test_options_that_cannot_be(capsys):
    for arguments, message in [
        (["--hidden", "100"], "--hidden must be a multiple of the head dim, 32; got 100"),
        (["--only", "nothing"], "is in no scheme's name"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main(["--device", "cpu", *arguments])
        assert message in capsys.readouterr().err
