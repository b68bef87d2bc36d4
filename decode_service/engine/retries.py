"""What a failure means for the request that met it: the task to try instead, or the error that ends it.

- a rank that raises, dies or stalls: the same once more, after the group is mended;
- a compiled call that fails: the same once more for each of them, eagerly by then;
- out of memory: shorter passes (the same pixels) where they have several frames, then a cheaper plan;
- NaN out of finite latents: once in float32.
"""

from __future__ import annotations

import dataclasses
import logging

from decode_service.engine.plans import Plans, pixel_bytes
from decode_service.engine.protocol import RankError, RankTask
from decode_service.errors import DecodeServiceError, GroupFailedError, NonFiniteOutputError, OutOfMemoryError
from decode_service.planning.plan import DecodePlan, PixelFormat

logger = logging.getLogger("decode_service.engine")


class Retries:
    """The attempts of one request: one retry for each kind of failure that a retry can help.

    Args:
        plans: makes cheaper plans.
        may_change_plan: whether the caller allows another mode.
    """

    def __init__(self, plans: Plans, *, may_change_plan: bool) -> None:
        self._plans = plans
        self._may_change_plan = may_change_plan
        self._answered: set[str] = set()

    @property
    def any(self) -> bool:
        """Whether there was one already."""
        return bool(self._answered)

    def after(self, error: RankError, task: RankTask) -> RankTask:
        """The task for another try after ``error``, once the group is sound.

        Raises:
            OutOfMemoryError: if no plan needs less memory, or the caller does not allow another, or it was tried already.
            GroupFailedError: if it failed so before.
        """
        if error.kind == "out_of_memory":
            return self._with_cheaper_plan(task, error)
        # A failed compilation does not count as the one retry of a broken group: no bucket can fail twice.
        answer = f"compile {error.bucket}" if error.kind == "compile" else "group"
        if answer in self._answered:
            raise GroupFailedError(f"the decode failed on its retry as well: {error}")
        self._answered.add(answer)
        logger.warning("decoding request %s again after: %s", task.request_id or "-", error)
        return task

    def in_float32(self, task: RankTask) -> RankTask:
        """The task for another try after NaN or Inf in the pixels.

        Raises:
            NonFiniteOutputError: if float32 was in use already.
        """
        if self._plans.dtype == "float32" or "float32" in self._answered:
            raise NonFiniteOutputError(
                "finite latents decoded to NaN or Inf in float32; are they meant for this model?"
            )
        self._answered.add("float32")
        logger.warning("NaN or Inf in the pixels of request %s: decoding it in float32", task.request_id or "-")
        why = f"decoded again, because {self._plans.dtype} gave NaN or Inf"
        plan = self._plans.in_float32(task.plan, why, task.pixels)
        return dataclasses.replace(task, plan=plan, precision="float32")

    def replanned(self, task: RankTask, plan: DecodePlan) -> RankTask:
        """``task`` with another plan, which is for the dtype that it is decoded in: after NaN that is not the model's."""
        if task.precision is not None:
            plan = self._plans.in_float32(plan, task.plan.dtype_reason, task.pixels)
        return dataclasses.replace(task, plan=plan)

    def _with_cheaper_plan(self, task: RankTask, error: RankError) -> RankTask:
        """The task with a plan that needs less memory on each rank."""
        plan = task.plan
        shorter = None if self._answered & {"passes", "memory"} else self._with_shorter_passes(plan, task.pixels)
        cheaper = shorter
        if shorter is None and self._may_change_plan and "memory" not in self._answered:
            cheaper = self._cheaper_plan(plan, task.pixels)
        if cheaper is None:
            advice = "items or frames, a smaller frame, or allow tile mode (strict: false)"
            if self._plans.spec.tiles is None:
                advice = "items or a smaller frame, or use ranks with more memory"
            raise OutOfMemoryError(
                f"decoding {list(plan.latent_shape)} in {plan.mode} mode does not fit the memory of a rank: send fewer "
                + advice,
                param="latents.shape",
            )
        self._answered.add("memory" if shorter is None else "passes")
        logger.warning(
            "request %s ran out of memory in %s mode (%s): decoding it in %s mode, %d latent frames a pass",
            task.request_id or "-",
            plan.mode,
            error.message,
            cheaper.mode,
            cheaper.chunk,
        )
        return self.replanned(task, cheaper)

    def _with_shorter_passes(self, plan: DecodePlan, pixels: PixelFormat) -> DecodePlan | None:
        """The same plan with one latent frame a pass, which gives the same pixels; None where no pass has more."""
        later = plan.latent_shape[2] - 1 if len(plan.latent_shape) == 5 else 0
        if min(plan.chunk, later) <= 1:
            return None
        made = self._one_frame_a_pass(plan, plan.mode, pixels)
        if made is None:
            return None
        reason = f"{plan.reason}; chunk shortened from {plan.chunk} to 1 latent frames, because memory ran out"
        return dataclasses.replace(made, fallback=plan.fallback, reason=reason)

    def _cheaper_plan(self, plan: DecodePlan, pixels: PixelFormat) -> DecodePlan | None:
        longest_first = ("spatial_shard_height", "spatial_shard_width")
        if plan.latent_shape[-1] >= plan.latent_shape[-2]:
            longest_first = longest_first[::-1]
        modes = {"direct": (*longest_first, "tile"), "batch": (*longest_first, "tile"), "tile": ()}.get(
            plan.mode, ("tile",)
        )
        for mode in modes:
            made = self._one_frame_a_pass(plan, mode, pixels)
            if made is not None:
                return dataclasses.replace(made, fallback=f"{plan.mode} ran out of memory", reason="needs less memory")
        return None

    def _one_frame_a_pass(self, plan: DecodePlan, mode: str, pixels: PixelFormat) -> DecodePlan | None:
        """What ``plan`` is for, in ``mode``; None where that cannot run."""
        try:
            return self._plans.make(
                plan.latent_shape,
                mode=mode,
                strict=True,
                collect=plan.collect,
                chunk=1,
                pixel_bytes=pixel_bytes(pixels),
            )
        except DecodeServiceError:
            return None
