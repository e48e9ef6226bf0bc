"""First frames as an image encoder sees them: as in Wan's pipeline, one job on any mesh, kept like latents."""

import json
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from opensora_accel import Plan
from opensora_accel.training import pictures
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.pictures import build_picture_encoder, picture_shape
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.sections import ImageConfig
from opensora_accel.training.tiny_run import tiny_config as tiny_proof
from opensora_accel.training.tiny_run import write_clips
from opensora_accel.training.true_size import TrueSize
from opensora_accel.verify.pool import RankError
from tests.tiers import PROVE, some
from tests.training.runs import tiny_config
from tests.training.test_loop import curve
from tests.training.test_pretrained import assert_same_tensors

CPU = torch.device("cpu")
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}


def saved_image_encoder(folder, processor_folder=None, seed=0, side=32):
    """As transformers 5 writes it; of three layers, which the last is no part of."""
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(seed)
    model = CLIPVisionModel(CLIPVisionConfig(**SIZES, image_size=side, patch_size=16)).eval()
    model.save_pretrained(folder)
    size = {"height": side, "width": side}
    processor = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=size)
    processor.save_pretrained(processor_folder or folder)
    return model


def old_names(folder):
    """As transformers 4 wrote it, and as Wan 2.1's are published."""
    path = folder / "model.safetensors"
    weights = {f"vision_model.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


# The encoder


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("is_old", some([True, False]))
def test_an_encoder_is_that_of_transformers_bit_for_bit(tmp_path, dtype, is_old):
    model = saved_image_encoder(tmp_path)
    if is_old:
        old_names(tmp_path)
    found = build_picture_encoder(ImageConfig(path=str(tmp_path), dtype=dtype), 0, CPU, torch.float32)
    wanted = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    assert_same_tensors(found.model, type(model).from_pretrained(tmp_path, dtype=wanted).eval())
    assert (found.num_states, found.width) == picture_shape(ImageConfig(path=str(tmp_path))) == (5, 16)


def test_states_are_those_of_wans_pipeline(tmp_path):
    """`WanImageToVideoPipeline.encode_image` of diffusers, given the same picture."""
    from diffusers import WanImageToVideoPipeline
    from transformers import CLIPImageProcessorPil

    (tmp_path / "image_encoder").mkdir()
    model = saved_image_encoder(tmp_path / "image_encoder", tmp_path / "image_processor")
    frames = torch.randint(0, 256, (3, 24, 40, 3), dtype=torch.uint8)
    pipeline = SimpleNamespace(
        image_encoder=model,
        image_processor=CLIPImageProcessorPil.from_pretrained(tmp_path / "image_processor"),
    )
    encoder = build_picture_encoder(ImageConfig(path=str(tmp_path / "image_encoder")), 0, CPU, torch.float32)
    for frame, states in zip(frames, encoder.encode(frames), strict=True):
        with torch.no_grad():
            expected = WanImageToVideoPipeline.encode_image(pipeline, Image.fromarray(frame.numpy()), CPU)
        assert torch.equal(states, expected[0])


@pytest.mark.parametrize(
    "damage,told",
    [
        (lambda folder: (folder / "preprocessor_config.json").unlink(), "no preprocessor_config.json in it"),
        (lambda folder: (folder / "preprocessor_config.json").write_text("{"), "preprocessor_config.json is damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "t5"}'), "holds a 't5' model; the encoder"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json; give the local folder of an image"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_image_encoder_is_told(tmp_path, damage, told):
    saved_image_encoder(tmp_path)
    damage(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=rf"image\.path .*{told}"):
        build_picture_encoder(ImageConfig(path=str(tmp_path)), 0, CPU, torch.float32)


@pytest.mark.parametrize(
    "changes,told",
    [
        ({"image": {"width": 16}}, r"conditions give it of no clip; set conditions\.i2v_head"),
        ({"image": {"width": 16}, "conditions": {"i2v_tail": 1}}, r"conditions give it of no clip"),
        ({"image": {"width": 12}}, r"image\.width must be a multiple of 8"),
        ({"image": {"width": 16, "path": "x"}}, r"image\.width is for the small encoder"),
        ({"image": {"dtype": "bf16"}}, r"image\.dtype is for an encoder from image\.path"),
        ({"image": {"cache": True}}, r"image\.cache is for a run with image\.path or image\.width"),
    ],
)
def test_wrong_options_are_told(changes, told):
    with pytest.raises(ValueError, match=told):
        config_from_dict(changes, "the test")


def test_a_siglip_of_hunyuan_video(tmp_path):
    """Its last states, of patches alone, prepared as the folder of its feature extractor says."""
    from transformers import SiglipImageProcessorPil, SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(0)
    model = SiglipVisionModel(SiglipVisionConfig(**SIZES, image_size=32, patch_size=16)).eval()
    model.save_pretrained(tmp_path / "image_encoder")
    processor = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    processor.save_pretrained(tmp_path / "feature_extractor")
    config, taken = (
        ImageConfig(path=str(tmp_path / "image_encoder")),
        RECIPES["HunyuanVideo15Transformer3DModel"].pictures,
    )
    found = build_picture_encoder(config, 0, CPU, torch.float32, taken)
    assert picture_shape(config, taken) == (found.num_states, found.width) == (4, 16)
    frames = torch.randint(0, 256, (2, 48, 80, 3), dtype=torch.uint8)
    shown = [Image.fromarray(frame.numpy()) for frame in frames]
    with torch.no_grad():
        inputs = [processor.preprocess(images=each, return_tensors="pt") for each in shown]
        expected = torch.cat([model(**each).last_hidden_state for each in inputs])
    assert torch.equal(found.encode(frames), expected)
    with pytest.raises(ValueError, match=r"'siglip_vision_model' model; the encoder of this family is clip_"):
        build_picture_encoder(config, 0, CPU, torch.float32)


# A run

PICTURES = {
    "conditions.t2v": 1,
    "conditions.i2v_head": 3,
    "conditions.i2v_tail": 1,
    "image.width": 16,
    "text.length": 512,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips"))


@PROVE
@pytest.mark.parametrize(
    "plans",
    [
        [Plan(), Plan(ulysses=2)],
        [Plan(), Plan(ring=2, ulysses=2), Plan(dp_shard=2, ulysses=2, sharding="zero3")],
    ],
    ids=["sequence", "sharded"],
)
def test_one_job_whatever_the_mesh(ranks, folder, tmp_path, plans):
    found = []
    for number, plan in enumerate(plans):
        config = tiny_config(folder, tmp_path / str(number), plan.replace(precision="fp64"), **PICTURES)
        found.append(ranks(plan.world_size, curve, config, 2)[0])
    (losses, norms, gradients), *others = found
    branches = [name for name in gradients if "image_embedder" in name or ".add_k_proj" in name]
    assert len(branches) >= 10 and all(
        gradients[name].abs().max() > 0 for name in branches if "bias" not in name
    )
    for other_losses, other_norms, other_gradients in others:
        assert other_losses == pytest.approx(losses, rel=1e-9)
        assert other_norms == pytest.approx(norms, rel=1e-9)
        for name, gradient in gradients.items():
            assert torch.allclose(other_gradients[name], gradient, rtol=1e-9, atol=1e-12), name


def told_of(config):
    from opensora_accel.training.loop import Trainer

    objective = Trainer(config).objective
    frames = torch.randint(0, 256, (4, 5, 24, 40, 3), dtype=torch.uint8)
    kinds = ["t2v", "i2v_head", "i2v_tail", "i2v_loop"]
    like = torch.zeros(4, 48, 5, 6, 10)
    condition, _ = objective.encoders.encode_condition(kinds, frames, like, [None] * 4, range(4))
    return condition.pictures, objective.encoders.pictures.encode(frames[:, 0])


def test_a_first_frame_that_is_not_given_leaves_no_trace(ranks, folder, tmp_path):
    ((found, whole),) = ranks(1, told_of, tiny_config(folder, tmp_path, Plan(), **PICTURES))
    assert not found[[0, 2]].any() and torch.equal(found[[1, 3]], whole[[1, 3]])


def trained(config):
    """Losses, how often the encoder ran, and how often it was loaded, before sampling and after it."""
    from opensora_accel.training.loop import Trainer

    ran, loads = [], []
    encode, load = pictures.PictureEncoder.encode, pictures.load_pretrained

    def watched(self, frames):
        ran.append(len(frames))
        return encode(self, frames)

    def watched_load(*arguments, **options):
        loads.append(arguments[6])
        return load(*arguments, **options)

    pictures.PictureEncoder.encode, pictures.load_pretrained = watched, watched_load
    try:
        losses = Trainer(config).train()
    finally:
        pictures.PictureEncoder.encode, pictures.load_pretrained = encode, load
    return losses, sum(ran), [device for device in loads if device is not None]


@PROVE
def test_states_are_kept_like_latents(ranks, folder, tmp_path):
    """In memory, and in a folder: the same losses to the bit, and nothing is loaded where all is there."""
    saved_image_encoder(tmp_path / "encoder")
    base = PICTURES | {
        "image.width": 0,
        "image.path": str(tmp_path / "encoder"),
        "conditions.t2v": 0,
        "steps": 4,
    }
    base |= {"conditions.i2v_tail": 0, "data.num_frames": 9}  # of 12 frames: few starts, so that clips repeat
    cached = {"cache_folder": str(tmp_path / "cache")}
    runs = {"plain": {}, "memory": {"image.cache": True}, "cold": cached, "warm": cached}
    found = {
        name: ranks(1, trained, tiny_config(folder, tmp_path / name, Plan(), **base | changes))[0]
        for name, changes in runs.items()
    }
    losses, times, loads = found["plain"]
    assert times == 16 and len(loads) == 1
    assert all(other[0] == losses for other in found.values())
    assert found["memory"][1] < times and found["cold"][1] < times
    assert found["warm"][1:] == (0, [])


@PROVE
def test_a_run_samples_with_pictures(ranks, folder, tmp_path):
    sampling = {
        "steps": 1,
        "num_samples": 1,
        "sample_captions": ["a"],
        "flow.sample_steps": 1,
        "flow.guidance": 2.0,
    }
    config = tiny_config(folder, tmp_path / "run", Plan(), **PICTURES | sampling)
    assert len(ranks(1, trained, config)[0][0]) == 1
    assert (tmp_path / "run/samples/step_000001/clip_1.mp4").is_file()


@PROVE
@pytest.mark.parametrize(
    "changes,told",
    [
        (
            {"image.width": 0, "model.config.image_dim": 16},
            r"image_dim is 16, but .* give None .* from image\.path",
        ),
        ({"model.config.image_dim": 24}, r"image_dim is 24, but the encoders give 16"),
        ({"model.config.pos_embed_seq_len": 10}, r"states of two pictures \(pos_embed_seq_len is 10\)"),
    ],
)
def test_a_model_that_takes_other_pictures_is_told(ranks, folder, tmp_path, changes, told):
    with pytest.raises(RankError, match=told):
        ranks(1, told_of, tiny_config(folder, tmp_path, Plan(), **PICTURES | changes))


# The proof


def test_the_proof_has_pictures(tmp_path):
    saved_image_encoder(tmp_path / "encoder", side=64)
    config = tiny_config(
        tmp_path,
        tmp_path / "run",
        **PICTURES | {"image.width": 0, "image.path": str(tmp_path / "encoder")},
    )
    proof = tiny_proof(config, tmp_path)
    assert (proof.image, proof.text.length) == (ImageConfig(width=16), 512)
    assert proof.model.config.keys().isdisjoint({"image_dim", "added_kv_proj_dim"}), (
        "they follow from the encoder"
    )
    assert TrueSize.of(config).model().config.image_dim == 16


@PROVE
def test_verify_proves_a_run_with_pictures(tmp_path):
    from opensora_accel.cli import main

    values = {
        "data": {"folder": str(write_clips(tmp_path / "clips"))},
        "conditions": {"i2v_head": 1},
        "image": {"width": 16},
        "text": {"length": 512},
        "plan": {"ulysses": 2},
    }
    (tmp_path / "run.json").write_text(json.dumps(values))
    report = tmp_path / "report.json"
    assert main(["verify", "--config", str(tmp_path / "run.json"), "--json", str(report)]) == 0
    assert "image_embedder" in report.read_text()
