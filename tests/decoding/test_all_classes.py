"""What every class is held to alike, and those classes that ``test_exactness`` decodes on processes, on threads too."""

from __future__ import annotations

import pytest

from decode_service.decoding.families import FAMILIES
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from tests.decoding import models
from tests.decoding.family_checks import check_batch, check_exact_modes, check_tiles, reference
from tests.decoding.harness import latents_of
from tests.decoding.tiny_models import TINY, latent_shape, minimax_h3, tiny_spec

TILES = {
    "autoencoder_kl": (StrideTiles(32, 24), (1, 4, 11, 17)),
    "wan21": (StrideTiles(64, 48), (1, 4, 2, 11, 17)),
    "wan22": (StrideTiles(64, 32), (1, 4, 2, 5, 7)),
    "qwen_image": (StrideTiles(64, 48), (1, 4, 1, 11, 17)),
}


@pytest.mark.parametrize("class_name", [name for name in TINY if "batch" in tiny_spec(name).modes(2)])
def test_a_batch_is_its_items(class_name: str) -> None:
    vae = TINY[class_name]()
    shape = latent_shape(FAMILIES[class_name](vae, "tiny").spec, frames=2, height=4, width=5)
    # Three items on two ranks.
    check_batch(vae, latents_of((3, *shape[1:])))


@pytest.mark.parametrize("name", TILES)
def test_exact_modes_give_the_pixels_of_diffusers(name: str) -> None:
    vae, latents = models.tiny(name), latents_of(TILES[name][1])
    check_exact_modes(vae, latents, reference(vae, latents))


@pytest.mark.parametrize("name", TILES)
def test_tiles_give_the_tiled_pixels_of_diffusers(name: str) -> None:
    vae, (tiles, shape) = models.tiny(name), TILES[name]
    latents = latents_of(shape)
    if name == "autoencoder_kl":
        vae.enable_tiling()  # its size follows from the config's sample_size
    else:
        vae.enable_tiling(tiles.size_px, tiles.size_px, tiles.stride_px, tiles.stride_px)
    expected = reference(vae, latents)
    vae.disable_tiling()
    # Only the undivided output of Qwen-Image is clamped in diffusers; the family clamps both.
    check_tiles(vae, latents, expected.clamp(-1, 1) if name == "qwen_image" else expected, tiles=tiles)


def test_minimax_h3_is_its_tiles() -> None:
    vae, latents = minimax_h3(), latents_of((1, 4, 12, 17, 21))
    check_tiles(vae, latents, reference(vae, latents))


@pytest.mark.parametrize(
    ("class_name", "causes"),
    [
        ("AutoencoderKL", ("GroupNorm statistics", "attends to itself")),
        ("AutoencoderKLCogVideoX", ("GroupNorm statistics",)),
        ("AutoencoderKLWan", ("attends to itself",)),
        ("AutoencoderKLHunyuanVideo15", ("attends to itself",)),
        ("AutoencoderTiny", ("convolutions",)),
    ],
)
def test_a_plan_of_tiles_says_what_a_tile_misses(class_name: str, causes: tuple[str, ...]) -> None:
    spec = tiny_spec(class_name)
    plan = make_plan(spec, latent_shape(spec, height=200, width=200), group_size=2, policy=Policy(), mode="tile")
    assert not plan.exact
    said = plan.reason.partition("approximate: ")[2]
    known = ("GroupNorm statistics", "attends to itself", "convolutions")
    assert [cause for cause in known if cause in said] == list(causes)
