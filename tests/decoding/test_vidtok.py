"""``AutoencoderVidTok`` against diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from decode_service.decoding.families.vidtok import VidTokFamily
from decode_service.decoding.loading import ModelSource, load_family
from decode_service.errors import ConfigError, InvalidLatentsError, InvalidRequestError
from decode_service.planning.planner import Policy, make_plan, validate_denormalize
from decode_service.planning.spec import StrideTiles
from decode_service.planning.temporal import CausalFrames, GroupedFrames
from tests.decoding.family_checks import (
    check_causal_ratios,
    check_compiles_whole,
    check_exact_modes,
    check_half_precision,
    check_interleaved,
    check_tiles,
    decoded,
    largest_operand,
)
from tests.decoding.harness import latents_of
from tests.decoding.tiled_reference import tiled
from tests.decoding.tiny_models import vidtok as model


def reference(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return vae.decode(latents)


# A picture, two latent frames, and more than two, so that passes in the middle hold frames back.
@pytest.mark.parametrize("frames", [1, 2, 3])
def test_exact_modes_of_the_causal_decoder_give_the_video_of_diffusers(frames: int) -> None:
    vae, latents = model(), latents_of((1, 4, frames, 5, 5))
    expected = reference(vae, latents)
    check_exact_modes(vae, latents, expected)
    assert VidTokFamily(vae, "tiny").spec.frame_rule == CausalFrames(4)
    assert expected.shape[2] == 1 + 4 * (frames - 1)


def test_exact_modes_of_the_other_decoder_give_the_video_of_diffusers() -> None:
    vae, latents = model(is_causal=False), latents_of((1, 4, 4, 5, 5))
    check_exact_modes(vae, latents, reference(vae, latents))
    assert VidTokFamily(vae, "tiny").spec.frame_rule == GroupedFrames(4, 4)


@pytest.mark.parametrize("chunk", [1, 2, 3, 9])
def test_any_chunk_gives_the_same_video(chunk: int) -> None:
    """In float64 to the last bits, but for the doubling of frames, which the model does in float32."""
    vae, latents = model().double(), latents_of((1, 4, 6, 2, 3)).double()
    with torch.inference_mode():
        parts = list(VidTokFamily(vae, "tiny").decode(latents, chunk))
    assert all(part.shape[2] > 0 for part in parts) and len(parts) == 1 + -(-5 // chunk)
    torch.testing.assert_close(torch.cat(parts, 2), reference(vae, latents), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("config", "ratios"),
    [
        ({"tempo_ds": [2], "tempo_us": [1]}, (8, 2)),
        ({"tempo_ds": [0, 1, 2], "tempo_us": [1, 2, 3]}, (8, 8)),
        ({"ch_mult": [1, 2, 2], "tempo_ds": [1, 0]}, (4, 4)),
        ({"spatial_ds": [1, 2], "spatial_us": [2, 3], "tempo_ds": [1, 2], "tempo_us": [2, 3]}, (4, 4)),
    ],
)
def test_ratios_are_those_of_the_structure(config: dict[str, Any], ratios: tuple[int, int]) -> None:
    vae, latents = model(**config), latents_of((1, 4, 3, 4, 5))
    check_causal_ratios(vae, latents, reference(vae, latents), *ratios)


def test_an_encoder_and_a_decoder_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="makes 2 frames of one, its encoder one of 4"):
        VidTokFamily(model(tempo_us=[1]), "tiny")


def test_clips_of_which_diffusers_would_drop_frames_are_refused() -> None:
    vae = model(is_causal=False)
    assert reference(vae, latents_of((1, 4, 7, 2, 3))).shape[2] == 16, "not 28: three latent frames are gone"
    spec = VidTokFamily(vae, "tiny").spec
    assert spec.modes(2)[0] == "direct" and not spec.chunked
    with pytest.raises(InvalidLatentsError, match="cannot decode 7 latent frames: it takes multiples of 4"):
        make_plan(spec, (1, 4, 7, 2, 3), group_size=1, policy=Policy())


@pytest.mark.parametrize(("causal", "frames"), [(True, 1), (False, 4)])
def test_tiles_of_one_chunk_are_those_of_diffusers(causal: bool, frames: int) -> None:
    vae, latents = model(is_causal=causal), latents_of((1, 4, frames, 5, 6))
    vae.enable_tiling(32, 32, 0.25, 0.25)
    expected = reference(vae, latents)
    vae.disable_tiling()
    check_tiles(vae, latents, expected, tiles=StrideTiles(32, 24), ranks=(1, 3))


def test_tiles_are_decoded_in_time_as_the_whole_is() -> None:
    """diffusers decodes tiles in chunks, even a single one, and its causal chunks are not the video that it decodes at once:
    it doubles the first frames of the second chunk with those of the first at their side, which otherwise it does not."""
    vae, latents = model(), latents_of((1, 4, 3, 4, 6))
    single = latents[..., :4]
    vae.enable_tiling(32, 32, 0.25, 0.25)
    chunked = reference(vae, single)
    vae.disable_tiling()
    assert (chunked - reference(vae, single)).abs().max() > 1e-3, "diffusers has it right now: compare with it"

    def decode(tile: torch.Tensor) -> torch.Tensor:
        return reference(vae, tile.unflatten(1, (4, 3))).flatten(1, 2)

    expected = tiled(decode, latents.flatten(1, 2), tile_px=32, overlap=0.25, ratio=8).unflatten(1, (3, 9))
    check_tiles(vae, latents, expected, tiles=StrideTiles(32, 24), ranks=(1, 2))


def test_tiles_have_no_seams_in_time() -> None:
    """Of the decoder that is not causal diffusers puts chunks side by side, each decoded as if it were a video."""
    vae, latents = model(is_causal=False), latents_of((1, 4, 8, 3, 6))
    vae.enable_tiling(32, 32, 0.25, 0.25)
    theirs = reference(vae, latents)
    vae.disable_tiling()
    _, video = decoded(vae, latents, "tile", tiles=StrideTiles(32, 24))
    left = reference(vae, latents[..., :4])
    torch.testing.assert_close(video[..., :24], left[..., :24], atol=1e-5, rtol=0)
    assert (theirs - video)[:, :, 15:17].abs().max() > 1e-2, "diffusers has it right now: compare with it"


def test_own_tiles_are_those_of_the_class() -> None:
    assert VidTokFamily(model(), "tiny").spec.tiles == StrideTiles(256, 256)


def test_a_quantized_model_decodes_its_codes(tmp_path: Path) -> None:
    config = {"regularizer": "fsq", "codebook_size": 8**3, "z_channels": 3, "double_z": False}
    vae = model(**config)
    indices = torch.randint(0, 8**3, (1, 2, 4, 5), generator=torch.Generator().manual_seed(1))
    codes = vae.indices_to_latent(indices)
    with torch.inference_mode():
        expected = vae.decode(indices, decode_from_indices=True)
    _, video = decoded(vae, codes.contiguous(), "direct")
    torch.testing.assert_close(video, expected, atol=1e-5, rtol=0)
    vae.save_pretrained(tmp_path)
    family = load_family(ModelSource("tiny", str(tmp_path)), device=torch.device("cpu"))
    with torch.inference_mode():
        again = torch.cat(list(family.decode(codes, 1)), dim=2)
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=0)


def test_nothing_is_kept_on_the_model() -> None:
    def clean(vae: Any, latents: torch.Tensor) -> torch.Tensor:
        video = reference(vae, latents)
        vae._empty_causal_cached(vae)
        return video

    vae = model()
    check_interleaved(vae, [latents_of((1, 4, 4, 3, 4), seed) for seed in (1, 2)], clean)
    assert all(getattr(module, "causal_cache", None) is None for module in vae.modules())


def test_normalized_latents_are_refused() -> None:
    vae = model()
    spec = VidTokFamily(vae, "tiny").spec
    with pytest.raises(InvalidRequestError, match=r"no statistics.*denormalize false"):
        validate_denormalize(spec, (1, 4, 1, 3, 4))
    with pytest.raises(ValueError, match="no statistics"):
        decoded(vae, latents_of((1, 4, 1, 3, 4)), "direct", denormalize=True)


@pytest.mark.parametrize("causal", [True, False])
def test_half_precision_is_no_further_off_than_diffusers(causal: bool) -> None:
    check_half_precision(model(is_causal=causal), latents_of((1, 4, 4, 4, 5)), reference)


@pytest.mark.parametrize(("causal", "frames", "chunk"), [(True, 1, 1), (True, 4, 1), (True, 4, 3), (False, 4, 1)])
def test_no_operand_is_larger_than_planned(causal: bool, frames: int, chunk: int) -> None:
    vae, latents = model(is_causal=causal), latents_of((1, 4, frames, 6, 5))
    family = VidTokFamily(vae, "tiny")
    largest = largest_operand(family, latents, chunk)
    first, later = family.spec.operand_per_pixel_first, family.spec.operand_per_pixel
    planned = max(first, later * min(chunk, frames - 1)) if causal else first + later * (frames - 1)
    # A padded operand has two rows and columns more, which planning leaves out.
    assert 0.4 * planned * 48 * 40 <= largest <= 1.1 * planned * 48 * 40


def test_the_decoder_compiles_whole() -> None:
    vae, latents = model(ch_mult=[1, 1, 1], tempo_ds=[1, 0], num_res_blocks=0), latents_of((1, 4, 2, 2, 3))
    check_compiles_whole(vae, latents, reference(vae, latents))
