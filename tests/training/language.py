"""Small encoders of captions as families have them beside T5, in fp64, from torch's global stream."""

import re

import tokenizers
import torch
import transformers
from diffusers.pipelines.ltx2 import LTX2TextConnectors

from opensora_accel.training.captions import VISION_TOKENS, TextEncoder
from opensora_accel.training.llava import LlavaEncoder


class Processor(transformers.PreTrainedTokenizerFast):
    """A tokenizer that is given pictures too, as Qwen's; there are none."""

    def __call__(self, text=None, images=None, videos=None, **options):
        return super().__call__(text, **options)


# As which it is saved.
Processor.__name__ = "PreTrainedTokenizerFast"


def words_of(template, captions, kind=transformers.PreTrainedTokenizerFast):
    """A tokenizer that knows every word and mark of a template and of the captions."""
    words = re.findall(r"[^\W_]+|[^\w\s]|_", " ".join([template, *captions]))
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["<pad>", "<unk>", *words]))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    pre = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = pre.Sequence([pre.WhitespaceSplit(), pre.Punctuation("isolated")])
    return kind(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", padding_side="right")


def in_template(kind, taken, length, captions, reader=transformers.PreTrainedTokenizerFast, **options):
    """A language model that reads captions in a template."""
    tokenizer = words_of(taken.template, captions, reader)
    config = small_config(kind, tokenizer, **options)
    return TextEncoder(tokenizer, getattr(transformers, f"{kind}Model")(config).double(), length, taken)


def small_config(kind, tokenizer, num_hidden_layers=4, **options):
    return getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        **options,
    )


def llama(taken, length, captions):
    return in_template("Llama", taken, length, captions)


def gemma(taken, length, captions):
    """Its tokenizer begins every text with a mark."""
    encoder = in_template("Gemma2", taken, length, captions, num_key_value_heads=2, head_dim=8)
    encoder.tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", encoder.tokenizer.unk_token_id)]
    )
    # As it counts tokens of its template when it is made.
    return TextEncoder(encoder.tokenizer, encoder.model, length, taken)


def gemma3(taken, length, captions, *, per_stream=False):
    """A language model, and the connectors that make states for clips and for sound of what all its layers give.

    Those of LTX-2.3, per stream, have states as wide as its transformer is for clips and for sound.
    """
    # Of words in pairs, as sliding windows are drawn.
    encoder = in_template(
        "Gemma3Text", taken, length, captions, num_key_value_heads=2, head_dim=8, sliding_window=4
    )
    sizes = {"video": (3, 12), "audio": (3, 12)} if per_stream else {"video": (4, 8), "audio": (4, 8)}
    given = {}
    for stream, (heads, width) in sizes.items():
        prefix = f"{stream}_connector"
        given |= {f"{prefix}_num_attention_heads": heads, f"{prefix}_attention_head_dim": width}
        given |= {f"{prefix}_num_layers": 1, f"{prefix}_num_learnable_registers": 4}
    if per_stream:
        given |= {
            "per_modality_projections": True,
            "video_hidden_dim": 36,
            "audio_hidden_dim": 36,
            "rope_type": "split",
        }
    connectors = LTX2TextConnectors(32, encoder.model.config.num_hidden_layers + 1, **given).double()
    return TextEncoder(encoder.tokenizer, encoder.model, length, taken, connectors=connectors)


def qwen(taken, length, captions):
    """Its tokenizer knows the template as that of a chat."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    options = {"num_key_value_heads": 2, "rope_parameters": rope}
    encoder = in_template("Qwen2_5_VLText", taken, length, captions, Processor, **options)
    encoder.tokenizer.chat_template = (
        "{% for each in messages %}<|im_start|>{{ each.role }}\n{% if each.content is string %}{{ each.content }}"
        "{% else %}{% for part in each.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return encoder


def qwen2(taken, length, captions):
    """Its tokenizer has the template of a chat, in which a message is a list of parts."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    options = {"num_key_value_heads": 2, "rope_parameters": rope}
    encoder = in_template("Qwen2VLText", taken, length, captions, Processor, **options)
    encoder.tokenizer.chat_template = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "{% for each in messages %}<|im_start|>{{ each.role }}\n"
        "{% for part in each.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return encoder


def qwen3(taken, length, captions):
    """Of more layers than the state is from, and the whole that it is the reading part of, which sees pictures too."""
    tokenizer = words_of(taken.template, [*captions, taken.picture.format(1), taken.picture.format(2)])
    tokenizer.add_special_tokens({"additional_special_tokens": VISION_TOKENS})
    start, pad, end = tokenizer.convert_tokens_to_ids(VISION_TOKENS)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    options = {"num_key_value_heads": 2, "head_dim": 8, "rope_parameters": rope}
    reading = small_config("Qwen3VLText", tokenizer, num_hidden_layers=52, **options)
    sizes = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = transformers.Qwen3VLConfig(
        text_config=reading.to_dict(),
        vision_config={
            **sizes,
            "patch_size": 8,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        image_token_id=pad,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    whole = transformers.Qwen3VLForConditionalGeneration(config).double().eval()
    return TextEncoder(tokenizer, whole.model.language_model, length, taken), whole


def qwen_frames():
    """What prepares frames for it, of sides of 16 pixels to a token."""
    return transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64}, patch_size=8
    )


def byt5(taken):
    """An encoder of bytes."""
    sizes = {"d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    tokenizer = transformers.ByT5Tokenizer()
    model = transformers.T5EncoderModel(transformers.T5Config(vocab_size=len(tokenizer), **sizes))
    return TextEncoder(tokenizer, model.double(), taken.length, taken)


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


def saved_pair(folder, taken, captions, tokenizer, length=96):
    """Both in fp32, and saved as a pipeline has them."""
    torch.manual_seed(0)
    pair = [llama(taken[0], length, captions), clip(taken[1], tokenizer)]
    for each, number in zip(pair, ("", "_2"), strict=True):
        each.model.float().save_pretrained(folder / f"text_encoder{number}")
        each.tokenizer.save_pretrained(folder / f"tokenizer{number}")
    return pair


MARKS_OF_LLAMA = [
    *("<image>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("\n\n", "\n"),
]


def llava(taken, length, captions):
    """A language model that sees a picture in its template, of 9 parts; `whole` is what its pipeline has."""
    tokenizer = words_of(taken.template, captions)
    # As Llama's has them, one token each. Two before every text, so that as many are skipped as of Llama's own.
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS_OF_LLAMA})
    begin = MARKS_OF_LLAMA[1]
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begin} {begin} $A", special_tokens=[(begin, tokenizer.convert_tokens_to_ids(begin))]
    )
    sees = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sees, image_size=24, patch_size=8),
        text_config=small_config("Llama", tokenizer),
        image_token_index=tokenizer.convert_tokens_to_ids(taken.picture.token),
        image_seq_length=9,
        pad_token_id=tokenizer.pad_token_id,
    )
    whole = transformers.LlavaForConditionalGeneration(config).double().eval()
    prepares = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24}
    )
    encoder = LlavaEncoder(tokenizer, whole.model, length, taken, processor=prepares)
    encoder.whole = whole
    return encoder
