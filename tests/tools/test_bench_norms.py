"""The norm benchmark's bytes, kernels and claims are checked; its times are not, because this machine is shared."""

import json

from norms import PASSES, claims, main


def test_every_norm_is_measured_or_kept_with_a_reason(tmp_path):
    assert main(["--quick", "--device", "cpu", "--output", str(tmp_path / "result.json")]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert {"note", "hardware", "versions", "command", "date", "rounds", "cases", "claims"} < set(result)
    for case in result["cases"]:
        if case["kernel"] is None:
            assert case["reason"]
            continue
        assert case["kept_after"] < case["kept_before"] and case["difference"] <= 0.02
    swapped = {case["case"].split(",")[0] for case in result["cases"] if case["kernel"]}
    assert swapped <= {"FP32LayerNorm"}, "torch has no other kernel for a CPU that keeps less"
    assert [claim["held"] for claim in result["claims"][2:]] == [None] * 5
    for row in result["kernels"]:
        assert row["kernel"].startswith("plain PyTorch") and row["forward and backward"]["ours_ms"] > 0
    assert {row["case"].split(",")[0] for row in result["kernels"]} >= {"RMS norm", "norm and rotary"}


def test_a_claim_fails_where_a_kernel_is_slower():
    def row(name, ratio, **more):
        timed = {"ratio": {"median": ratio, "q1": ratio, "q3": ratio}}
        return {"case": name, "kernel": "F.rms_norm", "forward": timed, "forward and backward": timed, **more}

    rows = [row("a", 2.0), row("b", 0.8), {"case": "kept", "kernel": None}]
    assert [(claim["held"], claim["fails"]) for claim in claims(rows)] == [(False, ["b"])] * 2 + [
        (None, [])
    ] * 5
    on_gpu = [row("a", 2.0, share_of_copy_bandwidth=0.9), row("b", 2.0, share_of_copy_bandwidth=0.8)]
    assert [claim["held"] for claim in claims(on_gpu[:1])] == [True] * 3 + [None] * 4
    shares = {name: {"share_of_copy_bandwidth": 0.85} for name in PASSES}
    kernels = [{"case": kind, "kind": kind, **shares} for kind in ("norm or gate", "modulate or turn")]
    assert [claim["fails"] for claim in claims([], kernels)[3:]] == [["norm or gate"]] * 2 + [[]] * 2
    assert claims(on_gpu)[2]["fails"] == ["b"]
