"""What planning is told of Wan 2.1, as far as most tests of it care; others replace what they do care about."""

from __future__ import annotations

from decode_service.planning.spec import ModelSpec, StrideTiles
from decode_service.planning.temporal import CausalFrames

WAN = ModelSpec(
    name="wan",
    family="wan-2.1",
    class_name="AutoencoderKLWan",
    latent_channels=16,
    output_channels=3,
    spatial_ratio=8,
    decoder_ratio=8,
    frame_rule=CausalFrames(4),
    accepts_images=False,
    exact_axes=("height", "width"),
    tiles=StrideTiles(),
    operand_per_pixel=768,
    operand_per_pixel_first=288,
)
