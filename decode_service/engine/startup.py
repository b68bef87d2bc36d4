"""What a service decodes for itself before it is ready, and again after its ranks were replaced.

In this order: tiny decodes that test along which axes sharding is exact on this machine; small ones that are timed, so that
plans can predict; and the operator's warm-up shapes, in every way in which requests of these shapes are decoded. New
processes are warmed up once more in quiet moments, while the service decodes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from decode_client.wire import WireTensor

from decode_service.config import ServiceConfig
from decode_service.engine.batching import Batching
from decode_service.engine.compiled import Compiled
from decode_service.engine.plans import Plans, needs_all_ranks
from decode_service.engine.predictions import Predictions
from decode_service.engine.protocol import RankError, RankTask
from decode_service.engine.recovery import Recovery
from decode_service.engine.runs import Run, difference_between, outcome_of
from decode_service.engine.scheduler import Scheduler
from decode_service.engine.status import Status
from decode_service.errors import DecodeServiceError
from decode_service.planning.compiled_shapes import MEASURING_ROUNDS
from decode_service.planning.load import full
from decode_service.planning.plan import DecodePlan, PixelFormat

logger = logging.getLogger("decode_service.engine")

IDLE_PATIENCE_S = 30.0
"""How long new ranks wait for an idle moment before they warm up at the cost of those who wait."""

Decode = Callable[[RankTask, WireTensor], Awaitable[Run]]


class StartUp:
    """The decodes of one engine that nobody asked for.

    Args:
        config: the settings of the application.
        plans: the model, and how its requests are planned; the self-test takes axes out of it.
        predictions: are calibrated, and learn from the warm-up.
        compiled: learns what the warm-up measures.
        batching: is measured.
        scheduler: who runs on the ranks.
        recovery: mends the group.
        status: gets ``self_test``, ``warming``, and warnings.
        decode: runs a task, whatever breaks on the way, whoever waits.

    Attributes:
        self_test: for every axis that was tested ``exact``, or what was wrong with it.
        warm_shapes: those that were warmed up.
        cold: whether ranks were replaced and are not warm yet.
    """

    def __init__(
        self,
        config: ServiceConfig,
        plans: Plans,
        predictions: Predictions,
        compiled: Compiled,
        batching: Batching,
        scheduler: Scheduler,
        recovery: Recovery,
        status: Status,
        decode: Decode,
    ) -> None:
        self._config = config
        self._plans = plans
        self._predictions = predictions
        self._compiled = compiled
        self._batching = batching
        self._scheduler = scheduler
        self._recovery = recovery
        self._status = status
        self._decode = decode
        self._may_compile = False
        self._again: asyncio.Task[None] | None = None
        self.self_test: dict[str, str] = {}
        self.warm_shapes: list[list[int]] = []
        self.cold = False

    async def run(self, *, may_compile: bool, warnings: Sequence[str] = ()) -> None:
        """Test, calibrate and warm up the ranks, which are loaded.

        Args:
            may_compile: whether the ranks can compile their decoder.
            warnings: of what they found when they loaded it.

        Raises:
            GroupFailedError: if the group broke too often.
        """
        self._may_compile = may_compile
        for warning in warnings:
            self._warn(warning)
        self._warn_of_untested_model()
        self._warn_of_useless_warmup()
        self._status.state = "self_test"
        begun = time.monotonic()
        await self.test_exact_axes()
        self._status.refuse_if_given_up()
        await self._calibrate()
        self._status.refuse_if_given_up()
        await self._batching.measure(
            self._decode,
            seconds=self._config.calibration.seconds,
            max_pixels=self._config.limits.max_output_pixels,
        )
        self._status.refuse_if_given_up()
        tested = time.monotonic()
        self._status.state = "warming"
        await self._warm_up()
        self._status.refuse_if_given_up()
        self._predictions.settle()
        logger.info(
            "%s: self-test and calibration took %.1f s, warm-up %.1f s",
            self._plans.spec.name,
            tested - begun,
            time.monotonic() - tested,
        )

    def replaced(self) -> None:
        """The ranks are new processes, whose first decodes are slow: warm them up, unless that is under way anyway."""
        self.cold = bool(self.warm_shapes)
        if self._status.state != "warming":
            self.warm_again_where_cold()

    def warm_again_where_cold(self) -> None:
        """Begin to warm up ranks that were replaced, beside everything else."""
        if self.cold:
            self.stop()
            self._again = asyncio.get_running_loop().create_task(self._warm_up_again())

    def stop(self) -> None:
        """Warm up no further."""
        if self._again is not None:
            self._again.cancel()

    def _warn(self, warning: str) -> None:
        logger.warning("%s: %s", self._plans.spec.name, warning)
        self._status.warnings.append(warning)

    def _warn_of_untested_model(self) -> None:
        spec = self._plans.spec
        if not spec.tested:
            self._warn(
                f"{spec.class_name} is in no family that is compared with diffusers: its own decode runs, undivided and "
                "untested"
            )

    def _warn_of_useless_warmup(self) -> None:
        """One latent frame never reaches the graph of the later ones, so it would leave most of a video's path cold."""
        spec = self._plans.spec
        if spec.frame_rule is None or not spec.chunked or spec.accepts_images:
            return
        for shape in self._config.warmup.shapes:
            if len(shape) == 5 and shape[2] < 2:
                self._warn(f"warm-up of {list(shape)} leaves later frames cold: give it at least two latent frames")

    # ---- self-test and calibration -----------------------------------------------------------------------------------

    async def test_exact_axes(self) -> None:
        """Compare sharded decodes of tiny random latents with an undivided one; drop the axes that differ."""
        spec, ranks = self._plans.spec, self._plans.group_size
        if ranks == 1 or not spec.exact_axes:
            return
        # One or three more than a whole number of rows each, so that bands are uneven for every group of at least two.
        each = max(2, spec.min_band_cells)
        extent = spec.fixed_cells or max(each * ranks + 1, spec.min_cells)
        shape: tuple[int, ...] = (1, spec.latent_channels, extent, spec.fixed_cells or extent + 2)
        if spec.frame_rule is not None:
            # One frame alone would not test what passes hand on; image decoders take nothing else.
            frames = next(t for t in (*range(2, 64), 1) if spec.frame_rule.problem(t) is None)
            shape = (*shape[:2], frames, *shape[2:])
        latents = random_latents(shape)
        try:
            reference = await self._decode_for_test(latents, "direct")
        except DecodeServiceError as error:
            self._distrust(spec.exact_axes, f"the self-test could not decode undivided: {error}")
            return
        for axis in spec.exact_axes:
            try:
                sharded = await self._decode_for_test(latents, f"spatial_shard_{axis}")
                problem = difference_between(sharded, reference, self._plans.dtype)
            except DecodeServiceError as error:
                problem = str(error)
            if problem is None:
                self.self_test[axis] = "exact"
            else:
                self._distrust((axis,), problem)

    async def _decode_for_test(self, latents: WireTensor, mode: str) -> np.ndarray:
        # Eagerly: nobody will send these shapes, so compiling for them would only delay the start.
        task = RankTask(
            self._plans.for_test(latents.shape, mode),
            pixels=PixelFormat("float32", "model"),
            eager=True,
            request_id=f"self-test {mode}",
        )
        run = await self._decode(task, latents)
        return outcome_of(run, "float32", run.timings_ms).assemble()

    def _distrust(self, axes: Sequence[str], problem: str) -> None:
        why = f"the start-up self-test failed along the {' and '.join(axes)}: {problem}"
        self._plans.distrust(axes, why)
        self.self_test.update(dict.fromkeys(axes, problem))
        self._status.warnings.append(why)
        logger.error("%s of %s; this axis will not be sharded", why, self._plans.spec.name)

    async def _calibrate(self) -> None:
        """Time a few small decodes, so that plans can predict how long theirs take."""
        settings = self._config.calibration
        if not settings.enabled:
            self._predictions.problem = "switched off (calibration.enabled)"
            return

        chunk = self._plans.policy.chunk or 1

        async def decode(shape: tuple[int, ...], mode: str) -> Run:
            plan = self._plans.make(shape, mode=mode, strict=True, collect="shards", chunk=chunk)
            # Eagerly, as the self-test; what compiling gains is learnt from the warm-up and from requests.
            return await self._decode(
                RankTask(plan, eager=True, request_id=f"calibration {mode}"), random_latents(shape)
            )

        await self._predictions.calibrate(
            self._plans.spec,
            self._plans.group_size,
            decode,
            chunk=chunk,
            seconds=settings.seconds,
            max_pixels=self._config.limits.max_output_pixels,
        )

    # ---- warm-up ---------------------------------------------------------------------------------------------------

    async def _warm_up(self) -> None:
        """Decode every configured shape once, through the ordinary path, on all ranks that would decode it."""
        for shape in self._config.warmup.shapes:
            begun = time.monotonic()
            try:
                plan = await self._warm_up_shape(shape)
            except DecodeServiceError as error:
                logger.warning("warm-up of %s failed: %s", list(shape), error)
                self._status.warnings.append(f"warm-up of {list(shape)} failed: {error}")
                if not self._status.healthy:
                    raise
            else:
                self.warm_shapes.append(list(shape))
                logger.info("warm-up of %s in %s mode: %.1f s", list(shape), plan.mode, time.monotonic() - begun)

    async def _warm_up_shape(self, shape: Sequence[int]) -> DecodePlan:
        """Decode latents of ``shape`` until nothing about it is new, on all ranks that would; its plan on an idle group.

        Raises:
            DecodeServiceError: if it can't be decoded.
        """
        ranks = self._plans.group_size
        plan = self._plans.make(tuple(shape))
        latents = random_latents(tuple(shape))
        replan = self._plans.replan(plan)
        # Both ways in which requests of this shape are decoded, on an idle group and on a busy one.
        for each in [plan] if replan is None else [plan, replan(full(ranks))]:
            for _ in range(MEASURING_ROUNDS if self._compiles() else 1):
                task = RankTask(each, measure=self._compiles(), request_id="warm-up")
                # A plan for one rank runs on whichever is idle, so each rank has to be warm: as many at once as
                # there are ranks get one each.
                copies = 1 if needs_all_ranks(each) else ranks
                done = await asyncio.gather(*(self._decode(task, latents) for _ in range(copies)))
                if not any(part.measured for run in done for part in run.parts):
                    # As every request of this shape will be decoded.
                    self._predictions.observe(self._plans.spec, done[0])
                    break
                await self._share_what_is_compiled()
        return plan

    def _compiles(self) -> bool:
        return self._may_compile and not self._compiled.off

    async def _share_what_is_compiled(self) -> None:
        """Decide which calls of the decoder run compiled, and tell all ranks while none of them decodes."""

        async def tell() -> None:
            try:
                await self._compiled.tell()
            except RankError as error:
                # Some may know and some not; new processes begin with nothing.
                self._recovery.ask(RankError("died", error.rank, error.message, lost=(error.rank,)), True)

        await self._scheduler.exclusive(tell)
        await self._recovery.done(None)

    async def _warm_up_again(self) -> None:
        """Warm new processes up while the service decodes: eagerly at first, and shape by shape in quiet moments.

        Compiled code comes from the disk cache, so ranks are held for seconds.
        """
        begun = time.monotonic()
        try:
            for shape in self.warm_shapes:
                await self._until_idle(IDLE_PATIENCE_S)
                await self._warm_up_shape(shape)
        except DecodeServiceError as error:
            logger.warning("warm-up of new ranks failed: %s", error)
            self._status.warnings.append(f"warm-up of new ranks failed: {error}")
        except Exception:
            logger.exception("warm-up of new ranks failed")
        else:
            logger.info("the new ranks are warm after %.1f s", time.monotonic() - begun)
        self.cold = False

    async def _until_idle(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while self._scheduler.waiting + self._scheduler.running and time.monotonic() < deadline:
            await asyncio.sleep(0.05)


def random_latents(shape: tuple[int, ...]) -> WireTensor:
    """Normal float32 latents, the same for every call."""
    return WireTensor("float32", shape, np.random.default_rng(0).standard_normal(shape, np.float32).tobytes())
