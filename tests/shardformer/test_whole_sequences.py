"""Tokens exchanged for heads around attention whose own code needs every token, where a case of `CASES` does not go."""

from functools import partial

import pytest
import torch

import shardformer
from opensora_accel import Plan, init_parallel
from tests.shardformer.conformance import beside_one_device, in_double
from tests.tiers import some
from tests.tolerances import RELATIVE
from tests.video_models import CASES
from tests.video_models.flex import dense

EXACT = RELATIVE[torch.float64]
PLANS = some([Plan(ulysses=2), Plan(ring=3), Plan(ring=2, ulysses=2, checkpoint="full", offload=1.0)])


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
    return [out]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_sana_wm_s_refiner_trains_on_a_window_beside_its_cache(ranks, plan, gated):
    for found in ranks(plan.world_size, beside_refiner, plan, gated):
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < EXACT, worst


def beside_refiner(plan, gated):
    name = "SANA-WM's refiner, gated" if gated else "SANA-WM's refiner"
    return beside_one_device(CASES[name].make, plan, partial(windows, gated=gated))


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
        shardformer.shard(CASES["Kandinsky 6, super-resolution"].make(), plan)
    return str(caught.value)


def test_more_ranks_than_heads_are_refused(ranks):
    for words in ranks(6, too_many_ranks):
        assert "0.self_attention needs whole heads on every rank, and has 5 of them for 6 ranks" in words
        assert "use ring × ulysses of at most 5" in words
