"""The image VAE of FLUX.2 and of others that took it over: ``AutoencoderKLFlux2``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.image import RESNET_BLOCKS, ImageFamily, overlapping_tiles
from decode_service.errors import ConfigError
from decode_service.planning.spec import ModelSpec, Packing, StrideTiles


class Flux2Family(ImageFamily):
    """``AutoencoderKLFlux2``: the decoder of AutoencoderKL on 32 channels, normalized by the statistics in ``vae.bn``.

    The denoiser works on latents packed 2x2 into 128 channels; ``vae.decode``, and so this family, takes the 32 channels
    that ``_unpatchify_latents`` of the pipeline makes of them. Both packed forms, the sequence and the grid, are layouts.
    """

    class_names = ("AutoencoderKLFlux2",)
    serves = "FLUX.2"
    structure = RESNET_BLOCKS

    def __init__(self, vae: nn.Module, name: str, tiles: StrideTiles | None = None) -> None:
        super().__init__(vae, name, tiles)
        mean, variance = vae.bn.running_mean, vae.bn.running_var
        if not mean.is_meta and not mean.any() and bool((variance == 1).all()):
            raise ConfigError(
                f"the statistics vae.bn of {name} are as they are initialised, not read from its weights, so normalized "
                "latents cannot be decoded"
            )
        # Taken once: a retry in float32 casts the module's buffers, after which half-precision roots would differ.
        self._mean = self._per_phase(mean)
        self._std = self._per_phase(torch.sqrt(variance + self.config["batch_norm_eps"]))

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config = self.config
        widths = config.get("decoder_block_out_channels") or config["block_out_channels"]
        ratio = 2 ** (len(widths) - 1)
        # The widest operand at full resolution: the last upsampling leaves the channels of the stage before.
        operand = max(widths[0], widths[min(1, len(widths) - 1)])
        own_tiles = overlapping_tiles(self.vae.tile_latent_min_size * ratio, self.vae.tile_overlap_factor, ratio)
        return ModelSpec(
            name=name,
            family="flux-2",
            class_name="AutoencoderKLFlux2",
            latent_channels=config["latent_channels"],
            output_channels=config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=None,
            accepts_images=True,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles or own_tiles, ratio, "AutoencoderKLFlux2"),
            chunked=False,
            operand_per_pixel_first=operand,
            packing=Packing((2,), grid=True),
        )

    def _per_phase(self, packed: torch.Tensor) -> torch.Tensor:
        """Statistics (C, patch rows, patch columns) of statistics of packed channels.

        Among packed channels the channel comes first, then the row within the patch, then the column: the order of
        ``Flux2Pipeline._unpatchify_latents`` in diffusers 0.42.
        """
        rows, columns = self.config["patch_size"]
        if packed.numel() != self.spec.latent_channels * math.prod((rows, columns)):
            raise ConfigError(f"{packed.numel()} statistics do not fit {self.spec.latent_channels} latent channels")
        return packed.detach().clone().view(self.spec.latent_channels, rows, columns)

    def statistics(self) -> dict[str, Any]:
        """Of packed channels (channel, row and column of the patch): the batch norm's, with the deviation's root taken."""
        return {
            "bn_running_mean": self._mean.float().flatten().tolist(),
            "bn_running_std": self._std.float().flatten().tolist(),
            "batch_norm_eps": self.config["batch_norm_eps"],
            "patch_size": list(self.config["patch_size"]),
        }

    def denormalization(self) -> str:
        return "latents * bn_running_std + bn_running_mean, per channel and place in the patch; std = sqrt(var + eps)"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """By the rule of ``Flux2Pipeline``: ``latents * sqrt(running_var + eps) + running_mean`` on packed channels.

        A packed channel is an unpacked channel at one place of the patch, so the statistics are laid out over the frame
        instead of packing it: the same products and sums, for odd extents too.
        """
        height, width = latents_BCTHW.shape[-2:]
        device, dtype = latents_BCTHW.device, latents_BCTHW.dtype
        std, mean = (_over_frame(values.to(device, dtype), height, width) for values in (self._std, self._mean))
        return latents_BCTHW * std + mean


def _over_frame(values_CPQ: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """``values_CPQ`` (P rows and Q columns of a patch) repeated over a frame: (C, 1, ``height``, ``width``)."""
    rows = torch.arange(height, device=values_CPQ.device) % values_CPQ.shape[1]
    columns = torch.arange(width, device=values_CPQ.device) % values_CPQ.shape[2]
    return values_CPQ[:, rows][:, :, columns].unsqueeze(1)
