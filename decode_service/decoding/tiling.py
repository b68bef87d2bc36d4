"""Putting decoded tiles together, in the order and with the weights of the reference in diffusers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode_service.planning.tiles import TileGrid

# Tensors are (..., H, W) in the space where tiles are blended.


def stitch(tiles: Sequence[torch.Tensor], grid: TileGrid) -> torch.Tensor:
    """One picture (..., H, W) from the tiles of ``grid``, row by row.

    Each tile is cross-faded linearly with the tile above, then with the tile to its left, and cropped to what it keeps.
    The order matters to the numbers: see ``TileGrid.sequential``.
    """
    columns = len(grid.columns)
    first = tiles[0]
    height, width = sum(row.keep for row in grid.rows), sum(column.keep for column in grid.columns)
    canvas = first.new_empty((*first.shape[:-2], height, width))
    above: list[torch.Tensor] = []
    top = 0
    for i, row in enumerate(grid.rows):
        current: list[torch.Tensor] = []
        left = 0
        for j, column in enumerate(grid.columns):
            tile = raw = tiles[i * columns + j]
            if row.blend:
                tile = cross_fade(above[j], tile, row.blend, dim=-2)
            if column.blend:
                tile = cross_fade(current[j - 1], tile, column.blend, dim=-1)
            current.append(tile if grid.sequential else raw)
            canvas[..., top : top + row.keep, left : left + column.keep] = tile[..., : row.keep, : column.keep]
            left += column.keep
        above = current
        top += row.keep
    return canvas


def cross_fade(before: torch.Tensor, after: torch.Tensor, extent: int, dim: int) -> torch.Tensor:
    """``after``, its first ``extent`` positions along ``dim`` faded in from the last ``extent`` of ``before``.

    Weights are the reference's: position y counts y / extent for ``after`` and 1 - y / extent for ``before``, so the first
    position is all ``before``. They are made in float64 and the blend in float32 at least, whatever the tiles' dtype.
    """
    shape = [1] * after.dim()
    shape[dim] = extent
    rising = torch.arange(extent, dtype=torch.float64, device="cpu") / extent
    work = torch.promote_types(after.dtype, torch.float32)
    fade_in = rising.to(work).to(after.device).view(shape)
    fade_out = (1 - rising).to(work).to(after.device).view(shape)
    head = before.narrow(dim, before.shape[dim] - extent, extent) * fade_out + after.narrow(dim, 0, extent) * fade_in
    blended = after.clone()
    blended.narrow(dim, 0, extent).copy_(head)
    return blended
