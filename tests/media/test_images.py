"""Pictures are read back with Pillow."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from decode_service.errors import UnsupportedOutputError
from decode_service.media.encode import encode


def smooth(height=253, width=417, channels=3):
    """A picture without noise, so that lossy formats stay close; of odd size, so that rounding would show."""
    rows, columns = np.mgrid[:height, :width]
    planes = [rows * 255 // height, columns * 255 // width, (rows + columns) % 256, rows * 200 // height + 20]
    return np.stack(planes[:channels], axis=-1).astype(np.uint8)


def read(data):
    with Image.open(io.BytesIO(data)) as picture:
        return picture.format, np.asarray(picture)


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize(("name", "quality"), [("png", None), ("webp", 100)])
def test_lossless_formats_give_the_same_pixels(name, quality, channels):
    pixels = smooth(channels=channels)
    pixels[:50, :50, 3:] = 0  # colour under full transparency counts too
    encoded = encode(name, pixels, quality=quality)
    form, found = read(encoded.data)
    assert form == name.upper()
    assert encoded.media_type == f"image/{name}"
    np.testing.assert_array_equal(found, pixels)


@pytest.mark.parametrize("name", ["jpeg", "webp"])
def test_lossy_formats_keep_the_size_and_stay_close(name):
    pixels = smooth()
    form, found = read(encode(name, pixels).data)
    assert form == name.upper()
    assert found.shape == pixels.shape == (253, 417, 3)
    assert np.abs(found.astype(int) - pixels).mean() < 3


def test_lossy_webp_keeps_alpha_as_it_is():
    pixels = smooth(channels=4)
    found = read(encode("webp", pixels).data)[1]
    assert found.shape == pixels.shape == (253, 417, 4)
    np.testing.assert_array_equal(found[..., 3], pixels[..., 3])
    assert np.abs(found[..., :3].astype(int) - pixels[..., :3]).mean() < 3


@pytest.mark.parametrize("name", ["jpeg", "webp"])
def test_quality_trades_bytes(name):
    sizes = [len(encode(name, smooth(), quality=quality).data) for quality in (10, 60, 99)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2] / 2


def test_jpeg_keeps_full_colour_resolution():
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = (255, 0, 0)
    stripes[:, 1::2] = (0, 0, 255)
    found = read(encode("jpeg", stripes).data)[1].astype(int)
    assert np.abs(found - stripes).max() < 40  # 4:2:0 would make all of it purple


def test_leading_dimensions_of_one_picture_are_accepted():
    pixels = smooth(16, 24)
    assert encode("png", pixels).data == encode("png", pixels[None]).data == encode("png", pixels[None, None]).data


def test_memory_layout_does_not_matter():
    pixels = smooth(16, 24)
    strided = np.moveaxis(np.ascontiguousarray(np.moveaxis(pixels, -1, 0)), 0, -1)
    assert encode("png", strided).data == encode("png", pixels).data


def test_several_pictures_are_refused():
    with pytest.raises(UnsupportedOutputError):
        encode("png", np.zeros((2, 8, 8, 3), np.uint8))
    with pytest.raises(UnsupportedOutputError):
        encode("png", np.zeros((2, 1, 8, 8, 3), np.uint8))


def test_other_pixels_are_a_programming_error():
    with pytest.raises(ValueError, match="uint8"):
        encode("png", np.zeros((8, 8, 3), np.float32))
