"""The guide's model and policy, as its reader would run them."""

import re
import subprocess
import sys
from pathlib import Path

from shardformer import modeling
from shardformer.policy import UNSUPPORTED, base, counts, frames, grids
from tests.tiers import PROVE

GUIDE = Path(__file__).resolve().parents[2] / "docs/policies.md"


def code():
    (block,) = re.findall(r"```python\n(import torch\n.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    return block


def run(source, tmp_path):
    script = tmp_path / "my_model.py"
    script.write_text(source, encoding="utf-8")
    return subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=240, check=True
    ).stdout


@PROVE
def test_the_policy_from_nothing_is_proven_and_short(tmp_path):
    """Model, table and proof; the table alone is eight lines."""
    lines = [line for line in code().splitlines() if line.strip()]
    assert len(lines) < 60
    assert "the gradients are those of a single device" in run(code(), tmp_path)


@PROVE
def test_a_wrong_table_is_found(tmp_path):
    """Blocks that are not told to attend to all see their own tokens."""
    wrong = code().replace('    self_attention=("blocks.*.attention",),\n', "")
    found = run(wrong, tmp_path)
    assert wrong != code() and "the gradients are NOT those of a single device" in found


def test_the_guide_names_what_there_is():
    text = GUIDE.read_text(encoding="utf-8")
    for word in re.findall(r"`(\w+)\(", text):
        known = hasattr(base, word) or word in ("Plan", "shard", "unshard", "fully_shard")
        assert known or word[0].islower(), word
    functions = re.findall(r"`((?:split|gather|spread|count|read|add)_\w+)(?:`|\()", text)
    assert len(functions) > 8
    for word in functions:
        assert any(hasattr(module, word) for module in (counts, frames, grids, modeling)), word
    assert UNSUPPORTED
