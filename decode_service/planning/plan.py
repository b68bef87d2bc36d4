"""``DecodePlan``: the immutable answer to "how is this request decoded".

It is made once, by ``decode_service.planning.planner``, and carried out as it stands by every rank: ranks never decide,
so all of them issue the same collectives in the same order.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from decode_service.planning.bands import Band
from decode_service.planning.memory import MemoryNeed
from decode_service.planning.tiles import TileGrid, TileSpan

Mode = Literal["direct", "batch", "tile", "spatial_shard_height", "spatial_shard_width"]
Axis = Literal["batch", "height", "width"]
Collect = Literal["shards", "rank0", "broadcast"]

MODES: tuple[str, ...] = ("direct", "batch", "tile", "spatial_shard_height", "spatial_shard_width")
COLLECTS: tuple[str, ...] = ("shards", "rank0", "broadcast")
SHARD_AXIS: dict[str, Axis] = {"spatial_shard_height": "height", "spatial_shard_width": "width", "batch": "batch"}


@dataclass(frozen=True, slots=True)
class PixelFormat:
    """What ranks turn decoded pixels into, on the device, before they move.

    Attributes:
        dtype: ``uint8`` (channels last: [B,H,W,C] or [B,F,H,W,C]) or a float dtype of the wire (channels first:
            [B,C,H,W] or [B,C,F,H,W]).
        range: ``unit`` for [-1, 1]; ``model`` for the values exactly as the model's ``decode`` returns them.
    """

    dtype: str = "uint8"
    range: str = "unit"


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How one request is decoded.

    Attributes:
        mode: one of ``MODES``.
        ranks: ranks that decode. The other ranks of the group hold nothing (they still join a broadcast).
        axis: the axis that is divided over the ranks, or None (direct, tile).
        bands: for each of the ``ranks`` ranks its band of that axis: latent rows, latent columns or batch items.
        chunk: latent frames per decoder pass after the first frame.
        collect: how the pixels come back: every rank hands over what it holds (``shards``), everything on rank 0
            (``rank0``), or the whole on every rank (``broadcast``).
        reason: why this mode, for people.
        fallback: why the mode that was asked for could not run, or None.
        exact: whether the pixels are those of an undivided decode (tiles are an approximation of it).
        tiles: tile geometry, in tile mode.
        owners: the rank of every tile (row by row; for clip-wise families clip by clip), in tile mode.
        latent_shape: the latents the plan was made for, as ``vae.decode`` takes them: 4-D or 5-D, whatever was sent.
        output_frames, output_height, output_width: extents of the decoded picture, in frames and pixels.
        tested: whether the model is of a family that tests compare with diffusers; ``reason`` says so where it is not.
        memory: predicted need of the rank that needs most, or None where the model was not measured.
        dtype, dtype_reason: dtype of the arithmetic, and why it is that one.
        predicted_ms: how long the ranks will take, or None where no times were measured on them.
        alternatives: the other exact modes that could decode it, and how long they would take in milliseconds.
        together: items that one pass of the decoder takes; with more than 1 they are those of as many requests.
    """

    mode: Mode
    ranks: int
    axis: Axis | None
    bands: tuple[Band, ...]
    chunk: int
    collect: Collect
    reason: str
    fallback: str | None
    exact: bool
    tiles: TileGrid | None
    owners: tuple[int, ...]
    latent_shape: tuple[int, ...]
    output_frames: int
    output_height: int
    output_width: int
    tested: bool = True
    memory: MemoryNeed | None = None
    dtype: str = ""
    dtype_reason: str = ""
    predicted_ms: float | None = None
    alternatives: tuple[tuple[str, float], ...] = ()
    together: int = 1

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.ranks < 1 or self.chunk < 1:
            raise ValueError(f"ranks and chunk must be at least 1, got {self.ranks} and {self.chunk}")
        if self.together < 1 or (self.together > 1 and (self.mode != "direct" or self.needs_group)):
            raise ValueError(f"only one rank decodes items together, got {self.together} in {self.mode} mode")
        if (self.axis is None) != (not self.bands):
            raise ValueError("bands go with an axis, and an axis with bands")
        if self.bands and len(self.bands) != self.ranks:
            raise ValueError(f"{self.ranks} ranks need as many bands, got {len(self.bands)}")
        if (self.mode == "tile") != (self.tiles is not None):
            raise ValueError("tile geometry goes with tile mode")

    @property
    def needs_group(self) -> bool:
        """Whether every rank of the group must take part at the same time."""
        return self.ranks > 1 or self.collect == "broadcast"

    @property
    def output_pixels(self) -> int:
        """Decoded pixels in all: batch x frames x height x width."""
        return self.latent_shape[0] * self.output_frames * self.output_height * self.output_width

    def band(self, rank: int) -> Band | None:
        """The band of ``rank``, or None where it holds nothing or nothing is divided."""
        return self.bands[rank] if rank < len(self.bands) and self.bands[rank].size else None

    def public(self) -> dict[str, Any]:
        """The plan as replies show it: plain values only."""
        shown: dict[str, Any] = {
            "mode": self.mode,
            "ranks": self.ranks,
            "axis": self.axis,
            "chunk": self.chunk,
            "collect": self.collect,
            "reason": self.reason,
            "fallback": self.fallback,
            "exact": self.exact,
            "tested": self.tested,
            "bands": [[band.start, band.size] for band in self.bands],
            "output": {"frames": self.output_frames, "height": self.output_height, "width": self.output_width},
        }
        if self.together > 1:
            shown["together"] = self.together
        if self.tiles is not None:
            shown["tiles"] = {
                "rows": len(self.tiles.rows),
                "columns": len(self.tiles.columns),
                "owners": list(self.owners),
            }
        if self.dtype:
            shown["dtype"], shown["dtype_reason"] = self.dtype, self.dtype_reason
        if self.memory is not None:
            shown["memory"] = self.memory.public()
        if self.predicted_ms is not None:
            shown["predicted_ms"] = round(self.predicted_ms, 1)
            shown["alternatives"] = {mode: round(milliseconds, 1) for mode, milliseconds in self.alternatives}
        return shown

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which ``from_dict`` makes an equal plan."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DecodePlan:
        """The inverse of ``to_dict``, also after a trip through JSON or msgpack.

        Raises:
            ValueError, TypeError, KeyError: if the values are not those of a plan.
        """
        tiles = values["tiles"]
        grid = None
        if tiles is not None:
            grid = TileGrid(
                rows=tuple(TileSpan(**span) for span in tiles["rows"]),
                columns=tuple(TileSpan(**span) for span in tiles["columns"]),
                sequential=tiles["sequential"],
            )
        plain = {
            **values,
            "tiles": grid,
            "bands": tuple(Band(**band) for band in values["bands"]),
            "owners": tuple(values["owners"]),
            "latent_shape": tuple(values["latent_shape"]),
            "memory": MemoryNeed(**values["memory"]) if values.get("memory") else None,
            "alternatives": tuple((mode, milliseconds) for mode, milliseconds in values.get("alternatives", ())),
        }
        return cls(**plain)
