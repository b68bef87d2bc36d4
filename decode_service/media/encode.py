"""Decoded pixels to one file of the asked format. Blocking: call it in a thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decode_service.media.formats import check_installed, check_output, file_format
from decode_service.media.images import encode_jpeg, encode_png, encode_webp
from decode_service.media.video import DEFAULT_CODEC, encode_mp4


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """A finished file.

    Attributes:
        data: its bytes.
        media_type: for ``Content-Type``.
        extension: of a file name, with its dot.
        details: what was written, in one line, for video; None for images.
    """

    data: bytes
    media_type: str
    extension: str
    details: str | None = None


def encode(
    name: str,
    pixels: np.ndarray,
    *,
    fps: float | None = None,
    quality: int | None = None,
    codec: str = DEFAULT_CODEC,
) -> EncodedFile:
    """Encode ``pixels`` as format ``name``.

    Args:
        name: ``png``, ``jpeg``, ``webp`` or ``mp4``.
        pixels: uint8 [H,W,C], [F,H,W,C] or [B,F,H,W,C] (a batch of images [B,H,W,C] reads as frames).
        fps: frames per second, for mp4; 16 if None.
        quality: 1 to 100, for jpeg, webp (100 is lossless) and mp4; None takes the format's default.
        codec: FFmpeg name of the H.264 encoder, for mp4.

    Raises:
        UnsupportedOutputError: the format cannot hold the pixels, or its library is not installed.
    """
    target = file_format(name)
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4, 5):
        raise ValueError(f"pixels must be uint8 with 3 to 5 dimensions, got {pixels.dtype} {list(pixels.shape)}")
    batch = pixels.shape[0] if pixels.ndim == 5 else 1
    frames = 1 if pixels.ndim == 3 else pixels.shape[-4]
    height, width, channels = pixels.shape[-3:]
    check_output(name, batch=batch, frames=frames, height=height, width=width, channels=channels)
    check_installed(name)
    pixels_FHWC = pixels.reshape(frames, height, width, channels)
    if name == "mp4":
        video = encode_mp4(pixels_FHWC, fps, quality, codec)
        return EncodedFile(video.data, target.media_type, target.extension, video.details)
    if name == "png":
        data = encode_png(pixels_FHWC[0])
    elif name == "jpeg":
        data = encode_jpeg(pixels_FHWC[0], quality)
    else:
        data = encode_webp(pixels_FHWC[0], quality)
    return EncodedFile(data, target.media_type, target.extension)
