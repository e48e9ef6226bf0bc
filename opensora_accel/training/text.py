"""Captions to embeddings: a small T5 with a tokenizer trained on the captions, or a real one from a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora_accel.training.config import TextConfig
from opensora_accel.training.pretrained import load_pretrained, read_description, unloadable

_VOCABULARY = 2048
_VOCABULARIES = ("tokenizer.json", "spiece.model")
_TOLD_APART = 1000
"""Captions, and words, that are looked at."""


class TextEncoder:
    """A frozen T5 encoder and its tokenizer. Nothing is fetched."""

    def __init__(self, tokenizer: Any, model: Any, length: int):
        self.tokenizer, self.length = tokenizer, length
        self.model = model.eval().requires_grad_(False)

    @property
    def width(self) -> int:
        return self.model.config.d_model

    @torch.no_grad()
    def encode(self, captions: Sequence[str], device: torch.device, dtype: torch.dtype) -> Tensor:
        """[B, length, width]; zero behind the end of a caption, as Wan's pipeline has it."""
        tokens = self.tokenizer(
            list(captions), padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        )
        ids, mask = tokens["input_ids"].to(device), tokens["attention_mask"].to(device)
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return states.to(dtype) * mask.unsqueeze(-1).to(dtype)

    def check(self, captions: Iterable[str]) -> None:
        """Raises ValueError for captions of which the model would be told nothing.

        That is where different words, or different captions, all become the same tokens, or tokens that the encoder
        does not have.
        """
        different = sorted({caption for caption in captions if caption.strip()})[:_TOLD_APART]
        words = sorted({word for caption in different for word in caption.split()})[:_TOLD_APART]
        if not words:
            return
        of_words = self.tokenizer(words)["input_ids"]
        largest, size = max(max(ids, default=0) for ids in of_words), self.model.config.vocab_size
        if largest >= size:
            raise ValueError(
                f"the tokenizer is of another encoder: it gives token {largest} where the encoder has {size}; "
                "give a --text.path whose tokenizer and encoder belong together"
            )
        # One token is left of any word where there is a mark for its beginning; the rest is <unk>, and special.
        known = {token for ids in of_words for token in ids} - set(self.tokenizer.all_special_ids)
        if len(words) > 1 and len(known) <= 1:
            raise ValueError(
                f"the tokenizer knows none of the {len(words)} words in the captions: {words[-1]!r} becomes "
                f"{self.tokenizer.convert_ids_to_tokens(of_words[-1])}, and the others the like; give a --text.path "
                "with the whole tokenizer"
            )
        of_captions = self.tokenizer(different, truncation=True, max_length=self.length)["input_ids"]
        if len(different) > 1 and len(set(map(tuple, of_captions))) == 1:
            raise ValueError(
                f"all captions are the same in their first {self.length} tokens, and longer ones are cut there; raise "
                "--text.length, or let the captions begin with what tells them apart"
            )


def build_text_encoder(config: TextConfig, tokenizer_json: str, seed: int) -> TextEncoder:
    """The encoder from `config.path`; without one a small, randomly initialised T5 over `tokenizer_json`."""
    if config.path:
        return _load(config)
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer_from_json(tokenizer_json),
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = T5EncoderModel(
            T5Config(
                vocab_size=len(tokenizer),
                d_model=config.width,
                d_kv=max(8, config.width // 4),
                d_ff=2 * config.width,
                num_layers=2,
                num_heads=4,
                feed_forward_proj="gated-gelu",
                dropout_rate=0.0,
            )
        )
    return TextEncoder(tokenizer, model, config.length)


def train_tokenizer(captions: Sequence[str]) -> str:
    """A BPE tokenizer over these captions, as the JSON of the `tokenizers` library.

    BPE, because a seed must give one run: the Unigram and WordPiece trainers of tokenizers 0.23 give another
    vocabulary each time (three runs, three results, 2026-11).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(sorted(set(captions)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer.to_str()


def _tokenizer_from_json(text: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(text)


def text_width(config: TextConfig) -> int:
    """Embedding width of the encoder that `build_text_encoder` gives, without loading it."""
    return config.width if not config.path else int(_description(config)["d_model"])


def _description(config: TextConfig) -> dict[str, Any]:
    description = read_description("text.path", config.path, "a T5 or UMT5 encoder")
    kind = description.get("model_type")
    if kind not in ("t5", "umt5") or not isinstance(description.get("d_model"), int):
        raise ValueError(
            f"text.path {config.path} holds a {kind!r} model; the encoders used here are t5 and umt5"
        )
    return description


def _load(config: TextConfig) -> TextEncoder:
    from transformers import AutoTokenizer, T5EncoderModel, UMT5EncoderModel

    classes: dict[str, Any] = {"t5": T5EncoderModel, "umt5": UMT5EncoderModel}
    cls = classes[_description(config)["model_type"]]
    folder = _tokenizer_folder(Path(config.path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise unloadable(AutoTokenizer, "text.path", folder, error) from error
    return TextEncoder(tokenizer, load_pretrained(cls, "text.path", config.path), config.length)


def _tokenizer_folder(encoder: Path) -> Path:
    """The encoder's own folder, or the one beside it: diffusers has text_encoder and tokenizer, text_encoder_2 and …"""
    absolute = Path(os.path.abspath(encoder))
    beside = absolute.with_name(absolute.name.replace("text_encoder", "tokenizer"))
    for folder in (encoder, beside):
        # Without these transformers makes a tokenizer all the same, of nothing but <unk>.
        if any((folder / name).is_file() for name in _VOCABULARIES):
            return folder
    raise FileNotFoundError(
        f"text.path {encoder} has no tokenizer: there is no {' or '.join(_VOCABULARIES)} in it"
        f"{f' or in {beside}' if beside != absolute else ''}; put the files of its tokenizer there"
    )
