"""What ``decode`` takes, and what can be made of what it returns."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_client import DecodeClient, DecodeResult, WireTensor
from decode_client.inputs import latents_tensor
from decode_client.wire import bfloat16_to_float32, float32_to_bfloat16, unpack_request
from PIL import Image
from safetensors.torch import load_file, save_file

BASE = torch.linspace(-3, 3, 2 * 8 * 6 * 10).reshape(2, 8, 6, 10)


def tensor_result(array: Any, dtype: str | None = None, range: str = "unit") -> DecodeResult:
    pixels = WireTensor.from_array(array, dtype)
    return DecodeResult(format="tensor", content_type="application/msgpack", body=b"", pixels=pixels, range=range)


def file_result(format: str, body: bytes) -> DecodeResult:
    return DecodeResult(format=format, content_type="", body=body, pixels=None)


def picture(shape: tuple[int, ...], seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def safetensors_bytes(header: dict[str, Any]) -> bytes:
    packed = json.dumps(header).encode()
    return len(packed).to_bytes(8, "little") + packed + bytes(16)


class TestTorchInputs:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(
        "view",
        [
            lambda t: t,
            lambda t: t[:, ::2, 1:, ::3],
            lambda t: t.permute(0, 1, 3, 2),
            lambda t: t.to(memory_format=torch.channels_last),
            lambda t: t[:1].expand(3, -1, -1, -1),
            lambda t: t.clone().requires_grad_(),
            lambda t: torch.nn.Parameter(t.clone()),
        ],
        ids=["plain", "strided", "transposed", "channels last", "expanded", "requires grad", "parameter"],
    )
    def test_of_any_strides_and_dtype_keep_their_values(self, dtype: torch.dtype, view: Any) -> None:
        tensor = view(BASE.to(dtype))
        wire = latents_tensor(tensor)
        assert wire.shape == tuple(tensor.shape)
        assert wire.dtype == str(dtype).removeprefix("torch.")
        assert np.array_equal(wire.float32(), tensor.detach().float().numpy())

    def test_of_other_dtypes_are_told_the_conversion(self) -> None:
        with pytest.raises(ValueError, match=r"\.to\(torch\.float32\)"):
            latents_tensor(BASE.double())

    def test_bfloat16_reaches_the_server_bit_for_bit(self, service: Any) -> None:
        latents = BASE.to(torch.bfloat16)[:, 1:5].transpose(2, 3)
        with DecodeClient(service.url) as client:
            result = client.decode(latents, dtype="bfloat16")
        sent = unpack_request(service.seen[0].body).latents
        assert sent.dtype == "bfloat16"
        assert torch.equal(result.torch(), latents[:, :3])


class TestNumpyInputs:
    def test_of_any_strides_keep_their_values(self) -> None:
        array = BASE.numpy()[:, ::-2].transpose(0, 1, 3, 2)
        assert np.array_equal(latents_tensor(array).carrier(), array)

    def test_big_endian(self) -> None:
        assert np.array_equal(latents_tensor(BASE.numpy().astype(">f4")).carrier(), BASE.numpy())

    @pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, np.uint16, object])
    def test_of_other_dtypes_are_refused(self, dtype: Any) -> None:
        with pytest.raises(ValueError):
            latents_tensor(np.ones((1, 4, 2, 2), dtype))

    def test_empty_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 1, got 0"):
            latents_tensor(np.zeros((0, 4, 2, 2), np.float32))


class TestSafetensorsInputs:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_the_only_tensor_is_taken(self, tmp_path: Path, dtype: torch.dtype) -> None:
        save_file({"anything": BASE.to(dtype)}, tmp_path / "a.safetensors", metadata={"note": "x"})
        wire = latents_tensor(tmp_path / "a.safetensors")
        assert np.array_equal(wire.float32(), BASE.to(dtype).float().numpy())
        assert latents_tensor(str(tmp_path / "a.safetensors")).dtype == wire.dtype

    def test_the_one_called_latents_is_taken_of_several(self, tmp_path: Path) -> None:
        save_file({"a": BASE.half() * 2, "latents": BASE.half(), "z": BASE}, tmp_path / "a.safetensors")
        assert np.array_equal(latents_tensor(tmp_path / "a.safetensors").carrier(), BASE.half().numpy())

    def test_several_of_other_names_are_listed(self, tmp_path: Path) -> None:
        save_file({"one": BASE, "two": BASE.clone()}, tmp_path / "a.safetensors")
        with pytest.raises(ValueError, match="it holds: one, two"):
            latents_tensor(tmp_path / "a.safetensors")

    def test_other_dtypes_are_refused(self, tmp_path: Path) -> None:
        save_file({"latents": BASE.double()}, tmp_path / "a.safetensors")
        with pytest.raises(ValueError, match="F64"):
            latents_tensor(tmp_path / "a.safetensors")
        save_file({"latents": BASE.to(torch.uint8)}, tmp_path / "a.safetensors")
        with pytest.raises(ValueError, match="uint8"):
            latents_tensor(tmp_path / "a.safetensors")

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\x02\0\0\0",
            b"\xff" * 16,
            b"\x04\0\0\0\0\0\0\0nope",
            b"\x02\0\0\0\0\0\0\0[]",
            b"\x02\0\0\0\0\0\0\0{}",
            *(
                safetensors_bytes({"latents": entry})
                for entry in (
                    3,
                    {"dtype": "F32", "shape": [4]},
                    {"dtype": "F32", "shape": [4], "data_offsets": [0, 17]},
                    {"dtype": "F32", "shape": [4], "data_offsets": [8, 4]},
                    {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]},
                    {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]},
                    {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]},
                    {"dtype": "F32", "shape": [4], "data_offsets": [0.0, True]},
                )
            ),
        ],
    )
    def test_files_that_are_wrong_are_refused(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "a.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.safetensors"):
            latents_tensor(tmp_path / "a.safetensors")

    def test_missing_files_raise_as_files_do(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            latents_tensor(tmp_path / "nowhere.safetensors")


class TestArrays:
    def test_uint8_is_a_read_only_view(self) -> None:
        array = picture((1, 4, 5, 3))
        result = tensor_result(array)
        assert np.array_equal(result.numpy(), array)
        assert np.shares_memory(result.numpy(), array)
        assert not result.numpy().flags.writeable

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_floats_keep_their_dtype_and_are_aligned(self, dtype: str) -> None:
        values = BASE.numpy()[:, :3].astype(dtype)
        data = memoryview(b"x" + values.tobytes())[1:]
        result = DecodeResult(format="tensor", content_type="", body=b"", pixels=WireTensor(dtype, values.shape, data))
        assert result.numpy().dtype == dtype
        assert result.numpy().flags.aligned
        assert np.array_equal(result.numpy(), values)
        assert np.array_equal(result.torch().numpy(), values)

    def test_bfloat16_without_ml_dtypes_is_float32(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        bits = float32_to_bfloat16(BASE.numpy())
        assert np.array_equal(tensor_result(bits, "bfloat16").numpy(), bfloat16_to_float32(bits))

    def test_bfloat16_with_ml_dtypes_is_its_own(self) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        bits = float32_to_bfloat16(BASE.numpy())
        pixels = tensor_result(bits, "bfloat16").numpy()
        assert pixels.dtype == ml_dtypes.bfloat16
        assert np.array_equal(pixels.astype(np.float32), bfloat16_to_float32(bits))

    def test_torch_has_its_own_memory(self) -> None:
        array = picture((1, 4, 5, 3))
        tensor = tensor_result(array).torch("cpu")
        assert np.array_equal(tensor.numpy(), array)
        tensor += 1
        assert not np.array_equal(tensor.numpy(), array)

    def test_of_image_files_are_their_pixels(self) -> None:
        array = picture((4, 5, 3))
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, "png")
        assert np.array_equal(file_result("png", buffer.getvalue()).numpy(), array[None])

    def test_of_films_are_refused(self) -> None:
        for method in ("numpy", "torch", "pil"):
            with pytest.raises(ValueError, match='format="tensor"'):
                getattr(file_result("mp4", b"x"), method)()


class TestPictures:
    def test_one_is_one_and_several_are_a_list(self) -> None:
        one, film = picture((1, 4, 5, 3)), picture((2, 3, 4, 5, 3))
        assert np.array_equal(np.asarray(tensor_result(one).pil()), one[0])
        assert len(tensor_result(one).images()) == 1
        frames = tensor_result(film).pil()
        assert len(frames) == 6
        assert np.array_equal(np.asarray(frames[4]), film[1, 1])

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_floats_are_scaled_from_minus_one_to_one(self, dtype: str) -> None:
        values = np.array([-2, -1, -0.5, 0, 0.5, 1, 2], np.float32).reshape(1, 1, 1, 7).repeat(3, 1)
        array = float32_to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)
        image = tensor_result(array, dtype).pil()
        assert np.asarray(image)[0, :, 0].tolist() == [0, 0, 64, 128, 191, 255, 255]

    def test_films_of_floats_keep_the_order_of_frames(self) -> None:
        film = np.linspace(-1, 1, 2 * 3 * 4, dtype=np.float32).reshape(2, 1, 3, 2, 2).repeat(3, 1)
        frames = tensor_result(film).images()
        assert len(frames) == 6
        assert np.asarray(frames[5])[1, 1].tolist() == [255] * 3
        assert np.asarray(frames[0])[0, 0].tolist() == [0] * 3

    @pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
    def test_channels_choose_the_mode(self, channels: int, mode: str) -> None:
        assert tensor_result(picture((1, 4, 5, channels))).pil().mode == mode

    def test_what_has_no_scale_or_channels_is_refused(self) -> None:
        with pytest.raises(ValueError, match="channels"):
            tensor_result(picture((1, 4, 5, 2))).pil()
        with pytest.raises(ValueError, match="range"):
            tensor_result(BASE.numpy()[:, :3].copy(), range="model").pil()

    def test_without_pillow_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "PIL.Image", None)
        with pytest.raises(ImportError, match=r"decode-client\[images\]"):
            tensor_result(picture((1, 4, 5, 3))).pil()


class TestSaving:
    def test_tensors_as_npy(self, tmp_path: Path) -> None:
        array = BASE.numpy()[:, :3].copy()
        assert np.array_equal(np.load(tensor_result(array).save(tmp_path / "a.npy")), array)
        bits = float32_to_bfloat16(array)
        assert np.array_equal(
            np.load(tensor_result(bits, "bfloat16").save(tmp_path / "b.npy")), bfloat16_to_float32(bits)
        )

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
    def test_tensors_as_safetensors_that_others_read(self, tmp_path: Path, dtype: torch.dtype) -> None:
        pixels = (BASE[:, :3].abs() * 40).to(dtype)
        name = str(dtype).removeprefix("torch.")
        data = pixels.contiguous().view(torch.uint8).numpy().tobytes()
        result = DecodeResult(
            format="tensor",
            content_type="",
            body=b"",
            pixels=WireTensor(name, tuple(pixels.shape), data),
            model="demo",
        )
        assert torch.equal(load_file(result.save(tmp_path / "a.safetensors"))["pixels"], pixels)

    @pytest.mark.parametrize("suffix", [".png", ".jpg", ".jpeg", ".webp", ".PNG"])
    def test_one_picture_as_an_image(self, tmp_path: Path, suffix: str) -> None:
        array = picture((1, 8, 8, 3))
        path = tensor_result(array).save(str(tmp_path / f"a{suffix}"))
        with Image.open(path) as image:
            assert image.size == (8, 8)
            assert suffix.lower() != ".png" or np.array_equal(np.asarray(image), array[0])

    @pytest.mark.parametrize(
        ("format", "suffixes"), [("png", ".png"), ("jpeg", ".jpg .JPEG"), ("webp", ".webp"), ("mp4", ".mp4")]
    )
    def test_files_under_their_own_suffix_only(self, tmp_path: Path, format: str, suffixes: str) -> None:
        for suffix in suffixes.split():
            assert file_result(format, b"bytes").save(tmp_path / f"a{suffix}").read_bytes() == b"bytes"
        for suffix in (".npy", ".gif", "", ".png" if format != "png" else ".jpg"):
            with pytest.raises(ValueError, match=f"the reply is {format}"):
                file_result(format, b"bytes").save(tmp_path / f"b{suffix}")
        assert not list(tmp_path.glob("b*"))

    @pytest.mark.parametrize(
        ("name", "words"),
        [("a.mp4", 'format="mp4"'), ("a.gif", "not as .gif"), ("a", "without a suffix"), ("a.png", "there are 6")],
    )
    def test_tensors_under_a_suffix_that_cannot_hold_them(self, tmp_path: Path, name: str, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            tensor_result(picture((2, 3, 4, 5, 3))).save(tmp_path / name)
        assert not list(tmp_path.iterdir())


def test_a_result_says_whether_its_model_is_tested():
    def result(plan):
        return DecodeResult(format="png", content_type="image/png", body=b"", pixels=None, plan=plan)

    assert result({"mode": "direct"}).tested and result({"tested": True}).tested and result(None).tested
    assert not result({"tested": False}).tested
