"""The benchmark's results and bytes are checked; its times are not, because this machine is shared."""

import json
import re

import pytest
from collectives import main


@pytest.mark.prove
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_bytes_on_the_wire_are_those_of_theory(tmp_path, num_ranks):
    paths = ["--device", "cpu", "--output", str(tmp_path / "result.json")]
    assert main(["--quick", "--ranks", str(num_ranks), *paths]) == 0
    report = json.loads((tmp_path / "result.json").read_text())
    assert {"claims", "command", "date", "hardware", "ranks", "backend", "megabytes"} < set(report)
    operations = {re.split("[ ,]", result["case"])[0] for result in report["results"]}
    assert operations == {"all_to_all", "all_to_all_packed", "split", "gather", "ring_exchange"}
    assert sum(result["claimed"] for result in report["results"]) == (6 if num_ranks == 2 else 0)
    for result in report["results"]:
        assert result["results_equal"] and result["bytes_match"]
        assert result["ours_sent_bytes"] == result["plain_sent_bytes"] == result["theory_bytes"] > 0
        assert result["plain_sizes_bytes"] == 0
        assert set(result["times_ms"]) == {"ours", "plain"}
        assert all(len(times["rounds"]) == 3 for times in result["times_ms"].values())
    if num_ranks == 2:  # all-to-all of 1 MB between two ranks: half of it leaves
        assert report["results"][0]["ours_sent_bytes"] == report["results"][0]["input_bytes"] / 2 == 2**19
    # The times of a quick run say nothing.
    assert {claim["held"] for claim in report["claims"]} == ({None, True} if num_ranks == 2 else {True})


def test_what_cannot_be_is_refused(capsys):
    for options, message in (
        (["--ranks", "1"], "must be at least 2"),
        (["--only", "no"], "is in no case's name"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["--device", "cpu", *options])
        assert message in capsys.readouterr().err
