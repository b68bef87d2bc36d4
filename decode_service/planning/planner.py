"""The planner: (model, latent shape, group size, policy, wish, load) -> ``DecodePlan``, as one pure function.

``auto`` decides in this order: a tile-only model is tiled; several items are divided over the ranks; a frame small
enough for one rank is decoded by one; otherwise the longer axis with at least as many latent rows as ranks is sharded,
width on ties; a model that cannot be sharded is decoded by one rank; otherwise tiles, or one rank where a model has no tile
mode. Where that divides a request that is not too large over all ranks, exactly, and there are as many requests as ranks
(``Load``), one rank decodes it instead. A forced mode is never reinterpreted silently: where it cannot run, the plan falls
back to tiles (to one rank where the model has none) and says so, and ``strict`` makes that an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from decode_service.errors import InvalidLatentsError, InvalidRequestError, UnsupportedModeError
from decode_service.planning.bands import Band, split
from decode_service.planning.load import Load
from decode_service.planning.plan import COLLECTS, MODES, SHARD_AXIS, Axis, Collect, DecodePlan, Mode
from decode_service.planning.spec import ModelSpec
from decode_service.planning.tiles import TileGrid, assign_largest_first

MAX_OPERAND_ELEMENTS = 2**31 - 1

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
    direct_max_pixels: int = 512 * 512
    busy_direct_max_pixels: int = 32 << 20
    strict: bool = False
    chunk: int = 1
    collect: str = "shards"


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
) -> DecodePlan:
    """Decide how latents of ``latent_shape`` are decoded by a group of ``group_size`` ranks.

    Args:
        mode: ``auto`` or one of ``MODES``; ``auto`` takes the policy's mode.
        strict: whether a forced mode that cannot run is an error; None takes the policy's.
        collect: one of ``COLLECTS``; None takes the policy's.
        chunk: latent frames per decoder pass after the first; None takes the policy's.
        load: what else the group has to do. Only ``auto`` heeds it, to choose between exact modes; None is nothing.

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

    planner = _Planner(spec, latent_shape, group_size, policy, how, policy.chunk if chunk is None else chunk)
    if wished == "auto":
        return planner.under(load or Load())
    return planner.forced(wished, policy.strict if strict is None else strict)


class _Planner:
    """One planning problem; every method is a pure function of the constructor's arguments."""

    def __init__(
        self, spec: ModelSpec, shape: tuple[int, ...], group_size: int, policy: Policy, collect: str, chunk: int
    ) -> None:
        self.spec = spec
        self.shape = shape
        self.size = group_size
        self.policy = policy
        self.collect = collect
        self.frames, self.height, self.width = spec.output_extents(shape)
        self.latent_frames = shape[2] if len(shape) == 5 else 1
        self.chunk = chunk if spec.chunked else 1

    def under(self, load: Load) -> DecodePlan:
        """``auto`` with something else to do: one rank where it shortens the queue and gives the same pixels."""
        idle = self.auto()
        # A broadcast keeps all ranks busy whoever decodes.
        divided = idle.axis is not None and idle.collect != "broadcast"
        if not divided or idle.output_pixels > self.policy.busy_direct_max_pixels or self.problem("direct"):
            return idle
        why = load.one_rank_each(self.size)
        return idle if why is None else self.direct(why)

    def auto(self) -> DecodePlan:
        if self.spec.tile_only:
            return self.tile("the model decodes by its own tiles only")
        if self.shape[0] > 1 and self.size > 1 and not self.problem("batch"):
            return self.divided("batch", f"{self.shape[0]} items over {self.size} ranks")
        direct_problem = self.problem("direct")
        pixels = self.height * self.width
        if not direct_problem and pixels <= self.policy.direct_max_pixels:
            return self.direct(
                f"a frame of {pixels} pixels is within direct_max_pixels ({self.policy.direct_max_pixels})"
            )
        if self.size == 1 and not direct_problem:
            return self.direct("a group of one rank")
        for candidate in self.axes_by_length():
            if not self.problem(candidate):
                rows = self.shape[-2] if candidate == "spatial_shard_height" else self.shape[-1]
                axis = SHARD_AXIS[candidate]
                return self.divided(
                    candidate, f"{axis} is the longest axis that {self.size} ranks can share: {rows} latent cells"
                )
        if not direct_problem and not self.spec.exact_axes:
            return self.direct(f"one rank decodes exactly, and no group can: {self.spec.no_exact_axes_reason}")
        problems = "; ".join(dict.fromkeys(filter(None, (self.problem(m) for m in ("direct", *self.axes_by_length())))))
        if self.spec.tiles is None:
            if not direct_problem:
                return self.direct(f"one rank decodes exactly, and this group cannot: {problems}")
            raise UnsupportedModeError(
                f"{list(self.shape)} cannot be decoded by {self.size} ranks: {problems}; there is no tile mode: "
                f"{self.spec.no_tiles_reason}",
                param="latents.shape",
            )
        return self.tile(f"no exact mode can run: {problems}")

    def forced(self, mode: str, strict: bool) -> DecodePlan:
        problem = self.problem(mode)
        if problem is None:
            reason = "asked for"
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
        share = self.share(mode)
        if self.fitting_chunk(share) is None:
            return (
                f"its widest operand would have {self.operand_elements(share, 1):.2e} elements, over the "
                f"{MAX_OPERAND_ELEMENTS} that PyTorch's kernels can index"
            )
        return None

    def cells(self, axis: str) -> int:
        """Latent cells of ``height`` or ``width``."""
        return self.shape[-2] if axis == "height" else self.shape[-1]

    def share(self, mode: str) -> float:
        """The part of the frame that one rank decodes at a time; items of a batch go one by one."""
        if not mode.startswith("spatial_shard"):
            return 1.0
        cells = self.cells(SHARD_AXIS[mode])
        return split(cells, self.size)[0].size / cells

    def operand_elements(self, share: float, chunk: int) -> int:
        """Elements of the widest operand of one pass over ``share`` of the frame."""
        first, later = self.spec.operand_per_pixel_first, self.spec.operand_per_pixel
        if self.spec.pass_frames:
            per_pixel = first + later * (min(self.spec.pass_frames, self.latent_frames) - 1)
        else:
            per_pixel = max(first, later * min(chunk, self.latent_frames - 1))
        return int(per_pixel * self.height * self.width * share)

    def fitting_chunk(self, share: float) -> int | None:
        """The longest chunk up to the one asked for whose operands PyTorch's kernels can index; None if there is none.

        Any chunk gives the same pixels, so one that is too long is shortened rather than refused.
        """
        if self.operand_elements(share, self.chunk) <= MAX_OPERAND_ELEMENTS:
            return self.chunk
        if self.operand_elements(share, 1) > MAX_OPERAND_ELEMENTS:
            return None
        per_frame = self.spec.operand_per_pixel * self.height * self.width * share
        return min(self.chunk, int(MAX_OPERAND_ELEMENTS / per_frame))

    def direct(self, reason: str, *, fallback: str | None = None) -> DecodePlan:
        return self.plan("direct", 1, None, (), reason, fallback=fallback)

    def divided(self, mode: str, reason: str) -> DecodePlan:
        """A plan that divides the batch, the height or the width."""
        axis = SHARD_AXIS[mode]
        extent = {"batch": self.shape[0], "height": self.shape[-2], "width": self.shape[-1]}[axis]
        ranks = min(self.size, extent)
        return self.plan(mode, ranks, axis, split(extent, ranks), reason)

    def tile(self, reason: str, *, fallback: str | None = None) -> DecodePlan:
        assert self.spec.tiles is not None
        grid = self.spec.tiles.grid(self.shape[-2], self.shape[-1], self.spec.spatial_ratio, self.spec.decoder_ratio)
        work = grid.areas() * self.spec.tile_parts(self.shape)
        ranks = min(self.size, len(work))
        owners = assign_largest_first(work, ranks)
        share = max(grid.areas()) / (self.shape[-2] * self.shape[-1])
        if self.fitting_chunk(share) is None:
            raise UnsupportedModeError(
                f"{list(self.shape)} cannot be decoded by {self.size} ranks: even one tile would have an operand of "
                f"{self.operand_elements(share, 1):.2e} elements; use smaller tiles (policy.tile) or more ranks",
                param="latents.shape",
            )
        return self.plan("tile", ranks, None, (), reason, fallback=fallback, grid=grid, owners=owners, share=share)

    def plan(
        self,
        mode: str,
        ranks: int,
        axis: Axis | None,
        bands: tuple[Band, ...],
        reason: str,
        *,
        fallback: str | None = None,
        grid: TileGrid | None = None,
        owners: tuple[int, ...] = (),
        share: float | None = None,
    ) -> DecodePlan:
        chosen: Mode = mode  # type: ignore[assignment]
        how: Collect = self.collect  # type: ignore[assignment]
        # A model whose contract is tiles is exact in them; so is a single tile.
        exact = grid is None or self.spec.tile_only or grid.count == 1
        if not exact:
            reason += f"; approximate: {self.spec.tile_difference}"
        chunk = self.fitting_chunk(self.share(mode) if share is None else share) or 1
        if chunk < self.chunk:
            reason += f"; chunk shortened from {self.chunk} to {chunk} latent frames, which is what kernels can index"
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
            owners=owners,
            latent_shape=self.shape,
            output_frames=self.frames,
            output_height=self.height,
            output_width=self.width,
            tested=self.spec.tested,
        )
