"""``AutoencoderDC`` in its variants: every mode against diffusers."""

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

EVERY_STAGE = {"encoder_block_types": "EfficientViTBlock", "decoder_block_types": "EfficientViTBlock"}
RESIDUAL = {"encoder_block_types": "ResBlock", "decoder_block_types": "ResBlock"}

VARIANTS: dict[str, dict[str, Any]] = {
    "f32c32 of Sana": {},
    "interpolated": {"upsample_block_type": "interpolate"},
    "an output that upsamples": {"decoder_layers_per_block": (0, 1, 1), "encoder_layers_per_block": (0, 1, 1)},
    "no shortcut": {"decoder_in_shortcut": False, "decoder_conv_act_fn": "silu"},
    # f32c32, f64c128 and f128c512 for ImageNet: an output that upsamples, batch norm, attention at one scale.
    "f64c128 and f128c512": {
        "decoder_layers_per_block": (0, 1, 2),
        "encoder_layers_per_block": (0, 1, 1),
        "decoder_qkv_multiscales": ((), (), ()),
        "decoder_norm_types": ("batch_norm", "batch_norm", "rms_norm"),
        "decoder_act_fns": ("relu", "relu", "silu"),
    },
    "residual blocks only": RESIDUAL,
    "batch norm after attention": {"decoder_norm_types": "batch_norm"},
    "attention at every scale": {**EVERY_STAGE, "decoder_qkv_multiscales": ((7,), (3, 9), ())},
    # The lowest stage has 63 positions, the next 252: weights of positions below, sums above.
    "heads of more channels than positions": {
        **EVERY_STAGE,
        "attention_head_dim": 64,
        **{f"{side}_block_out_channels": (64, 64, 64) for side in ("encoder", "decoder")},
    },
}


def with_statistics(vae: Any) -> Any:
    """Batch norms as of a trained model, on which ones taken of the picture would show."""
    generator = torch.Generator().manual_seed(1)
    for module in vae.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.copy_(torch.randn(module.running_mean.shape, generator=generator) / 4)
            module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.5)
    return vae


@pytest.mark.parametrize("name", VARIANTS)
def test_every_exact_mode_gives_the_pixels_of_diffusers(name: str) -> None:
    vae, latents = with_statistics(dc(**VARIANTS[name])), latents_of((1, 4, 7, 9))
    expected = vae.decode(latents).sample
    assert expected.shape == (1, 3, 28, 36)
    check_exact_modes(vae, latents, expected)


def test_in_bfloat16_bands_are_as_near_to_float32_as_diffusers() -> None:
    vae, latents = dc(), latents_of((1, 4, 7, 9))
    exact = vae.decode(latents).sample
    vae.bfloat16()
    theirs = (vae.decode(latents.bfloat16()).sample.float() - exact).abs().mean()
    for mode in ("direct", "spatial_shard_height", "spatial_shard_width"):
        _, picture = decoded(vae, latents, mode, ranks=1 if mode == "direct" else 3)
        assert (picture - exact).abs().mean() <= 1.1 * theirs, mode


def test_every_rank_needs_as_many_cells_as_the_widest_convolution_reaches() -> None:
    """5 x 5 at the lowest resolution, so 2 cells."""
    vae, latents = dc(), latents_of((1, 4, 6, 5))
    spec = AutoencoderDCFamily(vae, "tiny").spec
    assert spec.min_band_cells == 2
    check_exact_modes(vae, latents[..., :4], vae.decode(latents[..., :4]).sample, ranks=(2,))
    with pytest.raises(UnsupportedModeError, match="3 ranks with at least 2 each"):
        make_plan(spec, (1, 4, 6, 5), group_size=3, policy=Policy(), mode="spatial_shard_width", strict=True)
    plan = make_plan(spec, (1, 4, 6, 5), group_size=3, policy=Policy(direct_max_pixels=0))
    assert plan.mode == "spatial_shard_height"
    plan = make_plan(spec, (1, 4, 5, 5), group_size=3, policy=Policy(direct_max_pixels=0))
    assert plan.mode != "spatial_shard_height" and plan.mode != "spatial_shard_width"
    one_scale = AutoencoderDCFamily(dc(**VARIANTS["f64c128 and f128c512"]), "tiny").spec
    # 9 x 9 at twice the resolution reaches over 4 rows, 2 cells.
    scales = AutoencoderDCFamily(dc(**VARIANTS["attention at every scale"]), "tiny").spec
    assert (one_scale.min_band_cells, scales.min_band_cells) == (1, 2)


@pytest.mark.parametrize("extents", [(7, 9), (2, 3)])
def test_a_batch_is_divided_over_the_ranks(extents: tuple[int, int]) -> None:
    """The smaller pictures have fewer positions than the attention has head channels, so it goes by weights."""
    vae, latents = dc(), latents_of((3, 4, *extents))
    plan, pictures = decoded(vae, latents, "batch", ranks=2)
    assert plan.mode == "batch"
    torch.testing.assert_close(pictures, vae.decode(latents).sample, atol=1e-5, rtol=0)


def test_the_decoder_compiles_whole() -> None:
    """No graph break: the calls in the family's own order hide nothing from the compiler."""
    vae, latents = dc(), latents_of((1, 4, 5, 6))
    family = AutoencoderDCFamily(vae, "tiny")
    compiled = torch.compile(family.call_decoder, fullgraph=True, backend="eager")
    with torch.inference_mode():
        torch.testing.assert_close(compiled(latents), vae.decode(latents).sample, atol=1e-5, rtol=0)


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
    assert make_plan(spec, (1, 32, 128, 128), group_size=2, policy=Policy()).mode == "spatial_shard_width"
    assert spec.min_band_cells == 2
    spec = AutoencoderDCFamily(deepest, "f128").spec
    assert (spec.latent_channels, spec.spatial_ratio, spec.operand_per_pixel_first) == (512, 128, 64)
    assert spec.tiles == StrideTiles(512, 384)
