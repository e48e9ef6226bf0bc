"""The benchmark's results and bytes are checked; its times are not, because this machine is shared."""

import json

import pytest
from compressed import CASES, main


@pytest.mark.prove
def test_every_case_sends_the_bytes_of_theory(tmp_path, capsys):
    path = tmp_path / "result.json"
    assert main(["--quick", "--device", "cpu", "--output", str(path)]) == 0
    report = json.loads(path.read_text())
    unpacked, sent = report["results"][:2], report["results"][2:]
    assert [row["case"] for row in unpacked] == ["unpack int8", "unpack fp8"]
    assert [row["case"] for row in sent] == list(CASES)
    assert all(row["bytes_match"] for row in sent)
    # Times of the kernel are those of a GPU.
    held = {claim["claim"].partition(":")[0]: claim["held"] for claim in report["claims"]}
    assert held == {"unpack": None, "cases that send other bytes than theory": True}
    assert "SIMULATED: transfers alone" in capsys.readouterr().out


def test_ranks_that_are_no_nodes_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "cpu", "--ranks", "3"])
    assert "several nodes of 2" in capsys.readouterr().err
