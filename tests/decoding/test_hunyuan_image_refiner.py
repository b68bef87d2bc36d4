"""``AutoencoderKLHunyuanImageRefiner``: every mode against diffusers, for one frame and for several."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from decode_service.decoding.families.hunyuan_image_refiner import HunyuanImageRefinerFamily
from decode_service.errors import ConfigError
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from tests.decoding.family_checks import check_exact_modes, check_tiles, decoded
from tests.decoding.harness import latents_of
from tests.decoding.tiled_reference import tiled
from tests.decoding.tiny_models import hunyuan_image_refiner as refiner


@pytest.mark.parametrize("frames", [1, 3])
def test_every_exact_mode_gives_the_pixels_of_diffusers(frames: int) -> None:
    vae, latents = refiner(), latents_of((1, 4, frames, 7, 9))
    expected = vae.decode(latents).sample
    assert expected.shape == (1, 3, frames, 28, 36)
    check_exact_modes(vae, latents, expected)


def test_channels_that_do_not_match_at_upsampling_decode_alike() -> None:
    vae, latents = refiner(upsample_match_channel=False), latents_of((1, 4, 1, 7, 9))
    check_exact_modes(vae, latents, vae.decode(latents).sample)


def test_latents_without_a_time_axis_are_one_frame() -> None:
    vae, latents = refiner(), latents_of((2, 4, 7, 9))
    check_exact_modes(vae, latents, vae.decode(latents.unsqueeze(2)).sample.squeeze(2), ranks=(2,))


@pytest.mark.parametrize("frames", [1, 2])
def test_tiles_give_the_whole_picture_where_diffusers_truncates_it(frames: int) -> None:
    """Its ``tiled_decode`` blends and keeps as many pixels as it should latent cells; AutoencoderKL's loop is right."""
    vae, latents = refiner(), latents_of((1, 4, frames, 11, 13))
    vae.enable_tiling(32, 32)
    assert vae.decode(latents).sample.shape[-2:] == (12, 16), "diffusers got it right: compare with it instead"
    vae.disable_tiling()
    expected = tiled(vae.decoder, latents, tile_px=32, overlap=0.25, ratio=4)
    assert expected.shape == (1, 3, frames, 44, 52)
    check_tiles(vae, latents, expected, tiles=StrideTiles(32, 24))


def test_normalized_latents_are_divided_by_the_scaling_factor() -> None:
    vae, latents = refiner(), latents_of((2, 4, 1, 7, 9))
    _, picture = decoded(vae, latents, "spatial_shard_height", ranks=2, denormalize=True)
    expected = vae.decode(latents / vae.config.scaling_factor).sample
    torch.testing.assert_close(picture, expected, atol=1e-5, rtol=0)


def test_a_model_without_a_scaling_factor_is_refused() -> None:
    with pytest.raises(ConfigError, match="scaling_factor"):
        HunyuanImageRefinerFamily(refiner(scaling_factor=None), "tiny")


def test_the_published_size_and_its_limits() -> None:
    with torch.device("meta"):
        vae = diffusers.AutoencoderKLHunyuanImageRefiner()
    spec = HunyuanImageRefinerFamily(vae, "refiner").spec
    assert (spec.latent_channels, spec.spatial_ratio) == (32, 16)
    assert (spec.operand_per_pixel_first, spec.operand_per_pixel) == (384, 128)
    assert spec.tiles == StrideTiles(256, 192)

    def plan(*shape: int) -> Any:
        return make_plan(spec, shape, group_size=1, policy=Policy())

    assert plan(1, 32, 128, 128).mode == "direct", "2048 x 2048: 1.6e9 elements"
    two = plan(1, 32, 2, 128, 128)
    assert two.mode == "tile" and "elements" in two.reason, "all frames are one pass: 2^31 elements"
