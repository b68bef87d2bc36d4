"""``AutoencoderKLHunyuanImage``: every mode against diffusers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode_service.decoding.families.hunyuan_image import HunyuanImageFamily, widest_activation
from decode_service.errors import ConfigError
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from tests.decoding.family_checks import check_exact_modes, check_tiles, check_tiles_of_uneven_strides, decoded
from tests.decoding.harness import latents_of
from tests.decoding.tiny_models import hunyuan_image

VARIANTS: dict[str, dict[str, Any]] = {
    "matched channels": {},
    "the same channels everywhere": {"block_out_channels": (32, 32, 32), "upsample_match_channel": False},
    "a last stage that does not upsample": {"spatial_compression_ratio": 2},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_exact_mode_gives_the_pixels_of_diffusers(name: str) -> None:
    vae, latents = hunyuan_image(**VARIANTS[name]), latents_of((1, 8, 7, 9))
    check_exact_modes(vae, latents, vae.decode(latents).sample)


def test_tiles_give_the_tiled_pixels_of_diffusers() -> None:
    vae, latents = hunyuan_image(), latents_of((1, 8, 11, 13))
    vae.enable_tiling()
    expected = vae.decode(latents).sample
    vae.disable_tiling()
    check_tiles(vae, latents, expected)


def test_a_sample_size_that_is_no_whole_number_of_strides_still_gives_the_whole_picture() -> None:
    check_tiles_of_uneven_strides(hunyuan_image(sample_size=36), latents_of((1, 8, 11, 13)))


def test_normalized_latents_are_divided_by_the_scaling_factor() -> None:
    vae, latents = hunyuan_image(), latents_of((2, 8, 7, 9))
    _, picture = decoded(vae, latents, "spatial_shard_width", ranks=2, denormalize=True)
    expected = vae.decode(latents / vae.config.scaling_factor).sample
    torch.testing.assert_close(picture, expected, atol=1e-5, rtol=0)


def test_a_model_without_a_scaling_factor_is_refused() -> None:
    with pytest.raises(ConfigError, match="scaling_factor"):
        HunyuanImageFamily(hunyuan_image(scaling_factor=None), "tiny")


def test_the_widest_activation_is_found_at_any_depth() -> None:
    assert widest_activation((1024, 1024, 512, 512, 256, 128), 5, matched=True) == 128
    assert widest_activation((1024, 1024, 512, 512, 256, 128), 5, matched=False) == 256
    assert widest_activation((4096, 16, 16), 2, matched=True) == 256, "4096 channels at a sixteenth of the pixels"


def test_the_published_size_and_its_limits() -> None:
    config: dict[str, Any] = {
        "latent_channels": 64,
        "block_out_channels": (128, 256, 512, 512, 1024, 1024),
        "layers_per_block": 2,
        "spatial_compression_ratio": 32,
        "sample_size": 384,
        "scaling_factor": 0.75289,
    }
    with torch.device("meta"):
        spec = HunyuanImageFamily(hunyuan_image(**config), "hunyuan").spec
    assert (spec.latent_channels, spec.spatial_ratio, spec.operand_per_pixel_first) == (64, 32, 128)
    assert spec.tiles == StrideTiles(384, 288)
    assert make_plan(spec, (1, 64, 64, 64), group_size=1, policy=Policy()).mode == "direct", "2048 x 2048"
    huge = make_plan(spec, (1, 64, 128, 128), group_size=1, policy=Policy())
    assert huge.mode == "tile" and "elements" in huge.reason, "one 4096 x 4096 picture is 2^31"
