"""The norm benchmark's bytes, kernels and claims are checked; its times are not, because this machine is shared."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "tools" / "bench_norms.py"


def load():
    spec = importlib.util.spec_from_file_location("bench_norms", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_norms"] = module
    spec.loader.exec_module(module)
    return module


def test_every_norm_is_measured_or_kept_with_a_reason(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert {"note", "hardware", "versions", "command", "date", "rounds", "cases", "claims"} < set(result)
    assert str(tmp_path) not in result["command"]
    for case in result["cases"]:
        if case["kernel"] is None:
            assert case["reason"]
            continue
        assert case["kept_after"] <= 4 <= case["kept_before"] and case["difference"] <= 0.02
        assert not case["forward"]["on_kernel"], "an input this small is not worth a kernel"
    kept = {case["case"].split(",")[0] for case in result["cases"] if case["kernel"] is None}
    assert kept == {"FP32LayerNorm", "AdaLayerNormContinuous", "CogVideoXLayerNormZero"}


def test_a_claim_is_about_kernels_only_and_fails_where_one_is_slower():
    def result(name, ratio, on_kernel=True):
        timed = {"on_kernel": on_kernel, "ratio": {"median": ratio, "q1": ratio, "q3": ratio}}
        return {"case": name, "kernel": "tiles", "forward": timed, "forward and backward": timed}

    claims = load()._claims([result("a", 2.0), result("b", 0.8), result("c", 0.8, on_kernel=False)], False)
    assert [(claim["held"], claim["fails"]) for claim in claims] == [(False, ["b"])] * 2


@pytest.mark.parametrize("option", [["--rounds", "1"], ["--device", "cuda"]])
def test_what_cannot_be_measured_is_refused(option):
    import torch

    if torch.cuda.is_available() and "cuda" in option:
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(SCRIPT), *option], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and ("must be at least 2" in done.stderr or "needs a GPU" in done.stderr)
