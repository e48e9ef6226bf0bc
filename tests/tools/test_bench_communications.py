"""The benchmark's results and bytes are checked; its times are not, because this machine is shared."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "tools" / "bench_communications.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bytes_on_the_wire_are_those_of_theory(tmp_path, num_ranks):
    out = tmp_path / "result.json"
    done = run("--quick", "--ranks", str(num_ranks), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert {"claim", "claim_holds", "command", "date", "machine", "ranks", "backend", "megabytes"} < set(
        report
    )
    assert {"cpu", "cores", "torch", "python"} < set(report["machine"])
    operations = {re.split("[ ,]", result["case"])[0] for result in report["results"]}
    assert operations == {"all_to_all", "all_to_all_packed", "split", "gather", "ring_exchange"}
    assert sum(result["claimed"] for result in report["results"]) == (6 if num_ranks == 2 else 0)
    for result in report["results"]:
        assert result["results_equal"] and result["bytes_match"]
        assert result["ours_sent_bytes"] == result["plain_sent_bytes"] == result["theory_bytes"] > 0
        assert result["plain_sizes_bytes"] == 0
        assert set(result["times"]) == {"ours", "ours_as_returned", "plain"}
        for times in result["times"].values():
            assert times["runs"] == 3 and times["min_ms"] <= times["median_ms"] <= times["max_ms"]
        assert result["ratio"] == pytest.approx(
            result["times"]["plain"]["median_ms"] / result["times"]["ours"]["median_ms"]
        )
    if num_ranks == 2:  # all-to-all of 1 MB between two ranks: half of it leaves
        assert report["results"][0]["ours_sent_bytes"] == report["results"][0]["input_bytes"] / 2 == 2**19


def test_help_teaches_and_bad_settings_are_refused():
    shown = run("--help")
    assert shown.returncode == 0 and "Claim:" in shown.stdout and "how to read the table" in shown.stdout
    refused = run("--ranks", "1")
    assert refused.returncode == 2 and "must be at least 2" in refused.stderr
