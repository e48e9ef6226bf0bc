"""Image transformers that people train along with video: one sequence of text and image, or one after the other."""

from __future__ import annotations

import torch
from torch import nn

from tests.opensora_models.randomize import randomize
from tests.video_models.case import Case, Inputs, randn, text_mask

HEIGHT, WIDTH, TEXT = 5, 7, 4


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return randomize(
        FluxTransformer2DModel(
            in_channels=8,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=8,
            num_attention_heads=3,
            joint_attention_dim=16,
            pooled_projection_dim=10,
            guidance_embeds=True,
            axes_dims_rope=(2, 2, 4),
        )
    )


def flux2() -> nn.Module:
    from diffusers import Flux2Transformer2DModel

    return randomize(
        Flux2Transformer2DModel(
            in_channels=8,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=8,
            num_attention_heads=3,
            joint_attention_dim=16,
            timestep_guidance_channels=16,
            axes_dims_rope=(2, 2, 2, 2),
        )
    )


def grid_ids(num_columns: int) -> torch.Tensor:
    """[35, num_columns]: each token's row and column, in columns 1 and 2."""
    ids = torch.zeros(HEIGHT, WIDTH, num_columns)
    ids[..., 1] += torch.arange(HEIGHT)[:, None]
    ids[..., 2] += torch.arange(WIDTH)
    return ids.flatten(0, 1)


def flux_inputs() -> Inputs:
    """5 × 7 = 35 tokens, and 4 of text."""
    return {
        "hidden_states": randn(2, HEIGHT * WIDTH, 8),
        "encoder_hidden_states": randn(2, TEXT, 16, seed=2),
        "pooled_projections": randn(2, 10, seed=3),
        "timestep": torch.tensor([0.1, 0.7]),
        "guidance": torch.tensor([1.0, 6.0]),
        "img_ids": grid_ids(3),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def controlled(inputs: Inputs, *names: str) -> Inputs:
    """With what a ControlNet adds to the tokens behind each of two blocks."""
    size = 2, HEIGHT * WIDTH, 24
    return inputs | {
        name: [randn(*size, seed=20 + i), randn(*size, seed=30 + i)] for i, name in enumerate(names)
    }


def flux2_inputs(batched: bool) -> Inputs:
    inputs = flux_inputs() | {"img_ids": grid_ids(4), "txt_ids": torch.arange(TEXT)[:, None].expand(-1, 4)}
    del inputs["pooled_projections"]
    if batched:  # as its pipeline makes them
        inputs |= {name: inputs[name].expand(2, -1, -1) for name in ("img_ids", "txt_ids")}
    return inputs


def stable_diffusion3(dual_attention_layers: tuple[int, ...] = ()) -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return randomize(
        SD3Transformer2DModel(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            attention_head_dim=8,
            num_attention_heads=3,
            joint_attention_dim=16,
            caption_projection_dim=24,
            pooled_projection_dim=10,
            pos_embed_max_size=12,
            dual_attention_layers=dual_attention_layers,
            qk_norm="rms_norm" if dual_attention_layers else None,
        )
    )


def stable_diffusion3_inputs() -> Inputs:
    return {
        "hidden_states": randn(2, 4, 2 * HEIGHT, 2 * WIDTH),
        "encoder_hidden_states": randn(2, TEXT, 16, seed=2),
        "pooled_projections": randn(2, 10, seed=3),
        "timestep": torch.tensor([100.0, 700.0]),
    }


def qwen_image(zero_cond_t: bool = False) -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return randomize(
        QwenImageTransformer2DModel(
            patch_size=1,
            in_channels=8,
            out_channels=8,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=3,
            joint_attention_dim=16,
            axes_dims_rope=(2, 2, 4),
            zero_cond_t=zero_cond_t,
        )
    )


def qwen_image_inputs(edited: bool = False) -> Inputs:
    """35 tokens, and of an image to edit 2 × 3 more behind them; a caption of 4 tokens and one of 3."""
    shapes = [(1, HEIGHT, WIDTH), *([(1, 2, 3)] if edited else [])]
    return {
        "hidden_states": randn(2, sum(h * w for _, h, w in shapes), 8),
        "encoder_hidden_states": randn(2, TEXT, 16, seed=2),
        "encoder_hidden_states_mask": text_mask((TEXT, 3), TEXT),
        "timestep": torch.tensor([0.1, 0.7]),
        "img_shapes": [shapes, shapes],
    }


def joyimage(plus: bool = False, **options: str) -> nn.Module:
    from diffusers import JoyImageEditPlusTransformer3DModel, JoyImageEditTransformer3DModel

    model = JoyImageEditPlusTransformer3DModel if plus else JoyImageEditTransformer3DModel
    return randomize(
        model(
            in_channels=4,
            hidden_size=24,
            num_attention_heads=3,
            text_dim=16,
            mlp_width_ratio=1.5,
            num_layers=2,
            rope_dim_list=[2, 2, 4],
            **options,
        )
    )


def joyimage_inputs() -> Inputs:
    """Two images to edit and the noisy one, of 5 × 7 = 35 tokens each, and 4 of text."""
    return {
        "hidden_states": randn(2, 3, 4, 1, 2 * HEIGHT, 2 * WIDTH),
        "timestep": torch.tensor([100.0, 700.0]),
        "encoder_hidden_states": randn(2, TEXT, 16, seed=2),
    }


def joyimage_plus_inputs(masked: bool) -> Inputs:
    """35 tokens, and of images to edit 2 × 3 and 4 × 2 more, or 2 × 3 and padding; captions of 4 tokens and 3."""
    shapes = [[(1, HEIGHT, WIDTH), (1, 2, 3), (1, 4, 2)], [(1, HEIGHT, WIDTH), (1, 2, 3)]]
    inputs = {
        "hidden_states": randn(2, HEIGHT * WIDTH + 14, 4, 1, 2, 2),
        "timestep": torch.tensor([100.0, 700.0]),
        "encoder_hidden_states": randn(2, TEXT, 16, seed=2),
        "shape_list": shapes,
    }
    return inputs | ({"encoder_hidden_states_mask": text_mask((TEXT, 3), TEXT)} if masked else {})


def z_image() -> nn.Module:
    from diffusers import ZImageTransformer2DModel

    return randomize(
        ZImageTransformer2DModel(
            in_channels=4,
            dim=24,
            n_layers=2,
            n_refiner_layers=2,
            n_heads=3,
            n_kv_heads=3,
            cap_feat_dim=16,
            axes_dims=[2, 2, 4],
            axes_lens=[128, 32, 32],
        )
    )


def z_image_inputs(sizes: tuple[tuple[int, int], ...], captions: tuple[int, ...]) -> Inputs:
    """Images of their own sizes, as a list; the model pads each of them, and each caption, to multiples of 32."""
    return {
        "x": [randn(4, 1, *size, seed=1 + i) for i, size in enumerate(sizes)],
        "t": torch.tensor([0.1, 0.7]),
        "cap_feats": [randn(length, 16, seed=7 + i) for i, length in enumerate(captions)],
    }


_BOTH = ("hidden_states", "encoder_hidden_states")
_LISTS = ("x", "cap_feats")

IMAGE_MODELS = {
    "FLUX.1": Case(flux, flux_inputs, _BOTH),
    "FLUX.1, ControlNet": Case(
        flux,
        lambda: controlled(flux_inputs(), "controlnet_block_samples", "controlnet_single_block_samples"),
        (*_BOTH, "controlnet_single_block_samples"),
    ),
    "FLUX.2": Case(flux2, lambda: flux2_inputs(batched=False), _BOTH),
    "FLUX.2, ids in a batch": Case(flux2, lambda: flux2_inputs(batched=True), _BOTH),
    "SD 3": Case(stable_diffusion3, stable_diffusion3_inputs, _BOTH),
    "SD 3, ControlNet": Case(
        stable_diffusion3,
        lambda: controlled(stable_diffusion3_inputs(), "block_controlnet_hidden_states"),
        (*_BOTH, "block_controlnet_hidden_states"),
    ),
    "SD 3.5": Case(lambda: stable_diffusion3((0, 1)), stable_diffusion3_inputs, _BOTH),
    "Qwen-Image": Case(qwen_image, qwen_image_inputs, _BOTH),
    "Qwen-Image, ControlNet": Case(
        qwen_image,
        lambda: controlled(qwen_image_inputs(), "controlnet_block_samples"),
        (*_BOTH, "controlnet_block_samples"),
    ),
    "Qwen-Image-Edit": Case(
        lambda: qwen_image(zero_cond_t=True), lambda: qwen_image_inputs(edited=True), _BOTH
    ),
    "JoyImage-Edit": Case(joyimage, joyimage_inputs, _BOTH),
    "JoyImage-Edit, text positions": Case(lambda: joyimage(rope_type="mrope"), joyimage_inputs, _BOTH),
    "JoyImage-Edit-Plus": Case(lambda: joyimage(plus=True), lambda: joyimage_plus_inputs(masked=True), _BOTH),
    "JoyImage-Edit-Plus, no mask": Case(
        lambda: joyimage(plus=True), lambda: joyimage_plus_inputs(masked=False), _BOTH
    ),
    "Z-Image": Case(z_image, lambda: z_image_inputs(((10, 14), (10, 14)), (5, 5)), _LISTS),
    "Z-Image, of two sizes": Case(z_image, lambda: z_image_inputs(((10, 14), (6, 10)), (40, 5)), _LISTS),
}
