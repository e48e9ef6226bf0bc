"""MiniMax H3: clips and their stereo sound in one sequence, as its pipeline makes them, and the same on any mesh."""

import copy
import dataclasses
import json
from types import SimpleNamespace

import numpy
import pytest
import torch
from diffusers import MiniMaxH3Blocks, MiniMaxH3ModularPipeline, MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3 import before_denoise
from PIL import Image

from opensora_accel import Plan
from opensora_accel.training import configured, new_command, one_clip
from opensora_accel.training.buckets import Bucket
from opensora_accel.training.captions import VISION_TOKENS, TextEncoder
from opensora_accel.training.classes import arguments_of
from opensora_accel.training.clips import Clip
from opensora_accel.training.codec import LatentFrames, VideoVAE, build_codec, latent_shape
from opensora_accel.training.conditions import KINDS, Condition, check_conditions
from opensora_accel.training.config import config_from_dict, load_config
from opensora_accel.training.encoding import Encoded, Encoders
from opensora_accel.training.flow import draw_noise, shifted
from opensora_accel.training.kept import StoredCaptions
from opensora_accel.training.objective import Objective
from opensora_accel.training.planned import frozen_parts, planned_sizes
from opensora_accel.training.recipes import RECIPES, Inputs, check_recipe
from opensora_accel.training.samples import sample_latents
from opensora_accel.training.sections import CodecConfig, ConditionsConfig, TextConfig
from opensora_accel.training.sound import EncodedSound, WaveVAE, build_sound_codec, sound_shape
from opensora_accel.training.stored import Stored, open_disk_cache
from opensora_accel.training.text_encoders import build_text_encoder, picture_tokens, text_shapes
from opensora_accel.training.tiny_run import write_clips
from opensora_accel.verify.pool import RankError
from tests.tiers import CPU_AND_GPU, some
from tests.training.language import qwen3, qwen_frames
from tests.training.pipelines import assert_the_answers_of_the_host, moved, without_rounding
from tests.training.runs import assert_one_run, losses, tiny_config
from tests.training.test_loop import curve
from tests.training.test_prodigy import trained
from tests.training.vaes import ltx2_audio_vae, minimax_h3_audio_vae, minimax_h3_vae

CPU = torch.device("cpu")
NAME = "MiniMaxH3Transformer3DModel"
RECIPE = RECIPES[NAME]
CAPTIONS = ["a rabbit looks up at the sky", "two birds"]
# Of a run that gives no frames.
READS = configured.texts_of(config_from_dict({"model": {"class_name": NAME}}, "the test"))
STEPS = 4
# Of 22 frames: 7 latent frames, and 37 positions of sound.
SIZE = (22, 32, 48)


class Processor:
    """What the pipeline asks which tokens are of frames, and how these are prepared."""

    image_processor = qwen_frames()

    def __init__(self, tokenizer):
        self.of_frame = tokenizer.convert_tokens_to_ids(VISION_TOKENS[1])

    def create_mm_token_type_ids(self, ids):
        return [[int(number == self.of_frame) for number in each] for each in ids]


def exact(times, shift):
    """Its scheduler, held against our times, and given them: its own are rounded to fp32."""

    class Exact(MiniMaxH3Scheduler):
        def set_timesteps(self, *args, **kwargs):
            super().set_timesteps(*args, **kwargs)
            torch.testing.assert_close(self.sigmas.double(), times, atol=1e-6, rtol=0)
            self.sigmas, self.timesteps = times, 1 - times[:-1]

    return Exact(shift=shift)


@pytest.fixture(scope="module")
def parts():
    """What a pipeline has around the model, in fp64, whose captions have more layers than are looked at."""
    torch.manual_seed(0)
    reader, whole = qwen3(RECIPE.text[0], 12, [*CAPTIONS, "gradient of colour number 0 1 2 3 4"])
    return SimpleNamespace(
        reader=reader,
        whole=whole,
        vae=minimax_h3_vae().double().eval(),
        audio_vae=minimax_h3_audio_vae().double().eval(),
    )


@pytest.fixture(scope="module")
def made(parts):
    return setting(parts, parts.reader)


@pytest.fixture(scope="module")
def made_of_frames(parts):
    """The same of a run that gives frames, whose encoder of captions sees them."""
    whole, reader = parts.whole.model, parts.reader
    sees = TextEncoder(reader.tokenizer, whole, 12, RECIPE.text[0], processor=qwen_frames())
    return setting(
        parts, sees, conditions={"i2v_head": 1.0}, text={"length": 12, "width": 32, "cache": False}
    )


def setting(parts, reader, **changes):
    """The objective of the trainer, and the pipeline of diffusers, of the same weights in fp64."""
    num_frames, height, width = SIZE
    config = config_from_dict(
        {
            "data": {"num_frames": num_frames, "height": height, "width": width},
            "model": {"class_name": NAME, "config": dict(RECIPE.tiny)},
            "text": {"length": 12, "width": 32},
            "flow": {"shift": 12.0, "sample_steps": STEPS},
            **changes,
        },
        "the test",
    )
    codec, sounds = VideoVAE(parts.vae), WaveVAE(parts.audio_vae)
    arguments = RECIPE.tiny | {"in_channels": 4, "audio_in_channels": 4, "text_dim": 32}
    torch.manual_seed(0)
    model = configured.model_class(config.model)(**arguments).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    shape, (bucket,) = latent_shape(codec, *SIZE), config.data.sizes
    around = arguments_of(model), {bucket: shape}, 24.0, CPU, torch.float64
    conditioning = configured.conditioning_of(config, codec)
    encoders = Encoders(config, RECIPE, codec, None, conditioning, sounds, *around)
    tokens = {bucket: one_clip.tokens_per_sample(shape, model)}
    objective = Objective(config, RECIPE, encoders, [reader], model, model, tokens)
    times = RECIPE.sample_times(STEPS, 12.0)
    pipeline = MiniMaxH3Blocks().init_pipeline()
    pipeline.update_components(
        vae=parts.vae,
        audio_vae=parts.audio_vae,
        transformer=model,
        text_encoder=parts.whole,
        tokenizer=parts.reader.tokenizer,
        processor=Processor(parts.reader.tokenizer),
        scheduler=exact(times, 12.0),
        audio_scheduler=exact(shifted(times, 3 / 12), 3.0),
    )
    pipeline.set_progress_bar_config(disable=True)
    return SimpleNamespace(objective=objective, pipeline=pipeline, bucket=bucket, shape=shape)


def noise_of(made, num_samples):
    rng = torch.Generator().manual_seed(1)
    shapes = made.shape, made.objective.encoders.sound_latents(made.bucket)
    return [torch.randn(num_samples, *shape, dtype=torch.float64, generator=rng) for shape in shapes]


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


@pytest.mark.parametrize("kinds", [("i2v_head", "i2v_tail"), ("i2v_loop", "t2v")], ids=str)
def test_a_sample_of_frames_that_are_given_is_the_pipelines(made_of_frames, monkeypatch, kinds):
    """Of the first frame, the last, both, or none: as rows of their own, and as the encoder of captions sees them."""
    made = made_of_frames
    monkeypatch.setattr(MiniMaxH3ModularPipeline, "min_duration", 0.0)
    objective, (noise, size) = made.objective, (noise_of(made, 2), made.bucket)
    frames = torch.randint(
        0, 256, (2, *SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    clips = [Clip("", 0, size)] * 2
    outputs = ["latents", "audio_latents", "condition_latents", "keyframe_anchors"]
    with without_rounding():
        condition, _ = objective.encoders.encode_condition(kinds, frames, noise[0], clips, [7, 9])
        found = sample_latents(objective, noise, CAPTIONS, size, condition)
        for row, kind in enumerate(kinds):
            drawn = draw_noise(noise[0][:1, :, :2], 0, [(7, 9)[row]], purpose="noise of given frames")
            of_ends = {end: drawn[:, :, end, None] for end in KINDS[kind].numbers}
            pictures = {end: Image.fromarray(frames[row, (0, -1)[end]].numpy()) for end in of_ends}
            left = iter(of_ends.values())
            monkeypatch.setattr(before_denoise, "randn_tensor", lambda *_, left=left, **__: next(left))
            answer = made.pipeline(
                prompt=CAPTIONS[row],
                num_frames=size.num_frames,
                height=size.height,
                width=size.width,
                num_inference_steps=STEPS + 1,
                latents=noise[0][row : row + 1],
                audio_latents=noise[1][row].permute(2, 0, 1),
                **{("image", "last_image")[end]: picture for end, picture in pictures.items()},
                output=outputs,
            )
            for end, expected, noisy in zip(
                pictures, answer["condition_latents"] or [], of_ends.values(), strict=True
            ):
                held = 0.999 * expected[0, :, 0].double() + 0.001 * noisy[0, :, 0]
                assert (condition.latents[row, :, end] - held).abs().max() < 1e-10
            assert answer["latents"].shape == (1, 4, 7, 8, 12)
            assert (found[0][row] - answer["latents"][0]).abs().max() < 1e-10
            assert (found[1][row].permute(2, 0, 1) - answer["audio_latents"]).abs().max() < 1e-10


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


def test_rows_and_places_of_frames_that_are_given():
    """Behind the caption, at the places of the first and of the last frame, and never noisier than the clip."""
    inputs = Inputs(
        torch.zeros(1, 4, 7, 4, 6),
        torch.tensor([500.0]),
        [torch.zeros(1, 9, 8)],
        [],
        Condition(torch.ones(1, 4, 2, 4, 6), timestep=1.0, ends=[KINDS["i2v_loop"]]),
        frame_rate=24.0,
        latent_frames=LatentFrames(4, chunk=5, fewest=7, step=5),
        alpha=12.0,
        config={"patch_size": (1, 2, 2)},
        sound=torch.zeros(1, 4, 37, 2),
        seen=torch.arange(9)[None] < 4,
    )
    found = RECIPE.arguments(inputs)
    assert found["hidden_states"].shape == (1, 12 + 42, 16)
    assert found["hidden_states"][0, :, 0].tolist() == [1.0] * 12 + [0.0] * 42
    assert found["video_indices"].tolist() == [*range(9, 21), *range(95, 137)]
    assert found["audio_indices"].tolist() == [*range(21, 95)]
    places = found["position_ids"]
    assert places[9:21, 0].tolist() == pytest.approx([9.0] * 6 + [9 + 5 / 3 * 21] * 6)
    assert torch.equal(places[9:15, 1:], places[95:101, 1:]) and places[21, 0] == 9
    assert found["token_tags"].tolist() == [0] * 4 + [1] * 5 + [0] * 12 + [2] * 74 + [0] * 42
    assert found["timestep_indices"].tolist() == [0] * 9 + [2] * 12 + [1] * 74 + [0] * 42
    assert found["timestep"].tolist() == pytest.approx([0.5, 0.8, 0.999])
    late = RECIPE.arguments(dataclasses.replace(inputs, timestep=torch.tensor([0.5])))
    assert late["timestep"][2] == late["timestep"][0]


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


CHANGES = {"model.class_name": NAME, "model.config": dict(RECIPE.tiny), "data.frame_rate": 12.0}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Five that hum, with captions of different lengths, of which one says nothing."""
    folder = write_clips(tmp_path_factory.mktemp("clips"), num_frames=24, with_sound=True)
    lines = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["caption"] = " ".join(line["caption"].split()[:number])
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


MESHES = [{"ulysses": 3}, {"ring": 2}, {"dp_replicate": 2}, {"dp_shard": 2, "sharding": "zero3"}]


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


OF_FRAMES = {f"conditions.{kind}": 1.0 for kind in ("t2v", "i2v_head", "i2v_tail", "i2v_loop")}
OF_FRAMES |= {"text.cache": False}


@pytest.mark.parametrize("degrees", some([MESHES[0], MESHES[1], MESHES[3]]), ids=str)
def test_a_run_of_frames_that_are_given_is_one_on_any_mesh(ranks, clips, tmp_path, degrees):
    """Clips of which the first frame, the last, both or none are given: sequences of many lengths, by which no rank's
    share divides."""
    found = []
    for number, plan in enumerate((Plan(precision="fp64"), Plan(precision="fp64", **degrees))):
        config = tiny_config(clips, tmp_path / str(number), plan, **CHANGES, **OF_FRAMES)
        found.append(ranks(plan.world_size, curve, config, 3)[0])
    assert_one_run(*found)


def test_a_run_of_frames_that_are_given_goes_on_bit_by_bit(ranks, clips, tmp_path):
    plan, changes = Plan(ulysses=3, sharding="zero3"), CHANGES | OF_FRAMES | {"steps": 4}
    whole, weights, _ = ranks(3, trained, tiny_config(clips, tmp_path / "run", plan, **changes))[0]
    half = tiny_config(clips, tmp_path / "half", plan, **changes)
    first, _, saved = ranks(3, trained, half, None, 2)[0]
    second, found, _ = ranks(3, trained, half, saved)[0]
    assert first + second == whole and all(torch.equal(found[name], weights[name]) for name in weights)


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


def folder_of(parts, folder, model):
    """A pipeline's folder, as it is published: an index of blocks, and each part in a folder of its own."""
    for name, part in {
        "vae": parts.vae,
        "audio_vae": parts.audio_vae,
        "text_encoder": parts.whole,
        "transformer": model,
    }.items():
        copy.deepcopy(part).float().save_pretrained(folder / name)
    parts.reader.tokenizer.save_pretrained(folder / "tokenizer")
    for name, shift in (("scheduler", 12.0), ("audio_scheduler", 3.0)):
        MiniMaxH3Scheduler(shift=shift).save_pretrained(folder / name)
    (folder / "modular_model_index.json").write_text('{"_class_name": "MiniMaxH3ModularPipeline"}')
    return folder


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


@pytest.fixture(scope="module")
def sees(parts, pipeline_folder):
    """Options of an encoder that sees frames, with what prepares them beside it, and the encoder."""
    qwen_frames().save_pretrained(pipeline_folder / "processor")
    config = TextConfig(path=str(pipeline_folder / "text_encoder"), dtype="fp32", length=12, cache=False)
    return config, build_text_encoder(config, "", 0, CPU, torch.float32, RECIPE.text)


def test_an_encoder_that_sees_from_its_folder(parts, sees):
    """States of a caption behind two frames are those of the whole; those of a caption alone stay what they are."""
    config, reader = sees
    frames = torch.randint(
        0, 256, (2, 32, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    whole = TextEncoder(
        parts.reader.tokenizer, parts.whole.model, 12, RECIPE.text[0], processor=qwen_frames()
    )
    shown = [frames, frames[:0]]
    found = reader.encode(CAPTIONS, CPU, torch.float32, shown)
    expected = whole.encode(CAPTIONS, CPU, torch.float64, shown)
    # A label has 5 tokens, a frame 2 · 3 between two marks.
    assert reader.num_tokens(CAPTIONS, shown) == [2 * (5 + 8) + 7, 2] and found.shape == (2, 33, 32)
    assert reader.are_seen(shown) == [2 * (5 * [False] + 8 * [True]), []]
    assert torch.allclose(found.double(), expected, atol=1e-4)
    assert torch.equal(found[1, :2], reader.encode(CAPTIONS[1:], CPU, torch.float32)[0, :2])
    assert picture_tokens(config, RECIPE.text[0], 32, 48) == len("<Picture 1>: ") + 8


def test_states_of_frames_are_kept_in_a_folder(sees, tmp_path):
    """By their pixels: what was computed is found again, without the encoder, and other pixels are computed."""
    config, reader = sees
    frames = torch.randint(
        0, 256, (3, 32, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    loads = []

    def build_it():
        loads.append(1)
        return reader

    def kept():
        outline = build_text_encoder(config, "", 0, CPU, torch.float32, RECIPE.text, outline=True)
        stored = Stored.embeddings(open_disk_cache(str(tmp_path)), config, CPU, RECIPE.text)
        return StoredCaptions(outline, build_it, CAPTIONS, stored)

    for shown, num_loads in (
        ([frames[:1], frames[1:]], 1),
        ([frames[:1], frames[1:]], 1),
        ([frames[1:2]] * 2, 2),
    ):
        found = kept().encode(CAPTIONS, CPU, torch.float32, shown)
        torch.testing.assert_close(found, reader.encode(CAPTIONS, CPU, torch.float32, shown), rtol=0, atol=0)
        assert len(loads) == num_loads


def test_frames_that_are_given_have_room_in_a_plan(pipeline_folder, sees):
    """Of the kind that gives the most: both frames, as rows of the clip's and as states of the caption's."""
    config, _ = sees
    values = {
        "data": {"num_frames": 22, "height": 32, "width": 48, "frame_rate": 24.0},
        "model": {"path": str(pipeline_folder / "transformer")},
        "codec": {
            key: str(pipeline_folder / name) for key, name in (("path", "vae"), ("sound_path", "audio_vae"))
        },
        "text": {"path": config.path, "length": 12, "cache": False},
        "conditions": {"i2v_head": 1.0, "i2v_loop": 0.1},
    }
    run = config_from_dict(values, "the test")
    (size,) = planned_sizes(run)
    inputs = size.true.inputs(1)
    # 13 characters of a label, 6 parts of a frame between two marks.
    assert size.workload(1).text_tokens == inputs.text.size(1) == 12 + 2 * (13 + 8)
    assert RECIPE.arguments(inputs)["hidden_states"].shape == (1, (7 + 2) * 24, 16)
    of_seeing, of_reading = (
        frozen_parts(each)["text encoder"][0] for each in (run, replaced(run, conditions=ConditionsConfig()))
    )
    assert of_seeing > of_reading


def test_frames_that_cannot_be_given_are_refused(ranks, clips, pipeline_folder, sees, tmp_path):
    config = config_from_dict({"model": {"class_name": NAME}, "conditions": {"i2v_head": 1.0}}, "the test")
    with pytest.raises(
        ValueError, match=r"text.cache embeds captions alone, at the start; set text.cache to False"
    ):
        check_recipe(RECIPE, config)
    sizes = [Bucket(39, 32, 48)], LatentFrames(4, chunk=5, fewest=7, step=5)
    with pytest.raises(
        ValueError, match="v2v_head gives 33 frames, and this model takes the first, the last or both"
    ):
        check_conditions(ConditionsConfig(v2v_head=1.0), *sizes, RECIPE.frames[0])
    check_conditions(ConditionsConfig(i2v_tail=1.0, i2v_loop=1.0), *sizes, RECIPE.frames[0])
    description = json.loads((pipeline_folder / "text_encoder" / "config.json").read_text())
    reading = tmp_path / "reading"
    reading.mkdir()
    (reading / "config.json").write_text(json.dumps(description["text_config"]))
    with pytest.raises(
        ValueError, match=r"the part that reads alone.*choose text_encoder of the model's pipeline"
    ):
        text_shapes(TextConfig(path=str(reading)), RECIPE.text)
    with pytest.raises(FileNotFoundError, match=r"does not say how frames.*copy the folder processor"):
        picture_tokens(TextConfig(path=str(reading)), RECIPE.text[0], 32, 48)


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
    of_references = config_from_dict({"model": {"path": str(tmp_path / "transformer_ref")}}, "the test")
    with pytest.raises(
        ValueError, match=r"makes clips from references.*choose the folder transformer beside it"
    ):
        check_recipe(RECIPE, of_references)


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


def replaced(config, **changes):
    """With values by their full names."""
    for name, value in changes.items():
        table, _, key = name.rpartition(".")
        if table:
            section = dataclasses.replace(getattr(config, table), **{key: value})
            config = dataclasses.replace(config, **{table: section})
        else:
            config = dataclasses.replace(config, **{key: value})
    return config


def test_an_image_has_no_place_among_its_clips(ranks, clips, pipeline_folder, tmp_path):
    changes = {"data": {"folder": str(clips), "buckets": ["1x24x40", "22x24x40"], "batch_size": 2}, **CHANGES}
    changes |= {"codec": {"path": str(pipeline_folder / "vae")}}
    with pytest.raises(RankError, match=r"data.buckets 1x24x40: data.num_frames \(1\) must be 22, or"):
        ranks(1, losses, tiny_config(clips, tmp_path, **changes))
