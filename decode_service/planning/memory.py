"""What a plan needs of a rank's memory, as arithmetic on numbers that were measured when the model was loaded.

``decode_service.decoding.footprint`` measures a model's ``Footprint``; here it is scaled to a plan. Activations grow with
the pixels of the frame (attention is computed in blocks, so its square does not count) and with the latent frames of a
pass. Predictions are of live tensors: an allocator's fragments and a convolution's workspace come on top, which is why the
default budget leaves a tenth of the device free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode_service.planning.spec import ModelSpec

#: Part of a device's memory that plans may fill by default.
BUDGET_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of live activations per output pixel of one frame (height x width of what a rank decodes).

    Attributes:
        still: at the peak of a clip of one latent frame.
        clip: at the peak of a longer clip, whatever the number of frames of a pass (temporal caches included).
        per_frame: more than ``clip`` for every latent frame of a pass after the first one.
        caches: of ``clip``, what stays between passes.
    """

    still: float
    clip: float = 0.0
    per_frame: float = 0.0
    caches: float = 0.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one loaded model takes of a rank's memory.

    Attributes:
        weight_bytes: parameters and buffers.
        itemsize: bytes of one element of its latents and pixels.
        whole: activations of an undivided frame or of a tile.
        banded: those of a band, which needs more per pixel: halo rows are copied, norms merge in float32. None where the
            model cannot be sharded.
    """

    weight_bytes: int
    itemsize: int
    whole: Activations
    banded: Activations | None = None

    def in_float32(self) -> Footprint:
        """The same model decoding with its weights cast up to float32: at most that, where parts are float32 already."""
        factor = 4 / self.itemsize

        def scaled(activations: Activations) -> Activations:
            return Activations(**{name: factor * nbytes for name, nbytes in asdict(activations).items()})

        banded = None if self.banded is None else scaled(self.banded)
        return Footprint(math.ceil(factor * self.weight_bytes), 4, scaled(self.whole), banded)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Predicted peak of the rank that needs most, in bytes.

    Attributes:
        per_rank_bytes: the peak: weights, latents and output, and the larger of activations (with caches) and assembly.
        weights: the model.
        latents: the request's latents, which every rank holds whole.
        activations: live activations of the widest pass, without the caches.
        caches: what the decoder keeps between passes.
        output: pixels in the dtype of the reply, those of all items.
        tiles: decoded tiles of one item that wait to be put together.
        assembly: bringing tiles or parts together, while nothing is decoded.
        budget_bytes: what a plan may need, or None where nobody set a limit.
    """

    per_rank_bytes: int
    weights: int
    latents: int
    activations: int
    caches: int
    output: int
    tiles: int
    assembly: int
    budget_bytes: int | None = None

    def public(self) -> dict[str, Any]:
        """As replies show it: the peak, what it consists of, and the budget."""
        parts = asdict(self)
        peak, budget = parts.pop("per_rank_bytes"), parts.pop("budget_bytes")
        return {"per_rank_bytes": peak, "budget_bytes": budget, "of_which": parts}


def gib(nbytes: int) -> str:
    """``nbytes`` for people."""
    if nbytes < 2**27:
        return f"{nbytes / 2**20:.2f} MiB"
    return f"{nbytes / 2**30:.2f} GiB"


def _activation_bytes(activations: Activations, pixels: float, latent_frames: int, pass_frames: int) -> tuple[int, int]:
    """Activations and caches, in bytes, of passes that take ``pass_frames`` latent frames after the first one."""
    if latent_frames == 1:
        return math.ceil(activations.still * pixels), 0
    caches = activations.caches * pixels
    live = max(activations.still, activations.clip + activations.per_frame * pass_frames) * pixels - caches
    return math.ceil(live), math.ceil(caches)


def memory_need(
    spec: ModelSpec,
    latent_shape: Sequence[int],
    *,
    mode: str,
    share: float,
    items: int,
    chunk: int,
    collect: str = "shards",
    pixel_bytes: int = 1,
    tile_cells: int = 0,
    owned_tile_cells: int = 0,
    together: int = 1,
) -> MemoryNeed | None:
    """The need of the rank that needs most, or None for a model without a footprint.

    Args:
        share: part of the frame that one rank decodes at a time (a band, or the largest tile).
        items: items of the batch that one rank decodes, one after the other.
        chunk: latent frames of a pass, where the model leaves that free.
        collect: how pixels come back; rank 0 holds the whole picture beside its part unless they stay where they are.
        pixel_bytes: bytes of one value of the reply.
        tile_cells: latent cells of all tiles of one item (all parts in time), in tile mode.
        owned_tile_cells: those of them that one rank decodes at most.
        together: items that one pass takes.
    """
    footprint = spec.footprint
    if footprint is None:
        return None
    banded = mode.startswith("spatial_shard")
    activations = footprint.banded if banded else footprint.whole
    if activations is None:
        return None
    latent_frames = latent_shape[2] if len(latent_shape) == 5 else 1
    frames, height, width = spec.output_extents(tuple(latent_shape))
    if spec.pass_frames:
        later = min(spec.pass_frames, latent_frames) - 1
    else:
        later = min(chunk, latent_frames - 1) if spec.chunked else 0
    live, caches = _activation_bytes(activations, together * height * width * share, latent_frames, later)

    # Once as it arrived and once in the model's dtype, denormalized by way of a third.
    latents = 3 * math.prod(latent_shape) * footprint.itemsize
    values = frames * height * width * spec.output_channels
    whole = latent_shape[0] * values * pixel_bytes
    tiles = assembly = 0
    if mode == "tile":
        # Parts in time cover the clip once each (those that overlap, a little more).
        parts = spec.tile_parts(tuple(latent_shape))
        part_values = max(frames / parts, 1.0) * spec.output_channels * spec.spatial_ratio**2 * footprint.itemsize
        if parts > 1:
            part_values *= 1.5
        tiles = math.ceil(owned_tile_cells * part_values)
        gathered = math.ceil(tile_cells * part_values)
        # Stitched, clamped, and turned into the reply's dtype by way of float32.
        conversion = 2 * footprint.itemsize + (4 if pixel_bytes == 1 else pixel_bytes)
        assembly = gathered - tiles + values * conversion
        output = whole
    else:
        output = math.ceil(items * values * pixel_bytes * (share if banded else 1.0))
        if collect != "shards":
            assembly = 2 * whole
    peak = footprint.weight_bytes + latents + output + tiles + max(live + caches, assembly)
    return MemoryNeed(peak, footprint.weight_bytes, latents, live, caches, output, tiles, assembly)
