"""Ranks as Ray actors: real processes, real gloo, real kills. One cluster for the module."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from decode_service.config import ServiceConfig
from decode_service.engine import ray_group
from decode_service.engine.engine import DecodeEngine
from decode_service.engine.places import RankPlace
from decode_service.engine.ray_group import RayGroup
from tests.ray_cluster import two_gpus_on_paper

from .conftest import TinyWan, job

# A group takes seconds to start, and a minute where others use the cores too; here it starts four times.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with two_gpus_on_paper():
        yield


def faulty_worker(folder: Path) -> Callable[[ServiceConfig, RankPlace], Any]:
    """Ranks that do once what a file ``folder/<rank>`` says, and of which number 1 lacks a rewrite.

    Defined in a function, so that it is pickled by value.
    """

    def make(config: ServiceConfig, place: RankPlace) -> Any:
        from decode_service.decoding.compilation import CompileFailedError
        from decode_service.engine.failures import describe_failure
        from decode_service.engine.rank_worker import RankWorker

        class Faulty(RankWorker):
            def decode(self, task: Any, latents: Any, dtype: str) -> Any:
                order = folder / str(self.place.rank)
                if order.exists():
                    what = order.read_text()
                    order.unlink()
                    if what == "die":
                        os._exit(1)
                    if what == "freeze":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    error = CompileFailedError("no compiler") if what == "compile" else ValueError(what)
                    return describe_failure(error)
                return super().decode(task, latents, dtype)

        if place.rank == 1:
            config = config.model_copy(
                update={"rewrites": config.rewrites.model_copy(update={"one_frame_conv2d": False})}
            )
        return Faulty(config, place)

    return make


@asynccontextmanager
async def serving(config: ServiceConfig, faults: Path) -> AsyncIterator[tuple[DecodeEngine, RayGroup]]:
    group = RayGroup(config, faulty_worker(faults))
    engine = DecodeEngine(group, config)
    try:
        await engine.start()
        yield engine, group
    finally:
        await engine.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 500)

    asyncio.run(limited())


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_processes_give_the_pixels_of_diffusers_whatever_happens_to_them(
    cluster: None, tiny_wan: TinyWan, tmp_path: Path
) -> None:
    """One group for all of it, because a group takes seconds to start; each step is one sentence."""

    async def test() -> None:
        latents = tiny_wan.latents(2, 9, 11)
        expected = tiny_wan.decode(latents)
        config = tiny_wan.config(group={"collective_timeout_s": 3, "abort_grace_s": 3}, compile={"enabled": False})

        async def decodes(mode: str = "spatial_shard_width", **wishes: Any) -> None:
            outcome = await engine.decode(job(latents, mode=mode, **wishes))
            assert np.abs(outcome.assemble() - expected).max() < 1e-5

        async with serving(config, tmp_path) as (engine, group):
            first = [where.pid for where in group.environments]
            assert len(set(first)) == 2

            # Their allocator keeps what they free: glibc was told before it allocated anything.
            for pid in first:
                assert b"MALLOC_TRIM_THRESHOLD_=" in Path(f"/proc/{pid}/environ").read_bytes()

            # A rewrite that one of them lacks changes what they exchange, so both do without.
            assert "off on rank 1 of 2" in engine.describe()["rewrites"]["one_frame_conv2d"]["reason"]
            assert len(engine.readiness().warnings) == 1

            # Every exact mode, and every way to collect.
            assert engine.describe()["self_test"] == {"height": "exact", "width": "exact"}
            for mode in ("direct", "spatial_shard_height", "spatial_shard_width"):
                await decodes(mode)
            # Latents that are too large for the call itself are put into Ray's store.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ray_group, "IN_CALL_BYTES", 0)
                await decodes()
            outcome = await engine.decode(job(latents, mode="spatial_shard_width", collect="broadcast"))
            assert len(outcome.digests) == 2
            assert len(set(outcome.digests)) == 1

            # A rank that raises: the same processes join anew, and the caller sees nothing of it.
            (tmp_path / "1").write_text("cosmic ray")
            await decodes()
            assert [where.pid for where in group.environments] == first

            # A failed compilation: eager on all ranks, same processes.
            (tmp_path / "0").write_text("compile")
            await decodes()
            assert [where.pid for where in group.environments] == first
            assert engine.describe()["compile"]["reason"] == "CompileFailedError: no compiler"

            # A rank that is killed between requests: the next one is served by new processes.
            os.kill(first[1], signal.SIGKILL)
            await decodes()
            second = [where.pid for where in group.environments]
            assert not set(first) & set(second)
            assert not any(map(is_running, first))

            # A rank that dies in the middle of a decode.
            (tmp_path / "0").write_text("die")
            await decodes()
            third = [where.pid for where in group.environments]
            assert not set(second) & set(third)
            assert engine.readiness().ready

            # A rank that is frozen, like a GPU that hangs.
            (tmp_path / "1").write_text("freeze")
            began = time.monotonic()
            await decodes()
            assert time.monotonic() - began < 60
            assert not any(map(is_running, third))

            last = [where.pid for where in group.environments]
        assert not any(map(is_running, last))

    run(test)


def test_each_rank_gets_a_device_of_its_own(cluster: None, tiny_wan: TinyWan) -> None:
    async def test() -> None:
        group = RayGroup(tiny_wan.config(group={"device": "cuda", "cpus_per_rank": 0.25}))
        try:
            await group.place()
            await group.spawn()
            assert sorted(str(where.visible_devices) for where in group.environments) == ["0", "1"]
        finally:
            await group.close()
            await group.close()

    run(test)


def test_a_model_that_cannot_be_loaded_is_named(cluster: None, tiny_wan: TinyWan, tmp_path: Path) -> None:
    async def test() -> None:
        group = RayGroup(tiny_wan.config(model={"source": str(tmp_path / "nothing-here")}))
        with pytest.raises(Exception, match="nothing-here"):
            await group.start()
        await group.close()

    run(test)


def test_what_requests_took_is_exported_by_model_and_mode(cluster: None) -> None:
    from decode_service.telemetry import ACTUAL_TO_PREDICTED, DECODE_SECONDS, DECODED_REQUESTS, RayMetrics

    observer = RayMetrics("lab/tiny")
    observer.decoded("direct", 0.3, 0.2, 1)
    observer.decoded("direct", 0.7, None, 4)
    observer.decoded("tile", 3.0, None, 1)
    address = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"

    def exported() -> dict[str, float]:
        with urllib.request.urlopen(address, timeout=10) as reply:
            lines = [line for line in reply.read().decode().splitlines() if 'model="lab/tiny"' in line]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    until = time.monotonic() + 60
    while not (seen := exported()) and time.monotonic() < until:
        time.sleep(0.5)

    def value(name: str, *labels: str) -> float | None:
        matching = [v for k, v in seen.items() if k.startswith(f"ray_{name}{{") and all(label in k for label in labels)]
        return matching[0] if matching else None

    assert value(f"{DECODE_SECONDS}_count", 'mode="tile"') == 1
    assert value(f"{DECODE_SECONDS}_bucket", 'mode="direct"', 'le="0.2"') == 0
    assert value(f"{DECODE_SECONDS}_bucket", 'mode="direct"', 'le="0.5"') == 1
    # Five requests in two passes.
    assert value(f"{DECODE_SECONDS}_count", 'mode="direct"') == 2
    assert value(f"{DECODED_REQUESTS}_total", 'mode="direct"') == 5
    # 1.5 times as long as predicted.
    assert value(f"{ACTUAL_TO_PREDICTED}_bucket", 'mode="direct"', 'le="1.25"') == 0
    assert value(f"{ACTUAL_TO_PREDICTED}_bucket", 'mode="direct"', 'le="2.0"') == 1
    assert value(f"{ACTUAL_TO_PREDICTED}_count", 'mode="tile"') is None, "nothing was predicted"
