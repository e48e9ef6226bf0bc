"""The scaling benchmark's counts, fits and labels are checked; its times are not, because this machine is shared."""

import dataclasses
import json

import pytest
from plan_step import QUICK, Sizes, count_simulated
from scaling import main, strategies, world_sizes
from scaling_fit import Link, Point, fit_link, serial_share, simulated_time

from opensora_accel import Plan

NAMES = {field.name for field in dataclasses.fields(Sizes)}
SMALL = Sizes(**{name: value for name, value in QUICK.items() if name in NAMES})


def strong(ranks, share, network=0.0, waited=0.0):
    """By Amdahl, with what ranks wait for on top."""
    computed = share + (1 - share) / ranks
    return Point(ranks, ranks, 1.0, computed / (1 - network - waited), network, waited)


def weak(ranks, share, network=0.0):
    """By Gustafson, with more than as much work."""
    work = ranks**1.5
    return Point(ranks, ranks, work, work / (share + (1 - share) * ranks) / (1 - network), network)


@pytest.mark.parametrize("share", [0.0, 0.07, 0.6])
def test_the_fit_finds_the_serial_share(share):
    assert serial_share("strong", [strong(ranks, share) for ranks in (2, 4, 8)]) == pytest.approx(share)
    assert serial_share("weak", [weak(ranks, share) for ranks in (2, 4, 8)]) == pytest.approx(share)
    # What ranks wait for is no part of what is serial, unless it is left in.
    points = [strong(ranks, share, network=0.2, waited=0.05) for ranks in (2, 4)]
    assert serial_share("strong", [each.without_communication() for each in points]) == pytest.approx(share)
    assert serial_share("strong", points) > share + 0.1
    alone = [weak(4, share, network=0.3).without_communication()]
    assert serial_share("weak", alone) == pytest.approx(share)


def test_ranks_that_share_cores_are_held_against_the_cores():
    # Four ranks on two cores, as fast as two: nothing is serial.
    assert serial_share("strong", [Point(4, 2, 1.0, 0.5)]) == pytest.approx(0)
    assert serial_share("weak", [Point(4, 2, 4.0, 2.0)]) == pytest.approx(0)
    assert serial_share("strong", [Point(4, 1, 1.0, 1.3)]) is None


def test_the_fit_finds_the_link():
    link = Link(20e-6, 3e9)
    transfers = [(calls, size, link.seconds(calls, size)) for calls, size in ((16, 1e6), (40, 1e6), (9, 5e7))]
    found = fit_link(transfers)
    assert found.latency_s == pytest.approx(20e-6) and found.bytes_per_s == pytest.approx(3e9)
    # From calls and bytes that are in proportion, and where bytes alone explain more than all.
    assert fit_link([(1, 1e6, 1e-3), (2, 2e6, 2e-3)]) == Link(0.0, pytest.approx(1e9))
    assert fit_link([(10, 1e6, 1e-3), (20, 4e6, 4.2e-3)]).latency_s == 0.0
    assert fit_link([(10, 4e6, 1e-3), (20, 1e6, 2e-3)]).bytes_per_s > 1e15
    assert fit_link([]) is None and fit_link([(0, 0, 0.0)]) is None


def test_what_was_fitted_gives_the_times_that_it_was_fitted_to():
    for ranks in (2, 16):
        point = strong(ranks, 0.1, waited=0.2)
        assert simulated_time("strong", point, 5.0, 0.1, 0.0) == pytest.approx(5.0 * point.time)
        grown = weak(ranks, 0.1)
        assert simulated_time("weak", grown, 5.0, 0.1, 0.25) == pytest.approx(5.0 * grown.time + 0.25)


def test_what_is_counted_without_ranks_is_what_theory_says():
    share = SMALL.tokens // 2 * SMALL.heads * SMALL.head_dim * 4
    axes = count_simulated(Plan(ulysses=2, dp_replicate=2), SMALL)["by_axis"]
    # q, k and v out and one back, and their gradients: half of each leaves.
    assert axes["all-to-all over ulysses"]["sent_bytes"] == SMALL.layers * 8 * share // 2
    # Of all gradients each of four ranks sends 2 · 3/4. DDP also broadcasts the model's buffers.
    num_parameters = sum(parameter.numel() for parameter in SMALL.build().parameters())
    (reduced,) = [axis for name, axis in axes.items() if name.startswith("all-reduce over mixed")]
    assert reduced["sent_bytes"] == 1.5 * 4 * num_parameters


@pytest.mark.prove
def test_what_a_ring_and_data_ranks_count_is_what_theory_says():
    share = SMALL.tokens // 2 * SMALL.heads * SMALL.head_dim * 4
    ring = count_simulated(Plan(ring=2), SMALL)["by_axis"]
    # Keys and values forward and again in backward, and then their gradients.
    assert ring["send over ring"]["sent_bytes"] == SMALL.layers * 6 * share
    data = count_simulated(Plan(dp_replicate=2), SMALL)
    assert data["rank_flops"] == count_simulated(Plan(), SMALL)["rank_flops"]


def test_every_strategy_has_a_plan_of_as_many_ranks():
    assert world_sizes(1) == [1] and world_sizes(6) == [1, 2, 4, 6]
    for ranks in (1, 2, 4, 6):
        plans = strategies("weak", ranks)
        assert all(plan.world_size == ranks for plan in plans.values())
        assert list(strategies("strong", ranks).items()) == [
            (name, plan) for name, plan in plans.items() if plan.data == 1
        ]


@pytest.mark.prove
@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_a_short_run_has_its_rows_and_labels_what_is_simulated(tmp_path, mode, capsys):
    paths = [
        "--output",
        f"{tmp_path}/s.json",
        "--markdown",
        f"{tmp_path}/s.md",
        "--picture",
        f"{tmp_path}/s.png",
    ]
    assert main(["--device", "cpu", "--quick", f"--{mode}", *paths]) == 0
    result = json.loads((tmp_path / "s.json").read_text())
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    found = result[mode]
    expected = {"one rank": 1, "ulysses": 2, "ring": 2}
    if mode == "weak":
        expected |= {"data parallel": 2, "data parallel, sharded": 2}
    assert {row["strategy"]: row["ranks"] for row in found["rows"]} == expected
    for row in found["rows"]:
        assert row["by_axis"] == row["seen"]["by_axis"]
        assert row["seen"]["peak_bytes"] > 0 and len(row["step_ms"]["rounds"]) == 2
        assert 0 <= row["seen"]["exposed_share"] < 1 <= row["seen"]["imbalance"]
        assert 0 < row["useful"] <= 1.01
    assert set(expected) - {"one rank"} == {limit["strategy"] for limit in found["limits"]}
    assert found["simulated"] and all(
        (row["label"], row["ranks"]) == ("SIMULATED", 4) for row in found["simulated"]
    )
    table = (tmp_path / "s.md").read_text().split("beyond this machine, SIMULATED")[1]
    assert table.count("| SIMULATED |") == len(found["simulated"])
    assert all(claim["held"] for claim in result["claims"] if claim["comparison"] == "exactly")
