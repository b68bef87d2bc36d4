"""A norm and the SiLU after it as one function, in one pass over channels-last memory where Triton runs.

Eager decodes on CUDA, and so all that are divided between ranks, otherwise read and write a feature map once more for the SiLU and
several times for the norm: that is most of their time outside convolutions. On the CPU the same functions are torch
operations, the reference that the kernels are tested against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from decode_service.decoding.group_norm import group_moments
from decode_service.decoding.overridable import overridable
from decode_service.decoding.pixel_norm import EPSILON
from decode_service.decoding.tracing import is_traced

# B batch, C channels, G groups.

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def fuses(x: torch.Tensor) -> bool:
    """Whether the functions of this module take ``x``: 4-D or 5-D, its channels last in memory, and followed by no compiler."""
    return (
        not is_traced(x)
        and x.dim() in (4, 5)
        and x.dtype in _DTYPES
        and x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    )


@overridable
def silu_over(x: torch.Tensor) -> torch.Tensor:
    """``silu(x)``, written over ``x`` or, under the halo rule, to where the convolution after it wants it: ``x`` is gone."""
    return F.silu(x, inplace=True)


@overridable
def rms_norm_silu(x: torch.Tensor, scale: float, gamma_C: torch.Tensor) -> torch.Tensor:
    """``silu(F.normalize(x, dim=1) * scale * gamma)``, computed in float32 and rounded once.

    Args:
        x: (B,C,...) that ``fuses``.
        scale: the square root of the number of channels.
        gamma_C: the learnt factor of every channel.

    Returns:
        A new tensor of the shape, dtype and layout of ``x``.
    """
    if x.device.type == "cuda":
        # Here, because nothing but this needs Triton, which is no part of torch for the CPU.
        from decode_service.decoding import triton_kernels

        return triton_kernels.rms_norm_silu(x, scale, gamma_C, EPSILON)
    factor = (gamma_C.float() * scale).view(-1, *[1] * (x.dim() - 2))
    return F.silu(F.normalize(x.float(), dim=1, eps=EPSILON).mul_(factor), inplace=True).to(x.dtype)


@overridable
def group_norm_silu(
    x: torch.Tensor, groups: int, weight_C: torch.Tensor, bias_C: torch.Tensor, eps: float
) -> torch.Tensor:
    """``silu(F.group_norm(x, groups, weight, bias, eps))`` of ``x`` (B,C,...) that ``fuses``; under the halo rule of all bands."""
    return normalize_groups_silu(x, *group_moments(x, groups), weight_C, bias_C, eps)


def normalize_groups_silu(
    x: torch.Tensor,
    mean_BG: torch.Tensor,
    variance_BG: torch.Tensor,
    weight_C: torch.Tensor,
    bias_C: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The SiLU of ``group_norm`` of ``x`` with statistics that are known, computed in float32 and rounded once.

    Args:
        x: (B,C,...) that ``fuses``.
        mean_BG, variance_BG: of every group of neighbouring channels, float32.

    Returns:
        A new tensor of the shape, dtype and layout of ``x``.
    """
    per_group = x.shape[1] // mean_BG.shape[1]
    mean_BC, deviation_BC = (
        values.float().repeat_interleave(per_group, 1) for values in (mean_BG, torch.rsqrt(variance_BG + eps))
    )
    factor_BC = deviation_BC * weight_C.float()
    if x.device.type == "cuda":
        from decode_service.decoding import triton_kernels

        return triton_kernels.scaled_silu(x, mean_BC, factor_BC, bias_C.float())
    ones = [1] * (x.dim() - 2)
    mean, factor = (values.view(*values.shape, *ones) for values in (mean_BC, factor_BC))
    normalized = (x.float() - mean).mul_(factor).add_(bias_C.float().view(1, -1, *ones))
    return F.silu(normalized, inplace=True).to(x.dtype)
