"""Tokens exchanged for heads around attention whose own code needs every token, where a case of `CASES` does not go."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.precision import LiftOperations
from tests.shardformer.conformance import compare, fp64_model, in_double
from tests.tiers import some
from tests.tolerances import RELATIVE
from tests.video_models import CASES
from tests.video_models.case import randn
from tests.video_models.flex import dense, use_dense_flex_attention

EXACT = RELATIVE[torch.float64]
PLANS = some([Plan(ulysses=2), Plan(ring=3), Plan(ring=2, ulysses=2, checkpoint="full", offload=1.0)])


def gradients(model, losses):
    sum(losses).backward()
    found = {f"output {i}": loss.detach() for i, loss in enumerate(losses)}
    return found | {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()
    }


def beside_one_device(case, plan, losses_of):
    """Errors of a sharded model's losses and gradients; `losses_of(model)` runs it several times."""
    init_parallel(plan)
    with LiftOperations():
        found = []
        for sharded in (False, True):
            model = fp64_model(case)
            model = shardformer.shard(model, plan) if sharded else model
            found.append(gradients(model, losses_of(model)))
    return compare(found[1], found[0])


def _create_block_mask(*args, _compile, **options):
    return create_block_mask(*args, **options)


def both_passes(model):
    """The reference's keys go to the cache, with gradients; the clip is denoised beside them."""
    from diffusers.models.transformers import transformer_wan_animate_2 as module

    use_dense_flex_attention()
    reference = in_double(CASES["Wan Animate 2"].inputs())
    clip = reference | {
        # One frame more than the reference has, which stands for the image: 6 × 3 × 5 = 90 tokens.
        "hidden_states": [randn(4, 6, 6, 10, seed=11).double(), randn(4, 6, 6, 10, seed=12).double()],
        "condition_latents": [randn(2, 6, 6, 10, seed=13).double(), randn(2, 6, 6, 10, seed=14).double()],
        "kv_cache_mode": "cached",
        "seq_len": 90,
        "offset_grid_sizes": None,
        "reference_grid_sizes": torch.tensor([[5, 3, 5], [5, 3, 5]]),
        "origin_len": 16,  # 4 × (5 − 1)
        "origin_area": (48, 80),  # 16 × those of a grid
    }
    # It would be compiled for a mask of the real size.
    with mock.patch.object(module, "create_block_mask", _create_block_mask):
        out = model(**reference, return_dict=False)[0]
        denoised = model(**clip, return_dict=False)[0]
    return [torch.stack(out).square().mean(), torch.stack(denoised).square().mean()]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_wan_animate_2_trains_through_its_cache(ranks, plan):
    """With gradients to the reference's pass, which diffusers' pipeline never asks for."""
    for found in ranks(plan.world_size, beside_animate, plan):
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < EXACT, worst


def beside_animate(plan):
    return beside_one_device(CASES["Wan Animate 2"], plan, both_passes)


def windows(model, gated):
    """Keys of a first window are seen by a second one, of other positions and another number of tokens."""
    from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache

    name = "SANA-WM's refiner, gated" if gated else "SANA-WM's refiner"
    inputs = in_double(CASES[name].inputs())
    cache = SanaWMRefinerKVCache(2)
    cache.sink_pe = inputs["video_rotary_emb"]
    with torch.no_grad():
        model(**inputs, kv_cache=cache, kv_cache_mode="capture_pre_rope", return_dict=False)
    for layer in map(cache.get, range(2)):
        layer.store_sink(*layer.get_captured_pre_rope())
    window = inputs | {
        "hidden_states": inputs["hidden_states"][:, 20:60],
        "timestep": inputs["timestep"][:, 20:60],
        "video_rotary_emb": tuple(table[..., 20:60, :] for table in inputs["video_rotary_emb"]),
    }
    (out,) = model(**window, kv_cache=cache, kv_cache_mode="inject", return_dict=False)
    return [out.square().mean()]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_sana_wm_s_refiner_trains_on_a_window_beside_its_cache(ranks, plan, gated):
    for found in ranks(plan.world_size, beside_refiner, plan, gated):
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < EXACT, worst


def beside_refiner(plan, gated):
    name = "SANA-WM's refiner, gated" if gated else "SANA-WM's refiner"
    return beside_one_device(CASES[name], plan, partial(windows, gated=gated))


def test_blocks_are_chosen_by_all_queries_and_keys(monkeypatch):
    """Kandinsky 6 SR: one token's change moves what tokens of other blocks see, so a rank cannot choose by its own."""
    seen = []
    monkeypatch.setattr("tests.video_models.flex.dense", lambda mask: seen.append(dense(mask)) or seen[-1])
    case = CASES["Kandinsky 6, super-resolution"]
    model, inputs = case.make(), case.inputs()
    with torch.no_grad():
        model(**inputs)
        inputs["hidden_states"][:, -1, -1, -1] += 30
        model(**inputs)
    before, _, after, _ = seen
    changed = (before != after).any(-1)[..., :-64]
    assert 0.2 < before.float().mean() < 0.8
    assert changed.any()


def too_many_ranks():
    plan = Plan(ring=3, ulysses=2)
    init_parallel(plan)
    with pytest.raises(ValueError) as caught:
        shardformer.shard(CASES["Wan Animate 2"].make(), plan)
    return str(caught.value)


def test_more_ranks_than_heads_are_refused(ranks):
    for words in ranks(6, too_many_ranks):
        assert "blocks.0.self_attn needs whole heads on every rank, and has 5 of them for 6 ranks" in words
        assert "use ring × ulysses of at most 5" in words
