"""``DecodeEngine``: one model on one group of ranks, from a validated job to its pixels, whatever breaks on the way.

A request is validated, planned (``plans``), queued (``scheduler``) and run. What else an engine does is elsewhere: what it
decodes for itself before it is ready (``startup``), what a failure means for the request that met it (``retries``) and for
the group (``recovery``), which calls of the decoder run compiled (``compiled``), and how long decodes take
(``predictions``).

No Ray and no torch here: the group does the work, behind ``RankGroup``. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decode_client.wire import WireTensor

from decode_service.config import ServiceConfig
from decode_service.engine.batching import Batching, key_of
from decode_service.engine.compiled import Compiled
from decode_service.engine.off_loop import over_bytes
from decode_service.engine.plans import Plans, Replan, needs_all_ranks, pixel_bytes
from decode_service.engine.predictions import Predictions
from decode_service.engine.protocol import (
    DecodeJob,
    DecodeObserver,
    DecodeOutcome,
    RankError,
    RankGroup,
    RankPixels,
    RankTask,
    Readiness,
)
from decode_service.engine.recovery import Recovery
from decode_service.engine.retries import Retries
from decode_service.engine.runs import Run, outcome_of
from decode_service.engine.scheduler import Gang, Scheduler, Together
from decode_service.engine.startup import StartUp
from decode_service.engine.status import Status
from decode_service.errors import (
    DecodeServiceError,
    GroupFailedError,
    NonFiniteLatentsError,
    NotReadyError,
)
from decode_service.planning.conditioning import conditioning_of
from decode_service.planning.geometry import describe_geometry
from decode_service.planning.layouts import Layout, arrange, layouts
from decode_service.planning.load import Load, full
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.planner import validate_denormalize
from decode_service.planning.spec import ModelSpec

logger = logging.getLogger("decode_service.engine")


class _TogetherFailedError(Exception):
    """A pass of several requests failed. Whose fault it was is not known, so each is decoded alone."""


class DecodeEngine:
    """A ``DecodeService`` over a ``RankGroup``.

    Args:
        group: the ranks; the engine starts and closes them.
        config: the settings of the application.
        observer: is told of what is decoded for callers, or None.
    """

    def __init__(self, group: RankGroup, config: ServiceConfig, observer: DecodeObserver | None = None) -> None:
        self._group = group
        self._observer = observer
        self._config = config
        self._description: dict[str, Any] = {}
        self._status = Status()
        self._scheduler = Scheduler(group.size, max_jobs=config.limits.max_queued)
        self._predictions = Predictions()
        self._plans = Plans(config, group.size, self._predictions)
        self._compiled = Compiled(group, self._status)
        self._batching = Batching(config.policy.batch, self._plans)
        self._recovery = Recovery(
            group,
            self._scheduler,
            self._compiled,
            self._status,
            max_rebuilds=config.group.max_rebuilds,
            on_new_processes=lambda: self._startup.replaced(),
        )
        self._startup = StartUp(
            config,
            self._plans,
            self._predictions,
            self._compiled,
            self._batching,
            self._scheduler,
            self._recovery,
            self._status,
            # No bound on requests may stop it.
            lambda task, latents: self._run_to_the_end(task, latents, admitted=True),
        )

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the group, test that sharding is exact on this machine, and warm up. Ready when it returns.

        Raises:
            ConfigError: if the configuration cannot work.
            RankError, GroupFailedError: if the ranks cannot be started.
        """
        begun = time.monotonic()
        info = await self._group.start()
        self._description = dict(info.description)
        self._plans.loaded(info.spec, self._description.get("device_memory_bytes"))
        await self._startup.run(may_compile=bool(self._description["compile"]["active"]), warnings=info.warnings)
        self._status.state = "ready"
        self._startup.warm_again_where_cold()
        logger.info(
            "%s is ready on %d rank(s) after %.1f s", self.spec.name, self._group.size, time.monotonic() - begun
        )

    async def close(self) -> None:
        """End the ranks, once what runs on them has returned. Jobs that still wait get ``NotReadyError``. Callable twice."""
        self._startup.stop()
        self._status.state = "closed"
        # By every caller: a second one must not end ranks for which the first still waits.
        await self._scheduler.drain()
        await self._group.close()

    def healthy(self) -> bool:
        """False once the group is given up: only a new replica can help then."""
        return self._status.healthy

    # ---- DecodeService ---------------------------------------------------------------------------------------------

    @property
    def spec(self) -> ModelSpec:
        return self._plans.spec

    @property
    def max_body_bytes(self) -> int:
        return self._config.limits.max_body_bytes

    @property
    def max_total_body_bytes(self) -> int:
        return self._config.limits.total_body_bytes()

    def readiness(self) -> Readiness:
        return Readiness(self._status.state == "ready", self._status.state, tuple(self._status.warnings))

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
            "memory_budget_bytes": self._plans.policy.memory_budget_bytes,
            "group": {"ranks": self._group.size, "device": config.group.device},
            "policy": config.policy.model_dump(mode="json"),
            "limits": {
                **config.limits.model_dump(mode="json"),
                "max_total_body_bytes": config.limits.total_body_bytes(),
            },
            # The ranks know whether their decoder can be compiled at all.
            "compile": self._compiled.describe(self._description["compile"]["reason"], cold=self._startup.cold),
            "self_test": dict(self._startup.self_test),
            **self._predictions.describe(),
            "batching": self._batching.describe(compiled=self._compiled.any),
            "warm_shapes": [list(shape) for shape in self._startup.warm_shapes],
            "state": self._status.state,
            "warnings": list(self._status.warnings),
            "queue": {
                "waiting": self._scheduler.waiting,
                "running": self._scheduler.running,
                "callers": self._scheduler.callers,
            },
        }

    def plan(
        self,
        latent_shape: tuple[int, ...],
        *,
        layout: Layout | None = None,
        mode: str = "auto",
        strict: bool | None = None,
        collect: str | None = None,
        chunk: int | None = None,
        denormalize: bool = False,
        pixels: PixelFormat | None = None,
    ) -> DecodePlan:
        """Validate the shape against the model and the limits, and plan it for an idle group; see ``DecodeService``."""
        nbytes = pixel_bytes(pixels or PixelFormat())
        arranged = arrange(self.spec, latent_shape, layout or Layout()).latent_shape
        plan = self._plans.make(arranged, mode=mode, strict=strict, collect=collect, chunk=chunk, pixel_bytes=nbytes)
        if denormalize:
            validate_denormalize(self.spec, arranged)
        return plan

    async def decode(self, job: DecodeJob) -> DecodeOutcome:
        """Validate, plan, queue and decode; see ``DecodeService``."""
        begun = time.monotonic()
        self._status.refuse_unless_serving()
        wishes: dict[str, Any] = {
            "mode": job.mode,
            "strict": job.strict,
            "collect": job.collect,
            "chunk": job.chunk,
            "pixel_bytes": pixel_bytes(job.pixels),
        }
        arrangement = arrange(self.spec, job.latents.shape, job.layout)
        plan = self._plans.make(arrangement.latent_shape, **wishes)
        conditioning = conditioning_of(self.spec, job.timestep, job.noise_scale, job.seed)
        if job.denormalize:
            validate_denormalize(self.spec, arrangement.latent_shape)
        if not await over_bytes(job.latents.nbytes, job.latents.is_finite):
            raise NonFiniteLatentsError("the latents hold NaN or Inf", param="latents.data")
        wished_s = self._config.limits.default_deadline_s if job.deadline_s is None else job.deadline_s
        policy = self._plans.policy
        strict = policy.strict if job.strict is None else job.strict
        forced = (policy.mode if job.mode == "auto" else job.mode) != "auto"
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
        try:
            run = await self._run_to_the_end(
                task,
                job.latents,
                deadline=begun + wished_s,
                may_change_plan=not (strict and forced),
                caller=job.caller,
                replan=self._plans.replan(plan, **wishes),
                # A caller that forces a mode wants the same bytes every time. An operator that forces direct and allows passes
                # of several (which are off by default) wants both.
                joins=job.mode == "auto",
            )
        except DecodeServiceError as error:
            # Its traceback leads to the latents, by way of frames that know the error: a cycle, which keeps their memory until
            # somebody looks for cycles.
            raise error.with_traceback(None) from None
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

    def _tell_observer(self, run: Run) -> None:
        """Tell of ``run``, which may be any of those that shared a pass."""
        if self._observer is None:
            return
        plan = run.plan
        predicted_s = None if plan.predicted_ms is None else plan.predicted_ms / 1e3
        try:
            self._observer.decoded(plan.mode, run.timings_ms["decode"] / 1e3, predicted_s, plan.together)
        except Exception:
            logger.exception("metrics of a decode could not be noted")

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
        joins: bool = False,
    ) -> Run:
        """Run ``task``, with one retry for each kind of failure that a retry can help.

        ``admitted`` is for the engine's own decodes, which no bound on requests may stop. ``replan`` makes the plan anew
        when the ranks are there. ``joins`` is whether its first attempt may be one pass with other requests.

        Raises:
            DecodeServiceError: if it can't be decoded.
        """
        retries = Retries(self._plans, may_change_plan=may_change_plan)
        # What runs compiled was compiled for one item.
        joins = joins and self._batching.active and not self._compiled.any

        def asks_for_all_ranks(load: Load) -> bool:
            nonlocal task
            if replan is not None:
                task = retries.replanned(task, replan(load))
            return needs_all_ranks(task.plan)

        def decided() -> RankTask:
            return task

        failed_together = False
        while True:
            error: RankError | None = None
            try:
                run = await self._run_once(
                    decided,
                    latents,
                    gang=needs_all_ranks(task.plan) if replan is None else asks_for_all_ranks,
                    caller=caller,
                    deadline=deadline,
                    admitted=admitted or retries.any or failed_together,
                    # The engine's own decodes are no requests.
                    observed=not admitted,
                    alone=None if not joins else task.plan if replan is None else replan(full(self._group.size)),
                )
            except RankError as raised:
                # Without the frames that hold the failed attempt, which know the error by themselves: a cycle.
                error = raised.with_traceback(None)
            except _TogetherFailedError as raised:
                raised.with_traceback(None)
                failed_together = True
                await self._recovery.done(deadline)
                continue
            # Outside the except block, so that nothing of the failed attempt is held while the next one runs.
            if error is None:
                if run.finite:
                    return run
                task = retries.in_float32(task)
                del run
                continue
            await self._recovery.done(deadline)
            task = retries.after(error, task)
            if error.kind == "out_of_memory":
                replan = None

    async def _run_once(
        self,
        decided: Callable[[], RankTask],
        latents: WireTensor,
        *,
        gang: Gang,
        caller: str,
        deadline: float | None,
        admitted: bool,
        observed: bool,
        alone: DecodePlan | None,
    ) -> Run:
        """Queue a run. ``decided`` is asked for the task once ``gang`` has been; ``observed`` is whether the observer is told.

        ``alone`` is how one rank decodes it; it may be decoded together with others so. None: it may not.
        """
        submitted = time.monotonic()

        async def work(ranks: Sequence[int]) -> Run:
            task = decided()
            self._refuse_if_over()
            begun = time.monotonic()
            try:
                parts = await self._group.run(task, latents, ranks)
            except RankError as error:
                # Asked for here, while this job still holds its ranks, so that no other job starts in between.
                self._recovery.ask(error, needs_all_ranks(task.plan))
                raise
            self._compiled.add(ranks, parts)
            run = Run(task.plan, parts, _timings_ms(submitted, begun, parts))
            if observed:
                self._tell_observer(run)
            return run

        return await self._scheduler.run(
            work,
            gang=gang,
            caller=caller,
            pixels=decided().plan.output_pixels,
            deadline=deadline,
            admitted=admitted,
            together=None if alone is None else self._together(_Member(decided, latents, submitted), alone, deadline),
        )

    def _together(self, member: _Member, alone: DecodePlan, deadline: float | None) -> Together[Run] | None:
        """How a request that one rank decodes as ``alone`` says can be decoded with others; None where it cannot."""
        task = replace(member.decided(), plan=alone)
        most = self._batching.most(alone, task.pixels)
        if most < 2:
            return None
        key = key_of(task, member.latents)
        window_s = self._batching.window_s
        if deadline is not None:
            # It must still be decoded in time, which a rank that was idle could have begun at once.
            window_s = min(window_s, max(0.0, deadline - member.submitted) / 2)
        return Together(key, most, member, self._work_together, window_s)

    async def _work_together(self, members: Sequence[_Member], ranks: Sequence[int]) -> list[Run]:
        """Decode the requests of ``members`` in one pass.

        Raises:
            _TogetherFailedError: nothing was decoded, or it is unknown of which request that is the fault.
        """
        self._refuse_if_over()
        begun = time.monotonic()
        tasks = [member.decided() for member in members]
        failed = None
        try:
            joined = await asyncio.to_thread(self._batching.join, tasks, [member.latents for member in members])
            if joined is not None:
                parts = await self._group.run(joined[0], joined[1], ranks)
        except RankError as error:
            self._recovery.ask(error, False)
            failed = error.with_traceback(None)
        except DecodeServiceError:
            raise
        except Exception as error:
            # Lack of memory for the joined latents, say: each request alone may do, or tells its own failure.
            logger.exception("requests could not be decoded together")
            raise _TogetherFailedError from error
        if joined is None:
            raise _TogetherFailedError
        task, _ = joined
        # Outside the except block, so that nothing of the failed attempt is held.
        if failed is not None:
            logger.warning("decoding requests %s one by one after: %s", task.request_id, failed)
            self._batching.failed(task.plan, failed)
            raise _TogetherFailedError
        times = [_timings_ms(member.submitted, begun, parts) for member in members]
        runs = self._batching.share(tasks[0], task, parts[0], times)
        # Once: it took the rank no more time for being shared.
        self._tell_observer(runs[0])
        return runs

    def _refuse_if_over(self) -> None:
        """
        Raises:
            NotReadyError, GroupFailedError: if nothing may run any more.
        """
        if self._status.state == "closed":
            raise NotReadyError("the service is shutting down")
        if not self.healthy():
            raise GroupFailedError("the group was given up; the replica is being replaced")


@dataclass(frozen=True, eq=False)
class _Member:
    """What decoding a request together with others needs of it.

    Attributes:
        decided: its task, for the load at its start.
        latents: as they were sent.
        submitted: when it was queued, by ``time.monotonic()``.
    """

    decided: Callable[[], RankTask]
    latents: WireTensor
    submitted: float


def _timings_ms(submitted: float, begun: float, parts: Sequence[RankPixels]) -> dict[str, float]:
    """Where the time of a run went that was ``submitted`` and ``begun`` then, by ``time.monotonic()``, and ends now."""
    put = max(part.timings_ms.get("put", 0.0) for part in parts)
    decode = max(part.timings_ms.get("decode", 0.0) for part in parts)
    wall = (time.monotonic() - begun) * 1e3
    return {
        "queue": (begun - submitted) * 1e3,
        "put": put,
        "decode": decode,
        "collect": max(0.0, wall - put - decode),
    }
