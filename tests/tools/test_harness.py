"""The harness survives what a peer may do, says which claims hold, and writes what it measured."""

import dataclasses
import json
import math

import harness
import pytest
import ranks
from harness import Report, make_claim, make_parser, make_table, parse_options, ratios, spread, take_turns
from peers.side import Problem
from ranks import Job, run_tasks

MISBEHAVING = "tests.tools.misbehaving"
SMALL = dataclasses.asdict(Problem("small", queries=12, keys=12, heads=4, kv_heads=4, head_dim=8))


def task(part, side, **changes):
    return {"label": side, "part": part, "sides": [side], "problem": SMALL | changes, "rounds": 2}


@pytest.mark.prove
def test_what_raises_aborts_or_hangs_is_reported_and_the_rest_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)
    names = ["raises", "right", "aborts", "right", "hangs", "right"]
    found = run_tasks(Job(MISBEHAVING, 2, limit_s=3.0), [task("errors", name) for name in names])
    assert [outcome.status for outcome in found] == ["raises", "done", "aborts", "done", "hangs", "done"]
    assert found[0].reason == "ValueError: rank 1 has had enough"
    assert found[2].reason.startswith("SIGABRT") and "3 s" in found[4].reason
    assert found[1].found["right"]
    assert capsys.readouterr().err.startswith("2 ranks: raises\n")


def test_ranks_that_cannot_start_are_reported():
    (found,) = run_tasks(Job("no_such_script", 2), [task("errors", "right")])
    assert (found.status, found.reason) == (
        "raises",
        "ModuleNotFoundError: No module named 'no_such_script'",
    )


def test_sides_take_turns_in_an_order_that_changes():
    order = []

    def turn(name):
        order.append(name)
        return None if name == "c" and len(order) > 12 else float(len(order))

    turns = {name: lambda name=name: turn(name) for name in "abc"}
    times = take_turns(turns, 3)
    assert order[6:] == list("abcbcacab"), "two rounds of warm-up, then each begins once"
    assert times["a"] == [7.0, 12.0, 14.0] and times["c"] == [9.0, 11.0]  # a turn without a time is left out
    assert ratios([2, 4, 9], [1, 2, 3])["median"] == 2


def test_a_claim_holds_or_not_or_was_not_measured():
    values = {1.0: True, 1.1: False, None: None, math.nan: False}
    for value, held in values.items():
        assert make_claim("speed", value, "at most", 1.02)["held"] is held
    for comparison, value, held in [
        ("at least", 1.0, True),
        ("above", 1.0, False),
        ("exactly", 1.0, True),
        ("exactly", 1.01, False),
        ("1, to within", 1.5, False),
    ]:
        threshold = 0.1 if comparison == "1, to within" else 1.0
        assert make_claim("speed", value, comparison, threshold)["held"] is held


def test_a_report_is_written_and_read_again_without_paths_of_this_machine(tmp_path, capsys):
    given = ["--device", "cpu", "--output", str(tmp_path / "deep" / "r.json"), f"--markdown={tmp_path}/r.md"]
    options = parse_options(make_parser("x", "", 3), given, {})
    report = Report(options, backend="gloo")
    report.result |= {"rows": [{"rounds": [1.0, 2.5e-3]}], "claims": [make_claim("speed", 3.0, "at most", 1)]}
    columns = {"side": "side", "ms": "ms", "peak": "at.peak_bytes", "held": "held"}
    rows = [
        {"side": "ours", "ms": spread([1, 2, 3]), "at": {"peak_bytes": 2**21}, "held": True},
        {"side": "b"},
    ]
    report.show(make_table("Times", columns, rows, ["a note"]))
    report.finish()
    text = (tmp_path / "deep" / "r.json").read_text(encoding="utf-8")
    result = json.loads(text)
    assert result == report.result and "[ 1.0, 0.0025 ]" in text and str(tmp_path) not in text
    assert {"hardware", "versions", "load_average_at_start", "date", "backend"} < set(result)
    assert result["command"] == "python tools/bench/x.py --device cpu --output r.json --markdown=r.md"
    shown = (tmp_path / "r.md").read_text(encoding="utf-8")
    lines = [" ".join(line.split()) for line in shown.splitlines()]  # without what pads the cells
    assert {
        "| ours | 2 [1.5, 2.5] | 2.00 | yes |",
        "| b | – | – | – |",
        "- a note",
        "| DOES NOT HOLD | 3 | at most | 1 | speed |",
    } < set(lines)
    assert "| side | ms           | peak | held |" in shown, "as wide as its widest cell"
    assert "DOES NOT HOLD" in capsys.readouterr().out


def test_a_quick_run_changes_only_what_was_left_out():
    def parse(*given):
        parser = make_parser("x", "", 3)
        parser.add_argument("--tokens", type=int)
        usual = {"quick": {"rounds": 2}, "cpu": {"tokens": 8}, "cuda": {"tokens": 80}}
        return parse_options(parser, ["--device", "cpu", *given], usual)

    assert (parse().rounds, parse().tokens) == (3, 8)
    assert (parse("--quick").rounds, parse("--quick", "--rounds", "7").rounds) == (2, 7)
    assert parse("--quick", "--rounds", "3").rounds == 3, "the usual value, but given"
    assert parse("--tokens", "9").tokens == 9


@pytest.mark.parametrize(
    "script",
    [
        "attention",
        "blockwise",
        "collectives",
        "longest",
        "norms",
        "offload",
        "scaling",
        "slices",
        "techniques",
    ],
)
def test_help_teaches_and_bad_options_are_refused(script, capsys, monkeypatch):
    import importlib
    import sys

    main = importlib.import_module(script).main
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "Claim" in shown and f"python tools/bench/{script}.py --" in shown
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = {
        "--rounds": ("1", "--rounds must be at least 2"),
        "--picture": ("p.png", "pip install matplotlib"),
    }
    if not harness.torch.cuda.is_available():
        refused["--device"] = ("cuda", "--device cuda needs")
    for option, (value, message) in refused.items():
        with pytest.raises(SystemExit, match="2"):
            main(["--device", "cpu", option, value])
        assert message in " ".join(capsys.readouterr().err.split())
