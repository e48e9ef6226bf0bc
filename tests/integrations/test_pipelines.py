"""Pipelines whose transformer is spread over ranks generate what one device generates."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

from opensora_accel.communications.checks import gather_objects
from opensora_accel.integrations import diffusers as parallel
from opensora_accel.precision import LiftOperations
from tests.integrations.pipelines import PIPELINES
from tests.integrations.test_diffusers import size
from tests.shardformer.conformance import in_double
from tests.tiers import each_once, some
from tests.tolerances import relative_error

CONFIGS = {
    "ulysses 2": {"ulysses_degree": 2},
    "ring 3": {"ring_degree": 3},
    "ulysses 3": {"ulysses_degree": 3},
    "ring 2": {"ring_degree": 2},
}


def in_fp64(name):
    pipe, call = PIPELINES[name]()
    pipe.to(torch.float64)
    pipe.set_progress_bar_config(disable=dist.get_rank() != 0)
    return pipe, in_double(call)


def generate(pipe, call):
    """Frames or latents, and how long the latents were after each step."""
    norms, bar = [], io.StringIO()

    def note(_pipe, _step, _timestep, values):
        norms.append(values["latents"].norm().item())
        return values

    generator = torch.Generator().manual_seed(3)
    with contextlib.redirect_stderr(bar):
        out = pipe(**call, generator=generator, callback_on_step_end=note, return_dict=False)[0]
    return out, norms, bar.getvalue()


def errors(name, options):
    with LiftOperations():
        expected, norms, _bar = generate(*in_fp64(name))
        pipe, call = in_fp64(name)
        with parallel.install():
            pipe.transformer.enable_parallelism(config=ContextParallelConfig(**options))
        found, found_norms, bar = generate(pipe, call)
        again, _norms, _bar = generate(pipe, call)
    assert found.dtype == torch.float64 and len(norms) == 3 and norms[0] != norms[2]
    assert torch.tensor(found_norms) == pytest.approx(torch.tensor(norms), rel=1e-10)
    assert bool("3/3" in bar) == (dist.get_rank() == 0)
    assert torch.equal(found, again)
    everyone = gather_objects(found, dist.group.WORLD)
    assert all(torch.equal(each, found) for each in everyone)
    parallel.disable_parallelism(pipe.transformer)
    return relative_error(found, expected)


@pytest.mark.parametrize(("name", "config"), each_once(PIPELINES, CONFIGS, [*PIPELINES][:2]))
def test_a_pipeline_generates_what_one_device_does(ranks, name, config):
    assert max(ranks(size(CONFIGS[config]), errors, name, CONFIGS[config])) < 1e-10


# Caches of diffusers


def cache_config(name, pipe):
    from diffusers import FirstBlockCacheConfig, MagCacheConfig, PyramidAttentionBroadcastConfig

    if name == "first block":
        return FirstBlockCacheConfig(threshold=0.3)
    if name == "magnitude":
        return MagCacheConfig(
            threshold=10.0, retention_ratio=0.1, num_inference_steps=6, mag_ratios=torch.ones(6)
        )
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 2000),
        current_timestep_callback=lambda: pipe._current_timestep,
    )


def errors_with_cache(name, cache, is_first, options):
    with LiftOperations():
        pipe, call = in_fp64(name)
        call |= {"num_inference_steps": 6, "output_type": "latent"}
        uncached, *_ = generate(pipe, call)
        pipe.transformer.enable_cache(cache_config(cache, pipe))
        expected, *_ = generate(pipe, call)
        if not is_first:
            pipe.transformer.disable_cache()
        parallel.enable_parallelism(pipe.transformer, config=ContextParallelConfig(**options))
        if not is_first:
            pipe.transformer.enable_cache(cache_config(cache, pipe))
        found, *_ = generate(pipe, call)
        parallel.disable_parallelism(pipe.transformer)
        assert pipe.transformer.is_cache_enabled
        undone, *_ = generate(pipe, call)
    assert torch.equal(undone, expected) and relative_error(uncached, expected) > 1e-3
    return relative_error(found, expected)


@pytest.mark.parametrize("is_first", some([True, False]))
@pytest.mark.parametrize("cache", some(["first block", "broadcast", "magnitude"]))
@pytest.mark.parametrize("name", some(["HunyuanVideoPipeline", "WanPipeline"], "WanPipeline"))
def test_a_cache_skips_what_it_skips_on_one_device(ranks, name, cache, is_first):
    assert max(ranks(2, errors_with_cache, name, cache, is_first, {"ulysses_degree": 2})) < 1e-10


# What a user may forget


def other_noise():
    pipe, call = in_fp64("LTXPipeline")
    parallel.enable_parallelism(pipe.transformer, config=ContextParallelConfig(ulysses_degree=2))
    with pytest.raises(
        ValueError, match=r"called LTXVideoTransformer3DModel with different inputs: hidden_states"
    ):
        pipe(**call, generator=torch.Generator().manual_seed(dist.get_rank()))


def test_generators_that_are_seeded_by_rank_are_refused(ranks):
    ranks(2, other_noise)
