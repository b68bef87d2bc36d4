"""How long decodes take here: measured at the start, corrected by every request, and compared with what was predicted.

At the start a few small decodes are timed on the ranks that serve, which gives a ``Calibration``. Afterwards every mode keeps a
factor: the exponentially weighted geometric mean of what decodes took over what the constants say. Plans get it with the
constants, so that they stay a function of their inputs; the same sequence of requests and times gives the same factors.

No Ray and no torch here.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from decode_service.engine.runs import Run
from decode_service.errors import DecodeServiceError, InvalidRequestError, OutOfMemoryError
from decode_service.planning.cost import Calibration, IndistinctTimesError, Timed, calibrated, doubtful, told_apart
from decode_service.planning.planner import amount_of
from decode_service.planning.spec import ModelSpec

logger = logging.getLogger("decode_service.engine")

#: Weight of one request in the factor of its mode, once there were some; the first ones weigh more.
WEIGHT = 0.1

#: A request counts as at most so much slower or faster than predicted: one that was interrupted must not decide the next ones.
LARGEST_RATIO = 8.0

#: By how much a mode's factor returns to what it was at the start with every request in another mode. A mode that was slow
#: once (another process was busy) would otherwise never be tried again.
FORGETTING = 0.01

#: Requests of a mode over which statistics are taken.
WINDOW = 256

_REPEATS = 2
_LARGEST_SCALE = 8
#: Where kernels take no time of which one could tell, on a GPU say, frames must be larger.
_LARGEST_SCALE_APART = 64
_LONGEST_PASS = 4
#: How often times that make no sense are taken again.
_RETRIES = 3

TimedDecode = Callable[[tuple[int, ...], str], Awaitable[Run]]


@dataclasses.dataclass
class _Mode:
    """What is known of decodes in one mode; logarithms of factors.

    Attributes:
        count: predicted decodes so far, however many.
        correction: of the constants.
        at_start: what it was when the service became ready.
        times_ms: predicted and actual ones, of the last decodes.
    """

    count: int = 0
    correction: float = 0.0
    at_start: float = 0.0
    times_ms: deque[tuple[float, float]] = dataclasses.field(default_factory=lambda: deque(maxlen=WINDOW))

    def public(self) -> dict[str, Any]:
        """The count of all decodes, and how well the last ``WINDOW`` were predicted."""
        ratios = [actual / predicted for predicted, actual in self.times_ms]
        return {
            "count": self.count,
            "mean_predicted_ms": round(statistics.fmean(predicted for predicted, _ in self.times_ms), 2),
            "mean_actual_ms": round(statistics.fmean(actual for _, actual in self.times_ms), 2),
            "mean_ratio": round(statistics.fmean(ratios), 3),
            "ratio": {f"p{percent}": round(_percentile(ratios, percent), 3) for percent in (10, 50, 90)},
            "p90_abs_error_ms": round(
                _percentile([abs(actual - predicted) for predicted, actual in self.times_ms], 90), 2
            ),
            "p90_abs_error": round(_percentile([abs(ratio - 1) for ratio in ratios], 90), 3),
        }


class _Repeated:
    """One decode that is repeated. The fastest counts: whatever else a machine does can only make it slower.

    Attributes:
        shape, mode: of the decode.
        fastest: so far, or None where there was none.
    """

    def __init__(self, spec: ModelSpec, decode: TimedDecode, shape: tuple[int, ...], mode: str) -> None:
        self._spec = spec
        self._decode = decode
        self.shape = shape
        self.mode = mode
        self.fastest: Timed | None = None

    @property
    def seconds(self) -> float:
        """Of the fastest so far; infinite where there was none."""
        return math.inf if self.fastest is None else self.fastest.seconds

    async def once(self) -> float:
        """Decode once more; how long that took, in seconds."""
        run = await self._decode(self.shape, self.mode)
        seconds = max(run.timings_ms["decode"], 1e-3) / 1e3
        if seconds < self.seconds:
            done = amount_of(self._spec, run.plan)
            assert done is not None
            stages = ("prepare", "collect", "to_host")
            fixed = max(sum(part.timings_ms.get(stage, 0.0) for stage in stages) for part in run.parts) / 1e3
            self.fastest = Timed(self.mode, self.shape, done, seconds, min(fixed, seconds))
        return seconds

    def enlarged(self, scale: int, mode: str | None = None) -> _Repeated:
        """One of ``scale`` times the rows and columns, in the same mode or another."""
        shape = (*self.shape[:-2], self.shape[-2] * scale, self.shape[-1] * scale)
        return _Repeated(self._spec, self._decode, shape, mode or self.mode)


async def _in_turn(decodes: Sequence[_Repeated], within_s: float) -> None:
    """Repeat each of ``decodes`` a few times, after one that warms up, for about ``within_s`` each.

    In turn: other processes take the machine for a while and then leave it, and all that is compared should meet both.
    """
    spent = [await each.once() if math.isinf(each.seconds) else 0.0 for each in decodes]
    for _ in range(_REPEATS):
        for index, each in enumerate(decodes):
            if spent[index] + each.seconds / 2 < within_s:
                spent[index] += await each.once()


async def _settled(decodes: Sequence[_Repeated], within_s: float) -> None:
    """Repeat those of ``decodes`` whose times are ``doubtful``, until none is or that seems not to help."""
    for _ in range(_RETRIES):
        doubted = doubtful(_fastest(decodes))
        again = [each for each in decodes if each.fastest in doubted]
        if not again:
            break
        # At least once more, however long it takes.
        await _in_turn(again, max(within_s, *(each.seconds for each in again)))


def _fastest(decodes: Sequence[_Repeated]) -> list[Timed]:
    return [each.fastest for each in decodes if each.fastest is not None]


class Predictions:
    """The calibration of one group, and how well it predicts."""

    def __init__(self) -> None:
        self._constants: Calibration | None = None
        self._modes: dict[str, _Mode] = {}
        self._decodes: list[Timed] = []
        self.problem = "not measured yet"

    @property
    def calibration(self) -> Calibration | None:
        """What plans are made with; None where nothing was measured."""
        if self._constants is None:
            return None
        corrections = tuple((mode, math.exp(known.correction)) for mode, known in sorted(self._modes.items()))
        return dataclasses.replace(self._constants, corrections=corrections)

    async def calibrate(
        self, spec: ModelSpec, ranks: int, decode: TimedDecode, *, chunk: int, seconds: float, max_pixels: int
    ) -> None:
        """Time decodes of two sizes, undivided and shared along every axis, in turn, for about ``seconds``.

        The larger ones are enlarged, which may take as long once more, until they take longer than the small ones by more
        than chance. Where they never do, or where a decode fails, ``problem`` says so, and there is no calibration.

        Args:
            decode: decodes random latents of a shape in a mode, in passes of ``chunk`` latent frames.
            max_pixels: largest picture that may be decoded.
        """
        if spec.work is None:
            self.problem = "the model's work could not be counted"
            return
        shared = [f"spatial_shard_{axis}" for axis in spec.exact_axes] if ranks > 1 else []
        modes = ["tile"] if spec.tile_only else ["direct", *shared]
        try:
            shape, most = sizes(spec, ranks, chunk)
            # Every mode is timed at two sizes.
            each_s = seconds / (2 * len(modes))
            small = [_Repeated(spec, decode, shape, mode) for mode in modes]
            await _in_turn(small, each_s)
            # As large as its part of the time allows, twice the sides at least.
            area = min(each_s / (_REPEATS + 1) / max(one.seconds for one in small), float(most**2))
            possible = math.isqrt(max_pixels // math.prod(spec.output_extents(shape)))
            scale = min(max(2, math.isqrt(int(area))), most, possible)
            large: list[_Repeated] = []
            if scale > 1:
                alone = await self._enlarged(small[0], scale, min(_LARGEST_SCALE_APART, possible), each_s, seconds)
                large = [alone, *(alone.enlarged(1, mode) for mode in modes[1:])]
                await _in_turn([*small, *large], each_s)
            await _settled([*small, *large], each_s)
            self._decodes = _fastest([*small, *large])
            self._constants = calibrated(self._decodes)
        except (DecodeServiceError, IndistinctTimesError) as error:
            failed = "the decodes that were to be timed failed: " if isinstance(error, DecodeServiceError) else ""
            self.problem = f"{failed}{error}"
            logger.warning("%s predicts no times, and plans by fixed rules: %s", spec.name, self.problem)
        else:
            self.problem = ""
            logger.info("calibrated %s: %s", spec.name, self._constants.public())

    async def _enlarged(self, small: _Repeated, scale: int, most: int, within_s: float, growing_s: float) -> _Repeated:
        """A decode of ``scale`` times the sides of ``small``, or of up to ``most`` times where that takes hardly longer.

        On a GPU a frame of many times the pixels takes as long as a small one while kernels are launched more slowly than
        they run, and tells of arithmetic only once it is larger.

        Args:
            within_s: for one size, about.
            growing_s: for all sizes beyond ``scale``.
        """
        large = small.enlarged(scale)
        await _in_turn([small, large], within_s)
        while not told_apart(small.seconds, large.seconds) and scale * 2 <= most:
            # Of four times the pixels, all of them arithmetic; twice.
            growing_s -= 8 * large.seconds
            if growing_s < 0:
                break
            scale *= 2
            larger = small.enlarged(scale)
            try:
                await _in_turn([small, larger], within_s)
            except (InvalidRequestError, OutOfMemoryError) as error:
                logger.info("latents %s are not timed: %s", list(larger.shape), error)
                break
            large = larger
        return large

    def settle(self) -> None:
        """Take what is known now for the usual."""
        for known in self._modes.values():
            known.at_start = known.correction

    def observe(self, spec: ModelSpec, run: Run, *, pixel_bytes: int = 1) -> None:
        """Learn from a decode, unless it was not predicted, or took the time of compiling too."""
        predicted_ms, actual_ms = run.plan.predicted_ms, run.timings_ms["decode"]
        done = amount_of(spec, run.plan, pixel_bytes=pixel_bytes)
        if self._constants is None or predicted_ms is None or done is None or min(predicted_ms, actual_ms) <= 0:
            return
        if any(part.measured for part in run.parts):
            return
        mode = self._modes.setdefault(run.plan.mode, _Mode())
        mode.count += 1
        mode.times_ms.append((predicted_ms, actual_ms))
        # Of the constants, not of the prediction: many plans may have been made with a factor that is old by now.
        ratio = actual_ms / (self._constants.seconds(done, run.plan.mode) * 1e3)
        ratio = min(max(ratio, 1 / LARGEST_RATIO), LARGEST_RATIO)
        weight = max(WEIGHT, 1 / (mode.count + 1))
        mode.correction += weight * (math.log(ratio) - mode.correction)
        for other in self._modes.values():
            if other is not mode:
                other.correction += FORGETTING * (other.at_start - other.correction)

    def describe(self) -> dict[str, Any]:
        """As ``/v1/models`` shows it: ``calibration`` and ``predictions``."""
        calibration = self.calibration
        shown: dict[str, Any] = {"calibrated": calibration is not None, "reason": self.problem}
        if calibration is not None and self._constants is not None:
            shown.update(calibration.public())
            shown["decodes"] = [
                {
                    "mode": timed.mode,
                    "latent_shape": list(timed.latent_shape),
                    "ms": round(timed.seconds * 1e3, 2),
                    "fitted_ms": round(self._constants.seconds(timed.amount, timed.mode) * 1e3, 2),
                }
                for timed in self._decodes
            ]
        return {
            "calibration": shown,
            "predictions": {name: mode.public() for name, mode in sorted(self._modes.items()) if mode.count},
        }


def sizes(spec: ModelSpec, ranks: int, chunk: int = 1) -> tuple[tuple[int, ...], int]:
    """Latents (1,C,H,W) or (1,C,T,H,W) of a small decode that every mode can carry out, and how far it may be enlarged.

    Clips have latent frames for one pass after the first, where the model takes so many: passes as requests have them, since
    kernels may take longer for a single frame than for two.
    """
    times: tuple[int, ...] = ()
    if spec.frame_rule is not None:
        times = (next(t for t in (*range(1 + min(chunk, _LONGEST_PASS), 64), 1) if spec.frame_rule.problem(t) is None),)
    fixed = getattr(spec.tiles, "size_px", 0) // spec.spatial_ratio if spec.tile_only else spec.fixed_cells
    if fixed:
        return (1, spec.latent_channels, *times, fixed, fixed), 1
    rows = max(spec.min_cells, ranks * spec.min_band_cells, 4)
    return (1, spec.latent_channels, *times, rows, 2 * rows), _LARGEST_SCALE


def _percentile(values: list[float], percent: int) -> float:
    """The nearest-rank percentile."""
    return sorted(values)[math.ceil(percent * len(values) / 100) - 1]
