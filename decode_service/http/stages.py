"""Where the time of one request went, by stage, in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Stages:
    """A stopwatch that is created when the request's head is there."""

    def __init__(self) -> None:
        self._start_s = self._last_s = time.perf_counter()
        self._timings_ms: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """What has passed since the last lap was ``stage``."""
        now_s = time.perf_counter()
        self._timings_ms[stage] = (now_s - self._last_s) * 1000
        self._last_s = now_s

    def add(self, timings_ms: Mapping[str, float]) -> None:
        """Stages that somebody else measured."""
        self._timings_ms.update(timings_ms)

    def restart(self) -> None:
        """What has passed since the last lap belongs to stages that somebody else measured."""
        self._last_s = time.perf_counter()

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s

    def total(self) -> dict[str, float]:
        """All stages so far, and ``total``: from the request's head until now."""
        shown = {**self._timings_ms, "total": self.elapsed_s() * 1000}
        return {stage: round(milliseconds, 3) for stage, milliseconds in shown.items()}
