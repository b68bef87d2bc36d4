"""Everything the two clients do apart from sending and sleeping, as generators.

A *flow* yields ``Send`` and ``Sleep`` steps and returns the method's result; a client carries the steps out and hands
back the reply (or throws in what went wrong). So retries and deadlines exist once, and know nothing of threads or event
loops. What replies say is read in ``_replies``.
"""

from __future__ import annotations

import json
import logging
import operator
import platform
import random
import re
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

import httpx2

from decode_client._replies import Reply, decode_result, json_map, status_error
from decode_client._version import __version__
from decode_client.errors import (
    APIStatusError,
    AuthError,
    ConnectionFailedError,
    DecodeError,
    InvalidReplyError,
    NotReadyError,
    TimedOutError,
)
from decode_client.inputs import Latents, latents_tensor
from decode_client.result import DecodeResult
from decode_client.wire import (
    MSGPACK_CONTENT_TYPE,
    DecodeRequest,
    OutputSpec,
    WireError,
    pack_request,
)

log = logging.getLogger("decode_client")

CONNECT_TIMEOUT_S = 5.0
POOL_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 5.0
PROBE_INTERVAL_S = 0.5

#: Statuses after which the same request may succeed. Decoding is pure, so sending it again is safe.
RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
#: Errors of those statuses that the same latents would only meet again.
NEVER_RETRIED_TYPES = frozenset({"non_finite_output"})
#: A server that asks for a longer pause than this gets no retry: the caller is better told now.
MAX_RETRY_AFTER_S = 60.0
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 8.0

_RETRIED_FAILURES = (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ProxyError, httpx2.ConnectTimeout)

Timeout: TypeAlias = "float | httpx2.Timeout | None"


@dataclass(frozen=True, slots=True)
class Send:
    """Send one HTTP request and read the whole reply.

    Attributes:
        expires_at: ``time.monotonic()`` after which the reply is no longer read, also if bytes keep coming; or None.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None
    timeout: httpx2.Timeout
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


class Receiver:
    """Collects one reply's body in one buffer, and stops at the deadline."""

    def __init__(self, send: Send, response: httpx2.Response) -> None:
        self._expires_at = send.expires_at
        self._response = response
        self._body = bytearray()

    def add(self, piece: bytes) -> None:
        self._body += piece
        if self._expires_at is not None and time.monotonic() > self._expires_at:
            raise httpx2.ReadTimeout("the reply was still arriving")

    def reply(self) -> Reply:
        return Reply(self._response.status_code, self._response.headers, self._body)


T = TypeVar("T")
Flow: TypeAlias = Generator[Send | Sleep, Any, T]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a client was constructed with.

    Attributes:
        base_url: without a trailing slash; may hold a path prefix.
        timeout: seconds that one attempt may take, or a ``httpx2.Timeout`` of its phases, or None for no limit.
        max_retries: attempts after the first.
    """

    base_url: str
    api_key: str | None
    timeout: Timeout
    max_retries: int
    default_headers: Mapping[str, str]

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url must be like http://host:port or https://host/prefix, got {self.shown_url!r}")
        _ = parts.port  # raises ValueError where it is not a port
        if parts.query or parts.fragment:
            raise ValueError("base_url must have neither a query nor a fragment")
        if self.api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", self.api_key):
            # Not shown: whatever it is, it is a secret. An HTTP library would quote it in its own error.
            raise ValueError("api_key must be visible ASCII characters")
        if isinstance(self.timeout, (int, float)) and not self.timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, got {self.timeout}")
        if isinstance(self.max_retries, bool) or not isinstance(self.max_retries, int) or self.max_retries < 0:
            raise ValueError(f"max_retries must be an integer of at least 0, got {self.max_retries!r}")
        object.__setattr__(self, "base_url", self.base_url.rstrip("/"))

    def __repr__(self) -> str:
        return f"Settings(base_url={self.shown_url!r}, max_retries={self.max_retries})"

    @property
    def shown_url(self) -> str:
        """The base URL without credentials, for messages."""
        parts = urlsplit(self.base_url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    def headers(self, request_id: str, extra: Mapping[str, str]) -> dict[str, str]:
        """Headers of one request; the caller's own defaults win over the client's, and ``extra`` over both."""
        headers = {
            "User-Agent": f"decode-client/{__version__} python/{platform.python_version()}",
            # Pixels hardly compress, and a proxy that tries costs more time than it saves.
            "Accept-Encoding": "identity",
        }
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        merged = httpx2.Headers(headers)
        merged.update(dict(self.default_headers))
        merged.update({"X-Request-Id": request_id, **extra})
        return dict(merged)


@dataclass(frozen=True, slots=True)
class Call:
    """One logical request, over however many attempts.

    Attributes:
        content: makes the body, given the seconds that are left (None: no deadline).
        timeout: as in ``Settings``.
        deadline_s: seconds from the start of the call after which it must be over, retries included.
    """

    method: str
    path: str
    request_id: str
    content: Callable[[float | None], bytes] | None = None
    content_type: str | None = None
    timeout: Timeout = None
    deadline_s: float | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Flows


def exchange(settings: Settings, call: Call) -> Flow[Reply]:
    """Send a call, again where that may help, until a 2xx reply.

    Raises:
        DecodeError: the last attempt's, by cause.
    """
    started = time.monotonic()
    deadline_at = None if call.deadline_s is None else started + call.deadline_s
    attempt = 0
    while True:
        error: DecodeError
        try:
            reply: Reply = yield _send(settings, call, deadline_at)
        except httpx2.HTTPError as failure:
            error = _failure_error(settings, call, failure, time.monotonic() - started)
            retry = isinstance(failure, _RETRIED_FAILURES)
            asked = None
        else:
            if 200 <= reply.status < 300:
                return reply
            error = status_error(reply, call.request_id)
            retry = error.status in RETRIED_STATUSES and error.type not in NEVER_RETRIED_TYPES
            asked = error.retry_after
        if not retry or attempt >= settings.max_retries or (asked is not None and asked > MAX_RETRY_AFTER_S):
            raise error
        delay = retry_delay(attempt, asked)
        if deadline_at is not None and time.monotonic() + delay >= deadline_at:
            raise error
        attempt += 1
        log.debug("retry %d of %d in %.2f s: %s", attempt, settings.max_retries, delay, error)
        yield Sleep(delay)


def decode_flow(
    settings: Settings,
    latents: Latents,
    *,
    model: str | None = None,
    layout: str = "auto",
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    layers: int | None = None,
    denormalize: bool = False,
    timestep: float | None = None,
    noise_scale: float | None = None,
    seed: int | None = None,
    mode: str = "auto",
    strict: bool | None = None,
    collect: str | None = None,
    chunk: int | None = None,
    format: str = "tensor",
    dtype: str = "uint8",
    range: str = "unit",
    fps: float | None = None,
    quality: int | None = None,
    deadline_s: float | None = None,
    timeout: Timeout = None,
    request_id: str | None = None,
) -> Flow[DecodeResult]:
    output = _output(format, dtype, range, fps, quality)
    request = DecodeRequest(
        latents=latents_tensor(latents),
        model=model,
        layout=layout,
        height=height,
        width=width,
        frames=frames,
        layers=layers,
        denormalize=denormalize,
        timestep=timestep,
        noise_scale=noise_scale,
        seed=seed,
        mode=mode,
        strict=strict,
        collect=collect,
        chunk=chunk,
        output=output,
        deadline_ms=None if deadline_s is None else _milliseconds(deadline_s),
    )

    def body(left_s: float | None) -> bytes:
        # Every attempt tells the server how long somebody still waits, not how long they meant to at first.
        return pack_request(request if left_s is None else replace(request, deadline_ms=left_s * 1000))

    call = Call(
        "POST",
        "/decode",
        _request_id(request_id),
        body,
        MSGPACK_CONTENT_TYPE,
        settings.timeout if timeout is None else timeout,
        deadline_s,
    )
    reply = yield from exchange(settings, call)
    return decode_result(reply, request, call.request_id)


def _output(format: str, dtype: str, range: str, fps: float | None, quality: int | None) -> OutputSpec:
    """
    Raises:
        WireError: a keyword is out of range, or does not go with the others.
    """
    try:
        return OutputSpec(format=format, dtype=dtype, range=range, fps=fps, quality=quality)
    except WireError as error:
        raise error.under("output") from None


def plan_flow(
    settings: Settings,
    shape: Sequence[int],
    *,
    model: str | None = None,
    layout: str = "auto",
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    layers: int | None = None,
    denormalize: bool = False,
    mode: str = "auto",
    strict: bool | None = None,
    collect: str | None = None,
    chunk: int | None = None,
    format: str = "tensor",
    dtype: str = "uint8",
    range: str = "unit",
    fps: float | None = None,
    quality: int | None = None,
    timeout: Timeout = None,
) -> Flow[dict[str, Any]]:
    output = _output(format, dtype, range, fps, quality)
    if not isinstance(denormalize, bool):
        raise ValueError(f"denormalize must be True or False, got {denormalize!r}")
    # Defaults are left out, so that services that do not know a field yet still plan.
    chosen = {
        each.name: getattr(output, each.name) for each in fields(output) if getattr(output, each.name) != each.default
    }
    given: dict[str, Any] = {"model": model, "layout": None if layout == "auto" else layout}
    given |= {"height": height, "width": width, "frames": frames, "layers": layers, "denormalize": denormalize or None}
    given |= {"mode": mode, "strict": strict, "collect": collect, "chunk": chunk, "output": chosen or None}
    wanted = {"shape": [int(extent) for extent in shape]} | {k: v for k, v in given.items() if v is not None}
    # Numpy's integers are as good as Python's.
    content = json.dumps(wanted, default=operator.index).encode()
    call = Call(
        "POST",
        "/plan",
        _request_id(None),
        lambda _: content,
        "application/json",
        settings.timeout if timeout is None else timeout,
    )
    reply = yield from exchange(settings, call)
    plan = json_map(reply, call.request_id).get("plan")
    if not isinstance(plan, dict):
        raise InvalidReplyError("the reply holds no plan", request_id=call.request_id)
    return plan


def models_flow(settings: Settings) -> Flow[list[dict[str, Any]]]:
    call = Call("GET", "/v1/models", _request_id(None), timeout=settings.timeout)
    reply = yield from exchange(settings, call)
    fields = json_map(reply, call.request_id)
    models = fields.get("models", fields.get("data"))
    if not isinstance(models, list):
        raise InvalidReplyError("the reply holds no list of models", request_id=call.request_id)
    return models


def model_flow(
    settings: Settings,
    name: str,
    *,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    batch: int | None = None,
) -> Flow[dict[str, Any]]:
    size = {"height": height, "width": width, "frames": frames, "batch": batch}
    given = {key: value for key, value in size.items() if value is not None}
    if given and not {"height", "width"} <= given.keys():
        raise ValueError("a size is a height and a width, in pixels")
    path = f"/v1/models/{quote(name, safe='')}" + (f"?{urlencode(given)}" if given else "")
    call = Call("GET", path, _request_id(None), timeout=settings.timeout)
    reply = yield from exchange(settings, call)
    return json_map(reply, call.request_id)


def probe_flow(settings: Settings, path: str) -> Flow[bool]:
    problem = yield from _probe(settings, path, PROBE_TIMEOUT_S)
    return problem is None


def wait_until_ready_flow(settings: Settings, timeout_s: float, poll_s: float = PROBE_INTERVAL_S) -> Flow[None]:
    if not timeout_s > 0 or not poll_s > 0:
        raise ValueError(f"timeout_s and poll_s must be above 0 seconds, got {timeout_s} and {poll_s}")
    give_up_at = time.monotonic() + timeout_s
    said: str | None = None
    while True:
        left_s = give_up_at - time.monotonic()
        problem = yield from _probe(settings, "/readyz", max(0.05, min(PROBE_TIMEOUT_S, left_s)))
        if problem is None:
            return
        said = problem.message if isinstance(problem, APIStatusError) else said
        if time.monotonic() + poll_s >= give_up_at:
            # The last probe may have had too little time for an answer; what the service said before still helps.
            before = "" if said in (None, problem.message) else f"; before that it said: {said}"
            raise NotReadyError(f"{settings.shown_url} was not ready within {timeout_s:g} s: {problem.message}{before}")
        yield Sleep(poll_s)


def _probe(settings: Settings, path: str, timeout_s: float) -> Flow[DecodeError | None]:
    """Ask once; None where the answer is yes, else what stands in the way.

    404 counts as "not yet": a service answers that way while its application is still being deployed.

    Raises:
        AuthError: waiting will not mend a wrong key.
    """
    call = Call("GET", path, _request_id(None), timeout=timeout_s)
    try:
        yield from exchange(replace(settings, max_retries=0), call)
    except AuthError:
        raise
    except DecodeError as error:
        return error
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Pieces


def _send(settings: Settings, call: Call, deadline_at: float | None) -> Send:
    now = time.monotonic()
    left_s = None if deadline_at is None else max(deadline_at - now, 0.001)
    limits = [value for value in (left_s, call.timeout) if isinstance(value, (int, float))]
    attempt_s = min(limits) if limits else None
    if isinstance(call.timeout, httpx2.Timeout):
        phases = call.timeout.as_dict()
        bounded = {k: v if left_s is None else min(v, left_s) if v is not None else left_s for k, v in phases.items()}
        timeout = httpx2.Timeout(**bounded)
    else:
        timeout = httpx2.Timeout(
            attempt_s,
            connect=CONNECT_TIMEOUT_S if attempt_s is None else min(CONNECT_TIMEOUT_S, attempt_s),
            pool=attempt_s if attempt_s is None else min(POOL_TIMEOUT_S, attempt_s),
        )
    content = None if call.content is None else call.content(left_s)
    return Send(
        method=call.method,
        url=settings.base_url + call.path,
        headers=settings.headers(call.request_id, {"Content-Type": call.content_type} if call.content_type else {}),
        content=content,
        timeout=timeout,
        expires_at=None if attempt_s is None else now + attempt_s,
    )


def retry_delay(attempt: int, asked_s: float | None) -> float:
    """Seconds to wait before attempt ``attempt + 1``: what the server asked for, else exponential backoff.

    Random, so that callers who were turned away together do not come back together; never less than was asked for.
    """
    backoff: float = min(BACKOFF_FIRST_S * 2.0 ** min(attempt, 16), BACKOFF_MAX_S)
    if asked_s is None:
        return backoff * (1 - 0.25 * random.random())
    return asked_s + 0.25 * backoff * random.random()


def _failure_error(settings: Settings, call: Call, failure: httpx2.HTTPError, took_s: float) -> DecodeError:
    where = f"{call.method} {settings.shown_url}{call.path}"
    reason = str(failure) or type(failure).__name__
    if isinstance(failure, httpx2.TimeoutException) and not isinstance(failure, httpx2.ConnectTimeout):
        return TimedOutError(f"{where} timed out after {took_s:.1f} s: {reason}", request_id=call.request_id)
    if isinstance(failure, (httpx2.DecodingError, httpx2.TooManyRedirects)):
        return InvalidReplyError(f"{where}: {reason}", request_id=call.request_id)
    return ConnectionFailedError(f"{where} failed: {reason}", request_id=call.request_id)


def _request_id(given: str | None) -> str:
    if given is None:
        return uuid.uuid4().hex
    if not re.fullmatch(r"[\x21-\x7e]{1,128}", given):
        raise ValueError("request_id must be 1 to 128 visible ASCII characters")
    return given


def _milliseconds(seconds: float) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise ValueError(f"deadline_s must be a finite number of seconds above 0, got {seconds!r}")
    return seconds * 1000
