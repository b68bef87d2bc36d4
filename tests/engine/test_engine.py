"""The engine over real ranks in this process: requests, what it refuses, and what it says of itself."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from decode_client.wire import WireTensor

from decode_service.config import ServiceConfig
from decode_service.engine.engine import DecodeEngine
from decode_service.engine.local_group import LocalGroup
from decode_service.engine.protocol import DecodeJob, RankTask
from decode_service.errors import (
    DeadlineExceededError,
    GroupFailedError,
    InvalidLatentsError,
    InvalidRequestError,
    NonFiniteLatentsError,
    NotReadyError,
    OutputTooLargeError,
    QueueFullError,
    UnsupportedModeError,
)
from decode_service.planning.plan import PixelFormat

from .conftest import FLOAT, Faults, TinyWan, held_until, job, not_a_number, run, serving, within

# ---- decoding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collect", ["shards", "rank0", "broadcast"])
def test_exact_modes_give_the_pixels_of_diffusers(tiny_wan: TinyWan, collect: str) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(3, 9, 11)
        expected = tiny_wan.decode(latents)
        async with serving(tiny_wan.config()) as engine:
            for mode in ("auto", "direct", "spatial_shard_height", "spatial_shard_width"):
                outcome = await engine.decode(job(latents, mode=mode, collect=collect))
                assert outcome.plan.mode == ("spatial_shard_width" if mode == "auto" else mode)
                assert outcome.shape == expected.shape
                assert np.abs(outcome.assemble() - expected).max() < 1e-5
                assert len(outcome.parts) == (2 if collect == "shards" and mode != "direct" else 1)
                assert len(outcome.digests) == (2 if collect == "broadcast" else 0)
                assert len(set(outcome.digests)) <= 1
                assert set(outcome.timings_ms) >= {"queue", "put", "decode", "collect", "total"}

    run(test)


def test_uint8_pixels_are_channels_last_and_stream_in_order(tiny_wan: TinyWan) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 8, 9)
        async with serving(tiny_wan.config()) as engine:
            outcome = await engine.decode(job(latents, mode="spatial_shard_width", pixels=PixelFormat()))
        unit = np.clip(tiny_wan.decode(latents) * 0.5 + 0.5, 0, 1)
        expected = np.round(unit * 255).astype(np.uint8).transpose(0, 2, 3, 4, 1)
        assert outcome.shape == expected.shape
        assert np.abs(outcome.assemble().astype(int) - expected).max() <= 1
        assert b"".join(outcome.iter_bytes(1000)) == outcome.assemble().tobytes()

    run(test)


def test_small_requests_run_at_the_same_time_and_do_not_mix(tiny_wan: TinyWan) -> None:
    async def test() -> None:
        requests = [tiny_wan.latents(2, 6, 6, seed=seed) for seed in range(6)]
        async with serving(tiny_wan.config()) as engine:
            outcomes = await asyncio.gather(*(engine.decode(job(latents)) for latents in requests))
        for latents, outcome in zip(requests, outcomes, strict=True):
            assert outcome.plan.mode == "direct"
            assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5

    run(test)


def test_sixteen_requests_at_once_run_one_per_rank_and_one_alone_on_all(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        requests = [tiny_wan.latents(1, 5, 6, seed=seed) for seed in range(16)]
        async with serving(tiny_wan.config(policy={"direct_max_pixels": 0}), faults) as engine:
            all_wait = held_until(engine, faults, rank=0, waiting=15)
            _, *outcomes = await asyncio.gather(all_wait, *(engine.decode(job(latents)) for latents in requests))
            for latents, outcome in zip(requests, outcomes, strict=True):
                assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5
            # The first one found the group idle.
            direct = [outcome for outcome in outcomes if outcome.plan.mode == "direct"]
            assert len(direct) == 15 and all("one rank each" in outcome.plan.reason for outcome in direct)
            each = [sum(rank == on and task.plan.mode == "direct" for on, task in faults.tasks) for rank in (0, 1)]
            assert min(each) >= 4, "both ranks decoded, at the same time"
            alone = await engine.decode(job(requests[0]))
            assert alone.plan.mode == "spatial_shard_width"
            assert engine.describe()["queue"] == {"waiting": 0, "running": 0, "callers": 0}

    run(test)


def test_what_was_asked_for_stays_in_a_queue(tiny_wan: TinyWan) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 9, 10)
        async with serving(tiny_wan.config()) as engine:
            outcomes = await asyncio.gather(
                *(engine.decode(job(latents, mode="spatial_shard_height", strict=True)) for _ in range(4))
            )
        assert [outcome.plan.mode for outcome in outcomes] == ["spatial_shard_height"] * 4

    run(test)


def test_several_items_are_divided_over_the_ranks(tiny_wan: TinyWan) -> None:
    async def test() -> None:
        latents = np.concatenate([tiny_wan.latents(2, 5, 5, seed=seed) for seed in range(3)])
        async with serving(tiny_wan.config()) as engine:
            outcome = await engine.decode(job(latents))
        assert outcome.plan.mode == "batch"
        assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5

    run(test)


def test_a_group_of_one_serves(tiny_wan: TinyWan) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 12, 12)
        async with serving(tiny_wan.config(group={"ranks": 1})) as engine:
            outcome = await engine.decode(job(latents, collect="broadcast"))
        assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5

    run(test)


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_bad_requests_are_refused_before_anything_runs(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        config = tiny_wan.config(limits={"max_output_pixels": 5 * 64 * 64})
        async with serving(config, faults) as engine:
            with pytest.raises(InvalidLatentsError, match="channels"):
                await engine.decode(job(np.zeros((1, 5, 2, 8, 8), np.float32)))
            with pytest.raises(OutputTooLargeError, match=r"limit is 20480 \(limits.max_output_pixels\)"):
                await engine.decode(job(tiny_wan.latents(3, 8, 8)))
            latents = tiny_wan.latents(2, 4, 4)
            latents[0, 1, 0, 2, 2] = np.nan
            with pytest.raises(NonFiniteLatentsError):
                await engine.decode(job(latents))
            bits = np.full((1, 4, 2, 4, 4), 0x7F80, np.uint16)
            infinite = DecodeJob(WireTensor("bfloat16", bits.shape, bits.tobytes()))
            with pytest.raises(NonFiniteLatentsError):
                await engine.decode(infinite)
        assert faults.tasks == []

    run(test)


def test_nothing_is_served_before_start_and_after_close(tiny_wan: TinyWan) -> None:
    async def test() -> None:
        config = tiny_wan.config()
        engine = DecodeEngine(LocalGroup(config), config)
        assert engine.readiness().state == "starting"
        with pytest.raises(NotReadyError):
            await engine.decode(job(tiny_wan.latents(2, 4, 4)))
        await engine.start()
        assert engine.readiness().ready
        await engine.close()
        await engine.close()
        with pytest.raises(NotReadyError):
            await engine.decode(job(tiny_wan.latents(2, 4, 4)))

    run(test)


def test_a_full_queue_and_a_passed_deadline_are_told_apart(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 4, 4)
        config = tiny_wan.config(group={"ranks": 1}, limits={"max_queued": 2})
        async with serving(config, faults) as engine:
            faults.on(0, lambda task: time.sleep(0.5))
            running = asyncio.create_task(engine.decode(job(latents)))
            late = asyncio.create_task(engine.decode(job(latents, deadline_s=0.1)))
            await asyncio.sleep(0.05)
            with pytest.raises(QueueFullError):
                await engine.decode(job(latents))
            with pytest.raises(DeadlineExceededError, match="waiting"):
                await late
            await running
            # The one that was late never ran.
            assert len(faults.tasks) == 1

    run(test)


def test_a_flood_of_one_caller_keeps_another_waiting_for_one_turn(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 4, 4)
        config = tiny_wan.config(group={"ranks": 1}, limits={"max_queued": 8})
        async with serving(config, faults) as engine:
            held = threading.Event()
            faults.on(0, lambda task: within(30, held))
            flood = [
                asyncio.create_task(engine.decode(job(latents, caller="flood", request_id="flood"))) for _ in range(8)
            ]
            while engine.describe()["queue"]["waiting"] < 7:
                await asyncio.sleep(0.005)
            single = asyncio.create_task(engine.decode(job(latents, caller="single", request_id="single")))
            while engine.describe()["queue"]["callers"] < 2:
                await asyncio.sleep(0.005)
            held.set()
            await single
            assert [task.request_id for _, task in faults.tasks].index("single") <= 2
            ended = await asyncio.gather(*flood, return_exceptions=True)
            # The queue was full: one of the flood made room.
            refused = [str(end) for end in ended if isinstance(end, QueueFullError)]
            assert len(refused) == 1 and "gave way to another caller's" in refused[0] and "8 of its 8" in refused[0]

    run(test)


def test_latents_are_let_go_with_their_request_however_it_ends(tiny_wan: TinyWan, faults: Faults) -> None:
    """They are views into the bodies of requests, whose memory is bounded. Nobody waits for the collector of cycles."""
    held: list[weakref.ref[np.ndarray]] = []

    def watched(**wishes: Any) -> DecodeJob:
        array = tiny_wan.latents(2, 4, 4)
        held.append(weakref.ref(array))
        return DecodeJob(
            WireTensor("float32", array.shape, array.reshape(-1).view(np.uint8).data), pixels=FLOAT, **wishes
        )

    def failing(task: RankTask) -> None:
        # A new one each time: who keeps an exception keeps the frames that it went through.
        raise ValueError("cosmic ray")

    def lacking_memory(task: RankTask) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    async def kept(count: int) -> bool:
        """Whether so many are held, as soon as the threads that last did something with them are idle again."""
        until = time.monotonic() + 5
        while (now := sum(each() is not None for each in held)) != count and time.monotonic() < until:
            await asyncio.sleep(0.005)
        return now == count

    async def ended(engine: DecodeEngine, **wishes: Any) -> str:
        try:
            await engine.decode(watched(**wishes))
        except Exception as error:
            return type(error).__name__
        return "decoded"

    async def test() -> None:
        config = tiny_wan.config(group={"ranks": 1}, limits={"max_queued": 2})
        async with serving(config, faults) as engine:
            gc.collect()
            gc.disable()
            assert await ended(engine) == "decoded" and await kept(0)
            faults.on(0, *[failing] * 2)
            assert await ended(engine) == "GroupFailedError" and await kept(0)
            faults.on(0, *[lacking_memory] * 3)
            assert await ended(engine, mode="direct", strict=True) == "OutOfMemoryError" and await kept(0)
            faults.pending.clear()
            faults.on(0, not_a_number)
            assert await ended(engine) == "NonFiniteOutputError" and await kept(0)
            # One runs for nobody, one gives way, and one leaves.
            event = threading.Event()
            faults.on(0, lambda task: within(30, event))
            running = asyncio.create_task(ended(engine, caller="flood"))
            while not engine.describe()["queue"]["running"]:
                await asyncio.sleep(0.005)
            waiting = asyncio.create_task(ended(engine, caller="flood"))
            while not engine.describe()["queue"]["waiting"]:
                await asyncio.sleep(0.005)
            single = asyncio.create_task(ended(engine, caller="single"))
            assert await waiting == "QueueFullError" and await kept(2)
            single.cancel()
            running.cancel()
            await asyncio.wait([single, running])
            del single, running
            assert await kept(1), "ranks are not interrupted"
            event.set()
            assert await kept(0)

    try:
        run(test)
    finally:
        gc.enable()


def test_absurd_extents_are_refused_before_they_are_planned(tiny_wan: TinyWan) -> None:
    async def test() -> None:
        async with serving(tiny_wan.config()) as engine:
            for shape in ((1, 4, 1, 2**31 - 1, 2**31 - 1), (1, 4, 2**31 - 1, 1, 1), (1, 4, 1, 400_000, 400_000)):
                began = time.monotonic()
                with pytest.raises(OutputTooLargeError, match="max_output_pixels"):
                    engine.plan(shape, mode="tile")
                assert time.monotonic() - began < 1

    run(test)


def test_different_pictures_after_a_broadcast_are_an_error(tiny_wan: TinyWan, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        digests = iter(("aa", "bb"))
        async with serving(tiny_wan.config()) as engine:
            whole = engine._group.run

            async def tampered(task: RankTask, latents: WireTensor, ranks: Any) -> Any:
                return [replace(part, digest=next(digests)) for part in await whole(task, latents, ranks)]

            monkeypatch.setattr(engine._group, "run", tampered)
            with pytest.raises(GroupFailedError, match="different pictures"):
                await engine.decode(job(tiny_wan.latents(2, 6, 6), collect="broadcast"))

    run(test)


def test_a_model_whose_decoder_is_never_compiled_is_not_shown_as_compiled(
    tiny_wan: TinyWan, monkeypatch: pytest.MonkeyPatch
) -> None:
    from decode_service.decoding.families.wan import WanFamily

    async def test() -> None:
        async with serving(tiny_wan.config(compile={"enabled": True})) as engine:
            shown = engine.describe()["compile"]
            assert shown["active"] is False and "eagerly" in shown["reason"]
        async with serving(tiny_wan.config(compile={"enabled": False})) as engine:
            assert "config" in engine.describe()["compile"]["reason"]

    monkeypatch.setattr(WanFamily, "compiles", False)
    run(test)


def test_describe_is_plain_json(tiny_wan: TinyWan) -> None:
    import json

    async def test() -> None:
        async with serving(tiny_wan.config()) as engine:
            shown = json.loads(json.dumps(engine.describe()))
        assert shown["name"] == "tiny"
        assert shown["group"] == {"ranks": 2, "device": "cpu"} and shown["dtype"] == "float32"
        assert shown["self_test"] == {"height": "exact", "width": "exact"}
        assert shown["state"] == "ready"

    run(test)


# ---- classes that no family describes --------------------------------------------------------------------------------


def test_an_untested_class_is_served_and_says_so(tmp_path: Path) -> None:
    torch.manual_seed(4)
    vae = diffusers.VQModel(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=None,
    ).eval()
    vae.save_pretrained(tmp_path)
    config = ServiceConfig.model_validate(
        {
            "model": {"name": "vq", "source": str(tmp_path), "dtype": "float32"},
            "group": {"ranks": 2, "threads": 1},
            "policy": {"direct_max_pixels": 0},
        }
    )
    latents = np.random.default_rng(0).standard_normal((1, 4, 6, 9), np.float32)
    with torch.inference_mode():
        expected = vae.decode(torch.from_numpy(latents)).sample.numpy()

    async def test() -> None:
        async with serving(config) as engine:
            shown = engine.describe()
            assert shown["tested"] is False and shown["modes"] == ["direct", "batch"]
            assert any("untested" in warning for warning in engine.readiness().warnings)
            outcome = await engine.decode(job(latents))
            assert np.abs(outcome.assemble() - expected).max() < 1e-5
            assert outcome.plan.mode == "direct" and not outcome.plan.tested and outcome.plan.fallback is None
            with pytest.raises(UnsupportedModeError, match=r"tile is not possible .*; use direct or auto"):
                await engine.decode(job(latents, mode="tile"))
            with pytest.raises(InvalidRequestError, match=r"neither a scaling_factor .* denormalize false") as refused:
                await engine.decode(job(latents, denormalize=True))
            assert refused.value.status == 422 and refused.value.param == "denormalize"

    run(test)


def test_a_tested_class_says_nothing_of_it(tiny_wan: TinyWan) -> None:
    async def test() -> None:
        async with serving(tiny_wan.config(group={"ranks": 1})) as engine:
            assert engine.describe()["tested"] is True and not engine.readiness().warnings
            assert (await engine.decode(job(tiny_wan.latents(1, 4, 4)))).plan.tested

    run(test)
