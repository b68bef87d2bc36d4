"""``DecodeEngine``: one model on one group of ranks, from a validated job to its pixels, whatever breaks on the way.

It validates, plans, queues, runs, and decides what a failure means:

- a compiled call that fails is switched off on all ranks for good, and the request is decoded eagerly;
- a rank that raises costs new communicators and one retry, a rank that dies or stalls new processes and one retry;
- out of memory costs one retry with shorter passes (the same pixels) where they have several frames, and one with a
  cheaper plan; NaN out of finite latents costs one in float32.

Groups that need new processes too often are given up, so that something above (Ray Serve) replaces the whole replica.

No Ray and no torch here: the group does the work, behind ``RankGroup``. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from decode_client.wire import WireTensor

from decode_service.config import ServiceConfig
from decode_service.engine.predictions import Predictions
from decode_service.engine.protocol import (
    DecodeJob,
    DecodeOutcome,
    RankError,
    RankGroup,
    RankTask,
    Readiness,
)
from decode_service.engine.runs import Run, difference_between, outcome_of
from decode_service.engine.scheduler import Gang, Scheduler
from decode_service.errors import (
    DeadlineExceededError,
    DecodeServiceError,
    GroupFailedError,
    InvalidRequestError,
    NonFiniteLatentsError,
    NonFiniteOutputError,
    NotReadyError,
    OutOfMemoryError,
    OutputTooLargeError,
)
from decode_service.planning.compiled_shapes import MEASURING_ROUNDS, CompiledShapes
from decode_service.planning.conditioning import conditioning_of
from decode_service.planning.geometry import describe_geometry
from decode_service.planning.layouts import Layout, arrange, layouts
from decode_service.planning.load import Load, full
from decode_service.planning.memory import BUDGET_SHARE
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.planner import Policy, make_plan, validate_denormalize, validate_latents
from decode_service.planning.spec import ModelSpec

logger = logging.getLogger("decode_service.engine")

REBUILD_WINDOW_S = 600.0

IDLE_PATIENCE_S = 30.0
"""How long new ranks wait for an idle moment before they warm up at the cost of those who wait."""

Replan = Callable[[Load], DecodePlan]

_NUMPY_DTYPES = {"uint8": np.uint8, "float16": np.float16, "bfloat16": np.uint16, "float32": np.float32}


class DecodeEngine:
    """A ``DecodeService`` over a ``RankGroup``.

    Args:
        group: the ranks; the engine starts and closes them.
        config: the settings of the application.
    """

    def __init__(self, group: RankGroup, config: ServiceConfig) -> None:
        self._group = group
        self._config = config
        self._scheduler = Scheduler(group.size, max_jobs=config.limits.max_queued)
        self._policy = Policy(
            mode=config.policy.mode,
            direct_max_pixels=config.policy.direct_max_pixels,
            busy_direct_max_pixels=config.policy.busy_direct_max_pixels,
            strict=config.policy.strict,
            chunk=config.policy.chunk,
            collect=config.policy.collect,
            memory_budget_bytes=config.policy.memory_budget_bytes,
        )
        self._spec: ModelSpec | None = None
        self._description: dict[str, Any] = {}
        self._state = "starting"
        self._warnings: list[str] = []
        self._self_test: dict[str, str] = {}
        self._warm_shapes: list[list[int]] = []
        self._predictions = Predictions()
        self._compile_off: str | None = None
        self._compiled = CompiledShapes()
        self._in_use: frozenset[str] = frozenset()
        self._cold = False
        self._warming_again: asyncio.Task[None] | None = None
        self._unrecovered: list[tuple[RankError, bool]] = []
        self._recovery: asyncio.Future[None] | None = None
        self._rebuilds: deque[float] = deque()

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the group, test that sharding is exact on this machine, and warm up. Ready when it returns.

        Raises:
            ConfigError: if the configuration cannot work.
            RankError, GroupFailedError: if the ranks cannot be started.
        """
        begun = time.monotonic()
        info = await self._group.start()
        self._spec = info.spec
        self._description = dict(info.description)
        self._warn_of_untested_model()
        device_bytes = self._description.get("device_memory_bytes")
        if self._policy.memory_budget_bytes is None and device_bytes:
            self._policy = dataclasses.replace(self._policy, memory_budget_bytes=int(device_bytes * BUDGET_SHARE))
        self._warn_of_useless_warmup()
        loaded = time.monotonic()
        self._state = "self_test"
        await self._test_exact_axes()
        self._refuse_if_given_up()
        await self._calibrate()
        self._refuse_if_given_up()
        tested = time.monotonic()
        self._state = "warming"
        await self._warm_up()
        self._refuse_if_given_up()
        self._predictions.settle()
        self._state = "ready"
        if self._cold:
            self._start_warming_again()
        logger.info(
            "%s is ready on %d rank(s): start %.1f s, self-test and calibration %.1f s, warm-up %.1f s",
            self.spec.name,
            self._group.size,
            loaded - begun,
            tested - loaded,
            time.monotonic() - tested,
        )

    async def close(self) -> None:
        """End the ranks. Jobs that still wait get ``NotReadyError``. Callable twice."""
        if self._warming_again is not None:
            self._warming_again.cancel()
        if self._state != "closed":
            self._state = "closed"
            await self._scheduler.drain()
        await self._group.close()

    def healthy(self) -> bool:
        """False once the group is given up: only a new replica can help then."""
        return self._state not in ("failed", "closed")

    # ---- DecodeService ---------------------------------------------------------------------------------------------

    @property
    def spec(self) -> ModelSpec:
        if self._spec is None:
            raise NotReadyError("the model is still loading")
        return self._spec

    @property
    def max_body_bytes(self) -> int:
        return self._config.limits.max_body_bytes

    def readiness(self) -> Readiness:
        return Readiness(self._state == "ready", self._state, tuple(self._warnings))

    def describe(self) -> dict[str, Any]:
        """Everything that ``GET /v1/models/{name}`` shows."""
        spec, config = self.spec, self._config
        return {
            **self._description,
            "name": spec.name,
            "dtype_configured": config.model.dtype,
            "latent_ndims": list(spec.latent_ndims()),
            "layouts": ["auto", *layouts(spec)],
            "default_timestep": spec.default_timestep,
            "exact_axes": list(spec.exact_axes),
            "no_exact_axes_reason": spec.no_exact_axes_reason,
            "tile_only": spec.tile_only,
            "no_tiles_reason": spec.no_tiles_reason,
            "tested": spec.tested,
            "modes": list(spec.modes(self._group.size)),
            **describe_geometry(spec, self._group.size),
            "memory_budget_bytes": self._policy.memory_budget_bytes,
            "group": {"ranks": self._group.size, "device": config.group.device},
            "policy": config.policy.model_dump(mode="json"),
            "limits": config.limits.model_dump(mode="json"),
            "compile": self._describe_compile(),
            "self_test": dict(self._self_test),
            **self._predictions.describe(),
            "warm_shapes": [list(shape) for shape in self._warm_shapes],
            "state": self._state,
            "warnings": list(self._warnings),
            "queue": {
                "waiting": self._scheduler.waiting,
                "running": self._scheduler.running,
                "callers": self._scheduler.callers,
            },
        }

    def _may_compile(self) -> bool:
        return bool(self._description["compile"]["active"]) and self._compile_off is None

    def _describe_compile(self) -> dict[str, Any]:
        """Whether any call of the decoder runs compiled, why none does, and what was measured of each."""
        # The ranks know whether their decoder can be compiled at all; the engine, whether it has failed since.
        reason = self._compile_off or self._description["compile"]["reason"]
        if not reason and not self._in_use:
            reason = "no call of the decoder was faster compiled; shapes has what was measured"
            if not self._compiled:
                reason = "nothing has been compiled: only what decoding the shapes in warmup.shapes calls is"
            if self._cold:
                reason = "the ranks were started anew and are not warm yet"
        active = not reason and bool(self._in_use)
        return {"active": active, "reason": reason or None, "shapes": self._compiled.public()}

    def plan(
        self,
        latent_shape: tuple[int, ...],
        *,
        layout: Layout | None = None,
        mode: str = "auto",
        strict: bool | None = None,
        collect: str | None = None,
        chunk: int | None = None,
    ) -> DecodePlan:
        """Validate the shape against the model and the limits, and plan it for an idle group; see ``DecodeService``."""
        arranged = arrange(self.spec, latent_shape, layout or Layout()).latent_shape
        return self._plan(arranged, mode=mode, strict=strict, collect=collect, chunk=chunk)

    def _plan(
        self,
        latent_shape: tuple[int, ...],
        *,
        mode: str = "auto",
        strict: bool | None = None,
        collect: str | None = None,
        chunk: int | None = None,
        pixel_bytes: int = 1,
    ) -> DecodePlan:
        """``plan`` for latents as ``vae.decode`` takes them.

        ``pixel_bytes`` is the size of one value of the reply, for the memory that it takes.
        """
        spec = self.spec
        # Before planning: what a plan holds (every tile and its owner) grows with the picture.
        validate_latents(spec, latent_shape)
        frames, height, width = spec.output_extents(latent_shape)
        limit = self._config.limits.max_output_pixels
        pixels = latent_shape[0] * frames * height * width
        if pixels > limit:
            raise OutputTooLargeError(
                f"{latent_shape[0]} x {frames} frames of {height} x {width} are {pixels} pixels; the limit is {limit} "
                "(limits.max_output_pixels)",
                param="latents.shape",
            )
        return self._plan_beside(
            Load(),
            latent_shape=latent_shape,
            mode=mode,
            strict=strict,
            collect=collect,
            chunk=chunk,
            pixel_bytes=pixel_bytes,
        )

    def _plan_beside(self, load: Load, *, latent_shape: tuple[int, ...], **wishes: Any) -> DecodePlan:
        return make_plan(
            self.spec,
            latent_shape,
            group_size=self._group.size,
            policy=self._policy,
            load=load,
            calibration=self._predictions.calibration,
            **wishes,
        )

    def _replan(self, plan: DecodePlan, **wishes: Any) -> Replan | None:
        """How the request of ``plan`` is planned for the load at its start; None where no load makes a difference."""

        def replan(load: Load) -> DecodePlan:
            return self._plan_beside(load, latent_shape=plan.latent_shape, **wishes)

        if plan.axis is None or _needs_all_ranks(replan(full(self._group.size))):
            return None
        return replan

    async def decode(self, job: DecodeJob) -> DecodeOutcome:
        """Validate, plan, queue and decode; see ``DecodeService``."""
        begun = time.monotonic()
        self._refuse_unless_serving()
        if job.pixels.dtype not in _NUMPY_DTYPES:
            raise InvalidRequestError(
                f"pixels are one of {', '.join(_NUMPY_DTYPES)}, got {job.pixels.dtype!r}", param="output.dtype"
            )
        arrangement = arrange(self.spec, job.latents.shape, job.layout)
        wishes: dict[str, Any] = {
            "mode": job.mode,
            "strict": job.strict,
            "collect": job.collect,
            "chunk": job.chunk,
            "pixel_bytes": _pixel_bytes(job.pixels),
        }
        plan = self._plan(arrangement.latent_shape, **wishes)
        conditioning = conditioning_of(self.spec, job.timestep, job.noise_scale, job.seed)
        if job.denormalize:
            validate_denormalize(self.spec, arrangement.latent_shape)
        if not await asyncio.to_thread(job.latents.is_finite):
            raise NonFiniteLatentsError("the latents hold NaN or Inf", param="latents.data")
        wished_s = self._config.limits.default_deadline_s if job.deadline_s is None else job.deadline_s
        strict = self._policy.strict if job.strict is None else job.strict
        forced = (self._policy.mode if job.mode == "auto" else job.mode) != "auto"
        if plan.fallback:
            logger.warning("%s; decoding in %s mode, request %s", plan.fallback, plan.mode, job.request_id or "-")
        task = RankTask(
            plan,
            job.denormalize,
            job.pixels,
            request_id=job.request_id,
            arrangement=arrangement,
            conditioning=conditioning,
        )
        run = await self._run_to_the_end(
            task,
            job.latents,
            deadline=begun + wished_s,
            may_change_plan=not (strict and forced),
            caller=job.caller,
            replan=self._replan(plan, **wishes),
        )
        self._predictions.observe(self.spec, run, pixel_bytes=wishes["pixel_bytes"])
        predicted = {} if run.plan.predicted_ms is None else {"predicted": run.plan.predicted_ms}
        timings = {**run.timings_ms, **predicted, "total": (time.monotonic() - begun) * 1e3}
        outcome = outcome_of(run, job.pixels.dtype, timings)
        logger.info(
            "decoded %s to %s, %s on %d rank(s), %s, in %.0f ms (queue %.0f, decode %.0f), request %s",
            list(job.latents.shape),
            list(outcome.shape),
            run.plan.mode,
            run.plan.ranks,
            "compiled" if run.compiled else "eager",
            timings["total"],
            timings["queue"],
            timings["decode"],
            job.request_id or "-",
        )
        return outcome

    # ---- one request, whatever breaks ------------------------------------------------------------------------------

    async def _run_to_the_end(
        self,
        task: RankTask,
        latents: WireTensor,
        *,
        deadline: float | None = None,
        may_change_plan: bool = False,
        admitted: bool = False,
        caller: str = "",
        replan: Replan | None = None,
    ) -> Run:
        """Run ``task``, with one retry for each kind of failure that a retry can help.

        ``admitted`` is for the engine's own decodes, which no bound on requests may stop. ``replan`` makes the plan anew
        when the ranks are there.

        Raises:
            DecodeServiceError: if it can't be decoded.
        """
        answered: set[str] = set()

        def needs_all_ranks(load: Load) -> bool:
            nonlocal task
            if replan is not None:
                task = _replanned(task, replan(load))
            return _needs_all_ranks(task.plan)

        def decided() -> RankTask:
            return task

        while True:
            error: RankError | None = None
            try:
                run = await self._run_once(
                    decided,
                    latents,
                    gang=_needs_all_ranks(task.plan) if replan is None else needs_all_ranks,
                    caller=caller,
                    deadline=deadline,
                    admitted=admitted or bool(answered),
                )
            except RankError as raised:
                error = raised
            # Outside the except block, so that nothing of the failed attempt is held while the next one runs.
            if error is None:
                if run.finite:
                    return run
                task = self._in_float32(task, answered)
                del run
                continue
            await self._recovered(deadline)
            if error.kind == "out_of_memory":
                task = self._with_cheaper_plan(task, error, answered, may_change_plan)
                replan = None
                continue
            # A failed compilation does not count as the one retry of a broken group: no bucket can fail twice.
            answer = f"compile {error.bucket}" if error.kind == "compile" else "group"
            if answer in answered:
                raise GroupFailedError(f"the decode failed on its retry as well: {error}")
            answered.add(answer)
            logger.warning("decoding request %s again after: %s", task.request_id or "-", error)

    async def _run_once(
        self,
        decided: Callable[[], RankTask],
        latents: WireTensor,
        *,
        gang: Gang,
        caller: str,
        deadline: float | None,
        admitted: bool,
    ) -> Run:
        """Queue a run. ``decided`` is asked for the task once ``gang`` has been."""
        submitted = time.monotonic()

        async def work(ranks: Sequence[int]) -> Run:
            task = decided()
            if self._state == "closed":
                raise NotReadyError("the service is shutting down")
            if not self.healthy():
                raise GroupFailedError("the group was given up; the replica is being replaced")
            begun = time.monotonic()
            try:
                parts = await self._group.run(task, latents, ranks)
            except RankError as error:
                # Asked for here, while this job still holds its ranks, so that no other job starts in between.
                self._ask_for_recovery(error, _needs_all_ranks(task.plan))
                raise
            for rank, part in zip(ranks, parts, strict=True):
                self._compiled.add(rank, part.measured)
            put = max(part.timings_ms.get("put", 0.0) for part in parts)
            decode = max(part.timings_ms.get("decode", 0.0) for part in parts)
            wall = (time.monotonic() - begun) * 1e3
            timings = {
                "queue": (begun - submitted) * 1e3,
                "put": put,
                "decode": decode,
                "collect": max(0.0, wall - put - decode),
            }
            return Run(task.plan, parts, timings)

        pixels = decided().plan.output_pixels
        return await self._scheduler.run(
            work, gang=gang, caller=caller, pixels=pixels, deadline=deadline, admitted=admitted
        )

    def _in_float32(self, task: RankTask, answered: set[str]) -> RankTask:
        """The task for another try after NaN or Inf in the pixels.

        Raises:
            NonFiniteOutputError: if float32 was in use already.
        """
        if self._dtype_name() == "float32" or "float32" in answered:
            raise NonFiniteOutputError(
                "finite latents decoded to NaN or Inf in float32; are they meant for this model?"
            )
        answered.add("float32")
        logger.warning("NaN or Inf in the pixels of request %s: decoding it in float32", task.request_id or "-")
        why = f"decoded again, because {self._dtype_name()} gave NaN or Inf"
        # What was predicted is not for float32.
        plan = dataclasses.replace(task.plan, dtype="float32", dtype_reason=why, predicted_ms=None, alternatives=())
        return dataclasses.replace(task, plan=plan, precision="float32")

    def _dtype_name(self) -> str:
        """The dtype that the ranks decode in, which is another than configured where that cannot work."""
        return self.spec.dtype or self._config.torch_dtype_name()

    def _with_cheaper_plan(
        self, task: RankTask, error: RankError, answered: set[str], may_change_plan: bool
    ) -> RankTask:
        """The task with a plan that needs less memory on each rank.

        Raises:
            OutOfMemoryError: if there is none, or the caller does not allow another, or it was tried already.
        """
        plan = task.plan
        shorter = None if answered & {"passes", "memory"} else self._with_shorter_passes(plan, task.pixels)
        cheaper = shorter
        if shorter is None and may_change_plan and "memory" not in answered:
            cheaper = self._cheaper_plan(plan, task.pixels)
        if cheaper is None:
            advice = "items or frames, a smaller frame, or allow tile mode (strict: false)"
            if self.spec.tiles is None:
                advice = "items or a smaller frame, or use ranks with more memory"
            raise OutOfMemoryError(
                f"decoding {list(plan.latent_shape)} in {plan.mode} mode does not fit the memory of a rank: send fewer "
                + advice,
                param="latents.shape",
            )
        answered.add("memory" if shorter is None else "passes")
        logger.warning(
            "request %s ran out of memory in %s mode (%s): decoding it in %s mode, %d latent frames a pass",
            task.request_id or "-",
            plan.mode,
            error.message,
            cheaper.mode,
            cheaper.chunk,
        )
        return _replanned(task, cheaper)

    def _with_shorter_passes(self, plan: DecodePlan, pixels: PixelFormat) -> DecodePlan | None:
        """The same plan with one latent frame a pass, which gives the same pixels; None where no pass has more."""
        later = plan.latent_shape[2] - 1 if len(plan.latent_shape) == 5 else 0
        if min(plan.chunk, later) <= 1:
            return None
        try:
            made = self._plan(
                plan.latent_shape,
                mode=plan.mode,
                strict=True,
                collect=plan.collect,
                chunk=1,
                pixel_bytes=_pixel_bytes(pixels),
            )
        except DecodeServiceError:
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
            try:
                made = self._plan(
                    plan.latent_shape,
                    mode=mode,
                    strict=True,
                    collect=plan.collect,
                    chunk=1,
                    pixel_bytes=_pixel_bytes(pixels),
                )
            except DecodeServiceError:
                continue
            return dataclasses.replace(made, fallback=f"{plan.mode} ran out of memory", reason="needs less memory")
        return None

    # ---- recovery --------------------------------------------------------------------------------------------------

    def _ask_for_recovery(self, error: RankError, gang: bool) -> None:
        """Note what broke and take the next turn on all ranks to mend it, unless nothing has to be mended."""
        if not (gang or error.needs_new_processes or error.kind == "compile"):
            return
        self._unrecovered.append((error, gang))
        if self._recovery is None or self._recovery.done():
            if self._state == "ready":
                self._state = "rebuilding"
            self._recovery = self._scheduler.exclusive(self._recover)

    async def _recovered(self, deadline: float | None) -> None:
        """Wait for a recovery that is under way.

        Raises:
            DeadlineExceededError: if the deadline passes first.
            GroupFailedError: if the group was given up.
        """
        if self._recovery is not None and not self._recovery.done():
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            await asyncio.wait([self._recovery], timeout=timeout)
            if not self._recovery.done():
                raise DeadlineExceededError("the deadline passed while the group recovered", param="deadline_ms")
        if not self.healthy():
            raise GroupFailedError("the ranks could not be brought back; the replica is being replaced")

    async def _recover(self) -> None:
        """Mend everything that broke since the last time; runs alone on the group."""
        broken, self._unrecovered = self._unrecovered, []
        begun = time.monotonic()
        try:
            for broke, _ in broken:
                if broke.kind == "compile" and self._compile_off is None:
                    await self._give_up_compiled(broke)
        except Exception as failed:
            logger.exception("compilation could not be switched off on all ranks")
            if not isinstance(failed, RankError):
                failed = RankError("died", 0, f"{type(failed).__name__}: {failed}", lost=(0,))
            broken.append((failed, True))
        to_mend = [error for error, gang in broken if gang or error.needs_new_processes]
        # New processes mend everything that new communicators would.
        error: RankError | None = next(iter(sorted(to_mend, key=lambda e: not e.needs_new_processes)), None)
        while error is not None:
            if error.needs_new_processes and not self._may_rebuild():
                self._give_up(error)
                return
            how = "starting the ranks anew" if error.needs_new_processes else "joining the ranks anew"
            logger.warning("%s after: %s", how, error)
            try:
                await self._group.recover(error)
            except RankError as failed:
                # Whatever it was, processes that can't be joined are no use.
                error = RankError("died", failed.rank, failed.message, lost=(failed.rank,))
            except Exception as failed:
                logger.exception("recovery failed")
                error = RankError("died", error.rank, f"{type(failed).__name__}: {failed}", lost=(error.rank,))
            else:
                logger.info("the group is back after %.1f s", time.monotonic() - begun)
                if error.needs_new_processes:
                    self._forget_what_was_warm()
                error = None
        if self._state == "rebuilding":
            self._state = "ready"

    async def _give_up_compiled(self, broke: RankError) -> None:
        """Decode eagerly from now on, on all ranks, what was compiled when ``broke`` happened."""
        if broke.bucket:
            logger.error("a compiled decoder failed; its bucket %s is eager for good: %s", broke.bucket, broke.message)
            self._warnings.append(f"decoder calls of bucket {broke.bucket} are not compiled any more: {broke.message}")
            self._compiled.fail(broke.bucket, broke.message)
            self._in_use = self._compiled.kept()
            await self._group.use_compiled(self._in_use)
            return
        self._compile_off = broke.message
        self._in_use = frozenset()
        logger.error("torch.compile failed and is off for good, on all ranks: %s", broke.message)
        self._warnings.append(f"compilation is off: {broke.message}")
        await self._group.set_compile(False, broke.message)

    def _forget_what_was_warm(self) -> None:
        """The ranks are new processes: nothing is compiled there, and their first decodes are slow."""
        self._compiled.forget()
        self._in_use = frozenset()
        self._cold = bool(self._warm_shapes)
        if self._cold and self._state != "warming":
            self._start_warming_again()

    def _may_rebuild(self) -> bool:
        """Count a start of new processes, unless there were too many of late."""
        now = time.monotonic()
        while self._rebuilds and now - self._rebuilds[0] > REBUILD_WINDOW_S:
            self._rebuilds.popleft()
        if len(self._rebuilds) >= self._config.group.max_rebuilds:
            return False
        self._rebuilds.append(now)
        return True

    def _give_up(self, error: RankError) -> None:
        self._state = "failed"
        limit = self._config.group.max_rebuilds
        logger.error("giving the group up: more than %d rebuilds in %g s; last: %s", limit, REBUILD_WINDOW_S, error)
        self._warnings.append(f"the group was given up: {error}")

    def _refuse_unless_serving(self) -> None:
        if self._state in ("starting", "self_test", "warming"):
            raise NotReadyError(f"the model is not ready yet: {self._state}")
        if not self.healthy():
            raise NotReadyError(f"the model is not served any more: {self._state}", retry_after_s=10.0)

    def _refuse_if_given_up(self) -> None:
        if not self.healthy():
            raise GroupFailedError(f"the ranks broke too often while starting: {'; '.join(self._warnings)}")

    # ---- start-up --------------------------------------------------------------------------------------------------

    def _warn_of_untested_model(self) -> None:
        spec = self.spec
        if not spec.tested:
            warning = f"{spec.class_name} is in no family that is compared with diffusers: its own decode runs, undivided and untested"
            logger.warning("%s: %s", spec.name, warning)
            self._warnings.append(warning)

    def _warn_of_useless_warmup(self) -> None:
        """One latent frame never reaches the graph of the later ones, so it would leave most of a video's path cold."""
        spec = self.spec
        if spec.frame_rule is None or not spec.chunked or spec.accepts_images:
            return
        for shape in self._config.warmup.shapes:
            if len(shape) == 5 and shape[2] < 2:
                warning = f"warm-up of {list(shape)} leaves later frames cold: give it at least two latent frames"
                logger.warning("%s: %s", spec.name, warning)
                self._warnings.append(warning)

    async def _test_exact_axes(self) -> None:
        """Compare sharded decodes of tiny random latents with an undivided one; drop the axes that differ."""
        spec = self.spec
        if self._group.size == 1 or not spec.exact_axes:
            return
        # One or three more than a whole number of rows each, so that bands are uneven for every group of at least two.
        each = max(2, spec.min_band_cells)
        extent = spec.fixed_cells or max(each * self._group.size + 1, spec.min_cells)
        shape: tuple[int, ...] = (1, spec.latent_channels, extent, spec.fixed_cells or extent + 2)
        if spec.frame_rule is not None:
            # One frame alone would not test what passes hand on; image decoders take nothing else.
            frames = next(t for t in (*range(2, 64), 1) if spec.frame_rule.problem(t) is None)
            shape = (*shape[:2], frames, *shape[2:])
        latents = _random_latents(shape)
        try:
            reference = await self._decode_for_test(latents, "direct")
        except DecodeServiceError as error:
            self._distrust(spec.exact_axes, f"the self-test could not decode undivided: {error}")
            return
        for axis in spec.exact_axes:
            try:
                sharded = await self._decode_for_test(latents, f"spatial_shard_{axis}")
                problem = difference_between(sharded, reference, self._dtype_name())
            except DecodeServiceError as error:
                problem = str(error)
            if problem is None:
                self._self_test[axis] = "exact"
            else:
                self._distrust((axis,), problem)

    async def _calibrate(self) -> None:
        """Time a few small decodes, so that plans can predict how long theirs take."""
        settings = self._config.calibration
        if not settings.enabled:
            self._predictions.problem = "switched off (calibration.enabled)"
            return

        chunk = self._policy.chunk or 1

        async def decode(shape: tuple[int, ...], mode: str) -> Run:
            latents = _random_latents(shape)
            plan = self._plan(shape, mode=mode, strict=True, collect="shards", chunk=chunk)
            # Eagerly, as the self-test; what compiling gains is learnt from the warm-up and from requests.
            task = RankTask(plan, eager=True, request_id=f"calibration {mode}")
            return await self._run_to_the_end(task, latents, admitted=True)

        await self._predictions.calibrate(
            self.spec,
            self._group.size,
            decode,
            chunk=chunk,
            seconds=settings.seconds,
            max_pixels=self._config.limits.max_output_pixels,
        )

    async def _decode_for_test(self, latents: WireTensor, mode: str) -> np.ndarray:
        pixels = PixelFormat("float32", "model")
        # Not by the limits for requests: a tiny latent of a video model may have more pixels than the operator's stills.
        policy = dataclasses.replace(self._policy, memory_budget_bytes=None)
        plan = make_plan(
            self.spec,
            latents.shape,
            group_size=self._group.size,
            policy=policy,
            mode=mode,
            strict=True,
            collect="shards",
        )
        # Eagerly: nobody will send these shapes, so compiling for them would only delay the start.
        task = RankTask(plan, pixels=pixels, eager=True, request_id=f"self-test {mode}")
        run = await self._run_to_the_end(task, latents, admitted=True)
        return outcome_of(run, "float32", run.timings_ms).assemble()

    def _distrust(self, axes: Sequence[str], problem: str) -> None:
        spec = self.spec
        left = tuple(axis for axis in spec.exact_axes if axis not in axes)
        why = f"the start-up self-test failed along the {' and '.join(axes)}: {problem}"
        self._spec = dataclasses.replace(spec, exact_axes=left, no_exact_axes_reason=why)
        self._self_test.update(dict.fromkeys(axes, problem))
        self._warnings.append(why)
        logger.error("%s of %s; this axis will not be sharded", why, spec.name)

    async def _warm_up(self) -> None:
        """Decode every configured shape once, through the ordinary path, on all ranks that would decode it."""
        for shape in self._config.warmup.shapes:
            begun = time.monotonic()
            try:
                plan = await self._warm_up_shape(shape)
            except DecodeServiceError as error:
                logger.warning("warm-up of %s failed: %s", list(shape), error)
                self._warnings.append(f"warm-up of {list(shape)} failed: {error}")
                if not self.healthy():
                    raise
            else:
                self._warm_shapes.append(list(shape))
                logger.info("warm-up of %s in %s mode: %.1f s", list(shape), plan.mode, time.monotonic() - begun)

    async def _warm_up_shape(self, shape: Sequence[int]) -> DecodePlan:
        """Decode latents of ``shape`` until nothing about it is new, on all ranks that would; its plan on an idle group.

        Raises:
            DecodeServiceError: if it can't be decoded.
        """
        plan = self._plan(tuple(shape))
        latents = _random_latents(tuple(shape))
        replan = self._replan(plan)
        # Both ways in which requests of this shape are decoded, on an idle group and on a busy one.
        for each in [plan] if replan is None else [plan, replan(full(self._group.size))]:
            for _ in range(MEASURING_ROUNDS if self._may_compile() else 1):
                task = RankTask(each, measure=self._may_compile(), request_id="warm-up")
                # A plan for one rank runs on whichever is idle, so each rank has to be warm: as many at once as
                # there are ranks get one each.
                copies = 1 if _needs_all_ranks(each) else self._group.size
                runs = [self._run_to_the_end(task, latents, admitted=True) for _ in range(copies)]
                done = await asyncio.gather(*runs)
                if not any(part.measured for run in done for part in run.parts):
                    # As every request of this shape will be decoded.
                    self._predictions.observe(self.spec, done[0])
                    break
                await self._share_what_is_compiled()
        return plan

    async def _share_what_is_compiled(self) -> None:
        """Decide which calls of the decoder run compiled, and tell all ranks while none of them decodes."""

        async def tell() -> None:
            try:
                await self._group.use_compiled(self._compiled.kept())
                self._in_use = self._compiled.kept()
            except RankError as error:
                # Some may know and some not; new processes begin with nothing.
                self._ask_for_recovery(RankError("died", error.rank, error.message, lost=(error.rank,)), True)

        await self._scheduler.exclusive(tell)
        await self._recovered(None)

    def _start_warming_again(self) -> None:
        if self._warming_again is not None:
            self._warming_again.cancel()
        self._warming_again = asyncio.get_running_loop().create_task(self._warm_up_again())

    async def _warm_up_again(self) -> None:
        """Warm new processes up while the service decodes: eagerly at first, and shape by shape in quiet moments.

        Compiled code comes from the disk cache, so ranks are held for seconds.
        """
        begun = time.monotonic()
        try:
            for shape in self._warm_shapes:
                await self._until_idle(IDLE_PATIENCE_S)
                await self._warm_up_shape(shape)
        except DecodeServiceError as error:
            logger.warning("warm-up of new ranks failed: %s", error)
            self._warnings.append(f"warm-up of new ranks failed: {error}")
        except Exception:
            logger.exception("warm-up of new ranks failed")
        else:
            logger.info("the new ranks are warm after %.1f s", time.monotonic() - begun)
        self._cold = False

    async def _until_idle(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while self._scheduler.waiting + self._scheduler.running and time.monotonic() < deadline:
            await asyncio.sleep(0.05)


# ---- pure helpers --------------------------------------------------------------------------------------------------


def _pixel_bytes(pixels: PixelFormat) -> int:
    """Bytes of one value of the reply."""
    return np.dtype(_NUMPY_DTYPES[pixels.dtype]).itemsize


def _replanned(task: RankTask, plan: DecodePlan) -> RankTask:
    """``task`` with another plan, which says the dtype that the task is decoded in: after NaN that is not the model's."""
    if task.precision is not None:
        plan = dataclasses.replace(
            plan, dtype=task.plan.dtype, dtype_reason=task.plan.dtype_reason, predicted_ms=None, alternatives=()
        )
    return dataclasses.replace(task, plan=plan)


def _random_latents(shape: tuple[int, ...]) -> WireTensor:
    return WireTensor("float32", shape, np.random.default_rng(0).standard_normal(shape, np.float32).tobytes())


def _needs_all_ranks(plan: DecodePlan) -> bool:
    """Whether a plan uses the communicator, which joins all ranks, also those that decode nothing."""
    # Of the plans that need no communicator only direct ones run anywhere: tiles, say, are assigned to rank numbers.
    return plan.needs_group or plan.mode != "direct"
