"""``AutoencoderKL`` in its variants, against diffusers; the exactness of every mode is in ``test_exactness``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from decode_service.decoding.loading import ModelSource, load_family
from decode_service.errors import ConfigError
from tests.decoding import models
from tests.decoding.harness import latents_of

CPU = torch.device("cpu")

VARIANTS: dict[str, dict[str, Any]] = {
    "SD 1": {"use_quant_conv": True, "use_post_quant_conv": True, "scaling_factor": 0.18215, "shift_factor": None},
    "SD3": {"latent_channels": 16, "scaling_factor": 1.5305, "shift_factor": 0.0609},
    "FLUX.1": {"latent_channels": 16},
    "without attention": {"mid_block_add_attention": False},
    "with statistics": {
        "use_post_quant_conv": True,
        "scaling_factor": 0.5,
        "shift_factor": None,
        "latents_mean": (0.1, -0.2, 0.3, 0.4),
        "latents_std": (1.5, 0.5, 2.0, 1.0),
    },
    "four levels": {
        "block_out_channels": (8, 8, 16, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_decodes_and_denormalizes_as_its_pipeline_does(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    vae = models.autoencoder_kl(**VARIANTS[name]).eval().requires_grad_(False)
    vae.save_pretrained(tmp_path)
    family = load_family(ModelSource("tiny", str(tmp_path)), device=CPU)
    latents = latents_of((1, vae.config.latent_channels, 7, 9))
    config = vae.config
    if config.latents_mean is not None:
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (config.latents_mean, config.latents_std))
        raw = latents * std / config.scaling_factor + mean
    else:
        raw = latents / config.scaling_factor + (config.shift_factor or 0.0)
    with torch.inference_mode():
        ours = torch.cat(list(family.decode(family.denormalize(latents.unsqueeze(2)), 1)), 2).squeeze(2)
    torch.testing.assert_close(ours, vae.decode(raw).sample, atol=1e-5, rtol=0)
    ratio = 2 ** (len(config.block_out_channels) - 1)
    assert ours.shape == (1, 3, 7 * ratio, 9 * ratio)
    assert family.spec.output_extents(tuple(latents.shape)) == (1, 7 * ratio, 9 * ratio)


def test_float16_weights_that_would_overflow_are_loaded_in_float32(tmp_path: Path) -> None:
    """SDXL's ``force_upcast``: in float16 its activations overflow, and the picture is black."""
    models.autoencoder_kl(force_upcast=True).save_pretrained(tmp_path)
    family = load_family(ModelSource("tiny", str(tmp_path), dtype="float16"), device=CPU)
    assert family.dtype() == torch.float32
    models.autoencoder_kl(force_upcast=False).save_pretrained(tmp_path)
    assert load_family(ModelSource("tiny", str(tmp_path), dtype="float16"), device=CPU).dtype() == torch.float16


def test_a_model_without_a_scaling_factor_is_refused(tmp_path: Path) -> None:
    models.autoencoder_kl(scaling_factor=None).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="scaling_factor"):
        load_family(ModelSource("tiny", str(tmp_path)), device=CPU)


def test_eight_sdxl_pictures_at_once_stay_below_2_31_elements(tmp_path: Path) -> None:
    """8 x 256 x 1024 x 1024 is exactly 2^31: diffusers decodes 7 such pictures and fails at 8."""
    from decode_service.planning.planner import Policy, make_plan

    widths = (128, 256, 512, 512)
    with torch.device("meta"):
        vae = models.autoencoder_kl(
            block_out_channels=widths,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        )
    from decode_service.decoding.families.autoencoder_kl import AutoencoderKLFamily

    spec = AutoencoderKLFamily(vae, "sdxl").spec
    assert spec.operand_per_pixel_first == 256
    for batch in (7, 8, 9):
        assert make_plan(spec, (batch, 4, 128, 128), group_size=1, policy=Policy()).mode == "direct"
    huge = make_plan(spec, (1, 4, 512, 512), group_size=1, policy=Policy())
    assert huge.mode == "tile" and "elements" in huge.reason, "one 4096 x 4096 picture is 2^32"
