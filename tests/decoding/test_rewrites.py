"""Exact rewrites: on every decoder that describes its structure they give diffusers' pixels, in every mode.

The families' own tests decode with all rewrites on; here it is checked that these were at work, and what happens where one is
not exact or not wanted.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from decode_service.config import RewritesConfig
from decode_service.decoding import packed_weights
from decode_service.decoding.band_exchange import UnshardableOperation
from decode_service.decoding.communicator import SoloCommunicator
from decode_service.decoding.dense_convolution import dense_conv3d
from decode_service.decoding.families import FAMILIES
from decode_service.decoding.loading import ModelSource
from decode_service.decoding.pixel_norm import pixel_rms_norm
from decode_service.decoding.rank import RankDecoder
from decode_service.decoding.rewrites import (
    NAMES,
    Rewrite,
    apply_rewrites,
    causal_residual,
    convolutions,
    normalization,
)
from decode_service.decoding.rewrites.upsampling import folded
from decode_service.decoding.sharding import ShardedFrame
from decode_service.decoding.work import count
from decode_service.planning.bands import Band
from decode_service.planning.plan import PixelFormat
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from tests.decoding import models, test_hunyuan_image_refiner, test_hunyuan_video, test_hunyuan_video15, test_ltx_video
from tests.decoding import test_qwen_image21 as qwen21
from tests.decoding.conftest import Zoo
from tests.decoding.family_checks import check_exact_modes, check_tiles, decoded, rewritten
from tests.decoding.harness import latents_of

IMAGE = {"upsample_conv", "norm_activation", "residual", "packed_weights"}
STILL = {"one_frame_conv2d", "upsample_conv", "norm_activation", "packed_weights"}
CACHED = {*STILL, "causal_input", "causal_residual"}
CLIP = {"one_frame_conv2d", "norm_activation", "packed_weights"}

#: Models by family, and the rewrites that fit each.
EXPECTED: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "autoencoder_kl": (lambda: models.tiny("autoencoder_kl"), IMAGE),
    "wan21": (lambda: models.tiny("wan21"), CACHED),
    "wan22": (lambda: models.tiny("wan22"), CACHED),
    "qwen_image": (lambda: models.tiny("qwen_image"), CACHED),
    "qwen_image21": (lambda: qwen21.model("residual"), STILL),
    "hunyuan_video": (test_hunyuan_video.tiny, CLIP),
    "hunyuan_video15": (test_hunyuan_video15.tiny, CLIP),
    "hunyuan_image_refiner": (test_hunyuan_image_refiner.refiner, CLIP),
    "ltx": (test_ltx_video.ltx, CLIP),
    "ltx2": (test_ltx_video.ltx2, CLIP),
}


@pytest.fixture(autouse=True)
def small_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiny models too, though their weights are put in order in no time."""
    monkeypatch.setattr(packed_weights, "SMALLEST", 1)


def apply(vae: Any, **options: Any) -> dict[str, Rewrite]:
    return {rewrite.name: rewrite for rewrite in apply_rewrites(vae, FAMILIES[type(vae).__name__].structure, **options)}


def test_the_config_has_a_switch_for_every_rewrite() -> None:
    assert set(RewritesConfig.model_fields) == set(NAMES)
    assert set(RewritesConfig().enabled()) == set(NAMES)
    assert "channels_last" not in RewritesConfig(channels_last=False).enabled()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_rewrites_that_fit_a_family_are_on_and_the_others_say_why_not(name: str) -> None:
    build, expected = EXPECTED[name]
    applied = apply(build())
    assert {rewrite.name for rewrite in applied.values() if rewrite.active} == expected
    for rewrite in applied.values():
        assert (rewrite.modules > 0) == rewrite.active == (not rewrite.reason), rewrite


@pytest.mark.parametrize("name", EXPECTED)
def test_a_single_frame_is_that_of_diffusers_in_every_exact_mode(name: str) -> None:
    vae = EXPECTED[name][0]()
    latents = latents_of((1, 4, 7, 9) if name == "autoencoder_kl" else (1, 4, 1, 7, 9))
    with torch.inference_mode():
        check_exact_modes(vae, latents, vae.decode(latents).sample)


@pytest.mark.parametrize("name", EXPECTED)
def test_rewrites_leave_the_exchanges_between_ranks_as_many_as_they_are(name: str) -> None:
    build, _ = EXPECTED[name]
    vae = build()
    family = FAMILIES[type(vae).__name__]

    def exchanges(model: Any) -> tuple[float, float]:
        return count(family(model, name)).exchanges

    # Of a single frame, the first pass of a clip, and of each later pass.
    assert exchanges(rewritten(vae)) == exchanges(vae) and exchanges(vae)[0] > 5


@pytest.mark.parametrize("name", ["wan21", "wan22", "qwen_image"])
def test_rows_of_new_frames_alone_travel(name: str) -> None:
    vae = EXPECTED[name][0]()
    family = FAMILIES[type(vae).__name__]
    kept, sent_again = (count(family(model, name)).halo_bytes[1] for model in (rewritten(vae), copy.deepcopy(vae)))
    # Of a pass of one latent frame, which the lowest convolutions see after two and the highest, four frames, after two.
    assert kept < 0.7 * sent_again


@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("name", ["wan21", "wan22", "qwen_image"])
def test_passes_of_any_length_give_the_pixels_of_diffusers(name: str, chunk: int) -> None:
    vae, latents = EXPECTED[name][0](), latents_of((1, 4, 5, 5, 6))
    with torch.inference_mode():
        expected = vae.decode(latents).sample
    for mode, ranks in (("direct", 1), ("spatial_shard_height", 2), ("spatial_shard_width", 2)):
        _, pixels = decoded(vae, latents, mode, ranks=ranks, chunk=chunk)
        assert (pixels - expected).abs().max() < 1e-5, mode


@pytest.mark.parametrize("name", ["autoencoder_kl", "wan21"])
def test_tiles_are_those_without_rewrites(name: str) -> None:
    vae = EXPECTED[name][0]()
    latents = latents_of((1, 4, 11, 13) if name == "autoencoder_kl" else (1, 4, 2, 9, 11))
    tiles = StrideTiles(32, 24) if name == "autoencoder_kl" else StrideTiles(64, 48)
    _, expected = decoded(vae, latents, "tile", tiles=tiles, rewrites=())
    check_tiles(vae, latents, expected, tiles=tiles, ranks=(1, 2))


@pytest.mark.parametrize("name", ["autoencoder_kl", "wan21", "wan22", "qwen_image", "qwen_image21", "hunyuan_video15"])
def test_bfloat16_is_as_close_to_float32_as_diffusers_is(name: str) -> None:
    vae = EXPECTED[name][0]()
    latents = latents_of((1, 4, 12, 12) if name == "autoencoder_kl" else (1, 4, 1, 12, 12))
    with torch.inference_mode():
        exact = vae.decode(latents).sample
        vae.bfloat16()
        theirs = vae.decode(latents.bfloat16()).sample.float()
    _, ours = decoded(vae, latents, "direct")
    assert (ours - exact).square().mean().sqrt() <= 1.1 * (theirs - exact).square().mean().sqrt()


@pytest.mark.parametrize("name", ["wan21", "wan22"])
def test_wide_convolutions_in_two_dimensions_round_no_worse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vae, latents = EXPECTED[name][0](), latents_of((1, 4, 4, 6, 8))
    with torch.inference_mode():
        exact = vae.decode(latents).sample
        vae.bfloat16()
        theirs = (vae.decode(latents.bfloat16()).sample.float() - exact).square().mean().sqrt()
    monkeypatch.setattr(convolutions, "WIDE", 8)
    flat = [
        m
        for m in rewritten(vae).modules()
        if isinstance(m, convolutions.CausalInput) and m._causal_input[1] is not None
    ]
    assert len(flat) > 10
    for mode, ranks, chunk in (("direct", 1, 1), ("direct", 1, 3), ("spatial_shard_height", 2, 2)):
        _, ours = decoded(vae, latents, mode, ranks=ranks, chunk=chunk)
        assert (ours - exact).square().mean().sqrt() <= 1.1 * theirs, (mode, chunk)


def test_two_decodes_interleaved_on_one_rewritten_model_do_not_disturb_each_other() -> None:
    vae = EXPECTED["wan21"][0]()
    family = FAMILIES["AutoencoderKLWan"](rewritten(vae), "tiny")
    first, second = latents_of((1, 4, 3, 5, 6), seed=1), latents_of((1, 4, 3, 7, 4), seed=2)
    with torch.inference_mode():
        expected = [vae.decode(z).sample for z in (first, second)]
        passes = list(zip(family.decode(first, 1), family.decode(second, 1), strict=True))
    for pixels, reference in zip(zip(*passes, strict=True), expected, strict=True):
        assert (torch.cat(pixels, dim=2).clamp(-1, 1) - reference).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autoencoder_kl", "wan21", "qwen_image21"])
def test_rewritten_decoders_compile(name: str) -> None:
    vae = EXPECTED[name][0]()
    latents = latents_of((1, 4, 5, 6) if name == "autoencoder_kl" else (1, 4, 1, 5, 6))
    family = FAMILIES[type(vae).__name__](rewritten(vae), "tiny")
    decoder = RankDecoder(family, device=torch.device("cpu"), compile_enabled=True)
    decoder.attach(SoloCommunicator())
    plan = make_plan(decoder.spec, tuple(latents.shape), group_size=1, policy=Policy())
    pixels = PixelFormat("float32", "model")
    part = decoder.decode(plan, latents.numpy(), "float32", denormalize=False, pixels=pixels, measure=True)
    with torch.inference_mode():
        expected = vae.decode(latents).sample
    assert part.array is not None and (torch.from_numpy(part.array) - expected).abs().max() < 1e-5
    # Measuring compares what the compiled decoder gives with what the eager one does.
    assert len(part.measured) == 1 and not part.measured[0].problem and part.measured[0].compiled_ms


# What is off


def test_a_rewrite_that_is_switched_off_is_left_off(zoo: Zoo) -> None:
    source = ModelSource("tiny", str(zoo.folders["wan21"]))
    decoder = RankDecoder.load(source, device="cpu", rewrites=set(NAMES) - {"one_frame_conv2d"})
    shown = decoder.describe()["rewrites"]
    assert set(shown) == set(NAMES)
    assert shown["one_frame_conv2d"] == {"active": False, "modules": 0, "reason": "switched off in the config"}
    assert shown["causal_input"]["active"] and shown["causal_input"]["modules"] > 20
    assert not shown["channels_last"]["active"] and "float32" in shown["channels_last"]["reason"]
    convs = [m for m in decoder._family.vae.modules() if isinstance(m, nn.Conv3d)]
    assert convs and not any(isinstance(conv, convolutions.OneFrameConvolution) for conv in convs)


@pytest.mark.parametrize("name", ["autoencoder_kl", "wan21", "wan22", "qwen_image", "qwen_image21"])
def test_half_precision_is_channels_last_and_float32_is_not(name: str) -> None:
    vae = EXPECTED[name][0]()
    for dtype in (torch.float32, torch.bfloat16):
        made = copy.deepcopy(vae).to(dtype)
        applied = apply(made)["channels_last"]
        assert applied.active == (dtype == torch.bfloat16), applied.reason
        weight = made.decoder.conv_out.weight
        assert weight.is_contiguous() == (dtype == torch.float32)


def test_without_rewrites_the_model_is_untouched() -> None:
    vae = EXPECTED["wan21"][0]()
    classes = [type(module) for module in vae.modules()]
    strides = [parameter.stride() for parameter in vae.parameters()]
    assert not any(rewrite.active for rewrite in apply(vae, enabled=()).values())
    assert [type(module) for module in vae.modules()] == classes
    assert [parameter.stride() for parameter in vae.parameters()] == strides


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (convolutions.OneFrameConvolution, "one_frame_conv2d", lambda y: y * 1.001),
        (normalization.PixelRMSNorm, "norm_activation", lambda y: y[..., :-1]),
        (convolutions.CausalInput, "causal_input", lambda y: torch.full_like(y, float("nan"))),
        (causal_residual.CausalResidual, "causal_residual", lambda y: y.roll(1, 2)),
    ],
)
def test_a_rewrite_that_differs_is_detected_at_load_and_taken_back(
    owner: Any,
    name: str,
    broken: Callable[[torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    vae, latents = EXPECTED["wan21"][0](), latents_of((1, 4, 2, 5, 6))
    with torch.inference_mode():
        expected = vae.decode(latents).sample
    original, calls = owner.forward, 0

    def forward(self: Any, *args: Any) -> torch.Tensor:
        # Right at first: the modules before the one that differs must be taken back, too.
        nonlocal calls
        calls += 1
        output: torch.Tensor = original(self, *args)
        return broken(output) if calls > 10 else output

    monkeypatch.setattr(owner, "forward", forward)
    with caplog.at_level(logging.WARNING, "decode_service.decoding.rewrites"):
        applied = apply(vae)
    assert not applied[name].active and applied[name].modules == 0 and "differs" in applied[name].reason
    assert name in caplog.text
    assert not any(isinstance(module, owner) for module in vae.modules())
    family = FAMILIES["AutoencoderKLWan"](vae, "tiny")
    with torch.inference_mode():
        pixels = torch.cat(list(family.decode(latents, 1)), dim=2).clamp(-1, 1)
    assert (pixels - expected).abs().max() < 1e-5


# Parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_rms_norm_is_its_formula_also_where_all_channels_are_zero(dtype: torch.dtype) -> None:
    x = latents_of((2, 24, 3, 5, 7)).to(dtype)
    gamma = latents_of((24,), seed=1).to(dtype)
    for zeros in (False, True):
        if zeros:
            x[:, :, 1, 2, 3] = 0
        expected = F.normalize(x.float(), dim=1).to(dtype) * 24**0.5 * gamma.view(-1, 1, 1, 1)
        got = pixel_rms_norm(x, 24**0.5, gamma)
        # float32 keeps the layout that it comes in, half precision is channels last.
        assert got.dtype == dtype and got.is_contiguous() == (dtype == torch.float32)
        assert got.is_contiguous(memory_format=torch.channels_last_3d) == (dtype != torch.float32)
        # Written into a larger tensor it is the same, and nothing else changes there.
        room = torch.full((2, 24, 5, 5, 9), 7.0, dtype=dtype)
        own = room[:, :, 2:, :, 1:8]
        assert pixel_rms_norm(x, 24**0.5, gamma, own) is own and torch.equal(own, got)
        assert (room == 7).sum() >= room.numel() - own.numel()
        torch.testing.assert_close(
            got, expected, atol=0, rtol=1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        )


def test_not_a_number_stays_one_through_the_rms_norm() -> None:
    x = torch.ones(1, 8, 2, 2)
    x[0, 3, 1, 1] = float("nan")
    y = pixel_rms_norm(x, 8**0.5, torch.ones(8))
    assert y[0, :, 1, 1].isnan().all() and not y[0, :, 0].isnan().any()


def test_folded_weights_are_upsampling_and_convolution() -> None:
    conv, x = nn.Conv2d(6, 5, 3, padding=1), latents_of((2, 6, 4, 7))
    with torch.no_grad():
        expected = conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        got = F.conv_transpose2d(x, folded(conv.weight), conv.bias, stride=2, padding=1)
    assert (got - expected).abs().max() < 1e-6


def test_the_convolution_of_small_operands_is_the_same() -> None:
    x, weight, bias = latents_of((1, 48, 3, 8, 8)), latents_of((16, 48, 3, 3, 3)) / 36, latents_of((16,))
    expected = F.conv3d(x, weight, bias, padding=(0, 1, 1))
    assert (dense_conv3d(x, weight, bias, (1, 1, 1), (0, 1, 1), (1, 1, 1), 1) - expected).abs().max() < 1e-5


def test_a_transposed_convolution_that_would_miss_the_neighbour_is_refused() -> None:
    x, weight = latents_of((1, 4, 3, 5)), latents_of((4, 4, 4, 4))
    with ShardedFrame(SoloCommunicator(), "height", [Band(0, 3)]):
        with pytest.raises(UnshardableOperation, match="transposed convolution"):
            F.conv_transpose2d(x, weight, stride=2, padding=1)
        with pytest.raises(UnshardableOperation, match="transposed convolution"):
            F.conv_transpose2d(F.pad(x, (1, 1, 1, 1)), weight, stride=2, padding=1)
        assert F.conv_transpose2d(F.pad(x, (1, 1, 1, 1)), weight, stride=2, padding=3).shape == (1, 4, 6, 10)


# Layout and memory


@pytest.mark.parametrize("name", ["autoencoder_kl", "qwen_image"])
def test_every_convolution_of_the_large_maps_gives_channels_last_activations(name: str) -> None:
    dtype = torch.bfloat16
    vae = rewritten(EXPECTED[name][0]().to(dtype))
    family = FAMILIES[type(vae).__name__](vae, "tiny")
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wrong = []

    def watch(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        if output.shape[1] > 1 and not output.is_contiguous(memory_format=formats[output.dim()]):
            wrong.append((module, output.stride()))

    hooks = [
        m.register_forward_hook(watch)
        for m in vae.decoder.up_blocks.modules()
        if isinstance(m, (nn.Conv2d, nn.Conv3d, nn.SiLU))
    ]
    with torch.inference_mode():
        list(family.decode(latents_of((1, 4, 1, 5, 6)).to(dtype), 1))
    assert hooks and not wrong


def live_bytes() -> int:
    """Bytes of all tensors that are alive, each storage once."""
    # By type alone: isinstance would wake lazy attributes of other objects, and tensors without data have no storage to count.
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu"]
    # Nor have weights in the order of their kernels, which are kept per weight and not per decode.
    tensors = [x for x in tensors if not x.is_mkldnn]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize("name", ["wan21", "wan22"])
def test_a_long_video_holds_no_more_between_passes_than_a_short_one(name: str) -> None:
    family = FAMILIES["AutoencoderKLWan"](rewritten(EXPECTED[name][0]()), "tiny")

    def held(latent_frames: int) -> int:
        """The most that a decode holds after a pass, beside its latents: caches of features, and the pass's pixels."""
        latents = latents_of((1, 4, latent_frames, 4, 5))
        before, most = live_bytes(), 0
        with torch.inference_mode():
            for pixels in family.decode(latents, 1):
                most = max(most, live_bytes() - before - 2 * latents.nbytes)
                del pixels
        return most

    short, long = held(5), held(21)
    assert short > 0 and long <= short * 1.02


def test_a_single_frame_leaves_nothing_behind() -> None:
    family = FAMILIES["AutoencoderKLQwenImage"](rewritten(EXPECTED["qwen_image"][0]()), "tiny")
    latents = latents_of((1, 4, 1, 8, 9))
    before = live_bytes()
    with torch.inference_mode():
        (pixels,) = family.decode(latents, 1)
        # The pixels, and post_quant_conv's output, which the decode holds: no cache.
        assert live_bytes() - before <= pixels.nbytes + latents.nbytes
