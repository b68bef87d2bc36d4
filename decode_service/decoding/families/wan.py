"""Wan 2.1 (8x, 16 channels) and Wan 2.2 (residual, patchified, 16x, 48 channels): ``AutoencoderKLWan``."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders import autoencoder_kl_wan as wan

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.causal import CausalFamily, zero_padded
from decode_service.decoding.rewrites import Activation, CausalConvolution, DecoderStructure
from decode_service.planning.spec import ModelSpec, Packing, StrideTiles
from decode_service.planning.temporal import CausalFrames


class WanFamily(CausalFamily):
    """``AutoencoderKLWan`` in both of its forms."""

    class_names = ("AutoencoderKLWan",)
    serves = "Wan 2.1 and 2.2 A14B (16 channels), 2.2 5B (48), Sana-Video"
    structure = DecoderStructure(
        channels_last=True,
        causal_convolutions=(CausalConvolution(wan.WanCausalConv3d, "zeros", zero_padded, takes_cache=True),),
        rms_norms=(wan.WanRMS_norm,),
        activations=(
            Activation(wan.WanResidualBlock, "nonlinearity"),
            Activation(wan.WanDecoder3d, "nonlinearity", ("norm_out",)),
        ),
        residual_blocks=(wan.WanResidualBlock,),
        duplications=(wan.DupUp3D,),
    )

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config = self.config
        patch = config["patch_size"] or 1
        # From the structure, not from scale_factor_spatial, which a config may have left at its default.
        decoder_ratio = 2 ** len(config["temperal_downsample"])
        width = config["decoder_base_dim"] or config["base_dim"]
        later, first = causal_operands(width, config["dim_mult"], halved=not config["is_residual"])
        return ModelSpec(
            name=name,
            family="wan-2.2" if config["is_residual"] else "wan-2.1",
            class_name="AutoencoderKLWan",
            latent_channels=config["z_dim"],
            output_channels=config["out_channels"] // patch**2,
            spatial_ratio=decoder_ratio * patch,
            decoder_ratio=decoder_ratio,
            frame_rule=CausalFrames(2 ** sum(config["temperal_downsample"])),
            accepts_images=False,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles, decoder_ratio * patch, "AutoencoderKLWan"),
            operand_per_pixel=later // patch**2,
            operand_per_pixel_first=first // patch**2,
            # The pipelines of Wan pack nothing; that of Bria FIBO, which uses its VAE, does.
            packing=Packing((1, 2)),
            operand_padding=2 * patch,
        )

    def run_pass(self, x_BCTHW: torch.Tensor, cache: list[Any] | None, *, first: bool) -> torch.Tensor:
        # Wan's decoder must be told of the first frame: the residual shortcut of 2.2 drops its leading copies there.
        return self.call_decoder(x_BCTHW, feat_cache=cache, feat_idx=[0], first_chunk=first)


def causal_operands(width: int, multipliers: list[int], *, halved: bool) -> tuple[int, int]:
    """Elements of the widest operand at full resolution per pixel of one frame: of a later pass, of the first pass.

    Two candidates: the input of the last upsampling's convolution (4 frames; the channels of the stage before), and that
    of the last stage's 3x3x3 convolutions (4 frames and 2 cached ones; 1 and 2 in the first pass).

    Args:
        width: channels of the last stage.
        multipliers: channel multipliers, last stage first.
        halved: whether upsampling halves the channels (Wan 2.1, Qwen-Image).
    """
    before = width * multipliers[1] if len(multipliers) > 1 else width
    last_input = max(before // 2 if halved else before, width)
    return max(4 * before, 6 * last_input), max(before, 3 * last_input)
