"""Who has how much of a mask: what ranks record of it, and what is made of that."""

from collections import Counter

import pytest
import torch

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.attention import local_attention
from opensora_accel.attention.slices import AttentionSlices, Deal, deal
from opensora_accel.profiler import profile
from opensora_accel.profiler.analyse import analyse
from opensora_accel.profiler.findings import findings_of
from opensora_accel.profiler.masks import MAX_MASKS
from opensora_accel.profiler.records import (
    MaskedAttention,
    RecordWriter,
    RunRecord,
    Span,
    StepRecord,
    read_rank,
)
from opensora_accel.profiler.report import write_report
from shardformer import packing
from tests.tiers import some
from tests.video_models import CASES

# Of the case's clip, 5 frames of 15 tokens.
CAUSAL, ROWS = AttentionSlices.block_causal(5, 15), AttentionSlices.packed([40, 35])


def recorded(plan, folder, balanced):
    """Two steps of Wan, the first with two forwards under one mask and the other with one each of two masks."""
    init_parallel(plan)
    case = CASES["Wan"]
    model = shardformer.shard(case.make(), plan, packed=True)
    with profile(model, plan, folder, count_flops=False) as run:
        for masks in ((CAUSAL, CAUSAL), (CAUSAL, ROWS)):
            for mask in masks:
                with packing.run_packed(model, hidden_states=mask, balanced=balanced):
                    out = model(**case.inputs(), return_dict=False)[0]
                out.square().mean().backward()
            run.step()
    return len(shardformer.blocks_of(model)), len(next(iter(case.inputs().values())))


@pytest.mark.parametrize(
    "plan",
    some(
        [
            Plan(ring=3, checkpoint="full"),
            Plan(ulysses=2),
            Plan(dp_replicate=2, ring=2),
            Plan(ring=2, ulysses=2),
        ]
    ),
    ids=str,
)
@pytest.mark.parametrize("balanced", some([False, True]))
def test_what_is_recorded_are_the_pairs_of_the_deal(ranks, tmp_path, plan, balanced):
    """Of forwards alone: what is recomputed in backward is no share of its own."""
    ((layers, samples), *_others) = ranks(plan.world_size, recorded, plan, tmp_path, balanced)

    def shares(mask):
        if balanced:
            return deal(mask, plan.ring)
        splits = [75 // plan.ring + (number < 75 % plan.ring) for number in range(plan.ring)]
        return Deal.in_order(mask, splits, splits)

    sums = Counter()
    for rank in range(plan.world_size):
        run, steps = read_rank(tmp_path / f"rank_{rank:05d}.jsonl")
        place = run.coordinates.get("ring", 0)
        first, second = ({each.mask: each for each in step.masks} for step in steps)
        for found, numbers in ((first, {CAUSAL: 2}), (second, {CAUSAL: 1, ROWS: 1})):
            assert found.keys() == {str(mask) for mask in numbers}
            for mask, number in numbers.items():
                each = found[str(mask)]
                assert each.calls == number * layers
                assert each.pairs == number * layers * samples * shares(mask).areas[place]
                assert each.mean_pairs == pytest.approx(number * layers * samples * mask.area / plan.ring)
                sums[mask] += each.pairs / number
    num_rings = plan.world_size // plan.ring
    # ROWS is in one of the two steps.
    expected = {CAUSAL: 2 * CAUSAL.area, ROWS: ROWS.area}
    assert sums == {mask: num_rings * layers * samples * area for mask, area in expected.items()}


def test_pairs_with_keys_that_all_ranks_have_are_no_share(tmp_path):
    """Packed clips that see their own captions."""
    q, k = torch.randn(1, 7, 2, 8), torch.randn(1, 5, 2, 8)
    with profile(torch.nn.Linear(1, 1), folder=tmp_path, count_flops=False) as run:
        local_attention(q, k, k, slices=AttentionSlices.packed([3, 4], [2, 3]))
        local_attention(q, q, q, slices=AttentionSlices.packed([3, 4]))
        run.step()
    (step,) = read_rank(tmp_path / "rank_00000.jsonl")[1]
    assert [(each.calls, each.pairs, each.mean_pairs) for each in step.masks] == [(1, 25, 25.0)]


def written(folder, rank, steps, attended_s=6.0):
    writer = RecordWriter(folder, RunRecord(rank, 2, {"ring": rank}, {"ring": [0, 1]}))
    for number, attention in enumerate(steps):
        start = 10.0 * number
        spans = [Span("attention", "blocks.0.attn1", "forward", start, start + attended_s)]
        writer.step(StepRecord(number, start, start + 10.0, {}, spans, masks=attention))
    writer.close()


def test_shares_worked_by_hand(tmp_path):
    """Two ranks, a warm-up and two steps: of mask a one rank has 30 of 40 pairs, of mask b the other 26 of 40."""
    a, b = [MaskedAttention("a", 2, 30, 20.0)], [MaskedAttention("b", 1, 14, 20.0)]
    written(tmp_path, 0, [a, a, b])
    written(tmp_path, 1, [a, [a[0]._replace(pairs=10)], [b[0]._replace(pairs=26)]])
    run = analyse(tmp_path)
    assert [(mask.mask, mask.steps, mask.calls) for mask in run.masks] == [("a", 1, 2.0), ("b", 1, 1.0)]
    assert [(mask.imbalance, mask.busiest_rank, mask.mean_pairs) for mask in run.masks] == [
        (1.5, 0, 20),
        (1.3, 1, 20),
    ]
    # In each step the ring waits for another rank.
    assert run.mask_imbalance == pytest.approx((1.5 + 1.3) / 2)
    assert [(rank.pairs, rank.pairs_of_mean) for rank in run.ranks] == [(22, 1.1), (18, 0.9)]
    (found,) = [each for each in findings_of(run) if each.kind == "uneven mask"]
    assert found.ranks == (0,) and found.axis == "ring"
    assert found.seconds == pytest.approx(6 * (1 - 1 / 1.4)) and found.share == pytest.approx(
        found.seconds / 10
    )


def test_even_masks_and_runs_without_are_no_finding(tmp_path):
    for name, attention in (("even", [MaskedAttention("a", 2, 21, 20.0)]), ("none", [])):
        for rank in range(2):
            written(tmp_path / name, rank, [attention] * 2)
    assert not [each for name in ("even", "none") for each in findings_of(analyse(tmp_path / name))]
    without = analyse(tmp_path / "none")
    assert (without.masks, without.mask_imbalance, without.ranks[0].pairs) == ([], None, None)


def test_a_page_of_a_run_whose_every_step_has_its_row(tmp_path):
    """It has the least even ones, and says of how many."""
    steps = [[MaskedAttention(f"row {number}", 1, 20 + number % 7, 20.0)] for number in range(MAX_MASKS + 5)]
    for rank in range(2):
        written(tmp_path / "profile", rank, steps)
    document = write_report([tmp_path / "profile"], tmp_path / "page.html")
    assert document["runs"][0]["num_masks"] == MAX_MASKS + 4  # without the warm-up's
    masks = document["runs"][0]["masks"]
    assert len(masks) == MAX_MASKS and masks[0]["imbalance"] == pytest.approx(1.3)
    page = (tmp_path / "page.html").read_text()
    assert "Who has how much of the masks" in page and "Of 24 masks these 20 are the least even" in page
    assert torch.tensor([mask["imbalance"] for mask in masks]).diff().max() <= 0
