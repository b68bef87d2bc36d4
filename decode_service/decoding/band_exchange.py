"""What the bands of a frame pass to each other: the rows at their edges, and whatever all of them must know.

Bands are uneven and never padded; every layer of a decoder scales all extents by the same whole factor, so a band's extent at
any depth is its latent extent times that factor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from decode_service.decoding.communicator import Communicator
from decode_service.planning.bands import Band

# B batch, C channels, T frames, H height, W width, G groups.

AXIS_DIM = {"height": -2, "width": -1}


class UnshardableOperation(RuntimeError):
    """An operation that the halo rule does not cover; decoding it band by band could give a wrong picture."""


class TensorMap(WeakIdKeyDictionary):
    """What is known of single tensors, as long as these live."""

    def __bool__(self) -> bool:
        # Asked at every operation of a decoder, nearly always of an empty one; its length is a computation.
        return bool(self.data)


class RowsBeside(NamedTuple):
    """The rows of the neighbouring bands beside one band, None where there is no neighbour or nobody asked."""

    before: torch.Tensor | None
    after: torch.Tensor | None
    #: Of all ranks, in rank order, if they went along.
    moments: tuple[torch.Tensor, ...] = ()

    def each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> RowsBeside:
        """What ``function`` makes of the rows."""
        return RowsBeside(
            None if self.before is None else function(self.before), None if self.after is None else function(self.after)
        )


class BandExchange:
    """One rank's band of a frame, and its exchanges with the other bands.

    Args:
        communicator: the ranks that share the frame; used for nothing else meanwhile.
        axis: ``height`` or ``width``.
        bands: latent cells of every rank along the axis, none of them empty.

    Attributes:
        axis, dim: the axis, and its dimension counted from the end.
        band: this rank's latent cells along the axis.
        exchanges: collectives issued so far.
        beside: bands that nothing but one activation has touched since a group norm made them, and the rows beside them, which
            travelled with its statistics: what pads such a band next need not ask for them.
        roomy: bands that lie in a larger tensor, which has a row more on either side for what belongs beside them.
    """

    def __init__(self, communicator: Communicator, axis: str, bands: Sequence[Band]) -> None:
        if len(bands) != communicator.size:
            raise ValueError(f"{communicator.size} ranks need as many bands, got {len(bands)}")
        if min(band.size for band in bands) < 1:
            raise ValueError("every rank needs at least one latent cell of the sharded axis")
        self.dim = AXIS_DIM[axis]
        self.axis = axis
        self.exchanges = 0
        self._communicator = communicator
        self.band = bands[communicator.rank]
        self._sizes = [band.size for band in bands]
        self._rank = communicator.rank
        self.beside = TensorMap()
        self.roomy = TensorMap()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Latent cells of every rank along the axis."""
        return tuple(self._sizes)

    @property
    def communicator(self) -> Communicator:
        """What it exchanges by."""
        return self._communicator

    @contextlib.contextmanager
    def communicating_by(self, communicator: Communicator) -> Iterator[None]:
        """While it lasts, ``communicator``, of the same rank in as many, stands in for the frame's own."""
        own, self._communicator = self._communicator, communicator
        try:
            yield
        finally:
            self._communicator = own

    def extents(self, local_extent: int) -> list[int]:
        """Extent of every rank's band at the depth where this rank's band has ``local_extent``."""
        factor, remainder = divmod(local_extent, self._sizes[self._rank])
        if remainder or factor < 1:
            raise UnshardableOperation(
                f"an extent of {local_extent} is not a multiple of this band's {self._sizes[self._rank]} latent cells"
            )
        return [size * factor for size in self._sizes]

    def with_halo(
        self, x: torch.Tensor, before: int, after: int, mode: str = "constant", value: float = 0.0
    ) -> torch.Tensor:
        """``x`` with ``before`` and ``after`` rows of the neighbouring bands, and padding at the edges of the frame.

        Args:
            mode: what lies outside the frame: ``constant`` (``value``), ``replicate`` or ``reflect``.
        """
        return self.joined_with_halo([x], before, after, mode, value)

    def joined_with_halo(
        self,
        parts: Sequence[torch.Tensor],
        before: int,
        after: int,
        mode: str = "constant",
        value: float = 0.0,
        *,
        lend: bool = False,
        write: Callable[[torch.Tensor], Any] | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        """``with_halo`` of ``parts`` joined along their frames (dimension 2), in one copy.

        Args:
            parts: bands. The first ones may have their halo already: then rows of the others alone travel.
            lend: whether the result may share memory with a band that has room, and no copy is made: it must not be written to.
            write: writes what takes the place of the last part, which then says its shape alone.
            memory_format: of the result; None for that of the last part.
        """
        x = parts[-1]
        dim = x.dim() + self.dim
        extents = self.extents(x.shape[dim])
        if min(extents) < max(before, after):
            raise UnshardableOperation(
                f"a halo of {max(before, after)} rows does not fit in a band of {min(extents)}: use fewer ranks"
            )
        last = len(extents) - 1
        length = x.shape[dim]
        shape = list(x.shape)
        if len(parts) > 1:
            shape[2] = sum(part.shape[2] for part in parts)
        shape[dim] = before + length + after
        known: RowsBeside | None = self.beside.get(x) if len(parts) == 1 and max(before, after) <= 1 else None
        room: torch.Tensor | None = self.roomy.pop(x, None) if known is not None and lend else None
        if known is not None and room is not None:
            joined = padded = room.narrow(dim, 1 - before, before + length + after)
            beside = known
        else:
            # In a layout that the convolution that follows need not change.
            memory_format = memory_format or memory_format_of(x)
            joined = padded = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format)
            fresh = [part for part in parts if part.shape[dim] == length]
            haloed = parts[: len(parts) - len(fresh)]
            if haloed:
                frames = sum(part.shape[2] for part in haloed)
                padded = joined.narrow(2, frames, shape[2] - frames)
            own = padded.narrow(dim, before, length)
            places = own.split([part.shape[2] for part in fresh], 2) if len(fresh) > 1 else (own,)
            if write is not None:
                write(places[-1])
                fresh[-1] = places[-1]
            # Rows travel while the rest is copied.
            finish = self.begin_rows_beside(fresh, before, after) if known is None else lambda: known
            start = 0
            for part in haloed:
                joined.narrow(2, start, part.shape[2]).copy_(part)
                start += part.shape[2]
            for place, part in zip(places, fresh, strict=True):
                if place is not part:
                    place.copy_(part)
            beside = finish()
        for start, size, rows in ((0, before, beside.before), (before + length, after, beside.after)):
            if size and rows is not None:
                padded.narrow(dim, start, size).copy_(rows)
        # What lies outside may reflect more rows than a narrow band has: the neighbour's are here by now.
        if before and self._rank == 0:
            inside = padded.narrow(dim, before, length + (after if last else 0))
            padded.narrow(dim, 0, before).copy_(_outside(inside, dim, before, mode, value, at_start=True))
        if after and self._rank == last:
            inside = padded.narrow(dim, 0 if last else before, length + (before if last else 0))
            padded.narrow(dim, before + length, after).copy_(_outside(inside, dim, after, mode, value, at_start=False))
        return joined

    def begin_rows_beside(
        self, parts: Sequence[torch.Tensor], before: int, after: int, moments: torch.Tensor | None = None
    ) -> Callable[[], RowsBeside]:
        """Ask for the rows of the neighbouring bands beside ``parts``, which are joined along their frames.

        Args:
            moments: what all ranks get from each other by the way.

        Returns:
            What waits for the ``before`` and the ``after`` rows and the moments of all.
        """
        x, last = parts[-1], len(self._sizes) - 1
        dim = x.dim() + self.dim
        length, shape = x.shape[dim], list(x.shape)
        if len(parts) > 1:
            shape[2] = sum(part.shape[2] for part in parts)
        sends, receives = [], []
        beside: list[torch.Tensor | None] = [None, None]
        for index, peer, ours, theirs in ((0, self._rank - 1, after, before), (1, self._rank + 1, before, after)):
            if not 0 <= peer <= last:
                continue
            if ours:
                rows = [part.narrow(dim, length - ours if index else 0, ours) for part in parts]
                sends.append((peer, (torch.cat(rows, 2) if len(rows) > 1 else rows[0]).contiguous()))
            if theirs:
                shape[dim] = theirs
                buffer = beside[index] = x.new_empty(shape)
                receives.append((peer, buffer))
        gathered: list[torch.Tensor] = []
        if moments is not None:
            gathered = [moments if rank == self._rank else torch.empty_like(moments) for rank in range(last + 1)]
            others = [rank for rank in range(last + 1) if rank != self._rank]
            sends += [(rank, moments) for rank in others]
            receives += [(rank, gathered[rank]) for rank in others]
        wait = self._communicator.begin_exchange(sends, receives)
        self.exchanges += 1

        def finish() -> RowsBeside:
            wait()
            # What was sent had to live until here.
            sends.clear()
            return RowsBeside(beside[0], beside[1], tuple(gathered))

        return finish

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """``x`` of all ranks, concatenated in rank order along ``dim``, whose extent follows the bands."""
        shape = list(x.shape)
        parts = []
        for extent in self.extents(x.shape[dim]):
            shape[dim] = extent
            parts.append(x.new_empty(shape))
        parts[self._rank] = x.contiguous()
        others = [peer for peer in range(len(parts)) if peer != self._rank]
        self._communicator.exchange(
            [(peer, parts[self._rank]) for peer in others], [(peer, parts[peer]) for peer in others]
        )
        self.exchanges += 1
        return torch.cat(parts, dim)

    def merged_moments(self, moments: Sequence[torch.Tensor], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and biased variance over all bands, from those (2,B,G) of each band, of ``count`` elements on this rank.

        Source: Chan, Golub and LeVeque (1979), for any number of parts at once. Every rank computes the same numbers in
        the same order, so all get the same bits. Counts follow from the bands, so only the two moments travel.
        """
        counts = self.extents(count)
        shares = [band_count / sum(counts) for band_count in counts]
        bands = [each.double() for each in moments]
        merged_mean, within = torch.stack([x * share for x, share in zip(bands, shares, strict=True)]).sum(0)
        deviations = [(x[0] - merged_mean).square() * share for x, share in zip(bands, shares, strict=True)]
        between = torch.stack(deviations).sum(0)
        return merged_mean.float(), (within + between).float()


def memory_format_of(x: torch.Tensor) -> torch.memory_format:
    """The layout in memory that ``x`` has, where it is dense; otherwise, and in float32, that of new tensors.

    float32 decoders keep that layout, whose convolutions round better: twice as well on Wan 2.1 as one that a band slips out of
    behind an attention or an upsampling in time.
    """
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if (
        channels_last is not None
        and x.dtype != torch.float32
        and not x.is_contiguous()
        and x.is_contiguous(memory_format=channels_last)
    ):
        return channels_last
    return torch.contiguous_format


def _outside(x: torch.Tensor, dim: int, rows: int, mode: str, value: float, *, at_start: bool) -> torch.Tensor:
    """``rows`` rows beyond the edge of the frame, as ``F.pad`` makes them."""
    length = x.shape[dim]
    shape = list(x.shape)
    shape[dim] = rows
    if mode == "constant":
        return x.new_full(shape, value)
    if mode == "replicate":
        return x.narrow(dim, 0 if at_start else length - 1, 1).expand(shape)
    if length <= rows:
        raise UnshardableOperation(f"reflecting {rows} rows needs a band of more than {rows}, got {length}")
    return x.narrow(dim, 1 if at_start else length - 1 - rows, rows).flip(dim)
