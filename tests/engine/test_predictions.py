"""Predicted times: measured on real ranks at the start, corrected by what decodes take."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from decode_service.config import ServiceConfig
from decode_service.engine.predictions import LARGEST_RATIO, Predictions, sizes
from decode_service.engine.protocol import RankPixels
from decode_service.engine.runs import Run
from decode_service.errors import UnsupportedModeError
from decode_service.planning.compiled_shapes import BucketMeasurement
from decode_service.planning.cost import Calibration
from decode_service.planning.plan import DecodePlan
from decode_service.planning.planner import Policy, amount_of, make_plan
from tests.planning.test_cost import FAST, WAN

from .conftest import Faults, TinyWan, job, raising, run, serving

MEASURED = {"enabled": True, "seconds": 0.2}


def measured_config(tiny_wan: TinyWan, **sections: object) -> ServiceConfig:
    return tiny_wan.config(**{"calibration": MEASURED, "policy": {"direct_max_pixels": None}, **sections})


def test_the_ranks_are_timed_at_the_start_and_plans_predict(tiny_wan: TinyWan) -> None:
    async def test() -> None:
        async with serving(measured_config(tiny_wan)) as engine:
            shown = json.loads(json.dumps(engine.describe()))
            calibration = shown["calibration"]
            assert calibration["calibrated"] and not calibration["reason"]
            assert calibration["flop_s"] > 0 and calibration["fixed_s"] > 0
            assert min(calibration[name] for name in ("pass_s", "exchange_s", "byte_s")) >= 0
            modes = {"direct", "spatial_shard_height", "spatial_shard_width"}
            assert {decode["mode"] for decode in calibration["decodes"]} == modes
            assert len({tuple(decode["latent_shape"]) for decode in calibration["decodes"]}) == 2
            assert shown["predictions"] == {}, "these decodes were not requests"

            plan = engine.plan((1, 4, 3, 8, 10))
            assert plan.predicted_ms is not None and {plan.mode, *dict(plan.alternatives)} == modes
            for larger in ((1, 4, 5, 8, 10), (1, 4, 3, 16, 10), (1, 4, 3, 8, 20)):
                for mode in modes:
                    less, more = (engine.plan(shape, mode=mode) for shape in (plan.latent_shape, larger))
                    assert less.predicted_ms is not None and more.predicted_ms is not None
                    assert less.predicted_ms < more.predicted_ms, (larger, mode)

            latents = tiny_wan.latents(3, 8, 10)
            outcome = await engine.decode(job(latents))
            assert np.abs(outcome.assemble() - tiny_wan.decode(latents)).max() < 1e-5
            assert outcome.timings_ms["predicted"] == outcome.plan.predicted_ms
            seen = engine.describe()["predictions"][outcome.plan.mode]
            ratio = outcome.timings_ms["decode"] / outcome.timings_ms["predicted"]
            assert seen["count"] == 1 and seen["mean_ratio"] == pytest.approx(ratio, abs=1e-3)
            assert seen["p90_abs_error"] == pytest.approx(abs(ratio - 1), abs=1e-3)
            assert engine.describe()["calibration"]["corrections"][outcome.plan.mode] != 1.0

    run(test)


def test_without_a_calibration_the_rules_decide(tiny_wan: TinyWan) -> None:
    async def test() -> None:
        async with serving(tiny_wan.config()) as engine:
            assert engine.describe()["calibration"] == {
                "calibrated": False,
                "reason": "switched off (calibration.enabled)",
            }
            outcome = await engine.decode(job(tiny_wan.latents(3, 10, 12)))
            assert outcome.plan.mode == "spatial_shard_width" and outcome.plan.predicted_ms is None
            assert "predicted" not in outcome.timings_ms and engine.describe()["predictions"] == {}

    run(test)


def test_a_calibration_that_fails_is_said_and_does_without(tiny_wan: TinyWan, faults: Faults) -> None:
    # Rank 0 decodes the three pictures of the self-test first.
    faults.on(0, *[lambda task: None] * 3, raising(torch.OutOfMemoryError("CUDA out of memory")))

    async def test() -> None:
        async with serving(measured_config(tiny_wan), faults) as engine:
            shown = engine.describe()["calibration"]
            assert not shown["calibrated"] and "does not fit the memory" in shown["reason"]
            assert engine.readiness().ready and engine.plan((1, 4, 3, 10, 12)).predicted_ms is None

    run(test)


def test_an_observer_is_told_of_requests_and_cannot_fail_them(
    tiny_wan: TinyWan, caplog: pytest.LogCaptureFixture
) -> None:
    class Observer:
        def __init__(self) -> None:
            self.seen: list[tuple[str, float, float | None]] = []

        def decoded(self, mode: str, seconds: float, predicted_seconds: float | None, requests: int) -> None:
            assert requests == 1
            self.seen.append((mode, seconds, predicted_seconds))
            if len(self.seen) == 3:
                raise OSError("the exporter is gone")

    observer = Observer()

    async def test() -> None:
        for config in (measured_config(tiny_wan), tiny_wan.config()):
            async with serving(config, observer=observer) as engine:
                assert len(observer.seen) in (0, 2), "the decodes of the start are no requests"
                for mode in ("direct", "spatial_shard_width"):
                    outcome = await engine.decode(job(tiny_wan.latents(2, 6, 7), mode=mode))
                    told, seconds, predicted_s = observer.seen[-1]
                    assert told == mode and seconds == pytest.approx(outcome.timings_ms["decode"] / 1e3)
                    predicted_ms = outcome.timings_ms.get("predicted")
                    assert predicted_s == (None if predicted_ms is None else pytest.approx(predicted_ms / 1e3))
        assert [predicted_s is None for _, _, predicted_s in observer.seen] == [False, False, True, True]

    run(test)
    assert "the exporter is gone" in caplog.text


# ---- what is timed, without a clock --------------------------------------------------------------------------------


class Machine:
    """Two ranks that take as long as ``true`` says, times ``slower`` of the number of the decode.

    Attributes:
        decodes: shape, mode and seconds of each.
    """

    def __init__(self, true: Calibration, slower: Callable[[int], float] = lambda _: 1.0) -> None:
        self.true = true
        self.slower = slower
        self.decodes: list[tuple[tuple[int, ...], str, float]] = []

    async def decode(self, shape: tuple[int, ...], mode: str) -> Run:
        plan = make_plan(WAN, shape, group_size=2, policy=Policy(chunk=1), mode=mode, strict=True)
        done = amount_of(WAN, plan)
        assert done is not None
        seconds = self.true.seconds(done, mode) * self.slower(len(self.decodes))
        self.decodes.append((shape, mode, seconds))
        fixed = {"to_host": self.true.fixed_s * 1e3}
        return Run(plan, [RankPixels(None, True, "", fixed, False)], {"decode": seconds * 1e3})

    def calibrated(self, *, seconds: float = 3.0, max_pixels: int = 1 << 29) -> Predictions:
        predictions = Predictions()
        asyncio.run(
            predictions.calibrate(WAN, 2, self.decode, chunk=1, seconds=seconds, max_pixels=max_pixels),
        )
        return predictions


#: Two latent frames of 4 x 8 cells take 20 ms, the half of them that is a band 25 ms.
CORE = Calibration(fixed_s=1e-3, pass_s=5e-3, flop_s=1e-13, band_flop_s=1.2e-13, exchange_s=1e-4, byte_s=1e-9)
#: Of such ranks no decode is repeated, but for a reason.
SLOW = replace(CORE, pass_s=0.5, flop_s=1e-11, band_flop_s=1.2e-11)


def constants(predictions: Predictions) -> Calibration:
    assert predictions.calibration is not None and not predictions.problem
    return predictions.calibration


def test_a_quiet_machine_is_known_exactly() -> None:
    for true in (FAST, CORE):
        found = constants(Machine(true).calibrated())
        for name in ("fixed_s", "pass_s", "flop_s", "band_flop_s", "exchange_s", "byte_s"):
            assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.05), name


def test_small_decodes_that_are_slowed_do_not_make_arithmetic_free() -> None:
    """Something else runs until the large decodes begin, when a small one has taken as long as a large one will.

    Timed size by size, both would have taken the same time.
    """
    quiet = Machine(CORE)
    quiet.calibrated()
    first_large = next(index for index, each in enumerate(quiet.decodes) if each[0][-1] > 8)
    ratio = quiet.decodes[first_large][2] / quiet.decodes[0][2]
    machine = Machine(CORE, lambda index: ratio if index < 9 else 1.0)
    found = constants(machine.calibrated())
    for name in ("flop_s", "pass_s", "band_flop_s", "exchange_s"):
        assert getattr(found, name) == pytest.approx(getattr(CORE, name), rel=0.05), name


def busy(seed: int) -> Callable[[int], float]:
    """Others take the machine for stretches of one to ten decodes, half of the time, and slow each decode up to ten times."""
    draw = np.random.default_rng(seed)
    slower: list[float] = []
    while len(slower) < 200:
        length = int(draw.integers(1, 11))
        slower += draw.uniform(1, 10, length).tolist() if draw.random() < 0.5 else [1.0] * length
    return slower.__getitem__


@pytest.mark.parametrize(("true", "share"), [(CORE, 0.85), (SLOW, 0.7)], ids=["fast", "slow"])
def test_a_busy_machine_is_mostly_known_within_a_factor_of_two(true: Calibration, share: float) -> None:
    """And never seems much faster than it is: arithmetic that takes next to no time gives nonsense for every size."""
    known, seeds = 0, 100
    for seed in range(seeds):
        machine = Machine(true, busy(seed))
        predictions = machine.calibrated()
        assert len(machine.decodes) < 50
        if predictions.calibration is None:
            assert "too alike" in predictions.problem
            continue
        found = predictions.calibration
        assert found.band_flop_s >= found.flop_s > true.flop_s / 2
        assert min(found.pass_s, found.exchange_s, found.byte_s) >= 0
        known += found.flop_s < 2 * true.flop_s
    assert known >= share * seeds


def test_one_decode_that_was_interrupted_is_taken_again() -> None:
    """Also where decodes are so slow that none is repeated otherwise."""
    quiet = Machine(SLOW)
    quiet.calibrated()
    assert len(quiet.decodes) == len(set(quiet.decodes)) == 6
    # The first is a small one; there is no way to tell it from one with larger fixed costs, as long as the large one takes
    # half as long again.
    for interrupted in range(1, 6):
        machine = Machine(SLOW, lambda index, interrupted=interrupted: 8.0 if index == interrupted else 1.0)  # type: ignore[misc]
        found = constants(machine.calibrated())
        assert found.flop_s == pytest.approx(SLOW.flop_s, rel=0.05), interrupted
        assert found.band_flop_s == pytest.approx(SLOW.band_flop_s, rel=0.05), interrupted


def test_frames_are_enlarged_until_arithmetic_is_seen() -> None:
    """Where kernels are launched more slowly than they run, as on a GPU."""
    launching = replace(FAST, pass_s=20e-3, flop_s=3e-15, band_flop_s=3e-15)
    machine = Machine(launching)
    found = constants(machine.calibrated())
    assert found.flop_s == pytest.approx(3e-15, rel=0.05) and found.pass_s == pytest.approx(20e-3, rel=0.05)
    sides = [shape[-1] // 8 for shape, _, _ in machine.decodes]
    assert sides[-1] == max(sides) > 8
    assert sum(seconds for _, _, seconds in machine.decodes) < 2 * 3.0


def test_a_machine_on_which_size_makes_no_difference_is_not_calibrated(caplog: pytest.LogCaptureFixture) -> None:
    alike = replace(FAST, flop_s=0.0, band_flop_s=0.0, byte_s=0.0)
    machine = Machine(alike)
    predictions = machine.calibrated()
    assert predictions.calibration is None and "too alike to tell what arithmetic takes" in predictions.problem
    shown = predictions.describe()["calibration"]
    assert shown == {"calibrated": False, "reason": predictions.problem}
    assert "plans by fixed rules" in caplog.text and len(machine.decodes) < 60
    largest = max(shape[-1] for shape, _, _ in machine.decodes)
    assert largest >= 32 * 8
    # Slow ranks do not decode ever larger frames in the hope of finding out.
    slow = Machine(replace(alike, pass_s=0.5))
    assert slow.calibrated().calibration is None
    assert max(shape[-1] for shape, _, _ in slow.decodes) == 2 * 8 and len(slow.decodes) < 30


def test_no_frame_is_timed_that_may_not_be_decoded_or_does_not_fit() -> None:
    launching = replace(FAST, pass_s=20e-3, flop_s=3e-15, band_flop_s=3e-15)
    # Two latent frames of 4 x 8 cells: five frames of 32 x 64 pixels.
    limited = Machine(launching)
    assert limited.calibrated(max_pixels=5 * 32 * 64 * 15).calibration is None
    assert max(shape[-1] for shape, _, _ in limited.decodes) == 2 * 8

    class Small(Machine):
        async def decode(self, shape: tuple[int, ...], mode: str) -> Run:
            if shape[-1] > 4 * 8:
                raise UnsupportedModeError("it needs more memory than there is")
            return await super().decode(shape, mode)

    small = Small(launching)
    predictions = small.calibrated()
    assert predictions.calibration is None and "[1, 16, 2, 16, 32] took" in predictions.problem
    assert Small(CORE).calibrated().calibration is not None


# ---- what is learnt, without a clock -------------------------------------------------------------------------------


def taking(plan: DecodePlan, milliseconds: float) -> Run:
    return Run(plan, [RankPixels(None, True, "", {}, False)], {"decode": milliseconds})


def known() -> Predictions:
    predictions = Predictions()
    predictions._constants = FAST
    return predictions


def planned(mode: str, predictions: Predictions) -> DecodePlan:
    return make_plan(
        WAN, (1, 16, 5, 40, 60), group_size=2, policy=Policy(chunk=1), mode=mode, calibration=predictions.calibration
    )


def test_the_time_that_compiling_takes_is_not_learnt() -> None:
    predictions = known()
    plan = planned("direct", predictions)
    bucket = BucketMeasurement("a call", (1, 16, 1, 40, 60), "float32")
    predictions.observe(WAN, Run(plan, [RankPixels(None, True, "", {}, False, (bucket,))], {"decode": 1e6}))
    assert "direct" not in predictions.describe()["predictions"]
    predictions.observe(WAN, taking(plan, 5.0))
    assert predictions.describe()["predictions"]["direct"]["count"] == 1


def correction(predictions: Predictions, mode: str) -> float:
    calibration = predictions.calibration
    assert calibration is not None
    return calibration.correction(mode)


def test_a_mode_is_corrected_slowly_towards_what_it_takes() -> None:
    predictions = known()
    constants_ms = planned("direct", predictions).predicted_ms
    assert constants_ms is not None
    factors = []
    for _ in range(60):
        predictions.observe(WAN, taking(planned("direct", predictions), 2 * constants_ms))
        factors.append(correction(predictions, "direct"))
    assert factors == sorted(factors) and factors[0] < 1.5 and factors[-1] == pytest.approx(2, rel=0.01)
    predictions.observe(WAN, taking(planned("direct", predictions), 4 * constants_ms))
    assert factors[-1] < correction(predictions, "direct") < 2.2, "one request is a tenth of the evidence"
    assert correction(predictions, "spatial_shard_width") == 1.0
    assert planned("direct", predictions).predicted_ms == pytest.approx(
        constants_ms * correction(predictions, "direct")
    )


def test_plans_that_are_old_do_not_correct_twice() -> None:
    """A queue of requests was planned before the first of them was decoded."""
    predictions = known()
    plan = planned("direct", predictions)
    assert plan.predicted_ms is not None
    for _ in range(60):
        predictions.observe(WAN, taking(plan, 3 * plan.predicted_ms))
    assert correction(predictions, "direct") == pytest.approx(3, rel=0.01)


def test_one_interrupted_decode_decides_nothing() -> None:
    predictions = known()
    plan = planned("direct", predictions)
    assert plan.predicted_ms is not None
    for _ in range(20):
        predictions.observe(WAN, taking(plan, plan.predicted_ms))
    predictions.observe(WAN, taking(plan, 1000 * plan.predicted_ms))
    assert 1 < correction(predictions, "direct") <= LARGEST_RATIO**0.1 + 1e-9


def test_a_mode_that_was_slow_once_is_tried_again() -> None:
    """Otherwise nobody would ever find out that it is as fast as before."""
    predictions = known()
    shard, direct = (planned(mode, predictions) for mode in ("spatial_shard_width", "direct"))
    assert shard.predicted_ms is not None and direct.predicted_ms is not None
    predictions.settle()
    assert planned("auto", predictions).mode == "spatial_shard_width"
    for _ in range(20):
        predictions.observe(WAN, taking(shard, 6 * shard.predicted_ms))
    assert planned("auto", predictions).mode != "spatial_shard_width"
    for _ in range(400):
        predictions.observe(WAN, taking(direct, direct.predicted_ms))
    assert planned("auto", predictions).mode == "spatial_shard_width"


def test_the_same_decodes_teach_the_same() -> None:
    def taught() -> Predictions:
        predictions = known()
        for milliseconds in (50.0, 80.0, 20.0):
            for mode in ("direct", "spatial_shard_width"):
                predictions.observe(WAN, taking(planned(mode, predictions), milliseconds))
        return predictions

    assert taught().describe() == taught().describe()
    assert taught().calibration == taught().calibration


def test_statistics_are_of_requests_as_they_were_predicted() -> None:
    predictions = known()
    plan = planned("direct", predictions)
    assert plan.predicted_ms is not None
    for tenths in range(1, 11):
        predictions.observe(WAN, taking(plan, plan.predicted_ms * (1 + tenths / 10)))
    seen = predictions.describe()["predictions"]["direct"]
    assert seen["count"] == 10 and seen["mean_ratio"] == pytest.approx(1.55)
    assert seen["p90_abs_error"] == pytest.approx(0.9)
    assert seen["ratio"] == {"p10": pytest.approx(1.1), "p50": pytest.approx(1.5), "p90": pytest.approx(1.9)}
    assert seen["mean_predicted_ms"] == pytest.approx(plan.predicted_ms, abs=0.01)
    assert seen["mean_actual_ms"] == pytest.approx(1.55 * plan.predicted_ms, abs=0.01)
    assert seen["p90_abs_error_ms"] == pytest.approx(0.9 * plan.predicted_ms, rel=0.01)
    # In float32, say, for which nothing was predicted.
    predictions.observe(WAN, taking(replace(plan, predicted_ms=None), 5.0))
    assert predictions.describe()["predictions"]["direct"]["count"] == 10


def test_the_timed_decodes_are_small_and_possible_in_every_mode() -> None:
    assert sizes(WAN, 2) == ((1, 16, 2, 4, 8), 8)
    assert sizes(WAN, 2, chunk=2)[0] == (1, 16, 3, 4, 8)
    assert sizes(replace(WAN, min_band_cells=2), 8)[0] == (1, 16, 2, 16, 32)
    assert sizes(replace(WAN, frame_rule=None), 8)[0] == (1, 16, 8, 16)
    assert sizes(replace(WAN, fixed_cells=16), 2) == ((1, 16, 2, 16, 16), 1)
