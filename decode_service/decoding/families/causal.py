"""Causal video decoders with a feature cache, and the normalization that they share with others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from decode_service.decoding.families.base import Family
from decode_service.decoding.families.passes import CausalPassesFamily
from decode_service.decoding.rewrites import SpatialPadding
from decode_service.decoding.tiling import stitch
from decode_service.planning.plan import DecodePlan

# B batch, C channels, T latent frames, F pixel frames, H height, W width.


class MeanStdFamily(Family):
    """Families whose latents are normalized by ``latents_mean`` and ``latents_std``, per channel."""

    def statistics(self) -> dict[str, Any]:
        return {key: self.config[key] for key in ("latents_mean", "latents_std")}

    def denormalization(self) -> str:
        return "latents / (1 / latents_std) + latents_mean, per channel"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        # Dividing by the reciprocal is what the Wan and Qwen-Image pipelines do; in half precision it rounds
        # differently from multiplying by the deviation.
        shape = (1, self.spec.latent_channels, 1, 1, 1)
        device, dtype = latents_BCTHW.device, latents_BCTHW.dtype
        mean = torch.tensor(self.config["latents_mean"]).view(shape).to(device, dtype)
        reciprocal = 1.0 / torch.tensor(self.config["latents_std"]).view(shape).to(device, dtype)
        return latents_BCTHW / reciprocal + mean


class TimesStdFamily(MeanStdFamily):
    """Those whose pipelines multiply by the deviation."""

    def denormalization(self) -> str:
        return "latents * latents_std + latents_mean, per channel"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        shape = (1, self.spec.latent_channels, 1, 1, 1)
        device, dtype = latents_BCTHW.device, latents_BCTHW.dtype
        mean = torch.tensor(self.config["latents_mean"]).view(shape).to(device, dtype)
        std = torch.tensor(self.config["latents_std"]).view(shape).to(device, dtype)
        return latents_BCTHW * std + mean


class CausalFamily(MeanStdFamily, CausalPassesFamily):
    """Causal video decoders with a feature cache: Wan and Qwen-Image.

    diffusers keeps the cache on the model, so that two decodes at once destroy each other; its decoder takes the cache as
    an argument, though, and here every decode brings its own.
    """

    @property
    def patch_size(self) -> int:
        """Pixels per side that the decoder packs into channels."""
        return self.spec.spatial_ratio // self.spec.decoder_ratio

    def run_pass(self, x_BCTHW: torch.Tensor, cache: list[Any] | None, *, first: bool) -> torch.Tensor:
        """One pass of the decoder over consecutive latent frames; updates ``cache`` in place."""
        return self.call_decoder(x_BCTHW, feat_cache=cache, feat_idx=[0])

    def passes(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        """Decoder output pass by pass, still patchified and unclamped."""
        x_BCTHW = self.vae.post_quant_conv(latents_BCTHW)
        frames = x_BCTHW.shape[2]
        # A single frame never reads a cache, so none is kept: at 4K it would be gigabytes.
        cache = [None] * self._cache_slots() if frames > 1 else None
        for start, stop in self.frame_rule.chunks(frames, chunk):
            yield self.run_pass(x_BCTHW[:, :, start:stop], cache, first=start == 0)

    def _cache_slots(self) -> int:
        causal_conv = type(self.vae.post_quant_conv)
        return sum(isinstance(module, causal_conv) for module in self.vae.decoder.modules())

    def to_model_range(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.clamp(-1.0, 1.0)

    def decode(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        for x_BCFHW in self.passes(latents_BCTHW, chunk):
            yield unpatchify(x_BCFHW, self.patch_size)

    def merge_tiles(self, plan: DecodePlan, tiles: list[torch.Tensor]) -> torch.Tensor:
        assert plan.tiles is not None
        return unpatchify(stitch(tiles, plan.tiles), self.patch_size)


def zero_padded(convolution: Any) -> SpatialPadding:
    """The zeros around a frame that a causal convolution of Wan's form adds by itself."""
    return SpatialPadding(*convolution._padding[:4])


def unpatchify(x_BCFHW: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Channels back into ``patch_size`` x ``patch_size`` pixels: (B, C*p*p, F, H, W) to (B, C, F, H*p, W*p).

    Among the packed channels the column within the patch comes before the row (diffusers' AutoencoderKLWan).
    """
    if patch_size == 1:
        return x_BCFHW
    batch, packed, frames, height, width = x_BCFHW.shape
    channels = packed // patch_size**2
    x = x_BCFHW.reshape(batch, channels, patch_size, patch_size, frames, height, width)
    x = x.permute(0, 1, 4, 5, 3, 6, 2)
    return x.reshape(batch, channels, frames, height * patch_size, width * patch_size)
