"""Which calls of a decoder run compiled: measured by the ranks, decided once for all of them.

A *bucket* is one kind of call: the shapes, strides and dtypes of all tensors that go in (latents and whatever the passes before
have left) and all other arguments. One decode has a few of them: a video's first pass, its second, the later ones, and the
last where fewer frames are left; tiles at the edges of the frame.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

#: A compiled bucket must be at least this much faster than the eager one to be kept: less is within what measuring is worth.
MIN_SPEEDUP = 1.02

#: Decodes in which a warm-up shape may still meet calls that nobody has measured. Two are the rule; more where what compiled
#: passes leave to the next ones lies otherwise in memory, which makes another bucket of their calls.
MEASURING_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class BucketMeasurement:
    """What one rank found out about one bucket.

    Attributes:
        key: the bucket; the same on every rank.
        shape, dtype: of the first tensor that goes in, for people.
        eager_ms, compiled_ms: median time of one call; None where it was not compiled.
        compile_s: seconds that compiling took, with what the disk cache spared.
        problem: why it must not run compiled whatever the times are; empty if nothing is wrong.
        axis, bands: of a call that all ranks make together, each on its band of a frame: the axis that is divided, and every
            rank's latent cells of it. Empty otherwise.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    eager_ms: float | None = None
    compiled_ms: float | None = None
    compile_s: float | None = None
    problem: str = ""
    axis: str = ""
    bands: tuple[int, ...] = ()

    @property
    def speedup(self) -> float | None:
        """Eager over compiled time."""
        return self.eager_ms / self.compiled_ms if self.eager_ms and self.compiled_ms else None

    @property
    def worthwhile(self) -> bool:
        """Whether it is enough faster on this rank."""
        return not self.problem and (self.speedup or 0.0) >= MIN_SPEEDUP


class CompiledShapes:
    """What all ranks measured, and the decision that follows from it: a bucket runs compiled on every rank or on none.

    A bucket is kept where no rank had a problem with it and it was faster on each rank that measured it: ranks wait for the
    slowest. A rank that never met a bucket has not compiled it and runs it eagerly. Calls on bands are made by all ranks
    together, so all must have measured them.
    """

    def __init__(self) -> None:
        self._measured: dict[str, dict[int, BucketMeasurement]] = {}
        self._failed: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._measured)

    def add(self, rank: int, measurements: Iterable[BucketMeasurement]) -> None:
        for measurement in measurements:
            self._measured.setdefault(measurement.key, {})[rank] = measurement

    def fail(self, key: str, reason: str) -> None:
        """A compiled call of ``key`` failed: never again."""
        self._failed.setdefault(key, reason)

    def forget(self) -> None:
        """The ranks are new processes, which have compiled nothing yet. What failed before stays failed."""
        self._measured.clear()

    def kept(self) -> frozenset[str]:
        """The buckets that run compiled."""
        return frozenset(key for key in self._measured if not self._objection(key))

    def _slowest(self, key: str) -> BucketMeasurement:
        return min(self._measured[key].values(), key=lambda measurement: measurement.speedup or 0.0)

    def _objection(self, key: str) -> str:
        """Why ``key`` runs eagerly, or an empty string."""
        if key in self._failed:
            return self._failed[key]
        for rank, measurement in sorted(self._measured[key].items()):
            if measurement.problem:
                return f"rank {rank}: {measurement.problem}"
        slowest = self._slowest(key)
        missing = set(range(len(slowest.bands))) - set(self._measured[key])
        if missing:
            return f"rank {', '.join(map(str, sorted(missing)))} has not measured it"
        if not slowest.worthwhile:
            return f"not faster: {slowest.speedup or 0.0:.2f} of the eager speed; it takes {MIN_SPEEDUP:g}"
        return ""

    def public(self) -> list[dict[str, Any]]:
        """Every bucket as ``/v1/models/{name}`` shows it."""
        shown = []
        for key in self._measured:
            slowest, objection = self._slowest(key), self._objection(key)
            shown.append(
                {
                    "key": key,
                    "input": list(slowest.shape),
                    "dtype": slowest.dtype,
                    "axis": slowest.axis or None,
                    "bands": list(slowest.bands) or None,
                    "compiled": not objection,
                    "reason": objection or None,
                    "speedup": _rounded(slowest.speedup),
                    "eager_ms": _rounded(slowest.eager_ms),
                    "compiled_ms": _rounded(slowest.compiled_ms),
                    "compile_s": _rounded(slowest.compile_s),
                    "ranks": sorted(self._measured[key]),
                }
            )
        return shown


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
