"""The base of video decoders that take a clip whole: no cache, no passes, one tile is one call for all its frames."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from decode_service.decoding.families.base import Family
from decode_service.decoding.rewrites import SpatialPadding
from decode_service.decoding.tiling import stitch
from decode_service.planning.plan import DecodePlan
from decode_service.planning.spec import StrideTiles
from decode_service.planning.tiles import TileSpan

# B batch, C channels, T latent frames, F pixel frames, H height, W width.


class WholeClipFamily(Family):
    """Families whose ``vae.decode`` is one call of the decoder."""

    def decode_clip(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """Pixels (B,C,F,H,W) of a clip, or of one tile of it, by one call of the decoder."""
        return self.call_decoder(latents_BCTHW)

    def decode(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        yield self.decode_clip(latents_BCTHW)

    def decode_tile(
        self, latents_BCTHW: torch.Tensor, part: int, row: TileSpan, column: TileSpan, chunk: int
    ) -> torch.Tensor:
        return self.decode_clip(cut(latents_BCTHW, row, column))

    def tile_shape(self, latent_shape: Sequence[int], part: int, row: TileSpan, column: TileSpan) -> tuple[int, ...]:
        assert self.spec.frame_rule is not None
        ratio, frames = self.spec.decoder_ratio, self.spec.frame_rule.frames(latent_shape[2])
        return latent_shape[0], self.spec.decoder_channels, frames, row.size * ratio, column.size * ratio

    def merge_tiles(self, plan: DecodePlan, tiles: list[torch.Tensor]) -> torch.Tensor:
        assert plan.tiles is not None
        return stitch(tiles, plan.tiles)

    def own_tiles(self) -> StrideTiles:
        """The tiles that ``enable_tiling()`` of the reference sets (they are square in every class here)."""
        return StrideTiles(int(self.vae.tile_sample_min_height), int(self.vae.tile_sample_stride_height))


def time_padded(convolution: Any) -> SpatialPadding:
    """How a causal convolution of the HunyuanVideo models pads its frames."""
    left, right, top, bottom = convolution.time_causal_padding[:4]
    return SpatialPadding(left, right, top, bottom, mode=convolution.pad_mode)


def cut(latents_BCTHW: torch.Tensor, row: TileSpan, column: TileSpan) -> torch.Tensor:
    """The latents of one tile, all frames."""
    return latents_BCTHW[..., row.start : row.start + row.size, column.start : column.start + column.size]


class Convolution(NamedTuple):
    """A 3x3x3 convolution of the decoder and where it runs.

    Attributes:
        input_channels, output_channels: as the module has them.
        spatial: decoder pixels per position of its input, along one axis.
        frames: frames of its input per latent frame after the first.
    """

    input_channels: int
    output_channels: int
    spatial: int
    frames: int


def clip_operands(convolutions: Iterable[Convolution]) -> tuple[int, int]:
    """Elements of the widest operand per decoder pixel of one frame: for the first latent frame, for every later one.

    The input of a convolution counts with the two frames that pad it in time.
    """
    first = later = 0.0
    for input_channels, output_channels, spatial, frames in convolutions:
        area = spatial**2
        first = max(first, 3 * input_channels / area, output_channels / area)
        later = max(later, frames * max(input_channels, output_channels) / area)
    return math.ceil(first), math.ceil(later)
