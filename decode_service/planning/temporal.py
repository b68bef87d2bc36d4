"""The frame rule of a family: how many pixel frames come from how many latent frames, and how they are grouped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from decode_service.planning.tiles import TileSpan, overlap_axis


class FrameRule(Protocol):
    """Latent frames to pixel frames."""

    def frames(self, latent_frames: int) -> int:
        """Pixel frames decoded from ``latent_frames`` latent frames."""
        ...

    def problem(self, latent_frames: int) -> str | None:
        """Why ``latent_frames`` is not a length the decoder takes, or None if it is."""
        ...

    def describe(self) -> str:
        """One line for people, for example ``1 + 4 * (T - 1)``."""
        ...


@dataclass(frozen=True, slots=True)
class CausalFrames:
    """Causal decoders: the first latent frame gives one pixel frame, every later one gives ``ratio``."""

    ratio: int

    def frames(self, latent_frames: int) -> int:
        return 1 + self.ratio * (latent_frames - 1)

    def problem(self, latent_frames: int) -> str | None:
        return None if latent_frames >= 1 else "at least one latent frame is needed"

    def describe(self) -> str:
        return f"1 + {self.ratio} * (T - 1)"

    def chunks(self, latent_frames: int, chunk: int) -> tuple[tuple[int, int], ...]:
        """``(start, stop)`` of every decoder pass: the first frame alone, then ``chunk`` latent frames at a time.

        The first frame is always alone because its pass differs (no temporal upsampling); after it any grouping gives
        the same pixels.
        """
        return ((0, 1), *((t, min(t + chunk, latent_frames)) for t in range(1, latent_frames, chunk)))


@dataclass(frozen=True, slots=True)
class SingleFrame:
    """Image decoders whose latents have a time axis, of one frame."""

    def frames(self, latent_frames: int) -> int:
        return latent_frames

    def problem(self, latent_frames: int) -> str | None:
        return (
            None if latent_frames == 1 else "it decodes images, one latent frame each; send videos as a batch of images"
        )

    def describe(self) -> str:
        return "one frame"


@dataclass(frozen=True, slots=True)
class EqualFrames:
    """Decoders that leave time as it is: every latent frame gives one pixel frame."""

    def frames(self, latent_frames: int) -> int:
        return latent_frames

    def problem(self, latent_frames: int) -> str | None:
        return None if latent_frames >= 1 else "at least one latent frame is needed"

    def describe(self) -> str:
        return "T"


@dataclass(frozen=True, slots=True)
class GroupedFrames:
    """Decoders of whole groups of latent frames, each of which gives ``ratio`` pixel frames (VidTok that is not causal)."""

    ratio: int
    group: int

    def frames(self, latent_frames: int) -> int:
        return self.ratio * latent_frames

    def problem(self, latent_frames: int) -> str | None:
        if latent_frames >= 1 and latent_frames % self.group == 0:
            return None
        return f"it takes multiples of {self.group}, and diffusers drops the frames beyond the last whole one"

    def describe(self) -> str:
        return f"{self.ratio} * T, T a multiple of {self.group}"


@dataclass(frozen=True, slots=True)
class LinearFrames:
    """A rule that was measured rather than known: ``ratio * T + offset`` pixel frames, from ``at_least`` latent frames on."""

    ratio: int
    offset: int
    at_least: int = 1

    def frames(self, latent_frames: int) -> int:
        return self.ratio * latent_frames + self.offset

    def problem(self, latent_frames: int) -> str | None:
        if latent_frames >= self.at_least:
            return None
        return f"at least {self.at_least} latent frame{'s are' if self.at_least > 1 else ' is'} needed"

    def describe(self) -> str:
        if not self.offset:
            return f"{self.ratio} * T"
        return f"{self.ratio} * T {'-' if self.offset < 0 else '+'} {abs(self.offset)}"


@dataclass(frozen=True, slots=True)
class RemainderFirstFrames:
    """CogVideoX: chunks of ``batch`` latent frames whose first one takes the remainder as well.

    The rule is that of ``AutoencoderKLCogVideoX._decode`` in diffusers 0.42. How frames are grouped is part of the model:
    statistics are taken per chunk, and a chunk of an odd number of frames begins with one that is not upsampled in time.

    Attributes:
        batch: latent frames of a chunk.
        ratio: pixel frames per latent frame, a power of two.
    """

    batch: int
    ratio: int

    def chunks(self, latent_frames: int) -> tuple[tuple[int, int], ...]:
        """``(start, stop)`` of every decoder pass."""
        first = min(self.batch + latent_frames % self.batch, latent_frames)
        return ((0, first), *((t, t + self.batch) for t in range(first, latent_frames, self.batch)))

    def chunk_frames(self, latent_frames: int) -> int:
        """Pixel frames of a chunk of ``latent_frames``."""
        return self.ratio * latent_frames if latent_frames % 2 == 0 else 1 + self.ratio * (latent_frames - 1)

    def frames(self, latent_frames: int) -> int:
        return sum(self.chunk_frames(stop - start) for start, stop in self.chunks(latent_frames))

    def problem(self, latent_frames: int) -> str | None:
        return None if latent_frames >= 1 else "at least one latent frame is needed"

    def describe(self) -> str:
        if self.batch == 2:
            return f"1 + {self.ratio} * (T - 1) for odd T, {self.ratio} * T for even T"
        return f"by chunks of {self.batch} latent frames, the first one with the remainder"


@dataclass(frozen=True, slots=True)
class SegmentFrames:
    """KVAE: segments of a fixed number of latent frames, each handing a cache to the next.

    The rule is that of ``AutoencoderKLKVAEVideo._decode`` in diffusers 0.42. How frames are grouped is part of the model:
    statistics are taken per segment, and a segment of one latent frame is not upsampled in time wherever it stands. So a
    clip whose last segment has a single frame (6, 10, 14, ... latent frames of the released model) ends early.

    Attributes:
        first: latent frames of the first segment.
        later: latent frames of every other one; the last may have fewer.
        ratio: pixel frames per latent frame.
    """

    first: int
    later: int
    ratio: int

    def chunks(self, latent_frames: int) -> tuple[tuple[int, int], ...]:
        """``(start, stop)`` of every decoder pass."""
        first = min(self.first, latent_frames)
        starts = range(first, latent_frames, self.later)
        return ((0, first), *((t, min(t + self.later, latent_frames)) for t in starts))

    def frames(self, latent_frames: int) -> int:
        whole = 1 + self.ratio * (latent_frames - 1)
        return whole - (self.ratio - 1 if self._ends_early(latent_frames) else 0)

    def _ends_early(self, latent_frames: int) -> bool:
        beyond = latent_frames - self.first
        return beyond > 0 and beyond % self.later == 1

    def problem(self, latent_frames: int) -> str | None:
        return None if latent_frames >= 1 else "at least one latent frame is needed"

    def describe(self) -> str:
        if self.ratio == 1:
            return "T"
        return (
            f"1 + {self.ratio} * (T - 1), and {self.ratio - 1} fewer where T is {self.first + 1} + {self.later} * n: "
            "a last segment of one latent frame gives one frame"
        )


@dataclass(frozen=True, slots=True)
class OverlapFrames:
    """Allegro: clips that overlap and are cross-faded, laid out in time as tiles are in space.

    Attributes:
        clip: latent frames of a clip.
        min_overlap: latent frames that consecutive clips share at least.
        ratio: pixel frames per latent frame.
    """

    clip: int
    min_overlap: int
    ratio: int

    def spans(self, latent_frames: int) -> tuple[TileSpan, ...]:
        """The clips, with starts and sizes in latent frames and overlaps in pixel frames."""
        return overlap_axis(latent_frames, self.clip, self.min_overlap, self.ratio)

    def clip_count(self, latent_frames: int) -> int:
        return len(self.spans(latent_frames))

    def frames(self, latent_frames: int) -> int:
        return self.ratio * latent_frames

    def problem(self, latent_frames: int) -> str | None:
        return None if latent_frames >= 1 else "at least one latent frame is needed"

    def describe(self) -> str:
        return f"{self.ratio} * T"


@dataclass(frozen=True, slots=True)
class ClipFrames:
    """MiniMax-H3: latents come in clips whose tails were dropped by the encoder, so decoded clips overlap.

    The rule is that of ``AutoencoderKLMiniMaxH3._decode`` in diffusers 0.42.

    Attributes:
        clip_length: pixel frames of one encoder clip.
        token_drop: latent frames that the encoder drops at the end.
        ratio: pixel frames per latent frame.
    """

    clip_length: int
    token_drop: int
    ratio: int

    @property
    def tokens_per_clip(self) -> int:
        return math.ceil(self.clip_length / self.ratio)

    @property
    def token_overlap(self) -> int:
        """Latent frames that a clip borrows from the next one."""
        return (-self.token_drop) % self.tokens_per_clip

    @property
    def frame_pre_padding(self) -> int:
        """Pixel frames at the head of each part that only exist because clip_length is not a multiple of ratio."""
        return (-self.clip_length) % self.ratio

    @property
    def frame_overlap(self) -> int:
        """Pixel frames over which consecutive clips are cross-faded."""
        return max(self.token_overlap * self.ratio - self.frame_pre_padding, 0)

    def pad_tokens(self, latent_frames: int) -> int:
        """Latent frames by which the clip is extended (repeating the last) to a whole number of clips."""
        return (-(latent_frames + self.token_drop)) % self.tokens_per_clip

    def clip_count(self, latent_frames: int) -> int:
        padded = latent_frames + self.token_drop + self.pad_tokens(latent_frames)
        return padded // self.tokens_per_clip - int(self.token_drop > 0)

    def clip_span(self, index: int, latent_frames: int) -> tuple[int, int]:
        """``(start, stop)`` in padded latent frames of clip ``index``."""
        start = index * self.tokens_per_clip
        stop = start + self.tokens_per_clip + self.token_overlap
        return start, min(stop, latent_frames + self.pad_tokens(latent_frames))

    def trimmed_frames(self, latent_frames: int) -> int:
        """Pixel frames that only the padding produced and that are cut off at the end."""
        tail = self.clip_length % self.ratio
        return sum(
            tail if tail and (latent_frames + k) % self.tokens_per_clip == 0 else self.ratio
            for k in range(self.pad_tokens(latent_frames))
        )

    def frames(self, latent_frames: int) -> int:
        clips = self.clip_count(latent_frames)
        if clips < 1:
            return 0
        # Every clip gives the frames of its own tokens; the last one those of the tokens that it borrowed, too.
        frames = clips * (self.tokens_per_clip * self.ratio - self.frame_pre_padding)
        if self.token_drop:
            start, stop = self.clip_span(clips - 1, latent_frames)
            borrowed = stop - start - self.tokens_per_clip
            frames += max(min(borrowed, self.tokens_per_clip) * self.ratio - self.frame_pre_padding, 0)
        return frames - self.trimmed_frames(latent_frames)

    def problem(self, latent_frames: int) -> str | None:
        if latent_frames < 1:
            return "at least one latent frame is needed"
        if self.clip_count(latent_frames) < 1 or self.frames(latent_frames) < 1:
            return (
                f"{latent_frames} latent frames are less than one clip; "
                f"whole clips have {self.tokens_per_clip} * n + {self.token_overlap} latent frames"
            )
        return None

    def describe(self) -> str:
        return (
            f"{self.clip_length} * n + {self.frame_overlap} frames from "
            f"{self.tokens_per_clip} * n + {self.token_overlap} latent frames"
        )


@dataclass(frozen=True, slots=True)
class FadedFrames:
    """HunyuanVideo: short clips are decoded whole, longer ones in parts that overlap in time and are cross-faded.

    The rule is that of ``AutoencoderKLHunyuanVideo._temporal_tiled_decode`` in diffusers 0.42.

    Attributes:
        ratio: pixel frames per latent frame after the first.
        whole: most latent frames of a clip that is decoded whole.
        stride: latent frames from one part of a longer clip to the next.
    """

    ratio: int
    whole: int
    stride: int

    @property
    def fade(self) -> int:
        """Pixel frames over which consecutive parts are cross-faded."""
        return (self.whole - self.stride) * self.ratio

    def parts(self, latent_frames: int) -> tuple[tuple[int, int], ...]:
        """``(start, stop)`` in latent frames of every part.

        A part has one frame more than ``whole``, because the pixel frame of its first latent frame is dropped (that of
        the part before is kept). So a part of a single frame gives nothing, and is left out.
        """
        if latent_frames <= self.whole:
            return ((0, latent_frames),)
        return tuple(
            (start, min(start + self.whole + 1, latent_frames)) for start in range(0, latent_frames - 1, self.stride)
        )

    def clip_count(self, latent_frames: int) -> int:
        return len(self.parts(latent_frames))

    def frames(self, latent_frames: int) -> int:
        return 1 + self.ratio * (latent_frames - 1)

    def problem(self, latent_frames: int) -> str | None:
        return None if latent_frames >= 1 else "at least one latent frame is needed"

    def describe(self) -> str:
        return f"1 + {self.ratio} * (T - 1)"
