"""Captions to embeddings: a small T5 with a tokenizer trained on the captions, or a real one from a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora_accel.training.config import TextConfig

_VOCABULARY = 2048


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
    return config.width if not config.path else int(_description(Path(config.path))["d_model"])


def _description(folder: Path) -> dict[str, Any]:
    description = folder / "config.json"
    if not description.is_file():
        raise FileNotFoundError(
            f"text.path {folder} has no config.json; give the local folder of a T5 or UMT5 encoder with its tokenizer"
        )
    return dict(json.loads(description.read_text(encoding="utf-8")))


def _load(config: TextConfig) -> TextEncoder:
    from transformers import AutoTokenizer, T5EncoderModel, UMT5EncoderModel

    folder = Path(config.path)
    kind = _description(folder).get("model_type")
    classes: dict[str, Any] = {"t5": T5EncoderModel, "umt5": UMT5EncoderModel}
    if kind not in classes:
        raise ValueError(f"text.path {folder} holds a {kind!r} model; the encoders used here are t5 and umt5")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = classes[kind].from_pretrained(folder, local_files_only=True)
    return TextEncoder(tokenizer, model, config.length)
