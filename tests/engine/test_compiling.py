"""The engine over ranks that compile: decided once for all of them, in warm-up, and mended together.

What compiling gives is replaced by the decoder itself, or by what a test needs: here it matters who runs what when.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from decode_service.decoding import compilation
from decode_service.engine.engine import DecodeEngine
from decode_service.engine.local_group import LocalGroup
from decode_service.engine.protocol import RankError, RankTask
from decode_service.planning import compiled_shapes

from .conftest import Faults, TinyWan, job, run, serving

WARM = (2, 6, 6)
# More pixels than one rank is given by the policy: both ranks decode it, each a band.
WARM_BANDS = (2, 9, 8)
BANDS: dict[str, Any] = {"compile": {"enabled": True}, "warmup": {"shapes": [[1, 4, *WARM_BANDS]]}}
COMPILED: dict[str, Any] = {"compile": {"enabled": True}, "warmup": {"shapes": [[1, 4, *WARM]]}}


class Compiler:
    """Stands in for torch's: compiled code is the decoder itself, unless ``fault`` says otherwise.

    Attributes:
        compiled: threads (ranks) in which something was compiled, in order.
        fault: called with the rank before each compiled call.
    """

    def __init__(self) -> None:
        self.compiled: list[int] = []
        self.fault: Callable[[int], None] = lambda rank: None

    def __call__(self, forward: Any) -> Any:
        self.compiled.append(_rank())

        def compiled(*args: Any, **kwargs: Any) -> Any:
            self.fault(_rank())
            return forward(*args, **kwargs)

        return compiled


def _rank() -> int:
    return int(threading.current_thread().name.split("-")[1].split("_")[0])


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(compilation, "compile_whole", compiler)
    monkeypatch.setattr(compilation, "compile_sharded", lambda forward, args, kwargs: compiler(forward))
    monkeypatch.setattr(compilation, "MIN_ROUNDS", 1)
    monkeypatch.setattr(compilation, "MEASURING_S", 0.0)
    monkeypatch.setattr(compiled_shapes, "MIN_SPEEDUP", 0.0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return compiler


async def decoded(engine: DecodeEngine, tiny_wan: TinyWan, *extents: int, **wishes: Any) -> bool:
    """Whether it ran compiled; its pixels are right in any case."""
    latents = tiny_wan.latents(*extents)
    outcome = await engine.decode(job(latents, **wishes))
    assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5
    return outcome.compiled


def test_warm_shapes_run_compiled_on_every_rank_and_others_at_once_eagerly(
    tiny_wan: TinyWan, compiler: Compiler
) -> None:
    async def test() -> None:
        async with serving(tiny_wan.config(**COMPILED)) as engine:
            shown = engine.describe()["compile"]
            assert shown["active"] and shown["reason"] is None
            # The first pass and the second one.
            assert len(shown["shapes"]) == 2 and sorted(compiler.compiled) == [0, 0, 1, 1]
            assert all(shape["compiled"] and shape["ranks"] == [0, 1] for shape in shown["shapes"])
            assert {tuple(shape["input"][-2:]) for shape in shown["shapes"]} == {WARM[1:]}
            # Two at once: one on each rank.
            assert await asyncio.gather(*(decoded(engine, tiny_wan, *WARM) for _ in range(2))) == [True, True]
            assert not await decoded(engine, tiny_wan, 2, 6, 5)
            assert not await decoded(engine, tiny_wan, *WARM, mode="spatial_shard_width")
            assert len(compiler.compiled) == 4, "nothing was compiled for requests"

    run(test)


def test_warm_frames_divided_between_ranks_run_compiled(tiny_wan: TinyWan, compiler: Compiler) -> None:
    async def test() -> None:
        async with serving(tiny_wan.config(**BANDS)) as engine:
            shapes = engine.describe()["compile"]["shapes"]
            # The first pass and the second one, on bands; and of whole frames, as a busy group decodes them.
            divided = [shape for shape in shapes if shape["bands"]]
            assert [(shape["axis"], shape["bands"]) for shape in divided] == [("height", [5, 4])] * 2
            assert all(shape["compiled"] and shape["ranks"] == [0, 1] for shape in shapes)
            compiled = len(compiler.compiled)
            assert await decoded(engine, tiny_wan, *WARM_BANDS)
            assert not await decoded(engine, tiny_wan, 2, 9, 9)
            assert not await decoded(engine, tiny_wan, *WARM_BANDS, mode="spatial_shard_width")
            assert len(compiler.compiled) == compiled, "nothing was compiled for requests"

    run(test)


@pytest.mark.parametrize("when", ["in warm-up", "in a request"])
def test_a_rank_that_fails_on_its_band_makes_the_bucket_eager_on_all_and_the_request_is_served(
    tiny_wan: TinyWan, compiler: Compiler, when: str
) -> None:
    failures = iter([True])

    def fails_once(rank: int) -> None:
        if rank == 1 and next(failures, False):
            raise AssertionError("a guard broke")

    async def test() -> None:
        if when == "in warm-up":
            compiler.fault = fails_once
        async with serving(tiny_wan.config(**BANDS)) as engine:
            compiler.fault = fails_once
            assert not await decoded(engine, tiny_wan, *WARM_BANDS), "one of two passes is eager now"
            assert any("a guard broke" in warning for warning in engine.readiness().warnings)
            divided = {shape["key"] for shape in engine.describe()["compile"]["shapes"] if shape["bands"]}
            for worker in engine._group._workers:  # type: ignore[attr-defined]
                assert len(divided & worker.decoder._decoder._in_use) == 1
            assert engine.readiness().ready

    run(test)


def test_tiles_of_warm_shapes_run_compiled(tiny_wan: TinyWan, compiler: Compiler) -> None:
    async def test() -> None:
        policy = {"mode": "tile", "tile": {"size_px": 32, "stride_px": 24}}
        async with serving(tiny_wan.config(**COMPILED, policy=policy)) as engine:
            shapes = engine.describe()["compile"]["shapes"]
            assert {tuple(shape["input"][-2:]) for shape in shapes} == {(4, 4), (4, 3), (3, 4), (3, 3)}
            assert (await engine.decode(job(tiny_wan.latents(*WARM)))).compiled

    run(test)


def test_what_one_rank_cannot_compile_no_rank_runs_compiled(tiny_wan: TinyWan, compiler: Compiler) -> None:
    def no_compiler(rank: int) -> None:
        if rank == 1:
            raise AssertionError("no compiler here")

    async def test() -> None:
        compiler.fault = no_compiler
        async with serving(tiny_wan.config(**COMPILED)) as engine:
            shown = engine.describe()["compile"]
            assert not shown["active"] and all("rank 1" in shape["reason"] for shape in shown["shapes"])
            assert await asyncio.gather(*(decoded(engine, tiny_wan, *WARM) for _ in range(2))) == [False, False]
            assert not any(worker.decoder._decoder._in_use for worker in engine._group._workers)  # type: ignore[attr-defined]

    run(test)


def test_nothing_faster_is_shown_with_what_was_measured(
    tiny_wan: TinyWan, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_shapes, "MIN_SPEEDUP", 1e9)

    async def test() -> None:
        async with serving(tiny_wan.config(**COMPILED)) as engine:
            shown = engine.describe()["compile"]
            assert not shown["active"] and "faster" in shown["reason"]
            assert all(shape["speedup"] > 0 and "not faster" in shape["reason"] for shape in shown["shapes"])
            assert not await decoded(engine, tiny_wan, *WARM)

    run(test)


def test_a_compiled_call_that_fails_makes_its_bucket_eager_on_all_ranks_and_the_request_is_served(
    tiny_wan: TinyWan, compiler: Compiler
) -> None:
    failures = iter([True])

    def fails_once(rank: int) -> None:
        if next(failures, False):
            raise AssertionError("a guard broke")

    async def test() -> None:
        async with serving(tiny_wan.config(**COMPILED)) as engine:
            compiler.fault = fails_once
            assert not await decoded(engine, tiny_wan, *WARM), "one of two passes is eager now"
            shown = engine.describe()["compile"]
            assert shown["active"] and [shape["compiled"] for shape in shown["shapes"]].count(False) == 1
            assert any("a guard broke" in str(shape["reason"]) for shape in shown["shapes"])
            assert any("a guard broke" in warning for warning in engine.readiness().warnings)
            in_use = {worker.decoder._decoder._in_use for worker in engine._group._workers}  # type: ignore[attr-defined]
            assert len(in_use) == 1 and len(in_use.pop()) == 1
            assert engine.readiness().ready and len(compiler.compiled) == 4

    run(test)


def test_every_bucket_of_a_request_may_fail_and_it_is_still_served(tiny_wan: TinyWan, compiler: Compiler) -> None:
    def always(rank: int) -> None:
        raise AssertionError("a guard broke")

    async def test() -> None:
        async with serving(tiny_wan.config(**COMPILED)) as engine:
            compiler.fault = always
            assert not await decoded(engine, tiny_wan, *WARM)
            assert not engine.describe()["compile"]["active"]

    run(test)


def test_new_ranks_decode_eagerly_at_once_and_are_warm_again_soon(
    tiny_wan: TinyWan, compiler: Compiler, faults: Faults
) -> None:
    gone = threading.Event()

    def stalls(task: RankTask) -> None:
        gone.wait(20)

    async def test() -> None:
        config = tiny_wan.config(**COMPILED, group={"run_timeout_s": 4, "abort_grace_s": 0.2})
        async with serving(config, faults) as engine:
            faults.on(0, stalls)
            # The retry comes before the warm-up.
            assert not await decoded(engine, tiny_wan, *WARM)
            gone.set()
            assert faults.built == 4
            while not engine.describe()["compile"]["active"] or engine.describe()["queue"]["running"]:
                await asyncio.sleep(0.02)
            assert sorted(compiler.compiled) == [0, 0, 0, 0, 1, 1, 1, 1]
            assert await asyncio.gather(*(decoded(engine, tiny_wan, *WARM) for _ in range(2))) == [True, True]

    run(test)


def test_ranks_of_which_some_could_not_be_told_are_started_anew(
    tiny_wan: TinyWan, compiler: Compiler, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        config = tiny_wan.config(**COMPILED)
        group = LocalGroup(config, faults.make_worker)
        tell, failures = group.use_compiled, iter([True])

        async def tells_some(keys: frozenset[str]) -> None:
            if next(failures, False):
                await group._on(0, group._workers[0].use_compiled, keys)
                raise RankError("collective", 1, "no answer")
            await tell(keys)

        monkeypatch.setattr(group, "use_compiled", tells_some)
        engine = DecodeEngine(group, config)
        await engine.start()
        try:
            assert faults.built == 4 and engine.readiness().ready
            assert await asyncio.gather(*(decoded(engine, tiny_wan, *WARM) for _ in range(2))) == [True, True]
        finally:
            await engine.close()

    run(test)


def test_without_warm_up_shapes_nothing_is_compiled(tiny_wan: TinyWan, compiler: Compiler) -> None:
    async def test() -> None:
        async with serving(tiny_wan.config(compile={"enabled": True})) as engine:
            assert "warmup.shapes" in engine.describe()["compile"]["reason"]
            assert not await decoded(engine, tiny_wan, *WARM) and not compiler.compiled

    run(test)


def test_compiling_may_take_longer_than_a_request(tiny_wan: TinyWan, compiler: Compiler) -> None:
    def takes_time(rank: int) -> None:
        threading.Event().wait(0.7)

    async def test() -> None:
        compiler.fault = takes_time
        config = tiny_wan.config(**COMPILED, group={"ranks": 1, "run_timeout_s": 2.5, "abort_grace_s": 0.1})
        async with serving(config) as engine:
            compiler.fault = lambda rank: None
            assert len(engine.describe()["compile"]["shapes"]) == 2 and not engine.readiness().warnings
            assert await decoded(engine, tiny_wan, *WARM)

    run(test)
