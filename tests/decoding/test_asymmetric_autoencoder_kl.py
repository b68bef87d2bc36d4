"""``AsymmetricAutoencoderKL``: every mode against diffusers' plain decode."""

from __future__ import annotations

import torch

from decode_service.decoding.families.asymmetric_autoencoder_kl import AsymmetricAutoencoderKLFamily
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from tests.decoding.family_checks import check_exact_modes, check_tiles, decoded
from tests.decoding.harness import latents_of
from tests.decoding.tiled_reference import tiled
from tests.decoding.tiny_models import asymmetric_autoencoder_kl as asymmetric


def test_every_exact_mode_gives_the_pixels_of_diffusers() -> None:
    vae, latents = asymmetric(), latents_of((1, 4, 7, 9))
    expected = vae.decode(latents).sample
    assert expected.shape == (1, 3, 28, 36)
    check_exact_modes(vae, latents, expected)


def test_tiles_are_those_of_autoencoder_kl() -> None:
    vae, latents = asymmetric(), latents_of((1, 4, 11, 13))
    expected = tiled(lambda z: vae.decode(z).sample, latents, tile_px=32, overlap=0.25, ratio=4)
    assert expected.shape == (1, 3, 44, 52)
    check_tiles(vae, latents, expected, tiles=StrideTiles(32, 24))
    plan, _ = decoded(vae, latents, "tile", tiles=StrideTiles(32, 24))
    assert not plan.exact


def test_normalized_latents_are_divided_by_the_scaling_factor() -> None:
    vae, latents = asymmetric(), latents_of((2, 4, 7, 9))
    _, picture = decoded(vae, latents, "spatial_shard_height", ranks=2, denormalize=True)
    expected = vae.decode(latents / vae.config.scaling_factor).sample
    torch.testing.assert_close(picture, expected, atol=1e-5, rtol=0)


def test_a_full_size_and_its_limits() -> None:
    """A decoder 1.5 times as wide as that of Stable Diffusion."""
    widths = (192, 384, 768, 768)
    with torch.device("meta"):
        vae = asymmetric(
            down_block_types=("DownEncoderBlock2D",) * 4,
            down_block_out_channels=(128, 256, 512, 512),
            up_block_types=("UpDecoderBlock2D",) * 4,
            up_block_out_channels=widths,
            norm_num_groups=32,
        )
    spec = AsymmetricAutoencoderKLFamily(vae, "asymmetric").spec
    assert (spec.latent_channels, spec.spatial_ratio, spec.operand_per_pixel_first) == (4, 8, 384)
    assert make_plan(spec, (1, 4, 256, 256), group_size=1, policy=Policy()).mode == "direct", "2048 x 2048"
    assert make_plan(spec, (1, 4, 512, 512), group_size=1, policy=Policy()).mode == "tile", "4096 x 4096"
