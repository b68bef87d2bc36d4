"""Reading request bodies: content type and size first, then the bytes, as a stream into one buffer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from decode_client.wire import MSGPACK_CONTENT_TYPE
from starlette.requests import Request

from decode_service.errors import MalformedRequestError, PayloadTooLargeError, UnsupportedMediaTypeError

MSGPACK_CONTENT_TYPES = (MSGPACK_CONTENT_TYPE, "application/x-msgpack", "application/vnd.msgpack")
#: What HTTP libraries say of plain bytes: nothing, or that they are bytes. The route reads msgpack, so that is what they are.
UNTYPED = ("", "application/octet-stream")
MAX_JSON_BYTES = 64 << 10


async def read_msgpack(request: Request, max_bytes: int) -> memoryview:
    """The body of a msgpack request, of at most ``max_bytes``.

    Raises:
        UnsupportedMediaTypeError: the content type is another, or the body is compressed.
        PayloadTooLargeError: the body is, or says that it is, larger.
        MalformedRequestError: it does not have the length that it announced.
        ClientDisconnect: the caller left.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in (*MSGPACK_CONTENT_TYPES, *UNTYPED):
        raise UnsupportedMediaTypeError(
            f"{request.url.path} reads Content-Type {MSGPACK_CONTENT_TYPE}, got {content_type[:100]!r}",
            param="Content-Type",
        )
    return await read_body(request, max_bytes)


async def read_json(request: Request) -> Any:
    """The value of a small JSON body, whatever its content type says.

    Raises:
        PayloadTooLargeError: it is larger than 64 KiB.
        MalformedRequestError: it is not JSON.
    """
    body = await read_body(request, MAX_JSON_BYTES)
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise MalformedRequestError(f"the body is not JSON: {error}") from None


async def read_body(request: Request, max_bytes: int) -> memoryview:
    """The body, of at most ``max_bytes``; see ``read_msgpack`` for the errors."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaTypeError(
            f"compressed bodies are not read: send it without Content-Encoding {encoding[:100]!r}",
            param="Content-Encoding",
        )
    announced = request.headers.get("content-length")
    if announced is None:
        return await _read_unannounced(request, max_bytes)
    if not (announced.isascii() and announced.isdigit()):
        raise MalformedRequestError(f"Content-Length must be a number of bytes, got {announced[:32]!r}")
    # Compared as text first: turning thousands of digits into an integer is refused by Python, and slow.
    length = int(announced) if len(announced.lstrip("0")) < 19 else max_bytes + 1
    if length > max_bytes:
        raise _too_large(f"{announced[:32]} bytes are announced", max_bytes)
    # Memory of np.empty is not touched before the bytes are there, so an announcement alone costs nothing; and the stream
    # into one buffer takes half the time of joining its chunks afterwards.
    buffer = np.empty(length, np.uint8).data
    received = 0
    async for chunk in request.stream():
        if received + len(chunk) > length:
            raise MalformedRequestError(f"the body is longer than the {length} bytes that its Content-Length announced")
        buffer[received : received + len(chunk)] = chunk
        received += len(chunk)
    if received < length:
        raise MalformedRequestError(
            f"the body ends after {received} bytes where its Content-Length announced {length}: it was cut off"
        )
    return buffer


async def _read_unannounced(request: Request, max_bytes: int) -> memoryview:
    """A chunked body: its length is known only at the end, so the limit is watched on the way."""
    buffer = bytearray()
    async for chunk in request.stream():
        if len(buffer) + len(chunk) > max_bytes:
            raise _too_large("it has more", max_bytes)
        buffer += chunk
    return memoryview(buffer)


def _too_large(found: str, max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"a body may have {max_bytes} bytes here, and {found}")
