"""What failures mean for a request and for the group: real ranks in this process, real failures."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from decode_service.decoding.compilation import CompileFailedError
from decode_service.engine.protocol import RankError, RankTask
from decode_service.errors import (
    DecodeServiceError,
    GroupFailedError,
    NonFiniteOutputError,
    NotReadyError,
    OutOfMemoryError,
)
from tests.decoding import test_rae

from .conftest import Faults, TinyWan, held_until, job, not_a_number, raising, run, serving, within


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


def test_whoever_closes_the_engine_waits_for_what_runs_and_nothing_is_mended_for_it(
    tiny_wan: TinyWan, faults: Faults
) -> None:
    async def test() -> None:
        async with serving(tiny_wan.config(), faults) as engine:
            running, release = threading.Event(), threading.Event()

            def fail(task: RankTask) -> None:
                running.set()
                within(30, release)
                raise ValueError("cosmic ray")

            faults.on(0, fail)
            decode = asyncio.ensure_future(engine.decode(job(tiny_wan.latents(2, 10, 12), mode="spatial_shard_width")))
            while not running.is_set():
                await asyncio.sleep(0.005)
            # As Serve does it: the constructor that fails, and the end of the replica.
            closing = [asyncio.ensure_future(engine.close()) for _ in range(2)]
            done, _ = await asyncio.wait(closing, timeout=0.2)
            assert not done, "a rank decodes"
            group = engine._group
            recovered: list[RankError] = []

            async def recover(error: RankError) -> None:
                recovered.append(error)

            group.recover = recover  # type: ignore[method-assign]
            release.set()
            with pytest.raises(DecodeServiceError):
                await decode
            await asyncio.gather(*closing)
            assert recovered == [], "there is nobody to mend it for"
            assert engine.readiness().state == "closed"

    run(test)
