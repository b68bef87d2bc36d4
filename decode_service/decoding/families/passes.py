"""The bases of families whose decoder takes consecutive latent frames, pass by pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch

from decode_service.decoding.families.base import Family
from decode_service.decoding.tiling import stitch
from decode_service.planning.plan import DecodePlan
from decode_service.planning.temporal import CausalFrames
from decode_service.planning.tiles import TileSpan

# B batch, C channels, T latent frames, F pixel frames, H height, W width.


class PassesFamily(Family):
    """Families that ``passes`` describes completely: a tile is an undivided decode of its part of the latents."""

    @abstractmethod
    def passes(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        """Decoder output (B,C,F,H,W) of consecutive latent frames, from latents as ``vae.decode`` takes them.

        Args:
            chunk: latent frames per pass after the first, where the model leaves that free.
        """

    def denormalization(self) -> str:
        return "1 / scaling_factor * latents"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """By ``scaling_factor`` alone, in the order of operations of the CogVideoX, SVD and EasyAnimate pipelines."""
        return 1 / self.config["scaling_factor"] * latents_BCTHW

    def decode(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        yield from self.passes(latents_BCTHW, chunk)

    def decode_tile(
        self, latents_BCTHW: torch.Tensor, part: int, row: TileSpan, column: TileSpan, chunk: int
    ) -> torch.Tensor:
        tile_BCTHW = latents_BCTHW[..., row.start : row.start + row.size, column.start : column.start + column.size]
        tile = latents_BCTHW.new_empty(self.tile_shape(latents_BCTHW.shape, part, row, column))
        start = 0
        for x_BCFHW in self.passes(tile_BCTHW, chunk):
            tile[:, :, start : start + x_BCFHW.shape[2]] = x_BCFHW
            start += x_BCFHW.shape[2]
        return tile

    def tile_shape(self, latent_shape: Sequence[int], part: int, row: TileSpan, column: TileSpan) -> tuple[int, ...]:
        rule, ratio = self.spec.frame_rule, self.spec.decoder_ratio
        assert rule is not None
        frames = rule.frames(latent_shape[2])
        return latent_shape[0], self.spec.decoder_channels, frames, row.size * ratio, column.size * ratio

    def merge_tiles(self, plan: DecodePlan, tiles: list[torch.Tensor]) -> torch.Tensor:
        assert plan.tiles is not None
        return stitch(tiles, plan.tiles)


class CausalPassesFamily(PassesFamily):
    """Those whose first latent frame gives one frame, and every later one the same number."""

    @property
    def frame_rule(self) -> CausalFrames:
        rule = self.spec.frame_rule
        assert isinstance(rule, CausalFrames)
        return rule
