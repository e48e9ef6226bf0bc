"""Models of their authors' own repositories, but for Wan's, which stands beside diffusers'."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.authors_models.hunyuan_video import HYVideoDiffusionTransformer
from tests.authors_models.ltx import Transformer3DModel
from tests.authors_models.open_sora_plan import OpenSoraT2V_v1_3
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


_BOTH = ("hidden_states", "encoder_hidden_states")


def _case(
    make: type[torch.nn.Module], inputs: Callable[[], Inputs], differentiated: tuple[str, ...] = _BOTH
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
}
