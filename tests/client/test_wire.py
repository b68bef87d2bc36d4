"""The wire format: what is packed comes back, and whatever else arrives is refused with words that help."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from decode_client.wire import (
    DTYPES,
    LATENT_DTYPES,
    LAYOUTS,
    MODES,
    PIXEL_DTYPES,
    DecodeRequest,
    OutputSpec,
    WireError,
    WireTensor,
    bfloat16_to_float32,
    float32_to_bfloat16,
    itemsize,
    pack_request,
    tensor_reply_prefix,
    unpack_request,
    unpack_tensor_reply,
)
from hypothesis import given, settings
from hypothesis import strategies as st

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple)
fast = settings(max_examples=60, deadline=None)


@st.composite
def tensors(draw: st.DrawFn, dtypes: tuple[str, ...] = LATENT_DTYPES) -> WireTensor:
    dtype, shape = draw(st.sampled_from(dtypes)), draw(shapes)
    size = int(np.prod(shape)) * itemsize(dtype)
    return WireTensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


@st.composite
def outputs(draw: st.DrawFn) -> OutputSpec:
    name = draw(st.sampled_from(["tensor", "png", "jpeg", "webp", "mp4"]))
    if name == "tensor":
        dtype = draw(st.sampled_from(PIXEL_DTYPES))
        return OutputSpec(dtype=dtype, range="unit" if dtype == "uint8" else draw(st.sampled_from(["unit", "model"])))
    fps = draw(st.none() | st.floats(0.1, 240)) if name == "mp4" else None
    quality = draw(st.none() | st.integers(1, 100)) if name != "png" else None
    return OutputSpec(format=name, fps=fps, quality=quality)


@st.composite
def requests(draw: st.DrawFn) -> DecodeRequest:
    return DecodeRequest(
        latents=draw(tensors()),
        model=draw(st.none() | st.text(min_size=1, max_size=30)),
        layout=draw(st.sampled_from(LAYOUTS)),
        **{name: draw(st.none() | st.integers(1, 2**31 - 1)) for name in ("height", "width", "frames", "layers")},
        denormalize=draw(st.booleans()),
        timestep=draw(st.none() | st.floats(0, 1)),
        noise_scale=draw(st.none() | st.floats(0, 1)),
        seed=draw(st.none() | st.integers(0, 2**64 - 1)),
        mode=draw(st.sampled_from(MODES)),
        strict=draw(st.none() | st.booleans()),
        collect=draw(st.none() | st.sampled_from(["shards", "rank0", "broadcast"])),
        chunk=draw(st.none() | st.integers(1, 1000)),
        output=draw(outputs()),
        deadline_ms=draw(st.none() | st.floats(0.5, 1e9)),
    )


def small_request(**changes: Any) -> dict[str, Any]:
    latents = {"dtype": "float32", "shape": [1, 4, 2, 2], "data": bytes(64)}
    return {"latents": latents, **changes}


def with_latents(**changes: Any) -> dict[str, Any]:
    return small_request(latents={**small_request()["latents"], **changes})


def refused(body: Any) -> WireError:
    packed = body if isinstance(body, bytes) else msgpack.packb(body)
    with pytest.raises(WireError) as caught:
        unpack_request(packed)
    return caught.value


class TestRequests:
    @fast
    @given(requests())
    def test_come_back_as_they_were_packed(self, request_: DecodeRequest) -> None:
        again = unpack_request(pack_request(request_))
        for field in dataclasses.fields(DecodeRequest):
            if field.name != "latents":
                assert getattr(again, field.name) == getattr(request_, field.name), field.name
        assert (again.latents.dtype, again.latents.shape) == (request_.latents.dtype, request_.latents.shape)
        assert bytes(again.latents.data) == bytes(request_.latents.data)

    @fast
    @given(requests(), st.randoms())
    def test_are_plain_msgpack_in_any_order_of_keys(self, request_: DecodeRequest, random: Any) -> None:
        plain = msgpack.unpackb(pack_request(request_))
        names = list(plain)
        random.shuffle(names)
        parts = list(plain["latents"])
        random.shuffle(parts)
        plain["latents"] = {part: plain["latents"][part] for part in parts}
        again = unpack_request(msgpack.packb({name: plain[name] for name in names}))
        assert bytes(again.latents.data) == bytes(request_.latents.data)
        assert again.output == request_.output

    def test_take_defaults_for_what_is_absent_or_nil(self) -> None:
        for request in (
            unpack_request(msgpack.packb(small_request())),
            unpack_request(msgpack.packb(small_request(model=None, mode=None, output=None, deadline_ms=None))),
        ):
            assert (request.model, request.denormalize, request.mode, request.strict) == (None, False, "auto", None)
            assert request.output == OutputSpec("tensor", "uint8", None, None, "unit")

    def test_take_numpy_numbers(self) -> None:
        latents = WireTensor("float32", (1, 4, 2, 2), bytes(64))
        request = DecodeRequest(latents, height=np.int64(64), timestep=np.float32(0.5), seed=np.uint64(2**64 - 1))
        again = unpack_request(pack_request(request))
        assert (again.height, again.timestep, again.seed) == (64, 0.5, 2**64 - 1)

    def test_latents_are_a_view_into_the_body(self) -> None:
        body = bytearray(msgpack.packb(small_request()))
        latents = unpack_request(body).latents
        assert not latents.carrier().flags.writeable
        body[-1] = 0x40
        assert latents.carrier()[0, 3, 1, 1] == 2.0

    @pytest.mark.parametrize("size", [0xFF, 0x100, 0xFFFF, 0x10000])
    def test_of_every_bin_header_size(self, size: int) -> None:
        latents = WireTensor.from_array(np.arange(size, dtype=np.float16)[None])
        body = pack_request(DecodeRequest(latents))
        assert msgpack.unpackb(body)["latents"]["data"] == bytes(latents.data)
        assert unpack_request(memoryview(body)).latents.shape == (1, size)


class TestMalformedBodies:
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"\xc1",
            b"\x90",
            b"\xc0",
            b"{}",
            b"\xdf\xff\xff\xff\xff",
            b"\xde\x00",
            msgpack.packb(small_request()) + b"\0",
        ],
        ids=["empty", "reserved", "list", "nil", "json", "endless map", "half a header", "trailing"],
    )
    def test_are_refused(self, body: bytes) -> None:
        assert refused(body).malformed

    def test_are_refused_wherever_they_are_cut(self) -> None:
        whole = msgpack.packb(small_request(model="demo", chunk=4, output={"format": "mp4", "fps": 24}))
        for end in range(len(whole)):
            assert refused(whole[:end]).malformed, end

    @fast
    @given(st.binary(max_size=200))
    def test_never_raise_anything_else(self, body: bytes) -> None:
        refused(body)

    @fast
    @given(st.integers(0, 90), st.integers(0, 255))
    def test_of_one_changed_byte_never_raise_anything_else(self, position: int, value: int) -> None:
        body = bytearray(msgpack.packb(small_request(model="demo", strict=True)))
        body[position % len(body)] = value
        with contextlib.suppress(WireError):
            unpack_request(body)

    def test_duplicate_keys(self) -> None:
        key = msgpack.packb("mode") + msgpack.packb("tile")
        assert "twice" in str(refused(b"\x82" + key + key))

    def test_keys_that_are_not_text(self) -> None:
        assert "text" in str(refused({1: 2}))

    def test_extension_types(self) -> None:
        assert "extension" in str(refused(small_request(model=msgpack.ExtType(5, b"x"))))

    def test_deep_nesting(self) -> None:
        assert refused(b"\x81" + msgpack.packb("model") + b"\x91" * 3000 + b"\xc0").malformed

    def test_cannot_make_a_small_body_a_large_tree(self) -> None:
        bomb = b"\x82" + msgpack.packb("model") + b"\xdd" + struct.pack(">I", 2_000_000) + b"\x90" * 2_000_000
        tracemalloc.start()
        try:
            error = refused(bomb)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        assert error.param == "model"

    def test_do_not_take_the_memory_that_a_header_claims(self) -> None:
        head = msgpack.packb(small_request())[: -66 - 1] + b"\xc6\xff\xff\xff\xff"
        assert refused(head).malformed


class TestFields:
    @pytest.mark.parametrize(
        ("body", "param", "words"),
        [
            ({"model": "demo"}, "latents", "missing"),
            (small_request(latents=None), "latents", "missing"),
            (small_request(latents=b"123"), "latents", "map of dtype, shape and data"),
            (small_request(latent=1), "latent", "did you mean latents?"),
            (small_request(Mode="tile"), "Mode", "did you mean mode?"),
            (small_request(zzz=1), "zzz", "fields are model, latents"),
            (small_request(model=""), "model", "1 to 256 characters"),
            (small_request(model=7), "model", "an integer"),
            (small_request(model="x" * 300), "model", "1 to 256 characters"),
            (small_request(model="x" * 100_000), "model", "longer than"),
            (small_request(denormalize=1), "denormalize", "true or false"),
            (small_request(denormalize="true"), "denormalize", "true or false"),
            (small_request(layout="bcthw"), "layout", "did you mean BCTHW?"),
            (small_request(layout="nhwc"), "layout", "auto, BCHW, CHW"),
            (small_request(layout=["packed"]), "layout", "got a list"),
            (small_request(hieght=64), "hieght", "did you mean height?"),
            (small_request(height=0), "height", "at least 1"),
            (small_request(width=64.0), "width", "integer"),
            (small_request(frames=True), "frames", "got True"),
            (small_request(layers=2**31), "layers", "2**31"),
            (small_request(timestep=1.5), "timestep", "from 0 to 1, got 1.5"),
            (small_request(timestep=-0.1), "timestep", "from 0 to 1"),
            (small_request(timestep=float("nan")), "timestep", "from 0 to 1"),
            (small_request(timestep=True), "timestep", "got True"),
            (small_request(noise_scale="0.1"), "noise_scale", "from 0 to 1"),
            (small_request(seed=-1), "seed", "0 to 2**64 - 1, got -1"),
            (small_request(seed=0.0), "seed", "integer"),
            (small_request(seed=False), "seed", "got False"),
            (small_request(strict=0), "strict", "true or false"),
            (small_request(mode="tiles"), "mode", "did you mean tile?"),
            (small_request(mode=["tile"]), "mode", "got a list"),
            (small_request(collect="rank-0"), "collect", "did you mean rank0?"),
            (small_request(chunk=0), "chunk", "at least 1"),
            (small_request(chunk=True), "chunk", "got True"),
            (small_request(chunk=1.0), "chunk", "integer"),
            (small_request(chunk=2**40), "chunk", "2**31"),
            (small_request(deadline_ms=0), "deadline_ms", "above 0"),
            (small_request(deadline_ms=-5.0), "deadline_ms", "above 0"),
            (small_request(deadline_ms=float("nan")), "deadline_ms", "finite"),
            (small_request(deadline_ms=float("inf")), "deadline_ms", "finite"),
            (small_request(deadline_ms=True), "deadline_ms", "got True"),
            (small_request(output="png"), "output", "map of format"),
            (small_request(output={"format": "jpg"}), "output.format", "did you mean jpeg?"),
            (small_request(output={"fmt": "png"}), "output.fmt", "format"),
            (small_request(output={"dtype": "float64"}), "output.dtype", "uint8, float16, bfloat16 or float32"),
            (small_request(output={"format": "png", "dtype": "float32"}), "output.dtype", "8-bit"),
            (small_request(output={"format": "png", "fps": 24}), "output.fps", "mp4"),
            (small_request(output={"format": "mp4", "fps": 0}), "output.fps", "above 0"),
            (small_request(output={"format": "jpeg", "quality": 101}), "output.quality", "1 to 100"),
            (small_request(output={"format": "jpeg", "quality": True}), "output.quality", "integer"),
            (small_request(output={"quality": 90}), "output.quality", "jpeg, webp or mp4"),
            (small_request(output={"range": "model"}), "output.range", "float dtype"),
            (with_latents(dtype="float64"), "latents.dtype", "float32, float16 or bfloat16, got 'float64'"),
            (with_latents(dtype="uint8"), "latents.dtype", "float32, float16 or bfloat16"),
            (with_latents(dtype=["float32"]), "latents.dtype", "got a list"),
            (with_latents(shape=[1, 4, 2]), "latents.data", "takes 32 bytes, got 64"),
            (with_latents(shape=[2**40, 2**40, 2**40]), "latents.data", "takes"),
            (with_latents(shape=[1, 4, 0, 2]), "latents.shape", "at least 1, got 0"),
            (with_latents(shape=[1, -4, 2, -2]), "latents.shape", "at least 1, got -4"),
            (with_latents(shape=[True, 4, 2, 2]), "latents.shape", "got True"),
            (with_latents(shape=[1, 4, 2.0, 2]), "latents.shape", "got 2.0"),
            (with_latents(shape="1,4,2,2"), "latents.shape", "list of integers"),
            (with_latents(shape=[]), "latents.shape", "1 to 8 dimensions"),
            (with_latents(shape=[1] * 9), "latents.shape", "1 to 8 dimensions"),
            (with_latents(data="text"), "latents.data", "must be bytes"),
            (with_latents(data=[0] * 64), "latents.data", "must be bytes"),
            (with_latents(data=b""), "latents.data", "takes 64 bytes, got 0"),
            (with_latents(layout="C"), "latents.layout", "dtype, shape, data"),
            (small_request(latents={"dtype": "float32", "shape": [1]}), "latents.data", "data is missing"),
        ],
    )
    def test_that_are_wrong_are_named_with_what_would_be_right(self, body: Any, param: str, words: str) -> None:
        error = refused(body)
        assert error.param == param
        assert words in str(error)
        assert not error.malformed

    def test_messages_stay_short_whatever_was_sent(self) -> None:
        for body in (small_request(mode="x" * 3000), small_request(**{"y" * 3000: 1}), with_latents(dtype="z" * 3000)):
            error = refused(body)
            assert len(str(error)) < 300
            assert len(error.param or "") < 80


class TestReplies:
    @fast
    @given(tensors(PIXEL_DTYPES), st.dictionaries(st.sampled_from(["plan", "model", "timings"]), st.text(max_size=9)))
    def test_prefix_and_bytes_are_what_packb_would_write(self, pixels: WireTensor, fields: dict[str, Any]) -> None:
        prefix = tensor_reply_prefix(pixels.dtype, pixels.shape, pixels.nbytes, fields)
        data = bytes(pixels.data)
        whole = {**fields, "pixels": {"dtype": pixels.dtype, "shape": list(pixels.shape), "data": data}}
        assert prefix + data == msgpack.packb(whole)
        again = unpack_tensor_reply(prefix + data)
        assert bytes(again.pop("pixels").data) == data
        assert again == fields

    @pytest.mark.parametrize("size", [1, 255, 256, 65535, 65536, 2**32 - 1])
    def test_prefix_has_the_header_of_every_size(self, size: int) -> None:
        prefix = tensor_reply_prefix("uint8", (size,), size, {})
        marker, width = {1: (0xC4, 1), 2: (0xC5, 2), 4: (0xC6, 4)}[1 if size < 256 else 2 if size < 65536 else 4]
        assert prefix.endswith(bytes([marker]) + size.to_bytes(width, "big"))

    def test_that_no_bin_can_hold_say_what_to_ask_for(self) -> None:
        with pytest.raises(WireError, match="ask for dtype uint8 or for mp4"):
            tensor_reply_prefix("float32", (2**30,), 2**32, {})

    def test_of_the_wrong_size_are_refused(self) -> None:
        with pytest.raises(WireError, match="takes 16 bytes, got 15"):
            tensor_reply_prefix("float32", (4,), 15, {})

    def test_large_plans_and_unknown_fields_pass(self) -> None:
        fields = {"plan": {"owners": list(range(100_000))}, "later": {"version": 2}}
        body = tensor_reply_prefix("uint8", (1, 1, 1, 3), 3, fields) + b"rgb"
        again = unpack_tensor_reply(body)
        assert again["plan"] == fields["plan"]
        assert again["later"] == {"version": 2}

    def test_pixels_are_a_view(self) -> None:
        body = bytearray(tensor_reply_prefix("uint8", (1, 1, 1, 3), 3, {}) + b"rgb")
        pixels = unpack_tensor_reply(body)["pixels"]
        body[-1] = 7
        assert pixels.carrier()[0, 0, 0, 2] == 7

    @pytest.mark.parametrize("reply", [{}, {"pixels": None}, {"pixels": 3}, {"pixels": {"dtype": "uint8"}}, []])
    def test_without_pixels_are_refused(self, reply: Any) -> None:
        with pytest.raises(WireError):
            unpack_tensor_reply(msgpack.packb(reply))


class TestTensors:
    @pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
    def test_from_arrays_of_any_strides_and_byte_order(self, dtype: str) -> None:
        base = (np.random.default_rng(0).standard_normal((2, 6, 8, 10)) * 50).astype(dtype)
        swapped = base.astype(np.dtype(dtype).newbyteorder(">"))
        for array in (
            base,
            base[:, ::2],
            base[..., ::-1],
            base.transpose(3, 0, 2, 1),
            np.asfortranarray(base),
            swapped,
        ):
            tensor = WireTensor.from_array(array)
            assert tensor.dtype == dtype
            assert np.array_equal(tensor.carrier(), array)
            assert bytes(tensor.data) == array.astype(DTYPES[dtype]).tobytes()

    def test_contiguous_arrays_are_shared_not_copied(self) -> None:
        array = np.zeros((1, 4, 2, 2), np.float32)
        tensor = WireTensor.from_array(array)
        array[0, 0, 0, 0] = 5
        assert tensor.carrier()[0, 0, 0, 0] == 5

    def test_bfloat16_bits_are_taken_as_they_are(self) -> None:
        bits = float32_to_bfloat16(np.array([[1.0, -2.5, 3.140625]], np.float32))
        for given_bits in (bits, bits.astype(">u2"), np.asfortranarray(bits)):
            tensor = WireTensor.from_array(given_bits, dtype="bfloat16")
            assert tensor.float32().tolist() == [[1.0, -2.5, 3.140625]]

    def test_bfloat16_of_ml_dtypes(self) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        tensor = WireTensor.from_array(np.array([1.5, -2], ml_dtypes.bfloat16))
        assert tensor.dtype == "bfloat16"
        assert tensor.float32().tolist() == [1.5, -2]

    @pytest.mark.parametrize("dtype", ["float64", "int32", "uint16", "complex64", "bool"])
    def test_other_dtypes_are_refused(self, dtype: str) -> None:
        with pytest.raises(WireError) as caught:
            WireTensor.from_array(np.zeros((1, 2), dtype))
        assert caught.value.param == "dtype"

    def test_float64_is_told_the_conversion(self) -> None:
        with pytest.raises(WireError, match=r"\.astype\(np\.float32\)"):
            WireTensor.from_array(np.zeros((1, 2)))

    def test_a_dtype_that_contradicts_the_array_is_refused(self) -> None:
        with pytest.raises(WireError, match="the array is float32, not float16"):
            WireTensor.from_array(np.zeros(3, np.float32), dtype="float16")

    def test_scalars_and_empty_arrays_are_refused(self) -> None:
        for array in (np.float32(1), np.zeros((1, 0), np.float32)):
            with pytest.raises(WireError):
                WireTensor.from_array(array)

    @pytest.mark.parametrize("dtype", LATENT_DTYPES)
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_is_finite_sees_one_bad_value(self, dtype: str, bad: float) -> None:
        values = np.ones((2, 3), np.float32) * 100
        as_tensor = {
            "float32": lambda: WireTensor.from_array(values),
            "float16": lambda: WireTensor.from_array(values.astype(np.float16)),
            "bfloat16": lambda: WireTensor.from_array(float32_to_bfloat16(values), dtype="bfloat16"),
        }[dtype]
        assert as_tensor().is_finite()
        values[1, 2] = bad
        assert not as_tensor().is_finite()

    def test_largest_finite_bfloat16_is_finite(self) -> None:
        bits = np.array([0x7F7F, 0xFF7F, 0x0001, 0x8000], np.uint16)
        assert WireTensor.from_array(bits, dtype="bfloat16").is_finite()

    def test_unaligned_bytes_compute(self) -> None:
        buffer = b"x" + np.arange(6, dtype="<f4").tobytes()
        tensor = WireTensor("float32", (2, 3), memoryview(buffer)[1:])
        assert tensor.float32().sum() == 15
        assert tensor.is_finite()

    def test_survive_a_trip_to_another_process(self) -> None:
        tensor = WireTensor("uint8", (3,), bytearray(b"abc"))
        again = pickle.loads(pickle.dumps(tensor))
        assert (again.dtype, again.shape, bytes(again.data)) == ("uint8", (3,), b"abc")


class TestBfloat16:
    def test_every_bit_pattern_widens_as_in_torch_and_comes_back(self) -> None:
        bits = np.arange(2**16, dtype=np.uint16)
        wide = bfloat16_to_float32(bits)
        reference = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
        assert np.array_equal(wide, reference, equal_nan=True)
        back = float32_to_bfloat16(wide)
        numbers = ~np.isnan(wide)
        assert np.array_equal(back[numbers], bits[numbers])
        assert np.isnan(bfloat16_to_float32(back[~numbers])).all()

    @fast
    @given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
    def test_rounds_as_torch_does(self, patterns: list[int]) -> None:
        values = np.array(patterns, np.uint32).view(np.float32)
        ours = bfloat16_to_float32(float32_to_bfloat16(values))
        theirs = torch.from_numpy(values.copy()).to(torch.bfloat16).float().numpy()
        assert np.array_equal(ours, theirs, equal_nan=True)

    def test_keeps_shape_and_strides(self) -> None:
        values = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
        assert np.array_equal(bfloat16_to_float32(float32_to_bfloat16(values)), values)
        assert float(bfloat16_to_float32(float32_to_bfloat16(2.0))) == 2.0
