"""Captions become the same embeddings in every run; a real encoder is read from a folder."""

import pytest
import torch

from opensora_accel.training.config import TextConfig
from opensora_accel.training.text import build_text_encoder, train_tokenizer

CAPTIONS = ["a grey rabbit yawns in a meadow", "a rabbit crawls out of its burrow", "a rabbit waves"]
CPU = torch.device("cpu")


def encode(captions, config=None, seed=0, dtype=torch.float32):
    config = config or TextConfig(length=12, width=32)
    return build_text_encoder(config, train_tokenizer(CAPTIONS), seed).encode(captions, CPU, dtype)


def test_the_same_seed_gives_the_same_embeddings():
    assert len({train_tokenizer(CAPTIONS) for _ in range(5)}) == 1
    assert train_tokenizer(CAPTIONS) == train_tokenizer(CAPTIONS[::-1] * 2)
    before = torch.random.get_rng_state()
    first = encode(CAPTIONS)
    assert torch.equal(first, encode(CAPTIONS)) and not torch.equal(first, encode(CAPTIONS, seed=1))
    assert torch.equal(torch.random.get_rng_state(), before), "the encoder drew from the global stream"


def test_captions_differ_and_padding_is_zero():
    states = encode(CAPTIONS + [""])
    assert states.shape == (4, 12, 32) and not states.requires_grad
    assert not torch.allclose(states[0], states[1])
    assert states[3, 1:].abs().max() == 0 and states[3, 0].abs().max() > 0, "an empty caption is one token"
    assert encode(["a rabbit waves " * 20]).abs().amin(-1).min() > 0, "a long caption is cut at the length"


def test_words_never_seen_are_no_error():
    assert torch.isfinite(encode(["日本語 ☃ zebra"])).all()


@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_a_local_encoder(tmp_path, kind):
    from tests.shardformer.test_t5 import encoder

    model = encoder(kind).eval()
    model.save_pretrained(tmp_path)
    build_text_encoder(TextConfig(width=32), train_tokenizer(CAPTIONS), 0).tokenizer.save_pretrained(tmp_path)
    config = TextConfig(path=str(tmp_path), length=12)
    loaded = build_text_encoder(config, "", 0)
    assert loaded.width == 32 and type(loaded.model) is type(model)
    ids = loaded.tokenizer(CAPTIONS[:1], return_tensors="pt")["input_ids"]
    expected = model(input_ids=ids).last_hidden_state
    found = loaded.encode(CAPTIONS[:1], CPU, torch.float32)
    assert torch.allclose(found[:, : ids.size(1)], expected, atol=1e-6)


def test_a_folder_without_an_encoder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json; give the local folder of a T5"):
        build_text_encoder(TextConfig(path=str(tmp_path)), "", 0)
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ValueError, match="holds a 'clip' model"):
        build_text_encoder(TextConfig(path=str(tmp_path)), "", 0)
