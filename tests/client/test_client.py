"""The clients against a real HTTP server that is slow, broken, busy or wrong: each cause has its own error."""

from __future__ import annotations

import asyncio
import email.utils
import inspect
import socket
import threading
import time
from pathlib import Path
from typing import Any

import decode_client
import httpx2
import numpy as np
import pytest
from decode_client import (
    APIStatusError,
    AsyncDecodeClient,
    AuthError,
    BadRequestError,
    ConnectionFailedError,
    DeadlineExceededError,
    DecodeClient,
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
    _protocol,
    _replies,
)
from decode_client.wire import unpack_request

LATENTS = np.linspace(-1, 1, 4 * 2 * 3, dtype=np.float32).reshape(1, 4, 2, 3)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class TestDecode:
    def test_returns_pixels_plan_and_timings(self, service: Any, call: Any) -> None:
        result = call(service.url, "decode", LATENTS, model="demo", request_id="abc-1")
        assert result.dtype == "uint8"
        assert result.shape == result.numpy().shape == (1, 2, 3, 3)
        assert result.numpy()[0, 0, 0, 0] == 0
        assert result.plan["mode"] == "direct"
        assert result.timings == {"decode": 1.5, "queue": 0.25}
        assert (result.model, result.request_id, result.digests) == ("demo", "abc-1", ())
        assert result.compiled is False
        assert result.content_type == "application/msgpack"
        assert result.content == result.numpy().tobytes()

    def test_sends_every_option(self, service: Any, call: Any) -> None:
        options = {"denormalize": True, "mode": "tile", "strict": False, "collect": "broadcast", "chunk": 2}
        options |= {"layout": "BCHW", "height": 16, "width": 24, "frames": 1, "layers": 3}
        options |= {"timestep": 0.05, "noise_scale": 0.025, "seed": 2**64 - 1}
        result = call(service.url, "decode", LATENTS, **options, dtype="float32", range="model", deadline_s=60)
        sent = unpack_request(service.seen[0].body)
        assert {name: getattr(sent, name) for name in options} == options
        assert (sent.output.dtype, sent.output.range) == ("float32", "model")
        assert 59_000 < sent.deadline_ms <= 60_000
        assert np.array_equal(sent.latents.carrier(), LATENTS)
        assert np.array_equal(result.numpy(), LATENTS[:, :3])
        assert result.digests == ("ab", "ab")

    def test_files_come_back_as_they_are(self, service: Any, call: Any, answers: Any, tmp_path: Path) -> None:
        service.files["mp4"] = answers.file("video/mp4", b"a film")
        result = call(service.url, "decode", LATENTS[:, :, None], format="mp4", fps=24, quality=80)
        assert result.content == b"a film"
        assert result.plan == {"mode": "tile", "ranks": 2}
        assert result.timings == {"queue": 0.5, "decode": 12.25}
        assert (result.model, result.shape, result.dtype) == ("demo", (1, 5, 16, 24, 3), None)
        assert result.compiled is True
        assert result.save(tmp_path / "clip.mp4").read_bytes() == b"a film"

    def test_path_prefix_key_and_headers_are_sent(self, service: Any, call: Any) -> None:
        options = {"api_key": "secret\n", "default_headers": {"X-Team": "pictures"}}
        call(service.url + "/app/", "decode", LATENTS, client=options)
        seen = service.seen[0]
        assert seen.path == "/app/decode"
        assert seen.headers["authorization"] == "Bearer secret"
        assert seen.headers["x-team"] == "pictures"
        assert seen.headers["content-type"] == "application/msgpack"
        assert seen.headers["user-agent"].startswith(f"decode-client/{decode_client.__version__} python/")

    def test_environment_says_where_and_who(self, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DECODE_SERVICE_URL", service.url)
        monkeypatch.setenv("DECODE_SERVICE_API_KEY", "from-env")
        with DecodeClient() as client:
            client.decode(LATENTS)
        assert service.seen[0].headers["authorization"] == "Bearer from-env"

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"latents": LATENTS.astype(np.float64)}, ValueError, r"\.astype\(np\.float32\)"),
            ({"latents": [[1.0]]}, TypeError, "numpy array"),
            ({"mode": "tiles"}, ValueError, "did you mean tile"),
            ({"format": "gif"}, ValueError, "png, jpeg"),
            ({"format": "png", "dtype": "float32"}, ValueError, "8-bit"),
            ({"deadline_s": 0}, ValueError, "above 0"),
            ({"chunk": 0}, ValueError, "at least 1"),
            ({"request_id": "a b\n"}, ValueError, "visible ASCII"),
            ({"chunks": 2}, TypeError, "chunks"),
        ],
    )
    def test_wrong_arguments_are_refused_before_anything_is_sent(
        self, service: Any, call: Any, options: dict[str, Any], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            call(service.url, "decode", **{"latents": LATENTS, **options})
        assert not service.seen


class TestOtherRoutes:
    def test_plan(self, service: Any, call: Any) -> None:
        plan = call(service.url, "plan", (1, 4, np.int64(8), 8), mode="tile", strict=True)
        assert plan["asked"] == {"shape": [1, 4, 8, 8], "mode": "tile", "strict": True}
        assert service.seen[0].headers["content-type"] == "application/json"
        plan = call(
            service.url, "plan", (1, 15, 16), layout="packed", height=np.int64(48), width=80, frames=5, layers=2
        )
        extents = {"height": 48, "width": 80, "frames": 5, "layers": 2}
        assert plan["asked"] == {"shape": [1, 15, 16], "layout": "packed", **extents, "mode": "auto"}
        plan = call(service.url, "plan", (1, 4, 8, 8), denormalize=True, dtype="float32", range="model")
        output = {"dtype": "float32", "range": "model"}
        assert plan["asked"] == {"shape": [1, 4, 8, 8], "denormalize": True, "mode": "auto", "output": output}
        with pytest.raises(ValueError, match="8-bit pixels"):
            call(service.url, "plan", (1, 4, 8, 8), format="png", dtype="float32")
        with pytest.raises(ValueError, match="True or False"):
            call(service.url, "plan", (1, 4, 8, 8), denormalize=np.True_)

    def test_models(self, service: Any, call: Any) -> None:
        assert call(service.url, "models") == [{"name": "demo"}]
        assert call(service.url, "model", "demo")["latent_channels"] == 4
        with pytest.raises(NotFoundError):
            call(service.url, "model", "../healthz")
        assert service.seen[-1].path == "/v1/models/..%2Fhealthz"

    def test_a_model_is_asked_for_the_latents_of_a_size(self, service: Any, call: Any, answers: Any) -> None:
        told = {"name": "demo", "for_size": {"latent_shape": [2, 4, 3, 8, 6]}}
        service.script = [answers.json(200, told)]
        assert call(service.url, "model", "demo", height=64, width=48, frames=9, batch=2) == told
        assert service.seen[-1].path == "/v1/models/demo?height=64&width=48&frames=9&batch=2"
        with pytest.raises(ValueError, match="a height and a width"):
            call(service.url, "model", "demo", height=64)

    def test_replies_of_another_program_are_invalid(self, service: Any, call: Any, answers: Any) -> None:
        for method, arguments in (("plan", [(1, 4, 8, 8)]), ("models", []), ("model", ["demo"])):
            service.script = [answers.plain(200, {"Content-Type": "text/html"}, b"<h1>It works!</h1>")]
            with pytest.raises(InvalidReplyError):
                call(service.url, method, *arguments)

    def test_healthy_and_ready_are_yes_or_no(self, service: Any, call: Any, answers: Any) -> None:
        assert call(service.url, "healthy") is True
        assert call(service.url, "ready") is True
        for status in (404, 500, 503):
            service.script = [answers.json(status, {"ready": False})]
            assert call(service.url, "ready") is False
        assert call(f"http://127.0.0.1:{free_port()}", "healthy") is False
        assert len(service.seen) == 5

    def test_a_wrong_key_is_not_merely_unready(self, service: Any, call: Any, answers: Any) -> None:
        service.script = [answers.error(401, "unauthorized")]
        with pytest.raises(AuthError):
            call(service.url, "wait_until_ready", 5)


class TestWaitUntilReady:
    def test_returns_once_the_service_is_ready(self, service: Any, call: Any, answers: Any) -> None:
        service.script = [answers.plain(404), answers.json(503, {"state": "warming up"}), answers.plain(drop=True)]
        call(service.url, "wait_until_ready", 10, poll_s=0.01)
        assert [seen.path for seen in service.seen] == ["/readyz"] * 4

    def test_says_what_stood_in_the_way(self, service: Any, call: Any, answers: Any) -> None:
        service.script = [answers.json(503, {"state": "loading", "warnings": ["weights are large"]})] * 100
        started = time.monotonic()
        with pytest.raises(NotReadyError, match=r"0\.2 s.*loading; weights are large") as caught:
            call(service.url, "wait_until_ready", 0.2, poll_s=0.02)
        assert time.monotonic() - started < 5
        assert isinstance(caught.value, TimeoutError)

    def test_gives_up_on_an_address_where_nothing_listens(self, call: Any) -> None:
        with pytest.raises(NotReadyError, match="failed"):
            call(f"http://127.0.0.1:{free_port()}", "wait_until_ready", 0.1, poll_s=0.02)

    def test_starts_before_the_service_does(self, call: Any) -> None:
        port = free_port()
        late: list[Any] = []

        def start() -> None:
            from http.server import BaseHTTPRequestHandler, HTTPServer

            class Ready(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    self.send_response(200)
                    self.end_headers()

                def log_message(self, format: str, *args: Any) -> None:
                    pass

            late.append(HTTPServer(("127.0.0.1", port), Ready))
            late[0].serve_forever(0.02)

        timer = threading.Timer(0.2, start)
        timer.start()
        call(f"http://127.0.0.1:{port}", "wait_until_ready", 10, poll_s=0.05)
        timer.join(0)
        late[0].shutdown()
        late[0].server_close()


class TestErrors:
    @pytest.mark.parametrize(
        ("status", "type", "error"),
        [
            (400, "malformed_request", BadRequestError),
            (401, "unauthorized", AuthError),
            (403, "forbidden", AuthError),
            (404, "model_not_found", NotFoundError),
            (409, "conflict", APIStatusError),
            (413, "payload_too_large", TooLargeError),
            (415, "unsupported_media_type", BadRequestError),
            (422, "invalid_latents", UnprocessableError),
            (429, "rate_limited", RateLimitedError),
            (500, "internal_error", ServerError),
            (503, "queue_full", QueueFullError),
            (503, "not_ready", UnavailableError),
            (504, "deadline_exceeded", DeadlineExceededError),
            (507, "out_of_memory", ServerError),
        ],
    )
    def test_have_a_class_per_cause(
        self, service: Any, call: Any, answers: Any, status: int, type: str, error: type[APIStatusError]
    ) -> None:
        service.script = [answers.error(status, type, "latents.shape")]
        with pytest.raises(error) as caught:
            call(service.url, "decode", LATENTS, client={"max_retries": 0})
        raised = caught.value
        assert raised.__class__ is error
        assert (raised.status, raised.type, raised.param) == (status, type, "latents.shape")
        assert raised.request_id == "from-server"
        assert all(part in str(raised) for part in (str(status), type, "latents.shape", "from-server"))

    @pytest.mark.parametrize(
        ("content_type", "body", "message"),
        [
            ("text/html", b"<html><h1>502 Bad\n Gateway</h1></html>", "502 Bad Gateway"),
            ("text/plain", b"", "the server answered 502"),
            ("application/json", b"[1, 2]", "the server answered 502"),
            ("application/json", b'{"detail": "upstream is gone"}', "upstream is gone"),
            ("application/json", b'{"error": "upstream is gone"}', "upstream is gone"),
            ("application/json", b'{"error": {"message": null, "param": 3}}', "the server answered 502"),
            ("application/json", b'{"error"', '{"error"'),
            ("application/octet-stream", b"\xff\xfe\x00", None),
        ],
    )
    def test_of_a_proxy_are_typed_too(
        self, service: Any, call: Any, answers: Any, content_type: str, body: bytes, message: str | None
    ) -> None:
        service.script = [answers.plain(502, {"Content-Type": content_type}, body)]
        with pytest.raises(ServerError) as caught:
            call(service.url, "decode", LATENTS, client={"max_retries": 0}, request_id="mine")
        assert (caught.value.status, caught.value.type, caught.value.request_id) == (502, "http_502", "mine")
        assert message is None or caught.value.message == message

    def test_never_show_credentials(self, call: Any) -> None:
        url = f"http://user:hunter2@127.0.0.1:{free_port()}"
        with pytest.raises(ConnectionFailedError) as caught:
            call(url, "decode", LATENTS, client={"max_retries": 0, "api_key": "sesame"})
        assert "hunter2" not in str(caught.value)
        assert "127.0.0.1" in str(caught.value)
        with DecodeClient(url, api_key="sesame") as client:
            assert "hunter2" not in repr(client) + client.base_url + repr(client._settings)
            assert "sesame" not in repr(client._settings)
        with pytest.raises(ValueError, match="visible ASCII") as refused:
            DecodeClient(url, api_key="ses ame")
        assert "ses ame" not in str(refused.value)

    @pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://h:port", "http://h/?q=1", ""])
    def test_of_an_unusable_base_url_come_at_once(self, url: str) -> None:
        for kind in (DecodeClient, AsyncDecodeClient):
            with pytest.raises(ValueError):
                kind(url)


class TestInvalidReplies:
    @pytest.mark.parametrize(
        ("content_type", "body"),
        [
            ("text/html", b"<h1>hello</h1>"),
            ("application/json", b"{}"),
            ("application/msgpack", b""),
            ("application/msgpack", b"\xc1"),
            ("application/msgpack", b"\x80"),
            ("application/msgpack", b"\x81\xa6pixels\x83\xa5dtype\xa5uint8\xa5shape\x92\x02\x02\xa4data\xc4\x04abcd"),
            ("application/msgpack", b"\x81\xa6pixels\x83\xa5dtype\xa5uint8\xa5shape\x92\x02\x02\xa4data\xc4\x09abcd"),
        ],
        ids=["html", "json", "empty", "garbage", "no pixels", "two dimensions", "cut"],
    )
    def test_are_refused(self, service: Any, call: Any, answers: Any, content_type: str, body: bytes) -> None:
        service.script = [answers.plain(200, {"Content-Type": content_type}, body)]
        with pytest.raises(InvalidReplyError) as caught:
            call(service.url, "decode", LATENTS, request_id="mine")
        assert caught.value.request_id == "mine"
        assert len(service.seen) == 1

    def test_of_another_dtype_than_asked(self, service: Any, call: Any, answers: Any) -> None:
        call(service.url, "decode", LATENTS)
        service.script = [answers.tensor(unpack_request(service.seen[0].body), "x")]
        with pytest.raises(InvalidReplyError, match="expected float32"):
            call(service.url, "decode", LATENTS, dtype="float32")

    def test_of_another_format_than_asked(self, service: Any, call: Any, answers: Any) -> None:
        service.files["png"] = answers.file("image/jpeg", b"x")
        with pytest.raises(InvalidReplyError, match="expected image/png"):
            call(service.url, "decode", LATENTS, format="png")

    def test_with_a_plan_that_is_not_json(self, service: Any, call: Any, answers: Any) -> None:
        service.files["png"] = answers.plain(200, {"Content-Type": "image/png", "X-Decode-Plan": "{tile"}, b"x")
        with pytest.raises(InvalidReplyError, match="X-Decode-Plan"):
            call(service.url, "decode", LATENTS, format="png")


class TestRetries:
    @pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
    def test_follow_errors_that_may_pass(self, service: Any, call: Any, answers: Any, status: int) -> None:
        service.script = [answers.error(status, "some_error"), answers.error(status, "some_error")]
        assert call(service.url, "decode", LATENTS).model == "demo"
        assert len(service.seen) == 3

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 415, 422, 501, 507])
    def test_do_not_follow_errors_that_stay(self, service: Any, call: Any, answers: Any, status: int) -> None:
        service.script = [answers.error(status, "some_error")] * 3
        with pytest.raises(APIStatusError):
            call(service.url, "decode", LATENTS)
        assert len(service.seen) == 1

    def test_do_not_follow_a_decode_that_went_to_nan(self, service: Any, call: Any, answers: Any) -> None:
        service.script = [answers.error(500, "non_finite_output")]
        with pytest.raises(ServerError):
            call(service.url, "decode", LATENTS)
        assert len(service.seen) == 1

    @pytest.mark.parametrize("broken", [{"drop": True}, {"truncate": True, "body": b"half"}], ids=["dropped", "cut"])
    def test_follow_connections_that_break(self, service: Any, call: Any, answers: Any, broken: dict[str, Any]) -> None:
        service.script = [answers.plain(**broken), answers.plain(**broken)]
        assert call(service.url, "decode", LATENTS).model == "demo"
        assert len(service.seen) == 3

    def test_end_with_the_last_error(self, service: Any, call: Any, answers: Any) -> None:
        service.script = [answers.plain(502), answers.plain(502), answers.error(503, "queue_full")]
        with pytest.raises(QueueFullError):
            call(service.url, "decode", LATENTS)
        service.script = [answers.plain(drop=True)] * 3
        with pytest.raises(ConnectionFailedError) as caught:
            call(service.url, "decode", LATENTS)
        assert isinstance(caught.value, ConnectionError)
        assert len(service.seen) == 6

    def test_are_as_many_as_asked(self, service: Any, call: Any, answers: Any) -> None:
        for retries in (0, 1, 4):
            service.seen.clear()
            service.script = [answers.plain(503)] * 9
            with pytest.raises(UnavailableError):
                call(service.url, "decode", LATENTS, client={"max_retries": retries})
            assert len(service.seen) == retries + 1

    def test_keep_the_request_id_and_the_bytes(self, service: Any, call: Any, answers: Any) -> None:
        service.script = [answers.plain(503), answers.plain(503)]
        result = call(service.url, "decode", LATENTS)
        assert {seen.headers["x-request-id"] for seen in service.seen} == {result.request_id}
        assert len({seen.body for seen in service.seen}) == 1
        assert call(service.url, "decode", LATENTS).request_id != result.request_id

    def test_wait_as_long_as_the_server_asks(self, service: Any, call: Any, answers: Any) -> None:
        service.script = [answers.plain(503, {"Retry-After": "1"})]
        started = time.monotonic()
        call(service.url, "decode", LATENTS)
        assert 1 <= time.monotonic() - started < 10

    def test_wait_until_the_date_that_the_server_names(self, service: Any, call: Any, answers: Any) -> None:
        at = email.utils.formatdate(time.time() + 2, usegmt=True)
        service.script = [answers.plain(429, {"Retry-After": at})]
        started = time.monotonic()
        call(service.url, "decode", LATENTS)
        assert 0.9 <= time.monotonic() - started < 10

    def test_do_not_happen_when_the_server_asks_for_longer(self, service: Any, call: Any, answers: Any) -> None:
        service.script = [answers.error(503, "not_ready", **{"Retry-After": "61"})]
        with pytest.raises(UnavailableError) as caught:
            call(service.url, "decode", LATENTS)
        assert caught.value.retry_after == 61
        assert len(service.seen) == 1

    @pytest.mark.parametrize(
        ("value", "seconds"),
        [
            ("0", 0),
            (" 7 ", 7),
            ("2.5", 2.5),
            ("Thu, 01 Jan 1970 00:01:40 GMT", 40),
            ("Thu, 01 Jan 1970 00:00:10 GMT", 0),
            ("soon", None),
            ("-3", None),
            ("", None),
            (None, None),
        ],
    )
    def test_read_every_form_of_retry_after(self, value: str | None, seconds: float | None) -> None:
        assert _replies.parse_retry_after(value, now=60.0) == seconds

    def test_back_off_longer_each_time_and_never_less_than_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_protocol, "BACKOFF_FIRST_S", 0.5)
        for attempt, most in enumerate([0.5, 1, 2, 4, 8, 8, 8]):
            assert most * 0.75 <= _protocol.retry_delay(attempt, None) <= most
        assert 3 <= _protocol.retry_delay(0, 3.0) <= 3.2
        assert len({_protocol.retry_delay(3, None) for _ in range(20)}) > 1
        assert _protocol.retry_delay(100_000, None) <= 8


class TestDeadlines:
    def test_a_retry_does_not_outlast_the_deadline(self, service: Any, call: Any, answers: Any) -> None:
        service.script = [answers.error(503, "queue_full", **{"Retry-After": "30"})]
        started = time.monotonic()
        with pytest.raises(QueueFullError):
            call(service.url, "decode", LATENTS, deadline_s=20)
        assert time.monotonic() - started < 15
        assert len(service.seen) == 1

    def test_every_attempt_says_what_is_left(self, service: Any, call: Any, answers: Any) -> None:
        service.script = [answers.plain(503, before=lambda: time.sleep(0.2))]
        call(service.url, "decode", LATENTS, deadline_s=30)
        first, second = (unpack_request(seen.body).deadline_ms for seen in service.seen)
        assert 200 <= first - second < 5000

    def test_the_client_stops_waiting_at_the_deadline(self, service: Any, call: Any, answers: Any) -> None:
        service.script = [answers.plain(before=lambda: time.sleep(6))]
        started = time.monotonic()
        with pytest.raises(TimedOutError) as caught:
            call(service.url, "decode", LATENTS, deadline_s=0.2)
        assert time.monotonic() - started < 5
        assert isinstance(caught.value, TimeoutError)
        assert len(service.seen) == 1

    def test_a_reply_that_drips_does_not_outlast_the_timeout(self, service: Any, call: Any, answers: Any) -> None:
        service.script = [answers.plain(body=bytes(16 * 1000), drip_s=0.05)]
        started = time.monotonic()
        with pytest.raises(TimedOutError, match="still arriving"):
            call(service.url, "decode", LATENTS, timeout=0.3)
        assert time.monotonic() - started < 20

    def test_a_timeout_is_not_tried_again(self, service: Any, call: Any, answers: Any) -> None:
        service.script = [answers.plain(before=lambda: time.sleep(0.6))] * 3
        for timeout in (0.1, httpx2.Timeout(0.1)):
            service.seen.clear()
            with pytest.raises(TimedOutError, match=r"POST .*/decode timed out after"):
                call(service.url, "decode", LATENTS, timeout=timeout)
            assert len(service.seen) == 1

    def test_the_clients_timeout_is_the_default(self, service: Any, call: Any, answers: Any) -> None:
        service.script = [answers.plain(before=lambda: time.sleep(0.6))]
        with pytest.raises(TimedOutError):
            call(service.url, "decode", LATENTS, client={"timeout": 0.1})
        call(service.url, "decode", LATENTS, client={"timeout": None})


class TestOneSurface:
    def test_both_clients_have_the_same_methods_and_keywords(self) -> None:
        shared = {"decode", "plan", "models", "model", "healthy", "ready", "wait_until_ready", "with_options", "close"}
        for name in shared:
            sync, asynchronous = getattr(DecodeClient, name), getattr(AsyncDecodeClient, name)
            assert list(inspect.signature(sync).parameters) == list(inspect.signature(asynchronous).parameters), name
        ours, theirs = (inspect.signature(kind.__init__).parameters for kind in (DecodeClient, AsyncDecodeClient))
        assert list(ours) == list(theirs)

    def test_help_shows_the_keywords(self) -> None:
        parameters = inspect.signature(DecodeClient.decode).parameters
        assert list(parameters)[:3] == ["self", "latents", "model"]
        assert parameters["dtype"].default == "uint8"

    def test_keywords_for_type_checkers_are_those_of_the_call(self) -> None:
        from decode_client.client import DecodeOptions, PlanOptions

        for options, flow in ((DecodeOptions, _protocol.decode_flow), (PlanOptions, _protocol.plan_flow)):
            assert set(options.__annotations__) == set(list(inspect.signature(flow).parameters)[2:])

    def test_an_unknown_keyword_names_the_method_that_was_called(self) -> None:
        with DecodeClient("http://127.0.0.1:1") as client:
            with pytest.raises(TypeError, match=r"^decode\(\) .*'hight'; did you mean height\?$"):
                client.decode(LATENTS, hight=64)  # type: ignore[call-arg]
            with pytest.raises(TypeError, match=r"^plan\(\) .*'seed'; it has .*layout"):
                client.plan((1, 4, 8, 8), seed=1)  # type: ignore[call-arg]

        async def asynchronous() -> None:
            async with AsyncDecodeClient("http://127.0.0.1:1") as client:
                with pytest.raises(TypeError, match=r"^decode\(\) .*'xyzzy'; it has model, layout"):
                    await client.decode(LATENTS, xyzzy=1)  # type: ignore[call-arg]

        asyncio.run(asynchronous())

    def test_with_options_shares_connections_and_changes_the_rest(self, service: Any, answers: Any) -> None:
        with DecodeClient(service.url, default_headers={"X-A": "1", "X-B": "1"}) as client:
            with client.with_options(max_retries=0, default_headers={"X-B": "2"}) as other:
                service.script = [answers.plain(503)]
                with pytest.raises(UnavailableError):
                    other.decode(LATENTS)
            client.decode(LATENTS)
        assert service.seen[0].headers["x-a"] == "1"
        assert [seen.headers["x-b"] for seen in service.seen] == ["2", "1"]
        with pytest.raises(ValueError, match="max_retries"):
            client.with_options(max_retries=-1)

    def test_your_own_transport_is_used_and_stays_open(self, service: Any) -> None:
        with httpx2.Client(headers={"X-Mine": "yes"}) as mine:
            with DecodeClient(service.url, http_client=mine) as client:
                client.decode(LATENTS)
            assert not mine.is_closed
        assert service.seen[0].headers["x-mine"] == "yes"

    def test_an_application_can_be_called_without_a_socket(self, service: Any) -> None:
        async def application(scope: Any, receive: Any, send: Any) -> None:
            body = b""
            while True:
                message = await receive()
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
            headers = [(b"content-type", b"application/msgpack")]
            from decode_client.wire import tensor_reply_prefix

            extents = (1, *unpack_request(body).latents.shape[2:], 3)
            size = int(np.prod(extents))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            content = tensor_reply_prefix("uint8", extents, size, {}) + bytes(size)
            await send({"type": "http.response.body", "body": content})

        async def run() -> None:
            transport = httpx2.ASGITransport(application)
            async with (
                httpx2.AsyncClient(transport=transport) as mine,
                AsyncDecodeClient("http://inside", http_client=mine) as client,
            ):
                results = await asyncio.gather(*(client.decode(LATENTS) for _ in range(5)))
            assert {result.shape for result in results} == {(1, 2, 3, 3)}

        asyncio.run(run())

    def test_threads_can_share_a_client(self, service: Any) -> None:
        results: list[Any] = []
        with DecodeClient(service.url) as client:
            threads = [threading.Thread(target=lambda: results.append(client.decode(LATENTS))) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len({result.request_id for result in results}) == 6

    def test_cancelling_an_async_call_frees_its_connection(self, service: Any, answers: Any) -> None:
        service.script = [answers.plain(before=lambda: time.sleep(0.5))]

        async def run() -> None:
            async with AsyncDecodeClient(service.url) as client:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(client.decode(LATENTS), 0.1)
                assert (await client.decode(LATENTS)).model == "demo"

        asyncio.run(run())
