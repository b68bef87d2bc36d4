"""What one request asks of one group, mode by mode: passes that fit, memory, operands, time, and why a mode cannot run.

Which of the modes is taken is the planner's to choose (``decode_service.planning.planner``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from decode_service.planning.bands import split
from decode_service.planning.cost import Amount, Calibration, amount
from decode_service.planning.memory import MemoryNeed, gib, memory_need
from decode_service.planning.plan import SHARD_AXIS, DecodePlan
from decode_service.planning.spec import ModelSpec
from decode_service.planning.tiles import TileGrid, assign_largest_first

MAX_OPERAND_ELEMENTS = 2**31 - 1

#: Lengths of passes that are compared where nobody asks for one, and what the shortest may take more than the best.
CHUNKS = (1, 2, 4, 8, 16)
CHUNK_MARGIN = 0.05

#: Latent rows and columns that one rank decodes at a time.
Region = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of every part in time, and who decodes them.

    Attributes:
        grid: of one part.
        work: latent cells of each tile, part by part.
        owners: the rank of each.
        ranks: how many have any.
    """

    grid: TileGrid
    work: tuple[int, ...]
    owners: tuple[int, ...]
    ranks: int

    @classmethod
    def of_plan(cls, spec: ModelSpec, plan: DecodePlan) -> Tiles | None:
        """Those of ``plan``; None where it has none."""
        if plan.tiles is None:
            return None
        return cls(plan.tiles, plan.tiles.areas() * spec.tile_parts(plan.latent_shape), plan.owners, plan.ranks)

    def largest(self) -> Region:
        """Rows and columns of the largest tile."""
        return max(row.size for row in self.grid.rows), max(column.size for column in self.grid.columns)

    def jobs(self) -> list[tuple[int, int, int]]:
        """Owner, part in time and latent cells of every tile."""
        pairs = zip(self.owners, self.work, strict=True)
        return [(owner, index // self.grid.count, cells) for index, (owner, cells) in enumerate(pairs)]

    def largest_share(self) -> int:
        """Latent cells of the rank that decodes most."""
        shares = [0] * self.ranks
        for owner, cells in zip(self.owners, self.work, strict=True):
            shares[owner] += cells
        return max(shares)


@dataclass(frozen=True, slots=True)
class Settled:
    """A mode with its chunk: what it needs, or why it cannot run; ``bound`` is what a shorter chunk than asked for is."""

    chunk: int
    need: MemoryNeed | None
    problem: str | None
    bound: str = "what kernels can index"


class Demands:
    """One request and one group; every method is a pure function of the constructor's arguments.

    Args:
        spec: the model.
        shape: of the latents, which ``spec`` can decode.
        group_size: number of ranks.
        budget_bytes: what may be needed of a rank's memory, or None for no limit.
        collect: how the pixels are brought together.
        chunk: latent frames per pass after the first; None where nobody asked for a length, so that the fastest is taken.
        pixel_bytes: bytes of one value of the reply.
        calibration: how fast the group is; None where nobody measured.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shape: tuple[int, ...],
        group_size: int,
        budget_bytes: int | None,
        collect: str,
        chunk: int | None,
        pixel_bytes: int = 1,
        calibration: Calibration | None = None,
    ) -> None:
        self.spec = spec
        self.shape = shape
        self.size = group_size
        self.budget_bytes = budget_bytes
        self.collect = collect
        self.frames, self.height, self.width = spec.output_extents(shape)
        self.latent_frames = shape[2] if len(shape) == 5 else 1
        self.calibration = None if spec.work is None else calibration
        self.chunk = chunk if chunk is not None and spec.chunked else 1
        self.free_chunk = chunk is None and spec.chunked and self.calibration is not None
        self.pixel_bytes = pixel_bytes

    def axes_by_length(self) -> tuple[str, str]:
        """Both spatial modes, the longer axis first, width on ties."""
        if self.shape[-2] > self.shape[-1]:
            return "spatial_shard_height", "spatial_shard_width"
        return "spatial_shard_width", "spatial_shard_height"

    def tiles(self) -> Tiles:
        """The tiles of a model that has any, divided over the ranks."""
        assert self.spec.tiles is not None
        grid = self.spec.tiles.grid(self.shape[-2], self.shape[-1], self.spec.spatial_ratio, self.spec.decoder_ratio)
        work = grid.areas() * self.spec.tile_parts(self.shape)
        ranks = min(self.size, len(work))
        return Tiles(grid, work, assign_largest_first(work, ranks), ranks)

    def cells(self, axis: str) -> int:
        """Latent cells of ``height`` or ``width``."""
        return self.shape[-2] if axis == "height" else self.shape[-1]

    def region(self, mode: str) -> Region:
        """Latent rows and columns that one rank decodes at a time; items of a batch go one by one."""
        rows, columns = self.shape[-2:]
        if mode == "spatial_shard_height":
            rows = split(rows, self.size)[0].size
        elif mode == "spatial_shard_width":
            columns = split(columns, self.size)[0].size
        return rows, columns

    def problem(self, mode: str) -> str | None:
        """Why ``mode`` cannot decode this request, or None."""
        spec = self.spec
        if mode == "tile":
            return spec.no_tiles_reason if spec.tiles is None else None
        if spec.tile_only:
            return f"{spec.class_name} decodes by its own tiles only; {spec.no_exact_axes_reason}"
        if mode == "batch":
            if self.shape[0] < 2:
                return "batch divides items over ranks, and there is one item"
        elif mode.startswith("spatial_shard"):
            axis = SHARD_AXIS[mode]
            if axis not in spec.exact_axes:
                return spec.no_exact_axes_reason or f"{spec.class_name} cannot be sharded along the {axis}"
            if self.size < 2:
                return "the group has one rank"
            cells = self.cells(axis)
            if cells < self.size * spec.min_band_cells:
                each = f" with at least {spec.min_band_cells} each" if spec.min_band_cells > 1 else ""
                return f"{cells} latent cells of {axis} are fewer than {self.size} ranks{each}"
        return self.settle(mode, self.region(mode)).problem

    def predictions(self) -> tuple[tuple[str, float], ...]:
        """Every exact mode that can run and its predicted time in milliseconds, those that hold fewer ranks first."""
        if self.calibration is None or self.spec.tile_only:
            return ()
        times = []
        for mode in ("direct", "batch", *self.axes_by_length()):
            if mode != "direct" and self.size == 1:
                continue
            if self.problem(mode) is None:
                milliseconds = self.predicted_ms(mode, self.settle(mode, self.region(mode)).chunk)
                times += [] if milliseconds is None else [(mode, milliseconds)]
        return tuple(times)

    def predicted_ms(self, mode: str, chunk: int, tiles: Tiles | None = None) -> float | None:
        """How long the ranks take in ``mode``; None where nobody measured."""
        done = self.amount(mode, chunk, tiles)
        return None if done is None or self.calibration is None else self.calibration.seconds(done, mode) * 1e3

    def amount(self, mode: str, chunk: int, tiles: Tiles | None) -> Amount | None:
        """What the rank that has most to do does in ``mode``; None where nobody counted."""
        region = self.region(mode)
        parallel = min(self.size, self.shape[0]) if mode == "batch" else self.size
        return amount(
            self.spec,
            self.shape,
            mode=mode,
            ranks=tiles.ranks if tiles else 1 if mode == "direct" else parallel,
            chunk=chunk,
            share=region[0] * region[1] / (self.shape[-2] * self.shape[-1]),
            items=split(self.shape[0], parallel)[0].size if mode == "batch" else self.shape[0],
            collect=self.collect,
            pixel_bytes=self.pixel_bytes,
            tiles=tiles.jobs() if tiles else (),
        )

    def soonest_chunk(self, mode: str, region: Region, tiles: Tiles | None) -> int:
        """The length of passes that nobody asked for: the shortest that is as good as the best that fits."""
        budget = self.budget_bytes
        times = {}
        for chunk in CHUNKS:
            need = self.need(mode, region, chunk, tiles)
            too_much = need is not None and budget is not None and need.per_rank_bytes > budget
            beyond = self.operand_elements(region, chunk) > MAX_OPERAND_ELEMENTS or too_much
            if chunk > 1 and (beyond or chunk > self.latent_frames - 1):
                break
            milliseconds = self.predicted_ms(mode, chunk, tiles)
            assert milliseconds is not None
            times[chunk] = milliseconds
        least = min(times.values())
        return next(chunk for chunk, milliseconds in times.items() if milliseconds * (1 - CHUNK_MARGIN) <= least)

    def operand_elements(self, region: Region, chunk: int) -> int:
        """Elements of the widest operand of one pass over ``region``, padding included."""
        first, later = self.spec.operand_per_pixel_first, self.spec.operand_per_pixel
        if self.spec.pass_frames:
            per_pixel = first + later * (min(self.spec.pass_frames, self.latent_frames) - 1)
        else:
            per_pixel = max(first, later * min(chunk, self.latent_frames - 1))
        return int(per_pixel * self.padded_pixels(region))

    def padded_pixels(self, region: Region) -> int:
        ratio, padding = self.spec.spatial_ratio, self.spec.operand_padding
        return (region[0] * ratio + padding) * (region[1] * ratio + padding)

    def fitting_chunk(self, region: Region, wished: int) -> int | None:
        """The longest chunk up to ``wished`` whose operands PyTorch's kernels can index; None if there is none.

        Any chunk gives the same pixels, so one that is too long is shortened rather than refused.
        """
        if self.operand_elements(region, wished) <= MAX_OPERAND_ELEMENTS:
            return wished
        if self.operand_elements(region, 1) > MAX_OPERAND_ELEMENTS:
            return None
        per_frame = self.spec.operand_per_pixel * self.padded_pixels(region)
        return min(wished, int(MAX_OPERAND_ELEMENTS / per_frame))

    def settle(self, mode: str, region: Region, tiles: Tiles | None = None) -> Settled:
        """The longest chunk with which ``mode`` fits the kernels and the memory, what it needs, and why none does."""
        wished = self.soonest_chunk(mode, region, tiles) if self.free_chunk else self.chunk
        chunk = self.fitting_chunk(region, wished)
        if chunk is None:
            return Settled(
                1,
                None,
                f"its widest operand would have {self.operand_elements(region, 1):.2e} elements, over the "
                f"{MAX_OPERAND_ELEMENTS} that PyTorch's kernels can index",
            )
        need = self.need(mode, region, chunk, tiles)
        budget = self.budget_bytes
        if need is None or budget is None or need.per_rank_bytes <= budget:
            return Settled(chunk, need, None)

        def fits(frames: int) -> bool:
            shorter = self.need(mode, region, frames, tiles)
            return shorter is not None and shorter.per_rank_bytes <= budget

        # Longer than the rest of the clip is the rest of the clip.
        fewer = largest(min(chunk, self.latent_frames - 1) - 1, fits) if self.spec.chunked else 0
        if fewer > 0:
            return Settled(fewer, self.need(mode, region, fewer, tiles), None, bound="what fits the memory")
        return Settled(
            chunk, need, f"it needs {gib(need.per_rank_bytes)} of memory on a rank, and the budget is {gib(budget)}"
        )

    def need(
        self, mode: str, region: Region, chunk: int, tiles: Tiles | None, *, together: int = 1
    ) -> MemoryNeed | None:
        """The memory that ``mode`` needs of the rank that needs most; None where the model was not measured."""
        items = split(self.shape[0], min(self.size, self.shape[0]))[0].size if mode == "batch" else self.shape[0]
        need = memory_need(
            self.spec,
            self.shape,
            mode=mode,
            share=region[0] * region[1] / (self.shape[-2] * self.shape[-1]),
            items=items,
            chunk=chunk,
            collect=self.collect,
            pixel_bytes=self.pixel_bytes,
            tile_cells=sum(tiles.work) if tiles else 0,
            owned_tile_cells=tiles.largest_share() if tiles else 0,
            together=together,
        )
        return None if need is None else replace(need, budget_bytes=self.budget_bytes)


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``limit`` that fits, 0 if none does; what fits with more fits with fewer."""
    low, high = 0, limit
    while low < high:
        middle = math.ceil((low + high) / 2)
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
