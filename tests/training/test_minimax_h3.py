"""MiniMax H3: clips and their stereo sound in one sequence, as its pipeline makes them, and the same on any mesh."""

import json

import numpy
import pytest
import torch
from diffusers import MiniMaxH3ModularPipeline

from opensora_accel import Plan
from opensora_accel.training import configured, new_command
from opensora_accel.training.codec import LatentFrames, VideoVAE, build_codec
from opensora_accel.training.config import config_from_dict, load_config
from opensora_accel.training.encoding import Encoded
from opensora_accel.training.recipes import Inputs
from opensora_accel.training.samples import sample_latents
from opensora_accel.training.sections import CodecConfig, TextConfig
from opensora_accel.training.sound import EncodedSound, WaveVAE, build_sound_codec, sound_shape
from opensora_accel.training.text_encoders import build_text_encoder, text_shapes
from opensora_accel.verify.pool import RankError
from tests.tiers import CPU_AND_GPU, some
from tests.training.minimax_h3 import (
    CAPTIONS,
    CHANGES,
    CPU,
    MESHES,
    NAME,
    RECIPE,
    SIZE,
    STEPS,
    folder_of,
    make_parts,
    noise_of,
    replaced,
    setting,
    write_captioned,
)
from tests.training.pipelines import assert_the_answers_of_the_host, moved, without_rounding
from tests.training.runs import assert_one_run, losses, tiny_config
from tests.training.test_loop import curve
from tests.training.vaes import ltx2_audio_vae, minimax_h3_vae

# Of a run that gives no frames.
READS = configured.texts_of(config_from_dict({"model": {"class_name": NAME}}, "the test"))


@pytest.fixture(scope="module")
def parts():
    return make_parts()


@pytest.fixture(scope="module")
def made(parts):
    return setting(parts, parts.reader)


def test_a_sample_is_the_pipelines(made, monkeypatch):
    """Of captions of two lengths, whose clips the pipeline makes one by one."""
    # It makes 5 to 15 seconds, whatever its model can.
    monkeypatch.setattr(MiniMaxH3ModularPipeline, "min_duration", 0.0)
    noise, size = noise_of(made, 2), made.bucket
    assert noise[0].shape == (2, 4, 7, 8, 12) and noise[1].shape == (2, 4, 37, 2)

    def expected(row, **given):
        return made.pipeline(
            prompt=CAPTIONS[row],
            num_frames=size.num_frames,
            height=size.height,
            width=size.width,
            num_inference_steps=STEPS + 1,
            latents=noise[0][row : row + 1],
            audio_latents=noise[1][row].permute(2, 0, 1),
            **given,
        )

    outputs = ["latents", "audio_latents", "videos", "audio", "sampling_rate"]
    with without_rounding():
        clips, sounds = found = sample_latents(made.objective, noise, CAPTIONS, size)
        encoders = made.objective.encoders
        frames, (samples, rate) = encoders.codec.decode(clips), encoders.sounds.decode(sounds)
        whole = [expected(row, output_type="np", output=outputs) for row in range(2)]
    assert all((each - before).abs().max() > 0.1 for each, before in zip(found, noise, strict=True))
    for row, answer in enumerate(whole):
        assert (clips[row] - answer["latents"][0]).abs().max() < 1e-10
        assert (sounds[row].permute(2, 0, 1) - answer["audio_latents"]).abs().max() < 1e-10
        levels = torch.from_numpy(numpy.round(answer["videos"][0] * 255)).int()
        assert frames[row].shape == levels.shape == (22, 32, 48, 3)
        assert (frames[row].int() - levels).abs().max() <= 1
        assert rate == answer["sampling_rate"] == 32000
        assert samples[row].shape == (2, 37 * 800) and samples[row].std() > 1e-3
        assert torch.allclose(samples[row].double(), answer["audio"][0], atol=1e-6)


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_what_is_learned_and_made_on_a_gpu_is_that_of_the_host(made, device):
    try:
        assert_the_answers_of_the_host(made, device)
    finally:
        moved(made, CPU)


def test_clips_and_sound_are_encoded_as_they_are_decoded(parts):
    """By the VAEs' own calls: pixels as ImageNet's are made unit, and each channel of sound by itself."""
    codec, sounds, rng = VideoVAE(parts.vae), WaveVAE(parts.audio_vae), torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (2, *SIZE, 3), dtype=torch.uint8, generator=rng)
    mean, std = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
    pixels = ((frames / 255 - mean) / std).permute(0, 4, 1, 2, 3).double()
    statistics = [
        torch.tensor(each, dtype=torch.float64) for each in ((-1.0, 0.0, 0.5, 1.0), (0.5, 1.0, 1.5, 2.0))
    ]
    centre, width = (each.view(-1, 1, 1, 1) for each in statistics)
    with torch.no_grad():
        expected = (parts.vae.encode(pixels).latent_dist.mode() - centre) / width
        assert torch.allclose(codec.encode(frames).double(), expected, atol=1e-5)
        samples = torch.rand(2, 2, 37 * 800, generator=rng, dtype=torch.float64) * 2 - 1
        found = sounds.encode(samples)
        for row in range(2):
            for channel in range(2):
                alone = parts.audio_vae.encode(samples[row, channel][None, None]).latent_dist.mode()[0]
                alone = (alone - statistics[0].view(-1, 1)) / statistics[1].view(-1, 1)
                assert torch.allclose(found[row, ..., channel], alone, atol=1e-6)
    again, rate = sounds.decode(found)
    assert again.shape == samples.shape and rate == 32000


def test_latent_frames_begin_anew_with_each_chunk():
    frames = LatentFrames(4, chunk=5, fewest=7, step=5)
    assert frames.starts(7).tolist() == [0, 1, 5, 9, 13, 17, 18] and frames.num_frames(7) == 22
    assert [frames.num_latents(each) for each in (22, 39, 124)] == [7, 12, 37]
    assert frames.numbers(22)[:, :2].tolist() == [[0, 1], [0, 2], [0, 3], [0, 4]]
    assert frames.numbers(22)[:, -2:].tolist() == [[17, 18], [17, 19], [17, 20], [17, 21]]
    for wrong, use in ((1, "22"), (5, "22"), (21, "22"), (23, "22 or 39"), (120, "107 or 124")):
        with pytest.raises(
            ValueError, match=f"must be 22, or a multiple of 17 more, for this codec; use {use}$"
        ):
            frames.num_latents(wrong)
    assert VideoVAE(minimax_h3_vae()).latent_frames == frames


def test_rows_and_places_of_another_frame_rate():
    """At 12 frames a second a clip takes twice as long, and so does its sound: a second is 40 long for both."""
    sound = torch.zeros(1, 4, 73, 2)
    inputs = Inputs(
        torch.zeros(1, 4, 7, 4, 6),
        torch.tensor([500.0]),
        [torch.zeros(1, 9, 8)],
        [],
        frame_rate=12.0,
        latent_frames=LatentFrames(4, chunk=5, fewest=7, step=5),
        alpha=12.0,
        config={"patch_size": (1, 2, 2)},
        sound=sound,
    )
    found = RECIPE.arguments(inputs)
    assert found["hidden_states"].shape == (1, 42, 16) and found["audio_hidden_states"].shape == (1, 146, 4)
    places = found["position_ids"]
    assert places[:9, 0].tolist() == list(range(9)) and not places[:9, 1:].any()
    assert places[9:82, 0].tolist() == list(range(9, 82)) and places[82:155, 0].tolist() == list(range(9, 82))
    times = places[155:, 0].unique().tolist()
    assert times == pytest.approx([9 + 40 / 12 * frame for frame in (0, 1, 5, 9, 13, 17, 18)])
    # 4 × 6 latents, of a square of 24: sides of 0.816 and 1.225 times its own.
    assert places[155, 1:].tolist() == pytest.approx([16 * (1 - (4 / 6) ** 0.5), 16 * (1 - 1.5**0.5)])
    assert places[9:82, 2].unique().tolist() == [places[155, 2]]
    assert places[82:155, 2].unique().tolist() == [places[157, 2]]
    # Noise 0.5 of a clip is 0.2 of its sound; times run the other way.
    assert found["timestep"].tolist() == pytest.approx([0.5, 0.8])
    assert found["timestep_indices"].bincount().tolist() == [51, 146]
    assert found["token_tags"].bincount().tolist() == [42, 9, 146]


def test_sound_is_learned_at_its_own_time(made, monkeypatch):
    """The noise of a clip at 0.5 is 0.2 of its sound, which the model is told."""
    objective, (clean, sound) = made.objective, noise_of(made, 1)
    of_sound = EncodedSound(sound, torch.tensor([True]))
    batch = Encoded(made.bucket, [0], CAPTIONS[:1], clean, None, None, of_sound)
    seen = []

    def predict(noisy, timestep, **_):
        seen.append((noisy, timestep))
        return [torch.zeros_like(each) for each in noisy]

    monkeypatch.setattr(objective, "predict", predict)
    objective.loss_at(batch, 0.5)
    (noisy, timestep), (clip, other) = seen[0], batch.streams(objective.config.seed)
    assert timestep.tolist() == [500.0]
    torch.testing.assert_close(noisy[0], 0.5 * clean + 0.5 * clip.noise)
    torch.testing.assert_close(noisy[1], 0.8 * sound + 0.2 * other.noise)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return write_captioned(tmp_path_factory.mktemp("clips"))


@pytest.mark.parametrize("degrees", some(MESHES), ids=str)
def test_a_run_is_one_on_any_mesh(ranks, clips, tmp_path, degrees):
    """Losses, norms and gradients are those of one rank, of clips with captions of different lengths."""
    found = []
    changes = CHANGES | {"data.batch_size": 4}
    for number, plan in enumerate((Plan(precision="fp64"), Plan(precision="fp64", **degrees))):
        config = tiny_config(clips, tmp_path / str(number), plan, **changes)
        found.append(ranks(plan.world_size, curve, config, 3)[0])
    gradients = found[0][2]
    assert_one_run(*found)
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())


def loss_of_each(config):
    """Of a batch, and of each of its clips alone; whether the gradients of a step are those of the batch's loss."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    objective, parameters = trainer.objective, list(trainer.state.model.parameters())
    batch = objective.encoders.encode(next(trainer.loader))
    alone = [float(objective.loss(each)) for each in batch.one_by_one()]
    together = objective.loss(batch)
    expected = torch.autograd.grad(together, parameters)
    trainer.experts[0].backward(batch, is_last=True)
    is_same = all(
        torch.allclose(each.grad, gradient, rtol=1e-9, atol=1e-12)
        for each, gradient in zip(parameters, expected, strict=True)
    )
    return float(together), alone, is_same, objective.texts[0].num_tokens(batch.captions)


def test_a_batch_is_its_clips_one_by_one(ranks, clips, tmp_path):
    config = tiny_config(clips, tmp_path, Plan(precision="fp64"), **CHANGES)
    together, alone, is_same, lengths = ranks(1, loss_of_each, config)[0]
    assert together == pytest.approx(sum(alone) / len(alone), rel=1e-12) and len(set(alone)) == 4
    assert is_same and len(set(lengths)) > 1


@pytest.fixture(scope="module")
def pipeline_folder(parts, made, tmp_path_factory):
    return folder_of(parts, tmp_path_factory.mktemp("pipeline") / "h3", made.objective.model)


def test_encoders_from_its_folder(parts, pipeline_folder):
    """The part that reads is taken of the encoder, from the files of the whole."""
    config = TextConfig(path=str(pipeline_folder / "text_encoder"), dtype="fp32", length=12)
    reader = build_text_encoder(config, "", 0, CPU, torch.float32, READS)
    assert reader.shape == (12, 32) and text_shapes(config, READS) == [(12, 32)]
    found = reader.encode(CAPTIONS, CPU, torch.float32)
    expected = parts.reader.encode(CAPTIONS, CPU, torch.float64)
    assert torch.allclose(found.double(), expected, atol=1e-4) and expected.abs().max() > 0.1
    assert reader.num_tokens(CAPTIONS) == [7, 2]
    # What a tokenizer makes nothing of has a state all the same.
    assert not reader.encode([""], CPU, torch.float32).any() and reader.num_tokens([""]) == [0]
    of_sound = CodecConfig(sound_path=str(pipeline_folder / "audio_vae"))
    assert sound_shape(of_sound, RECIPE.sound).latents(22 / 24) == (4, 37, 2)
    codec = build_sound_codec(of_sound, RECIPE.sound, CPU, torch.float32)
    samples = torch.rand(1, 2, 1600) * 2 - 1
    assert torch.allclose(
        codec.encode(samples).double(), WaveVAE(parts.audio_vae).encode(samples.double()), atol=1e-4
    )


def test_an_encoder_that_is_kept_in_fp32_sees_no_rounded_pixels(pipeline_folder):
    frames = torch.randint(0, 256, (1, *SIZE, 3), dtype=torch.uint8)
    found = [
        build_codec(CodecConfig(path=str(pipeline_folder / "vae"), dtype=dtype), CPU, torch.float32)
        for dtype in ("bf16", "fp32")
    ]
    rounded, whole = (codec.encode(frames) for codec in found)
    assert found[0].model.dtype == torch.bfloat16 and torch.equal(rounded, whole)


def test_what_does_not_fit_is_refused(parts, pipeline_folder, tmp_path):
    shallow = json.loads((pipeline_folder / "text_encoder" / "config.json").read_text())
    shallow["text_config"]["num_hidden_layers"] = 50
    (tmp_path / "config.json").write_text(json.dumps(shallow))
    with pytest.raises(ValueError, match="has 50 layers, and what this model takes is given by the 50th"):
        text_shapes(TextConfig(path=str(tmp_path)), RECIPE.text)
    ltx2_audio_vae().save_pretrained(tmp_path / "ltx2")
    with pytest.raises(
        ValueError, match="holds 'AutoencoderKLLTX2Audio'; it takes a AutoencoderKLMiniMaxH3Audio"
    ):
        sound_shape(CodecConfig(sound_path=str(tmp_path / "ltx2")), RECIPE.sound)
    description = json.loads((pipeline_folder / "audio_vae" / "config.json").read_text())
    (tmp_path / "ltx2" / "config.json").write_text(json.dumps(description | {"latents_std": [1.0]}))
    with pytest.raises(ValueError, match="does not say the latents_std of its 4 channels"):
        sound_shape(CodecConfig(sound_path=str(tmp_path / "ltx2")), RECIPE.sound)


def test_a_configuration_for_its_folder(ranks, clips, pipeline_folder, tmp_path):
    output = tmp_path / "train.toml"
    assert new_command.main([str(pipeline_folder), "--data", str(clips), "--output", str(output)]) == 0
    config = load_config(output)
    assert (config.flow.shift, config.flow.caption_drop, config.data.frame_rate) == (12.0, 0.0, 24.0)
    assert config.codec.sound_path == str(pipeline_folder / "audio_vae")
    values = {"data.num_frames": 22, "data.height": 24, "data.width": 40, "data.frame_rate": 12.0}
    (losses_of_run,) = ranks(
        1, losses, replaced(config, output=str(tmp_path / "run"), num_samples=0, **values)
    )
    assert len(losses_of_run) == 4 and losses_of_run[0] > 0


def test_an_image_has_no_place_among_its_clips(ranks, clips, pipeline_folder, tmp_path):
    changes = {"data": {"folder": str(clips), "buckets": ["1x24x40", "22x24x40"], "batch_size": 2}, **CHANGES}
    changes |= {"codec": {"path": str(pipeline_folder / "vae")}}
    with pytest.raises(RankError, match=r"data.buckets 1x24x40: data.num_frames \(1\) must be 22, or"):
        ranks(1, losses, tiny_config(clips, tmp_path, **changes))
