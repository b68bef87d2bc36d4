"""Who decodes when: a bounded queue over the ranks of one group, fair to callers, from which no job is starved.

A job takes all ranks (a *gang* job, one that uses the group's communicator) or any single one. Some can do with either:
they are asked when they are about to start, because what is better depends on what else there is to do then.

Callers take turns, one job each, and jobs of one caller start in order; retries and recovery go before all turns. Whoever
is next starts next: a gang job whose turn it is waits for all ranks, and nothing overtakes it meanwhile, not even on
ranks that are idle. How long a small job takes is predicted at best, so it could not be promised that the gang job starts no
later. So a job with k others of its caller before it waits for at most k + 1 turns of each other caller.

Jobs of one rank that are alike can be carried out together, where the one whose turn it is says how (``Together``). Others
join it out of turn, which costs those who wait no more than the time by which the whole takes longer than the one. It may say
how long it waits for others although a rank is idle; everything behind it waits with it.

Where the queue is full, a caller that has much in it gives way to one that has less.

Pure asyncio: no Ray, no torch. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from decode_service.engine.fair_queue import FairQueue
from decode_service.errors import DeadlineExceededError, QueueFullError
from decode_service.planning.load import Load

logger = logging.getLogger("decode_service.engine")

T = TypeVar("T")
Work = Callable[[Sequence[int]], Awaitable[T]]
Gang = bool | Callable[[Load], bool]


@dataclass(frozen=True, eq=False)
class Together(Generic[T]):
    """How a job can be carried out with others, on one rank.

    Attributes:
        key: jobs with equal keys can be.
        most: how many at once.
        member: what ``work`` is given of this job.
        work: called with the members, in the order of their turns, and the rank; returns their results in the same order.
        window_s: how long the job waits for others although a rank is idle.
    """

    key: Hashable
    most: int
    member: Any
    work: Callable[[Sequence[Any], Sequence[int]], Awaitable[Sequence[T]]]
    window_s: float = 0.0


@dataclass(eq=False)
class _Ticket(Generic[T]):
    """One job.

    Attributes:
        work: what to do with the ranks that it is given.
        gang: whether it needs all ranks, or a function that says so for the load at its start.
        result: what the work returned or raised; cancelled if it left the queue before it started.
        caller: who takes a turn for it.
        pixels: how much work it is.
        exclusive: whether it goes before everything that waits.
        started: whether it holds ranks.
        holds_all: whether it holds all of them.
        together: how it can be carried out with others, or None.
        queued_at: on the event loop's clock.
        waited: whether one like it started while it was there: then it waits no more for others, whatever its window.
    """

    work: Work[T]
    gang: Gang
    result: asyncio.Future[T]
    caller: str = ""
    pixels: int = 1
    exclusive: bool = False
    started: bool = False
    holds_all: bool = False
    together: Together[T] | None = None
    queued_at: float = 0.0
    waited: bool = False


class Scheduler:
    """Starts jobs on idle ranks, caller by caller.

    Args:
        ranks: number of ranks.
        max_jobs: jobs that wait or run; more are refused.
    """

    def __init__(self, ranks: int, *, max_jobs: int) -> None:
        if ranks < 1 or max_jobs < 1:
            raise ValueError(f"ranks and max_jobs must be at least 1, got {ranks} and {max_jobs}")
        self._idle = list(range(ranks))
        self._size = ranks
        self._max_jobs = max_jobs
        self._queue: FairQueue[_Ticket[Any]] = FairQueue()
        self._running: dict[asyncio.Task[None], list[_Ticket[Any]]] = {}
        # When the window of the job whose turn it is ends; of others nobody has to know.
        self._window: asyncio.TimerHandle | None = None
        self._draining = False
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
        return sum(len(tickets) for tickets in self._running.values())

    @property
    def callers(self) -> int:
        """Callers that have jobs in the queue."""
        return self._queue.callers

    @property
    def idle_ranks(self) -> int:
        return len(self._idle)

    async def run(
        self,
        work: Work[T],
        *,
        gang: Gang,
        caller: str = "",
        pixels: int = 1,
        deadline: float | None = None,
        admitted: bool = False,
        together: Together[T] | None = None,
    ) -> T:
        """Queue ``work``, wait until it has run, and return its result.

        If the caller is cancelled, or its deadline passes, then a job that waits leaves the queue at once, and a job
        that runs goes on unattended: its ranks are released only when it has returned.

        Args:
            work: called with the ranks it holds.
            gang: whether it needs all ranks; otherwise it gets one. A function is asked when the job could start, each
                time, so that its last answer is the one that counts. It must not block.
            caller: who takes a turn for it.
            pixels: how much work it is, to compare it with others.
            deadline: ``time.monotonic()`` after which nobody waits for the result, or None.
            admitted: whether this continues a job that was admitted before (a retry), or is the service's own: it goes
                to the head of the queue, and the bound does not apply.
            together: how it can be carried out with others, where it gets one rank. What is ``admitted`` never is.

        Raises:
            QueueFullError: if too many jobs wait or run: at once, or later, when it gives way to another caller's.
            DeadlineExceededError: if the deadline passes.
        """
        timeout = None if deadline is None else deadline - time.monotonic()
        if timeout is not None and timeout <= 0:
            # Started first and given up after, it would hold the ranks for nobody.
            raise DeadlineExceededError("the deadline passed before the ranks were asked", param="deadline_ms")
        if not admitted:
            self._make_room(caller)
        ticket = self._submit(
            work, gang=gang, head=admitted, caller=caller, pixels=pixels, together=None if admitted else together
        )
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
        """Return when no job waits or runs. From now on none waits for others to join it."""
        self._draining = True
        self._start_what_fits()
        while self._queue or self._running:
            await asyncio.wait(list(self._running) or [ticket.result for ticket in self._queue])

    def _submit(
        self,
        work: Work[T],
        *,
        gang: Gang,
        head: bool,
        exclusive: bool = False,
        caller: str = "",
        pixels: int = 1,
        together: Together[T] | None = None,
    ) -> _Ticket[T]:
        loop = asyncio.get_running_loop()
        ticket = _Ticket(work, gang, loop.create_future(), caller, pixels, exclusive)
        ticket.together, ticket.queued_at = together, loop.time()
        # A failure of a job that nobody waits for any more is the engine's to log, not asyncio's.
        ticket.result.add_done_callback(lambda result: result.cancelled() or result.exception())
        if head:
            # Behind what is exclusive: a retry that overtook the recovery could get the rank that is to be mended.
            ahead = 0 if exclusive else sum(waiting.exclusive for waiting in self._queue)
            self._queue.add_urgent(ticket, ahead)
        else:
            self._queue.add(ticket, caller)
        self._start_what_fits()
        return ticket

    def _make_room(self, caller: str) -> None:
        """See to it that one more job of ``caller`` is within the bound.

        In a full queue the newest job of the caller with most jobs gives way, as long as it still has no fewer than
        ``caller`` afterwards: a flood displaces itself, and nobody who is alone is refused what is free.

        Raises:
            QueueFullError: if none gives way.
        """
        if self.waiting + self.running < self._max_jobs:
            return
        held = Counter(ticket.caller for ticket in (*self._queue, *itertools.chain(*self._running.values())))
        for other, jobs in held.most_common():
            newest = self._queue.newest(other)
            if jobs < held[caller] + 2:
                break
            if newest is not None:
                self._queue.remove(newest)
                newest.result.set_exception(
                    QueueFullError(
                        f"this request gave way to another caller's: the queue is full, and {jobs} of its "
                        f"{self._max_jobs} places were taken by requests of yours"
                    )
                )
                return
        raise QueueFullError(
            f"{self.waiting} requests wait and {self.running} run; the limit is {self._max_jobs} together"
        )

    def _leave(self, ticket: _Ticket[Any]) -> None:
        if ticket.started or ticket.result.done():
            return
        self._queue.remove(ticket)
        ticket.result.cancel()
        self._start_what_fits()

    def _start_what_fits(self) -> None:
        while self._idle and (ticket := self._queue.head()) is not None:
            try:
                gang = self._needs_all(ticket)
            except Exception as error:
                # Nobody else may be kept waiting by it.
                self._queue.pop()
                ticket.result.set_exception(error)
                continue
            needed = self._size if gang else 1
            if len(self._idle) < needed:
                return
            if not gang and self._waits_for_others(ticket):
                return
            self._queue.pop()
            tickets = [ticket] if gang else [ticket, *self._joining(ticket)]
            ranks, self._idle = self._idle[:needed], self._idle[needed:]
            ticket.holds_all = gang
            for each in tickets:
                each.started = True
            task = asyncio.get_running_loop().create_task(self._carry_out(tickets, ranks), context=self._context)
            self._running[task] = tickets

    def _needs_all(self, ticket: _Ticket[Any]) -> bool:
        return ticket.gang if isinstance(ticket.gang, bool) else ticket.gang(self._load_beside(ticket))

    def _alike(self, ticket: _Ticket[Any]) -> list[_Ticket[Any]]:
        """What waits and could be carried out with ``ticket``, in the order in which it would join."""
        how = ticket.together
        if how is None:
            return []

        def alike(other: _Ticket[Any]) -> bool:
            return other is ticket or (other.together is not None and other.together.key == how.key)

        return [other for other in self._queue.leading(alike) if other is not ticket]

    def _waits_for_others(self, ticket: _Ticket[Any]) -> bool:
        """Whether ``ticket``, which could start, still waits for others to join it; then it is asked again in time."""
        how = ticket.together
        if (
            how is None
            or how.window_s <= 0
            or ticket.waited
            or self._draining
            or len(self._alike(ticket)) + 1 >= how.most
        ):
            return False
        over_at = ticket.queued_at + how.window_s
        if over_at <= asyncio.get_running_loop().time():
            return False
        self._ask_again_at(over_at)
        return True

    def _ask_again_at(self, when: float) -> None:
        """Start what fits ``when``, on the event loop's clock, instead of at another time that was given before."""
        if self._window is not None:
            if self._window.when() == when:
                # Every job that comes in a window leads here.
                return
            self._window.cancel()
        self._window = asyncio.get_running_loop().call_at(when, self._window_is_over, context=self._context)

    def _window_is_over(self) -> None:
        self._window = None
        self._start_what_fits()

    def _joining(self, ticket: _Ticket[Any]) -> list[_Ticket[Any]]:
        """Take out of the queue what is carried out with ``ticket``, which was taken out before."""
        how = ticket.together
        if how is None or how.most < 2:
            return []
        alike = self._alike(ticket)
        for other in alike:
            # Those that do not join were left to other ranks, or found the pass full: a window of their own would only keep
            # these ranks idle once more.
            other.waited = True
        # What other ranks could begin at once is left to them.
        most = min(how.most, math.ceil((len(alike) + 1) / len(self._idle)))
        joining: list[_Ticket[Any]] = []
        for other in alike:
            if len(joining) + 1 >= most:
                break
            try:
                if self._needs_all(other):
                    break
            except Exception:
                # It is told so when its own turn comes.
                break
            joining.append(other)
        for other in joining:
            self._queue.remove(other)
        return joining

    def _load_beside(self, ticket: _Ticket[Any]) -> Load:
        """What there is to do besides ``ticket``."""
        return Load.beside(
            ticket.pixels,
            waiting=(other.pixels for other in self._queue if other is not ticket and other.gang is not True),
            running=(sum(other.pixels for other in held) for held in self._running.values() if not held[0].holds_all),
        )

    async def _carry_out(self, tickets: list[_Ticket[Any]], ranks: list[int]) -> None:
        first = tickets[0]
        try:
            if len(tickets) == 1:
                results = [await first.work(ranks)]
            else:
                assert first.together is not None
                members = [ticket.together.member for ticket in tickets if ticket.together is not None]
                results = list(await first.together.work(members, ranks))
                if len(results) != len(tickets):
                    raise RuntimeError(f"{len(tickets)} jobs were carried out together, with {len(results)} results")
        except asyncio.CancelledError:
            # Only the end of the event loop cancels this task.
            for ticket in tickets:
                ticket.result.cancel()
            raise
        except Exception as error:
            for ticket in tickets:
                # The traceback holds the frames of the work, and with them the latents; the future would keep it alive.
                ticket.result.set_exception(error.with_traceback(None))
        else:
            for ticket, result in zip(tickets, results, strict=True):
                ticket.result.set_result(result)
        finally:
            task = asyncio.current_task()
            assert task is not None
            del self._running[task]
            self._idle = sorted([*self._idle, *ranks])
            self._start_what_fits()
