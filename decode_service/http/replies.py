"""From an outcome to a reply: headers that say what was done, and the pixels as a map or as a file."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from decode_client.wire import MSGPACK_CONTENT_TYPE, OutputSpec, tensor_reply_prefix
from starlette.responses import Response, StreamingResponse

from decode_service.engine.off_loop import SMALL_BYTES
from decode_service.engine.protocol import DecodeOutcome
from decode_service.http.stages import Stages
from decode_service.media.encode import EncodedFile, encode

ChunkType = Literal["bytes", "memoryview"]

CHUNK_BYTES = 4 << 20
#: Proxies commonly refuse more than 8 KB of headers in all.
MAX_PLAN_HEADER_CHARS = 4096

# Encoding takes seconds for a video. In the threads that everything shares, a few of them would keep latents from being
# checked, and from being handed to ranks that are idle.
_encoders = ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0))), thread_name_prefix="encode")


def tensor_reply(
    outcome: DecodeOutcome, model: str, request_id: str, stages: Stages, chunk_type: ChunkType
) -> Response:
    """The pixels as a msgpack map, streamed from the parts as they are, with the length known up front."""
    fields: dict[str, Any] = {
        "model": model,
        "request_id": request_id,
        "plan": outcome.plan.public(),
        "timings": stages.total(),
        "compiled": outcome.compiled,
    }
    if outcome.digests:
        fields["digests"] = list(outcome.digests)
    prefix = tensor_reply_prefix(outcome.dtype, outcome.shape, outcome.nbytes, fields)
    headers = describe(outcome, model, request_id, stages)
    return _stream(_chained(prefix, outcome), len(prefix) + outcome.nbytes, MSGPACK_CONTENT_TYPE, headers, chunk_type)


async def file_reply(
    outcome: DecodeOutcome,
    output: OutputSpec,
    model: str,
    request_id: str,
    stages: Stages,
    chunk_type: ChunkType,
) -> Response:
    """The pixels as a PNG, JPEG, WebP or MP4 file, encoded off the event loop.

    Raises:
        UnsupportedOutputError: the encoder refuses the pixels.
    """
    encoded = await asyncio.get_running_loop().run_in_executor(_encoders, _encode, outcome, output)
    stages.lap("encode")
    headers = describe(outcome, model, request_id, stages)
    headers["Content-Disposition"] = f'inline; filename="decoded{encoded.extension}"'
    if encoded.details is not None:
        headers["X-Decode-Video"] = encoded.details
    pieces = _pieces(memoryview(encoded.data))
    return _stream(pieces, len(encoded.data), encoded.media_type, headers, chunk_type)


def describe(outcome: DecodeOutcome, model: str, request_id: str, stages: Stages) -> dict[str, str]:
    """The headers that every decoded reply carries."""
    return {
        "X-Request-Id": request_id,
        "X-Decode-Model": model,
        "X-Decode-Shape": json.dumps(list(outcome.shape), separators=(",", ":")),
        "X-Decode-Dtype": outcome.dtype,
        "X-Decode-Plan": plan_header(outcome.plan.public()),
        "X-Decode-Compiled": "true" if outcome.compiled else "false",
        "Server-Timing": server_timing(stages.total()),
    }


def plan_header(plan: dict[str, Any], max_chars: int = MAX_PLAN_HEADER_CHARS) -> str:
    """A plan as compact ASCII JSON. Where it is too long, the longest lists go first, then the ends of sentences."""
    shown = dict(plan)
    text = _compact(shown)
    if len(text) > max_chars and isinstance(shown.get("tiles"), dict):
        shown["tiles"] = {key: value for key, value in shown["tiles"].items() if key != "owners"}
        text = _compact(shown)
    if len(text) > max_chars:
        shown.pop("bands", None)
        text = _compact(shown)
    if len(text) > max_chars:
        # \uXXXX escapes take up to six characters each, twelve outside the basic plane.
        sentence = max_chars // 48
        shown = {key: value[:sentence] if isinstance(value, str) else value for key, value in shown.items()}
        text = _compact(shown)
    return text


def server_timing(timings_ms: dict[str, float]) -> str:
    """The ``Server-Timing`` header (W3C): ``stage;dur=milliseconds``, comma-separated."""
    return ", ".join(
        f"{re.sub(r'[^A-Za-z0-9_.-]', '_', stage)};dur={milliseconds:.2f}" for stage, milliseconds in timings_ms.items()
    )


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


def _encode(outcome: DecodeOutcome, output: OutputSpec) -> EncodedFile:
    pixels = outcome.assemble()
    if pixels.ndim == 4 and output.format != "mp4":
        # [1,H,W,C]: the batch is no time axis. (For mp4 a picture is a video of one frame.)
        pixels = pixels[0]
    return encode(output.format, pixels, fps=output.fps, quality=output.quality)


def _stream(
    pieces: Iterable[memoryview], nbytes: int, media_type: str, headers: dict[str, str], chunk_type: ChunkType
) -> Response:
    headers = {**headers, "Content-Length": str(nbytes)}
    if nbytes <= SMALL_BYTES:
        return Response(b"".join(pieces), media_type=media_type, headers=headers)
    # A plain generator runs in a worker thread, so interleaving the ranks' parts does not hold the event loop.
    content: Iterable[bytes | memoryview] = pieces if chunk_type == "memoryview" else (bytes(piece) for piece in pieces)
    return StreamingResponse(content, media_type=media_type, headers=headers)


def _chained(prefix: bytes, outcome: DecodeOutcome) -> Iterator[memoryview]:
    yield memoryview(prefix)
    yield from outcome.iter_bytes(CHUNK_BYTES)


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]
