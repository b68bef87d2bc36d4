"""Reading request bodies: content type and size first, then the bytes, as a stream into one buffer.

Latents are views into that buffer, so it lives as long as anybody wants them: until they are decoded, also where the caller has
left meanwhile. ``BodyMemory`` bounds what all buffers take together.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from typing import Any

import numpy as np
from decode_client.wire import MSGPACK_CONTENT_TYPE
from starlette.requests import Request

from decode_service.errors import (
    MalformedRequestError,
    PayloadTooLargeError,
    QueueFullError,
    UnsupportedMediaTypeError,
)

MSGPACK_CONTENT_TYPES = (MSGPACK_CONTENT_TYPE, "application/x-msgpack", "application/vnd.msgpack")
#: What HTTP libraries say of plain bytes: nothing, or that they are bytes. The route reads msgpack, so that is what they are.
UNTYPED = ("", "application/octet-stream")
MAX_JSON_BYTES = 64 << 10


class BodyMemory:
    """The memory of request bodies, and how much of it there may be.

    A body counts from the allocation of its buffer until that is freed, whoever held it last. Nobody has to say that he is done
    with it, so nothing is forgotten when a caller leaves, a body is malformed, or a decode fails. ``take`` and ``held`` are the
    event loop's; buffers may be freed in any thread.

    Args:
        most: bytes that all bodies may take together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held = 0
        # What was freed, and is not subtracted yet: whatever runs when a buffer is freed may run in the middle of anything.
        self._freed: deque[Share] = deque()

    @property
    def held(self) -> int:
        """Bytes that bodies take now."""
        while self._freed:
            self._held -= self._freed.popleft().nbytes
        return self._held

    def share_of(self, buffer: np.ndarray | GrowingBuffer) -> Share:
        """An account for ``buffer`` that is closed when it is freed. Nothing is on it yet."""
        share = Share()
        weakref.finalize(buffer, self._freed.append, share).atexit = False
        return share

    def take(self, share: Share, nbytes: int) -> None:
        """Put ``nbytes`` more on the account of a body.

        Raises:
            QueueFullError: that would be more than there may be.
        """
        held = self.held
        if held + nbytes > self.most:
            raise QueueFullError(
                f"the bodies of other requests take {held - share.nbytes} bytes, and with this one they would take more than "
                f"{self.most} together (limits.max_total_body_bytes): send it again later"
            )
        self._held += nbytes
        share.nbytes += nbytes


class Share:
    """What one body takes of a ``BodyMemory``."""

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes = 0


class GrowingBuffer(bytearray):
    """A bytearray that says when it is freed: weak references to it are possible, and to others they are not.

    What it allocates ahead, an eighth at most, nobody writes to, so it is no memory yet.
    """


async def read_msgpack(request: Request, max_bytes: int, memory: BodyMemory) -> memoryview:
    """The body of a msgpack request, of at most ``max_bytes``, for which there must be ``memory``.

    Raises:
        QueueFullError: other bodies take too much memory. Nothing was read of one that announced its length.
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
    return await read_body(request, max_bytes, memory)


async def read_json(request: Request) -> Any:
    """The value of a small JSON body, whatever its content type says. The number of requests is all that bounds them.

    Raises:
        PayloadTooLargeError: it is larger than 64 KiB.
        MalformedRequestError: it is not JSON.
    """
    body = await read_body(request, MAX_JSON_BYTES, BodyMemory(MAX_JSON_BYTES))
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise MalformedRequestError(f"the body is not JSON: {error}") from None


async def read_body(request: Request, max_bytes: int, memory: BodyMemory) -> memoryview:
    """The body, of at most ``max_bytes``; see ``read_msgpack`` for the errors."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaTypeError(
            f"compressed bodies are not read: send it without Content-Encoding {encoding[:100]!r}",
            param="Content-Encoding",
        )
    announced = request.headers.get("content-length")
    if announced is None:
        return await _read_unannounced(request, max_bytes, memory)
    if not (announced.isascii() and announced.isdigit()):
        raise MalformedRequestError(f"Content-Length must be a number of bytes, got {announced[:32]!r}")
    # Compared as text first: turning thousands of digits into an integer is refused by Python, and slow.
    length = int(announced) if len(announced.lstrip("0")) < 19 else max_bytes + 1
    if length > max_bytes:
        raise _too_large(f"{announced[:32]} bytes are announced", max_bytes)
    # Memory of np.empty is not touched before the bytes are there, so an announcement alone costs nothing; and the stream
    # into one buffer takes half the time of joining its chunks afterwards.
    array = np.empty(length, np.uint8)
    # All of it now: half a body is of no use to anybody.
    memory.take(memory.share_of(array), length)
    buffer = array.data
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


async def _read_unannounced(request: Request, max_bytes: int, memory: BodyMemory) -> memoryview:
    """A chunked body: its length is known only at the end, so the limits are watched on the way."""
    buffer = GrowingBuffer()
    share = memory.share_of(buffer)
    async for chunk in request.stream():
        if len(buffer) + len(chunk) > max_bytes:
            raise _too_large("it has more", max_bytes)
        memory.take(share, len(chunk))
        buffer += chunk
    return memoryview(buffer)


def _too_large(found: str, max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"a body may have {max_bytes} bytes here, and {found}")
