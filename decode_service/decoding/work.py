"""What decoding with a loaded model takes of arithmetic and of exchanges between ranks, counted without decoding anything.

The decoder runs on torch's ``meta`` device (see ``footprint.py``) on frames of two sizes and clips of two or three lengths,
undivided and on a band; the counts are those of this very model. What is linear in the pixels and what goes with their
square (attention) follow from the two sizes.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from decode_service.decoding.attention import QueryBlocks
from decode_service.decoding.band_exchange import AXIS_DIM
from decode_service.decoding.communicator import Messages
from decode_service.decoding.families.base import Family
from decode_service.decoding.footprint import Alone, clip_lengths, identity, measured_cells, without_data
from decode_service.decoding.sharding import ShardedFrame
from decode_service.planning.bands import split
from decode_service.planning.cost import Work, pass_count
from decode_service.planning.spec import ModelSpec
from decode_service.planning.tiles import TileSpan

logger = logging.getLogger(__name__)

_SIZES = (16, 24)
_BANDS = 3

# As in footprint.py: models of one configuration take the same.
_counted: dict[str, Work] = {}


class FlopCount(TorchDispatchMode):
    """Adds up the floating-point operations of matrix products, convolutions and attention in this thread.

    By the formulas of ``torch.utils.flop_counter``, which counts a multiplication and an addition as two.

    Attributes:
        total: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            # Operations made of others (linear, conv2d) are counted by what they are made of.
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        output = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=output)
        return output


class _Received(Alone):
    """A rank whose peers are not there, which counts the bytes that they would have sent."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.nbytes = 0

    def begin_exchange(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        self.nbytes += sum(buffer.numel() * buffer.element_size() for _, buffer in receives)
        return super().begin_exchange(sends, receives)


@dataclasses.dataclass(frozen=True, slots=True)
class _Counted:
    """One decode."""

    flops: int = 0
    exchanges: int = 0
    nbytes: int = 0


def with_work(family: Family, spec: ModelSpec) -> ModelSpec:
    """``spec`` of a loaded model with its work, or without where its decoder cannot run on shapes alone."""
    key = identity(family)
    if key not in _counted:
        begun = time.perf_counter()
        try:
            _counted[key] = count(family)
        except Exception as error:
            logger.warning("the work of %s cannot be counted, so times are not predicted: %s", spec.name, error)
            return spec
        logger.info("counted the work of %s in %.1f s", spec.name, time.perf_counter() - begun)
    return dataclasses.replace(spec, work=_counted[key])


def count(family: Family) -> Work:
    """The work of a loaded model.

    Raises:
        Exception: whatever its decoder raises on tensors without data.
    """
    shadow = without_data(family)
    spec = shadow.spec
    short, middle, long = clip_lengths(spec)
    # Where passes have a free number of frames, every later frame is like the first of them.
    lengths = sorted({short, middle} if spec.chunked else {short, middle, long})
    # Models of one size, and those that are made of tiles of one size, are counted on it alone.
    sizes = (measured_cells(spec),) if spec.tile_only or spec.fixed_cells else _SIZES
    ratio = spec.spatial_ratio
    linear, squared = {}, {}
    for frames in lengths:
        flops = {(cells * ratio) ** 2: _decode(shadow, frames, cells, None).flops for cells in sizes}
        linear[frames], squared[frames] = _per_pixel_and_square(flops)
    axis = spec.exact_axes[-1] if spec.exact_axes else None
    first = later = 0.0
    halo, gathered = {}, {}
    if axis is not None:
        for frames in lengths:
            counted = [_decode(shadow, frames, cells, axis) for cells in sizes]
            halo[frames], gathered[frames] = _halo_and_gathered(sizes, [each.nbytes for each in counted], ratio)
            passes = pass_count(spec, frames, 1)
            if passes == 1:
                first = max(first, float(counted[-1].exchanges))
            else:
                later = (counted[-1].exchanges - first) / (passes - 1)
        # Passes whose frames are part of the model are alike; these clips have only one.
        later = later or first
    return Work(
        flops=_straight(linear),
        attention=_bent(squared) if spec.pass_frames else (*_straight(squared), 0.0),
        exchanges=(first, later),
        halo_bytes=_straight(halo) if halo else (0.0, 0.0),
        gathered_bytes=_straight(gathered) if gathered else (0.0, 0.0),
        itemsize=shadow.dtype().itemsize,
    )


def _decode(family: Family, frames: int, cells: int, axis: str | None) -> _Counted:
    """Count a decode of ``frames`` x ``cells`` x ``cells``, undivided or on the middle one of three bands."""
    spec = family.spec
    latents = torch.empty((1, spec.latent_channels, frames, cells, cells), dtype=family.dtype(), device="meta")
    peers, frame = _Received(1, _BANDS), None
    flops = FlopCount()
    with torch.inference_mode(), QueryBlocks():
        if spec.tile_only:
            span = TileSpan(0, cells, 0, cells)
            with flops:
                family.decode_tile(latents, 0, span, span, 1)
            return _Counted(flops.total)
        if axis is None:
            with flops:
                for _ in family.decode(latents, 1):
                    pass
            return _Counted(flops.total)
        bands = split(cells, _BANDS)
        latents = latents.narrow(AXIS_DIM[axis], bands[1].start, bands[1].size)
        frame = ShardedFrame(peers, axis, bands)
        passes = family.decode(latents, 1)
        while True:
            with frame:
                if next(passes, None) is None:
                    return _Counted(0, frame.exchanges, peers.nbytes)


def _per_pixel_and_square(flops: dict[int, int]) -> tuple[float, float]:
    """a, b of ``flops = a * pixels + b * pixels^2``; b is 0 where one size is known."""
    (small, of_small), *others = sorted(flops.items())
    square = 0.0
    if others:
        large, of_large = others[-1]
        square = max(0.0, (of_large / large - of_small / small) / (large - small))
    return of_small / small - square * small, square


def _halo_and_gathered(sizes: Sequence[int], nbytes: Sequence[int], ratio: int) -> tuple[float, float]:
    """Bytes per pixel of the cut from one neighbour, and per pixel that others hold, from squares of ``sizes`` cells."""
    cuts = [cells * ratio for cells in sizes]
    per_cut = [received / cut for received, cut in zip(nbytes, cuts, strict=True)]
    others = [(cells - split(cells, _BANDS)[1].size) * ratio for cells in sizes]
    gathered = 0.0
    if len(sizes) > 1:
        gathered = max(0.0, (per_cut[-1] - per_cut[0]) / (others[-1] - others[0]))
    return max(0.0, (per_cut[0] - gathered * others[0]) / 2), gathered


def _straight(by_frames: dict[int, float]) -> tuple[float, float]:
    """a, b of ``a + b * (T - 1)`` through the values of the shortest and of the longest clip."""
    (short, first), *others = sorted(by_frames.items())
    slope = (others[-1][1] - first) / (others[-1][0] - short) if others else 0.0
    return first - slope * (short - 1), slope


def _bent(by_frames: dict[int, float]) -> tuple[float, float, float]:
    """a, b, c of ``a + b * (T - 1) + c * (T - 1)^2``: in one pass the tokens of all frames may attend to one another."""
    straight = _straight(by_frames)
    if len(by_frames) < 3:
        return (*straight, 0.0)
    (x0, y0), (x1, y1), (x2, y2) = ((frames - 1, value) for frames, value in sorted(by_frames.items()))
    curve = ((y2 - y1) / (x2 - x1) - (y1 - y0) / (x1 - x0)) / (x2 - x0)
    if curve <= 1e-3 * y2 / max(1, x2) ** 2:
        return (*straight, 0.0)
    slope = (y1 - y0) / (x1 - x0) - curve * (x0 + x1)
    return y0 - slope * x0 - curve * x0**2, slope, curve
