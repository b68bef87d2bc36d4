"""The image VAE of Kandinsky's KVAE 1.0: ``AutoencoderKLKVAE``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.image import ImageFamily, overlapping_tiles
from decode_service.planning.spec import ModelSpec, StrideTiles


class KVAEFamily(ImageFamily):
    """``AutoencoderKLKVAE``: 4-D latents, no quant convolutions, norms that the latents themselves scale and shift.

    GroupNorm takes its statistics over the whole picture, so tiles only approximate an undivided decode, while sharding
    merges the statistics and is exact.
    """

    class_names = ("AutoencoderKLKVAE",)
    serves = "KVAE 1.0"

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config = self.config
        widths = [config["channels"] * multiplier for multiplier in config["ch_mult"]]
        ratio = 2 ** (len(widths) - 1)
        own_tiles = overlapping_tiles(self.vae.tile_latent_min_size * ratio, self.vae.tile_overlap_factor, ratio)
        return ModelSpec(
            name=name,
            family="kvae",
            class_name="AutoencoderKLKVAE",
            latent_channels=config["z_channels"],
            output_channels=config["in_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=None,
            accepts_images=True,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles or own_tiles, ratio, "AutoencoderKLKVAE"),
            chunked=False,
            operand_per_pixel_first=widest_stage(widths),
        )

    def denormalization(self) -> str:
        return "latents"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """Nothing: the config has neither a factor nor statistics, and ``vae.decode`` takes what ``vae.encode`` gives."""
        return latents_BCTHW


def widest_stage(widths: Sequence[int]) -> int:
    """Elements of the widest activation of one frame, per output pixel.

    Upsampling leaves the channels of the stage before, on which the first block of a stage works.

    Args:
        widths: channels of every stage, highest resolution first.
    """
    pairs = zip(widths, [*widths[1:], widths[-1]], strict=True)
    return math.ceil(max(max(width, before) / 4**stage for stage, (width, before) in enumerate(pairs)))
