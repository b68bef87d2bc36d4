"""Reading replies, whoever wrote them: results of those that are what was asked for, typed errors of all others."""

from __future__ import annotations

import email.utils
import json
import re
import time
from dataclasses import dataclass
from typing import Any

import httpx2

from decode_client.errors import APIStatusError, InvalidReplyError, status_error_class
from decode_client.result import CONTENT_TYPES, DecodeResult
from decode_client.wire import MSGPACK_CONTENT_TYPE, DecodeRequest, WireError, unpack_tensor_reply


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply, read whole."""

    status: int
    headers: httpx2.Headers
    body: bytearray


def status_error(reply: Reply, request_id: str) -> APIStatusError:
    """The typed error for a reply that is not 2xx, whoever wrote its body."""
    message, type_name, param = "", f"http_{reply.status}", None
    known_id = reply.headers.get("x-request-id") or request_id
    try:
        fields = json.loads(reply.body)
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, dict):
        error = fields.get("error")
        if isinstance(error, dict):
            message = str(error.get("message") or "")
            type_name = str(error.get("type") or type_name)
            param = error.get("param") if isinstance(error.get("param"), str) else None
            known_id = str(error.get("request_id") or known_id)
        else:
            message = str(error or fields.get("detail") or fields.get("message") or "")
            state, warnings = fields.get("state"), fields.get("warnings")
            if not message and isinstance(state, str):
                message = "; ".join([state, *(str(w) for w in (warnings if isinstance(warnings, list) else []))])
    if not message:
        text = re.sub(r"<[^>]*>|\s+", " ", reply.body[:2000].decode("utf-8", "replace")) if fields is None else ""
        message = " ".join(text.split())[:200] or f"the server answered {reply.status}"
    return status_error_class(reply.status, type_name)(
        message,
        status=reply.status,
        type=type_name,
        param=param,
        request_id=known_id,
        retry_after=parse_retry_after(reply.headers.get("retry-after"), time.time()),
    )


def parse_retry_after(value: str | None, now: float) -> float | None:
    """Seconds from a ``Retry-After`` header (seconds or an HTTP date), at least 0; None where it is neither."""
    if value is None:
        return None
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", value):
        return float(value)
    try:
        at = email.utils.parsedate_to_datetime(value).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return max(0.0, at - now)


def decode_result(reply: Reply, request: DecodeRequest, request_id: str) -> DecodeResult:
    """The result of a 2xx reply to ``request``.

    Raises:
        InvalidReplyError: if the reply is not what was asked for.
    """
    output = request.output
    content_type = _media_type(reply)
    expected = MSGPACK_CONTENT_TYPE if output.format == "tensor" else CONTENT_TYPES[output.format]
    known_id: str = reply.headers.get("x-request-id") or request_id
    if content_type != expected:
        raise InvalidReplyError(f"expected {expected}, got {content_type or 'no content type'}", request_id=known_id)
    if output.format == "tensor":
        try:
            fields = unpack_tensor_reply(reply.body)
        except WireError as error:
            raise InvalidReplyError(f"the reply cannot be read: {error.message}", request_id=known_id) from error
        pixels = fields["pixels"]
        if pixels.dtype != output.dtype or len(pixels.shape) not in (4, 5):
            got = f"{pixels.dtype} of {len(pixels.shape)} dimensions"
            raise InvalidReplyError(f"expected {output.dtype} of 4 or 5 dimensions, got {got}", request_id=known_id)
        plan, timings, model = fields.get("plan"), fields.get("timings"), fields.get("model")
        known_id = str(fields.get("request_id") or known_id)
        digests = fields.get("digests") or []
        compiled = fields.get("compiled")
    else:
        pixels, digests = None, []
        if not reply.body:
            raise InvalidReplyError(f"the {output.format} file is empty", request_id=known_id)
        plan = _plan_header(reply, known_id)
        timings = parse_server_timing(reply.headers.get("server-timing", ""))
        model = reply.headers.get("x-decode-model")
        compiled = {"true": True, "false": False}.get(reply.headers.get("x-decode-compiled", ""))
    if not isinstance(plan or {}, dict) or not isinstance(timings or {}, dict) or not isinstance(digests, list):
        raise InvalidReplyError("the reply's plan and timings must be maps, its digests a list", request_id=known_id)
    return DecodeResult(
        format=output.format,
        content_type=content_type,
        body=reply.body,
        pixels=pixels,
        range=output.range,
        shape=parse_shape(reply.headers.get("x-decode-shape", "")),
        plan=plan,
        timings=timings,
        model=model,
        request_id=known_id,
        digests=digests,
        compiled=compiled if isinstance(compiled, bool) else None,
    )


def parse_shape(value: str) -> list[int] | None:
    """Extents from an ``X-Decode-Shape`` header, a JSON list; None where it is not one."""
    try:
        shape = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return shape if isinstance(shape, list) and all(type(extent) is int for extent in shape) else None


def parse_server_timing(value: str) -> dict[str, float]:
    """Milliseconds by name from a ``Server-Timing`` header; entries without a duration are left out."""
    timings: dict[str, float] = {}
    for entry in value.split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, number = parameter.partition("=")
            if key.strip().lower() == "dur" and name:
                try:
                    timings[name] = float(number.strip().strip('"'))
                except ValueError:
                    continue
    return timings


def _plan_header(reply: Reply, request_id: str) -> Any:
    header = reply.headers.get("x-decode-plan")
    if header is None:
        return None
    try:
        return json.loads(header)
    except (ValueError, RecursionError) as error:
        raise InvalidReplyError("the X-Decode-Plan header is not JSON", request_id=request_id) from error


def _media_type(reply: Reply) -> str:
    header: str = reply.headers.get("content-type", "")
    return header.partition(";")[0].strip().lower()


def json_map(reply: Reply, request_id: str) -> dict[str, Any]:
    """The JSON object of a reply.

    Raises:
        InvalidReplyError: if it holds none.
    """
    try:
        fields = json.loads(reply.body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise InvalidReplyError("expected a JSON object", request_id=request_id)
    return fields
