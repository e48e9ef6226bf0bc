"""MiniMax H3 with frames that are given: rows of their own, which its encoder of captions sees, as in its pipeline."""

import dataclasses
import json

import pytest
import torch
from diffusers import MiniMaxH3ModularPipeline
from diffusers.modular_pipelines.minimax_h3 import before_denoise
from PIL import Image

from opensora_accel import Plan
from opensora_accel.training.buckets import Bucket
from opensora_accel.training.captions import TextEncoder
from opensora_accel.training.clips import Clip
from opensora_accel.training.codec import LatentFrames
from opensora_accel.training.conditions import KINDS, Condition, check_conditions
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.flow import draw_noise
from opensora_accel.training.kept import StoredCaptions
from opensora_accel.training.planned import frozen_parts, planned_sizes
from opensora_accel.training.recipes import Inputs, check_recipe
from opensora_accel.training.samples import sample_latents
from opensora_accel.training.sections import ConditionsConfig, TextConfig
from opensora_accel.training.stored import Stored, open_disk_cache
from opensora_accel.training.text_encoders import build_text_encoder, picture_tokens, text_shapes
from tests.tiers import PROVE, some
from tests.training.language import qwen_frames
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
    seeing,
    seeing_setting,
    write_captioned,
)
from tests.training.pipelines import without_rounding
from tests.training.runs import assert_one_run, tiny_config
from tests.training.test_loop import curve
from tests.training.test_prodigy import trained


@pytest.fixture(scope="module")
def parts():
    return make_parts()


@pytest.fixture(scope="module")
def made(parts):
    return seeing_setting(parts, conditions={"i2v_head": 1.0})


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return write_captioned(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def pipeline_folder(parts, made, tmp_path_factory):
    return folder_of(parts, tmp_path_factory.mktemp("pipeline") / "h3", made.objective.model)


@pytest.fixture(scope="module")
def sees(parts, pipeline_folder):
    return seeing(parts, pipeline_folder)


@pytest.mark.parametrize("kinds", [("i2v_head", "i2v_tail"), ("i2v_loop", "t2v")], ids=str)
def test_a_sample_of_frames_that_are_given_is_the_pipelines(made, monkeypatch, kinds):
    """Of the first frame, the last, both, or none: as rows of their own, and as the encoder of captions sees them."""
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


@PROVE
def test_a_run_of_frames_that_are_given_goes_on_bit_by_bit(ranks, clips, tmp_path):
    plan, changes = Plan(ulysses=3, sharding="zero3"), CHANGES | OF_FRAMES | {"steps": 4}
    whole, weights, _ = ranks(3, trained, tiny_config(clips, tmp_path / "run", plan, **changes))[0]
    half = tiny_config(clips, tmp_path / "half", plan, **changes)
    first, _, saved = ranks(3, trained, half, None, 2)[0]
    second, found, _ = ranks(3, trained, half, saved)[0]
    assert first + second == whole and all(torch.equal(found[name], weights[name]) for name in weights)


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


@PROVE
def test_states_of_frames_are_kept_in_a_folder(sees, tmp_path):
    """By their pixels and shapes: what was computed is found again, without the encoder, and others are computed."""
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
        # Of the same bytes, in another shape.
        ([[frames[1].reshape(48, 32, 3)], frames[1:2]], 3),
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
