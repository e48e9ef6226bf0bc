"""Diffusion forcing: a time for each latent frame, in training and in samples, on any mesh."""

import dataclasses
import json
import logging

import numpy
import pytest
import torch
from diffusers import SkyReelsV2DiffusionForcingPipeline
from PIL import Image

from opensora_accel import Plan, init_parallel
from opensora_accel.observe.fakes import fake_world
from opensora_accel.training import build, configured
from opensora_accel.training.clips import Clip
from opensora_accel.training.codec import SpaceToDepth
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.flow import Stream, draw_noise, draw_times, flow_loss, loss_weights, staggered
from opensora_accel.training.recipes import RECIPES, check_conditioning, check_recipe
from opensora_accel.training.recipes.base import even_times
from opensora_accel.training.samples import sample_latents
from opensora_accel.training.sections import FlowConfig
from opensora_accel.training.text_encoders import text_shapes
from opensora_accel.training.tiny_run import tiny_config as tiny_proof
from opensora_accel.training.true_size import TrueSize
from opensora_accel.verify.pool import RankError
from tests.tiers import some
from tests.training.pipelines import CAPTIONS, FROM_FRAMES, by_pipeline, setting, without_rounding
from tests.training.runs import assert_one_run, tiny_config
from tests.training.test_loop import curve

NAME = "SkyReelsV2Transformer3DModel"
INDEPENDENT, SORTED = (FlowConfig(diffusion_forcing=each) for each in ("independent", "non-decreasing"))
# Of 25 tokens, five in a latent frame, which neither two nor three ranks share evenly.
FORCED = {
    "model": {"class_name": NAME, "config": dict(RECIPES[NAME].tiny)},
    "flow.diffusion_forcing": "non-decreasing",
    "data.height": 8,
}


def test_times_of_frames_depend_on_the_position_alone():
    for config in (INDEPENDENT, SORTED):
        times = draw_times(config, 3.0, 0, [3, 4, 5], 7)
        assert times.shape == (3, 7) and times.dtype == torch.float64 and times.unique().numel() == 21
        assert torch.equal(times[1:2], draw_times(config, 3.0, 0, [4], 7))
        assert not torch.equal(times, draw_times(config, 3.0, 1, [3, 4, 5], 7))
        part = draw_times(dataclasses.replace(config, time_range=(0.5, 0.75)), 3.0, 0, range(50), 7)
        assert part.min() >= 0.5 and part.max() <= 0.75
    assert (times.diff() >= 0).all()
    assert not (draw_times(INDEPENDENT, 3.0, 0, range(50), 7).diff() >= 0).all(1).any()


def test_independent_times_are_those_of_clips():
    config = dataclasses.replace(INDEPENDENT, weighting="bell")
    found = draw_times(config, 3.0, 0, range(1000), 20)
    quantiles = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
    of_clips = draw_times(FlowConfig(), 3.0, 0, range(5000)).quantile(quantiles)
    torch.testing.assert_close(found.flatten().quantile(quantiles), of_clips, rtol=0, atol=0.02)
    weights = loss_weights(config, 3.0, found)
    assert weights.shape == found.shape and weights.mean().item() == pytest.approx(1.0, rel=0.02)


def fopp(num_frames, num_times, rng):
    """Timesteps of frames as AR-Diffusion draws them: by the number of ways that lead on to the last frame."""
    ways = numpy.ones((num_frames, num_times))
    for frame in reversed(range(num_frames - 1)):
        ways[frame] = ways[frame + 1][::-1].cumsum()[::-1]
    frame = rng.integers(num_frames)
    times = numpy.zeros(num_frames, dtype=int)
    times[frame] = rng.integers(num_times)
    for number in range(frame + 1, num_frames):
        first = times[number - 1]
        share = ways[number, first:] / ways[number, first:].sum()
        times[number] = first + rng.choice(num_times - first, p=share)
    # The other way round the same, from the last time down.
    for number in reversed(range(frame)):
        last = times[number + 1]
        share = ways[num_frames - 1 - number, num_times - 1 - last :]
        times[number] = last - rng.choice(last + 1, p=share / share.sum())
    return times


def test_non_decreasing_times_are_those_of_frame_oriented_probability_propagation():
    uniform = dataclasses.replace(SORTED, time_distribution="uniform")
    found = draw_times(uniform, 1.0, 0, range(2000), 4)
    rng = numpy.random.default_rng(0)
    expected = torch.tensor(numpy.stack([fopp(4, 200, rng) for _ in range(2000)])).double() / 199
    quantiles = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    torch.testing.assert_close(
        found.quantile(quantiles, 0), expected.quantile(quantiles, 0), rtol=0, atol=0.04
    )
    torch.testing.assert_close(found.T.corrcoef(), expected.T.corrcoef(), rtol=0, atol=0.07)


def test_each_frame_is_noisy_and_counts_by_its_own_time():
    clean, noise = torch.randn(2, 2, 3, 4, 5, 6, dtype=torch.float64)
    times, weights = torch.rand(2, 2, 4, dtype=torch.float64)
    weights = weights + 0.5
    seen = []

    def predict(noisy, timestep):
        seen.extend([*noisy, timestep])
        return [torch.zeros_like(noisy[0])]

    found = flow_loss(predict, [Stream(clean, noise)], times, weights=weights)
    by_hand = 0.0
    for clip in range(2):
        for frame in range(4):
            t, where = times[clip, frame], (clip, slice(None), frame)
            assert torch.equal(seen[0][where], (1 - t) * clean[where] + t * noise[where])
            by_hand += weights[clip, frame] * (noise - clean)[where].square().mean() / 8
    assert torch.equal(seen[1], times * 1000)
    torch.testing.assert_close(found, by_hand, rtol=1e-12, atol=0)


@pytest.mark.parametrize("num_steps", [1, 5])
def test_blocks_begin_as_in_the_pipeline(num_steps):
    """Its matrix of steps, and which frames move in each of them."""
    times = even_times(num_steps, 3.0)
    exact = torch.cat([times[:1], times])
    for num_frames, ar_step, block, num_given in (
        *((6, ar_step, block, 0) for ar_step in (0, 1, 2, 9) for block in (1, 2, 6)),
        (6, 2, 1, 1),
        (6, 0, 1, 2),
        (6, 1, 2, 2),
        (6, 9, 2, 4),
    ):
        rows = staggered(times, num_frames, ar_step, block, num_given)
        _, numbers, moves, intervals = SkyReelsV2DiffusionForcingPipeline.generate_timestep_matrix(
            None, num_frames, times[:-1] * 1000, num_frames, ar_step, num_given, block
        )
        assert intervals == [(0, num_frames)] * len(numbers) and len(rows) == len(numbers) + 1
        assert torch.equal(exact[numbers][:, num_given:], rows[:-1, num_given:])
        assert torch.equal((rows.diff(dim=0) != 0)[:, num_given:], moves[:, num_given:])


@pytest.mark.parametrize("frame_rate", [16.0, 24.0])
def test_a_sample_beside_a_frame_with_noise_on_it_is_the_pipelines(frame_rate, monkeypatch):
    """One frame after the other, with what is told of the frame rate."""
    made = setting(NAME, frame=FROM_FRAMES["SkyReels-V2"])
    objective, size, rng = made.objective, made.bucket, torch.Generator().manual_seed(1)
    objective.encoders.frame_rate = frame_rate
    flow = dataclasses.replace(objective.config.flow, ar_step=2, addnoise_condition=20.0)
    objective.config = dataclasses.replace(objective.config, flow=flow)
    noise = torch.randn(1, *made.shape, dtype=torch.float64, generator=rng)
    shape = 1, size.num_frames, size.height, size.width, 3
    frames = 255 * torch.randint(0, 2, shape, dtype=torch.uint8, generator=rng)
    drawn = iter(
        draw_noise(noise, objective.config.seed, [0], purpose=f"noise of given frames, step {step}")
        for step in range(100)
    )
    monkeypatch.setattr(torch, "randn_like", lambda like: next(drawn)[:, :, : like.size(2)])
    given = {"image": Image.fromarray(frames[0, 0].numpy()), "ar_step": 2, "addnoise_condition": 20}
    with without_rounding():
        expected = by_pipeline(made, noise, "latent", CAPTIONS[:1], **given, fps=int(frame_rate))
        condition, _ = objective.encoders.encode_condition(
            ["i2v_head"], frames, noise, [Clip("", 0, size)], [0]
        )
        (found,) = sample_latents(objective, [noise], CAPTIONS[:1], size, condition)
        objective.encoders.frame_rate = 40.0 - frame_rate
        (other,) = sample_latents(objective, [noise], CAPTIONS[:1], size, condition)
        objective.encoders.frame_rate = frame_rate
        pair = [torch.cat([each] * 2) for each in (noise, condition.latents, condition.given)]
        both = condition._replace(latents=pair[1], given=pair[2])
        timestep = torch.tensor([[200.0, 500.0, 900.0]] * 2, dtype=torch.float64)
        (together,) = objective.predict(pair[:1], timestep, size, CAPTIONS[:1] * 2, both)
        (alone,) = objective.predict([noise], timestep[:1], size, CAPTIONS[:1], condition)
    assert (found - expected).abs().max() < 1e-10
    assert (found - other).abs().max() > 1e-3, "the frame rate counts"
    # Its pipeline takes one clip a call.
    assert (together - alone).abs().max() < 1e-12


MESHES = [
    {"ulysses": 3},
    {"ring": 2},
    {"dp_replicate": 2},
    {"dp_shard": 2, "sharding": "zero3"},
    {"ring": 2, "ulysses": 2, "checkpoint": "full"},
]


@pytest.mark.parametrize("degrees", some(MESHES), ids=str)
@pytest.mark.parametrize("kind", some(["forced", "causal", "given"]))
def test_a_run_is_one_on_any_mesh(ranks, clips, tmp_path, degrees, kind):
    """Losses, norms and gradients are those of one rank; three share a clip unevenly."""
    changes = (
        FORCED
        | {
            "forced": {"model.config.inject_sample_info": True, "flow.shift": 3.0},
            "causal": {"flow.causal_block_size": 2, "data.num_frames": 6},
            "given": {
                "conditions.i2v_head": 1,
                "flow.diffusion_forcing": "independent",
                "flow.weighting": "bell",
            },
        }[kind]
    )
    changes["model"] = {**FORCED["model"], "config": dict(RECIPES[NAME].tiny)}
    found = []
    for number, plan in enumerate((Plan(precision="fp64"), Plan(precision="fp64", **degrees))):
        config = tiny_config(clips, tmp_path / str(number), plan, **changes)
        found.append(ranks(plan.world_size, curve, config, 3)[0])
    assert_one_run(*found)


def told(config):
    """What the model is told of the first batch, whose losses are those of a call for each clip alone."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    objective, batch = trainer.objective, next(iter(trainer.loader))
    calls = []
    objective.model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    encoded = objective.encoders.encode(batch)
    with torch.no_grad():
        whole = objective.loss(encoded).item()
        alone = [objective.loss(one).item() for one in encoded.one_by_one()]
        objective.loss_at(encoded, 0.5)
    return whole, alone, [kwargs for _, kwargs in calls]


def test_the_model_is_told_of_each_frame_and_a_frame_that_is_given_has_time_0(ranks, clips, tmp_path):
    changes = FORCED | {"conditions.t2v": 0, "conditions.i2v_head": 1}
    config = tiny_config(clips, tmp_path, Plan(precision="fp64"), **changes)
    whole, alone, calls = ranks(1, told, config)[0]
    assert whole == pytest.approx(sum(alone) / 4, rel=1e-12)
    first, *_, validation = calls
    assert first["enable_diffusion_forcing"] is True and "fps" not in first
    timestep = first["timestep"]
    assert timestep.shape == (4, 5) and (timestep[:, 0] == 0).all() and (timestep[:, 1:].diff() >= 0).all()
    assert timestep[:, 1:].unique().numel() == 16
    # All frames of a look have one time, but the one that is given.
    assert validation["timestep"][0].tolist() == [0.0] + [500.0] * 4


def test_the_proof_of_a_run_and_its_true_size_have_times_of_frames(tmp_path):
    tables = {"flow": {"diffusion_forcing": "independent", "causal_block_size": 4}}
    tables |= {"model": FORCED["model"], "data": {"num_frames": 8}}
    config = config_from_dict(tables, "the test")
    proof = tiny_proof(config, tmp_path)
    assert proof.flow.diffusion_forcing == "independent" and proof.data.num_frames == 6
    assert proof.model.config["num_frame_per_block"] == 2 and not proof.flow.causal_block_size
    true = TrueSize.of(config)
    assert true.arguments["num_frame_per_block"] == 4 and true.times(3).shape == (3, 8)


def config_of(**tables):
    return config_from_dict({"model": {"class_name": NAME}} | tables, "the test")


def test_what_does_not_fit_times_of_frames_is_refused():
    flow = {"diffusion_forcing": "independent"}
    for tables, message in (
        ({"flow": {"ar_step": 5}}, r"have times of their own; set flow\.diffusion_forcing"),
        ({"flow": {"causal_block_size": 2}}, r"have times of their own; set flow\.diffusion_forcing"),
        ({"flow": flow | {"time_distribution": "stretched"}}, "one time for a clip; leave them out"),
        ({"flow": flow | {"boundary": 0.5}}, "one time for a clip; leave them out"),
        (
            {"flow": {"diffusion_forcing": "non-decreasing", "weighting": "bell"}},
            r"set flow\.diffusion_forcing to independent",
        ),
        (
            {"flow": flow | {"addnoise_condition": 20.0}},
            r"this run gives none; set conditions\.i2v_head above 0 or flow\.sample_frames",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            config_of(**tables)
    codec = SpaceToDepth(4, torch.float32)
    with fake_world(0, 1):
        init_parallel(Plan(), "cpu")
        for tables, message in (
            ({"model": {"class_name": "WanTransformer3DModel"}}, "or choose .* SkyReelsV2Transformer3DModel"),
            (
                {"conditions": {"i2v_head": 1.0}, "image": {"width": 16}, "text": {"length": 512}},
                r"leave image\.path and image\.width out",
            ),
            ({"data": {"frame_rate": 24.0}}, r"inject_sample_info is False\); leave data\.frame_rate out"),
            (
                {"flow": flow | {"causal_block_size": 2}, "model": FORCED["model"]},
                r"the number of latent frames \(9\) must be a multiple of 2",
            ),
        ):
            run = config_of(**{"flow": flow} | tables)
            shapes = text_shapes(run.text, RECIPES[run.model.class_name].text)
            with pytest.raises(ValueError, match=message):
                build.build_model(run, codec, shapes, torch.float32)
        recipe = RECIPES[NAME]
        run = config_of(conditions={"i2v_head": 1.0})
        with pytest.raises(ValueError, match=r"set flow\.diffusion_forcing, or choose weights"):
            check_conditioning(recipe, recipe.frames[1], run)
        run = config_of(conditions={"i2v_head": 1.0}, flow=flow)
        assert configured.conditioning_of(run, codec) == recipe.frames[1]
        check_conditioning(recipe, recipe.frames[1], run)


def test_weights_of_diffusion_forcing_that_would_forget_it_are_warned_of(tmp_path, caplog):
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "SkyReelsV2DiffusionForcingPipeline"})
    )
    with fake_world(0, 1), caplog.at_level(logging.WARNING):
        init_parallel(Plan(), "cpu")
        model = {"path": str(tmp_path / "transformer")}
        check_recipe(RECIPES[NAME], config_of(model=model, flow={"diffusion_forcing": "independent"}))
        assert caplog.text == ""
        check_recipe(RECIPES[NAME], config_of(model=model))
    assert "set flow.diffusion_forcing to non-decreasing to keep what it learned" in caplog.text


def sampled(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    return len(trainer.train()), trainer.output


def test_a_run_trains_and_samples(ranks, clips, tmp_path):
    changes = FORCED | {"conditions.i2v_head": 1, "data.num_frames": 6, "steps": 2, "num_samples": 1}
    changes |= {"flow.causal_block_size": 2, "flow.ar_step": 1, "flow.addnoise_condition": 20}
    changes |= {"flow.sample_steps": 2, "flow.guidance": 2.0}
    (found,) = ranks(1, sampled, tiny_config(clips, tmp_path / "run", Plan(), **changes))
    assert found[0] == 2 and (found[1] / "samples/step_000002/strip.png").is_file()
    with pytest.raises(RankError, match=r"the number of latent frames \(5\) must be a multiple of 2"):
        ranks(1, sampled, tiny_config(clips, tmp_path / "b", Plan(), **changes | {"data.num_frames": 5}))
