"""SkyReels-V2 in blocks of frames makes a dense mask, of which self-attention over ranks takes the slices."""

import pytest
import torch

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.precision import LiftOperations
from shardformer.spread import running_tokens
from tests.shardformer.conformance import in_double
from tests.tolerances import RELATIVE, relative_error
from tests.video_models.skyreels_v2 import inputs, skyreels


def in_blocks(model, num_frames):
    """As its users change it from clip to clip."""
    model.register_to_config(num_frame_per_block=num_frames)
    return model


def of_several_blocks(plan):
    """Errors of clips in blocks of 2, 3, 1 and 2 frames, how even the ranks' work is, and whether it is dealt out."""
    init_parallel(plan)
    clip, sizes = in_double(inputs(forcing=True)), (2, 3, 1, 2)
    found = []

    def record(*_):
        state = running_tokens().state
        found.append(state.deal if state.deal is None else state.deal.imbalance)

    with LiftOperations(), torch.no_grad():
        alone = skyreels().double()
        expected = [in_blocks(alone, size)(**clip).sample for size in sizes]
        model = shardformer.shard(skyreels().double(), plan)
        model.blocks[1].attn1.register_forward_pre_hook(record)
        errors = [
            relative_error(in_blocks(model, size)(**clip).sample, out)
            for size, out in zip(sizes, expected, strict=True)
        ]
    return max(errors), found


@pytest.mark.parametrize("plan", [Plan(ring=2), Plan(ulysses=3)], ids=str)
def test_ranks_attend_by_slices_of_the_mask_that_the_model_makes(ranks, plan):
    for error, imbalances in ranks(plan.world_size, of_several_blocks, plan):
        assert error < RELATIVE[torch.float64]
        assert (
            imbalances[2] is None
        )  # a block of one frame is no mask for this model: all frames see each other
        dealt = [each for each in imbalances if each is not None]
        assert len(dealt) == 3
        # Runs of 45 of 90 tokens, of which the last see more: 1.33 and 1.5 times as much as ranks should have.
        assert all(each < 1.05 for each in dealt) == (plan.ring > 1)


def show_more(mask):
    mask[..., 0, -1] = True
    return mask


def show_less(mask):
    mask[..., -1, 0] = False
    return mask


@pytest.mark.parametrize(
    "change",
    [
        show_more,
        show_less,
        lambda mask: mask.expand(2, -1, -1, -1),
        lambda mask: mask.float(),
        lambda _: None,
    ],
    ids=["more is seen", "less is seen", "of each sample", "a bias", "none"],
)
def test_another_mask_than_the_table_says_is_refused(parallel_registry, change):
    model = skyreels(num_frame_per_block=2)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _block, args: (*args[:-1], change(args[-1])))
    shardformer.shard(model, Plan(), packed=True)
    with pytest.raises(
        ValueError, match=r"gets AttentionSlices.*as its attention_mask, and the model made another"
    ):
        model(**inputs(forcing=True))
