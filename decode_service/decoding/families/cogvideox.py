"""CogVideoX: ``AutoencoderKLCogVideoX``, decoded in chunks of two latent frames that hand a cache to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.passes import PassesFamily
from decode_service.planning.spec import ModelSpec, RectangleTiles, StrideTiles
from decode_service.planning.temporal import RemainderFirstFrames


class CogVideoXFamily(PassesFamily):
    """``AutoencoderKLCogVideoX``.

    GroupNorm takes its statistics over the frames of a chunk, so the chunks are the model's own and not free. It takes
    them over the whole picture too: sharding merges them and is exact, tiles only approximate.

    Latents are (B,C,T,H,W), as ``vae.decode`` takes them. The pipeline's own are (B,T,C,H,W), which is layout ``BTCHW``; of
    version 1.5 they begin with frames that pad the transformer's patches, which the pipeline drops before it decodes.
    """

    class_names = ("AutoencoderKLCogVideoX",)
    serves = "CogVideoX"

    @property
    def frame_rule(self) -> RemainderFirstFrames:
        rule = self.spec.frame_rule
        assert isinstance(rule, RemainderFirstFrames)
        return rule

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        widths = self.config["block_out_channels"]
        ratio = 2 ** (len(widths) - 1)
        doublings = sum(
            block.upsamplers is not None and block.upsamplers[0].compress_time for block in self.vae.decoder.up_blocks
        )
        rule = RemainderFirstFrames(self.vae.num_latent_frames_batch_size, 2**doublings)
        # At full resolution the last upsampling leaves the channels of the stage before, of all frames of a chunk: ratio for
        # every latent frame (an odd chunk has ratio - 1 fewer). The convolutions put two cached frames before them.
        width = max(widths[0], widths[min(1, len(widths) - 1)])
        return ModelSpec(
            name=name,
            family="cogvideox",
            class_name="AutoencoderKLCogVideoX",
            latent_channels=self.config["latent_channels"],
            output_channels=self.config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=rule,
            accepts_images=False,
            exact_axes=("height", "width"),
            tiles=self._own_tiles(ratio) if tiles is None else stride_tiles(tiles, ratio, "AutoencoderKLCogVideoX"),
            chunked=False,
            operand_per_pixel=rule.ratio * width,
            operand_per_pixel_first=(2 + rule.ratio) * width,
            pass_frames=2 * rule.batch - 1,
        )

    def _own_tiles(self, ratio: int) -> RectangleTiles:
        """The reference's tiles: half the training height and width, a sixth and a fifth of them overlapping.

        diffusers takes strides in latent cells and what is kept of a tile in pixels, each rounded by itself, so that at
        some sizes the picture grows (256 pixels: 26 cells apart, 214 pixels kept). Here both follow from the stride.
        """
        vae = self.vae
        return RectangleTiles(
            _stride(vae.tile_latent_min_height, vae.tile_overlap_factor_height, ratio),
            _stride(vae.tile_latent_min_width, vae.tile_overlap_factor_width, ratio),
        )

    def passes(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        cache: dict[str, Any] | None = None
        chunks = self.frame_rule.chunks(latents_BCTHW.shape[2])
        for start, stop in chunks:
            x_BCTHW = latents_BCTHW[:, :, start:stop]
            if self.vae.post_quant_conv is not None:
                x_BCTHW = self.vae.post_quant_conv(x_BCTHW)
            pixels_BCFHW, cache = self.call_decoder(x_BCTHW, conv_cache=cache)
            cache = _without_unread(cache) if stop < latents_BCTHW.shape[2] else None
            yield pixels_BCFHW


def _stride(tile: int, overlap: float, ratio: int) -> StrideTiles:
    """``tile`` latent cells with ``overlap`` of them shared, in pixels."""
    return StrideTiles(tile * ratio, max(int(tile * (1 - overlap)), 1) * ratio)


def _without_unread(cache: dict[str, Any]) -> dict[str, Any]:
    """``cache`` without what the 1x1x1 convolutions of the spatial norms leave: their whole input, which nothing reads."""
    return {
        key: _without_unread(value) if isinstance(value, dict) else value
        for key, value in cache.items()
        if key not in ("conv_y", "conv_b")
    }
