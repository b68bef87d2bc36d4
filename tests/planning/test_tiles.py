"""Tile geometry equals that of diffusers wherever diffusers is right, and covers the picture everywhere."""

from __future__ import annotations

import itertools

import pytest
from diffusers import AutoencoderKLMiniMaxH3
from hypothesis import given
from hypothesis import strategies as st

from decode_service.planning.spec import OverlapTiles, RectangleTiles, StrideTiles
from decode_service.planning.tiles import TileSpan, assign_largest_first, overlap_axis, stride_axis


def covered(spans: tuple[TileSpan, ...], ratio: int) -> list[int]:
    """Pixels that the kept parts cover, in order."""
    return [pixel for span in spans for pixel in range(span.start * ratio, span.start * ratio + span.keep)]


@given(extent=st.integers(1, 200), tile=st.integers(1, 40), data=st.data())
def test_stride_tiles_cover_every_pixel_once(extent: int, tile: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, tile))
    spans = stride_axis(extent, tile, stride, ratio=4)
    assert covered(spans, 4) == list(range(extent * 4))
    for before, after in itertools.pairwise(spans):
        overlap = (before.start + before.size - after.start) * 4
        assert after.blend <= overlap, "a tile can only be blended where its neighbour was decoded too"
        assert after.blend <= after.size * 4


@given(extent=st.integers(1, 200), tile=st.integers(2, 40), data=st.data())
def test_overlap_tiles_cover_every_pixel_once_with_full_tiles(extent: int, tile: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, tile - 1))
    spans = overlap_axis(extent, tile, overlap, ratio=4)
    assert covered(spans, 4) == list(range(extent * 4))
    if len(spans) > 1:
        assert {span.size for span in spans} == {tile}
        assert all(span.blend >= overlap * 4 for span in spans[1:])


@pytest.fixture(scope="module")
def minimax_h3() -> AutoencoderKLMiniMaxH3:
    return AutoencoderKLMiniMaxH3(
        latent_channels=4, block_out_channels=(8,) * 6, layers_per_block=1, norm_num_groups=4, decoder_num_layers=1
    )


@pytest.mark.parametrize("extent", range(1, 90))
def test_overlap_tiles_are_those_of_minimax_h3(minimax_h3: AutoencoderKLMiniMaxH3, extent: int) -> None:
    starts, lengths, overlaps = minimax_h3._split_tiles(extent * 16, 256, 64)
    spans = OverlapTiles(256, 64).grid(extent, extent, 16, 16).rows
    assert [span.start * 16 for span in spans] == starts
    assert [span.size * 16 for span in spans] == lengths
    assert [span.blend for span in spans[1:]] == overlaps


@pytest.mark.parametrize("stride", [0, 33])
def test_a_stride_beyond_the_tile_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match="stride of 1 to 32"):
        stride_axis(100, 32, stride, 8)


@pytest.mark.parametrize(
    ("tiles", "words"),
    [
        (StrideTiles(250, 192), "multiples"),
        (StrideTiles(128, 192), "at most the tile"),
        (StrideTiles(256, 0), "at least 8"),
    ],
)
def test_tile_settings_that_cannot_work_are_explained(tiles: StrideTiles, words: str) -> None:
    problem = tiles.problem(8)
    assert problem is not None and words in problem


def test_a_frame_within_one_tile_is_not_cut() -> None:
    assert StrideTiles(256, 192).grid(32, 32, 8, 8).count == 1
    assert StrideTiles(256, 192).grid(30, 33, 8, 8).count == 4, "diffusers cuts both axes as soon as one is too long"


@given(work=st.lists(st.integers(1, 100), min_size=1, max_size=40), ranks=st.integers(1, 8))
def test_tiles_are_assigned_largest_first(work: list[int], ranks: int) -> None:
    owners = assign_largest_first(work, ranks)
    loads = [sum(w for w, owner in zip(work, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(loads) == sum(work)
    # Graham's bound for list scheduling, in terms that need no optimal schedule.
    assert max(loads) <= sum(work) / ranks + max(work) * (1 - 1 / ranks)
    if len(work) >= ranks:
        assert set(owners) == set(range(ranks))


@pytest.mark.parametrize(("height", "width"), [(30, 45), (31, 45), (30, 46), (60, 90), (7, 100), (100, 7)])
def test_rectangular_tiles_cover_the_frame(height: int, width: int) -> None:
    tiles = RectangleTiles(StrideTiles(240, 200), StrideTiles(360, 288))
    grid = tiles.grid(height, width, 8, 8)
    assert sum(row.keep for row in grid.rows) == height * 8
    assert sum(column.keep for column in grid.columns) == width * 8
    assert (grid.count == 1) == (height <= 30 and width <= 45)


def test_overlaps_may_differ_between_the_axes() -> None:
    grid = OverlapTiles(320, 120, 80).grid(90, 160, 8, 8)
    assert [row.start for row in grid.rows] == [0, 25, 50]
    assert [column.start for column in grid.columns] == [0, 30, 60, 90, 120]
