"""Client for a VAE decode service: latents in, pixels out, over HTTP and msgpack.

::

    from decode_client import DecodeClient

    with DecodeClient("http://localhost:8000") as client:
        client.wait_until_ready(timeout_s=300)
        result = client.decode(latents, denormalize=True)  # torch, numpy or a path to a .safetensors file
        result.pil().save("picture.png")
        client.decode(video_latents, format="mp4", fps=24).save("clip.mp4")

``AsyncDecodeClient`` has the same surface with ``await``. Neither torch nor Pillow is needed until a method is called
whose result is theirs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from decode_client._version import __version__
from decode_client.errors import (
    APIStatusError,
    AuthError,
    BadRequestError,
    ConnectionFailedError,
    DeadlineExceededError,
    DecodeError,
    InvalidReplyError,
    NotFoundError,
    NotReadyError,
    QueueFullError,
    RateLimitedError,
    ServerError,
    TimedOutError,
    TooLargeError,
    UnavailableError,
    UnprocessableError,
)
from decode_client.wire import WireError, WireTensor

if TYPE_CHECKING:
    from decode_client.client import AsyncDecodeClient, DecodeClient
    from decode_client.result import DecodeResult

__all__ = [
    "DecodeClient",
    "AsyncDecodeClient",
    "DecodeResult",
    "WireTensor",
    "WireError",
    "DecodeError",
    "ConnectionFailedError",
    "TimedOutError",
    "NotReadyError",
    "InvalidReplyError",
    "APIStatusError",
    "BadRequestError",
    "AuthError",
    "NotFoundError",
    "TooLargeError",
    "UnprocessableError",
    "RateLimitedError",
    "ServerError",
    "UnavailableError",
    "QueueFullError",
    "DeadlineExceededError",
    "__version__",
]

# A server imports ``decode_client.wire`` alone: it must not pay for, or need, an HTTP client.
_LAZY = {
    "DecodeClient": "decode_client.client",
    "AsyncDecodeClient": "decode_client.client",
    "DecodeResult": "decode_client.result",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
