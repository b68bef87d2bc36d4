"""LTX-Video (32x32x8, 128 channels): ``AutoencoderKLLTXVideo``, with and without timestep conditioning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from diffusers.models.autoencoders import autoencoder_kl_ltx as ltx

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.whole_clip import Convolution, WholeClipFamily, clip_operands
from decode_service.decoding.rewrites import Activation, CausalConvolution, DecoderStructure, SpatialPadding
from decode_service.errors import ConfigError
from decode_service.planning.spec import WHOLE_CLIP, ModelSpec, Packing, StrideTiles
from decode_service.planning.temporal import CausalFrames

# B batch, C channels, T latent frames, H height, W width.


def padded_by_its_convolution(convolution: Any) -> SpatialPadding:
    """How a causal convolution of the LTX models pads its frames."""
    _, rows, columns = convolution.conv.padding
    mode = convolution.conv.padding_mode
    return SpatialPadding(columns, columns, rows, rows, mode="constant" if mode == "zeros" else mode)


class LTXVideoFamily(WholeClipFamily):
    """``AutoencoderKLLTXVideo``: one call of the decoder for the whole clip. Its norms are per position.

    A model with timestep conditioning (0.9.1 and later) is decoded at the pipeline's default, ``decode_timestep=0``, unless
    the request says another. There the noise that the pipeline mixes in has weight 0, so that the picture depends on the
    latents alone.
    """

    class_names = ("AutoencoderKLLTXVideo",)
    serves = "LTX-Video"
    structure = DecoderStructure(
        causal_convolutions=(
            CausalConvolution(ltx.LTXVideoCausalConv3d, "repeat", padded_by_its_convolution, convolution="conv"),
        ),
        activations=(
            Activation(ltx.LTXVideoResnetBlock3d, "nonlinearity"),
            Activation(ltx.LTXVideoDecoder3d, "conv_act"),
        ),
    )
    family_name = "ltx-video"

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config, decoder = self.config, self.vae.decoder
        (class_name,) = self.class_names
        inject_noise = config["decoder_inject_noise"]
        if inject_noise if isinstance(inject_noise, bool) else any(inject_noise):
            raise ConfigError(
                f"{name} ({class_name}) draws noise while decoding (decoder_inject_noise), so that no decode is like "
                "another; such models are not supported yet"
            )
        if config["patch_size_t"] != 1:
            raise ConfigError(
                f"{name} ({class_name}) packs {config['patch_size_t']} frames into channels (patch_size_t); only 1 is supported"
            )
        # From the structure: the ratios of the config describe the encoder, and may be overridden by hand.
        strides = [upsampler.stride for block in decoder.up_blocks for upsampler in block.upsamplers or ()]
        ratio = config["patch_size"] * math.prod(stride[1] for stride in strides)
        first, later = clip_operands(self._convolutions(ratio))
        return ModelSpec(
            name=name,
            family=self.family_name,
            class_name=class_name,
            latent_channels=config["latent_channels"],
            output_channels=config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=CausalFrames(math.prod(stride[0] for stride in strides)),
            accepts_images=False,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles or self.own_tiles(), ratio, class_name),
            chunked=False,
            operand_per_pixel_first=first,
            operand_padding=2 * config["patch_size"],
            operand_per_pixel=later,
            pass_frames=WHOLE_CLIP,
            # The transformer's patches are single cells in every released model.
            packing=Packing((1,)),
            default_timestep=0.0 if config["timestep_conditioning"] else None,
        )

    def _convolutions(self, spatial: int) -> Iterator[Convolution]:
        decoder, frames = self.vae.decoder, 1
        for block in decoder.up_blocks:
            if block.conv_in is not None:
                conv = block.conv_in.conv1.conv
                yield Convolution(conv.in_channels, conv.out_channels, spatial, frames)
            for upsampler in block.upsamplers or ():
                conv = upsampler.conv.conv
                yield Convolution(conv.in_channels, conv.out_channels, spatial, frames)
                frames, spatial = frames * upsampler.stride[0], spatial // upsampler.stride[1]
            for resnet in block.resnets:
                conv = resnet.conv1.conv
                yield Convolution(conv.in_channels, conv.out_channels, spatial, frames)
        conv = decoder.conv_out.conv
        yield Convolution(conv.in_channels, conv.out_channels, spatial, frames)

    def statistics(self) -> dict[str, Any]:
        # Part of the weights, not of the config.
        mean, std = (x.tolist() for x in (self.vae.latents_mean.float(), self.vae.latents_std.float()))
        return {"scaling_factor": self.config["scaling_factor"], "latents_mean": mean, "latents_std": std}

    def denormalization(self) -> str:
        return "latents * latents_std / scaling_factor + latents_mean, per channel"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        # ``_denormalize_latents`` of LTXPipeline; the statistics are part of the weights, not of the config.
        shape, device, dtype = (1, -1, 1, 1, 1), latents_BCTHW.device, latents_BCTHW.dtype
        mean = self.vae.latents_mean.view(shape).to(device, dtype)
        std = self.vae.latents_std.view(shape).to(device, dtype)
        return latents_BCTHW * std / self.config["scaling_factor"] + mean

    def decode_clip(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        timestep: Any = None
        if self.config["timestep_conditioning"]:
            timestep = latents_BCTHW.new_full((latents_BCTHW.shape[0],), self.timestep)
        return self.call_decoder(latents_BCTHW, timestep)

    def dtype(self) -> torch.dtype:
        # Not the decoder's first parameter, which is the multiplier of the timestep where it has one.
        weight: torch.Tensor = self.vae.decoder.conv_in.conv.weight
        return weight.dtype
