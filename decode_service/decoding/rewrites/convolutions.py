"""Causal convolutions: one frame as a 2-D convolution, and the frames before it without copies for padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from decode_service.decoding.causal_conv3d import (
    CausalKernel,
    ChannelNorm,
    activated_conv3d,
    causal_conv3d,
    continued_conv3d,
    front,
)
from decode_service.decoding.dense_convolution import dense_conv2d
from decode_service.decoding.rewrites.site import ClassSite, Site, random_input
from decode_service.decoding.rewrites.structure import CausalConvolution, DecoderStructure, SpatialPadding

# B batch, C channels, T frames, H height, W width, O output channels.

#: Input channels from which a 3-D convolution in bfloat16 runs in 2-D.
WIDE = 512


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
        own = (padding.top, padding.left)
        if not padding.by_convolution:
            # Before the frame becomes a picture: under the halo rule the neighbours' rows may have come with the norm before.
            sides = (padding.left, padding.right, padding.top, padding.bottom, 0, 0)
            x_BCTHW, own = F.pad(x_BCTHW, sides, mode=padding.mode), (0, 0)
        x_BCHW = x_BCTHW.squeeze(2)
        y_BCHW = dense_conv2d(x_BCHW, weight, conv.bias, conv.stride[-2:], own, conv.dilation[-2:], conv.groups)
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
            last = structure.keeps_channels_last(weight.dtype)
            weight = weight.clone(memory_format=torch.channels_last if last else torch.contiguous_format)
        calls = [_call(conv, frames=1)]
        yield ClassSite(module, OneFrameConvolution, calls, {"_one_frame": (weight, kind.padding(module), conv)})


class CausalInput:
    """A causal convolution whose input is put together once: zeros, the frames before, the frames.

    The module pads the joined frames in space by another copy; here the convolution does.

    Wide convolutions in bfloat16 run in 2-D: each frame and the two before it side by side in the channels, so that all
    products are still summed in one go. On a CPU with AMX, oneDNN's 3-D convolution of 512 and more channels takes up to 2.9
    times as long as that, and 0.7 to 0.9 times as long for fewer.
    """

    # The second is the kernel with its frames side by side in the channels, (O, 3C, H, W), or None.
    _causal_input: tuple[SpatialPadding, torch.Tensor | None]
    weight: torch.Tensor
    bias: torch.Tensor | None
    kernel_size: tuple[int, int, int]
    stride: tuple[int, int, int]
    dilation: tuple[int, int, int]
    groups: int

    def forward(self, x_BCTHW: torch.Tensor, cache_BCTHW: torch.Tensor | None = None) -> torch.Tensor:
        parts = [x_BCTHW] if cache_BCTHW is None or self.kernel_size[0] == 1 else [cache_BCTHW, x_BCTHW]
        kernel = self._kernel(x_BCTHW, self._causal_input[1])
        return causal_conv3d([*front(parts, kernel), *parts], kernel)

    def continued(
        self, before_BCTHW: torch.Tensor | None, x_BCTHW: torch.Tensor, norm: ChannelNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``continued_conv3d``, or ``activated_conv3d`` if there is a norm, by a 2-D convolution where that does."""
        flat_weight = self._causal_input[1]
        if before_BCTHW is None and x_BCTHW.shape[2] == 1:
            flat_weight = getattr(self, "_one_frame", (None,))[0]
        kernel = self._kernel(x_BCTHW, flat_weight)
        if norm is None:
            return continued_conv3d(before_BCTHW, x_BCTHW, kernel)
        return activated_conv3d(before_BCTHW, x_BCTHW, norm, kernel)

    def _kernel(self, x_BCTHW: torch.Tensor, flat_weight: torch.Tensor | None) -> CausalKernel:
        # Of another dtype: the model is cast up for this decode. And several items may not be joined with their frames.
        if flat_weight is not None and (flat_weight.dtype != x_BCTHW.dtype or x_BCTHW.shape[0] > 1):
            flat_weight = None
        padding = self._causal_input[0]
        own = (0, padding.top, padding.left)
        return CausalKernel(self.weight, flat_weight, self.bias, self.stride, own, self.dilation, self.groups)


class _CausalInputSite(ClassSite):
    """A causal convolution whose weight, if it is used in two forms, is kept once: one form is a view of the other."""

    def __init__(self, conv: nn.Conv3d, padding: SpatialPadding, calls: Sequence[Callable[..., torch.Tensor]]) -> None:
        self._conv = conv
        self._weight = conv.weight.data
        flat: torch.Tensor | None = None
        if conv.weight.dtype == torch.bfloat16 and conv.weight.device.type == "cpu" and _is_wide(conv):
            memory_OHWTC = self._weight.permute(0, 3, 4, 2, 1).contiguous()
            self._viewed = memory_OHWTC.permute(0, 4, 3, 1, 2)
            flat = memory_OHWTC.flatten(3).permute(0, 3, 1, 2)
        self._flat = flat
        super().__init__(conv, CausalInput, calls, {"_causal_input": (padding, flat)})

    def install(self) -> None:
        super().install()
        if self._flat is not None:
            self._conv.weight.data = self._viewed

    def undo(self) -> None:
        super().undo()
        self._conv.weight.data = self._weight


def _is_wide(conv: nn.Conv3d) -> bool:
    return conv.in_channels >= WIDE and conv.kernel_size == (3, 3, 3) and conv.groups == 1 and conv.dilation[0] == 1


def causal_input_sites(decoder: nn.Module, structure: DecoderStructure) -> Iterator[Site]:
    for module, kind in _causal_convolutions(decoder, structure):
        conv, padding = kind.conv(module), kind.padding(module)
        fits = kind.takes_cache and conv is module and kind.front == "zeros" and padding.by_convolution
        if not fits or not isinstance(conv, nn.Conv3d) or conv.stride[0] != 1:
            continue
        calls = [_call(conv, frames=1)]
        if conv.kernel_size[0] > 1:
            # Caches of the first pass hold one frame, later ones as many as the kernel reaches back.
            calls += [_call(conv, frames=1, cached=1), _call(conv, frames=2, cached=conv.kernel_size[0] - 1)]
        yield _CausalInputSite(conv, padding, calls)


def prepared_weights(decoder: nn.Module) -> Iterator[torch.Tensor]:
    """The weights of 2-D convolutions that the rewrites of this module have made."""
    for module in decoder.modules():
        attributes = vars(module)
        for weight in (attributes.get("_one_frame", (None,))[0], attributes.get("_causal_input", (None, None))[1]):
            if weight is not None:
                yield weight


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
