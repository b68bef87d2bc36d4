"""The wire format of ``POST /decode``: msgpack maps around raw tensor bytes, for the client and the server alike.

A request is one map; a tensor reply is another::

    {"model": "demo", "latents": {"dtype": "bfloat16", "shape": [1, 4, 64, 64], "data": <bin>}, "output": {...}, ...}
    {"plan": {...}, "timings": {...}, "model": "demo", "request_id": "...", "pixels": {"dtype", "shape", "data"}}

Tensor bytes are little-endian in C order. Nothing is ever unpickled, extension types are refused, a dtype is looked up
in ``DTYPES``, and sizes are checked before memory is taken: parsing never copies tensor bytes, and what it does build
is bounded by a few limits, whatever the body claims.

This module imports nothing but the standard library, numpy and msgpack, and knows nothing of HTTP.
"""

from __future__ import annotations

import difflib
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt

BytesLike: TypeAlias = bytes | bytearray | memoryview
Array: TypeAlias = npt.NDArray[Any]

#: Every dtype of the wire and the numpy dtype that carries its bytes. numpy has no bfloat16: its bits travel as uint16.
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "uint8": np.dtype("u1"),
}
LATENT_DTYPES: tuple[str, ...] = ("float32", "float16", "bfloat16")
PIXEL_DTYPES: tuple[str, ...] = ("uint8", "float16", "bfloat16", "float32")

MODES: tuple[str, ...] = ("auto", "direct", "batch", "tile", "spatial_shard_height", "spatial_shard_width")
COLLECTS: tuple[str, ...] = ("shards", "rank0", "broadcast")
FORMATS: tuple[str, ...] = ("tensor", "png", "jpeg", "webp", "mp4")
RANGES: tuple[str, ...] = ("unit", "model")
#: How latents lie in memory. Letters name the dimensions: B batch, C channels, T latent frames, H rows, W columns.
LAYOUTS: tuple[str, ...] = ("auto", "BCHW", "CHW", "BCTHW", "CTHW", "BTCHW", "TCHW", "packed", "patchified")

#: Formats to which the optional output fields apply; anywhere else they are refused rather than ignored.
FPS_FORMATS: tuple[str, ...] = ("mp4",)
QUALITY_FORMATS: tuple[str, ...] = ("jpeg", "webp", "mp4")

MSGPACK_CONTENT_TYPE = "application/msgpack"

MAX_DIMS = 8
MAX_NAME_CHARS = 256
#: A msgpack bin holds at most this many bytes (its longest header is 32 bits).
MAX_BIN_BYTES = 2**32 - 1

# One value other than tensor bytes, msgpack-encoded. A few bytes of msgpack can become a large tree of Python objects,
# so the bound on the encoded size is what bounds the memory that a hostile body can take.
_MAX_REQUEST_VALUE_BYTES = 4 << 10
_MAX_REPLY_VALUE_BYTES = 16 << 20
_MAX_MAP_KEYS = 64
_MAX_INTEGER = 2**31 - 1
#: What a seed may be: torch's generators take 64 bits.
MAX_SEED = 2**64 - 1

_LAYOUT_FIELDS = ("layout", "height", "width", "frames", "layers")
_DECODER_FIELDS = ("timestep", "noise_scale", "seed")
_REQUEST_FIELDS = (
    "model",
    "latents",
    *_LAYOUT_FIELDS,
    "denormalize",
    *_DECODER_FIELDS,
    "mode",
    "strict",
    "collect",
    "chunk",
    "output",
    "deadline_ms",
)
_OUTPUT_FIELDS = ("format", "dtype", "fps", "quality", "range")
_TENSOR_FIELDS = ("dtype", "shape", "data")


class WireError(ValueError):
    """A message that is not what the wire format says.

    Attributes:
        message: what is wrong and what would be right.
        param: the field at fault, dotted (``latents.shape``), or None.
        malformed: True where the bytes cannot be parsed at all; False where one field is wrong.
    """

    def __init__(self, message: str, *, param: str | None = None, malformed: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.malformed = malformed

    def under(self, parent: str) -> WireError:
        """The same error about a field of ``parent``: ``shape`` becomes ``latents.shape``."""
        param = parent if self.param is None else f"{parent}.{self.param}"
        return WireError(self.message, param=param, malformed=self.malformed)


def itemsize(dtype: str) -> int:
    """Bytes of one element of a wire dtype.

    Raises:
        WireError: if the dtype is not one of ``DTYPES``.
    """
    return DTYPES[_choice(dtype, tuple(DTYPES), "dtype")].itemsize


def float32_to_bfloat16(values: npt.ArrayLike) -> Array:
    """The bits (uint16) of float32 values rounded to bfloat16: to nearest, ties to even, as torch and ml_dtypes round.

    NaN stays NaN (quiet, sign kept); a finite value past the largest bfloat16 becomes infinity.
    """
    given = np.asarray(values, dtype=np.float32)
    bits = np.ascontiguousarray(given).view(np.uint32).reshape(given.shape)
    # NaN is set apart because the carry of rounding could turn its mantissa into that of infinity, or wrap around.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    result: Array = np.where(np.isnan(given), quiet, rounded).astype("<u2")
    return result


def bfloat16_to_float32(bits: npt.ArrayLike) -> Array:
    """The float32 values of bfloat16 bits (uint16); exact.

    Raises:
        TypeError: if ``bits`` is not an array of uint16.
    """
    given = np.asarray(bits)
    if given.dtype.kind != "u" or given.dtype.itemsize != 2:
        raise TypeError(f"bfloat16 bits are carried as uint16, got {given.dtype}")
    widened = given.astype(np.uint32)
    widened <<= np.uint32(16)
    return widened.view(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class WireTensor:
    """A tensor as the wire carries it: a dtype's name, extents, and little-endian bytes in C order.

    Attributes:
        dtype: one of ``DTYPES``.
        shape: extents, each at least 1; 1 to 8 of them.
        data: the bytes; kept as a read-only view of what was given, never copied.

    Raises:
        WireError: if the dtype is unknown, an extent is not a positive integer, or the bytes do not fill the shape.
    """

    dtype: str
    shape: tuple[int, ...]
    data: BytesLike

    def __post_init__(self) -> None:
        _choice(self.dtype, tuple(DTYPES), "dtype")
        object.__setattr__(self, "shape", _extents(self.shape))
        object.__setattr__(self, "data", _flat_view(self.data))
        _check_size(self.dtype, self.shape, len(self.data), "data")

    def __reduce__(self) -> tuple[type[WireTensor], tuple[str, tuple[int, ...], bytes]]:
        # A memoryview cannot travel between processes; its bytes can.
        return WireTensor, (self.dtype, self.shape, bytes(self.data))

    def __repr__(self) -> str:
        return f"WireTensor(dtype={self.dtype!r}, shape={self.shape}, nbytes={self.nbytes})"

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def carrier(self) -> Array:
        """The tensor as a read-only numpy view of ``data``, without a copy; bfloat16 as the uint16 of its bits.

        Bytes inside a message can start anywhere, so the array may be unaligned: numpy computes with it as it is;
        ``np.require(array, requirements="A")`` gives an aligned one.
        """
        return np.frombuffer(self.data, dtype=DTYPES[self.dtype]).reshape(self.shape)

    def float32(self) -> Array:
        """The tensor as float32; a read-only view where it is float32 already, else a new array."""
        carrier = self.carrier()
        return bfloat16_to_float32(carrier) if self.dtype == "bfloat16" else carrier.astype(np.float32, copy=False)

    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        carrier = self.carrier()
        if self.dtype == "bfloat16":
            exponent = np.uint16(0x7F80)
            return bool(np.all((carrier & exponent) != exponent))
        return bool(np.all(np.isfinite(carrier)))

    @classmethod
    def from_array(cls, array: npt.ArrayLike, dtype: str | None = None) -> WireTensor:
        """A tensor from a numpy array of any strides and byte order; shares its memory where that is possible.

        Args:
            array: float32, float16, uint8, the bfloat16 of ml_dtypes, or uint16 bits with ``dtype="bfloat16"``.
            dtype: the wire dtype, where the array's own does not say it; values are never converted.

        Raises:
            WireError: if the array's dtype is not one of the wire, or not the one asked for.
        """
        given = np.asarray(array)
        if dtype is not None:
            _choice(dtype, tuple(DTYPES), "dtype")
        if given.dtype.name == "bfloat16":
            given, name = given.view(np.uint16), "bfloat16"
        elif given.dtype.name == "uint16" and dtype == "bfloat16":
            name = "bfloat16"
        elif given.dtype.name in ("float32", "float16", "uint8"):
            name = given.dtype.name
        elif given.dtype.name == "uint16":
            raise WireError(
                'uint16 is accepted as the bits of bfloat16 only: WireTensor.from_array(bits, dtype="bfloat16")',
                param="dtype",
            )
        else:
            raise WireError(
                f"dtype {given.dtype.name} cannot travel; use one of {', '.join(DTYPES)}, for example by "
                ".astype(np.float32)",
                param="dtype",
            )
        if dtype is not None and dtype != name:
            raise WireError(f"the array is {name}, not {dtype}: convert it first", param="dtype")
        # Extents are checked before ascontiguousarray, which would turn a scalar into one element.
        shape = _extents(given.shape)
        contiguous = np.ascontiguousarray(given, dtype=DTYPES[name])
        return cls(name, shape, contiguous.reshape(-1).view(np.uint8).data)


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What the pixels come back as.

    Attributes:
        format: ``tensor`` (a msgpack map), or a file: ``png``, ``jpeg``, ``webp``, ``mp4``.
        dtype: of a tensor: ``uint8`` ([B,H,W,C] or [B,F,H,W,C]) or a float dtype ([B,C,H,W] or [B,C,F,H,W]).
            Files hold 8-bit pixels, so they go with ``uint8`` alone.
        fps: frames per second of ``mp4``; None takes the server's default.
        quality: 1 (smallest) to 100 (best) of ``jpeg``, ``webp`` and ``mp4``; None takes the server's default.
        range: of a float tensor: ``unit`` for [-1, 1]; ``model`` for the values as the model's ``decode`` returns them.

    Raises:
        WireError: if a field is out of range, or does not apply to the format.
    """

    format: str = "tensor"
    dtype: str = "uint8"
    fps: float | None = None
    quality: int | None = None
    range: str = "unit"

    def __post_init__(self) -> None:
        _choice(self.format, FORMATS, "format")
        _choice(self.dtype, PIXEL_DTYPES, "dtype")
        _choice(self.range, RANGES, "range")
        if self.fps is not None:
            _positive_number(self.fps, "fps")
            _applies("fps", self.format, FPS_FORMATS)
        if self.quality is not None:
            if _positive_integer(self.quality, "quality") > 100:
                raise WireError(f"quality must be 1 to 100, got {self.quality}", param="quality")
            _applies("quality", self.format, QUALITY_FORMATS)
        if self.format != "tensor" and self.dtype != "uint8":
            raise WireError(
                f"{self.format} holds 8-bit pixels: use dtype uint8, or format tensor for {self.dtype}", param="dtype"
            )
        if self.range == "model" and self.dtype == "uint8":
            floats = ", ".join(name for name in PIXEL_DTYPES if name != "uint8")
            raise WireError(f"range model goes with format tensor and a float dtype ({floats})", param="range")


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRequest:
    """One request to decode.

    Attributes:
        latents: float32, float16 or bfloat16; the shape is the model's business.
        model: name of the model, or None for the only one served.
        layout: how the latents lie, one of ``LAYOUTS``: ``auto`` tells from the shape where only one reading fits;
            ``packed`` is a sequence of tokens (B,N,C*p*p), as pipelines hold latents of FLUX, Qwen-Image and LTX;
            ``patchified`` is (B,C*p*p,H/p,W/p).
        height, width: extents of the decoded picture, in pixels: needed by ``packed``, elsewhere checked against the shape.
        frames: pixel frames of the decoded video: needed by ``packed`` latents of a video, elsewhere checked.
        layers: pictures that each ``packed`` item is to give, where a pipeline packs several (Qwen-Image-Layered).
        denormalize: True where the latents are normalized and the model's own statistics must be applied first.
        timestep: 0 to 1, for decoders with timestep conditioning (a pipeline's ``decode_timestep``); None takes the
            default of the model's pipeline.
        noise_scale: 0 to 1, the share of noise mixed into latents of such decoders (``decode_noise_scale``); None takes
            the timestep, as pipelines do.
        seed: of that noise; None is 0.
        mode: how to divide the work; one of ``MODES``.
        strict: whether a mode that cannot run is an error instead of a fallback; None takes the server's default.
        collect: how the pixels come back from the ranks; one of ``COLLECTS``, or None for the server's default.
        chunk: latent frames per pass, at least 1, or None for the server's default.
        output: what the pixels come back as.
        deadline_ms: milliseconds after which nobody waits for the pixels, or None.

    Raises:
        WireError: if a field is of the wrong type or out of range.
    """

    latents: WireTensor
    model: str | None = None
    layout: str = "auto"
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    layers: int | None = None
    denormalize: bool = False
    timestep: float | None = None
    noise_scale: float | None = None
    seed: int | None = None
    mode: str = "auto"
    strict: bool | None = None
    collect: str | None = None
    chunk: int | None = None
    output: OutputSpec = field(default_factory=OutputSpec)
    deadline_ms: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.latents, WireTensor):
            raise WireError(f"latents must be a WireTensor, got {_kind(self.latents)}", param="latents")
        if self.latents.dtype not in LATENT_DTYPES:
            raise WireError(
                f"latents must be {_or(LATENT_DTYPES)}, got {self.latents.dtype}",
                param="latents.dtype",
            )
        if self.model is not None and not (isinstance(self.model, str) and 0 < len(self.model) <= MAX_NAME_CHARS):
            shown = repr(self.model) if self.model == "" else _kind(self.model)
            raise WireError(f"model must be a name of 1 to {MAX_NAME_CHARS} characters, got {shown}", param="model")
        _choice(self.layout, LAYOUTS, "layout")
        for name in ("height", "width", "frames", "layers"):
            if (extent := getattr(self, name)) is not None:
                object.__setattr__(self, name, _positive_integer(extent, name))
        _boolean(self.denormalize, "denormalize")
        for name in ("timestep", "noise_scale"):
            if (share := getattr(self, name)) is not None:
                object.__setattr__(self, name, _share(share, name))
        if self.seed is not None:
            if not _is_integer(self.seed) or not 0 <= self.seed <= MAX_SEED:
                raise WireError(f"seed must be an integer from 0 to 2**64 - 1, got {_shown(self.seed)}", param="seed")
            object.__setattr__(self, "seed", int(self.seed))
        _choice(self.mode, MODES, "mode")
        if self.strict is not None:
            _boolean(self.strict, "strict")
        if self.collect is not None:
            _choice(self.collect, COLLECTS, "collect")
        if self.chunk is not None:
            _positive_integer(self.chunk, "chunk")
        if not isinstance(self.output, OutputSpec):
            raise WireError(f"output must be an OutputSpec, got {_kind(self.output)}", param="output")
        if self.deadline_ms is not None:
            _positive_number(self.deadline_ms, "deadline_ms")


def pack_request(request: DecodeRequest) -> bytes:
    """The body of ``POST /decode``. Fields at their default are left out; the latents' bytes come last.

    Raises:
        WireError: if the latents have more bytes than a msgpack bin can hold.
    """
    fields: dict[str, Any] = {
        "model": request.model,
        "layout": request.layout if request.layout != "auto" else None,
        "height": request.height,
        "width": request.width,
        "frames": request.frames,
        "layers": request.layers,
        "denormalize": request.denormalize or None,
        "timestep": request.timestep,
        "noise_scale": request.noise_scale,
        "seed": request.seed,
        "mode": request.mode if request.mode != "auto" else None,
        "strict": request.strict,
        "collect": request.collect,
        "chunk": request.chunk,
        "deadline_ms": request.deadline_ms,
    }
    defaults = OutputSpec()
    output = {
        name: getattr(request.output, name)
        for name in _OUTPUT_FIELDS
        if getattr(request.output, name) != getattr(defaults, name)
    }
    fields["output"] = output or None
    latents = request.latents
    if latents.nbytes > MAX_BIN_BYTES:
        raise WireError(f"latents of {latents.nbytes} bytes do not fit one request (4 GiB)", param="latents.data")
    present = {name: value for name, value in fields.items() if value is not None}
    prefix = _tensor_last_prefix(present, "latents", latents.dtype, latents.shape, latents.nbytes)
    return b"".join((prefix, latents.data))


def unpack_request(body: BytesLike) -> DecodeRequest:
    """Parse the body of ``POST /decode``. The latents are a view into ``body``, which must not change while they live.

    A field that is nil counts as absent.

    Raises:
        WireError: ``malformed`` where the body is not one msgpack map; else about the field in ``param``.
    """
    reader = _Reader(body, _MAX_REQUEST_VALUE_BYTES)
    fields: dict[str, Any] = {}
    for name in reader.keys("the body", known=_REQUEST_FIELDS):
        if name == "latents":
            fields[name] = _read_tensor(reader, "latents", LATENT_DTYPES)
        elif name == "output":
            fields[name] = _read_output(reader)
        else:
            fields[name] = reader.value(name)
    reader.end()
    present = {name: value for name, value in fields.items() if value is not None}
    if "latents" not in present:
        raise WireError("latents are missing: a map of dtype, shape and data", param="latents")
    return DecodeRequest(**present)


def tensor_reply_prefix(dtype: str, shape: Sequence[int], nbytes: int, fields: Mapping[str, Any]) -> bytes:
    """Everything of a tensor reply that comes before the pixels' own bytes.

    ``pixels`` is the last key and ``data`` the last within it, so prefix + raw bytes is the whole message: a server can
    stream it with a known length and never holds a second copy.

    Args:
        dtype: of the pixels; one of ``PIXEL_DTYPES``.
        shape: of the pixels.
        nbytes: how many bytes will follow.
        fields: the other fields of the reply: plain values only.

    Raises:
        WireError: if the bytes do not fill the shape, or are more than a msgpack bin can hold.
    """
    _choice(dtype, PIXEL_DTYPES, "dtype")
    extents = _extents(shape)
    _check_size(dtype, extents, nbytes, "data")
    if nbytes > MAX_BIN_BYTES:
        raise WireError(
            f"{nbytes} bytes of pixels do not fit one tensor reply (4 GiB): ask for dtype uint8 or for mp4",
            param="output",
        )
    if "pixels" in fields:
        raise ValueError("pixels are not one of the other fields")
    return _tensor_last_prefix(fields, "pixels", dtype, extents, nbytes)


def unpack_tensor_reply(body: BytesLike) -> dict[str, Any]:
    """Parse a tensor reply: its fields, with ``pixels`` as a ``WireTensor`` that is a view into ``body``.

    Fields that this version does not know are passed through.

    Raises:
        WireError: if the body is not a tensor reply.
    """
    reader = _Reader(body, _MAX_REPLY_VALUE_BYTES)
    fields: dict[str, Any] = {}
    for name in reader.keys("the reply"):
        fields[name] = _read_tensor(reader, "pixels", PIXEL_DTYPES) if name == "pixels" else reader.value(name)
    reader.end()
    if fields.get("pixels") is None:
        raise WireError("the reply holds no pixels", param="pixels")
    return fields


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class _Reader:
    """A cursor over one msgpack message that hands tensor bytes out as views and bounds everything else.

    msgpack's own ``unpackb`` would copy every bin and build whatever tree the body describes before anyone could look.
    """

    def __init__(self, body: BytesLike, max_value_bytes: int) -> None:
        self._body = _flat_view(body)
        self._position = 0
        self._max_value_bytes = max_value_bytes
        if not self._body:
            raise WireError("the body is empty: send one msgpack map", malformed=True)

    def keys(self, what: str, known: tuple[str, ...] | None = None) -> Iterable[str]:
        """The keys of the map at the cursor; the caller reads each one's value before it asks for the next.

        Raises:
            WireError: if there is no map, or a key is not text, comes twice or is not one of ``known``.
        """
        if not self.at_map():
            raise WireError(f"{what} must be a msgpack map", malformed=True)
        count = self._parse(lambda unpacker: unpacker.read_map_header(), what)
        if count > _MAX_MAP_KEYS:
            raise WireError(f"{what} has {count} fields, more than the {_MAX_MAP_KEYS} accepted", malformed=True)
        seen: set[str] = set()
        for _ in range(count):
            key = self.value(f"a key of {what}", param=None)
            if not isinstance(key, str):
                raise WireError(f"keys of {what} must be text, got {_kind(key)}", malformed=True)
            if known is not None and key not in known:
                raise _unknown_field(key, known)
            if key in seen:
                raise WireError(f"field {key} comes twice", param=key, malformed=True)
            seen.add(key)
            yield key

    def value(self, what: str, param: str | None = "") -> Any:
        """The value at the cursor, whole, if it is no larger than the limit."""
        return self._parse(lambda unpacker: unpacker.unpack(), what, what if param == "" else param)

    def skip_nil(self) -> bool:
        """Whether the value at the cursor is nil; it is consumed if so."""
        if self._marker() != 0xC0:
            return False
        self._position += 1
        return True

    def blob(self, param: str) -> memoryview:
        """The bin at the cursor, as a view.

        Raises:
            WireError: if the value is not a bin, or the body ends inside it.
        """
        marker = self._take(1, param)[0]
        if marker not in (0xC4, 0xC5, 0xC6):
            raise WireError(f"{param} must be bytes (a msgpack bin, not text or a list)", param=param)
        length = int.from_bytes(self._take(1 << (marker - 0xC4), param), "big")
        return self._take(length, param)

    def end(self) -> None:
        if self._position != len(self._body):
            extra = len(self._body) - self._position
            raise WireError(f"{extra} bytes follow the end of the message", malformed=True)

    def _take(self, count: int, what: str) -> memoryview:
        taken = self._body[self._position : self._position + count]
        if len(taken) != count:
            raise WireError(
                f"the body ends early: {what} needs {count} bytes where {len(taken)} are left", malformed=True
            )
        self._position += count
        return taken

    def _marker(self) -> int:
        if self._position >= len(self._body):
            raise WireError("the body ends early, where a value should begin", malformed=True)
        return self._body[self._position]

    def at_map(self) -> bool:
        marker = self._marker()
        return 0x80 <= marker <= 0x8F or marker in (0xDE, 0xDF)

    def _parse(self, read: Callable[[Any], Any], what: str, param: str | None = None) -> Any:
        remaining = len(self._body) - self._position
        # Most values are a few bytes: the first window is small, and only what does not fit it is tried again.
        for window in (64, self._max_value_bytes):
            unpacker = msgpack.Unpacker(
                raw=False, strict_map_key=True, ext_hook=_refuse_extension, max_buffer_size=window
            )
            unpacker.feed(self._body[self._position : self._position + window])
            try:
                value = read(unpacker)
            except msgpack.OutOfData:
                if remaining <= window:
                    raise WireError(f"the body ends early, inside {what}", malformed=True) from None
                continue
            except WireError as error:
                raise WireError(error.message, param=param, malformed=True) from None
            except (ValueError, msgpack.UnpackException, RecursionError) as error:
                if window < self._max_value_bytes and remaining > window:
                    # Lengths are checked against the window, so a long value can also fail this way.
                    continue
                if _says_too_long(error):
                    break
                raise WireError(
                    f"{what} is not valid msgpack: {error or type(error).__name__}", malformed=True
                ) from None
            self._position += unpacker.tell()
            return value
        raise WireError(f"{what} is longer than the {self._max_value_bytes} bytes accepted", param=param)


def _says_too_long(error: Exception) -> bool:
    return "exceeds max_" in str(error)


def _refuse_extension(code: int, data: bytes) -> Any:
    raise WireError("msgpack extension types are not part of this protocol")


def _read_tensor(reader: _Reader, name: str, dtypes: tuple[str, ...]) -> WireTensor | None:
    if reader.skip_nil():
        return None
    if not reader.at_map():
        raise WireError(f"{name} must be a map of dtype, shape and data", param=name)
    parts: dict[str, Any] = {}
    try:
        for key in reader.keys(name, known=_TENSOR_FIELDS):
            parts[key] = reader.blob("data") if key == "data" else reader.value(key)
        for key in _TENSOR_FIELDS:
            if key not in parts:
                raise WireError(f"{key} is missing: {name} must be a map of dtype, shape and data", param=key)
        _choice(parts["dtype"], dtypes, "dtype")
        return WireTensor(**parts)
    except WireError as error:
        raise (error if error.malformed else error.under(name)) from None


def _read_output(reader: _Reader) -> OutputSpec | None:
    if reader.skip_nil():
        return None
    if not reader.at_map():
        raise WireError(f"output must be a map of {', '.join(_OUTPUT_FIELDS)}", param="output")
    try:
        fields = {key: reader.value(key) for key in reader.keys("output", known=_OUTPUT_FIELDS)}
        return OutputSpec(**{key: value for key, value in fields.items() if value is not None})
    except WireError as error:
        raise (error if error.malformed else error.under("output")) from None


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def _tensor_last_prefix(
    fields: Mapping[str, Any], tensor: str, dtype: str, shape: tuple[int, ...], nbytes: int
) -> bytes:
    packer = msgpack.Packer(autoreset=False, use_bin_type=True)
    packer.pack_map_header(len(fields) + 1)
    for name, value in fields.items():
        packer.pack(name)
        packer.pack(value)
    packer.pack(tensor)
    packer.pack_map_header(3)
    for value in ("dtype", dtype, "shape", list(shape), "data"):
        packer.pack(value)
    packed: bytes = packer.bytes()
    return packed + _bin_header(nbytes)


def _bin_header(nbytes: int) -> bytes:
    if nbytes <= 0xFF:
        return struct.pack(">BB", 0xC4, nbytes)
    if nbytes <= 0xFFFF:
        return struct.pack(">BH", 0xC5, nbytes)
    return struct.pack(">BI", 0xC6, nbytes)


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def _kind(value: Any) -> str:
    names = {type(None): "nil", bool: "a boolean", int: "an integer", float: "a number", str: "text", dict: "a map"}
    names |= {list: "a list", tuple: "a list", bytes: "bytes"}
    return names.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    """A value as an error quotes it: scalars as they are, shortened; anything else by its kind."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "…")
    if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 10**20):
        return repr(value)
    return _kind(value)


def _or(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def _did_you_mean(value: str, options: Sequence[str]) -> str:
    spelt = {option.lower(): option for option in options}
    nearest = difflib.get_close_matches(value[:64].lower(), spelt, n=1, cutoff=0.6)
    return f"; did you mean {spelt[nearest[0]]}?" if nearest else ""


def _unknown_field(name: str, known: Sequence[str]) -> WireError:
    hint = _did_you_mean(name, known)
    return WireError(f"unknown field {_shown(name)}{hint or '; fields are ' + ', '.join(known)}", param=name[:64])


def _choice(value: Any, options: tuple[str, ...], param: str) -> str:
    if isinstance(value, str) and value in options:
        return value
    # Dtype names are all alike, so the nearest one is no better a guess than any other.
    hint = _did_you_mean(value, options) if isinstance(value, str) and param != "dtype" else ""
    raise WireError(f"{param} must be {_or(options)}, got {_shown(value)}{hint}", param=param)


def _boolean(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise WireError(f"{param} must be true or false, got {_shown(value)}", param=param)
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def _positive_integer(value: Any, param: str) -> int:
    if not _is_integer(value) or not 1 <= value <= _MAX_INTEGER:
        raise WireError(f"{param} must be an integer of at least 1 (and below 2**31), got {_shown(value)}", param=param)
    return int(value)


def _positive_number(value: Any, param: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise WireError(f"{param} must be a finite number above 0, got {_shown(value)}", param=param)
    return float(value)


def _share(value: Any, param: str) -> float:
    number = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    # Written so that NaN, which no comparison holds for, is refused too.
    if not number or not 0 <= value <= 1:
        raise WireError(f"{param} must be a number from 0 to 1, got {_shown(value)}", param=param)
    return float(value)


def _applies(param: str, format_name: str, formats: tuple[str, ...]) -> None:
    if format_name not in formats:
        raise WireError(f"{param} applies to format {_or(formats)}, not to {format_name}", param=param)


def _extents(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, (list, tuple)):
        raise WireError(f"shape must be a list of integers, got {_shown(shape)}", param="shape")
    if not 1 <= len(shape) <= MAX_DIMS:
        raise WireError(f"shape must have 1 to {MAX_DIMS} dimensions, got {len(shape)}", param="shape")
    for extent in shape:
        if not _is_integer(extent) or extent < 1:
            raise WireError(
                f"every extent of shape must be an integer of at least 1, got {_shown(extent)}", param="shape"
            )
    return tuple(int(extent) for extent in shape)


def _flat_view(data: Any) -> memoryview:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise WireError(f"data must be bytes, got {_kind(data)}", param="data")
    view = memoryview(data)
    if not view.c_contiguous:
        raise WireError("data must be contiguous bytes", param="data")
    return view.cast("B").toreadonly()


def _check_size(dtype: str, shape: tuple[int, ...], nbytes: int, param: str) -> None:
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if nbytes != expected:
        extents = "x".join(str(extent) for extent in shape)
        raise WireError(f"{dtype} of {extents} takes {expected} bytes, got {nbytes}", param=param)
