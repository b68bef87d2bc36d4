"""Tile geometry as pure numbers: where tiles lie, how far they blend, what is kept of each, and who decodes which.

Two layouts are known, each the one of its reference in diffusers 0.42: ``stride_axis`` (a fixed tile and stride, trailing
tiles cut short) and ``overlap_axis`` (full tiles whose overlaps are widened until they cover the frame exactly).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TileSpan:
    """One tile along one axis.

    Attributes:
        start: first latent cell.
        size: latent cells.
        blend: decoder pixels at the head that are cross-faded with the tile before (0 for the first tile).
        keep: decoder pixels from the head that go into the picture, after blending.
    """

    start: int
    size: int
    blend: int
    keep: int


@dataclass(frozen=True, slots=True)
class TileGrid:
    """All tiles of one frame: the product of the spans of its two axes.

    Attributes:
        rows: spans along the height.
        columns: spans along the width.
        sequential: whether a tile is blended with neighbours that are blended already (Wan, Qwen-Image) or with their
            raw pixels (MiniMax-H3). It is part of the numbers, so it follows the reference.
    """

    rows: tuple[TileSpan, ...]
    columns: tuple[TileSpan, ...]
    sequential: bool

    @property
    def count(self) -> int:
        return len(self.rows) * len(self.columns)

    def areas(self) -> tuple[int, ...]:
        """Latent cells of every tile, row by row."""
        return tuple(row.size * column.size for row in self.rows for column in self.columns)


def stride_axis(extent: int, tile: int, stride: int, ratio: int) -> tuple[TileSpan, ...]:
    """Tiles of ``tile`` cells every ``stride`` cells, the last ones cut at the edge.

    Source: the layout of ``tiled_decode`` of AutoencoderKLWan and AutoencoderKLQwenImage in diffusers 0.42.

    Args:
        extent, tile, stride: latent cells.
        ratio: decoder pixels per latent cell.

    Raises:
        ValueError: if stride is larger than tile: the picture would have gaps (diffusers silently truncates it).
    """
    if not 1 <= stride <= tile:
        raise ValueError(f"a tile of {tile} latent cells needs a stride of 1 to {tile} cells, got {stride}")
    spans: list[TileSpan] = []
    for start in range(0, extent, stride):
        size = min(tile, extent - start)
        blend = min(spans[-1].size, size, tile - stride) * ratio if spans else 0
        spans.append(TileSpan(start, size, blend, min(size, stride) * ratio))
    return tuple(spans)


def overlap_axis(extent: int, tile: int, min_overlap: int, ratio: int) -> tuple[TileSpan, ...]:
    """As few full tiles as keep every overlap at ``min_overlap`` cells or more; the slack widens the first overlaps.

    Source: ``_split_tiles`` and ``_stitch_tiles`` of AutoencoderKLMiniMaxH3 in diffusers 0.42, in latent cells.

    Args:
        extent, tile, min_overlap: latent cells.
        ratio: decoder pixels per latent cell.
    """
    if not 0 <= min_overlap < tile:
        raise ValueError(f"a tile of {tile} latent cells needs an overlap of 0 to {tile - 1} cells, got {min_overlap}")
    if tile >= extent:
        return (TileSpan(0, extent, 0, extent * ratio),)
    count = math.ceil((extent - min_overlap) / (tile - min_overlap))
    slack = tile * count - min_overlap * (count - 1) - extent
    overlaps = [min_overlap + slack // (count - 1) + (i < slack % (count - 1)) for i in range(count - 1)]
    spans = []
    start = 0
    for index in range(count):
        blend = overlaps[index - 1] * ratio if index else 0
        dropped = overlaps[index] if index < count - 1 else 0
        spans.append(TileSpan(start, tile, blend, (tile - dropped) * ratio))
        start += tile - dropped
    return tuple(spans)


def assign_largest_first(work: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The rank of every item: largest work first, each to the least loaded rank (the lowest on ties).

    Longest-processing-time-first scheduling (Graham 1969). Deterministic, so that it needs no communication.
    """
    loads = [(0, rank) for rank in range(ranks)]
    owner = [0] * len(work)
    for item in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        load, rank = loads[0]
        owner[item] = rank
        heapq.heapreplace(loads, (load + work[item], rank))
    return tuple(owner)
