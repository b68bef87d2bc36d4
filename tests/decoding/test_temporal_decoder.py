"""``AutoencoderKLTemporalDecoder`` (Stable Video Diffusion) against diffusers."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from decode_service.decoding.families.temporal_decoder import TemporalDecoderFamily
from decode_service.decoding.tiling import stitch
from decode_service.errors import InvalidLatentsError
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from tests.decoding.family_checks import check_exact_modes, check_tiles, decoded
from tests.decoding.harness import latents_of
from tests.decoding.tiny_models import temporal_decoder as model


def reference(vae: Any, latents_BCTHW: torch.Tensor) -> torch.Tensor:
    """As the StableVideoDiffusion pipeline lays latents out, with all frames in one chunk."""
    batch, _, frames = latents_BCTHW.shape[:3]
    with torch.inference_mode():
        videos = [
            vae.decode(video.transpose(0, 1), num_frames=frames).sample.transpose(0, 1) for video in latents_BCTHW
        ]
    assert len(videos) == batch
    return torch.stack(videos)


@pytest.mark.parametrize("frames", [1, 2, 3, 5])
def test_exact_modes_give_the_video_of_diffusers(frames: int) -> None:
    vae, latents = model(), latents_of((1, 4, frames, 7, 9))
    check_exact_modes(vae, latents, reference(vae, latents))


def test_normalized_videos_are_decoded_as_the_svd_pipeline_does() -> None:
    """One frame after the other within a video, one video after the other: (B,T,C,H,W) flattened, not (B,C,T,H,W)."""
    vae, latents = model(), latents_of((2, 4, 3, 7, 9))
    raw = 1 / vae.config.scaling_factor * latents
    with torch.inference_mode():
        flat = vae.decode(raw.permute(0, 2, 1, 3, 4).flatten(0, 1), num_frames=3).sample
    expected = flat.reshape(-1, 3, *flat.shape[1:]).permute(0, 2, 1, 3, 4)
    for mode, ranks in (("direct", 1), ("batch", 2)):
        _, video = decoded(vae, latents, mode, ranks=ranks, denormalize=True)
        torch.testing.assert_close(video, expected, atol=1e-5, rtol=1e-5)


def test_tiles_are_undivided_decodes_of_their_part_and_say_that_they_approximate() -> None:
    vae, latents, tiles = model(), latents_of((1, 4, 3, 11, 13)), StrideTiles(32, 24)
    with pytest.raises(NotImplementedError):
        vae.enable_tiling()
    plan, _ = decoded(vae, latents, "tile", tiles=tiles)
    assert plan.tiles is not None and not plan.exact
    parts = [
        reference(vae, latents[..., row.start : row.start + row.size, column.start : column.start + column.size])
        for row in plan.tiles.rows
        for column in plan.tiles.columns
    ]
    expected = stitch(parts, plan.tiles)
    assert expected.shape == (1, 3, 3, 44, 52)
    check_tiles(vae, latents, expected, tiles=tiles)
    check_tiles(vae, latents.repeat(2, 1, 1, 1, 1), expected.repeat(2, 1, 1, 1, 1), tiles=tiles, ranks=(1,))


def test_pictures_are_refused_because_diffusers_means_frames_by_them() -> None:
    with pytest.raises(InvalidLatentsError, match="5-D"):
        make_plan(TemporalDecoderFamily(model(), "tiny").spec, (14, 4, 7, 9), group_size=1, policy=Policy())


def test_a_video_of_25_frames_is_too_large_for_one_rank_and_sharded_by_two() -> None:
    widths = (128, 256, 512, 512)
    with torch.device("meta"):
        vae = diffusers.AutoencoderKLTemporalDecoder(
            block_out_channels=widths, down_block_types=("DownEncoderBlock2D",) * 4
        )
    spec = TemporalDecoderFamily(vae, "svd").spec
    # The pipeline's own default of 14 frames at once is the most that fits.
    assert make_plan(spec, (1, 4, 14, 72, 128), group_size=1, policy=Policy()).mode == "direct"
    alone = make_plan(spec, (1, 4, 25, 72, 128), group_size=1, policy=Policy())
    assert alone.mode == "tile" and "elements" in alone.reason
    assert make_plan(spec, (1, 4, 25, 72, 128), group_size=2, policy=Policy()).mode == "spatial_shard_width"
