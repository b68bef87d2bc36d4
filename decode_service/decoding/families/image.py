"""What the families without a time axis share: one picture, one pass of the decoder, tiles of pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.resnet import ResnetBlock2D

from decode_service.decoding.families.base import Family
from decode_service.decoding.rewrites import Activation, DecoderStructure
from decode_service.decoding.tiling import stitch
from decode_service.planning.plan import DecodePlan
from decode_service.planning.spec import StrideTiles
from decode_service.planning.tiles import TileSpan

# B batch, C channels, T latent frames (1 here), H height, W width.

#: Decoders of diffusers' general residual blocks.
RESNET_BLOCKS = DecoderStructure(
    channels_last=True,
    activations=(Activation(ResnetBlock2D, "nonlinearity"), Activation(Decoder, "conv_act", ("conv_norm_out",))),
)


class ImageFamily(Family):
    """Families of 4-D latents whose ``decode`` is ``decoder(post_quant_conv(z))``, the convolution being optional.

    Tiles are cut and blended as ``tiled_decode`` of diffusers' AutoencoderKL does it.
    """

    def decode(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        yield self._decode_frame(latents_BCTHW)

    def _decode_frame(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        x_BCHW = latents_BCTHW.squeeze(2)
        post_quant_conv = getattr(self.vae, "post_quant_conv", None)
        if post_quant_conv is not None:
            x_BCHW = post_quant_conv(x_BCHW)
        return self.call_decoder(x_BCHW).unsqueeze(2)

    def decode_tile(
        self, latents_BCTHW: torch.Tensor, part: int, row: TileSpan, column: TileSpan, chunk: int
    ) -> torch.Tensor:
        return self._decode_frame(
            latents_BCTHW[..., row.start : row.start + row.size, column.start : column.start + column.size]
        )

    def tile_shape(self, latent_shape: Sequence[int], part: int, row: TileSpan, column: TileSpan) -> tuple[int, ...]:
        ratio = self.spec.decoder_ratio
        return latent_shape[0], self.spec.output_channels, 1, row.size * ratio, column.size * ratio

    def merge_tiles(self, plan: DecodePlan, tiles: list[torch.Tensor]) -> torch.Tensor:
        assert plan.tiles is not None
        return stitch(tiles, plan.tiles)


def overlapping_tiles(size_px: int, overlap: float, ratio: int) -> StrideTiles:
    """Tiles of ``size_px`` pixels of which the fraction ``overlap`` overlaps, in whole latent cells.

    diffusers rounds tile and stride to cells for the latents but not for the pixels, so that a size that is not a whole
    number of cells gives a picture of another size there; where both agree this is its geometry.

    Args:
        ratio: pixels per latent cell.
    """
    cells = max(1, size_px // ratio)
    return StrideTiles(cells * ratio, max(1, int(cells * (1 - overlap))) * ratio)
