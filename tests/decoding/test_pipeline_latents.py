"""Latents as pipelines hold them, decoded to the pictures that the pipelines make of them: their own code is the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from decode_service.decoding.families import FAMILIES
from decode_service.decoding.rank import RankDecoder
from decode_service.planning.conditioning import Conditioning, conditioning_of
from decode_service.planning.layouts import Layout
from decode_service.planning.planner import Policy, make_plan
from tests.decoding import models
from tests.decoding.family_checks import CPU, MODEL_RANGE, decoded, is_varied
from tests.decoding.harness import latents_of
from tests.decoding.pipelines import finish, method
from tests.decoding.test_cogvideox import model as cogvideox
from tests.decoding.test_flux2 import flux2
from tests.decoding.test_ltx_video import RESIDUAL, ltx, ltx2
from tests.decoding.test_qwen_image21 import model as qwen_image21
from tests.decoding.test_temporal_decoder import model as temporal_decoder

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """A pipeline, its latents, and what a request says of them.

    Attributes:
        variables: what the end of ``__call__`` reads besides the latents.
        picture: whether the pixels are (B,C,H,W), else (B,C,F,H,W).
    """

    vae: Callable[[], Any]
    module: str
    pipeline: str
    shape: tuple[int, ...]
    layout: Layout
    variables: dict[str, Any] = field(default_factory=dict)
    picture: bool = True


def sized(height: int, width: int, ratio: int, **more: Any) -> dict[str, Any]:
    return {"height": height, "width": width, "self_vae_scale_factor": ratio, **more}


def ltx_extents(frames: int, rows: int, columns: int) -> dict[str, Any]:
    patches = {"self_transformer_spatial_patch_size": 1, "self_transformer_temporal_patch_size": 1}
    extents = {"latent_num_frames": frames, "latent_height": rows, "latent_width": columns, "batch_size": 1}
    noise = {"decode_timestep": 0.0, "decode_noise_scale": None, "generator": None, "device": torch.device("cpu")}
    return {**extents, **patches, **noise, "prompt_embeds": torch.zeros(())}


FLUX2_IDS = method("flux2.pipeline_flux2", "Flux2Pipeline", "_prepare_latent_ids")(torch.empty(2, 16, 3, 5))

CASES = {
    "FLUX.1": Case(
        lambda: models.tiny("autoencoder_kl"),
        "flux.pipeline_flux",
        "FluxPipeline",
        (2, 15, 16),
        Layout("packed", height=24, width=40),
        sized(24, 40, 4),
    ),
    "Chroma": Case(
        lambda: models.tiny("autoencoder_kl"),
        "chroma.pipeline_chroma",
        "ChromaPipeline",
        (1, 15, 16),
        Layout("auto", height=40, width=24),
        sized(40, 24, 4),
    ),
    "Qwen-Image": Case(
        lambda: models.tiny("qwen_image"),
        "qwenimage.pipeline_qwenimage",
        "QwenImagePipeline",
        (2, 6, 16),
        Layout("packed", height=32, width=48),
        sized(32, 48, 8),
    ),
    "Qwen-Image-Edit": Case(
        lambda: models.tiny("qwen_image"),
        "qwenimage.pipeline_qwenimage_edit",
        "QwenImageEditPipeline",
        (1, 6, 16),
        Layout("packed", height=48, width=32),
        sized(48, 32, 8),
    ),
    "Qwen-Image-Layered": Case(
        lambda: models.tiny("qwen_image"),
        "qwenimage.pipeline_qwenimage_layered",
        "QwenImageLayeredPipeline",
        (2, 3 * 2, 16),
        Layout("packed", height=16, width=32, layers=2),
        sized(16, 32, 8, layers=2),
    ),
    "Qwen-Image 2.1": Case(
        lambda: qwen_image21("residual"),
        "qwenimage21.pipeline_qwenimage21",
        "QwenImage21Pipeline",
        (1, 4 * 6, 4),
        Layout("packed", height=16, width=24),
        sized(16, 24, 4),
    ),
    "Bria FIBO": Case(
        lambda: models.tiny("wan22"),
        "bria_fibo.pipeline_bria_fibo",
        "BriaFiboPipeline",
        (1, 6, 4),
        Layout("packed", height=32, width=48, frames=1),
        sized(32, 48, 16, do_patching=False),
        picture=False,
    ),
    "Bria FIBO, patched": Case(
        lambda: models.tiny("wan22"),
        "bria_fibo.pipeline_bria_fibo",
        "BriaFiboPipeline",
        (1, 6, 16),
        Layout("packed", height=64, width=96, frames=1),
        sized(64, 96, 16, do_patching=True),
        picture=False,
    ),
    "FLUX.2": Case(
        flux2,
        "flux2.pipeline_flux2",
        "Flux2Pipeline",
        (2, 15, 16),
        Layout("packed", height=24, width=40),
        {"latent_ids": FLUX2_IDS},
    ),
    "LTX-Video": Case(
        lambda: ltx(scaling_factor=0.5),
        "ltx.pipeline_ltx",
        "LTXPipeline",
        (1, 2 * 3 * 4, 4),
        Layout("packed", height=24, width=32, frames=5),
        ltx_extents(2, 3, 4),
        picture=False,
    ),
    "LTX-2": Case(
        lambda: ltx2(scaling_factor=0.5),
        "ltx2.pipeline_ltx2",
        "LTX2Pipeline",
        (1, 3 * 3 * 4, 4),
        Layout("packed", height=24, width=32, frames=9),
        ltx_extents(3, 3, 4),
        picture=False,
    ),
    "CogVideoX": Case(
        cogvideox,
        "cogvideo.pipeline_cogvideox",
        "CogVideoXPipeline",
        (2, 3, 4, 5, 6),
        Layout("BTCHW"),
        {"additional_frames": 0, "self_vae_scaling_factor_image": cogvideox().config.scaling_factor},
        picture=False,
    ),
    "Stable Video Diffusion": Case(
        temporal_decoder,
        "stable_video_diffusion.pipeline_stable_video_diffusion",
        "StableVideoDiffusionPipeline",
        (2, 3, 4, 5, 6),
        Layout("BTCHW"),
        # The pipeline's default: all frames of a video in one chunk.
        {"needs_upcasting": False, "num_frames": 3, "decode_chunk_size": 3},
        picture=False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_pixels_are_those_of_the_pipeline(name: str) -> None:
    case = CASES[name]
    vae, latents = case.vae(), latents_of(case.shape)
    expected = finish(case.module, case.pipeline, vae, latents, **case.variables)
    assert is_varied(expected)
    if not case.picture and expected.dim() == 4:
        expected = expected.unsqueeze(2)
    for mode, ranks in (("direct", 1), ("spatial_shard_width", 2)):
        _, pixels = decoded(vae, latents, mode, ranks=ranks, layout=case.layout, denormalize=True)
        assert pixels.shape == expected.shape
        torch.testing.assert_close(pixels, expected, atol=TOLERANCE, rtol=0)


def test_flux2_latents_in_rows_and_columns_are_those_of_the_sequence() -> None:
    """Bria FIBO 2 and ERNIE-Image keep them that way; batch norm comes before the patches are taken apart."""
    case, vae = CASES["FLUX.2"], flux2()
    grid = latents_of((2, 16, 3, 5))
    expected = finish(case.module, case.pipeline, vae, grid.flatten(2).transpose(1, 2), **case.variables)
    for layout in (Layout(), Layout("patchified"), Layout("patchified", height=24, width=40)):
        _, pixels = decoded(vae, grid, "direct", layout=layout, denormalize=True)
        torch.testing.assert_close(pixels, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", [(4, 2, 5, 6), (2, 4, 5, 6)])
def test_a_video_without_a_batch_is_a_batch_of_one(shape: tuple[int, ...]) -> None:
    vae, latents = temporal_decoder(), latents_of(shape)
    batched = (latents if shape[0] == 4 else latents.transpose(0, 1)).unsqueeze(0).contiguous()
    _, expected = decoded(vae, batched, "direct")
    _, pixels = decoded(vae, latents, "direct", layout=Layout("auto" if shape[0] == 4 else "TCHW"))
    assert torch.equal(pixels, expected)


def test_a_smaller_chunk_of_svd_frames_is_another_video() -> None:
    """Why ``decode_chunk_size`` is no setting: frames of one chunk see each other, and those of another do not."""
    case = CASES["Stable Video Diffusion"]
    vae, latents = temporal_decoder(), latents_of((1, 4, 4, 5, 6))
    whole, halves = (
        finish(case.module, case.pipeline, vae, latents, needs_upcasting=False, num_frames=4, decode_chunk_size=size)
        for size in (4, 2)
    )
    assert (whole - halves).abs().max() > 1e-3
    _, video = decoded(vae, latents, "direct", layout=Layout("BTCHW"), denormalize=True)
    torch.testing.assert_close(video, whole, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("scale", [None, 0.0, 0.25])
@pytest.mark.parametrize("name", ["LTX-Video", "LTX-2"])
def test_timestep_and_noise_are_those_of_the_pipeline_on_any_number_of_ranks(name: str, scale: float | None) -> None:
    """LTX mixes noise into denormalized latents, LTX-2 into normalized ones; both by the timestep where nothing is said."""
    case = CASES[name]
    build = ltx if name == "LTX-Video" else ltx2
    vae = build(scaling_factor=0.5, timestep_conditioning=True, **RESIDUAL)
    latents = latents_of((2, 2 * 3 * 5, 4))
    variables = {
        **ltx_extents(2, 3, 5),
        "batch_size": 2,
        "decode_timestep": 0.05,
        "decode_noise_scale": scale,
        "generator": torch.Generator().manual_seed(11),
    }
    expected = finish(case.module, case.pipeline, vae, latents, **variables)
    layout = Layout("packed", height=24, width=40, frames=5)
    conditioning = conditioning_of(FAMILIES[type(vae).__name__](vae, "tiny").spec, 0.05, scale, 11)
    for mode, ranks in (
        ("direct", 1),
        ("batch", 2),
        ("spatial_shard_height", 3),
        ("spatial_shard_width", 2),
        ("tile", 1),
    ):
        _, pixels = decoded(vae, latents, mode, ranks=ranks, layout=layout, conditioning=conditioning, denormalize=True)
        torch.testing.assert_close(pixels, expected, atol=TOLERANCE, rtol=0)
    _, plain = decoded(vae, latents, "direct", layout=layout, denormalize=True)
    assert (plain - expected).abs().max() > 1e-3, "a timestep without effect would prove nothing"


@pytest.mark.parametrize("build", [ltx, ltx2])
def test_noise_in_denormalized_latents_is_the_same_noise(build: Callable[..., Any]) -> None:
    """LTX-2's own ``output_type="latent"`` gives such latents, and mixes its noise in before."""
    vae = build(scaling_factor=0.5, timestep_conditioning=True, **RESIDUAL)
    family = FAMILIES[type(vae).__name__](vae, "tiny")
    latents, conditioning = latents_of((1, 4, 2, 3, 5)), Conditioning(0.05, 0.3, 2)
    raw = family.denormalize(latents)
    _, expected = decoded(vae, latents, "direct", conditioning=conditioning, denormalize=True)
    _, pixels = decoded(vae, raw, "direct", conditioning=conditioning)
    torch.testing.assert_close(pixels, expected, atol=TOLERANCE, rtol=0)


def test_another_seed_is_other_noise_and_the_same_seed_the_same_bytes() -> None:
    vae, latents = ltx(timestep_conditioning=True, **RESIDUAL), latents_of((1, 4, 2, 3, 5))
    first, again, other = (
        decoded(vae, latents, "direct", conditioning=Conditioning(0.05, 0.3, seed))[1]
        for seed in (2**64 - 1, 2**64 - 1, 0)
    )
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_is_mixed_in_half_precision_as_the_pipeline_rounds_it(dtype: torch.dtype) -> None:
    family = FAMILIES["AutoencoderKLLTXVideo"](ltx().to(dtype), "tiny")
    latents, noise = latents_of((1, 4, 2, 3, 5)).to(dtype), latents_of((1, 4, 2, 3, 5), seed=3).to(dtype)
    scale = torch.tensor([0.3], dtype=dtype)[:, None, None, None, None]
    expected = (1 - scale) * latents + scale * noise
    assert torch.equal(family.noised(latents, noise, 0.3, denormalize=False), expected)


def test_a_retry_in_float32_has_the_noise_of_the_first_try() -> None:
    """Half precision draws other numbers from the same seed, and the retry is for the same request."""
    vae = ltx(timestep_conditioning=True, **RESIDUAL).bfloat16()
    family = FAMILIES["AutoencoderKLLTXVideo"](vae, "tiny")
    latents = latents_of((1, 4, 2, 3, 5))
    plan = make_plan(family.spec, tuple(latents.shape), group_size=1, policy=Policy())
    part = RankDecoder(family, device=CPU).decode(
        plan,
        latents.numpy(),
        "float32",
        denormalize=False,
        pixels=MODEL_RANGE,
        conditioning=Conditioning(0.05, 0.3, 2),
        precision="float32",
    )
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(2), dtype=torch.bfloat16).float()
    with torch.inference_mode():
        expected = vae.float().decode((1 - 0.3) * latents + 0.3 * noise, torch.tensor([0.05])).sample
    assert part.array is not None
    torch.testing.assert_close(torch.from_numpy(part.array), expected, atol=TOLERANCE, rtol=0)
