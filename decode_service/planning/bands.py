"""How one extent is divided over ranks: uneven bands, never padded.

Padding an extent so that it divides evenly leaks through the first bias, so a rank with no more than its own rows is
both simpler and exact.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Band:
    """Consecutive cells ``[start, start + size)`` of one extent (latent rows, latent columns or batch items)."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size

    def scaled(self, factor: int) -> Band:
        """The same band in an extent that is ``factor`` times as long (latent cells to pixels)."""
        return Band(self.start * factor, self.size * factor)


def split(extent: int, ranks: int) -> tuple[Band, ...]:
    """Divide ``extent`` cells over ``ranks`` as evenly as whole cells allow: sizes differ by at most one.

    Bands are in rank order, adjacent, and cover the extent exactly. With fewer cells than ranks the last bands are
    empty; whether that is acceptable is the planner's business.

    Raises:
        ValueError: if extent is negative or ranks is not positive.
    """
    if extent < 0:
        raise ValueError(f"extent must not be negative, got {extent}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    size, extra = divmod(extent, ranks)
    bands = []
    start = 0
    for rank in range(ranks):
        band = Band(start, size + (rank < extra))
        bands.append(band)
        start = band.stop
    return tuple(bands)
