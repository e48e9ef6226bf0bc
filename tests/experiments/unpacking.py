"""The kernel that unpacks compressed weights beside the operations that it stands for.

`test_compressed.py` runs this file in a process of its own: in Triton's interpreter, and compiled for GPUs that are not
here. On a machine with a GPU, `make gpu` runs it there.
"""

import math
import os

import pytest
import torch

from opensora_accel.experiments.compressed import BLOCK, WIRE_DTYPES, CompressedShards
from tests.tiers import NEEDS_GPU
from tests.with_triton import interpreter_that_rounds  # noqa: F401  (a fixture)

pytest.importorskip("triton")
from opensora_accel.experiments.unpack_kernel import unpack_blocks

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
RUNS = [] if IS_INTERPRETED else NEEDS_GPU
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def runs(test):
    for mark in RUNS:
        test = mark(test)
    return test


@runs
def test_every_number_of_fp8_is_read_by_its_bits():
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).view(1, 256)
    output = torch.empty(1, 256, device=DEVICE)
    starts, sizes = torch.tensor([0, BLOCK], device=DEVICE), torch.full((2,), BLOCK, device=DEVICE)
    unpack_blocks(output, numbers, torch.ones(1, 2, device=DEVICE), starts, sizes)
    assert torch.equal(output.isnan(), numbers.float().isnan()) and output.isnan().sum() == 2
    assert torch.equal(output.nan_to_num(), numbers.float().nan_to_num())
    assert output[0, 0x80] == 0 and output[0, 0x80].signbit()


@runs
@pytest.mark.parametrize("wire", WIRE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "numels", [[130, 3, 0, 128, 1, 700, 5, 5000], [144, 16, 0, 128, 32, 704, 48, 5008]], ids=["odd", "whole"]
)
def test_messages_come_out_bit_for_bit(wire, dtype, numels):
    shards = CompressedShards(
        numels, [False, True, False, False, True, False, True, False], dtype, WIRE_DTYPES[wire]
    )
    of_ranks = torch.randn(3, sum(numels), generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    of_ranks[1, 0], of_ranks[2, numels[0] + 1] = (
        math.nan,
        math.nan,
    )  # in a block, and in what travels as it is
    messages = torch.stack([shards.pack(of_rank) for of_rank in of_ranks])
    found, expected = (torch.full_like(of_ranks, 77.0) for _ in range(2))
    shards.unpack_by_operations(messages, expected)
    shards.unpack_by_kernel(messages, found)
    assert expected.isnan().sum() == BLOCK + 1
    assert torch.equal(found.nan_to_num(88.0), expected.nan_to_num(88.0))


@runs
def test_nothing_to_unpack():
    scales, blocks = torch.empty(2, 0, device=DEVICE), torch.empty(2, 0, dtype=torch.int8, device=DEVICE)
    output = torch.ones(2, 3, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    unpack_blocks(output, blocks, scales, none, none)
    assert torch.equal(output, torch.ones(2, 3, device=DEVICE))


@pytest.mark.skipif(IS_INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("wire", WIRE_DTYPES)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_it_compiles_for_gpus_without_spilling(arch, wire):
    """Also fp8 for an A100, which has none. Weights of linear layers are written 16 bytes at once."""
    from tools.kernel_costs import compiled_for, disassembled

    shards = CompressedShards([64 * BLOCK], [False], torch.bfloat16, WIRE_DTYPES[wire])
    messages = shards.pack(torch.ones(64 * BLOCK, dtype=torch.bfloat16)).repeat(2, 1)
    with compiled_for(arch) as launches:
        shards.unpack_by_kernel(messages, torch.empty(2, 64 * BLOCK, dtype=torch.bfloat16))
    ((_, binary),) = launches  # one pass
    usage, instructions = disassembled(binary)
    assert usage["STACK"] + usage["LOCAL"] == 0
    stores = [name for name in map(str, instructions) if "STG" in name]
    assert stores and all("STG.E.128" in name for name in stores), stores
