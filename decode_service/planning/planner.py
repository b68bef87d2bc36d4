"""The planner: (model, latent shape, group size, policy, wish, load, calibration) -> ``DecodePlan``, as one pure function.

``auto`` takes, of the exact modes that can run, the one that is predicted to be done first, where the group was calibrated
(``decode_service.planning.cost``); a frame within ``direct_max_pixels``, if the operator gave one, is not sharded whatever
the prediction. Without a calibration it decides by rules, in this order: a tile-only model is tiled; several items are
divided over the ranks; a frame small enough for one rank is decoded by one; otherwise the longer axis with at least as many
latent rows as ranks is sharded, width on ties; otherwise one rank decodes it. Tiles are taken only where no exact mode can
run. What needs more memory than the budget, or wider operands than kernels index, cannot run. Where that divides a request
that is not too large over all ranks, exactly, and there are as many requests as that gains (``Load``), one rank decodes it instead.
A forced mode is never reinterpreted silently: where it cannot run, the plan falls back to tiles (to one rank where the model
has none) and says so, and ``strict`` makes that an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from decode_service.errors import InvalidLatentsError, InvalidRequestError, UnsupportedModeError
from decode_service.planning.bands import Band, split
from decode_service.planning.cost import Amount, Calibration
from decode_service.planning.demands import MAX_OPERAND_ELEMENTS, Demands, Settled, Tiles, largest
from decode_service.planning.load import Load
from decode_service.planning.memory import MemoryNeed
from decode_service.planning.plan import COLLECTS, MODES, SHARD_AXIS, Axis, Collect, DecodePlan, Mode
from decode_service.planning.spec import ModelSpec

#: The reason of a plan in the mode that was forced.
ASKED_FOR = "asked for"

#: Frames of at most so many pixels go to one rank where neither a prediction nor the operator decides.
DIRECT_MAX_PIXELS = 512 * 512

#: Predictions that differ by less are equal. Then the mode that leaves most to other requests goes first.
MODE_MARGIN = 0.1

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
    demands = Demands(spec, plan.latent_shape, plan.ranks, None, plan.collect, plan.chunk, pixel_bytes)
    return demands.amount(plan.mode, plan.chunk, Tiles.of_plan(spec, plan))


def need_in_float32(
    spec: ModelSpec, plan: DecodePlan, *, pixel_bytes: int = 1, budget_bytes: int | None = None
) -> MemoryNeed | None:
    """The memory that carrying out ``plan`` takes with the model cast up to float32; None where it was not measured."""
    if spec.footprint is None:
        return None
    cast = replace(spec, footprint=spec.footprint.in_float32())
    demands = Demands(cast, plan.latent_shape, plan.ranks, budget_bytes, plan.collect, plan.chunk, pixel_bytes)
    tiles = Tiles.of_plan(spec, plan)
    region = demands.region(plan.mode) if tiles is None else tiles.largest()
    return demands.need(plan.mode, region, plan.chunk, tiles)


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
    budget = policy.memory_budget_bytes
    demands = Demands(spec, shape, 1, budget, plan.collect, plan.chunk, pixel_bytes)
    region = demands.region(plan.mode)
    if items * demands.operand_elements(region, plan.chunk) > MAX_OPERAND_ELEMENTS:
        return None
    need = demands.need(plan.mode, region, plan.chunk, None, together=items)
    if need is not None and budget is not None and need.per_rank_bytes > budget:
        return None
    reason = f"{plan.reason}; {items} requests in one pass"
    # Times are predicted for requests that are decoded one by one.
    return replace(
        plan, latent_shape=shape, together=items, memory=need, reason=reason, predicted_ms=None, alternatives=()
    )


class _Planner(Demands):
    """One planning problem: takes a mode, by what each demands and what the operator and the caller wish, and builds its plan.

    Every method is a pure function of the constructor's arguments.
    """

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
        super().__init__(spec, shape, group_size, policy.memory_budget_bytes, collect, chunk, pixel_bytes, calibration)
        self.policy = policy

    def under(self, load: Load) -> DecodePlan:
        """``auto`` with something else to do: one rank where it shortens the queue and gives the same pixels."""
        idle = self.auto()
        # A broadcast keeps all ranks busy whoever decodes.
        divided = idle.axis is not None and idle.collect != "broadcast"
        if not divided or idle.output_pixels > self.policy.busy_direct_max_pixels or self.problem("direct"):
            return idle
        times = dict(self.predictions())
        gain = times["direct"] / times[idle.mode] if {"direct", idle.mode} <= times.keys() else None
        why = load.one_rank_each(self.size, gain)
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

    def what_would_fit(self) -> str:
        """Advice for a request that nothing can decode: the nearest ones that this group can, as sizes."""
        batch, width = self.shape[0], self.shape[-1]
        advice = []
        if batch > 1:
            fits = largest(batch - 1, lambda n: self.can((n, *self.shape[1:])))
            advice.append(f"{fits} items at a time" if fits else "")
        if not any(advice) and self.latent_frames > 1:
            frames = largest(self.latent_frames - 1, lambda t: self.can((1, self.shape[1], t, *self.shape[-2:])))
            advice.append(f"{frames} latent frames at a time" if frames else "")
        if not any(advice):
            one = (1, *self.shape[1:-2])

            def scaled(columns: int) -> tuple[int, int]:
                return max(1, self.shape[-2] * columns // width), columns

            columns = largest(width - 1, lambda n: self.can((*one, *scaled(n))))
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
        tiles = self.tiles()
        region = tiles.largest()
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
        return self.plan("tile", tiles.ranks, None, (), reason, fallback=fallback, tiles=tiles, settled=settled)

    def plan(
        self,
        mode: str,
        ranks: int,
        axis: Axis | None,
        bands: tuple[Band, ...],
        reason: str,
        *,
        fallback: str | None = None,
        tiles: Tiles | None = None,
        settled: Settled | None = None,
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
