"""Videos are read back with PyAV."""

from __future__ import annotations

import io
from fractions import Fraction
from itertools import pairwise

import av
import numpy as np
import pytest

from decode_service.errors import InvalidRequestError, UnsupportedOutputError
from decode_service.media.encode import encode
from decode_service.media.video import crf, encode_mp4, frame_rate

COLOURS = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "cyan": (0, 255, 255),
    "magenta": (255, 0, 255),
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "grey": (128, 128, 128),
}


def flat(height=240, width=416):
    """One frame of each colour."""
    frames = np.empty((len(COLOURS), height, width, 3), np.uint8)
    frames[:] = np.array(list(COLOURS.values()), np.uint8)[:, None, None]
    return frames


def moving(frames=17, height=48, width=80):
    index = np.arange(frames)[:, None, None, None]
    rows, columns, channels = np.ogrid[:height, :width, :3]
    return ((rows * 3 + columns * 2 + channels * 60 + index * 5) % 200 + 20).astype(np.uint8)


@pytest.mark.parametrize(
    ("height", "width", "pixel_format"),
    [(240, 416, "yuv420p"), (253, 417, "yuv444p"), (240, 253, "yuv444p"), (2, 2, "yuv420p"), (1, 1, "yuv444p")],
)
def test_every_size_is_kept_exactly(height, width, pixel_format):
    video = encode_mp4(moving(5, height, width))
    assert video.details == f"h264; {pixel_format}; bt709; {width}x{height}; 5 frames; 16 fps"
    with av.open(io.BytesIO(video.data)) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, stream.pix_fmt) == (width, height, pixel_format)
        assert [(frame.width, frame.height) for frame in container.decode(video=0)] == [(width, height)] * 5


@pytest.mark.parametrize("size", [(240, 416), (63, 97)])
def test_saturated_colours_survive(size):
    with av.open(io.BytesIO(encode_mp4(flat(*size), quality=90).data)) as container:
        for frame, (name, colour) in zip(container.decode(video=0), COLOURS.items(), strict=True):
            found = frame.to_ndarray(format="rgb24").astype(int)
            assert np.abs(found - colour).max() <= 4, name


def test_luma_is_that_of_bt709_in_limited_range():
    """The file's own numbers, so that a wrong matrix cannot hide behind the same wrong matrix in the reader."""
    with av.open(io.BytesIO(encode_mp4(flat(), quality=90).data)) as container:
        for frame, colour in zip(container.decode(video=0), COLOURS.values(), strict=True):
            luma = frame.to_ndarray()[:240].astype(int)
            expected = 16 + 219 * np.dot(colour, (0.2126, 0.7152, 0.0722)) / 255
            assert np.abs(luma - expected).max() <= 2, colour


def test_colour_is_tagged_in_the_container_and_in_every_frame():
    with av.open(io.BytesIO(encode_mp4(flat()).data)) as container:
        context = container.streams.video[0].codec_context
        assert (context.color_primaries, context.color_trc, context.colorspace, context.color_range) == (1, 1, 1, 1)
        for frame in container.decode(video=0):
            assert (frame.color_primaries, frame.color_trc, frame.colorspace, frame.color_range) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("fps", "rate"),
    [
        (None, Fraction(16)),
        (24, Fraction(24)),
        (24000 / 1001, Fraction(24000, 1001)),
        (23.976, Fraction(24000, 1001)),
        (23.98, Fraction(24000, 1001)),
        (29.97, Fraction(30000, 1001)),
        (59.94, Fraction(60000, 1001)),
        (12.5, Fraction(25, 2)),
        (0.5, Fraction(1, 2)),
    ],
)
def test_frame_rates_are_stored_exactly(fps, rate):
    assert frame_rate(fps) == rate
    with av.open(io.BytesIO(encode_mp4(moving(6), fps).data)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate == rate
        times = [frame.pts * frame.time_base for frame in container.decode(video=0)]
    assert [later - earlier for earlier, later in pairwise(times)] == [1 / rate] * 5


@pytest.mark.parametrize("fps", [0, -1, 1001, float("inf"), float("nan")])
def test_other_frame_rates_are_refused(fps):
    with pytest.raises(InvalidRequestError):
        frame_rate(fps)


def test_quality_maps_to_crf_and_trades_bytes():
    assert [crf(quality) for quality in (None, 100, 66, 50, 1)] == [18, 1, 18, 26, 50]
    sizes = [len(encode_mp4(moving(), quality=quality).data) for quality in (1, 50, 100)]
    assert sizes == sorted(sizes)


def test_frames_are_all_there_and_in_order():
    frames = moving().astype(int)
    with av.open(io.BytesIO(encode_mp4(moving(), quality=95).data)) as container:
        found = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    nearest = [int(np.abs(frames - frame).mean(axis=(1, 2, 3)).argmin()) for frame in found]
    assert nearest == list(range(17))


@pytest.mark.parametrize("frames", [1, 17, 2000])
def test_the_index_comes_before_the_frames(frames):
    data = encode_mp4(moving(frames, 16, 16), quality=1).data
    assert 0 < data.index(b"moov") < data.index(b"mdat")


def test_the_same_frames_give_the_same_bytes_whatever_memory_held_before():
    random = np.random.default_rng(0)
    files = set()
    for _ in range(20):
        rubbish = [random.bytes(int(size)) for size in random.integers(1000, 500_000, 4)]
        files.add(encode_mp4(moving(height=96, width=160)).data)
        del rubbish
    assert len(files) == 1


def test_a_leading_batch_of_one_is_accepted():
    encoded = encode("mp4", moving(5)[None], fps=24)
    assert encoded.media_type == "video/mp4"
    assert encoded.details == "h264; yuv420p; bt709; 80x48; 5 frames; 24 fps"


def test_an_encoder_that_is_not_there_is_named():
    with pytest.raises(UnsupportedOutputError, match="no_such_encoder"):
        encode("mp4", moving(2), codec="no_such_encoder")
