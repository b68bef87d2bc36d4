"""The client is small: it works where torch, Ray, diffusers and Pillow are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from decode_client.wire import float32_to_bfloat16, unpack_request

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "ray", "diffusers", "PIL", "safetensors", "ml_dtypes", "fastapi", "starlette"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
"""


def run(code: str, *arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", BLOCK + code, *arguments],
        env={**os.environ, "PYTHONWARNINGS": "error::ImportWarning"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_importing_the_wire_format_imports_no_http_client() -> None:
    code = """
import decode_client.wire
print(sorted({"httpx2", "httpcore2", "asyncio", "PIL", "torch"} & set(sys.modules)))
"""
    assert run(code).strip() == "[]"


def test_decoding_needs_neither_torch_nor_ray(service: Any, tmp_path: Path) -> None:
    code = """
import asyncio
import numpy as np
import decode_client
from decode_client import AsyncDecodeClient, DecodeClient, WireTensor

url, folder = sys.argv[1:]
array = np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 4, 2, 3)
bits = WireTensor.from_array(decode_client.wire.float32_to_bfloat16(array), dtype="bfloat16")
with DecodeClient(url) as client:
    assert client.decode(array).numpy().shape == (1, 2, 3, 3)
    pixels = client.decode(bits, dtype="bfloat16")
    assert pixels.numpy().dtype == np.float32
    saved = pixels.save(folder + "/latents.safetensors")
    again = client.decode(saved, dtype="bfloat16")
    assert again.content == pixels.content
    for name, method in (("torch", pixels.torch), ("Pillow", pixels.pil)):
        try:
            method()
        except ImportError as error:
            assert name in str(error), error
        else:
            raise AssertionError(name)

async def main():
    async with AsyncDecodeClient(url) as client:
        return await client.decode(array, dtype="float32")

assert np.array_equal(asyncio.run(main()).numpy(), array[:, :3])
print(sorted({"torch", "ray", "PIL"} & set(sys.modules)))
"""
    assert run(code, service.url, str(tmp_path)).strip() == "[]"
    sent = unpack_request(service.seen[1].body).latents
    assert sent.dtype == "bfloat16"
    assert sent.carrier().ravel()[0] == float32_to_bfloat16(-1.0)
