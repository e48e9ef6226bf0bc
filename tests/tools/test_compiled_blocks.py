"""What Inductor writes for blocks on a GPU that is not here: one pass where eager torch takes many, and no spills."""

import re
import subprocess
import sys

import pytest

from tests.with_triton import ROOT, environment, needs_triton

# Units that a forward moves at most, by model: a unit is the block's input, once read or written.
MOST = {
    "wan2.1-14b": 25,
    "hunyuan-video": 35,
    "ltx-video": 31,
    "ltx-2": 42,
    "cogvideox-5b": 27,
    "minimax-h3": 28,
}


@pytest.mark.prove
@pytest.mark.parametrize("name", MOST)
def test_a_compiled_block_moves_a_part_of_what_eager_torch_moves(name, tmp_path):
    needs_triton()
    found = subprocess.run(
        [sys.executable, "tools/compiled_blocks.py", "--only", name, "--code", tmp_path / "code"],
        env=environment(tmp_path),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    rows = re.findall(
        r"^\| \S+ \| (\w+) \| (forward|backward) \| ([\d.]+) \| ([\d.]+) \| (\d+) \| (\d+) \|$",
        found.stdout,
        re.M,
    )
    assert len(rows) == (4 if name == "hunyuan-video" else 2)
    for block, direction, eager, compiled, num_kernels, spilled in rows:
        assert float(compiled) < 0.6 * float(eager) and int(num_kernels) > 5 and int(spilled) == 0
        assert direction == "backward" or float(compiled) <= MOST[name]
        (code,) = (tmp_path / "code").glob(f"{name}_{block}_{direction}_*.py")
        # By what it says of itself: kernels and products, and attention that it left alone.
        text = code.read_text(encoding="utf-8")
        assert "triton" in text and "extern_kernels" in text and "compiled_blocks.attention" in text
