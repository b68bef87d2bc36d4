"""Qwen-Image-Layered: ``AutoencoderKLQwenImage`` with an alpha channel, its layers decoded as pictures of a batch."""

from __future__ import annotations

import io
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from decode_service.decoding.families.qwen_image import QwenImageFamily
from decode_service.media.encode import encode
from decode_service.planning.plan import PixelFormat
from decode_service.planning.spec import StrideTiles
from tests.decoding.family_checks import check_exact_modes, check_tiles, decoded
from tests.decoding.harness import latents_of
from tests.decoding.models import STATISTICS, weights_times

LAYERS = 3


@pytest.fixture(scope="module")
def vae() -> Any:
    torch.manual_seed(4)
    config = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "temperal_downsample": [False, True]}
    vae = diffusers.AutoencoderKLQwenImage(**config, num_res_blocks=1, input_channels=4, **STATISTICS)
    return weights_times(1.2, vae.eval().requires_grad_(False))


def pipeline_layers(vae: Any, latents_BCLHW: torch.Tensor) -> torch.Tensor:
    """Pixels (layers,4,H,W) as ``QwenImageLayeredPipeline.__call__`` gets them from its unpacked latents.

    Frame 0 of its latents is the picture that was taken apart; every other one is a layer, and a picture of its own.
    """
    dtype, channels = latents_BCLHW.dtype, vae.config.z_dim
    mean = torch.tensor(vae.config.latents_mean).view(1, channels, 1, 1, 1).to(dtype)
    reciprocal = 1.0 / torch.tensor(vae.config.latents_std).view(1, channels, 1, 1, 1).to(dtype)
    latents = (latents_BCLHW / reciprocal + mean)[:, :, 1:]
    _, _, _, height, width = latents.shape
    latents = latents.permute(0, 2, 1, 3, 4).reshape(-1, channels, 1, height, width)
    with torch.no_grad():
        return vae.decode(latents, return_dict=False)[0].squeeze(2)


def layers_of(latents_BCLHW: torch.Tensor) -> torch.Tensor:
    """What a caller sends: every layer a picture (C,H,W) of the batch, without frame 0; still normalized."""
    return latents_BCLHW[:, :, 1:].permute(0, 2, 1, 3, 4).flatten(0, 1).contiguous()


def test_exact_modes_give_all_four_channels_of_diffusers(vae: Any) -> None:
    latents = latents_of((1, 4, 1, 7, 9))
    with torch.no_grad():
        expected = vae.decode(latents).sample
    assert expected.shape == (1, 4, 1, 28, 36)
    check_exact_modes(vae, latents, expected)


def test_tiles_give_all_four_channels_of_diffusers(vae: Any) -> None:
    latents = latents_of((1, 4, 1, 11, 13))
    vae.enable_tiling(32, 32, 24, 24)
    with torch.no_grad():
        # diffusers clamps its undivided pictures only.
        expected = vae.decode(latents).sample.clamp(-1, 1)
    vae.disable_tiling()
    assert expected.shape == (1, 4, 1, 44, 52)
    check_tiles(vae, latents, expected, tiles=StrideTiles(32, 24))


@pytest.mark.parametrize(("mode", "ranks"), [("direct", 1), ("batch", 2), ("spatial_shard_width", 2)])
def test_layers_are_decoded_as_the_layered_pipeline_does(vae: Any, mode: str, ranks: int) -> None:
    latents = latents_of((2, 4, LAYERS + 1, 5, 6))
    expected = pipeline_layers(vae, latents)
    _, pictures = decoded(vae, layers_of(latents), mode, ranks=ranks, denormalize=True)
    assert pictures.shape == (2 * LAYERS, 4, 20, 24)
    torch.testing.assert_close(pictures, expected, atol=1e-5, rtol=0)


def test_layers_as_frames_of_a_video_would_be_something_else(vae: Any) -> None:
    """The same latents sent as they come out of the denoiser are a clip, whose frames are upsampled in time."""
    latents = latents_of((1, 4, LAYERS + 1, 5, 6))
    plan, _ = decoded(vae, latents, "direct", denormalize=True)
    assert plan.output_frames == 1 + 2 * LAYERS


@pytest.mark.parametrize(("name", "quality"), [("png", None), ("webp", 100), ("webp", None)])
def test_files_of_layers_keep_their_alpha(vae: Any, name: str, quality: int | None) -> None:
    latents = latents_of((1, 4, 2, 5, 6))
    [expected] = VaeImageProcessor().postprocess(pipeline_layers(vae, latents), "pil")
    assert expected.mode == "RGBA"
    _, pictures = decoded(vae, layers_of(latents), "direct", denormalize=True, pixels=PixelFormat("uint8"))
    assert pictures.shape == (1, 20, 24, 4)
    with Image.open(io.BytesIO(encode(name, pictures[0].numpy(), quality=quality).data)) as file:
        assert file.mode == "RGBA"
        found, wanted = np.asarray(file).astype(int), np.asarray(expected).astype(int)
    # A step of one where rounding falls on the other side.
    lossless = found if quality == 100 or name == "png" else found[..., 3:]
    assert np.abs(lossless - wanted[..., -lossless.shape[-1] :]).max() <= 1
    assert np.ptp(wanted[..., 3]) > 10, "a constant alpha would prove nothing"


def test_the_released_configuration() -> None:
    with torch.device("meta"):
        spec = QwenImageFamily(diffusers.AutoencoderKLQwenImage(input_channels=4), "layered").spec
    assert (spec.latent_channels, spec.output_channels, spec.decoder_channels) == (16, 4, 4)
