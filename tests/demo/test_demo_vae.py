"""The demo VAE is real: diffusers loads it, and its samples decode to the photographs they were made from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from decode_service import demo

FOLDER_LIMIT_BYTES = 12_000_000
LEAST_PSNR_DB = 25.0


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    return AutoencoderKLWan.from_pretrained(demo.DEMO_VAE_DIR, torch_dtype=torch.float32).eval()


def decode(vae: AutoencoderKLWan, latents_BCTHW: np.ndarray) -> np.ndarray:
    """uint8 (F, H, W, 3) of raw latents."""
    with torch.inference_mode():
        pixels_BCFHW = vae.decode(torch.from_numpy(latents_BCTHW)).sample
    return ((pixels_BCFHW[0].permute(1, 2, 3, 0) + 1) * 127.5).round().to(torch.uint8).numpy()


def psnr_db(decoded_FHWC: np.ndarray, original_FHWC: np.ndarray) -> np.ndarray:
    """Per frame."""
    error = decoded_FHWC.astype(np.float64) - original_FHWC
    return 10 * np.log10(255.0**2 / np.square(error).mean(axis=(1, 2, 3)))


@pytest.mark.parametrize("name", sorted(demo.SAMPLES))
def test_a_sample_decodes_to_its_photograph(vae: AutoencoderKLWan, name: str) -> None:
    original = demo.original_frames(name)
    decoded = decode(vae, demo.load_sample(name))
    assert decoded.shape == original.shape
    psnr_F = psnr_db(decoded, original)
    assert psnr_F.mean() >= LEAST_PSNR_DB
    # No single frame may be ruined behind a good mean: the first and the last are decoded differently from the rest.
    assert psnr_F.min() >= LEAST_PSNR_DB - 2


def test_the_samples_are_a_still_a_landscape_and_a_portrait_clip() -> None:
    shapes = {name: demo.load_sample(name).shape for name in demo.SAMPLES}
    assert shapes["still"] == (1, 16, 1, 32, 32)
    assert shapes["landscape"] == (1, 16, 5, 30, 52)
    assert shapes["portrait"] == (1, 16, 5, 52, 30)
    for name in ("landscape", "portrait"):
        assert len(demo.original_frames(name)) >= 17


def test_the_clips_move() -> None:
    """A clip whose frames are all alike would not notice a decoder that mixes them up."""
    for name in ("landscape", "portrait"):
        frames = demo.original_frames(name)
        assert psnr_db(frames[1:], frames[:-1]).max() < 40


def test_the_configuration_describes_the_latents(vae: AutoencoderKLWan) -> None:
    mean, std = np.array(vae.config.latents_mean), np.array(vae.config.latents_std)
    assert mean.shape == std.shape == (vae.config.z_dim,) == (16,)
    assert (std > 0).all()
    # Normalized, the samples together have about zero mean and unit spread in every channel.
    normalized = [(demo.load_sample(name)[0].reshape(16, -1) - mean[:, None]) / std[:, None] for name in demo.SAMPLES]
    assert np.abs(np.mean([n.mean(axis=1) for n in normalized], axis=0)).max() < 0.3
    spread = np.sqrt(np.mean([np.square(n).mean(axis=1) for n in normalized], axis=0))
    assert 0.7 < spread.min() and spread.max() < 1.4


def test_the_encoder_is_there_and_fits_the_decoder(vae: AutoencoderKLWan) -> None:
    original = demo.original_frames("still")
    pixels = torch.from_numpy(original).permute(3, 0, 1, 2).unsqueeze(0).float() / 127.5 - 1
    with torch.inference_mode():
        latents = vae.encode(pixels).latent_dist.sample(torch.Generator().manual_seed(0))
    assert psnr_db(decode(vae, latents.numpy()), original).mean() >= 23


def test_every_layer_of_the_decoder_matters(vae: AutoencoderKLWan) -> None:
    """A fixture with dead weights would hide a decoder that gets them wrong."""
    for name, parameter in vae.decoder.named_parameters():
        if name.endswith("weight"):
            assert parameter.std() > 1e-3, name
        if parameter.ndim == 5:
            for tap, kernel in enumerate(parameter.unbind(2)):
                assert kernel.std() > 1e-3, f"{name}, temporal tap {tap}"


def test_diffusers_finds_every_weight_it_expects() -> None:
    _, info = AutoencoderKLWan.from_pretrained(demo.DEMO_VAE_DIR, output_loading_info=True)
    assert not any(info.values()), info


def test_the_folder_stays_small() -> None:
    folder = demo.DEMO_VAE_DIR.parent
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= FOLDER_LIMIT_BYTES
