"""Causal Wan over ranks: what is not in its cases among all models' (`test_policies.py`)."""

from dataclasses import replace

import pytest
import torch

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.attention.slices import AttentionSlices
from opensora_accel.precision import LiftOperations
from shardformer import packing
from shardformer.policy import PackedAttention
from shardformer.policy.wan import CAUSAL_WAN
from tests.authors_models.causal_wan import CausalWanModel, causal_wan_inputs
from tests.shardformer.conformance import compare, fp64_model, in_double, of_first_rank, step
from tests.tolerances import RELATIVE, relative_error
from tests.video_models import CASES


def causal_wan():
    torch.manual_seed(0)
    return CausalWanModel().double()


def of_clips_of_two_lengths():
    """The model keeps the mask of its first clip, whose first frames see each other as those of a shorter one do."""
    init_parallel(Plan(ring=2))
    clips = [in_double(causal_wan_inputs(frames)) for frames in (5, 4, 5)]
    with LiftOperations(), torch.no_grad():
        alone = causal_wan()
        expected = [alone(**clip) for clip in clips]
        model = shardformer.shard(causal_wan(), Plan(ring=2))
        return max(relative_error(model(**clip), out) for clip, out in zip(clips, expected, strict=True))


def test_a_mask_that_is_kept_is_read_for_each_clips_length(ranks):
    assert max(ranks(2, of_clips_of_two_lengths)) < RELATIVE[torch.float64]


def of_a_share_of_a_whole_block(plan):
    """A clip of 17 frames of 15 tokens, of which one rank has 128 and the other 127."""
    init_parallel(plan)
    case, clip = CASES["Causal Wan, its authors'"], in_double(causal_wan_inputs(17))
    with LiftOperations():
        expected = of_first_rank(lambda: step(fp64_model(case), case, clip))
        found = step(shardformer.shard(fp64_model(case), plan), case, clip)
    return compare(found, expected)


@pytest.mark.parametrize("plan", [Plan(ulysses=2), Plan(ring=2, checkpoint="full")], ids=str)
def test_a_rank_that_has_nothing_to_pad_keeps_its_tokens(ranks, plan):
    for found in ranks(2, of_a_share_of_a_whole_block, plan):
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < RELATIVE[torch.float64], worst


def test_a_mask_of_the_models_own_is_refused_beside_ones_own(parallel_registry):
    """A table that lets both be told: only one of them could be attended by."""
    model = causal_wan()
    model.forward = model._forward_train
    table = replace(CAUSAL_WAN, packed_attention=(PackedAttention("blocks.*.self_attn", "x"),))
    shardformer.shard(model, Plan(), policy=table, packed=True)
    told = packing.run_packed(model, x=AttentionSlices.causal(75))
    with told, pytest.raises(ValueError, match=r"has a mask of its own \(block_mask\); leave run_packed out"):
        model(**in_double(causal_wan_inputs()))


def of_clips_of_two_shots():
    init_parallel(Plan(ring=2))
    model = shardformer.shard(causal_wan(), Plan(ring=2))
    clip = in_double(causal_wan_inputs())
    with pytest.raises(ValueError) as error:
        model(**clip | {"context": clip["context"].repeat(2, 1, 1)})
    assert model(**clip).isfinite().all()
    return str(error.value)


def test_captions_of_shots_are_refused_on_all_ranks(ranks):
    """A caption for each half of a clip, as LongLive 2 has them; this model would take a rank's half for the clip."""
    for words in ranks(2, of_clips_of_two_shots):
        assert "blocks.0 has 4 captions for 2 clips" in words and "give each clip one caption" in words
