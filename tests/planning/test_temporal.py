"""Frame rules against the decoders of diffusers."""

from __future__ import annotations

import pytest
import torch

from decode_service.planning.temporal import (
    CausalFrames,
    ClipFrames,
    EqualFrames,
    OverlapFrames,
    RemainderFirstFrames,
    SingleFrame,
)
from tests.decoding import models


@pytest.mark.parametrize("name", ["wan21", "wan22"])
def test_causal_decoders_give_one_frame_and_then_four_each(name: str) -> None:
    vae = models.BUILDERS[name]().eval()
    rule = CausalFrames(4)
    for latent_frames in (1, 2, 3, 5):
        with torch.inference_mode():
            frames = vae.decode(torch.zeros(1, 4, latent_frames, 2, 2)).sample.shape[2]
        assert rule.frames(latent_frames) == frames


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_chunks_cover_all_frames_with_the_first_alone(chunk: int) -> None:
    for latent_frames in range(1, 20):
        chunks = CausalFrames(4).chunks(latent_frames, chunk)
        assert chunks[0] == (0, 1)
        assert [t for start, stop in chunks for t in range(start, stop)] == list(range(latent_frames))
        assert all(stop - start <= chunk for start, stop in chunks[1:])


@pytest.mark.parametrize(("clip_length", "token_drop"), [(17, 3), (16, 0), (9, 1)])
def test_minimax_h3_clips_give_the_frames_of_diffusers(clip_length: int, token_drop: int) -> None:
    vae = models.minimax_h3(clip_length=clip_length, token_drop=token_drop).eval()
    rule = ClipFrames(clip_length, token_drop, 4)
    possible = 0
    for latent_frames in range(1, 24):
        if rule.problem(latent_frames):
            # Less than one clip: diffusers has nothing to concatenate and fails with a bare torch error.
            with pytest.raises((RuntimeError, ValueError)):
                vae.decode(torch.zeros(1, 4, latent_frames, 1, 1))
            continue
        possible += 1
        with torch.inference_mode():
            assert rule.frames(latent_frames) == vae.decode(torch.zeros(1, 4, latent_frames, 1, 1)).sample.shape[2]
    assert possible > 10


def test_frames_of_images_and_of_decoders_that_leave_time_alone() -> None:
    assert SingleFrame().problem(1) is None and "images" in str(SingleFrame().problem(2))
    assert [EqualFrames().frames(count) for count in (1, 2, 14)] == [1, 2, 14]
    assert EqualFrames().problem(0)


def test_chunks_with_the_remainder_first() -> None:
    rule = RemainderFirstFrames(2, 4)
    assert rule.chunks(1) == ((0, 1),)
    assert rule.chunks(5) == ((0, 3), (3, 5))
    assert rule.chunks(6) == ((0, 2), (2, 4), (4, 6))
    assert [rule.frames(count) for count in (1, 2, 3, 4, 13)] == [1, 8, 9, 16, 49]


def test_clips_that_overlap_cover_the_video() -> None:
    rule = OverlapFrames(6, 2, 4)
    assert [span.start for span in rule.spans(22)] == [0, 4, 8, 12, 16]
    for count in range(1, 40):
        spans = rule.spans(count)
        assert len(spans) == rule.clip_count(count) and spans[-1].start + spans[-1].size == count
