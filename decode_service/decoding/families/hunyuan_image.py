"""The image VAE of HunyuanImage 2.1: ``AutoencoderKLHunyuanImage``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from diffusers.models.autoencoders import autoencoder_kl_hunyuanimage as hunyuan

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.image import ImageFamily, overlapping_tiles
from decode_service.decoding.rewrites import Activation, DecoderStructure
from decode_service.errors import ConfigError
from decode_service.planning.spec import ModelSpec, StrideTiles


class HunyuanImageFamily(ImageFamily):
    """``AutoencoderKLHunyuanImage``: GroupNorm, attention in the middle, upsampling by moving channels into pixels."""

    class_names = ("AutoencoderKLHunyuanImage",)
    serves = "HunyuanImage"
    structure = DecoderStructure(
        channels_last=True,
        activations=(
            Activation(hunyuan.HunyuanImageResnetBlock, "nonlinearity"),
            Activation(hunyuan.HunyuanImageDecoder2D, "nonlinearity", ("norm_out",)),
        ),
    )

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config = self.config
        if config["scaling_factor"] is None:
            raise ConfigError(f"the config of {name} has no scaling_factor, so normalized latents cannot be decoded")
        widths = config["block_out_channels"][::-1]
        # The decoder doubles once per stage until the ratio is reached, and never after its last stage.
        doublings = min(doublings_to(config["spatial_compression_ratio"]), len(widths) - 1)
        ratio = 2**doublings
        own_tiles = overlapping_tiles(self.vae.tile_sample_min_size, self.vae.tile_overlap_factor, ratio)
        return ModelSpec(
            name=name,
            family="hunyuan-image",
            class_name="AutoencoderKLHunyuanImage",
            latent_channels=config["latent_channels"],
            output_channels=config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=None,
            accepts_images=True,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles or own_tiles, ratio, "AutoencoderKLHunyuanImage"),
            chunked=False,
            operand_per_pixel_first=widest_activation(widths, doublings, matched=config["upsample_match_channel"]),
        )

    def denormalization(self) -> str:
        return "latents / scaling_factor"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """By the rule of ``HunyuanImagePipeline``: ``latents / scaling_factor``."""
        return latents_BCTHW / self.config["scaling_factor"]


def doublings_to(ratio: int) -> int:
    """How many stages of these decoders double the picture: stage i does where i < log2(ratio)."""
    return math.ceil(math.log2(ratio))


def widest_activation(widths: Sequence[int], doublings: int, *, matched: bool) -> int:
    """Elements of the widest activation of one frame, per output pixel.

    A stage's activations have its own channels, and those that the upsampling before it leaves, which is those of the
    stage where they are ``matched``. Upsampling itself needs no more: its convolution makes four times the channels of
    its result at a quarter of the pixels.

    Args:
        widths: channels of every stage, in the decoder's order.
        doublings: stages, from the first, that double the picture.
    """
    widest, channels = 0.0, widths[0]
    for stage, width in enumerate(widths):
        share = 4.0 ** (min(stage, doublings) - doublings)
        widest = max(widest, max(channels, width) * share)
        channels = widths[stage + 1] if matched and stage < doublings and stage + 1 < len(widths) else width
        if stage < doublings:
            widest = max(widest, channels * share * 4)
    return math.ceil(widest)
