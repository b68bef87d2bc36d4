"""Allegro: ``AutoencoderKLAllegro``, decoded by overlapping blocks of 24 frames and 320 x 320 pixels.

Its decoder has only ever been run block by block: GroupNorm and attention take in one block, and diffusers refuses to
decode anything undivided. So blocks are the model's contract, as tiles are MiniMax-H3's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from decode_service.decoding.families.base import Family
from decode_service.errors import ConfigError
from decode_service.planning.plan import DecodePlan
from decode_service.planning.spec import ModelSpec, OverlapTiles, StrideTiles
from decode_service.planning.temporal import OverlapFrames
from decode_service.planning.tiles import TileSpan

# B batch, C channels, T latent frames, F pixel frames, H height, W width.


class AllegroFamily(Family):
    """``AutoencoderKLAllegro``. Tile parts are blocks along time.

    diffusers steps through the latents by a fixed stride and leaves out what does not fill a block: those pixels stay 0,
    and latents smaller than a block give a grey video. Here overlaps are widened until blocks cover the video exactly, and
    what is smaller than a block is decoded as it is. Where diffusers covers the whole video the two agree.
    """

    class_names = ("AutoencoderKLAllegro",)
    serves = "Allegro"

    @property
    def blocks(self) -> OverlapFrames:
        rule = self.spec.frame_rule
        assert isinstance(rule, OverlapFrames)
        return rule

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        if tiles is not None:
            raise ConfigError(
                "policy.tile cannot be set for Allegro: its block size and overlap are part of the model; remove the setting"
            )
        vae, config = self.vae, self.config
        ratio, frames_ratio = vae.spatial_compression_ratio, int(config["temporal_compression_ratio"])
        frames, height, width = tuple(vae.kernel)
        step, down, right = tuple(vae.stride)
        if height != width:
            raise ConfigError(f"{name} has blocks of {height} x {width} pixels; only square ones are known")
        return ModelSpec(
            name=name,
            family="allegro",
            class_name="AutoencoderKLAllegro",
            latent_channels=config["latent_channels"],
            output_channels=config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            # Blocks and strides in latents, each rounded down, as in diffusers.
            frame_rule=OverlapFrames(
                frames // frames_ratio, frames // frames_ratio - step // frames_ratio, frames_ratio
            ),
            accepts_images=False,
            exact_axes=(),
            no_exact_axes_reason="its videos are defined as blended blocks, each normalized by itself",
            tiles=OverlapTiles(
                height // ratio * ratio,
                (height // ratio - down // ratio) * ratio,
                (width // ratio - right // ratio) * ratio,
            ),
            tile_only=True,
            chunked=False,
            operand_per_pixel_first=self._widest_operand(frames // frames_ratio, ratio),
        )

    def _widest_operand(self, frames: int, spatial: int) -> int:
        """Elements of the widest operand of a block of ``frames`` latent frames, per pixel of one frame of the block.

        The convolutions over time see two frames more than there are; upsampling leaves four times the pixels.
        """
        widest = 0.0
        for block in self.vae.decoder.up_blocks:
            resnet = block.resnets[0].conv1
            channels = resnet.out_channels
            widest = max(widest, frames * resnet.in_channels / spatial**2)
            frames *= 2 if block.add_temp_upsample else 1
            widest = max(widest, (frames + 2) * channels / spatial**2)
            if block.upsamplers is not None:
                spatial //= 2
                widest = max(widest, frames * channels / spatial**2)
        return math.ceil(widest)

    def denormalization(self) -> str:
        return "1 / scaling_factor * latents"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """By the rule of the Allegro pipeline."""
        return 1 / self.config["scaling_factor"] * latents_BCTHW

    def decode(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        raise NotImplementedError("Allegro is decoded by blocks only")

    def decode_tile(
        self, latents_BCTHW: torch.Tensor, part: int, row: TileSpan, column: TileSpan, chunk: int
    ) -> torch.Tensor:
        clip = self.blocks.spans(latents_BCTHW.shape[2])[part]
        region = tuple(slice(span.start, span.start + span.size) for span in (clip, row, column))
        block_BCTHW = latents_BCTHW[(..., *region)]
        # post_quant_conv is two-dimensional.
        x_NCHW = self.vae.post_quant_conv(block_BCTHW.transpose(1, 2).flatten(0, 1))
        return self.call_decoder(x_NCHW.unflatten(0, (-1, clip.size)).transpose(1, 2))

    def tile_shape(self, latent_shape: Sequence[int], part: int, row: TileSpan, column: TileSpan) -> tuple[int, ...]:
        ratio, blocks = self.spec.decoder_ratio, self.blocks
        frames = blocks.spans(latent_shape[2])[part].size * blocks.ratio
        return latent_shape[0], self.spec.output_channels, frames, row.size * ratio, column.size * ratio

    def merge_tiles(self, plan: DecodePlan, tiles: list[torch.Tensor]) -> torch.Tensor:
        """The sum of all blocks, weighted along each axis; the rule is ``_prepare_for_blend`` of diffusers 0.42."""
        assert plan.tiles is not None
        first, ratio = tiles[0], self.spec.decoder_ratio
        axes = [
            [(span, weights, ratio) for span, weights in zip(spans, blend_weights(spans, ratio), strict=True)]
            for spans, ratio in (
                (self.blocks.spans(plan.latent_shape[2]), self.blocks.ratio),
                (plan.tiles.rows, ratio),
                (plan.tiles.columns, ratio),
            )
        ]
        extents = (plan.output_frames, plan.output_height, plan.output_width)
        work = torch.promote_types(first.dtype, torch.float32)
        pixels_BCFHW = first.new_zeros((*first.shape[:2], *extents), dtype=work)
        for tile, cell in zip(tiles, itertools.product(*axes), strict=True):
            region = tuple(slice(span.start * ratio, (span.start + span.size) * ratio) for span, _, ratio in cell)
            over_time, down, across = (weights.to(first.device, work) for _, weights, _ in cell)
            pixels_BCFHW[(..., *region)] += tile * over_time.view(-1, 1, 1) * down.view(-1, 1) * across
        return pixels_BCFHW.to(first.dtype)


def blend_weights(spans: Sequence[TileSpan], ratio: int) -> list[torch.Tensor]:
    """What every pixel of each span counts, in float64; all spans that share a pixel add up to 1.

    Position y of an overlap of n pixels counts y / n for the later span and 1 - y / n for the earlier one. Where widened
    overlaps let three spans meet, the products of these are brought back to a sum of 1.

    Args:
        ratio: pixels per latent cell (or pixel frames per latent frame).
    """
    total = torch.zeros((spans[-1].start + spans[-1].size) * ratio, dtype=torch.float64)
    weights = []
    for index, span in enumerate(spans):
        own = torch.ones(span.size * ratio, dtype=torch.float64)
        if span.blend:
            own[: span.blend] *= torch.arange(span.blend, dtype=torch.float64) / span.blend
        after = spans[index + 1].blend if index + 1 < len(spans) else 0
        if after:
            own[-after:] *= 1 - torch.arange(after, dtype=torch.float64) / after
        total[span.start * ratio : (span.start + span.size) * ratio] += own
        weights.append(own)
    return [
        own / total[span.start * ratio : (span.start + span.size) * ratio]
        for own, span in zip(weights, spans, strict=True)
    ]
