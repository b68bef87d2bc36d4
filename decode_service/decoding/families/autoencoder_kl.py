"""The image VAE of Stable Diffusion 1 to 3, SDXL, FLUX.1, Z-Image and many more: ``AutoencoderKL``."""

from __future__ import annotations

import torch

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.image import RESNET_BLOCKS, ImageFamily
from decode_service.errors import ConfigError
from decode_service.planning.spec import ModelSpec, Packing, StrideTiles


class AutoencoderKLFamily(ImageFamily):
    """``AutoencoderKL``: 4-D latents, with or without a ``post_quant_conv``.

    GroupNorm takes its statistics over the whole picture, so tiles, which each take their own, only approximate an
    undivided decode (colours shift a little), while sharding merges the statistics and is exact.
    """

    class_names = ("AutoencoderKL",)
    serves = "SD 1 to 3, SDXL, FLUX.1, Z-Image"
    structure = RESNET_BLOCKS

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config = self.config
        if config["scaling_factor"] is None:
            raise ConfigError(f"the config of {name} has no scaling_factor, so normalized latents cannot be decoded")
        widths = config["block_out_channels"]
        ratio = 2 ** (len(widths) - 1)
        # The widest operand at full resolution: the last upsampling leaves the channels of the stage before.
        operand = max(widths[0], widths[min(1, len(widths) - 1)])
        return ModelSpec(
            name=name,
            family="autoencoder-kl",
            class_name="AutoencoderKL",
            latent_channels=config["latent_channels"],
            output_channels=config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=None,
            accepts_images=True,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles or self._own_tiles(), ratio, "AutoencoderKL"),
            chunked=False,
            operand_per_pixel_first=operand,
            # FLUX.1, and Chroma, Bria, Ovis, LongCat and others that pack as it does.
            packing=Packing((2,)),
        )

    def _own_tiles(self) -> StrideTiles:
        """The reference's tiles: as large as the training pictures, a quarter of them overlapping."""
        size = int(self.vae.tile_sample_min_size)
        return StrideTiles(size, size - int(size * self.vae.tile_overlap_factor))

    def denormalization(self) -> str:
        if self.config.get("latents_mean") is not None and self.config.get("latents_std") is not None:
            return "latents * latents_std / scaling_factor + latents_mean, per channel"
        shift = " + shift_factor" if self.config.get("shift_factor") is not None else ""
        return f"latents / scaling_factor{shift}"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """By the rule of the SDXL pipeline where the config has a mean and a deviation, else by that of SD3 and FLUX.1."""
        config, shape = self.config, (1, self.spec.latent_channels, 1, 1, 1)
        scaling = config["scaling_factor"]
        if config.get("latents_mean") is not None and config.get("latents_std") is not None:
            device, dtype = latents_BCTHW.device, latents_BCTHW.dtype
            mean = torch.tensor(config["latents_mean"]).view(shape).to(device, dtype)
            std = torch.tensor(config["latents_std"]).view(shape).to(device, dtype)
            return latents_BCTHW * std / scaling + mean
        scaled = latents_BCTHW / scaling
        return scaled + config["shift_factor"] if config.get("shift_factor") is not None else scaled
