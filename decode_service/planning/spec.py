"""What planning must know of a model: plain numbers and names, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from decode_service.planning.cost import Work
from decode_service.planning.memory import Footprint
from decode_service.planning.temporal import ClipFrames, FadedFrames, FrameRule, OverlapFrames
from decode_service.planning.tiles import TileGrid, TileSpan, overlap_axis, stride_axis

WHOLE_CLIP = 2**31
"""``ModelSpec.pass_frames`` of a decoder that takes all frames in one pass."""


@dataclass(frozen=True, slots=True)
class StrideTiles:
    """Tiles of a fixed size and stride, in pixels (diffusers: ``tile_sample_min_*`` and ``tile_sample_stride_*``)."""

    size_px: int = 256
    stride_px: int = 192

    def grid(self, height: int, width: int, spatial_ratio: int, decoder_ratio: int) -> TileGrid:
        """Tiles of a latent frame of ``height`` x ``width`` cells.

        Args:
            spatial_ratio: final pixels per latent cell.
            decoder_ratio: pixels per latent cell in the space where tiles are blended (before unpatchifying).
        """
        tile = self.size_px // spatial_ratio
        if height <= tile and width <= tile:
            # diffusers decodes a frame that fits in one tile whole, without cutting it at the stride.
            rows = stride_axis(height, max(tile, height), max(tile, height), decoder_ratio)
            columns = stride_axis(width, max(tile, width), max(tile, width), decoder_ratio)
        else:
            stride = self.stride_px // spatial_ratio
            rows = stride_axis(height, tile, stride, decoder_ratio)
            columns = stride_axis(width, tile, stride, decoder_ratio)
        return TileGrid(rows, columns, sequential=True)

    def problem(self, spatial_ratio: int) -> str | None:
        """Why this geometry cannot tile a model with ``spatial_ratio`` pixels per latent cell, or None."""
        if self.size_px % spatial_ratio or self.stride_px % spatial_ratio:
            return (
                f"tile size {self.size_px} and stride {self.stride_px} px must be multiples of the model's "
                f"{spatial_ratio} pixels per latent cell"
            )
        if not spatial_ratio <= self.stride_px <= self.size_px:
            return f"the stride ({self.stride_px} px) must be at least {spatial_ratio} px and at most the tile ({self.size_px} px)"
        return None


@dataclass(frozen=True, slots=True)
class RectangleTiles:
    """Tiles of a fixed size and stride that differ between the axes (CogVideoX)."""

    vertical: StrideTiles
    horizontal: StrideTiles

    def grid(self, height: int, width: int, spatial_ratio: int, decoder_ratio: int) -> TileGrid:
        """Tiles of a latent frame of ``height`` x ``width`` cells; see ``StrideTiles.grid``."""
        fits = height <= self.vertical.size_px // spatial_ratio and width <= self.horizontal.size_px // spatial_ratio

        def spans(extent: int, tiles: StrideTiles) -> tuple[TileSpan, ...]:
            tile = extent if fits else tiles.size_px // spatial_ratio
            stride = extent if fits else tiles.stride_px // spatial_ratio
            return stride_axis(extent, tile, stride, decoder_ratio)

        return TileGrid(spans(height, self.vertical), spans(width, self.horizontal), sequential=True)


@dataclass(frozen=True, slots=True)
class OverlapTiles:
    """Full tiles with at least ``min_overlap_px`` pixels of overlap; part of the model's contract, so not adjustable.

    ``min_overlap_width_px`` is the overlap along the width where it is another.
    """

    size_px: int = 256
    min_overlap_px: int = 64
    min_overlap_width_px: int | None = None

    def grid(self, height: int, width: int, spatial_ratio: int, decoder_ratio: int) -> TileGrid:
        """Tiles of a latent frame of ``height`` x ``width`` cells; see ``StrideTiles.grid``."""
        tile = self.size_px // spatial_ratio
        overlap = self.min_overlap_px // spatial_ratio
        along_width = overlap if self.min_overlap_width_px is None else self.min_overlap_width_px // spatial_ratio
        return TileGrid(
            overlap_axis(height, tile, overlap, decoder_ratio),
            overlap_axis(width, tile, along_width, decoder_ratio),
            sequential=False,
        )


@dataclass(frozen=True, slots=True)
class Packing:
    """How pipelines pack the latents of a family into tokens, each of them a square patch of latent cells.

    Of a token's channels the latent channel comes first, then the row within the patch, then the column: the order of
    every ``_unpack_latents`` and ``_unpatchify_latents`` of diffusers 0.42.

    Attributes:
        patches: sides that a patch may have, in latent cells.
        grid: whether the tokens also come in rows and columns, (B,C*p*p,H/p,W/p).
        layers: whether one sequence may hold several pictures, the first of them the one that is to be taken apart
            (``QwenImageLayeredPipeline``).
    """

    patches: tuple[int, ...]
    grid: bool = False
    layers: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One loaded model as the planner, the validator and the reply headers see it.

    Attributes:
        name: the name that requests use.
        family: family name, for example ``wan-2.1``.
        class_name: diffusers class, for example ``AutoencoderKLWan``.
        latent_channels: channels of the latents.
        output_channels: channels of the pixels (3, or 4 with alpha).
        spatial_ratio: pixels per latent cell, along both axes.
        decoder_ratio: the same in the space where tiles are blended (smaller where the output is patchified).
        frame_rule: latent frames to pixel frames; None for families without a time axis.
        accepts_images: whether 4-D latents (B,C,H,W) are taken, as one frame each.
        exact_axes: axes that can be sharded exactly: a subset of ``("height", "width")``.
        no_exact_axes_reason: why not, where ``exact_axes`` is empty.
        tile_only: the model's own contract asks for tiles; ``auto`` means tile.
        tiles: tile geometry, or None where the model has no tile mode.
        no_tiles_reason: why not, where ``tiles`` is None.
        tested: whether the model's family is one that tests compare with diffusers.
        chunked: whether the temporal chunk length is free (causal decoders).
        operand_per_pixel: elements of the widest operand of a pass over one later latent frame, per output pixel of one
            frame (height x width); 0 where unknown. PyTorch's kernels return zeros or fail at 2^31 elements.
        operand_per_pixel_first: the same for the pass over the first latent frame.
        tile_difference: why tiles only approximate the undivided frame, where they do.
        operand_padding: pixels by which padding enlarges each axis of that operand: two decoder pixels, of 3x3 convolutions.
        min_cells: latent rows and columns that a frame needs at least.
        normalized_frames: latent frames that can be denormalized at most, where every frame has statistics of its own; 0
            where any number can.
        no_denormalize_reason: why normalized latents cannot be taken at all, or empty.
        fixed_cells: latent rows, and as many columns, that every frame has; 0 where a frame may have any size.
        min_band_cells: latent rows or columns that every rank needs at least where a frame is sharded: the reach of the
            widest convolution, in latent cells.
        pass_frames: latent frames of one pass at most, the first included, where a pass takes many at once (then the
            operand is that of the first and of all later ones together; ``WHOLE_CLIP`` where it takes all); 0 where the
            chunk length says it.
        packing: how pipelines pack its latents, or None where they do not.
        default_timestep: what the model's pipeline decodes at where nothing else is asked for, or None for decoders without
            timestep conditioning.
        footprint: what it takes of a rank's memory, measured at loading; None where nobody measured.
        work: what decoding takes of arithmetic and exchanges, counted at loading; None where nobody counted.
        dtype: dtype of the arithmetic; empty before a model is loaded.
        dtype_reason: why it is that one.
    """

    name: str
    family: str
    class_name: str
    latent_channels: int
    output_channels: int
    spatial_ratio: int
    decoder_ratio: int
    frame_rule: FrameRule | None
    accepts_images: bool
    exact_axes: tuple[str, ...]
    tiles: StrideTiles | RectangleTiles | OverlapTiles | None
    no_exact_axes_reason: str = ""
    no_tiles_reason: str = ""
    tile_only: bool = False
    tested: bool = True
    chunked: bool = True
    operand_per_pixel: int = 0
    operand_per_pixel_first: int = 0
    operand_padding: int = 2
    pass_frames: int = 0
    tile_difference: str = "every tile is decoded by itself"
    min_cells: int = 1
    packing: Packing | None = None
    default_timestep: float | None = None
    normalized_frames: int = 0
    no_denormalize_reason: str = ""
    fixed_cells: int = 0
    min_band_cells: int = 1
    footprint: Footprint | None = None
    work: Work | None = None
    dtype: str = ""
    dtype_reason: str = ""

    @property
    def decoder_channels(self) -> int:
        """Channels in the space where tiles are blended."""
        return self.output_channels * (self.spatial_ratio // self.decoder_ratio) ** 2

    def modes(self, ranks: int) -> tuple[str, ...]:
        """The modes in which a group of ``ranks`` can decode this model, given latents of suitable extents."""
        if self.tile_only:
            return ("tile",)
        divided = ("batch", *(f"spatial_shard_{axis}" for axis in self.exact_axes)) if ranks > 1 else ()
        tiled = () if self.tiles is None else ("tile",)
        return ("direct", *divided, *tiled)

    def latent_ndims(self) -> tuple[int, ...]:
        """Numbers of dimensions that latents may have."""
        if self.frame_rule is None:
            return (4,)
        return (4, 5) if self.accepts_images else (5,)

    def tile_parts(self, latent_shape: tuple[int, ...]) -> int:
        """Times that the tile grid is decoded: once per clip or part in time where a family has them, else once."""
        if isinstance(self.frame_rule, (ClipFrames, FadedFrames, OverlapFrames)):
            return self.frame_rule.clip_count(latent_shape[2])
        return 1

    def output_extents(self, latent_shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Pixel frames, height and width of the picture decoded from latents of ``latent_shape``."""
        frames = self.frame_rule.frames(latent_shape[2]) if len(latent_shape) == 5 and self.frame_rule else 1
        return frames, latent_shape[-2] * self.spatial_ratio, latent_shape[-1] * self.spatial_ratio
