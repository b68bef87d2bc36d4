"""``AutoencoderKLAllegro`` against diffusers, which decodes by blocks only."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from decode_service.decoding.families.allegro import AllegroFamily, blend_weights
from decode_service.errors import ConfigError, UnsupportedModeError
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from decode_service.planning.tiles import overlap_axis
from tests.decoding.family_checks import check_tiles, decoded
from tests.decoding.harness import latents_of
from tests.decoding.tiny_models import allegro as model


def reference(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """diffusers returns (B,F,C,H,W) here."""
    vae.enable_tiling()
    with torch.inference_mode():
        return vae.decode(latents).sample.permute(0, 2, 1, 3, 4)


@pytest.mark.parametrize("shape", [(3, 8, 14), (5, 13, 8), (7, 13, 20)])
def test_blocks_give_the_video_of_diffusers_where_that_covers_it(shape: tuple[int, ...]) -> None:
    vae, latents = model(), latents_of((1, 4, *shape))
    expected = reference(vae, latents)
    assert expected.shape[2:] == (shape[0] * 4, shape[1] * 4, shape[2] * 4)
    check_tiles(vae, latents, expected)
    plan, _ = decoded(vae, latents, "auto", ranks=2)
    assert plan.mode == "tile" and plan.exact


def test_what_does_not_fill_a_block_is_decoded_too() -> None:
    vae, latents = model(), latents_of((1, 4, 4, 11, 12))
    covered = reference(vae, latents)
    assert covered[..., 32:, :].abs().max() == 0, "diffusers covers the video now: compare with it"
    plan, video = decoded(vae, latents, "tile", ranks=3)
    assert plan.tiles is not None and len(plan.owners) == 8
    assert video.shape == (1, 3, 16, 44, 48)
    # Corners belong to one block each: the first of three axes alone, the last of three axes alone.
    with torch.inference_mode():
        blocks = [latents[:, :, :3, :8, :8], latents[:, :, 1:, 3:, 4:]]
        first, last = (vae.decoder(post_quantized(vae, block)) for block in blocks)
    torch.testing.assert_close(video[:, :, :4, :12, :16], first[:, :, :4, :12, :16], atol=1e-5, rtol=0)
    torch.testing.assert_close(video[:, :, -4:, -12:, -16:], last[:, :, -4:, -12:, -16:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_what_is_smaller_than_a_block_is_one_block(frames: int) -> None:
    vae, latents = model(), latents_of((1, 4, frames, 7, 5))
    with torch.inference_mode():
        expected = vae.decoder(post_quantized(vae, latents))
    _, video = decoded(vae, latents, "tile")
    torch.testing.assert_close(video, expected, atol=1e-5, rtol=0)


def post_quantized(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    frames = [vae.post_quant_conv(frame) for frame in latents.unbind(2)]
    return torch.stack(frames, 2)


def test_normalized_latents_are_decoded_as_the_allegro_pipeline_does() -> None:
    vae, latents = model(), latents_of((2, 4, 3, 8, 14)) * 0.1
    # One by one: diffusers cannot take a batch of several.
    items = [reference(vae, item) for item in (1 / vae.config.scaling_factor * latents).split(1)]
    _, video = decoded(vae, latents[:1], "tile", denormalize=True)
    torch.testing.assert_close(video, items[0], atol=1e-5, rtol=0)
    _, videos = decoded(vae, latents, "tile", denormalize=True)
    # The convolutions of a batch of two sum in another order.
    torch.testing.assert_close(videos, torch.cat(items), atol=5e-5, rtol=0)


@pytest.mark.parametrize("extent", range(8, 40))
def test_weights_add_up_to_one_everywhere(extent: int) -> None:
    spans = overlap_axis(extent, 8, 3, 4)
    total = torch.zeros(extent * 4, dtype=torch.float64)
    for span, weights in zip(spans, blend_weights(spans, 4), strict=True):
        total[span.start * 4 : (span.start + span.size) * 4] += weights
    torch.testing.assert_close(total, torch.ones_like(total))


def test_blocks_are_not_negotiable() -> None:
    vae = model()
    spec = AllegroFamily(vae, "tiny").spec
    with pytest.raises(UnsupportedModeError, match="blended blocks"):
        make_plan(spec, (1, 4, 3, 8, 8), group_size=2, policy=Policy(), mode="spatial_shard_width")
    with pytest.raises(ConfigError, match="Allegro"):
        AllegroFamily(vae, "tiny", StrideTiles())


def test_the_released_configuration_is_cut_as_diffusers_does() -> None:
    with torch.device("meta"):
        spec = AllegroFamily(diffusers.AutoencoderKLAllegro(), "allegro").spec
    shape = (1, 4, 22, 90, 160)
    assert spec.output_extents(shape) == (88, 720, 1280)
    plan = make_plan(spec, shape, group_size=1, policy=Policy())
    assert plan.tiles is not None
    assert [row.start for row in plan.tiles.rows] == [0, 25, 50]
    assert [column.start for column in plan.tiles.columns] == [0, 30, 60, 90, 120]
    assert len(plan.owners) == 5 * 3 * 5
