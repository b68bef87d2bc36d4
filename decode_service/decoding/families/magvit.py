"""EasyAnimate: ``AutoencoderKLMagvit``, a causal decoder that keeps its feature cache on its modules."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import torch
from torch import nn

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.passes import CausalPassesFamily
from decode_service.decoding.families.wan import causal_operands
from decode_service.planning.spec import ModelSpec, StrideTiles
from decode_service.planning.temporal import CausalFrames


class MagvitFamily(CausalPassesFamily):
    """``AutoencoderKLMagvit``.

    Every convolution and every upsampling remembers what it saw in an attribute, so that two decodes at once destroy each
    other. Here every decode runs on modules of its own that share the weights, and what they remember goes with them.
    """

    class_names = ("AutoencoderKLMagvit",)
    serves = "EasyAnimate"
    compiles = False

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config, vae = self.config, self.vae
        widths = config["block_out_channels"]
        ratio = 2 ** (len(widths) - 1)
        upsamplers = [block.upsampler for block in vae.decoder.up_blocks if block.upsampler is not None]
        later, first = causal_operands(1, list(widths), halved=False)
        return ModelSpec(
            name=name,
            family="easyanimate",
            class_name="AutoencoderKLMagvit",
            latent_channels=config["latent_channels"],
            output_channels=config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=CausalFrames(2 ** sum(upsampler.temporal_upsample for upsampler in upsamplers)),
            accepts_images=False,
            exact_axes=("height", "width"),
            tiles=stride_tiles(
                tiles or StrideTiles(vae.tile_sample_min_height, vae.tile_sample_stride_height),
                ratio,
                "AutoencoderKLMagvit",
            ),
            # Statistics of a frame and nearest upsampling do not care how frames are grouped; statistics of all frames
            # of a pass, and linear upsampling in time, do.
            chunked=config["spatial_group_norm"],
            operand_per_pixel=later,
            operand_per_pixel_first=first,
        )

    def passes(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        x_BCTHW = self.vae.post_quant_conv(latents_BCTHW)
        frames = x_BCTHW.shape[2]
        # Eagerly: what the modules remember would make a compiled decoder a new one in every pass.
        decoder = with_shared_weights(self.vae.decoder)
        # diffusers decodes the latent frames after the first one by one.
        size = chunk if self.spec.chunked else self.vae.num_latent_frames_batch_size
        for start, stop in self.frame_rule.chunks(frames, size):
            yield decoder(x_BCTHW[:, :, start:stop])


def with_shared_weights(module: nn.Module) -> nn.Module:
    """A copy of ``module`` and its submodules whose parameters and buffers are the very ones of ``module``."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    twin: nn.Module = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    return twin
