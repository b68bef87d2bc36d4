"""How much memory request bodies take together: counted from the head of a request until its latents are decoded."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from decode_client.wire import OutputSpec

from decode_service import errors
from decode_service.engine.protocol import DecodeJob, DecodeOutcome
from decode_service.http import create_app, request_id

Body = Callable[..., bytes]


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """What is freed only when somebody looks for cycles is not free: it may take minutes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@dataclass
class Call:
    """One request to the application as a server makes it: what was asked of it, and what it answered."""

    head: list[tuple[bytes, bytes]]
    messages: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    received: int = 0
    sent: list[dict[str, Any]] = field(default_factory=list)

    async def receive(self) -> dict[str, Any]:
        message = await self.messages.get()
        self.received += 1
        return message

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def put(self, content: bytes, more: bool = False) -> None:
        self.messages.put_nowait({"type": "http.request", "body": content, "more_body": more})

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode().lower(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def error(self) -> dict[str, Any]:
        content = b"".join(message.get("body", b"") for message in self.sent[1:])
        error: dict[str, Any] = json.loads(content)["error"]
        return error


class Server:
    """An application with its requests in flight."""

    def __init__(self, service: Any) -> None:
        self.service = service
        self.app = create_app(service)

    @property
    def held(self) -> int:
        held: int = self.app.state.bodies.held
        return held

    def begin(self, length: int | None) -> tuple[Call, asyncio.Task[None]]:
        """A request whose head has arrived; ``length`` None sends a chunked body."""
        head = [(b"content-type", b"application/msgpack")]
        head += [(b"transfer-encoding", b"chunked")] if length is None else [(b"content-length", b"%d" % length)]
        call = Call(head)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/decode",
            "raw_path": b"/decode",
            "root_path": "",
            "query_string": b"",
            "headers": head,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        return call, asyncio.ensure_future(self.app(scope, call.receive, call.send))  # type: ignore[arg-type]

    async def whole(self, body: bytes) -> Call:
        """A request from head to reply."""
        call, task = self.begin(len(body))
        call.put(body)
        await task
        self.service.jobs.clear()
        return call


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 30)

    asyncio.run(limited())


def test_what_would_be_too_much_together_is_refused_before_it_is_read(service: Any, body_of: Body) -> None:
    body = body_of()
    service.max_total_body_bytes = 3 * len(body) - 1

    async def test() -> None:
        server = Server(service)
        slow = [server.begin(len(body)) for _ in range(2)]
        await until(lambda: server.held == 2 * len(body))
        refused, task = server.begin(len(body))
        await task
        assert refused.status == 503 and refused.received == 0
        assert refused.error["type"] == "queue_full" and int(refused.headers["retry-after"]) >= 1
        assert "limits.max_total_body_bytes" in refused.error["message"]
        assert f"take {2 * len(body)} bytes" in refused.error["message"]
        # The others are none the worse for it, and their memory is there for the next.
        for call, task in slow:
            call.put(body)
            await task
            assert call.status == 200
        service.jobs.clear()
        assert server.held == 0
        assert (await server.whole(body)).status == 200

    run(test)


def test_one_alone_is_received_as_often_as_it_comes(service: Any, body_of: Body) -> None:
    body = body_of()
    service.max_body_bytes = service.max_total_body_bytes = len(body)

    async def test() -> None:
        server = Server(service)
        for _ in range(3):
            assert (await server.whole(body)).status == 200
            assert server.held == 0
            call, task = server.begin(None)
            for start in range(0, len(body), 100):
                call.put(body[start : start + 100], more=True)
            call.put(b"")
            await task
            service.jobs.clear()
            assert call.status == 200 and server.held == 0

    run(test)


def test_a_body_of_unknown_length_counts_as_it_grows(service: Any, body_of: Body) -> None:
    body = body_of()
    service.max_total_body_bytes = len(body) + 250

    async def test() -> None:
        server = Server(service)
        call, task = server.begin(None)
        for sent in (100, 200):
            call.put(body[sent - 100 : sent], more=True)
            await until(lambda sent=sent: server.held == sent)  # type: ignore[misc]
        other = server.begin(len(body))
        await until(lambda: server.held == len(body) + 200)
        call.put(body[200:], more=False)
        await task
        assert call.status == 503 and call.error["type"] == "queue_full"
        assert f"take {len(body)} bytes" in call.error["message"]
        assert server.held == len(body)
        other[0].put(body)
        await other[1]
        service.jobs.clear()
        assert other[0].status == 200 and server.held == 0

    run(test)


def test_latents_count_while_they_are_decoded(service: Any, body_of: Body) -> None:
    body = body_of()
    service.delay_s = 0.05

    async def test() -> None:
        server = Server(service)
        call, task = server.begin(len(body))
        call.put(body)
        await until(lambda: bool(service.jobs))
        service.jobs.clear()
        assert server.held == len(body)
        await task
        assert call.status == 200 and server.held == 0

    run(test)


def test_a_file_is_encoded_without_the_latents(service: Any, body_of: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    from decode_service.http import app as application

    held: list[int] = []

    async def test() -> None:
        server = Server(service)
        file_reply = application.file_reply

        async def watched(*arguments: Any) -> Any:
            held.append(server.held)
            return await file_reply(*arguments)

        monkeypatch.setattr(application, "file_reply", watched)
        decode = service.decode

        async def forgetting(job: DecodeJob) -> DecodeOutcome:
            outcome: DecodeOutcome = await decode(job)
            service.jobs.clear()
            return outcome

        monkeypatch.setattr(service, "decode", forgetting)
        assert (await server.whole(body_of(output=OutputSpec(format="png")))).status == 200

    run(test)
    assert held == [0]


def test_latents_that_are_decoded_for_nobody_count_until_they_are(service: Any, body_of: Body) -> None:
    """A run is not interrupted when its caller leaves: its latents still take memory."""
    body = body_of()
    service.delay_s = 30

    async def test() -> None:
        server = Server(service)
        call, task = server.begin(len(body))
        call.put(body)
        await until(lambda: bool(service.jobs))
        call.leave()
        await task
        assert not call.sent and server.held == len(body)
        service.jobs.clear()
        assert server.held == 0

    run(test)


def announced(body: bytes) -> int | None:
    return len(body)


def chunked(body: bytes) -> int | None:
    return None


@pytest.mark.parametrize("length_of", [announced, chunked])
class TestNothingIsLeft:
    """Of any request, however it ends."""

    def ended(
        self,
        service: Any,
        body: bytes,
        length: int | None,
        *,
        end: Callable[[Call, asyncio.Task[None]], Awaitable[None]] | None = None,
        content: bytes | None = None,
        status: int | None = None,
    ) -> None:
        """One request of ``body``, of which ``content`` is sent at first; ``end`` does the rest."""

        async def test() -> None:
            server = Server(service)
            call, task = server.begin(length)
            content_ = body if content is None else content
            call.put(content_, more=end is not None and len(content_) < len(body))
            if end is not None:
                await end(call, task)
            await asyncio.wait([task])
            if status is not None:
                assert call.status == status, call.error
            service.jobs.clear()
            assert task.cancelled() or task.exception() is None
            del task
            assert server.held == 0
            # And the next one is received.
            service.failure, service.delay_s = None, 0.0
            assert (await server.whole(body)).status == 200

        run(test)

    def test_who_leaves_in_the_middle_of_a_body(self, service: Any, body_of: Body, length_of: Any) -> None:
        body = body_of()

        async def leave(call: Call, task: asyncio.Task[None]) -> None:
            await until(lambda: call.received == 1)
            call.leave()

        self.ended(service, body, length_of(body), content=body[:99], end=leave)

    def test_who_leaves_while_decoding(self, service: Any, body_of: Body, length_of: Any) -> None:
        body, service.delay_s = body_of(), 30

        async def leave(call: Call, task: asyncio.Task[None]) -> None:
            await until(lambda: bool(service.jobs))
            call.leave()

        self.ended(service, body, length_of(body), end=leave)

    @pytest.mark.parametrize("decoding", [False, True])
    def test_whose_handler_is_cancelled(self, service: Any, body_of: Body, length_of: Any, decoding: bool) -> None:
        """As Serve does after request_timeout_s."""
        body, service.delay_s = body_of(), 30

        async def cancel(call: Call, task: asyncio.Task[None]) -> None:
            await until(lambda: bool(service.jobs) if decoding else call.received == 1)
            task.cancel()

        self.ended(service, body, length_of(body), content=body if decoding else body[:99], end=cancel)

    def test_what_is_malformed(self, service: Any, body_of: Body, length_of: Any) -> None:
        body = body_of()
        wrong = bytes([0xC1]) + body[1:]
        self.ended(service, body, length_of(body), content=wrong, status=400)

    def test_what_is_cut_off_or_too_long(self, service: Any, body_of: Body, length_of: Any) -> None:
        body = body_of()
        self.ended(service, body, length_of(body), content=body[:-1], status=400)
        self.ended(service, body, length_of(body), content=body + b"x", status=400)

    def test_latents_that_do_not_fit_the_model(self, service: Any, body_of: Body, length_of: Any) -> None:
        for latents in (np.zeros((1, 7, 4, 4), np.float32), np.full((1, 4, 4, 4), np.nan, np.float32)):
            wrong = body_of(latents)
            self.ended(service, body_of(), length_of(wrong), content=wrong, status=422)

    def test_a_deadline_that_is_over(self, service: Any, body_of: Body, length_of: Any) -> None:
        late = body_of(deadline_ms=1e-6)
        self.ended(service, body_of(), length_of(late), content=late, status=504)

    @pytest.mark.parametrize(
        ("failure", "status"),
        [
            (errors.QueueFullError("full"), 503),
            (errors.DeadlineExceededError("late"), 504),
            (RuntimeError("a bug"), 500),
        ],
        ids=["queue full", "deadline", "bug"],
    )
    def test_a_decode_that_fails(
        self,
        service: Any,
        body_of: Body,
        length_of: Any,
        failure: Exception,
        status: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # pytest keeps what is logged, tracebacks and all that they hold.
        monkeypatch.setattr(request_id.logger, "disabled", True)
        body = body_of()

        async def decode(job: DecodeJob) -> DecodeOutcome:
            service.jobs.append(job)
            await asyncio.sleep(0)
            raise failure.__class__(*failure.args)

        decoded, service.decode = service.decode, decode

        async def again(call: Call, task: asyncio.Task[None]) -> None:
            await asyncio.wait([task])
            service.decode = decoded

        self.ended(service, body, length_of(body), end=again, status=status)

    def test_a_body_that_is_larger_than_allowed(self, service: Any, body_of: Body, length_of: Any) -> None:
        body = body_of()
        service.max_body_bytes = len(body)
        self.ended(service, body, length_of(body + b"x"), content=body + b"x", status=413)
