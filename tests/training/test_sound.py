"""Sound: read where the frames are, as latents and back, and trained beside clips, the same on any mesh."""

import json
import shutil
import tarfile
from fractions import Fraction

import av
import numpy
import pytest
import torch
from diffusers.pipelines.ltx2 import LTX2VocoderWithBWE
from PIL import Image
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from opensora_accel import Plan
from opensora_accel.training.clips import VideoFolder
from opensora_accel.training.data import ClipLoader
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.samples import write_video
from opensora_accel.training.sections import CodecConfig, DataConfig
from opensora_accel.training.sound import FoldedSound, SpectrumVAE, build_sound_codec, sound_shape
from opensora_accel.training.soundtrack import read_sound
from opensora_accel.training.tiny_run import proof_of, write_clips
from opensora_accel.training.true_size import TrueSize
from opensora_accel.training.video import UnreadableVideo, Video, probe, read_timed_clip
from opensora_accel.verify.pool import RankError
from tests.tiers import some
from tests.training.runs import assert_one_run, losses, tiny_config
from tests.training.test_loop import curve
from tests.training.vaes import ltx2_audio_vae, ltx2_vocoder

CPU = torch.device("cpu")
NAME = "LTX2VideoTransformer3DModel"
SOUND = RECIPES[NAME].sound
RATE, FPS, SECONDS = 8000, 10, 12


def sine(pitch, seconds=1.0, rate=RATE):
    return 0.5 * torch.sin(2 * torch.pi * pitch * torch.arange(int(seconds * rate)) / rate)[None]


def written(path, sound, layout, codec, container=None, begins_s=0, seconds=SECONDS):
    """A file of black frames, with `sound` [channels, samples] that begins so many seconds after them."""
    with av.open(str(path), "w", format=container) as opened:
        video = opened.add_stream("mpeg4" if path.suffix != ".flv" else "flv1", rate=FPS)
        video.height, video.width, video.pix_fmt = 16, 16, "yuv420p"
        audio = opened.add_stream(codec, rate=sound[1], layout=layout)
        for _ in range(seconds * FPS):
            picture = numpy.zeros((16, 16, 3), dtype=numpy.uint8)
            opened.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        opened.mux(video.encode())
        samples = sound[0]
        kind = "s16" if samples.dtype == numpy.int16 else "fltp"
        frame = av.AudioFrame.from_ndarray(numpy.ascontiguousarray(samples), format=kind, layout=layout)
        frame.sample_rate, frame.pts = sound[1], begins_s * sound[1]
        frame.time_base = Fraction(1, sound[1])
        opened.mux(audio.encode(frame))
        opened.mux(audio.encode())
    return path


@pytest.fixture(scope="module")
def ramp(tmp_path_factory):
    """A file whose sample n is n, of uncompressed sound that begins one second after its frames."""
    samples = (numpy.arange((SECONDS - 2) * RATE) % 30000).astype(numpy.int16)[None]
    path = tmp_path_factory.mktemp("ramp") / "ramp.mov"
    return written(path, (samples, RATE), "mono", "pcm_s16le", "mov", begins_s=1)


@pytest.mark.parametrize("start", [0, 5, 10, 33, 77, 105])
def test_sound_is_that_of_the_frames(ramp, start):
    """Frame `start` is shown 0.1 · start seconds after the first, and the sound begins at 1 s and ends at 11 s."""
    frames, (first, last) = read_timed_clip(ramp, start, 13, height=16, width=16)
    assert len(frames) == 13 and last - first == Fraction(12, FPS)
    found = read_sound(ramp, first, 9600, rate=RATE, num_channels=1)
    at = torch.arange(9600) + start * RATE // FPS - RATE
    expected = torch.where((at >= 0) & (at < (SECONDS - 2) * RATE), at % 30000, 0).float() / 2**15
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-6)


CONTAINERS = {
    ".mp4": "aac",
    ".mkv": "aac",
    ".opus.mkv": "libopus",
    ".flv": "aac",
    ".avi": "mp3",
    ".ts": "aac",
    ".mov": "aac",
}


@pytest.mark.parametrize("begin_s", [Fraction(0), Fraction(1, 10), Fraction(23, 10)])
@pytest.mark.parametrize("ending", CONTAINERS)
def test_sound_has_no_joints_in_any_container(tmp_path, ending, begin_s):
    """A tone goes on through all parts of the file, as loud as it was, and where it was to a few samples."""
    rate = 48000 if "opus" in ending else 44100
    path = tmp_path / f"tone{ending}"
    written(path, (sine(220, 4.0, rate).numpy(), rate), "mono", CONTAINERS[ending], seconds=4)
    _, (first, _) = read_timed_clip(path, 0, 1, height=16, width=16)
    found = read_sound(path, first + begin_s, 16000, rate=16000, num_channels=1)[0]
    at = torch.arange(16000) / 16000
    # What is left of it when its own sine and cosine are taken away.
    waves = torch.stack([torch.sin(2 * torch.pi * 220 * at), torch.cos(2 * torch.pi * 220 * at)], 1)
    # Encoders begin with some silence.
    inner = slice(2000, None)
    weights = torch.linalg.lstsq(waves[inner], found[inner, None]).solution
    rest = found[inner] - (waves[inner] @ weights)[:, 0]
    assert rest.square().mean() < 1e-3 * found[inner].square().mean()
    # LAME takes 5 % off.
    assert weights.norm().item() == pytest.approx(0.475 if ending == ".avi" else 0.5, rel=0.02)


LAYOUTS = {
    "mono": ([0.4], [0.4, 0.4], [0.4]),
    "stereo": ([0.4, 0.2], [0.4, 0.2], [0.3]),
    # As loud on each side where all channels are.
    "5.1": ([0.4] * 6, [0.4, 0.4], [0.4]),
    "7.1": ([0.4] * 8, [0.4, 0.4], [0.4]),
    "quad": ([0.1, 0.2, 0.3, 0.4], [0.25, 0.25], [0.25]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_channels_are_mixed_as_loud_as_they_are(tmp_path, layout):
    given, in_two, in_one = LAYOUTS[layout]
    tones = torch.cat([each * 2 * sine(220, 2.0) for each in given]).numpy()
    path = tmp_path / "mix.mov"
    samples = (tones * 32767).astype(numpy.int16).T.reshape(1, -1)
    written(path, (samples, RATE), layout, "pcm_s16le", "mov", seconds=2)
    for expected in (in_two, in_one):
        found = read_sound(path, Fraction(0), 8000, rate=RATE, num_channels=len(expected))
        assert found.abs().amax(1).tolist() == pytest.approx(expected, rel=0.01)
        assert found.abs().max() <= 1


def test_files_without_sound_and_broken_ones(tmp_path, ramp):
    write_video(tmp_path / "silent.mp4", torch.zeros(5, 16, 16, 3, dtype=torch.uint8), FPS)
    assert not probe(tmp_path / "silent.mp4").has_sound and probe(ramp).has_sound
    assert read_sound(tmp_path / "silent.mp4", Fraction(0), 100, rate=RATE, num_channels=1) is None
    (tmp_path / "broken.mov").write_bytes(ramp.read_bytes()[:2000])
    with pytest.raises(UnreadableVideo, match="broken"):
        read_sound(tmp_path / "broken.mov", Fraction(0), 100, rate=RATE, num_channels=1)


def test_folded_sound_is_exact():
    codec = FoldedSound(SOUND.folded, torch.float64)
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
    codec = SpectrumVAE(ltx2_audio_vae(), ltx2_vocoder)
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


def wide_vocoder():
    """LTX-2.3's, of 48,000 samples a second."""
    small = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 1, 1]]}
    small |= {f"bwe_{name}": value for name, value in small.items()}
    return LTX2VocoderWithBWE(in_channels=16, hidden_channels=64, bwe_hidden_channels=32, **small)


@pytest.mark.parametrize(("vocoder", "rate"), [(ltx2_vocoder, 24000), (wide_vocoder, 48000)])
def test_a_vae_of_a_folder_with_its_vocoder(tmp_path, vocoder, rate):
    torch.manual_seed(0)
    vae, vocoder = ltx2_audio_vae(), vocoder()
    config = CodecConfig(sound_path=str(tmp_path / "audio_vae"))
    with pytest.raises(FileNotFoundError, match=r"audio_vae has no config\.json"):
        sound_shape(config, SOUND)
    vae.save_pretrained(tmp_path / "audio_vae")
    with pytest.raises(FileNotFoundError, match=r"vocoder of codec.sound_path.* has no config.json"):
        build_sound_codec(config, SOUND, CPU, torch.float32)
    vae.save_pretrained(tmp_path / "vocoder")
    with pytest.raises(ValueError, match="holds 'AutoencoderKLLTX2Audio'; it takes a LTX2Vocoder or"):
        build_sound_codec(config, SOUND, CPU, torch.float32)
    vocoder.save_pretrained(tmp_path / "vocoder")
    codec = build_sound_codec(config, SOUND, CPU, torch.float32)
    assert codec.shape == sound_shape(config, SOUND)
    latents = torch.randn(1, *codec.shape.latents(0.5))
    found, expected = codec.decode(latents), SpectrumVAE(vae, lambda: vocoder).decode(latents)
    assert torch.equal(found[0], expected[0]) and found[1] == expected[1] == rate
    (tmp_path / "vocoder" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no diffusion_pytorch_model\.safetensors"):
        build_sound_codec(config, SOUND, CPU, torch.float32)


@pytest.mark.parametrize("change", [{"mel_bins": None}, {"in_channels": 6}, {"sample_rate": 0}])
def test_a_vae_of_another_kind_is_refused_in_one_line(tmp_path, change):
    vae = {"_class_name": "AutoencoderKLLTX2Audio"}
    (tmp_path / "config.json").write_text(json.dumps(vae))
    # What is left out is as the class has it.
    assert sound_shape(CodecConfig(sound_path=str(tmp_path)), SOUND).latents(2.0) == (8, 50, 16)
    (tmp_path / "config.json").write_text(json.dumps(vae | change))
    with pytest.raises(ValueError, match="it takes one of 1 or 2 channels whose bands are a multiple of 4"):
        sound_shape(CodecConfig(sound_path=str(tmp_path)), SOUND)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Five that hum, of which one is silent."""
    folder = write_clips(tmp_path_factory.mktemp("clips"), with_sound=True)
    write_video(folder / "1.mp4", torch.zeros(12, 24, 40, 3, dtype=torch.uint8), 12)
    return folder


def loader(folder, **options):
    config = DataConfig(folder=str(folder), num_frames=5, height=24, width=40, batch_size=5, **options)
    shape = SOUND.folded
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
        assert sound.abs().max().item() == pytest.approx(0.3, rel=0.1)


def test_sound_of_another_frame_rate_is_left_out(clips, caplog):
    """Told 24 frames a second, a clip of 5 frames lasts 0.2 s, and that of a file of 12 a second 0.4 s."""
    batch = next(loader(clips, frame_rate=24.0))
    assert batch.sounds == [None] * 5
    assert "5 of 5 videos are learned without sound" in caplog.text
    assert "-r 24" in caplog.text and "0.mp4 with 12" in caplog.text
    # Every second frame of theirs.
    caplog.clear()
    assert sum(each is not None for each in next(loader(clips, frame_rate=6.0, frame_stride=2)).sounds) == 4


def test_a_clip_in_which_the_picture_stands_still_is_learned_without_sound(tmp_path):
    """A phone leaves frames out where nothing moves: its rate is 10 in the mean, and the clip lasts 2 s longer."""
    path = tmp_path / "stalls.mkv"
    with av.open(str(path), "w") as container:
        video, audio = (
            container.add_stream("mpeg4", rate=FPS),
            container.add_stream("pcm_s16le", rate=RATE, layout="mono"),
        )
        video.height, video.width, video.pix_fmt = 24, 40, "yuv420p"
        for number in range(12):
            frame = av.VideoFrame.from_ndarray(
                numpy.full((24, 40, 3), 9 * number, dtype=numpy.uint8), format="rgb24"
            )
            frame.pts = number + 20 * (number > 5)
            container.mux(video.encode(frame))
        container.mux(video.encode())
        samples = (sine(220, 3.2) * 32767).short().numpy()
        sound = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        sound.sample_rate, sound.pts = RATE, 0
        container.mux(audio.encode(sound))
        container.mux(audio.encode())
    video = Video(
        "stalls.mkv", "a caption", probe(path), DataConfig(num_frames=5, height=24, width=40).sizes[0]
    )
    config = DataConfig(folder=str(tmp_path), num_frames=5, height=24, width=40)
    folder = VideoFolder([video], config, seed=0, sound=SOUND.folded, frame_rate=FPS)
    starts = {position: folder.start(video, position) for position in range(40)}
    for position, start in starts.items():
        stands_still = start <= 5 < start + 4
        assert (folder[position, 0].sound is None) == stands_still, start
    assert len(set(starts.values())) == 8


def test_damaged_sound_sets_a_file_aside(tmp_path, monkeypatch):
    folder = write_clips(tmp_path / "clips", with_sound=True)

    def damaged(path, *arguments, **options):
        if path.name == "2.mp4":
            raise UnreadableVideo(f"{path}: its sound is damaged")
        return read_sound(path, *arguments, **options)

    monkeypatch.setattr("opensora_accel.training.clips.read_sound", damaged)
    batches = loader(folder)
    assert "2.mp4" not in next(batches).files and "its sound is damaged" in batches.quarantined["2.mp4"]
    config = DataConfig(folder=str(folder), num_frames=5, height=24, width=40)
    video = Video("2.mp4", "a caption", probe(folder / "2.mp4"), config.sizes[0])
    sample = VideoFolder([video], config, seed=0, sound=SOUND.folded, frame_rate=12)[0, 0]
    assert sample.frames is None and "its sound is damaged" in sample.error, "held out, it counts nothing"


def test_workers_and_shards_have_sound(tmp_path):
    folder = write_clips(tmp_path / "clips", with_sound=True)
    expected = next(loader(folder))
    by_workers = next(loader(folder, num_workers=1))
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        for number, line in enumerate((folder / "metadata.jsonl").read_text().splitlines()):
            shard.add(folder / f"{number}.mp4", f"{number}.mp4")
            (tmp_path / f"{number}.txt").write_text(json.loads(line)["caption"])
            shard.add(tmp_path / f"{number}.txt", f"{number}.txt")
    (tmp_path / "shards").mkdir()
    shutil.move(tmp_path / "shard.tar", tmp_path / "shards" / "shard.tar")
    of_shard = next(loader(tmp_path / "shards"))
    for found in (by_workers, of_shard):
        for one, other in zip(found.sounds, expected.sounds, strict=True):
            assert torch.equal(one, other)


CHANGES = {"model.class_name": NAME, "model.config": dict(RECIPES[NAME].tiny)}


@pytest.mark.parametrize("degrees", some([{"ulysses": 3}, {"ring": 2}, {"dp_replicate": 2}]), ids=str)
def test_a_run_with_sound_is_one_on_any_mesh(ranks, clips, tmp_path, degrees):
    """Losses, norms and gradients are those of one rank, whatever clips have sound; three share a clip unevenly."""
    found = []
    for number, plan in enumerate((Plan(precision="fp64"), Plan(precision="fp64", **degrees))):
        config = tiny_config(clips, tmp_path / str(number), plan, **CHANGES)
        found.append(ranks(plan.world_size, curve, config, 2)[0])
    gradients = found[0][2]
    assert_one_run(*found)
    assert all(gradient.abs().sum() > 0 for name, gradient in gradients.items() if "audio" in name)


def encoded(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    batch = next(trainer.loader)
    made = trainer.objective.encoders.encode(batch)
    first, sound = made.streams(0, 0.5)
    plain = [each.noise.flatten(1) for each in made.streams(0)]
    held_out = [each.sounds[0] is not None for each, _ in trainer.loader.held_out_batches()]
    # Both are drawn from the position; one is not the beginning of the other.
    assert not torch.allclose(plain[1], plain[0][:, : plain[1].size(1)])
    return batch.files, made.sound, sound.learned.flatten().tolist(), first.noise, sound.noise, held_out


def test_silence_stands_for_sound_that_is_not_there(ranks, clips, tmp_path):
    changes = {"data.batch_size": 4, "validation.num_clips": 1, **CHANGES}
    config = tiny_config(clips, tmp_path, **changes)
    files, (latents, is_there), learned, of_clips, noise, held_out = ranks(1, encoded, config)[0]
    assert is_there.tolist() == learned == [file != "1.mp4" for file in files] and held_out
    for file, each in zip(files, latents, strict=True):
        assert bool(each.any()) == (file != "1.mp4")
    # An offset is of brightness: means of the channels of clips are 0.5 apart, and of sound nearly none.
    assert of_clips.flatten(2).mean(2).std() > 0.3 > 3 * noise.flatten(2).mean(2).std()


def test_images_beside_clips_with_sound(ranks, tmp_path):
    folder = write_clips(tmp_path / "clips", num_videos=3, with_sound=True)
    Image.fromarray(numpy.full((24, 40, 3), 200, dtype=numpy.uint8)).save(folder / "0.png")
    with open(folder / "metadata.jsonl", "a", encoding="utf-8") as lines:
        lines.write(json.dumps({"file": "0.png", "caption": "a grey picture"}) + "\n")
    sizes = {"folder": str(folder), "buckets": ["1x24x40", "5x24x40"], "batch_size": 2}
    found = []
    for number, plan in enumerate((Plan(precision="fp64"), Plan(precision="fp64", ulysses=2))):
        config = tiny_config(folder, tmp_path / str(number), plan, data=sizes, **CHANGES)
        found.append(ranks(plan.world_size, losses, config)[0])
    assert found[1] == pytest.approx(found[0], rel=1e-9)


def test_sound_that_is_not_there_counts_nothing(ranks, tmp_path):
    """A run whose clips are all silent learns no sound: what answers for it has gradients of 0."""
    folder = write_clips(tmp_path / "clips")
    plan = Plan(precision="fp64")
    _, _, gradients = ranks(1, curve, tiny_config(folder, tmp_path / "run", plan, **CHANGES), 1)[0]
    assert not gradients["audio_proj_out.weight"].any() and gradients["proj_out.weight"].any()


@pytest.mark.parametrize("options", [{}, {"use_prompt_embeddings": False, "cross_attn_mod": True}], ids=str)
def test_the_proof_of_a_run_has_sound(ranks, clips, tmp_path, options):
    changes = CHANGES | {"model.config": {**CHANGES["model.config"], **options}, "text.width": 36}
    config = tiny_config(clips, tmp_path / "run", **changes)
    proof = proof_of(config, tmp_path, max_ranks=2)
    assert probe(tmp_path / "clips" / "0.mp4").has_sound
    found = ranks(1, curve, proof.step.config, 1)[0]
    assert found[2]["audio_proj_out.weight"].any()
    inputs = TrueSize.of(config).inputs(2)
    # Of 5 frames at 25 a second.
    assert inputs.sound.shape == (2, 20, 5, 16)


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
    sound = read_sound(path, Fraction(0), 3200, rate=RATE, num_channels=1)
    assert sound.abs().max() > 0.05


def test_an_audio_vae_for_a_model_that_makes_no_sound_is_refused(ranks, clips, tmp_path):
    config = tiny_config(clips, tmp_path, **{"codec.sound_path": "audio_vae"})
    with pytest.raises(RankError, match=r"WanTransformer3DModel makes no sound; leave codec.sound_path out"):
        ranks(1, curve, config, 1)
