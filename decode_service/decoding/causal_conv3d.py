"""3-D convolutions of frames that come in parts: zeros, the frames before, the frames themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from decode_service.decoding.dense_convolution import dense_conv2d, dense_conv3d
from decode_service.decoding.overridable import overridable

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
    reach = kernel.flat_weight.shape[1] // frames[0].shape[1]
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
    return causal_conv3d([*front(real, kernel), *real], kernel), last_frames(real, kernel.weight_OCTHW.shape[2] - 1)


def front(parts_BCTHW: Sequence[torch.Tensor], kernel: CausalKernel) -> list[torch.Tensor]:
    """The zeros that stand before ``parts``, of which the last are the frames to be convolved."""
    flat, x_BCTHW = kernel.flat_weight, parts_BCTHW[-1]
    reach = kernel.weight_OCTHW.shape[2] if flat is None else flat.shape[1] // x_BCTHW.shape[1]
    missing = reach - 1 - sum(part.shape[2] for part in parts_BCTHW[:-1])
    return [torch.zeros_like(parts_BCTHW[0][:, :, :1])] * missing


def last_frames(parts_BCTHW: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """A copy of the last ``count`` frames of ``parts``, or of all where there are fewer."""
    x_BCTHW = parts_BCTHW[-1][:, :, -count:]
    missing = count - x_BCTHW.shape[2]
    if missing and len(parts_BCTHW) > 1:
        return torch.cat([last_frames(parts_BCTHW[:-1], missing), x_BCTHW], dim=2)
    return x_BCTHW.clone()
