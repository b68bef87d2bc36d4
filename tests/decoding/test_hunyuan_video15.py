"""``AutoencoderKLHunyuanVideo15`` against diffusers."""

from __future__ import annotations

import diffusers
import pytest
import torch

from decode_service.decoding.families.hunyuan_video15 import HunyuanVideo15Family
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from decode_service.planning.temporal import CausalFrames
from tests.decoding.family_checks import (
    check_compiles_whole,
    check_exact_modes,
    check_half_precision,
    check_tiles,
    decoded,
    reference,
)
from tests.decoding.harness import latents_of
from tests.decoding.tiny_models import hunyuan_video15 as tiny


@pytest.mark.parametrize("frames", [1, 2, 4])
def test_every_exact_mode_is_what_diffusers_decodes(frames: int) -> None:
    vae = tiny()
    latents = latents_of((1, 4, frames, 7, 9))
    check_exact_modes(vae, latents, reference(vae, latents))


def test_four_fold_time_is_exact() -> None:
    vae = tiny(temporal_compression_ratio=4)
    latents = latents_of((1, 4, 3, 5, 4))
    check_exact_modes(vae, latents, reference(vae, latents), ranks=(2,))


def test_the_mask_matters_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the checks above would not notice its absence."""
    vae = tiny()
    latents = latents_of((1, 4, 2, 7, 9))
    masked = reference(vae, latents)
    block = type(vae.decoder.mid_block.attentions[0])
    monkeypatch.setattr(block, "prepare_causal_attention_mask", staticmethod(lambda *a, **k: None))
    assert (reference(vae, latents) - masked).abs().max() > 0.01


@pytest.mark.parametrize("frames", [1, 3])
def test_tiles_are_those_of_diffusers(frames: int) -> None:
    """Where its sizes agree: ``enable_tiling`` does not derive the latent sizes from the pixel sizes, and with pixel sizes
    alone the picture is cut short (20 x 21 latents at tile 128 give 192 x 192 pixels)."""
    vae = tiny()
    latents = latents_of((1, 4, frames, 7, 9))
    vae.enable_tiling(32, 32, 4, 4, 0.25)
    expected = reference(vae, latents)
    vae.disable_tiling()
    assert expected.shape[-2:] == (56, 72)
    check_tiles(vae, latents, expected, tiles=StrideTiles(32, 24))


def test_tiles_of_any_size_keep_the_whole_picture() -> None:
    vae = tiny()
    latents = latents_of((1, 4, 2, 7, 9))
    for tiles in (StrideTiles(16, 8), StrideTiles(48, 40)):
        plan, picture = decoded(vae, latents, "tile", tiles=tiles)
        assert plan.tiles is not None and plan.tiles.count > 1
        assert picture.shape == (1, 3, 3, 56, 72)


def test_denormalizing_is_what_the_pipeline_does() -> None:
    """``HunyuanVideo15Pipeline``: ``latents / vae.config.scaling_factor``."""
    vae = tiny(scaling_factor=1.03682)
    latents = latents_of((1, 4, 2, 7, 9))
    expected = reference(vae, latents / vae.config.scaling_factor)
    _, picture = decoded(vae, latents, "direct", denormalize=True)
    torch.testing.assert_close(picture, expected, atol=1e-5, rtol=0)


def test_half_precision_is_no_further_off_than_diffusers() -> None:
    check_half_precision(tiny(), latents_of((1, 4, 3, 7, 9)))


def test_planning_knows_the_released_model() -> None:
    with torch.device("meta"):
        vae = diffusers.AutoencoderKLHunyuanVideo15()
    spec = HunyuanVideo15Family(vae, "hunyuan").spec
    assert (spec.spatial_ratio, spec.frame_rule, spec.latent_channels) == (16, CausalFrames(4), 32)
    assert spec.tiles == StrideTiles(256, 192)
    assert (spec.operand_per_pixel_first, spec.operand_per_pixel) == (3 * 128, 4 * 128)
    # 121 frames of 720 x 1280: 123 x 128 elements per pixel, so a whole clip must be divided by 8.
    shape = (1, 32, 31, 45, 80)
    assert make_plan(spec, shape, group_size=4, policy=Policy()).mode == "tile"
    assert make_plan(spec, shape, group_size=8, policy=Policy()).mode == "spatial_shard_width"


def test_the_decoder_compiles_whole() -> None:
    vae, latents = tiny(), latents_of((1, 4, 3, 5, 6))
    check_compiles_whole(vae, latents, reference(vae, latents))
