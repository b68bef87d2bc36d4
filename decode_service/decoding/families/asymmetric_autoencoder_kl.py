"""The VAE for Stable Diffusion with a larger decoder, made for inpainting: ``AsymmetricAutoencoderKL``."""

from __future__ import annotations

import torch

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.image import RESNET_BLOCKS, ImageFamily
from decode_service.planning.spec import ModelSpec, StrideTiles


class AsymmetricAutoencoderKLFamily(ImageFamily):
    """``AsymmetricAutoencoderKL`` without a picture and a mask to condition on: ``vae.decode(z)``.

    diffusers has no tiles for this class; here they are those of AutoencoderKL, of the size that Stable Diffusion was
    trained on. As there, every tile takes its own GroupNorm statistics, so tiles only approximate.
    """

    class_names = ("AsymmetricAutoencoderKL",)
    serves = "Stable Diffusion inpainting, without a mask"
    tile_geometry = "ours, by the rule of AutoencoderKL"
    structure = RESNET_BLOCKS

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config = self.config
        widths = config["up_block_out_channels"]
        ratio = 2 ** (len(widths) - 1)
        return ModelSpec(
            name=name,
            family="asymmetric-autoencoder-kl",
            class_name="AsymmetricAutoencoderKL",
            latent_channels=config["latent_channels"],
            output_channels=config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=None,
            accepts_images=True,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles or StrideTiles(512, 384), ratio, "AsymmetricAutoencoderKL"),
            chunked=False,
            # The widest operand at full resolution: the last upsampling leaves the channels of the stage before.
            operand_per_pixel_first=max(widths[0], widths[min(1, len(widths) - 1)]),
        )

    def denormalization(self) -> str:
        return "latents / scaling_factor"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """By the rule of ``StableDiffusionInpaintPipeline``: ``latents / scaling_factor``."""
        return latents_BCTHW / self.config["scaling_factor"]
