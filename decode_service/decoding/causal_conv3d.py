"""A 3-D convolution of frames that come in parts: zeros, the frames before, the frames themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode_service.decoding.dense_convolution import dense_conv2d, dense_conv3d
from decode_service.decoding.overridable import overridable

# B batch, C channels, T frames, H height, W width, O output channels.


@overridable
def causal_conv3d(
    parts_BCTHW: Sequence[torch.Tensor],
    weight_OCTHW: torch.Tensor,
    flat_weight: torch.Tensor | None,
    bias_O: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """``F.conv3d`` of the parts joined along T; under the halo rule it means what that means.

    A function of its own because of that rule: bands and their neighbours' rows are put together in one copy, too.

    Args:
        flat_weight: the kernel with its frames side by side in the channels (O,TC,H,W), with which the convolution runs in
            2-D; or None. It has to have one item, and no stride or dilation in time, then.
        padding: in time, height and width; in time it is zero.
    """
    parts = list(parts_BCTHW)
    if flat_weight is None:
        x_BCTHW = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
        return dense_conv3d(x_BCTHW, weight_OCTHW, bias_O, stride, padding, dilation, groups)
    frames = [frame for part in parts for frame in part.unbind(2)]
    reach = weight_OCTHW.shape[2]
    windows = [torch.cat(frames[start : start + reach], dim=1) for start in range(len(frames) - reach + 1)]
    x_TCHW = torch.cat(windows, dim=0) if len(windows) > 1 else windows[0]
    y_TCHW = dense_conv2d(x_TCHW, flat_weight, bias_O, stride[1:], padding[1:], dilation[1:], groups)
    return y_TCHW.unsqueeze(0).transpose(1, 2)
