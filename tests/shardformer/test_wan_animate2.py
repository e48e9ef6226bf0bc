"""Wan Animate 2 over ranks: a clip beside the keys that a reference's pass left in a cache, under the model's mask."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.attention.slices import AttentionSlices, Slice, deal
from opensora_accel.communications import share_sizes
from shardformer.spread import running_tokens, streams
from tests.shardformer.conformance import beside_one_device, compare, step_of
from tests.tiers import PROVE, each_once
from tests.tolerances import RELATIVE
from tests.video_models.case import randn
from tests.video_models.flex import use_dense_flex_attention
from tests.video_models.wan import animate2

EXACT = RELATIVE[torch.float64]
MODULE = "diffusers.models.transformers.transformer_wan_animate_2"


@dataclass(frozen=True)
class Scene:
    """What the model is called with: grids of tokens of each sample, whose numbers of tokens are alike."""

    clip: tuple[tuple[int, int, int], ...]
    reference: tuple[tuple[int, int, int], ...]
    # Of the video, which the mask is made for; without the image.
    frames: int = 5
    tokens_per_frame: int = 15
    layers: int = 2
    # Of the model's config, by which the reference's positions are others than the clip's.
    positions: tuple[tuple[str, int], ...] = ()
    # Whether gradients go through the cache into the reference's pass.
    trains_reference: bool = True

    def outputs_of(self, model) -> list[torch.Tensor]:
        """Of the reference's pass, of two forwards of the clip beside it, and of one without a condition."""
        use_dense_flex_attention()
        cache = self.filled(model)
        outputs = [cache[1]] if self.trains_reference else []
        outputs += [self.denoise(model, cache[0], timestep) for timestep in (100, 900)]
        return [*outputs, self.denoise(model, cache[0], 500, is_uncondtion=True)]

    def filled(self, model, cache=None):
        """The cache of the reference's pass, and what that returns."""
        from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

        cache = WanAnimate2KVCache(self.layers) if cache is None else cache
        grids = torch.tensor(self.reference)
        with torch.set_grad_enabled(self.trains_reference):
            inputs = self._inputs(model, self.reference, seed=1, timestep=0)
            out = model(**inputs, kv_cache=cache, kv_cache_mode="extract", offset_grid_sizes=grids)
        return cache, joined(out)

    def denoise(self, model, cache, timestep, **changed):
        options = {
            "kv_cache": cache,
            "kv_cache_mode": "cached",
            "reference_grid_sizes": torch.tensor(self.reference),
            "origin_len": 4 * (self.frames - 1),
            "origin_area": (16, 16 * self.tokens_per_frame),
        }
        with mock.patch(f"{MODULE}.create_block_mask", uncompiled_block_mask):
            return joined(model(**self._inputs(model, self.clip, 7, timestep), **options | changed))

    def _inputs(self, model, grids, seed, timestep):
        dtype = model.head.head.weight.dtype
        sizes = [(frames, 2 * height, 2 * width) for frames, height, width in grids]
        return {
            "hidden_states": [randn(4, *size, seed=seed + i).to(dtype) for i, size in enumerate(sizes)],
            "condition_latents": [randn(2, *size, seed=30 + i).to(dtype) for i, size in enumerate(sizes)],
            "timestep": torch.tensor([timestep, timestep // 2]),
            "encoder_hidden_states": [
                randn(7, 16, seed=5).to(dtype),
                randn(4, 16, seed=6).to(dtype),
            ],
            "seq_len": grids[0][0] * grids[0][1] * grids[0][2],
        }

    def make(self):
        return animate2(self.layers, **dict(self.positions))


def joined(out):
    """One tensor of what the model returns of each sample, which may have other sides."""
    return torch.cat([each.flatten() for each in out.sample])


def uncompiled_block_mask(*args, _compile, **options):
    """It would be compiled for a mask of the real size."""
    return create_block_mask(*args, **options)


def alike(*grid):
    return grid, grid


SCENES = {
    "whole video": Scene(alike(6, 3, 5), alike(5, 3, 5)),
    "reference pass without gradients": Scene(alike(6, 3, 5), alike(5, 3, 5), trains_reference=False),
    "fewer frames": Scene(alike(4, 3, 5), alike(3, 3, 5)),
    "a reference of fewer frames than the clip": Scene(alike(6, 3, 5), alike(2, 3, 5)),
    "a clip of fewer frames than the reference": Scene(alike(3, 3, 5), alike(5, 3, 5)),
    "smaller frames": Scene(alike(6, 2, 6), alike(5, 3, 3)),
    "fewer and smaller frames": Scene(alike(5, 1, 7), alike(3, 2, 5)),
    "strides": Scene(alike(5, 3, 5), alike(4, 2, 7), positions=(("refer_stride", 3),)),
    "a reference at the places of the clip": Scene(
        alike(6, 3, 5), alike(5, 3, 5), positions=(("refer_offset_t", 0), ("refer_offset_w", 0))
    ),
    "samples of other shapes": Scene(((6, 3, 5), (6, 5, 3)), ((4, 2, 7), (4, 7, 2))),
    # The last one stands in the padding of the mask's blocks, sees nothing and is not seen.
    "more frames than the video": Scene(alike(7, 3, 5), alike(4, 3, 5)),
    "a block left out": Scene(alike(5, 2, 5), alike(5, 3, 3), layers=11),
}
MESHES = [
    Plan(ring=2, ulysses=2, checkpoint="full", offload=1.0),
    Plan(ulysses=2),
    Plan(ring=3),
    Plan(ring=3, ulysses=2),  # more ranks than heads
    Plan(ulysses=3, checkpoint="full"),
    Plan(ring=2),
    Plan(ulysses=2, overlap_ulysses=True),
    Plan(dp_shard=2, ring=2, sharding="zero3", checkpoint="selective"),
]


@pytest.mark.parametrize(
    ("name", "plan"), each_once(SCENES, MESHES, ["whole video", "strides", "a block left out"])
)
def test_both_passes_are_those_of_one_device(ranks, name, plan):
    for found in ranks(plan.world_size, errors, name, plan):
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < EXACT, (worst, found[worst])


def errors(name, plan):
    return beside_one_device(SCENES[name].make, plan, SCENES[name].outputs_of)


def whole_video(frames, per_frame):
    """Who sees whom of a video of so many frames with an image, and a reference of as many: keys of the clip first."""
    clip = range((frames + 1) * per_frame)
    return AttentionSlices(
        len(clip),
        len(clip) + frames * per_frame,
        (
            Slice.of(clip, clip),
            *(
                Slice.of(
                    range((frame + 1) * per_frame, (frame + 2) * per_frame),
                    range(len(clip) + frame * per_frame, len(clip) + (frame + 1) * per_frame),
                )
                for frame in range(frames)
            ),
        ),
    )


def of_the_whole_video():
    """The mask that the clip's pass goes by, how often one was read, and each rank's keys."""
    init_parallel(Plan(ring=2))
    scene, found, num_read, read = SCENES["whole video"], [], [], AttentionSlices.from_block_mask
    model = shardformer.shard(scene.make(), Plan(ring=2))

    def record(module, args, kwargs):
        if kwargs["kv_cache_mode"] == "cached":
            found.append(running_tokens().state.deal)

    def counted(*args):
        num_read.append(1)
        return read(*args)

    model.blocks[1].self_attn.register_forward_pre_hook(record, with_kwargs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionSlices, "from_block_mask", counted)
        scene.outputs_of(model)
    assert all(each is found[0] for each in found[1:])
    return found[0].mask == whole_video(5, 15), len(num_read), found[0].splits, found[0].kv_splits


def test_the_models_mask_is_read_once_and_no_padding_is_kept(ranks):
    for is_whole, num_read, splits, kv_splits in ranks(2, of_the_whole_video):
        assert is_whole and num_read == 1
        assert sum(splits) == 90 and kv_splits == (splits[0] + 38, splits[1] + 37)


@pytest.mark.parametrize(("num_ranks", "ulysses"), [(2, 1), (3, 1), (8, 1), (8, 2), (32, 1), (32, 8)])
def test_no_rank_has_5_percent_more_than_its_share_of_a_true_mask(num_ranks, ulysses):
    """21 frames of 1,560 tokens, and an image: 34,320 tokens beside 32,760 of the reference."""
    mask = whole_video(21, 1560)
    of_reference = torch.arange(mask.num_queries, mask.num_keys).tensor_split(num_ranks)
    held = tuple((range(int(each[0]), int(each[-1]) + 1),) for each in of_reference)
    found = deal(mask, num_ranks, ulysses=ulysses, more_keys=held).merged(ulysses)
    assert sum(found.areas) == mask.area and found.imbalance < 1.05
    # No rank is sent keys of the reference that its own queries do not see.
    for rank, step in enumerate(found.steps(0)):
        needs = found.needs(0, (0 - rank) % len(found.runs))
        assert rank == 0 or step.num_received == sum(map(len, needs))


def random_runs(generator, sizes, least=0):
    """Runs of these sizes in order, with random gaps before them, and where the last one ends."""
    runs, start = [], least
    for size in sizes:
        start += int(torch.randint(0, 4, (), generator=generator))
        runs.append(range(start, start + size))
        start += size
    return tuple(runs), start


@pytest.mark.parametrize("seed", range(8))
def test_what_stands_in_buffers_is_turned_to_what_there_is(seed):
    """Any mask: the clip's queries, its keys, those of the cache, and of all others those that anybody sees."""
    generator = torch.Generator().manual_seed(seed)
    own, stop = random_runs(generator, (3, 3, 2))
    held, stop = random_runs(generator, (4, 1), stop)
    num_keys = stop + 9
    dense = torch.rand(stop, num_keys, generator=generator) < 0.3
    dense[:, stop + 3 :] = False  # nobody sees some of the padding
    at = streams.Buffers(stop, num_keys, own, held, (3, 0, 2))
    laid, more_keys = streams.laid_out(AttentionSlices.from_dense(dense), at)
    rows = [place for run in own for place in run]
    known = rows + [place for run in held for place in run]
    seen = dense[rows].any(0)
    zeros = [place for place in range(num_keys) if seen[place] and place not in known]
    assert torch.equal(laid.dense(), dense[rows][:, known + zeros])
    assert [of_rank[0] for of_rank in more_keys] == [range(8, 11), range(11, 11), range(11, 13)]
    shares = [of_rank[1] for of_rank in more_keys]
    assert [len(share) for share in shares] == list(share_sizes(len(zeros), 3))
    assert list(itertools.chain(*shares)) == list(range(13, 13 + len(zeros)))


def refused():
    """Every mistake, and what is said of it before a token is split; behind them the model still works."""
    scene = SCENES["smaller frames"]
    model, others, told = animate2(), animate2(), {}
    on_one_device = scene.filled(model)[0]
    init_parallel(Plan(dp_replicate=2, ring=2))
    elsewhere = scene.filled(shardformer.shard(model, Plan(dp_replicate=2, ring=2)))[0]
    shardformer.unshard(model)
    parallel_states.reset()
    init_parallel(Plan(ring=4))
    shardformer.shard(model, Plan(ring=4))
    use_dense_flex_attention()

    def refuse(kind, cache, scene=scene, error=ValueError, **changed):
        splits = []
        hook = model.blocks[0].norm1.register_forward_pre_hook(lambda *_: splits.append(1))
        with pytest.raises(error) as caught:
            scene.denoise(model, cache, 100, **changed)
        hook.remove()
        assert not splits  # nothing was sent
        told[kind] = str(caught.value)

    refuse("of one device", on_one_device)
    refuse("of another mesh", elsewhere)
    cache = scene.filled(model)[0]
    again = scene.filled(others, scene.filled(model)[0])[0]
    refuse("filled again on one device", again)
    refuse("of another model", scene.filled(shardformer.shard(others, Plan(ring=4)))[0])
    refuse("other tokens", cache, reference_grid_sizes=torch.tensor(alike(4, 3, 3)))
    refuse("too small", cache, origin_area=(16, 16 * 11))
    refuse("too short", cache, origin_len=0, origin_area=(16, 16 * 30))
    empty = scene.filled(model)[0]
    empty.clear()
    refuse("empty", empty, error=RuntimeError)
    kept, model.block_masks = model.block_masks, {}
    scene.denoise(model, cache, 100, origin_len=100)
    model.block_masks = {(5, 15): next(iter(model.block_masks.values()))}
    refuse("another video's mask", cache)
    seen = model.block_masks[5, 15] = torch.ones(128, 256, dtype=torch.bool)
    refuse("dense", cache)
    model.block_masks = kept
    # Every layer's cache is looked at, where it is used.
    cache.layer_caches[1] = on_one_device.layer_caches[1]
    with pytest.raises(ValueError) as caught:
        scene.denoise(model, cache, 100)
    told["of the second layer"] = str(caught.value)
    assert seen.all() and scene.denoise(model, scene.filled(model)[0], 100).isfinite().all()
    return told


def test_caches_and_masks_of_something_else_are_refused_on_all_ranks(ranks):
    not_ours = "that were not left there by this model as it is sharded now"
    expected = {
        "of one device": f"blocks.0's kv_cache holds keys of 45 tokens {not_ours}",
        "of another mesh": not_ours,
        "filled again on one device": f"blocks.0's kv_cache holds keys of 45 tokens {not_ours}",
        "of another model": not_ours,
        "other tokens": "blocks.0's kv_cache holds a reference of 45 tokens, and reference_grid_sizes are of 36: run",
        "too small": "blocks.0 has a clip of 6 frames of 12 tokens, and its mask is for a video of 5 frames of 11",
        "too short": "6 frames of 12 tokens, and its mask is for a video of 1 frames of 30 tokens, and an image; pass",
        "empty": "The KV cache is empty. Run the reference pass before the generation pass.",
        "another video's mask": "the block mask is of 512 queries",
        "dense": "blocks.0's attention_mask is a Tensor, and self-attention over ranks goes by a block mask",
        "of the second layer": f"blocks.1's kv_cache holds keys of 45 tokens {not_ours}",
    }
    first, *others = ranks(4, refused, env={"OPENSORA_ACCEL_DEBUG": "1"})  # every forward is compared
    assert all(each.keys() == expected.keys() for each in (first, *others))
    for each in (first, *others):
        assert {kind for kind in expected if expected[kind] not in each[kind]} == set(), each


def compiled():
    """Errors of three steps with compiled blocks, of which the first is not traced, and how many graphs there were."""
    scene, plan, counter = (
        SCENES["fewer and smaller frames"],
        Plan(ulysses=2),
        CompileCounterWithBackend("aot_eager"),
    )
    init_parallel(plan)
    torch._dynamo.reset()
    expected = step_of(scene.make(), scene.outputs_of)
    model, errors, counts = shardformer.shard(scene.make(), plan), [], []
    for block in shardformer.blocks_of(model):
        block.compile(backend=counter)
    for _ in range(3):
        model.zero_grad()
        errors.append(max(compare(step_of(model, scene.outputs_of), expected).values()))
        counts.append(counter.frame_count)
    return errors, counts


@PROVE
@pytest.mark.slow
def test_compiled_blocks_fill_and_read_caches_without_another_graph_for_each(ranks):
    for found, (first, second, third) in ranks(2, compiled):
        assert max(found) < RELATIVE[torch.float32]
        assert first < second == third
