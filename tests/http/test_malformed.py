"""Whatever bytes arrive: a 4xx with the one form of error, nothing executed, and the next good request works."""

from __future__ import annotations

import os
import pickle

import msgpack
import numpy as np
import pytest


def tensor(**changes):
    return {"dtype": "float32", "shape": [1, 4, 2, 2], "data": bytes(64), **changes}


def request(**changes):
    return msgpack.packb({"latents": tensor(), **changes})


def latents(**changes):
    return msgpack.packb({"latents": tensor(**changes)})


class Exploit:
    def __reduce__(self):
        return os.mkdir, (self.path,)


def twice(key):
    """A map that has one key two times, which no packer writes."""
    value = msgpack.packb(key) + msgpack.packb("demo")
    return b"\x83" + value + value + msgpack.packb("latents") + msgpack.packb(tensor())


def nested(depth):
    return msgpack.packb({"latents": tensor()})[:-1] + b"\x00" + b"\x91" * depth


CASES = {
    "empty": (b"", 400),
    "nil": (b"\xc0", 400),
    "a number": (msgpack.packb(7), 400),
    "a list": (msgpack.packb([1, 2]), 400),
    "text": (msgpack.packb("latents"), 400),
    "never used byte": (b"\xc1", 400),
    "json": (b'{"latents": 1}', 400),
    "trailing bytes": (request() + b"\x00", 400),
    "two messages": (request() * 2, 400),
    "map bomb": (b"\xdf\xff\xff\xff\xff", 400),
    "list bomb": (b"\xdd\xff\xff\xff\xff", 400),
    "bin bomb": (b"\x81\xa7latents\xc6\xff\xff\xff\xff", 422),
    "bin bomb in data": (b"\x81\xa7latents\x81\xa4data\xc6\xff\xff\xff\xff", 400),
    "text bomb": (b"\x81\xdb\xff\xff\xff\xff", 400),
    "nested lists": (b"\x81\xa5model" + b"\x91" * 3000 + b"\x01", 400),
    "nested maps": (b"\x81\xa1a" * 3000 + b"\x01", 422),
    "maps inside model": (request(model={"a": {"b": {"c": 1}}}), 422),
    "map in map of latents": (msgpack.packb({"latents": {"latents": tensor()}}), 422),
    "deep tail": (nested(500), 400),
    "number as key": (b"\x81\x01\x02", 400),
    "bytes as key": (msgpack.packb({b"latents": 1}), 400),
    "text that is no text": (b"\x81\xa5model\xa4\xff\xfe\xfd\xfc", 400),
    "extension type": (request(model=msgpack.ExtType(4, b"x")), 400),
    "timestamp": (request(model=msgpack.Timestamp(1)), 422),
    "duplicate model": (twice("model"), 400),
    "no latents": (msgpack.packb({"model": "lab/nearest"}), 422),
    "latents are nil": (request(latents=None), 422),
    "latents are a list": (request(latents=[0.0] * 16), 422),
    "unknown field": (request(modle="x"), 422),
    "unknown tensor field": (latents(strides=[1]), 422),
    "dtype object": (latents(dtype="object"), 422),
    "dtype as code": (latents(dtype="O8"), 422),
    "dtype number": (latents(dtype=7), 422),
    "uint8 latents": (latents(dtype="uint8", data=bytes(16)), 422),
    "shape bomb": (latents(shape=[2**31, 2**31, 2**31, 2**31]), 422),
    "shape past 64 bits": (latents(shape=[2**63, 2**63]), 422),
    "zero extent": (latents(shape=[1, 4, 0, 2], data=b""), 422),
    "zero of a bomb": (latents(shape=[2**40, 0, 2**40, 1], data=b""), 422),
    "negative extents": (latents(shape=[1, 4, -2, -2]), 422),
    "float extents": (latents(shape=[1.0, 4, 2, 2]), 422),
    "boolean extents": (latents(shape=[True, 4, 2, 2]), 422),
    "nan extents": (latents(shape=[float("nan"), 4, 2, 2]), 422),
    "no extents": (latents(shape=[], data=bytes(4)), 422),
    "many extents": (latents(shape=[1] * 33), 422),
    "shape is text": (latents(shape="1422"), 422),
    "shape is nested": (latents(shape=[[1, 4], [2, 2]]), 422),
    "too little data": (latents(data=bytes(63)), 422),
    "too much data": (latents(data=bytes(65)), 422),
    "data is text": (latents(data="x" * 64), 422),
    "data is a list": (latents(data=[0] * 64), 422),
    "mode number": (request(mode=3), 422),
    "mode unknown": (request(mode="tiles"), 422),
    "strict as text": (request(strict="true"), 422),
    "denormalize as number": (request(denormalize=1), 422),
    "chunk zero": (request(chunk=0), 422),
    "chunk boolean": (request(chunk=True), 422),
    "deadline nan": (request(deadline_ms=float("nan")), 422),
    "deadline negative": (request(deadline_ms=-1), 422),
    "deadline text": (request(deadline_ms="soon"), 422),
    "output is text": (request(output="png"), 422),
    "format with a path": (request(output={"format": "../png"}), 422),
    "quality 101": (request(output={"format": "jpeg", "quality": 101}), 422),
    "fps infinite": (request(output={"format": "mp4", "fps": float("inf")}), 422),
    "fps of a picture": (request(output={"format": "png", "fps": 16}), 422),
    "fps of webp": (request(output={"format": "webp", "fps": 16}), 422),
    "float file": (request(output={"format": "png", "dtype": "float32"}), 422),
    "model of many characters": (request(model="m" * 3000), 422),
    "model with line breaks": (request(model="a\r\nX-Evil: 1"), 404),
}


def check(reply):
    assert 400 <= reply.status_code < 500, reply.text
    error = reply.json()["error"]
    assert set(error) == {"type", "message", "param", "request_id"}
    assert 0 < len(error["message"]) < 1000
    assert error["param"] is None or len(error["param"]) < 200


@pytest.mark.parametrize(("body", "status"), CASES.values(), ids=CASES.keys())
def test_a_malformed_request_is_a_clear_client_error(client, service, body_of, body, status):
    reply = client.post("/decode", content=body)
    check(reply)
    assert reply.status_code == status, reply.text
    assert not service.jobs
    assert client.post("/decode", content=body_of()).status_code == 200


def test_a_body_cut_anywhere_is_a_client_error(client, service, body_of):
    body = body_of()
    for length in [*range(80), *range(80, len(body), 97), len(body) - 1]:
        check(client.post("/decode", content=body[:length]))
    assert not service.jobs
    assert client.post("/decode", content=body).status_code == 200


def test_random_bytes_are_client_errors(client, service):
    random = np.random.default_rng(0)
    for length in random.integers(1, 3000, 300):
        check(client.post("/decode", content=random.bytes(int(length))))
    assert not service.jobs


def test_flipped_bytes_never_break_the_server(client, body_of):
    random = np.random.default_rng(1)
    body = body_of(model="lab/nearest", mode="direct", chunk=2)
    header = body.index(b"data") + 8
    for _ in range(400):
        flipped = bytearray(body)
        for position in random.integers(0, header, random.integers(1, 4)):
            flipped[position] = random.integers(0, 256)
        reply = client.post("/decode", content=bytes(flipped))
        assert reply.status_code in (200, 400, 404, 422), reply.text
        if reply.status_code != 200:
            check(reply)


def test_pickles_are_never_executed(client, service, tmp_path):
    exploit = Exploit()
    exploit.path = str(tmp_path / "executed")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps(exploit, protocol)
        for body in (pickled, request(model=pickled), latents(data=pickled), latents(dtype=pickled)):
            check(client.post("/decode", content=body))
    assert not (tmp_path / "executed").exists()
    assert not service.jobs


def test_a_body_shorter_than_announced_is_a_clean_400(client, body_of):
    body = body_of()
    reply = client.post("/decode", content=body, headers={"Content-Length": str(len(body) + 10)})
    assert reply.status_code == 400
    assert "cut off" in reply.json()["error"]["message"]
    reply = client.post("/decode", content=body, headers={"Content-Length": str(len(body) - 10)})
    assert reply.status_code == 400


@pytest.mark.parametrize("length", ["-1", "1e3", "0x10", "many", "²", ""])
def test_a_content_length_that_is_no_number_is_400(client, body_of, length):
    reply = client.post("/decode", content=body_of(), headers={"Content-Length": length.encode("latin-1")})
    assert reply.status_code == 400
