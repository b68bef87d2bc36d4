"""The routes beside /decode."""

from __future__ import annotations

import dataclasses
import json

import pytest
from decode_client.wire import FORMATS, LAYOUTS, MODES, PIXEL_DTYPES, RANGES, DecodeRequest, OutputSpec

from decode_service.http.replies import MAX_PLAN_HEADER_CHARS, plan_header
from decode_service.http.requests import PlanOutput, PlanRequest
from decode_service.planning.plan import PixelFormat


def test_probes(client):
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"ready": True, "state": "ready", "warnings": []}
    assert client.get("/readyz", headers={"X-Request-Id": "probe"}).headers["x-request-id"] == "probe"


def test_models_are_listed_and_described_also_with_a_slash_in_the_name(client, service):
    assert client.get("/v1/models").json() == {"models": [service.describe()]}
    assert client.get("/v1/models/lab/nearest").json() == service.describe()
    assert client.get("/v1/models/lab%2Fnearest").json() == service.describe()
    reply = client.get("/v1/models/lab/other")
    assert reply.status_code == 404
    assert "lab/nearest" in reply.json()["error"]["message"]


def test_plan_shows_the_plan_without_decoding(client, service):
    reply = client.post("/plan", json={"shape": [1, 4, 3, 6, 10], "model": "lab/nearest", "chunk": 2, "strict": True})
    assert reply.status_code == 200
    assert reply.json() == {"plan": service.plan((1, 4, 3, 6, 10), chunk=2).public()}
    assert not service.jobs


def test_plan_takes_latents_as_decode_takes_them(client, service):
    expected = {"plan": service.plan((1, 4, 6, 10)).public()}
    for body in (
        {"shape": [1, 15, 16], "layout": "packed", "height": 48, "width": 80},
        {"shape": [1, 15, 16], "height": 48, "width": 80},
        {"shape": [4, 6, 10], "layout": "CHW"},
    ):
        assert client.post("/plan", json=body).json() == expected
    video = client.post("/plan", json={"shape": [1, 3, 4, 6, 10], "layout": "BTCHW", "frames": 9}).json()["plan"]
    assert video["output"] == {"frames": 9, "height": 48, "width": 80}


def test_plan_takes_what_is_wanted_of_the_pixels(client, service):
    body = {"shape": [1, 4, 6, 10], "denormalize": True, "output": {"dtype": "float32", "range": "model"}}
    assert client.post("/plan", json=body).status_code == 200
    assert client.post("/plan", json={"shape": [1, 4, 6, 10], "output": {"format": "png"}}).status_code == 200
    assert service.planned == [(True, PixelFormat("float32", "model")), (False, PixelFormat())]


@pytest.mark.parametrize(
    ("body", "status", "param", "hint"),
    [
        (b"", 400, None, "JSON"),
        (b"{", 400, None, "JSON"),
        (b"\xff\xfe", 400, None, "JSON"),
        (b"[" * 60000, 400, None, "JSON"),
        (b"[1, 4]", 422, None, "shape"),
        (b"{}", 422, "shape", "required"),
        (b'{"shape": []}', 422, "shape", "1"),
        (b'{"shape": "1,4"}', 422, "shape", "tuple"),
        (b'{"shape": [1, 4, 6.5, 10]}', 422, "shape.2", "integer"),
        (b'{"shape": [true, 4, 6, 10]}', 422, "shape.0", "integer"),
        (b'{"shape": [1, 4, 0, 10]}', 422, "shape.2", "1"),
        (b'{"shape": [1, 4, 99999999999999999999, 10]}', 422, "shape.2", "less"),
        (b'{"shape": [1, 4, 2000000000, 2000000000]}', 422, "shape", "pixels"),
        (b'{"shape": [1, 16, 6, 10]}', 422, "shape", "4"),
        (b'{"shape": [1, 4, 6, 10], "mdoe": "tile"}', 422, "mdoe", "'mode'"),
        (b'{"shape": [1, 4, 6, 10], "mode": "tiles"}', 422, "mode", "'tile'"),
        (b'{"shape": [1, 4, 6, 10], "strict": "yes"}', 422, "strict", "boolean"),
        (b'{"shape": [1, 4, 6, 10], "layout": "NCHW"}', 422, "layout", "'packed'"),
        (b'{"shape": [1, 15, 16], "height": 48.0, "width": 80}', 422, "height", "integer"),
        (b'{"shape": [1, 15, 16], "height": 0, "width": 80}', 422, "height", "1"),
        (b'{"shape": [1, 15, 16], "layout": "packed"}', 422, "height", "needed"),
        (b'{"shape": [1, 4, 6, 10], "seed": 1}', 422, "seed", "unknown field"),
        (b'{"shape": [1, 4, 6, 10], "model": "wan"}', 404, "model", "lab/nearest"),
        (b'{"shape": [1, 4, 6, 10], "denormalize": 1}', 422, "denormalize", "boolean"),
        (b'{"shape": [1, 4, 6, 10], "output": "png"}', 422, "output", "dictionary"),
        (b'{"shape": [1, 4, 6, 10], "output": {"dtype": "int8"}}', 422, "output.dtype", "'float32'"),
        (b'{"shape": [1, 4, 6, 10], "output": {"type": "png"}}', 422, "output.type", "not permitted"),
        (b'{"shape": [1, 4, 6, 10], "output": {"format": "png", "fps": 8}}', 422, "output.fps", "mp4"),
        (b'{"shape": [1, 4, 3, 6, 10], "output": {"format": "png"}}', 422, "output.format", "mp4"),
        (b'{"shape": [' + b"1," * 40000 + b"1]}", 413, None, "65536"),
    ],
)
def test_plan_says_what_is_wrong(client, body, status, param, hint):
    reply = client.post("/plan", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["param"] == param
    assert hint in reply.json()["error"]["message"]


def test_the_openapi_document_describes_the_msgpack_request(client):
    document = client.get("/openapi.json").json()
    operation = document["paths"]["/decode"]["post"]
    schema = operation["requestBody"]["content"]["application/msgpack"]["schema"]
    assert set(schema["properties"]) == {field.name for field in dataclasses.fields(DecodeRequest)}
    assert schema["properties"]["mode"]["enum"] == list(MODES)
    assert schema["properties"]["layout"]["enum"] == list(LAYOUTS)
    assert schema["properties"]["output"]["properties"]["format"]["enum"] == list(FORMATS)
    assert "application/msgpack" in operation["responses"]["200"]["content"]
    assert "video/mp4" in operation["responses"]["200"]["content"]
    assert client.get("/docs").status_code == 200


def test_plan_requests_know_the_modes_of_the_wire():
    assert set(PlanRequest.model_json_schema()["properties"]["mode"]["enum"]) == set(MODES)
    assert set(PlanRequest.model_json_schema()["properties"]["layout"]["enum"]) == set(LAYOUTS)
    output = PlanOutput.model_json_schema()["properties"]
    assert set(output) == {field.name for field in dataclasses.fields(OutputSpec)}
    for name, values in (("format", FORMATS), ("dtype", PIXEL_DTYPES), ("range", RANGES)):
        assert set(output[name]["enum"]) == set(values)


def test_a_long_plan_still_fits_a_header():
    plan = {
        "mode": "tile",
        "reason": "a long reason \N{SNOWMAN} " * 200,
        "bands": [[i, 1] for i in range(2000)],
        "tiles": {"rows": 100, "columns": 100, "owners": [7] * 10000},
    }
    text = plan_header(plan)
    assert len(text) <= MAX_PLAN_HEADER_CHARS
    assert text.isascii()
    assert json.loads(text)["tiles"] == {"rows": 100, "columns": 100}
    assert len(plan["tiles"]["owners"]) == 10000
