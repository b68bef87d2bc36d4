"""``AutoencoderKLMagvit`` (EasyAnimate) against diffusers."""

from __future__ import annotations

import diffusers
import pytest
import torch

from decode_service.decoding.families.magvit import MagvitFamily, with_shared_weights
from decode_service.planning.spec import StrideTiles
from tests.decoding.family_checks import check_exact_modes, check_interleaved, check_tiles, decoded, reference
from tests.decoding.harness import latents_of
from tests.decoding.tiny_models import magvit as model

TILES = StrideTiles(32, 28)
VARIANTS = {"statistics of a frame": True, "statistics of a pass": False}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("frames", [1, 2, 3, 5])
def test_exact_modes_give_the_video_of_diffusers(frames: int, variant: str) -> None:
    vae, latents = model(VARIANTS[variant]), latents_of((1, 4, frames, 7, 9))
    expected = reference(vae, latents)
    check_exact_modes(vae, latents, expected)
    rule = MagvitFamily(vae, "tiny").spec.frame_rule
    assert rule is not None and rule.frames(frames) == expected.shape[2] == 1 + 4 * (frames - 1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_any_chunk_gives_the_same_video(chunk: int, variant: str) -> None:
    vae, latents = model(VARIANTS[variant]), latents_of((1, 4, 5, 4, 5))
    expected = reference(vae, latents)
    plan, video = decoded(vae, latents, "direct", chunk=chunk)
    assert plan.chunk == (chunk if VARIANTS[variant] else 1)
    torch.testing.assert_close(video, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("frames", [1, 3])
def test_tiles_give_the_tiled_video_of_diffusers(frames: int) -> None:
    vae, latents = model(), latents_of((1, 4, frames, 11, 13))
    vae.enable_tiling(TILES.size_px, TILES.size_px, None, TILES.stride_px, TILES.stride_px)
    expected = reference(vae, latents)
    vae.disable_tiling()
    check_tiles(vae, latents, expected, tiles=TILES)


def test_normalized_latents_are_decoded_as_the_easyanimate_pipeline_does() -> None:
    vae, latents = model(), latents_of((1, 4, 2, 7, 9))
    with torch.inference_mode():
        expected = vae.decode(1 / vae.config.scaling_factor * latents).sample
    _, video = decoded(vae, latents, "direct", denormalize=True)
    torch.testing.assert_close(video, expected, atol=1e-5, rtol=0)


def test_interleaved_decodes_do_not_touch_each_other_nor_the_model() -> None:
    vae = model()
    check_interleaved(vae, [latents_of((1, 4, 4, 4, 5), seed) for seed in (1, 2)], chunk=2)
    assert all(getattr(module, "prev_features", None) is None for module in vae.modules())


def test_modules_of_a_decode_share_the_weights() -> None:
    decoder = model().decoder
    twin = with_shared_weights(decoder)
    own, shared = dict(decoder.named_parameters()), dict(twin.named_parameters())
    assert own.keys() == shared.keys() and all(own[name] is shared[name] for name in own)
    assert twin.conv_in is not decoder.conv_in


def test_the_released_configuration_has_its_ratios() -> None:
    with torch.device("meta"):
        spec = MagvitFamily(diffusers.AutoencoderKLMagvit(), "easyanimate").spec
    assert spec.output_extents((1, 16, 13, 48, 84)) == (49, 384, 672)
    assert spec.tiles == StrideTiles(512, 448)
    assert (spec.operand_per_pixel, spec.operand_per_pixel_first) == (6 * 256, 3 * 256)
