"""HunyuanVideo 1.0 (8x8x4, 16 channels), also SkyReels and FramePack: ``AutoencoderKLHunyuanVideo``.

What ``vae.decode`` gives is the definition of the picture, and with its default settings it cuts time: clips of up to 4
latent frames are decoded whole, longer ones in parts of 5 latent frames every 3, whose pixel frames are cross-faded
(``use_framewise_decoding`` and the ``tile_sample_*_num_frames`` of diffusers). So ``direct`` means: the parts that the
reference makes, each of them whole in space. The spatial shards are exact to that; tiles cut every part in space too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from diffusers.models.autoencoders import autoencoder_kl_hunyuan_video as hunyuan
from torch import nn

from decode_service.decoding.attention import frame_causal_attention
from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.whole_clip import Convolution, WholeClipFamily, clip_operands, cut, time_padded
from decode_service.decoding.rewrites import Activation, CausalConvolution, DecoderStructure
from decode_service.decoding.tiling import stitch
from decode_service.planning.plan import DecodePlan
from decode_service.planning.spec import ModelSpec, StrideTiles
from decode_service.planning.temporal import FadedFrames
from decode_service.planning.tiles import TileSpan

# B batch, C channels, T latent frames, F pixel frames, H height, W width, L tokens (T x H x W, frame by frame),
# N heads, S tokens of one frame, D head channels.


class HunyuanVideoFamily(WholeClipFamily):
    """``AutoencoderKLHunyuanVideo``. Tile parts are its temporal parts.

    GroupNorm takes its statistics over a whole part, so tiles only approximate an undivided decode.

    diffusers' decoder builds a (THW)^2 mask for its attention, 10 GB in bfloat16 for one part of a 720p video. Here the
    family calls the decoder's own modules one after the other, as the decoder's ``forward`` does, with the attention frame
    by frame (``frame_causal_attention``), which needs no mask. Nothing is set on the model: the order of calls is ours, every
    module that computes is diffusers' own, and ``vae.decode`` still is the reference.
    """

    class_names = ("AutoencoderKLHunyuanVideo",)
    serves = "HunyuanVideo, SkyReels, FramePack"
    structure = DecoderStructure(
        causal_convolutions=(
            CausalConvolution(hunyuan.HunyuanVideoCausalConv3d, "repeat", time_padded, convolution="conv"),
        ),
        activations=(
            Activation(hunyuan.HunyuanVideoResnetBlockCausal3D, "nonlinearity"),
            Activation(hunyuan.HunyuanVideoDecoder3D, "conv_act", ("conv_norm_out",)),
        ),
    )

    def __init__(self, vae: nn.Module, name: str, tiles: StrideTiles | None = None) -> None:
        super().__init__(vae, name, tiles)
        self.call_decoder = self._run_decoder

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        vae, config = self.vae, self.config
        # From the structure: a ratio in the config has no effect where there are too few blocks for it.
        factors = [upsampler.upsample_factor for block in vae.decoder.up_blocks for upsampler in block.upsamplers or ()]
        frame_ratio = math.prod(int(factor[0]) for factor in factors)
        spatial_ratio = math.prod(int(factor[1]) for factor in factors)
        first, later = clip_operands(self._convolutions(spatial_ratio))
        rule = FadedFrames(
            ratio=frame_ratio,
            whole=vae.tile_sample_min_num_frames // frame_ratio,
            stride=vae.tile_sample_stride_num_frames // frame_ratio,
        )
        return ModelSpec(
            name=name,
            family="hunyuan-video",
            class_name="AutoencoderKLHunyuanVideo",
            latent_channels=config["latent_channels"],
            output_channels=config["out_channels"],
            spatial_ratio=spatial_ratio,
            decoder_ratio=spatial_ratio,
            frame_rule=rule,
            accepts_images=False,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles or self.own_tiles(), spatial_ratio, "AutoencoderKLHunyuanVideo"),
            chunked=False,
            operand_per_pixel_first=first,
            operand_per_pixel=later,
            pass_frames=rule.whole + 1,
        )

    def _convolutions(self, spatial: int) -> Iterator[Convolution]:
        frames = 1
        for block in self.vae.decoder.up_blocks:
            for resnet in block.resnets:
                conv = resnet.conv1.conv
                yield Convolution(conv.in_channels, conv.out_channels, spatial, frames)
            for upsampler in block.upsamplers or ():
                frames *= int(upsampler.upsample_factor[0])
                spatial //= int(upsampler.upsample_factor[1])
                conv = upsampler.conv.conv
                yield Convolution(conv.in_channels, conv.out_channels, spatial, frames)

    @property
    def frame_rule(self) -> FadedFrames:
        rule = self.spec.frame_rule
        assert isinstance(rule, FadedFrames)
        return rule

    def denormalization(self) -> str:
        return "latents / scaling_factor"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        # HunyuanVideoPipeline; its image-to-video, SkyReels and FramePack forms do the same.
        return latents_BCTHW / self.config["scaling_factor"]

    def decode_clip(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        return self.call_decoder(self.vae.post_quant_conv(latents_BCTHW))

    def _run_decoder(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        """``HunyuanVideoDecoder3D.forward``, without its mask."""
        decoder: Any = self.vae.decoder
        x = decoder.conv_in(x_BCTHW)
        x = decoder.mid_block.resnets[0](x)
        for attention, resnet in zip(decoder.mid_block.attentions, decoder.mid_block.resnets[1:], strict=True):
            if attention is not None:
                x = _attend(attention, x)
            x = resnet(x)
        for block in decoder.up_blocks:
            x = block(x)
        return decoder.conv_out(decoder.conv_act(decoder.conv_norm_out(x)))

    # Parts in time

    def decode(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        spans = self.frame_rule.parts(latents_BCTHW.shape[2])
        return self._join(self.decode_clip(latents_BCTHW[:, :, start:stop]) for start, stop in spans)

    def _join(self, parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The frames of consecutive parts (B,C,F,H,W), each cross-faded with the one before.

        Source: ``_temporal_tiled_decode`` of AutoencoderKLHunyuanVideo in diffusers 0.42. The parts are blended already
        when the next one is blended with them.
        """
        rule = self.frame_rule
        before: torch.Tensor | None = None
        keep = rule.stride * rule.ratio + 1
        for part in parts:
            if before is None:
                before = part
                continue
            yield before[:, :, :keep]
            keep = rule.stride * rule.ratio
            # The first frame of a part was decoded without a past; the part before has a better one.
            before = _fade_in(before, part[:, :, 1:], rule.fade)
        assert before is not None
        yield before

    def decode_tile(
        self, latents_BCTHW: torch.Tensor, part: int, row: TileSpan, column: TileSpan, chunk: int
    ) -> torch.Tensor:
        start, stop = self.frame_rule.parts(latents_BCTHW.shape[2])[part]
        return self.decode_clip(cut(latents_BCTHW[:, :, start:stop], row, column))

    def tile_shape(self, latent_shape: Sequence[int], part: int, row: TileSpan, column: TileSpan) -> tuple[int, ...]:
        start, stop = self.frame_rule.parts(latent_shape[2])[part]
        return super().tile_shape((*latent_shape[:2], stop - start), part, row, column)

    def merge_tiles(self, plan: DecodePlan, tiles: list[torch.Tensor]) -> torch.Tensor:
        """Put every part together in space, then the parts in time, as the reference does."""
        assert plan.tiles is not None
        grid, count = plan.tiles, plan.tiles.count
        parts = (stitch(tiles[start : start + count], grid) for start in range(0, len(tiles), count))
        return torch.cat(list(self._join(parts)), dim=2)


def _attend(attention: Any, x_BCTHW: torch.Tensor) -> torch.Tensor:
    """diffusers' ``Attention`` over all tokens of a clip, each of which sees its own frame and the earlier ones.

    Source: ``AttnProcessor2_0`` of diffusers 0.42, for the ``Attention`` that HunyuanVideoMidBlock3D makes: a GroupNorm of
    its own, no norms of queries and keys, a residual connection.
    """
    frames, height, width = x_BCTHW.shape[2:]
    x_BLC = x_BCTHW.permute(0, 2, 3, 4, 1).flatten(1, 3)
    normed_BLC = attention.group_norm(x_BLC.transpose(1, 2)).transpose(1, 2)

    def per_head(projection: Any) -> torch.Tensor:
        x = projection(normed_BLC).unflatten(2, (attention.heads, -1)).unflatten(1, (frames, height * width))
        return x.permute(0, 3, 1, 2, 4)

    y_BNTSD = frame_causal_attention(*map(per_head, (attention.to_q, attention.to_k, attention.to_v)))
    y_BLC = y_BNTSD.permute(0, 2, 3, 1, 4).flatten(3, 4).flatten(1, 2)
    for layer in attention.to_out:
        y_BLC = layer(y_BLC)
    y_BLC = (y_BLC + x_BLC) / attention.rescale_output_factor
    return y_BLC.unflatten(1, (frames, height, width)).permute(0, 4, 1, 2, 3)


def _fade_in(before: torch.Tensor, after: torch.Tensor, extent: int) -> torch.Tensor:
    """``after``, its first ``extent`` frames faded in from the last ``extent`` of ``before``: both (B,C,F,H,W).

    Source: ``blend_t`` of the reference, in its arithmetic. It uses numbers and slices of the frame dimension only, so that
    it may run under the halo rule too.
    """
    extent = min(before.shape[2], after.shape[2], extent)
    start = before.shape[2] - extent
    faded = [before[:, :, start + i] * (1 - i / extent) + after[:, :, i] * (i / extent) for i in range(extent)]
    return torch.cat([torch.stack(faded, dim=2), after[:, :, extent:]], dim=2)
