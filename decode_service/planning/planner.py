"""The planner: (model, latent shape, group size, policy, wish, load, calibration) -> ``DecodePlan``, as one pure function.

``auto`` takes, of the exact modes that can run, the one that is predicted to be done first, where the group was calibrated
(``decode_service.planning.cost``); a frame within ``direct_max_pixels``, if the operator gave one, is not sharded whatever
the prediction. Without a calibration it decides by rules, in this order: a tile-only model is tiled; several items are
divided over the ranks; a frame small enough for one rank is decoded by one; otherwise the longer axis with at least as many
latent rows as ranks is sharded, width on ties; otherwise one rank decodes it. Tiles are taken only where no exact mode can
run. What needs more memory than the budget, or wider operands than kernels index, cannot run. Where that divides a request
that is not too large over all ranks, exactly, and there are as many requests as ranks (``Load``), one rank decodes it instead.
A forced mode is never reinterpreted silently: where it cannot run, the plan falls back to tiles (to one rank where the model
has none) and says so, and ``strict`` makes that an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from decode_service.errors import InvalidLatentsError, InvalidRequestError, UnsupportedModeError
from decode_service.planning.bands import Band, split
from decode_service.planning.cost import Amount, Calibration, amount
from decode_service.planning.load import Load
from decode_service.planning.memory import MemoryNeed, gib, memory_need
from decode_service.planning.plan import COLLECTS, MODES, SHARD_AXIS, Axis, Collect, DecodePlan, Mode
from decode_service.planning.spec import ModelSpec
from decode_service.planning.tiles import TileGrid, assign_largest_first

MAX_OPERAND_ELEMENTS = 2**31 - 1

#: The reason of a plan in the mode that was forced.
ASKED_FOR = "asked for"

#: Frames of at most so many pixels go to one rank where neither a prediction nor the operator decides.
DIRECT_MAX_PIXELS = 512 * 512

#: Predictions that differ by less are equal. Then the mode that leaves most to other requests goes first.
MODE_MARGIN = 0.1

#: Lengths of passes that are compared where nobody asks for one, and what the shortest may take more than the best.
CHUNKS = (1, 2, 4, 8, 16)
CHUNK_MARGIN = 0.05

#: Latent rows and columns that one rank decodes at a time.
Region = tuple[int, int]

# Latent channels by which people recognise a VAE; used only to say which model a request was probably meant for.
LIKELY_VAES = {
    4: "SD 1/2, SDXL or another 4-channel AutoencoderKL",
    12: "Mochi",
    16: "Wan 2.1 (also the Wan 2.2 14B models), Qwen-Image, FLUX.1, SD3, HunyuanVideo or CogVideoX",
    24: "MiniMax-H3",
    32: "FLUX.2, HunyuanVideo 1.5 or DC-AE",
    48: "Wan 2.2 5B (TI2V)",
    64: "packed FLUX.1 or Qwen-Image latents, which go as (B,tokens,64) with layout packed",
    128: "LTX-Video, or packed FLUX.2 latents",
    768: "a representation autoencoder (RAE)",
}


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's choices; see ``decode_service.config.PolicyConfig`` for their meaning."""

    mode: str = "auto"
    direct_max_pixels: int | None = None
    busy_direct_max_pixels: int = 32 << 20
    strict: bool = False
    chunk: int | None = None
    collect: str = "shards"
    memory_budget_bytes: int | None = None


def validate_latents(spec: ModelSpec, shape: tuple[int, ...]) -> None:
    """Check that ``spec`` can decode latents of ``shape``.

    Raises:
        InvalidLatentsError: saying which shape would be right and, for a wrong channel count, the likely VAE.
    """
    layouts = {4: "(B,C,H,W)", 5: "(B,C,T,H,W)"}
    allowed = spec.latent_ndims()
    wanted = " or ".join(f"{ndim}-D {layouts[ndim]}" for ndim in reversed(allowed))
    if len(shape) not in allowed:
        raise InvalidLatentsError(
            f"{spec.name} ({spec.class_name}) takes {wanted} latents, got {len(shape)} dimensions {list(shape)}",
            param="latents.shape",
        )
    if min(shape) < 1:
        raise InvalidLatentsError(f"every extent must be at least 1, got {list(shape)}", param="latents.shape")
    channels = shape[1]
    if channels != spec.latent_channels:
        likely = LIKELY_VAES.get(channels)
        hint = f"; {channels} channels are usual for {likely}" if likely else ""
        if len(shape) == 5 and shape[2] == spec.latent_channels:
            hint = "; dimensions 1 and 2 look swapped: send (B,C,T,H,W), or say layout BTCHW"
        raise InvalidLatentsError(
            f"{spec.name} ({spec.class_name}) expects {spec.latent_channels} latent channels in dimension 1, "
            f"got {channels} in {list(shape)}{hint}",
            param="latents.shape",
        )
    if min(shape[-2:]) < spec.min_cells:
        raise InvalidLatentsError(
            f"{spec.name} ({spec.class_name}) needs at least {spec.min_cells} latent rows and columns, got {list(shape)}",
            param="latents.shape",
        )
    if spec.fixed_cells and set(shape[-2:]) != {spec.fixed_cells}:
        raise InvalidLatentsError(
            f"{spec.name} ({spec.class_name}) decodes pictures of one size, {spec.fixed_cells} x {spec.fixed_cells} latent "
            f"cells, got {shape[-2]} x {shape[-1]} in {list(shape)}",
            param="latents.shape",
        )
    if len(shape) == 5 and spec.frame_rule is not None:
        problem = spec.frame_rule.problem(shape[2])
        if problem:
            raise InvalidLatentsError(
                f"{spec.name} cannot decode {shape[2]} latent frames: {problem}", param="latents.shape"
            )


def validate_denormalize(spec: ModelSpec, shape: tuple[int, ...]) -> None:
    """Check that ``spec`` can denormalize latents of ``shape``, which it can decode.

    Raises:
        InvalidRequestError: saying what to send instead.
    """
    reason, frames = spec.no_denormalize_reason, shape[2] if len(shape) == 5 else 1
    if not reason and spec.normalized_frames and frames > spec.normalized_frames:
        reason = f"it has statistics for {spec.normalized_frames} latent frames, got {frames}"
    if reason:
        raise InvalidRequestError(
            f"{spec.name} ({spec.class_name}) cannot denormalize these latents: {reason}; send latents as its decode takes "
            "them, with denormalize false",
            param="denormalize",
        )


def make_plan(
    spec: ModelSpec,
    latent_shape: tuple[int, ...],
    *,
    group_size: int,
    policy: Policy,
    mode: str = "auto",
    strict: bool | None = None,
    collect: str | None = None,
    chunk: int | None = None,
    load: Load | None = None,
    pixel_bytes: int = 1,
    calibration: Calibration | None = None,
) -> DecodePlan:
    """Decide how latents of ``latent_shape`` are decoded by a group of ``group_size`` ranks.

    Args:
        mode: ``auto`` or one of ``MODES``; ``auto`` takes the policy's mode.
        strict: whether a forced mode that cannot run is an error; None takes the policy's.
        collect: one of ``COLLECTS``; None takes the policy's.
        chunk: latent frames per decoder pass after the first; None takes the policy's, and where that has none the one
            that is predicted to be fastest, or 1.
        load: what else the group has to do. Only ``auto`` heeds it, to choose between exact modes; None is nothing.
        pixel_bytes: bytes of one value of the reply, for the memory that it takes.
        calibration: how fast the group is; None where nobody measured, so that fixed rules decide.

    Raises:
        InvalidLatentsError: the shape does not fit the model.
        InvalidRequestError: an argument is not one of its values.
        UnsupportedModeError: the forced mode cannot run and falling back is not allowed, or nothing fits.
    """
    validate_latents(spec, latent_shape)
    wished = policy.mode if mode == "auto" else mode
    if wished != "auto" and wished not in MODES:
        raise InvalidRequestError(f"mode must be auto or one of {', '.join(MODES)}, got {mode!r}", param="mode")
    how = policy.collect if collect is None else collect
    if how not in COLLECTS:
        raise InvalidRequestError(f"collect must be one of {', '.join(COLLECTS)}, got {how!r}", param="collect")
    if chunk is not None and chunk < 1:
        raise InvalidRequestError(f"chunk must be at least 1 latent frame, got {chunk}", param="chunk")

    passes = policy.chunk if chunk is None else chunk
    planner = _Planner(spec, latent_shape, group_size, policy, how, passes, pixel_bytes, calibration)
    if wished == "auto":
        return planner.under(load or Load())
    return planner.forced(wished, policy.strict if strict is None else strict)


def amount_of(spec: ModelSpec, plan: DecodePlan, *, pixel_bytes: int = 1) -> Amount | None:
    """What the rank that has most to do does in ``plan``; None for a model whose work was not counted."""
    planner = _Planner(spec, plan.latent_shape, plan.ranks, Policy(), plan.collect, plan.chunk, pixel_bytes)
    return planner.amount(plan.mode, plan.chunk, _tiles_of(spec, plan))


def need_in_float32(
    spec: ModelSpec, plan: DecodePlan, *, pixel_bytes: int = 1, budget_bytes: int | None = None
) -> MemoryNeed | None:
    """The memory that carrying out ``plan`` takes with the model cast up to float32; None where it was not measured."""
    if spec.footprint is None:
        return None
    cast = replace(spec, footprint=spec.footprint.in_float32())
    policy = Policy(memory_budget_bytes=budget_bytes)
    planner = _Planner(cast, plan.latent_shape, plan.ranks, policy, plan.collect, plan.chunk, pixel_bytes)
    region = planner.region(plan.mode)
    if plan.tiles is not None:
        region = _largest_tile(plan.tiles)
    return planner.need(plan.mode, region, plan.chunk, _tiles_of(spec, plan))


def together(
    spec: ModelSpec, plan: DecodePlan, items: int, *, policy: Policy, pixel_bytes: int = 1
) -> DecodePlan | None:
    """The plan of one pass for ``items`` requests that are each planned as ``plan``, on one rank.

    None where a pass cannot take so many: the plan is not for one item on one rank, or memory or the kernels' range of
    indices do not suffice.
    """
    if plan.mode != "direct" or plan.needs_group or plan.latent_shape[0] != 1 or items < 2:
        return None
    shape = (items, *plan.latent_shape[1:])
    planner = _Planner(spec, shape, 1, policy, plan.collect, plan.chunk, pixel_bytes)
    region = planner.region(plan.mode)
    if items * planner.operand_elements(region, plan.chunk) > MAX_OPERAND_ELEMENTS:
        return None
    need = planner.need(plan.mode, region, plan.chunk, None, together=items)
    budget = policy.memory_budget_bytes
    if need is not None and budget is not None and need.per_rank_bytes > budget:
        return None
    reason = f"{plan.reason}; {items} requests in one pass"
    # Times are predicted for requests that are decoded one by one.
    return replace(
        plan, latent_shape=shape, together=items, memory=need, reason=reason, predicted_ms=None, alternatives=()
    )


def _tiles_of(spec: ModelSpec, plan: DecodePlan) -> _Tiles | None:
    if plan.tiles is None:
        return None
    return _Tiles(plan.tiles, plan.tiles.areas() * spec.tile_parts(plan.latent_shape), plan.owners, plan.ranks)


def _largest_tile(grid: TileGrid) -> Region:
    return max(row.size for row in grid.rows), max(column.size for column in grid.columns)


class _Planner:
    """One planning problem; every method is a pure function of the constructor's arguments."""

    def __init__(
        self,
        spec: ModelSpec,
        shape: tuple[int, ...],
        group_size: int,
        policy: Policy,
        collect: str,
        chunk: int | None,
        pixel_bytes: int = 1,
        calibration: Calibration | None = None,
    ) -> None:
        self.spec = spec
        self.shape = shape
        self.size = group_size
        self.policy = policy
        self.collect = collect
        self.frames, self.height, self.width = spec.output_extents(shape)
        self.latent_frames = shape[2] if len(shape) == 5 else 1
        self.calibration = None if spec.work is None else calibration
        # None: the planner chooses.
        self.chunk = chunk if chunk is not None and spec.chunked else 1
        self.free_chunk = chunk is None and spec.chunked and self.calibration is not None
        self.pixel_bytes = pixel_bytes

    def under(self, load: Load) -> DecodePlan:
        """``auto`` with something else to do: one rank where it shortens the queue and gives the same pixels."""
        idle = self.auto()
        # A broadcast keeps all ranks busy whoever decodes.
        divided = idle.axis is not None and idle.collect != "broadcast"
        if not divided or idle.output_pixels > self.policy.busy_direct_max_pixels or self.problem("direct"):
            return idle
        why = load.one_rank_each(self.size)
        return idle if why is None else self.direct(why)

    def auto(self, *, advise: bool = True) -> DecodePlan:
        if self.spec.tile_only:
            return self.tile("the model decodes by its own tiles only", advise=advise)
        soonest = self.soonest()
        if soonest is not None:
            return soonest
        if self.shape[0] > 1 and self.size > 1 and not self.problem("batch"):
            return self.divided("batch", f"{self.shape[0]} items over {self.size} ranks")
        direct_problem = self.problem("direct")
        limit = DIRECT_MAX_PIXELS if self.policy.direct_max_pixels is None else self.policy.direct_max_pixels
        if not direct_problem and self.height * self.width <= limit:
            return self.direct(self.within(limit))
        if self.size == 1 and not direct_problem:
            return self.direct("a group of one rank")
        for candidate in self.axes_by_length():
            if not self.problem(candidate):
                rows = self.shape[-2] if candidate == "spatial_shard_height" else self.shape[-1]
                axis = SHARD_AXIS[candidate]
                return self.divided(
                    candidate, f"{axis} is the longest axis that {self.size} ranks can share: {rows} latent cells"
                )
        problems = "; ".join(dict.fromkeys(filter(None, (self.problem(m) for m in ("direct", *self.axes_by_length())))))
        if not direct_problem:
            # However large: exact pixels later are better than approximate ones sooner, and the caller can ask for tiles.
            if not self.spec.exact_axes:
                problems = self.spec.no_exact_axes_reason
            return self.direct(f"one rank decodes exactly, and this group cannot share the frame: {problems}")
        if self.spec.tiles is None:
            advice = f"; what would fit: {self.what_would_fit()}" if advise else ""
            raise UnsupportedModeError(
                f"{list(self.shape)} cannot be decoded by {self.size} ranks: {problems}; there is no tile mode: "
                f"{self.spec.no_tiles_reason}{advice}",
                param="latents.shape",
            )
        return self.tile(f"no exact mode can run: {problems}", advise=advise)

    def forced(self, mode: str, strict: bool) -> DecodePlan:
        problem = self.problem(mode)
        if problem is None:
            reason = ASKED_FOR
            if mode == "tile":
                return self.tile(reason)
            if mode == "direct":
                return self.direct(reason)
            return self.divided(mode, reason)
        # Not a matter of size: no request to such a model can ever run so, and falling back would hide a mistake.
        if mode == "tile" or (self.spec.tile_only and mode.startswith("spatial_shard")):
            instead = "tile" if self.spec.tile_only else "direct"
            raise UnsupportedModeError(
                f"{mode} is not possible for {self.spec.name}: {problem}; use {instead} or auto", param="mode"
            )
        if strict:
            raise UnsupportedModeError(f"{mode} cannot decode this request: {problem}", param="mode")
        reason, fallback = "the mode that was asked for cannot run", f"{mode} cannot run: {problem}"
        if self.spec.tiles is not None:
            return self.tile(reason, fallback=fallback)
        direct_problem = self.problem("direct")
        if direct_problem is not None:
            raise UnsupportedModeError(
                f"{fallback}, one rank cannot decode it either ({direct_problem}), and there is no tile mode: "
                f"{self.spec.no_tiles_reason}",
                param="mode",
            )
        return self.direct(reason, fallback=fallback)

    def within(self, limit: int) -> str:
        return f"a frame of {self.height * self.width} pixels is within direct_max_pixels ({limit})"

    def soonest(self) -> DecodePlan | None:
        """The exact mode that is predicted to be done first; None without predictions, or where no exact mode can run."""
        times = dict(self.predictions())
        limit = self.policy.direct_max_pixels
        small = limit is not None and self.height * self.width <= limit and "direct" in times
        if small:
            times = {mode: milliseconds for mode, milliseconds in times.items() if mode in ("direct", "batch")}
        if not times:
            return None
        least = min(times.values())
        mode = next(mode for mode, milliseconds in times.items() if milliseconds * (1 - MODE_MARGIN) <= least)
        others = [f"{milliseconds:.0f} in {other}" for other, milliseconds in times.items() if other != mode]
        reason = f"predicted to take {times[mode]:.0f} ms"
        if others:
            reason += f", against {', '.join(others)}"
        elif small and limit is not None:
            reason = self.within(limit)
        elif self.size == 1:
            reason = "a group of one rank"
        elif not self.spec.exact_axes:
            reason = f"one rank decodes exactly, and no group can: {self.spec.no_exact_axes_reason}"
        if mode == "direct":
            return self.direct(reason)
        return self.divided(mode, reason)

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

    def predicted_ms(self, mode: str, chunk: int, tiles: _Tiles | None = None) -> float | None:
        """How long the ranks take in ``mode``; None where nobody measured."""
        done = self.amount(mode, chunk, tiles)
        return None if done is None or self.calibration is None else self.calibration.seconds(done, mode) * 1e3

    def amount(self, mode: str, chunk: int, tiles: _Tiles | None) -> Amount | None:
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

    def soonest_chunk(self, mode: str, region: Region, tiles: _Tiles | None) -> int:
        """The length of passes that nobody asked for: the shortest that is as good as the best that fits."""
        budget = self.policy.memory_budget_bytes
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

    def axes_by_length(self) -> tuple[str, str]:
        """Both spatial modes, the longer axis first, width on ties."""
        if self.shape[-2] > self.shape[-1]:
            return "spatial_shard_height", "spatial_shard_width"
        return "spatial_shard_width", "spatial_shard_height"

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

    def settle(self, mode: str, region: Region, tiles: _Tiles | None = None) -> _Settled:
        """The longest chunk with which ``mode`` fits the kernels and the memory, what it needs, and why none does."""
        wished = self.soonest_chunk(mode, region, tiles) if self.free_chunk else self.chunk
        chunk = self.fitting_chunk(region, wished)
        if chunk is None:
            return _Settled(
                1,
                None,
                f"its widest operand would have {self.operand_elements(region, 1):.2e} elements, over the "
                f"{MAX_OPERAND_ELEMENTS} that PyTorch's kernels can index",
            )
        need = self.need(mode, region, chunk, tiles)
        budget = self.policy.memory_budget_bytes
        if need is None or budget is None or need.per_rank_bytes <= budget:
            return _Settled(chunk, need, None)

        def fits(frames: int) -> bool:
            shorter = self.need(mode, region, frames, tiles)
            return shorter is not None and shorter.per_rank_bytes <= budget

        # Longer than the rest of the clip is the rest of the clip.
        fewer = _largest(min(chunk, self.latent_frames - 1) - 1, fits) if self.spec.chunked else 0
        if fewer > 0:
            return _Settled(fewer, self.need(mode, region, fewer, tiles), None, bound="what fits the memory")
        return _Settled(
            chunk, need, f"it needs {gib(need.per_rank_bytes)} of memory on a rank, and the budget is {gib(budget)}"
        )

    def need(
        self, mode: str, region: Region, chunk: int, tiles: _Tiles | None, *, together: int = 1
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
        return None if need is None else replace(need, budget_bytes=self.policy.memory_budget_bytes)

    def what_would_fit(self) -> str:
        """Advice for a request that nothing can decode: the nearest ones that this group can, as sizes."""
        batch, width = self.shape[0], self.shape[-1]
        advice = []
        if batch > 1:
            fits = _largest(batch - 1, lambda n: self.can((n, *self.shape[1:])))
            advice.append(f"{fits} items at a time" if fits else "")
        if not any(advice) and self.latent_frames > 1:
            frames = _largest(self.latent_frames - 1, lambda t: self.can((1, self.shape[1], t, *self.shape[-2:])))
            advice.append(f"{frames} latent frames at a time" if frames else "")
        if not any(advice):
            one = (1, *self.shape[1:-2])

            def scaled(columns: int) -> tuple[int, int]:
                return max(1, self.shape[-2] * columns // width), columns

            columns = _largest(width - 1, lambda n: self.can((*one, *scaled(n))))
            if columns:
                height_px, width_px = (cells * self.spec.spatial_ratio for cells in scaled(columns))
                advice.append(f"a frame of {height_px} x {width_px} pixels")
        ranks = next((n for n in (2, 4, 8, 16, 32, 64) if n > self.size and self.can(self.shape, n)), None)
        advice.append(f"a group of {ranks} ranks" if ranks else "")
        if self.policy.memory_budget_bytes is not None and self.can(self.shape, budget=None):
            advice.append("a larger policy.memory_budget_bytes")
        if self.spec.tiles is not None and not self.spec.tile_only:
            advice.append("smaller tiles (policy.tile)")
        return ", or ".join(filter(None, advice)) or "nothing that this group could hold"

    def can(self, shape: tuple[int, ...], ranks: int | None = None, budget: int | None = -1) -> bool:
        """Whether ``auto`` has a plan for another shape, another number of ranks, or another budget."""
        policy = self.policy if budget == -1 else replace(self.policy, memory_budget_bytes=budget)
        # Whether it can does not depend on how fast it is.
        other = _Planner(self.spec, shape, ranks or self.size, policy, self.collect, self.chunk, self.pixel_bytes)
        try:
            validate_latents(self.spec, shape)
            other.auto(advise=False)
        except (InvalidLatentsError, UnsupportedModeError):
            return False
        return True

    def direct(self, reason: str, *, fallback: str | None = None) -> DecodePlan:
        return self.plan("direct", 1, None, (), reason, fallback=fallback)

    def divided(self, mode: str, reason: str) -> DecodePlan:
        """A plan that divides the batch, the height or the width."""
        axis = SHARD_AXIS[mode]
        extent = {"batch": self.shape[0], "height": self.shape[-2], "width": self.shape[-1]}[axis]
        ranks = min(self.size, extent)
        return self.plan(mode, ranks, axis, split(extent, ranks), reason)

    def tile(self, reason: str, *, fallback: str | None = None, advise: bool = True) -> DecodePlan:
        assert self.spec.tiles is not None
        grid = self.spec.tiles.grid(self.shape[-2], self.shape[-1], self.spec.spatial_ratio, self.spec.decoder_ratio)
        work = grid.areas() * self.spec.tile_parts(self.shape)
        ranks = min(self.size, len(work))
        tiles = _Tiles(grid, tuple(work), assign_largest_first(work, ranks), ranks)
        region = _largest_tile(grid)
        settled = self.settle("tile", region, tiles)
        if settled.problem:
            advice = f"; what would fit: {self.what_would_fit()}" if advise else ""
            exact = "" if self.spec.tile_only or reason == ASKED_FOR else f"{fallback or reason}; and "
            raise UnsupportedModeError(
                f"{list(self.shape)} cannot be decoded by {self.size} ranks: {exact}in tiles of "
                f"{region[0] * self.spec.spatial_ratio} x {region[1] * self.spec.spatial_ratio} pixels "
                f"{settled.problem}{advice}",
                param="latents.shape",
            )
        return self.plan("tile", ranks, None, (), reason, fallback=fallback, tiles=tiles, settled=settled)

    def plan(
        self,
        mode: str,
        ranks: int,
        axis: Axis | None,
        bands: tuple[Band, ...],
        reason: str,
        *,
        fallback: str | None = None,
        tiles: _Tiles | None = None,
        settled: _Settled | None = None,
    ) -> DecodePlan:
        chosen: Mode = mode  # type: ignore[assignment]
        how: Collect = self.collect  # type: ignore[assignment]
        # A model whose contract is tiles is exact in them; so is a single tile.
        grid = tiles.grid if tiles else None
        exact = grid is None or self.spec.tile_only or grid.count == 1
        if not exact:
            reason += f"; approximate: {self.spec.tile_difference}"
        settled = settled or self.settle(mode, self.region(mode))
        chunk = settled.chunk
        if self.free_chunk and chunk > 1:
            reason += f"; passes of {chunk} latent frames, which take less time than shorter ones"
        elif chunk < self.chunk:
            reason += f"; chunk shortened from {self.chunk} to {chunk} latent frames, which is {settled.bound}"
        if not self.spec.tested:
            reason += f"; untested: {self.spec.class_name} is in no family that is compared with diffusers, and its own decode runs"
        return DecodePlan(
            mode=chosen,
            ranks=ranks,
            axis=axis,
            bands=bands,
            chunk=chunk,
            collect=how,
            reason=reason,
            fallback=fallback,
            exact=exact,
            tiles=grid,
            owners=tiles.owners if tiles else (),
            latent_shape=self.shape,
            output_frames=self.frames,
            output_height=self.height,
            output_width=self.width,
            tested=self.spec.tested,
            memory=settled.need,
            dtype=self.spec.dtype,
            dtype_reason=self.spec.dtype_reason,
            predicted_ms=self.predicted_ms(mode, chunk, tiles),
            alternatives=tuple((other, ms) for other, ms in self.predictions() if other != mode),
        )


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of every part in time, their latent cells, and the rank of each."""

    grid: TileGrid
    work: tuple[int, ...]
    owners: tuple[int, ...]
    ranks: int

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
class _Settled:
    """A mode with its chunk: what it needs, or why it cannot run; ``bound`` is what a shorter chunk than asked for is."""

    chunk: int
    need: MemoryNeed | None
    problem: str | None
    bound: str = "what kernels can index"


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``limit`` that fits, 0 if none does; what fits with more fits with fewer."""
    low, high = 0, limit
    while low < high:
        middle = math.ceil((low + high) / 2)
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
