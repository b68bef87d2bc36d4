"""MiniMax-H3: ``AutoencoderKLMiniMaxH3``, a vision transformer decoded by its own overlapping clips and tiles.

Its tiles are part of the model: the released frames are the blended-tile ones, and position ids are relative to the tile.
So there is no undivided decode to be exact to, and a spatial shard is an error rather than a fallback.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from decode_service.decoding.families.causal import TimesStdFamily
from decode_service.decoding.tiling import cross_fade, stitch
from decode_service.errors import ConfigError
from decode_service.planning.plan import DecodePlan
from decode_service.planning.spec import ModelSpec, OverlapTiles, StrideTiles
from decode_service.planning.temporal import ClipFrames
from decode_service.planning.tiles import TileSpan

# The pixels of this model are ImageNet-normalized RGB over [0, 1] (docstring of AutoencoderKLMiniMaxH3 in diffusers 0.42).
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class MiniMaxH3Family(TimesStdFamily):
    """``AutoencoderKLMiniMaxH3``. Tile parts are its temporal clips."""

    class_names = ("AutoencoderKLMiniMaxH3",)
    serves = "MiniMax-H3"

    @property
    def clips(self) -> ClipFrames:
        rule = self.spec.frame_rule
        assert isinstance(rule, ClipFrames)
        return rule

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        if tiles is not None:
            raise ConfigError(
                "policy.tile cannot be set for MiniMax-H3: its tile size and overlap are part of the model; remove the setting"
            )
        vae, config = self.vae, self.config
        ratio = vae.spatial_compression_ratio
        own_tiles = OverlapTiles(vae.tile_sample_min_height, vae.tile_sample_min_overlap_height)
        clips = ClipFrames(config["clip_length"], config["token_drop"], vae.temporal_compression_ratio)
        # The widest layer of the transformer, on all tokens of a clip; a few tokens that are no place of the picture are
        # less than an element per pixel of a tile.
        widest_layer = max(layer.out_features for layer in vae.decoder.modules() if isinstance(layer, nn.Linear))
        operand = math.ceil(widest_layer * (clips.tokens_per_clip + clips.token_overlap) / ratio**2) + 1
        return ModelSpec(
            name=name,
            family="minimax-h3",
            class_name="AutoencoderKLMiniMaxH3",
            latent_channels=config["latent_channels"],
            output_channels=config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=clips,
            accepts_images=False,
            exact_axes=(),
            no_exact_axes_reason="its frames are defined as blended tiles with positions relative to the tile",
            tiles=own_tiles,
            tile_only=True,
            chunked=False,
            operand_per_pixel_first=operand,
        )

    def decode(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        raise NotImplementedError("MiniMax-H3 is decoded by tiles only")

    def decode_tile(
        self, latents_BCTHW: torch.Tensor, part: int, row: TileSpan, column: TileSpan, chunk: int
    ) -> torch.Tensor:
        frames = latents_BCTHW.shape[2]
        start, stop = self.clips.clip_span(part, frames)
        # Frames beyond the end repeat the last one, as the reference pads a video to whole clips.
        index = torch.arange(start, stop, device=latents_BCTHW.device).clamp(max=frames - 1)
        tile = latents_BCTHW[..., row.start : row.start + row.size, column.start : column.start + column.size]
        return self.call_decoder(self.vae.post_quant_conv(tile.index_select(2, index)))

    def tile_shape(self, latent_shape: Sequence[int], part: int, row: TileSpan, column: TileSpan) -> tuple[int, ...]:
        ratio = self.spec.decoder_ratio
        start, stop = self.clips.clip_span(part, latent_shape[2])
        frames = (stop - start) * self.clips.ratio
        return latent_shape[0], self.spec.output_channels, frames, row.size * ratio, column.size * ratio

    def merge_tiles(self, plan: DecodePlan, tiles: list[torch.Tensor]) -> torch.Tensor:
        """Stitch every clip, then cross-fade the clips; the rule is ``AutoencoderKLMiniMaxH3._decode``'s."""
        assert plan.tiles is not None
        clips, count = self.clips, plan.tiles.count
        frames_per_part = clips.tokens_per_clip * clips.ratio
        pieces: list[torch.Tensor] = []
        overlap: torch.Tensor | None = None
        for index in range(clips.clip_count(plan.latent_shape[2])):
            clip = stitch(tiles[index * count : (index + 1) * count], plan.tiles)
            piece = clip[:, :, :frames_per_part][:, :, clips.frame_pre_padding :]
            if overlap is not None:
                extent = min(overlap.shape[2], piece.shape[2], clips.frame_overlap)
                piece = cross_fade(overlap, piece, extent, dim=2)
            pieces.append(piece)
            if clips.token_drop:
                overlap = clip[:, :, frames_per_part : 2 * frames_per_part][:, :, clips.frame_pre_padding :]
        if overlap is not None:
            pieces.append(overlap)
        pixels = torch.cat(pieces, dim=2)
        return pixels[:, :, : pixels.shape[2] - clips.trimmed_frames(plan.latent_shape[2])]

    def to_unit_range(self, pixels: torch.Tensor) -> torch.Tensor:
        shape = (1, -1, 1, 1, 1)
        std = torch.tensor(IMAGENET_STD, device=pixels.device).view(shape)
        mean = torch.tensor(IMAGENET_MEAN, device=pixels.device).view(shape)
        return (pixels.float() * std + mean).clamp(0.0, 1.0) * 2.0 - 1.0
