"""Representation autoencoders (RAE): ``AutoencoderRAE``, a vision transformer that decodes features of another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from decode_service.decoding.families.base import Family
from decode_service.decoding.sharding import ShardedFrame
from decode_service.errors import ConfigError
from decode_service.planning.plan import DecodePlan
from decode_service.planning.spec import ModelSpec, StrideTiles
from decode_service.planning.tiles import TileSpan

# B batch, C channels, T latent frames (1 here), H height, W width, S tokens.

_NO_TILES = "its decoder has one position embedding for each token of a picture of one size, and a tile is none"


class RAEFamily(Family):
    """``AutoencoderRAE``: as many tokens as its encoder gives, and a class token, through transformer blocks to patches.

    A band of a picture has the class token and its own tokens, whose queries see the keys of all: sharding is exact.

    Pictures have one size. diffusers stretches the latents of other square pictures to it, and takes any rectangle of as
    many cells for the square, which scrambles the picture; here both are refused.

    The pixels of ``vae.decode`` are RGB over [0, 1].
    """

    class_names = ("AutoencoderRAE",)
    serves = "RAE, of one size"

    @classmethod
    def building(cls) -> AbstractContextManager[None]:
        """Without the encoder, a model of the transformers library that need not even be installed."""
        return _without_encoder()

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        vae, config = self.vae, self.config
        if tiles is not None:
            raise ConfigError(f"policy.tile cannot be set for AutoencoderRAE: {_NO_TILES}; remove the setting")
        if not config["reshape_to_2d"]:
            raise ConfigError(
                f"{name} has reshape_to_2d: false, so its latents are tokens (B,N,C); pictures (B,C,H,W) are decoded here"
            )
        patch, cells = vae.decoder_patch_size, math.isqrt(vae.num_patches)
        return ModelSpec(
            name=name,
            family="rae",
            class_name="AutoencoderRAE",
            latent_channels=config["encoder_hidden_size"],
            output_channels=config["num_channels"],
            spatial_ratio=patch,
            decoder_ratio=patch,
            frame_rule=None,
            accepts_images=True,
            exact_axes=("height", "width"),
            tiles=None,
            no_tiles_reason=_NO_TILES,
            chunked=False,
            operand_per_pixel_first=_widest_operand(
                tokens=1 + cells**2,
                channels=max(
                    config["encoder_hidden_size"],
                    config["decoder_hidden_size"],
                    config["decoder_intermediate_size"],
                    patch**2 * config["num_channels"],
                ),
                heads=config["decoder_num_attention_heads"],
                pixels=(cells * patch) ** 2,
            ),
            fixed_cells=cells,
        )

    def statistics(self) -> dict[str, Any]:
        """None: those of the config are applied by ``vae.decode`` and are nobody else's business."""
        return {}

    def denormalization(self) -> str:
        return "latents"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """Nothing: ``vae.decode`` itself undoes the factor and the statistics of the latents, and so does ``decode``."""
        return latents_BCTHW

    def decode(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        vae, scaling = self.vae, self.config["scaling_factor"]
        x_BCHW = latents_BCTHW.squeeze(2)
        if scaling != 1.0:
            x_BCHW = x_BCHW / scaling
        frame = ShardedFrame.current()
        if frame is not None:
            pixels_BCHW = self._decode_band(x_BCHW, frame)
        else:
            x_BSC = vae._denormalize_latents(x_BCHW).flatten(2).transpose(1, 2).contiguous()
            pixels_BCHW = vae.decoder.unpatchify(self.call_decoder(x_BSC, return_dict=False)[0])
        yield vae._denormalize_image(pixels_BCHW).unsqueeze(2)

    def _decode_band(self, x_BCHW: torch.Tensor, frame: ShardedFrame) -> torch.Tensor:
        """What ``decode`` of a whole picture does, on a band: its own rows or columns of all that has a position.

        The order of ``RAEDecoder.forward``, which takes a band for a picture of another size and stretches it. Every rank
        has the class token, and only its own of the other tokens.
        """
        vae, decoder, cells = self.vae, self.vae.decoder, self.spec.fixed_cells
        batch, _, height, width = x_BCHW.shape
        own = slice(frame.band.start, frame.band.stop)
        rows, columns = (own, slice(None)) if frame.axis == "height" else (slice(None), own)

        def of_band(statistics: torch.Tensor) -> torch.Tensor:
            values = statistics.to(x_BCHW.device, x_BCHW.dtype)
            if values.dim() < 3:
                return values
            values_CHW = values.flatten(0, -3)
            tall, wide = (extent > 1 for extent in values_CHW.shape[1:])
            return values_CHW[:, rows if tall else slice(None), columns if wide else slice(None)]

        x_BCHW = x_BCHW * (of_band(vae._latents_std) + 1e-5) + of_band(vae._latents_mean)
        x_BSC = decoder.decoder_embed(x_BCHW.flatten(2).transpose(1, 2))
        positions_SC = decoder.decoder_pos_embed[0].to(x_BSC.device, x_BSC.dtype)
        band_SC = positions_SC[1:].unflatten(0, (cells, cells))[rows, columns].flatten(0, 1)
        class_BSC = (decoder.trainable_cls_token + positions_SC[:1]).expand(batch, -1, -1)
        x_BSC = torch.cat([class_BSC, x_BSC + band_SC], dim=1)
        with frame.sharing_tokens(1):
            for layer in decoder.decoder_layers:
                x_BSC = layer(x_BSC)
        x_BSC = decoder.decoder_pred(decoder.decoder_norm(x_BSC))[:, 1:]
        # As ``unpatchify``: row and column within the patch, then the channel.
        patch, channels = decoder.patch_size, decoder.num_channels
        pixels = x_BSC.reshape(batch, height, width, patch, patch, channels).permute(0, 5, 1, 3, 2, 4)
        return pixels.reshape(batch, channels, height * patch, width * patch)

    def to_unit_range(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.clamp(0.0, 1.0) * 2.0 - 1.0

    def decode_tile(
        self, latents_BCTHW: torch.Tensor, part: int, row: TileSpan, column: TileSpan, chunk: int
    ) -> torch.Tensor:
        raise NotImplementedError("AutoencoderRAE is never tiled")

    def tile_shape(self, latent_shape: Sequence[int], part: int, row: TileSpan, column: TileSpan) -> tuple[int, ...]:
        raise NotImplementedError("AutoencoderRAE is never tiled")

    def merge_tiles(self, plan: DecodePlan, tiles: list[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError("AutoencoderRAE is never tiled")


def _widest_operand(*, tokens: int, channels: int, heads: int, pixels: int) -> int:
    """Elements of the widest operand per output pixel: what a layer gives for all tokens, or their attention scores."""
    return math.ceil(tokens * max(channels, heads * tokens) / pixels)


@contextmanager
def _without_encoder() -> Iterator[None]:
    """diffusers makes ``AutoencoderRAE`` with a module without weights as its encoder, and passes over an encoder's weights."""
    from diffusers.models.autoencoders import autoencoder_rae

    model, build = autoencoder_rae.AutoencoderRAE, autoencoder_rae._build_encoder
    ignored = model._keys_to_ignore_on_load_unexpected
    autoencoder_rae._build_encoder = lambda **_: nn.Identity()
    model._keys_to_ignore_on_load_unexpected = [*ignored, r"^encoder\."]
    try:
        yield
    finally:
        autoencoder_rae._build_encoder = build
        model._keys_to_ignore_on_load_unexpected = ignored
