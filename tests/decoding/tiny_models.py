"""A tiny random model of every class that a family decodes: ``TINY``, by class name.

Made with diffusers, with random weights from a fixed seed, in eval mode, on the CPU. Each has everything that its published
form has and that decoding depends on (attention, statistics, shortcuts, patches), is small enough to decode in a fraction
of a second, and gives pixels of 0.1 to 1: tolerances are absolute. Builders take configuration that overrides their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch

from decode_service.decoding.families import FAMILIES, Family
from decode_service.decoding.families.rae import RAEFamily
from decode_service.planning.spec import ModelSpec
from tests.decoding import models
from tests.decoding.models import STATISTICS, pixels_times, weights_times


def autoencoder_kl() -> Any:
    return models.tiny("autoencoder_kl")


def wan() -> Any:
    """Wan 2.2, residual and patchified; ``models`` has Wan 2.1 too."""
    return models.tiny("wan22")


def qwen_image() -> Any:
    return models.tiny("qwen_image")


def minimax_h3() -> Any:
    return models.tiny("minimax_h3")


def qwen_image21(**config: Any) -> Any:
    torch.manual_seed(4)
    defaults = {
        "base_dim": 8,
        "decoder_base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True],
        "scale_factor_spatial": 4 * config.get("patch_size", 1),
        "is_residual": True,
        **STATISTICS,
    }
    vae = diffusers.AutoencoderKLQwenImage21(**{**defaults, **config}).eval().requires_grad_(False)
    return weights_times(1.2, vae)


def allegro() -> Any:
    """Blocks of 3 x 8 x 8 latents, every 2 x 5 x 6."""
    torch.manual_seed(4)
    vae = diffusers.AutoencoderKLAllegro(
        block_out_channels=(8, 16, 16),
        down_block_types=("AllegroDownBlock3D",) * 3,
        up_block_types=("AllegroUpBlock3D",) * 3,
        temporal_downsample_blocks=(True, True, False),
        temporal_upsample_blocks=(False, True, True),
        layers_per_block=1,
        norm_num_groups=4,
    )
    vae = vae.eval().requires_grad_(False)
    vae.kernel, vae.stride = (12, 32, 32), (8, 20, 24)
    return pixels_times(0.2, weights_times(1.2, vae))


def asymmetric_autoencoder_kl(**config: Any) -> Any:
    """A tiny random one whose decoder is wider and deeper than its encoder."""
    torch.manual_seed(10)
    defaults = {
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "down_block_out_channels": (8, 8, 8),
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "up_block_out_channels": (8, 16, 24),
        "layers_per_up_block": 2,
        "norm_num_groups": 4,
    }
    vae = diffusers.AsymmetricAutoencoderKL(**{**defaults, **config}).eval().requires_grad_(False)
    return pixels_times(0.6, vae)


def autoencoder_dc(**config: Any) -> Any:
    torch.manual_seed(11)
    return models.autoencoder_dc(**config).eval().requires_grad_(False)


def autoencoder_tiny(**config: Any) -> Any:
    """A random one of four stages, as all published ones have, so 8 pixels per latent cell."""
    torch.manual_seed(9)
    defaults = {
        "encoder_block_out_channels": (8, 8, 8, 8),
        "decoder_block_out_channels": (8, 8, 8, 8),
        "num_encoder_blocks": (1, 1, 1, 1),
        "num_decoder_blocks": (1, 1, 1, 1),
    }
    vae = diffusers.AutoencoderTiny(**{**defaults, **config}).eval().requires_grad_(False)
    return weights_times(1.5, vae)


def cogvideox(**config: Any) -> Any:
    torch.manual_seed(4)
    defaults = {
        "block_out_channels": (8, 16, 16),
        "down_block_types": ("CogVideoXDownBlock3D",) * 3,
        "up_block_types": ("CogVideoXUpBlock3D",) * 3,
        "latent_channels": 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "sample_height": 96,
        "sample_width": 80,
    }
    vae = diffusers.AutoencoderKLCogVideoX(**{**defaults, **config}).eval().requires_grad_(False)
    # A few of its pixels are ten times as far from zero as most.
    return pixels_times(0.3, weights_times(1.2, vae))


def flux2(*, trained: bool = True, **config: Any) -> Any:
    """A tiny random one, with statistics unless it is not ``trained``."""
    torch.manual_seed(4)
    widths = (8, 16, 16)
    defaults = {
        "block_out_channels": widths,
        "down_block_types": ("DownEncoderBlock2D",) * len(widths),
        "up_block_types": ("UpDecoderBlock2D",) * len(widths),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "sample_size": 32,
    }
    vae = diffusers.AutoencoderKLFlux2(**{**defaults, **config})
    if trained:
        vae.bn.running_mean.normal_()
        vae.bn.running_var.uniform_(0.3, 3.0)
    return vae.eval().requires_grad_(False)


def hunyuan_image(**config: Any) -> Any:
    """A tiny random one; its norms have 32 groups whatever the config says, so no stage has fewer channels."""
    torch.manual_seed(6)
    defaults = {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 8,
        "block_out_channels": (32, 32, 64),
        "layers_per_block": 1,
        "spatial_compression_ratio": 4,
        "sample_size": 32,
        "scaling_factor": 0.75,
    }
    return diffusers.AutoencoderKLHunyuanImage(**{**defaults, **config}).eval().requires_grad_(False)


def hunyuan_image_refiner(**config: Any) -> Any:
    """A tiny random one."""
    torch.manual_seed(8)
    defaults = {
        "latent_channels": 4,
        "block_out_channels": (8, 16, 32),
        "layers_per_block": 1,
        "spatial_compression_ratio": 4,
        "temporal_compression_ratio": 2,
        "scaling_factor": 1.03682,
    }
    return diffusers.AutoencoderKLHunyuanImageRefiner(**{**defaults, **config}).eval().requires_grad_(False)


def hunyuan_video(**config: Any) -> diffusers.AutoencoderKLHunyuanVideo:
    torch.manual_seed(3)
    defaults = {"block_out_channels": (8, 8, 8, 16), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    vae = diffusers.AutoencoderKLHunyuanVideo(**{**defaults, **config}).eval().requires_grad_(False)
    # Pixels of 2 to 3, on which float32 itself is 1e-5 off; trained ones stay within 1.
    return pixels_times(0.25, vae)


def hunyuan_video15(**config: Any) -> diffusers.AutoencoderKLHunyuanVideo15:
    """8x in space, 2x in time, so that the reference's mask (made row by row) and the picture stay small."""
    torch.manual_seed(3)
    defaults = {
        "block_out_channels": (8, 8, 16, 16),
        "layers_per_block": 1,
        "latent_channels": 4,
        "spatial_compression_ratio": 8,
        "temporal_compression_ratio": 2,
    }
    vae = diffusers.AutoencoderKLHunyuanVideo15(**{**defaults, **config}).eval().requires_grad_(False)
    # Pixels well beyond 1, where float32 itself is 1e-5 off; trained ones stay within 1.
    return pixels_times(0.3, vae)


def _with_statistics(vae: Any) -> Any:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        vae.latents_mean.copy_(torch.randn(vae.latents_mean.shape, generator=generator))
        vae.latents_std.copy_(torch.rand(vae.latents_std.shape, generator=generator) + 0.5)
    return vae.eval().requires_grad_(False)


def ltx_video(**config: Any) -> diffusers.AutoencoderKLLTXVideo:
    """8x in space and 4x in time: two upsamplings after 2 x 2 patches."""
    torch.manual_seed(3)
    defaults: dict[str, Any] = {
        "latent_channels": 4,
        "block_out_channels": (8, 16),
        "decoder_block_out_channels": (8, 16),
        "down_block_types": ("LTXVideoDownBlock3D",) * 2,
        "layers_per_block": (1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1),
        "spatio_temporal_scaling": (True, True),
        "decoder_spatio_temporal_scaling": (True, True),
        "decoder_inject_noise": (False, False, False),
        "downsample_type": ("conv", "conv"),
        "upsample_residual": (False, False),
        "upsample_factor": (1, 1),
        "patch_size": 2,
    }
    return pixels_times(0.6, _with_statistics(diffusers.AutoencoderKLLTXVideo(**{**defaults, **config})))


def ltx2_video(**config: Any) -> diffusers.AutoencoderKLLTX2Video:
    torch.manual_seed(3)
    defaults: dict[str, Any] = {
        "latent_channels": 4,
        "block_out_channels": (8, 16),
        "decoder_block_out_channels": (8, 16),
        "down_block_types": ("LTX2VideoDownBlock3D",) * 2,
        "layers_per_block": (1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1),
        "spatio_temporal_scaling": (True, True),
        "decoder_spatio_temporal_scaling": (True, True),
        "decoder_inject_noise": (False, False, False),
        "downsample_type": ("spatiotemporal", "spatiotemporal"),
        "upsample_type": ("spatiotemporal", "spatiotemporal"),
        "upsample_residual": (True, True),
        "upsample_factor": (2, 2),
        "patch_size": 2,
    }
    return pixels_times(0.6, _with_statistics(diffusers.AutoencoderKLLTX2Video(**{**defaults, **config})))


def magvit(spatial_group_norm: bool = True) -> Any:
    torch.manual_seed(4)
    vae = diffusers.AutoencoderKLMagvit(
        block_out_channels=(8, 16, 16),
        latent_channels=4,
        down_block_types=("SpatialDownBlock3D", "SpatialTemporalDownBlock3D", "SpatialTemporalDownBlock3D"),
        up_block_types=("SpatialTemporalUpBlock3D",) * 3,
        layers_per_block=1,
        norm_num_groups=4,
        spatial_group_norm=spatial_group_norm,
    )
    vae = vae.eval().requires_grad_(False)
    return weights_times(1.2, vae)


def mochi(**config: Any) -> Any:
    torch.manual_seed(4)
    defaults = {
        "encoder_block_out_channels": (32, 32, 32),
        "decoder_block_out_channels": (32, 32, 64),
        "latent_channels": 4,
        "layers_per_block": (1, 1, 1, 1),
        "temporal_expansions": (2, 3),
        "spatial_expansions": (2, 2),
        "add_attention_block": (False,) * 4,
        "scaling_factor": 0.8,
        **STATISTICS,
    }
    vae = diffusers.AutoencoderKLMochi(**{**defaults, **config}).eval().requires_grad_(False)
    return weights_times(1.2, vae)


def temporal_decoder() -> Any:
    torch.manual_seed(4)
    vae = diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 64, 64), down_block_types=("DownEncoderBlock2D",) * 3, layers_per_block=1
    )
    vae = vae.eval().requires_grad_(False)
    # Mixing factors start at zero; others make a difference between frames and time.
    for name, parameter in vae.decoder.named_parameters():
        if name.endswith("mix_factor"):
            parameter.fill_(0.4)
    return vae


def cosmos(**config: Any) -> Any:
    """8x8x8 in four stages as released, the attention over space and time included, in the middle and in the first stage."""
    torch.manual_seed(5)
    defaults = {
        "encoder_block_out_channels": (8, 8, 8, 8),
        "decode_block_out_channels": (8, 12, 16, 16),
        "latent_channels": 4,
        "num_layers": 1,
        "attention_resolutions": (64,),
        "latents_mean": None,
        "latents_std": None,
    }
    vae = diffusers.AutoencoderKLCosmos(**{**defaults, **config}).eval().requires_grad_(False)
    return pixels_times(0.3, weights_times(1.5, vae))


def kvae(**config: Any) -> Any:
    torch.manual_seed(4)
    defaults = {"channels": 32, "ch_mult": (1, 2, 2), "num_dec_blocks": 1, "z_channels": 4, "sample_size": 32}
    vae = diffusers.AutoencoderKLKVAE(**{**defaults, **config}).eval().requires_grad_(False)
    return pixels_times(0.5, vae)


def kvae_video(**config: Any) -> Any:
    torch.manual_seed(4)
    defaults = {"ch": 32, "ch_mult": (1, 2, 1), "num_res_blocks": 1, "z_channels": 4, "temporal_compress_times": 4}
    vae = diffusers.AutoencoderKLKVAEVideo(**{**defaults, **config}).eval().requires_grad_(False)
    return pixels_times(0.5, vae)


def vidtok(**config: Any) -> Any:
    """4x8x8 in four stages as released."""
    torch.manual_seed(5)
    defaults = {"ch": 16, "ch_mult": [1, 1, 1, 2], "z_channels": 4, "num_res_blocks": 1}
    vae = diffusers.AutoencoderVidTok(**{**defaults, **config}).eval().requires_grad_(False)
    # Norms over 16 channels make much of rounding. In float64 nothing is left (see the chunks).
    return pixels_times(0.5, vae)


#: Of the tiny RAE: latent rows and columns, pixels per side of a patch, latent channels.
RAE_CELLS, RAE_PATCH, RAE_CHANNELS = 5, 4, 8


def rae(**config: Any) -> Any:
    """A tiny random one with statistics; without the encoder, which is a model of another library."""
    torch.manual_seed(4)
    defaults = {
        "encoder_hidden_size": RAE_CHANNELS,
        "encoder_patch_size": 14,
        "encoder_input_size": 14 * RAE_CELLS,
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 32,
        "patch_size": RAE_PATCH,
        "latents_mean": torch.randn(RAE_CHANNELS, RAE_CELLS, RAE_CELLS).tolist(),
        "latents_std": (torch.rand(RAE_CHANNELS, RAE_CELLS, RAE_CELLS) + 0.5).tolist(),
        "scaling_factor": 0.7,
    }
    with RAEFamily.building():
        vae = diffusers.AutoencoderRAE(**{**defaults, **config}).eval().requires_grad_(False)
    # Otherwise nearly the same patch is everywhere.
    weights_times(2.0, vae)
    vae.decoder.trainable_cls_token.normal_()
    return vae


TINY: dict[str, Callable[[], Any]] = {
    "AutoencoderKL": autoencoder_kl,
    "AutoencoderKLWan": wan,
    "AutoencoderKLQwenImage": qwen_image,
    "AutoencoderKLQwenImage21": qwen_image21,
    "AutoencoderKLCogVideoX": cogvideox,
    "AutoencoderKLMochi": mochi,
    "AutoencoderKLTemporalDecoder": temporal_decoder,
    "AutoencoderKLMagvit": magvit,
    "AutoencoderKLAllegro": allegro,
    "AutoencoderKLFlux2": flux2,
    "AutoencoderKLHunyuanImage": hunyuan_image,
    "AutoencoderKLHunyuanImageRefiner": hunyuan_image_refiner,
    "AutoencoderDC": autoencoder_dc,
    "AutoencoderTiny": autoencoder_tiny,
    "AsymmetricAutoencoderKL": asymmetric_autoencoder_kl,
    "AutoencoderKLHunyuanVideo": hunyuan_video,
    "AutoencoderKLHunyuanVideo15": hunyuan_video15,
    "AutoencoderKLLTXVideo": ltx_video,
    "AutoencoderKLLTX2Video": ltx2_video,
    "AutoencoderKLMiniMaxH3": minimax_h3,
    "AutoencoderKLCosmos": cosmos,
    "AutoencoderKLKVAE": kvae,
    "AutoencoderKLKVAEVideo": kvae_video,
    "AutoencoderVidTok": vidtok,
    "AutoencoderRAE": rae,
}


def tiny_family(class_name: str) -> Family:
    """The family of the tiny model of ``class_name``."""
    return FAMILIES[class_name](TINY[class_name](), "tiny")


def tiny_spec(class_name: str) -> ModelSpec:
    """What planning is told of the tiny model of ``class_name``."""
    return tiny_family(class_name).spec


def latent_shape(spec: ModelSpec, *, frames: int = 3, height: int = 7, width: int = 9) -> tuple[int, ...]:
    """The shape of one latent of the model, video where it takes any; extents that neither 2 nor 3 ranks divide.

    The number of frames is raised until the model's frame rule takes it, or 1 where it takes no other.
    """
    if spec.fixed_cells:
        height = width = spec.fixed_cells
    if spec.frame_rule is None:
        return (1, spec.latent_channels, height, width)
    taken = [t for t in (*range(frames, frames + 32), 1) if not spec.frame_rule.problem(t)]
    return (1, spec.latent_channels, taken[0], height, width)
