"""From the Python client through HTTP and the engine to ranks in this process: latents as pipelines leave them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from decode_client import AsyncDecodeClient, UnprocessableError

from decode_service.config import ServiceConfig
from decode_service.engine.engine import DecodeEngine
from decode_service.engine.local_group import LocalGroup
from decode_service.errors import InvalidRequestError
from decode_service.http import create_app
from tests.decoding.harness import latents_of
from tests.decoding.test_ltx_video import RESIDUAL, ltx

from .conftest import Faults, TinyWan, job, raising


@asynccontextmanager
async def client_of(
    config: ServiceConfig, faults: Faults | None = None
) -> AsyncIterator[tuple[AsyncDecodeClient, DecodeEngine]]:
    engine = DecodeEngine(LocalGroup(config, faults.make_worker) if faults else LocalGroup(config), config)
    await engine.start()
    try:
        transport = httpx2.ASGITransport(app=create_app(engine))
        async with httpx2.AsyncClient(transport=transport) as http:
            async with AsyncDecodeClient("http://service", http_client=http, max_retries=0) as client:
                yield client, engine
    finally:
        await engine.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


def swapped(latents: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(latents.swapaxes(1, 2))


def test_ltx_latents_with_noise_are_the_same_pixels_on_one_rank_and_on_two(tmp_path: Path) -> None:
    """``LTXPipeline(output_type="latent")`` gives such latents; its order is unpack, denormalize, mix, decode."""
    vae: Any = ltx(timestep_conditioning=True, scaling_factor=0.5, **RESIDUAL)
    vae.save_pretrained(tmp_path)
    packed = latents_of((1, 2 * 5 * 6, 4))
    latents = packed.view(1, 2, 5, 6, 4).permute(0, 4, 1, 2, 3)
    mean, std = (statistics.view(1, -1, 1, 1, 1) for statistics in (vae.latents_mean, vae.latents_std))
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(5))
    mixed = (1 - 0.2) * (latents * std / 0.5 + mean) + 0.2 * noise
    with torch.inference_mode():
        expected = vae.decode(mixed, torch.tensor([0.05])).sample
    told = {"layout": "packed", "height": 40, "width": 48, "frames": 5}
    noisy = {"denormalize": True, "timestep": 0.05, "noise_scale": 0.2, "seed": 5}

    async def test(ranks: int) -> None:
        config = ServiceConfig.model_validate(
            {
                "model": {"name": "ltx", "source": str(tmp_path), "dtype": "float32"},
                "group": {"ranks": ranks, "threads": 1},
                "policy": {"direct_max_pixels": 1},
                "calibration": {"enabled": False},
            }
        )
        async with client_of(config) as (client, _):
            result = await client.decode(packed, **told, **noisy, dtype="float32", range="model")
            assert result.plan["mode"] == ("direct" if ranks == 1 else "spatial_shard_width")
            torch.testing.assert_close(result.torch(), expected, atol=1e-5, rtol=0)
            assert (await client.plan(packed.shape, **told))["output"] == {"frames": 5, "height": 40, "width": 48}
            described = await client.model("ltx")
            assert described["default_timestep"] == 0.0
            assert described["layouts"] == ["auto", "BCTHW", "CTHW", "BTCHW", "TCHW", "packed"]
            # Without a word about it: the pipeline's default, and no noise.
            plain = await client.decode(packed, **told, dtype="float32", range="model", seed=5)
            with torch.inference_mode():
                torch.testing.assert_close(plain.torch(), vae.decode(latents, torch.zeros(1)).sample, atol=1e-5, rtol=0)

    for ranks in (1, 2):
        run(lambda ranks=ranks: test(ranks))  # type: ignore[misc]


def test_layouts_of_a_video_model(tiny_wan: TinyWan) -> None:
    latents = tiny_wan.latents(2, 3, 4)
    expected = tiny_wan.decode(latents)

    async def test() -> None:
        async with client_of(tiny_wan.config()) as (client, _):
            tokens = np.ascontiguousarray(latents.transpose(0, 2, 3, 4, 1).reshape(1, 2 * 3 * 4, 4))
            ways: list[tuple[np.ndarray, dict[str, Any]]] = [
                (latents, {"height": 24, "width": 32, "frames": 5}),
                (latents[0], {}),
                (latents[0], {"layout": "CTHW"}),
                (swapped(latents), {"layout": "BTCHW"}),
                (swapped(latents)[0], {"layout": "TCHW"}),
                (tokens, {"height": 24, "width": 32, "frames": 5}),
            ]
            for sent, told in ways:
                result = await client.decode(sent, **told, dtype="float32", range="model")
                assert np.abs(result.numpy() - expected).max() < 1e-5, told
                shown = await client.plan(sent.shape, **told)
                assert shown["output"] == result.plan["output"] == {"frames": 5, "height": 24, "width": 32}
            half = torch.from_numpy(latents).bfloat16()
            whole, moved = [
                await client.decode(sent, layout=layout, dtype="float32")
                for sent, layout in ((half, "BCTHW"), (half.transpose(1, 2), "BTCHW"))
            ]
            np.testing.assert_array_equal(moved.numpy(), whole.numpy())
            for told, param, words in (
                ({"seed": 1}, "seed", "no timestep conditioning"),
                ({"timestep": 0.05}, "timestep", "no timestep conditioning"),
                ({"noise_scale": 0.0}, "noise_scale", "no timestep conditioning"),
                ({"layout": "BCHW"}, "layout", "it takes auto, BCTHW, CTHW, BTCHW, TCHW or packed"),
            ):
                with pytest.raises(UnprocessableError, match=words) as refused:
                    await client.decode(latents, **told)
                assert refused.value.param == param
            with pytest.raises(UnprocessableError, match="or say layout BTCHW"):
                await client.decode(swapped(latents))

    run(test)


def test_packed_latents_that_need_too_much_memory_are_decoded_by_a_cheaper_plan(
    tiny_wan: TinyWan, faults: Faults
) -> None:
    latents = tiny_wan.latents(1, 9, 11)
    tokens = np.ascontiguousarray(latents.transpose(0, 2, 3, 4, 1).reshape(1, 99, 4))

    async def test() -> None:
        async with client_of(tiny_wan.config(policy={"direct_max_pixels": 1 << 20}), faults) as (client, _):
            faults.on(0, raising(torch.OutOfMemoryError("full")))
            result = await client.decode(tokens, height=72, width=88, frames=1, dtype="float32", range="model")
            assert result.plan["fallback"] == "direct ran out of memory"
            assert result.plan["mode"] == "spatial_shard_width"
            assert np.abs(result.numpy() - tiny_wan.decode(latents)).max() < 1e-5

    run(test)


def test_the_engine_checks_what_it_is_given_itself(tiny_wan: TinyWan) -> None:
    async def test() -> None:
        async with client_of(tiny_wan.config(group={"ranks": 1})) as (_, engine):
            with pytest.raises(InvalidRequestError, match="timestep"):
                await engine.decode(job(tiny_wan.latents(1, 4, 4), timestep=0.1))

    run(test)
