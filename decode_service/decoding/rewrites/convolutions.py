"""Causal convolutions: one frame as a 2-D convolution, and the frames before it without copies for padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from decode_service.decoding.dense_conv3d import dense_conv3d
from decode_service.decoding.rewrites.site import ClassSite, Site, random_input
from decode_service.decoding.rewrites.structure import CausalConvolution, DecoderStructure, SpatialPadding

# B batch, C channels, T frames, H height, W width.


class OneFrameConvolution:
    """A causal convolution over one frame with nothing before it, which is a 2-D convolution.

    Before the frame stand zeros, and the kernel's last temporal slice alone meets the frame; or the frame again, and the
    kernel's sum over time does. A kernel of three frames needs a third of the arithmetic.
    """

    # The 2-D weight is None where the convolution's own is one.
    _one_frame: tuple[torch.Tensor | None, SpatialPadding, nn.Conv2d | nn.Conv3d]

    def forward(self, x_BCTHW: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        prepared, padding, conv = self._one_frame
        weight = conv.weight if prepared is None else prepared
        cached = any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values()))
        # Another dtype: the model is cast up for this decode, and its own weights say it better.
        if x_BCTHW.shape[2] != 1 or cached or x_BCTHW.dtype != weight.dtype:
            output: torch.Tensor = super().forward(x_BCTHW, *args, **kwargs)  # type: ignore[misc]
            return output
        x_BCHW = x_BCTHW.squeeze(2)
        own = (padding.top, padding.left)
        if not padding.by_convolution:
            x_BCHW = F.pad(x_BCHW, (padding.left, padding.right, padding.top, padding.bottom), mode=padding.mode)
            own = (0, 0)
        y_BCHW = F.conv2d(x_BCHW, weight, conv.bias, conv.stride[-2:], own, conv.dilation[-2:], conv.groups)
        return y_BCHW.unsqueeze(2)


def one_frame_sites(decoder: nn.Module, structure: DecoderStructure) -> Iterator[Site]:
    for module, kind in _causal_convolutions(decoder, structure):
        conv = kind.conv(module)
        if conv.stride[0] != 1:
            continue
        weight: torch.Tensor | None = None
        if isinstance(conv, nn.Conv3d):
            # Copied: a slice of the 3-D weight would be put in order again at every call.
            if kind.front == "zeros":
                weight = conv.weight.detach()[:, :, -1]
            else:
                weight = conv.weight.detach().sum(2, dtype=torch.float32).to(conv.weight.dtype)
            weight = weight.clone(memory_format=torch.channels_last)
        calls = [_call(conv, frames=1)]
        yield ClassSite(module, OneFrameConvolution, calls, {"_one_frame": (weight, kind.padding(module), conv)})


class CausalInput:
    """A causal convolution whose input is put together once: zeros, the frames before, the frames.

    The module pads the joined frames in space by another copy; here the convolution does.
    """

    _causal_input: SpatialPadding
    weight: torch.Tensor
    bias: torch.Tensor | None
    kernel_size: tuple[int, int, int]
    stride: tuple[int, int, int]
    dilation: tuple[int, int, int]
    groups: int

    def forward(self, x_BCTHW: torch.Tensor, cache_BCTHW: torch.Tensor | None = None) -> torch.Tensor:
        padding, before = self._causal_input, self.kernel_size[0] - 1
        if before:
            parts = [x_BCTHW]
            if cache_BCTHW is not None:
                parts.insert(0, cache_BCTHW)
                before -= cache_BCTHW.shape[2]
            parts = [torch.zeros_like(x_BCTHW[:, :, :1])] * before + parts
            x_BCTHW = torch.cat(parts, dim=2) if len(parts) > 1 else x_BCTHW
        own = (0, padding.top, padding.left)
        return dense_conv3d(x_BCTHW, self.weight, self.bias, self.stride, own, self.dilation, self.groups)


def causal_input_sites(decoder: nn.Module, structure: DecoderStructure) -> Iterator[Site]:
    for module, kind in _causal_convolutions(decoder, structure):
        conv, padding = kind.conv(module), kind.padding(module)
        fits = kind.takes_cache and conv is module and kind.front == "zeros" and padding.by_convolution
        if not fits or conv.stride[0] != 1:
            continue
        calls = [_call(conv, frames=1)]
        if conv.kernel_size[0] > 1:
            # Caches of the first pass hold one frame, later ones as many as the kernel reaches back.
            calls += [_call(conv, frames=1, cached=1), _call(conv, frames=2, cached=conv.kernel_size[0] - 1)]
        yield ClassSite(module, CausalInput, calls, {"_causal_input": padding})


def _causal_convolutions(
    decoder: nn.Module, structure: DecoderStructure
) -> Iterator[tuple[nn.Module, CausalConvolution]]:
    for module in decoder.modules():
        for kind in structure.causal_convolutions:
            if isinstance(module, kind.module):
                yield module, kind


def _call(
    conv: nn.Conv2d | nn.Conv3d, *, frames: int, cached: int = 0
) -> Callable[[nn.Module, torch.Generator], torch.Tensor]:
    def call(module: nn.Module, generator: torch.Generator) -> torch.Tensor:
        x = random_input(conv, (1, conv.in_channels, frames, 3, 4), generator)
        arguments = (random_input(conv, (1, conv.in_channels, cached, 3, 4), generator),) if cached else ()
        output: torch.Tensor = module(x, *arguments)
        return output

    return call
