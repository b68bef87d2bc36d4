"""From pixels back to latents: which sizes a model can decode, and which latents give them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from decode_service.errors import InvalidRequestError
from decode_service.planning.demands import MAX_OPERAND_ELEMENTS
from decode_service.planning.plan import MODES
from decode_service.planning.spec import ModelSpec, OverlapTiles, RectangleTiles, StrideTiles

_EXAMPLES = 8

#: Pixel frames beyond which nobody is answered: the search for them would be long, and no limit allows them.
MAX_FRAMES = 10**6


def describe_frames(spec: ModelSpec) -> dict[str, Any]:
    """The frame rule in words and in numbers: ``latent_to_pixel`` are the first valid pairs of frames."""
    rule = spec.frame_rule
    if rule is None:
        return {"rule": "one frame", "latent_to_pixel": [[1, 1]], "valid_pixel_frames": [1], "ends": True}
    valid = [t for t in range(1, 10 * _EXAMPLES) if rule.problem(t) is None]
    pairs = [[t, rule.frames(t)] for t in valid[:_EXAMPLES]]
    return {
        "rule": f"pixel frames = {rule.describe()}, T latent frames",
        "latent_to_pixel": pairs,
        "valid_pixel_frames": [frames for _, frames in pairs],
        "ends": len(valid) <= _EXAMPLES,
    }


def describe_tiles(spec: ModelSpec) -> dict[str, Any] | None:
    """Tile geometry in pixels, and whether ``policy.tile`` may change it; None where the model has no tile mode."""
    tiles = spec.tiles
    if tiles is None:
        return None
    if isinstance(tiles, StrideTiles):
        shown: dict[str, Any] = {"size_px": [tiles.size_px] * 2, "stride_px": [tiles.stride_px] * 2}
    elif isinstance(tiles, RectangleTiles):
        sides = tiles.vertical, tiles.horizontal
        shown = {"size_px": [side.size_px for side in sides], "stride_px": [side.stride_px for side in sides]}
    else:
        assert isinstance(tiles, OverlapTiles)
        across = tiles.min_overlap_px if tiles.min_overlap_width_px is None else tiles.min_overlap_width_px
        shown = {"size_px": [tiles.size_px] * 2, "min_overlap_px": [tiles.min_overlap_px, across]}
    return {"order": "height, width", **shown, "adjustable": not spec.tile_only}


def missing_modes(spec: ModelSpec, ranks: int) -> dict[str, str]:
    """The modes in which a group of ``ranks`` cannot decode this model at all, and why."""
    available = spec.modes(ranks)
    reasons = {}
    for mode in MODES:
        if mode in available:
            continue
        if spec.tile_only:
            reasons[mode] = f"the model decodes by its own tiles only: {spec.no_exact_axes_reason}"
        elif mode == "tile":
            reasons[mode] = spec.no_tiles_reason
        elif ranks < 2:
            reasons[mode] = "the group has one rank"
        else:
            reasons[mode] = spec.no_exact_axes_reason or "this axis cannot be sharded"
    return reasons


def describe_geometry(spec: ModelSpec, ranks: int) -> dict[str, Any]:
    """What ``/v1/models/{name}`` says of sizes: frames, tiles, modes, operands and memory."""
    footprint = spec.footprint
    memory: dict[str, Any] | None = None
    if footprint is not None:
        memory = {"weight_bytes": footprint.weight_bytes, "activation_bytes_per_pixel": {}}
        for name, activations in (("whole_frame_or_tile", footprint.whole), ("band", footprint.banded)):
            if activations is not None:
                memory["activation_bytes_per_pixel"][name] = {
                    "one_latent_frame": round(activations.still, 1),
                    "several_latent_frames": round(activations.clip, 1),
                    "each_latent_frame_of_a_pass": round(activations.per_frame, 1),
                    "caches_between_passes": round(activations.caches, 1),
                }
    return {
        "frames": describe_frames(spec),
        "pixels_multiple_of": spec.spatial_ratio,
        "min_latent_extent": spec.fixed_cells or spec.min_cells,
        "max_latent_extent": spec.fixed_cells or None,
        "tiles": describe_tiles(spec),
        "unavailable_modes": missing_modes(spec, ranks),
        "widest_operand": {
            "elements_per_pixel_first_frame": spec.operand_per_pixel_first,
            "elements_per_pixel_later_frame": spec.operand_per_pixel,
            "limit_elements": MAX_OPERAND_ELEMENTS,
        },
        "memory": memory,
    }


def latents_for(
    spec: ModelSpec, *, height: int, width: int, frames: int | None = None, batch: int = 1
) -> dict[str, Any]:
    """The latents that decode to ``batch`` pictures of ``height`` x ``width`` pixels, or clips of ``frames`` frames.

    Returns:
        ``latent_shape`` and the ``pixel_shape`` (B,F,H,W,C) of a uint8 reply, or (B,H,W,C) where the model takes 4-D
        latents and no frames were asked for.

    Raises:
        InvalidRequestError: no latents decode to that size; the message names the nearest that there are.
    """
    cells = []
    for name, pixels in (("height", height), ("width", width)):
        ratio, least = spec.spatial_ratio, spec.min_cells * spec.spatial_ratio
        if spec.fixed_cells and pixels != spec.fixed_cells * ratio:
            raise InvalidRequestError(
                f"{spec.name} decodes to one size, {spec.fixed_cells * ratio} x {spec.fixed_cells * ratio} pixels, so {name} "
                f"{pixels} is not possible",
                param=name,
            )
        below, above = max(least, pixels // ratio * ratio), max(least, -(-pixels // ratio) * ratio)
        if pixels % ratio or pixels < least:
            nearest = f"{below} or {above}" if below != above else f"{above}"
            raise InvalidRequestError(
                f"{spec.name} decodes to multiples of {ratio} pixels from {least} on, so {name} {pixels} is not "
                f"possible; the nearest is {nearest}",
                param=name,
            )
        cells.append(pixels // ratio)
    rule, channels = spec.frame_rule, spec.latent_channels
    if rule is None or (frames is None and spec.accepts_images):
        if frames not in (None, 1):
            raise InvalidRequestError(
                f"{spec.name} decodes single pictures, so frames can only be 1, got {frames}; send several as a batch",
                param="frames",
            )
        return {
            "latent_shape": [batch, channels, *cells],
            "pixel_shape": [batch, height, width, spec.output_channels],
        }
    wanted = 1 if frames is None else frames
    latent_frames = _latent_frames(spec, wanted, asked=frames is not None)
    return {
        "latent_shape": [batch, channels, latent_frames, *cells],
        "pixel_shape": [batch, rule.frames(latent_frames), height, width, spec.output_channels],
    }


def _latent_frames(spec: ModelSpec, frames: int, *, asked: bool) -> int:
    """Latent frames that decode to ``frames``; where nobody ``asked`` for a number, the fewest that the model takes."""
    rule = spec.frame_rule
    assert rule is not None
    if frames > MAX_FRAMES:
        raise InvalidRequestError(f"frames must be at most {MAX_FRAMES}, got {frames}", param="frames")
    # Some models take none of the first few numbers, and some only one; what takes 64 takes any larger number.
    valid: Sequence[int] = [t for t in range(1, 65) if rule.problem(t) is None]
    if not asked:
        return valid[0]
    if valid[-1] == 64 and rule.frames(64) < frames:
        # No latent frame makes less than one of pixels.
        valid = range(64, frames + 65)
    index = bisect.bisect_left(valid, frames, key=rule.frames)
    if index < len(valid) and rule.frames(valid[index]) == frames:
        return valid[index]
    near = [str(rule.frames(t)) for t in valid[max(0, index - 1) : index + 1]]
    raise InvalidRequestError(
        f"{spec.name} cannot decode to {frames} frames (its rule: {rule.describe()}, T latent frames); the nearest is "
        f"{' or '.join(near)}",
        param="frames",
    )
