"""Norm and SiLU in one pass over channels-last memory, for CUDA. Needs Triton, which torch for CUDA brings along.

With the channels next to each other a position is a row of memory. Everything is computed in float32 and rounded once. What the
kernels compute is written in ``norm_activation``, as torch operations. They have been run by Triton's
interpreter, and compiled for devices, but not run on one yet.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl

# B batch, C channels, N positions (frames, rows and columns).

#: Elements of the block of one program, and channels of the widest position that one program can hold.
BLOCK = 4096
MOST_CHANNELS = 8192


@triton.jit
def _rms_norm_silu(x, gamma_C, y, positions, channels, scale, eps, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    # 64 bits: a feature map may have more than 2^31 elements.
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    inside = (n[:, None] < positions) & (c[None, :] < channels)
    offsets = n[:, None] * channels + c[None, :]
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    norm = tl.sqrt(tl.sum(values * values, axis=1))
    # A norm that is not a number must stay none, or the picture would be finite.
    norm = tl.where(norm < eps, eps, norm)
    gamma = tl.load(gamma_C + c, mask=c < channels, other=0.0).to(tl.float32) * scale
    normalized = values / norm[:, None] * gamma[None, :]
    activated = normalized / (1.0 + tl.exp(-normalized))
    tl.store(y + offsets, activated.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_silu(  # type: ignore[no-untyped-def]
    x, mean_BC, factor_BC, bias_C, y, positions, channels, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    item = tl.program_id(2).to(tl.int64)
    known = c < channels
    inside = (n[:, None] < positions) & known[None, :]
    offsets = (item * positions + n[:, None]) * channels + c[None, :]
    mean = tl.load(mean_BC + item * channels + c, mask=known, other=0.0)
    factor = tl.load(factor_BC + item * channels + c, mask=known, other=0.0)
    bias = tl.load(bias_C + c, mask=known, other=0.0)
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    normalized = (values - mean[None, :]) * factor[None, :] + bias[None, :]
    activated = normalized / (1.0 + tl.exp(-normalized))
    tl.store(y + offsets, activated.to(y.dtype.element_ty), mask=inside)


def rms_norm_silu(x: torch.Tensor, scale: float, gamma_C: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``norm_activation.rms_norm_silu``.

    Args:
        x: (B,C,...), dense with the channels last.

    Raises:
        ValueError: it is not, or has more than ``MOST_CHANNELS``.
    """
    channels = x.shape[1]
    if channels > MOST_CHANNELS:
        raise ValueError(f"a position of {channels} channels does not fit one program of at most {MOST_CHANNELS}")
    rows = _rows(x)
    out = torch.empty_like(rows)
    positions = rows.numel() // max(1, channels)
    if rows.numel():
        block_c = triton.next_power_of_2(channels)
        block_n = max(1, BLOCK // block_c)
        with _on_device_of(x):
            _rms_norm_silu[(triton.cdiv(positions, block_n),)](
                rows, gamma_C.contiguous(), out, positions, channels, scale, eps, BLOCK_N=block_n, BLOCK_C=block_c
            )
    return out.movedim(-1, 1)


def scaled_silu(x: torch.Tensor, mean_BC: torch.Tensor, factor_BC: torch.Tensor, bias_C: torch.Tensor) -> torch.Tensor:
    """``silu((x - mean) * factor + bias)``, of the dtype of ``x``.

    Args:
        x: (B,C,...), dense with the channels last.
        mean_BC, factor_BC, bias_C: float32.

    Raises:
        ValueError: ``x`` is not.
    """
    rows = _rows(x)
    out = torch.empty_like(rows)
    batch, channels = x.shape[:2]
    if rows.numel():
        positions = rows.numel() // (batch * channels)
        block_c = min(triton.next_power_of_2(channels), 256)
        block_n = max(1, BLOCK // block_c)
        with _on_device_of(x):
            _scaled_silu[(triton.cdiv(positions, block_n), triton.cdiv(channels, block_c), batch)](
                rows,
                mean_BC.contiguous(),
                factor_BC.contiguous(),
                bias_C.contiguous(),
                out,
                positions,
                channels,
                BLOCK_N=block_n,
                BLOCK_C=block_c,
            )
    return out.movedim(-1, 1)


def _rows(x: torch.Tensor) -> torch.Tensor:
    rows = x.movedim(1, -1)
    if not rows.is_contiguous():
        raise ValueError(f"the channels of {list(x.shape)} with strides {list(x.stride())} are not last in memory")
    return rows


def _on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
