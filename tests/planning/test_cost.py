"""Predicted times: counts times constants, and what the planner makes of them. No device, and no clock."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_service.planning.cost import (
    APART,
    Amount,
    Calibration,
    IndistinctTimesError,
    Timed,
    Work,
    amount,
    calibrated,
    doubtful,
    pass_count,
)
from decode_service.planning.load import Load
from decode_service.planning.memory import Activations, Footprint
from decode_service.planning.plan import DecodePlan
from decode_service.planning.planner import Policy, amount_of, make_plan
from decode_service.planning.spec import ModelSpec, OverlapTiles
from decode_service.planning.temporal import ClipFrames, FadedFrames
from tests.planning import specs

WAN = replace(
    specs.WAN,
    accepts_images=True,
    work=Work(
        flops=(1e7, 3e7),
        attention=(0.1, 0.1, 0.0),
        exchanges=(30.0, 30.0),
        halo_bytes=(1000.0, 3000.0),
        gathered_bytes=(1.0, 1.0),
    ),
)
#: A hundred TFLOP/s a rank; an exchange costs what 10 GFLOP do.
FAST = Calibration(fixed_s=1e-3, pass_s=1e-3, flop_s=1e-14, band_flop_s=1.1e-14, exchange_s=1e-4, byte_s=1e-10)
CLIP = (1, 16, 21, 60, 104)


def plan(
    shape: tuple[int, ...] = CLIP,
    *,
    spec: ModelSpec = WAN,
    ranks: int = 4,
    policy: Policy | None = None,
    calibration: Calibration | None = FAST,
    **wish: object,
) -> DecodePlan:
    return make_plan(
        spec,
        shape,
        group_size=ranks,
        policy=policy or Policy(chunk=1),
        calibration=calibration,
        **wish,  # type: ignore[arg-type]
    )


class TestAuto:
    def test_a_plan_says_how_long_it_takes_and_what_the_others_would(self) -> None:
        made = plan()
        assert made.mode == "spatial_shard_width" and made.predicted_ms is not None
        others = dict(made.alternatives)
        assert set(others) == {"direct", "spatial_shard_height"}
        assert made.predicted_ms < others["spatial_shard_height"] < others["direct"]
        assert f"predicted to take {made.predicted_ms:.0f} ms, against {others['direct']:.0f} in direct" in made.reason
        shown = json.loads(json.dumps(made.public()))
        assert shown["predicted_ms"] == round(made.predicted_ms, 1)
        assert shown["alternatives"]["direct"] == round(others["direct"], 1)
        assert DecodePlan.from_dict(json.loads(json.dumps(made.to_dict()))) == made

    def test_the_prediction_of_an_alternative_is_that_of_its_own_plan(self) -> None:
        for shape in (CLIP, (3, 16, 2, 40, 40)):
            for mode, milliseconds in plan(shape).alternatives:
                assert plan(shape, mode=mode).predicted_ms == milliseconds

    def test_slow_exchanges_make_one_rank_the_faster_one(self) -> None:
        """At a frame that the rules would shard."""
        assert plan(calibration=None).mode == "spatial_shard_width"
        slow = plan(calibration=replace(FAST, exchange_s=0.1))
        assert slow.mode == "direct" and slow.alternatives[0][1] > (slow.predicted_ms or 0)

    def test_fast_exchanges_make_sharding_the_faster_one(self) -> None:
        """At a frame that the rules would leave to one rank."""
        small = (1, 16, 21, 32, 48)
        assert plan(small, calibration=None).mode == "direct"
        assert plan(small, calibration=replace(FAST, exchange_s=1e-6)).mode == "spatial_shard_width"

    def test_a_gain_below_a_tenth_does_not_hold_the_other_ranks(self) -> None:
        direct = plan(mode="direct").predicted_ms
        sharded = plan(mode="spatial_shard_width").predicted_ms
        assert direct is not None and sharded is not None
        for gain, expected in ((0.91, "direct"), (0.89, "spatial_shard_width")):
            factor = gain * direct / sharded
            both = (("spatial_shard_height", 10 * factor), ("spatial_shard_width", factor))
            assert plan(calibration=replace(FAST, corrections=both)).mode == expected

    def test_corrections_decide_too(self) -> None:
        assert plan(calibration=replace(FAST, corrections=(("spatial_shard_width", 3.0),))).mode == (
            "spatial_shard_height"
        )

    def test_the_operators_limit_is_an_override(self) -> None:
        within = plan(policy=Policy(direct_max_pixels=480 * 832, chunk=1))
        assert within.mode == "direct" and within.reason.startswith("a frame of 399360 pixels is within")
        assert dict(within.alternatives)["spatial_shard_width"] < (within.predicted_ms or 0)
        assert plan(policy=Policy(direct_max_pixels=480 * 832 - 1, chunk=1)).mode == "spatial_shard_width"
        assert plan((4, *CLIP[1:]), policy=Policy(direct_max_pixels=480 * 832, chunk=1)).mode == "batch"

    def test_without_constants_or_counts_the_rules_decide(self) -> None:
        for made in (plan(calibration=None), plan(spec=replace(WAN, work=None))):
            assert made == plan(calibration=None, spec=replace(WAN, work=None))
            assert made.mode == "spatial_shard_width" and "longest axis" in made.reason
            assert made.predicted_ms is None and "predicted_ms" not in made.public()
        assert plan((1, 16, 1, 64, 64), calibration=None).mode == "direct", "512 x 512 pixels"

    def test_items_go_where_they_are_done_first(self) -> None:
        assert plan((4, 16, 5, 60, 104)).mode == "batch"
        # Five items over four ranks: one of them decodes two, while sharding keeps all of them busy all the time.
        assert plan((5, 16, 5, 60, 104)).mode == "spatial_shard_width"
        assert plan((5, 16, 5, 60, 104), calibration=replace(FAST, exchange_s=0.1)).mode == "batch"

    def test_what_cannot_run_is_no_alternative(self) -> None:
        wide = replace(WAN, operand_per_pixel=768, operand_per_pixel_first=288)
        made = plan((1, 16, 21, 270, 480), spec=wide, calibration=replace(FAST, exchange_s=10.0))
        assert made.axis in ("height", "width") and "direct" not in dict(made.alternatives)
        assert plan(ranks=1).alternatives == ()
        assert "spatial_shard_height" not in {(few := plan((1, 16, 21, 3, 104))).mode, *dict(few.alternatives)}
        # A limit of the operator's against sharding forbids nothing else.
        assert plan((1, 16, 1, 3, 7), ranks=8, policy=Policy(direct_max_pixels=0)).mode == "direct"

    def test_a_forced_mode_stays_and_shows_what_was_faster(self) -> None:
        forced = plan(mode="direct")
        assert (forced.mode, forced.reason) == ("direct", "asked for")
        assert min(dict(forced.alternatives).values()) < (forced.predicted_ms or 0)
        tiled = plan(mode="tile")
        assert tiled.predicted_ms is not None and set(dict(tiled.alternatives)) == {
            "direct",
            "spatial_shard_height",
            "spatial_shard_width",
        }

    def test_the_load_still_decides(self) -> None:
        crowded = plan((1, 16, 3, 60, 104), load=Load(waiting=5))
        assert crowded.mode == "direct" and crowded.reason == "5 requests wait: one rank each"

    def test_load_counts_against_what_sharing_is_predicted_to_gain(self) -> None:
        """Fewer requests than ranks have one each where sharing a frame among all gains less than there are requests."""
        factors = (("spatial_shard_height", 1.6), ("spatial_shard_width", 1.6))
        shape, slow = (1, 16, 3, 60, 104), replace(FAST, corrections=factors)
        idle = plan(shape, calibration=slow, policy=Policy(chunk=1))
        gain = dict(idle.alternatives)["direct"] / (idle.predicted_ms or 0)
        assert idle.axis is not None and 1.1 < gain < 3
        few = plan(shape, calibration=slow, load=Load(waiting=2))
        assert few.mode == "direct" and f"only {gain:.1f} times as fast" in few.reason
        assert plan(shape, load=Load(waiting=2)).axis is not None, "three times as fast, and more"


class TestChunk:
    """Any length of passes gives the same pixels, so nobody has to choose one."""

    SLOW_PASSES = replace(FAST, pass_s=1.0)

    def test_fewer_passes_are_taken_where_passes_cost(self) -> None:
        made = plan(policy=Policy(), calibration=self.SLOW_PASSES)
        assert made.chunk == 16 and "passes of 16 latent frames" in made.reason
        assert plan(policy=Policy(), calibration=replace(FAST, exchange_s=0.1), mode="spatial_shard_width").chunk == 16

    def test_short_passes_are_taken_where_it_makes_no_difference(self) -> None:
        made = plan(policy=Policy(), calibration=replace(FAST, pass_s=0.0), mode="direct")
        assert made.chunk == 1 and "passes" not in made.reason

    def test_an_explicit_length_stays(self) -> None:
        assert plan(policy=Policy(), calibration=self.SLOW_PASSES, chunk=3).chunk == 3
        assert plan(policy=Policy(chunk=2), calibration=self.SLOW_PASSES).chunk == 2
        assert plan(policy=Policy(), calibration=None).chunk == 1

    def test_passes_are_not_longer_than_the_clip_the_memory_or_the_kernels(self) -> None:
        assert plan((1, 16, 4, 60, 104), policy=Policy(), calibration=self.SLOW_PASSES).chunk == 2
        assert plan((1, 16, 60, 104), policy=Policy(), calibration=self.SLOW_PASSES).chunk == 1
        activations = Activations(still=4000, clip=8000, per_frame=9000, caches=3000)
        spec = replace(WAN, footprint=Footprint(300 << 20, 4, activations, activations), operand_per_pixel=768)
        need = plan(spec=spec, mode="direct", chunk=4).memory
        assert need is not None
        tight = Policy(memory_budget_bytes=need.per_rank_bytes)
        assert plan(spec=spec, policy=tight, calibration=self.SLOW_PASSES, mode="direct").chunk == 4
        kernels = plan((1, 16, 21, 90, 160), spec=spec, ranks=1, policy=Policy(), calibration=self.SLOW_PASSES)
        assert (kernels.mode, kernels.chunk) == ("direct", 2), "three latent frames are the most that can be indexed"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(4, 200),
    st.integers(4, 200),
    st.sampled_from(["direct", "spatial_shard_width", "spatial_shard_height"]),
    st.integers(1, 8),
    st.sampled_from([(1, 0, 0), (0, 4, 0), (0, 0, 4)]),
)
def test_more_takes_longer(
    frames: int, rows: int, columns: int, mode: str, chunk: int, more: tuple[int, int, int]
) -> None:
    """Whatever grows: frames, rows or columns, a whole cell for every rank."""
    larger = (1, 16, frames + more[0], rows + more[1], columns + more[2])
    before = plan((1, 16, frames, rows, columns), mode=mode, chunk=chunk, strict=True).predicted_ms
    after = plan(larger, mode=mode, chunk=chunk, strict=True).predicted_ms
    assert before is not None and after is not None and before < after


def test_longer_passes_are_fewer_and_never_slower() -> None:
    assert [pass_count(WAN, 21, chunk) for chunk in (1, 2, 4, 20, 100)] == [21, 11, 6, 2, 2]
    times = [plan(mode="spatial_shard_width", chunk=chunk).predicted_ms for chunk in (1, 2, 4, 20)]
    assert times == sorted(times, reverse=True) and len(set(times)) == 4  # type: ignore[type-var]


def test_tiles_cost_their_overlaps_and_are_shared() -> None:
    one = [plan(mode=mode, ranks=1).predicted_ms for mode in ("direct", "tile")]
    assert one[0] is not None and one[1] is not None
    assert 1.2 * one[0] < one[1] < 2 * one[0], "256 pixels every 192, cut at the edges"
    shared = plan(mode="tile", ranks=4).predicted_ms
    assert shared is not None and one[1] / 4 < shared < one[1] / 2


def test_clips_that_are_decoded_in_parts_cost_by_the_part() -> None:
    """Attention over all frames of a part costs by the square of its frames; parts do not see one another."""
    work = Work(flops=(0.0, 0.0), attention=(1.0, 2.0, 1.0))
    faded = replace(WAN, frame_rule=FadedFrames(4, whole=4, stride=3), chunked=False, pass_frames=5, work=work)
    whole, parts = (amount(faded, (1, 16, t, 8, 8), mode="direct", ranks=1, chunk=1) for t in (4, 7))
    assert whole is not None and parts is not None
    assert whole.flops == 16 * 64.0**4 and whole.passes == 1
    # Latent frames 0 to 4 and 3 to 6: five and four of them.
    assert parts.flops == (25 + 16) * 64.0**4 and parts.passes == 2


def test_a_model_of_tiles_is_predicted_by_its_tiles() -> None:
    h3 = replace(
        WAN,
        latent_channels=24,
        spatial_ratio=16,
        decoder_ratio=16,
        frame_rule=ClipFrames(17, 3, 4),
        accepts_images=False,
        exact_axes=(),
        tiles=OverlapTiles(),
        tile_only=True,
        chunked=False,
    )
    one, many = (plan((1, 24, 7, cells, cells), spec=h3).predicted_ms for cells in (16, 40))
    assert one is not None and many is not None and one < many
    assert plan((1, 24, 7, 40, 40), spec=h3).alternatives == ()


def test_replies_that_are_brought_together_take_longer() -> None:
    times = [
        plan(mode="spatial_shard_width", collect=collect).predicted_ms for collect in ("shards", "rank0", "broadcast")
    ]
    assert times == sorted(times) and len(set(times)) == 3  # type: ignore[type-var]


@pytest.mark.parametrize("mode", ["direct", "spatial_shard_width", "tile", "batch"])
def test_what_a_plan_does_follows_from_the_plan_alone(mode: str) -> None:
    made = plan((3, 16, 5, 60, 104), mode=mode, chunk=2)
    done = amount_of(WAN, made)
    assert done is not None and made.predicted_ms is not None
    assert FAST.seconds(done, mode) * 1e3 == pytest.approx(made.predicted_ms)


class TestCalibrating:
    def decodes(self, true: Calibration) -> list[Timed]:
        """Decodes of two sizes, as they would be timed where ``true`` holds exactly."""
        timed = []
        for cells in (4, 12):
            for mode in ("direct", "spatial_shard_height", "spatial_shard_width"):
                shape = (1, 16, 2, cells, 2 * cells)
                done = amount_of(WAN, plan(shape, mode=mode, ranks=2))
                assert done is not None
                timed.append(Timed(mode, shape, done, true.seconds(done, mode), true.fixed_s))
        return timed

    def test_it_finds_the_constants_that_hold(self) -> None:
        found = calibrated(self.decodes(FAST))
        for name in ("fixed_s", "pass_s", "flop_s", "band_flop_s", "exchange_s", "byte_s"):
            assert getattr(found, name) == pytest.approx(getattr(FAST, name), rel=0.02), name

    def test_it_is_deterministic(self) -> None:
        assert calibrated(self.decodes(FAST)) == calibrated(self.decodes(FAST))

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.floats(1, 20), min_size=6, max_size=6))
    def test_times_that_are_disturbed_give_plausible_constants_or_none(self, disturbed: list[float]) -> None:
        decodes = [
            replace(timed, seconds=timed.seconds * factor)
            for timed, factor in zip(self.decodes(FAST), disturbed, strict=True)
        ]
        small, large = (timed for timed in decodes if timed.mode == "direct")
        try:
            found = calibrated(decodes)
        except IndistinctTimesError:
            assert large.seconds < APART * small.seconds
            return
        assert large.seconds >= APART * small.seconds
        most = large.seconds / large.amount.flops
        assert most / 3 <= found.flop_s <= most * 1.001
        assert found.band_flop_s >= found.flop_s
        assert min(found.pass_s, found.exchange_s, found.byte_s) >= 0
        for mode in ("direct", "spatial_shard_height", "spatial_shard_width"):
            # Of 16 times the pixels and more.
            times = [
                plan((1, 16, 2, cells, 2 * cells), mode=mode, calibration=found).predicted_ms for cells in (60, 240)
            ]
            assert times[0] is not None and times[1] is not None and times[1] > 5 * times[0]

    def test_a_large_decode_that_took_no_longer_than_a_small_one_calibrates_nothing(self) -> None:
        """Once this gave a machine whose arithmetic took no time at all."""
        for seconds in (1.0, 1.49):
            decodes = [
                replace(timed, seconds=seconds if timed.latent_shape[-1] == 24 else 1.0) for timed in self.decodes(FAST)
            ]
            with pytest.raises(
                IndistinctTimesError, match=r"\[1, 16, 2, 12, 24\] took .* ms, and \[1, 16, 2, 4, 8\], with 9.* times"
            ):
                calibrated(decodes)

    def test_arithmetic_takes_at_least_what_a_large_decode_took_beyond_a_small_one(self) -> None:
        """Small ones fit into caches; the fit of both would lie in between, and requests are large."""
        small, large = Amount(passes=2, flops=1e9), Amount(passes=2, flops=1e10)
        shape = (1, 16, 2, 4, 4)
        found = calibrated([Timed("direct", shape, small, 0.01), Timed("direct", shape, large, 1.0)])
        assert found.flop_s == pytest.approx(0.99e-10) and found.pass_s == 0

    def test_a_time_that_can_hardly_be_right_is_doubted(self) -> None:
        decodes = self.decodes(FAST)
        assert doubtful(decodes) == []
        for index, timed in enumerate(decodes):
            slowed = replace(timed, seconds=30 * timed.seconds)
            doubted = doubtful([*decodes[:index], slowed, *decodes[index + 1 :]])
            assert slowed in doubted, timed
            # A small decode that took long makes the large one of its mode look too fast.
            assert all(
                other.mode == timed.mode and other.latent_shape[-1] == 24 for other in doubted if other != slowed
            )
        # Exchanges may take as long as they will.
        slow = [replace(timed, seconds=timed.seconds * (100 if timed.amount.banded else 1)) for timed in decodes]
        assert doubtful(slow) == []

    def test_sharing_that_seems_to_cost_nothing_costs_its_arithmetic(self) -> None:
        """Decodes of one rank were slowed by something, those of bands were not."""
        decodes = [
            replace(timed, seconds=timed.seconds * (3 if timed.mode == "direct" else 1)) for timed in self.decodes(FAST)
        ]
        found = calibrated(decodes)
        assert (found.exchange_s, found.byte_s) == (0, 0) and found.band_flop_s == found.flop_s

    def test_one_size_goes_to_what_grows_with_it(self) -> None:
        done = Amount(passes=2, flops=1e9)
        found = calibrated([Timed("direct", (1, 16, 2, 4, 4), done, 0.5, 0.1)])
        assert (found.fixed_s, found.pass_s) == (0.1, 0.0) and found.flop_s == pytest.approx(0.4e-9)

    def test_it_needs_a_decode_of_one_rank(self) -> None:
        with pytest.raises(ValueError, match="whole frame"):
            calibrated([timed for timed in self.decodes(FAST) if timed.mode != "direct"])
