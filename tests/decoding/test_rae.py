"""``AutoencoderRAE`` against diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from decode_service.decoding.families.rae import RAEFamily
from decode_service.decoding.loading import ModelSource, load_family
from decode_service.decoding.rank import RankDecoder
from decode_service.errors import ConfigError, InvalidLatentsError, UnsupportedModeError
from decode_service.planning.plan import PixelFormat
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from tests.decoding.family_checks import check_exact_modes, decoded, reference
from tests.decoding.harness import latents_of
from tests.decoding.tiny_models import RAE_CELLS as CELLS
from tests.decoding.tiny_models import RAE_CHANNELS as CHANNELS
from tests.decoding.tiny_models import RAE_PATCH as PATCH
from tests.decoding.tiny_models import rae as model

CPU = torch.device("cpu")


VARIANTS: dict[str, dict[str, Any]] = {
    "statistics per position": {},
    "statistics per channel": {
        "latents_mean": [[[0.5]]] * CHANNELS,
        "latents_std": [[[0.5 + 0.25 * i]] for i in range(CHANNELS)],
    },
    "without statistics": {"latents_mean": None, "latents_std": None, "scaling_factor": 1.0},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_picture_is_that_of_diffusers(name: str) -> None:
    vae, latents = model(**VARIANTS[name]), latents_of((1, CHANNELS, CELLS, CELLS))
    expected = reference(vae, latents)
    assert expected.shape == (1, 3, CELLS * PATCH, CELLS * PATCH)
    check_exact_modes(vae, latents, expected)


@pytest.mark.parametrize("denormalize", [False, True])
def test_a_batch_is_divided_and_vae_decode_itself_undoes_the_statistics(denormalize: bool) -> None:
    """What a denoiser makes goes to ``vae.decode`` as it is, so both kinds of latents are the same."""
    vae, latents = model(), latents_of((3, CHANNELS, CELLS, CELLS))
    _, picture = decoded(vae, latents, "batch", ranks=2, denormalize=denormalize)
    torch.testing.assert_close(picture, reference(vae, latents), atol=1e-5, rtol=0)


def test_pixels_over_0_to_1_are_answered_over_the_usual_range() -> None:
    vae, latents = model(), latents_of((1, CHANNELS, CELLS, CELLS)) * 3
    expected = reference(vae, latents)
    assert expected.min() < 0 < 0.5 < 1 < expected.max(), "both ends must be clamped"
    _, floats = decoded(vae, latents, "direct", pixels=PixelFormat("float32"))
    torch.testing.assert_close(floats, expected.clamp(0, 1) * 2 - 1, atol=1e-5, rtol=0)
    _, bytes_ = decoded(vae, latents, "direct", pixels=PixelFormat("uint8"))
    wanted = (expected.clamp(0, 1) * 255).permute(0, 2, 3, 1)
    assert (bytes_.float() - wanted).abs().max() < 0.51


@pytest.mark.parametrize("cells", [(4, 4), (CELLS, 4), (1, CELLS**2)])
def test_other_sizes_are_refused_with_the_right_one(cells: tuple[int, int]) -> None:
    """diffusers stretches the first to 5 x 5, fails on the second and takes the third for 5 x 5."""
    vae = model(latents_mean=None, latents_std=None)
    if cells == (CELLS, 4):
        with pytest.raises(RuntimeError):
            reference(vae, latents_of((1, CHANNELS, *cells)))
    else:
        assert reference(vae, latents_of((1, CHANNELS, *cells))).shape[-2:] == (20, 20)
    with pytest.raises(InvalidLatentsError, match=r"one size, 5 x 5 latent cells, got") as caught:
        make_plan(RAEFamily(vae, "tiny").spec, (1, CHANNELS, *cells), group_size=1, policy=Policy())
    assert caught.value.param == "latents.shape"


def test_it_has_no_tiles_and_says_why() -> None:
    vae, shape = model(), (1, CHANNELS, CELLS, CELLS)
    assert not hasattr(vae, "use_tiling"), "diffusers tiles it now: look how"
    spec = RAEFamily(vae, "tiny").spec
    assert spec.modes(1) == ("direct",) and "tile" not in spec.modes(2)
    for strict in (False, True):
        with pytest.raises(UnsupportedModeError, match=r"position embedding for each token.*use direct or auto"):
            make_plan(spec, shape, group_size=2, policy=Policy(), mode="tile", strict=strict)
    with pytest.raises(ConfigError, match=r"policy\.tile cannot be set"):
        RAEFamily(vae, "tiny", StrideTiles(16, 12))


def test_a_group_with_more_ranks_than_rows_decodes_on_one() -> None:
    spec, shape = RAEFamily(model(), "tiny").spec, (1, CHANNELS, CELLS, CELLS)
    chosen = make_plan(spec, shape, group_size=CELLS + 1, policy=Policy(direct_max_pixels=0))
    assert chosen.mode == "direct" and chosen.exact and "fewer than 6 ranks" in chosen.reason
    forced = make_plan(spec, shape, group_size=CELLS + 1, policy=Policy(), mode="spatial_shard_width")
    assert forced.mode == "direct" and forced.fallback is not None and "fewer than 6 ranks" in forced.fallback


@pytest.mark.parametrize("axis", ["height", "width"])
def test_a_band_has_its_own_positions_and_one_class_token(axis: str) -> None:
    """A wrong position, or a class token that counts once for every rank, shows in the picture."""
    vae, latents = model(), latents_of((1, CHANNELS, CELLS, CELLS))
    expected = reference(vae, latents)
    vae.decoder.trainable_cls_token.mul_(-1.0)
    assert (reference(vae, latents) - expected).abs().max() > 1e-3, "a class token without effect would prove nothing"
    vae.decoder.trainable_cls_token.mul_(-1.0)
    flipped = reference(vae, latents.flip(-1 if axis == "width" else -2))
    assert (flipped.flip(-1 if axis == "width" else -2) - expected).abs().max() > 1e-2, "nor positions without one"
    for ranks in (4, 5):
        _, picture = decoded(vae, latents, f"spatial_shard_{axis}", ranks=ranks)
        torch.testing.assert_close(picture, expected, atol=1e-5, rtol=0)


def test_latents_that_are_tokens_are_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="reshape_to_2d"):
        RAEFamily(model(reshape_to_2d=False, latents_mean=None, latents_std=None), "tiny")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_with_an_encoder_is_loaded_without_it(dtype: str, tmp_path: Path) -> None:
    """The encoder's library need not be installed for what is never run."""
    vae = model()
    vae.save_pretrained(tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    save_file(load_file(file) | {"encoder.layernorm.weight": torch.ones(8)}, file, metadata={"format": "pt"})
    family = load_family(ModelSource("tiny", str(tmp_path), dtype=dtype), device=CPU)
    decoder, latents = RankDecoder(family, device=CPU), latents_of((1, CHANNELS, CELLS, CELLS))
    assert decoder.spec.family == "rae"
    plan = make_plan(family.spec, tuple(latents.shape), group_size=1, policy=Policy())

    def pixels(precision: str | None) -> torch.Tensor:
        part = decoder.decode(
            plan,
            latents.numpy(),
            "float32",
            denormalize=True,
            pixels=PixelFormat("float32", "model"),
            precision=precision,
        )
        assert part.array is not None
        return torch.from_numpy(part.array)

    half = vae.to(getattr(torch, dtype))
    expected = reference(half, latents.to(half.dtype)).float()
    torch.testing.assert_close(pixels(None), expected, atol=1e-5, rtol=0)
    pixels("float32")
    torch.testing.assert_close(pixels(None), expected, atol=1e-5, rtol=0)


def test_building_leaves_diffusers_as_it_was() -> None:
    from diffusers.models.autoencoders import autoencoder_rae

    before = autoencoder_rae._build_encoder, diffusers.AutoencoderRAE._keys_to_ignore_on_load_unexpected
    with RAEFamily.building():
        assert isinstance(autoencoder_rae._build_encoder(encoder_type="dinov2"), nn.Identity)
    with pytest.raises(ValueError, match="divisible"):
        model(encoder_patch_size=13)
    after = autoencoder_rae._build_encoder, diffusers.AutoencoderRAE._keys_to_ignore_on_load_unexpected
    assert after == before


def test_the_published_configuration_and_its_limits() -> None:
    with torch.device("meta"), RAEFamily.building():
        vae = diffusers.AutoencoderRAE(decoder_hidden_size=1152, decoder_intermediate_size=4096)
    spec = RAEFamily(vae, "rae").spec
    assert (spec.latent_channels, spec.output_channels, spec.spatial_ratio, spec.fixed_cells) == (768, 3, 16, 16)
    assert spec.output_extents((1, 768, 16, 16)) == (1, 256, 256)
    assert spec.operand_per_pixel_first == 17, "257 tokens of 4112 attention scores each"


def test_statistics_of_every_place_are_not_told_and_none_are_said_to_be_applied() -> None:
    """Of the published model they are 400 000 numbers, and megabytes in every answer about it."""
    many = torch.zeros(CHANNELS * 50, CELLS, CELLS).tolist()
    vae = model(encoder_hidden_size=CHANNELS * 50, latents_mean=many, latents_std=many)
    shown = RankDecoder(RAEFamily(vae, "tiny"), device=CPU).describe()
    assert shown["denormalize"]["statistics"] == {} and shown["denormalize"]["formula"] == "latents"
    assert shown["config"]["latents_mean"] == "400 x 5 x 5 numbers, left out here"
    assert shown["config"]["scaling_factor"] == 0.7
    few = RankDecoder(RAEFamily(model(), "tiny"), device=CPU).describe()["config"]
    assert len(few["latents_mean"]) == CHANNELS
