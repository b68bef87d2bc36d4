"""``AutoencoderKLHunyuanVideo`` against diffusers: temporal parts, frame-causal attention, tiles."""

from __future__ import annotations

import itertools

import diffusers
import pytest
import torch
import torch.nn.functional as F

from decode_service.decoding import attention
from decode_service.decoding.attention import frame_causal_attention
from decode_service.decoding.families.hunyuan_video import HunyuanVideoFamily
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from decode_service.planning.temporal import FadedFrames
from tests.decoding.family_checks import (
    check_compiles_whole,
    check_exact_modes,
    check_half_precision,
    check_tiles,
    decoded,
    largest_operand,
    reference,
)
from tests.decoding.harness import latents_of
from tests.decoding.tiny_models import hunyuan_video as tiny


# 1, 2 and 3 frames, the longest clip that is decoded whole, and longer ones: with parts of 5 and 2 latent frames, with a
# last part of which nothing remains (7), and with three parts (9).
@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 7, 9])
def test_every_exact_mode_is_what_diffusers_decodes_by_default(frames: int) -> None:
    vae = tiny()
    latents = latents_of((1, 4, frames, 7, 5 if frames > 5 else 9))
    check_exact_modes(vae, latents, reference(vae, latents), ranks=(3,) if frames > 5 else (2, 3))


def test_the_mask_matters_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the checks above would not notice its absence."""
    vae = tiny()
    latents = latents_of((1, 4, 2, 7, 9))
    masked = reference(vae, latents)
    module = diffusers.models.autoencoders.autoencoder_kl_hunyuan_video
    original = module.prepare_causal_attention_mask
    monkeypatch.setattr(module, "prepare_causal_attention_mask", lambda *a, **k: torch.zeros_like(original(*a, **k)))
    assert (reference(vae, latents) - masked).abs().max() > 0.01


def test_a_model_without_attention_is_exact() -> None:
    vae = tiny(mid_block_add_attention=False)
    latents = latents_of((1, 4, 2, 7, 9))
    check_exact_modes(vae, latents, reference(vae, latents), ranks=(2,))


@pytest.mark.parametrize("frames", [1, 3, 6])
def test_tiles_are_those_of_diffusers(frames: int) -> None:
    vae = tiny()
    latents = latents_of((1, 4, frames, 7, 9))
    vae.enable_tiling(32, 32, tile_sample_stride_height=24, tile_sample_stride_width=24)
    expected = reference(vae, latents)
    vae.disable_tiling()
    check_tiles(vae, latents, expected, tiles=StrideTiles(32, 24))


def test_a_frame_below_the_tile_along_one_axis_is_tiled_as_in_diffusers() -> None:
    vae = tiny()
    latents = latents_of((1, 4, 2, 3, 9))
    vae.enable_tiling(32, 32, tile_sample_stride_height=24, tile_sample_stride_width=24)
    expected = reference(vae, latents)
    vae.disable_tiling()
    check_tiles(vae, latents, expected, tiles=StrideTiles(32, 24), ranks=(1,))


def test_denormalizing_is_what_the_pipeline_does() -> None:
    """``HunyuanVideoPipeline``: ``latents / vae.config.scaling_factor``."""
    vae = tiny(scaling_factor=0.476986)
    latents = latents_of((1, 4, 2, 7, 9))
    expected = reference(vae, latents / vae.config.scaling_factor)
    _, picture = decoded(vae, latents, "direct", denormalize=True)
    torch.testing.assert_close(picture, expected, atol=1e-5, rtol=0)


def test_half_precision_is_no_further_off_than_diffusers() -> None:
    check_half_precision(tiny(), latents_of((1, 4, 5, 7, 9)))


@pytest.mark.parametrize("frames", [1, 2, 4, 5])
def test_no_mask_is_made_and_no_operand_is_larger_than_planned(frames: int) -> None:
    """The reference's mask of 5 frames of 18 x 16 tokens has 1440^2 elements, more than the widest activation."""
    vae = tiny(block_out_channels=(4, 4, 4, 8))
    latents = latents_of((1, 4, frames, 18, 16))
    family = HunyuanVideoFamily(vae, "tiny")
    spec, largest = family.spec, largest_operand(family, latents, 1)
    planned = (spec.operand_per_pixel_first + (frames - 1) * spec.operand_per_pixel) * 144 * 128
    # A padded operand has two rows and columns more, which planning leaves out.
    assert planned <= largest <= planned * 1.05
    assert largest < (frames * 18 * 16) ** 2 or frames < 5


def test_a_long_clip_needs_no_more_than_its_parts() -> None:
    with torch.device("meta"):
        vae = diffusers.AutoencoderKLHunyuanVideo()
    spec = HunyuanVideoFamily(vae, "hunyuan").spec
    assert (spec.spatial_ratio, spec.frame_rule) == (8, FadedFrames(ratio=4, whole=4, stride=3))
    assert (spec.operand_per_pixel_first, spec.operand_per_pixel) == (3 * 256, 4 * 256)
    for frames in (5, 33):
        shape = (1, 16, frames, 68, 120)
        assert make_plan(spec, shape, group_size=1, policy=Policy()).mode == "tile", "19 x 256 x 544 x 960 > 2^31"
        assert make_plan(spec, shape, group_size=2, policy=Policy()).mode == "spatial_shard_width"
    assert make_plan(spec, (1, 16, 3, 68, 120), group_size=1, policy=Policy()).mode == "direct"


@pytest.mark.parametrize("frames", range(1, 24))
def test_parts_cover_every_frame_once(frames: int) -> None:
    rule = FadedFrames(ratio=4, whole=4, stride=3)
    parts = rule.parts(frames)
    assert parts[0][0] == 0 and parts[-1][1] == frames
    assert all(stop - start >= 2 for start, stop in parts) or frames == 1
    kept = [4 * (following[0] - start) for (start, _), following in itertools.pairwise(parts)]
    last = 4 * (parts[-1][1] - parts[-1][0] - 1)
    assert 1 + sum(kept) + last == rule.frames(frames) == 1 + 4 * (frames - 1)


@pytest.mark.parametrize("limit", [attention.MAX_SCORES, 40])
def test_frame_causal_attention_is_masked_attention(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", limit)
    query, key, value = (latents_of((2, 2, 3, 5, 8), seed) for seed in range(3))
    frame = torch.arange(3).repeat_interleave(5)
    mask = frame.unsqueeze(1) >= frame.unsqueeze(0)
    expected = F.scaled_dot_product_attention(*(x.flatten(2, 3) for x in (query, key, value)), attn_mask=mask)
    actual = frame_causal_attention(query, key, value)
    torch.testing.assert_close(actual.flatten(2, 3), expected, atol=1e-6, rtol=1e-5)


def test_the_decoder_compiles_whole() -> None:
    vae, latents = tiny(), latents_of((1, 4, 3, 5, 6))
    check_compiles_whole(vae, latents, reference(vae, latents))
