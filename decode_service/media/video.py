"""Frames to MP4 (H.264), in memory, with PyAV.

Licence note: PyAV itself is BSD, but its wheels bundle libx264, which is GPL (or needs a commercial licence). Who ships
a product with it must check that; ``codec`` takes any other H.264 encoder of the installed FFmpeg (``h264_nvenc``, ``h264_qsv``, ...).

Size: the video has exactly the decoded size. Tools that round up to 16 pixel macro-blocks resize silently. 4:2:0 colour needs
even sides, so a picture with an odd side is written with full colour resolution (yuv444p, High 4:4:4 profile), which
FFmpeg-based players show and some hardware decoders and browsers do not; the reply says which one was written.

Colour: converted with the BT.709 matrix to limited range, and tagged as such (matrix, primaries, transfer, range). FFmpeg's
defaults would convert with BT.601 and tag nothing, and players then guess BT.709 for large pictures: red turns orange.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, cast

import numpy as np

from decode_service.errors import InvalidRequestError, UnsupportedOutputError

if TYPE_CHECKING:
    from av import VideoStream

DEFAULT_FPS = 16.0
DEFAULT_CODEC = "libx264"
DEFAULT_CRF = 18
MAX_FPS = 1000.0

_X264_OPTIONS = {
    # Measured on 33 noisy frames of 832x480: 1.2 s, and 4.6 s with "medium", for files no larger at the same CRF.
    "preset": "veryfast",
    # Without it the same frames give other bytes now and then: x264's AVX code for macro-block trees depends on what memory
    # held before (seen in 30 of 80 runs, with one thread too; in none of 80 with it). It costs no time.
    "x264-params": "cpu-independent=1",
}


@dataclass(frozen=True, slots=True)
class EncodedVideo:
    """An MP4 file.

    Attributes:
        data: the file.
        details: codec, pixel format, matrix, size, frames and rate in one line, for people and the reply's header.
    """

    data: bytes
    details: str


def crf(quality: int | None) -> int:
    """x264's constant rate factor for ``quality`` 1 to 100: ``1 + (100 - quality) / 2``, and 18 if None.

    100 is CRF 1 (CRF 0 would switch to a lossless profile that hardly any player takes), 66 is CRF 18 (differences are hardly
    visible), 50 is CRF 26, 1 is CRF 50.
    """
    return DEFAULT_CRF if quality is None else 1 + (100 - quality) // 2


def frame_rate(fps: float | None) -> Fraction:
    """``fps`` as the exact rational rate that containers store; 16 if None.

    Rates of television such as 23.976 or 29.97 become 24000/1001 and 30000/1001.

    Raises:
        InvalidRequestError: ``fps`` is not above 0 and at most 1000.
    """
    fps = DEFAULT_FPS if fps is None else fps
    if not 0 < fps <= MAX_FPS:
        raise InvalidRequestError(f"fps must be above 0 and at most {MAX_FPS:g}, got {fps:g}", param="output.fps")
    whole = round(fps)
    if abs(fps - whole) > 1e-6:
        television = Fraction(round(fps * 1.001) * 1000, 1001)
        # People write these rates with two or three decimals.
        if fps > 10 and abs(fps - television) < 0.006:
            return television
    return max(Fraction(fps).limit_denominator(1001), Fraction(1, 1001))


def encode_mp4(
    pixels_FHWC: np.ndarray,
    fps: float | None = None,
    quality: int | None = None,
    codec: str = DEFAULT_CODEC,
) -> EncodedVideo:
    """Encode frames; the same frames and options give the same bytes.

    Args:
        pixels_FHWC: uint8 [F,H,W,3], at least one frame.
        fps: frames per second; see ``frame_rate``.
        quality: 1 to 100; see ``crf``. Encoders other than libx264 use their own default.
        codec: FFmpeg name of a video encoder that MP4 holds, H.264 or other.

    Raises:
        UnsupportedOutputError: the installed FFmpeg lacks the encoder, or the encoder refuses the size.
        InvalidRequestError: ``fps`` is out of range.
    """
    import av
    from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

    frames, height, width, _ = pixels_FHWC.shape
    rate = frame_rate(fps)
    pixel_format = "yuv444p" if height % 2 or width % 2 else "yuv420p"
    options = {**_X264_OPTIONS, "crf": str(crf(quality))} if codec == "libx264" else {}
    # The index is written in front of the frames (fast start), so that players begin before the whole file is there. FFmpeg's
    # "faststart" reopens its output by name, which a buffer in memory has not; reserving the index's space needs no name. An
    # index entry takes at most 36 bytes a frame.
    container_options = {"moov_size": str(4096 + 40 * frames)}
    buffer = io.BytesIO()
    reformatter = VideoReformatter()
    interpolation = Interpolation.BICUBIC | Interpolation.FULL_CHR_H_INP | Interpolation.ACCURATE_RND
    try:
        with av.open(buffer, "w", format="mp4", options=container_options) as container:
            stream = cast("VideoStream", container.add_stream(codec, rate=rate, options=options))
            stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
            context = stream.codec_context
            context.color_primaries = context.color_trc = context.colorspace = 1  # ITU-T H.273: 1 is BT.709
            context.color_range = ColorRange.MPEG
            for pixels_HWC in pixels_FHWC:
                frame = reformatter.reformat(
                    av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels_HWC), format="rgb24"),
                    format=pixel_format,
                    src_color_range=ColorRange.JPEG,
                    dst_color_range=ColorRange.MPEG,
                    dst_colorspace=Colorspace.ITU709,
                    interpolation=interpolation,
                )
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    except (av.error.FFmpegError, av.codec.codec.UnknownCodecError) as error:
        raise UnsupportedOutputError(
            f"the video encoder {codec} cannot write {frames} frames of {width}x{height} as {pixel_format} ({error}): "
            "ask for output.format 'tensor'",
            param="output.format",
        ) from error
    details = f"{context.codec.canonical_name}; {pixel_format}; bt709; {width}x{height}; {frames} frames; {_rate_text(rate)} fps"
    return EncodedVideo(buffer.getvalue(), details)


def _rate_text(rate: Fraction) -> str:
    return str(rate) if rate.denominator == 1 or rate.denominator == 1001 else f"{float(rate):g}"
