"""A tiny model of every family, for what is checked of all of them, and what is published of some."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import diffusers
import torch

from decode_service.decoding.families import FAMILIES, Family
from tests.decoding import (
    models,
    test_allegro,
    test_asymmetric_autoencoder_kl,
    test_autoencoder_dc,
    test_autoencoder_tiny,
    test_cogvideox,
    test_flux2,
    test_hunyuan_image,
    test_hunyuan_image_refiner,
    test_hunyuan_video,
    test_hunyuan_video15,
    test_ltx_video,
    test_magvit,
    test_mochi,
    test_qwen_image21,
    test_temporal_decoder,
)

#: By name; a family may have several. A family that is missing here fails ``test_every_family_is_in_the_catalogue``.
TINY: dict[str, Callable[[], Any]] = {
    "autoencoder-kl": models.autoencoder_kl,
    "wan-2.1": models.wan21,
    "wan-2.2": models.wan22,
    "qwen-image": models.qwen_image,
    "minimax-h3": models.minimax_h3,
    "allegro": test_allegro.model,
    "asymmetric-autoencoder-kl": test_asymmetric_autoencoder_kl.asymmetric,
    "autoencoder-dc": test_autoencoder_dc.dc,
    "autoencoder-tiny": test_autoencoder_tiny.tiny,
    "cogvideox": test_cogvideox.model,
    "flux-2": test_flux2.flux2,
    "hunyuan-image": test_hunyuan_image.hunyuan_image,
    "hunyuan-image-refiner": test_hunyuan_image_refiner.refiner,
    "hunyuan-video": test_hunyuan_video.tiny,
    "hunyuan-video-1.5": test_hunyuan_video15.tiny,
    "ltx-video": test_ltx_video.ltx,
    "ltx-2-video": test_ltx_video.ltx2,
    "easyanimate": test_magvit.model,
    "easyanimate, statistics of a pass": lambda: test_magvit.model(False),
    "mochi": test_mochi.model,
    "qwen-image-2.1": lambda: test_qwen_image21.model("residual"),
    "svd": test_temporal_decoder.model,
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
        "autoencoder-kl": lambda: diffusers.AutoencoderKL(**blocks, **widths, latent_channels=16),
        "wan-2.1": diffusers.AutoencoderKLWan,
        "allegro": diffusers.AutoencoderKLAllegro,
        "cogvideox": lambda: diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(128, 256, 256, 512), layers_per_block=3, latent_channels=16
        ),
    }
    with torch.device("meta"):
        return builders[name]().eval().requires_grad_(False)
