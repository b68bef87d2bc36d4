"""What compilation needs of a family: decoders that torch can trace, or the word that they cannot be."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from decode_service.decoding.families import FAMILIES
from decode_service.decoding.rank import RankDecoder
from tests.decoding import tiny_models


def refiner() -> Any:
    return diffusers.AutoencoderKLHunyuanImageRefiner(
        block_out_channels=(8, 8, 16, 16, 16), layers_per_block=1, latent_channels=4, scaling_factor=1.0
    )


def test_no_numpy_boolean_is_left_on_a_module() -> None:
    """torch.compile fails on guards of them, with a plain AssertionError at every call."""
    vae = refiner()
    found = [name for module in vae.modules() for name, v in vars(module).items() if isinstance(v, np.bool_)]
    assert found, "diffusers leaves none any more: the mending can go"
    FAMILIES[type(vae).__name__](vae, "tiny")
    assert not any(isinstance(v, np.bool_) for module in vae.modules() for v in vars(module).values())


@pytest.mark.parametrize("build", [tiny_models.mochi, tiny_models.magvit])
def test_a_family_that_cannot_be_compiled_says_so(build: Any) -> None:
    vae = build()
    decoder = RankDecoder(FAMILIES[type(vae).__name__](vae, "tiny"), device=torch.device("cpu"), compile_enabled=True)
    shown = decoder.describe()["compile"]
    assert not shown["active"] and "eagerly" in shown["reason"]
