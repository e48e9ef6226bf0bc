"""A simulated step is the one worked out by hand, and faster parts never make it slower."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opensora_accel import Plan
from opensora_accel.planner.simulate import HOST, Contention, simulate
from opensora_accel.planner.trace import Operation, Trace

KINDS = {"compute": "gemm", "copy_out": "copy_out", "copy_in": "copy_in"}


def steps(*rows):
    """A trace of operations, each `(stream, seconds, after)`, and the function that gives their seconds."""
    operations = []
    for number, (stream, _seconds, *after) in enumerate(rows):
        kind = KINDS.get(stream, "collective")
        is_collective = kind == "collective"
        operations.append(
            Operation(
                f"operation {number}",
                kind,
                stream,
                after=tuple(after),
                collective="all-gather" if is_collective else "",
                axis="ulysses" if stream == "exchange" else "mixed" if is_collective else "",
            )
        )
    seconds = {operation.name: row[1] for operation, row in zip(operations, rows, strict=True)}
    trace = Trace(Plan(), 0, 1, tuple(operations), (), 0, 0, 0, 0)
    return trace, lambda operation: seconds[operation.name]


def run(*rows, **options):
    return simulate(*steps(*rows), **options)


def times(timeline):
    return [(span.start_s, span.end_s) for span in timeline.spans]


def test_the_example_of_the_text():
    found = run(("compute", 3), ("compute", 2), ("gather", 6, 0), ("compute", 4, 2))
    assert times(found) == [(0, 3), (3, 5), (3, 9), (9, 13)]
    assert found.step_s == 13 and found.busy_s == {"compute": 9, "gather": 6}
    assert found.exposed_s == {"gather": 4} and found.exposed_by_axis == {"mixed": 4}
    assert found.critical_path == {0: 3, 2: 6, 3: 4}
    assert found.critical_s == {"gemm": 7, "all-gather over mixed": 6}


def test_an_exchange_that_compute_waits_for_is_exposed_in_full():
    found = run(("compute", 1), ("exchange", 5, 0), ("compute", 1, 1))
    assert times(found) == [(0, 1), (1, 6), (6, 7)] and found.exposed_by_axis == {"ulysses": 5}


def test_a_gather_under_compute_is_hidden():
    found = run(("compute", 1), ("gather", 3, 0), ("compute", 4), ("compute", 1, 1))
    assert found.step_s == 6 and found.exposed_s == {} and found.critical_s == {"gemm": 6}


def test_what_a_wait_is_for_is_followed_back():
    # The copy in waits for the copy out, which waits for compute; 2 s of the first and 3 s of the other are exposed.
    found = run(("compute", 1), ("copy_out", 4, 0), ("compute", 2), ("copy_in", 3, 1), ("compute", 1, 3))
    assert times(found) == [(0, 1), (1, 5), (1, 3), (5, 8), (8, 9)]
    assert found.exposed_s == {"copy_out": 2, "copy_in": 3}
    assert found.critical_path == {0: 1, 1: 4, 3: 3, 4: 1}


def test_a_step_that_ends_with_a_collective_waits_for_it():
    found = run(("compute", 2), ("reduce", 5, 0))
    assert found.step_s == 7 and found.exposed_s == {"reduce": 5} and found.critical_path == {0: 2, 1: 5}


def test_a_collective_waits_for_the_last_rank():
    """It lasts from when this rank comes, and takes nothing from others while it waits."""
    late = Contention(compute_beside_collective=2.0, late_s=lambda computed_s: computed_s / 4)
    found = run(("compute", 4), ("exchange", 2, 0), ("compute", 8, 1), ("exchange", 2, 2), contention=late)
    assert times(found) == [(0, 4), (4, 7), (7, 15), (15, 19)] and found.exposed_s == {"exchange": 7}
    hidden = run(("compute", 4), ("gather", 2, 0), ("compute", 3), contention=late)
    # 1 s beside one that waits, and 2 s at half the speed.
    assert times(hidden) == [(0, 4), (4, 7), (4, 8)]
    busy = dataclasses.replace(late, compute_beside_waiting=True)
    assert times(run(("compute", 4), ("gather", 2, 0), ("compute", 3), contention=busy))[-1] == (4, 8.5)


def test_the_host_may_take_another_time_for_each():
    seconds = {"operation 0": 1.0, "operation 1": 5.0}
    found = run(("compute", 2), ("compute", 2), launch_s=lambda operation: seconds[operation.name])
    assert times(found) == [(1, 3), (6, 8)] and found.exposed_s == {"host": 4}


def test_one_thing_at_a_time_runs_on_a_stream():
    found = run(("gather", 3), ("gather", 2), ("compute", 1, 0), ("compute", 1, 1))
    assert times(found) == [(0, 3), (3, 5), (3, 4), (5, 6)] and found.exposed == {0: 3, 1: 1}


def test_the_host_launches_in_order_and_may_be_late():
    found = run(("compute", 0.5), ("compute", 0.5), ("compute", 4), ("compute", 1), launch_s=1.0)
    # Launched after 1, 2, 3 and 4 seconds.
    assert times(found) == [(1, 1.5), (2, 2.5), (3, 7), (7, 8)]
    assert found.exposed_s[HOST] == pytest.approx(2.0) and found.let_start_by == (HOST, HOST, HOST, 2)
    assert sum(found.critical_s.values()) == pytest.approx(found.step_s)


def test_operations_share_a_link():
    # 4 s of work each: from 2 to 6 both run at half speed, after that the first has 2 s left.
    rows = (("compute", 2), ("gather", 4), ("copy_in", 2, 0))
    shared = Contention(links=lambda operation: () if operation.stream == "compute" else ("link",))
    assert times(run(*rows)) == [(0, 2), (0, 4), (2, 4)]
    found = run(*rows, contention=shared)
    assert times(found) == [(0, 2), (0, 6), (2, 6)]
    only_one = Contention(links=lambda operation: ("link",) if operation.stream == "gather" else ())
    assert times(run(*rows, contention=only_one)) == times(run(*rows))


def test_compute_runs_slower_beside_a_collective_only():
    beside = Contention(compute_beside_collective=1.5)
    # 3 s beside the gather are 2 s of its work, and 2 s are left.
    assert times(run(("gather", 3), ("compute", 4), contention=beside)) == [(0, 3), (0, 5)]
    assert times(run(("copy_in", 3), ("compute", 4), contention=beside)) == [(0, 3), (0, 4)]


def test_an_empty_step_takes_no_time():
    found = run()
    assert found.step_s == 0 and found.exposed == {} and found.critical_path == {}


def test_operations_may_take_no_time():
    found = run(("compute", 0), ("gather", 0, 0), ("compute", 1, 1))
    assert found.step_s == 1 and found.exposed == {}


def test_wrong_seconds_and_factors_are_refused():
    with pytest.raises(ValueError, match="at least 0; got -1 for operation 0"):
        run(("compute", -1))
    with pytest.raises(ValueError, match="at least 0; got nan"):
        run(("compute", float("nan")))
    with pytest.raises(ValueError, match=r"at least 1 .* got 0\.5"):
        run(("compute", 1), contention=Contention(compute_beside_collective=0.5))


STREAMS = ("compute", "gather", "reduce", "exchange", "ring", "copy_out", "copy_in")


@st.composite
def any_step(draw):
    rows = []
    for number in range(draw(st.integers(1, 12))):
        after = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        rows.append((draw(st.sampled_from(STREAMS)), draw(st.integers(0, 8)), *sorted(after)))
    return rows


@settings(max_examples=60)
@given(any_step(), st.sampled_from(STREAMS), st.integers(0, 1))
def test_more_bandwidth_never_makes_a_step_slower(rows, stream, launch_s):
    faster = [(row[0], row[1] / 2 if row[0] == stream else row[1], *row[2:]) for row in rows]
    assert run(*faster, launch_s=launch_s).step_s <= run(*rows, launch_s=launch_s).step_s


@settings(max_examples=60)
@given(any_step(), st.integers(0, 1))
def test_contention_never_helps_and_nothing_is_lost(rows, launch_s):
    alone = run(*rows, launch_s=launch_s)
    beside = Contention(links=lambda operation: ("link",), compute_beside_collective=1.25)
    together = run(*rows, launch_s=launch_s, contention=beside)
    assert together.step_s >= alone.step_s - 1e-9
    for found in (alone, together):
        assert sum(found.critical_path.values()) == pytest.approx(found.step_s)
        assert all(seconds > 0 for seconds in found.exposed.values())
        # Compute has something to do, or waits.
        parts = found.busy_s.get("compute", 0) + sum(found.exposed.values())
        assert parts == pytest.approx(found.step_s)
        for number, row in enumerate(rows):
            assert all(found.spans[before].end_s <= found.spans[number].start_s for before in row[2:])
            assert found.spans[number].end_s - found.spans[number].start_s >= row[1] - 1e-9
    # Never slower than one thing after the other at the slowest.
    assert (
        together.step_s <= 1.25 * len(STREAMS) * (sum(row[1] for row in rows) + launch_s * len(rows)) + 1e-9
    )
