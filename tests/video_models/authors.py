"""Models of their authors' own repositories, but for Wan's, which stands beside diffusers'."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.authors_models import skyreels_v2
from tests.authors_models.causal_wan import CausalWanModel, causal_wan_inputs
from tests.authors_models.hunyuan_video import HYVideoDiffusionTransformer
from tests.authors_models.kandinsky5 import DiffusionTransformer3D
from tests.authors_models.latte import Latte
from tests.authors_models.ltx import Transformer3DModel
from tests.authors_models.ltx2 import LTXModel, Modality
from tests.authors_models.open_sora_plan import OpenSoraT2V_v1_3
from tests.authors_models.step_video import StepVideoModel
from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, text_mask

FRAMES, HEIGHT, WIDTH, TEXT = 5, 3, 5, 7  # 75 tokens


def places() -> torch.Tensor:
    """[3, 75]: each token's frame, row and column."""
    return torch.cartesian_prod(*(torch.arange(float(size)) for size in (FRAMES, HEIGHT, WIDTH))).T


def hunyuan_video_inputs() -> Inputs:
    """One caption of two has 4 tokens of 7."""
    angles = places().T.repeat_interleave(2, dim=1) @ torch.randn(
        6, 8, generator=torch.Generator().manual_seed(5)
    )
    return {
        "x": randn(2, 4, FRAMES, 2 * HEIGHT, 2 * WIDTH),
        "t": torch.tensor([0.1, 0.7]),
        "text_states": randn(2, TEXT, 16, seed=2),
        "text_mask": text_mask((TEXT, 4), TEXT).long(),
        "text_states_2": randn(2, 10, seed=3),
        "freqs_cos": angles.cos(),
        "freqs_sin": angles.sin(),
    }


def ltx_inputs(per_token_time: bool = False) -> Inputs:
    return {
        "hidden_states": randn(2, FRAMES * HEIGHT * WIDTH, 8),
        "indices_grid": places().expand(2, -1, -1),
        "encoder_hidden_states": randn(2, TEXT, 16, seed=2),
        "timestep": randn(2, 75, seed=4) if per_token_time else torch.tensor([0.1, 0.7]),
        "encoder_attention_mask": text_mask((TEXT, 4), TEXT).long(),
    }


def open_sora_plan_inputs() -> Inputs:
    """The second clip has 4 frames of 5."""
    seen = torch.ones(2, FRAMES, 2 * HEIGHT, 2 * WIDTH)
    seen[1, 4:] = 0
    return {
        "hidden_states": randn(2, 4, FRAMES, 2 * HEIGHT, 2 * WIDTH),
        "timestep": torch.tensor([0.1, 0.7]),
        "encoder_hidden_states": randn(2, 1, TEXT, 16, seed=2),
        "attention_mask": seen,
        "encoder_attention_mask": text_mask((TEXT, 4), TEXT).long()[:, None],
    }


def kandinsky5_inputs() -> Inputs:
    """One clip; two tokens of its caption are hidden."""
    return {
        "x": randn(FRAMES, 2 * HEIGHT, 2 * WIDTH, 4),
        "text_embed": randn(1, TEXT, 16, seed=2),
        "pooled_text_embed": randn(1, 10, seed=3),
        "time": torch.tensor([300.0]),
        "visual_rope_pos": [torch.arange(size) for size in (FRAMES, HEIGHT, WIDTH)],
        "text_rope_pos": torch.arange(TEXT),
        "attention_mask": text_mask((TEXT - 2,), TEXT)[None, None],
    }


def step_video_inputs() -> Inputs:
    return {
        "hidden_states": randn(2, FRAMES, 4, HEIGHT, WIDTH),
        "encoder_hidden_states": randn(2, TEXT - 2, 16, seed=2),
        "encoder_hidden_states_2": randn(2, 2, 8, seed=3),
        "timestep": torch.tensor([100.0, 700.0]),
        "encoder_attention_mask": text_mask((TEXT, 4), TEXT).long(),
    }


def skyreels_v2_inputs(forcing: bool = True) -> Inputs:
    times = torch.linspace(10, 900, 2 * FRAMES).view(2, FRAMES)
    return {
        "x": randn(2, 4, FRAMES, 2 * HEIGHT, 2 * WIDTH),
        "t": times if forcing else times[:, 0],
        "context": randn(2, TEXT, 20, seed=2),
    }


def latte_inputs() -> Inputs:
    """5 frames of 3 × 3 places."""
    return {"x": randn(2, FRAMES, 4, 6, 6), "t": torch.tensor([100.0, 700.0])}


def ltx2_inputs(has_audio: bool = True, masked: bool = False) -> Inputs:
    """75 tokens of video and 11 of audio; the first frame's tokens are a keyframe's."""
    times = torch.arange(11.0).expand(2, 1, -1)
    video = Modality(
        latent=randn(2, 75, 8),
        sigma=torch.tensor([0.1, 0.7]),
        timesteps=randn(2, 75, seed=4),
        positions=torch.stack([places(), places() + 1], -1).expand(2, -1, -1, -1),
        context=randn(2, TEXT, 16, seed=2),
        attention_mask=(randn(2, 75, 75, seed=8) > -1).float() if masked else None,
        keyframes_mask=(torch.arange(75) < HEIGHT * WIDTH).float().expand(2, -1)[..., None],
    )
    audio = Modality(
        latent=randn(2, 11, 6, seed=5),
        sigma=torch.tensor([0.2, 0.6]),
        timesteps=randn(2, 11, seed=6),
        positions=torch.stack([times, times + 1], -1),
        context=randn(2, TEXT, 16, seed=7),
    )
    return {"video": video, "audio": audio if has_audio else None}


_BOTH = ("hidden_states", "encoder_hidden_states")


def _case(
    make: Callable[[], torch.nn.Module], inputs: Callable[[], Inputs], differentiated: tuple[str, ...] = _BOTH
) -> Case:
    """Their checkpointing is a call of torch's within the model, and there is none to turn on here."""
    return Case(lambda: randomize(make()), inputs, differentiated, lambda model: None)


AUTHORS = {
    "HunyuanVideo, its authors'": _case(
        HYVideoDiffusionTransformer, hunyuan_video_inputs, ("x", "text_states")
    ),
    "LTX-Video, its authors'": _case(Transformer3DModel, ltx_inputs),
    "LTX-Video, its authors', time per token": _case(Transformer3DModel, lambda: ltx_inputs(True)),
    "Open-Sora-Plan, its authors'": _case(OpenSoraT2V_v1_3, open_sora_plan_inputs),
    "Kandinsky 5, its authors'": _case(DiffusionTransformer3D, kandinsky5_inputs, ("x", "text_embed")),
    "LTX-2, its authors'": _case(LTXModel, ltx2_inputs, ("video.latent", "video.context", "audio.latent")),
    "LTX-2, its authors', masked, no audio": _case(
        partial(LTXModel, has_audio=False), lambda: ltx2_inputs(False, True), ("video.latent",)
    ),
    "Latte, its authors'": _case(Latte, latte_inputs, ("x",)),
    "Step-Video, its authors'": _case(StepVideoModel, step_video_inputs),
    "Causal Wan, its authors'": _case(CausalWanModel, causal_wan_inputs, ("x", "context")),
    "Causal Wan, windows of blocks": _case(
        partial(CausalWanModel, num_frame_per_block=2, local_attn_size=3),
        partial(causal_wan_inputs, frames=6),
        ("x", "context"),
    ),
    "Causal Wan, teacher forcing": _case(
        partial(CausalWanModel, num_frame_per_block=2),
        partial(causal_wan_inputs, frames=6, clean=True),
        ("x", "clean_x", "context"),
    ),
    "SkyReels-V2, its authors'": _case(
        skyreels_v2.WanModel, lambda: skyreels_v2_inputs(forcing=False), ("x", "context")
    ),
    "SkyReels-V2, its authors', diffusion forcing": _case(
        skyreels_v2.WanModel, skyreels_v2_inputs, ("x", "context")
    ),
}
