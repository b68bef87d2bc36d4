"""Who decodes when: a bounded first-in-first-out queue over the ranks of one group.

A job takes all ranks (a *gang* job, one that uses the group's communicator) or any single one, so that a queue of small
requests runs one per rank at the same time. Jobs start strictly in order: a gang job at the head waits for ranks to
become idle and nothing overtakes it, hence a stream of small jobs cannot starve it.

Pure asyncio: no Ray, no torch. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from decode_service.errors import DeadlineExceededError, QueueFullError

logger = logging.getLogger("decode_service.engine")

T = TypeVar("T")
Work = Callable[[Sequence[int]], Awaitable[T]]


@dataclass(eq=False)
class _Ticket(Generic[T]):
    """One job.

    Attributes:
        work: what to do with the ranks that it is given.
        gang: whether it needs all ranks.
        result: what the work returned or raised; cancelled if it left the queue before it started.
        exclusive: whether it goes before everything that waits.
        started: whether it holds ranks.
    """

    work: Work[T]
    gang: bool
    result: asyncio.Future[T]
    exclusive: bool = False
    started: bool = False


class Scheduler:
    """Starts jobs on idle ranks, in order.

    Args:
        ranks: number of ranks.
        max_jobs: jobs that wait or run; ``run`` refuses more.
    """

    def __init__(self, ranks: int, *, max_jobs: int) -> None:
        if ranks < 1 or max_jobs < 1:
            raise ValueError(f"ranks and max_jobs must be at least 1, got {ranks} and {max_jobs}")
        self._idle = list(range(ranks))
        self._size = ranks
        self._max_jobs = max_jobs
        self._queue: deque[_Ticket[Any]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        # Work runs in the context of the scheduler, not in that of the request that submitted it. Ray keeps the current
        # task in a context variable and cancels the children of a cancelled request: actor calls made in the request's
        # own context could be withdrawn from one rank and not from another, in the middle of a collective.
        self._context = contextvars.copy_context()

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Jobs that hold ranks."""
        return len(self._running)

    @property
    def idle_ranks(self) -> int:
        return len(self._idle)

    async def run(self, work: Work[T], *, gang: bool, deadline: float | None = None, admitted: bool = False) -> T:
        """Queue ``work``, wait until it has run, and return its result.

        If the caller is cancelled, or its deadline passes, then a job that waits leaves the queue at once, and a job
        that runs goes on unattended: its ranks are released only when it has returned.

        Args:
            work: called with the ranks it holds.
            gang: whether it needs all ranks; otherwise it gets one.
            deadline: ``time.monotonic()`` after which nobody waits for the result, or None.
            admitted: whether this continues a job that was admitted before (a retry), or is the service's own: it goes
                to the head of the queue, and the bound does not apply.

        Raises:
            QueueFullError: if too many jobs wait or run.
            DeadlineExceededError: if the deadline passes.
        """
        if not admitted and self.waiting + self.running >= self._max_jobs:
            raise QueueFullError(
                f"{self.waiting} requests wait and {self.running} run; the limit is {self._max_jobs} together"
            )
        timeout = None if deadline is None else deadline - time.monotonic()
        if timeout is not None and timeout <= 0:
            # Started first and given up after, it would hold the ranks for nobody.
            raise DeadlineExceededError("the deadline passed before the ranks were asked", param="deadline_ms")
        ticket = self._submit(work, gang=gang, head=admitted)
        try:
            # wait() neither cancels nor unwraps what it waits for, so the job is shielded from both ways out.
            await asyncio.wait([ticket.result], timeout=timeout)
        except asyncio.CancelledError:
            self._leave(ticket)
            raise
        if not ticket.result.done():
            where = "while decoding" if ticket.started else "while waiting for the ranks"
            self._leave(ticket)
            raise DeadlineExceededError(f"the deadline passed {where}", param="deadline_ms")
        return ticket.result.result()

    def exclusive(self, work: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        """Run ``work`` before every job that waits, once all that run have returned; nothing else runs meanwhile.

        The place at the head is taken by the call itself, so a job that calls it is followed by nothing else.
        """

        async def alone(_: Sequence[int]) -> T:
            return await work()

        return self._submit(alone, gang=True, head=True, exclusive=True).result

    async def drain(self) -> None:
        """Return when no job waits or runs."""
        while self._queue or self._running:
            await asyncio.wait(self._running or [ticket.result for ticket in self._queue])

    def _submit(self, work: Work[T], *, gang: bool, head: bool, exclusive: bool = False) -> _Ticket[T]:
        ticket = _Ticket(work, gang, asyncio.get_running_loop().create_future(), exclusive)
        # A failure of a job that nobody waits for any more is the engine's to log, not asyncio's.
        ticket.result.add_done_callback(lambda result: result.cancelled() or result.exception())
        if head:
            # Behind what is exclusive: a retry that overtook the recovery could get the rank that is to be mended.
            ahead = 0 if exclusive else sum(waiting.exclusive for waiting in self._queue)
            self._queue.insert(ahead, ticket)
        else:
            self._queue.append(ticket)
        self._start_what_fits()
        return ticket

    def _leave(self, ticket: _Ticket[Any]) -> None:
        if ticket.started:
            return
        self._queue.remove(ticket)
        ticket.result.cancel()
        self._start_what_fits()

    def _start_what_fits(self) -> None:
        while self._queue:
            ticket = self._queue[0]
            needed = self._size if ticket.gang else 1
            if len(self._idle) < needed:
                return
            self._queue.popleft()
            ranks, self._idle = self._idle[:needed], self._idle[needed:]
            ticket.started = True
            task = asyncio.get_running_loop().create_task(self._carry_out(ticket, ranks), context=self._context)
            self._running.add(task)

    async def _carry_out(self, ticket: _Ticket[Any], ranks: list[int]) -> None:
        try:
            result = await ticket.work(ranks)
        except asyncio.CancelledError:
            # Only the end of the event loop cancels this task.
            ticket.result.cancel()
            raise
        except Exception as error:
            # The traceback holds the frames of the work, and with them the latents; the future would keep it alive.
            ticket.result.set_exception(error.with_traceback(None))
        else:
            ticket.result.set_result(result)
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._running.discard(task)
            self._idle = sorted([*self._idle, *ranks])
            self._start_what_fits()
