"""From what a decoder returns to what a caller asked for, on the device, before anything moves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from decode_service.planning.plan import PixelFormat

# B batch, C channels, F pixel frames, H height, W width.

TORCH_DTYPES = {
    "uint8": torch.uint8,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


def convert(pixels_BCFHW: torch.Tensor, wanted: PixelFormat) -> torch.Tensor:
    """Pixels of ``wanted.dtype`` in its layout: uint8 is (B,F,H,W,C), floats are (B,C,F,H,W).

    uint8 is computed in float32 and rounded half to even, as diffusers' image processor does for float32 pixels.
    """
    if wanted.dtype != "uint8":
        return pixels_BCFHW.to(TORCH_DTYPES[wanted.dtype])
    unit = pixels_BCFHW.float().mul(0.5).add_(0.5).clamp_(0.0, 1.0)
    return unit.mul_(255.0).round_().to(torch.uint8).permute(0, 2, 3, 4, 1)


def pixel_shape(extents_BCFHW: Sequence[int], wanted: PixelFormat) -> tuple[int, ...]:
    """Shape of ``convert``'s result for pixels of these extents."""
    batch, channels, frames, height, width = extents_BCFHW
    if wanted.dtype == "uint8":
        return batch, frames, height, width, channels
    return batch, channels, frames, height, width


def axis_dim(axis: str, wanted: PixelFormat) -> int:
    """Dimension of the 5-D pixels that ``axis`` (batch, height or width) is."""
    if axis == "batch":
        return 0
    channels_last = wanted.dtype == "uint8"
    return {"height": 2, "width": 3}[axis] if channels_last else {"height": 3, "width": 4}[axis]


def to_numpy(pixels: torch.Tensor) -> np.ndarray:
    """The C-contiguous numpy array that carries ``pixels``; bfloat16 travels as uint16."""
    host = pixels.detach().contiguous().cpu()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(np.uint16)
    return host.numpy()


def from_carrier(carrier: np.ndarray, dtype_name: str) -> torch.Tensor:
    """A tensor with the values of a wire array (bfloat16 carried as uint16); always a copy, the array may be read-only.

    The tensor is contiguous, whatever the strides of the array.
    """
    if dtype_name == "bfloat16":
        return torch.from_numpy(carrier.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(carrier.copy())
