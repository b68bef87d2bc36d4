"""``AutoencoderKLLTXVideo`` and ``AutoencoderKLLTX2Video`` against diffusers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from decode_service.decoding.families.ltx2_video import LTX2VideoFamily
from decode_service.decoding.families.ltx_video import LTXVideoFamily
from decode_service.errors import ConfigError
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from decode_service.planning.temporal import CausalFrames
from tests.decoding.family_checks import check_exact_modes, check_tiles, decoded
from tests.decoding.harness import latents_of
from tests.decoding.tiny_models import ltx2_video as ltx2
from tests.decoding.tiny_models import ltx_video as ltx

# The upsampling of LTX-Video 0.9.1 and later. Only these can be conditioned: with the others' ``conv_in`` diffusers fails.
RESIDUAL = {"upsample_residual": (True, True), "upsample_factor": (2, 2)}

MODELS: dict[str, Callable[[], Any]] = {
    "LTX 0.9": ltx,
    "LTX, causal": lambda: ltx(decoder_causal=True),
    "LTX, residual upsampling": lambda: ltx(**RESIDUAL),
    "LTX-2": ltx2,
    "LTX-2, padded with zeros, not causal": lambda: ltx2(decoder_spatial_padding_mode="zeros", decoder_causal=False),
    "LTX-2, time and space apart": lambda: ltx2(upsample_type=("spatial", "temporal"), temporal_compression_ratio=2),
}


def reference(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    timestep = torch.zeros(latents.shape[0]) if vae.config.timestep_conditioning else None
    with torch.inference_mode():
        return vae.decode(latents, timestep).sample


@pytest.mark.parametrize("frames", [1, 2, 4])
@pytest.mark.parametrize("name", ["LTX 0.9", "LTX-2"])
def test_every_exact_mode_is_what_diffusers_decodes(name: str, frames: int) -> None:
    vae = MODELS[name]()
    latents = latents_of((1, 4, frames, 7, 9))
    check_exact_modes(vae, latents, reference(vae, latents))


@pytest.mark.parametrize("name", [name for name in MODELS if "," in name])
def test_a_variant_is_exact(name: str) -> None:
    vae = MODELS[name]()
    latents = latents_of((1, 4, 3, 7, 9))
    check_exact_modes(vae, latents, reference(vae, latents), ranks=(3,))


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("build", [ltx, ltx2])
def test_tiles_are_those_of_diffusers(build: Callable[[], Any], frames: int) -> None:
    vae = build()
    # With 7 rows the last tile would have one, on which diffusers fails for LTX-2.
    latents = latents_of((1, 4, frames, 8, 9))
    vae.enable_tiling(32, 32, tile_sample_stride_height=24, tile_sample_stride_width=24)
    expected = reference(vae, latents)
    vae.disable_tiling()
    assert expected.shape[-2:] == (64, 72)
    check_tiles(vae, latents, expected, tiles=StrideTiles(32, 24), ranks=(1, 3))


def test_a_last_tile_of_one_row_is_decoded_with_the_row_before() -> None:
    """diffusers raises: LTX-2 pads by reflecting, and one row has nothing to reflect."""
    vae = ltx2()
    latents = latents_of((1, 4, 2, 7, 3))
    plan, picture = decoded(vae, latents, "tile", tiles=StrideTiles(32, 24))
    assert plan.tiles is not None and plan.tiles.rows[-1].size == 1
    before, last = reference(vae, latents[..., 3:7, :])[..., -8:, :], reference(vae, latents[..., 5:7, :])[..., -8:, :]
    rising = (torch.arange(8) / 8).view(8, 1)
    torch.testing.assert_close(picture[..., -8:, :], before * (1 - rising) + last * rising, atol=1e-5, rtol=0)
    assert picture.shape[-2] == 56


def test_a_tile_smaller_than_the_stride_is_refused() -> None:
    """diffusers keeps its stride of 448 when only the tile is made smaller, and cuts the picture short without a word."""
    with pytest.raises(ConfigError, match="stride"):
        LTXVideoFamily(ltx(), "tiny", StrideTiles(256, 448))


@pytest.mark.parametrize("build", [ltx, ltx2])
def test_denormalizing_is_what_the_pipeline_does(build: Callable[..., Any]) -> None:
    """``_denormalize_latents`` of ``LTXPipeline`` and ``LTX2Pipeline``; the statistics are buffers of the model."""
    vae = build(scaling_factor=0.5)
    latents = latents_of((1, 4, 2, 7, 9))
    mean, std = (statistics.view(1, -1, 1, 1, 1) for statistics in (vae.latents_mean, vae.latents_std))
    raw = latents * std / vae.config.scaling_factor + mean
    _, picture = decoded(vae, latents, "direct", denormalize=True)
    torch.testing.assert_close(picture, reference(vae, raw), atol=1e-5, rtol=0)


@pytest.mark.parametrize("build", [ltx, ltx2])
def test_timestep_conditioning_is_decoded_at_the_pipelines_default(build: Callable[..., Any]) -> None:
    """``decode_timestep=0.0``, and noise of that weight."""
    vae = build(timestep_conditioning=True, **RESIDUAL)
    latents = latents_of((2, 4, 2, 8, 9))
    expected = reference(vae, latents)
    check_exact_modes(vae, latents, expected)
    _, divided = decoded(vae, latents, "batch", ranks=2)
    torch.testing.assert_close(divided, expected, atol=1e-5, rtol=0)
    vae.enable_tiling(32, 32, tile_sample_stride_height=24, tile_sample_stride_width=24)
    tiled = reference(vae, latents)
    vae.disable_tiling()
    check_tiles(vae, latents, tiled, tiles=StrideTiles(32, 24), ranks=(2,))


def test_the_dtype_is_that_of_the_weights_not_of_the_timestep_multiplier() -> None:
    vae = ltx(timestep_conditioning=True, **RESIDUAL).bfloat16()
    vae.decoder.timestep_scale_multiplier.data = vae.decoder.timestep_scale_multiplier.data.float()
    assert LTXVideoFamily(vae, "tiny").dtype() == torch.bfloat16


@pytest.mark.parametrize("build", [ltx, ltx2])
@pytest.mark.parametrize("config", [{"decoder_inject_noise": (False, True, False)}, {"patch_size_t": 2}])
def test_what_is_not_supported_says_so(build: Callable[..., Any], config: dict[str, Any]) -> None:
    vae = build(**config)
    family = LTXVideoFamily if build is ltx else LTX2VideoFamily
    with pytest.raises(ConfigError, match="support"):
        family(vae, "tiny")


def test_planning_knows_the_released_models() -> None:
    with torch.device("meta"):
        first = LTXVideoFamily(diffusers.AutoencoderKLLTXVideo(), "ltx").spec
        second = LTX2VideoFamily(diffusers.AutoencoderKLLTX2Video(), "ltx2").spec
    for spec in (first, second):
        assert (spec.spatial_ratio, spec.frame_rule, spec.latent_channels) == (32, CausalFrames(8), 128)
        assert spec.tiles == StrideTiles(512, 448)
    # 128 channels at a quarter of the resolution: 8 elements per pixel and frame, and 8 frames per latent frame.
    assert first.operand_per_pixel == 8 * 8
    assert make_plan(first, (1, 128, 16, 34, 60), group_size=1, policy=Policy()).mode == "direct"
    long = make_plan(first, (1, 128, 33, 34, 60), group_size=1, policy=Policy())
    assert long.mode == "tile" and "elements" in long.reason, "257 frames of 1088 x 1920 are 2^32"
    assert make_plan(first, (1, 128, 33, 34, 60), group_size=4, policy=Policy()).mode == "spatial_shard_width"
