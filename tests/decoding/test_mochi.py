"""``AutoencoderKLMochi`` against diffusers, which decodes the whole video in one pass."""

from __future__ import annotations

import itertools

import diffusers
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXSafeConv3d
from torch import nn

from decode_service.decoding.families.mochi import MochiFamily
from decode_service.planning.spec import StrideTiles
from tests.decoding.family_checks import check_exact_modes, check_interleaved, check_tiles, decoded, reference
from tests.decoding.harness import latents_of
from tests.decoding.models import STATISTICS
from tests.decoding.tiny_models import mochi as model

TILES = StrideTiles(32, 24)


@pytest.mark.parametrize("frames", [1, 2, 3, 5])
def test_exact_modes_give_the_video_of_diffusers(frames: int) -> None:
    vae, latents = model(), latents_of((1, 4, frames, 7, 9))
    expected = reference(vae, latents)
    check_exact_modes(vae, latents, expected)
    rule = MochiFamily(vae, "tiny").spec.frame_rule
    assert rule is not None and rule.frames(frames) == expected.shape[2] == 1 + 6 * (frames - 1)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_any_chunk_gives_the_same_video(chunk: int) -> None:
    vae, latents = model(), latents_of((1, 4, 5, 4, 5))
    expected = reference(vae, latents)
    plan, video = decoded(vae, latents, "direct", chunk=chunk)
    assert plan.chunk == chunk
    torch.testing.assert_close(video, expected, atol=1e-5, rtol=0)
    _, video = decoded(vae, latents, "spatial_shard_height", ranks=2, chunk=chunk)
    torch.testing.assert_close(video, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("frames", [1, 3])
def test_tiles_give_the_tiled_video_of_diffusers(frames: int) -> None:
    vae, latents = model(), latents_of((1, 4, frames, 11, 13))
    vae.enable_tiling(TILES.size_px, TILES.size_px, TILES.stride_px, TILES.stride_px)
    expected = reference(vae, latents)
    vae.disable_tiling()
    check_tiles(vae, latents, expected, tiles=TILES)


def test_normalized_latents_are_decoded_as_the_mochi_pipeline_does() -> None:
    vae, latents = model(), latents_of((1, 4, 2, 7, 9))
    mean, std = (torch.tensor(STATISTICS[key]).view(1, 4, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    with torch.inference_mode():
        expected = vae.decode(latents * std / 0.8 + mean).sample
    _, video = decoded(vae, latents, "direct", denormalize=True)
    torch.testing.assert_close(video, expected, atol=1e-5, rtol=0)

    without = model(latents_mean=None, latents_std=None)
    with torch.inference_mode():
        expected = without.decode(latents / 0.8).sample
    _, video = decoded(without, latents, "direct", denormalize=True)
    torch.testing.assert_close(video, expected, atol=1e-5, rtol=0)


def test_interleaved_decodes_do_not_touch_each_other() -> None:
    check_interleaved(model(), [latents_of((1, 4, 4, 4, 5), seed) for seed in (1, 2)], chunk=2)


def test_convolutions_of_long_clips_are_cut_in_time_and_still_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """CogVideoXSafeConv3d cuts inputs of more than 2^30 elements after they were padded; here it cuts all of them."""

    def cut(self: nn.Conv3d, input: torch.Tensor) -> torch.Tensor:
        kernel = self.kernel_size[0]
        parts = torch.chunk(input, max(input.shape[2] // 3, 1), dim=2)
        if kernel > 1:
            parts = (
                parts[0],
                *(torch.cat((a[:, :, -kernel + 1 :], b), dim=2) for a, b in itertools.pairwise(parts)),
            )
        return torch.cat([nn.Conv3d.forward(self, part) for part in parts], dim=2)

    vae, latents = model(), latents_of((1, 4, 4, 5, 7))
    expected = reference(vae, latents)
    monkeypatch.setattr(CogVideoXSafeConv3d, "forward", cut)
    for mode in ("spatial_shard_height", "spatial_shard_width"):
        _, video = decoded(vae, latents, mode, ranks=2, chunk=3)
        torch.testing.assert_close(video, expected, atol=1e-5, rtol=0)


def test_framewise_decoding_in_diffusers_is_not_what_this_could_use() -> None:
    vae = model()
    vae._enable_framewise_decoding()
    with pytest.raises(RuntimeError), torch.inference_mode():
        vae.decode(latents_of((1, 4, 4, 7, 9)))


def test_the_released_configuration_has_its_ratios() -> None:
    with torch.device("meta"):
        spec = MochiFamily(diffusers.AutoencoderKLMochi(), "mochi").spec
    assert spec.output_extents((1, 12, 28, 60, 106)) == (163, 480, 848)
    assert spec.operand_per_pixel == 128 * 8
