"""Cosmos 1.0's continuous video tokenizers: ``AutoencoderKLCosmos`` (Cosmos-Predict2 and later use ``AutoencoderKLWan``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from decode_service.decoding.attention import attention_over_time
from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.passes import CausalPassesFamily
from decode_service.decoding.families.past import Past
from decode_service.planning.spec import ModelSpec, StrideTiles
from decode_service.planning.temporal import CausalFrames

# B batch, C channels, T latent frames, F pixel frames, H height, W width, N heads, D head channels, P positions (B x H x W),
# p pixels per side of a patch, which has as many frames.

SIGMA_DATA = 0.5
"""Deviation to which the Cosmos 1.0 denoisers were trained to bring latents: ``sigma_data`` of their EDMEulerScheduler."""


class CosmosFamily(CausalPassesFamily):
    """``AutoencoderKLCosmos``.

    Everything in its decoder looks back in time only: convolutions, temporal attention, and norms and spatial attention
    of one frame each. diffusers runs it over all frames at once; here passes hand on what the next one looks back at, so
    memory follows the chunk. Its modules' own ``forward`` begins every call with copies of the first frame, so the family
    calls what is in them in the order in which they do.

    The pipelines' latents have the scheduler's ``sigma_data`` in them, which no config of the VAE tells. The released
    denoisers were all trained with 0.5 (``SIGMA_DATA``), so that is what ``denormalize`` takes out: the pipeline's latents
    can be sent as they are. Latents of a denoiser with another one must be sent raw.
    """

    class_names = ("AutoencoderKLCosmos",)
    serves = "Cosmos 1.0"

    def __init__(self, vae: nn.Module, name: str, tiles: StrideTiles | None = None) -> None:
        super().__init__(vae, name, tiles)
        self.call_decoder = self._run_decoder

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config, vae, patch = self.config, self.vae, self.config["patch_size"]
        # From the structure: which blocks double the frames or the picture depends on three numbers of the config.
        upsamplers = [upsampler for block in vae.decoder.up_blocks for upsampler in block.upsamplers or ()]
        ratio = patch * 2 ** sum(upsampler.spatial_upsample for upsampler in upsamplers)
        frames = 2 ** sum(upsampler.temporal_upsample for upsampler in upsamplers)
        # At full resolution, before patches are taken apart: the last upsampling leaves the channels of the stage before,
        # and convolutions in time, the last of which makes the patches, see two frames more.
        widths, area = config["decode_block_out_channels"], patch**2
        before, width = widths[min(1, len(widths) - 1)], max(widths[0], config["out_channels"] * patch**3)
        statistics = self._statistics("latents_mean").shape[2] if self._has_statistics else 1
        return ModelSpec(
            name=name,
            family="cosmos",
            class_name="AutoencoderKLCosmos",
            latent_channels=config["latent_channels"],
            output_channels=config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=CausalFrames(frames * patch),
            accepts_images=False,
            exact_axes=("height", "width"),
            tiles=stride_tiles(
                tiles or StrideTiles(vae.tile_sample_min_height, vae.tile_sample_stride_height),
                ratio,
                "AutoencoderKLCosmos",
            ),
            operand_per_pixel=math.ceil(max(frames * before, (frames + 2) * width) / area),
            operand_per_pixel_first=math.ceil(max(before, 3 * width) / area),
            normalized_frames=statistics if statistics > 1 else 0,
        )

    # Normalization

    @property
    def _has_statistics(self) -> bool:
        return self.config.get("latents_mean") is not None

    def _statistics(self, name: str) -> torch.Tensor:
        """(1,C,T,1,1): every channel has them for each of the first frames, 16 in the released models, or once for all."""
        return torch.tensor(self.config[name]).view(1, self.config["latent_channels"], -1, 1, 1)

    def statistics(self) -> dict[str, Any]:
        """With the scheduler's ``sigma_data``; the config's ``scaling_factor`` is used by no pipeline."""
        found = super().statistics()
        found.pop("scaling_factor", None)
        return {**found, "sigma_data": SIGMA_DATA}

    def denormalization(self) -> str:
        if not self._has_statistics:
            return "latents / sigma_data"
        return "latents * latents_std / sigma_data + latents_mean, per channel and frame"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """By the rule of CosmosTextToWorldPipeline and CosmosVideoToWorldPipeline, with ``SIGMA_DATA``."""
        if not self._has_statistics:
            return latents_BCTHW / SIGMA_DATA
        mean, std = (
            self._statistics(name)[:, :, : latents_BCTHW.shape[2]].to(latents_BCTHW)
            for name in ("latents_mean", "latents_std")
        )
        return latents_BCTHW * std / SIGMA_DATA + mean

    # Passes

    def passes(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        x_BCTHW = self.vae.post_quant_conv(latents_BCTHW)
        frames = x_BCTHW.shape[2]
        # A single frame has no successor, so nothing is kept for it.
        past = Past() if frames > 1 else None
        for start, stop in self.frame_rule.chunks(frames, chunk):
            if past is not None:
                past.rewind()
            yield self.call_decoder(x_BCTHW[:, :, start:stop], past, first=start == 0)

    def _run_decoder(self, x_BCTHW: torch.Tensor, past: Past | None, *, first: bool) -> torch.Tensor:
        """``CosmosDecoder3d.forward`` over consecutive latent frames; ``first`` for the first of all, which is alone."""
        decoder: Any = self.vae.decoder
        x = _project(decoder.conv_in, x_BCTHW, past)
        middle = decoder.mid_block
        x = _resnet(middle.resnets[0], x, past)
        for attention, over_time, resnet in zip(
            middle.attentions, middle.temp_attentions, middle.resnets[1:], strict=True
        ):
            x = _attend_over_time(over_time, attention(x), past)
            x = _resnet(resnet, x, past)
        for block in decoder.up_blocks:
            for resnet, attention, over_time in zip(
                block.resnets, block.attentions, block.temp_attentions, strict=True
            ):
                x = _resnet(resnet, x, past)
                if attention is not None:
                    x = _attend_over_time(over_time, attention(x), past)
            for upsampler in block.upsamplers or ():
                x = _upsample(upsampler, x, past, first=first)
        x = _project(decoder.conv_out, F.silu(decoder.norm_out(x)), past)
        pixels_BCFHW = unpatch(x, self.config["patch_size"], haar=self.config["patch_type"] == "haar")
        # The first latent frame stands for one pixel frame, the last of its patch.
        return pixels_BCFHW[:, :, self.config["patch_size"] - 1 :] if first else pixels_BCFHW


def _convolve(conv: Any, x_BCTHW: torch.Tensor, past: Past | None) -> torch.Tensor:
    """``CosmosCausalConv3d.forward``, with the frames before where there are any, and else copies of the first."""
    if not conv.temporal_pad:
        return conv(x_BCTHW)
    fill = x_BCTHW[:, :, :1].expand(-1, -1, conv.temporal_pad, -1, -1)
    if past is None:
        x_BCTHW = torch.cat([fill, x_BCTHW], dim=2)
    else:
        x_BCTHW = past.lengthen(x_BCTHW, conv.temporal_pad, fill)
    if any(conv.spatial_pad):
        x_BCTHW = F.pad(x_BCTHW, (*conv.spatial_pad, 0, 0), mode=conv.pad_mode)
    return F.conv3d(x_BCTHW, conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)


def _project(projection: Any, x_BCTHW: torch.Tensor, past: Past | None) -> torch.Tensor:
    """``CosmosConvProjection3d.forward``: in space, then in time."""
    return _convolve(projection.conv_t, projection.conv_s(x_BCTHW), past)


def _resnet(block: Any, x_BCTHW: torch.Tensor, past: Past | None) -> torch.Tensor:
    """``CosmosResnetBlock3d.forward``."""
    y = _project(block.conv1, F.silu(block.norm1(x_BCTHW)), past)
    y = _project(block.conv2, block.dropout(F.silu(block.norm2(y))), past)
    return y + block.conv_shortcut(x_BCTHW)


def _attend_over_time(attention: Any, x_BCTHW: torch.Tensor, past: Past | None) -> torch.Tensor:
    """``CosmosTemporalAttentionProcessor2_0`` with the causal mask that the blocks give it."""
    batch, _, _, height, width = x_BCTHW.shape
    normed = attention.norm(x_BCTHW)

    def tokens(projection: Any) -> torch.Tensor:
        x_PTC = projection(normed).permute(0, 3, 4, 2, 1).flatten(0, 2)
        return x_PTC.unflatten(2, (attention.num_attention_heads, -1)).transpose(1, 2)

    query_PNTD, key_PNTD, value_PNTD = map(tokens, (attention.to_q, attention.to_k, attention.to_v))
    if past is not None:
        key_PNTD, value_PNTD = past.lengthen(key_PNTD, None), past.lengthen(value_PNTD, None)
    y_PNTD = attention_over_time(query_PNTD, key_PNTD, value_PNTD)
    y = y_PNTD.transpose(1, 2).flatten(2, 3).unflatten(0, (batch, height, width)).permute(0, 4, 3, 1, 2)
    for layer in attention.to_out:
        y = layer(y)
    return y + x_BCTHW


def _upsample(upsampler: Any, x_BCTHW: torch.Tensor, past: Past | None, *, first: bool) -> torch.Tensor:
    """``CosmosUpsample3d.forward``: every frame but the first of all becomes two."""
    if upsampler.temporal_upsample:
        x_BCTHW = x_BCTHW if first else x_BCTHW.repeat_interleave(2, dim=2)
        x_BCTHW = _convolve(upsampler.conv1, x_BCTHW, past) + x_BCTHW
    if upsampler.spatial_upsample:
        x_BCTHW = x_BCTHW.repeat_interleave(2, dim=3).repeat_interleave(2, dim=4)
        x_BCTHW = upsampler.conv2(x_BCTHW) + x_BCTHW
    return upsampler.conv3(x_BCTHW)


def unpatch(x_BCTHW: torch.Tensor, patch: int, *, haar: bool) -> torch.Tensor:
    """Patches of p frames, rows and columns, from their channels: (B, C*p^3, T, H, W) to (B, C, T*p, H*p, W*p).

    Source: ``CosmosUnpatcher3d`` of diffusers 0.42, without its cut at the first frame. Its inverse Haar transform runs
    fourteen transposed convolutions of one weight per channel each time. They come to sums and differences of pairs, along
    one axis after the other: the three factors of 2 ** -0.5 and the final 8 ** 0.5 cancel.

    Args:
        patch: p, a power of two where ``haar``.
        haar: whether patches are wavelet coefficients; otherwise they are the pixels.
    """
    if not haar:
        x = x_BCTHW.unflatten(1, (-1, patch, patch, patch)).permute(0, 1, 5, 2, 6, 3, 7, 4)
        return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)
    for _ in range(patch.bit_length() - 1):
        # Halves of the channels are the sums and the differences of neighbouring frames; halves of these, of rows; of
        # these, of columns.
        x = x_BCTHW.unflatten(1, (2, 2, 2, -1))
        for half, dim in ((3, -1), (2, -2), (1, -3)):
            low, high = x.unbind(half)
            x = torch.stack([low + high, low - high], dim=dim).flatten(dim - 1, dim)
        x_BCTHW = x
    return x_BCTHW
