"""Reading and writing single tensors of .safetensors files, bfloat16 included, without torch.

The numpy side of the safetensors package cannot read bfloat16. The layout is simple: 8 bytes little-endian length of a
JSON header, the header (name -> dtype, shape, begin and end offset), then the bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decode_client.wire import WireError, WireTensor

#: The format's own bound on its header.
MAX_HEADER_BYTES = 100_000_000

_TO_WIRE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "U8": "uint8"}
_FROM_WIRE = {wire: name for name, wire in _TO_WIRE.items()}


def read_tensor(path: str | os.PathLike[str], preferred: str) -> WireTensor:
    """The tensor called ``preferred``, or else the only one of the file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not a safetensors file, holds several tensors and none of that name, or its dtype is not
            one of the wire.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path} is not a safetensors file")
        try:
            header = json.loads(file.read(header_bytes))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a safetensors file: its header is not JSON") from error
        if not isinstance(header, dict):
            raise ValueError(f"{path} is not a safetensors file: its header is not a map")
        names = [name for name in header if name != "__metadata__"]
        if preferred not in names and len(names) != 1:
            shown = ", ".join(names[:8]) or "none"
            raise ValueError(f"{path} must hold one tensor, or one called {preferred}; it holds: {shown}")
        name = preferred if preferred in names else names[0]
        dtype, shape, begin, end = _entry(path, name, header[name])
        if not 0 <= begin <= end <= size - 8 - header_bytes:
            raise ValueError(f"{path}: tensor {name} lies outside the file")
        file.seek(8 + header_bytes + begin)
        data = file.read(end - begin)
    try:
        return WireTensor(dtype, shape, data)
    except WireError as error:
        raise ValueError(f"{path}: tensor {name}: {error.message}") from error


def write_tensor(path: Path, name: str, tensor: WireTensor, metadata: Mapping[str, str]) -> None:
    """Write a file that holds one tensor."""
    entry = {"dtype": _FROM_WIRE[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [0, tensor.nbytes]}
    header = json.dumps({"__metadata__": dict(metadata), name: entry}).encode()
    # Readers map the bytes as they lie, so they start at a multiple of 8; the format pads the header with spaces.
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        file.write(tensor.data)


def _entry(path: str | os.PathLike[str], name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype, shape = entry["dtype"], entry["shape"]
        begin, end = entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{path}: tensor {name} is not described by dtype, shape and data_offsets") from None
    if not isinstance(dtype, str) or dtype not in _TO_WIRE:
        raise ValueError(f"{path}: tensor {name} is {dtype}; convert it to one of {', '.join(_TO_WIRE)}")
    if type(begin) is not int or type(end) is not int:
        raise ValueError(f"{path}: data_offsets of tensor {name} are not integers")
    return _TO_WIRE[dtype], shape, begin, end
