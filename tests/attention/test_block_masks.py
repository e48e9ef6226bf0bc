"""Block masks of flex attention as slices: against the dense mask that torch makes of the same function."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from opensora_accel.attention.slices import AttentionSlices

BLOCK_SIZES = (8, 16, (8, 32), (32, 8))
OPTIONS = {"B": None, "H": None, "device": "cpu", "_compile": False}


def block_mask(mask_mod, num_queries, num_keys=None, block_size=16, **options):
    num_keys = num_queries if num_keys is None else num_keys
    sizes = {"Q_LEN": num_queries, "KV_LEN": num_keys, "BLOCK_SIZE": block_size}
    return create_block_mask(mask_mod, **sizes, **OPTIONS | options)


def whole_blocks(length, block_size):
    """The length with the padding that models put behind their tokens."""
    side = max(block_size) if isinstance(block_size, tuple) else block_size
    return -(-length // side) * side


def block_causal(frames, tokens, block, window):
    """A function as causal video models write it: padding sees itself, so that its softmax is of something."""

    def mask(_b, _h, q, k):
        end = (q // (tokens * block) + 1) * tokens * block
        seen = (q < frames * tokens) & (k < end.clamp(max=frames * tokens))
        if window is not None:
            seen = seen & (k >= end.clamp(max=frames * tokens) - window * tokens)
        return seen | (q == k)

    return mask


def teacher_forcing(frames, tokens, block):
    """A clean clip before the noisy one, whose blocks see themselves and the clean ones before."""
    clip = frames * tokens

    def mask(_b, _h, q, k):
        of_query, of_key = q % clip // (tokens * block), k % clip // (tokens * block)
        both = (q < 2 * clip) & (k < 2 * clip)
        clean = (q < clip) & (k < clip) & (of_key <= of_query)
        noisy = (q >= clip) & torch.where(k < clip, of_key < of_query, of_key == of_query)
        return both & (clean | noisy) | (q == k)

    return mask


@given(
    st.integers(1, 7), st.integers(1, 13), st.integers(1, 3), st.integers(0, 3), st.sampled_from(BLOCK_SIZES)
)
def test_blocks_of_frames_come_back(frames, tokens, block, window, block_size):
    """A window of 0 stands for all; `AttentionSlices.block_causal` says the same by itself."""
    size = frames * tokens
    seen_frames = None if window == 0 else max(window, min(block, frames))
    mask = block_causal(frames, tokens, block, seen_frames)
    made = block_mask(mask, whole_blocks(size, block_size), block_size=block_size)
    found = AttentionSlices.from_block_mask(made, size)
    assert torch.equal(found.dense(), create_mask(mask, 1, 1, size, size, device="cpu")[0, 0])
    assert found == AttentionSlices.block_causal(
        frames, tokens, block_frames=block, window_frames=seen_frames
    )


@given(st.integers(1, 4), st.integers(1, 11), st.integers(1, 3), st.sampled_from(BLOCK_SIZES))
def test_clean_clips_before_noisy_ones_come_back(frames, tokens, block, block_size):
    size, mask = 2 * frames * tokens, teacher_forcing(frames, tokens, block)
    made = block_mask(mask, whole_blocks(size, block_size), block_size=block_size)
    found = AttentionSlices.from_block_mask(made, size)
    assert torch.equal(found.dense(), create_mask(mask, 1, 1, size, size, device="cpu")[0, 0])
    assert found == AttentionSlices.teacher_forcing(frames, tokens, block_frames=block)


@settings(max_examples=40)
@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.floats(0, 1),
    st.integers(0, 2**31),
    st.sampled_from(BLOCK_SIZES),
)
def test_any_mask_of_other_keys_than_queries_comes_back(num_queries, num_keys, share, seed, block_size):
    """Runs of 8 by 8, so that there are blocks of every kind: seen whole, in part and not at all."""
    rng = torch.Generator().manual_seed(seed)
    seen = (torch.rand(-(-num_queries // 8), -(-num_keys // 8), generator=rng) < share).repeat_interleave(
        8, 0
    )
    seen = seen.repeat_interleave(8, 1)[:num_queries, :num_keys].contiguous()
    made = block_mask(lambda _b, _h, q, k: seen[q, k], num_queries, num_keys, block_size)
    found = AttentionSlices.from_block_mask(made, num_queries, num_keys)
    assert torch.equal(found.dense(), seen)


def test_only_blocks_that_are_listed_are_seen():
    """A model may take blocks off a mask and leave its function as it was; flex attention then looks at the rest."""
    made = block_mask(lambda _b, _h, q, k: q >= k, 64)
    made.kv_num_blocks[..., 2] = 0  # the third row of blocks sees nothing of its own block
    seen = torch.ones(64, 64, dtype=torch.bool).tril()
    seen[32:48, 32:48] = False
    assert torch.equal(AttentionSlices.from_block_mask(made, 64).dense(), seen)


def test_only_blocks_that_are_seen_in_part_are_asked_of_the_function():
    asked = []

    def mask(_b, _h, q, k):
        asked.append((q, k))
        return q // 16 >= k // 16

    made = block_mask(mask, 64)
    asked.clear()
    assert AttentionSlices.from_block_mask(made, 64).area == 16 * 16 * 10
    assert asked == []  # each is seen whole or not at all


# What slices do not say.


def test_padding_that_is_seen_is_refused_with_the_remedy():
    """Blocks of three frames of 10 tokens, of which the second ends behind the 50 tokens that there are."""
    made = block_mask(lambda _b, _h, q, k: k // 30 <= q // 30, 64)
    with pytest.raises(
        ValueError,
        match=r"lets some of tokens 16…31 see padding behind the 50 tokens.*whole blocks of frames",
    ):
        AttentionSlices.from_block_mask(made, 50)
    assert AttentionSlices.from_block_mask(made, 60).area == 60 * 30 + 30 * 30


@pytest.mark.parametrize(("batch", "heads"), [(2, None), (None, 3), (2, 3)])
def test_masks_of_samples_or_heads_are_refused(batch, heads):
    made = block_mask(lambda b, h, q, k: q + b + h >= k, 64, B=batch, H=heads)
    shape = rf"\({batch or 1}, {heads or 1}\)"
    with pytest.raises(
        ValueError, match=rf"made for {shape} samples and heads.*make it with B=None and H=None"
    ):
        AttentionSlices.from_block_mask(made, 64)


@pytest.mark.parametrize("sizes", [(65, 48), (64, 49), (48, 48), (64, 32)])
def test_masks_of_another_number_of_tokens_are_refused(sizes):
    """Flex attention refuses them too: tokens are padded to whole blocks, and not to more of them."""
    made = block_mask(lambda _b, _h, q, k: q >= k, 64, 48)
    with pytest.raises(
        ValueError, match=f"is of 64 queries and 48 keys, and there are {sizes[0]} and {sizes[1]}"
    ):
        AttentionSlices.from_block_mask(made, *sizes)


def test_masks_without_structure_are_refused():
    seen = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    made = block_mask(lambda _b, _h, q, k: seen[q, k], 64)
    with pytest.raises(ValueError, match=r"would take \S+ slices, and 100 are the most"):
        AttentionSlices.from_block_mask(made, 64, max_slices=100)
    assert torch.equal(AttentionSlices.from_block_mask(made, 64).dense(), seen)
