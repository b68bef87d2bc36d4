"""Every error is JSON of one form with its own status, and the next good request works."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from decode_client.wire import OutputSpec
from starlette.testclient import TestClient

from decode_service import errors
from decode_service.engine.protocol import Readiness
from decode_service.http import create_app


def check(reply, status, kind, param=None):
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) == {"type", "message", "param", "request_id"}
    assert (error["type"], error["param"]) == (kind, param), error
    assert error["message"]
    assert error["request_id"] == reply.headers["x-request-id"]
    return error["message"]


@pytest.fixture
def works_after(client, body_of):
    yield
    assert client.post("/decode", content=body_of()).status_code == 200


@pytest.mark.parametrize("content_type", ["application/json", "text/plain; charset=x"])
def test_another_content_type_is_415_and_the_right_one_is_named(service, body_of, content_type):
    client = TestClient(create_app(service))
    headers = {"Content-Type": content_type}
    message = check(
        client.post("/decode", content=body_of(), headers=headers), 415, "unsupported_media_type", "Content-Type"
    )
    assert "application/msgpack" in message


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "application/octet-stream"}])
def test_bytes_of_no_type_are_taken_for_msgpack(service, body_of, headers):
    with TestClient(create_app(service)) as client:
        assert client.post("/decode", content=body_of(), headers=headers).status_code == 200


@pytest.mark.parametrize("content_type", ["application/x-msgpack", "Application/MsgPack; version=5"])
def test_other_spellings_of_msgpack_are_read(client, body_of, content_type):
    assert client.post("/decode", content=body_of(), headers={"Content-Type": content_type}).status_code == 200


def test_a_compressed_body_is_415(client, body_of):
    reply = client.post("/decode", content=body_of(), headers={"Content-Encoding": "gzip"})
    check(reply, 415, "unsupported_media_type", "Content-Encoding")


@pytest.mark.usefixtures("works_after")
class TestRequests:
    def test_another_model_is_404_and_the_served_one_is_named(self, client, body_of):
        message = check(client.post("/decode", content=body_of(model="wan")), 404, "model_not_found", "model")
        assert "lab/nearest" in message

    def test_latents_of_another_model_are_422(self, client, service, body_of, latents_of):
        check(client.post("/decode", content=body_of(latents_of(1, 16, 4, 4))), 422, "invalid_latents", "latents.shape")
        assert not service.jobs

    @pytest.mark.parametrize(
        ("shape", "fields", "kind", "param", "words"),
        [
            ((1, 15, 16), {"layout": "packed"}, "invalid_request", "height", "height is needed"),
            ((1, 15, 16), {"height": 48}, "invalid_request", "width", "width is needed"),
            ((1, 15, 16), {"height": 48, "width": 72}, "invalid_request", "width", "64 or 80 would be"),
            ((1, 15, 16), {"height": 64, "width": 80}, "invalid_latents", "latents.shape", "4 x 5 = 20 tokens"),
            ((1, 15, 12), {"height": 48, "width": 80}, "invalid_latents", "latents.shape", "packed (B,tokens,16)"),
            ((4, 4, 6, 10), {}, "invalid_request", "layout", "layout BCHW, CTHW or TCHW"),
            ((1, 4, 6, 10), {"layout": "patchified"}, "invalid_request", "layout", "it takes auto, BCHW"),
            ((1, 4, 6, 10), {"height": 50}, "invalid_request", "height", "decode to height 48"),
            ((1, 3, 4, 6, 10), {"layout": "BCTHW"}, "invalid_latents", "latents.shape", "has 3 (dimension 1)"),
        ],
    )
    def test_latents_that_do_not_lie_as_the_request_says_are_422(
        self, client, service, body_of, latents_of, shape, fields, kind, param, words
    ):
        reply = client.post("/decode", content=body_of(latents_of(*shape), **fields))
        assert words in check(reply, 422, kind, param)
        assert not service.jobs
        wanted = client.post("/plan", json={"shape": list(shape), **fields})
        assert words in check(wanted, 422, kind, param.removeprefix("latents."))

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_one_value_that_is_not_finite_is_422(self, client, service, body_of, latents_of, value):
        latents = latents_of()
        latents[0, 3, 5, 9] = value
        check(client.post("/decode", content=body_of(latents)), 422, "non_finite_latents", "latents.data")
        assert not service.jobs

    def test_the_shape_is_judged_before_the_values(self, client, body_of):
        latents = np.full((1, 16, 4, 4), np.nan, np.float32)
        check(client.post("/decode", content=body_of(latents)), 422, "invalid_latents", "latents.shape")

    def test_too_many_pixels_are_422(self, client, service, body_of):
        service.max_output_pixels = 100
        check(client.post("/decode", content=body_of()), 422, "output_too_large", "latents.shape")
        service.max_output_pixels = 1 << 24

    def test_a_reply_past_the_wire_format_is_refused_before_it_is_decoded(self, client, service, body_of, latents_of):
        service.max_output_pixels = 1 << 40
        body = body_of(latents_of(1, 4, 50, 60, 60), OutputSpec(dtype="float32"))
        service.max_body_bytes = len(body)
        assert 197 * 480 * 480 * 3 * 4 < 2**32
        service.channels = 24
        check(client.post("/decode", content=body), 422, "output_too_large", "output.dtype")
        service.channels = 3
        assert not service.jobs

    def test_a_mode_that_cannot_run_is_422(self, client, body_of):
        check(client.post("/decode", content=body_of(mode="tile")), 422, "unsupported_mode", "mode")

    @pytest.mark.parametrize(
        ("shape", "output", "instead"),
        [
            ((2, 4, 4, 4), OutputSpec(format="png"), "one by one"),
            ((1, 4, 2, 4, 4), OutputSpec(format="webp"), "mp4"),
            ((2, 4, 2, 4, 4), OutputSpec(format="mp4"), "one by one"),
        ],
    )
    def test_what_a_format_cannot_hold_is_refused_before_it_is_decoded(
        self, client, service, body_of, latents_of, shape, output, instead
    ):
        reply = client.post("/decode", content=body_of(latents_of(*shape), output))
        message = check(reply, 422, "unsupported_output", "output.format")
        assert instead in message
        assert "'tensor'" in message
        assert not service.jobs

    def test_a_frame_rate_out_of_range_is_422(self, client, body_of):
        reply = client.post("/decode", content=body_of(output=OutputSpec(format="mp4", fps=1e9)))
        check(reply, 422, "invalid_request", "output.fps")

    def test_a_deadline_that_is_over_already_is_504(self, client, service, body_of):
        check(client.post("/decode", content=body_of(deadline_ms=1e-6)), 504, "deadline_exceeded", "deadline_ms")
        assert not service.jobs


SERVICE_ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.DecodeServiceError) and kind is not errors.DecodeServiceError
]


@pytest.mark.parametrize("kind", SERVICE_ERRORS, ids=lambda kind: kind.__name__)
def test_what_the_service_raises_is_answered_as_it_says(client, service, body_of, kind):
    service.failure = kind("what would be right", param="latents")
    reply = client.post("/decode", content=body_of())
    assert check(reply, kind.status, kind.type, "latents") == "what would be right"
    assert ("retry-after" in reply.headers) == (kind.retry_after_s is not None)
    service.failure = None
    assert client.post("/decode", content=body_of()).status_code == 200


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.2, "1"), (2.0, "2"), (2.01, "3")])
def test_retry_after_is_in_whole_seconds_rounded_up(client, service, body_of, retry_after_s, header):
    service.failure = errors.QueueFullError("full", retry_after_s=retry_after_s)
    assert client.post("/decode", content=body_of()).headers["retry-after"] == header


def test_an_unexpected_exception_is_logged_and_leaks_nothing(client, service, body_of, caplog):
    service.failure = RuntimeError("secret path /srv/keys")
    with caplog.at_level(logging.ERROR, logger="decode_service.http"):
        reply = client.post("/decode", content=body_of(), headers={"X-Request-Id": "abc"})
    message = check(reply, 500, "internal_error")
    assert "secret" not in message
    assert "abc" in message
    assert any(record.exc_info and "abc" in record.getMessage() for record in caplog.records)
    service.failure = None
    assert client.post("/decode", content=body_of()).status_code == 200


def test_an_unknown_route_is_404_and_lists_the_routes(client):
    message = check(client.get("/decoder"), 404, "not_found")
    assert "POST /decode" in message
    assert "GET /v1/models" in message


def test_a_wrong_method_is_405_and_names_the_right_one(client):
    reply = client.get("/decode")
    assert "use POST" in check(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"


def test_a_missing_library_is_422_and_says_what_to_install(client, service, body_of, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reply = client.post("/decode", content=body_of(output=OutputSpec(format="png")))
    assert "pillow" in check(reply, 422, "unsupported_output", "output.format")
    assert not service.jobs


def test_not_ready_is_503_with_its_state(client, service):
    service.ready = Readiness(False, "warming up", ("rank 1 restarted",))
    reply = client.get("/readyz")
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "5"
    assert reply.json()["error"]["type"] == "not_ready"
    assert "warming up" in reply.json()["error"]["message"]
    assert reply.json()["state"] == "warming up"
    assert reply.json()["warnings"] == ["rank 1 restarted"]


def test_a_model_that_is_still_loading_answers_503_everywhere_but_lives(client, service, body_of):
    service.loading = True
    service.ready = Readiness(False, "loading")
    check(client.post("/decode", content=body_of()), 503, "not_ready")
    check(client.post("/plan", json={"shape": [1, 4, 6, 10], "model": "lab/nearest"}), 503, "not_ready")
    check(client.get("/v1/models/lab/nearest"), 503, "not_ready")
    assert client.get("/readyz").json()["state"] == "loading"
    assert client.get("/healthz").status_code == 200
    service.loading = False
    assert client.post("/decode", content=body_of()).status_code == 200
