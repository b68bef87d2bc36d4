"""The planner's rules, one sentence each; no device, no process."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_service.errors import InvalidLatentsError, InvalidRequestError, UnsupportedModeError
from decode_service.planning.load import Load
from decode_service.planning.plan import DecodePlan
from decode_service.planning.planner import Policy, make_plan, validate_denormalize
from decode_service.planning.spec import WHOLE_CLIP, ModelSpec, OverlapTiles
from decode_service.planning.temporal import CausalFrames, ClipFrames
from tests.planning.specs import WAN

QWEN = replace(WAN, name="qwen", family="qwen-image", class_name="AutoencoderKLQwenImage", accepts_images=True)
H3 = ModelSpec(
    name="h3",
    family="minimax-h3",
    class_name="AutoencoderKLMiniMaxH3",
    latent_channels=24,
    output_channels=3,
    spatial_ratio=16,
    decoder_ratio=16,
    frame_rule=ClipFrames(17, 3, 4),
    accepts_images=False,
    exact_axes=(),
    no_exact_axes_reason="its frames are defined as blended tiles",
    tiles=OverlapTiles(),
    tile_only=True,
    chunked=False,
)
SMALL = Policy(direct_max_pixels=64 * 64)


def plan(
    shape: tuple[int, ...], *, spec: ModelSpec = WAN, ranks: int = 4, policy: Policy = SMALL, **wish: object
) -> DecodePlan:
    return make_plan(spec, shape, group_size=ranks, policy=policy, **wish)  # type: ignore[arg-type]


class TestAuto:
    def test_a_small_frame_goes_direct(self) -> None:
        assert plan((1, 16, 21, 8, 8)).mode == "direct"

    def test_several_items_go_batch(self) -> None:
        chosen = plan((3, 16, 1, 60, 104))
        assert (chosen.mode, chosen.axis, chosen.ranks) == ("batch", "batch", 3)
        assert [band.size for band in chosen.bands] == [1, 1, 1]

    def test_the_longer_axis_is_sharded(self) -> None:
        assert plan((1, 16, 21, 60, 104)).mode == "spatial_shard_width"
        assert plan((1, 16, 21, 104, 60)).mode == "spatial_shard_height"

    def test_width_wins_ties(self) -> None:
        assert plan((1, 16, 21, 60, 60)).mode == "spatial_shard_width"

    def test_an_axis_needs_as_many_rows_as_ranks(self) -> None:
        assert plan((1, 16, 1, 3, 40), ranks=8).mode == "spatial_shard_width"
        narrow = plan((1, 16, 1, 3, 7), ranks=8, policy=Policy(direct_max_pixels=0))
        assert narrow.mode == "direct" and narrow.exact and "fewer than 8 ranks" in narrow.reason

    def test_bands_are_as_wide_as_the_model_reaches(self) -> None:
        spec = replace(QWEN, min_band_cells=2)
        assert plan((1, 16, 1, 8, 40), ranks=4, spec=spec).mode == "spatial_shard_width"
        assert plan((1, 16, 1, 8, 7), ranks=4, spec=spec, policy=Policy(direct_max_pixels=0)).axis == "height"
        refused = plan((1, 16, 1, 8, 7), ranks=4, spec=spec, mode="spatial_shard_width")
        assert refused.fallback is not None and "fewer than 4 ranks with at least 2 each" in refused.fallback

    def test_tiles_say_why_they_approximate_unless_they_do_not(self) -> None:
        spec = replace(QWEN, tile_difference="every tile is for itself")
        tiled = plan((1, 16, 1, 60, 104), spec=spec, mode="tile")
        assert not tiled.exact and tiled.reason.endswith("approximate: every tile is for itself")
        whole = plan((1, 16, 1, 8, 8), spec=spec, mode="tile")
        assert whole.exact and "approximate" not in whole.reason
        own = plan((1, 24, 7, 40, 40), spec=H3)
        assert own.exact and "approximate" not in own.reason

    def test_a_model_that_cannot_be_sharded_is_decoded_by_one_rank_rather_than_approximated(self) -> None:
        spec = replace(QWEN, exact_axes=(), no_exact_axes_reason="it mixes all positions")
        whole = plan((1, 16, 1, 60, 104), spec=spec)
        assert whole.mode == "direct" and whole.exact and "it mixes all positions" in whole.reason
        assert plan((1, 16, 1, 540, 960), spec=spec).mode == "tile", "too large for one rank"

    def test_a_group_of_one_decodes_directly_what_one_rank_can(self) -> None:
        assert plan((1, 16, 21, 60, 104), ranks=1).mode == "direct"
        assert plan((4, 16, 1, 60, 104), ranks=1).mode == "direct"

    def test_operands_near_2_31_elements_are_never_decoded_whole(self) -> None:
        """Wan 2.1 at 2160 x 3840: 768 * 8.3e6 elements. PyTorch's kernels return zeros there."""
        assert plan((1, 16, 21, 270, 480), ranks=1).mode == "tile"
        assert plan((1, 16, 21, 270, 480), ranks=4).mode == "spatial_shard_width"
        assert "elements" in plan((1, 16, 21, 270, 480), ranks=1).reason

    def test_a_chunk_whose_operands_are_too_wide_is_shortened_not_refused(self) -> None:
        """Any chunk gives the same pixels; tiles would not."""
        shape = (1, 16, 21, 90, 160)
        assert plan(shape, ranks=1, chunk=1).chunk == 1
        shortened = plan(shape, ranks=1, chunk=20)
        assert (shortened.mode, shortened.chunk) == ("direct", 3)
        assert "chunk shortened from 20 to 3" in shortened.reason
        assert plan(shape, ranks=4, chunk=20).mode == "spatial_shard_width"
        tiled = plan((1, 16, 81, 60, 104), ranks=2, mode="tile", chunk=80)
        assert 768 * tiled.chunk * 256 * 256 < 2**31 < 768 * (tiled.chunk + 1) * 256 * 256
        assert plan((1, 16, 3, 8, 8), chunk=100).chunk == 100, "a chunk longer than the clip is simply the rest of it"

    def test_a_model_whose_smallest_tile_is_too_wide_is_refused(self) -> None:
        wide = replace(WAN, operand_per_pixel=2**16, operand_per_pixel_first=2**16)
        with pytest.raises(UnsupportedModeError, match=r"what would fit: .*or smaller tiles"):
            plan((1, 16, 2, 60, 104), spec=wide, ranks=1)

    def test_absurd_extents_are_planned_in_no_time(self) -> None:
        import time

        began = time.monotonic()
        assert H3.output_extents((1, 24, 2**31 - 1, 1, 1))[0] > 2**31
        assert time.monotonic() - began < 1

    def test_a_decoder_that_is_not_divided_in_time_takes_all_frames_in_one_pass(self) -> None:
        spec = replace(
            WAN,
            frame_rule=CausalFrames(1),
            chunked=False,
            operand_per_pixel=128,
            operand_per_pixel_first=384,
            pass_frames=WHOLE_CLIP,
        )
        # 1024 x 1024: (384 + 128 * 12) * 2^20 elements are below 2^31, and 13 later frames are 2^31.
        assert plan((1, 16, 13, 128, 128), spec=spec, ranks=1).mode == "direct"
        assert plan((1, 16, 14, 128, 128), spec=spec, ranks=1).mode == "tile"

    def test_the_policy_can_force_a_mode(self) -> None:
        assert plan((1, 16, 2, 60, 104), policy=Policy(mode="tile")).mode == "tile"
        assert plan((1, 16, 2, 60, 104), policy=Policy(mode="tile"), mode="direct").mode == "direct"


class TestLoad:
    """With as many requests as ranks each rank decodes its own; with fewer, all ranks decode one after the other."""

    SHAPE = (1, 16, 3, 60, 104)

    def test_an_idle_group_decodes_one_request_together(self) -> None:
        assert plan(self.SHAPE, load=Load()) == plan(self.SHAPE)
        assert plan(self.SHAPE).mode == "spatial_shard_width"

    def test_as_many_requests_as_ranks_get_one_rank_each(self) -> None:
        assert plan(self.SHAPE, load=Load(waiting=2)).mode == "spatial_shard_width"
        crowded = plan(self.SHAPE, load=Load(waiting=5))
        assert (crowded.mode, crowded.exact, crowded.fallback) == ("direct", True, None)
        assert crowded.reason == "5 requests wait: one rank each"
        assert (
            plan(self.SHAPE, load=Load(waiting=1, running=2)).reason
            == "1 request waits and 2 requests run: one rank each"
        )
        assert plan(self.SHAPE, ranks=2, load=Load(running=1)).reason == "1 request runs: one rank each"

    def test_several_items_stay_together_too(self) -> None:
        assert plan((3, 16, 1, 60, 104), load=Load()).mode == "batch"
        assert plan((3, 16, 1, 60, 104), load=Load(waiting=3)).mode == "direct"

    def test_a_rank_that_is_held_for_long_is_not_waited_for(self) -> None:
        chosen = plan(self.SHAPE, load=Load(running=1, outlasting=1))
        assert chosen.mode == "direct" and "a larger request holds a rank" in chosen.reason
        assert plan(self.SHAPE, load=Load(running=1)).mode == "spatial_shard_width"

    @pytest.mark.parametrize("mode", ["spatial_shard_height", "spatial_shard_width", "tile", "direct"])
    def test_a_forced_mode_stays_whatever_the_load(self, mode: str) -> None:
        busy = Load(waiting=50, running=3, outlasting=3)
        assert plan(self.SHAPE, mode=mode, load=busy) == plan(self.SHAPE, mode=mode)
        assert plan(self.SHAPE, policy=Policy(mode=mode), load=busy).mode == mode
        assert plan(self.SHAPE, mode=mode, strict=True, load=busy).mode == mode

    def test_no_load_makes_one_rank_decode_what_it_cannot(self) -> None:
        any_size = Policy(busy_direct_max_pixels=2**40)
        large = plan((1, 16, 21, 270, 480), policy=any_size, load=Load(waiting=50))
        assert large.mode == "spatial_shard_width", "its operand has more elements than kernels can index"
        assert plan((1, 16, 21, 90, 160), policy=any_size, load=Load(waiting=50)).mode == "direct"

    def test_a_request_that_would_take_one_rank_too_long_is_shared_whatever_the_load(self) -> None:
        pixels = 9 * 480 * 832
        limit = Policy(busy_direct_max_pixels=pixels)
        assert plan(self.SHAPE, policy=limit, load=Load(waiting=50)).mode == "direct"
        limit = Policy(busy_direct_max_pixels=pixels - 1)
        assert plan(self.SHAPE, policy=limit, load=Load(waiting=50)).mode == "spatial_shard_width"

    def test_nothing_is_gained_where_all_ranks_take_part_or_there_is_one(self) -> None:
        assert plan(self.SHAPE, collect="broadcast", load=Load(waiting=50)).mode == "spatial_shard_width"
        alone = plan(self.SHAPE, ranks=1, load=Load(waiting=50))
        assert (alone.mode, alone.reason) == ("direct", "a group of one rank")

    def test_tiles_are_never_exchanged_for_an_exact_mode_because_others_wait(self) -> None:
        """The pixels of a request must not depend on who else is there."""
        shape, spec = (1, 16, 21, 270, 480), replace(WAN, exact_axes=(), no_exact_axes_reason="nobody tried")
        assert plan(shape, ranks=8, spec=spec).mode == "tile"
        assert plan(shape, ranks=8, spec=spec, load=Load(waiting=50)).mode == "tile"

    def test_requests_count_where_they_are_at_least_half_as_large(self) -> None:
        assert Load.beside(100, waiting=[49, 50, 1000], running=[10, 60]) == Load(waiting=2, running=1)
        assert Load.beside(100, waiting=[], running=[199, 200]) == Load(running=2, outlasting=1)
        # Fifty previews are no reason to let a film have one rank only, but the film is one for each preview.
        assert Load.beside(10_000, waiting=[10] * 50, running=[]).one_rank_each(4) is None
        assert Load.beside(10, waiting=[], running=[10_000]).one_rank_each(4) is not None

    @pytest.mark.parametrize(
        ("others", "ranks", "gain", "alone"),
        [
            (0, 8, 1.2, False),
            (1, 8, 2.0, True),
            (1, 8, 2.1, False),
            (2, 8, 2.1, True),
            (6, 8, None, False),
            (7, 8, None, True),
            (7, 8, 9.5, True),
            (5, 1, 1.0, False),
        ],
    )
    def test_as_many_requests_as_sharing_gains_are_enough(
        self, others: int, ranks: int, gain: float | None, alone: bool
    ) -> None:
        for load in (Load(waiting=others), Load(running=others)):
            why = load.one_rank_each(ranks, gain)
            assert (why is not None) is alone
            assert not alone or ("predicted" in str(why)) is (others + 1 < ranks)

    @given(waiting=st.integers(0, 20), ranks=st.integers(2, 8), gain=st.floats(1.0, 8.0))
    def test_the_last_of_a_crowd_is_never_done_later_for_what_load_decides(
        self, waiting: int, ranks: int, gain: float
    ) -> None:
        gain = min(gain, ranks)
        requests = waiting + 1
        # In decodes of one rank.
        shared, alone = requests / gain, -(-requests // ranks)
        if Load(waiting=waiting).one_rank_each(ranks, gain) is None:
            assert shared <= alone
        elif requests <= ranks:
            assert alone <= shared

    @given(
        shape=st.tuples(st.integers(1, 3), st.just(16), st.integers(1, 9), st.integers(1, 200), st.integers(1, 200)),
        ranks=st.integers(1, 8),
        load=st.builds(Load, st.integers(0, 9), st.integers(0, 8), st.integers(0, 2)),
    )
    def test_load_only_chooses_between_exact_plans(self, shape: tuple[int, ...], ranks: int, load: Load) -> None:
        idle, busy = plan(shape, ranks=ranks), plan(shape, ranks=ranks, load=load)
        assert busy == idle or (idle.exact and busy.exact and busy.mode == "direct" and busy.ranks == 1)


class TestForced:
    @pytest.mark.parametrize("mode", ["direct", "tile", "spatial_shard_height", "spatial_shard_width"])
    def test_a_mode_that_can_run_runs_as_asked(self, mode: str) -> None:
        chosen = plan((1, 16, 3, 11, 17), mode=mode)
        assert chosen.mode == mode and chosen.fallback is None and chosen.reason == "asked for"

    def test_a_mode_that_cannot_run_falls_back_to_tile_and_says_so(self) -> None:
        chosen = plan((1, 16, 3, 3, 17), mode="spatial_shard_height")
        assert chosen.mode == "tile"
        assert chosen.fallback is not None and "spatial_shard_height cannot run: 3 latent cells" in chosen.fallback

    @pytest.mark.parametrize("mode", ["batch", "spatial_shard_height"])
    def test_strict_makes_it_an_error(self, mode: str) -> None:
        with pytest.raises(UnsupportedModeError, match=f"{mode} cannot decode this request") as caught:
            plan((1, 16, 3, 3, 17), mode=mode, strict=True)
        assert caught.value.status == 422 and caught.value.param == "mode"

    def test_strict_can_be_the_operators_default_and_be_overridden(self) -> None:
        strict = Policy(strict=True)
        with pytest.raises(UnsupportedModeError):
            plan((1, 16, 3, 3, 17), policy=strict, mode="spatial_shard_height")
        assert plan((1, 16, 3, 3, 17), policy=strict, mode="spatial_shard_height", strict=False).mode == "tile"

    def test_arguments_out_of_range_are_named(self) -> None:
        with pytest.raises(InvalidRequestError, match="mode must be auto or one of"):
            plan((1, 16, 1, 8, 8), mode="shard")
        with pytest.raises(InvalidRequestError, match="collect must be one of"):
            plan((1, 16, 1, 8, 8), collect="gather")
        with pytest.raises(InvalidRequestError, match="at least 1 latent frame"):
            plan((1, 16, 1, 8, 8), chunk=0)


class TestMiniMaxH3:
    def test_auto_means_its_own_tiles_and_they_are_exact(self) -> None:
        chosen = plan((1, 24, 7, 4, 4), spec=H3)
        assert chosen.mode == "tile" and chosen.exact and chosen.fallback is None

    @pytest.mark.parametrize("mode", ["spatial_shard_height", "spatial_shard_width"])
    @pytest.mark.parametrize("strict", [False, True])
    def test_a_spatial_mode_is_an_error_that_says_why(self, mode: str, strict: bool) -> None:
        with pytest.raises(UnsupportedModeError, match="blended tiles"):
            plan((1, 24, 7, 40, 40), spec=H3, mode=mode, strict=strict)

    def test_every_clip_has_the_whole_grid(self) -> None:
        chosen = plan((1, 24, 12, 40, 30), spec=H3)
        assert chosen.tiles is not None
        assert len(chosen.owners) == 2 * chosen.tiles.count
        assert set(chosen.owners) == {0, 1, 2, 3}

    def test_less_than_a_clip_is_refused_with_the_rule(self) -> None:
        with pytest.raises(InvalidLatentsError, match=r"5 \* n \+ 2"):
            plan((1, 24, 1, 8, 8), spec=H3)


class TestValidation:
    def test_a_wrong_channel_count_names_the_expected_one_and_the_likely_vae(self) -> None:
        with pytest.raises(InvalidLatentsError, match=r"expects 16 latent channels.*got 48.*Wan 2\.2 5B") as caught:
            plan((1, 48, 3, 8, 8))
        assert caught.value.param == "latents.shape"

    def test_swapped_axes_are_recognised(self) -> None:
        with pytest.raises(InvalidLatentsError, match="look swapped"):
            plan((1, 5, 16, 8, 8))

    @pytest.mark.parametrize("shape", [(16, 8, 8), (1, 16, 8, 8), (1, 1, 16, 1, 8, 8)])
    def test_a_wrong_number_of_dimensions_names_the_right_layout(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(InvalidLatentsError, match=r"5-D \(B,C,T,H,W\)"):
            plan(shape)

    def test_image_families_take_four_dimensions_too(self) -> None:
        assert plan((1, 16, 8, 8), spec=QWEN).output_frames == 1

    def test_a_frame_needs_as_many_rows_as_the_model_reflects(self) -> None:
        reflecting = replace(WAN, min_cells=2)
        with pytest.raises(InvalidLatentsError, match="at least 2 latent rows and columns"):
            plan((1, 16, 1, 1, 8), spec=reflecting)
        assert plan((1, 16, 1, 2, 2), spec=reflecting).mode == "direct"

    def test_empty_extents_are_refused(self) -> None:
        with pytest.raises(InvalidLatentsError, match="at least 1"):
            plan((1, 16, 1, 0, 8))


@given(
    batch=st.integers(1, 3),
    frames=st.integers(1, 30),
    height=st.integers(1, 80),
    width=st.integers(1, 80),
    ranks=st.integers(1, 8),
    mode=st.sampled_from(["auto", "direct", "batch", "tile", "spatial_shard_height", "spatial_shard_width"]),
    chunk=st.integers(1, 9),
)
def test_any_request_gives_a_plan_that_survives_the_wire_and_covers_everything(
    batch: int, frames: int, height: int, width: int, ranks: int, mode: str, chunk: int
) -> None:
    made = plan((batch, 16, frames, height, width), ranks=ranks, mode=mode, chunk=chunk)
    assert DecodePlan.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    json.dumps(made.public())
    assert 1 <= made.ranks <= ranks
    if made.axis is not None:
        extent = {"batch": batch, "height": height, "width": width}[made.axis]
        assert sum(band.size for band in made.bands) == extent
        assert min(band.size for band in made.bands) >= 1
    if made.tiles is not None:
        assert len(made.owners) == made.tiles.count
        assert sum(row.keep for row in made.tiles.rows) == made.output_height == height * 8
        assert sum(column.keep for column in made.tiles.columns) == made.output_width == width * 8
    assert made.output_frames == 1 + 4 * (frames - 1)
    assert (made.fallback is not None) == (mode not in ("auto", made.mode))


class TestDenormalizing:
    def test_statistics_of_every_frame_are_for_so_many(self) -> None:
        spec = replace(WAN, normalized_frames=16)
        validate_denormalize(spec, (1, 16, 16, 8, 8))
        with pytest.raises(InvalidRequestError, match=r"16 latent frames, got 17.*denormalize false") as caught:
            validate_denormalize(spec, (1, 16, 17, 8, 8))
        assert caught.value.param == "denormalize"
        validate_denormalize(WAN, (1, 16, 17, 8, 8))

    def test_a_model_without_statistics_says_so(self) -> None:
        with pytest.raises(InvalidRequestError, match=r"none in its config.*denormalize false"):
            validate_denormalize(replace(WAN, no_denormalize_reason="none in its config"), (1, 16, 8, 8))


def test_a_plan_says_that_a_model_is_untested() -> None:
    tested, untested = plan((1, 16, 5, 30, 40)), plan((1, 16, 5, 30, 40), spec=replace(WAN, tested=False))
    assert tested.public()["tested"] is True and "untested" not in tested.reason
    assert untested.public()["tested"] is False and "; untested: AutoencoderKLWan" in untested.reason
    assert DecodePlan.from_dict(json.loads(json.dumps(untested.to_dict()))) == untested


class TestWithoutTiles:
    """A model that has no tile mode at all."""

    SPEC = replace(
        QWEN, frame_rule=None, chunked=False, tiles=None, no_tiles_reason="it has one size", operand_per_pixel_first=288
    )

    def test_its_modes_have_no_tile(self) -> None:
        assert self.SPEC.modes(2) == ("direct", "batch", "spatial_shard_height", "spatial_shard_width")

    @pytest.mark.parametrize("strict", [False, True])
    def test_asking_for_tiles_is_an_error_that_says_why(self, strict: bool) -> None:
        with pytest.raises(UnsupportedModeError, match="tile is not possible for qwen: it has one size; use direct"):
            plan((1, 16, 60, 60), spec=self.SPEC, mode="tile", strict=strict)

    def test_a_forced_mode_that_cannot_run_falls_back_to_one_rank(self) -> None:
        chosen = plan((1, 16, 3, 40), spec=self.SPEC, mode="spatial_shard_height")
        assert chosen.mode == "direct" and chosen.exact
        assert chosen.fallback is not None and "3 latent cells" in chosen.fallback
        with pytest.raises(UnsupportedModeError, match="batch cannot decode this request"):
            plan((1, 16, 3, 40), spec=self.SPEC, mode="batch", strict=True)

    def test_auto_takes_one_rank_where_a_group_cannot_share_the_frame(self) -> None:
        chosen = plan((1, 16, 3, 3), spec=self.SPEC, policy=Policy(direct_max_pixels=0))
        assert chosen.mode == "direct" and "fewer than 4 ranks" in chosen.reason

    @pytest.mark.parametrize("mode", ["auto", "direct", "batch"])
    def test_what_one_rank_cannot_decode_is_refused(self, mode: str) -> None:
        with pytest.raises(UnsupportedModeError, match=r"elements.*no tile mode: it has one size"):
            plan((1, 16, 540, 960), spec=self.SPEC, ranks=1, mode=mode)

    def test_a_frame_of_another_size_than_the_fixed_one_is_refused(self) -> None:
        fixed = replace(self.SPEC, fixed_cells=16)
        assert plan((1, 16, 16, 16), spec=fixed).output_height == 128
        for cells in ((16, 8), (8, 16), (32, 32)):
            with pytest.raises(InvalidLatentsError, match="one size, 16 x 16 latent cells"):
                plan((1, 16, *cells), spec=fixed)
