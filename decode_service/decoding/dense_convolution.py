"""Convolutions with a say in the kernel that they take on the CPU; elsewhere, and for compilers, those of torch.

A weight that is kept in a kernel's own order is used so (``packed_weights``). And in float32 on the CPU, for one item whose
batch x channels x frames x rows are at most 20480, PyTorch (2.13, ``use_mkldnn`` in ATen's Convolution.cpp) writes the operand
of a 3-D convolution out for a matrix product, whatever the layout. That took 2 to 5 times as long as oneDNN on operands of
narrow models and small frames, and is a few microseconds faster on the smallest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from decode_service.decoding.overridable import overridable
from decode_service.decoding.packed_weights import packed_convolution, packed_convolution_transpose
from decode_service.decoding.tracing import is_traced

# B batch, C channels, T frames, H height, W width, O output channels.

_SLOW_UP_TO = 20480
_TINY = 2048


@overridable
def dense_conv2d(
    x_BCHW: torch.Tensor,
    weight_OCHW: torch.Tensor,
    bias_O: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """``F.conv2d``; under the halo rule it means what that means."""
    if x_BCHW.device.type == "cpu" and not is_traced(x_BCHW):
        output = packed_convolution(x_BCHW, weight_OCHW, bias_O, stride, padding, dilation, groups)
        if output is not None:
            return output
    return F.conv2d(x_BCHW, weight_OCHW, bias_O, stride, padding, dilation, groups)


@overridable
def dense_conv3d(
    x_BCTHW: torch.Tensor,
    weight_OCTHW: torch.Tensor,
    bias_O: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """``F.conv3d``; under the halo rule it means what that means."""
    if x_BCTHW.device.type == "cpu" and not is_traced(x_BCTHW):
        output = packed_convolution(x_BCTHW, weight_OCTHW, bias_O, stride, padding, dilation, groups)
        if output is None and x_BCTHW.dtype == torch.float32 and _is_slow(x_BCTHW, weight_OCTHW):
            output = torch.mkldnn_convolution(
                x_BCTHW, weight_OCTHW, bias_O, list(padding), list(stride), list(dilation), groups
            )
        if output is not None:
            return output
    return F.conv3d(x_BCTHW, weight_OCTHW, bias_O, stride, padding, dilation, groups)


@overridable
def dense_conv_transpose2d(
    x_BCHW: torch.Tensor,
    weight_COHW: torch.Tensor,
    bias_O: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
) -> torch.Tensor:
    """``F.conv_transpose2d``; under the halo rule it means what that means."""
    if x_BCHW.device.type == "cpu" and not is_traced(x_BCHW):
        output = packed_convolution_transpose(x_BCHW, weight_COHW, bias_O, stride, padding)
        if output is not None:
            return output
    return F.conv_transpose2d(x_BCHW, weight_COHW, bias_O, stride, padding)


def _is_slow(x_BCTHW: torch.Tensor, weight_OCTHW: torch.Tensor) -> bool:
    """Whether torch would not take oneDNN's kernel for a float32 operand that is worth it."""
    batch, channels, frames, height, width = x_BCTHW.shape
    slow = batch == 1 and channels * frames * height <= _SLOW_UP_TO
    worth_it = channels * frames * height * width > _TINY and weight_OCTHW.shape[-1] > 1
    return slow and worth_it and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
