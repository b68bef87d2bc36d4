"""POST /decode: latents in, pixels out."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
from typing import Any

import av
import numpy as np
import pytest
from decode_client.wire import OutputSpec, unpack_tensor_reply
from PIL import Image

from decode_service.http import replies
from decode_service.http.stages import Stages
from decode_service.planning.plan import PixelFormat


@pytest.mark.parametrize("path", ["/decode", "/decode/"])
def test_a_tensor_reply_holds_the_decoded_pixels(client, service, body_of, latents_of, path):
    reply = client.post(path, content=body_of(), follow_redirects=False)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/msgpack"
    assert int(reply.headers["content-length"]) == len(reply.content)
    fields = unpack_tensor_reply(reply.content)
    np.testing.assert_array_equal(fields["pixels"].carrier(), service.pixels(latents_of(), PixelFormat()))
    assert fields["plan"]["mode"] == "spatial_shard_height"
    assert fields["model"] == "lab/nearest"
    assert fields["request_id"] == reply.headers["x-request-id"]
    assert {"recv", "parse", "queue", "ranks", "total"} <= set(fields["timings"])


@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16"])
def test_bands_of_a_video_are_put_together_in_the_asked_dtype(client, service, body_of, latents_of, dtype):
    latents = latents_of(2, 4, 3, 5, 7)
    reply = client.post("/decode", content=body_of(latents, OutputSpec(dtype=dtype)))
    pixels = unpack_tensor_reply(reply.content)["pixels"]
    expected = service.pixels(latents, PixelFormat(dtype))
    assert pixels.dtype == dtype
    assert pixels.shape == ((2, 9, 40, 56, 3) if dtype == "uint8" else (2, 3, 9, 40, 56))
    tolerance = 2**-8 if dtype == "bfloat16" else 0
    np.testing.assert_allclose(pixels.float32() if dtype != "uint8" else pixels.carrier(), expected, atol=tolerance)


def test_headers_say_what_was_decoded_and_where_the_time_went(client, body_of):
    reply = client.post("/decode", content=body_of(), headers={"X-Request-Id": "shot-17"})
    assert reply.headers["x-request-id"] == "shot-17"
    assert reply.headers["x-decode-model"] == "lab/nearest"
    assert json.loads(reply.headers["x-decode-shape"]) == [1, 48, 80, 3]
    assert reply.headers["x-decode-dtype"] == "uint8"
    assert json.loads(reply.headers["x-decode-plan"])["bands"] == [[0, 3], [3, 3]]
    stage = r"[A-Za-z0-9_.-]+;dur=\d+\.\d+"
    assert re.fullmatch(f"{stage}(, {stage})*", reply.headers["server-timing"])
    assert "ranks;dur=1.25" in reply.headers["server-timing"]


@pytest.mark.parametrize(("shape", "compiled"), [((1, 4, 6, 10), True), ((1, 4, 3, 6, 10), False)])
def test_replies_say_whether_the_decoder_ran_compiled(client, body_of, latents_of, shape, compiled):
    reply = client.post("/decode", content=body_of(latents_of(*shape)))
    assert unpack_tensor_reply(reply.content)["compiled"] is compiled
    assert reply.headers["x-decode-compiled"] == ("true" if compiled else "false")


@pytest.mark.parametrize("offered", ["", "a" * 129, "caf\xe9", "tab\tid"])
def test_an_insane_request_id_is_replaced(client, body_of, offered):
    reply = client.post("/decode", content=body_of(), headers={"X-Request-Id": offered.encode("latin-1")})
    assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"])


def test_every_wish_reaches_the_service(client, service, body_of):
    wishes = {"denormalize": True, "mode": "direct", "strict": True, "collect": "rank0", "chunk": 3}
    wishes |= {"timestep": 0.05, "noise_scale": 0.025, "seed": 7}
    output = OutputSpec(dtype="float16", range="model")
    client.post("/decode", content=body_of(output=output, deadline_ms=5000, **wishes))
    job = service.jobs[-1]
    assert {name: getattr(job, name) for name in wishes} == wishes
    assert job.pixels == PixelFormat("float16", "model")
    assert 4 < job.deadline_s <= 5
    assert job.request_id


@pytest.mark.parametrize(
    ("name", "media_type", "pillow_format"),
    [("png", "image/png", "PNG"), ("jpeg", "image/jpeg", "JPEG"), ("webp", "image/webp", "WEBP")],
)
def test_a_picture_comes_back_as_a_bare_file(client, service, body_of, latents_of, name, media_type, pillow_format):
    reply = client.post("/decode", content=body_of(output=OutputSpec(format=name)))
    assert reply.status_code == 200
    assert reply.headers["content-type"] == media_type
    assert int(reply.headers["content-length"]) == len(reply.content)
    assert "encode;dur=" in reply.headers["server-timing"]
    with Image.open(io.BytesIO(reply.content)) as picture:
        assert (picture.format, picture.size) == (pillow_format, (80, 48))
        if name == "png":
            np.testing.assert_array_equal(np.asarray(picture), service.pixels(latents_of(), PixelFormat())[0])


def test_one_latent_frame_of_a_video_model_is_a_picture(client, body_of, latents_of):
    reply = client.post("/decode", content=body_of(latents_of(1, 4, 1, 6, 10), OutputSpec(format="png")))
    with Image.open(io.BytesIO(reply.content)) as picture:
        assert picture.size == (80, 48)


@pytest.mark.parametrize(("shape", "frames"), [((1, 4, 3, 6, 10), 9), ((1, 4, 6, 10), 1)])
def test_a_video_comes_back_as_mp4(client, body_of, latents_of, shape, frames):
    output = OutputSpec(format="mp4", fps=24, quality=80)
    reply = client.post("/decode", content=body_of(latents_of(*shape), output))
    assert reply.headers["content-type"] == "video/mp4"
    assert reply.headers["x-decode-video"] == f"h264; yuv420p; bt709; 80x48; {frames} frames; 24 fps"
    with av.open(io.BytesIO(reply.content)) as container:
        assert [(frame.width, frame.height) for frame in container.decode(video=0)] == [(80, 48)] * frames


def test_packed_latents_are_the_picture_that_they_pack(client, service, body_of, latents_of):
    """2 x 2 cells of 8 px in a token, the channel before the place in the patch."""
    latents = latents_of(2, 4, 6, 10)
    packed = latents.reshape(2, 4, 3, 2, 5, 2).transpose(0, 2, 4, 1, 3, 5).reshape(2, 15, 16)
    for layout in ("auto", "packed"):
        reply = client.post("/decode", content=body_of(packed, layout=layout, height=48, width=80))
        pixels = unpack_tensor_reply(reply.content)["pixels"]
        np.testing.assert_array_equal(pixels.carrier(), service.pixels(latents, PixelFormat()))


def test_one_item_without_a_batch_comes_back_as_a_batch_of_one(client, service, body_of, latents_of):
    picture, video = latents_of(4, 6, 10), latents_of(4, 3, 6, 10)
    for latents, options in ((picture, {}), (video, {}), (video, {"layout": "CTHW", "frames": 9, "width": 80})):
        reply = client.post("/decode", content=body_of(latents, **options))
        pixels = unpack_tensor_reply(reply.content)["pixels"]
        np.testing.assert_array_equal(pixels.carrier(), service.pixels(latents[None], PixelFormat()))


def test_frames_before_channels_are_taken_where_the_layout_says_so(client, service, body_of, latents_of):
    latents = latents_of(1, 4, 3, 6, 10)
    swapped = np.ascontiguousarray(latents.swapaxes(1, 2))
    reply = client.post("/decode", content=body_of(swapped, layout="BTCHW"))
    pixels = unpack_tensor_reply(reply.content)["pixels"]
    np.testing.assert_array_equal(pixels.carrier(), service.pixels(latents, PixelFormat()))


def test_a_packed_picture_comes_back_as_a_file(client, body_of, latents_of):
    body = body_of(latents_of(1, 15, 16), OutputSpec(format="png"), height=48, width=80)
    with Image.open(io.BytesIO(client.post("/decode", content=body).content)) as picture:
        assert picture.size == (80, 48)


def test_files_that_are_encoded_keep_nothing_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are checked and handed to the ranks in the threads that the process shares, of which there are 32 at most."""
    done = threading.Event()

    def encode(*_: Any) -> None:
        assert done.wait(30)
        raise ValueError("no pixels")

    monkeypatch.setattr(replies, "_encode", encode)

    async def test() -> None:
        nothing: Any = None
        encodings = [
            asyncio.ensure_future(replies.file_reply(nothing, OutputSpec("png"), "m", "r", Stages(), "bytes"))
            for _ in range(40)
        ]
        await asyncio.sleep(0)
        try:
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "checked"), 10) == "checked"
        finally:
            done.set()
        assert all(isinstance(error, ValueError) for error in await asyncio.gather(*encodings, return_exceptions=True))

    asyncio.run(test())
