"""The deep-compression autoencoder of Sana (32, 64 or 128 pixels per latent cell): ``AutoencoderDC``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.image import ImageFamily
from decode_service.planning.spec import ModelSpec, StrideTiles


class AutoencoderDCFamily(ImageFamily):
    """``AutoencoderDC``: residual blocks, and blocks of linear attention at the lower resolutions.

    It is not sharded. Linear attention sums keys times values over all positions by a matrix product, normalizes by the
    sum of a row of ones that it pads its tokens with, and takes another path where a picture has few positions; the halo
    rule would have to know which dimension of these products holds positions, and so it does of the channel norms, which
    run on tensors whose channels were moved to the end.
    """

    class_names = ("AutoencoderDC",)

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
            exact_axes=(),
            no_exact_axes_reason="its linear attention sums over all positions by matrix products, which are not sharded",
            tiles=stride_tiles(tiles or own_tiles, ratio, "AutoencoderDC"),
            chunked=False,
            operand_per_pixel_first=_widest_operand(
                widths,
                layers,
                config["decoder_block_types"],
                config["decoder_qkv_multiscales"],
                interpolated=config["upsample_block_type"] == "interpolate",
            ),
        )

    def denormalization(self) -> str:
        return "latents / scaling_factor"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """By the rule of ``SanaPipeline``: ``latents / scaling_factor``."""
        return latents_BCTHW / self.config["scaling_factor"]


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
