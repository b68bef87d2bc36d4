"""Latents as callers hold them, and the permutation that undoes it: exactly that of diffusers' own functions."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decode_client.wire import LAYOUTS

from decode_service.errors import InvalidLatentsError, InvalidRequestError
from decode_service.planning.conditioning import Conditioning, conditioning_of
from decode_service.planning.layouts import Layout, arrange, layouts
from decode_service.planning.spec import ModelSpec, Packing, StrideTiles
from decode_service.planning.temporal import CausalFrames, SingleFrame
from tests.decoding.pipelines import method

FLUX = ModelSpec(
    name="flux",
    family="autoencoder-kl",
    class_name="AutoencoderKL",
    latent_channels=16,
    output_channels=3,
    spatial_ratio=8,
    decoder_ratio=8,
    frame_rule=None,
    accepts_images=True,
    exact_axes=("height", "width"),
    tiles=StrideTiles(),
    packing=Packing((2,)),
)
FLUX2 = replace(FLUX, name="flux2", latent_channels=32, packing=Packing((2,), grid=True))
QWEN = replace(FLUX, name="qwen", frame_rule=CausalFrames(4), packing=Packing((2,), layers=True))
QWEN21 = replace(QWEN, name="qwen21", latent_channels=64, frame_rule=SingleFrame(), packing=Packing((1,)))
WAN = replace(FLUX, name="wan", frame_rule=CausalFrames(4), accepts_images=False, packing=Packing((1, 2)))
COGVIDEOX = replace(WAN, name="cogvideox", packing=None)
LTX = replace(WAN, name="ltx", latent_channels=128, spatial_ratio=32, frame_rule=CausalFrames(8), packing=Packing((1,)))


def numbered(*shape: int) -> np.ndarray:
    """Every element another number, so that one in the wrong place shows."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def arranged(spec: ModelSpec, latents: np.ndarray, **fields: Any) -> np.ndarray:
    arrangement = arrange(spec, latents.shape, Layout(**fields))
    result = arrangement.apply(latents)
    assert result.shape == arrangement.latent_shape
    return result


def refused(spec: ModelSpec, shape: tuple[int, ...], **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        arrange(spec, shape, Layout(**fields))
    assert 400 <= caught.value.status < 500
    return caught.value


class TestPacked:
    @pytest.mark.parametrize("name", ["auto", "packed"])
    @pytest.mark.parametrize(
        ("module", "pipeline"),
        [
            ("flux.pipeline_flux", "FluxPipeline"),
            ("flux.pipeline_flux_kontext", "FluxKontextPipeline"),
            ("chroma.pipeline_chroma", "ChromaPipeline"),
            ("longcat_image.pipeline_longcat_image", "LongCatImagePipeline"),
            ("ovis_image.pipeline_ovis_image", "OvisImagePipeline"),
        ],
    )
    def test_flux_and_who_packs_as_it_does(self, module: str, pipeline: str, name: str) -> None:
        packed = numbered(2, 15, 64)
        expected = method(module, pipeline, "_unpack_latents")(torch.from_numpy(packed), 48, 80, 8)
        assert expected.shape == (2, 16, 6, 10)
        np.testing.assert_array_equal(arranged(FLUX, packed, name=name, height=48, width=80), expected.numpy())

    def test_bria_counts_pixels_per_token(self) -> None:
        packed = numbered(2, 15, 64)
        unpack = method("bria.pipeline_bria", "BriaPipeline", "_unpack_latents")
        expected = unpack(torch.from_numpy(packed), 48, 80, 16)
        np.testing.assert_array_equal(arranged(FLUX, packed, height=48, width=80), expected.numpy())

    @pytest.mark.parametrize(
        ("module", "pipeline"),
        [
            ("qwenimage.pipeline_qwenimage", "QwenImagePipeline"),
            ("qwenimage.pipeline_qwenimage_edit", "QwenImageEditPipeline"),
            ("qwenimage.pipeline_qwenimage_edit_plus", "QwenImageEditPlusPipeline"),
        ],
    )
    def test_qwen_image(self, module: str, pipeline: str) -> None:
        packed = numbered(2, 15, 64)
        expected = method(module, pipeline, "_unpack_latents")(torch.from_numpy(packed), 48, 80, 8)
        assert expected.shape == (2, 16, 1, 6, 10)
        ours = arranged(QWEN, packed, height=48, width=80)
        # A picture: the pipeline drops the frame dimension after decoding.
        np.testing.assert_array_equal(ours, expected.numpy()[:, :, 0])

    def test_others_that_use_the_vae_of_qwen_image(self) -> None:
        packed = numbered(2, 15, 64)
        ours = arranged(QWEN, packed, height=48, width=80)
        nucleus = method("nucleusmoe_image.pipeline_nucleusmoe_image", "NucleusMoEImagePipeline", "_unpack_latents")
        np.testing.assert_array_equal(ours, nucleus(torch.from_numpy(packed), 48, 80, 2, 8).numpy()[:, :, 0])
        krea = method("krea2.pipeline_krea2", "Krea2Pipeline", "_unpack_latents")
        pipeline = SimpleNamespace(patch_size=2, vae_scale_factor=8)
        np.testing.assert_array_equal(ours, krea(pipeline, torch.from_numpy(packed), 48, 80).numpy()[:, :, 0])

    def test_qwen_image_layered(self) -> None:
        packed = numbered(2, 4 * 6, 64)
        unpack = method("qwenimage.pipeline_qwenimage_layered", "QwenImageLayeredPipeline", "_unpack_latents")
        unpacked = unpack(torch.from_numpy(packed), 32, 48, 3, 8)[:, :, 1:]
        expected = unpacked.permute(0, 2, 1, 3, 4).reshape(-1, 16, 1, 4, 6)
        ours = arranged(QWEN, packed, name="packed", height=32, width=48, layers=3)
        np.testing.assert_array_equal(ours, expected.numpy()[:, :, 0])

    def test_qwen_image_21_has_tokens_of_single_cells(self) -> None:
        packed = numbered(2, 24, 64)
        unpack = method("qwenimage21.pipeline_qwenimage21", "QwenImage21Pipeline", "_unpack_latents")
        expected = unpack(torch.from_numpy(packed), 32, 48, 8)
        np.testing.assert_array_equal(arranged(QWEN21, packed, height=32, width=48), expected.numpy()[:, :, 0])

    @pytest.mark.parametrize(
        ("module", "pipeline"), [("ltx.pipeline_ltx", "LTXPipeline"), ("ltx2.pipeline_ltx2", "LTX2Pipeline")]
    )
    def test_ltx(self, module: str, pipeline: str) -> None:
        packed = numbered(2, 3 * 2 * 5, 128)
        expected = method(module, pipeline, "_unpack_latents")(torch.from_numpy(packed), 3, 2, 5)
        assert expected.shape == (2, 128, 3, 2, 5)
        np.testing.assert_array_equal(arranged(LTX, packed, height=64, width=160, frames=17), expected.numpy())

    def test_flux2(self) -> None:
        latents = torch.from_numpy(numbered(2, 128, 3, 5))
        pipeline = ("flux2.pipeline_flux2", "Flux2Pipeline")
        packed = method(*pipeline, "_pack_latents")(latents)
        ids = method(*pipeline, "_prepare_latent_ids")(latents)
        unpacked = method(*pipeline, "_unpack_latents_with_ids")(packed, ids)
        expected = method(*pipeline, "_unpatchify_latents")(unpacked)
        assert packed.shape == (2, 15, 128) and expected.shape == (2, 32, 6, 10)
        np.testing.assert_array_equal(arranged(FLUX2, packed.numpy(), height=48, width=80), expected.numpy())
        for name in ("auto", "patchified"):
            np.testing.assert_array_equal(arranged(FLUX2, latents.numpy(), name=name), expected.numpy())

    @pytest.mark.parametrize(("function", "side"), [("_unpack_latents", 2), ("_unpack_latents_no_patch", 1)])
    def test_bria_fibo_packs_latents_of_wan_in_two_ways(self, function: str, side: int) -> None:
        packed = numbered(2, 15, 16 * side**2)
        height, width = 3 * 8 * side, 5 * 8 * side
        unpack = method("bria_fibo.pipeline_bria_fibo", "BriaFiboPipeline", function)
        expected = unpack(torch.from_numpy(packed), height, width, 8)
        ours = arranged(WAN, packed, name="packed", height=height, width=width, frames=1)
        np.testing.assert_array_equal(ours[:, :, 0], expected.numpy())

    @pytest.mark.parametrize(
        ("spec", "shape", "fields", "param", "words"),
        [
            (FLUX, (1, 15, 64), {}, "height", "height is needed"),
            (FLUX, (1, 15, 64), {"height": 48}, "width", "width is needed"),
            (FLUX, (1, 15, 64), {"height": 48, "width": 81}, "width", "80 or 96 would be"),
            (FLUX, (1, 15, 64), {"height": 8, "width": 80}, "height", "16 would be"),
            (FLUX, (1, 16, 64), {"height": 48, "width": 80}, "latents.shape", "3 x 5 = 15 tokens of 16 px, got 16"),
            (FLUX, (1, 15, 48), {"height": 48, "width": 80, "name": "packed"}, "latents.shape", "(B,tokens,64)"),
            (FLUX, (15, 64), {"height": 48, "width": 80, "name": "packed"}, "latents.shape", "(B,tokens,64)"),
            (FLUX, (1, 15, 64), {"height": 48, "width": 80, "frames": 5}, "frames", "pictures of 1 frame"),
            (FLUX, (1, 15, 64), {"height": 48, "width": 80, "layers": 2}, "layers", "several pictures"),
            (QWEN, (1, 15, 64), {"height": 48, "width": 80, "layers": 2}, "latents.shape", "45 tokens"),
            (LTX, (1, 30, 128), {"height": 64, "width": 160}, "frames", "frames is needed"),
            (LTX, (1, 30, 128), {"height": 64, "width": 160, "frames": 16}, "frames", "9 or 17 would be"),
            (LTX, (1, 30, 128), {"height": 64, "width": 160, "frames": 25}, "latents.shape", "4 x 2 x 5 = 40 tokens"),
            (WAN, (1, 30, 128), {"height": 64, "width": 160}, "latents.shape", "packed (B,tokens,16 or 64)"),
            (COGVIDEOX, (1, 30, 64), {"name": "packed"}, "layout", "it takes auto, BCTHW, CTHW, BTCHW or TCHW"),
        ],
    )
    def test_what_does_not_fit_says_what_would(
        self, spec: ModelSpec, shape: tuple[int, ...], fields: dict[str, Any], param: str, words: str
    ) -> None:
        error = refused(spec, shape, **fields)
        assert error.param == param
        assert words in error.message

    def test_an_absurd_number_of_frames_is_refused_at_once(self) -> None:
        began = time.perf_counter()
        refused(LTX, (1, 30, 128), height=64, width=160, frames=2**31 - 2)
        assert time.perf_counter() - began < 1.0


class TestPlain:
    def test_frames_before_channels_are_taken_where_they_are_said_to_be(self) -> None:
        latents = numbered(2, 3, 16, 4, 5)
        for spec in (COGVIDEOX, QWEN):
            np.testing.assert_array_equal(arranged(spec, latents, name="BTCHW"), latents.swapaxes(1, 2))
            np.testing.assert_array_equal(arranged(spec, latents[0], name="TCHW"), latents[:1].swapaxes(1, 2))

    def test_they_are_never_guessed(self) -> None:
        """A video of 16 latent frames has (B,16,16,H,W) in both layouts: ``auto`` is (B,C,T,H,W), always."""
        square = numbered(1, 16, 16, 4, 5)
        np.testing.assert_array_equal(arranged(COGVIDEOX, square), square)
        np.testing.assert_array_equal(arranged(COGVIDEOX, square, name="BTCHW"), square.swapaxes(1, 2))
        # Not rearranged, so that ``validate_latents`` refuses it.
        assert arrange(COGVIDEOX, (1, 3, 16, 4, 5), Layout(frames=9)).latent_shape == (1, 3, 16, 4, 5)

    @pytest.mark.parametrize("name", ["auto", "named"])
    def test_latents_without_a_batch_become_a_batch_of_one(self, name: str) -> None:
        picture, video = numbered(16, 4, 5), numbered(16, 3, 4, 5)
        for spec, latents, layout in (
            (FLUX, picture, "CHW"),
            (QWEN, picture, "CHW"),
            (QWEN, video, "CTHW"),
            (WAN, video, "CTHW"),
        ):
            ours = arranged(spec, latents, name="auto" if name == "auto" else layout)
            np.testing.assert_array_equal(ours, latents[None])

    def test_whole_batches_are_left_as_they_are_and_not_copied(self) -> None:
        for spec, latents in ((FLUX, numbered(2, 16, 4, 5)), (WAN, numbered(2, 16, 3, 4, 5))):
            ours = arranged(spec, latents)
            np.testing.assert_array_equal(ours, latents)
            assert np.shares_memory(ours, latents)

    def test_a_picture_that_could_be_a_square_of_tokens_is_told_by_the_pixels(self) -> None:
        """(16,64,64): a picture of 512 x 512 px, or 16 packed ones of 128 x 128 px."""
        latents = numbered(16, 64, 64)
        np.testing.assert_array_equal(arranged(FLUX, latents), latents[None])
        np.testing.assert_array_equal(arranged(FLUX, latents, height=512, width=512), latents[None])
        assert arranged(FLUX, latents, height=128, width=128).shape == (16, 16, 16, 16)
        assert arranged(FLUX, latents, name="CHW", height=512).shape == (1, 16, 64, 64)

    def test_a_batch_of_sixteen_pictures_of_a_video_model_may_be_a_video(self) -> None:
        error = refused(QWEN, (16, 16, 4, 5))
        assert error.param == "layout" and "layout BCHW, CTHW or TCHW" in error.message
        assert arranged(QWEN, numbered(16, 16, 4, 5), name="BCHW").shape == (16, 16, 4, 5)
        assert arranged(QWEN, numbered(16, 16, 4, 5), name="CTHW").shape == (1, 16, 16, 4, 5)
        # An image model has no frames, and one of single frames takes no sixteen: one reading is left.
        assert arranged(FLUX, numbered(16, 16, 4, 5)).shape == (16, 16, 4, 5)
        assert arranged(replace(QWEN, frame_rule=SingleFrame()), numbered(16, 16, 4, 5)).shape == (16, 16, 4, 5)

    def test_frames_or_channels_first_of_a_video_model_is_not_guessed(self) -> None:
        error = refused(WAN, (16, 16, 4, 5))
        assert error.param == "layout" and "CTHW or TCHW" in error.message

    @pytest.mark.parametrize(
        ("spec", "shape", "fields", "param", "words"),
        [
            (WAN, (7, 16, 4, 5), {}, "latents.shape", "layout TCHW"),
            (WAN, (7, 15, 4, 5), {}, "latents.shape", "(B,C,T,H,W) latents with 16 channels"),
            (WAN, (16, 4, 5), {}, "latents.shape", "(B,C,T,H,W)"),
            (WAN, (16, 4, 5), {"name": "CHW"}, "layout", "does not take layout CHW"),
            (FLUX, (4, 4, 5), {}, "latents.shape", "4-D (B,C,H,W), 3-D (C,H,W) or packed (B,tokens,64)"),
            (FLUX, (1, 16, 4, 5), {"name": "BCTHW"}, "layout", "it takes auto, BCHW, CHW or packed"),
            (FLUX, (1, 16, 4, 5), {"name": "nchw"}, "layout", "one of auto, BCHW"),
            (FLUX, (1, 16, 4, 5), {"name": "CHW"}, "latents.shape", "layout CHW has 3 dimensions, got 4"),
            (FLUX, (1, 4, 4, 5), {"name": "BCHW"}, "latents.shape", "has 4 (dimension 1)"),
            (COGVIDEOX, (1, 16, 3, 4, 5), {"name": "BTCHW"}, "latents.shape", "has 3 (dimension 2)"),
            (FLUX, (1, 16, 4, 5), {"height": 33}, "height", "decode to height 32"),
            (FLUX, (1, 16, 4, 5), {"width": 4}, "width", "decode to width 40"),
            (FLUX, (1, 16, 4, 5), {"frames": 2}, "frames", "decode to frames 1"),
            (WAN, (1, 16, 3, 4, 5), {"frames": 3}, "frames", "decode to frames 9"),
            (QWEN, (1, 16, 4, 5), {"layers": 1}, "layers", "several pictures"),
            (FLUX2, (1, 32, 4, 5), {"name": "patchified"}, "latents.shape", "(B,128,rows,columns)"),
            (FLUX, (1, 64, 4, 5), {"name": "patchified"}, "layout", "does not take layout patchified"),
        ],
    )
    def test_what_does_not_fit_says_what_would(
        self, spec: ModelSpec, shape: tuple[int, ...], fields: dict[str, Any], param: str, words: str
    ) -> None:
        error = refused(spec, shape, **fields)
        assert error.param == param
        assert words in error.message

    def test_what_only_the_model_can_judge_is_left_to_it(self) -> None:
        for shape in ((1, 4, 4, 5), (1, 16, 1, 4, 5), (16,), (2, 2, 2, 2, 2, 2)):
            assert arrange(FLUX, shape, Layout()).latent_shape == shape


def test_every_layout_of_the_wire_is_taken_by_some_model_and_no_other() -> None:
    specs = (FLUX, FLUX2, QWEN, QWEN21, WAN, COGVIDEOX, LTX)
    assert {"auto"}.union(*(layouts(spec) for spec in specs)) == set(LAYOUTS)


def test_an_arrangement_travels() -> None:
    arrangement = arrange(QWEN, (1, 24, 64), Layout("packed", 32, 48, layers=3))
    assert pickle.loads(pickle.dumps(arrangement)) == arrangement


class TestConditioning:
    MODEL = replace(LTX, default_timestep=0.0)

    def test_what_is_left_out_is_what_the_pipeline_takes(self) -> None:
        assert conditioning_of(self.MODEL, None, None, None) == Conditioning(0.0, 0.0, 0)
        assert conditioning_of(self.MODEL, 0.05, None, 3) == Conditioning(0.05, 0.05, 3)
        assert conditioning_of(self.MODEL, 0.05, 0.0, None) == Conditioning(0.05, 0.0, 0)
        assert conditioning_of(self.MODEL, None, 0.1, None) == Conditioning(0.0, 0.1, 0)
        assert conditioning_of(LTX, None, None, None) is None

    @pytest.mark.parametrize(
        ("given", "param"),
        [((0.0, None, None), "timestep"), ((None, 0.1, None), "noise_scale"), ((None, None, 0), "seed")],
    )
    def test_a_decoder_that_takes_none_says_so(self, given: tuple[Any, ...], param: str) -> None:
        with pytest.raises(InvalidRequestError, match="no timestep conditioning") as caught:
            conditioning_of(LTX, *given)
        assert caught.value.param == param

    @pytest.mark.parametrize(
        ("given", "param"),
        [((1.5, None, None), "timestep"), ((None, float("nan"), None), "noise_scale"), ((None, None, 2**64), "seed")],
    )
    def test_values_out_of_range_are_refused(self, given: tuple[Any, ...], param: str) -> None:
        with pytest.raises(InvalidRequestError, match="must be from 0 to") as caught:
            conditioning_of(self.MODEL, *given)
        assert caught.value.param == param


def test_errors_about_the_shape_are_errors_about_latents() -> None:
    assert isinstance(refused(FLUX, (1, 16, 64), height=48, width=80), InvalidLatentsError)
    assert not isinstance(refused(FLUX, (1, 15, 64), height=48), InvalidLatentsError)
