"""Small VAEs of each family, and what makes sound of LTX-2's spectrograms, from torch's global stream."""

import diffusers
import torch
from diffusers.pipelines.ltx2 import LTX2Vocoder


def wan_vae():
    sizes = {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return diffusers.AutoencoderKLWan(**sizes, temperal_downsample=[False, True, True])


def ltx_vae(timestep_conditioning=False, scaling_factor=1.3):
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False, False, False, False, False),
        upsample_residual=(False, False, False, False),
        upsample_factor=(1, 1, 1, 1),
        timestep_conditioning=timestep_conditioning,
        patch_size=1,
        patch_size_t=1,
        scaling_factor=scaling_factor,
    )
    # As published ones have them: among the weights.
    vae.latents_mean.copy_(torch.linspace(-1, 1, 8))
    vae.latents_std.copy_(torch.linspace(0.5, 2, 8))
    return vae


def ltx2_vae():
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=8,
        block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False, False, False),
        downsample_type=("spatiotemporal", "spatiotemporal"),
        upsample_residual=(False, False),
        upsample_factor=(1, 1),
        patch_size=1,
        patch_size_t=1,
    )
    vae.latents_mean.copy_(torch.linspace(-1, 1, 8))
    vae.latents_std.copy_(torch.linspace(0.5, 2, 8))
    return vae


def ltx2_audio_vae():
    vae = diffusers.AutoencoderKLLTX2Audio(base_channels=8, latent_channels=4, mel_bins=8, num_res_blocks=1)
    vae.latents_mean.copy_(torch.linspace(-1, 1, 8))
    vae.latents_std.copy_(torch.linspace(0.5, 2, 8))
    return vae


def ltx2_vocoder():
    return LTX2Vocoder(
        in_channels=16,
        hidden_channels=8,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 1, 1]],
    )


def mochi_vae():
    # Its pipeline has 12 channels, 8 pixels and 6 frames written into it.
    sizes = {name: (32, 32, 32, 32) for name in ("encoder_block_out_channels", "decoder_block_out_channels")}
    return diffusers.AutoencoderKLMochi(latent_channels=12, layers_per_block=(1, 1, 1, 1, 1), **sizes)


def cogvideox_vae(**given):
    sizes = {"block_out_channels": (4, 4, 4, 4), "latent_channels": 4, "layers_per_block": 1}
    return diffusers.AutoencoderKLCogVideoX(**sizes, norm_num_groups=2, **given)


def allegro_vae():
    """Of tiles of 24 × 128 × 128, the next of which are 16 frames, 8 rows and 48 columns on."""
    sizes = {"block_out_channels": (4, 4, 4, 4), "layers_per_block": 1, "norm_num_groups": 2}
    return diffusers.AutoencoderKLAllegro(sample_size=128, **sizes)


def picture_vae(**given):
    """Of single pictures, as Stable Diffusion's."""
    stages = {"block_out_channels": (4, 4, 4, 4), "layers_per_block": 1, "norm_num_groups": 2}
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    return diffusers.AutoencoderKL(**stages, **kinds, latent_channels=4, **given)


def picture_vae_for_frames():
    """The same, which looks at a picture's neighbours where it decodes."""
    stages = {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1}
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4}
    return diffusers.AutoencoderKLTemporalDecoder(**stages, **kinds, latent_channels=4)


def easyanimate_vae():
    sizes = {"block_out_channels": (4, 4, 4, 4), "layers_per_block": 1, "norm_num_groups": 2}
    return diffusers.AutoencoderKLMagvit(latent_channels=4, **sizes)


def hunyuan_video_vae():
    sizes = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4}
    return diffusers.AutoencoderKLHunyuanVideo(latent_channels=4, **sizes)


def hunyuan_video15_vae():
    sizes = {"block_out_channels": (8, 8, 8, 8, 8), "layers_per_block": 1}
    return diffusers.AutoencoderKLHunyuanVideo15(latent_channels=4, **sizes)


def minimax_h3_vae():
    """Its clips have 5, 22, 39, … frames, of sides of 4 pixels to a position."""
    sizes = {
        "block_out_channels": (8, 8, 8),
        "spatial_downsample_factors": (2, 2, 1),
        "temporal_downsample_factors": (2, 2, 1),
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }
    decoder = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "num_register_tokens": 1}
    return diffusers.AutoencoderKLMiniMaxH3(
        latent_channels=4,
        latents_mean=(-1.0, 0.0, 0.5, 1.0),
        latents_std=(0.5, 1.0, 1.5, 2.0),
        **sizes,
        **{f"decoder_{name}": value for name, value in decoder.items()},
    )


@torch.no_grad()
def minimax_h3_audio_vae():
    """Samples of one channel, 800 to a position. Its weight norm keeps no graph, with which it could not be copied."""
    return diffusers.AutoencoderKLMiniMaxH3Audio(
        encoder_dim=2,
        latent_dim=16,
        latent_channels=4,
        num_attention_heads=2,
        decoder_dim=128,
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3, 5),),
        latents_mean=[-1.0, 0.0, 0.5, 1.0],
        latents_std=[0.5, 1.0, 1.5, 2.0],
    )
