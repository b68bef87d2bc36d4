"""What a failure means for the group: whether it has to be mended, how, and when it is given up.

A rank that raises while others wait for it costs new communicators, one that dies or stalls new processes for all, and a
compiled call that fails is switched off everywhere. Recovery takes the next turn on all ranks, before every request that
waits. A group that needs new processes too often is given up, so that something above (Ray Serve) replaces the replica.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from decode_service.engine.compiled import Compiled
from decode_service.engine.protocol import RankError, RankGroup
from decode_service.engine.scheduler import Scheduler
from decode_service.engine.status import Status
from decode_service.errors import DeadlineExceededError, GroupFailedError

logger = logging.getLogger("decode_service.engine")

REBUILD_WINDOW_S = 600.0


class Recovery:
    """Mends one group.

    Args:
        group: the ranks.
        scheduler: who runs on them.
        compiled: what runs compiled on them.
        status: ``rebuilding`` while the group is mended, ``failed`` once it is given up.
        max_rebuilds: starts of new processes within ``REBUILD_WINDOW_S`` seconds; one more and the group is given up.
        on_new_processes: called after new processes have replaced the ranks, while nothing else runs on them.
    """

    def __init__(
        self,
        group: RankGroup,
        scheduler: Scheduler,
        compiled: Compiled,
        status: Status,
        *,
        max_rebuilds: int,
        on_new_processes: Callable[[], None],
    ) -> None:
        self._group = group
        self._scheduler = scheduler
        self._compiled = compiled
        self._status = status
        self._max_rebuilds = max_rebuilds
        self._on_new_processes = on_new_processes
        self._broken: list[tuple[RankError, bool]] = []
        self._under_way: asyncio.Future[None] | None = None
        self._rebuilds: deque[float] = deque()

    def ask(self, error: RankError, gang: bool) -> None:
        """Note what broke and take the next turn on all ranks to mend it, unless nothing has to be mended.

        Args:
            gang: whether the communicator was in use.
        """
        if not (gang or error.needs_new_processes or error.kind == "compile"):
            return
        self._broken.append((error, gang))
        if self._under_way is None or self._under_way.done():
            if self._status.state == "ready":
                self._status.state = "rebuilding"
            self._under_way = self._scheduler.exclusive(self._mend)

    async def done(self, deadline: float | None) -> None:
        """Wait for a recovery that is under way.

        Raises:
            DeadlineExceededError: if the deadline passes first.
            GroupFailedError: if the group was given up.
        """
        if self._under_way is not None and not self._under_way.done():
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            await asyncio.wait([self._under_way], timeout=timeout)
            if not self._under_way.done():
                raise DeadlineExceededError("the deadline passed while the group recovered", param="deadline_ms")
        if not self._status.healthy:
            raise GroupFailedError("the ranks could not be brought back; the replica is being replaced")

    async def _mend(self) -> None:
        """Mend everything that broke since the last time; runs alone on the group."""
        broken, self._broken = self._broken, []
        begun = time.monotonic()
        try:
            for broke, _ in broken:
                if broke.kind == "compile":
                    await self._compiled.give_up(broke)
        except Exception as failed:
            logger.exception("compilation could not be switched off on all ranks")
            if not isinstance(failed, RankError):
                failed = RankError("died", 0, f"{type(failed).__name__}: {failed}", lost=(0,))
            broken.append((failed, True))
        to_mend = [error for error, gang in broken if gang or error.needs_new_processes]
        # New processes mend everything that new communicators would.
        error: RankError | None = next(iter(sorted(to_mend, key=lambda e: not e.needs_new_processes)), None)
        while error is not None:
            if self._status.state == "closed":
                # Nothing will be decoded any more, and new ranks would only keep the end waiting.
                return
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
                    self._compiled.forget()
                    self._on_new_processes()
                error = None
        if self._status.state == "rebuilding":
            self._status.state = "ready"

    def _may_rebuild(self) -> bool:
        """Count a start of new processes, unless there were too many of late."""
        now = time.monotonic()
        while self._rebuilds and now - self._rebuilds[0] > REBUILD_WINDOW_S:
            self._rebuilds.popleft()
        if len(self._rebuilds) >= self._max_rebuilds:
            return False
        self._rebuilds.append(now)
        return True

    def _give_up(self, error: RankError) -> None:
        self._status.state = "failed"
        logger.error(
            "giving the group up: more than %d rebuilds in %g s; last: %s", self._max_rebuilds, REBUILD_WINDOW_S, error
        )
        self._status.warnings.append(f"the group was given up: {error}")
