"""The deep-compression autoencoder of Sana (32, 64 or 128 pixels per latent cell): ``AutoencoderDC``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from decode_service.decoding.attention import kernel_attention
from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.image import ImageFamily
from decode_service.planning.spec import ModelSpec, StrideTiles

# B batch, C channels, T latent frames (1 here), H height, W width, N heads, D head channels.


class AutoencoderDCFamily(ImageFamily):
    """``AutoencoderDC``: residual blocks, and blocks of linear attention at the lower resolutions.

    Linear attention sums keys times values over all positions by a matrix product of flattened positions, in which the halo
    rule cannot tell what a band is. So the family calls the decoder's own modules one after the other, as the decoder's
    ``forward`` does, with attention in a form that knows rows and columns (``kernel_attention``). Nothing is set on the
    model, and ``vae.decode`` still is the reference.

    Tiles only approximate: every tile attends to itself.
    """

    class_names = ("AutoencoderDC",)
    serves = "Sana, Sana-Sprint, PRX, DC-AE for ImageNet"

    def __init__(self, vae: nn.Module, name: str, tiles: StrideTiles | None = None) -> None:
        super().__init__(vae, name, tiles)
        self.call_decoder = self._run_decoder

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        vae, config = self.vae, self.config
        widths, layers = config["decoder_block_out_channels"], config["decoder_layers_per_block"]
        # A stage without layers does not upsample; the output convolution does so in place of the last one.
        doublings = sum(count > 0 for count in layers[:-1]) + (layers[0] == 0)
        ratio = 2**doublings
        # In whole latent cells: at 128 pixels per cell the stride of 448 px is none, and diffusers repeats rows there.
        own_tiles = StrideTiles(
            max(1, vae.tile_sample_min_height // ratio) * ratio,
            max(1, vae.tile_sample_stride_height // ratio) * ratio,
        )
        return ModelSpec(
            name=name,
            family="autoencoder-dc",
            class_name="AutoencoderDC",
            latent_channels=config["latent_channels"],
            output_channels=config["in_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=None,
            accepts_images=True,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles or own_tiles, ratio, "AutoencoderDC"),
            chunked=False,
            operand_per_pixel_first=_widest_operand(
                widths,
                layers,
                config["decoder_block_types"],
                config["decoder_qkv_multiscales"],
                interpolated=config["upsample_block_type"] == "interpolate",
            ),
            min_band_cells=self._reach(),
        )

    def _reach(self) -> int:
        """Latent cells over which the convolutions of the multiscale queries, keys and values reach; at least 1."""
        reach, scale = 1, 1
        for stage in reversed(self.vae.decoder.up_blocks):
            for layer in stage:
                scale *= getattr(layer, "factor", 1)  # of an upsampling block
                for projection in layer.attn.to_qkv_multiscale if hasattr(layer, "attn") else ():
                    reach = max(reach, math.ceil(projection.proj_in.padding[0] / scale))
        return reach

    def denormalization(self) -> str:
        return "latents / scaling_factor"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """By the rule of ``SanaPipeline``: ``latents / scaling_factor``."""
        return latents_BCTHW / self.config["scaling_factor"]

    def _run_decoder(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """``Decoder.forward`` of AutoencoderDC, with ``_attend`` in its attention blocks."""
        decoder: Any = self.vae.decoder
        x = decoder.conv_in(x_BCHW)
        if decoder.in_shortcut:
            x = x + x_BCHW.repeat_interleave(decoder.in_shortcut_repeats, dim=1)
        for stage in reversed(decoder.up_blocks):
            for layer in stage:
                # EfficientViTBlock is an attention and a gated convolution; the other blocks have no attention.
                x = layer.conv_out(_attend(layer.attn, x)) if hasattr(layer, "attn") else layer(x)
        x = decoder.norm_out(x.movedim(1, -1)).movedim(-1, 1)
        return decoder.conv_out(decoder.conv_act(x))


def _attend(attention: Any, x_BCHW: torch.Tensor) -> torch.Tensor:
    """diffusers' ``SanaMultiscaleLinearAttention``, by its own modules and ``kernel_attention``.

    Source: ``SanaMultiscaleAttnProcessor2_0`` of diffusers 0.42.
    """
    x_BHWC = x_BCHW.movedim(1, -1)
    projections = (attention.to_q, attention.to_k, attention.to_v)
    qkv_BCHW = torch.cat([projection(x_BHWC).movedim(-1, 1) for projection in projections], dim=1)
    scales_BCHW = torch.cat([qkv_BCHW, *(block(qkv_BCHW) for block in attention.to_qkv_multiscale)], dim=1)
    heads = scales_BCHW.unflatten(1, (-1, 3 * attention.attention_head_dim))
    query_BNDHW, key_BNDHW, value_BNDHW = heads.chunk(3, dim=2)
    y_BNDHW = kernel_attention(
        attention.nonlinearity(query_BNDHW), attention.nonlinearity(key_BNDHW), value_BNDHW, attention.eps
    )
    y_BHWC = attention.to_out(y_BNDHW.to(x_BCHW.dtype).flatten(1, 2).movedim(1, -1))
    if attention.norm_type == "rms_norm":
        y_BCHW = attention.norm_out(y_BHWC.movedim(-1, 1).movedim(1, -1)).movedim(-1, 1)
    else:
        y_BCHW = attention.norm_out(y_BHWC.movedim(-1, 1))
    return y_BCHW + x_BCHW if attention.residual_connection else y_BCHW


def _widest_operand(
    widths: Sequence[int],
    layers: Sequence[int],
    block_types: str | Sequence[str],
    multiscales: Sequence[Sequence[int]],
    *,
    interpolated: bool,
) -> int:
    """Elements of the widest operand per output pixel.

    An attention block has eight times its channels in its gated convolution, and three times (queries, keys and values)
    for each of its scales. Upsampling by interpolation convolves the channels of the stage before at its own resolution;
    by moving channels into pixels it needs no more than its result.

    Args:
        widths, layers, block_types, multiscales: of every stage, highest resolution first, as in the config.
    """
    widest = 0.0
    for stage, width in enumerate(widths):
        share = 0.25**stage
        block_type = block_types if isinstance(block_types, str) else block_types[stage]
        if layers[stage]:
            factor = max(8, 3 * (1 + len(multiscales[stage]))) if block_type == "EfficientViTBlock" else 1
            widest = max(widest, width * factor * share)
        if interpolated and stage + 1 < len(widths):
            widest = max(widest, widths[stage + 1] * share)
    return math.ceil(widest)
