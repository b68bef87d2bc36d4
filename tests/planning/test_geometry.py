"""From pixels to latents, for every frame rule there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_service.errors import InvalidRequestError
from decode_service.planning.geometry import describe_frames, describe_tiles, latents_for, missing_modes
from decode_service.planning.spec import OverlapTiles, RectangleTiles, StrideTiles
from decode_service.planning.temporal import (
    CausalFrames,
    ClipFrames,
    EqualFrames,
    FadedFrames,
    FrameRule,
    OverlapFrames,
    RemainderFirstFrames,
    SingleFrame,
)
from tests.planning.test_planner import H3, QWEN, WAN

RULES: list[FrameRule] = [
    CausalFrames(4),
    CausalFrames(6),
    CausalFrames(1),
    EqualFrames(),
    RemainderFirstFrames(2, 4),
    OverlapFrames(6, 2, 4),
    ClipFrames(17, 3, 4),
    FadedFrames(4, 4, 3),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.describe())
def test_every_length_that_a_rule_makes_is_found_and_no_other(rule: FrameRule) -> None:
    spec = replace(WAN, frame_rule=rule)
    lengths = {rule.frames(t): t for t in range(60, 0, -1) if rule.problem(t) is None}
    for frames in range(1, max(lengths)):
        if frames in lengths:
            told = latents_for(spec, height=64, width=80, frames=frames)
            assert told["latent_shape"][3:] == [8, 10]
            assert rule.frames(told["latent_shape"][2]) == frames == told["pixel_shape"][1]
            continue
        with pytest.raises(InvalidRequestError, match="the nearest is") as caught:
            latents_for(spec, height=64, width=80, frames=frames)
        nearest = {int(n) for n in str(caught.value).split("the nearest is ")[1].split(" or ")}
        below, above = [n for n in lengths if n < frames], [n for n in lengths if n > frames]
        assert nearest == {*sorted(below)[-1:], min(above)}, frames


def test_decoders_of_single_frames_say_so() -> None:
    spec = replace(QWEN, frame_rule=SingleFrame())
    assert latents_for(spec, height=64, width=80)["latent_shape"] == [1, 16, 8, 10]
    assert latents_for(spec, height=64, width=80, frames=1)["latent_shape"] == [1, 16, 1, 8, 10]
    with pytest.raises(InvalidRequestError, match="the nearest is 1"):
        latents_for(spec, height=64, width=80, frames=81)
    assert describe_frames(spec)["ends"] and describe_frames(replace(spec, frame_rule=None))["ends"]


def test_frames_and_tiles_are_told_in_numbers() -> None:
    told = describe_frames(WAN)
    assert told["rule"] == "pixel frames = 1 + 4 * (T - 1), T latent frames" and not told["ends"]
    assert told["latent_to_pixel"][:3] == [[1, 1], [2, 5], [3, 9]]
    assert describe_tiles(WAN) == {
        "order": "height, width",
        "size_px": [256, 256],
        "stride_px": [192, 192],
        "adjustable": True,
    }
    sides = RectangleTiles(StrideTiles(240, 200), StrideTiles(360, 288))
    assert describe_tiles(replace(WAN, tiles=sides))["stride_px"] == [200, 288]
    block = replace(H3, tiles=OverlapTiles(320, 120, 80))
    assert describe_tiles(block)["min_overlap_px"] == [120, 80] and not describe_tiles(block)["adjustable"]


def test_missing_modes_have_reasons() -> None:
    assert missing_modes(WAN, 4) == {}
    assert set(missing_modes(WAN, 1).values()) == {"the group has one rank"}
    assert set(missing_modes(H3, 4)) == {"direct", "batch", "spatial_shard_height", "spatial_shard_width"}
    assert all("blended tiles" in why for why in missing_modes(H3, 4).values())
    one_axis = replace(WAN, exact_axes=("width",), no_exact_axes_reason="")
    assert missing_modes(one_axis, 2) == {"spatial_shard_height": "this axis cannot be sharded"}
