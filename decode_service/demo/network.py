"""The demo VAE's forward pass as it is trained: the same function as diffusers', over a whole clip at once.

diffusers runs `AutoencoderKLWan` chunk by chunk with a cache, which is how one decodes a long video and a slow way to
train a small network on a CPU. Two facts make it cheap, and `train.py` checks both against diffusers before it starts:

- A causal 3x3x3 convolution over one frame sees two zero frames, so it is a 2-D convolution with the last temporal
  slice. Stills train as a 2-D network, and leave the other slices alone.
- Over a whole clip the cached chunks amount to zero frames in front; only the temporal resampling treats the first
  frame apart: it passes through, and the rest are resampled among themselves.

Nothing here is used to serve: this module is for `train.py` alone.

Shape suffixes: N frames of all clips in one dim (batch x frames), B batch, C channels, T frames at the current temporal
resolution, H/W height and width.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn
from torch.nn import functional as F


class TrainableVAE(nn.Module):
    """Runs the encoder and decoder of a diffusers `AutoencoderKLWan` on a batch of equally long clips.

    Inside, frames are folded into the batch dim and kept channels-last, which is what the CPU convolutions want.
    """

    def __init__(self, vae: AutoencoderKLWan) -> None:
        super().__init__()
        self.vae = vae

    def encode(self, pixels_BCFHW: Tensor) -> Tensor:
        """Pixels in [-1, 1], F = 1 + 4n, to the mean latents (B, 16, 1 + n, H/8, W/8)."""
        x, frames = _fold(pixels_BCFHW)
        encoder = self.vae.encoder
        x = self._conv(encoder.conv_in, x, frames)
        for layer in encoder.down_blocks:
            if hasattr(layer, "resample"):
                x, frames = self._downsample(layer, x, frames)
            else:
                x = self._residual(layer, x, frames)
        x = self._middle(encoder.mid_block, x, frames)
        x = self._conv(encoder.conv_out, F.silu(_rms_norm(encoder.norm_out, x)), frames)
        x = self._conv(self.vae.quant_conv, x, frames)
        return _unfold(x, frames)[:, : self.vae.z_dim]

    def decode(self, latents_BCTHW: Tensor) -> Tensor:
        """Raw latents to pixels (B, 3, 1 + 4(T - 1), 8H, 8W), not clamped: a clamp would stop the gradient."""
        x, frames = _fold(latents_BCTHW)
        decoder = self.vae.decoder
        x = self._conv(self.vae.post_quant_conv, x, frames)
        x = self._conv(decoder.conv_in, x, frames)
        x = self._middle(decoder.mid_block, x, frames)
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                x = self._residual(resnet, x, frames)
            if block.upsamplers is not None:
                x, frames = self._upsample(block.upsamplers[0], x, frames)
        x = self._conv(decoder.conv_out, F.silu(_rms_norm(decoder.norm_out, x)), frames)
        return _unfold(x, frames)

    def _conv(self, conv: nn.Conv3d, x_NCHW: Tensor, frames: int) -> Tensor:
        # diffusers keeps its own padding (w, w, h, h, t, 0) and leaves the convolution's at zero.
        pad = (conv._padding[2], conv._padding[0])
        if frames == 1 or conv.kernel_size[0] == 1:
            return F.conv2d(x_NCHW, conv.weight[:, :, -1], conv.bias, padding=pad)
        x_BCTHW = F.pad(_unfold(x_NCHW, frames), (0, 0, 0, 0, conv._padding[4], 0))
        return _fold(F.conv3d(x_BCTHW, conv.weight, conv.bias, padding=(0, *pad)))[0]

    def _residual(self, block: nn.Module, x: Tensor, frames: int) -> Tensor:
        shortcut = x if isinstance(block.conv_shortcut, nn.Identity) else self._conv(block.conv_shortcut, x, frames)
        x = self._conv(block.conv1, F.silu(_rms_norm(block.norm1, x)), frames)
        x = self._conv(block.conv2, F.silu(_rms_norm(block.norm2, x)), frames)
        return x + shortcut

    def _middle(self, block: nn.Module, x: Tensor, frames: int) -> Tensor:
        x = self._residual(block.resnets[0], x, frames)
        for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
            x = self._residual(resnet, _attend(attention, x), frames)
        return x

    def _upsample(self, layer: nn.Module, x: Tensor, frames: int) -> tuple[Tensor, int]:
        if layer.mode == "upsample3d" and frames > 1:
            x_BCTHW = _unfold(x, frames)
            first, rest = x_BCTHW[:, :, :1], x_BCTHW[:, :, 1:]
            rest = F.conv3d(F.pad(rest, (0, 0, 0, 0, 2, 0)), layer.time_conv.weight, layer.time_conv.bias)
            # Channels come out as [even frames, odd frames]; interleave them in time.
            rest = rest.unflatten(1, (2, -1)).movedim(1, 3).flatten(2, 3)
            x, frames = _fold(torch.cat([first, rest], dim=2))
        return layer.resample[1](F.interpolate(x, scale_factor=2, mode="nearest-exact")), frames

    def _downsample(self, layer: nn.Module, x: Tensor, frames: int) -> tuple[Tensor, int]:
        x = layer.resample(x)
        if layer.mode == "downsample3d" and frames > 1:
            x_BCTHW = _unfold(x, frames)
            rest = F.conv3d(x_BCTHW, layer.time_conv.weight, layer.time_conv.bias, stride=(2, 1, 1))
            x, frames = _fold(torch.cat([x_BCTHW[:, :, :1], rest], dim=2))
        return x, frames


@torch.no_grad()
def start_as_a_crossfade(vae: AutoencoderKLWan) -> None:
    """Sets the temporal kernels so that a clip is a row of stills, four frames apart, and the decoder fades between.

    That is as far as a network trained on stills can get. Training on clips starts from it, not from noise in time.
    """
    for conv in vae.modules():
        if not isinstance(conv, nn.Conv3d) or conv.kernel_size[0] == 1:
            continue
        if conv.kernel_size == (3, 3, 3):
            conv.weight[:, :, :-1] = 0
            continue
        conv.weight.zero_()
        conv.bias.zero_()
        identity = torch.eye(conv.in_channels)
        if conv.out_channels == conv.in_channels:
            conv.weight[:, :, -1, 0, 0] = identity  # downsampling: keep the later of two frames
        else:
            # Upsampling: the first half of the channels is the earlier of two frames, halfway from the one before.
            conv.weight[: conv.in_channels, :, -1, 0, 0] = identity / 2
            conv.weight[: conv.in_channels, :, -2, 0, 0] = identity / 2
            conv.weight[conv.in_channels :, :, -1, 0, 0] = identity


def _channels_last(x_NCHW: Tensor) -> Tensor:
    return x_NCHW.contiguous(memory_format=torch.channels_last)


def _fold(x_BCTHW: Tensor) -> tuple[Tensor, int]:
    """(B, C, T, H, W) to (B T, C, H, W), channels last, and T. Free when the input is channels-last already."""
    return _channels_last(x_BCTHW.transpose(1, 2).flatten(0, 1)), x_BCTHW.shape[2]


def _unfold(x_NCHW: Tensor, frames: int) -> Tensor:
    return x_NCHW.unflatten(0, (-1, frames)).transpose(1, 2)


def _rms_norm(norm: nn.Module, x_NCHW: Tensor) -> Tensor:
    return F.normalize(x_NCHW, dim=1) * (norm.scale * norm.gamma.reshape(-1, 1, 1))


def _attend(attention: nn.Module, x_NCHW: Tensor) -> Tensor:
    height = x_NCHW.shape[-2]
    qkv = attention.to_qkv(_rms_norm(attention.norm, x_NCHW)).flatten(2).transpose(1, 2).unsqueeze(1)
    y = F.scaled_dot_product_attention(*qkv.chunk(3, dim=-1))
    y = _channels_last(y.squeeze(1).transpose(1, 2).unflatten(2, (height, -1)))
    return attention.proj(y) + x_NCHW
