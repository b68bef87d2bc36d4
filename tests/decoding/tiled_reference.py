"""diffusers' own loop over tiles, for decoders whose class has none or a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import diffusers
import torch


def tiled(
    decode: Callable[[torch.Tensor], torch.Tensor], latents: torch.Tensor, *, tile_px: int, overlap: float, ratio: int
) -> torch.Tensor:
    """``latents`` (B,C,H,W) or (B,C,T,H,W) decoded in tiles by ``AutoencoderKL.tiled_decode``.

    Args:
        decode: what decodes one tile, of the latents' number of dimensions.
        tile_px: side of a tile; with ``overlap`` it must give whole latent cells of ``ratio`` pixels.
    """
    assert tile_px % ratio == 0 and (tile_px * overlap) % ratio == 0
    frames = latents.shape[2:-2]

    def decode_flat(tile_BCHW: torch.Tensor) -> torch.Tensor:
        return decode(tile_BCHW.unflatten(1, (-1, *frames)) if frames else tile_BCHW).flatten(1, -3)

    borrowed = SimpleNamespace(
        config=SimpleNamespace(use_post_quant_conv=False),
        decoder=decode_flat,
        tile_sample_min_size=tile_px,
        tile_latent_min_size=tile_px // ratio,
        tile_overlap_factor=overlap,
    )
    for name in ("blend_v", "blend_h"):
        setattr(borrowed, name, getattr(diffusers.AutoencoderKL, name).__get__(borrowed))
    pixels = diffusers.AutoencoderKL.tiled_decode(borrowed, latents.flatten(1, -3)).sample
    return pixels.unflatten(1, (-1, *frames)) if frames else pixels
