"""HunyuanVideo 1.5 (16x16x4, 32 channels): ``AutoencoderKLHunyuanVideo15``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as hunyuan
from torch import nn

from decode_service.decoding.attention import frame_causal_attention
from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.whole_clip import Convolution, WholeClipFamily, clip_operands, time_padded
from decode_service.decoding.rewrites import Activation, CausalConvolution, DecoderStructure
from decode_service.planning.spec import WHOLE_CLIP, ModelSpec, StrideTiles
from decode_service.planning.temporal import CausalFrames

# B batch, C channels, T latent frames, H height, W width, S tokens of one frame.


class HunyuanVideo15Family(WholeClipFamily):
    """``AutoencoderKLHunyuanVideo15``: one call of the decoder for the whole clip; RMS norms, which are per position.

    diffusers builds the (THW)^2 mask of its attention row by row in Python. As for HunyuanVideo 1.0, the family calls the
    decoder's own modules in the order of the decoder's ``forward``, with attention frame by frame instead of the mask.
    """

    class_names = ("AutoencoderKLHunyuanVideo15",)
    serves = "HunyuanVideo 1.5"
    structure = DecoderStructure(
        causal_convolutions=(
            CausalConvolution(hunyuan.HunyuanVideo15CausalConv3d, "repeat", time_padded, convolution="conv"),
        ),
        rms_norms=(hunyuan.HunyuanVideo15RMS_norm,),
        activations=(
            Activation(hunyuan.HunyuanVideo15ResnetBlock, "nonlinearity"),
            Activation(hunyuan.HunyuanVideo15Decoder3D, "conv_act", ("norm_out",)),
        ),
    )

    def __init__(self, vae: nn.Module, name: str, tiles: StrideTiles | None = None) -> None:
        super().__init__(vae, name, tiles)
        self.call_decoder = self._run_decoder

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        # From the structure: the ratios of the config have no effect where there are too few blocks for them.
        upsamplers = self._upsamplers()
        ratio = 2 ** len(upsamplers)
        frame_ratio = math.prod(2 if upsampler.add_temporal_upsample else 1 for upsampler in upsamplers)
        first, later = clip_operands(self._convolutions(ratio))
        return ModelSpec(
            name=name,
            family="hunyuan-video-1.5",
            class_name="AutoencoderKLHunyuanVideo15",
            latent_channels=self.config["latent_channels"],
            output_channels=self.config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=CausalFrames(frame_ratio),
            accepts_images=False,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles or self.own_tiles(), ratio, "AutoencoderKLHunyuanVideo15"),
            chunked=False,
            operand_per_pixel_first=first,
            operand_per_pixel=later,
            pass_frames=WHOLE_CLIP,
        )

    def _upsamplers(self) -> list[Any]:
        return [upsampler for block in self.vae.decoder.up_blocks for upsampler in block.upsamplers or ()]

    def own_tiles(self) -> StrideTiles:
        size = int(self.vae.tile_sample_min_height)
        return StrideTiles(size, size - int(size * self.vae.tile_overlap_factor))

    def _convolutions(self, spatial: int) -> Iterator[Convolution]:
        frames = 1
        for block in self.vae.decoder.up_blocks:
            for resnet in block.resnets:
                conv = resnet.conv1.conv
                yield Convolution(conv.in_channels, conv.out_channels, spatial, frames)
            for upsampler in block.upsamplers or ():
                conv = upsampler.conv.conv
                yield Convolution(conv.in_channels, conv.out_channels, spatial, frames)
                spatial //= 2
                frames *= 2 if upsampler.add_temporal_upsample else 1

    def denormalization(self) -> str:
        return "latents / scaling_factor"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        # HunyuanVideo15Pipeline and its image-to-video form.
        return latents_BCTHW / self.config["scaling_factor"]

    def _run_decoder(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        """``HunyuanVideo15Decoder3D.forward``, without its mask."""
        decoder: Any = self.vae.decoder
        x = decoder.conv_in(x_BCTHW) + x_BCTHW.repeat_interleave(repeats=decoder.repeat, dim=1)
        x = decoder.mid_block.resnets[0](x)
        for attention, resnet in zip(decoder.mid_block.attentions, decoder.mid_block.resnets[1:], strict=True):
            if attention is not None:
                x = _attend(attention, x)
            x = resnet(x)
        for block in decoder.up_blocks:
            x = block(x)
        return decoder.conv_out(decoder.conv_act(decoder.norm_out(x)))


def _attend(attention: Any, x_BCTHW: torch.Tensor) -> torch.Tensor:
    """``HunyuanVideo15AttnBlock.forward``: one head, over all tokens of this and earlier frames."""
    height, width = x_BCTHW.shape[3:]
    normed_BCTHW = attention.norm(x_BCTHW)

    def tokens(projection: Any) -> torch.Tensor:
        return projection(normed_BCTHW).flatten(3).permute(0, 2, 3, 1).unsqueeze(1).contiguous()

    y_B1TSC = frame_causal_attention(*map(tokens, (attention.to_q, attention.to_k, attention.to_v)))
    y_BCTHW = y_B1TSC.squeeze(1).permute(0, 3, 1, 2).unflatten(3, (height, width))
    return attention.proj_out(y_BCTHW) + x_BCTHW
