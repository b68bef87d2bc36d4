"""The memory of plans: numbers from a footprint, and what a budget does to them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from decode_service.errors import UnsupportedModeError
from decode_service.planning.memory import Activations, Footprint, gib
from decode_service.planning.plan import DecodePlan
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import ModelSpec
from tests.planning import specs

GIB = 2**30

WAN = replace(
    specs.WAN,
    footprint=Footprint(
        weight_bytes=300 << 20,
        itemsize=4,
        whole=Activations(still=4000, clip=8000, per_frame=9000, caches=3000),
        banded=Activations(still=4500, clip=9000, per_frame=10000, caches=3000),
    ),
)
CLIP = (1, 16, 21, 60, 104)
PIXELS = 480 * 832


def plan(
    shape: tuple[int, ...] = CLIP, *, ranks: int = 4, budget: int | None = None, spec: ModelSpec = WAN, **wish: object
) -> DecodePlan:
    policy = Policy(direct_max_pixels=64 * 64, memory_budget_bytes=budget)
    return make_plan(spec, shape, group_size=ranks, policy=policy, **wish)  # type: ignore[arg-type]


def needed(made: DecodePlan) -> int:
    assert made.memory is not None
    return made.memory.per_rank_bytes


def test_a_plan_says_what_it_needs_and_of_what() -> None:
    made = plan(mode="direct")
    assert made.memory is not None
    shown = made.public()["memory"]
    parts = shown["of_which"]
    assert parts["weights"] == 300 << 20
    assert parts["activations"] + parts["caches"] == 17000 * PIXELS
    assert parts["caches"] == 3000 * PIXELS
    assert parts["output"] == 81 * PIXELS * 3
    assert shown["per_rank_bytes"] == sum(parts.values()), "nothing is assembled"
    assert shown["budget_bytes"] is None
    assert DecodePlan.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_a_band_is_a_part_of_it() -> None:
    band = plan(mode="spatial_shard_width").memory
    assert band is not None
    assert band.activations + band.caches == 19000 * PIXELS // 4
    assert band.output == 81 * PIXELS * 3 // 4


def test_a_single_latent_frame_keeps_no_caches() -> None:
    still = plan((1, 16, 1, 60, 104), mode="direct").memory
    assert still is not None and still.caches == 0 and still.activations == 4000 * PIXELS


def test_longer_chunks_need_more() -> None:
    assert needed(plan(mode="direct", chunk=4)) - needed(plan(mode="direct", chunk=1)) == 3 * 9000 * PIXELS


def test_items_are_decoded_one_by_one_so_only_their_pixels_and_latents_add_up() -> None:
    one, four = plan(mode="direct").memory, plan((4, *CLIP[1:]), mode="direct").memory
    assert one is not None and four is not None
    assert four.activations == one.activations and four.caches == one.caches
    assert four.output == 4 * one.output and four.latents == 4 * one.latents
    divided = plan((4, *CLIP[1:]), ranks=2, mode="batch").memory
    assert divided is not None and divided.output == 2 * one.output


def test_pixels_of_a_wider_dtype_count() -> None:
    narrow, wide = plan(mode="direct").memory, plan(mode="direct", pixel_bytes=4).memory
    assert narrow is not None and wide is not None and wide.output == 4 * narrow.output


def test_bringing_the_parts_together_counts_on_top() -> None:
    shards, gathered = (plan(mode="spatial_shard_width", collect=how).memory for how in ("shards", "rank0"))
    assert shards is not None and gathered is not None
    assert shards.assembly == 0 and gathered.assembly == 2 * 81 * PIXELS * 3


def test_tiles_bound_the_activations_but_wait_to_be_put_together() -> None:
    whole, tiled = plan(ranks=1, mode="direct").memory, plan(ranks=1, mode="tile").memory
    assert whole is not None and tiled is not None
    assert tiled.activations < whole.activations / 4
    # 1.65 times the pixels, in the model's dtype.
    assert 81 * PIXELS * 3 * 4 < tiled.tiles < 2 * 81 * PIXELS * 3 * 4


def test_a_budget_drops_what_does_not_fit_and_prefers_exact_modes() -> None:
    whole, band = needed(plan(mode="direct")), needed(plan(mode="spatial_shard_width"))
    small = replace(WAN, footprint=WAN.footprint)
    direct = make_plan(small, CLIP, group_size=4, policy=Policy(direct_max_pixels=2**30))
    assert direct.mode == "direct"
    budget = Policy(direct_max_pixels=2**30, memory_budget_bytes=(whole + band) // 2)
    assert make_plan(small, CLIP, group_size=4, policy=budget).mode == "spatial_shard_width"
    assert plan(budget=whole).mode == "spatial_shard_width"
    tiled = plan(ranks=1, budget=whole - 1)
    assert tiled.mode == "tile" and not tiled.exact
    assert "of memory on a rank, and the budget is" in tiled.reason
    assert needed(tiled) <= whole - 1


def test_a_batch_is_decoded_item_by_item_until_its_pixels_alone_are_too_many() -> None:
    """The items of a batch on one rank share the activations, so a budget for one is nearly one for many."""
    budget = needed(plan(ranks=1, mode="direct")) + 15 * (81 * PIXELS * 3 + 3 * 4 * 16 * 21 * 60 * 104)
    assert plan((16, *CLIP[1:]), ranks=1, budget=budget).mode == "direct"
    assert plan((17, *CLIP[1:]), ranks=1, budget=budget).mode == "tile", "which holds fewer activations"
    assert plan((17, *CLIP[1:]), ranks=2, budget=budget).mode == "batch"


def test_a_chunk_is_shortened_before_a_mode_is_dropped() -> None:
    budget = needed(plan(ranks=1, mode="direct", chunk=2))
    made = plan(ranks=1, budget=budget, chunk=3)
    assert (made.mode, made.chunk) == ("direct", 2)
    assert "chunk shortened from 3 to 2 latent frames, which is what fits" in made.reason


def test_a_forced_mode_over_the_budget_falls_back_or_is_refused() -> None:
    budget = needed(plan(mode="direct")) - 1
    made = plan(ranks=4, budget=budget, mode="direct")
    assert made.mode == "tile" and made.fallback is not None and "the budget is" in made.fallback
    with pytest.raises(UnsupportedModeError, match=r"direct cannot decode this request: it needs .* of memory"):
        plan(ranks=4, budget=budget, mode="direct", strict=True)


def test_what_nothing_can_hold_is_refused_with_what_would_fit() -> None:
    with pytest.raises(
        UnsupportedModeError, match=r"what would fit: (\d+) latent frames at a time.*larger policy"
    ) as caught:
        plan((1, 16, 201, 270, 480), ranks=1, budget=12 * GIB)
    frames = int(str(caught.value).split("what would fit: ")[1].split()[0])
    assert plan((1, 16, frames, 270, 480), ranks=1, budget=12 * GIB).mode == "tile"
    with pytest.raises(UnsupportedModeError):
        plan((1, 16, frames + 1, 270, 480), ranks=1, budget=12 * GIB)
    with pytest.raises(UnsupportedModeError, match=r"what would fit: \d+ items at a time"):
        plan((64, 16, 21, 60, 104), ranks=1, budget=5 * GIB)


def test_a_model_that_was_not_measured_has_no_prediction_and_no_limit() -> None:
    made = plan(spec=replace(WAN, footprint=None), budget=1)
    assert made.memory is None and "memory" not in made.public()


def test_what_is_refused_says_why_the_mode_that_was_asked_for_cannot_run() -> None:
    with pytest.raises(UnsupportedModeError) as refused:
        plan(mode="direct", budget=330 << 20)
    assert "direct cannot run: it needs " in refused.value.message
    assert "; and in tiles of 256 x 256 pixels it needs " in refused.value.message
    with pytest.raises(UnsupportedModeError) as refused:
        plan(mode="tile", budget=330 << 20)
    assert "by 4 ranks: in tiles of 256 x 256 pixels it needs " in refused.value.message


def test_memory_is_told_in_units_in_which_it_is_not_nothing() -> None:
    assert [gib(nbytes) for nbytes in (3_000_000, 100 << 20, 256 << 20, 3 << 30)] == [
        "2.86 MiB",
        "100.00 MiB",
        "0.25 GiB",
        "3.00 GiB",
    ]
