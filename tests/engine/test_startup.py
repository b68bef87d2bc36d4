"""What an engine decodes for itself before it is ready: the self-test and the warm-up, on real ranks in this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode_service.config import RewritesConfig, ServiceConfig
from decode_service.decoding import packed_weights
from decode_service.engine.agreement import MAY_DIFFER
from decode_service.engine.engine import DecodeEngine
from decode_service.engine.local_group import LocalGroup
from decode_service.engine.places import RankPlace
from decode_service.engine.protocol import GroupInfo, RankError, RankTask
from decode_service.engine.rank_worker import RankWorker
from decode_service.errors import (
    GroupFailedError,
    OutputTooLargeError,
)
from tests.decoding import tiny_models

from .conftest import Faults, TinyWan, job, run, serving


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


def differing_in(*rewrites: str) -> Callable[[ServiceConfig, RankPlace], RankWorker]:
    """Ranks of which number 1 runs without ``rewrites``, as if they had failed there."""

    def make_worker(config: ServiceConfig, place: RankPlace) -> RankWorker:
        off = RewritesConfig(**dict.fromkeys(rewrites, False)) if place.rank == 1 else RewritesConfig()
        return RankWorker(config.model_copy(update={"rewrites": off}), place)

    return make_worker


def test_ranks_leave_off_the_rewrites_that_change_what_they_exchange_unless_all_have_them(
    tiny_wan: TinyWan, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        config = tiny_wan.config()
        names = [name for name in config.rewrites.enabled() if name not in MAY_DIFFER]
        engine = DecodeEngine(LocalGroup(config, differing_in(*names)), config)
        await engine.start()
        shown = engine.describe()
        assert shown["self_test"] == {"height": "exact", "width": "exact"}
        (warning,) = engine.readiness().warnings
        for name in names:
            why = f"{name} is off on rank 1 of 2 (switched off in the config)"
            assert why in warning
            assert (shown["rewrites"][name]["active"], shown["rewrites"][name]["reason"]) == (False, why)
        assert shown["rewrites"]["norm_activation"]["active"], "all can run it"
        latents = tiny_wan.latents(1, 6, 7)
        outcome = await engine.decode(job(latents, mode="spatial_shard_width"))
        assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5
        await engine.close()

    with caplog.at_level(logging.WARNING, "decode_service.engine"):
        run(test)
    assert caplog.text.count("left off on all ranks") == 1


def test_ranks_may_differ_in_other_rewrites_and_say_so(
    tmp_path: Path, tiny_wan: TinyWan, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of tiny models too, whose weights are put in order in no time.
    monkeypatch.setattr(packed_weights, "SMALLEST", 1)
    tiny_models.autoencoder_kl().save_pretrained(tmp_path)

    async def test() -> None:
        config = tiny_wan.config(model={"source": str(tmp_path), "dtype": "bfloat16"})
        engine = DecodeEngine(LocalGroup(config, differing_in(*MAY_DIFFER)), config)
        await engine.start()
        shown = engine.describe()
        assert shown["self_test"] == {"height": "exact", "width": "exact"}
        (warning,) = engine.readiness().warnings
        for name in MAY_DIFFER:
            assert shown["rewrites"][name]["active"] and f"{name} is off on rank 1 of 2" in warning
        await engine.close()

    run(test)


def test_ranks_that_are_started_anew_begin_with_what_was_agreed(
    tiny_wan: TinyWan, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[frozenset[str]] = []

    class Watched(RankWorker):
        def load(
            self, compile_enabled: bool, measure: bool = True, without: Collection[str] = frozenset()
        ) -> GroupInfo:
            loaded.append(frozenset(without))
            return super().load(compile_enabled, measure, without)

    def make_worker(config: ServiceConfig, place: RankPlace) -> RankWorker:
        off = RewritesConfig(one_frame_conv2d=place.rank != 1)
        return Watched(config.model_copy(update={"rewrites": off}), place)

    async def test() -> None:
        group = LocalGroup(tiny_wan.config(), make_worker)
        await group.start()
        without = frozenset({"one_frame_conv2d"})
        assert loaded == [frozenset(), frozenset(), without, without]
        loaded.clear()
        await group.recover(RankError("died", 1, "gone", lost=(1,)))
        assert loaded == [without, without]
        await group.close()

    with caplog.at_level(logging.WARNING, "decode_service.engine"):
        run(test)
    assert "after the group was started anew: rewrites are left off on all ranks" in caplog.text


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
