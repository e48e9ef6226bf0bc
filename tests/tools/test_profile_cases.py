"""Runs that are slow on purpose, and what their report says first."""

import sys

import pytest
from profile_cases import CASES, CONGESTED_STEPS, NUM_STEPS, main


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a socket option of Linux limits links")
@pytest.mark.prove
@pytest.mark.parametrize("name", CASES)
def test_the_report_names_what_was_made_wrong(tmp_path, monkeypatch, capfd, name):
    monkeypatch.setattr(
        sys, "argv", ["profile_cases.py", "--out", str(tmp_path), "--pictures", str(tmp_path), name]
    )
    assert main() == 0, capfd.readouterr().out
    assert "as it should" in capfd.readouterr().out
    (picture,) = tmp_path.glob("case_*.svg")
    assert picture.read_text().startswith("<svg ") and "var(" not in picture.read_text()


def test_an_unknown_case_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["profile_cases.py", "slow disk"])
    with pytest.raises(SystemExit):
        main()
    assert "there is no case 'slow disk'; there are slow data, exposed ring" in capsys.readouterr().err
    assert max(CONGESTED_STEPS) < NUM_STEPS
