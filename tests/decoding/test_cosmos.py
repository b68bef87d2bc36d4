"""``AutoencoderKLCosmos`` against diffusers."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from decode_service.decoding.attention import attention_over_time
from decode_service.decoding.families.cosmos import CosmosFamily, unpatch
from decode_service.planning.spec import StrideTiles
from tests.decoding.family_checks import (
    check_causal_ratios,
    check_compiles_whole,
    check_exact_modes,
    check_half_precision,
    check_interleaved,
    check_tiles,
    decoded,
    largest_operand,
    reference,
)
from tests.decoding.harness import latents_of
from tests.decoding.tiled_reference import tiled
from tests.decoding.tiny_models import cosmos as model


# A picture, one later frame alone, and enough frames for attention over time to look back across passes.
@pytest.mark.parametrize("frames", [1, 2, 4])
def test_exact_modes_give_the_video_of_diffusers(frames: int) -> None:
    vae, latents = model(), latents_of((1, 4, frames, 5, 7))
    expected = reference(vae, latents)
    check_exact_modes(vae, latents, expected)
    rule = CosmosFamily(vae, "tiny").frame_rule
    assert rule.frames(frames) == expected.shape[2] == 1 + 8 * (frames - 1)


@pytest.mark.parametrize("chunk", [1, 2, 3, 9])
def test_any_chunk_gives_the_same_video(chunk: int) -> None:
    vae, latents = model(), latents_of((1, 4, 5, 3, 4))
    _, video = decoded(vae, latents, "direct", chunk=chunk)
    torch.testing.assert_close(video, reference(vae, latents), atol=1e-5, rtol=0)


def test_what_looks_back_matters_to_the_reference() -> None:
    """Or the checks above would not notice a pass that begins anew, nor an attention that looks ahead."""
    vae, latents = model(), latents_of((1, 4, 5, 3, 4))
    changed = latents.clone()
    changed[:, :, 0] += 1
    first, second = reference(vae, latents), reference(vae, changed)
    assert (first - second)[:, :, -8:].abs().max() > 1e-3, "the last latent frame sees the first"
    changed = latents.clone()
    changed[:, :, 4] += 1
    assert torch.equal(reference(vae, changed)[:, :, :25], first[:, :, :25]), "and none sees a later one"


@pytest.mark.parametrize(
    ("config", "ratios"),
    [
        ({"temporal_compression_ratio": 4}, (8, 4)),
        ({"spatial_compression_ratio": 16}, (16, 8)),
        ({"patch_size": 2, "spatial_compression_ratio": 8, "temporal_compression_ratio": 4}, (8, 4)),
        ({"patch_type": "rearrange"}, (8, 8)),
    ],
)
def test_ratios_are_those_of_the_structure(config: dict[str, Any], ratios: tuple[int, int]) -> None:
    vae, latents = model(**config), latents_of((1, 4, 3, 4, 5))
    check_causal_ratios(vae, latents, reference(vae, latents), *ratios)


@pytest.mark.parametrize("patch", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["haar", "rearrange"])
def test_patches_are_taken_apart_as_diffusers_does(kind: str, patch: int) -> None:
    theirs = diffusers.models.autoencoders.autoencoder_kl_cosmos.CosmosUnpatcher3d(patch, kind)
    x = latents_of((2, 3 * patch**3, 2, 3, 5)) * patch**-1.5
    ours = unpatch(x, patch, haar=kind == "haar")[:, :, patch - 1 :]
    torch.testing.assert_close(ours, theirs(x), atol=1e-5, rtol=0)


def test_tiles_are_those_that_diffusers_describes_and_does_not_make() -> None:
    """``enable_tiling`` of the reference sets sizes that its ``decode`` never reads."""
    vae, latents = model(), latents_of((1, 4, 2, 7, 9))
    whole = reference(vae, latents)
    vae.enable_tiling(32, 32, tile_sample_stride_height=24, tile_sample_stride_width=24)
    assert torch.equal(reference(vae, latents), whole), "diffusers tiles it now: compare with that"

    def decode(tile: torch.Tensor) -> torch.Tensor:
        return reference(vae, tile.unflatten(1, (4, 2))).flatten(1, 2)

    expected = tiled(decode, latents.flatten(1, 2), tile_px=32, overlap=0.25, ratio=8).unflatten(1, (3, 9))
    assert expected.shape == whole.shape and not torch.equal(expected, whole)
    check_tiles(vae, latents, expected, tiles=StrideTiles(32, 24), ranks=(1, 3))


@pytest.mark.parametrize("statistics", [None, 1, 16])
def test_normalized_latents_are_decoded_as_the_cosmos_pipelines_do(statistics: int | None) -> None:
    config: dict[str, Any] = {}
    if statistics:
        config["latents_mean"] = latents_of((4 * statistics,), 1).tolist()
        config["latents_std"] = latents_of((4 * statistics,), 2).abs().add(0.5).tolist()
    vae, latents = model(**config), latents_of((1, 4, 3, 4, 5))
    scale = diffusers.EDMEulerScheduler().config.sigma_data
    # The arithmetic of CosmosTextToWorldPipeline.
    if statistics:
        mean, std = (
            torch.tensor(vae.config[name]).view(1, 4, -1, 1, 1)[:, :, : latents.size(2)].to(latents)
            for name in ("latents_mean", "latents_std")
        )
        raw = latents * std / scale + mean
    else:
        raw = latents / scale
    _, video = decoded(vae, latents, "direct", denormalize=True)
    torch.testing.assert_close(video, reference(vae, raw), atol=1e-5, rtol=0)
    assert CosmosFamily(vae, "tiny").spec.normalized_frames == (statistics if statistics == 16 else 0)


def test_interleaved_decodes_do_not_touch_each_other() -> None:
    check_interleaved(model(), [latents_of((1, 4, 4, 3, 4), seed) for seed in (1, 2)])


def test_half_precision_is_no_further_off_than_diffusers() -> None:
    check_half_precision(model(), latents_of((1, 4, 3, 5, 7)))


def test_the_decoder_compiles_whole() -> None:
    vae, latents = model(attention_resolutions=(), num_layers=0), latents_of((1, 4, 2, 3, 4))
    check_compiles_whole(vae, latents, reference(vae, latents))


def test_attention_over_time_does_not_care_how_positions_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = latents_of((7, 2, 2, 8), 1), latents_of((7, 2, 5, 8), 2), latents_of((7, 2, 5, 8), 3)
    whole = attention_over_time(query, key, value)
    monkeypatch.setattr("decode_service.decoding.attention.MAX_POSITIONS", 3)
    torch.testing.assert_close(attention_over_time(query, key, value), whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("frames", "chunk"), [(1, 1), (3, 1), (3, 2)])
def test_no_operand_is_larger_than_planned(frames: int, chunk: int) -> None:
    vae, latents = model(decode_block_out_channels=(64, 96, 32, 32)), latents_of((1, 4, frames, 18, 16))
    family = CosmosFamily(vae, "tiny")
    spec, largest = family.spec, largest_operand(family, latents, chunk)
    planned = max(spec.operand_per_pixel_first, min(chunk, frames - 1) * spec.operand_per_pixel) * 144 * 128
    # A padded operand has two rows and columns more, which planning leaves out.
    assert 0.6 * planned <= largest <= planned * 1.1


def test_the_released_configuration() -> None:
    with torch.device("meta"):
        spec = CosmosFamily(diffusers.AutoencoderKLCosmos(latents_mean=None, latents_std=None), "cosmos").spec
    assert spec.output_extents((1, 16, 16, 88, 160)) == (121, 704, 1280)
    assert spec.tiles == StrideTiles(512, 448)
    # At a quarter of the height and the width: 256 channels of 3 frames; of 2 and 2 frames, or 512 of 2.
    assert (spec.operand_per_pixel_first, spec.operand_per_pixel) == (48, 64)
