"""Waiting requests of one shape in one pass: real decoders on real ranks in this process."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_client.wire import WireTensor, itemsize

from decode_service.config import ServiceConfig
from decode_service.decoding.families import FAMILIES
from decode_service.decoding.rank import RankDecoder
from decode_service.engine import batching
from decode_service.engine.engine import DecodeEngine
from decode_service.engine.local_group import LocalGroup
from decode_service.engine.protocol import DecodeJob, DecodeOutcome, RankTask
from decode_service.engine.runs import Run
from decode_service.engine.scheduler import Together
from decode_service.errors import DeadlineExceededError, GroupFailedError, QueueFullError
from decode_service.planning.conditioning import Conditioning
from decode_service.planning.layouts import Layout
from decode_service.planning.memory import Activations, Footprint, MemoryNeed
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.planner import Policy, make_plan, together
from tests.decoding import catalogue, tiny_models
from tests.decoding.test_ltx_video import RESIDUAL, ltx
from tests.planning.test_cost import WAN

from .conftest import FLOAT, Faults, TinyWan, job, raising, run, serving, within


@pytest.fixture(scope="module")
def kl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny AutoencoderKL on disk and in memory."""
    vae = tiny_models.autoencoder_kl().eval().requires_grad_(False)
    folder = tmp_path_factory.mktemp("tiny-kl")
    vae.save_pretrained(folder)
    return folder, vae


@pytest.fixture
def whatever_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of several gain by decree: which takes less time on a busy machine is not what is tested."""
    monkeypatch.setattr(batching, "MARGIN", -1e9)


def config_of(folder: Path, *, ranks: int = 1, **policy: Any) -> ServiceConfig:
    return ServiceConfig.model_validate(
        {
            "model": {"name": "kl", "source": str(folder), "dtype": "float32"},
            "group": {"ranks": ranks, "threads": 1},
            "policy": {"direct_max_pixels": 1 << 20, "batch": {"max_items": 4}, **policy},
            # Short: the smallest frames are all that is measured. Times are not predicted.
            "calibration": {"enabled": False, "seconds": 0.01},
        }
    )


def stills(vae: Any, count: int, rows: int = 4, columns: int = 8) -> list[np.ndarray]:
    """As many requests, of the size at which passes are measured."""
    draw = np.random.default_rng(1).standard_normal
    return [draw((1, vae.config.latent_channels, rows, columns), np.float32) for _ in range(count)]


def decoded(vae: Any, latents: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return np.asarray(vae.decode(torch.from_numpy(latents)).sample)


class Observer:
    """A ``DecodeObserver`` that remembers."""

    def __init__(self) -> None:
        self.requests: list[int] = []

    def decoded(self, mode: str, seconds: float, predicted_seconds: float | None, requests: int) -> None:
        assert seconds > 0
        self.requests.append(requests)


async def queued(
    engine: DecodeEngine, faults: Faults, calls: Sequence[Callable[[], Awaitable[DecodeOutcome]]]
) -> list[asyncio.Task[DecodeOutcome]]:
    """Tasks of all ``calls``: the first runs, and goes on to do so until the others wait."""
    held = threading.Event()
    waiting = faults.pending.setdefault(0, [])
    waiting.insert(0, lambda task: within(30, held))
    tasks = [asyncio.ensure_future(call()) for call in calls]
    while engine.describe()["queue"]["waiting"] < len(calls) - 1:
        await asyncio.sleep(0.005)
    held.set()
    return tasks


def test_what_waits_is_decoded_in_one_pass_to_the_pixels_of_each_alone(
    kl: tuple[Path, Any], faults: Faults, whatever_is_faster: None
) -> None:
    folder, vae = kl
    latents, observer = stills(vae, 7), Observer()

    async def test() -> None:
        async with serving(config_of(folder), faults, observer) as engine:
            calls = [lambda each=each: engine.decode(job(each, caller="a")) for each in latents]  # type: ignore[misc]
            outcomes = await asyncio.gather(*await queued(engine, faults, calls))
            assert [outcome.plan.together for outcome in outcomes] == [1, 4, 4, 4, 4, 2, 2]
            assert [task.plan.together for _, task in faults.tasks] == [1, 4, 2]
            assert observer.requests == [1, 4, 2], "its time is told once for each pass, with the number of requests"
            alone = [await engine.decode(job(each)) for each in latents]
            for each, outcome, single in zip(latents, outcomes, alone, strict=True):
                assert single.plan.together == 1
                assert np.abs(outcome.assemble() - single.assemble()).max() < 1e-5
                assert np.abs(outcome.assemble() - decoded(vae, each)).max() < 1e-5
            shown = outcomes[1].plan.public()
            assert shown["together"] == 4 and "4 requests in one pass" in shown["reason"]
            assert "together" not in alone[0].plan.public()
            assert outcomes[1].plan.latent_shape == latents[1].shape
            told = json.loads(json.dumps(engine.describe()))["batching"]
            assert told["active"] and told["reason"] is None and (told["passes"], told["requests"]) == (2, 6)
            assert {each["items"] for each in told["measured"]} == {2, 4}
            assert all(0 <= each["difference"] < 1e-5 for each in told["measured"])
            assert engine.describe()["queue"] == {"waiting": 0, "running": 0, "callers": 0}

    run(test)


def test_only_what_is_alike_and_measured_is_decoded_together(
    kl: tuple[Path, Any], faults: Faults, whatever_is_faster: None
) -> None:
    folder, vae = kl
    small, large = stills(vae, 1)[0], stills(vae, 1, 9, 9)[0]

    async def test() -> None:
        async with serving(config_of(folder), faults) as engine:
            assert engine.describe()["batching"]["max_pixels"] == engine.plan(small.shape).output_pixels
            wishes: list[tuple[np.ndarray, dict[str, Any]]] = [
                (small, {}),
                (small, {"denormalize": True}),
                (small, {"pixels": FLOAT.__class__()}),
                # Who forces a mode wants the same bytes every time.
                (small, {"mode": "direct"}),
                (small, {"mode": "direct"}),
                # Larger than what was measured.
                (large, {}),
                (large, {}),
                # Two items of one request.
                (np.concatenate([small, small]), {}),
                (np.concatenate([small, small]), {}),
            ]
            calls = [lambda each=each: engine.decode(job(each[0], caller="a", **each[1])) for each in wishes]  # type: ignore[misc]
            for outcome in await asyncio.gather(*await queued(engine, faults, calls)):
                assert outcome.plan.together == 1
        async with serving(config_of(folder, batch={"max_items": 1}), faults) as engine:
            outcomes = await asyncio.gather(*await queued(engine, faults, [lambda: engine.decode(job(small))] * 4))
            assert [outcome.plan.together for outcome in outcomes] == [1] * 4
            told = engine.describe()["batching"]
            assert not told["active"] and "max_items" in told["reason"] and told["measured"] == []

    run(test)


def test_a_request_is_decoded_before_its_deadline_whatever_the_window(
    kl: tuple[Path, Any], faults: Faults, whatever_is_faster: None
) -> None:
    folder, vae = kl
    latents = stills(vae, 1)[0]

    async def test() -> None:
        async with serving(config_of(folder, batch={"max_items": 4, "window_ms": 10_000}), faults) as engine:
            begun = time.monotonic()
            outcome = await engine.decode(job(latents, deadline_s=2.0))
            assert 0.9 < time.monotonic() - begun < 2 and outcome.plan.together == 1

    run(test)


def test_an_operator_who_forces_direct_and_allows_passes_gets_both(
    kl: tuple[Path, Any], faults: Faults, whatever_is_faster: None
) -> None:
    folder, vae = kl
    latents = stills(vae, 1)[0]

    async def test() -> None:
        async with serving(config_of(folder, mode="direct"), faults) as engine:
            outcomes = await asyncio.gather(*await queued(engine, faults, [lambda: engine.decode(job(latents))] * 3))
            assert [outcome.plan.together for outcome in outcomes] == [1, 2, 2]
        async with serving(config_of(folder, ranks=2, mode="spatial_shard_width"), faults) as engine:
            told = engine.describe()["batching"]
            assert not told["active"] and "policy.mode is spatial_shard_width" in told["reason"]
            assert told["measured"] == [], "nobody could share a pass, so none is timed"

    run(test)


@pytest.mark.parametrize(("margin", "tolerance", "why"), [(1e9, 1.0, "not faster"), (-1e9, -1.0, "differ from single")])
def test_nothing_is_decoded_together_that_does_not_gain_or_differs(
    kl: tuple[Path, Any], faults: Faults, monkeypatch: pytest.MonkeyPatch, margin: float, tolerance: float, why: str
) -> None:
    folder, vae = kl
    monkeypatch.setattr(batching, "MARGIN", margin)
    monkeypatch.setitem(batching.TOLERANCE, "float32", tolerance)

    async def test() -> None:
        async with serving(config_of(folder), faults) as engine:
            told = engine.describe()["batching"]
            assert not told["active"] and why in told["reason"]
            latents = stills(vae, 1)[0]
            outcomes = await asyncio.gather(*await queued(engine, faults, [lambda: engine.decode(job(latents))] * 4))
            assert [outcome.plan.together for outcome in outcomes] == [1] * 4

    run(test)


def test_a_bad_request_fails_alone(kl: tuple[Path, Any], faults: Faults, whatever_is_faster: None) -> None:
    folder, vae = kl
    latents = stills(vae, 5)

    class Picky(Faults):
        def bad(self, task: RankTask) -> None:
            if "bad" in task.request_id:
                raise ValueError("cosmic ray")

    picky = Picky()

    async def test() -> None:
        async with serving(config_of(folder), picky) as engine:
            calls = [
                lambda index=index: engine.decode(  # type: ignore[misc]
                    job(latents[index], caller="a", request_id="bad" if index == 2 else f"good {index}")
                )
                for index in range(5)
            ]
            tasks = await queued(engine, picky, calls)
            picky.pending[0].extend([picky.bad] * 20)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(results[2], GroupFailedError) and "cosmic ray" in str(results[2])
            for index, result in enumerate(results):
                if index != 2:
                    assert isinstance(result, DecodeOutcome) and result.plan.together == 1
                    assert np.abs(result.assemble() - decoded(vae, latents[index])).max() < 1e-5
            # All four at once, then one by one, and the bad one once more.
            assert [task.plan.together for _, task in picky.tasks] == [1, 4, 1, 1, 1, 1, 1]
            picky.pending[0].clear()
            outcomes = await asyncio.gather(*await queued(engine, picky, calls))
            assert [outcome.plan.together for outcome in outcomes] == [1, 4, 4, 4, 4], "they still go together"

    run(test)


def test_out_of_memory_together_is_decoded_alone_from_then_on(
    kl: tuple[Path, Any], faults: Faults, whatever_is_faster: None
) -> None:
    folder, vae = kl
    latents = stills(vae, 9)

    async def test() -> None:
        async with serving(config_of(folder), faults) as engine:
            calls = [lambda each=each: engine.decode(job(each)) for each in latents]  # type: ignore[misc]
            tasks = await queued(engine, faults, calls)
            faults.on(0, raising(torch.OutOfMemoryError("CUDA out of memory")))
            outcomes = await asyncio.gather(*tasks)
            # Also those that were queued before the first pass failed.
            assert [outcome.plan.together for outcome in outcomes] == [1] * 9
            assert all(outcome.plan.fallback is None for outcome in outcomes), "alone there is memory enough"
            told = engine.describe()["batching"]
            assert "ran out of memory" in told["reason"]
            assert told["max_pixels"] < engine.plan(latents[0].shape).output_pixels
            outcomes = await asyncio.gather(*await queued(engine, faults, calls))
            assert [outcome.plan.together for outcome in outcomes] == [1] * 9

    run(test)


def test_a_pass_that_failed_keeps_no_latents(kl: tuple[Path, Any], faults: Faults, whatever_is_faster: None) -> None:
    """Of none of its requests; nobody waits for the collector of cycles."""
    folder, vae = kl
    held: list[weakref.ref[np.ndarray]] = []

    def watched() -> DecodeJob:
        array = stills(vae, 1)[0]
        held.append(weakref.ref(array))
        return DecodeJob(WireTensor("float32", array.shape, array.reshape(-1).view(np.uint8).data))

    def failing(task: RankTask) -> None:
        raise ValueError("cosmic ray")

    async def test() -> None:
        async with serving(config_of(folder), faults) as engine:
            gc.collect()
            gc.disable()
            tasks = await queued(engine, faults, [lambda: engine.decode(watched())] * 4)
            faults.on(0, failing)
            assert [outcome.plan.together for outcome in await asyncio.gather(*tasks)] == [1] * 4
            assert [task.plan.together for _, task in faults.tasks] == [1, 3, 1, 1, 1]
            del tasks
            until = time.monotonic() + 5
            while any(each() is not None for each in held) and time.monotonic() < until:
                await asyncio.sleep(0.005)
            assert not any(each() is not None for each in held)

    try:
        run(test)
    finally:
        gc.enable()


def test_lack_of_memory_for_what_is_joined_leaves_each_its_own_decode(
    kl: tuple[Path, Any], faults: Faults, whatever_is_faster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, vae = kl
    latents = stills(vae, 3)

    def join(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(batching.Batching, "join", join)

    async def test() -> None:
        async with serving(config_of(folder), faults) as engine:
            calls = [lambda each=each: engine.decode(job(each)) for each in latents]  # type: ignore[misc]
            outcomes = await asyncio.gather(*await queued(engine, faults, calls))
            assert [outcome.plan.together for outcome in outcomes] == [1, 1, 1]

    run(test)


def test_who_leaves_takes_nobody_along(kl: tuple[Path, Any], faults: Faults, whatever_is_faster: None) -> None:
    folder, vae = kl
    latents, observer = stills(vae, 4), Observer()

    async def test() -> None:
        async with serving(config_of(folder), faults, observer) as engine:
            running, release = threading.Event(), threading.Event()

            def hold(task: RankTask) -> None:
                running.set()
                within(30, release)

            deadlines = [None, None, 2.0, None]
            calls = [
                lambda each=each: engine.decode(job(each[0], deadline_s=each[1]))  # type: ignore[misc]
                for each in zip(latents, deadlines, strict=True)
            ]
            tasks = await queued(engine, faults, calls)
            faults.on(0, hold)
            while not running.is_set():
                await asyncio.sleep(0.005)
            assert engine.describe()["queue"]["running"] == 3
            tasks[1].cancel()
            with suppress(asyncio.CancelledError):
                await tasks[1]
            with pytest.raises(DeadlineExceededError, match="while decoding"):
                await tasks[2]
            release.set()
            outcome = await tasks[3]
            assert outcome.plan.together == 3
            assert np.abs(outcome.assemble() - decoded(vae, latents[3])).max() < 1e-5
            assert observer.requests == [1, 3], "the ranks were busy for them too"

    run(test)


def test_nan_in_one_of_them_is_decoded_again_alone(tiny_wan: TinyWan, faults: Faults, whatever_is_faster: None) -> None:
    latents = [tiny_wan.latents(2, 4, 8, seed=seed) for seed in range(4)]
    # Finite in float16, and their sums in the first convolution are not.
    latents[2] = np.sign(latents[2]) * np.float32(6e4)

    async def test() -> None:
        config = tiny_wan.config(
            model={"dtype": "float16"},
            group={"ranks": 1},
            policy={"batch": {"max_items": 4}},
            calibration={"seconds": 0.01},
        )
        async with serving(config, faults) as engine:
            assert engine.describe()["batching"]["active"], engine.describe()["batching"]
            calls = [lambda each=each: engine.decode(job(each)) for each in latents]  # type: ignore[misc]
            outcomes = await asyncio.gather(*await queued(engine, faults, calls))
            assert [outcome.plan.together for outcome in outcomes] == [1, 3, 1, 3]
            assert [outcome.plan.dtype for outcome in outcomes] == ["float16", "float16", "float32", "float16"]
            assert all(np.isfinite(outcome.assemble()).all() for outcome in outcomes)

    run(test)


def test_each_keeps_its_own_noise(tmp_path: Path, faults: Faults, whatever_is_faster: None) -> None:
    vae: Any = ltx(timestep_conditioning=True, scaling_factor=0.5, **RESIDUAL)
    vae.save_pretrained(tmp_path)
    latents = np.random.default_rng(2).standard_normal((1, vae.config.latent_channels, 2, 4, 8), np.float32)
    noises: list[dict[str, Any]] = [{"seed": seed, "timestep": 0.05, "noise_scale": 0.5} for seed in (0, 1, 2)]
    # Another timestep is another pass.
    noises.append({"seed": 3, "timestep": 0.1, "noise_scale": 0.5})

    async def test() -> None:
        async with serving(config_of(tmp_path), faults) as engine:
            wishes = [noises[0], *noises]
            calls = [lambda each=each: engine.decode(job(latents, caller="a", **each)) for each in wishes]  # type: ignore[misc]
            outcomes = await asyncio.gather(*await queued(engine, faults, calls))
            assert [outcome.plan.together for outcome in outcomes] == [1, 3, 3, 3, 1]
            for each, outcome in zip(wishes, outcomes, strict=True):
                single = await engine.decode(job(latents, mode="direct", **each))
                assert np.abs(outcome.assemble() - single.assemble()).max() < 1e-5
            assert np.abs(outcomes[1].assemble() - outcomes[2].assemble()).max() > 1e-2

    run(test)


def test_idle_ranks_take_requests_of_their_own_first(
    kl: tuple[Path, Any], faults: Faults, whatever_is_faster: None
) -> None:
    folder, vae = kl
    latents = stills(vae, 4)

    async def test() -> None:
        async with serving(config_of(folder, ranks=2), faults) as engine:
            outcomes = await asyncio.gather(*(engine.decode(job(each)) for each in latents[:2]))
            assert [outcome.plan.together for outcome in outcomes] == [1, 1]
            # All ranks are busy while four come; the first that is idle leaves none of them half of the work.
            whole = asyncio.ensure_future(engine.decode(job(stills(vae, 1, 9, 9)[0], mode="spatial_shard_width")))
            while not engine.describe()["queue"]["running"]:
                await asyncio.sleep(0)
            outcomes = await asyncio.gather(*(engine.decode(job(each)) for each in latents))
            await whole
            assert [outcome.plan.together for outcome in outcomes] == [2, 2, 2, 2]
            assert {rank for rank, task in faults.tasks if task.plan.together == 2} == {0, 1}

    run(test)


# ---- who may share a pass --------------------------------------------------------------------------------------------

TOGETHER = "may share a pass"
APART = "never share a pass"
ALONE = "a request that says so is decoded alone"
FOLLOWS = "the same for all that one rank decodes, or follows from what is decided here"

#: Whatever a request consists of. Who adds a field says whether requests that differ in it alone may share a pass, and gives a
#: value for it that differs from that of ``BASE``.
DECIDED: dict[type, dict[str, tuple[str, Any]]] = {
    WireTensor: {
        "dtype": (APART, "float16"),
        # They may lie in another way, with frames first say: see the shape of the plan.
        "shape": (TOGETHER, (1, 3, 16, 8, 16)),
        "data": (TOGETHER, bytes(4 * 16 * 3 * 8 * 16)),
    },
    Conditioning: {"timestep": (APART, 0.5), "noise_scale": (APART, 0.5), "seed": (TOGETHER, 7)},
    PixelFormat: {"dtype": (APART, "float32"), "range": (APART, "model")},
    RankTask: {
        "plan": (FOLLOWS, None),
        "denormalize": (APART, True),
        "pixels": (FOLLOWS, None),
        "precision": (APART, "float32"),
        "eager": (APART, True),
        "measure": (APART, True),
        "request_id": (TOGETHER, "another"),
        # Latents are arranged before they are joined.
        "arrangement": (TOGETHER, None),
        # Others of its fields: see above.
        "conditioning": (APART, None),
        "seeds": (TOGETHER, (1, 2)),
    },
    DecodePlan: {
        "latent_shape": (APART, (1, 16, 3, 16, 8)),
        "chunk": (APART, 2),
        "collect": (APART, "rank0"),
        "reason": (TOGETHER, "another"),
        "fallback": (TOGETHER, "another mode could not run"),
        # What is known of times changes with every request.
        "predicted_ms": (TOGETHER, 12.0),
        "alternatives": (TOGETHER, (("spatial_shard_width", 1.0),)),
        # It follows from the pixels, which are decided above.
        "memory": (TOGETHER, MemoryNeed(*range(8))),
        # Those of a plan for one rank, of the model, of the shape, and of the precision.
        **dict.fromkeys(("mode", "ranks", "axis", "bands", "tiles", "owners", "exact", "together"), (FOLLOWS, None)),
        **dict.fromkeys(("tested", "output_frames", "output_height", "output_width"), (FOLLOWS, None)),
        **dict.fromkeys(("dtype", "dtype_reason"), (FOLLOWS, None)),
    },
    DecodeJob: {
        # Of another shape; their dtype and values: see above.
        "latents": (APART, WireTensor("float32", (1, 16, 3, 16, 8), bytes(4 * 16 * 3 * 16 * 8))),
        # The same latents, frames first.
        "layout": (TOGETHER, Layout("BTCHW")),
        "denormalize": (APART, True),
        "timestep": (APART, 0.5),
        "noise_scale": (APART, 0.5),
        "seed": (TOGETHER, 7),
        # Who forces a mode wants the same bytes every time.
        "mode": (ALONE, "direct"),
        # It says what becomes of a forced mode that cannot run.
        "strict": (TOGETHER, True),
        "collect": (APART, "rank0"),
        "chunk": (APART, 2),
        "pixels": (APART, FLOAT),
        "deadline_s": (TOGETHER, 60.0),
        "request_id": (TOGETHER, "another"),
        "caller": (TOGETHER, "another"),
    },
}

#: With timestep conditioning, so that every wish can be made.
CONDITIONED = replace(WAN, default_timestep=0.05)


def stating(shape: tuple[int, ...] = (1, 16, 3, 8, 16), **wishes: Any) -> DecodeJob:
    latents = WireTensor("float32", shape, np.ones(shape, np.float32).tobytes())
    return DecodeJob(**{"latents": latents, **wishes})


async def told_to_the_scheduler(job: DecodeJob) -> Together[Run] | None:
    """How the engine says that ``job`` may be decoded with others; None where it may not. No rank is started."""
    config = ServiceConfig.model_validate(
        {"model": {"name": "wan", "source": "nowhere"}, "policy": {"batch": {"max_items": 4}}}
    )
    engine = DecodeEngine(LocalGroup(config), config)
    engine._plans.loaded(CONDITIONED, None)
    engine._status.state, engine._batching.max_pixels = "ready", 1 << 30
    told: dict[str, Any] = {}

    async def schedule(work: Any, **how: Any) -> Any:
        told.update(how)
        raise QueueFullError("that is all that was to be known")

    engine._scheduler.run = schedule  # type: ignore[method-assign]
    with suppress(QueueFullError):
        await engine.decode(job)
    how: Together[Run] | None = told["together"]
    return how


def base() -> tuple[RankTask, WireTensor]:
    """What a plain request makes of itself."""
    how = asyncio.run(told_to_the_scheduler(stating()))
    assert how is not None
    task, latents = how.member.decided(), how.member.latents
    assert how.key == batching.key_of(task, latents)
    assert task.conditioning is not None and task.arrangement is not None
    return task, latents


def changed(kind: type, name: str, value: Any) -> Hashable:
    """The key of ``base``, with another ``name`` of its ``kind``."""
    task, latents = base()
    if kind is WireTensor:
        # Of the right size, whatever it says.
        values = {"dtype": latents.dtype, "shape": latents.shape, name: value}
        count = math.prod(values["shape"]) * itemsize(values["dtype"])
        return batching.key_of(task, WireTensor(**{"data": bytes(count), **values}))
    if kind is RankTask:
        return batching.key_of(replace(task, **{name: value}), latents)
    part = {Conditioning: "conditioning", PixelFormat: "pixels", DecodePlan: "plan"}[kind]
    return batching.key_of(replace(task, **{part: replace(getattr(task, part), **{name: value})}), latents)


FIELDS = [(kind, field.name) for kind in DECIDED for field in fields(kind)]


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=[f"{kind.__name__}.{name}" for kind, name in FIELDS])
def test_of_every_field_somebody_decided_whether_requests_that_differ_in_it_share_a_pass(kind: type, name: str) -> None:
    assert name in DECIDED[kind], (
        f"{kind.__name__}.{name} is new: may requests that differ in it alone share a pass? Decide it in `DECIDED`, and "
        "where they may not, put it into `batching.key_of`"
    )
    decision, value = DECIDED[kind][name]
    if decision == FOLLOWS:
        return
    ours = batching.key_of(*base())
    if kind is DecodeJob:
        shape = (1, 3, 16, 8, 16) if name == "layout" else (1, 16, 3, 8, 16)
        how = asyncio.run(told_to_the_scheduler(stating(shape, **{name: value})))
        assert (how is None) == (decision == ALONE)
        theirs = None if how is None else how.key
    else:
        theirs = changed(kind, name, value)
    assert (theirs == ours) == (decision == TOGETHER)


def test_nothing_is_decided_of_fields_that_are_gone() -> None:
    for kind, decided in DECIDED.items():
        assert set(decided) <= {field.name for field in fields(kind)}, kind


# ---- passes of every family ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in catalogue.TINY if not catalogue.family(name).spec.tile_only])
def test_items_of_a_pass_are_those_of_single_ones_in_every_family(name: str) -> None:
    vae = catalogue.TINY[name]().eval().requires_grad_(False)
    decoder = RankDecoder(FAMILIES[type(vae).__name__](vae, name), device=torch.device("cpu"))
    shape, _ = batching.sizes(decoder.spec, 1, 1)
    plan = make_plan(decoder.spec, shape, group_size=1, policy=Policy(), mode="direct")
    joined = together(decoder.spec, plan, 3, policy=Policy())
    assert joined is not None
    latents = np.random.default_rng(0).standard_normal(joined.latent_shape, np.float32)
    whole = decoder.decode(joined, latents, "float32", denormalize=False, pixels=FLOAT)
    assert whole.array is not None and whole.finite_items == (True,) * 3
    for item in range(3):
        alone = decoder.decode(plan, latents[item : item + 1], "float32", denormalize=False, pixels=FLOAT)
        assert alone.array is not None
        # Cosmos, CogVideoX and others have pixels beyond 1: to their size.
        largest = max(1.0, float(np.abs(alone.array).max()))
        assert np.abs(whole.array[item : item + 1] - alone.array).max() < 1e-5 * largest


# ---- plans of passes -------------------------------------------------------------------------------------------------


def alone(**wishes: Any) -> DecodePlan:
    return make_plan(WAN, (1, 16, 3, 16, 16), group_size=2, policy=Policy(), **{"mode": "direct", **wishes})


def test_a_pass_needs_the_activations_of_all_its_items() -> None:
    activations = Activations(still=1000.0, clip=2000.0, per_frame=500.0, caches=300.0)
    spec = replace(WAN, footprint=Footprint(10**6, 4, activations, activations))
    plan = make_plan(spec, (1, 16, 3, 16, 16), group_size=2, policy=Policy(), mode="direct")
    joined = together(spec, plan, 4, policy=Policy())
    assert joined is not None and plan.memory is not None and joined.memory is not None
    assert joined.memory.weights == plan.memory.weights
    for part in ("activations", "caches", "output", "latents"):
        assert getattr(joined.memory, part) == pytest.approx(4 * getattr(plan.memory, part), abs=4)
    enough, short = (Policy(memory_budget_bytes=joined.memory.per_rank_bytes + more) for more in (0, -1))
    assert together(spec, plan, 4, policy=enough) is not None
    assert together(spec, plan, 4, policy=short) is None


def test_only_single_items_on_one_rank_go_together() -> None:
    assert together(WAN, alone(), 2, policy=Policy()) is not None
    assert together(WAN, alone(), 1, policy=Policy()) is None
    assert together(WAN, alone(mode="spatial_shard_width"), 2, policy=Policy()) is None
    assert together(WAN, alone(collect="broadcast"), 2, policy=Policy()) is None
    two = make_plan(WAN, (2, 16, 3, 16, 16), group_size=2, policy=Policy(), mode="direct")
    assert together(WAN, two, 2, policy=Policy()) is None
    joined = together(WAN, alone(), 3, policy=Policy())
    assert joined is not None and DecodePlan.from_dict(json.loads(json.dumps(joined.to_dict()))) == joined


def test_a_pass_stays_within_what_kernels_index() -> None:
    spec = replace(WAN, operand_per_pixel=2**22, operand_per_pixel_first=2**22, operand_padding=0)
    plan = make_plan(spec, (1, 16, 2, 1, 1), group_size=1, policy=Policy(), mode="direct")
    pixels = plan.output_height * plan.output_width
    fits = (2**31 - 1) // (2**22 * pixels)
    assert fits > 2
    assert together(spec, plan, fits, policy=Policy()) is not None
    assert together(spec, plan, fits + 1, policy=Policy()) is None
