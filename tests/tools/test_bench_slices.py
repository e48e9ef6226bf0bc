"""What the benchmark of masks as slices counts is right; its times are not tested, because this machine is shared."""

import json

import pytest
import slices
import torch
from slices import claims_of_times, claims_of_work, count_work, main, zigzag

from opensora_accel.attention.balance import positions
from opensora_accel.attention.slices import AttentionSlices, deal


def test_work_and_bytes_of_a_mask_known_by_hand():
    """Causal, 8 tokens on 2 ranks: 18 pairs each when dealt out, 10 and 26 in order."""
    row = count_work("causal", AttentionSlices.causal(8), 2, 2)
    assert (row["dealt"], row["zigzag"], row["in_order"]) == (1, 1, 26 / 18)
    # Rank 0 has tokens 0 1 6 7 and rank 1 has 2 3 4 5: rank 0 sends 2 of 4 and receives 4 of 4.
    assert row["busiest"] == row["all"] == (2 + 4) / 8
    assert row["runs"] == 2 and row["slices"] == 1


def test_bytes_are_those_of_a_dense_mask():
    mask = AttentionSlices.packed([9, 2, 14, 6])
    shares, seen = deal(mask, 3), mask.dense()
    held = [shares.positions(rank) for rank in range(3)]
    needs = torch.tensor([[int(seen[a][:, b].any(0).sum()) for b in held] for a in held])
    needs.fill_diagonal_(0)
    row = count_work("packed", mask, 3, 2)
    tokens = needs.sum(0) + needs.sum(1)  # sent and received
    assert row["busiest"] == pytest.approx(int(tokens.max()) / (2 * 2 * 31 / 3))
    assert row["all"] == pytest.approx(int(tokens.sum()) / (2 * 2 * 31))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_its_zigzag_is_the_rings(num_ranks):
    total = 4 * num_ranks
    found = zigzag(AttentionSlices.causal(total), num_ranks)
    for rank in range(num_ranks):
        assert torch.equal(found.positions(rank), positions(total, num_ranks, rank, "zigzag"))


def work_row(**figures):
    row = {"mask": "1000 clips", "ranks": 64, "dealt": 1.02, "busiest": 0.3, "solver_ms": {"median": 20.0}}
    return row | figures


def time_row(side, **figures):
    return {"case": "packed", "ranks": 2, "side": side} | {
        name: {"median": at} for name, at in figures.items()
    }


def test_claims():
    for figures, held in [
        ({}, [True, True, True]),
        ({"dealt": 1.06}, [False, True, True]),
        ({"busiest": 1.01}, [True, False, True]),
        ({"solver_ms": {"median": 51.0}}, [True, True, False]),
    ]:
        assert [claim["held"] for claim in claims_of_work([work_row(**figures)], is_timed=True)] == held
    for row, held in [
        (time_row("slices, dealt", over_area=1.15, busy_over_area=1.16), [True, False]),
        (time_row("slices, dealt", over_area=1.16, busy_over_area=1.15), [False, True]),
        (time_row("8 calls, ring", over_slices=1.0), [True]),
        (time_row("padded, Ulysses", over_slices=0.99), [False]),
        (time_row("dense mask", over_slices=1.5), [True]),
        (time_row("slices, in order", over_slices=0.5, over_area=2.0), []),
        (time_row("all pairs", over_slices=0.5), []),
    ]:
        assert [claim["held"] for claim in claims_of_times([row], is_timed=True)] == held
        assert [claim["held"] for claim in claims_of_times([row], is_timed=False)] == [None] * len(held)


@pytest.mark.prove
def test_the_command_end_to_end(tmp_path):
    paths = [f"--{kind}={tmp_path}/result.{end}" for kind, end in (("output", "json"), ("markdown", "md"))]
    assert main(["--quick", "--device", "cpu", *paths]) == 0
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert len(result["work"]) == len(slices.masks()) * 3
    sides = {name: [row["side"] for row in result["times"] if row["case"] == name] for name in slices.CASES}
    assert [len(of_case) for of_case in sides.values()] == [7, 3, 3]
    # What is counted holds also in a quick run; its times say nothing.
    assert {claim["held"] for claim in result["claims"]} == {None, True}
    assert "DOES NOT HOLD" not in (tmp_path / "result.md").read_text(encoding="utf-8")


@pytest.mark.prove
def test_a_side_that_attends_to_something_else_is_found(monkeypatch):
    """Run in this process, as a world of one rank."""
    world = slices.World(0, 1, torch.device("cpu"), None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(slices.World, "largest", lambda self, values: values)
    task = {"case": "block causal, alone", "tokens": 42, "rounds": 2}
    assert len(slices.run_task(world, task)) == 3
    whole = AttentionSlices.dense
    for wrong in (lambda mask: whole(mask).roll(2, 1), lambda mask: whole(mask).fill_(True)):
        monkeypatch.setattr(AttentionSlices, "dense", wrong)
        with pytest.raises(ValueError, match="dense mask differs from slices, dealt"):
            slices.run_task(world, task)


def test_what_cannot_be_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "cpu", "--only", "nothing"])
    assert "is in no name; they are 12 clips" in " ".join(capsys.readouterr().err.split())
