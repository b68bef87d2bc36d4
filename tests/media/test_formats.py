"""What each format can hold is known before anything is decoded."""

from __future__ import annotations

import mimetypes
import subprocess
import sys

import pytest
from decode_client.wire import FORMATS as WIRE_FORMATS

from decode_service.errors import InvalidRequestError, UnsupportedOutputError
from decode_service.media.formats import FORMATS, check_installed, check_output, file_format

EXTENTS = {"batch": 1, "frames": 1, "height": 480, "width": 832, "channels": 3}


def test_the_table_has_every_format_of_the_wire_and_the_registered_media_types():
    assert {"tensor", *FORMATS} == set(WIRE_FORMATS)
    for known in FORMATS.values():
        if known.name != "webp":  # younger than some systems' tables
            assert mimetypes.guess_type(f"x{known.extension}")[0] == known.media_type


@pytest.mark.parametrize("name", FORMATS)
def test_one_picture_fits_every_format(name):
    check_output(name, **EXTENTS)


def test_mp4_holds_frames_of_odd_sizes_too():
    check_output("mp4", **{**EXTENTS, "frames": 81, "height": 253, "width": 251}, fps=23.976)


@pytest.mark.parametrize(
    ("name", "extents", "instead"),
    [
        ("png", {"batch": 2}, "one by one, or ask for 'tensor'"),
        ("mp4", {"batch": 2}, "one by one, or ask for 'tensor'"),
        ("jpeg", {"frames": 5}, "'mp4' or 'tensor'"),
        ("webp", {"frames": 5}, "'mp4' or 'tensor'"),
        ("jpeg", {"channels": 4}, "alpha: ask for 'png' or 'webp' or 'tensor'"),
        ("mp4", {"channels": 4, "frames": 5}, "alpha: ask for 'tensor'"),
        ("png", {"channels": 16}, "16 channels: ask for 'tensor'"),
        ("webp", {"width": 16384}, "'png' or 'jpeg' or 'tensor'"),
        ("webp", {"width": 16384, "channels": 4}, "'png' or 'tensor'"),
        ("jpeg", {"height": 65501}, "'png' or 'tensor'"),
        ("mp4", {"width": 16386}, "'tensor'"),
        ("mp4", {"width": 8192, "height": 8192}, "'tensor'"),
        ("gif", {}, "png"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(name, extents, instead):
    with pytest.raises(UnsupportedOutputError) as refused:
        check_output(name, **{**EXTENTS, **extents})
    assert instead in refused.value.message
    assert refused.value.param == "output.format"


@pytest.mark.parametrize(("name", "fps"), [("mp4", 1e6), ("webp", 16.0)])
def test_a_frame_rate_that_cannot_be_honoured_is_refused(name, fps):
    with pytest.raises(InvalidRequestError) as refused:
        check_output(name, **EXTENTS, fps=fps)
    assert refused.value.param == "output.fps"


def test_a_missing_library_is_named(monkeypatch):
    for name in FORMATS:
        check_installed(name)
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(UnsupportedOutputError, match="install 'av'"):
        check_installed("mp4")


def test_nothing_optional_or_heavy_is_imported_before_it_is_needed():
    program = (
        "import sys, decode_service.http, decode_service.media.encode; "
        "print(sorted({'av', 'PIL', 'torch', 'ray', 'diffusers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_formats_are_refused_with_the_known_ones():
    with pytest.raises(UnsupportedOutputError, match="tensor, png, jpeg, webp, mp4"):
        file_format("tiff")
