"""Extents are divided unevenly, never padded: every height from 1 to 40 over 1 to 8 ranks."""

from __future__ import annotations

import pytest

from decode_service.planning.bands import Band, split


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("extent", range(1, 41))
def test_bands_cover_the_extent_once_and_differ_by_at_most_one(extent: int, ranks: int) -> None:
    bands = split(extent, ranks)
    assert len(bands) == ranks
    cells = [cell for band in bands for cell in range(band.start, band.stop)]
    assert cells == list(range(extent))
    sizes = [band.size for band in bands]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "larger bands come first, so that empty ones can only be last"


def test_a_band_scales_with_the_picture() -> None:
    assert Band(3, 2).scaled(8) == Band(24, 16)


@pytest.mark.parametrize(("extent", "ranks"), [(-1, 2), (4, 0)])
def test_impossible_splits_are_refused(extent: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="must"):
        split(extent, ranks)
