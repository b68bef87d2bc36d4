"""Stable Video Diffusion: ``AutoencoderKLTemporalDecoder``, an image decoder whose layers also mix neighbouring frames."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.passes import PassesFamily
from decode_service.planning.spec import WHOLE_CLIP, ModelSpec, StrideTiles
from decode_service.planning.temporal import EqualFrames

# diffusers cannot tile this VAE, so the geometry is ours: large, because GroupNorm and attention see one tile only, and
# small enough for the 25 frames of a video to stay below 2^31 elements.
TILES = StrideTiles(size_px=512, stride_px=384)


class TemporalDecoderFamily(PassesFamily):
    """``AutoencoderKLTemporalDecoder``.

    Latents are (B,C,T,H,W) as for every video family here; diffusers takes the frames as a batch, (B*T,C,H,W), with
    ``num_frames=T``, and the pipeline's own are (B,T,C,H,W), which is layout ``BTCHW``. All frames of a video are decoded
    together, which is the pipeline's default. Its layers look both ways in time and GroupNorm takes its statistics over all
    frames, so a video decoded in parts (a smaller ``decode_chunk_size``) is another video.
    """

    class_names = ("AutoencoderKLTemporalDecoder",)
    serves = "Stable Video Diffusion"
    tile_geometry = "ours"

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        widths = self.config["block_out_channels"]
        ratio = 2 ** (len(widths) - 1)
        return ModelSpec(
            name=name,
            family="svd",
            class_name="AutoencoderKLTemporalDecoder",
            latent_channels=self.config["latent_channels"],
            output_channels=self.config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=EqualFrames(),
            # A 4-D latent could mean a picture or, as in diffusers, the frames of a video.
            accepts_images=False,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles or TILES, ratio, "AutoencoderKLTemporalDecoder"),
            chunked=False,
            # The last upsampling leaves the channels of the stage before, of every frame.
            operand_per_pixel=max(widths[0], widths[min(1, len(widths) - 1)]),
            operand_per_pixel_first=max(widths[0], widths[min(1, len(widths) - 1)]),
            pass_frames=WHOLE_CLIP,
        )

    def passes(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        batch, _, frames = latents_BCTHW.shape[:3]
        x_NCHW = latents_BCTHW.transpose(1, 2).flatten(0, 1)
        pixels_NCHW = self.call_decoder(x_NCHW, image_only_indicator=x_NCHW.new_zeros(batch, frames), num_frames=frames)
        yield pixels_NCHW.unflatten(0, (batch, frames)).transpose(1, 2)
