"""``AutoencoderKLKVAEVideo`` against diffusers."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from decode_service.decoding.families.kvae_video import KVAEVideoFamily
from decode_service.errors import ConfigError
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from decode_service.planning.temporal import SegmentFrames
from tests.decoding.family_checks import check_exact_modes, check_interleaved, check_tiles, decoded, reference
from tests.decoding.harness import latents_of
from tests.decoding.tiled_reference import tiled
from tests.decoding.tiny_models import kvae_video as model


@pytest.mark.parametrize(("frames", "ranks"), [(1, (2, 3)), (2, (2, 3)), (6, (2, 3)), (11, (3,))])
def test_exact_modes_give_the_video_of_diffusers(frames: int, ranks: tuple[int, ...]) -> None:
    """One frame, a part of the first segment, a second one of one frame, and a third one of two."""
    vae, latents = model(), latents_of((1, 4, frames, 4, 5))
    check_exact_modes(vae, latents, reference(vae, latents), ranks=ranks)


@pytest.mark.parametrize(
    "config",
    [
        {"temporal_compress_times": 2, "ch_mult": (1, 1, 1)},
        {"temporal_compress_times": 8, "ch_mult": (1, 1, 1)},
        {"temporal_compress_times": 1, "ch_mult": (1, 2)},
    ],
)
def test_exact_modes_do_so_at_other_compressions(config: dict[str, Any]) -> None:
    vae = model(**config)
    frames = KVAEVideoFamily(vae, "tiny").frame_rule.first + 2
    latents = latents_of((1, 4, frames, 2, 3))
    check_exact_modes(vae, latents, reference(vae, latents), ranks=(2,))


@pytest.mark.parametrize(("compression", "levels"), [(1, 1), (2, 1), (4, 1), (8, 3)])
def test_frames_are_those_of_diffusers_at_any_compression(compression: int, levels: int) -> None:
    vae = model(temporal_compress_times=compression, ch_mult=(1,) * (levels + 1), num_res_blocks=0)
    rule = KVAEVideoFamily(vae, "tiny").frame_rule
    for frames in sorted({1, 2, rule.first, rule.first + 1, rule.first + 2, rule.first + rule.later + 1}):
        chunks = rule.chunks(frames)
        assert [t for start, stop in chunks for t in range(start, stop)] == list(range(frames))
        # A channel's statistics need two values, and more cells would only cost time.
        assert rule.frames(frames) == reference(vae, torch.zeros(1, 4, frames, 1, 2)).shape[2], frames


def test_a_last_segment_of_one_latent_frame_gives_one_frame_as_in_diffusers() -> None:
    """21 frames encode to 6 latent frames, of which diffusers decodes 18: the plan says so before anybody decodes."""
    vae = model()
    with torch.inference_mode():
        latents = vae.encode(torch.zeros(1, 3, 21, 8, 8)).latent_dist.mode()
    assert latents.shape[2] == 6 and reference(vae, latents).shape[2] == 18
    plan, video = decoded(vae, latents, "direct")
    assert plan.output_frames == video.shape[2] == 18
    assert "3 fewer where T is 6 + 4 * n" in KVAEVideoFamily(vae, "tiny").frame_rule.describe()


def test_the_chunk_length_is_the_models_own() -> None:
    vae, latents = model(), latents_of((1, 4, 7, 2, 3))
    plan, video = decoded(vae, latents, "direct", chunk=3)
    assert plan.chunk == 1
    torch.testing.assert_close(video, reference(vae, latents), atol=1e-5, rtol=0)


def test_tiles_are_undivided_decodes_of_their_part() -> None:
    """``enable_tiling`` of diffusers changes nothing for this class, so its AutoencoderKL's loop is compared with."""
    vae, latents = model(), latents_of((1, 4, 3, 9, 6))
    undivided = reference(vae, latents)
    vae.enable_tiling()
    assert torch.equal(reference(vae, latents), undivided), "diffusers tiles it now: compare with that"
    vae.disable_tiling()
    assert undivided.shape == (1, 3, 9, 36, 24)
    flat = tiled(lambda part: reference(vae, part), latents, tile_px=32, overlap=0.25, ratio=4)
    check_tiles(vae, latents, flat.flatten(1, 2).unflatten(1, (3, 9)), tiles=StrideTiles(32, 24), ranks=(1, 2))
    assert not make_plan(
        KVAEVideoFamily(vae, "tiny").spec, (1, 4, 2, 9, 99), group_size=1, policy=Policy(), mode="tile"
    ).exact


def test_latents_are_decoded_as_the_encoder_gives_them() -> None:
    """The config has no factor and no statistics; what a pipeline would apply is nothing."""
    vae, latents = model(), latents_of((2, 4, 2, 3, 5))
    assert not {"scaling_factor", "shift_factor", "latents_mean", "latents_std"} & set(vae.config)
    expected = torch.cat([reference(vae, item) for item in latents.split(1)])
    for mode, ranks in (("direct", 1), ("batch", 2)):
        _, video = decoded(vae, latents, mode, ranks=ranks, denormalize=True)
        torch.testing.assert_close(video, expected, atol=1e-5, rtol=0)


def test_interleaved_decodes_do_not_touch_each_other() -> None:
    check_interleaved(model(), [latents_of((1, 4, 7, 2, 3), seed) for seed in (1, 2)])


@pytest.mark.parametrize(("frames", "kept"), [(5, 0), (9, 1)])
def test_what_no_pass_will_read_is_not_kept(frames: int, kept: int) -> None:
    """The cached frames of all convolutions of a picture of one frame would be gigabytes."""
    vae, caches = model(), []
    family = KVAEVideoFamily(vae, "tiny")

    def spy(x: torch.Tensor, cache: Any) -> torch.Tensor:
        caches.append(cache)
        return vae.decoder(x, cache)

    family.call_decoder = spy
    with torch.inference_mode():
        list(family.decode(latents_of((1, 4, frames, 2, 2)), 1))
    held = [cache["conv_in"]["padding"] for cache in caches]
    assert sum(padding is not None for padding in held[:-1]) == kept
    before = held[-2] if kept else None
    assert held[-1] is before, "the last pass read it and left it as it was"


@pytest.mark.parametrize("compression", [3, 16, 32])
def test_a_compression_that_leaves_no_segments_is_refused(compression: int) -> None:
    vae = model(temporal_compress_times=compression)
    with pytest.raises((RuntimeError, ValueError)):
        reference(vae, torch.zeros(1, 4, 19, 2, 2))
    with pytest.raises(ConfigError, match="must be 1, 2, 4 or 8"):
        KVAEVideoFamily(vae, "tiny")


def test_the_released_configuration_and_its_limits() -> None:
    with torch.device("meta"):
        spec = KVAEVideoFamily(diffusers.AutoencoderKLKVAEVideo(), "kvae").spec
    assert (spec.latent_channels, spec.output_channels, spec.spatial_ratio) == (16, 3, 8)
    assert spec.frame_rule == SegmentFrames(first=5, later=4, ratio=4)
    assert (spec.operand_per_pixel_first, spec.operand_per_pixel, spec.pass_frames) == (768, 896, 5)
    # 17 frames of 256 channels: 480 x 832 is 1.7e9 elements, 720 x 1280 is 4.0e9 and fits a rank only by tiles or bands.
    assert make_plan(spec, (1, 16, 31, 60, 104), group_size=1, policy=Policy()).mode == "direct"
    alone = make_plan(spec, (1, 16, 31, 90, 160), group_size=1, policy=Policy())
    assert alone.mode == "tile" and "elements" in alone.reason
    assert make_plan(spec, (1, 16, 31, 90, 160), group_size=2, policy=Policy()).mode == "spatial_shard_width"
