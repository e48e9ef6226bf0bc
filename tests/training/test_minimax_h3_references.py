"""MiniMax H3 from references: each in its own shape and rows, seen by its encoder of captions, as in its pipeline."""

import copy
import dataclasses
import shutil

import numpy
import pytest
import torch
from diffusers import MiniMaxH3ModularPipeline
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference, before_denoise
from PIL import Image

from opensora_accel import Plan
from opensora_accel.training import new_command
from opensora_accel.training.beside import with_references
from opensora_accel.training.clips import clip_of, read_references
from opensora_accel.training.codec import LatentFrames
from opensora_accel.training.conditions import Condition
from opensora_accel.training.config import config_from_dict, load_config
from opensora_accel.training.entries import entries_of
from opensora_accel.training.flow import draw_noise
from opensora_accel.training.planned import planned_sizes
from opensora_accel.training.recipes import Inputs, check_recipe
from opensora_accel.training.samples import sample_latents
from opensora_accel.training.tiny_run import proof_of
from opensora_accel.training.video import Reference, Video, index_videos, read_stretched_picture
from tests.tiers import PROVE, some
from tests.training.minimax_h3 import (
    CAPTIONS,
    CHANGES,
    MESHES,
    RECIPE,
    SIZE,
    STEPS,
    folder_of,
    make_parts,
    noise_of,
    seeing,
    seeing_setting,
    write_captioned,
)
from tests.training.pipelines import without_rounding
from tests.training.runs import assert_one_run, tiny_config
from tests.training.test_loop import curve
from tests.training.test_prodigy import trained
from tests.training.test_references import kept

# Pixels of the shorter side, and a unit of a side: a latent position is of 4, and a patch of 2 × 2 of those.
SIDE, UNIT = 24, 8


@pytest.fixture(scope="module")
def parts():
    return make_parts()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five clips that hum, each with two references."""
    return write_captioned(tmp_path_factory.mktemp("referred"), num_references=2)


@pytest.fixture(scope="module")
def made(parts, folder):
    return made_with(parts, folder)


def made_with(parts, folder):
    num_frames, height, width = SIZE
    data = {"num_frames": num_frames, "height": height, "width": width}
    data |= {"references": str(folder / "references"), "num_references": 2, "reference_side": SIDE}
    found = seeing_setting(parts, data=data)
    found.pipeline.update_components(transformer_ref=found.objective.model, reference_image_short_edge=SIDE)
    return found


def drawn_pictures(folder, *sizes):
    """Files of noise, of these widths and heights."""
    rng, paths = torch.Generator().manual_seed(3), []
    for number, (width, height) in enumerate(sizes):
        pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=rng)
        paths.append(folder / f"{number}.png")
        Image.fromarray(pixels.numpy()).save(paths[-1])
    return paths


def by_pipeline(made, noise, row, paths, monkeypatch, position):
    """What the pipeline makes of a row of noise, and what its model is called with, step by step.

    It draws the noise that references are held in as it is drawn here.
    """
    number = iter(range(1, 1 + len(paths)))

    def drawn(shape, **_):
        like = torch.empty(shape, dtype=torch.float64)
        return draw_noise(like, 0, [position], purpose=f"noise of reference {next(number)}")

    monkeypatch.setattr(MiniMaxH3ModularPipeline, "min_duration", 0.0)
    monkeypatch.setattr(before_denoise, "randn_tensor", drawn)
    with called(made) as calls:
        answer = made.pipeline(
            references=[MiniMaxH3ImageReference.from_file(path) for path in paths],
            prompt=CAPTIONS[row],
            num_frames=SIZE[0],
            height=SIZE[1],
            width=SIZE[2],
            num_inference_steps=STEPS + 1,
            latents=noise[0][row : row + 1],
            audio_latents=noise[1][row].permute(2, 0, 1),
            output=["latents", "audio_latents", "condition_latents"],
        )
    return answer, calls


class called:
    """Arguments of the calls of the model meanwhile."""

    def __init__(self, made):
        self.model, self.calls = made.objective.model, []

    def __enter__(self):
        def note(_, args, kwargs):
            self.calls.append(
                {name: each.clone() for name, each in kwargs.items() if isinstance(each, torch.Tensor)}
            )

        self.hook = self.model.register_forward_pre_hook(note, with_kwargs=True)
        return self.calls

    def __exit__(self, *_):
        self.hook.remove()


def video_of(made, paths):
    """A video with these references, as the loader finds them."""
    data = made.objective.config.data
    sizes = [reference_of(path) for path in paths]
    return Video("a.mp4", "", None, data.sizes[0], references=tuple(sizes))


def reference_of(path):
    """By the pipeline's own arithmetic of sides."""
    width, height = Image.open(path).size
    scale = SIDE / min(width, height)
    height, width = (max(UNIT, round(each * scale / UNIT) * UNIT) for each in (height, width))
    return Reference(str(path), height, width, is_on_white=False)


def conditioned(made, paths_of_each, positions):
    encoders, videos = made.objective.encoders, [video_of(made, paths) for paths in paths_of_each]
    pictures, clips = [read_references(each) for each in videos], [clip_of(each, 0) for each in videos]
    latents = encoders.encode_references(pictures, clips)
    return encoders.condition_of_references(pictures, latents, positions), latents


SHAPES = [[(50, 30), (20, 64)], [(24, 24)], [(90, 23), (31, 44), (40, 40)]]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_a_sample_with_references_is_the_pipelines(made, tmp_path, monkeypatch, sizes):
    """And all that the model is called with: rows, places, kinds, times, and states of the caption that has seen them.

    Two captions of different lengths, the second with the references in the other order.
    """
    noise, size = noise_of(made, 2), made.bucket
    paths = drawn_pictures(tmp_path, *sizes)
    of_each = [paths, paths[::-1]]
    with without_rounding():
        condition, latents = conditioned(made, of_each, [7, 9])
        with called(made) as calls:
            clips, sounds = sample_latents(made.objective, noise, CAPTIONS, size, condition)
        for row in range(2):
            answer, expected = by_pipeline(made, noise, row, of_each[row], monkeypatch, (7, 9)[row])
            for found, its in zip(latents[row], answer["condition_latents"], strict=True):
                assert found.shape == its.shape and (found - its).abs().max() < 1e-10
            assert (clips[row] - answer["latents"][0]).abs().max() < 1e-10
            assert (sounds[row].permute(2, 0, 1) - answer["audio_latents"]).abs().max() < 1e-10
            # One call of each clip in every step.
            assert len(expected) == STEPS
            for found, its in zip(calls[row::2], expected, strict=True):
                assert_called_alike(found, its)


def assert_called_alike(found, expected):
    """Times are numbered in another order."""
    for each in (found, expected):
        each["timestep"] = each["timestep"][each.pop("timestep_indices")]
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].shape == each.shape, name
        assert (found[name] - each).abs().max() < 1e-9, name


def test_rows_and_places_of_references():
    """Each at the moment behind the one before it, in a square of its own shape; sound and clip begin behind all."""
    shapes = [(4, 4), (4, 6)]
    inputs = Inputs(
        torch.zeros(1, 4, 7, 4, 6),
        torch.tensor([500.0]),
        [torch.zeros(1, 36, 8)],
        [],
        Condition(
            torch.zeros(1, 0, 1, 1, 1),
            timestep=1.0,
            references=[[torch.full((1, 4, 1, *each), number + 1.0) for number, each in enumerate(shapes)]],
        ),
        frame_rate=24.0,
        latent_frames=LatentFrames(4, chunk=5, fewest=7, step=5),
        alpha=12.0,
        config={"patch_size": (1, 2, 2)},
        sound=torch.zeros(1, 4, 37, 2),
        seen=torch.arange(36)[None] < 27,
    )
    found = RECIPE.arguments(inputs)
    assert found["hidden_states"][0, :, 0].tolist() == [1.0] * 4 + [2.0] * 6 + [0.0] * 42
    assert found["video_indices"].tolist() == [*range(36, 46), *range(120, 162)]
    assert found["audio_indices"].tolist() == [*range(46, 120)]
    places = found["position_ids"]
    assert places[36:46, 0].tolist() == [36.0] * 4 + [37.0] * 6
    assert places[46, 0] == places[120, 0] == 38
    assert places[36:40, 1:].tolist() == [[0, 0], [0, 16], [16, 0], [16, 16]]
    assert torch.equal(places[40:46, 1:], places[120:126, 1:])
    assert found["token_tags"].tolist() == [0] * 27 + [1] * 9 + [0] * 10 + [2] * 74 + [0] * 42
    assert found["timestep_indices"].tolist() == [0] * 36 + [2] * 10 + [1] * 74 + [0] * 42
    assert found["timestep"].tolist() == pytest.approx([0.5, 0.8, 0.999])


def run_config(folder, output, plan=None, **changes):
    options = {"data.references": str(folder / "references"), "data.num_references": 2}
    options |= {"data.reference_side": 16, "text.cache": False, "data.batch_size": 6}
    return tiny_config(folder, output, plan, **{**CHANGES, **options, **changes})


def looked_at(config, unit=UNIT):
    videos, _ = index_videos(entries_of(config), config.root, config)
    return with_references(videos, config, unit)


def test_a_reference_keeps_its_shape(folder, tmp_path):
    """Its sides are multiples of a unit; a phone's picture stands upright; what is too long is set aside."""
    references = shutil.copytree(folder / "references", tmp_path / "references")
    drawn_pictures(tmp_path, (64, 16), (65, 16))
    sideways = Image.open(tmp_path / "0.png").convert("RGB")
    exif = sideways.getexif()
    exif[0x0112] = 6
    (references / "0.0.png").unlink()
    sideways.save(references / "0.0.jpg", exif=exif, quality=100, subsampling=0)
    shutil.copy(tmp_path / "1.png", references / "3.1.png")
    config = run_config(folder, tmp_path, **{"data.references": str(references)}).data
    videos, set_aside = looked_at(config)
    assert [video.file for video in videos] == ["0.mp4", "1.mp4", "2.mp4", "4.mp4"]
    assert set_aside["3.mp4"].endswith(
        "3.1.png: is 65 × 16, and a reference is at most 4 times as long as it is wide; crop it"
    )
    # Files of 16 × 64, 32 × 24 and 32 × 32, whose shorter side becomes 16.
    assert [(each.height, each.width) for each in videos[0].references] == [(64, 16), (16, 16)]
    assert [(each.height, each.width) for each in videos[1].references] == [(16, 24), (16, 16)]
    (upright, _) = read_references(videos[0])
    expected = torch.from_numpy(numpy.array(sideways)).rot90(-1, (0, 1))
    assert upright.shape == (64, 16, 3) and (upright.int() - expected.int()).abs().max() < 60
    assert (upright.float() - expected.float()).abs().mean() < 8
    with pytest.raises(ValueError, match=r"5 of 5 files do not have 3 in .*: add what is missing"):
        looked_at(dataclasses.replace(config, num_references=3))
    only = tmp_path / "only"
    only.mkdir()
    for number in range(5):
        shutil.copy(tmp_path / "1.png", only / f"{number}.png")
    with pytest.raises(ValueError, match=r"(?s)none of the 5 videos .* can be used.*crop it"):
        looked_at(dataclasses.replace(config, references=str(only), num_references=1))


WRONG = [
    ({"data.reference_side": 0}, r"each reference in its own shape; set data\.reference_side .* 2048"),
    ({"text.cache": True}, r"sees references, and text\.cache .* set text\.cache to False"),
    (
        {"conditions.i2v_head": 1.0},
        r"or frames that are given, by weights of their own; leave all of conditions",
    ),
    ({"sample_captions": ["a bird"]}, r"sample_captions have no references, .* leave sample_captions out"),
    (
        {"data.references": "", "data.num_references": 1},
        r"reference_side \(16\) .* name that folder, or leave",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[next(iter(each)) for each, _ in WRONG])
def test_what_cannot_go_with_references_is_refused(folder, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        check_recipe(RECIPE, run_config(folder, tmp_path, **changes))


def test_weights_for_references_are_named_so(folder, tmp_path):
    """Its pipeline has one folder of weights for references, and one for all else."""
    for name in ("transformer", "transformer_ref"):
        (tmp_path / name).mkdir()
    check_recipe(RECIPE, run_config(folder, tmp_path))
    for name, options, message in (
        (
            "transformer_ref",
            {},
            r"from references, and this run gives none; set data\.references .* transformer beside",
        ),
        (
            "transformer",
            {"references": "a", "reference_side": 32},
            r"no references .* transformer_ref beside it, or",
        ),
    ):
        values = {"model": {"path": str(tmp_path / name)}, "data": options, "text": {"cache": False}}
        values["flow"] = {"caption_drop": 0.0}
        with pytest.raises(ValueError, match=message):
            check_recipe(RECIPE, config_from_dict(values, "the test"))
    values["model"]["path"] = str(tmp_path / "transformer_ref")
    check_recipe(RECIPE, config_from_dict(values, "the test"))


@PROVE
@pytest.mark.parametrize("degrees", some(MESHES), ids=str)
def test_a_run_with_references_is_one_on_any_mesh(ranks, folder, tmp_path, degrees):
    found = []
    for number, plan in enumerate((Plan(precision="fp64"), Plan(precision="fp64", **degrees))):
        config = run_config(folder, tmp_path / str(number), plan, **{"flow.caption_drop": 0.4})
        found.append(ranks(plan.world_size, curve, config, 3)[0])
    assert_one_run(*found)


@PROVE
def test_a_run_with_references_goes_on_bit_by_bit(ranks, folder, tmp_path):
    plan = Plan(ulysses=3, sharding="zero3")
    whole, weights, _ = ranks(3, trained, run_config(folder, tmp_path / "run", plan, steps=4))[0]
    half = run_config(folder, tmp_path / "half", plan, steps=4)
    first, _, saved = ranks(3, trained, half, None, 2)[0]
    second, found, _ = ranks(3, trained, half, saved)[0]
    assert first + second == whole and all(torch.equal(found[name], weights[name]) for name in weights)


def batch_of(config):
    """Of the first batch: its files and positions, what it is encoded to, and losses of it with other references."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    objective, batch = trainer.objective, next(trainer.loader)
    encoded = objective.encoders.encode(batch)
    condition = encoded.condition
    swapped = condition._replace(references=[each[::-1] for each in condition.references])
    unseen = condition._replace(pictures_of_references=[each[::-1] for each in batch.references])
    each = [
        float(objective.loss(dataclasses.replace(encoded, condition=other)))
        for other in (condition, swapped, unseen)
    ]
    return batch.files, batch.positions, encoded.clean.shape, condition, each


def test_references_of_a_batch_are_those_of_its_clips(ranks, folder, tmp_path):
    """Encoded each alone, and held in noise of the sample's own; the model sees them in both ways."""
    config = run_config(folder, tmp_path, Plan(precision="fp64"))
    files, positions, shape, condition, of_each = ranks(1, batch_of, config)[0]
    assert shape == (6, 48, 5, 6, 10) and condition.latents.numel() == 0
    for file, position, rows, pictures in zip(
        files, positions, condition.references, condition.pictures_of_references, strict=True
    ):
        for number, (row, picture) in enumerate(zip(rows, pictures, strict=True)):
            path = folder / "references" / file.replace(".mp4", f".{number}.png")
            pixels = read_stretched_picture(path, 16, (24, 16)[number])
            assert torch.equal(picture, pixels)
            unit = pixels.double().permute(2, 0, 1) / 127.5 - 1
            clean = torch.nn.functional.pixel_unshuffle(unit, 4)[None, :, None]
            noise = draw_noise(clean, config.seed, [position], purpose=f"noise of reference {number + 1}")
            torch.testing.assert_close(row, 0.999 * clean + 0.001 * noise, rtol=0, atol=1e-12)
    assert len(set(of_each)) == 3


def test_what_was_encoded_is_kept(ranks, parts, folder, tmp_path):
    """Latents in memory and in a folder, and states of captions that have seen references, by their pixels."""
    copy.deepcopy(parts.vae).float().save_pretrained(tmp_path / "vae")

    def run(name, **changes):
        options = {"steps": 2, "data.num_frames": 22, "data.height": 32, "data.width": 48}
        options |= {"data.batch_size": 1, "codec": {"path": str(tmp_path / "vae"), "dtype": "fp32"}}
        return ranks(1, kept, run_config(folder, tmp_path / name, Plan(), **{**options, **changes}))[0]

    cached = {"cache_folder": str(tmp_path / "cache")}
    plain, _ = run("plain")
    in_memory, _ = run("memory", **{"codec.cache": True})
    cold, (_, _, stored) = run("cold", **cached)
    warm, (hits, misses, again) = run("warm", **cached)
    assert plain == in_memory == cold == warm and misses == again == 0 < hits and stored
    # Another side is another picture.
    _, (_, misses, _) = run("other", **cached, **{"data.reference_side": 24})
    assert misses


def test_a_plan_counts_the_largest_reference(parts, made, folder, tmp_path):
    path = folder_of(parts, tmp_path / "h3", made.objective.model)
    text, _ = seeing(parts, path)
    values = {
        "data": {"num_frames": 22, "height": 32, "width": 48, "frame_rate": 24.0},
        "model": {"path": str(path / "transformer")},
        "codec": {key: str(path / name) for key, name in (("path", "vae"), ("sound_path", "audio_vae"))},
        "text": {"path": text.path, "length": 12, "cache": False},
    }
    (without,) = planned_sizes(config_from_dict(values, "the test"))
    values["data"] |= {"references": str(folder / "references"), "num_references": 2, "reference_side": 48}
    config = config_from_dict(values, "the test")
    (size,) = planned_sizes(config)
    # The largest is of 32 × 24, here 64 × 48: 8 × 6 patches, and 4 × 3 tokens of the encoder.
    rows, seen = 8 * 6, len("<Picture 1>: ") + 2 + 4 * 3
    assert size.num_tokens == without.num_tokens + 2 * rows
    inputs = size.true.inputs(2)
    assert size.workload(1).text_tokens == inputs.text.size(1) == 12 + 2 * seen
    for each in inputs.one_by_one():
        assert RECIPE.arguments(each)["hidden_states"].shape == (1, 7 * 24 + 2 * rows, 16)
    assert (
        RECIPE.arguments(next(inputs.one_by_one()))["position_ids"][12 + 2 * seen :, 0].min() == 12 + 2 * seen
    )
    (tmp_path / "empty").mkdir()
    for name, error, message in (
        ("nowhere", FileNotFoundError, "is no folder; give one with a reference for each file"),
        ("empty", ValueError, "has no picture that can be used; give one with a reference for each file"),
    ):
        data = dataclasses.replace(config.data, references=str(tmp_path / name))
        with pytest.raises(error, match=message):
            planned_sizes(dataclasses.replace(config, data=data))


def test_a_proof_has_references(folder, tmp_path):
    config = run_config(folder, tmp_path, Plan(ulysses=2))
    proof = proof_of(config, tmp_path / "proof", 2)
    assert proof.step.config.data.reference_side == 16 and proof.step.config.data.num_references == 2
    assert (tmp_path / "proof" / "clips" / "references" / "4.1.png").is_file()


def sampled(config):
    from opensora_accel.training import samples
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    trainer.train()
    encoders, positions = trainer.objective.encoders, []
    original = encoders.condition_of_references

    def noted(*given):
        positions.append(given[2])
        return original(*given)

    encoders.condition_of_references = noted
    videos = trainer.loader.videos[:2]
    swapped = [dataclasses.replace(video, references=video.references[::-1]) for video in videos]
    with torch.no_grad():
        return [samples.sample_clips(trainer.objective, each) for each in (videos, swapped)], positions


def test_samples_have_the_references_of_the_video_beside_them(ranks, folder, tmp_path):
    changes = {"steps": 3, "num_samples": 2, "flow.sample_steps": 2, "optim.lr": 0.05, "optim.ema_decay": 0.0}
    changes |= {"validation.num_clips": 1, "validation.every": 2, "data.batch_size": 2}
    ((made, swapped), positions), *_ = ranks(
        2, sampled, run_config(folder, tmp_path, Plan(ulysses=2), **changes)
    )
    assert positions == [[0, 1]] * 2, "each has noise of its own"
    for each, other in zip(made, swapped, strict=True):
        assert each.references.shape == (2, 24, 40, 3) and each.clip.shape == (5, 24, 40, 3)
        assert not torch.equal(each.clip, other.clip), "their order counts"
    assert len(list(tmp_path.glob("samples/step_000003/*.mp4"))) == 2


def test_a_configuration_with_references(ranks, parts, made, folder, tmp_path):
    path = folder_of(parts, tmp_path / "h3", made.objective.model)
    seeing(parts, path)
    shutil.copytree(path / "transformer", path / "transformer_ref")
    output = tmp_path / "train.toml"
    arguments = ["--data", str(folder), "--references", str(folder / "references"), "--output", str(output)]
    assert new_command.main([str(path), *arguments]) == 0
    config = load_config(output)
    assert config.model.path == str(path / "transformer_ref") and not config.text.cache
    assert (config.data.reference_side, config.data.num_references) == (2048, 1)
