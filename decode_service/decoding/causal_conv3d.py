"""3-D convolutions of frames that come in parts: zeros, the frames before, the frames themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from decode_service.decoding.dense_convolution import dense_conv2d, dense_conv3d
from decode_service.decoding.overridable import overridable
from decode_service.decoding.pixel_norm import normalized_format, pixel_rms_norm

# B batch, C channels, T frames, H height, W width, O output channels.


class CausalKernel(NamedTuple):
    """What a causal convolution convolves with.

    Attributes:
        weight_OCTHW: its weight.
        flat_weight: the kernel with its frames side by side in the channels (O,TC,H,W), with which the convolution runs in 2-D; or
            None. It has to have one group, the operand one item, and neither a stride or dilation in time, then. Of the kernel's
            frames it may have the last ones only.
        bias_O: its bias, or None.
        stride, padding, dilation: in time, height and width; in time the padding is zero.
        groups: of channels.
    """

    weight_OCTHW: torch.Tensor
    flat_weight: torch.Tensor | None
    bias_O: torch.Tensor | None
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


@overridable
def causal_conv3d(parts_BCTHW: Sequence[torch.Tensor], kernel: CausalKernel) -> torch.Tensor:
    """``F.conv3d`` of the parts joined along T; under the halo rule it means what that means.

    A function of its own because of that rule: bands and their neighbours' rows are put together in one copy, too.
    """
    parts = list(parts_BCTHW)
    if kernel.flat_weight is None:
        x_BCTHW = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
        return dense_conv3d(
            x_BCTHW, kernel.weight_OCTHW, kernel.bias_O, kernel.stride, kernel.padding, kernel.dilation, kernel.groups
        )
    frames = [frame for part in parts for frame in part.unbind(2)]
    reach = _reach(kernel, parts[0])
    windows = [torch.cat(frames[start : start + reach], dim=1) for start in range(len(frames) - reach + 1)]
    x_TCHW = torch.cat(windows, dim=0) if len(windows) > 1 else windows[0]
    y_TCHW = dense_conv2d(
        x_TCHW,
        kernel.flat_weight,
        kernel.bias_O,
        kernel.stride[1:],
        kernel.padding[1:],
        kernel.dilation[1:],
        kernel.groups,
    )
    return y_TCHW.unsqueeze(0).transpose(1, 2)


@overridable
def continued_conv3d(
    before_BCTHW: torch.Tensor | None, x_BCTHW: torch.Tensor, kernel: CausalKernel
) -> tuple[torch.Tensor, torch.Tensor]:
    """``causal_conv3d`` of ``x`` after the frames before it, and what the frames after it are to be given.

    Args:
        before_BCTHW: what the call before gave; None where there was none. What it holds is up to this function: under the halo
            rule, frames with the neighbours' rows, so that these travel once. Fewer frames than the kernel looks back at are
            preceded by zeros.

    Returns:
        The output, as many frames as ``x`` has, and the frames for the next call: as many as the kernel looks back at, or all that
        there were.
    """
    real = [x_BCTHW] if before_BCTHW is None else [before_BCTHW, x_BCTHW]
    return causal_conv3d([*front(real, kernel), *real], kernel), last_frames(real, seen_again(real, kernel))


class ChannelNorm(NamedTuple):
    """What ``pixel_rms_norm`` normalizes with: the root of the number of channels, and their learnt factors."""

    scale: float
    gamma_C: torch.Tensor

    def activated(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The SiLU of ``x``, normalized: a new tensor, or ``out``."""
        return F.silu(pixel_rms_norm(x, self.scale, self.gamma_C, out), inplace=True)


@overridable
def activated_conv3d(
    before_BCTHW: torch.Tensor | None, x_BCTHW: torch.Tensor, norm: ChannelNorm, kernel: CausalKernel
) -> tuple[torch.Tensor, torch.Tensor]:
    """``continued_conv3d`` of what ``norm`` makes of ``x``, which is written to where the convolution takes it."""
    if not takes_joined(kernel, x_BCTHW):
        return continued_conv3d(before_BCTHW, norm.activated(x_BCTHW), kernel)
    real = [x_BCTHW] if before_BCTHW is None else [before_BCTHW, x_BCTHW]
    parts = [*front(real, kernel), *real]
    shape, dtype, device = list(x_BCTHW.shape), x_BCTHW.dtype, x_BCTHW.device
    shape[2] = sum(part.shape[2] for part in parts)
    joined = torch.empty(shape, dtype=dtype, device=device, memory_format=normalized_format(x_BCTHW))
    *places, own = joined.split([part.shape[2] for part in parts], 2)
    for place, part in zip(places, parts, strict=False):
        place.copy_(part)
    norm.activated(x_BCTHW, own)
    return causal_conv3d([joined], kernel), last_frames([joined], seen_again(real, kernel))


def front(parts_BCTHW: Sequence[torch.Tensor], kernel: CausalKernel) -> list[torch.Tensor]:
    """The zeros that stand before ``parts``, of which the last are the frames to be convolved."""
    missing = _reach(kernel, parts_BCTHW[-1]) - 1 - sum(part.shape[2] for part in parts_BCTHW[:-1])
    return [torch.zeros_like(parts_BCTHW[0][:, :, :1])] * missing


def seen_again(parts_BCTHW: Sequence[torch.Tensor], kernel: CausalKernel) -> int:
    """How many frames of ``parts`` the frames after them are convolved with."""
    return min(kernel.weight_OCTHW.shape[2] - 1, sum(part.shape[2] for part in parts_BCTHW))


def takes_joined(kernel: CausalKernel, x_BCTHW: torch.Tensor) -> bool:
    """Whether the convolution takes frames one after the other, and not side by side in the channels."""
    return kernel.flat_weight is None or _reach(kernel, x_BCTHW) == 1


def _reach(kernel: CausalKernel, x_BCTHW: torch.Tensor) -> int:
    """Frames that one frame of the output is made of."""
    flat = kernel.flat_weight
    return kernel.weight_OCTHW.shape[2] if flat is None else flat.shape[1] // x_BCTHW.shape[1]


def last_frames(parts_BCTHW: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """A copy of the last ``count`` frames of ``parts``, which have as many."""
    length = parts_BCTHW[-1].shape[2]
    x_BCTHW = parts_BCTHW[-1][:, :, max(0, length - count) :]
    missing = count - x_BCTHW.shape[2]
    return torch.cat([last_frames(parts_BCTHW[:-1], missing), x_BCTHW], dim=2) if missing else x_BCTHW.clone()
