"""``AutoencoderKLKVAE`` against diffusers."""

from __future__ import annotations

import diffusers
import pytest
import torch

from decode_service.decoding.families.kvae import KVAEFamily
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from tests.decoding.family_checks import check_exact_modes, check_tiles, check_tiles_of_uneven_strides, decoded
from tests.decoding.harness import latents_of
from tests.decoding.tiny_models import kvae as model


@pytest.mark.parametrize("multipliers", [(1, 2, 2), (2, 1, 1, 2)])
def test_exact_modes_give_the_picture_of_diffusers(multipliers: tuple[int, ...]) -> None:
    vae, latents = model(ch_mult=multipliers), latents_of((1, 4, 7, 11))
    with torch.inference_mode():
        expected = vae.decode(latents).sample
    check_exact_modes(vae, latents, expected)


def test_a_frame_of_one_cell_per_rank_reflects_the_rows_of_its_neighbours() -> None:
    vae, latents = model(), latents_of((1, 4, 3, 3))
    with torch.inference_mode():
        expected = vae.decode(latents).sample
    check_exact_modes(vae, latents, expected)


def test_tiles_give_the_tiled_picture_of_diffusers() -> None:
    vae, latents = model(), latents_of((1, 4, 11, 17))
    vae.enable_tiling()
    with torch.inference_mode():
        expected = vae.decode(latents).sample
    vae.disable_tiling()
    check_tiles(vae, latents, expected)


def test_a_sample_size_that_is_no_whole_number_of_strides_still_gives_the_whole_picture() -> None:
    check_tiles_of_uneven_strides(model(sample_size=36), latents_of((1, 4, 19, 23)))


def test_a_sample_size_of_two_numbers_is_tiled_by_its_first() -> None:
    """diffusers sizes latent tiles by the first number, and then fails: it multiplies the list by the overlap."""
    vae, latents = model(sample_size=(32, 48)), latents_of((1, 4, 11, 9))
    vae.enable_tiling()
    with torch.inference_mode(), pytest.raises(TypeError):
        vae.decode(latents)
    vae.disable_tiling()
    assert KVAEFamily(vae, "tiny").spec.tiles == StrideTiles(32, 24)
    plan, picture = decoded(vae, latents, "tile")
    square = model()
    square.enable_tiling()
    with torch.inference_mode():
        expected = square.decode(latents).sample
    assert plan.tiles is not None and plan.tiles.count > 1
    torch.testing.assert_close(picture, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["direct", "batch"])
def test_latents_are_decoded_as_the_encoder_gives_them(mode: str) -> None:
    """The config has no factor and no statistics; what a pipeline would apply is nothing."""
    vae, latents = model(), latents_of((2, 4, 5, 6))
    assert not {"scaling_factor", "shift_factor", "latents_mean", "latents_std"} & set(vae.config)
    with torch.inference_mode():
        expected = torch.cat([vae.decode(item).sample for item in latents.split(1)])
    _, picture = decoded(vae, latents, mode, ranks=1 if mode == "direct" else 2, denormalize=True)
    torch.testing.assert_close(picture, expected, atol=1e-5, rtol=0)


def test_the_released_configuration_and_its_limits() -> None:
    with torch.device("meta"):
        spec = KVAEFamily(diffusers.AutoencoderKLKVAE(), "kvae").spec
    assert (spec.latent_channels, spec.output_channels, spec.spatial_ratio) == (16, 3, 8)
    assert spec.operand_per_pixel_first == 256
    assert spec.tiles == StrideTiles(1024, 768)
    huge = make_plan(spec, (1, 16, 512, 512), group_size=1, policy=Policy())
    assert huge.mode == "tile" and "elements" in huge.reason, "one 4096 x 4096 picture is 2^32"
