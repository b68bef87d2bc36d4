"""What only a real server shows: limits before reading, bodies cut off, callers that leave, streams of known length."""

from __future__ import annotations

import http.client
import json
import socket
import time

import numpy as np
import pytest
from decode_client.wire import OutputSpec, unpack_tensor_reply

from decode_service.planning.plan import PixelFormat

HEADERS = {"Content-Type": "application/msgpack"}
BOTH_CHUNK_TYPES = pytest.mark.parametrize("chunk_type", ["bytes", "memoryview"])


def post(port, body, headers=HEADERS, **options):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", "/decode", body=body, headers=headers, **options)
        reply = connection.getresponse()
        return reply, reply.read()
    finally:
        connection.close()


def send_raw(port, head, body=b""):
    link = socket.create_connection(("127.0.0.1", port), timeout=30)
    lines = ["POST /decode HTTP/1.1", "Host: x", "Content-Type: application/msgpack", *head, "", ""]
    link.sendall("\r\n".join(lines).encode() + body)
    return link


def receive_reply(link):
    reply = http.client.HTTPResponse(link)
    reply.begin()
    return reply, json.loads(reply.read())


@BOTH_CHUNK_TYPES
def test_a_large_reply_streams_with_its_length(port, service, body_of, latents_of):
    latents = latents_of(1, 4, 2, 64, 128)
    reply, content = post(port, body_of(latents))
    assert reply.status == 200
    assert int(reply.headers["Content-Length"]) == len(content) > 4 << 20
    assert "Transfer-Encoding" not in reply.headers
    pixels = unpack_tensor_reply(content)["pixels"].carrier()
    np.testing.assert_array_equal(pixels, service.pixels(latents, PixelFormat()))


@BOTH_CHUNK_TYPES
def test_a_large_file_streams_with_its_length(port, body_of, latents_of):
    body = body_of(latents_of(1, 4, 64, 64), OutputSpec(format="png"))
    reply, content = post(port, body)
    assert reply.status == 200
    assert int(reply.headers["Content-Length"]) == len(content)


class TestBodies:
    def test_an_announced_body_over_the_limit_is_refused_before_it_is_sent(self, port, service):
        link = send_raw(port, [f"Content-Length: {service.max_body_bytes + 1}"])
        reply, error = receive_reply(link)
        assert reply.status == 413
        assert str(service.max_body_bytes) in error["error"]["message"]

    def test_an_absurd_length_is_refused_too(self, port):
        reply, _ = receive_reply(send_raw(port, [f"Content-Length: {'9' * 18}"]))
        assert reply.status == 413

    def test_a_caller_that_sends_its_large_body_first_still_reads_the_413(self, port, service, body_of):
        service.max_body_bytes = 1 << 20
        reply, content = post(port, bytes(32 << 20))
        assert reply.status == 413
        assert json.loads(content)["error"]["type"] == "payload_too_large"
        assert post(port, body_of())[0].status == 200

    def test_a_chunked_body_is_read(self, port, body_of):
        body = body_of()
        chunks = (body[start : start + 100] for start in range(0, len(body), 100))
        assert post(port, chunks, encode_chunked=True)[0].status == 200

    def test_a_chunked_body_over_the_limit_is_413(self, port, service):
        reply, content = post(port, (bytes(1 << 16) for _ in range(40)), encode_chunked=True)
        assert reply.status == 413
        assert json.loads(content)["error"]["type"] == "payload_too_large"

    def test_a_body_cut_off_leaves_the_server_working(self, port, service, body_of):
        body = body_of()
        link = send_raw(port, [f"Content-Length: {len(body)}"], body[: len(body) // 2])
        time.sleep(0.1)
        link.close()
        assert post(port, body)[0].status == 200
        assert len(service.jobs) == 1

    def test_a_slow_body_is_put_together(self, port, body_of):
        body = body_of()
        link = send_raw(port, [f"Content-Length: {len(body)}", "Connection: close"])
        for start in range(0, len(body), 250):
            link.sendall(body[start : start + 250])
            time.sleep(0.02)
        assert http_status(link) == 200

    def test_a_bad_content_length_is_400(self, port):
        assert http_status(send_raw(port, ["Content-Length: many"])) == 400

    def test_one_connection_takes_errors_and_requests_in_turn(self, port, body_of):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        for body, status in [(body_of(), 200), (b"\xc1", 400), (body_of(), 200)]:
            connection.request("POST", "/decode", body=body, headers=HEADERS)
            reply = connection.getresponse()
            reply.read()
            assert reply.status == status
        connection.close()


class TestMemory:
    @pytest.fixture
    def service(self, service):
        service.max_total_body_bytes = service.max_body_bytes
        return service

    def test_a_body_for_which_there_is_no_memory_is_refused_before_it_is_sent(self, port, service, body_of):
        slow = send_raw(port, [f"Content-Length: {service.max_body_bytes}"], b"\x81")
        time.sleep(0.2)
        reply, error = receive_reply(send_raw(port, [f"Content-Length: {len(body_of())}"]))
        assert reply.status == 503
        assert error["error"]["type"] == "queue_full" and int(reply.headers["Retry-After"]) >= 1
        # Whoever leaves takes his memory along.
        slow.close()
        until = time.monotonic() + 10
        while (status := post(port, body_of())[0].status) == 503:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert status == 200


def http_status(link):
    return int(link.makefile("rb").readline().split()[1])


class TestDisconnects:
    def test_a_caller_that_leaves_cancels_its_decode(self, port, service, body_of):
        service.delay_s = 30
        body = body_of()
        link = send_raw(port, [f"Content-Length: {len(body)}"], body)
        until = time.monotonic() + 10
        while not service.jobs:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert not service.cancelled.is_set()
        link.close()
        assert service.cancelled.wait(10)
        service.delay_s = 0
        assert post(port, body)[0].status == 200

    def test_a_caller_that_leaves_in_the_middle_of_its_reply_harms_nobody(self, port, body_of, latents_of):
        body = body_of(latents_of(1, 4, 2, 64, 128))
        link = send_raw(port, [f"Content-Length: {len(body)}"], body)
        link.recv(1000)
        link.close()
        assert post(port, body_of())[0].status == 200
