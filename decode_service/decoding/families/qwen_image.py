"""Qwen-Image, and Krea 2 which uses the same VAE: ``AutoencoderKLQwenImage``."""

from __future__ import annotations

from diffusers.models.autoencoders import autoencoder_kl_qwenimage as qwen

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.causal import CausalFamily, zero_padded
from decode_service.decoding.families.wan import causal_operands
from decode_service.decoding.rewrites import Activation, CausalConvolution, DecoderStructure
from decode_service.planning.spec import ModelSpec, Packing, StrideTiles
from decode_service.planning.temporal import CausalFrames


class QwenImageFamily(CausalFamily):
    """``AutoencoderKLQwenImage``: the architecture of Wan 2.1, usually with a single frame.

    diffusers clamps its undivided output to [-1, 1] but not its tiled one; here both are clamped.

    Qwen-Image-Layered has four channels (RGBA). What its denoiser makes, (B,C,layers + 1,H,W), is no video: its pipeline
    drops frame 0 and decodes every layer as a picture of its own, so callers send the layers as a batch (B * layers,C,H,W).
    """

    class_names = ("AutoencoderKLQwenImage",)
    serves = "Qwen-Image, Krea 2, Qwen-Image-Layered"
    structure = DecoderStructure(
        channels_last=True,
        causal_convolutions=(CausalConvolution(qwen.QwenImageCausalConv3d, "zeros", zero_padded, takes_cache=True),),
        rms_norms=(qwen.QwenImageRMS_norm,),
        activations=(
            Activation(qwen.QwenImageResidualBlock, "nonlinearity"),
            Activation(qwen.QwenImageDecoder3d, "nonlinearity", ("norm_out",)),
        ),
        residual_blocks=(qwen.QwenImageResidualBlock,),
    )

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config = self.config
        ratio = 2 ** len(config["temperal_downsample"])
        later, first = causal_operands(config["base_dim"], config["dim_mult"], halved=True)
        return ModelSpec(
            name=name,
            family="qwen-image",
            class_name="AutoencoderKLQwenImage",
            latent_channels=config["z_dim"],
            output_channels=config["input_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=CausalFrames(2 ** sum(config["temperal_downsample"])),
            accepts_images=True,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles, ratio, "AutoencoderKLQwenImage"),
            operand_per_pixel=later,
            operand_per_pixel_first=first,
            packing=Packing((2,), layers=True),
        )
