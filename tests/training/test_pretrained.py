"""Encoders from folders: what the libraries' own loaders give, bit for bit, without the whole in memory."""

import gc
import os
import tempfile
import weakref
from pathlib import Path

import pytest
import torch

from opensora_accel import Plan
from opensora_accel.training.buckets import Bucket
from opensora_accel.training.captions import TextEncoder
from opensora_accel.training.clips import Clip
from opensora_accel.training.codec import SpaceToDepth, build_codec
from opensora_accel.training.kept import CachedLatents, EmbeddedCaptions
from opensora_accel.training.sections import CodecConfig, TextConfig
from opensora_accel.training.text_encoders import build_text_encoder, train_tokenizer
from tests.tiers import some
from tests.training.runs import tiny_config
from tests.training.test_text import CAPTIONS, saved_encoder

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def assert_same_tensors(found, expected):
    everything = [dict([*m.named_parameters(), *m.named_buffers()]) for m in (found, expected)]
    assert everything[0].keys() == everything[1].keys()
    for name, tensor in everything[1].items():
        assert everything[0][name].dtype == tensor.dtype, name
        assert torch.equal(everything[0][name], tensor), name


@pytest.mark.parametrize("kind", ["t5", "umt5"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_text_encoder_is_that_of_transformers_bit_for_bit(tmp_path, kind, dtype):
    model = saved_encoder(kind, tmp_path, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = type(model).from_pretrained(tmp_path, dtype=DTYPES[dtype]).eval()
    found = build_text_encoder(
        TextConfig(path=str(tmp_path), dtype=dtype, length=12), "", 0, CPU, torch.float32
    )
    assert_same_tensors(found.model, expected)
    assert found.model.shared.weight is found.model.encoder.embed_tokens.weight
    for caption, states in zip(CAPTIONS, found.encode(CAPTIONS, CPU, torch.float32), strict=True):
        tokens = found.tokenizer(
            [caption], padding="max_length", max_length=12, truncation=True, return_tensors="pt"
        )
        with torch.no_grad():
            alone = expected(**tokens.to(CPU)).last_hidden_state * tokens["attention_mask"].unsqueeze(-1)
        assert torch.equal(states, alone[0].float())


def vae(name):
    import diffusers

    sizes = {
        "AutoencoderKLWan": dict(
            base_dim=3,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1] * 4,
            latents_std=[0.5] * 4,
        ),
        "AutoencoderKLHunyuanVideo": dict(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
        ),
    }
    torch.manual_seed(0)
    return getattr(diffusers, name)(**sizes[name]).eval()


@pytest.mark.parametrize("name", ["AutoencoderKLWan", "AutoencoderKLHunyuanVideo"])
@pytest.mark.parametrize("kept", [None, ["conv_in", "quant_conv"]], ids=["none kept", "some kept in fp32"])
def test_a_vae_is_that_of_diffusers_bit_for_bit(tmp_path, monkeypatch, name, kept):
    model = vae(name)
    cls = type(model)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(cls, "_keep_in_fp32_modules", kept)
    expected = cls.from_pretrained(tmp_path, torch_dtype=torch.bfloat16).eval()
    found = build_codec(CodecConfig(path=str(tmp_path)), CPU, torch.float32)
    assert_same_tensors(found.model, expected)
    assert len({p.dtype for p in found.model.parameters()}) == 1 + bool(kept)
    if kept:
        return  # neither computes: the classes that keep some cast between them
    frames = torch.randint(0, 256, (1, 5, 16, 24, 3), dtype=torch.uint8)
    pixels = (frames.permute(0, 4, 1, 2, 3) / 127.5 - 1).bfloat16()
    with torch.no_grad():
        raw = expected.encode(pixels).latent_dist.mode().float()
        mean, std = found.statistics(CPU)
        latents = (raw - mean) / std
        pictures = expected.decode((latents * std + mean).bfloat16()).sample
    assert torch.equal(found.encode(frames), latents)
    decoded = ((pictures.float() + 1) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 4, 1)
    assert torch.equal(found.decode(latents), decoded)


@pytest.mark.prove
def test_loading_holds_one_tensor_beside_the_encoder(tmp_path):
    """By the peak of what the process holds, files that it maps among it: half of what fp32 takes, and a tensor."""
    from transformers import T5Config, T5EncoderModel

    # 80 MB of embedding, 24 blocks of 12 MB: 368 MB in fp32.
    config = T5Config(vocab_size=40_000, d_model=512, d_ff=2048, d_kv=64, num_heads=8, num_layers=24)
    model = T5EncoderModel(config)
    largest = max(p.nbytes for p in model.parameters())
    total = sum(p.nbytes for p in model.parameters())
    saved_encoder("t5", tmp_path, tmp_path)  # for the tokenizer
    model.save_pretrained(tmp_path)
    del model
    gc.collect()

    def status(entry):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(entry)).split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    encoder = build_text_encoder(TextConfig(path=str(tmp_path)), "", 0, CPU, torch.float32)
    peak = status("VmHWM") - before
    assert encoder.model.dtype == torch.bfloat16
    assert peak < total / 2 + largest + 30 * 2**20


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors.index.json", "one of two"])
def test_weights_that_cannot_be_streamed_are_refused(tmp_path, name):
    model = saved_encoder("t5", tmp_path, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if name == "pytorch_model.bin":
        torch.save(model.state_dict(), tmp_path / name)
        told = r"has no model\.safetensors, .*T5EncoderModel\.from_pretrained\(.*\)\.save_pretrained"
    elif name == "one of two":
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        next(tmp_path.glob("model-00002-*.safetensors")).unlink()
        told = r"text\.path .* cannot be loaded as T5EncoderModel \(.*model-00002"
    else:
        (tmp_path / name).write_text("{")
        told = (
            r"model\.safetensors\.index\.json is damaged \(Expecting property name.*; copy the folder again"
        )
    with pytest.raises(ValueError, match=told):
        build_text_encoder(TextConfig(path=str(tmp_path)), "", 0, CPU, torch.float32)


MANY = [f"a rabbit waves {number} times" + " and again" * (number % 5) for number in range(21)]


def embedded(dtype, folder):
    encoder = build_text_encoder(TextConfig(length=12, width=32), train_tokenizer(MANY), 0, CPU, dtype)
    expected = encoder.encode(sorted(MANY), CPU, dtype)
    tempfile.tempdir = folder
    try:
        cached = EmbeddedCaptions(encoder, MANY * 2, CPU)
    finally:
        tempfile.tempdir = None
    picked = [20, 3, 3, 0, 11]
    found = cached.encode([sorted(MANY)[at] for at in picked], CPU, dtype)
    return torch.equal(found, expected[picked]), found.shape, os.listdir(folder)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_embeddings_are_those_of_the_encoder(ranks, tmp_path, world_size, dtype):
    for same, shape, left in ranks(world_size, embedded, dtype, str(tmp_path)):
        assert same and shape == (5, 12, 32) and left == []


def without_room(folder):
    full = OSError(28, "No space left on device")

    def refuse(*_):
        raise full

    allocate, os.posix_fallocate = os.posix_fallocate, refuse
    try:
        embedded(torch.float32, folder)
    except OSError as error:
        return str(error)
    finally:
        os.posix_fallocate = allocate


def test_no_room_for_embeddings_is_said_on_all_ranks(ranks, tmp_path):
    for told in ranks(2, without_room, str(tmp_path)):
        assert "No space left" in told and "let TMPDIR name a place with room" in told


def kept_and_released(config):
    from opensora_accel.training.loop import Trainer

    made = []
    remember = TextEncoder.__init__

    def watched(self, tokenizer, model, *args, **options):
        remember(self, tokenizer, model, *args, **options)
        made.append(weakref.ref(model))

    TextEncoder.__init__ = watched
    try:
        trainer = Trainer(config)
    finally:
        TextEncoder.__init__ = remember
    losses = [trainer.step()["loss"] for _ in range(3)]
    return made[0]() is None, losses


def test_the_text_encoder_is_released_and_training_goes_on_the_same(ranks, clips, tmp_path):
    changes = {"flow.caption_drop": 0.5, "data.batch_size": 8}
    ((released, losses),) = ranks(1, kept_and_released, tiny_config(clips, tmp_path / "a", **changes))
    ((kept, expected),) = ranks(
        1, kept_and_released, tiny_config(clips, tmp_path / "b", **changes, **{"text.cache": False})
    )
    assert released and not kept
    assert losses == pytest.approx(expected, rel=1e-6)


def losses_with_vae(config, saved=None):
    """Losses of 4 steps, how often the VAE was loaded, whether it is alive after each step, and after sampling."""
    from opensora_accel.training import codec
    from opensora_accel.training.loop import Trainer

    made, build = [], codec.VideoVAE.__init__

    def watched(self, model):
        build(self, model)
        made.append(weakref.ref(model))

    codec.VideoVAE.__init__ = watched
    try:
        trainer = Trainer(config)
        losses, alive = [], []
        for _ in range(config.steps):
            losses.append(trainer.step()["loss"])
            alive.append(any(model() is not None for model in made))
        trainer.write_samples()
        alive.append(any(model() is not None for model in made))
    finally:
        codec.VideoVAE.__init__ = build
    return losses, alive, len(made)


def vae_config(clips, tmp_path, name, plan=None, **changes):
    vae("AutoencoderKLWan").save_pretrained(tmp_path / "vae")
    return tiny_config(
        clips,
        tmp_path / name,
        plan,
        codec={"path": str(tmp_path / "vae"), "dtype": "fp32"},
        # Clips that fill their videos: each has one, and five are all.
        data={
            "folder": str(clips), "num_frames": 9, "height": 32, "width": 48, "batch_size": 2, "frame_stride": 1
        },
        steps=5,
        num_samples=1,
        **changes,
    )  # fmt: skip


@pytest.fixture
def short_clips(tmp_path):
    from opensora_accel.training.tiny_run import write_clips

    return write_clips(tmp_path / "clips", num_videos=5, num_frames=9)


@pytest.mark.parametrize("plan", some([Plan(dp_replicate=2), Plan()]), ids=str)
def test_the_vae_is_released_once_every_clip_is_encoded(ranks, short_clips, tmp_path, plan):
    expected = ranks(plan.world_size, losses_with_vae, vae_config(short_clips, tmp_path, "a", plan))
    cached = vae_config(short_clips, tmp_path, "b", plan, **{"codec.cache": True})
    for (losses, alive, num_loads), (reference, always, once) in zip(
        ranks(plan.world_size, losses_with_vae, cached), expected, strict=True
    ):
        assert all(always) and once == 1
        assert losses == pytest.approx(reference, rel=1e-5)
        # Five clips in batches of two: on one rank all have been seen after the third step.
        first_without = alive.index(False)
        assert (
            0 < first_without < 5 and not any(alive[first_without:]) and num_loads == 2
        )  # once more to decode
        assert plan.world_size > 1 or first_without == 2


def test_what_is_given_of_a_clip_is_encoded_once_too(ranks, short_clips, tmp_path):
    given = {"conditions.i2v_head": 2, "conditions.i2v_loop": 1, "flow.sample_steps": 2}
    ((losses, *_),) = ranks(1, losses_with_vae, vae_config(short_clips, tmp_path, "a", **given))
    given["codec.cache"] = True
    ((cached, *_),) = ranks(1, losses_with_vae, vae_config(short_clips, tmp_path, "b", **given))
    assert cached == pytest.approx(losses, rel=1e-5)


def test_a_clip_that_nobody_foresaw_loads_the_vae_again():
    loads = []

    def build():
        loads.append(SpaceToDepth(2, torch.float32))
        return loads[-1]

    frames = torch.randint(0, 256, (2, 1, 4, 4, 3), dtype=torch.uint8)
    a, b = (Clip(name, 0, Bucket(1, 4, 4)) for name in "ab")
    cached = CachedLatents(build(), build, {(a, None)})
    expected = SpaceToDepth(2, torch.float32).encode(frames)
    assert torch.equal(cached.encode(frames[:1], [a]), expected[:1]) and len(loads) == 1
    assert torch.equal(cached.encode(frames, [a, b]), expected) and len(loads) == 2
    assert torch.equal(cached.encode(frames.zero_(), [a, b]), expected), "encoded once"
    assert len(loads) == 2


def test_latents_that_do_not_fit_are_refused(short_clips, tmp_path, monkeypatch, parallel_registry):
    from opensora_accel.training.loop import Trainer

    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10**9))
    config = vae_config(short_clips, tmp_path, "run", **{"codec.cache": True})
    monkeypatch.setattr("opensora_accel.training.build._check_memory", lambda *_: None)
    parallel_registry.start_distributed()
    with pytest.raises(
        ValueError, match=r"codec\.cache keeps the latents .*: 5 clips.*set codec\.cache to False"
    ):
        Trainer(config)
