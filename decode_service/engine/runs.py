"""What a run of a plan leaves behind: its parts as one picture, and how two pictures compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from decode_service.engine.protocol import DecodeOutcome, RankPixels
from decode_service.errors import GroupFailedError
from decode_service.planning.plan import DecodePlan

SELF_TEST_TOLERANCE = {"float32": (1e-4, 1e-4), "bfloat16": (0.1, 0.05), "float16": (0.1, 0.05)}
"""Largest accepted difference between a sharded and an undivided decode, by the dtype of the arithmetic: the maximum
difference relative to the largest value, and the rms difference relative to the rms.

In float32 the two differ by rounding only (below 1e-5). In half precision each differs from the exact answer by about
2 % rms, while a wrong halo, mask or statistic is off by tens of per cent in the rows that it touches.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One successful run of one plan."""

    plan: DecodePlan
    parts: list[RankPixels]
    timings_ms: dict[str, float]

    @property
    def finite(self) -> bool:
        return all(part.finite for part in self.parts)

    @property
    def compiled(self) -> bool:
        """Whether every call of the decoder ran compiled."""
        told = [part.compiled for part in self.parts if part.compiled is not None]
        return bool(told) and all(told)


def outcome_of(run: Run, dtype: str, timings_ms: Mapping[str, float]) -> DecodeOutcome:
    """What the ranks handed over, as one picture in parts."""
    plan = run.plan
    parts = [part.array for part in run.parts if part.array is not None and part.array.size]
    if not parts:
        raise GroupFailedError("no rank handed over any pixels")
    ndim = parts[0].ndim
    # uint8 is channels last, floats are channels first.
    height = ndim - 3 if dtype == "uint8" else ndim - 2
    part_axis = {"batch": 0, "height": height, "width": height + 1}[plan.axis] if plan.axis and len(parts) > 1 else 0
    shape = list(parts[0].shape)
    shape[part_axis] = sum(part.shape[part_axis] for part in parts)
    expected = (plan.latent_shape[0], plan.output_height, plan.output_width)
    if (shape[0], shape[height], shape[height + 1]) != expected:
        raise GroupFailedError(f"the ranks handed over a picture of shape {shape}, but the plan promised {expected}")
    digests = tuple(part.digest for part in run.parts if part.digest)
    if len(set(digests)) > 1:
        raise GroupFailedError(f"after the broadcast the ranks hold different pictures: digests {', '.join(digests)}")
    return DecodeOutcome(plan, dtype, tuple(shape), part_axis, parts, timings_ms, digests, run.compiled)


def difference_between(sharded: np.ndarray, reference: np.ndarray, dtype: str) -> str | None:
    """Why ``sharded`` is not the same picture as ``reference`` at the precision of ``dtype``, or None if it is."""
    if sharded.shape != reference.shape:
        return f"its shape is {sharded.shape} instead of {reference.shape}"
    most, rms_most = SELF_TEST_TOLERANCE[dtype]
    error = sharded.astype(np.float64) - reference
    worst = float(np.abs(error).max()) / max(1e-6, float(np.abs(reference).max()))
    rms = float(np.sqrt(np.mean(error**2))) / max(1e-6, float(np.sqrt(np.mean(np.square(reference, dtype=np.float64)))))
    if worst <= most and rms <= rms_most:
        return None
    return f"differs by {worst:.2e} of the largest value (allowed {most:g}) and {rms:.2e} rms (allowed {rms_most:g})"
