"""Which file formats exist, what each can hold, and whether given pixels fit: answered before anything is decoded."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

from decode_service.errors import InvalidRequestError, UnsupportedOutputError
from decode_service.media.video import frame_rate

Kind = Literal["image", "video"]


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One file format.

    Attributes:
        name: the value of ``output.format``.
        kind: one picture, or frames over time.
        extension: of a file name, with its dot.
        media_type: for ``Content-Type``.
        channels: numbers of channels that it holds.
        max_side: largest height and width in pixels that its encoder takes, or None where nothing real exceeds it.
        max_area: largest height x width in pixels, or None.
        module: the Python module that encodes it.
        package: what to install for that module.
    """

    name: str
    kind: Kind
    extension: str
    media_type: str
    channels: tuple[int, ...]
    max_side: int | None
    max_area: int | None
    module: str
    package: str


FORMATS: dict[str, FileFormat] = {
    file_format.name: file_format
    for file_format in (
        FileFormat("png", "image", ".png", "image/png", (3, 4), None, None, "PIL", "pillow"),
        # The format's own limit is 65535; libjpeg stops at 65500.
        FileFormat("jpeg", "image", ".jpg", "image/jpeg", (3,), 65500, None, "PIL", "pillow"),
        FileFormat("webp", "image", ".webp", "image/webp", (3, 4), 16383, None, "PIL", "pillow"),
        # x264 stops at 16384 a side, H.264 level 6.2 at 139264 macro-blocks of 16 x 16.
        FileFormat("mp4", "video", ".mp4", "video/mp4", (3,), 16384, 139264 * 256, "av", "av"),
    )
}


def file_format(name: str) -> FileFormat:
    """The format called ``name``.

    Raises:
        UnsupportedOutputError: there is none of that name.
    """
    try:
        return FORMATS[name]
    except KeyError:
        known = ", ".join(("tensor", *FORMATS))
        raise UnsupportedOutputError(f"no output format {name!r}: known are {known}", param="output.format") from None


def check_installed(name: str) -> None:
    """Make sure that the library that encodes ``name`` is there, without importing it.

    Raises:
        UnsupportedOutputError: it is not; the message says what to install.
    """
    wanted = file_format(name)
    if importlib.util.find_spec(wanted.module) is None:
        raise UnsupportedOutputError(
            f"this server cannot write {name}: install {wanted.package!r} (or 'decode-service[media]') on it, or ask for "
            "output.format 'tensor'",
            param="output.format",
        )


def check_output(
    name: str, *, batch: int, frames: int, height: int, width: int, channels: int, fps: float | None = None
) -> None:
    """Make sure that a file of format ``name`` can hold the decoded pixels; a pure function of the output's extents.

    Args:
        name: ``png``, ``jpeg``, ``webp`` or ``mp4``.
        batch: pictures or videos decoded together.
        frames: frames of each.
        height, width: pixels.
        channels: 3, or 4 with alpha.
        fps: frames per second that were asked for, or None.

    Raises:
        UnsupportedOutputError: it cannot; the message says which format could.
        InvalidRequestError: ``fps`` is out of range, or goes with a format of one picture.
    """
    wanted = file_format(name)
    side = max(height, width)
    if batch > 1:
        one = "picture" if wanted.kind == "image" else "video"
        raise _cannot(f"{name} holds one {one} and the batch has {batch}: send them one by one, or")
    if wanted.kind == "image" and frames > 1:
        raise _cannot(f"{name} holds one picture and the video has {frames} frames:", "mp4")
    if channels not in wanted.channels:
        what = "alpha" if channels == 4 else f"{channels} channels"
        able = [other.name for other in FORMATS.values() if channels in other.channels and other.kind == "image"]
        raise _cannot(f"{name} cannot hold {what}:", *(able if frames == 1 else ()))
    if wanted.max_side is not None and side > wanted.max_side:
        able = [
            other.name
            for other in FORMATS.values()
            if other.kind == wanted.kind and channels in other.channels and (other.max_side or side) >= side
        ]
        raise _cannot(
            f"{name} holds at most {wanted.max_side} pixels a side and the picture is {width}x{height}:", *able
        )
    if wanted.max_area is not None and height * width > wanted.max_area:
        raise _cannot(f"{name} holds at most {wanted.max_area} pixels a frame and the picture is {width}x{height}:")
    if fps is not None and wanted.kind == "image":
        raise InvalidRequestError(f"fps applies to mp4, and {name} holds one picture: leave it out", param="output.fps")
    frame_rate(fps)


def _cannot(problem: str, *able: str) -> UnsupportedOutputError:
    """The error for ``problem``, naming the formats that are able; ``tensor`` always is."""
    names = " or ".join(repr(name) for name in (*able, "tensor"))
    return UnsupportedOutputError(f"{problem} ask for {names}", param="output.format")
