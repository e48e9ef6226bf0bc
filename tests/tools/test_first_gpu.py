"""The run for a first GPU ends with a report that tells what became of each claim, whatever its stages do."""

import argparse
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import blockwise
import compressed
import first_gpu
import longest
import norms
import offload
import pytest
import torch
from dit_step import Case
from first_gpu import FAILED, HELD, NOT_RUN
from gpu_stages import STAGES, Stage

from tests.tiers import PROVE, some

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = [{"claim": "good", "held": True, "value": 1.0}, {"claim": "bad", "held": False, "value": 2.0}]
HANG = "import time; time.sleep(600)"


def stage(name, program="", *, writes=(), **options):
    """A stage that writes these claims and then runs the program."""
    begin = f"import json, os; json.dump({{'claims': {list(writes)!r}}}, open('{{out}}/{name}.json', 'w')); "
    options = {"claims": {f"claim of {name}": "good"}, "limit_s": 30.0, "gpus": 0, **options}
    return Stage(name, f'-c "{begin}{program}"', **options)


def outcomes(report):
    return {claim["claim"]: (claim["outcome"], claim["why"]) for claim in report["claims"]}


@PROVE
def test_whatever_a_stage_does_the_others_run_and_the_report_tells(tmp_path):
    stages = [
        stage("hangs", HANG, writes=CLAIMS[:1], limit_s=4.0),
        stage("aborts", "os.abort()"),
        stage("raises", "import no_such_library"),
        stage("fails", writes=CLAIMS),
        stage("holds", writes=CLAIMS[:1]),
        stage("skips", writes=[{"claim": "good", "held": None, "why": "no cuDNN"}]),
        stage("needs", gpus=1),
    ]
    machine = stage("machine", claims={})
    command = machine.command.replace("'claims'", "'machine': {'num_gpus': 0}, 'claims'")
    stages.insert(1, Stage("machine", command, {}, gpus=0))
    (tmp_path / "needs.json").write_text(json.dumps({"claims": CLAIMS[:1]}))  # of a run before
    report = first_gpu.drive(stages, tmp_path, 100.0)
    found = outcomes(report)
    assert found["claim of hangs"] == (NOT_RUN, "the stage was ended after 4 s, after 1 checks that held")
    assert found["claim of aborts"] == (NOT_RUN, "the stage died of SIGABRT")
    assert (
        found["claim of raises"][0] == NOT_RUN
        and "No module named 'no_such_library'" in found["claim of raises"][1]
    )
    assert found["claim of fails"][0] == HELD and found["bad"][0] == FAILED, "no failed check is lost"
    assert found["claim of holds"][0] == HELD
    assert found["claim of skips"] == (NOT_RUN, "no cuDNN")
    assert found["claim of needs"][0] == NOT_RUN and "needs 1 GPU(s)" in found["claim of needs"][1]
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text.splitlines()[0] == "2 claims held, 1 failed, 5 did not run"
    assert all(claim in text for claim in found)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == report


def test_what_a_stage_leaves_of_its_time_is_for_those_after_it(tmp_path):
    stages = [stage("holds", writes=CLAIMS[:1], limit_s=2.0), stage("hangs", HANG, limit_s=0.5)]
    found = first_gpu.drive(stages, tmp_path, 60.0)["stages"]
    assert 1 < found["hangs"]["seconds"] < 3, "its own half second, and most of the first one's two"


@pytest.mark.prove
def test_a_stage_that_would_take_all_time_leaves_some_to_those_after_it(tmp_path):
    started = time.monotonic()
    # Of 20 s, 10 are for the report and 6 for the second stage.
    stages = [stage("hangs", HANG, limit_s=600.0), stage("holds", writes=CLAIMS[:1], limit_s=24.0)]
    found = outcomes(first_gpu.drive(stages, tmp_path, 20.0))
    assert time.monotonic() - started < 20
    assert found["claim of hangs"] == (NOT_RUN, "the stage was ended after 4 s")
    assert found["claim of holds"][0] == HELD


@PROVE
@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT]))
def test_a_run_that_is_stopped_reports_what_there_is(tmp_path, number):
    program = (
        "import sys; from pathlib import Path; from tests.tools.test_first_gpu import *\n"
        "stages = stage('holds', writes=CLAIMS[:1]), stage('hangs', HANG), stage('never')\n"
        "first_gpu.drive(stages, Path(sys.argv[1]), 300)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, tmp_path], cwd=ROOT, env=environment())
    hanging = tmp_path / "hangs.json"
    deadline = time.monotonic() + 120
    while not hanging.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(number)
    assert child.wait(60) == 0
    found = outcomes(json.loads((tmp_path / "report.json").read_text(encoding="utf-8")))
    assert found["claim of holds"][0] == HELD
    assert found["claim of hangs"] == (NOT_RUN, f"the stage was stopped: {number.name}")
    assert found["claim of never"][0] == NOT_RUN and number.name in found["claim of never"][1]


def environment():
    paths = (ROOT, ROOT / "tools", ROOT / "tools" / "bench")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def test_a_run_of_some_stages_keeps_what_others_found(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps({
        "date": "yesterday",
        "stages": {"sanitizer": {"ended": "done", "seconds": 1, "checks": []}, "norms": {}},
        "claims": [
            {"claim": "no race", "stage": "sanitizer", "outcome": HELD, "why": "2 checks"},
            {"claim": "fast", "stage": "norms", "outcome": FAILED, "why": "slow"},
        ],
    }))  # fmt: skip
    report = first_gpu.drive([stage("norms", writes=CLAIMS[:1])], tmp_path, 60.0)
    assert outcomes(report) == {
        "no race": (HELD, "2 checks"),
        "claim of norms": (HELD, outcomes(report)["claim of norms"][1]),
    }
    assert "are of yesterday" in (tmp_path / "report.md").read_text(encoding="utf-8")


LOG = """\
tests/a/test_x.py::test_one[aten flash-2] PASSED                          [ 25%]
tests/a/test_x.py::test_two SKIPPED (needs a CUDA GPU)                    [ 50%]
tests/a/test_x.py::test_three[b] FAILED                                   [ 75%]
tests/a/test_x.py::test_of_a_worker[c d]
[gw1] [ 80%] PASSED tests/a/test_x.py::test_of_a_worker[c d]
SKIPPED [1] tests/a/test_y.py:3: no Triton
tests/a/test_x.py::test_four
"""


def test_what_pytest_told_is_read_also_where_a_test_took_the_process_along(tmp_path):
    (tmp_path / "tests.log").write_text(
        LOG + "\nFatal Python error: Aborted\n\nThread 0x1\n", encoding="utf-8"
    )
    checks = first_gpu.read_checks(Stage("tests", "pytest tests/a", {}), tmp_path, "died of SIGABRT")
    assert [(check["check"].rpartition("::")[2], check["held"]) for check in checks] == [
        ("test_one[aten flash-2]", True),
        ("test_two", None),
        ("test_three[b]", False),
        ("test_of_a_worker[c d]", True),
        ("test_four", False),
        ("tests/a/test_y.py", None),
    ]
    assert checks[1]["why"] == "needs a CUDA GPU" and checks[4]["why"] == "the process died of SIGABRT"


def test_the_guide_has_every_stage_and_no_other():
    guide = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`--only ([\w-]+)`", guide)) == {stage.name for stage in STAGES}


def test_all_stages_of_one_gpu_fit_the_time_and_so_do_those_of_several():
    for is_node in (False, True):
        limits_s = [stage.limit_s for stage in STAGES if not stage.gpus or (stage.gpus > 1) == is_node]
        assert sum(limits_s) + first_gpu.RESERVE_S <= 780


def test_every_test_for_a_gpu_is_in_a_stage():
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"\b(NEEDS_GPUS?|CPUS?_AND_GPUS?)\b", path.read_text(encoding="utf-8"))
        and path.name not in (Path(__file__).name, "tiers.py")
    }
    commands = " ".join(stage.command for stage in STAGES)
    assert marked and all(name in commands or str(Path(name).parent) in commands for name in marked)


def measured(rng):
    """What each benchmark of one GPU would claim there, of a device that takes any time for anything."""
    spread = lambda: {"median": rng.uniform(0.1, 9), "q1": rng.uniform(0.1, 9), "q3": rng.uniform(0.1, 9)}  # noqa: E731
    size = lambda: rng.randrange(1, 10**9)  # noqa: E731
    passes = {
        name: {"ratio": spread(), "share_of_copy_bandwidth": rng.uniform(0.3, 1.1)} for name in norms.PASSES
    }
    modes = {mode: {"tokens": size(), "ended": "the next length does not fit"} for mode in longest.MODES}
    schemes = {
        name: {
            "step_time_ms": spread(), "step_time_ratio": rng.uniform(0.9, 1.2), "peak_bytes": size(),
            "resident_bytes": size(), "kept_bytes": size(), "slot_bytes": size(), "out_bytes": size(),
            "in_bytes": size(), "theory_bytes": size(), "copy_time_hidden_share": rng.random(),
        }
        for name in offload.NAMES
    }  # fmt: skip
    case = Case(3072, 24, 12000, 4, torch.bfloat16, torch.device("cuda"))
    errors = [{"case": f"{way}, 2 ranks", "ratio": rng.uniform(0.5, 3)} for way in ("ring", "Ulysses")]
    return {
        "blockwise": blockwise.make_claims(
            errors, [{"case": "cuDNN", "chosen": True, "ratio": rng.uniform(1, 1.2)}], on_cuda=True
        ),
        "norms": norms.claims(
            [{"case": "T5", **passes, "share_of_copy_bandwidth": 0.9}],
            [{"case": kind, "kind": kind, **passes} for kind in norms.KINDS],
        ),
        "compressed": compressed.claims_of_unpacking(
            [{"case": "int8", "ratio": spread(), "share_of_copy_bandwidth": rng.uniform(0.3, 1.1)}]
        ),
        "offload": [offload.equal_gradients(case, rng.randrange(2)), *offload.claims(case, schemes)],
        "longest": longest.make_claims(
            modes, {"ratio": spread(), "waits": ["a.py:1"] * rng.randrange(2)}, True
        ),
    }


class Straight:
    """A stack whose peaks lie on a line, as those of blocks do, and whose steps take no time."""

    def __init__(self, start, per_token_bytes, base_bytes=10**6, limit_bytes=10**7):
        self.options = argparse.Namespace(
            start=start, unit=8, limit_bytes=limit_bytes, device_bytes=limit_bytes
        )
        self.line, self.free = (base_bytes, per_token_bytes), lambda: None

    def peak_bytes(self, tokens):
        peak = self.line[0] + tokens * self.line[1]
        if peak > self.options.limit_bytes:
            raise torch.OutOfMemoryError
        return peak


@pytest.mark.parametrize(
    ("start", "per_token_bytes"), [(8, 90), (64, 5000), (512, 10), (4096, 4000), (8, 2 * 10**6)]
)
def test_the_longest_sequence_is_found_in_a_few_steps(start, per_token_bytes):
    found = longest.search(Straight(start, per_token_bytes), time.monotonic() + 60.0)
    right = 9 * 10**6 // per_token_bytes
    assert found["ended"] == "the next length does not fit" and len(found["tried"]) <= 12
    if right < 8:
        assert found["tokens"] is None
    else:
        assert right / (1 + longest.CLOSE) - 8 <= found["tokens"] <= right


def test_short_steps_say_nothing_about_long_ones(monkeypatch):
    """As it was on an H100: 0.646 s for 256 tokens and 0.656 for 512, which were taken for 15 s at 19,000."""

    class Noisy(Straight):
        seconds = 0.0

        def peak_bytes(self, tokens):
            self.seconds += {256: 0.646, 512: 0.656}.get(tokens, 0.5 + 0.03 * (tokens / 4096) ** 2)
            return super().peak_bytes(tokens)

    stack = Noisy(256, 500)
    monkeypatch.setattr(longest, "time", argparse.Namespace(monotonic=lambda: stack.seconds))
    found = longest.search(stack, 7.0)
    assert found["ended"] == "the next length does not fit" and found["tokens"] > 16_000
    assert longest.length_of(found, stack.options) == found["tokens"]


def test_steps_that_grow_by_nothing_end_with_the_time_too(monkeypatch):
    class Even(Straight):
        seconds = 0.0

        def peak_bytes(self, tokens):
            self.seconds += 2.0
            return super().peak_bytes(tokens)

    stack = Even(8, 1)
    monkeypatch.setattr(longest, "time", argparse.Namespace(monotonic=lambda: stack.seconds))
    found = longest.search(stack, 7.0)
    assert found["ended"].startswith("the time ended") and stack.seconds == 6.0


def test_steps_are_compared_at_the_length_that_memory_gives_where_the_time_gave_a_shorter_one():
    stack = Straight(256, 500)
    tried = [{"tokens": tokens, "peak_bytes": stack.peak_bytes(tokens)} for tokens in (256, 512)]
    found = {"tokens": 512, "ended": "the time ended", "tried": tried}
    assert longest.length_of(found, stack.options) == 18_000
    assert longest.length_of({"tokens": None, "ended": "the time ended", "tried": []}, stack.options) == 0


@pytest.mark.parametrize("seed", range(10))
def test_whatever_a_gpu_takes_every_claim_of_a_benchmark_is_decided(tmp_path, seed):
    for name, claims in measured(random.Random(seed)).items():
        (each,) = (stage for stage in STAGES if stage.name == name)
        (tmp_path / each.result).write_text(json.dumps({"claims": claims}), encoding="utf-8")
        judged = first_gpu.judge(each, first_gpu.read_checks(each, tmp_path, "done"), "done")
        assert {claim["claim"] for claim in judged} == set(each.claims), "no check stands for itself"
        assert NOT_RUN not in {claim["outcome"] for claim in judged}, judged


@pytest.mark.prove
def test_every_claim_of_tests_has_some():
    for each in (stage for stage in STAGES if "pytest" in stage.command):
        words = [word for word in shlex.split(each.command)[1:] if not re.fullmatch(r"-n|\d+", word)]
        told = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-m", "cuda", *words],
            cwd=ROOT, env=environment(), capture_output=True, text=True,
        ).stdout  # fmt: skip
        names = [line for line in told.splitlines() if "::" in line]
        if "triton" in each.command and not names:
            continue  # it is not installed here
        for claim, pattern in each.claims.items():
            assert any(re.search(pattern, name) for name in names), (each.name, claim)


def test_a_stage_has_the_callers_modules(tmp_path, monkeypatch):
    (tmp_path / "carried.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = first_gpu.drive([stage("imports", "import carried", writes=CLAIMS[:1])], tmp_path, 60.0)[
        "claims"
    ]
    assert found["outcome"] == HELD


@pytest.mark.prove
@pytest.mark.slow
def test_a_dry_run_of_all_stages(tmp_path):
    command = [sys.executable, "tools/first_gpu.py", "--out", tmp_path, "--dry-run"]
    for which in ([], ["--node"]):  # into one report
        subprocess.run(command + which, cwd=ROOT, env=environment(), check=True, timeout=2400)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["stages"].keys() == {stage.name for stage in STAGES}
    assert {name: found["ended"] for name, found in report["stages"].items()} == dict.fromkeys(
        report["stages"], "done"
    )
    found = outcomes(report)
    for each in STAGES:
        assert set(each.claims) <= found.keys()
        num_checks = len(report["stages"][each.name]["checks"])
        assert num_checks, f"{each.name} checked nothing"
    held = {claim for claim, (outcome, _why) in found.items() if outcome == HELD}
    assert "offload trains on longer sequences than checkpointing alone" in held
    assert {"longest.png", "offload.png", "report.md"} <= {path.name for path in tmp_path.iterdir()}
