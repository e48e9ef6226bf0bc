"""Sound: read where the frames are, as latents and back, and trained beside clips, the same on any mesh."""

from fractions import Fraction

import av
import numpy
import pytest
import torch
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from opensora_accel import Plan
from opensora_accel.training.data import ClipLoader
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.samples import write_video
from opensora_accel.training.sections import CodecConfig, DataConfig
from opensora_accel.training.sound import FoldedSound, SoundVAE, build_sound_codec, sound_shape
from opensora_accel.training.tiny_run import write_clips
from opensora_accel.training.video import UnreadableVideo, probe, read_sound
from opensora_accel.verify.pool import RankError
from tests.tiers import some
from tests.training.runs import tiny_config
from tests.training.test_loop import curve
from tests.training.test_recipes import ltx2_audio_vae, ltx2_vocoder

CPU = torch.device("cpu")
NAME = "LTX2VideoTransformer3DModel"
RATE, FPS, SECONDS = 8000, 10, 12


def sine(pitch, seconds=1.0, rate=RATE):
    return 0.5 * torch.sin(2 * torch.pi * pitch * torch.arange(int(seconds * rate)) / rate)[None]


@pytest.fixture(scope="module")
def ramp(tmp_path_factory):
    """A file whose sample n is n, of uncompressed sound that begins one second after its frames."""
    path = tmp_path_factory.mktemp("ramp") / "ramp.mov"
    with av.open(str(path), "w", format="mov") as container:
        video = container.add_stream("mpeg4", rate=FPS)
        video.height, video.width, video.pix_fmt = 16, 16, "yuv420p"
        audio = container.add_stream("pcm_s16le", rate=RATE, layout="mono")
        for number in range(SECONDS * FPS):
            picture = numpy.full((16, 16, 3), number, dtype=numpy.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(video.encode())
        samples = (numpy.arange((SECONDS - 2) * RATE) % 30000).astype(numpy.int16)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE, RATE, Fraction(1, RATE)
        container.mux(audio.encode(frame))
        container.mux(audio.encode())
    return path


@pytest.mark.parametrize("start", [0, 5, 10, 33, 77, 105])
def test_sound_is_that_of_the_frames(ramp, start):
    """Frame `start` is shown 0.1 · start seconds after the first, and the sound begins at 1 s and ends at 11 s."""
    found = read_sound(ramp, start, 9600, rate=RATE, num_channels=1)
    at = torch.arange(9600) + start * RATE // FPS - RATE
    expected = torch.where((at >= 0) & (at < (SECONDS - 2) * RATE), at % 30000, 0).float() / 2**15
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-6)


def test_sound_is_resampled_and_mixed(tmp_path):
    """A tone stays the tone, at the same moment, at another rate and in two channels."""
    frames = torch.zeros(30, 16, 16, 3, dtype=torch.uint8)
    write_video(tmp_path / "tone.mp4", frames, FPS, (sine(220, 3.0, 44100), 44100))
    assert probe(tmp_path / "tone.mp4").has_sound
    found = read_sound(tmp_path / "tone.mp4", 10, 16000, rate=16000, num_channels=2)
    expected = sine(220, 2.0, 16000)[:, :16000]
    assert found.shape == (2, 16000) and torch.equal(found[0], found[1])
    assert torch.corrcoef(torch.cat([found[:1], expected]))[0, 1] > 0.999, "220 Hz, and no millisecond late"


def test_files_without_sound_and_broken_ones(tmp_path, ramp):
    write_video(tmp_path / "silent.mp4", torch.zeros(5, 16, 16, 3, dtype=torch.uint8), FPS)
    assert not probe(tmp_path / "silent.mp4").has_sound
    assert read_sound(tmp_path / "silent.mp4", 0, 100, rate=RATE, num_channels=1) is None
    (tmp_path / "broken.mov").write_bytes(ramp.read_bytes()[:2000])
    with pytest.raises(UnreadableVideo, match="broken"):
        read_sound(tmp_path / "broken.mov", 0, 100, rate=RATE, num_channels=1)


def test_folded_sound_is_exact():
    codec = FoldedSound(torch.float64)
    samples = torch.rand(2, 1, codec.shape.num_samples(1.9), dtype=torch.float64) * 2 - 1
    latents = codec.encode(samples)
    assert latents.shape == (2, *codec.shape.latents(1.9)) == (2, 20, 48, 16)
    found, rate = codec.decode(latents)
    assert rate == 8000 and torch.allclose(found.double(), samples, atol=1e-6)
    # The second position is the second 320 samples.
    assert torch.equal(latents[:, :, 1].flatten(1), 4 * samples[:, 0, 320:640])


def test_spectra_are_those_that_the_vae_was_trained_on():
    """By another library: 64 bands to 8 kHz on Slaney's scale, of magnitudes, mirrored at the ends."""
    torch.manual_seed(0)
    codec = SoundVAE(ltx2_audio_vae(), ltx2_vocoder)
    samples = torch.randn(1, 2, codec.shape.num_samples(0.5))
    found = codec.spectrogram(samples)
    # 12 positions: one spectrum, and four for each other.
    assert found.shape == (1, 2, 45, 8)
    filters = mel_filter_bank(513, 8, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
    for channel, bands in zip(samples[0], found[0], strict=True):
        expected = spectrogram(
            channel.numpy(),
            window_function(1024, "hann"),
            1024,
            160,
            power=1.0,
            mel_filters=filters,
            mel_floor=1e-5,
            log_mel="log",
        )
        torch.testing.assert_close(bands, torch.from_numpy(expected.T[:45]).float(), rtol=0, atol=1e-3)
    latents = codec.encode(samples)
    assert latents.shape == (1, *codec.shape.latents(0.5)) == (1, 4, 12, 2)
    again, rate = codec.decode(latents)
    assert rate == 24000 and again.shape == (1, 2, 45 * 4)


def test_a_vae_of_a_folder_with_its_vocoder(tmp_path):
    torch.manual_seed(0)
    vae, vocoder = ltx2_audio_vae(), ltx2_vocoder()
    config = CodecConfig(sound_path=str(tmp_path / "audio_vae"))
    with pytest.raises(FileNotFoundError, match=r"audio_vae has no config\.json"):
        sound_shape(config)
    vae.save_pretrained(tmp_path / "audio_vae")
    with pytest.raises(FileNotFoundError, match=r"vocoder of codec.sound_path.* has no config.json"):
        build_sound_codec(config, CPU, torch.float32)
    vae.save_pretrained(tmp_path / "vocoder")
    with pytest.raises(ValueError, match="holds 'AutoencoderKLLTX2Audio'; it takes a LTX2Vocoder or"):
        build_sound_codec(config, CPU, torch.float32)
    vocoder.save_pretrained(tmp_path / "vocoder")
    codec = build_sound_codec(config, CPU, torch.float32)
    assert codec.shape == sound_shape(config)
    latents = torch.randn(1, *codec.shape.latents(0.5))
    found, expected = codec.decode(latents), SoundVAE(vae, lambda: vocoder).decode(latents)
    assert torch.equal(found[0], expected[0]) and found[1] == expected[1]


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Five that hum, of which one is silent."""
    folder = write_clips(tmp_path_factory.mktemp("clips"), with_sound=True)
    write_video(folder / "1.mp4", torch.zeros(12, 24, 40, 3, dtype=torch.uint8), 12)
    return folder


def loader(folder, **options):
    config = DataConfig(folder=str(folder), num_frames=5, height=24, width=40, batch_size=5, **options)
    shape = sound_shape(CodecConfig())
    return ClipLoader(config, seed=0, data_rank=0, data_size=1, group=None, sound=shape)


def test_batches_have_the_sound_of_their_clips(clips, caplog):
    batches = loader(clips)
    assert batches.frame_rate == 12
    assert "1 of 5 videos are learned without sound, 1.mp4 among them: they have none" in caplog.text
    batch = next(batches)
    for file, sound, clip in zip(batch.files, batch.sounds, batch.clips, strict=True):
        if file == "1.mp4":
            assert sound is None
            continue
        # Of 5 frames at 12 a second: 10 positions of 320 samples.
        pitch, first = 110 * (1 + int(file[0])), clip.start * RATE // 12
        assert sound.shape == (1, 3200)
        expected = 0.6 * sine(pitch)[:, first : first + 3200]
        assert torch.corrcoef(torch.cat([sound, expected]))[0, 1] > 0.98, file


def test_sound_of_another_frame_rate_is_left_out(clips, caplog):
    """Told 24 frames a second, a clip of 5 frames lasts 0.2 s, and that of a file of 12 a second 0.4 s."""
    batch = next(loader(clips, frame_rate=24.0))
    assert batch.sounds == [None] * 5
    assert "5 of 5 videos are learned without sound" in caplog.text
    assert "-r 24" in caplog.text and "0.mp4 with 12" in caplog.text
    # Every second frame of theirs.
    assert sum(each is not None for each in next(loader(clips, frame_rate=6.0, frame_stride=2)).sounds) == 4


CHANGES = {"model.class_name": NAME, "model.config": dict(RECIPES[NAME].tiny)}


@pytest.mark.parametrize("degrees", some([{"ulysses": 3}, {"ring": 2}, {"dp_replicate": 2}]), ids=str)
def test_a_run_with_sound_is_one_on_any_mesh(ranks, clips, tmp_path, degrees):
    """Losses, norms and gradients are those of one rank, whatever clips have sound; three share a clip unevenly."""
    found = []
    for number, plan in enumerate((Plan(precision="fp64"), Plan(precision="fp64", **degrees))):
        config = tiny_config(clips, tmp_path / str(number), plan, **CHANGES)
        found.append(ranks(plan.world_size, curve, config, 2)[0])
    (losses, norms, gradients), (others, other_norms, other_gradients) = found
    assert others == pytest.approx(losses, rel=1e-9) and other_norms == pytest.approx(norms, rel=1e-9)
    for weight, gradient in gradients.items():
        assert torch.allclose(other_gradients[weight], gradient, rtol=1e-8, atol=1e-11), weight
    assert all(gradient.abs().sum() > 0 for name, gradient in gradients.items() if "audio" in name)


def test_sound_that_is_not_there_counts_nothing(ranks, tmp_path):
    """A run whose clips are all silent learns no sound: what answers for it has gradients of 0."""
    folder = write_clips(tmp_path / "clips")
    plan = Plan(precision="fp64")
    _, _, gradients = ranks(1, curve, tiny_config(folder, tmp_path / "run", plan, **CHANGES), 1)[0]
    assert not gradients["audio_proj_out.weight"].any() and gradients["proj_out.weight"].any()


def sampled(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    trainer.train()


def test_samples_have_sound(ranks, clips, tmp_path):
    config = tiny_config(clips, tmp_path, steps=2, num_samples=1, **{"flow.sample_steps": 2}, **CHANGES)
    ranks(1, sampled, config)
    (path,) = tmp_path.glob("samples/step_000002/*.mp4")
    info = probe(path)
    assert info.has_sound and info.fps == 12 and info.num_frames == 5
    sound = read_sound(path, 0, 3200, rate=RATE, num_channels=1)
    assert sound.abs().max() > 0.05


def test_an_audio_vae_for_a_model_that_makes_no_sound_is_refused(ranks, clips, tmp_path):
    config = tiny_config(clips, tmp_path, **{"codec.sound_path": "audio_vae"})
    with pytest.raises(RankError, match=r"WanTransformer3DModel makes no sound; leave codec.sound_path out"):
        ranks(1, curve, config, 1)
