"""Sums in bf16 with error feedback, and weights in blocks of int8 or fp8: within their bounds, in bytes of theory."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from opensora_accel.experiments.compressed import (
    BLOCK,
    WIRE_DTYPES,
    CompressedShards,
    RoundedSum,
    dequantize,
    quantize,
)
from opensora_accel.observe import CollectiveRecorder
from tests.tiers import some
from tests.with_triton import run_with_triton

U = 2.0**-8  # bf16 rounds by at most this share
STEPS = 40


def gradients(step, rank, numel, dtype):
    """With a part that is the same in all steps: without feedback its rounding would add up."""
    constant = torch.randn(numel, generator=torch.Generator().manual_seed(99 + rank), dtype=torch.float64)
    noise = torch.randn(
        numel, generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64
    )
    return (constant + 0.1 * noise).to(dtype)


def sums_over_steps(reduction, numel, feedback, dtype):
    """Largest share of the bound that one step, and that all steps together, take; whether ranks have the same bits."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sums = RoundedSum()
    # An all-reduce rounds twice: what ranks send, and the sum.
    num_roundings = 2 if reduction == "all-reduce" else 1
    total = expected_total = 0
    largest, worst_step, same = torch.zeros(numel, dtype=torch.float64), 0.0, True
    own = slice(None)
    if reduction == "reduce-scatter":
        own = slice(rank * numel // num_ranks, (rank + 1) * numel // num_ranks)
    for step in range(STEPS):
        each = torch.stack([gradients(step, other, numel, dtype) for other in range(num_ranks)]).double()
        sent = gradients(step, rank, numel, dtype)
        if reduction == "all-reduce":
            sums.all_reduce_(sent, dist.group.WORLD)
            found = sent
            others = [torch.empty_like(found) for _ in range(num_ranks)]
            dist.all_gather(others, found)
            same = same and all(torch.equal(other, found) for other in others)
        else:
            found = torch.empty(numel // num_ranks, dtype=dtype)
            sums.reduce_scatter(found, sent, dist.group.WORLD)
        if not feedback:
            sums.forget()
        expected, sizes = each.sum(0), each.abs().sum(0)
        largest = torch.maximum(largest, sizes)
        bound = num_roundings * U * (2 + U) / (1 - U) * largest
        worst_step = max(worst_step, ((found - expected[own]).abs() / bound[own]).max().item())
        total, expected_total = total + found.double(), expected_total + expected
    # The second rounding is of a sum that the first has moved: (1 + u)/(1 − u) times as much.
    bound = U / (1 - U) * (1 + (1 + U) / (1 - U) * (num_roundings - 1)) * largest
    # fp32 adds up and subtracts with errors of its own, a unit of 2⁻²⁴ each.
    bound = bound + STEPS * 8 * torch.finfo(dtype).eps * largest
    return worst_step, ((total - expected_total[own]).abs() / bound[own]).max().item(), same


@pytest.mark.parametrize("num_ranks", some([3, 2, 4]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["reduce-scatter", "all-reduce"])
def test_what_rounding_leaves_out_does_not_add_up(ranks, num_ranks, dtype, reduction):
    # An all-reduce takes sizes that the ranks do not divide.
    numel = 12 * 37 if reduction == "reduce-scatter" else 443
    for worst_step, whole_sum, same in ranks(num_ranks, sums_over_steps, reduction, numel, True, dtype):
        assert 0.05 < worst_step <= 1 and 0.01 < whole_sum <= 1 and same
    # The same without feedback: the bound of one step holds, that of all steps does not.
    for worst_step, whole_sum, _same in ranks(num_ranks, sums_over_steps, reduction, numel, False, dtype):
        assert worst_step <= 1 < whole_sum


def bytes_of_sums(numel):
    num_ranks = dist.get_world_size()
    with CollectiveRecorder() as recorder:
        RoundedSum().reduce_scatter(torch.empty(numel), torch.ones(num_ranks * numel), dist.group.WORLD)
        RoundedSum().all_reduce_(torch.ones(numel), dist.group.WORLD)
    return [(call.kind, call.dtype, call.sent_bytes) for call in recorder.calls]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_send_half_of_what_fp32_would(ranks, num_ranks):
    others, numel = num_ranks - 1, 102
    part = 2 * math.ceil(numel / num_ranks) * others
    expected = [
        ("all-to-all", "bfloat16", 2 * numel * others),
        ("all-to-all", "bfloat16", part),
        ("all-gather", "bfloat16", part),
    ]
    assert ranks(num_ranks, bytes_of_sums, numel) == [expected] * num_ranks


def after_a_lost_step():
    sums, found = RoundedSum(), []
    for value in (1 / 3, math.nan, math.inf, 1 / 3):
        tensor = torch.full((5,), value)
        sums.all_reduce_(tensor, dist.group.WORLD)
        found.append(tensor.clone())
    return found


def test_a_step_that_is_not_finite_is_seen_and_spoils_no_other(ranks):
    for first, nan, inf, last in ranks(2, after_a_lost_step):
        assert nan.isnan().all() and not inf.isfinite().any()
        assert torch.equal(first, last)  # nothing was left over from either


def sums_of_bf16():
    tensor = torch.full((5,), 1.5, dtype=torch.bfloat16)
    RoundedSum().all_reduce_(tensor, dist.group.WORLD)
    return tensor.tolist()


def test_what_is_bf16_already_is_summed_too(ranks):
    assert ranks(2, sums_of_bf16) == [[3.0] * 5] * 2


def error_bound(blocks, wire):
    """What `compressed` states, and the rounding of the fp32 scale and product."""
    largest = blocks.abs().amax(1, keepdim=True)
    if wire == "int8":
        bound = (largest / 254).expand_as(blocks)
    else:
        bound = torch.maximum(blocks.abs() / 16, largest / 448 * 2.0**-10)
    return bound + 2.0**-22 * largest + 2.0**-126


@pytest.mark.parametrize("wire", WIRE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_blocks_come_back_within_their_bound(wire, dtype):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(500, BLOCK, generator=generator, dtype=torch.float64)
    # Magnitudes within a block from one to a hundred thousand, and blocks from 1e-30 to 1e30.
    blocks *= 10 ** (5 * torch.rand(500, BLOCK, generator=generator, dtype=torch.float64))
    blocks *= 10 ** torch.linspace(-30, 30, 500, dtype=torch.float64).unsqueeze(1)
    blocks[0], blocks[1] = 0, 1e-42
    blocks = blocks.to(dtype)
    back = dequantize(*quantize(blocks, WIRE_DTYPES[wire]), dtype)
    exact = blocks.double()
    # A result in bf16 is rounded to it once more.
    rounding = 2.0**-8 * back.double().abs() if dtype == torch.bfloat16 else 0
    share = (back.double() - exact).abs() / (error_bound(exact, wire) + rounding)
    assert share.max() <= 1 and torch.equal(back[0], torch.zeros(BLOCK, dtype=dtype))
    if dtype != torch.bfloat16:
        assert share.max() > 0.9  # no looser than it has to be


@pytest.mark.parametrize("wire", WIRE_DTYPES)
def test_a_block_that_is_not_finite_stays_so(wire):
    blocks = torch.ones(3, BLOCK)
    blocks[0, 5], blocks[1, 5] = math.nan, math.inf
    back = dequantize(*quantize(blocks, WIRE_DTYPES[wire]), torch.float32)
    assert not back[0].isfinite().any() and not back[1].isfinite().any() and back[2].isfinite().all()


@pytest.mark.parametrize("wire", WIRE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_messages_hold_every_shard_in_its_place(wire, dtype):
    numels, exact = [130, 3, 0, 128, 1, 700, 5], [False, True, False, False, True, False, True]
    shards = CompressedShards(numels, exact, dtype, WIRE_DTYPES[wire])
    num_blocks = 2 + 0 + 1 + 6
    parts = [9 * dtype.itemsize, 128 * num_blocks, 4 * num_blocks]
    assert shards.message_bytes == sum(16 * math.ceil(part / 16) for part in parts)
    of_ranks = torch.randn(3, sum(numels), generator=torch.Generator().manual_seed(0)).to(dtype)
    messages = torch.stack([shards.pack(of_rank) for of_rank in of_ranks])
    found = torch.full_like(of_ranks, math.nan)
    shards.unpack(messages, found)
    for values, back, is_exact in zip(of_ranks.split(numels, 1), found.split(numels, 1), exact, strict=True):
        for value, returned in zip(values, back, strict=True):
            if is_exact:
                assert torch.equal(returned, value)
                continue
            # No block spans two shards.
            padded = torch.nn.functional.pad(value, (0, -len(value) % BLOCK)).view(-1, BLOCK)
            alone = dequantize(*quantize(padded, WIRE_DTYPES[wire]), dtype).flatten()[: len(value)]
            assert torch.equal(returned, alone)


@pytest.mark.prove
@pytest.mark.parametrize("interpret", [True, False], ids=["interpreted", "compiled for a GPU"])
def test_the_kernel_that_unpacks(interpret, tmp_path):
    run_with_triton(Path(__file__).with_name("unpacking.py"), tmp_path, interpret)
