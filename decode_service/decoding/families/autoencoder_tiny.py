"""The tiny distilled decoders for previews (TAESD, TAESDXL, TAESD3, TAEF1): ``AutoencoderTiny``."""

from __future__ import annotations

import torch

from decode_service.decoding.families.base import stride_tiles
from decode_service.decoding.families.image import ImageFamily, overlapping_tiles
from decode_service.decoding.rewrites import DecoderStructure
from decode_service.planning.plan import DecodePlan
from decode_service.planning.spec import ModelSpec, Packing, StrideTiles
from decode_service.planning.tiles import TileSpan

# B batch, C channels, F pixel frames (1 here), H height, W width.


class AutoencoderTinyFamily(ImageFamily):
    """``AutoencoderTiny``: convolutions only. Its decoder bounds latents by 3 tanh(z / 3) and returns about [-1, 1]."""

    class_names = ("AutoencoderTiny",)
    serves = "TAESD, TAESDXL, TAEF1 previews"
    structure = DecoderStructure(channels_last=True)

    def make_spec(self, name: str, tiles: StrideTiles | None) -> ModelSpec:
        config = self.config
        widths = config["decoder_block_out_channels"]
        # From the structure: the model's own spatial_scale_factor is 2 ** out_channels, right for 3 channels only.
        ratio = config["upsampling_scaling_factor"] ** (len(widths) - 1)
        own_tiles = overlapping_tiles(self.vae.tile_sample_min_size, self.vae.tile_overlap_factor, ratio)
        nearest = config["upsample_fn"] == "nearest"
        return ModelSpec(
            name=name,
            family="autoencoder-tiny",
            class_name="AutoencoderTiny",
            latent_channels=config["latent_channels"],
            output_channels=config["out_channels"],
            spatial_ratio=ratio,
            decoder_ratio=ratio,
            frame_rule=None,
            accepts_images=True,
            exact_axes=("height", "width") if nearest else (),
            no_exact_axes_reason="" if nearest else f"its {config['upsample_fn']} upsampling mixes rows of neighbours",
            tiles=stride_tiles(tiles or own_tiles, ratio, "AutoencoderTiny"),
            chunked=False,
            # The widest operand at full resolution: the last upsampling leaves the channels of the stage before.
            operand_per_pixel_first=max(widths[-1], widths[max(0, len(widths) - 2)]),
            # As TAEF1 is given the latents of FLUX.1.
            packing=Packing((2,)),
        )

    def denormalization(self) -> str:
        return "latents / scaling_factor + shift_factor"

    def denormalize(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """By the rule of the FLUX.1, SD3 and DreamLite pipelines: ``latents / scaling_factor + shift_factor``.

        The Stable Diffusion pipelines do the same without the shift, which is 0 in the configs for their models.
        """
        scaled = latents_BCTHW / self.config["scaling_factor"]
        shift = self.config.get("shift_factor")
        return scaled + shift if shift else scaled

    def merge_tiles(self, plan: DecodePlan, tiles: list[torch.Tensor]) -> torch.Tensor:
        """By the rule of ``AutoencoderTiny._tiled_decode``: every tile is faded over what is there already.

        A tile's weight is the product of one ramp per axis from 0 to 1, both included, over the overlap, and 1 along an
        axis on which it is the first. The reference assumes 3 output channels and 8 pixels per cell; here both are the
        model's own.
        """
        assert plan.tiles is not None and isinstance(self.spec.tiles, StrideTiles)
        grid, overlap_px = plan.tiles, self.spec.tiles.size_px - self.spec.tiles.stride_px
        first = tiles[0]
        work = torch.promote_types(first.dtype, torch.float32)
        shape = (*first.shape[:-2], plan.output_height, plan.output_width)
        canvas = torch.zeros(shape, dtype=work, device=first.device)
        cells = [(row, column) for row in grid.rows for column in grid.columns]
        for (row, column), tile in zip(cells, tiles, strict=True):
            (top, rise_H), (left, rise_W) = (
                self._rise(span, extent, overlap_px, canvas)
                for span, extent in ((row, tile.shape[-2]), (column, tile.shape[-1]))
            )
            weight_HW = rise_H.unsqueeze(1) * rise_W
            place = canvas[..., top : top + tile.shape[-2], left : left + tile.shape[-1]]
            place.copy_(weight_HW * tile + (1 - weight_HW) * place)
        return canvas.to(first.dtype)

    def _rise(self, span: TileSpan, extent: int, overlap_px: int, like: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Where a tile begins along one axis, in pixels, and its weight at each of its ``extent`` pixels."""
        if span.start == 0 or overlap_px == 0:
            weight = like.new_ones(extent)
        else:
            ramp = torch.arange(extent, dtype=like.dtype, device=like.device) / max(1, overlap_px - 1)
            weight = ramp.clamp(0, 1)
        return span.start * self.spec.decoder_ratio, weight
