"""Flow matching, its draws, the codecs and the schedule."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from opensora_accel.training.codec import SpaceToDepth, VideoVAE, build_codec, latent_shape
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.flow import (
    Stream,
    draw_noise,
    draw_times,
    drop_captions,
    flow_loss,
    loss_weights,
    sample,
    shifted,
    time_shift,
)
from opensora_accel.training.optim import EMA, learning_rate
from opensora_accel.training.recipes.base import even_times
from opensora_accel.training.sections import CodecConfig, FlowConfig, OptimConfig

CPU = torch.device("cpu")
# At 1, 5, 25, 50, 75 and 95 percent.
QUANTILES_OF_LTX2 = {
    1024: [0.039, 0.167, 0.47, 0.668, 0.816, 0.937],
    14080: [0.08, 0.366, 0.812, 0.914, 0.96, 0.988],
}


def test_the_shift_keeps_the_ends_and_grows_with_resolution_and_length():
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    assert shifted(t, 3.0)[[0, -1]].tolist() == [0.0, 1.0] and torch.equal(shifted(t, 1.0), t)
    assert (shifted(t, 3.0)[1:-1] > t[1:-1]).all()
    auto = FlowConfig()
    assert time_shift(auto, 256, 1) == 1.0 and time_shift(auto, 4096, 1) == 3.0
    assert time_shift(auto, 4096, 9) == pytest.approx(9.0)
    assert time_shift(FlowConfig(shift=2.5), 4096, 9) == 2.5
    # LTX-Video's: a mean of 0.95 at 1,024 tokens and of 2.05 at 4,096.
    ltx = FlowConfig(shift="ltx")
    assert math.log(time_shift(ltx, 64, 16)) == pytest.approx(0.95)
    assert math.log(time_shift(ltx, 256, 16)) == pytest.approx(2.05)


def test_stretched_times_are_those_of_ltx2s_trainer():
    """Quantiles of a million of its draws (`ShiftedLogitNormalTimestepSampler`, of 1,024 and of 14,080 tokens)."""
    for tokens, expected in QUANTILES_OF_LTX2.items():
        config = FlowConfig(shift="ltx", time_distribution="stretched")
        alpha = time_shift(config, tokens, 1)
        found = draw_times(config, alpha, 0, range(20_000))
        assert found.dtype == torch.float64 and found.min() > 0 and found.max() <= 1
        torch.testing.assert_close(
            found.quantile(torch.tensor([0.01, 0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)),
            torch.tensor(expected, dtype=torch.float64),
            rtol=0,
            atol=0.02,
        )
    with pytest.raises(ValueError, match="is over all times"):
        FlowConfig(time_distribution="stretched", weighting="bell")


def test_a_shift_is_a_mean_of_the_normal_distribution():
    plain, moved = FlowConfig(), FlowConfig(logit_mean=1.3)
    assert torch.allclose(
        draw_times(plain, math.exp(1.3), 0, range(100)), draw_times(moved, 1.0, 0, range(100)), atol=1e-12
    )
    wide = draw_times(FlowConfig(logit_std=2.0), 1.0, 0, range(4000))
    assert wide.logit().std().item() == pytest.approx(2.0, rel=0.05)
    with pytest.raises(ValueError, match="logit_std are for"):
        FlowConfig(time_distribution="uniform", logit_std=2.0)


@pytest.mark.parametrize("distribution", ["uniform", "logit-normal"])
def test_weights_are_a_bell_that_is_one_in_the_mean(distribution):
    config = FlowConfig(time_distribution=distribution, weighting="bell", shift=5.0)
    times = draw_times(config, 5.0, 0, range(20_000))
    weights = loss_weights(config, 5.0, times)
    assert weights.mean().item() == pytest.approx(1.0, rel=0.02)
    ends = loss_weights(config, 5.0, torch.tensor([0.0, 0.5, 0.25, 0.75, 1.0], dtype=torch.float64))
    assert ends[0].item() == pytest.approx(0, abs=1e-12) and ends[4].item() == pytest.approx(0, abs=1e-12)
    assert ends[2].item() == pytest.approx(ends[3].item()) and ends.argmax() == 1
    assert loss_weights(FlowConfig(), 5.0, times) is None


def test_the_bell_is_that_of_wans_training():
    """DiffSynth-Studio's, over its thousand times with shift 5 (fed7b18, `set_training_weight`)."""
    times = shifted(torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1], 5.0)
    heights = torch.exp(-2 * ((1000 * times - 500) / 1000) ** 2)
    heights = (heights - heights.min()) * 1000 / (heights - heights.min()).sum()
    ours = loss_weights(FlowConfig(time_distribution="uniform", weighting="bell"), 5.0, times)
    assert torch.allclose(ours, heights, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("time_range", [(0.875, 1.0), (0.0, 0.875), (0.3, 0.4)])
@pytest.mark.parametrize("alpha", [1.0, 5.0, 0.4])
@pytest.mark.parametrize("distribution", ["uniform", "logit-normal"])
def test_a_range_has_the_distributions_part_that_lies_in_it(distribution, alpha, time_range):
    others = {"logit_mean": 0.4, "logit_std": 1.3} if distribution == "logit-normal" else {}
    whole = FlowConfig(time_distribution=distribution, **others)
    part = dataclasses.replace(whole, time_range=time_range, weighting="bell")
    first, last = time_range
    drawn = draw_times(part, alpha, 0, range(4000))
    assert first <= drawn.min() and drawn.max() <= last, "one beyond would be another expert's"
    assert drawn.max() - drawn.min() > 0.8 * (last - first)
    expected = draw_times(whole, alpha, 1, range(20_000))
    expected = expected[(first <= expected) & (expected <= last)]
    # The greatest distance of their distributions, which is 0.04 by chance once in ten thousand for 4,000 and 2,500.
    bound = 2.3 * math.sqrt(1 / len(drawn) + 1 / len(expected))
    assert kolmogorov(drawn, expected) < bound
    assert loss_weights(part, alpha, drawn).mean().item() == pytest.approx(1.0, rel=0.05)


def kolmogorov(one, other):
    """The greatest distance of two empirical distributions."""
    points = torch.cat([one, other]).sort().values
    shares = [torch.searchsorted(each.sort().values, points, right=True) / len(each) for each in (one, other)]
    return (shares[0] - shares[1]).abs().max().item()


def test_a_range_is_a_lower_and_a_higher_time():
    with pytest.raises(ValueError, match="a lower and a higher time"):
        FlowConfig(time_range=(0.875, 0.2))
    with pytest.raises(ValueError, match="samples no whole clip"):
        config_from_dict({"flow": {"time_range": [0.875, 1.0]}}, "the test")
    config_from_dict({"flow": {"time_range": [0.875, 1.0]}, "num_samples": 0}, "the test")


def test_large_errors_count_by_their_size():
    """Beside huber_loss of PyTorch, which bends at once where this one bends little by little."""
    clean = torch.zeros(1, 1, 1, 1, 3, dtype=torch.float64)
    noise = torch.tensor([0.001, 1.0, 100.0], dtype=torch.float64).view_as(clean)

    def loss(huber, part):
        predicted = torch.where(torch.arange(3) == part, 0.0, noise)
        stream = Stream(clean, noise)
        return flow_loss(lambda *_: [predicted], [stream], torch.tensor([0.5]), huber=huber).item() * 3

    c = 0.1
    assert [loss(0.0, part) for part in range(3)] == pytest.approx([1e-6, 1.0, 1e4])
    assert loss(c, 0) == pytest.approx(1e-6, rel=1e-4) and loss(c, 2) == pytest.approx(2 * c * 100, rel=2e-3)
    for part, error in enumerate((0.001, 1.0, 100.0)):
        ours, theirs = loss(c, part), 2 * F.huber_loss(torch.tensor(error), torch.tensor(0.0), delta=c).item()
        assert theirs * 0.5 <= ours <= theirs * 1.06
    assert loss(1e6, 1) == pytest.approx(1.0, rel=1e-4), "with a large c all are squares"


def test_an_offset_moves_each_channel_of_a_sample_as_a_whole():
    like = torch.empty(3, 4, 2, 3, 5, dtype=torch.float64)
    plain, moved = (draw_noise(like, 0, [7, 8, 9], offset) for offset in (0.0, 0.25))
    moves = (moved - plain).flatten(2)
    assert (moves - moves[..., :1]).abs().max() < 1e-6 and moves[..., 0].unique().numel() == 12
    assert torch.equal(draw_noise(like[:1], 0, [8], 0.25)[0], moved[1]), "whatever samples come together"
    many = draw_noise(torch.empty(4000, 1, 1), 0, range(4000), 2.0)
    assert many.var().item() == pytest.approx(1 + 2.0**2, rel=0.1)


def test_draws_depend_on_the_position_alone():
    config, positions = FlowConfig(), [3, 4, 5, 6]
    times = draw_times(config, 2.0, 0, positions)
    assert torch.equal(times[2:], draw_times(config, 2.0, 0, positions[2:]))
    assert len(set(times.tolist())) == 4 and ((times > 0) & (times < 1)).all()
    assert not torch.equal(times, draw_times(config, 2.0, 1, positions))
    noise = draw_noise(torch.empty(4, 2, 3), 0, positions)
    assert torch.equal(noise[1], draw_noise(torch.empty(1, 2, 3), 0, [4])[0])
    assert not torch.equal(noise[0], noise[1])
    captions = drop_captions(["a"] * 1000, 0.25, 0, range(1000))
    assert 200 < captions.count("") < 300
    assert captions[10:20] == drop_captions(["a"] * 10, 0.25, 0, range(10, 20))
    uniform = draw_times(FlowConfig(time_distribution="uniform"), 1.0, 0, range(2000))
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.02)


def test_the_loss_of_the_true_velocity_is_zero():
    clean, noise = torch.randn(2, 2, 3, 4, 5, 6, dtype=torch.float64)
    times = torch.tensor([0.25, 0.75])
    seen = []

    def truth(x, timestep):
        seen.append((x, timestep))
        return [noise - clean]

    stream = Stream(clean, noise)
    assert flow_loss(truth, [stream], times).item() == 0.0
    (x,), timestep = seen[0]
    assert timestep.tolist() == [250.0, 750.0]
    assert torch.allclose(x[1], 0.25 * clean[1] + 0.75 * noise[1])
    assert flow_loss(lambda *_: [noise - clean + 2], [stream], times).item() == pytest.approx(4.0)


def test_two_streams_are_learned_at_one_time_and_what_is_not_there_counts_nothing():
    """Of two clips the second has no sound: whatever is answered for it costs nothing."""
    clean, noise = torch.randn(2, 2, 3, 4, 5, 6, dtype=torch.float64)
    sound, other = torch.randn(2, 2, 3, 7, 2, dtype=torch.float64)
    clips = Stream(clean, noise)
    sounds = Stream(sound, other, torch.tensor([True, False]).view(2, 1, 1, 1))
    seen = []

    def wrong(x, timestep):
        seen.append((x, timestep))
        return [noise - clean + 1, other - sound + torch.tensor([3.0, 100.0]).view(2, 1, 1, 1)]

    assert flow_loss(wrong, [clips, sounds], torch.tensor([0.25, 0.5])).item() == pytest.approx(1.0 + 9.0 / 2)
    (_, noisy), timestep = seen[0]
    assert torch.allclose(noisy[1], (sound[1] + other[1]) / 2) and timestep.tolist() == [250.0, 500.0]
    made = sample(lambda x, t: [noise - clean, other - sound], [noise, other], even_times(4, 2.0))
    torch.testing.assert_close(made, [clean, sound])


@pytest.mark.parametrize("alpha", [1.0, 3.0])
def test_euler_on_the_true_velocity_ends_at_the_data(alpha):
    target, noise = torch.randn(1, 2, 3), torch.randn(1, 2, 3)
    (found,) = sample(lambda x, t: [noise - target], [noise], even_times(7, alpha))
    assert torch.allclose(found, target, atol=1e-5)


def test_space_to_depth_is_exact_and_local():
    frames = torch.randint(0, 256, (2, 3, 8, 12, 3), dtype=torch.uint8)
    codec = SpaceToDepth(4, torch.float32)
    latents = codec.encode(frames)
    assert latents.shape == (2, 48, 3, 2, 3) and latents.abs().max() <= 1
    assert torch.equal(codec.decode(latents), frames)
    changed = frames.clone()
    changed[:, :, :4, :4] = 0
    assert torch.equal(codec.encode(changed)[..., 1:, :], latents[..., 1:, :])


def test_a_diffusers_vae_from_a_folder(tmp_path):
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    vae.save_pretrained(tmp_path)
    codec = build_codec(CodecConfig(path=str(tmp_path), dtype="fp32"), CPU, torch.float32)
    assert (codec.channels, codec.spatial, codec.latent_frames.temporal) == (16, 8, 4)
    frames = torch.randint(0, 256, (1, 5, 16, 24, 3), dtype=torch.uint8)
    latents = codec.encode(frames)
    assert latents.shape[1:] == latent_shape(codec, 5, 16, 24) == (16, 2, 2, 3)
    raw = vae.encode(frames.permute(0, 4, 1, 2, 3) / 127.5 - 1).latent_dist.mode()
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    assert torch.allclose(latents * std + mean, raw, atol=1e-5)
    assert codec.decode(latents).shape == frames.shape
    with pytest.raises(
        ValueError, match=r"data.num_frames \(6\) must be 1 more than a multiple of 4.*use 5 or 9"
    ):
        latent_shape(codec, 6, 16, 24)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AutoencoderKLWan", (16, 8, 4)),
        ("AutoencoderKLHunyuanVideo", (16, 8, 4)),
        ("AutoencoderKLLTXVideo", (128, 32, 8)),
        ("AutoencoderKLCogVideoX", (16, 8, 4)),
        ("AutoencoderKLMochi", (12, 8, 6)),
        ("AutoencoderKLTemporalDecoder", (4, 1, 1)),
        ("AutoencoderKLFlux2", None),
        ("AutoencoderKLKVAE", None),
    ],
)
def test_compression_of_the_vaes_of_diffusers(name, expected):
    import diffusers

    with torch.device("meta"):
        model = getattr(diffusers, name)()
    if expected is None:
        with pytest.raises(ValueError, match="does not say how far it compresses; the VAEs used here are"):
            VideoVAE(model)
    else:
        codec = VideoVAE(model)
        assert (codec.channels, codec.spatial, codec.latent_frames.temporal) == expected


def test_sizes_and_folders_that_do_not_fit(tmp_path):
    codec = SpaceToDepth(4, torch.float32)
    with pytest.raises(
        ValueError, match=r"data.width \(30\) must be a multiple of 4 for the codec; use 28 or 32"
    ):
        latent_shape(codec, 5, 16, 30)
    with pytest.raises(FileNotFoundError, match="give the local folder of a diffusers VAE"):
        build_codec(CodecConfig(path=str(tmp_path)), CPU, torch.float32)
    (tmp_path / "config.json").write_text('{"_class_name": "WanTransformer3DModel"}')
    with pytest.raises(ValueError, match="holds WanTransformer3DModel, not a VAE"):
        build_codec(CodecConfig(path=str(tmp_path)), CPU, torch.float32)


def test_the_schedule_warms_up_and_decays():
    config = OptimConfig(lr=1.0, warmup_steps=4)
    rates = [learning_rate(config, step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True) and rates[-1] == pytest.approx(1e-3)
    constant = OptimConfig(lr=1.0, warmup_steps=0, schedule="constant")
    assert {learning_rate(constant, step, 20) for step in range(20)} == {1.0}


def test_ema_follows_and_gives_back():
    model = torch.nn.Linear(2, 2)
    first = model.weight.detach().clone()
    ema = EMA(model, 0.5)
    with torch.no_grad():
        model.weight += 1
    ema.update()
    assert torch.allclose(ema.weights["weight"], first + 0.9), "the first update's decay is 1/10"
    with ema.applied():
        assert torch.allclose(model.weight, first + 0.9)
    assert torch.equal(model.weight, first + 1) and not math.isnan(model.weight.sum().item())
