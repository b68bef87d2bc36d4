"""The least that can answer with so many bytes: one ASGI function, for uvicorn. What a reply's transfer is held to.

``PLAIN_SERVER_BYTES`` says how many.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

_BODY = os.urandom(int(os.environ["PLAIN_SERVER_BYTES"]))
_HEADERS = [(b"content-type", b"application/octet-stream"), (b"content-length", str(len(_BODY)).encode())]


async def app(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Answer every request with the same bytes."""
    if scope["type"] != "http":
        raise RuntimeError(f"expected http, got {scope['type']}: start uvicorn with --lifespan off")
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": _BODY})
