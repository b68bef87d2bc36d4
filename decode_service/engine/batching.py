"""Several requests in one pass of the decoder, where that is faster: what was measured, and what follows from it.

Whether a pass of several items takes less time than as many passes of one depends on model, machine and frame: small frames
leave a GPU idle between kernels, and large ones do not. So it is timed at the start on the ranks that serve, for growing
frames, and the pixels are compared with those of each item alone. Frames beyond the largest that gained are decoded one by
one, and so is everything while calls of the decoder run compiled, which are compiled for single items.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

import numpy as np
from decode_client.wire import WireTensor

from decode_service.config import BatchConfig
from decode_service.engine.plans import Plans, pixel_bytes
from decode_service.engine.predictions import sizes
from decode_service.engine.protocol import RankError, RankPixels, RankTask
from decode_service.engine.runs import Run
from decode_service.errors import DecodeServiceError
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.planner import together

logger = logging.getLogger("decode_service.engine")

#: A pass of several must take so much less time per item.
MARGIN = 0.1

#: Largest difference between an item's pixels in a pass of several and alone, of pixels near 1: absolute in float32; in half
#: precision, where both are off by roundings, relative to the rms of the pixels and as rms.
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.03, "float16": 0.01}

_REPEATS = 3
_GROWTH = 2
_FLOAT = PixelFormat("float32", "model")

Decode = Callable[[RankTask, WireTensor], Awaitable[Run]]


@dataclasses.dataclass(frozen=True)
class Measured:
    """One comparison of a pass of ``items`` with as many passes of one; times are of one item."""

    latent_shape: tuple[int, ...]
    items: int
    alone_ms: float
    together_ms: float
    difference: float

    def public(self) -> dict[str, Any]:
        """As ``/v1/models`` shows it."""
        return {
            "latent_shape": list(self.latent_shape),
            "items": self.items,
            "ms_per_item_alone": round(self.alone_ms, 2),
            "ms_per_item_together": round(self.together_ms, 2),
            "difference": float(f"{self.difference:.2g}"),
        }


class Batching:
    """What one pass may take on one group.

    Args:
        settings: what the operator allows.
        plans: the model, and how its requests are planned.

    Attributes:
        max_pixels: largest picture (frames x height x width of one request) for which passes of several were faster.
        reason: why there is none, for people; empty where there is.
    """

    def __init__(self, settings: BatchConfig, plans: Plans) -> None:
        self._settings = settings
        self._plans = plans
        self._measured: list[Measured] = []
        self._passes = self._requests = 0
        self.max_pixels = 0
        self.reason = "not measured yet" if settings.max_items > 1 else "switched off (policy.batch.max_items)"

    @property
    def active(self) -> bool:
        """Whether any pass of several requests gains."""
        return self.max_pixels > 0

    @property
    def window_s(self) -> float:
        """How long a request waits for others although a rank is idle."""
        return self._settings.window_ms / 1e3

    async def measure(self, decode: Decode, *, seconds: float, max_pixels: int) -> None:
        """Compare passes of two and of ``max_items`` with single ones for growing frames, while they gain.

        Where the operator allows passes of several this is done whatever ``calibration.enabled`` says, which is about
        predicted times: without it there would be no such passes.

        Args:
            decode: carries out a task of the engine's own.
            seconds: how long it may take, about.
            max_pixels: largest picture that may be decoded.
        """
        if self._settings.max_items < 2:
            return
        spec, mode = self._plans.spec, self._plans.policy.mode
        if spec.tile_only:
            self.reason = "the model decodes by its own tiles only"
            return
        if mode not in ("auto", "direct"):
            # Requests that ask for another mode themselves are decoded alone.
            self.reason = f"policy.mode is {mode}, and passes of several requests are direct"
            logger.warning("%s: policy.batch does nothing: %s", spec.name, self.reason)
            return
        begun = time.monotonic()
        chunk = self._plans.policy.chunk or 1
        shape, most = sizes(spec, self._plans.group_size, chunk)
        self.reason, scale = "", 1
        try:
            while scale <= most and math.prod(spec.output_extents(shape)) * self._settings.max_items <= max_pixels:
                for items in dict.fromkeys((self._settings.max_items, 2)):
                    problem = await self._compare(decode, shape, items, chunk)
                    if problem:
                        break
                if problem:
                    self.reason = "" if self.max_pixels else problem
                    break
                self.max_pixels = math.prod(spec.output_extents(shape))
                spent = time.monotonic() - begun
                # The next frame has so many times the pixels.
                if spent * _GROWTH**2 > seconds:
                    break
                scale *= _GROWTH
                shape = (*shape[:-2], shape[-2] * _GROWTH, shape[-1] * _GROWTH)
        except DecodeServiceError as error:
            self.reason = "" if self.max_pixels else f"the decodes that were to be timed failed: {error}"
        if not self.max_pixels and not self.reason:
            self.reason = "no frame is small enough to be measured (limits.max_output_pixels)"
        logger.info("%s: passes of several requests up to %d pixels. %s", spec.name, self.max_pixels, self.reason)

    async def _compare(self, decode: Decode, shape: tuple[int, ...], items: int, chunk: int) -> str | None:
        """Time ``items`` of ``shape`` alone and together, in turn; why they had better be decoded alone, or None."""
        plans = self._plans
        nbytes = pixel_bytes(_FLOAT)
        plan = plans.make(shape, mode="direct", strict=True, collect="shards", chunk=chunk, pixel_bytes=nbytes)
        joined = self._plan(plan, items, _FLOAT)
        if joined is None:
            return f"{items} of {list(shape)} do not fit one pass"
        latents = np.random.default_rng(0).standard_normal((items, *shape[1:]), np.float32)
        singles = [_wire(latents[item : item + 1], "float32") for item in range(items)]
        alone_ms, together_ms = math.inf, math.inf
        for _ in range(_REPEATS):
            runs = [
                await decode(RankTask(plan, pixels=_FLOAT, eager=True, request_id="calibration alone"), single)
                for single in singles
            ]
            task = RankTask(joined, pixels=_FLOAT, eager=True, request_id="calibration together")
            whole = await decode(task, _wire(latents, "float32"))
            alone_ms = min(alone_ms, sum(run.timings_ms["decode"] for run in runs) / items)
            together_ms = min(together_ms, whole.timings_ms["decode"] / items)
        expected = np.concatenate([run.parts[0].array for run in runs if run.parts[0].array is not None])
        got = whole.parts[0].array
        assert got is not None
        difference = _difference(got, expected, plans.dtype)
        self._measured.append(Measured(shape, items, alone_ms, together_ms, difference))
        if difference > TOLERANCE[plans.dtype]:
            return f"passes of {items} items differ from single ones by {difference:.1e} at latents {list(shape)}"
        if together_ms > (1 - MARGIN) * alone_ms:
            return (
                f"passes of {items} items were not faster: {together_ms:.2f} ms an item, alone {alone_ms:.2f} ms, at "
                f"latents {list(shape)}"
            )
        return None

    def most(self, plan: DecodePlan, pixels: PixelFormat) -> int:
        """How many requests that are planned as ``plan`` one pass may take; 1 where each is decoded alone."""
        if plan.output_pixels > self.max_pixels or (plan.memory is None and self._plans.policy.memory_budget_bytes):
            return 1
        fits = (n for n in range(self._settings.max_items, 1, -1) if self._plan(plan, n, pixels) is not None)
        return next(fits, 1)

    def _plan(self, plan: DecodePlan, items: int, pixels: PixelFormat) -> DecodePlan | None:
        plans = self._plans
        return together(plans.spec, plan, items, policy=plans.policy, pixel_bytes=pixel_bytes(pixels))

    def join(self, tasks: Sequence[RankTask], latents: Sequence[WireTensor]) -> tuple[RankTask, WireTensor] | None:
        """One task for all, which have equal ``key_of``, and its latents; None where one pass cannot take them."""
        first = tasks[0]
        if first.plan.output_pixels > self.max_pixels:
            # A pass ran out of memory since these were queued.
            return None
        plan = self._plan(first.plan, len(tasks), first.pixels)
        if plan is None:
            return None
        arranged = [
            each.carrier().reshape(task.plan.latent_shape)
            if task.arrangement is None
            else task.arrangement.apply(each.carrier())
            for task, each in zip(tasks, latents, strict=True)
        ]
        seeds = tuple(task.conditioning.seed for task in tasks if task.conditioning is not None)
        ids = " ".join(task.request_id or "-" for task in tasks)
        task = dataclasses.replace(first, plan=plan, arrangement=None, seeds=seeds, request_id=ids)
        return task, _wire(np.concatenate(arranged), latents[0].dtype)

    def share(
        self, task: RankTask, joined: RankTask, part: RankPixels, timings_ms: Sequence[dict[str, float]]
    ) -> list[Run]:
        """What each of the requests gets of a pass of ``joined``; ``task`` is any of them, and times are each one's."""
        self._passes += 1
        self._requests += joined.plan.together
        plan = dataclasses.replace(joined.plan, latent_shape=task.plan.latent_shape)
        assert part.array is not None
        return [
            Run(
                plan,
                [dataclasses.replace(part, array=part.array[item : item + 1], finite=finite, finite_items=())],
                times,
            )
            for item, (finite, times) in enumerate(zip(part.finite_items, timings_ms, strict=True))
        ]

    def failed(self, plan: DecodePlan, error: RankError) -> None:
        """A pass failed. Where memory ran out, pictures of this size are decoded alone from now on."""
        pixels = plan.output_pixels // plan.together
        if error.kind == "out_of_memory" and pixels <= self.max_pixels:
            self.max_pixels = pixels - 1
            self.reason = f"a pass of {plan.together} items of {pixels} pixels ran out of memory"
            logger.warning("%s: larger ones are decoded alone from now on", self.reason)

    def describe(self, *, compiled: bool) -> dict[str, Any]:
        """As ``/v1/models`` shows it; ``compiled`` is whether calls run compiled, which they do for single items."""
        why_not = "calls of the decoder run compiled, for single items" if self.active and compiled else self.reason
        return {
            "active": self.active and not compiled,
            "reason": why_not or None,
            "max_items": self._settings.max_items,
            "max_pixels": self.max_pixels,
            "measured": [each.public() for each in self._measured],
            "passes": self._passes,
            "requests": self._requests,
        }


def key_of(task: RankTask, latents: WireTensor) -> Hashable:
    """Equal for requests that one pass can take: all but latents and seeds is the same."""
    conditioning = task.conditioning
    given = None if conditioning is None else (conditioning.timestep, conditioning.noise_scale)
    # Pixels are the same with other chunks, but every reply shows the plan that was asked for.
    wishes = (task.plan.chunk, task.plan.collect)
    how = (task.precision, task.eager, task.measure)
    return (task.plan.latent_shape, latents.dtype, task.denormalize, task.pixels, given, wishes, how)


def _wire(array: np.ndarray, dtype: str) -> WireTensor:
    return WireTensor(dtype, array.shape, np.ascontiguousarray(array).tobytes())


def _difference(got: np.ndarray, expected: np.ndarray, dtype: str) -> float:
    error = got.astype(np.float64) - expected
    if dtype == "float32":
        return float(np.abs(error).max())
    return float(np.sqrt(np.mean(error**2)) / max(1e-6, float(np.sqrt(np.mean(np.square(expected, dtype=np.float64))))))
