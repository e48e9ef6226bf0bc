"""Pipelines of diffusers, tiny, with random weights and no hub: what each is called with for 75 tokens of video."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.models import wan
from tests.video_models.case import randn, text_mask
from tests.video_models.cogvideox import cogvideox
from tests.video_models.hunyuan_video import hunyuan_video
from tests.video_models.ltx import ltx

Call = dict[str, Any]
CAPTIONS = ["a rabbit wakes up and stretches", "a butterfly lands on an apple"]


def wan_pipeline() -> tuple[Any, Call]:
    """With an encoder, its tokenizer and a VAE; the transformer is called twice a step."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    from opensora_accel.training.text_encoders import train_tokenizer

    words = Tokenizer.from_str(train_tokenizer(CAPTIONS))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    torch.manual_seed(0)
    config = UMT5Config(
        vocab_size=words.get_vocab_size(), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    pipe = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(config).eval(),
        transformer=wan(torch.float32),
        vae=vae,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
    )
    call = {"prompt": CAPTIONS, "negative_prompt": "grey", "max_sequence_length": 11, "output_type": "pt"}
    return pipe, video() | call | {"guidance_scale": 5.0}


def ltx_pipeline() -> tuple[Any, Call]:
    """Guided in one call of twice the batch, with masks over the text."""
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline

    pipe = LTXPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, ltx())
    call = video(height=96, width=160, num_frames=33) | {"guidance_scale": 3.0}
    return pipe, call | embeddings() | masks()


def hunyuan_pipeline() -> tuple[Any, Call]:
    """Guided by an embedded scale and, in a second call, by a negative prompt."""
    from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline

    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    pipe = HunyuanVideoPipeline(None, None, hunyuan_video(), None, scheduler, None, None)
    pooled = {f"{sign}pooled_prompt_embeds": randn(2, 10, seed=5) for sign in ("", "negative_")}
    return pipe, video() | embeddings() | masks() | pooled | {"true_cfg_scale": 3.0}


def cogvideox_pipeline() -> tuple[Any, Call]:
    """Guided in one call of twice the batch."""
    from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline

    pipe = CogVideoXPipeline(None, None, None, cogvideox(head_dim=16), CogVideoXDDIMScheduler())
    return pipe, video() | embeddings() | {"guidance_scale": 6.0}


def video(height: int = 48, width: int = 80, num_frames: int = 17) -> Call:
    sizes = {"height": height, "width": width, "num_frames": num_frames}
    return sizes | {"num_inference_steps": 3, "output_type": "latent"}


def embeddings() -> dict[str, Tensor]:
    """Of two captions, wanted and not."""
    return {"prompt_embeds": randn(2, 7, 16, seed=2), "negative_prompt_embeds": randn(2, 7, 16, seed=3)}


def masks() -> dict[str, Tensor]:
    return {
        "prompt_attention_mask": text_mask((7, 4), 7).long(),
        "negative_prompt_attention_mask": text_mask((3, 5), 7).long(),
    }


PIPELINES: dict[str, Callable[[], tuple[Any, Call]]] = {
    "WanPipeline": wan_pipeline,
    "LTXPipeline": ltx_pipeline,
    "HunyuanVideoPipeline": hunyuan_pipeline,
    "CogVideoXPipeline": cogvideox_pipeline,
}
