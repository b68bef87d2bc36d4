"""A small real HTTP server that speaks the protocol, and misbehaves on demand; and callers of both clients."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from decode_client import AsyncDecodeClient, DecodeClient, _protocol
from decode_client.wire import DecodeRequest, WireError, WireTensor, tensor_reply_prefix, unpack_request


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """What the server answers; ``before`` runs first (to sleep), ``truncate`` promises more bytes than it sends."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    before: Callable[[], None] | None = None
    truncate: bool = False
    drop: bool = False
    drip_s: float = 0.0


def pixels_of(request: DecodeRequest) -> WireTensor:
    """A decode that a test can compute too: the first three channels, as float32 or scaled to uint8."""
    first = request.latents.float32()[:, :3]
    if request.output.dtype == "uint8":
        scaled = np.moveaxis(first, 1, -1).clip(-1, 1) * 127.5 + 127.5
        return WireTensor.from_array(np.rint(scaled).astype(np.uint8))
    if request.output.dtype == "bfloat16":
        bits = request.latents.carrier()[:, :3]
        return WireTensor.from_array(bits, dtype="bfloat16")
    return WireTensor.from_array(first.astype(request.output.dtype))


def tensor_answer(request: DecodeRequest, request_id: str) -> Answer:
    pixels = pixels_of(request)
    fields = {
        "plan": {"mode": "direct", "ranks": 1, "reason": "small"},
        "timings": {"decode": 1.5, "queue": 0.25},
        "model": request.model or "demo",
        "request_id": request_id,
        "compiled": False,
        "digests": ["ab", "ab"] if request.collect == "broadcast" else [],
    }
    prefix = tensor_reply_prefix(pixels.dtype, pixels.shape, pixels.nbytes, fields)
    return Answer(headers={"Content-Type": "application/msgpack"}, body=prefix + bytes(pixels.data))


def file_answer(content_type: str, body: bytes) -> Answer:
    headers = {
        "Content-Type": content_type,
        "X-Decode-Plan": json.dumps({"mode": "tile", "ranks": 2}),
        "X-Decode-Model": "demo",
        "X-Decode-Shape": "[1,5,16,24,3]",
        "X-Decode-Compiled": "true",
        "Server-Timing": 'queue;dur=0.5, decode;dur=12.25;desc="all ranks", cached',
    }
    return Answer(headers=headers, body=body)


def json_answer(status: int, value: Any, **headers: str) -> Answer:
    return Answer(status, {"Content-Type": "application/json", **headers}, json.dumps(value).encode())


def error_answer(status: int, type: str, param: str | None = None, **headers: str) -> Answer:
    error = {"type": type, "message": f"{type} it is", "param": param, "request_id": "from-server"}
    return json_answer(status, {"error": error}, **headers)


class Service:
    """Answers in the order of ``script``, then as a healthy service would."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.script: list[Answer] = []
        self.files: dict[str, Answer] = {}
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                seen = Seen(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                service.seen.append(seen)
                answer = service.script.pop(0) if service.script else service.usual(seen)
                if answer.before is not None:
                    answer.before()
                if answer.drop:
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                length = len(answer.body) + (100 if answer.truncate else 0)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                try:
                    for start in range(0, len(answer.body), 16 if answer.drip_s else max(1, len(answer.body))):
                        self.wfile.write(answer.body[start : start + 16] if answer.drip_s else answer.body)
                        self.wfile.flush()
                        time.sleep(answer.drip_s)
                except OSError:
                    self.close_connection = True
                if answer.truncate:
                    self.close_connection = True

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def usual(self, seen: Seen) -> Answer:
        path = seen.path.removeprefix("/app")
        if path == "/decode":
            try:
                request = unpack_request(seen.body)
            except WireError as error:
                return error_answer(400 if error.malformed else 422, "invalid_request", error.param)
            if request.output.format != "tensor":
                return self.files[request.output.format]
            return tensor_answer(request, seen.headers["x-request-id"])
        if path == "/plan":
            return json_answer(200, {"plan": {"mode": "direct", "asked": json.loads(seen.body)}})
        if path == "/v1/models":
            return json_answer(200, {"models": [{"name": "demo"}]})
        if path == "/v1/models/demo":
            return json_answer(200, {"name": "demo", "latent_channels": 4})
        if path in ("/healthz", "/readyz"):
            return json_answer(200, {"status": "ok"})
        return error_answer(404, "not_found")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DECODE_SERVICE_URL", "DECODE_SERVICE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_protocol, "BACKOFF_FIRST_S", 0.01)


@dataclass
class Caller:
    """Calls one method of a fresh client, sync or async, so that every test below holds for both."""

    kind: str

    def __call__(self, url: str, method: str, *args: Any, client: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        if self.kind == "sync":
            with DecodeClient(url, **(client or {})) as sync_client:
                return getattr(sync_client, method)(*args, **kwargs)

        async def run() -> Any:
            async with AsyncDecodeClient(url, **(client or {})) as async_client:
                made = getattr(async_client, method)(*args, **kwargs)
                assert inspect.isawaitable(made)
                return await made

        return asyncio.run(run())


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Caller:
    return Caller(request.param)


@dataclass
class Answers:
    """The makers of answers, for tests that script the server."""

    plain = Answer
    tensor = staticmethod(tensor_answer)
    file = staticmethod(file_answer)
    json = staticmethod(json_answer)
    error = staticmethod(error_answer)


@pytest.fixture
def answers() -> type[Answers]:
    return Answers
