"""One picture to PNG, JPEG or WebP, with Pillow.

Pixels are uint8 [H,W,C] with C = 3, or 4 with alpha (PNG and WebP). No function resizes: a 253 pixels wide picture
stays 253 pixels wide.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

JPEG_QUALITY = 95
WEBP_QUALITY = 95


def encode_png(pixels_HWC: np.ndarray) -> bytes:
    """Lossless. zlib level 1: level 6 takes four times as long, more than many a decode, for files a tenth smaller."""
    return _save(pixels_HWC, "PNG", compress_level=1)


def encode_jpeg(pixels_HWC: np.ndarray, quality: int | None = None) -> bytes:
    """JPEG of ``quality`` 1 to 100 (95 if None), with full colour resolution (4:4:4).

    Libraries halve the colour resolution by default, which smears saturated edges: visible in generated pictures.
    """
    return _save(pixels_HWC, "JPEG", quality=JPEG_QUALITY if quality is None else quality, subsampling="4:4:4")


def encode_webp(pixels_HWC: np.ndarray, quality: int | None = None) -> bytes:
    """WebP of ``quality`` 1 to 99 (95 if None), or lossless at 100.

    Effort is the lowest: the next steps cost two to ten times the time and save a few per cent.
    """
    if quality == 100:
        # In lossless mode Pillow's quality is effort. exact keeps the colour of fully transparent pixels.
        return _save(pixels_HWC, "WEBP", lossless=True, quality=0, method=0, exact=True)
    return _save(pixels_HWC, "WEBP", quality=WEBP_QUALITY if quality is None else quality, method=0)


def _save(pixels_HWC: np.ndarray, pillow_format: str, **options: Any) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels_HWC)).save(buffer, pillow_format, **options)
    return buffer.getvalue()
