"""The VAE of HunyuanImage 2.1's refiner: ``AutoencoderKLHunyuanImageRefiner``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers.models.autoencoders import autoencoder_kl_hunyuanimage_refiner as hunyuan

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.hunyuan_image import doublings_to, widest_activation
from decode_service.decoding.families.image import ImageFamily, overlapping_tiles
from decode_service.decoding.families.whole_clip import time_padded
from decode_service.decoding.rewrites import Activation, CausalConvolution, DecoderStructure
from decode_service.errors import ConfigError
from decode_service.planning.spec import WHOLE_CLIP, ModelSpec, StrideTiles
from decode_service.planning.temporal import CausalFrames
from decode_service.planning.tiles import TileSpan

# B batch, C channels, T latent frames and as many pixel frames, H height, W width.


class HunyuanImageRefinerFamily(ImageFamily):
    """``AutoencoderKLHunyuanImageRefiner``: causal 3-D convolutions, and attention over all frames in the middle.

    Latents are (B,C,T,H,W) and every latent frame gives one pixel frame, whatever ``temporal_compression_ratio`` says;
    the pipeline decodes one. Attention sees later frames too, so all are decoded in one pass.
    """

    class_names = ("AutoencoderKLHunyuanImageRefiner",)
    serves = "HunyuanImage's refiner"
    tile_geometry = "diffusers' size, AutoencoderKL's loop"
    structure = DecoderStructure(
        causal_convolutions=(
            CausalConvolution(hunyuan.HunyuanImageRefinerCausalConv3d, "repeat", time_padded, convolution="conv"),
        ),
        rms_norms=(hunyuan.HunyuanImageRefinerRMS_norm,),
        activations=(
            Activation(hunyuan.HunyuanImageRefinerResnetBlock, "nonlinearity"),
            Activation(hunyuan.HunyuanImageRefinerDecoder3D, "conv_act", ("norm_out",)),
        ),
    )

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config = self.config
        if config["scaling_factor"] is None:
            raise ConfigError(f"the config of {name} has no scaling_factor, so normalized latents cannot be decoded")
        # A stage that upsamples does so in height and width, also where the config asks for time only.
        doublings = doublings_to(max(config["spatial_compression_ratio"], config["temporal_compression_ratio"]))
        ratio = 2**doublings
        widths = config["block_out_channels"][::-1]
        per_frame = widest_activation(widths, doublings, matched=config["upsample_match_channel"])
        own_tiles = overlapping_tiles(self.vae.tile_sample_min_height, self.vae.tile_overlap_factor, ratio)
        return ModelSpec(
            name=name,
            family="hunyuan-image-refiner",
            class_name="AutoencoderKLHunyuanImageRefiner",
            latent_channels=config["latent_channels"],
            output_channels=config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=CausalFrames(1),
            accepts_images=True,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles or own_tiles, ratio, "AutoencoderKLHunyuanImageRefiner"),
            chunked=False,
            # The widest operands are inputs of 3x3x3 convolutions, which are padded by two frames.
            operand_per_pixel=per_frame,
            operand_per_pixel_first=3 * per_frame,
            pass_frames=WHOLE_CLIP,
        )

    def denormalization(self) -> str:
        return "latents / scaling_factor"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """By the rule of ``HunyuanImageRefinerPipeline``: ``latents / scaling_factor``.

        Its denoiser works on pairs of frames packed into twice the channels; ``vae.decode``, and so this family, takes
        what ``_restore_image_tokens_order`` makes of them.
        """
        return latents_BCTHW / self.config["scaling_factor"]

    def _decode_frame(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        return self.call_decoder(latents_BCTHW)

    def tile_shape(self, latent_shape: Sequence[int], part: int, row: TileSpan, column: TileSpan) -> tuple[int, ...]:
        batch, channels, _, height, width = super().tile_shape(latent_shape, part, row, column)
        return batch, channels, latent_shape[2], height, width
