"""The attention benchmark finds what is wrong, survives what hangs, and counts exactly. Its times are not tested."""

import dataclasses
import json
import math

import pytest
import torch
import torch.distributed as dist

from opensora_accel.cli import main as cli
from opensora_accel.profiler.bench_attention import launch, main
from opensora_accel.profiler.bench_attention.claims import claims
from opensora_accel.profiler.bench_attention.environments import INSTALLS, Place, probe
from opensora_accel.profiler.bench_attention.launch import Launch, Outcome, run_tasks
from opensora_accel.profiler.bench_attention.peers import SIDES, find_side
from opensora_accel.profiler.bench_attention.plan import CASES, error_tasks, time_tasks
from opensora_accel.profiler.bench_attention.problem import Problem, World, full_attention, make_whole
from opensora_accel.profiler.bench_attention.rank import Task, measure_bytes, measure_errors
from opensora_accel.profiler.bench_attention.report import markdown
from opensora_accel.profiler.bench_attention.results import make_row, spread

SMALL = Problem("small", queries=12, keys=12, heads=4, kv_heads=4, head_dim=8)
MISBEHAVING = "tests.profiler.misbehaving"


def task(part, name, problem=SMALL):
    return Task(part, (name if name in SIDES else f"{MISBEHAVING}:{name}",), problem)


def on_rank(measure, *tasks):
    group = dist.group.WORLD
    world = World(group.rank(), group.size(), torch.device("cpu"), group)
    return [measure(world, each) for each in tasks]


# ---- gradient errors


def test_the_reference_is_torchs_own_attention():
    for case in CASES:
        whole = make_whole(case, torch.device("cpu"))
        heads_first = [t.transpose(1, 2).requires_grad_() for t in (whole.q, whole.k, whole.v)]
        mask = None if whole.mask is None else whole.mask[:, None, None, :]
        options = {"is_causal": case.causal, "attn_mask": mask, "enable_gqa": True}
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)
        gradients = torch.autograd.grad(out, heads_first, whole.grad)
        found = full_attention(case, whole)
        torch.testing.assert_close(found["out"], out, rtol=0, atol=1e-12)
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            torch.testing.assert_close(found[name], gradient.transpose(1, 2), rtol=0, atol=1e-12)


def test_a_wrong_side_is_told_from_a_right_one(ranks):
    tasks = [task("errors", name) for name in ("RIGHT", "ours ulysses", "WRONG", "NOT_A_NUMBER")]
    by_rank = ranks(2, on_rank, measure_errors, *tasks)
    made = [
        make_row(each, 2, Outcome("done", by_rank=list(found)))
        for each, found in zip(tasks, zip(*by_rank, strict=True), strict=True)
    ]
    assert [row["right"] for row in made] == [True, True, False, False]
    assert made[0]["worst"] < 1e-14 and made[3]["worst"] is None
    # Only rank 1's values were off, by 1e-4: the largest error over all ranks counts.
    assert 1e-6 < made[2]["errors"]["out"] < 1e-3 and made[2]["errors"]["dv"] > 1e-6


# ---- bytes


def test_bytes_of_known_exchanges_are_counted_exactly(ranks):
    problem = dataclasses.replace(SMALL, dtype="float32", batch=1)
    share = 4 * 4 * 8 * torch.float32.itemsize  # [1, 12 / 3, 4, 8]
    gathered, hidden = ranks(
        3, on_rank, measure_bytes, task("bytes", "RIGHT", problem), task("bytes", "HIDDEN", problem)
    )[0]
    assert gathered["q_bytes"] == hidden["q_bytes"] == share
    assert (gathered["collectives"], gathered["sends"]) == (4, 0)
    assert gathered["sent_bytes"] == 4 * 2 * share and not gathered["uncounted"]
    # q, all of k and v, the output and a log-sum-exp of one fp32 number a head and row.
    lse = 4 * 4 * torch.float32.itemsize
    assert gathered["kept_bytes"] == pytest.approx(2 * share + 2 * 3 * share + lse, abs=16)
    assert (hidden["collectives"], hidden["sends"], hidden["sent_bytes"]) == (0, 1, share)
    assert hidden["kept_bytes"] == 0


# ---- what a side may do to the run


def test_what_raises_aborts_or_hangs_is_reported_and_the_rest_goes_on(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    names = ["RAISES", "RIGHT", "ABORTS", "HANGS"]
    told = []
    found = run_tasks(
        Launch(2, silence_s=1.0),
        [task("errors", name) for name in names],
        lambda each, text: told.append(each),
    )
    assert [outcome.status for outcome in found] == ["raises", "done", "aborts", "hangs"]
    assert found[0].reason == "ValueError: rank 1 has had enough"
    assert found[2].reason.startswith("SIGABRT") and "1 s" in found[3].reason
    assert len(found[1].by_rank) == 2
    assert [each.sides[0].partition(":")[2] for each in dict.fromkeys(told)] == names


def test_a_side_that_does_not_import_says_why():
    names = [f"{MISBEHAVING}:BROKEN_IMPORT", "ours ulysses"]
    found = probe(names, Place(None, torch.sys.executable))
    assert found[names[0]]["reason"] == "does not import: ImportError: torch has no no_such_name"
    assert found[names[1]] == {"version": torch.__version__, "reason": None}


def test_a_peer_without_an_environment_is_skipped_with_the_remedy(tmp_path, capsys):
    options = ["--environments", str(tmp_path), "--output", str(tmp_path / "result.json")]
    assert main(["--only", "deepspeed", "--part", "errors", *options]) == 0
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert {row["status"] for row in result["errors"]} == {"skipped"}
    assert "--install-peers" in result["skipped"]["deepspeed ulysses"]
    assert "deepspeed ulysses is skipped" in capsys.readouterr().err


# ---- the table of sides


def test_the_table_is_whole():
    for side in SIDES.values():
        assert side.environment is None or side.environment in INSTALLS
        for other in (side.beside, side.beside_causal):
            assert other is None or other in SIDES
    for steps in INSTALLS.values():
        peer = steps[-1]
        assert "--no-deps" in peer and "==" in peer[-1] and not any("torch==" in word for word in peer[:-1])
    with pytest.raises(ValueError, match="no side 'nobody'; the sides are ours ulysses"):
        find_side("nobody")


def test_a_problem_is_put_only_to_an_interface_that_has_it():
    refused = {each.problem.name: why for each, why in error_tasks(SIDES["diffusers ring"], 2, "cpu") if why}
    assert set(refused) == {"causal", "grouped heads", "key mask"}
    assert refused["key mask"] == "its interface has no key mask"
    timed = [each.sides for each, _ in time_tasks(SIDES["torch ring"], 2, SMALL, 3)]
    assert timed == [("ours ring", "torch ring"), ("ours ring zigzag", "torch ring")]


# ---- claims and reports


def ring_row(sent_in_q, ranks=4, dtype="float32", side="ours ring"):
    problem = dataclasses.replace(SMALL, dtype=dtype).to_dict()
    counts = {"collectives": 0, "sends": 9, "barriers": 0, "size_exchanges": 0, "uncounted": []}
    sizes = {"sent_bytes": 1, "sent_in_q": sent_in_q, "kept_in_q": 4.0}
    return {"side": side, "ranks": ranks, "problem": problem, "status": "done", **counts, **sizes}


def time_row(side, ratios, name="full"):
    problem = dataclasses.replace(SMALL, name=name).to_dict()
    ms = {"ours_ms": spread([1, 2, 3]), "side_ms": spread([1, 2, 3])}
    done = {"status": "done", "beside": "ours ring", "ratio": spread(ratios)}
    return {"side": side, "ranks": 2, "problem": problem, **done, **ms}


@pytest.mark.parametrize(
    ("counted", "times", "held"),
    [
        ([ring_row(18.0), ring_row(24.0, dtype="bfloat16")], [], [True, True]),
        ([ring_row(20.0), ring_row(24.0, dtype="bfloat16")], [], [False, True]),
        ([], [time_row("diffusers ulysses", [1.1, 1.3, 1.4])], [True]),
        ([], [time_row("diffusers ulysses", [1.1, 1.19, 1.4])], [False]),
        ([], [time_row("yunchang ring", [0.8, 0.9, 1.2])], [True]),  # within the spread
        ([], [time_row("yunchang ring", [0.7, 0.8, 0.9])], [False]),
        ([], [time_row("ours ring zigzag", [0.7, 0.8, 0.9], "causal")], [True]),
        ([], [time_row("ours ring zigzag", [0.8, 0.9, 0.95], "causal")], [False]),
    ],
)
def test_claims(counted, times, held):
    assert [claim["held"] for claim in claims([], counted, times)] == held


def test_a_wrong_side_of_ours_fails_the_claim_and_shows_in_the_document():
    errors = {"out": 1e-16, "dq": 1e-16, "dk": math.nan, "dv": 0.5}
    by_rank = [{key: None if math.isnan(value) else value for key, value in errors.items()}] * 2
    row = make_row(Task("errors", ("ours ring",), SMALL), 2, Outcome("done", by_rank=by_rank))
    (claim,) = claims([row], [], [])
    assert claim["held"] is False and claim["value"] is None
    facts = {
        "hardware": {"cpu": "a CPU", "cores": 2},
        "versions": {"torch": "2"},
        "date": "now",
        "command": "c",
    }
    rest = {"bytes": [ring_row(18.0)], "times": [time_row("torch ring", [1, 2, 3])], "claims": [claim]}
    text = markdown({**facts, "errors": [row], **rest})
    assert "WRONG NaN" in text and "dk NaN, dv 5.0e-01" in text and "| NO | – |" in text
    assert "| ours ring | 4 | float32 | 0 | 9 | 0 |" in text and "2.000 [1.500, 2.500]" in text


def test_the_command_end_to_end(tmp_path, capsys):
    paths = ["--output", str(tmp_path / "result.json"), f"--markdown={tmp_path}/result.md"]
    paths += ["--picture", str(tmp_path / "result.png")]
    sides = ["--only", "ours ulysses", "--ranks", "2"]
    assert cli(["bench", "attention", "--part", "bytes", *sides, *paths]) == 0
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert {row["collectives"] for row in result["bytes"]} == {4} and not result["errors"]
    assert [claim["held"] for claim in result["claims"]] == [True]
    assert str(tmp_path) not in json.dumps(result)
    assert (
        "Any row again: `opensora-accel bench attention --part bytes" in (tmp_path / "result.md").read_text()
    )
    assert "claims:" in capsys.readouterr().out
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "nobody"], "--only 'nobody' is in no side's name; they are ours ulysses"),
        (["--ranks", "1"], "--ranks must be at least 2"),
        (["--tokens", "30", "--time-ranks", "4"], "--tokens (30) must be a multiple of 8"),
        (["--rounds", "1"], "--rounds must be at least 2"),
    ],
)
def test_options_that_cannot_be(options, message, capsys):
    with pytest.raises(SystemExit):
        main(options)
    assert message in " ".join(capsys.readouterr().err.split())
