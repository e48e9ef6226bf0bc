"""HunyuanVideo from a first frame: captions whose encoder sees it, and runs whose every clip begins with it."""

import dataclasses
import json
import shutil

import numpy
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from opensora_accel import Plan
from opensora_accel.training import configured, stored
from opensora_accel.training.clips import Clip
from opensora_accel.training.codec import SpaceToDepth
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.kept import StoredCaptions
from opensora_accel.training.llava import picture_states
from opensora_accel.training.planned import frozen_parts, planned_sizes
from opensora_accel.training.recipes import RECIPES, check_recipe
from opensora_accel.training.samples import sample_latents
from opensora_accel.training.sections import TextConfig
from opensora_accel.training.text_encoders import build_text_encoder, picture_tokens, text_shapes
from opensora_accel.training.tiny_run import tiny_config as tiny_proof
from opensora_accel.training.tiny_run import write_clips
from tests.tiers import PROVE, some
from tests.training.pipelines import (
    CAPTIONS,
    CPU,
    FROM_FRAMES,
    OF_PICTURE,
    by_pipeline,
    setting,
    without_rounding,
)
from tests.training.runs import assert_one_run, tiny_config
from tests.training.test_conditions import sampled
from tests.training.test_loop import curve
from tests.training.test_prodigy import trained

NAME = "HunyuanVideoTransformer3DModel"
KINDS = {each.tiny["image_condition_type"]: each for each in RECIPES[NAME].variants}
FIRST = {"conditions": {"t2v": 0.0, "i2v_head": 1.0}, "text.cache": False}


def drawn(*shape):
    """Pixels that are the same however they are scaled."""
    return 255 * torch.randint(0, 2, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("kind", "step"), [("token_replace", 4), ("latent_concat", 2)])
def test_states_of_a_frame_and_a_caption_are_the_pipelines(kind, step):
    """Of captions that fit, and of such as are cut before, within and behind the mark that is left out."""
    made = setting(f"{NAME}, {kind}")
    first, second = made.objective.texts
    captions = [CAPTIONS[0], *(" ".join(["birds"] * number) for number in range(17, 27)), ""]
    frames = [drawn(1, 32, 48, 3) for _ in captions]
    found = first.encode(captions, CPU, torch.float64, frames)
    counts = first.num_tokens(captions, frames)
    for row, caption in enumerate(captions):
        picture = frames[row][0] if caption else torch.zeros_like(frames[row][0])
        states, pooled, mask = made.pipeline.encode_prompt(
            Image.fromarray(picture.numpy()),
            [caption],
            prompt_template=OF_PICTURE,
            max_sequence_length=24,
            image_embed_interleave=step if caption else 2,
        )
        assert counts[row] == int(mask.sum())
        assert (found[row, : counts[row]] - states[0, : counts[row]]).abs().max() < 1e-12
        assert not found[row, counts[row] :].any()
        assert torch.equal(second.encode([caption], CPU, torch.float64)[0], pooled)
    # Three or five of nine states of the picture; six words and one token behind the mark, or as many as fit.
    of_picture = -(-9 // step)
    assert counts[0] == of_picture + 6 + 1 and max(counts) == of_picture + 24 - 4 and counts[-1] == 5 + 1
    other = first.encode(captions[:1], CPU, torch.float64, [255 - frames[0]])
    assert (found[0, : counts[0]] - other[0]).abs().amin(-1).min() > 0, "all states have seen the picture"
    assert first.are_seen(frames) == [[] for _ in frames]


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_the_pipelines(kind):
    """Of latent_concat its pipeline leaves out the first four, which the model has made of the one that is given."""
    made = setting(f"{NAME}, {kind}", frame=FROM_FRAMES[f"HunyuanVideo, {kind}"])
    objective, size, frames = made.objective, made.bucket, drawn(1, 9, 32, 48, 3)
    noise = torch.randn(1, *made.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with without_rounding():
        given = {"image": Image.fromarray(frames[0, 0].numpy())}
        expected = by_pipeline(made, noise, "np", CAPTIONS[:1], **given)
        condition, _ = objective.encoders.encode_condition(
            ["i2v_head"], frames, noise, [Clip("", 0, size)], [0]
        )
        (latents,) = sample_latents(objective, [noise], CAPTIONS[:1], size, condition)
        found = objective.encoders.codec.decode(latents)
    levels = torch.from_numpy(numpy.round(expected * 255)).int()
    left_out = 4 if kind == "latent_concat" else 0
    assert found.size(1) == 9 and levels.size(1) == 9 - left_out
    # One level: the pipeline rounds x/2 + ½ times 255, the codec x + 1 times 127.5, in fp32.
    assert (found[:, left_out:].int() - levels).abs().max() <= 1 and found.float().std() > 5


def test_without_a_frame_a_picture_is_black():
    (text, _) = setting(f"{NAME}, token_replace").objective.texts
    black = [torch.zeros(1, 32, 48, 3, dtype=torch.uint8)] * 2
    assert torch.equal(
        text.encode(CAPTIONS, CPU, torch.float64), text.encode(CAPTIONS, CPU, torch.float64, black)
    )


def test_sizes_are_those_of_the_encoder():
    """Of LLaVA's own, those that the pipeline has by heart."""
    sizes = transformers.LlavaConfig()
    assert picture_states(sizes) == 576 and picture_states(
        transformers.LlavaConfig(vision_feature_select_strategy="full")
    )
    for each in KINDS.values():
        assert each.text[0].template == OF_PICTURE["template"] and each.text[0].skipped == 103


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pipeline's, as it is published."""
    place = tmp_path_factory.mktemp("hunyuan") / "pipeline"
    setting(f"{NAME}, token_replace").pipeline.to(torch.float32).save_pretrained(place)
    return place


def config_of(folder, **changes):
    both = {"path": str(folder / "text_encoder"), "path_2": str(folder / "text_encoder_2")}
    return TextConfig(**both, dtype="fp32", length=24, cache=False, **changes)


OLD_NAMES = ("vision_tower.", "vision_tower.vision_model.")
NEW_NAMES = [("language_model.model.", "model.language_model."), ("vision_tower.", "model.vision_tower.")]
NEW_NAMES += [
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("language_model.lm_head", "lm_head"),
]


@pytest.mark.parametrize("renamed", [[], [OLD_NAMES], NEW_NAMES], ids=["own", "of version 4", "of the model"])
def test_an_encoder_from_its_folder(folder, tmp_path, renamed):
    copied = shutil.copytree(folder, tmp_path / "copied")
    file = copied / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    for before, after in renamed:
        assert any(name.startswith(before) for name in tensors)
        tensors = {
            after + name.removeprefix(before) if name.startswith(before) else name: tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, file)
    config, taken = config_of(copied), KINDS["token_replace"].text
    reader = build_text_encoder(config, "", 0, CPU, torch.float32, taken)
    assert text_shapes(config, taken) == [(24, 32), (1, 24)] and reader.shape == (24, 32)
    assert picture_tokens(config, taken[0], 32, 48) == 5
    (expected, _) = setting(f"{NAME}, token_replace").objective.texts
    frames = [drawn(1, 32, 48, 3)] * 2
    found = reader.encode(CAPTIONS, CPU, torch.float32, frames).double()
    assert torch.allclose(found, expected.encode(CAPTIONS, CPU, torch.float64, frames), atol=1e-4)
    reader.check(CAPTIONS)


def test_states_are_kept_in_a_folder(folder, tmp_path, monkeypatch):
    """By their pixels and our code; of an empty caption, whose picture is black, once for all clips of a size."""
    version, hashed = stored.code_version, set()

    def note_modules(modules):
        hashed.update(module.__name__.rpartition(".")[2] for module in modules)
        return version(modules)

    monkeypatch.setattr(stored, "code_version", note_modules)
    config, taken, loads = config_of(folder), KINDS["token_replace"].text, []
    reader = build_text_encoder(config, "", 0, CPU, torch.float32, taken)
    frames = drawn(4, 32, 48, 3)

    def build_it():
        loads.append(1)
        return reader

    def kept(states):
        outline = build_text_encoder(config, "", 0, CPU, torch.float32, states, outline=True)
        of_states = stored.Stored.embeddings(stored.open_disk_cache(str(tmp_path)), config, CPU, states)
        return StoredCaptions(outline, build_it, CAPTIONS, of_states)

    captions = [CAPTIONS[0], ""]
    for first, num_loads in ((0, 1), (0, 1), (2, 2)):
        shown = [frames[first, None], frames[first + 1, None]]
        found = kept(taken).encode(captions, CPU, torch.float32, shown)
        expected = reader.encode(captions, CPU, torch.float32, shown)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert len(loads) == num_loads
    kept(taken).encode([""], CPU, torch.float32, [255 - frames[3, None]])
    assert len(loads) == 2, "it is there"
    kept(KINDS["latent_concat"].text).encode(captions, CPU, torch.float32, shown)
    assert len(loads) == 3, "of other states of the picture"
    assert hashed == {"captions", "llava", "text_encoders", "pretrained"}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips"), of_lengths=True)


def changes_of(kind):
    return {"model.class_name": NAME, "model.config": dict(KINDS[kind].tiny), **FIRST}


@PROVE
@pytest.mark.parametrize(
    "degrees", some([{"ulysses": 3}, {"ring": 2}, {"dp_shard": 2, "sharding": "zero3"}]), ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_one_on_any_mesh(ranks, clips, tmp_path, kind, degrees):
    """Losses, norms and gradients are those of one rank, of captions of many lengths of which half are left out."""
    found = []
    for number, plan in enumerate((Plan(precision="fp64"), Plan(precision="fp64", **degrees))):
        changes = changes_of(kind) | {"flow.caption_drop": 0.5}
        config = tiny_config(clips, tmp_path / str(number), plan, **changes)
        found.append(ranks(plan.world_size, curve, config, 3)[0])
        # The proof of a run takes frames as the run does.
        (way,), codec = KINDS[kind].frames, SpaceToDepth(4, torch.float32)
        assert configured.conditioning_of(config, codec) == way
        assert configured.conditioning_of(tiny_proof(config, tmp_path), codec) == way
    assert_one_run(*found)
    assert all(gradient.abs().sum() > 0 for gradient in found[0][2].values())


@PROVE
@pytest.mark.parametrize("kind", some(KINDS, "token_replace"))
def test_a_run_goes_on_bit_by_bit_and_samples(ranks, clips, tmp_path, kind):
    plan, changes = Plan(ulysses=3, sharding="zero3"), changes_of(kind) | {"steps": 4}
    whole, weights, _ = ranks(3, trained, tiny_config(clips, tmp_path / "run", plan, **changes))[0]
    half = tiny_config(clips, tmp_path / "half", plan, **changes)
    first, _, saved = ranks(3, trained, half, None, 2)[0]
    second, found, _ = ranks(3, trained, half, saved)[0]
    assert first + second == whole and all(torch.equal(found[name], weights[name]) for name in weights)
    changes |= {"steps": 2, "num_samples": 1, "flow.sample_steps": 2, "flow.guidance": 2.0}
    losses, output, channels = ranks(1, sampled, tiny_config(clips, tmp_path / "samples", **changes))[0]
    assert len(losses) == 2 and (output / "samples/step_000002/strip.png").is_file()
    assert channels == (48 if kind == "token_replace" else 2 * 48 + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_frame_has_room_in_a_plan(folder, kind):
    arguments = dict(KINDS[kind].tiny) | {"in_channels": {"token_replace": 4, "latent_concat": 9}[kind]}
    values = {
        "data": {"num_frames": 9, "height": 32, "width": 48},
        "model": {"class_name": NAME, "config": arguments | {"out_channels": 4}},
        "codec": {"path": str(folder / "vae")},
        "text": {**dataclasses.asdict(config_of(folder))},
        "conditions": FIRST["conditions"],
    }
    run = config_from_dict(values, "the test")
    (size,) = planned_sizes(run)
    inputs = size.true.inputs(2)
    assert [tuple(each.shape) for each in inputs.texts] == [(2, 24 + 5, 32), (2, 1, 24)]
    assert [tuple(each.shape) for each in inputs.text_masks] == [(2, 24 + 5), (2, 1)]
    assert size.workload(1).text_tokens == 24 + 5
    parts = frozen_parts(run)
    assert {"text encoder", "second text encoder"} <= set(parts)
    saved = sum(tensor.nbytes for name, tensor in load_file(folder / "text_encoder" / "model.safetensors").items()
                if "lm_head" not in name)  # fmt: skip
    assert parts["text encoder"][0] >= saved, "with what sees"


def test_what_does_not_fit_is_refused(folder, tmp_path):
    recipe = KINDS["token_replace"]

    def checked(conditions=FIRST["conditions"], **tables):
        model = {"class_name": NAME, "config": dict(recipe.tiny)}
        values = {"model": model, "conditions": conditions, "text": {"cache": False}, **tables}
        check_recipe(recipe, config_from_dict(values, "the test"))

    checked()
    one = r"begins every clip with its first frame, which is all that is given; set conditions\.i2v_head to 1"
    for conditions in ({}, {"i2v_head": 1.0}, {"t2v": 0.0, "i2v_head": 1.0, "v2v_head": 1.0}):
        with pytest.raises(ValueError, match=one):
            checked(conditions)
    for tables, message in (
        ({"text": {}}, r"sees the frames that are given, and text\.cache .* set text\.cache to False"),
        (
            {"data": {"buckets": ["1x24x40", "5x24x40"]}},
            r"nothing to learn of an image; set data\.num_frames",
        ),
        ({"data": {"num_frames": 1}}, r"nothing to learn of an image; set data\.num_frames higher, or leave"),
        ({"sample_captions": ["a bird"]}, r"sample_captions have no frames to begin with"),
    ):
        with pytest.raises(ValueError, match=message):
            checked(**tables)
    of_text = {"model": {"class_name": NAME}, "conditions": FIRST["conditions"]}
    with pytest.raises(
        ValueError, match=r"takes no frames .* or choose those of its weights that begin with a"
    ):
        check_recipe(RECIPES[NAME], config_from_dict(of_text, "the test"))
    copied = shutil.copytree(folder, tmp_path / "copied")
    config, taken = config_of(copied), recipe.text
    shutil.rmtree(copied / "image_processor")
    with pytest.raises(
        FileNotFoundError, match=r"how frames .* are prepared.*copy the folder image_processor"
    ):
        build_text_encoder(config, "", 0, CPU, torch.float32, taken)
    reader = build_text_encoder(config_of(folder), "", 0, CPU, torch.float32, taken)
    reader.model.config.image_token_id += 1
    with pytest.raises(
        ValueError, match=r"a frame's token <image> is its \d+, and the encoder's \d+; give a"
    ):
        reader.check(CAPTIONS)
    reader.model.config.image_token_id -= 1
    for token in ("<image>", "<|end_header_id|>"):
        with pytest.raises(ValueError, match=r"has .* in it, which stands .* leave it out of the caption"):
            reader.check([*CAPTIONS, f"two {token} birds"])
    marked = dataclasses.replace(taken[0].picture, end_of_mark="<|nobody|>")
    reader.taken = dataclasses.replace(taken[0], picture=marked)
    with pytest.raises(ValueError, match=r"it has no token <\|nobody\|>; give a --text.path whose tokenizer"):
        reader.check(CAPTIONS)
    description = json.loads((copied / "text_encoder" / "config.json").read_text())
    (copied / "text_encoder" / "config.json").write_text(json.dumps(description["text_config"]))
    with pytest.raises(ValueError, match="holds a 'llama' model; what this model takes is llava"):
        text_shapes(config, taken)
