"""``AutoencoderTiny``: every mode against diffusers, and its own way of blending tiles."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from decode_service.decoding.families.autoencoder_tiny import AutoencoderTinyFamily
from decode_service.errors import UnsupportedModeError
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from tests.decoding.family_checks import check_exact_modes, check_tiles, decoded
from tests.decoding.harness import latents_of
from tests.decoding.tiny_models import autoencoder_tiny as tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "TAESD": {},
    "TAEF1": {"latent_channels": 16},
    "three stages": {
        "encoder_block_out_channels": (8, 8, 8),
        "decoder_block_out_channels": (8, 8, 8),
        "num_encoder_blocks": (1, 1, 1),
        "num_decoder_blocks": (1, 2, 1),
    },
    "upsampling by three": {"upsampling_scaling_factor": 3},
    "four channels of another activation": {"out_channels": 4, "act_fn": "silu"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_exact_mode_gives_the_pixels_of_diffusers(name: str) -> None:
    vae = tiny(**VARIANTS[name])
    # Hot latents, so that the bound on them matters.
    latents = 3 * latents_of((1, vae.config.latent_channels, 7, 9))
    check_exact_modes(vae, latents, vae.decode(latents).sample)


def shrink_tiles(vae: Any, cells: int, ratio: int, overlap: float) -> None:
    vae.tile_latent_min_size, vae.tile_sample_min_size = cells, cells * ratio
    vae.tile_overlap_factor = overlap


@pytest.mark.parametrize(("cells", "overlap"), [(8, 0.25), (8, 0.125), (5, 0.4)])
@pytest.mark.parametrize("extents", [(11, 13), (13, 6), (9, 17)])
def test_tiles_give_the_tiled_pixels_of_diffusers(cells: int, overlap: float, extents: tuple[int, int]) -> None:
    """Extents that leave last tiles narrower than the overlap are among them."""
    vae, latents = tiny(), latents_of((1, 4, *extents))
    shrink_tiles(vae, cells, 8, overlap)
    vae.enable_tiling()
    expected = vae.decode(latents).sample
    vae.disable_tiling()
    assert expected.shape == (1, 3, extents[0] * 8, extents[1] * 8)
    check_tiles(vae, latents, expected)


def test_tiles_of_a_model_with_another_ratio_and_four_channels_give_the_whole_picture() -> None:
    """diffusers assumes 3 channels, and 2 ** channels pixels per cell; told the right ratio, it blends alike."""
    three_stages = VARIANTS["three stages"]
    vae, latents = tiny(**three_stages, out_channels=4), latents_of((1, 4, 11, 13))
    assert vae.spatial_scale_factor == 16 and vae.decode(latents).sample.shape == (1, 4, 44, 52)
    shrink_tiles(vae, 8, 4, 0.25)
    decoder, vae.spatial_scale_factor = vae.decoder, 4
    vae.enable_tiling()
    for first in (0, 1):
        vae.decoder = ThreeChannels(decoder, first)
        expected = vae.decode(latents).sample
        vae.decoder = decoder
        plan, picture = decoded(vae, latents, "tile", ranks=2)
        assert plan.tiles is not None and plan.tiles.count > 1 and not plan.exact
        torch.testing.assert_close(picture[:, first : first + 3], expected, atol=1e-5, rtol=0)


class ThreeChannels(torch.nn.Module):
    """As many of the channels that ``decoder`` returns as the reference's buffer has room for."""

    def __init__(self, decoder: torch.nn.Module, first: int) -> None:
        super().__init__()
        self.decoder, self.first = decoder, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x)[:, self.first : self.first + 3]


def test_tiles_without_overlap_are_all_written() -> None:
    """diffusers' ramp of no pixels would give them weight 0."""
    vae, latents = tiny(), latents_of((1, 4, 7, 9))
    _, picture = decoded(vae, latents, "tile", tiles=StrideTiles(32, 32))
    tile = vae.decode(latents[..., 4:, 8:]).sample
    torch.testing.assert_close(picture[..., 32:, 64:], tile, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("scaling", "shift"), [(1.0, 0.0), (0.3611, 0.1159)])
def test_normalized_latents_are_divided_and_then_shifted(scaling: float, shift: float) -> None:
    vae, latents = tiny(scaling_factor=scaling, shift_factor=shift), latents_of((2, 4, 7, 9))
    _, picture = decoded(vae, latents, "spatial_shard_width", ranks=2, denormalize=True)
    torch.testing.assert_close(picture, vae.decode(latents / scaling + shift).sample, atol=1e-5, rtol=0)


def test_bilinear_upsampling_is_not_sharded() -> None:
    vae = tiny(upsample_fn="bilinear")
    spec = AutoencoderTinyFamily(vae, "tiny").spec
    with pytest.raises(UnsupportedModeError, match="bilinear upsampling"):
        make_plan(spec, (1, 4, 7, 9), group_size=2, policy=Policy(), mode="spatial_shard_width", strict=True)
    latents = latents_of((1, 4, 7, 9))
    check_exact_modes(vae, latents, vae.decode(latents).sample)


def test_the_published_size_and_its_limits() -> None:
    with torch.device("meta"):
        vae = diffusers.AutoencoderTiny()
    spec = AutoencoderTinyFamily(vae, "taesd").spec
    assert (spec.latent_channels, spec.spatial_ratio, spec.operand_per_pixel_first) == (4, 8, 64)
    assert spec.tiles == StrideTiles(512, 448)
    assert make_plan(spec, (1, 4, 512, 512), group_size=1, policy=Policy()).mode == "direct", "4096 x 4096"
