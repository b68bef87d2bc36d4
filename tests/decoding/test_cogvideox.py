"""``AutoencoderKLCogVideoX`` against diffusers."""

from __future__ import annotations

import diffusers
import pytest
import torch

from decode_service.decoding.families.cogvideox import CogVideoXFamily
from decode_service.planning.spec import StrideTiles
from decode_service.planning.temporal import RemainderFirstFrames
from tests.decoding.family_checks import check_exact_modes, check_interleaved, check_tiles, decoded, reference
from tests.decoding.harness import latents_of
from tests.decoding.tiny_models import cogvideox as model

BLOCKS = 3


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5])
def test_exact_modes_give_the_video_of_diffusers(frames: int) -> None:
    vae, latents = model(), latents_of((1, 4, frames, 7, 9))
    expected = reference(vae, latents)
    check_exact_modes(vae, latents, expected)
    rule = CogVideoXFamily(vae, "tiny").spec.frame_rule
    assert rule is not None and rule.frames(frames) == expected.shape[2]


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("batch", [2, 3, 4])
def test_frames_are_those_of_diffusers_at_any_grouping(ratio: int, batch: int) -> None:
    vae = model(temporal_compression_ratio=ratio)
    vae.num_latent_frames_batch_size = batch
    rule = CogVideoXFamily(vae, "tiny").spec.frame_rule
    assert isinstance(rule, RemainderFirstFrames) and rule.ratio == ratio
    for frames in range(1, 9):
        with torch.inference_mode():
            assert rule.frames(frames) == vae.decode(torch.zeros(1, 4, frames, 2, 2)).sample.shape[2], frames
        chunks = rule.chunks(frames)
        assert [t for start, stop in chunks for t in range(start, stop)] == list(range(frames))


@pytest.mark.parametrize("frames", [1, 3, 4])
def test_tiles_give_the_tiled_video_of_diffusers(frames: int) -> None:
    """At the sizes that a config gives, tiles in diffusers fit together: 12 x 10 latent cells every 10 x 8 here."""
    vae, latents = model(), latents_of((1, 4, frames, 15, 19))
    vae.enable_tiling()
    expected = reference(vae, latents)
    vae.disable_tiling()
    assert expected.shape[-2:] == (60, 76)
    check_tiles(vae, latents, expected)


@pytest.mark.parametrize("shape", [(12, 10), (13, 10), (12, 11), (11, 9), (10, 8), (24, 18), (25, 17)])
def test_a_video_is_tiled_where_diffusers_tiles_it(shape: tuple[int, int]) -> None:
    vae, latents = model(), latents_of((1, 4, 1, *shape))
    vae.enable_tiling()
    expected = reference(vae, latents)
    vae.disable_tiling()
    plan, video = decoded(vae, latents, "tile")
    assert plan.tiles is not None and (plan.tiles.count == 1) == (shape[0] <= 12 and shape[1] <= 10)
    torch.testing.assert_close(video, expected, atol=1e-5, rtol=0)


def test_tiles_whose_sizes_diffusers_rounds_apart_do_not_grow() -> None:
    """16 cells, a sixth shared: diffusers steps by 13 cells and keeps 54 pixels, not 52; the video gets larger."""
    vae, latents = model(sample_height=128, sample_width=128), latents_of((1, 4, 1, 20, 21))
    vae.enable_tiling()
    with torch.inference_mode():
        grown = vae.decode(latents).sample
    vae.disable_tiling()
    assert grown.shape[-2:] != (80, 84), "diffusers has it right now: compare with it"
    _, video = decoded(vae, latents, "tile", ranks=2)
    assert video.shape[-2:] == (80, 84)
    with torch.inference_mode():
        tile = vae.decode(latents[..., :16, :16]).sample
    torch.testing.assert_close(video[..., :52, :48], tile[..., :52, :48], atol=1e-5, rtol=0)


def test_tiles_of_a_config_fit_the_model() -> None:
    vae, latents = model(), latents_of((1, 4, 3, 11, 13))
    _, video = decoded(vae, latents, "tile", tiles=StrideTiles(32, 24))
    assert video.shape == (1, 3, 9, 44, 52)


def test_normalized_latents_are_decoded_as_the_cogvideox_pipeline_does() -> None:
    vae, latents = model(), latents_of((2, 4, 2, 7, 9))
    with torch.inference_mode():
        raw = 1 / vae.config.scaling_factor * latents
        # One by one, as with enable_slicing: a batch of two sums in another order.
        expected = torch.cat([vae.decode(item).sample for item in raw.split(1)])
    _, video = decoded(vae, latents, "direct", denormalize=True)
    torch.testing.assert_close(video, expected, atol=1e-5, rtol=0)


def test_interleaved_decodes_do_not_touch_each_other() -> None:
    check_interleaved(model(), [latents_of((1, 4, 5, 4, 5), seed) for seed in (1, 2)])


def test_the_released_configuration_is_tiled_as_diffusers_does() -> None:
    with torch.device("meta"):
        spec = CogVideoXFamily(diffusers.AutoencoderKLCogVideoX(), "cogvideox").spec
    assert spec.output_extents((1, 16, 13, 60, 90)) == (49, 480, 720)
    grid = spec.tiles.grid(60, 90, 8, 8)
    assert [row.start for row in grid.rows] == [0, 25, 50] and grid.rows[0].keep == 200
    assert [column.start for column in grid.columns] == [0, 36, 72] and grid.columns[0].keep == 288
    assert (spec.operand_per_pixel_first, spec.operand_per_pixel, spec.pass_frames) == (6 * 256, 4 * 256, 3)
