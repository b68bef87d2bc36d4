"""A tiny model of every family, for what is checked of all of them, and what is published of some."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import diffusers
import torch

from decode_service.decoding.families import FAMILIES, Family
from tests.decoding import models, tiny_models

#: Every class, and variants that need more or other operands.
TINY: dict[str, Callable[[], Any]] = {
    **tiny_models.TINY,
    "AutoencoderKLWan, 2.1": models.wan21,
    "AutoencoderKLMagvit, statistics of a pass": lambda: tiny_models.magvit(False),
}


@functools.cache
def family(name: str) -> Family:
    """The family of ``TINY[name]``, the same one for all who ask: nobody may change it."""
    torch.manual_seed(1)
    vae = TINY[name]().eval().requires_grad_(False)
    return FAMILIES[type(vae).__name__](vae, name)


def published(name: str) -> Any:
    """A published configuration, without weights: the defaults of its class in diffusers, where those are it."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    widths = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}
    builders: dict[str, Callable[[], Any]] = {
        "AutoencoderKL": lambda: diffusers.AutoencoderKL(**blocks, **widths, latent_channels=16),
        "AutoencoderKLWan, 2.1": diffusers.AutoencoderKLWan,
        "AutoencoderKLAllegro": diffusers.AutoencoderKLAllegro,
        "AutoencoderKLCogVideoX": lambda: diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(128, 256, 256, 512), layers_per_block=3, latent_channels=16
        ),
    }
    with torch.device("meta"):
        return builders[name]().eval().requires_grad_(False)
