"""The engine over real ranks in this process: real weights, real halos, real failures."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from decode_client.wire import WireTensor

from decode_service.config import ServiceConfig
from decode_service.decoding.compilation import CompileFailedError
from decode_service.engine.engine import DecodeEngine
from decode_service.engine.local_group import LocalGroup
from decode_service.engine.protocol import DecodeJob, RankTask
from decode_service.errors import (
    DeadlineExceededError,
    GroupFailedError,
    InvalidLatentsError,
    InvalidRequestError,
    NonFiniteLatentsError,
    NonFiniteOutputError,
    NotReadyError,
    OutOfMemoryError,
    OutputTooLargeError,
    QueueFullError,
    UnsupportedModeError,
)
from decode_service.planning.plan import PixelFormat
from tests.decoding import test_rae

from .conftest import Faults, TinyWan, job, not_a_number, raising


@asynccontextmanager
async def serving(config: ServiceConfig, faults: Faults | None = None) -> AsyncIterator[DecodeEngine]:
    engine = DecodeEngine(LocalGroup(config, faults.make_worker) if faults else LocalGroup(config), config)
    await engine.start()
    if faults:
        faults.tasks.clear()
    try:
        yield engine
    finally:
        await engine.close()


async def held_until(engine: DecodeEngine, faults: Faults, *, rank: int, waiting: int) -> None:
    """Let the decode that ``rank`` does next last until so many requests wait."""
    enough = threading.Event()
    faults.on(rank, lambda task: _within(30, enough))
    while engine.describe()["queue"]["waiting"] < waiting:
        await asyncio.sleep(0.005)
    enough.set()


def _within(seconds: float, event: threading.Event) -> None:
    assert event.wait(seconds)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 120)

    asyncio.run(limited())


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


# ---- what breaks ---------------------------------------------------------------------------------------------------


def test_a_rank_that_raises_costs_one_retry_and_no_reload(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 10, 12)
        async with serving(tiny_wan.config(), faults) as engine:
            faults.on(1, raising(ValueError("cosmic ray")))
            outcome = await engine.decode(job(latents, mode="spatial_shard_width"))
            assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5
            assert engine.readiness().ready
        assert faults.built == 2
        assert sorted(rank for rank, _ in faults.tasks) == [0, 0, 1, 1]

    run(test)


def test_a_rank_that_raises_twice_fails_the_request_but_not_the_service(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 10, 12)
        async with serving(tiny_wan.config(), faults) as engine:
            faults.on(1, raising(ValueError("bug")), raising(ValueError("bug")))
            with pytest.raises(GroupFailedError, match="bug"):
                await engine.decode(job(latents, mode="spatial_shard_width"))
            outcome = await engine.decode(job(latents, mode="spatial_shard_width"))
            assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5

    run(test)


def test_a_failed_compilation_is_latched_on_all_ranks_and_the_request_served(
    tiny_wan: TinyWan, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 10, 12)
        async with serving(tiny_wan.config(), faults) as engine:
            faults.on(1, raising(CompileFailedError("no compiler here")))
            outcome = await engine.decode(job(latents, mode="spatial_shard_height"))
            assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5
            assert engine.describe()["compile"] == {
                "active": False,
                "reason": "CompileFailedError: no compiler here",
                "shapes": [],
            }
            assert any("no compiler here" in warning for warning in engine.readiness().warnings)

    with caplog.at_level(logging.ERROR, "decode_service.engine"):
        run(test)
    assert sum("torch.compile failed" in record.message for record in caplog.records) == 1


def test_out_of_memory_takes_a_cheaper_plan_and_says_so(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 6, 6)
        async with serving(tiny_wan.config(), faults) as engine:
            faults.on(0, raising(torch.OutOfMemoryError("CUDA out of memory")))
            outcome = await engine.decode(job(latents))
            assert outcome.plan.mode == "spatial_shard_width"
            assert outcome.plan.fallback == "direct ran out of memory"
            assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5
            faults.on(1, raising(torch.OutOfMemoryError("CUDA out of memory")))
            outcome = await engine.decode(job(latents, mode="spatial_shard_height"))
            assert outcome.plan.mode == "tile"

    run(test)


def test_out_of_memory_shortens_passes_before_anything_approximates(tiny_wan: TinyWan, faults: Faults) -> None:
    """Any chunk gives the same pixels, so this is allowed where no other mode is."""

    async def test() -> None:
        latents = tiny_wan.latents(4, 6, 6)
        lack = raising(torch.OutOfMemoryError("CUDA out of memory"))
        async with serving(tiny_wan.config(), faults) as engine:
            faults.on(0, lack)
            wish = {"mode": "spatial_shard_height", "chunk": 3}
            outcome = await engine.decode(job(latents, strict=True, **wish))
            assert (outcome.plan.mode, outcome.plan.chunk, outcome.plan.fallback) == ("spatial_shard_height", 1, None)
            assert "shortened from 3 to 1 latent frames, because memory ran out" in outcome.plan.reason
            assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5
            faults.on(0, lack, lack)
            assert (await engine.decode(job(latents, **wish))).plan.mode == "tile", "shorter passes were not enough"
            faults.on(0, lack, lack)
            with pytest.raises(OutOfMemoryError):
                await engine.decode(job(latents, strict=True, **wish))

    run(test)


def test_out_of_memory_is_an_error_where_no_other_plan_is_allowed(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 6, 6)
        async with serving(tiny_wan.config(), faults) as engine:
            faults.on(0, raising(torch.OutOfMemoryError("CUDA out of memory")))
            with pytest.raises(OutOfMemoryError, match="direct mode"):
                await engine.decode(job(latents, mode="direct", strict=True))
            assert len(faults.tasks) == 1
            assert engine.readiness().ready

    run(test)


def test_what_does_not_fit_the_one_rank_that_load_gave_it_is_shared(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 9, 10)
        async with serving(tiny_wan.config(), faults) as engine:
            # The first request is decoded by both ranks, the other two by one each.
            both_wait = held_until(engine, faults, rank=1, waiting=2)
            requests = asyncio.gather(both_wait, *(engine.decode(job(latents)) for _ in range(3)))
            await asyncio.sleep(0)
            faults.on(1, raising(torch.OutOfMemoryError("CUDA out of memory")))
            _, *outcomes = await requests
        shared = [outcome.plan for outcome in outcomes if outcome.plan.fallback]
        assert [plan.fallback for plan in shared] == ["direct ran out of memory"]
        assert shared[0].mode == "spatial_shard_width"
        for outcome in outcomes:
            assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5

    run(test)


def test_a_flood_of_one_caller_keeps_another_waiting_for_one_turn(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 4, 4)
        config = tiny_wan.config(group={"ranks": 1}, limits={"max_queued": 8})
        async with serving(config, faults) as engine:
            held = threading.Event()
            faults.on(0, lambda task: _within(30, held))
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


def test_nan_from_half_precision_is_decoded_again_in_float32(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 6, 6)
        async with serving(tiny_wan.config(model={"dtype": "bfloat16"}), faults) as engine:
            faults.on(0, not_a_number)
            outcome = await engine.decode(job(latents))
            assert [task.precision for _, task in faults.tasks] == [None, "float32"]
            # bfloat16 weights, float32 arithmetic.
            assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 0.1

    run(test)


def test_a_retry_in_float32_says_so_whatever_becomes_of_its_plan(tiny_wan: TinyWan, faults: Faults) -> None:
    """A request that load may plan anew, and one that needs a cheaper plan on its retry."""

    async def test() -> None:
        async with serving(tiny_wan.config(model={"dtype": "bfloat16"}), faults) as engine:
            for extents, mode, faulty in (
                ((2, 9, 10), "spatial_shard_width", ()),
                ((2, 6, 6), "spatial_shard_width", (1,)),
            ):
                latents = tiny_wan.latents(*extents)
                faults.tasks.clear()
                faults.on(0, not_a_number, *(raising(torch.OutOfMemoryError("CUDA out of memory")) for _ in faulty))
                plan = (await engine.decode(job(latents))).plan
                assert plan.mode == mode
                assert {task.precision for _, task in faults.tasks[-2:]} == {"float32"}
                assert plan.dtype == "float32" and "bfloat16 gave NaN or Inf" in plan.dtype_reason

    run(test)


def test_a_cheaper_plan_counts_the_pixels_that_were_asked_for(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 6, 6)
        async with serving(tiny_wan.config(), faults) as engine:
            shared = (await engine.decode(job(latents, mode="spatial_shard_width"))).plan
            faults.on(0, raising(torch.OutOfMemoryError("CUDA out of memory")))
            cheaper = (await engine.decode(job(latents))).plan
            assert cheaper.fallback == "direct ran out of memory"
            assert cheaper.memory is not None and cheaper.memory == shared.memory

    run(test)


def test_nan_from_float32_is_an_error_never_a_black_picture(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        async with serving(tiny_wan.config(), faults) as engine:
            faults.on(0, not_a_number)
            with pytest.raises(NonFiniteOutputError):
                await engine.decode(job(tiny_wan.latents(2, 6, 6)))

    run(test)


def test_a_rank_that_stalls_is_replaced_and_the_request_served(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 10, 12)
        async with serving(tiny_wan.config(), faults) as engine:
            engine._group._config = tiny_wan.config(group={"run_timeout_s": 1.5, "abort_grace_s": 0.3})  # type: ignore[attr-defined]
            faults.on(1, lambda task: time.sleep(6))
            outcome = await engine.decode(job(latents, mode="spatial_shard_width"))
            assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5
        assert faults.built == 4

    run(test)


def test_a_group_that_breaks_too_often_is_given_up(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 10, 12)
        config = tiny_wan.config(group={"max_rebuilds": 0, "run_timeout_s": 1.0, "abort_grace_s": 0.2})
        async with serving(config, faults) as engine:
            assert engine.healthy()
            faults.on(1, lambda task: time.sleep(3))
            with pytest.raises(GroupFailedError):
                await engine.decode(job(latents, mode="spatial_shard_width"))
            assert not engine.healthy()
            assert engine.readiness().state == "failed"
            with pytest.raises(NotReadyError):
                await engine.decode(job(latents))

    run(test)


def test_a_caller_that_leaves_neither_breaks_the_group_nor_the_next_request(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        latents = tiny_wan.latents(2, 10, 12)

        def slow(task: RankTask) -> None:
            time.sleep(0.3)

        async with serving(tiny_wan.config(), faults) as engine:
            faults.on(1, slow)
            caller = asyncio.create_task(engine.decode(job(latents, mode="spatial_shard_width")))
            await asyncio.sleep(0.1)
            caller.cancel()
            outcome = await engine.decode(job(latents, mode="spatial_shard_height"))
            assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5
            # And if the abandoned decode fails, its ranks are mended without anybody waiting for it.
            faults.on(1, slow, raising(ValueError("late")))
            faults.pending[0] = []
            caller = asyncio.create_task(engine.decode(job(latents, mode="spatial_shard_width")))
            following = asyncio.create_task(engine.decode(job(latents, mode="spatial_shard_width")))
            await asyncio.sleep(0.1)
            caller.cancel()
            assert np.abs((await following).assemble() - tiny_wan.decode(latents)).max() < 1e-5

    run(test)


# ---- start-up ------------------------------------------------------------------------------------------------------


def test_sharding_that_differs_on_this_machine_is_switched_off(
    tiny_wan: TinyWan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from decode_service.engine import local_group

    class WrongHalo(local_group.RankWorker):
        def decode(self, task: RankTask, latents: np.ndarray, dtype: str) -> Any:
            answer = super().decode(task, latents, dtype)
            if task.plan.axis == "width":
                answer.array[..., 0] += 0.01
            return answer

    async def test() -> None:
        config = tiny_wan.config()
        engine = DecodeEngine(LocalGroup(config, WrongHalo), config)
        await engine.start()
        shown = engine.describe()
        assert shown["exact_axes"] == ["height"]
        assert shown["self_test"]["height"] == "exact"
        assert "differs by" in shown["self_test"]["width"]
        # The width would be taken on ties; the height is what is left.
        assert engine.plan((1, 4, 2, 12, 12)).mode == "spatial_shard_height"
        await engine.close()

    with caplog.at_level(logging.ERROR, "decode_service.engine"):
        run(test)
    assert "will not be sharded" in caplog.text


def test_the_self_test_heeds_the_models_reach_and_no_limit_of_requests(
    tiny_wan: TinyWan, monkeypatch: pytest.MonkeyPatch
) -> None:
    from decode_service.decoding.families.wan import WanFamily

    made = WanFamily.make_spec

    async def test() -> None:
        limits = {"limits": {"max_output_pixels": 1000}, "policy": {"memory_budget_bytes": 1000}}
        async with serving(tiny_wan.config(**limits)) as engine:
            shown = engine.describe()
            assert shown["self_test"] == {"height": "exact", "width": "exact"} and not shown["warnings"]
            with pytest.raises(OutputTooLargeError):
                engine.plan((1, 4, 2, 9, 10))

    monkeypatch.setattr(WanFamily, "make_spec", lambda *args: replace(made(*args), min_band_cells=4))
    run(test)


def test_warm_up_takes_the_ordinary_path_on_every_rank(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        shapes = [[1, 4, 2, 6, 6], [1, 4, 2, 10, 12], [1, 7, 2, 6, 6]]
        config = tiny_wan.config(warmup={"shapes": shapes})
        engine = DecodeEngine(LocalGroup(config, faults.make_worker), config)
        await engine.start()
        warm = [(rank, task.plan.mode) for rank, task in faults.tasks if task.request_id == "warm-up"]
        assert sorted(warm[:2]) == [(0, "direct"), (1, "direct")]
        # In both ways in which it is decoded: by all ranks where the group is idle, by each where others wait.
        assert sorted(warm[2:4]) == [(0, "spatial_shard_width"), (1, "spatial_shard_width")]
        assert sorted(warm[4:]) == [(0, "direct"), (1, "direct")]
        # One impossible shape is a warning, not a service that doesn't start.
        assert engine.describe()["warm_shapes"] == shapes[:2]
        assert engine.readiness().ready
        assert any("[1, 7, 2, 6, 6]" in warning for warning in engine.readiness().warnings)
        await engine.close()

    run(test)


def test_warm_up_of_a_video_model_with_one_latent_frame_is_warned_of(tiny_wan: TinyWan) -> None:
    async def test() -> None:
        async with serving(tiny_wan.config(warmup={"shapes": [[1, 4, 1, 6, 6]]})) as engine:
            assert engine.readiness().ready
            assert any("at least two latent frames" in warning for warning in engine.readiness().warnings)

    run(test)


def test_a_group_that_breaks_for_good_while_starting_is_not_ready(tiny_wan: TinyWan, faults: Faults) -> None:
    async def test() -> None:
        config = tiny_wan.config(group={"max_rebuilds": 0, "run_timeout_s": 1.0, "abort_grace_s": 0.2})
        # Rank 1 stalls in its first decode, which is the self-test's.
        faults.on(1, lambda task: time.sleep(3))
        engine = DecodeEngine(LocalGroup(config, faults.make_worker), config)
        with pytest.raises(GroupFailedError, match="while starting"):
            await engine.start()
        assert not engine.healthy() and not engine.readiness().ready
        await engine.close()

    run(test)


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


def test_a_model_of_one_size_without_tiles_is_tested_at_its_size_and_never_tiled(
    tiny_wan: TinyWan, faults: Faults, tmp_path: Path
) -> None:
    vae = test_rae.model()
    vae.save_pretrained(tmp_path)
    latents = np.random.default_rng(0).standard_normal((1, 8, 5, 5), np.float32)

    async def test() -> None:
        async with serving(tiny_wan.config(model={"source": str(tmp_path)}), faults) as engine:
            shown = engine.describe()
            assert shown["self_test"] == {"height": "exact", "width": "exact"}
            assert "tile" not in shown["modes"] and "position embedding" in shown["no_tiles_reason"]
            # Out of memory undivided, then no more: sharding needs less.
            faults.on(0, raising(torch.OutOfMemoryError("CUDA out of memory")))
            outcome = await engine.decode(job(latents, mode="direct"))
            assert outcome.plan.mode == "spatial_shard_width"
            with torch.no_grad():
                expected = vae.decode(torch.from_numpy(latents)).sample.numpy()
            assert np.abs(outcome.assemble() - expected).max() < 1e-5
            # Sharded out of memory: tiles would be next, and there are none.
            for rank in (0, 1):
                faults.on(rank, raising(torch.OutOfMemoryError("CUDA out of memory")))
            with pytest.raises(OutOfMemoryError, match="use ranks with more memory"):
                await engine.decode(job(latents, mode="spatial_shard_height"))

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
