"""``POST /plan`` and ``GET /v1/models/{name}`` of every family, through the engine, with nothing decoded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from decode_service.config import ServiceConfig
from decode_service.decoding.footprint import with_footprint
from decode_service.decoding.rank import RankDecoder
from decode_service.engine.engine import DecodeEngine
from decode_service.engine.protocol import GroupInfo
from decode_service.http import create_app
from decode_service.planning.demands import MAX_OPERAND_ELEMENTS
from decode_service.planning.spec import ModelSpec
from tests.decoding import catalogue

GIB = 2**30

#: Classes whose tiny models have none, because the published ones have none, or, of Cosmos, because they are optional.
WITHOUT_STATISTICS = {
    "AutoencoderKLCosmos",
    "AutoencoderKLKVAE",
    "AutoencoderKLKVAEVideo",
    "AutoencoderVidTok",
    "AutoencoderRAE",
}


class Unused:
    """A group that is loaded and never asked to decode."""

    def __init__(self, info: GroupInfo, size: int) -> None:
        self.info, self.size = info, size

    async def start(self) -> GroupInfo:
        return self.info

    async def run(self, task: Any, latents: Any, ranks: Sequence[int]) -> Any:
        raise AssertionError("nothing may be decoded")

    async def close(self) -> None:
        return


def served(name: str, *, ranks: int = 1, **policy: Any) -> tuple[ModelSpec, TestClient]:
    import torch

    family = catalogue.family(name)
    spec = with_footprint(family)
    decoder = RankDecoder(type(family)(family.vae, name), device=torch.device("cpu"))
    config = ServiceConfig.model_validate(
        {
            "model": {"name": "tiny", "source": "builtin:demo"},
            "group": {"ranks": ranks},
            "policy": policy,
            "limits": {"max_output_pixels": 2**40},
        }
    )
    engine = DecodeEngine(Unused(GroupInfo(spec, decoder.describe()), ranks), config)  # type: ignore[arg-type]
    # The self-test would decode on several ranks; what is planned does not depend on it.
    engine._startup.test_exact_axes = lambda: asyncio.sleep(0)  # type: ignore[method-assign, assignment, return-value]
    asyncio.run(engine.start())
    return spec, TestClient(create_app(engine))


def big_latents(client: TestClient, name: str, spec: ModelSpec) -> list[list[int]]:
    """Latents of a still of 4096 x 4096 and, of video families, of about 81 frames of 3840 x 2160."""
    if spec.fixed_cells:
        side = spec.fixed_cells * spec.spatial_ratio
        reply = client.get(f"/v1/models/{name}", params={"height": 4096, "width": 4096})
        assert reply.status_code == 422 and f"one size, {side} x {side} pixels" in reply.text
        sizes = [(side, side, None)]
    else:
        sizes = [(4096, 4096, None)]
    if (spec.frame_rule is not None and not spec.frame_rule.problem(2)) or spec.tile_only:
        sizes.append((2160, 3840, 81))
    shapes = []
    for height, width, frames in sizes:
        ratio = spec.spatial_ratio
        query = {"height": -(-height // ratio) * ratio, "width": -(-width // ratio) * ratio}
        if frames:
            query["frames"] = frames
        reply = client.get(f"/v1/models/{name}", params=query)
        if reply.status_code == 422:
            # 81 frames are not a length of this family: the message says which are.
            assert reply.json()["error"]["param"] == "frames"
            query["frames"] = int(reply.json()["error"]["message"].split("the nearest is ")[1].split()[-1])
            reply = client.get(f"/v1/models/{name}", params=query)
        assert reply.status_code == 200, reply.text
        told = reply.json()["for_size"]
        if frames:
            assert told["pixel_shape"][1] == query["frames"]
        shapes.append(told["latent_shape"])
    return shapes


@pytest.mark.parametrize("name", catalogue.TINY)
def test_big_frames_of_every_family_are_planned_and_say_what_they_need(name: str) -> None:
    for ranks in (1, 8):
        spec, client = served(name, ranks=ranks)
        _, tight = served(name, ranks=ranks, memory_budget_bytes=GIB // 4)
        for shape in big_latents(client, spec.name, spec):
            reply = client.post("/plan", json={"shape": shape})
            assert reply.status_code == 200, reply.text
            plan = reply.json()["plan"]
            memory = plan["memory"]
            assert memory["per_rank_bytes"] > memory["of_which"]["weights"] > 0
            assert spec.footprint is not None
            if plan["mode"] != "tile":
                share = 1 / plan["ranks"] if plan["axis"] in ("height", "width") else 1.0
                pixels = plan["output"]["height"] * plan["output"]["width"] * share
                assert spec.operand_per_pixel_first * pixels <= MAX_OPERAND_ELEMENTS
                assert memory["of_which"]["activations"] > pixels
            reply = tight.post("/plan", json={"shape": shape})
            if reply.status_code == 200:
                assert reply.json()["plan"]["memory"]["per_rank_bytes"] <= GIB // 4
            else:
                assert reply.status_code == 422
                message = reply.json()["error"]["message"]
                assert "the budget is 0.25 GiB; what would fit: " in message, message


@pytest.mark.parametrize("name", catalogue.TINY)
def test_a_model_tells_everything_that_can_be_derived_from_it(name: str) -> None:
    spec, client = served(name, ranks=2)
    told = client.get(f"/v1/models/{spec.name}").json()
    json.dumps(told)
    assert told["config"] and "_name_or_path" not in told["config"]
    assert told["spatial_compression_ratio"] == spec.spatial_ratio == told["pixels_multiple_of"]
    assert "latents" in told["denormalize"]["formula"] or told["denormalize"]["formula"].startswith("not possible")
    statistics = told["denormalize"]["statistics"]
    used = [
        key
        for key in ("scaling_factor", "latents_mean", "latents_std", "shift_factor")
        if key in told["denormalize"]["formula"]
    ]
    without = spec.class_name in WITHOUT_STATISTICS
    assert without == (not used and "bn_running_std" not in statistics)
    assert all(key in statistics for key in used), (used, list(statistics))
    frames = told["frames"]
    assert (
        all(spec.output_extents((1, 1, t, 1, 1))[0] == f for t, f in frames["latent_to_pixel"]) or not spec.frame_rule
    )
    assert set(told["modes"]) | set(told["unavailable_modes"]) == {
        "direct", "batch", "tile", "spatial_shard_height", "spatial_shard_width"
    }  # fmt: skip
    assert all(told["unavailable_modes"].values()), "a missing mode has a reason"
    assert (spec.tiles is None) == (told["tiles"] is None)
    assert spec.tiles is None or told["tiles"]["size_px"]
    assert told["memory"]["weight_bytes"] > 0
    assert told["parameters_by_dtype"] and told["dtype"] in ("float32", "")


def test_what_is_wanted_of_the_pixels_changes_the_plan_and_what_is_refused() -> None:
    spec, client = served("AutoencoderKLWan, 2.1")
    small = client.post("/plan", json={"shape": [1, 4, 3, 60, 104]}).json()["plan"]["memory"]
    for dtype, times in (("float32", 4), ("bfloat16", 2)):
        body = {"shape": [1, 4, 3, 60, 104], "output": {"dtype": dtype}, "denormalize": True}
        memory = client.post("/plan", json=body).json()["plan"]["memory"]
        assert memory["of_which"]["output"] == times * small["of_which"]["output"]
    # What fits as bytes and not as floats is planned so.
    budget = small["per_rank_bytes"] + small["of_which"]["output"]
    _, tight = served("AutoencoderKLWan, 2.1", memory_budget_bytes=budget)
    assert tight.post("/plan", json={"shape": [1, 4, 3, 60, 104]}).json()["plan"]["mode"] == "direct"
    floats = tight.post("/plan", json={"shape": [1, 4, 3, 60, 104], "output": {"dtype": "float32"}})
    assert floats.json()["plan"]["mode"] == "tile", floats.text
    spec, client = served("AutoencoderVidTok")
    refused = client.post("/plan", json={"shape": [1, spec.latent_channels, 3, 8, 8], "denormalize": True})
    assert refused.status_code == 422 and refused.json()["error"]["param"] == "denormalize"
    assert "denormalize false" in refused.json()["error"]["message"]


def test_sizes_that_nothing_decodes_to_are_refused_with_the_nearest() -> None:
    spec, client = served("AutoencoderKLWan, 2.1")
    address = f"/v1/models/{spec.name}"
    reply = client.get(address, params={"height": 480, "width": 832, "frames": 81, "batch": 2})
    assert reply.json()["for_size"] == {"latent_shape": [2, 4, 21, 60, 104], "pixel_shape": [2, 81, 480, 832, 3]}
    for query, param, hint in (
        ({"height": 481, "width": 832}, "height", "480 or 488"),
        ({"height": 480, "width": 3}, "width", "the nearest is 8"),
        ({"height": 480, "width": 832, "frames": 80}, "frames", "77 or 81"),
        ({"height": 480}, "width", "missing"),
        ({"height": 480, "width": "wide"}, "width", "whole number"),
        ({"height": 480, "width": 832, "fps": 16}, "fps", "known ones are"),
        ({"height": 480, "width": 832, "frames": 10**8}, "frames", "at most"),
    ):
        reply = client.get(address, params=query)
        assert reply.status_code == 422 and reply.json()["error"]["param"] == param, query
        assert hint in reply.json()["error"]["message"], reply.text
    still, client = served("AutoencoderKL")
    reply = client.get(f"/v1/models/{still.name}", params={"height": 64, "width": 64, "frames": 5})
    assert reply.status_code == 422 and "send several as a batch" in reply.text
