"""Rows of several clips, and masks of one's own: what a plan counts of them, and what ranks really do."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from opensora_accel import Plan, init_parallel
from opensora_accel.attention.slices import AttentionSlices, Deal, Slice, deal
from opensora_accel.planner.candidates import Passes, Request
from opensora_accel.planner.cost import Placement, collective_s
from opensora_accel.planner.estimate import Estimator, Reference
from opensora_accel.planner.explain import attention_of
from opensora_accel.planner.hardware import Hardware
from opensora_accel.planner.run import trace_step
from opensora_accel.planner.search import busiest_rank, exact, search
from opensora_accel.planner.workload import Workload, of_step
from opensora_accel.training.planned import job_of
from shardformer import packing, parallelize, shard
from tests.authors_models.causal_wan import CausalWanModel, causal_wan_inputs
from tests.planner.steps import inputs_of, really, wan
from tests.tiers import PROVE, some
from tests.training.test_rows import FAMILIES, rows_config

# Of clips of 135, 75, 15 and 75 tokens, the fullest row of 240 with the most pairs.
ROW, TEXT = [135, 75, 15, 15], 8
HEADS, HEAD_DIM, LAYERS = 3, 12, 2


def row_of(tmp_path, name="WanTransformer3DModel", plan=None):
    """With a CPU's kernels, whose attention takes heads of 12 numbers in fp32; no kernel of a GPU does."""
    ((workload, _share),) = job_of(rows_config(name, tmp_path, tmp_path / "run", plan)).mix
    return replace(workload, architecture="cpu")


def with_draws(prepare, model, run):
    """The same clips, times and noise on all ranks of a sequence group."""
    torch.manual_seed(run.data_rank)
    one_pass = prepare(model, run)

    def drawn(is_last):
        torch.manual_seed(run.data_rank)
        one_pass(is_last)

    return drawn


def attention_flops(trace, phase="forward"):
    return sum(each.flops for each in trace.operations if each.kind == "attention" and each.phase == phase)


def test_a_row_costs_the_area_of_its_clips(tmp_path):
    """And linear layers its tokens: 4·D operations of a pair of a head, 10·D in backward."""
    workload = row_of(tmp_path)
    assert workload.name == "a row of 240 tokens (1 × 9x24x40, 1 × 5x24x40, 2 × 1x24x40)"
    assert (workload.num_tokens, workload.text_tokens) == (240, 4 * TEXT)
    trace = trace_step(workload, Plan())
    pairs = sum(n * n + n * TEXT for n in ROW)
    assert attention_flops(trace) == LAYERS * HEADS * pairs * 4 * HEAD_DIM
    assert attention_flops(trace, "backward") == LAYERS * HEADS * pairs * 10 * HEAD_DIM
    assert trace.attention.deal.mask.digest == AttentionSlices.packed(ROW).digest
    gemms = {each.shape for each in trace.operations if each.kind == "gemm" and each.phase == "forward"}
    assert (1, 240, HEADS * HEAD_DIM, HEADS * HEAD_DIM) in gemms


RINGS = [
    Plan(ring=3, sharding="zero2", sharding_factor=3),
    Plan(ulysses=3),
    Plan(ring=2, ulysses=2, checkpoint="full"),
    Plan(dp_replicate=2, ring=2, checkpoint="selective"),
]


@PROVE
@pytest.mark.parametrize("plan", some(RINGS, RINGS[0]), ids=str)
@pytest.mark.parametrize("name", some(FAMILIES, "WanTransformer3DModel"))
def test_bytes_of_a_row_are_those_of_real_ranks(ranks, tmp_path, name, plan):
    workload = row_of(tmp_path, name, plan)
    workload = replace(
        workload, prepare=partial(with_draws, workload.prepare), fused_optimizer=False, architecture="cpu"
    )
    for rank, found in enumerate(ranks(plan.world_size, really, workload, plan)):
        trace = trace_step(workload, plan, rank=rank)
        assert trace.communication() == found["communication"]
        assert trace.peak_bytes == pytest.approx(found["peak"], rel=0.03)


@PROVE
def test_a_ring_sends_what_others_see(tmp_path):
    """And each rank computes its own pairs."""
    workload = row_of(tmp_path)
    dealt = deal(AttentionSlices.packed(ROW), 3)
    assert 1 < dealt.imbalance < 1.1
    for rank in range(3):
        trace = trace_step(workload, Plan(ring=3), rank=rank)
        text_pairs = dealt.splits[rank] * TEXT
        assert attention_flops(trace) == LAYERS * HEADS * (dealt.areas[rank] + text_pairs) * 4 * HEAD_DIM
        assert trace.attention.num_pairs == dealt.areas[rank]
        # Keys and values in forward and backward, their gradients as they were received; all in fp32.
        sent = sum(2 * step.num_sent + step.num_received for step in dealt.steps(rank))
        _calls, num_bytes = trace.communication()["send", "ring"]
        assert num_bytes == LAYERS * 2 * 4 * HEADS * HEAD_DIM * sent
        # A plain ring sends all of its keys twice on, and three gradients.
        assert sent < 2 * 2 * 80 + 3 * 80


# A student of a causal kind.

MASKS = {
    "block-causal": AttentionSlices.block_causal(5, 15, block_frames=2),
    "window": AttentionSlices.block_causal(5, 15, window_frames=2, sink_frames=1),
    "causal": AttentionSlices.causal(75),
}


def student(mask, balanced=True, **options):
    """Wan with a mask of one's own."""

    def prepare(model, run):
        init_parallel(run.plan, "cpu")
        model = shard(model, run.plan, packed=True)
        given = inputs_of("Wan", model, torch.float32)

        def one_pass(_is_last):
            with packing.run_packed(model, hidden_states=mask, balanced=balanced):
                model(**given)[0].square().mean().backward()

        return one_pass

    return Workload(
        "a student", partial(wan, layers=2), prepare, batch=2, num_tokens=75, text_tokens=7, num_heads=4,
        **{"architecture": "cpu", **options},
    )  # fmt: skip


@PROVE
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_costs_its_area(name):
    mask, plan = MASKS[name], Plan(ring=2)
    text_pairs = 75 * 7
    for rank in range(2):
        trace, dealt = trace_step(student(mask), plan, rank=rank), deal(mask, 2)
        pairs = dealt.areas[rank] + dealt.splits[rank] * 7
        assert attention_flops(trace) == 2 * 2 * 4 * pairs * 4 * 12  # layers, samples, heads
    whole = trace_step(student(mask), Plan())
    assert attention_flops(whole) == 2 * 2 * 4 * (mask.area + text_pairs) * 4 * 12


@PROVE
def test_the_rank_that_others_wait_for_is_traced():
    """Runs in order of a causal mask: the last of three has the most."""
    mask = MASKS["block-causal"]
    runs = Deal.in_order(mask, (25, 25, 25), (25, 25, 25))
    first = trace_step(student(mask, balanced=False), Plan(ring=3), rank=0)
    assert first.attention.deal.areas == runs.areas and busiest_rank(first) == 2
    assert busiest_rank(trace_step(student(mask), Plan(ring=3), rank=0)) == 0
    beside = trace_step(student(mask, balanced=False), Plan(dp_replicate=2, ring=3), rank=3)
    assert busiest_rank(beside) == 5
    asked = Request(((student(mask, balanced=False), 1.0),), Hardware.named("h100x8-ib400"), 3, "fp32")
    assert exact(asked, Plan(ring=3), Passes()).trace.rank == 2


@PROVE
@pytest.mark.parametrize("name", some(MASKS))
def test_estimates_know_how_even_a_ring_is_and_what_it_sends(name):
    dealt = deal(MASKS[name], 3)
    reference = Reference.of(student(MASKS[name]), "fp32")
    uneven, share, _rows = reference.in_ring(3)
    assert uneven == dealt.imbalance
    _own, *others = dealt.steps(0)
    assert share == sum(max(each.num_sent, each.num_received) for each in others) / 2 / max(dealt.splits) <= 1
    # Of all tokens, not of a tile: keys of 2 samples, 4 heads and 12 channels in fp32.
    assert reference.hidden_bytes == 2 * 75 * 4 * 12 * 4
    assert Reference.of(student(AttentionSlices.full(75)), "fp32").in_ring(3) == (1.0, 1.0, 1 / 3)


@PROVE
@pytest.mark.parametrize("mask", some([MASKS["block-causal"], AttentionSlices.full(75)]), ids=str)
def test_estimates_of_a_step_that_does_not_say_its_sizes(mask):
    """Of four heads on three ranks one has two, as on two ranks; tokens are counted, of a mask's tiles too."""
    known, unknown = student(mask), replace(student(mask), num_tokens=0, num_heads=0)
    reference = Reference.of(unknown, "fp32")
    assert reference.workload.num_tokens == 75
    assert reference.hidden_bytes == Reference.of(known, "fp32").hidden_bytes
    estimator = Estimator(reference, Hardware.named("h100x8-ib400"))
    plans = [Plan(ulysses=ranks) for ranks in (1, 2, 3, 4)]
    one, two, three, four = (estimator.seconds_by_kind(plan)["attention"] for plan in plans)
    assert two == three and one > two > four
    for plan in plans:
        # But for cross-attention, which goes by tokens.
        share = attention_flops(trace_step(unknown, plan)) / attention_flops(reference.whole)
        assert share == pytest.approx(-(-4 // plan.ulysses) / 4, rel=0.05)


@PROVE
def test_a_ring_by_a_mask_is_told():
    trace = trace_step(student(MASKS["block-causal"], balanced=False), Plan(ring=3))
    runs = Deal.in_order(MASKS["block-causal"], (25, 25, 25), (25, 25, 25))
    share = f"{MASKS['block-causal'].area / 75**2:.0%}"
    assert attention_of(trace) == (
        f"of 75 tokens each sees {share} on the average; the busiest rank of the ring has {runs.imbalance:.2f} times "
        f"the mean of pairs (runs in order: {runs.imbalance:.2f})"
    )
    assert "runs in order" not in attention_of(trace_step(student(MASKS["causal"]), Plan(ulysses=2)))


def test_a_block_mask_of_the_models_own_costs_its_area():
    """Causal Wan as its authors build it: five frames of 15 tokens, each a block."""
    inputs = causal_wan_inputs()

    def prepare(model, run):
        init_parallel(run.plan, "cpu")
        model = shard(model, run.plan)
        return lambda _is_last: model(**inputs).square().mean().backward()

    workload = Workload("Causal Wan", CausalWanModel, prepare, architecture="cpu")
    frames, tokens = inputs["x"].size(2), inputs["x"][0, 0, 0].numel() // 4
    mask = AttentionSlices.block_causal(frames, tokens)
    for plan in (Plan(ring=2), Plan(ulysses=2)):
        trace = trace_step(workload, plan)
        found = trace.attention.deal
        assert found.mask.digest == mask.digest and found.areas == deal(mask, plan.ring).areas
        # Layers, samples, and two heads of three, or all of them.
        assert attention_flops(trace) == 2 * 2 * (2 if plan.ulysses > 1 else 3) * found.areas[0] * 4 * 12


@PROVE
def test_a_message_that_is_only_received_takes_its_time():
    """The first of three ranks sees keys of the second: it waits as long as that one sends. The last does neither."""
    one, two, three = range(25), range(25, 50), range(50, 75)
    mask = AttentionSlices(
        75, 75, (Slice.of(one, range(50)), Slice.of(two, two), Slice.of(three, three))
    )  # fmt: skip
    hardware = Hardware.named("h100x8-ib400")
    counts, seconds = [], []
    for rank in range(3):
        trace = trace_step(student(mask, balanced=False), Plan(ring=3), rank=rank)
        messages = [each for each in trace.operations if each.collective in ("send", "recv")]
        counts.append(Counter(each.collective for each in messages))
        seconds.append(sum(collective_s(each, hardware, Placement.on(hardware, 3)) for each in messages))
    # Of two layers keys in forward and backward, and their gradients back: all of 25 tokens in fp32.
    assert counts[0] == {"recv": 4, "send": 2} and counts[2] == {}
    # What it gets back is under way beside what it sends.
    assert counts[1] == {"send": 4}
    assert seconds[0] == pytest.approx(6 / 4 * seconds[1]) and seconds[0] > 0


def true_student(heads, mask):
    """Two wide layers, 21 latent frames of 30 × 32 tokens; as a user's own step, which does not say so."""

    def step(model, run):
        init_parallel(run.plan, "cpu")
        model, forward = parallelize(model, run.plan, torch.device("cpu"), packed=True)
        dtype = model.patch_embedding.weight.dtype
        clip, text = torch.randn(1, 4, 21, 60, 64, dtype=dtype), torch.randn(1, 512, 16, dtype=dtype)
        with packing.run_packed(model, hidden_states=mask):
            out = forward(clip, timestep=torch.rand(1), encoder_hidden_states=text, return_dict=False)[0]
        out.float().square().mean().backward()

    return of_step("a student", partial(wan, layers=2, heads=heads, head_dim=128), step)


@PROVE
@pytest.mark.parametrize("heads", [12, 16])
def test_ulysses_and_rings_are_ranked_for_a_causal_student(heads):
    """Of 12 heads on 8 ranks one has two; in a ring of two it has three, of half of the tokens. 16 are even."""
    mask = AttentionSlices.block_causal(21, 30 * 32, block_frames=3)
    hardware, fixed = Hardware.named("h100x8-ib400"), {"sharding": "zero2", "checkpoint": "none"}
    request = Request(((true_student(heads, mask), 1.0),), hardware, 8, global_batch=1, fixed=fixed)
    plans = [Plan(ring=8 // u, ulysses=u, sharding="zero2", precision="bf16") for u in (1, 2, 4, 8)]
    attention_s = [exact(request, plan, Passes()).seconds_by_kind["attention"] for plan in plans]
    fastest = plans[attention_s.index(min(attention_s))]
    assert fastest.ulysses == {12: 4, 16: 8}[heads]
    outcome = search(request, budget_s=float("inf"))
    assert (outcome.best.plan.ring, outcome.best.plan.ulysses) == (fastest.ring, fastest.ulysses)
