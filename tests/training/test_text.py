"""Captions become the same embeddings in every run; a real encoder is read from a folder."""

import contextlib
import dataclasses
import json

import diffusers
import pytest
import torch
import transformers

from opensora_accel.training.captions import TextEncoder, TextShape, TextStates
from opensora_accel.training.kept import EmbeddedCaptions
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.sections import TextConfig
from opensora_accel.training.text_encoders import build_text_encoder, text_shapes, train_tokenizer
from tests.training.language import gemma, gemma3, qwen, qwen2, saved_pair

CAPTIONS = ["a grey rabbit yawns in a meadow", "a rabbit crawls out of its burrow", "a rabbit waves"]
CPU = torch.device("cpu")
LTX2 = "LTX2VideoTransformer3DModel"


def built(config, tokenizer_json, seed=0):
    return build_text_encoder(config, tokenizer_json, seed, CPU, torch.float32)


def encode(captions, config=None, seed=0, dtype=torch.float32):
    config = config or TextConfig(length=12, width=32)
    return built(config, train_tokenizer(CAPTIONS), seed).encode(captions, CPU, dtype)


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


def test_a_template_whose_tokens_the_tokenizer_counts():
    """SANA-Video's: the first state, those behind the template, and an empty caption without it."""
    torch.manual_seed(0)
    taken, captions = RECIPES["SanaVideoTransformer3DModel"].text[0], ["", "a bird", "two birds in a tree"]
    encoder = gemma(taken, 8, captions)
    assert encoder.num_tokens(captions) == [1, 1 + 1 + 2, 1 + 1 + 5] and encoder.shape == (8, 32)
    states = encoder.encode(captions, CPU, torch.float64)
    ids, mask = encoder.tokens("a bird")
    whole = encoder.model(input_ids=ids, attention_mask=mask).last_hidden_state
    # Of the template the first token and the last count.
    place = int(mask.sum()) - 3
    assert torch.equal(states[1, :4], torch.cat([whole[0, :1], whole[0, place : place + 3]]))
    assert not states[1, 4:].any() and not states[0, 1:].any()
    kept = EmbeddedCaptions(encoder, captions, CPU)
    assert torch.equal(kept.encode(captions, CPU, torch.float64), states)
    assert kept.num_tokens(captions) == encoder.num_tokens(captions)


@pytest.mark.parametrize("is_old", [False, True])
def test_states_of_padding_are_the_whole_models(tmp_path, is_old):
    """Of one that sees pictures too, whose file has the sizes of what reads in a table, or, an old one, beside others.

    The model sees padding, which the encoder leaves out of its attention.
    """
    torch.manual_seed(0)
    taken = RECIPES["EasyAnimateTransformer3DModel"].text
    made = qwen2(taken[0], 64, CAPTIONS)
    for parameter in made.model.parameters():
        # As they are drawn, attention moves hardly anything.
        torch.nn.init.normal_(parameter, std=0.3)
    reading = made.model.config.to_dict()
    pictures = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 1}
    whole = transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(text_config=reading, vision_config=pictures)
    ).eval()
    whole.model.language_model.load_state_dict(made.model.state_dict())
    folder = tmp_path / "text_encoder"
    whole.save_pretrained(folder)
    made.tokenizer.save_pretrained(tmp_path / "tokenizer")
    if is_old:
        description = json.loads((folder / "config.json").read_text())
        reading = description.pop("text_config")
        (folder / "config.json").write_text(json.dumps(reading | description))
    config = TextConfig(path=str(folder), length=64, dtype="fp32")
    encoder = build_text_encoder(config, "", 0, CPU, torch.float32, taken)
    assert [encoder.shape] == text_shapes(config, taken) == [TextShape(64, 32)]
    found = encoder.encode([*CAPTIONS, ""], CPU, torch.float32)
    parts = {"text_encoder": whole, "tokenizer": made.tokenizer}
    pipeline = diffusers.EasyAnimatePipeline(vae=None, transformer=None, scheduler=None, **parts)
    with torch.no_grad():
        states, _, mask, _ = pipeline.encode_prompt(
            [*CAPTIONS, ""], do_classifier_free_guidance=False, max_sequence_length=64
        )
    assert 0 < mask.sum() < mask.numel()
    assert torch.equal(mask, torch.cat([encoder.tokens(caption)[1] for caption in [*CAPTIONS, ""]]))
    assert torch.allclose(found, states, atol=1e-5) and found.abs().amin(-1).min() > 0
    assert encoder.num_tokens(CAPTIONS) == [64] * 3


@pytest.fixture
def with_pictures(tmp_path):
    """A model that sees pictures too, its tokenizer, and LTX-2's connectors, as their pipeline has them."""
    torch.manual_seed(0)
    made = gemma3(RECIPES[LTX2].text[0], 8, CAPTIONS)
    pictures = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=made.model.config.to_dict(),
        vision_config={**pictures, "image_size": 28, "patch_size": 14},
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.model.language_model.load_state_dict(made.model.state_dict())
    model.save_pretrained(tmp_path / "text_encoder")
    made.tokenizer.save_pretrained(tmp_path / "tokenizer")
    made.connectors.float().save_pretrained(tmp_path / "connectors")
    return model, made


def test_states_of_all_layers_go_through_connectors(tmp_path, with_pictures):
    model, made = with_pictures
    folders = {"path": str(tmp_path / "text_encoder"), "path_2": str(tmp_path / "connectors")}
    config, taken = TextConfig(**folders, length=8, dtype="fp32"), RECIPES[LTX2].text
    encoder = build_text_encoder(config, "", 0, CPU, torch.float32, taken)
    assert [encoder.shape] == text_shapes(config, taken) == [TextShape(8, 64)]
    captions = [*CAPTIONS, ""]
    states = encoder.encode(captions, CPU, torch.float32)
    # Padding stands on the left, and becomes what the connectors have learned, which the model sees.
    assert encoder.num_tokens(captions) == [8] * 4 and states.abs().amin(-1).min() > 0
    tokens = made.tokenizer(
        captions,
        padding="max_length",
        padding_side="left",
        max_length=8,
        truncation=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        layers = model(**tokens, output_hidden_states=True).hidden_states
        of_clips, of_sound, _ = made.connectors(torch.stack(layers, -1), tokens["attention_mask"])
    assert torch.allclose(states, torch.cat([of_clips, of_sound], -1), atol=1e-5)
    assert not torch.allclose(of_clips, of_sound, atol=0.1)
    kept = EmbeddedCaptions(encoder, captions, CPU)
    assert torch.equal(kept.encode(captions, CPU, torch.float32), states)


def test_connectors_that_do_not_fit_are_refused(tmp_path, with_pictures):
    taken = RECIPES[LTX2].text

    def build(**options):
        config = TextConfig(path=str(tmp_path / "text_encoder"), dtype="fp32", **options)
        return build_text_encoder(config, "", 0, CPU, torch.float32, taken)

    with pytest.raises(ValueError, match=r"set text.path_2 to its folder, as connectors beside"):
        build()
    with pytest.raises(ValueError, match=r"text.length \(10\) must be a multiple of 4"):
        build(path_2=str(tmp_path / "connectors"), length=10)
    with pytest.raises(ValueError, match=r"what this model takes is LTX2TextConnectors"):
        build(path_2=str(tmp_path / "text_encoder"), length=8)


def test_a_small_encoder_stands_for_both_kinds_of_states():
    taken = RECIPES[LTX2].text
    config = TextConfig(length=8, width=32)
    encoder = build_text_encoder(config, train_tokenizer(CAPTIONS), 0, CPU, torch.float32, taken)
    states = encoder.encode(CAPTIONS, CPU, torch.float32)
    assert [encoder.shape] == text_shapes(config, taken) == [TextShape(8, 64)]
    assert torch.equal(states[..., :32], states[..., 32:]) and states[0].any()


def test_captions_are_cut_where_the_encoder_cuts_them():
    """The mark at the end of a caption takes the last place."""
    encoder = built(TextConfig(length=4, width=32), train_tokenizer(CAPTIONS))
    with pytest.raises(ValueError, match="all captions are the same in their first 4 tokens"):
        encoder.check(["a grey rabbit yawns", "a grey rabbit waves"])


def test_words_never_seen_are_no_error():
    assert torch.isfinite(encode(["日本語 ☃ zebra"])).all()


def saved_encoder(kind, folder, tokenizer_folder, captions=CAPTIONS):
    from tests.shardformer.test_t5 import encoder

    model = encoder(kind).eval()
    model.save_pretrained(folder)
    if tokenizer_folder is not None:
        tokenizer = built(TextConfig(width=32), train_tokenizer(captions)).tokenizer
        tokenizer.save_pretrained(tokenizer_folder)
    return model


LAYOUTS = {
    "together": ("encoder", "encoder", "encoder"),
    "as diffusers has it": ("text_encoder", "tokenizer", "text_encoder"),
    "the second of two": ("text_encoder_2", "tokenizer_2", "text_encoder_2/"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_a_local_encoder(tmp_path, kind, layout):
    encoder, tokenizer, given = LAYOUTS[layout]
    model = saved_encoder(kind, tmp_path / encoder, tmp_path / tokenizer)
    config = TextConfig(path=f"{tmp_path}/{given}", length=12, dtype="fp32")
    loaded = built(config, "")
    assert [loaded.shape] == text_shapes(config, [TextStates()]) == [TextShape(12, 32)]
    assert type(loaded.model) is type(model)
    ids = loaded.tokenizer(CAPTIONS[:1], return_tensors="pt")["input_ids"]
    expected = model(input_ids=ids).last_hidden_state
    found = loaded.encode(CAPTIONS[:1], CPU, torch.float32)
    assert torch.allclose(found[:, : ids.size(1)], expected, atol=1e-6)
    loaded.check(CAPTIONS)


def test_two_encoders_of_a_pipelines_folder(tmp_path):
    taken = RECIPES["HunyuanVideoTransformer3DModel"].text
    pair = saved_pair(
        tmp_path, taken, CAPTIONS, built(TextConfig(width=32), train_tokenizer(CAPTIONS)).tokenizer
    )
    folders = {"path": f"{tmp_path}/text_encoder", "path_2": f"{tmp_path}/text_encoder_2"}
    config = TextConfig(**folders, length=96, dtype="fp32")
    assert text_shapes(config, taken) == [TextShape(96, 32), TextShape(1, 24)]
    for number, expected in enumerate(pair):
        found = build_text_encoder(config, "", 0, CPU, torch.float32, taken, number)
        found.check(CAPTIONS)
        assert found.shape == expected.shape and found.num_tokens(CAPTIONS) == expected.num_tokens(CAPTIONS)
        states = [each.encode(CAPTIONS, CPU, torch.float32) for each in (found, expected)]
        assert torch.equal(*states) and not torch.equal(states[0][0], states[0][1])
    for wrong, which, message in (
        (
            {"path_2": ""},
            taken,
            r"two encoders; set text\.path_2 to the folder of the second, of type clip_text_",
        ),
        ({}, taken[:1], r"states of one encoder; leave text\.path_2 out"),
        ({"path": folders["path_2"]}, taken, r"text\.path .* holds a 'clip_text_model' .* takes is llama"),
    ):
        with pytest.raises(ValueError, match=message):
            text_shapes(TextConfig(**{**folders, **wrong}), which)
    # Of another encoder: the template has fewer tokens than there are before the caption.
    short = dataclasses.replace(taken[0], template="{}")
    with pytest.raises(ValueError, match=r"makes 0 tokens of a template that has more than 95"):
        TextEncoder(pair[0].tokenizer, pair[0].model, 96, short).check(CAPTIONS)
    with pytest.raises(ValueError, match=r"text\.path_2 is the second of two encoders; set text\.path"):
        TextConfig(path_2="x")


@pytest.mark.parametrize("folder", ["encoder", "text_encoder"])
@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_an_encoder_without_tokenizer_files_is_refused(tmp_path, kind, folder):
    """transformers would make a T5 tokenizer of nothing but <unk>, and train on."""
    saved_encoder(kind, tmp_path / folder, None)
    (tmp_path / folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    with pytest.raises(
        FileNotFoundError,
        match=r"has no tokenizer: there is no tokenizer\.json or spiece\.model or vocab\.json",
    ):
        built(TextConfig(path=str(tmp_path / folder)), "")


def test_a_tokenizer_that_knows_no_word_is_refused():
    """Like the one that transformers makes without files: words are unknown, whatever their number."""
    unknowing = built(TextConfig(width=32), train_tokenizer(["☃", "☀"]))
    with pytest.raises(
        ValueError, match=r"knows none of the 12 words in the captions: 'yawns' becomes .*<unk>"
    ):
        unknowing.check(CAPTIONS)
    unknowing.check(["rabbit", "", "rabbit"])  # one word: there is nothing to tell apart


def test_the_tokenizer_that_transformers_makes_of_nothing_is_refused():
    from transformers import T5Tokenizer

    encoder = built(TextConfig(width=32), train_tokenizer(CAPTIONS))
    encoder.tokenizer = T5Tokenizer()
    encoder.model.config.vocab_size = 128
    with pytest.raises(ValueError, match="knows none of the 12 words"):
        encoder.check(CAPTIONS)


def test_captions_that_differ_behind_the_cut_are_refused():
    captions = [f"in the meadow behind the old house there is a {animal}" for animal in ("rabbit", "fox")]
    encoder = built(TextConfig(width=32, length=4), train_tokenizer(captions))
    with pytest.raises(ValueError, match=r"the same in their first 4 tokens.* raise --text\.length"):
        encoder.check(captions)
    built(TextConfig(width=32, length=40), train_tokenizer(captions)).check(captions)


def test_a_template_that_takes_all_tokens_is_refused():
    """One caption alone is the same as no other."""
    taken = RECIPES["CosmosTransformer3DModel"].text[0]
    qwen(taken, 64, CAPTIONS).check(CAPTIONS[:1])
    with pytest.raises(ValueError, match=r"text\.length \(16\) leaves no room for captions: \d\d tokens"):
        qwen(taken, 16, CAPTIONS).check(CAPTIONS[:1])
    skipped = RECIPES["Kandinsky5Transformer3DModel"].text[0]
    qwen(skipped, 64, CAPTIONS).check(CAPTIONS[:1])


def test_a_tokenizer_of_another_encoder_is_refused(tmp_path):
    saved_encoder("t5", tmp_path, tmp_path, [chr(0x4E00 + n) for n in range(300)])
    with pytest.raises(ValueError, match=r"of another encoder: it gives token \d+ where the encoder has 128"):
        built(TextConfig(path=str(tmp_path)), "").check([chr(0x4E00 + n) for n in range(300)])


DAMAGES = {
    "config.json": lambda path: path.write_text("{"),
    "a list": lambda path: path.with_name("config.json").write_text("[]"),
    "model.safetensors": lambda path: path.write_bytes(b"\x00" * 100),
    "missing weights": lambda path: path.with_name("model.safetensors").unlink(),
    "tokenizer.json": lambda path: path.write_text("{}"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_named_in_one_line(tmp_path, name):
    saved_encoder("umt5", tmp_path, tmp_path)
    DAMAGES[name](tmp_path / name)
    with pytest.raises(ValueError, match=rf"text\.path {tmp_path}") as caught:
        built(TextConfig(path=str(tmp_path)), "")
    assert len(str(caught.value).splitlines()) == 1


def test_weights_that_are_missing_are_not_drawn_at_random(tmp_path):
    from safetensors.torch import load_file, save_file

    saved_encoder("t5", tmp_path, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = weights.pop(next(name for name in weights if name.endswith("SelfAttention.q.weight")))
    assert lost is not None
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"not hold all weights of a T5EncoderModel: 1 are .*SelfAttention\.q\.weight"
    ):
        built(TextConfig(path=str(tmp_path)), "")


def test_no_code_of_a_folder_is_run(tmp_path):
    saved_encoder("t5", tmp_path, tmp_path)
    marker = tmp_path / "executed"
    (tmp_path / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Evil: pass\n"
    )
    for name, key in (("config.json", "AutoModel"), ("tokenizer_config.json", "AutoTokenizer")):
        values = json.loads((tmp_path / name).read_text())
        values["auto_map"] = {key: ["evil.Evil", "evil.Evil"] if key == "AutoTokenizer" else "evil.Evil"}
        values.pop("tokenizer_class", None)
        (tmp_path / name).write_text(json.dumps(values))
    with contextlib.suppress(ValueError):
        built(TextConfig(path=str(tmp_path)), "")
    assert not marker.exists()


def test_a_folder_without_an_encoder(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no config\.json; give the local folder of an encoder of type t5 or umt5"
    ):
        built(TextConfig(path=str(tmp_path)), "")
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ValueError, match="holds a 'clip' model"):
        built(TextConfig(path=str(tmp_path)), "")
