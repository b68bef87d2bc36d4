"""Qwen-Image 2.1: ``AutoencoderKLQwenImage21``, the residual architecture of Wan 2.2 reduced to single images."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from diffusers.models.autoencoders import autoencoder_kl_qwenimage21 as qwen

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.causal import CausalFamily, TimesStdFamily, zero_padded
from decode_service.decoding.rewrites import Activation, CausalConvolution, DecoderStructure
from decode_service.planning.spec import ModelSpec, Packing, StrideTiles
from decode_service.planning.temporal import CausalFrames, SingleFrame


class QwenImage21Family(TimesStdFamily, CausalFamily):
    """``AutoencoderKLQwenImage21``: 16x, 64 channels, pictures with an alpha channel.

    Its causal convolutions are two-dimensional ones, the last temporal slice of Wan's, and refuse a feature cache: a
    second latent frame cannot be decoded, whatever the temporal options in its config say.
    """

    class_names = ("AutoencoderKLQwenImage21",)
    serves = "Qwen-Image 2.1, with alpha"
    structure = DecoderStructure(
        channels_last=True,
        causal_convolutions=(CausalConvolution(qwen.QwenImage21CausalConv3d, "zeros", zero_padded),),
        rms_norms=(qwen.QwenImage21RMS_norm,),
        activations=(
            Activation(qwen.QwenImage21ResidualBlock, "nonlinearity"),
            Activation(qwen.QwenImage21Decoder3d, "nonlinearity", ("norm_out",)),
        ),
        duplications=(qwen.QwenImage21DupUp3D,),
    )

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config = self.config
        patch = config["patch_size"] or 1
        # From the structure, not from scale_factor_spatial, which a config may have left at its default.
        decoder_ratio = 2 ** (len(config["dim_mult"]) - 1)
        width = config["decoder_base_dim"] or config["base_dim"]
        # The widest operand at full resolution: the last upsampling leaves the channels of the stage before.
        operand = width * max(config["dim_mult"][:2])
        return ModelSpec(
            name=name,
            family="qwen-image-2.1",
            class_name="AutoencoderKLQwenImage21",
            latent_channels=config["z_dim"],
            output_channels=config["out_channels"] // patch**2,
            spatial_ratio=decoder_ratio * patch,
            decoder_ratio=decoder_ratio,
            frame_rule=SingleFrame(),
            accepts_images=True,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles, decoder_ratio * patch, "AutoencoderKLQwenImage21"),
            chunked=False,
            operand_per_pixel_first=operand // patch**2,
            packing=Packing((1,)),
            operand_padding=2 * patch,
        )

    @property
    def frame_rule(self) -> CausalFrames:
        """The causal rule for the one frame that there is."""
        return CausalFrames(1)

    def passes(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        x_BCTHW = self.vae.post_quant_conv(latents_BCTHW)
        # The residual shortcuts must know that this is the first frame: they drop its leading copies.
        yield self.call_decoder(x_BCTHW, first_chunk=True)
