"""``DecodeResult``: decoded pixels, or the file they were encoded to, and how they came about."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from decode_client._safetensors import write_tensor
from decode_client.wire import Array, WireTensor

if TYPE_CHECKING:
    import torch
    from PIL import Image

#: Content type and file suffixes of each format other than ``tensor``; the first suffix is the usual one.
CONTENT_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "mp4": "video/mp4"}
SUFFIXES = {"png": (".png",), "jpeg": (".jpg", ".jpeg"), "webp": (".webp",), "mp4": (".mp4",)}
_IMAGE_SUFFIXES = {suffix for name in ("png", "jpeg", "webp") for suffix in SUFFIXES[name]}


class DecodeResult:
    """What ``decode`` returns.

    Attributes:
        format: the format that was asked for: ``tensor``, ``png``, ``jpeg``, ``webp`` or ``mp4``.
        plan: how the service decoded: ``mode``, ``ranks``, ``reason``, ``fallback``, ...
        timings: where the time went, in milliseconds by stage.
        model: name of the model that decoded, or None where the service does not say.
        request_id: under which the service's logs know the request.
        content_type: of the reply.
        digests: with ``collect="broadcast"``, one hex digest of the pixels per rank.
        compiled: whether every call of the decoder ran compiled, or None where the service does not say.
    """

    def __init__(
        self,
        *,
        format: str,
        content_type: str,
        body: bytes | bytearray,
        pixels: WireTensor | None,
        range: str = "unit",
        shape: Sequence[int] | None = None,
        plan: Mapping[str, Any] | None = None,
        timings: Mapping[str, float] | None = None,
        model: str | None = None,
        request_id: str | None = None,
        digests: Sequence[str] = (),
        compiled: bool | None = None,
    ) -> None:
        self.format = format
        self.content_type = content_type
        self.plan: dict[str, Any] = dict(plan or {})
        self.timings: dict[str, float] = dict(timings or {})
        self.model = model
        self.request_id = request_id
        self.digests = tuple(digests)
        self.compiled = compiled
        self._body = body
        self._pixels = pixels
        self._range = range
        self._shape = None if shape is None else tuple(shape)

    def __repr__(self) -> str:
        what = f"{len(self._body)} bytes" if self._pixels is None else f"{self.dtype} {self.shape}"
        return f"DecodeResult({self.format}, {what}, model={self.model!r}, mode={self.plan.get('mode')!r})"

    @property
    def tested(self) -> bool:
        """False where the service decoded with a class that its tests do not compare with diffusers; ``plan["reason"]`` says so.

        True where the service does not say.
        """
        return bool(self.plan.get("tested", True))

    @property
    def content(self) -> bytes:
        """The file's bytes; of a tensor, its raw little-endian bytes in C order."""
        return bytes(self._body if self._pixels is None else self._pixels.data)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Extents of the decoded pixels; of a file, those that were encoded, or None where the service does not say.

        uint8 has channels last, [B,H,W,C] or [B,F,H,W,C]; float dtypes have them first, [B,C,H,W] or [B,C,F,H,W].
        """
        return self._shape if self._pixels is None else self._pixels.shape

    @property
    def dtype(self) -> str | None:
        """``uint8``, ``float16``, ``bfloat16`` or ``float32``, or None for a file."""
        return None if self._pixels is None else self._pixels.dtype

    def numpy(self) -> Array:
        """The pixels as a read-only array, without a copy where the dtype allows; ``.copy()`` it to write.

        Of a tensor: ``shape``, float values in [-1, 1] (unless ``range="model"``). bfloat16 comes as
        ``ml_dtypes.bfloat16`` where that package is installed, else widened to float32. Of an image file: uint8
        [1,H,W,C], by Pillow.

        Raises:
            ImportError: for an image file without Pillow.
            ValueError: for mp4.
        """
        if self._pixels is None:
            frames = np.stack([np.asarray(image) for image in self.images()])
            frames = frames.reshape(*frames.shape[:3], -1)
            frames.flags.writeable = False
            return frames
        # Float pixels can start at any byte of the reply; arrays that do are slow, and not every library takes them.
        carrier = np.require(self._pixels.carrier(), requirements="A")
        if self._pixels.dtype != "bfloat16":
            pixels = carrier
        else:
            try:
                pixels = carrier.view(importlib.import_module("ml_dtypes").bfloat16)
            except ImportError:
                pixels = self._pixels.float32()
        pixels.flags.writeable = False
        return pixels

    def torch(self, device: Any = None) -> torch.Tensor:
        """The pixels of a tensor reply as a torch tensor of their own dtype and memory, on ``device`` if given.

        Raises:
            ImportError: without torch.
            ValueError: for a file.
        """
        pixels = self._need_pixels("torch()")
        library: Any = _module("torch", "torch()", "torch")
        tensor = library.empty(pixels.shape, dtype=getattr(library, pixels.dtype))
        tensor.reshape(-1).view(library.uint8).numpy()[:] = np.frombuffer(pixels.data, dtype=np.uint8)
        return cast("torch.Tensor", tensor if device is None else tensor.to(device))

    def images(self) -> list[Image.Image]:
        """The pictures as Pillow images: every frame of every batch item, in order.

        Raises:
            ImportError: without Pillow.
            ValueError: for mp4, for ``range="model"``, or where the channels are not 1, 3 or 4.
        """
        image_module: Any = _module("PIL.Image", "images", "images")
        if self._pixels is None:
            if self.format == "mp4":
                raise ValueError('mp4 is not a picture: save() it, or ask for format="tensor"')
            image = image_module.open(io.BytesIO(self._body))
            image.load()
            return [image]
        frames = self._frames()
        if frames.shape[-1] not in (1, 3, 4):
            raise ValueError(f"pictures have 1, 3 or 4 channels, these pixels have {frames.shape[-1]}: use numpy()")
        if frames.shape[-1] == 1:
            frames = frames[..., 0]
        return [image_module.fromarray(np.ascontiguousarray(frame)) for frame in frames]

    def pil(self) -> Image.Image | list[Image.Image]:
        """The picture as a Pillow image, or the list of them where there are several; ``images()`` is always a list.

        Raises:
            ImportError, ValueError: as ``images``.
        """
        images = self.images()
        return images[0] if len(images) == 1 else images

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the pixels to a file; the suffix says what kind.

        A tensor goes to ``.npy`` (bfloat16 widened to float32, which numpy files can hold), ``.safetensors`` (its own
        dtype, under ``pixels``), or, where it is one picture, ``.png``, ``.jpg`` or ``.webp``. A file format goes to
        its own suffix and nothing else.

        Returns:
            The path.

        Raises:
            ValueError: if the suffix contradicts what there is to save.
            ImportError: for a picture without Pillow.
            OSError: if the file cannot be written.
        """
        target = Path(path)
        suffix = target.suffix.lower()
        if self._pixels is None:
            if suffix not in SUFFIXES[self.format]:
                raise ValueError(f"the reply is {self.format}: save it as {' or '.join(SUFFIXES[self.format])}")
            target.write_bytes(self._body)
        elif suffix == ".npy":
            bfloat16 = self._pixels.dtype == "bfloat16"
            with open(target, "wb") as file:
                np.save(file, self._pixels.float32() if bfloat16 else self._pixels.carrier(), allow_pickle=False)
        elif suffix == ".safetensors":
            notes = {"model": self.model, "request_id": self.request_id, "range": self._range}
            write_tensor(target, "pixels", self._pixels, {key: str(value) for key, value in notes.items() if value})
        elif suffix in _IMAGE_SUFFIXES:
            images = self.images()
            if len(images) != 1:
                raise ValueError(
                    f"{suffix} holds one picture and there are {len(images)}: save each of images(), or all of them as "
                    '.npy or .safetensors, or ask for format="mp4"'
                )
            images[0].save(target)
        else:
            hint = ' (ask for format="mp4" to get one)' if suffix == ".mp4" else ""
            choices = ".npy, .safetensors, .png, .jpg or .webp"
            raise ValueError(f"a tensor is saved as {choices}, not as {suffix or 'a file without a suffix'}{hint}")
        return target

    def _need_pixels(self, what: str) -> WireTensor:
        if self._pixels is None:
            raise ValueError(f'{what} needs a tensor and the reply is {self.format}: ask for format="tensor"')
        return self._pixels

    def _frames(self) -> Array:
        """All frames as uint8 [N,H,W,C]."""
        pixels = self._need_pixels("images()")
        if pixels.dtype == "uint8":
            return pixels.carrier().reshape(-1, *pixels.shape[-3:])
        if self._range != "unit":
            raise ValueError('range="model" has no fixed scale: ask for range="unit" to get pictures')
        frames = np.moveaxis(pixels.float32(), 1, -1)
        frames = frames.reshape(-1, *frames.shape[-3:])
        return np.rint((frames.clip(-1, 1) + 1) * 127.5).astype(np.uint8)


def _module(name: str, what: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{what} needs {extra if extra == 'torch' else 'Pillow'}: install decode-client[{extra}]"
        ) from error
