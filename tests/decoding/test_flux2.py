"""``AutoencoderKLFlux2``: every mode against diffusers, and the statistics of packed latents applied to unpacked ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F

from decode_service.decoding.families.flux2 import Flux2Family
from decode_service.decoding.loading import ModelSource, load_family
from decode_service.decoding.rank import RankDecoder
from decode_service.errors import ConfigError, InvalidLatentsError
from decode_service.planning.plan import PixelFormat
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from tests.decoding.family_checks import check_exact_modes, check_tiles, check_tiles_of_uneven_strides, decoded
from tests.decoding.harness import latents_of
from tests.decoding.tiny_models import flux2

CPU = torch.device("cpu")


def pipeline_denormalize(vae: Any, packed: torch.Tensor) -> torch.Tensor:
    """What ``Flux2Pipeline.__call__`` does between its denoiser and ``vae.decode``.

    Its ``_patchify_latents`` and ``_unpatchify_latents`` order packed channels as ``F.pixel_unshuffle`` does.
    """
    mean = vae.bn.running_mean.view(1, -1, 1, 1).to(packed.device, packed.dtype)
    std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps).to(packed.device, packed.dtype)
    return F.pixel_shuffle(packed * std + mean, 2)


VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "another decoder": {"decoder_block_out_channels": (4, 8, 24)},
    "without quant convolutions": {"use_quant_conv": False, "use_post_quant_conv": False},
    "without attention": {"mid_block_add_attention": False},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_exact_mode_gives_the_pixels_of_diffusers(name: str) -> None:
    vae, latents = flux2(**VARIANTS[name]), latents_of((1, 4, 11, 13))
    check_exact_modes(vae, latents, vae.decode(latents).sample)


def test_tiles_give_the_tiled_pixels_of_diffusers() -> None:
    vae, latents = flux2(), latents_of((1, 4, 11, 17))
    vae.enable_tiling()
    expected = vae.decode(latents).sample
    vae.disable_tiling()
    check_tiles(vae, latents, expected)


def test_a_sample_size_that_is_no_whole_number_of_strides_still_gives_the_whole_picture() -> None:
    check_tiles_of_uneven_strides(flux2(sample_size=36), latents_of((1, 4, 19, 23)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_latents_are_denormalized_as_the_pipeline_does_it_to_packed_ones(dtype: torch.dtype) -> None:
    vae = flux2().to(dtype)
    latents = latents_of((2, 4, 6, 10)).to(dtype)
    packed = F.pixel_unshuffle(latents, 2)
    assert packed.shape == (2, 16, 3, 5)
    ours = Flux2Family(vae, "tiny").denormalize(latents.unsqueeze(2)).squeeze(2)
    assert ours.dtype == dtype
    assert torch.equal(ours, pipeline_denormalize(vae, packed)), "the same operations, so the same bits"


def test_odd_extents_are_denormalized_as_the_corner_of_even_ones() -> None:
    family, latents = Flux2Family(flux2(), "tiny"), latents_of((1, 4, 1, 8, 10))
    assert torch.equal(family.denormalize(latents[..., :7, :9]), family.denormalize(latents)[..., :7, :9])


@pytest.mark.parametrize("mode", ["direct", "spatial_shard_height", "spatial_shard_width", "tile"])
def test_normalized_latents_decode_in_every_mode(mode: str) -> None:
    """Bands and tiles begin at odd rows, where a phase counted from their own first row would be wrong."""
    vae, latents = flux2(), latents_of((1, 4, 10, 14))
    raw = pipeline_denormalize(vae, F.pixel_unshuffle(latents, 2))
    if mode == "tile":
        vae.enable_tiling()
    expected = vae.decode(raw).sample
    vae.disable_tiling()
    _, picture = decoded(vae, latents, mode, ranks=1 if mode == "direct" else 3, denormalize=True)
    torch.testing.assert_close(picture, expected, atol=1e-5, rtol=0)


def test_a_retry_in_float32_leaves_the_statistics_as_they_were(tmp_path: Path) -> None:
    flux2().save_pretrained(tmp_path)
    family = load_family(ModelSource("tiny", str(tmp_path), dtype="bfloat16"), device=CPU)
    decoder, latents = RankDecoder(family, device=CPU), latents_of((1, 4, 5, 6))
    plan = make_plan(family.spec, (1, 4, 5, 6), group_size=1, policy=Policy())

    def pixels(precision: str | None) -> torch.Tensor:
        part = decoder.decode(
            plan, latents.numpy(), "float32", denormalize=True, pixels=PixelFormat("float32"), precision=precision
        )
        return torch.from_numpy(part.array)

    before = pixels(None)
    pixels("float32")
    assert torch.equal(pixels(None), before)


def test_a_model_whose_statistics_were_never_loaded_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vae\.bn"):
        Flux2Family(flux2(trained=False), "tiny")


def test_packed_latents_are_refused_with_a_hint() -> None:
    vae = flux2(latent_channels=32)
    with pytest.raises(InvalidLatentsError, match=r"expects 32 latent channels.*packed FLUX\.2"):
        make_plan(Flux2Family(vae, "flux2").spec, (1, 128, 8, 8), group_size=1, policy=Policy())


def test_the_published_size_and_its_limits() -> None:
    with torch.device("meta"):
        vae = diffusers.AutoencoderKLFlux2()
    spec = Flux2Family(vae, "flux2").spec
    assert (spec.latent_channels, spec.spatial_ratio, spec.operand_per_pixel_first) == (32, 8, 256)
    assert spec.tiles == StrideTiles(1024, 768)
    huge = make_plan(spec, (1, 32, 512, 512), group_size=1, policy=Policy())
    assert huge.mode == "tile" and "elements" in huge.reason, "one 4096 x 4096 picture is 2^32"
