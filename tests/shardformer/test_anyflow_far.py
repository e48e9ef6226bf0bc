"""AnyFlow FAR over ranks: masks that its users make beforehand, and what its slices do not say."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.attention.slices import AttentionSlices
from opensora_accel.precision import LiftOperations
from shardformer.spread import running_tokens
from tests.shardformer.conformance import fp64_model, in_double
from tests.tolerances import RELATIVE, relative_error
from tests.video_models import CASES
from tests.video_models.anyflow import far_inputs

CLEAN = CASES["AnyFlow FAR, clean frames"]


def mask_of(model, chunks=(1, 2, 1, 1), clean=True, width=20):
    return model.build_attention_mask(
        chunk_partition=list(chunks), height=4, width=width, has_clean_context=clean
    )


def of_masks_made_beforehand():
    """Errors of a mask that the model makes and of its user's, how often either was read, and how even work is."""
    init_parallel(Plan(ring=2))
    clip = in_double(far_inputs(clean=True))
    imbalances, num_read, read = [], [], AttentionSlices.from_block_mask

    def record(*_):
        imbalances.append(running_tokens().state.deal.imbalance)

    def counted(*args):
        num_read.append(1)
        return read(*args)

    with LiftOperations(), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        expected = fp64_model(CLEAN)(**clip).sample
        model = shardformer.shard(fp64_model(CLEAN), Plan(ring=2))
        model.blocks[1].attn1.register_forward_pre_hook(record)
        patch.setattr(AttentionSlices, "from_block_mask", counted)
        errors = [relative_error(model(**clip).sample, expected)]
        given = mask_of(model)
        errors += [relative_error(model(**clip, attention_mask=given).sample, expected) for _ in range(3)]
    return max(errors), len(num_read), max(imbalances)


def test_a_mask_made_beforehand_is_read_once(ranks):
    for error, num_read, imbalance in ranks(2, of_masks_made_beforehand):
        assert error < RELATIVE[torch.float64]
        assert num_read == 2  # the model makes one anew in each forward that gets none
        assert imbalance < 1.05


def refused():
    """Every mistake, and what is said of it before a token is split; behind them the model still works."""
    init_parallel(Plan(ring=2))
    model, clip, told = shardformer.shard(CLEAN.make(), Plan(ring=2)), far_inputs(clean=True), {}

    def refuse(kind, **changed):
        splits = []
        hook = model.blocks[0].norm1.register_forward_pre_hook(lambda *_: splits.append(1))
        with pytest.raises(ValueError) as error:
            model(**clip | changed)
        hook.remove()
        assert not splits  # nothing was sent
        told[kind] = str(error.value)

    sizes = {"Q_LEN": 128, "KV_LEN": 128, "device": "cpu"}
    refuse("of one rank's", attention_mask=mask_of(model, width=20 + 20 * torch.distributed.get_rank()))
    refuse("of more tokens", attention_mask=mask_of(model, width=40))
    refuse(
        "padding",
        attention_mask=create_block_mask(lambda _b, _h, q, k: q // 60 >= k // 60, None, None, **sizes),
    )
    refuse("of heads", attention_mask=create_block_mask(lambda _b, h, q, k: q + h >= k, None, 5, **sizes))
    refuse("dense", attention_mask=torch.ones(95, 95, dtype=torch.bool))
    # One of them would wait for tokens that the other does not send.
    chunks = ((1, 2, 1, 1), (2, 1, 1, 1))[torch.distributed.get_rank()]
    refuse("other masks", attention_mask=mask_of(model, chunks))
    refuse("cache", kv_cache=[{}, {}], kv_cache_flag={"is_cache_step": True})
    assert model(**clip).sample.isfinite().all()
    return told


def test_what_slices_do_not_say_is_refused_on_all_ranks(ranks):
    expected = {
        "of one rank's": "rank 1: the block mask is of 256 queries",
        "other masks": "the ranks disagree: blocks.0's attention_mask is AttentionSlices(95",
        "of more tokens": "of 256 queries and 256 keys, and there are 95 and 95, in blocks of 128; make it for this",
        "padding": "lets some of tokens 0…94 see padding behind the 95 tokens",
        "of heads": "is made for (1, 5) samples and heads",
        "dense": "blocks.0's attention_mask is a Tensor, and self-attention over ranks goes by a block mask",
        "cache": "kv_cache cannot be split over ranks",
    }
    first, second = ranks(2, refused, env={"OPENSORA_ACCEL_DEBUG": "1"})  # every forward is compared
    assert first == second
    assert {kind for kind in expected if expected[kind] not in first[kind]} == set(), first
