"""The attention benchmark finds what is wrong and counts exactly. Its times are not tested: this machine is shared."""

import dataclasses
import json

import attention
import pytest
import torch
from attention import CASES, claims, full_attention, main, make_table, make_task, make_whole, problems
from harness import ratios
from peers import INSTALLS, SIDES, is_ours
from ranks import Job, run_tasks

from tests.tools.test_harness import MISBEHAVING, SMALL, task


def run(num_ranks, *tasks):
    """As the rows of the benchmark are."""
    outcomes = run_tasks(Job(MISBEHAVING, num_ranks), tasks)
    row = {"ranks": num_ranks, "status": "done", "reason": ""}
    return [
        row | {"side": each["sides"][-1], "problem": each["problem"], **outcome.found}
        for each, outcome in zip(tasks, outcomes, strict=True)
    ]


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


@pytest.mark.prove
def test_a_wrong_side_is_told_from_a_right_one():
    names = ("right", "wrong", "not_a_number", "best case ulysses", "best case ring")
    rows = run(2, *(task("errors", name, name="self") for name in names))
    assert [row["right"] for row in rows] == [True, False, False, True, True]
    assert rows[0]["worst"] < 1e-14 and rows[2]["worst"] is None
    # Only rank 1's values were off, by 1e-4: the largest error over all ranks counts.
    assert 1e-6 < rows[1]["errors"]["out"] < 1e-3 and rows[1]["errors"]["dv"] > 1e-6
    table = make_table("errors", rows)
    assert table.count("WRONG NaN") == 1 and table.count("WRONG") == 2
    assert "- not_a_number, 2 ranks, self: out NaN" in table
    result = {
        "errors": [row | {"side": "ours ring"} for row in rows[:3]],
        "bytes": [],
        "times": [],
        "best": [],
    }
    (claim,) = claims(result)
    assert claim["held"] is False and claim["value"] is None


@pytest.mark.prove
def test_the_best_ring_is_right_on_four_ranks():
    each = task("errors", "best case ring")
    assert run(4, each)[0]["right"]


@pytest.mark.prove
def test_bytes_of_known_exchanges_are_counted_exactly():
    options = {"dtype": "float32", "batch": 1}
    share = 4 * 4 * 8 * torch.float32.itemsize  # [1, 12 / 3, 4, 8]
    gathered, hidden = run(3, task("bytes", "right", **options), task("bytes", "hidden", **options))
    assert gathered["q_bytes"] == hidden["q_bytes"] == share
    assert (gathered["collectives"], gathered["sends"]) == (4, 0)
    assert gathered["sent_bytes"] == 4 * 2 * share and gathered["sent_in_q"] == 8
    # q, all of k and v, the output and a log-sum-exp of one fp32 number a head and row.
    lse = 4 * 4 * torch.float32.itemsize
    assert gathered["kept_bytes"] == pytest.approx(2 * share + 2 * 3 * share + lse, abs=16)
    assert (hidden["collectives"], hidden["sends"], hidden["sent_bytes"]) == (0, 1, share)
    assert hidden["kept_bytes"] == 0


def test_the_table_of_sides_is_whole():
    for side in SIDES.values():
        assert side.beside is None or is_ours(side.beside)
    for peer, *needs in INSTALLS.values():
        assert "==" in peer and "torch" not in needs
    assert {name for name in INSTALLS if name not in {side.package for side in SIDES.values()}} == set()


def test_a_problem_is_put_only_to_an_interface_that_has_it():
    options = attention.parse(["--device", "cpu"])
    refused = {case.name: SIDES["diffusers ring"].refusal(case, 2) for case in CASES}
    assert {name for name, why in refused.items() if why} == {"causal", "grouped heads", "key mask"}
    assert refused["key mask"] == "its interface has no key mask"
    large = dataclasses.replace(CASES[0], queries=32768, keys=32768)
    assert SIDES["torch context_parallel"].refusal(large, 2) == "it would hold 52 GB of scores"
    assert SIDES["torch ring"].refusal(large, 2) is None
    timed = {name: [p.name for p in problems("times", side, options)] for name, side in SIDES.items()}
    assert timed["torch ring"] == ["full", "causal"] and timed["ours ring zigzag"] == ["causal"]
    causal = dataclasses.replace(CASES[0], causal=True)
    tasks = [make_task("times", SIDES["torch ring"], problem, 3) for problem in (CASES[0], causal)]
    assert [task["sides"][0] for task in tasks] == ["ours ring", "ours ring zigzag"]
    assert not timed["ours ring"] and not timed["best case ring"]
    best = [p.name for p in problems("best", SIDES["best case ring"], options)]
    assert best == ["2048 tokens", "256 tokens", "64 tokens"]


def row_of(side, *, ranks=4, name="full", **figures):
    counts = {"collectives": 0, "sends": 9, "barriers": 0}
    problem = SMALL | {"name": name, "dtype": figures.pop("dtype", "float32"), "batch": 1}
    return {"side": side, "ranks": ranks, "problem": problem, "status": "done", **counts, **figures}


def times_of(side, turns, name="full"):
    return row_of(side, name=name, beside="ours ring", ratio=ratios(turns, [1.0] * len(turns)))


@pytest.mark.parametrize(
    ("part", "rows", "held"),
    [
        ("bytes", [("ours ring", 18.0, "float32"), ("ours ring", 24.0, "bfloat16")], [True, True]),
        ("bytes", [("ours ring", 20.0, "float32"), ("ours ring", 24.0, "bfloat16")], [False, True]),
        ("times", [("diffusers ulysses", [1.1, 1.3, 1.4])], [True]),
        ("times", [("diffusers ulysses", [1.1, 1.19, 1.4])], [False]),
        ("times", [("yunchang ring", [0.8, 0.9, 1.2])], [True]),  # within the spread
        ("times", [("yunchang ring", [0.7, 0.8, 0.9])], [False]),
        ("times", [("ours ring zigzag", [0.7, 0.8, 0.9], "causal")], [True]),
        ("times", [("ours ring zigzag", [0.8, 0.9, 0.95], "causal")], [False]),
        ("best", [("best case ring", [0.94, 0.96, 0.97])], [True]),
        ("best", [("best case ring", [0.8, 0.9, 1.0])], [False]),
    ],
)
def test_claims(part, rows, held):
    if part == "bytes":
        made = [row_of(side, dtype=dtype, sent_in_q=sent) for side, sent, dtype in rows]
    else:
        made = [times_of(*row) for row in rows]
    result = {"errors": [], "bytes": [], "times": [], "best": []} | {part: made}
    assert [claim["held"] for claim in claims(result)] == held


@pytest.mark.prove
def test_the_command_end_to_end_with_a_peer_that_is_not_there(tmp_path, capsys):
    paths = [f"--{kind}={tmp_path}/result.{end}" for kind, end in (("output", "json"), ("markdown", "md"))]
    paths += [f"--picture={tmp_path}/result.png", "--environments", str(tmp_path)]
    sides = ["--only", "ulysses", "--ranks", "2", "--device", "cpu"]
    assert main(["--part", "bytes", "--quick", *sides, *paths]) == 0
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    done = {row["side"]: row["collectives"] for row in result["bytes"] if row["status"] == "done"}
    assert (
        done == {"ours ulysses": 4, "best case ulysses": 4, "diffusers ulysses": 8} and not result["errors"]
    )
    assert [claim["held"] for claim in result["claims"]] == [True, True]
    skipped = [row for row in result["bytes"] if row["side"] == "deepspeed ulysses"]
    assert {row["status"] for row in skipped} == {"skipped"} and "--install-peers" in skipped[0]["reason"]
    assert str(tmp_path) not in json.dumps(result)
    assert (
        "any row again: python tools/bench/attention.py --part bytes" in (tmp_path / "result.md").read_text()
    )
    printed = capsys.readouterr().out
    assert (
        "Claims" in printed and "deepspeed ulysses skipped (counted on 2): it has no environment" in printed
    )
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.prove
def test_everything_runs_quickly(tmp_path):
    assert (
        main(["--quick", "--ranks", "2", "--device", "cpu", "--output", str(tmp_path / "result.json")]) == 0
    )
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert all(result[part] for part in attention.PARTS)
    for row in result["times"] + result["best"]:
        assert row["status"] != "done" or len(row["ratio"]["rounds"]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "nobody"], "--only 'nobody' is in no side's name; they are ours ulysses"),
        (["--ranks", "1"], "must be at least 2: one rank has nobody to send to; got 1"),
    ],
)
def test_options_that_cannot_be(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "cpu", *options])
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_failure_keeps_its_reason():
    row = row_of("right") | {"status": "raises", "reason": "ValueError: 2 is not 3"}
    table = make_table("errors", [row, row | {"ranks": 3, "reason": "ValueError: 3 is not 4"}])
    assert (
        "- right raises (full on 4, full on 3): ValueError: 2 is not 3" in table and "3 is not 4" not in table
    )
