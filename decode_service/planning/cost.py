"""How long a plan takes, as arithmetic on counts of the model and on constants of the machine.

``decode_service.decoding.work`` counts a model's ``Work`` when it is loaded: floating-point operations per pixel, exchanges
between ranks, bytes. The engine times a few decodes of known size on the ranks that serve (``Timed``), and ``calibrated``
makes a ``Calibration`` of them. The predicted time of a decode is then

    fixed + passes * pass_s + flops * flop_s + exchanges * exchange_s + bytes * byte_s

of the rank that has most to do, times what decodes of that mode took of their prediction so far. It is what a reply's
``timings.decode`` measures: from the latents on the ranks to pixels in their memory, without the queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from decode_service.planning.temporal import (
    ClipFrames,
    FadedFrames,
    OverlapFrames,
    RemainderFirstFrames,
    SegmentFrames,
)

if TYPE_CHECKING:
    from decode_service.planning.spec import ModelSpec

#: A decode that has more to do must take so many times as long as one with less, lest the times tell nothing of arithmetic.
#: The fastest of several decodes may still be off by a tenth where other processes are busy. The difference of t and 1.5 t is
#: then off by at most (1 + 1.5) / 10 t, half of itself.
APART = 1.5

#: By how much one operation of a large decode may take longer than one of a small decode.
UNEVEN = 2.0

_SWEEPS = 5000


class IndistinctTimesError(ValueError):
    """The times do not tell what arithmetic takes: a decode that has much more to do took hardly longer."""


@dataclass(frozen=True, slots=True)
class Work:
    """What decoding with one loaded model takes, as functions of the picture's size.

    T are the latent frames that are decoded together (the clip, or one part of it), t = T - 1.

    Attributes:
        flops: a, b of ``a + b * t`` floating-point operations per output pixel of one frame (height x width).
        attention: a, b, c of ``a + b * t + c * t^2`` more of them per square of those pixels.
        exchanges: collectives of the first pass, and of each later one, where a frame is shared.
        halo_bytes: a, b of ``a + b * t`` bytes that a rank receives from one neighbour, per output pixel along the cut.
        gathered_bytes: a, b of ``a + b * t`` bytes that it receives per output pixel that other ranks hold.
        itemsize: bytes of one value of a decoded tile.
    """

    flops: tuple[float, float]
    attention: tuple[float, float, float] = (0.0, 0.0, 0.0)
    exchanges: tuple[float, float] = (0.0, 0.0)
    halo_bytes: tuple[float, float] = (0.0, 0.0)
    gathered_bytes: tuple[float, float] = (0.0, 0.0)
    itemsize: int = 4


@dataclass(frozen=True, slots=True)
class Amount:
    """What the rank that has most to do does for one request.

    Attributes:
        passes: calls of the decoder.
        flops: floating-point operations.
        exchanges: collectives.
        nbytes: bytes that it receives from other ranks.
        banded: whether it decodes a band, where every operation is looked at and halo rows are copied.
    """

    passes: int
    flops: float
    exchanges: float = 0.0
    nbytes: float = 0.0
    banded: bool = False


@dataclass(frozen=True, slots=True)
class Timed:
    """One decode that was timed.

    Attributes:
        mode, latent_shape: which one.
        amount: what it took to do.
        seconds: how long it took, on the rank that took longest.
        fixed_s: of them, what was not decoding: latents to the device, pixels to the host.
    """

    mode: str
    latent_shape: tuple[int, ...]
    amount: Amount
    seconds: float
    fixed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants of one model on the ranks of one group, in seconds.

    Attributes:
        fixed_s: of every request.
        pass_s: of every call of the decoder.
        flop_s: of one floating-point operation.
        band_flop_s: of one in a band, where it differs.
        exchange_s: of one collective.
        byte_s: of one byte received from another rank.
        corrections: by mode, the factor by which decodes took longer than these constants say (see
            ``decode_service.engine.predictions``).
    """

    fixed_s: float
    pass_s: float
    flop_s: float
    band_flop_s: float
    exchange_s: float = 0.0
    byte_s: float = 0.0
    corrections: tuple[tuple[str, float], ...] = ()

    def correction(self, mode: str) -> float:
        return dict(self.corrections).get(mode, 1.0)

    def seconds(self, amount: Amount, mode: str) -> float:
        """Predicted time of a decode in ``mode``."""
        flop_s = self.band_flop_s if amount.banded else self.flop_s
        uncorrected = (
            self.fixed_s
            + amount.passes * self.pass_s
            + amount.flops * flop_s
            + amount.exchanges * self.exchange_s
            + amount.nbytes * self.byte_s
        )
        return uncorrected * self.correction(mode)

    def public(self) -> dict[str, Any]:
        """As ``/v1/models`` shows it."""
        return {**asdict(self), "corrections": dict(self.corrections)}


def part_lengths(spec: ModelSpec, latent_frames: int) -> list[int]:
    """Latent frames of every part in time: one for most families, several where clips are cross-faded."""
    rule = spec.frame_rule
    if isinstance(rule, FadedFrames):
        return [stop - start for start, stop in rule.parts(latent_frames)]
    if isinstance(rule, OverlapFrames):
        return [span.size for span in rule.spans(latent_frames)]
    if isinstance(rule, ClipFrames):
        spans = (rule.clip_span(index, latent_frames) for index in range(rule.clip_count(latent_frames)))
        return [stop - start for start, stop in spans]
    return [latent_frames]


def pass_count(spec: ModelSpec, latent_frames: int, chunk: int) -> int:
    """Calls of the decoder for ``latent_frames`` that are decoded together."""
    rule = spec.frame_rule
    if spec.chunked:
        return 1 + math.ceil((latent_frames - 1) / chunk)
    if isinstance(rule, (RemainderFirstFrames, SegmentFrames)):
        return len(rule.chunks(latent_frames))
    return 1


def amount(
    spec: ModelSpec,
    latent_shape: Sequence[int],
    *,
    mode: str,
    ranks: int,
    chunk: int,
    share: float = 1.0,
    items: int = 1,
    collect: str = "shards",
    pixel_bytes: int = 1,
    tiles: Sequence[tuple[int, int, int]] = (),
) -> Amount | None:
    """What the rank that has most to do does, or None for a model whose work was not counted.

    Args:
        ranks: ranks that decode.
        share: part of the frame that is the largest band.
        items: items of the batch that one rank decodes.
        collect: bringing parts together costs bytes unless they stay where they are (``shards``).
        pixel_bytes: bytes of one value of the reply.
        tiles: in tile mode (owner, part in time, latent cells) of every tile of one item.
    """
    work = spec.work
    if work is None:
        return None
    frames, height, width = spec.output_extents(tuple(latent_shape))
    lengths = part_lengths(spec, latent_shape[2] if len(latent_shape) == 5 else 1)
    reply = latent_shape[0] * frames * height * width * spec.output_channels * pixel_bytes
    if mode == "tile":
        passes, flops = [0] * ranks, [0.0] * ranks
        moved = 0.0
        area = spec.spatial_ratio**2
        for owner, part, cells in tiles:
            passes[owner] += items * pass_count(spec, lengths[part], chunk)
            flops[owner] += items * _flops(work, lengths[part], cells * area, 1.0)
            share_of_clip = lengths[part] / max(1, sum(lengths))
            moved += items * cells * area * frames * share_of_clip * spec.output_channels * work.itemsize * (owner != 0)
        busiest = max(range(ranks), key=lambda rank: flops[rank])
        nbytes = moved + (reply if collect == "broadcast" and ranks > 1 else 0)
        return Amount(passes[busiest], flops[busiest], float(ranks > 1) * items, nbytes)

    banded = mode.startswith("spatial_shard")
    passes_, flops_, exchanges, nbytes = 0, 0.0, 0.0, 0.0
    for length in lengths:
        count = pass_count(spec, length, chunk)
        passes_ += count
        flops_ += _flops(work, length, height * width, share)
        if banded:
            exchanges += work.exchanges[0] + work.exchanges[1] * (count - 1)
            cut = height if mode == "spatial_shard_width" else width
            neighbours = 1 if ranks == 2 else 2
            nbytes += _line(work.halo_bytes, length) * cut * neighbours
            nbytes += _line(work.gathered_bytes, length) * height * width * (1 - share)
    passes_, flops_, exchanges, nbytes = passes_ * items, flops_ * items, exchanges * items, nbytes * items
    if collect != "shards" and (ranks > 1 or collect == "broadcast"):
        exchanges += 1 + (collect == "broadcast")
        nbytes += reply * (1 - 1 / ranks) + (reply if collect == "broadcast" else 0)
    return Amount(passes_, flops_, exchanges, nbytes, banded)


def told_apart(less_s: float, more_s: float) -> bool:
    """Whether the times of a decode and of one that has more to do tell what the difference takes; see ``APART``."""
    return more_s >= APART * less_s


def doubtful(decodes: Sequence[Timed]) -> list[Timed]:
    """Those of ``decodes`` whose times can hardly be right beside the others', and should be taken again.

    An operation takes no longer in a decode that has more of them, among which fixed costs are divided, nor on one rank than in
    a band; twice as long at most, where the larger one fits no cache. And sizes must be ``told_apart``.
    """
    found = [
        timed
        for timed in decodes
        if any(
            other.amount.flops <= timed.amount.flops
            and (other.amount.banded or not timed.amount.banded)
            and timed.seconds / timed.amount.flops > UNEVEN * other.seconds / other.amount.flops
            for other in decodes
        )
    ]
    smallest, largest = _ends([timed for timed in decodes if not timed.amount.banded])
    if smallest.amount.flops < largest.amount.flops and not told_apart(smallest.seconds, largest.seconds):
        found += [timed for timed in (smallest, largest) if timed not in found]
    return found


def calibrated(decodes: Sequence[Timed]) -> Calibration:
    """The constants that explain ``decodes`` best.

    Those of one rank come from decodes of whole frames (or of single tiles), of which there must be one at least and should
    be two sizes. What shared ones take beyond that goes to exchanges, bytes and slower arithmetic, so a band's operation never
    takes less than another. All are least squares of relative errors, none below zero.

    An operation always takes some time. Where there is one size, all of its time is the arithmetic's. Where there are several,
    at least what the largest took beyond the smallest is: as if the smallest had been nothing but fixed costs. As they are
    ``told_apart``, that is a third of the largest's time or more, and so ``flop_s`` is known within a factor of three, whatever
    was interrupted. For exchanges there is no such bound, and none is needed: where they seem to cost nothing, frames are
    shared, which corrects the mode's factor.

    Raises:
        ValueError: without a decode of a whole frame, or with one that took no time.
        IndistinctTimesError: the times of two sizes are too alike.
    """
    alone = [timed for timed in decodes if not timed.amount.banded]
    shared = [timed for timed in decodes if timed.amount.banded]
    if not alone:
        raise ValueError("calibrating needs a decode of a whole frame")
    if min(timed.seconds for timed in decodes) <= 0:
        raise ValueError("every decode takes some time")
    smallest, largest = _ends(alone)
    least_flop_s = 0.0
    if largest.amount.flops > smallest.amount.flops:
        if not told_apart(smallest.seconds, largest.seconds):
            raise IndistinctTimesError(
                f"latents {list(largest.latent_shape)} took {largest.seconds * 1e3:.2f} ms, and {list(smallest.latent_shape)}, "
                f"with {largest.amount.flops / smallest.amount.flops:.3g} times less to do, {smallest.seconds * 1e3:.2f} ms: "
                "too alike to tell what arithmetic takes"
            )
        least_flop_s = (largest.seconds - smallest.seconds) / largest.amount.flops
    fixed_s = min(timed.fixed_s for timed in alone)
    flop_s, pass_s = _non_negative_least_squares(
        [(timed.amount.flops, float(timed.amount.passes)) for timed in alone],
        [timed.seconds - fixed_s for timed in alone],
        [timed.seconds for timed in alone],
    )
    # Where large decodes are slow for their size, the fit lies between them and the small ones. Requests are large.
    flop_s = max(flop_s, least_flop_s)
    one_rank = Calibration(fixed_s, pass_s, flop_s, flop_s)
    if not shared:
        return one_rank
    more_flop_s, exchange_s, byte_s = _non_negative_least_squares(
        [(timed.amount.flops, timed.amount.exchanges, timed.amount.nbytes) for timed in shared],
        [timed.seconds - one_rank.seconds(timed.amount, "") for timed in shared],
        [timed.seconds for timed in shared],
    )
    return Calibration(fixed_s, pass_s, flop_s, flop_s + more_flop_s, exchange_s, byte_s)


def _ends(decodes: Sequence[Timed]) -> tuple[Timed, Timed]:
    """The one that has least to do, and the one that has most."""
    return (
        min(decodes, key=lambda timed: (timed.amount.flops, timed.seconds)),
        min(decodes, key=lambda timed: (-timed.amount.flops, timed.seconds)),
    )


def _line(coefficients: Sequence[float], latent_frames: int) -> float:
    """The polynomial of ``coefficients`` at ``latent_frames - 1``."""
    t = latent_frames - 1
    return sum(coefficient * t**power for power, coefficient in enumerate(coefficients))


def _flops(work: Work, latent_frames: int, pixels: float, share: float) -> float:
    """Operations on ``share`` of a frame of ``pixels``: a band's queries meet the keys of the whole frame."""
    return share * (_line(work.flops, latent_frames) * pixels + _line(work.attention, latent_frames) * pixels**2)


def _non_negative_least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float], scales: Sequence[float]
) -> list[float]:
    """x >= 0 that minimizes the sum of ((row . x - target) / scale)^2, by coordinate descent from zero.

    Where several x do, columns that come first get as much as they can: put the one to extrapolate by first.
    """
    columns = len(rows[0])
    a = [[value / scale for value in row] for row, scale in zip(rows, scales, strict=True)]
    norms = [math.sqrt(sum(row[j] ** 2 for row in a)) or 1.0 for j in range(columns)]
    a = [[row[j] / norms[j] for j in range(columns)] for row in a]
    residuals = [target / scale for target, scale in zip(targets, scales, strict=True)]
    x = [0.0] * columns
    for _ in range(_SWEEPS):
        moved = 0.0
        for j in range(columns):
            step = sum(row[j] * residual for row, residual in zip(a, residuals, strict=True))
            step = max(step, -x[j])
            if step:
                x[j] += step
                residuals = [residual - row[j] * step for row, residual in zip(a, residuals, strict=True)]
                moved = max(moved, abs(step))
        if moved < 1e-12:
            break
    return [value / norm for value, norm in zip(x, norms, strict=True)]
