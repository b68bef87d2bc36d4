"""``AutoencoderKLQwenImage21`` against diffusers."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from decode_service.decoding.families.qwen_image21 import QwenImage21Family
from decode_service.errors import InvalidLatentsError
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from tests.decoding.family_checks import check_exact_modes, check_tiles, decoded
from tests.decoding.harness import latents_of
from tests.decoding.models import STATISTICS
from tests.decoding.tiny_models import qwen_image21

VARIANTS: dict[str, dict[str, Any]] = {
    "residual": {"is_residual": True},
    "plain": {"is_residual": False},
    "patchified": {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12},
}


def model(variant: str) -> Any:
    return qwen_image21(**VARIANTS[variant])


@pytest.mark.parametrize("variant", VARIANTS)
def test_exact_modes_give_the_picture_of_diffusers(variant: str) -> None:
    vae, latents = model(variant), latents_of((1, 4, 1, 7, 9))
    with torch.inference_mode():
        expected = vae.decode(latents).sample
    check_exact_modes(vae, latents, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiles_give_the_tiled_picture_of_diffusers(variant: str) -> None:
    vae, latents = model(variant), latents_of((1, 4, 1, 11, 13))
    ratio = vae.spatial_compression_ratio
    size, stride = 8 * ratio, 6 * ratio
    vae.enable_tiling(size, size, stride, stride)
    with torch.inference_mode():
        expected = vae.decode(latents).sample
    vae.disable_tiling()
    check_tiles(vae, latents, expected, tiles=StrideTiles(size, stride))


def test_normalized_images_are_decoded_as_the_qwen_image_21_pipeline_does() -> None:
    vae, images = model("residual"), latents_of((2, 4, 7, 9))
    mean, std = (torch.tensor(STATISTICS[key]).view(1, 4, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    with torch.inference_mode():
        expected = vae.decode(images.unsqueeze(2) * std + mean).sample.squeeze(2)
    _, picture = decoded(vae, images, "direct", denormalize=True)
    assert picture.shape == (2, 4, 28, 36), "a picture has an alpha channel"
    torch.testing.assert_close(picture, expected, atol=1e-5, rtol=0)


def test_a_second_latent_frame_is_refused() -> None:
    vae = model("residual")
    with pytest.raises((RuntimeError, ValueError)), torch.inference_mode():
        vae.decode(latents_of((1, 4, 2, 7, 9)))
    with pytest.raises(InvalidLatentsError, match="one latent frame"):
        make_plan(QwenImage21Family(vae, "tiny").spec, (1, 4, 2, 7, 9), group_size=1, policy=Policy())


def test_the_released_configuration_has_its_ratios() -> None:
    with torch.device("meta"):
        spec = QwenImage21Family(diffusers.AutoencoderKLQwenImage21(), "qwen").spec
    assert (spec.latent_channels, spec.output_channels, spec.spatial_ratio) == (64, 4, 16)
    assert spec.operand_per_pixel_first == 288
