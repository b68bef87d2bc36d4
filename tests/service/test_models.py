"""Several models in one Serve config, each loaded from where its config says, through the Python client.

Everything that the service promises of a model is asked here of the running service: the pixels of diffusers in every
mode and for every chunk length, and a clear, quick refusal of every kind of bad request.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import msgpack
import numpy as np
import pytest
import torch
from decode_client import APIStatusError, DecodeClient

from decode_service.demo import DEMO_VAE_DIR
from local_service import DEFAULT_CONFIG, read_config
from tests.decoding import models
from tests.decoding.harness import latents_of

from .conftest import ServeProcess, serve_run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

TOLERANCE = 1e-5
TILES = {"demo": (128, 96), "wan22": (64, 32), "qwen_image": (64, 48)}
EXACT_MODES = ("direct", "spatial_shard_height", "spatial_shard_width")


@dataclasses.dataclass
class Served:
    """The running service and, for each model, diffusers' own instance of the same weights."""

    server: ServeProcess
    references: dict[str, Any]

    def client(self, model: str) -> DecodeClient:
        prefix = "" if model == "demo" else f"/{model}"
        return DecodeClient(f"{self.server.url}{prefix}", timeout=120)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    references: dict[str, Any] = {
        name: models.save(name, folder / name / "vae") for name in ("wan22", "qwen_image", "minimax_h3")
    }
    references["demo"] = diffusers.AutoencoderKLWan.from_pretrained(DEMO_VAE_DIR, torch_dtype=torch.float32).eval()
    config = read_config(DEFAULT_CONFIG)
    config["applications"] = [application("demo", {"source": "builtin:demo"}, "/")]
    for name in ("wan22", "qwen_image", "minimax_h3"):
        # Both ways of naming local weights: the folder of a pipeline, and one file.
        weights = folder / name / "vae" / "diffusion_pytorch_model.safetensors"
        model = {"source": str(weights)} if name == "qwen_image" else {"source": str(folder / name), "subfolder": "vae"}
        config["applications"].append(application(name, model, f"/{name}"))
    with serve_run(config, "haproxy", folder) as server:
        for name in references:
            prefix = "" if name == "demo" else f"/{name}"
            server.wait_for(f"{prefix}/readyz", 200, limit_s=300)
        yield Served(server, references)


def application(name: str, model: dict[str, str], prefix: str) -> dict[str, Any]:
    policy: dict[str, Any] = {"direct_max_pixels": 4096}
    if name in TILES:
        size, stride = TILES[name]
        policy["tile"] = {"size_px": size, "stride_px": stride}
    return {
        "name": name,
        "route_prefix": prefix,
        "import_path": "decode_service.app:build",
        "args": {
            "model": {"name": name, "dtype": "float32", **model},
            "group": {"ranks": 2, "device": "cpu", "threads": 1},
            "policy": policy,
            # Modes follow from the shape alone.
            "calibration": {"enabled": False},
            "limits": {"max_body_bytes": 1 << 20, "max_output_pixels": 1 << 20},
        },
    }


def difference(
    client: DecodeClient, latents: torch.Tensor, expected: torch.Tensor, **wish: Any
) -> tuple[dict[str, Any], float]:
    """The plan that ran, and the largest difference from ``expected``."""
    result = client.decode(latents, dtype="float32", **wish)
    pixels = result.torch()
    assert pixels.shape == expected.shape
    return dict(result.plan), (pixels - expected).abs().max().item()


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("demo", (1, 16, 3, 11, 17)),
        ("wan22", (1, 4, 3, 5, 7)),
        ("qwen_image", (1, 4, 1, 11, 17)),
        ("qwen_image", (2, 4, 7, 9)),
    ],
)
def test_exact_modes_and_any_chunk_give_the_pixels_of_diffusers(
    served: Served, model: str, shape: tuple[int, ...]
) -> None:
    vae = served.references[model]
    latents = latents_of(shape)
    with torch.inference_mode():
        expected = vae.decode(latents if len(shape) == 5 else latents.unsqueeze(2)).sample
        expected = expected if len(shape) == 5 else expected.squeeze(2)
    with served.client(model) as client:
        wishes = [{"mode": mode} for mode in EXACT_MODES]
        wishes += [{"mode": mode, "chunk": chunk} for mode, chunk in (("direct", 2), ("spatial_shard_width", 4))]
        wishes += [{"mode": "spatial_shard_height", "collect": how} for how in ("rank0", "broadcast")]
        for wish in wishes:
            plan, worst = difference(client, latents, expected, **wish)
            assert worst <= TOLERANCE, (wish, worst)
            assert plan["mode"] == wish["mode"] and plan["fallback"] is None
            assert plan["chunk"] == wish.get("chunk", 1)


@pytest.mark.parametrize(
    ("model", "shape"), [("demo", (1, 16, 2, 18, 20)), ("wan22", (1, 4, 3, 5, 7)), ("qwen_image", (1, 4, 1, 11, 17))]
)
def test_tiles_give_the_pixels_of_diffusers_tiled(served: Served, model: str, shape: tuple[int, ...]) -> None:
    vae = served.references[model]
    latents = latents_of(shape) * 0.5
    size, stride = TILES[model]
    vae.enable_tiling(size, size, stride, stride)
    try:
        with torch.inference_mode():
            # diffusers forgets to clamp the tiled output of Qwen-Image.
            expected = vae.decode(latents).sample.clamp(-1, 1)
    finally:
        vae.disable_tiling()
    with served.client(model) as client:
        plan, worst = difference(client, latents, expected, mode="tile")
    assert worst <= TOLERANCE
    assert plan["mode"] == "tile" and plan["tiles"]["rows"] * plan["tiles"]["columns"] > 1 and not plan["exact"]
    assert plan["ranks"] == 2


def test_packed_and_unbatched_latents_are_the_picture_of_the_others(served: Served) -> None:
    latents = latents_of((1, 4, 6, 10))
    packed = latents.view(1, 4, 3, 2, 5, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, 15, 16)
    with served.client("qwen_image") as client:
        expected = client.decode(latents, denormalize=True).numpy()
        for sent, told in ((packed, {"height": 48, "width": 80}), (latents[0], {})):
            result = client.decode(sent, denormalize=True, **told)
            np.testing.assert_array_equal(result.numpy(), expected)
            assert client.plan(sent.shape, **told)["output"] == {"frames": 1, "height": 48, "width": 80}


def test_minimax_h3_is_decoded_by_its_own_tiles_only(served: Served) -> None:
    vae = served.references["minimax_h3"]
    latents = latents_of((1, 4, 7, 17, 5))
    with torch.inference_mode():
        expected = vae.decode(latents).sample
    with served.client("minimax_h3") as client:
        plan, worst = difference(client, latents, expected, range="model")
        assert worst <= TOLERANCE and plan["mode"] == "tile" and plan["exact"]
        for mode in ("spatial_shard_height", "spatial_shard_width"):
            with pytest.raises(APIStatusError, match="its own tiles only") as refused:
                client.decode(latents, mode=mode)
            assert refused.value.status == 422


def test_auto_follows_the_shape(served: Served) -> None:
    with served.client("demo") as client:
        for shape, mode in (
            ((1, 16, 1, 8, 8), "direct"),
            ((2, 16, 1, 8, 8), "batch"),
            ((1, 16, 2, 9, 17), "spatial_shard_width"),
            ((1, 16, 2, 17, 9), "spatial_shard_height"),
            ((1, 16, 2, 12, 12), "spatial_shard_width"),
        ):
            assert client.decode(latents_of(shape)).plan["mode"] == mode
            assert client.plan(shape)["mode"] == mode
        fallback = client.decode(latents_of((1, 16, 1, 1, 9)), mode="spatial_shard_height")
        assert fallback.plan["mode"] == "tile" and "1 latent cells" in fallback.plan["fallback"]
        with pytest.raises(APIStatusError) as refused:
            client.decode(latents_of((1, 16, 1, 1, 9)), mode="spatial_shard_height", strict=True)
        assert refused.value.status == 422
    # Ray forwards the logs of its processes about twice a second.
    deadline = time.monotonic() + 10
    while "spatial_shard_height cannot run" not in served.server.log_tail(5000):
        assert time.monotonic() < deadline, "a fallback is logged"
        time.sleep(0.2)


def test_broadcast_ends_with_the_same_bytes_on_every_rank(served: Served) -> None:
    with served.client("demo") as client:
        result = client.decode(latents_of((1, 16, 2, 9, 17)), collect="broadcast")
    assert len(result.digests) == 2 and len(set(result.digests)) == 1


def request(latents: Any = None, **fields: Any) -> bytes:
    """A request map, well-formed or not."""
    good = {"dtype": "float32", "shape": [1, 16, 1, 4, 4], "data": np.zeros((1, 16, 1, 4, 4), np.float32).tobytes()}
    return msgpack.packb({"latents": {**good, **(latents or {})}, **fields})


def zeros(*shape: int) -> dict[str, Any]:
    return {"shape": list(shape), "data": np.zeros(shape, np.float32).tobytes()}


NAN = np.full((1, 16, 1, 4, 4), np.nan, np.float32).tobytes()

BAD: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "not msgpack": (lambda: b"\xc1\xc1", 400, "msgpack"),
    "cut off": (lambda: request()[:-100], 400, ""),
    "no latents": (lambda: msgpack.packb({"mode": "auto"}), 422, "latents"),
    "an unknown field": (lambda: request(mdoe="tile"), 422, "mode"),
    "an unknown output field": (lambda: request(output={"fromat": "png"}), 422, "format"),
    "an unknown model": (lambda: request(model="flux"), 404, "demo"),
    "an unknown mode": (lambda: request(mode="shard"), 422, "spatial_shard_height"),
    "an unknown dtype": (lambda: request({"dtype": "float64"}), 422, "bfloat16"),
    "wrong channels": (lambda: request(zeros(1, 48, 1, 4, 4)), 422, "Wan 2.2 5B"),
    "too few dimensions": (lambda: request(zeros(16, 4, 4)), 422, "(B,C,T,H,W)"),
    "packed latents of no extents": (lambda: request(zeros(1, 6, 64), layout="packed"), 422, "height is needed"),
    "a seed for nothing": (lambda: request(seed=1), 422, "no timestep conditioning"),
    "a size that does not fit": (lambda: request({"data": b"1234"}), 422, "bytes"),
    "no extent": (lambda: request({"shape": [1, 16, 1, 0, 4], "data": b""}), 422, ""),
    "an absurd extent": (lambda: request({"shape": [1, 16, 1, 2**31, 4]}), 422, ""),
    "NaN": (lambda: request({"data": NAN}), 422, "NaN"),
    "an output over the limit": (lambda: request(zeros(1, 16, 5, 32, 32)), 422, "limit"),
    "a body over the limit": (lambda: request(zeros(1, 16, 20, 32, 32)), 413, "bytes"),
    "chunk 0": (lambda: request(chunk=0), 422, "chunk"),
    "a boolean that is none": (lambda: request(strict="true"), 422, "strict"),
    "a clip as PNG": (lambda: request(zeros(1, 16, 2, 4, 4), output={"format": "png"}), 422, "mp4"),
    "two pictures as JPEG": (lambda: request(zeros(2, 16, 1, 4, 4), output={"format": "jpeg"}), 422, ""),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_request_is_refused_quickly_with_words_and_the_next_good_one_works(served: Served, kind: str) -> None:
    body, status, words = BAD[kind]
    began = time.monotonic()
    reply = served.server.request("/decode", body())
    took_s = time.monotonic() - began
    assert reply.status == status, reply.body[:300]
    error = reply.json()["error"]
    assert set(error) == {"type", "message", "param", "request_id"}
    assert words in error["message"], error["message"]
    assert error["request_id"] == reply.headers["x-request-id"]
    assert took_s < 1.0
    assert served.server.request("/decode", request()).status == 200


def test_every_status_is_json_also_where_no_route_is(served: Served) -> None:
    for reply, status in (
        (served.server.request("/nowhere"), 404),
        (served.server.request("/decode"), 405),
        (served.server.request("/decode", request(), Content_Type="text/plain"), 415),
        (served.server.request("/v1/models/flux"), 404),
        (served.server.request("/plan", b"[]", Content_Type="application/json"), 422),
    ):
        assert reply.status == status
        assert set(reply.json()["error"]) == {"type", "message", "param", "request_id"}


def test_files_have_the_decoded_size_and_carry_the_plan(served: Served, tmp_path: Path) -> None:
    with served.client("demo") as client:
        for name, shape in (
            ("png", (1, 16, 1, 5, 7)),
            ("jpeg", (1, 16, 1, 5, 7)),
            ("webp", (1, 16, 1, 5, 7)),
            ("mp4", (1, 16, 2, 5, 7)),
        ):
            result = client.decode(latents_of(shape), format=name)
            path = tmp_path / f"file.{name}"
            result.save(path)
            assert path.stat().st_size > 100 and result.plan["mode"] == "direct"
            assert result.plan["output"] == {"frames": 1 if shape[2] == 1 else 5, "height": 40, "width": 56}
            assert result.request_id and result.timings["decode"] > 0


def test_models_are_described_in_full(served: Served) -> None:
    for name, vae in served.references.items():
        with served.client(name) as client:
            shown = client.model(name)
            assert [listed["name"] for listed in client.models()] == [name]
        assert shown["config"]["_class_name"] == type(vae).__name__ == shown["class_name"]
        assert list(shown["config"]["latents_mean"]) == pytest.approx(list(vae.config.latents_mean))
        assert shown["dtype"] == "float32"
        assert "_name_or_path" not in shown["config"], "where the operator keeps weights is nobody else's business"
