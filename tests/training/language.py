"""Small encoders of captions as families have them beside T5, in fp64, from torch's global stream."""

import re

import tokenizers
import torch
import transformers

from opensora_accel.training.captions import TextEncoder


def words_of(template, captions):
    """A tokenizer that knows every word and mark of a template and of the captions."""
    words = re.findall(r"\w+|[^\w\s]+", " ".join([template, *captions]))
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["<pad>", "<unk>", *words]))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", padding_side="right"
    )


def llama(taken, length, captions):
    """An encoder that reads captions in a template."""
    tokenizer = words_of(taken.template, captions)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    return TextEncoder(tokenizer, transformers.LlamaModel(config).double(), length, taken)


def clip(taken, tokenizer):
    """An encoder of whole captions, which end with a mark."""
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return TextEncoder(tokenizer, transformers.CLIPTextModel(config).double(), 77, taken)


def saved_pair(folder, taken, captions, tokenizer, length=48):
    """Both in fp32, and saved as a pipeline has them."""
    torch.manual_seed(0)
    pair = [llama(taken[0], length, captions), clip(taken[1], tokenizer)]
    for each, number in zip(pair, ("", "_2"), strict=True):
        each.model.float().save_pretrained(folder / f"text_encoder{number}")
        each.tokenizer.save_pretrained(folder / f"tokenizer{number}")
    return pair
