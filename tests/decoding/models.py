"""Tiny random models of every family, written with diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch

STATISTICS = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.5, 2.0, 1.0]}


def wan21() -> diffusers.AutoencoderKLWan:
    return diffusers.AutoencoderKLWan(base_dim=8, z_dim=4, num_res_blocks=1, **STATISTICS)


def wan22() -> diffusers.AutoencoderKLWan:
    return diffusers.AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=4,
        num_res_blocks=1,
        is_residual=True,
        patch_size=2,
        in_channels=12,
        out_channels=12,
        scale_factor_spatial=16,
        **STATISTICS,
    )


def qwen_image() -> diffusers.AutoencoderKLQwenImage:
    return diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=4, num_res_blocks=1, **STATISTICS)


def minimax_h3(**config: int) -> diffusers.AutoencoderKLMiniMaxH3:
    model = diffusers.AutoencoderKLMiniMaxH3(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=2,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        **config,
        **STATISTICS,
    )
    # Zero-initialised residual scales would leave the transformer blocks without effect.
    with torch.no_grad():
        for block in model.decoder.transformer_blocks:
            block.scale1.fill_(0.5)
            block.scale2.fill_(0.5)
    return model


def autoencoder_kl(**config: Any) -> diffusers.AutoencoderKL:
    """FLUX.1's form: no quant convolutions, a shift; GroupNorm and attention as in all of them."""
    widths = (8, 16, 16)
    defaults = {
        "block_out_channels": widths,
        "down_block_types": ("DownEncoderBlock2D",) * len(widths),
        "up_block_types": ("UpDecoderBlock2D",) * len(widths),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "sample_size": 32,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "force_upcast": False,
    }
    return diffusers.AutoencoderKL(**{**defaults, **config})


def autoencoder_dc(**config: Any) -> diffusers.AutoencoderDC:
    """Sana's form, with linear attention at its lowest resolution: in heads of 8 channels, so from 9 positions on."""
    widths = (8, 16, 16)
    defaults = {"latent_channels": 4, "attention_head_dim": 8, "encoder_layers_per_block": (1, 1, 1)}
    for side in ("encoder", "decoder"):
        defaults |= {
            f"{side}_block_out_channels": widths,
            f"{side}_block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
            f"{side}_layers_per_block": (1, 1, 1),
            f"{side}_qkv_multiscales": ((), (), (5,)),
        }
    return diffusers.AutoencoderDC(**{**defaults, **config})


BUILDERS = {
    "autoencoder_kl": autoencoder_kl,
    "autoencoder_dc": autoencoder_dc,
    "wan21": wan21,
    "wan22": wan22,
    "qwen_image": qwen_image,
    "minimax_h3": minimax_h3,
}


def weights_times(factor: float, vae: Any) -> Any:
    """``vae`` with that much more, or less, weight in its decoder; biases stay.

    Random initial weights give pictures near zero, on which a wrong halo or blend could hide within any tolerance.
    """
    with torch.no_grad():
        for parameter in vae.decoder.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return vae


def pixels_times(factor: float, vae: Any) -> Any:
    """``vae`` with its last convolution, and so its pixels, that much larger.

    Tolerances are absolute, and rounding grows with the pixels: the errors of these models against themselves in float64 are
    about 2e-5 of what pixels differ from each other by. Half of a bound must be left for CPUs that sum in another order.
    """
    with torch.no_grad():
        for parameter in vae.decoder.conv_out.parameters():
            parameter.mul_(factor)
    return vae


def tiny(name: str) -> Any:
    """The model ``name`` with random weights from a fixed seed, in eval mode."""
    torch.manual_seed(7)
    model = BUILDERS[name]().eval().requires_grad_(False)
    if name in ("wan21", "qwen_image"):
        pixels_times(0.6, model)
        # So that pictures reach the ends of the range: otherwise nothing would show that they are clamped.
        with torch.no_grad():
            model.decoder.conv_out.bias.copy_(torch.tensor([0.8, 0.0, -0.8]))
    return model


def save(name: str, folder: Path) -> torch.nn.Module:
    """Write the model ``name`` to ``folder`` in diffusers layout, and return it."""
    model: torch.nn.Module = tiny(name)
    model.save_pretrained(folder)
    return model
