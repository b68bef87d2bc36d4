"""LTX-2 (32x32x8, 128 channels): ``AutoencoderKLLTX2Video``, the video half of an audio and video model."""

from __future__ import annotations

import dataclasses

import torch
from diffusers.models.autoencoders import autoencoder_kl_ltx2 as ltx2

from decode_service.decoding.families.base import mixed
from decode_service.decoding.families.ltx_video import LTXVideoFamily, padded_by_its_convolution
from decode_service.decoding.rewrites import Activation, CausalConvolution, DecoderStructure
from decode_service.planning.spec import ModelSpec, StrideTiles
from decode_service.planning.tiles import TileSpan

# B batch, C channels, T latent frames, H height, W width.


class LTX2VideoFamily(LTXVideoFamily):
    """``AutoencoderKLLTX2Video``: built as LTX-Video is, denormalized as there (``LTX2Pipeline._denormalize_latents``).

    Unlike other pipelines, ``LTX2Pipeline(output_type="latent")`` returns latents that are denormalized already: a request
    with those says ``denormalize: false``.
    """

    class_names = ("AutoencoderKLLTX2Video",)
    serves = "LTX-2"
    structure = DecoderStructure(
        causal_convolutions=(
            CausalConvolution(ltx2.LTX2VideoCausalConv3d, "repeat", padded_by_its_convolution, convolution="conv"),
        ),
        activations=(
            Activation(ltx2.LTX2VideoResnetBlock3d, "nonlinearity"),
            Activation(ltx2.LTX2VideoDecoder3d, "conv_act"),
        ),
    )
    family_name = "ltx-2-video"

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        # Its convolutions pad by reflecting, and a single row or column has nothing to reflect.
        reflects = self.config["decoder_spatial_padding_mode"] == "reflect"
        return dataclasses.replace(super().make_spec(name, tiles), min_cells=2 if reflects else 1)

    def noised(
        self, latents_BCTHW: torch.Tensor, noise_BCTHW: torch.Tensor, scale: float, *, denormalize: bool
    ) -> torch.Tensor:
        """As ``LTX2Pipeline`` does it: noise is mixed into normalized latents, which are denormalized afterwards.

        Into latents that are denormalized already, denormalized noise is mixed: the same function but for rounding,
        because denormalizing is affine and the weights sum to 1.
        """
        if denormalize:
            return self.denormalize(mixed(latents_BCTHW, noise_BCTHW, scale))
        return mixed(latents_BCTHW, self.denormalize(noise_BCTHW), scale)

    def decode_tile(
        self, latents_BCTHW: torch.Tensor, part: int, row: TileSpan, column: TileSpan, chunk: int
    ) -> torch.Tensor:
        """One tile. A last tile of a single cell is decoded together with the cell before it.

        Such a tile (480 px of height with the default tiles) fails in diffusers: convolutions pad by reflecting, and one
        row has nothing to reflect.
        """
        ratio = self.spec.decoder_ratio
        wider_row, wider_column = _at_least_two(row), _at_least_two(column)
        tile = super().decode_tile(latents_BCTHW, part, wider_row, wider_column, chunk)
        return tile[..., (row.start - wider_row.start) * ratio :, (column.start - wider_column.start) * ratio :]


def _at_least_two(span: TileSpan) -> TileSpan:
    if span.size > 1 or span.start == 0:
        return span
    return TileSpan(span.start - 1, 2, span.blend, span.keep)
