"""Families as the service loads them: from a folder, without their encoders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_service.decoding.families import FAMILIES
from decode_service.decoding.loading import ModelSource
from decode_service.decoding.rank import RankDecoder
from decode_service.planning.plan import PixelFormat
from decode_service.planning.planner import Policy, make_plan
from tests.decoding import tiny_models
from tests.decoding.harness import latents_of

# A model, and how many latent frames of it are decoded.
MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "qwen-image-2.1": (tiny_models.qwen_image21, 1),
    "cogvideox": (tiny_models.cogvideox, 5),
    "cosmos": (tiny_models.cosmos, 3),
    "vidtok": (tiny_models.vidtok, 3),
    "kvae": (tiny_models.kvae, 1),
    "kvae-video": (tiny_models.kvae_video, 6),
    "mochi": (tiny_models.mochi, 3),
    "svd": (tiny_models.temporal_decoder, 3),
    "easyanimate": (tiny_models.magvit, 3),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_from_a_folder_decodes_as_the_one_that_was_saved(name: str, tmp_path: Path) -> None:
    build, frames = MODELS[name]
    vae, latents = build(), latents_of((1, 4, frames, 7, 9))
    vae.save_pretrained(tmp_path)
    decoder = RankDecoder.load(ModelSource("tiny", str(tmp_path)), device="cpu")
    assert decoder.spec.family == name and decoder.describe()["frame_rule"]
    sent = latents if decoder.spec.frame_rule else latents.squeeze(2)
    plan = make_plan(decoder.spec, tuple(sent.shape), group_size=1, policy=Policy())
    part = decoder.decode(plan, sent.numpy(), "float32", denormalize=False, pixels=PixelFormat("float32", "model"))
    assert part.array is not None
    with torch.inference_mode():
        family = FAMILIES[type(vae).__name__](vae, "tiny")
        expected = family.to_model_range(torch.cat(list(family.decode(latents, plan.chunk)), 2))
    expected = expected if sent is latents else expected.squeeze(2)
    torch.testing.assert_close(torch.from_numpy(part.array), expected, atol=1e-5, rtol=0)


def test_blocks_of_a_model_from_a_folder_are_those_of_its_config(tmp_path: Path) -> None:
    tiny_models.allegro().save_pretrained(tmp_path)
    decoder = RankDecoder.load(ModelSource("tiny", str(tmp_path)), device="cpu")
    plan = make_plan(decoder.spec, (1, 4, 2, 7, 9), group_size=1, policy=Policy())
    latents = latents_of(plan.latent_shape)
    part = decoder.decode(plan, latents.numpy(), "float32", denormalize=False, pixels=PixelFormat())
    assert part.array is not None and part.array.shape == (1, 8, 28, 36, 3)
