"""The checks themselves fail when a family is wrong."""

from __future__ import annotations

import pytest
import torch

from tests.decoding import models
from tests.decoding.family_checks import check_exact_modes, check_tiles
from tests.decoding.harness import latents_of


def test_a_right_family_passes_and_a_wrong_picture_does_not() -> None:
    torch.manual_seed(2)
    vae = models.autoencoder_kl().eval().requires_grad_(False)
    latents = latents_of((1, 4, 11, 13))
    expected = vae.decode(latents).sample
    check_exact_modes(vae, latents, expected)
    wrong = expected.clone()
    wrong[..., 20, 20] += 1e-3
    with pytest.raises(AssertionError, match="spatial_shard_width on 3"):
        check_exact_modes(vae, latents, wrong)

    vae.enable_tiling()
    tiled = vae.decode(latents).sample
    vae.disable_tiling()
    check_tiles(vae, latents, tiled)
    with pytest.raises(AssertionError, match="tile on 1"):
        check_tiles(vae, latents, expected)
