"""Timing several things in turn, and the statistics of what came out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one thing took each time.

    Attributes:
        seconds: every measurement, in the order in which they were made.
    """

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ValueError("a timing needs at least one measurement")

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """``median_s``, ``best_s`` and every measurement, as reports hold them."""
        return {"median_s": self.median, "best_s": self.best, "seconds": list(self.seconds)}


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of ``values`` that at least ``percent`` % of them do not exceed (nearest rank).

    Raises:
        ValueError: without values, or if ``percent`` is not in (0, 100].
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    if not 0 < percent <= 100:
        raise ValueError(f"a percentile lies above 0 and at most at 100, got {percent}")
    ordered = sorted(values)
    # Rounded up in integers: 0.07 * 100 is a little more than 7.
    rank = -(-round(percent * 1000) * len(ordered) // 100_000)
    return ordered[rank - 1]


def interleave(
    contenders: Mapping[str, Callable[[], Any]],
    repeats: int,
    *,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time ``contenders`` in turn: A, B, C, A, B, C, ...

    Warming up is the caller's. A contender's result is dropped within its own time: giving memory back is part of it.

    Args:
        repeats: rounds.
        synchronize: waits for the device; called before and after each measurement.

    Raises:
        ValueError: if ``repeats`` is less than 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, contender in contenders.items():
            synchronize()
            begun = clock()
            contender()
            synchronize()
            seconds[name].append(clock() - begun)
    return {name: Timing(tuple(measured)) for name, measured in seconds.items()}


def synchronizer(device: torch.device) -> Callable[[], None]:
    """What waits until ``device`` has done its work."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


class Matmul:
    """A square matrix product: the arithmetic that the machine can do at its best, in this dtype and with these threads.

    Args:
        size: rows and columns; 2048 fills the caches of a CPU core, 8192 a GPU.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, size: int | None = None) -> None:
        self.size = size or (8192 if device.type == "cuda" else 2048)
        generator = torch.Generator().manual_seed(0)
        shape = (self.size, self.size)
        self._left, self._right = (
            torch.randn(shape, generator=generator).to(device=device, dtype=dtype) for _ in range(2)
        )

    @property
    def flops(self) -> int:
        """Of one call."""
        return 2 * self.size**3

    def __call__(self) -> None:
        torch.mm(self._left, self._right)
