"""The scripts that reproduce faults of other libraries show them, as docs/peers.md says.

Where one of these fails, the library may have been mended: then docs/peers.md wants a new line.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import PROVE

# `make prove` puts peers there that nothing else needs.
APART = Path(sys.prefix) / "peers"
FOLDER = Path(__file__).resolve().parents[2] / "tools/repro"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
# Of the peers that `make prove` installs apart, where they can be had.
PACKAGES = {
    "ring_attention_pytorch_ring.py": "ring_attention_pytorch",
    "yunchang_ring_pytorch.py": "yunchang",
}
SHOWS, MENDED, NOT_INSTALLED = 0, 1, 2


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_report_is_ready_to_be_sent(name):
    """It says to whom, with which versions, what was expected and found, and names the script."""
    text = (FOLDER / "reports" / name).with_suffix(".md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[0].startswith("# ") and re.match(r"To: [\w.-]+/[\w.-]+\. Seen with ", lines[2])
    assert f"`python {name}" in text and "torch 2." in text


def test_every_report_has_a_script():
    assert {path.stem for path in (FOLDER / "reports").iterdir()} == {
        name.removesuffix(".py") for name in SCRIPTS
    }


def run(name: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of a script that finds nothing of this repository."""
    environment = os.environ | {"PYTHONPATH": str(APART)}
    command = [sys.executable, str(FOLDER / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in (SHOWS, MENDED, NOT_INSTALLED), done.stderr
    assert "Traceback" not in done.stderr, done.stderr  # which has a status of 1, too
    return done.returncode, done.stdout


def largest_error(output: str) -> float:
    return max(float(error) for error in re.findall(r"error ([0-9.e+-]*[0-9]|inf)", output))


@PROVE
@pytest.mark.parametrize("name", SCRIPTS)
def test_fault_shows(name):
    status, output = run(name)
    assert status != NOT_INSTALLED or not (APART / PACKAGES.get(name, "-")).is_dir(), output
    if status == NOT_INSTALLED:
        pytest.skip(output.strip())
    assert status == SHOWS, output
    assert largest_error(output) > 0.1, output
    assert "expected" in output and "found" in output


@PROVE
def test_ring_of_two_ranks_counts_as_right():
    """diffusers' ring is right there: the script says so by its status."""
    pytest.importorskip("diffusers")
    status, output = run("diffusers_ring.py", "2")
    assert status == MENDED, output
    assert largest_error(output) < 1e-9, output


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_stands_alone(name):
    """It is short, and needs nothing of this repository."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert not re.search(r"^\s*(from|import) (opensora_accel|shardformer|tests|tools)\b", text, re.MULTILINE)
