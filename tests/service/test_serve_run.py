"""``serve run deploy/config.yaml``, as an operator would, on both of Ray Serve's proxies."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from decode_client.wire import DecodeRequest, OutputSpec, WireTensor, pack_request, unpack_tensor_reply

from decode_service.demo import DEMO_VAE_DIR
from local_service import DEFAULT_CONFIG

from .conftest import PROXIES, ServeProcess, serve_run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]


def request_for(latents: np.ndarray, mode: str) -> DecodeRequest:
    return DecodeRequest(
        model="demo",
        latents=WireTensor("float32", latents.shape, latents.tobytes()),
        denormalize=False,
        mode=mode,
        output=OutputSpec(format="tensor", dtype="float32"),
    )


def decode(server: ServeProcess, latents: np.ndarray, mode: str) -> np.ndarray:
    """Float pixels (B, C, F, H, W) over HTTP."""
    reply = server.request("/decode", pack_request(request_for(latents, mode)))
    assert reply.status == 200, (reply.body[:500], server.log_tail())
    fields = unpack_tensor_reply(reply.body)
    assert fields["plan"]["mode"] == mode
    return fields["pixels"].carrier()


@pytest.mark.parametrize("proxy", PROXIES)
def test_serve_run_answers_probes_decodes_and_survives_a_killed_rank(proxy: str, tmp_path: Path) -> None:
    """One server for all of it, because it takes half a minute to start."""
    with serve_run(DEFAULT_CONFIG, proxy, tmp_path) as server:
        # Long before the model is loaded, somebody answers; and says that it isn't ready.
        server.wait_for("/healthz", 200)
        server.wait_for("/readyz", 503)
        early = server.request("/readyz")
        if early.status == 503:
            assert early.json()["error"]["type"] == "not_ready"
            assert early.json()["error"]["request_id"] == early.headers["x-request-id"]
            assert early.json()["applications"]["demo"] == "DEPLOYING"
            assert early.headers["retry-after"] == "5"
        server.wait_for("/readyz", 200)
        assert server.request("/readyz").json()["applications"] == {"demo": "ready", "healthz": "ready"}

        # The pixels are those of diffusers, on one rank and on both.
        vae = diffusers.AutoencoderKLWan.from_pretrained(DEMO_VAE_DIR, torch_dtype=torch.float32)
        latents = np.random.default_rng(1).standard_normal((1, 16, 2, 18, 20), np.float32)
        with torch.inference_mode():
            expected = vae.decode(torch.from_numpy(latents)).sample.numpy()
        for mode in ("direct", "spatial_shard_height", "spatial_shard_width"):
            assert np.abs(decode(server, latents, mode) - expected).max() < 1e-5

        # HAProxy sends requests by Serve's own proxy while it does not know of a replica: a reply that is streamed survives that.
        if proxy == "haproxy":
            usual, server.url = server.url, f"http://127.0.0.1:{server.variable('RAY_SERVE_FALLBACK_PROXY_HTTP_PORT')}"
            assert np.abs(decode(server, latents, "direct") - expected).max() < 1e-5
            server.url = usual

        # A caller that leaves in the middle breaks nothing for the next one.
        with socket.create_connection(("127.0.0.1", server.port)) as caller:
            body = pack_request(request_for(np.repeat(latents, 3, axis=2), "spatial_shard_width"))
            head = f"POST /decode HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\nContent-Length: {len(body)}\r\n\r\n"
            caller.sendall(head.encode() + body)
            time.sleep(0.2)
        assert np.abs(decode(server, latents, "spatial_shard_height") - expected).max() < 1e-5

        # Errors are JSON.
        wrong = server.request("/decode", b"not msgpack")
        assert wrong.status == 400
        assert wrong.json()["error"]["type"] == "malformed_request"

        # A rank that is killed costs the next request a moment, not an error.
        ranks = server.ranks()
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        began = time.monotonic()
        assert np.abs(decode(server, latents, "spatial_shard_width") - expected).max() < 1e-5
        server.wait_for("/readyz", 200, limit_s=10)
        assert time.monotonic() - began < 60
        assert len(server.ranks()) == 2
        assert not set(ranks) & set(server.ranks())

        shown = server.request("/v1/models/demo").json()
        assert shown["state"] == "ready"
        assert shown["self_test"] == {"height": "exact", "width": "exact"}
