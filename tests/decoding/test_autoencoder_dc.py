"""``AutoencoderDC``: direct, batch and tiles against diffusers; no spatial mode."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from decode_service.decoding.families.autoencoder_dc import AutoencoderDCFamily
from decode_service.errors import ConfigError, UnsupportedModeError
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from tests.decoding.family_checks import check_exact_modes, check_tiles, decoded
from tests.decoding.harness import latents_of
from tests.decoding.tiled_reference import tiled
from tests.decoding.tiny_models import autoencoder_dc as dc

VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "interpolated": {"upsample_block_type": "interpolate"},
    "an output that upsamples": {"decoder_layers_per_block": (0, 1, 1), "encoder_layers_per_block": (0, 1, 1)},
    "no shortcut": {"decoder_in_shortcut": False},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_decodes_as_in_diffusers(name: str) -> None:
    vae, latents = dc(**VARIANTS[name]), latents_of((1, 4, 7, 9))
    expected = vae.decode(latents).sample
    assert expected.shape == (1, 3, 28, 36)
    check_exact_modes(vae, latents, expected)


@pytest.mark.parametrize("extents", [(7, 9), (2, 3)])
def test_a_batch_is_divided_over_the_ranks(extents: tuple[int, int]) -> None:
    """The smaller pictures have fewer positions than the attention has head channels, so it takes its quadratic path."""
    vae, latents = dc(), latents_of((3, 4, *extents))
    plan, pictures = decoded(vae, latents, "batch", ranks=2)
    assert plan.mode == "batch"
    torch.testing.assert_close(pictures, vae.decode(latents).sample, atol=1e-5, rtol=0)


def test_tiles_give_the_tiled_pixels_of_diffusers() -> None:
    vae, latents = dc(), latents_of((1, 4, 11, 13))
    vae.enable_tiling(32, 32, 24, 24)
    expected = vae.decode(latents).sample
    vae.disable_tiling()
    check_tiles(vae, latents, expected, tiles=StrideTiles(32, 24))


def test_a_tile_smaller_than_the_stride_is_refused_where_diffusers_truncates_the_picture() -> None:
    vae, latents = dc(), latents_of((1, 4, 11, 13))
    vae.enable_tiling(16, 16)
    assert vae.decode(latents).sample.shape[-2:] == (16, 16), "its stride is still 448 px"
    vae.disable_tiling()
    with pytest.raises(ConfigError, match="stride"):
        AutoencoderDCFamily(vae, "tiny", StrideTiles(16, 448))


def test_a_stride_that_is_no_whole_number_of_cells_still_gives_the_whole_picture() -> None:
    """As of 448 px at 128 pixels per cell; here 26 px at 4, which diffusers takes for 6 cells and yet keeps."""
    vae, latents = dc(), latents_of((1, 4, 11, 13))
    vae.enable_tiling(32, 32, 26, 26)
    assert vae.decode(latents).sample.shape[-2:] != (44, 52), "diffusers got it right: compare with it instead"
    vae.disable_tiling()
    expected = tiled(vae.decoder, latents, tile_px=32, overlap=0.25, ratio=4)
    assert expected.shape == (1, 3, 44, 52)
    check_tiles(vae, latents, expected)


def test_normalized_latents_are_divided_by_the_scaling_factor() -> None:
    vae, latents = dc(scaling_factor=0.41407), latents_of((2, 4, 7, 9))
    _, pictures = decoded(vae, latents, "batch", ranks=2, denormalize=True)
    torch.testing.assert_close(pictures, vae.decode(latents / 0.41407).sample, atol=1e-5, rtol=0)


def test_spatial_modes_are_refused_with_the_reason_and_auto_stays_exact() -> None:
    spec = AutoencoderDCFamily(dc(), "tiny").spec
    policy = Policy(direct_max_pixels=0)
    for axis in ("height", "width"):
        with pytest.raises(UnsupportedModeError, match="linear attention"):
            make_plan(spec, (1, 4, 7, 9), group_size=2, policy=policy, mode=f"spatial_shard_{axis}", strict=True)
    auto = make_plan(spec, (1, 4, 7, 9), group_size=2, policy=policy)
    assert auto.mode == "direct" and auto.exact and "linear attention" in auto.reason


def test_the_published_sizes_and_their_limits() -> None:
    attention = ("EfficientViTBlock",) * 3
    blocks = {f"{side}_block_types": ("ResBlock",) * 3 + attention for side in ("encoder", "decoder")}
    with torch.device("meta"):
        sana = diffusers.AutoencoderDC(**blocks)
        deepest = diffusers.AutoencoderDC(
            latent_channels=512,
            encoder_block_types="ResBlock",
            decoder_block_types="ResBlock",
            **{
                f"{side}_{key}": value
                for side in ("encoder", "decoder")
                for key, value in {
                    "block_out_channels": (128, 256, 512, 512, 1024, 1024, 2048, 2048),
                    "layers_per_block": (0, 4, 8, 2, 2, 2, 2, 2),
                    "qkv_multiscales": ((),) * 8,
                }.items()
            },
        )
    spec = AutoencoderDCFamily(sana, "sana").spec
    assert (spec.latent_channels, spec.spatial_ratio, spec.operand_per_pixel_first) == (32, 32, 128)
    assert spec.tiles == StrideTiles(512, 448)
    assert make_plan(spec, (1, 32, 64, 64), group_size=1, policy=Policy()).mode == "direct", "2048 x 2048"
    assert make_plan(spec, (1, 32, 128, 128), group_size=1, policy=Policy()).mode == "tile", "4096 x 4096 is 2^31"
    spec = AutoencoderDCFamily(deepest, "f128").spec
    assert (spec.latent_channels, spec.spatial_ratio, spec.operand_per_pixel_first) == (512, 128, 64)
    assert spec.tiles == StrideTiles(512, 384)
