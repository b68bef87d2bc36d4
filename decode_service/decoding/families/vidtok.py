"""VidTok: ``AutoencoderVidTok``, causal or not, with continuous (KL) or quantized (FSQ) latents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.image import overlapping_tiles
from decode_service.decoding.families.passes import PassesFamily
from decode_service.decoding.families.past import Past
from decode_service.errors import ConfigError
from decode_service.planning.spec import WHOLE_CLIP, ModelSpec, StrideTiles
from decode_service.planning.temporal import CausalFrames, FrameRule, GroupedFrames

# B batch, C channels, T latent frames, F pixel frames, H height, W width.


class VidTokFamily(PassesFamily):
    """``AutoencoderVidTok``.

    Latents are what ``vae.decode`` takes by default: of a quantized model the codes, not their indices. No pipeline
    normalizes them, and the config has nothing to do it with.

    Every convolution of the causal decoder keeps a copy of its whole input in an attribute, which two decodes at once
    would share. So the family calls what is in the modules, in the order in which they do, and what the next pass looks
    back at belongs to the decode. Doubling of frames looks ahead by one, too: a pass holds back what depends on a frame
    that has not come yet, and the last pass gives it all.

    The decoder that is not causal takes its frames at once.
    """

    class_names = ("AutoencoderVidTok",)
    serves = "VidTok, causal or not, continuous or quantized"

    def __init__(self, vae: nn.Module, name: str, tiles: StrideTiles | None = None) -> None:
        super().__init__(vae, name, tiles)
        self.call_decoder = self._run_decoder

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        vae, config = self.vae, self.config
        decoder: Any = vae.decoder
        doubled = sorted(level for level in decoder.spatial_us if level < decoder.num_resolutions)
        spatial = 2 ** len(doubled)
        # Frames are doubled only where the picture is.
        ratio = 2 ** len([level for level in decoder.tempo_us if level in doubled])
        causal = bool(vae.is_causal)
        if causal and ratio != vae.temporal_compression_ratio:
            raise ConfigError(
                f"the decoder of {name} makes {ratio} frames of one, its encoder one of {vae.temporal_compression_ratio}: "
                "tempo_us and tempo_ds of its config do not belong together"
            )
        rule: FrameRule = (
            CausalFrames(ratio) if causal else GroupedFrames(ratio, max(1, int(vae.num_latent_frames_batch_size)))
        )
        # At full resolution: the last stage, and the one whose upsampling leads to it.
        width = config["ch"] * max(config["ch_mult"][level] for level in {0, *doubled[:1]})
        own_tiles = overlapping_tiles(vae.tile_sample_min_height, vae.tile_overlap_factor_height, spatial)
        return ModelSpec(
            name=name,
            family="vidtok",
            class_name="AutoencoderVidTok",
            latent_channels=config["z_channels"],
            output_channels=config["out_channels"],
            spatial_ratio=spatial,
            decoder_ratio=spatial,
            frame_rule=rule,
            accepts_images=False,
            exact_axes=("height", "width"),
            tiles=stride_tiles(tiles or own_tiles, spatial, "AutoencoderVidTok"),
            chunked=causal,
            # Causal convolutions see two frames more; the last pass has what those before held back, up to ratio - 1.
            operand_per_pixel=(2 * ratio + 1 if causal else ratio) * width,
            operand_per_pixel_first=(ratio + 2 if causal else ratio) * width,
            pass_frames=0 if causal else WHOLE_CLIP,
            no_denormalize_reason="its config has no statistics, and no pipeline uses any",
        )

    def denormalization(self) -> str:
        return f"not possible: {self.spec.no_denormalize_reason}"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"cannot denormalize: {self.spec.no_denormalize_reason}")

    def passes(self, latents_BCTHW: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        rule, frames = self.spec.frame_rule, latents_BCTHW.shape[2]
        if not isinstance(rule, CausalFrames):
            yield self.call_decoder(latents_BCTHW, None, first=True, last=True)
            return
        # A single frame has no successor, so nothing is kept for it.
        past = Past() if frames > 1 else None
        for start, stop in rule.chunks(frames, chunk):
            if past is not None:
                past.rewind()
            first, last = start == 0, stop == frames
            pixels_BCFHW = self.call_decoder(latents_BCTHW[:, :, start:stop], past, first=first, last=last)
            # Of the frames of the first latent frame the last one is kept.
            yield pixels_BCFHW[:, :, rule.ratio - 1 :] if first else pixels_BCFHW

    def _run_decoder(self, x_BCTHW: torch.Tensor, past: Past | None, *, first: bool, last: bool) -> torch.Tensor:
        """``VidTokDecoder3D.forward`` over consecutive latent frames, or over all at once where it is not causal.

        Args:
            first, last: whether these are the first and the last latent frames of the video. The first is alone.
        """
        decoder: Any = self.vae.decoder

        def convolve(conv: Any, x: torch.Tensor) -> torch.Tensor:
            return _convolve(conv, x, past)

        def convolve_over_time(conv: Any, x: torch.Tensor) -> torch.Tensor:
            return _convolve_over_time(conv, x, past)

        x = convolve(decoder.conv_in, x_BCTHW)
        x = _resnet(decoder.mid.block_1, x, convolve)
        x = _attend(decoder.mid.attn_1, x)
        x = _resnet(decoder.mid.block_2, x, convolve)
        for level in reversed(range(decoder.num_resolutions)):
            up, up_over_time = decoder.up[level], decoder.up_temporal[level]
            for block, block_over_time in zip(up.block, up_over_time.block, strict=True):
                x = _frame_by_frame(partial(_resnet, block, convolve=_convolve_frame), x)
                x = _resnet(block_over_time, x, convolve_over_time)
            if level in decoder.spatial_us:
                x = _frame_by_frame(up.upsample, x)
                if level in decoder.tempo_us:
                    x = _double_frames(up_over_time.upsample, x, past, first=first, last=last)
        return convolve(decoder.conv_out, decoder.nonlinearity(_norm(decoder.norm_out, x)))


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """``VidTokLayerNorm.forward``: over channels, of a picture (B,C,H,W) or a video (B,C,T,H,W)."""
    return norm.norm(x.movedim(1, -1)).movedim(-1, 1)


def _frame_by_frame(layer: Callable[[torch.Tensor], torch.Tensor], x_BCTHW: torch.Tensor) -> torch.Tensor:
    """``layer`` of every frame by itself."""
    batch = x_BCTHW.shape[0]
    y = layer(x_BCTHW.transpose(1, 2).flatten(0, 1))
    return y.unflatten(0, (batch, -1)).transpose(1, 2)


def _with_frames_before(conv: Any, x_BCTHW: torch.Tensor, past: Past | None) -> torch.Tensor:
    """The causal padding of a convolution: the frames before where there are any, and else copies of the first."""
    if not conv.time_pad:
        return x_BCTHW
    fill = x_BCTHW[:, :, :1].expand(-1, -1, conv.time_pad, -1, -1)
    if past is None:
        return torch.cat([fill, x_BCTHW], dim=2)
    return past.lengthen(x_BCTHW, conv.time_pad, fill)


def _convolve(conv: Any, x_BCTHW: torch.Tensor, past: Past | None) -> torch.Tensor:
    """``VidTokCausalConv3d.forward``, or the convolution itself where it is not causal."""
    if isinstance(conv, nn.Conv3d):
        return conv(x_BCTHW)
    x_BCTHW = _with_frames_before(conv, x_BCTHW, past)
    if any(conv.spatial_padding):
        x_BCTHW = F.pad(x_BCTHW, conv.spatial_padding, mode=conv.pad_mode)
    return conv.conv(x_BCTHW)


def _convolve_frame(conv: Any, x_BCHW: torch.Tensor) -> torch.Tensor:
    return conv(x_BCHW)


def _convolve_over_time(conv: Any, x_BCTHW: torch.Tensor, past: Past | None) -> torch.Tensor:
    """``VidTokCausalConv1d`` or a plain one over the frames of every position, which the model moves into the batch."""
    inner = conv
    if not isinstance(conv, nn.Conv1d):
        x_BCTHW, inner = _with_frames_before(conv, x_BCTHW, past), conv.conv
    weight = inner.weight.unflatten(2, (-1, 1, 1))
    stride, padding, dilation = ((*inner.stride, 1, 1), (*inner.padding, 0, 0), (*inner.dilation, 1, 1))
    return F.conv3d(x_BCTHW, weight, inner.bias, stride, padding, dilation, inner.groups)


def _resnet(block: Any, x: torch.Tensor, convolve: Callable[[Any, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``VidTokResnetBlock.forward``; these decoders have no timesteps."""
    y = convolve(block.conv1, block.nonlinearity(_norm(block.norm1, x)))
    y = convolve(block.conv2, block.dropout(block.nonlinearity(_norm(block.norm2, y))))
    if block.in_channels != block.out_channels:
        x = convolve(block.conv_shortcut if block.use_conv_shortcut else block.nin_shortcut, x)
    return x + y


def _attend(attention: Any, x_BCTHW: torch.Tensor) -> torch.Tensor:
    """``VidTokAttnBlock.forward``: within each frame."""
    height, width = x_BCTHW.shape[-2:]
    normed = _norm(attention.norm, x_BCTHW)
    query_BTSC, key_BTSC, value_BTSC = (
        _convolve(conv, normed, None).permute(0, 2, 3, 4, 1).flatten(2, 3)
        for conv in (attention.q, attention.k, attention.v)
    )
    y_BTSC = F.scaled_dot_product_attention(query_BTSC, key_BTSC, value_BTSC)
    y = y_BTSC.unflatten(2, (height, width)).permute(0, 4, 1, 2, 3)
    return x_BCTHW + _convolve(attention.proj_out, y, None)


def _double_frames(upsample: Any, x_BCTHW: torch.Tensor, past: Past | None, *, first: bool, last: bool) -> torch.Tensor:
    """``VidTokUpsample3D.forward``.

    The causal one doubles the frames of the first latent frame by themselves, and all later ones together: a new frame is
    3/4 the nearest old one and 1/4 the next nearest. So the last new frame waits for the old one that follows.
    """
    if not upsample.is_causal or past is None:
        x = _interpolate(upsample, x_BCTHW)
    elif first:
        past.skip()
        x = _interpolate(upsample, x_BCTHW)
    else:
        old = past.lengthen(x_BCTHW, 1)
        x = _interpolate(upsample, old)
        # What the passes before gave: the first of the two new frames in the place of the old one that was kept.
        start = 0 if old.shape[2] == x_BCTHW.shape[2] else 1
        x = x[:, :, start : x.shape[2] - (0 if last else 1)]
    alpha = torch.sigmoid(upsample.mix_factor)
    return alpha * x + (1 - alpha) * _convolve(upsample.conv, x, past)


def _interpolate(upsample: Any, x_BCTHW: torch.Tensor) -> torch.Tensor:
    mode = upsample.interpolation_mode
    return F.interpolate(x_BCTHW.float(), scale_factor=[2.0, 1.0, 1.0], mode=mode).to(x_BCTHW.dtype)
