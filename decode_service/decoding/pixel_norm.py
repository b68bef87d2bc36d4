"""The RMS norm over channels of one position, in one pass over memory on the CPU.

``F.normalize`` and the products after it read and write a feature map seven times, several of them in float32 and across
the channels of a layout that keeps those apart: at 256x256 with 96 channels they cost five times the convolution that
follows. With the channels next to each other in memory a position is a row, and dividing rows by their norm is what
torch's kernel for weight normalization does in one pass, in float32 inside.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from decode_service.decoding.overridable import overridable
from decode_service.decoding.tracing import is_traced

# B batch, C channels, N positions (batch, frames, rows and columns).

#: ``F.normalize`` divides by no less than this.
EPSILON = 1e-12


def normalized_format(x: torch.Tensor) -> torch.memory_format:
    """The layout of ``pixel_rms_norm(x)``."""
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    if x.dtype == torch.float32 and (x.is_contiguous() or not x.is_contiguous(memory_format=last)):
        # float32 decoders keep that layout, whose convolutions round better; what upsampling in time has turned comes back to it.
        return torch.contiguous_format
    return last


@overridable
def pixel_rms_norm(
    x: torch.Tensor, scale: float, gamma_C: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``F.normalize(x, dim=1) * scale * gamma``.

    Args:
        x: (B,C,...), 4-D or 5-D.
        scale: the square root of the number of channels.
        gamma_C: the learnt factor of every channel.
        out: of the shape and dtype of ``x``, in any layout; where the result is written to, and nothing else of its memory.

    Returns:
        ``out``, or a new tensor of the shape and dtype of ``x``, in memory channels last, or contiguous in float32 unless ``x`` is
        channels last. Nothing else holds that, so that an activation may write over it.
    """
    if normalized_format(x) == torch.contiguous_format:
        x = x.contiguous()
        # The norm over channels, a kernel for any exponent, takes three times as long as squares and their sum. A factor for
        # each position instead of one for each channel rounds better.
        norms = x.square().sum(1, keepdim=True).sqrt_().clamp_min_(EPSILON)
        return torch.div(x, norms.div_(scale), out=out).mul_(gamma_C.view(-1, *[1] * (x.dim() - 2)))
    rows_last = x.movedim(1, -1).contiguous()
    rows_NC = rows_last.view(-1, x.shape[1])
    if is_traced(x) or x.device.type != "cpu":
        # A compiler fuses the formula by itself; the kernel is chosen for the CPU.
        normalized_NC = F.normalize(rows_NC.float(), dim=1).to(x.dtype)
    else:
        normalized_NC, norms_N1 = torch._weight_norm_interface(rows_NC, rows_NC.new_ones(rows_NC.shape[0], 1), 0)
        if norms_N1.amin() < EPSILON:
            # Rows of zeros, which the kernel would divide by zero.
            normalized_NC = F.normalize(rows_NC.float(), dim=1).to(x.dtype)
    normalized, rows = normalized_NC.view(rows_last.shape), None if out is None else out.movedim(1, -1)
    if x.dtype == torch.float32:
        normalized = torch.mul(normalized, gamma_C * scale, out=normalized if rows is None else rows)
    else:
        # Both factors in one pass, multiplied in float32 and rounded once: their product, rounded to half precision
        # beforehand, would be off by the same amount at every position.
        normalized = torch.addcmul(normalized.new_zeros(()), normalized, gamma_C, value=scale, out=rows)
    return normalized.movedim(-1, 1) if out is None else out
